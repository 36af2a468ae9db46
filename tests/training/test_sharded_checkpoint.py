"""Checkpoints of which every process writes a share in the background: the same run under any engine, and nothing half-written."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import load_config
from mmrl.errors import ConfigError
from mmrl.policy.manifest import problems
from mmrl.training.sharded_checkpoint import ShardedSaver
from mmrl.training.trainer import Trainer
from scripts._torture_trust_state import flip_bit
from tests.distributed.engines.deepspeed_worker import KINDS
from tests.distributed.engines.mixed_kit import mixed_run
from tests.distributed.test_distributed import compare, work
from tests.kits.engine_kit import config_file, weights_of
from tests.kits.prepared_kit import run_prepared
from tests.kits.process_worker import cut

TRAIN = "tests.kits.process_worker:train"
SHARDED = "train.checkpoint=sharded"


def small(folder: Path, **sections: Any) -> str:
    tree = mixed_run(
        folder, train={"save_every": 1}, eval={"every": 0}, algorithm={"kl": {"coef": 0}}
    )
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return config_file(folder / "c.yaml", tree)


def last(run: Path, step: int = 3) -> Path:
    return run / "checkpoints" / f"step_{step:06d}"


def ppo(folder: Path) -> str:
    return small(folder, algorithm={"advantage": "gae", "kl": {"coef": 0}})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, str]:
    """A whole run of one process, and sharded ones of two beside it: fsdp2, ddp that goes on from one of one process, ZeRO-2, and
    ZeRO-3 from the start and from the shards of fsdp2 and of ZeRO-2, also offloaded."""
    folder = tmp_path_factory.mktemp("sharded")
    config = ppo(folder)
    whole = Trainer(load_config(config))
    whole.fit()
    one = Trainer(load_config(config, ["name=one", SHARDED]))
    one.fit()
    work(
        folder,
        [
            [TRAIN, config, ["name=fsdp2", "engine.train=fsdp2", SHARDED]],
            [TRAIN, config, ["name=ddp", SHARDED], "one", 1],
            # accelerate tells whoever comes later of DeepSpeed, in variables
            [TRAIN, config, ["name=zero2", *KINDS["zero2"], SHARDED]],
            [TRAIN, config, ["name=zero3", *KINDS["zero3_sharded"], SHARDED]],
            [TRAIN, config, ["name=fsdp2_zero3", *KINDS["zero3_sharded"], SHARDED], "fsdp2", 2],
            [TRAIN, config, ["name=zero2_zero3", *KINDS["zero3_offload"], SHARDED], "zero2", 1],
        ],
    )
    return whole, config


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["one", "fsdp2", "ddp", "zero2", "zero3", "fsdp2_zero3", "zero2_zero3"]
)
def test_a_sharded_run_is_the_whole_one_and_a_hugging_face_folder(name: str, runs: Any) -> None:
    from transformers import AutoModelForImageTextToText

    whole, _ = runs
    run = whole.folder.path.with_name(name)
    compare(whole, run)
    folder = last(run)
    assert problems(folder, step=3) == [] and not list(run.glob("checkpoints/.*"))
    shards = sorted(p.name for p in folder.glob("model*.safetensors"))
    assert len(shards) == (1 if name == "one" else 2)
    assert {n for n, _ in weights_of(folder)} == {n for n, _ in weights_of(last(whole.folder.path))}
    _, messages = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not messages["missing_keys"] and not messages["unexpected_keys"]
    sizes = [(folder / s).stat().st_size for s in shards]
    assert max(sizes) < 1.3 * min(sizes), "processes write shares of one size"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2", "zero2", "zero3"])
def test_shards_of_two_processes_resume_in_one_which_writes_one_file(name: str, runs: Any) -> None:
    whole, config = runs
    cut(whole.folder.path.with_name(name), f"{name}_back", 2)
    back = Trainer(load_config(config, [f"name={name}_back"]), resume=True)
    assert back.start_step == 2
    back.fit()
    compare(whole, back.folder.path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", ["model-00002-of-00002.safetensors", "trainer/optimizer-00001-of-00002.pt"]
)
def test_a_flipped_bit_or_a_missing_shard_is_noticed(file: str, runs: Any) -> None:
    copy = cut(runs[0].folder.path.with_name("fsdp2"), "damaged_" + file[-8:-3], 2)
    path = last(copy, 2) / file
    flip_bit(path, 8 * path.stat().st_size - 5)
    (fault,) = problems(last(copy, 2), step=2)
    assert fault.startswith(file) and "its bytes" in fault
    path.unlink()
    (fault,) = problems(last(copy, 2), step=2)
    assert fault.startswith(file) and "cannot be read" in fault


@pytest.mark.slow
def test_in_bf16_processes_sample_from_rounded_copies_and_the_main_one_saves_masters(
    tmp_path: Path,
) -> None:
    """Whole checkpoints, of FSDP2, which gathers all in bf16, and of ZeRO-3, whose embeddings and norms stay fp32."""
    config = small(tmp_path, model={"dtype": "bf16"}, alarms={"logprob_gap": 1.0})
    job = "tests.training.sharded_worker:saved"
    kinds = {"fsdp2": ["engine.train=fsdp2"], "zero3": KINDS["zero3_sharded"]}
    ranks, _ = work(tmp_path, [[job, config, [f"name={n}", *kind]] for n, kind in kinds.items()])
    for rank, (fsdp2, zero3) in enumerate(ranks):
        for found in (fsdp2, zero3):
            assert found["saved"] == [f"{('cpu', 'meta')[rank]} torch.float32"]
            assert found["apart"] == [] and found["equal"], found
            # the first before the first of three steps
            assert found["versions"] == [4, 4, 4]
        assert fsdp2["types"] == ["torch.bfloat16"] and fsdp2["share"] == 0.5
        assert zero3["types"] == ["torch.bfloat16", "torch.float32"] and zero3["share"] < 0.67


class Slow:
    """Holds back the files of a save until it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.plain = threading.Event(), ShardedSaver._write
        monkeypatch.setattr(ShardedSaver, "_write", lambda *a: (self.go.wait(60), self.plain(*a)))


