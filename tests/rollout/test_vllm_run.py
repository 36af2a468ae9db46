"""Training runs that sample with vLLM: evaluation, checkpoints, resume, overlapped schedules, wrong syncs, Ray actors."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mmrl.config import load_config
from mmrl.errors import ConfigError, WeightSyncError
from mmrl.rollout.weights import SyncPlan
from mmrl.training.trainer import Trainer
from tests.kits.engine_kit import config_file, read_jsonl
from tests.kits.pool_kit import gone
from tests.kits.prepared_kit import SERVING, launch_prepared, prepared_generators
from tests.kits.process_worker import cut
from tests.rollout.vllm_kit import VLLM, run_tree

pytestmark = pytest.mark.slow


def run(folder: Path, name: str = "run", **sections: Any) -> Path:
    """The folder of a finished run."""
    trainer = Trainer(
        load_config(config_file(folder / f"{name}.yaml", run_tree(folder, name=name, **sections)))
    )
    trainer.fit()
    return trainer.folder.path


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with vLLM in the training process."""
    return run(tmp_path_factory.mktemp("colocated"))


def like(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Two runs are the same to rounding."""
    assert [row["step"] for row in others] == [row["step"] for row in rows]
    for one, other in zip(rows, others, strict=True):
        for name in (
            "train/reward/mean",
            "train/loss",
            "train/grad_norm",
            "eval/greedy/reward",
            "eval/sampled/reward",
        ):
            assert other[name] == pytest.approx(one[name], abs=1e-5), name


def test_a_run_with_vllm_trains_evaluates_and_resumes(colocated: Path, tmp_path: Path) -> None:
    folder = colocated
    rows = read_jsonl(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert (
            row["train/logprob_gap/max"] < 1e-5
            and row["train/sync/gap_max"] < 1e-5
            and row["time/sync"] > 0
        )
        assert abs(row["train/sampler/weight"] - 1) < 1e-4 and row["train/sampler/masked"] == 0
        assert row["eval/greedy/reward"] >= 0 and row["train/grad_norm"] > 0
    own = run(tmp_path, "own", engine={"rollout": "own"})
    greedy = [
        [
            r["text"]
            for r in read_jsonl(f / "eval" / "step_000000" / "predictions.jsonl")
            if r["mode"] == "greedy"
        ]
        for f in (folder, own)
    ]
    assert greedy[0] == greedy[1], "before training both engines answer alike"

    half = cut(folder, "half", 1)
    trainer = Trainer(load_config(folder.parents[1] / "run.yaml", ["name=half"]), resume=True)
    trainer.fit()
    assert trainer.start_step == 1
    like(rows, read_jsonl(half / "metrics.jsonl"))


def faults() -> list[tuple[Any, str]]:
    """What may happen to an actor's weights, and the words that tell of it. Inner functions: actors need not import this file."""

    def lose(host: Any) -> None:  # another output layer arrives
        load = host.backend.load
        host.backend.load = lambda weights: load(
            (n, t * 1.01 if n == "lm_head.weight" else t) for n, t in weights
        )

    def use_others(host: Any) -> None:  # the right ones arrive, others are computed with
        load = host.backend.load

        def wrong(weights: Any) -> Any:
            held = load(weights)
            host.backend.llm.apply_model(
                lambda model: model.language_model.model.norm.weight.data.mul_(1.2)
            )
            return held

        host.backend.load = wrong

    return [
        (lose, r"does not hold the trainer's weights.* in \d of .*lm_head"),
        (use_others, "does not compute with the trainer's weights after a sync"),
    ]


def test_engines_on_ray_sample_as_the_one_in_the_process_also_when_one_is_killed(
    colocated: Path, tmp_path: Path
) -> None:
    engine = {
        "rollout": "vllm",
        "vllm": VLLM,
        "workers": "ray",
        "ray": {"cpus": 2, "rollout_actors": 2},
    }
    trainer = Trainer(
        load_config(
            config_file(tmp_path / "ray.yaml", run_tree(tmp_path, name="ray", engine=engine))
        )
    )
    pids: list[int] = []

    def between(kind: str, payload: Any) -> None:
        if kind != "step" or payload["step"] != 1:
            return
        ask, actors = trainer.rollouts.cluster.ray.get, trainer.rollouts.engine.backend.group.actors
        for broken, words in faults():
            ask(actors[1].__ray_call__.remote(broken))
            with pytest.raises(WeightSyncError, match=words):
                trainer.rollouts.engine.publish(trainer.training)
            ask(actors[1].__ray_call__.remote(lambda host: delattr(host.backend, "load")))
            assert trainer.rollouts.engine.publish(trainer.training)["train/sync/gap_max"] < 1e-5
        pids.extend(ask([actor.__ray_call__.remote(lambda host: os.getpid()) for actor in actors]))
        os.kill(pids[0], signal.SIGKILL)

    trainer.on_event = between
    trainer.fit()
    folder = trainer.folder.path
    rows = read_jsonl(folder / "metrics.jsonl")
    like(read_jsonl(colocated / "metrics.jsonl"), rows)
    assert all(
        row["train/sync/gap_max"] < 1e-5 and row["train/logprob_gap/max"] < 1e-5 for row in rows
    )
    assert (
        [row["train/ray/restarts/rollouts"] for row in rows] == [0, 1]
        and len(pids) == 2
        and gone(pids)
    )
    for step in (1, 2):
        texts = [
            [row["text"] for row in read_jsonl(f / "rollouts" / f"step_{step:06d}.jsonl")]
            for f in (colocated, folder)
        ]
        assert texts[0] == texts[1] and len(texts[0]) >= 3


@pytest.mark.parametrize(
    "sections",
    [
        {"schedule": {"kind": "async", "staleness": 1, "wave": 1}},
        {
            "model": {
                "lora": {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]},
                "freeze": ["vision"],
            },
            "schedule": {"kind": "pipelined", "wave": 1},
            "algorithm": {"epochs": 2},
        },
    ],
    ids=["async", "pipelined-lora-epochs"],
)
def test_overlapped_schedules_sample_with_the_weights_of_their_step(
    sections: dict[str, Any], tmp_path: Path
) -> None:
    rows = read_jsonl(run(tmp_path, **sections) / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert (
            row["train/sync/gap_max"] < 1e-5
            and row["train/logprob_gap/max"] < 1e-5
            and "train/sampler/weight" in row
        )


def test_two_processes_with_sharded_weights_sample_with_an_engine_each(tmp_path: Path) -> None:
    vllm = {**VLLM, "probe_prompts": 1}
    tree = run_tree(
        tmp_path,
        engine={"rollout": "vllm", "train": "fsdp2", "vllm": vllm},
        train={"prompts_per_step": 4},
    )
    config = config_file(tmp_path / "two.yaml", tree)
    status, said = launch_prepared("mmrl.cli.main", "train", config, "--quiet", modules=SERVING)
    assert status == 0, said
    rows = read_jsonl(tmp_path / "runs" / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert (
            row["train/sync/gap_max"] < 1e-5
            and row["train/logprob_gap/max"] < 1e-5
            and row["train/grad_norm"] > 0
        )


def test_a_generator_process_samples_as_the_engine_in_the_process_also_when_it_is_killed(
    colocated: Path, tmp_path: Path
) -> None:
    engine = {"rollout": "vllm", "vllm": VLLM, "generator": {"kind": "process"}}
    tree = run_tree(tmp_path, name="apart", engine=engine)
    trainer = Trainer(load_config(config_file(tmp_path / "apart.yaml", tree)))

    def between(kind: str, payload: Any) -> None:
        if kind == "step" and payload["step"] == 1:
            os.kill(trainer.rollouts.generator.worker.pid, signal.SIGKILL)

    trainer.on_event = between
    with prepared_generators("vllm"):
        trainer.fit()
    rows = read_jsonl(trainer.folder.path / "metrics.jsonl")
    like(read_jsonl(colocated / "metrics.jsonl"), rows)
    for row in rows:
        assert row["train/sync/gap_max"] < 1e-5 and row["train/logprob_gap/max"] < 1e-5
    assert [row["train/generator/restarts"] for row in rows] == [0, 1]


def test_a_broken_sync_stops_the_run_in_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = SyncPlan.weights

    def without_head(self: SyncPlan, source: Any, *, everything: bool) -> Any:
        return (
            (n, t)
            for n, t in honest(self, source, everything=everything)
            if everything or n != "lm_head.weight"
        )

    monkeypatch.setattr(SyncPlan, "weights", without_head)
    with pytest.raises(WeightSyncError, match="weights after a sync"):
        run(tmp_path)
    folder = tmp_path / "runs" / "run"
    alarms = read_jsonl(folder / "alarms.jsonl")
    assert [(a["step"], a["name"], a["severity"]) for a in alarms] == [(1, "weight_sync", "error")]
    assert read_jsonl(folder / "metrics.jsonl") == [], "nothing was sampled with the old head"


def test_settings_that_vllm_cannot_keep_are_refused(tmp_path: Path) -> None:
    for rollout, message in (
        ({"top_p": 0.9}, "top_p 1 and top_k 0"),
        ({"top_k": 5}, "truncated distribution"),
        ({"temperature": 2.5}, r"within \[0.01, 2\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(tmp_path, next(iter(rollout)), rollout=rollout)
