"""A checkpoint that is not, bit for bit, what was saved is never resumed, evaluated or served; the run goes on from
the one before."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.cli.evaluation import eval_command
from mmrl.cli.serving import ServeOptions, serve_command
from mmrl.config import ModelConfig, load_config
from mmrl.distributed.world import World
from mmrl.errors import CheckpointError, NonFiniteError
from mmrl.operations.restart import find_start
from mmrl.policy.loading import load_policy
from mmrl.policy.manifest import MANIFEST, check_loadable, problems, write_manifest
from mmrl.training.checkpoint import Checkpoints
from mmrl.training.trainer import Trainer
from scripts._torture_trust_state import flip_bit as flip
from scripts.torture_resume import differences
from tests.kits.engine_kit import (
    ALBUM,
    album_data,
    config_file,
    fresh_policy,
    picture,
    read_jsonl,
    small_run,
    tiny_folder,
)

STEPS = 3


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with a checkpoint of each, that nobody disturbed."""
    folder = tmp_path_factory.mktemp("state")
    rows = [[picture((56, 56), i)] for i in range(8)]
    data, held = (
        album_data(folder / "data", rows[:6]),
        album_data(folder / "data", rows[6:], "held"),
    )
    tree = small_run(
        folder / "runs", data, held, name="calm", train={"steps": STEPS, "keep_last": 9}
    )
    trainer = Trainer(load_config(config_file(folder / "calm.yaml", tree)))
    trainer.fit()
    return trainer.folder.path


def copied(calm: Path, name: str) -> Path:
    run = calm.with_name(name)
    shutil.copytree(calm, run, symlinks=True)
    return run


def resumed(run: Path) -> Trainer:
    config = load_config(run.parents[1] / "calm.yaml", [f"name={run.name}"])
    trainer = Trainer(config, resume=True)
    trainer.fit()
    return trainer


def checkpoint(run: Path, step: int = STEPS) -> Path:
    return run / "checkpoints" / f"step_{step:06d}"


def files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def where(run: Path) -> tuple[int, dict[int, str]]:
    """From which step a resume would go on, and what is wrong with later ones."""
    start = find_start(Checkpoints(run / "checkpoints", 9), True, World(torch.device("cpu")))
    return start.step, start.damaged


@pytest.mark.slow
def test_every_flipped_bit_is_noticed(calm: Path) -> None:
    """One in the first and the last byte of every file, and 40 anywhere: every one of them is named with its file."""
    run = copied(calm, "flips")
    folder, rng = checkpoint(run), random.Random(5)
    assert where(run) == (STEPS, {})
    tries = [
        (f, bit)
        for f in files_of(folder)
        for bit in (rng.randrange(8), 8 * f.stat().st_size - 1 - rng.randrange(8))
    ]
    tries += [(f, rng.randrange(8 * f.stat().st_size)) for f in rng.choices(files_of(folder), k=40)]
    for file, bit in tries:
        flip(file, bit)
        step, damaged = where(run)
        assert step == STEPS - 1 and file.name in damaged[STEPS], (file, bit)
        flip(file, bit)
    assert where(run) == (STEPS, {})


def swap_file(name: str) -> Callable[[Path, Path], None]:
    return lambda before, last: shutil.copy(before / name, last / name) and None


def swap_trainer(before: Path, last: Path) -> None:
    shutil.rmtree(last / "trainer")
    shutil.copytree(before / "trainer", last / "trainer")


def swap_all(before: Path, last: Path) -> None:
    shutil.rmtree(last)
    shutil.copytree(before, last)


def other_step(before: Path, last: Path) -> None:
    file = last / "trainer" / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "step": 2}))


def one_nan(before: Path, last: Path) -> None:
    weights = load_file(last / "model.safetensors")
    weights[sorted(weights)[0]].view(-1)[0] = float("nan")
    save_file(weights, last / "model.safetensors", metadata={"format": "pt"})


def added(name: str) -> Callable[[Path, Path], None]:
    return lambda before, last: (last / name).write_text("{}") and None


def removed(name: str) -> Callable[[Path, Path], None]:
    return lambda before, last: (last / name).unlink()


def emptied(name: str) -> Callable[[Path, Path], None]:
    return lambda before, last: (last / name).write_bytes(b"")