@pytest.mark.slow
def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is of the step it is called by, whatever was trained meanwhile."""
    config = small(tmp_path, train={"save_every": 2, "steps": 4})
    whole = Trainer(load_config(config))
    whole.fit()
    slow, seen = Slow(monkeypatch), list[tuple[str, Any]]()

    def watch(kind: str, payload: Any) -> None:
        seen.append((kind, payload.get("step") if isinstance(payload, dict) else None))
        if (kind, seen[-1][1]) == ("step", 3):
            assert trainer.checkpoints.steps() == []
            slow.go.set()

    trainer = Trainer(load_config(config, ["name=sharded", SHARDED]), on_event=watch)
    trainer.fit()
    assert seen.index(("step", 3)) < seen.index(("checkpoint", 2))
    for step in (2, 4):
        mine, theirs = (dict(weights_of(last(t.folder.path, step))) for t in (trainer, whole))
        assert all(torch.equal(mine[n], theirs[n]) for n in theirs), step


@pytest.mark.slow
def test_a_process_that_cannot_write_leaves_an_alarm_and_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path)
    _fill_up(monkeypatch)
    trainer = Trainer(load_config(config, [SHARDED]))
    trainer.fit()
    assert trainer.checkpoints.steps() == [1, 3]
    alarms = (trainer.folder.path / "alarms.jsonl").read_text().splitlines()
    (alarm,) = [a for a in map(json.loads, alarms) if a["name"] == "checkpoint_failed"]
    assert "cannot write the checkpoint of step 2" in alarm["message"]
    assert not list(trainer.checkpoints.folder.glob(".partial*"))


def _fill_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of step 2 cannot be written."""
    plain = ShardedSaver._write

    def full(self: ShardedSaver, partial: Path, *rest: Any) -> None:
        if "000002" in partial.name:
            partial.joinpath("trainer").rename(partial / "gone")
        plain(self, partial, *rest)

    monkeypatch.setattr(ShardedSaver, "_write", full)


@pytest.mark.slow
def test_one_that_could_not_be_written_is_not_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill_up(monkeypatch)
    trainer = Trainer(load_config(small(tmp_path), [SHARDED]))
    with trainer.open_runtime():
        for step, metric in enumerate((0.5, 0.9, 0.7), 1):
            trainer.save_checkpoint(step, metric)
    assert trainer.checkpoints.steps() == [1, 3]
    assert (trainer.checkpoints.folder / "best").resolve().name == "step_000003"
    assert (trainer.saver.best, trainer.saver.best_step) == (0.7, 3)
    state = trainer.checkpoints.load_state(3, lambda found: None)
    assert (state["best"], state["best_step"]) == (0.7, 3)


KILLED = """
import os, signal, sys, threading
from mmrl.config import load_config
from mmrl.training.sharded_checkpoint import ShardedSaver
from mmrl.training.trainer import Trainer
plain, count = ShardedSaver._written, 0
def written(self, partial):
    global count
    count += 1
    if count == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, partial)
ShardedSaver._written = written
Trainer(load_config(sys.argv[1], ["train.checkpoint=sharded"])).fit()
"""


@pytest.mark.slow
def test_kill_9_in_the_middle_leaves_the_checkpoint_before_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    config = small(tmp_path)
    whole = Trainer(load_config(config, ["name=whole"]))
    whole.fit()
    done = run_prepared([sys.executable, "-c", KILLED, config])
    assert done.returncode == -signal.SIGKILL
    run = whole.folder.path.with_name(load_config(config).name)
    assert [p.name for p in run.glob("checkpoints/step_*")] == ["step_000001"]
    assert list(run.glob("checkpoints/.partial-step_000002/*.safetensors")), "its shard was there"
    resumed = Trainer(load_config(config, [SHARDED]), resume=True)
    assert resumed.start_step == 1
    resumed.fit()
    compare(whole, run)
    assert not list(run.glob("checkpoints/.partial*"))


def test_adapters_are_saved_whole() -> None:
    with pytest.raises(ConfigError, match=r"found model\.lora: an adapter is small"):
        load_config(None, [SHARDED, "model.lora.r=4"])
