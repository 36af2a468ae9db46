"""A killed and resumed run equals the undisturbed one, bit for bit; a run that cannot be continued says why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrl.config import load_config
from mmrl.errors import ConfigError, DataError, RolloutError
from mmrl.rollout.prompt_rollouter import PromptRollouter
from mmrl.training.trainer import Trainer
from scripts import torture_resume
from scripts.torture_resume import differences, torture
from tests.kits.engine_kit import ALBUM, album_data, config_file, picture, read_jsonl, small_run
from tests.kits.prepared_kit import Prepared

pytestmark = pytest.mark.slow  # kept out of `make check`, part of `make test`


def test_torture_with_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed's moment is in the middle of the run."""
    monkeypatch.setattr(torture_resume, "popen", Prepared)
    record = torture(tmp_path, kills=1, seed=3, steps=8)
    (kill,) = record["kills"]
    assert (
        record["passed"]
        and 3 <= kill["checkpoint"] < 8
        and not kill["phase"].startswith("starting")
    ), record
    assert set(record["identical"]) >= {
        "metrics.jsonl",
        "weights and optimizer",
        "eval/*/predictions.jsonl",
        "run state",
    }


def make(tmp_path: Path, name: str, **sections: Any) -> Any:
    """A run of five steps with pictures, a flat source (carry-over), a broken picture, evaluations and two epochs."""
    rows = [[picture((112, 84), i)] * (i % 3) for i in range(7)] + [[str(tmp_path / "missing.png")]]
    flat = album_data(tmp_path / "data", [[picture((56, 56), i)] for i in range(3)], "flat")
    held = album_data(tmp_path / "data", rows[:3], "held")
    train = [
        {"task": ALBUM, "path": album_data(tmp_path / "data", rows)},
        {"task": ALBUM, "path": flat, "params": {"value": 0.0}, "weight": 0.6},
    ]
    sections = {
        "algorithm": {"epochs": 2},
        "optim": {"lr": 0.005, "schedule": "cosine", "warmup_steps": 2},
        **sections,
    }
    tree = small_run(
        tmp_path / "runs",
        train[0]["path"],
        held,
        name=name,
        data={"train": train, "on_error": "record"},
        **{
            "train": {"steps": 5, "prompts_per_step": 4, "keep_last": 9},
            "eval": {"every": 2},
            **sections,
        },
    )
    return load_config(config_file(tmp_path / f"{name}.yaml", tree))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed; others are made beside it."""
    trainer = Trainer(make(tmp_path_factory.mktemp("calm"), "calm"))
    trainer.fit()
    return trainer.folder.path


def beside(calm: Path, name: str, **sections: Any) -> Any:
    """The configuration of a run in the folder of `calm`, of the same data."""
    return make(calm.parents[1], name, **sections)


def cut(calm: Path, name: str, step: int) -> Path:
    """A copy of the run as a kill after the checkpoint of `step` would leave it, later traces included."""
    run = calm.with_name(name)
    shutil.copytree(calm, run, symlinks=True)
    for later in range(step + 1, 6):
        shutil.rmtree(run / "checkpoints" / f"step_{later:06d}")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train/rew')  # a line cut by the kill
    half = run / "checkpoints" / f".partial-step_{step + 1:06d}"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    return run


@pytest.mark.parametrize("step", [0, 1, 3, 4, 5])
def test_resume_from_every_checkpoint(step: int, calm: Path) -> None:
    run = cut(calm, f"cut{step}", step)
    trainer = Trainer(beside(calm, run.name), resume=True)
    assert trainer.start_step == step
    trainer.fit()
    verdicts = differences(calm, run)
    assert all(verdicts.values()), verdicts
    assert not list((run / "checkpoints").glob(".*"))
    assert json.loads((run / "run.json").read_text())["resumed_at"] == (step or None)


def failing(monkeypatch: pytest.MonkeyPatch, step: int, error: Exception) -> None:
    """The rollout of `step` ends with `error` after its first group."""
    groups = PromptRollouter.groups

    def cut_short(rollouter: PromptRollouter, number: int) -> Iterator[Any]:
        for group in groups(rollouter, number):
            yield group
            if number == step:
                raise error

    monkeypatch.setattr(PromptRollouter, "groups", cut_short)


@pytest.mark.parametrize("error", [RolloutError("the server is gone"), ValueError("a defect")])
def test_a_rollout_that_fails_costs_no_finished_step(
    error: Exception, calm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"lost-{type(error).__name__}"
    config = beside(calm, name, train={"steps": 5, "prompts_per_step": 4, "save_every": 0})
    with monkeypatch.context() as patch:
        failing(patch, 4, error)
        with pytest.raises(type(error), match=str(error)):
            Trainer(config).fit()
    run = calm.with_name(name)
    assert sorted(p.name for p in (run / "checkpoints").glob("step_*")) == ["step_000003"]
    trainer = Trainer(config, resume=True)
    trainer.fit()
    assert trainer.start_step == 3
    verdicts = differences(calm, run)
    del verdicts["best checkpoint"], verdicts["run state"]  # other steps were saved
    assert all(verdicts.values()), verdicts
    states = [
        json.loads((at / "checkpoints/step_000005/trainer/state.json").read_text())
        for at in (calm, run)
    ]
    for key in ("schedule", "credit", "entropy", "updates", "alarms", "version"):
        assert states[0][key] == states[1][key], key


def test_an_error_of_unknown_reach_in_the_update_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(make(tmp_path, "half", train={"steps": 5, "save_every": 0}))
    step = trainer.optimizer.step

    def half(*args: Any, **options: Any) -> Any:
        step(*args, **options)
        if trainer.learner.step == 3:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(trainer.optimizer, "step", half)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.fit()
    assert not list(trainer.folder.path.glob("checkpoints/step_*"))


@pytest.mark.parametrize("kind", ["async", "pipelined"])
def test_a_rollout_that_fails_beside_the_training_thread_costs_no_finished_step(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(
        tmp_path,
        kind,
        train={"steps": 5, "save_every": 0},
        algorithm={"epochs": 1},
        schedule={"kind": kind},
    )
    with monkeypatch.context() as patch:
        failing(patch, 4, RolloutError("the server is gone"))
        trainer = Trainer(config)
        with pytest.raises(RolloutError, match="is gone"):
            trainer.fit()
    rows = read_jsonl(trainer.folder.path / "metrics.jsonl")
    (saved,) = trainer.folder.path.glob("checkpoints/step_*")
    assert int(saved.name[5:]) == rows[-1]["step"] >= 2
    again = Trainer(config, resume=True)
    again.fit()
    assert [r["step"] for r in read_jsonl(again.folder.path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_the_comparison_notices_differences(calm: Path) -> None:
    """Guards the others: another seed, one weight, one evaluation must show."""
    assert all(differences(calm, calm).values())
    other = Trainer(beside(calm, "other", seed=4))
    other.fit()
    verdicts = differences(calm, other.folder.path)
    assert not any(
        verdicts[n]
        for n in (
            "metrics.jsonl",
            "eval/*/predictions.jsonl",
            "rollouts/*.jsonl",
            "weights and optimizer",
        )
    )
    import torch
    from safetensors.torch import load_file, save_file

    copy = calm.with_name("copy")
    shutil.copytree(calm, copy, symlinks=True)
    file = copy / "checkpoints" / "step_000005" / "model.safetensors"
    weights = load_file(file)
    name = sorted(weights)[0]
    flat = weights[name].flatten()
    flat[0] = torch.nextafter(flat[0], torch.tensor(torch.inf))
    save_file(weights, file)
    assert [n for n, same in differences(calm, copy).items() if not same] == [
        "weights and optimizer"
    ], "one last bit"


def test_resume_refuses_another_run(calm: Path) -> None:
    cut(calm, "cut", 3)
    before = read_jsonl(calm / "metrics.jsonl")
    for sections, message in (
        ({"seed": 9}, "seed was 3, now 9"),
        ({"optim": {"lr": 0.5}}, "optim.lr was .*now 0.5"),
        ({"train": {"steps": 4, "prompts_per_step": 4}}, "train.steps was 5, now 4"),
    ):
        with pytest.raises(ConfigError, match=message):
            Trainer(beside(calm, "cut", **sections), resume=True).fit()
    settings = beside(calm, "cut")
    extra = Path(settings.data.train[0].path)
    extra.write_text(
        extra.read_text() + json.dumps({"id": "new", "images": [], "question": "?"}) + "\n"
    )
    with pytest.raises(DataError, match=r"8 samples.*now .*9 samples"):
        Trainer(settings, resume=True).fit()
    assert read_jsonl(calm / "metrics.jsonl") == before


def test_without_a_run_auto_starts_one_and_resume_says_so(tmp_path: Path) -> None:
    config = make(tmp_path, "new", train={"steps": 1, "prompts_per_step": 2})
    with pytest.raises(ConfigError, match=r"expected a run to continue in .*new, found none"):
        Trainer(config, resume=True)
    trainer = Trainer(config, resume="auto")
    trainer.fit()
    assert trainer.start_step == 0 and len(read_jsonl(trainer.folder.path / "metrics.jsonl")) == 1