def folder_for_file(before: Path, last: Path) -> None:
    (last / "config.json").unlink()
    (last / "config.json").mkdir()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            swap_file("model.safetensors"),
            "model.safetensors: its bytes are not those that were saved",
        ),
        (swap_file("trainer/optimizer.pt"), "trainer/optimizer.pt: its bytes"),
        (swap_trainer, "expected that of step_000003, found that of step_000002"),
        (swap_all, "expected that of step_000003, found that of step_000002"),
        (other_step, "trainer/state.json: "),
        (one_nan, "model.safetensors: "),
        (removed("config.json"), "config.json: cannot be read"),
        (folder_for_file, "config.json: "),
        (removed("trainer/state.json"), "trainer/state.json: cannot be read"),
        (removed(MANIFEST), "expected it next to the state"),
        (emptied(MANIFEST), "found other bytes"),
        (emptied("tokenizer.json"), r"tokenizer.json: expected [\d,]+ bytes, found 0"),
        (added("adapter_config.json"), "adapter_config.json: expected no such file"),
        (added("pytorch_model.bin"), "pytorch_model.bin"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_was_swapped_edited_added_or_removed_is_noticed(
    damage: Any, said: str, calm: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(calm, run, symlinks=True)
    damage(checkpoint(run, STEPS - 1), checkpoint(run))
    step, damaged = where(run)
    assert step == STEPS - 1
    assert re.search(said, damaged[STEPS]), damaged


def test_results_of_an_evaluation_and_notes_may_lie_beside_it(calm: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(calm, run, symlinks=True)
    (checkpoint(run) / "eval").mkdir()
    (checkpoint(run) / "eval" / "results.json").write_text("{}")
    (checkpoint(run) / "NOTES.md").write_text("mine")
    assert where(run) == (STEPS, {})
    shutil.copytree(checkpoint(run), tmp_path / "my-model")
    check_loadable(tmp_path / "my-model")  # a copy under a name of one's own


def test_a_run_goes_on_from_the_checkpoint_before(calm: Path) -> None:
    run = copied(calm, "newest")
    flip(
        checkpoint(run) / "model.safetensors",
        8 * (checkpoint(run) / "model.safetensors").stat().st_size - 3,
    )
    trainer = resumed(run)
    assert trainer.start_step == STEPS - 1
    verdicts = differences(calm, run)
    assert not verdicts.pop("alarms.jsonl") and all(verdicts.values()), verdicts
    others = read_jsonl(calm / "alarms.jsonl")
    (alarm,) = [a for a in read_jsonl(run / "alarms.jsonl") if a not in others]
    assert (
        alarm["name"] == "checkpoint_damaged"
        and alarm["step"] == STEPS - 1
        and alarm["severity"] == "error"
    )
    info = json.loads((run / "run.json").read_text())
    assert (
        info["damaged_checkpoints"] == {str(STEPS): alarm["message"]}
        and info["status"] == "finished"
    )
    assert (
        "model.safetensors: its bytes" in alarm["message"]
        and "goes on from step 2" in alarm["message"]
    )
    aside = run / "checkpoints" / "damaged_step_000003"
    assert str(aside) in alarm["message"] and problems(aside, step=STEPS), (
        "kept for whoever wants to look at it"
    )
    assert trainer.checkpoints.steps() == [1, 2, 3] and where(run) == (STEPS, {})


def test_a_damaged_best_checkpoint_gives_its_place_to_the_next_best(calm: Path) -> None:
    run = copied(calm, "best")
    scores = {row["step"]: row["eval/selection"] for row in read_jsonl(run / "metrics.jsonl")}
    # saved as if the first step had been the best
    file = checkpoint(run) / "trainer" / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "best": scores[1], "best_step": 1}))
    write_manifest(checkpoint(run), STEPS)
    trainer = Trainer(load_config(run.parents[1] / "calm.yaml", [f"name={run.name}"]), resume=True)
    trainer.checkpoints.mark_best(1)
    flip(checkpoint(run, 1) / "config.json", 11)
    with trainer.open_runtime():
        trainer._restore()
    trainer.folder.finish("interrupted")
    assert trainer.start_step == STEPS and trainer.saver.best == scores[
        trainer.saver.best_step
    ] == max(scores[2], scores[3])
    assert (run / "checkpoints" / "best").resolve() == checkpoint(run, trainer.saver.best_step)
    assert any(
        "it was the best one" in alarm["message"] for alarm in read_jsonl(run / "alarms.jsonl")
    )
    assert trainer.checkpoints.steps() == [2, 3]


def test_all_damaged_is_said_and_nothing_is_replaced(calm: Path) -> None:
    run = copied(calm, "all")
    for step in range(1, STEPS + 1):
        flip(checkpoint(run, step) / "trainer" / "optimizer.pt", 4321)
    before = {p: p.read_bytes() for p in files_of(run)}
    with pytest.raises(
        CheckpointError,
        match=r"every one damaged: step 3: trainer/optimizer.pt.*step 1: .*--overwrite",
    ):
        resumed(run)
    assert {p: p.read_bytes() for p in files_of(run)} == before


