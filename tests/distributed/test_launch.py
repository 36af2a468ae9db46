"""A run whose launcher says too little, or what cannot be, ends with a sentence: not as several runs, a traceback or a wait."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from mmrl.distributed.launch import VARIABLES, processes_launched
from mmrl.errors import ConfigError
from tests.kits.engine_kit import ENVIRONMENT, album_data, config_file, picture, small_run
from tests.kits.prepared_kit import TRAINING, run_prepared

ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", **ADDRESS}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
REFUSED = {
    "kubeflow": ({"RANK": "1", "WORLD_SIZE": "2", **ADDRESS}, "LOCAL_RANK beside WORLD_SIZE 2"),
    "minus_one": ({**LAUNCHED, "LOCAL_RANK": "-1"}, "LOCAL_RANK beside WORLD_SIZE 2"),
    "srun": ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0", **STEP}, r"found 2 tasks .*slurm_train"),
    "no_address": ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "MASTER_ADDR, MASTER_PORT"),
    "no_rank": ({"WORLD_SIZE": "2", "LOCAL_RANK": "0", **ADDRESS}, "found no RANK"),
    "size": ({"WORLD_SIZE": "abc"}, "environment variable WORLD_SIZE, found 'abc'"),
    "none": ({**LAUNCHED, "WORLD_SIZE": "0"}, "from 1 on .* WORLD_SIZE, found '0'"),
    "local": ({**LAUNCHED, "LOCAL_RANK": "x"}, "environment variable LOCAL_RANK, found 'x'"),
    "port": ({**LAUNCHED, "MASTER_PORT": "http"}, "environment variable MASTER_PORT"),
    "rank": ({**LAUNCHED, "RANK": "1", "WORLD_SIZE": "1"}, "RANK below WORLD_SIZE 1, found 1"),
}


def told(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> tuple[bool, int]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return processes_launched()


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_become_one_run_is_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        told(monkeypatch, variables)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (False, 1)),
        # a pod alone, a batch script without srun, one task of srun
        ({"RANK": "0", "WORLD_SIZE": "1", **ADDRESS}, (False, 1)),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, (False, 1)),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, (False, 1)),
        (LAUNCHED, (True, 2)),
        # a torchrun in each task of srun, also with its own MPI variables
        ({**LAUNCHED, **STEP, "PMI_SIZE": "4"}, (True, 2)),
        # accelerate joins these on the CPU; World finds where it does not
        ({"OMPI_COMM_WORLD_SIZE": "3"}, (False, 3)),
    ],
)
def test_launchers_are_understood(
    variables: dict[str, str], expected: tuple[bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(monkeypatch, variables) == expected


@pytest.mark.slow
@pytest.mark.parametrize("case", ["kubeflow", "srun", "size", "local", "no_address", "rank", "mpi"])
def test_the_command_line_says_so_and_starts_no_run(case: str, tmp_path: Path) -> None:
    variables, words = REFUSED.get(
        case, ({"OMPI_COMM_WORLD_SIZE": "2"}, "a run of 2 processes, .* 1 on c")
    )
    run = small_run(tmp_path, album_data(tmp_path, [[picture((56, 56))]]), model={"device": None})
    done = run_prepared(
        [sys.executable, "-m", "mmrl.cli.main", "train", config_file(tmp_path / "c.yaml", run)],
        modules=TRAINING,
        env={**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "", **variables},
        timeout=60,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert re.search(words, done.stderr), done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_generator_process_of_a_launched_run_is_one_by_itself() -> None:
    """One torchrun per node under srun: what launched the trainer is still in its environment."""
    code = (
        "import json, os; from mmrl.config import RunConfig; from mmrl.training import generator_host as host; "
        "from mmrl.distributed.world import World; "
        "config = RunConfig.model_validate(json.loads(os.environ['RUN'])); "
        "host._settle(config, 'cpu'); print(World(None).size)"
    )
    run = small_run(Path("/nowhere"), "train.jsonl")
    variables = {**LAUNCHED, **STEP, "RUN": json.dumps(run)}
    done = run_prepared([sys.executable, "-c", code], env={**ENVIRONMENT, **variables})
    assert done.stdout.strip() == "1", done.stderr