def test_evaluation_and_serving_refuse_a_damaged_checkpoint_and_name_others(
    calm: Path, tmp_path: Path
) -> None:
    run = copied(calm, "eval")
    held = str(run.parents[1] / "data" / "held.jsonl")
    flip(checkpoint(run) / "tokenizer.json", 99)
    (run / "checkpoints" / "best").unlink()
    (run / "checkpoints" / "best").symlink_to(checkpoint(run).name)
    best = str(run / "checkpoints" / "best")
    said = r"expected the checkpoint .*step_000003 as it was saved, found 1 fault: tokenizer.json.*step_000001, step_000002"
    with pytest.raises(CheckpointError, match=said):
        eval_command(best, ALBUM, [Path(held)], tmp_path / "out", None, [], 0, None)
    with pytest.raises(CheckpointError, match=said):
        serve_command(best, None, [], ServeOptions(port=0, engine="own"))
    with pytest.raises(CheckpointError, match=said):
        # and a run or a warm start that would begin with it
        load_policy(ModelConfig(path=best, device="cpu"))


def test_a_checkpoint_of_an_older_version_is_used_with_a_note(
    calm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(calm, "older")
    for step in range(1, STEPS + 1):
        folder = checkpoint(run, step) / "trainer"
        (folder / "manifest.json").unlink()
        state = json.loads((folder / "state.json").read_text())
        del state["manifest"]
        (folder / "state.json").write_text(json.dumps(state))
    shutil.rmtree(checkpoint(run))
    notes: list[str] = []
    check_loadable(checkpoint(run, 2), notes.append)
    assert len(notes) == 1 and "older version of mmrl" in notes[0]
    check_loadable(tiny_folder(), notes.append)
    check_loadable("Qwen/Qwen2.5-VL-3B-Instruct", notes.append)
    assert len(notes) == 1, "a model that mmrl did not save is nobody's business"
    trainer = resumed(run)
    assert trainer.start_step == 2 and "older version" in trainer.start.notes[0]
    assert all(differences(calm, run).values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_never_saved(bad: float, tmp_path: Path) -> None:
    p = fresh_policy()
    checkpoints = Checkpoints(tmp_path / "c", 1)
    checkpoints.save(1, p, {}, {"step": 1})
    name, parameter = p.trainable()[5]
    with torch.no_grad():
        parameter.view(-1)[-1] = bad
    with pytest.raises(
        NonFiniteError, match=rf"step 2: .*{name}.*nothing was saved.*\(1\) are untouched"
    ):
        checkpoints.save(2, p, {}, {"step": 2})
    with torch.no_grad():
        parameter.view(-1)[-1] = 0.0
    moments = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.tensor([0.0, bad])}}}
    with pytest.raises(NonFiniteError, match=r"optimizer state 0\.exp_avg"):
        checkpoints.save(2, p, moments, {"step": 2})
    assert [f.name for f in (tmp_path / "c").iterdir()] == ["step_000001"] and not problems(
        checkpoints.path(1), step=1
    )


def test_a_run_whose_weights_break_stops_and_keeps_its_sound_checkpoints(calm: Path) -> None:
    config = load_config(calm.parents[1] / "calm.yaml", ["name=breaks", "train.keep_last=1"])
    trainer = Trainer(config)

    def breaks(kind: str, payload: Any) -> None:
        if kind == "step" and payload["step"] == 2:  # after its update, before its checkpoint
            with torch.no_grad():
                trainer.policy.trainable()[0][1].view(-1)[0] = float("nan")

    trainer.on_event = breaks
    with pytest.raises(NonFiniteError, match="step 2: expected finite weights to save"):
        trainer.fit()
    run = trainer.folder.path
    assert trainer.checkpoints.steps() == [1] and where(run) == (1, {})
    assert "non_finite" in [alarm["name"] for alarm in read_jsonl(run / "alarms.jsonl")]
    assert json.loads((run / "run.json").read_text())["status"] == "failed"


def test_a_model_that_is_not_finite_is_not_loaded(tmp_path: Path) -> None:
    shutil.copytree(tiny_folder(), tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights[sorted(weights)[3]].view(-1)[2] = float("-inf")
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError,
        match=r"expected finite weights in .*model, found NaN or infinity in 1 tensor ",
    ):
        load_policy(ModelConfig(path=str(tmp_path / "model"), device="cpu"), trainable=False)


def test_files_are_shared_out_between_processes(calm: Path, tmp_path: Path) -> None:
    """Whatever the number of processes, each file is looked at by one of them."""
    shutil.copytree(checkpoint(calm), tmp_path / checkpoint(calm).name)
    folder = tmp_path / checkpoint(calm).name
    names = [os.path.relpath(f, folder) for f in files_of(folder) if f.name != "manifest.json"]
    for name in names:
        flip(folder / name, 3)
    for count in (1, 2, 3, len(names) + 2):
        found = [
            fault.partition(":")[0]
            for n in range(count)
            for fault in problems(folder, step=STEPS, share=(n, count))
        ]
        assert sorted(found) == sorted(names)
