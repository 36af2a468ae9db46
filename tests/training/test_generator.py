"""A generator process beside the trainer: the numbers of an inline run, versions, and what a kill of either side loses."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.errors import ConfigError, DataError, WeightSyncError
from mmrl.rollout.shared_weights import SharedWeights
from mmrl.training.generator import Generator
from mmrl.training.trainer import Trainer
from tests.kits.engine_kit import ALBUM, album_data, picture, read_jsonl
from tests.kits.prepared_kit import prepared_generators
from tests.training.partial_kit import WEIGHED, PatientRollouts, WeighedRollouts
from tests.training.test_scheduled_training import (
    ALONE,
    make,
    rollouts,
    rows,
    run,
    same,
    scheduled,
)

APART = {"engine": {"generator": {"kind": "process"}}}


@pytest.fixture(scope="module")
def prepared() -> Iterator[None]:
    """A dozen generators are started here; those of tests/robotics/test_generated_episodes.py are spawned as a user's."""
    with prepared_generators():
        yield


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Nine rows of pictures, of which groups mostly have signal, and three rows without any: they are replaced."""
    rows = [[picture(((112, 84), (56, 56), (84, 112))[i % 3], i)] * (i % 3) for i in range(9)]
    return (album_data(tmp_path / "data", rows), album_data(tmp_path / "data", rows[:3], "flat"))


def before_adding(trainer: Trainer, number: int, act: Callable[[], None]) -> None:
    """Call `act` before the trainer adds its group number `number` (from 0) of the run."""
    learner, added = trainer.rollouts.learner, []

    def made() -> Any:
        found = learner()
        add = found.add

        def counted(group: Any) -> None:
            if len(added) == number:
                act()
            added.append(group.key)
            add(group)

        found.add = counted  # type: ignore[method-assign]
        return found

    trainer.rollouts.learner = made  # type: ignore[method-assign]


def kill_generator(trainer: Trainer) -> None:
    pid = trainer.rollouts.generator.worker.pid  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.usefixtures("prepared")
def test_a_generator_that_is_killed_within_a_step_leaves_the_run_as_the_serial_one_bit_for_bit(
    tmp_path: Path, files: tuple[str, str]
) -> None:
    serial = run(tmp_path, files, "serial", ALONE)
    trainer = Trainer(make(tmp_path, files, "killed", ALONE, APART, scheduled("pipelined", wave=1)))
    before_adding(trainer, 2, lambda: kill_generator(trainer))
    trainer.fit()
    assert trainer.rollouts.generator.restarts == 1  # type: ignore[attr-defined]
    found = rows(trainer)
    # it may have made the whole step already: then the next one meets its end
    assert [r.pop("train/generator/restarts") for r in found][1:] == [1.0, 1.0]
    assert same(serial, trainer) and rows(serial) == found
    assert rollouts(serial) == rollouts(trainer)
    assert sum(r["train/groups/no_signal"] for r in found) > 0, "places were refilled"


@pytest.mark.slow
@pytest.mark.usefixtures("prepared")
def test_in_bf16_the_process_samples_from_two_thirds_of_the_bytes_what_masters_would(
    tmp_path: Path, files: tuple[str, str]
) -> None:
    """Products are stored as autocast casts them; a third of this tiny model is embeddings, which it does not cast."""
    bf16 = {"model": {"dtype": "bf16"}, "alarms": {"logprob_gap": 1.0}}
    serial = run(tmp_path, files, "serial", ALONE, bf16)
    options = (ALONE, APART, bf16, scheduled("pipelined", wave=1))
    trainer = Trainer(make(tmp_path, files, "apart", *options), rollouts=WeighedRollouts)
    trainer.fit()
    assert same(serial, trainer) and rollouts(serial) == rollouts(trainer)
    found = (tmp_path / "runs" / WEIGHED).read_text(encoding="utf-8").split()
    assert found[::2] == ["process", "inline"], "the trainer's, the generator's"
    assert int(found[3]) < 0.67 * int(found[1])
    # and so are the weights on their way
    masters = sum(p.nbytes for _, p in trainer.policy.trainable())
    assert trainer.rollouts._room.nbytes < 0.67 * masters  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.usefixtures("prepared")
def test_async_generation_stays_within_its_bound_and_resumes_with_the_prompts_it_would_have_had(
    tmp_path: Path, files: tuple[str, str]
) -> None:
    options = (
        APART,
        scheduled("async", wave=1, staleness=2),
        {"algorithm": {"dynamic_sampling": False}},
    )
    longer = {"train": {"steps": 4, "save_every": 2, "log_rollouts": 9}}
    whole = run(tmp_path, files, "whole", *options, longer)
    trainer = Trainer(make(tmp_path, files, "stopped", *options, longer))

    def stop() -> None:
        kill_generator(trainer)
        raise KeyboardInterrupt

    before_adding(trainer, 13, stop)  # both at once, in the middle of the last step
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    resumed = run(tmp_path, files, "stopped", *options, longer, resume=True)
    assert resumed.start_step == 2

    def asked(trainer: Trainer) -> list[Any]:
        return [[(r["key"], r["sample"]) for r in step] for step in rollouts(trainer)]

    assert len(asked(whole)[3]) == 4 * 3 and asked(resumed) == asked(whole)
    for r in rows(whole):
        assert 0 <= r["train/staleness"] <= 2 if "train/staleness" in r else True
    shares = [r["train/offpolicy/share"] for r in read_jsonl(whole.folder.path / "metrics.jsonl")]
    assert shares[0] == 0 and max(shares) > 0, "later steps were rolled out while the first trained"


@pytest.mark.slow
@pytest.mark.usefixtures("prepared")
def test_partial_rollouts_go_on_over_syncs_within_the_bound_and_a_kill_loses_none(
    tmp_path: Path, files: tuple[str, str]
) -> None:
    trainer = Trainer(
        make(
            tmp_path,
            files,
            "partial",
            APART,
            scheduled("async", wave=4, staleness=1, partial_rollouts=True),
            {"algorithm": {"dynamic_sampling": False}, "data": {"eval": []}},
            {"train": {"steps": 4, "log_rollouts": 9}},
        ),
        rollouts=PatientRollouts,
    )
    before_adding(trainer, 9, lambda: kill_generator(trainer))
    trainer.fit()
    assert trainer.rollouts.generator.restarts == 1  # type: ignore[attr-defined]
    written = rollouts(trainer)
    assert [len({tuple(r["key"]) for r in step}) for step in written] == [4] * 4
    mixed = [r for step in written for r in step if "token_versions" in r]
    assert mixed, "no sync fell within an answer"
    for r in mixed:
        (parts,) = r["token_versions"]
        versions = [version for version, _ in parts]
        assert versions == sorted(set(versions)) and sum(n for _, n in parts) == r["num_tokens"]
        # staleness counts from the oldest token
        assert r["versions"] == versions[:1] and versions[0] >= r["step"] - 1 - 1
        assert versions[-1] <= r["step"] - 1


@pytest.mark.slow
@pytest.mark.usefixtures("prepared")
def test_steps_that_arrived_during_an_evaluation_are_not_made_again(
    tmp_path: Path, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies while the trainer waits for an evaluation and whole later steps wait to be polled."""
    options = (
        APART,
        scheduled("async", wave=1, staleness=2),
        {"algorithm": {"dynamic_sampling": False}, "eval": {"every": 1, "samples": 1, "limit": 2}},
        {"data": {"eval": [{"task": ALBUM, "path": files[0]}]}},
        {"train": {"steps": 4, "log_rollouts": 9}},
    )
    whole = run(tmp_path, files, "whole", *options)
    evaluate, killed = Generator.evaluate, []

    def late(self: Generator, step: int, **given: Any) -> Any:
        if step == 1 and not killed:
            while not self.ledger.ended(2):
                self._keep(self._receive(1.0))
            killed.append(step)
            os.kill(self.worker.pid, signal.SIGKILL)  # type: ignore[union-attr]
        return evaluate(self, step, **given)

    monkeypatch.setattr(Generator, "evaluate", late)
    lost = run(tmp_path, files, "lost", *options)
    assert killed and lost.rollouts.generator.restarts == 1  # type: ignore[attr-defined]

    def asked(trainer: Trainer) -> list[Any]:
        return [[(r["key"], r["sample"]) for r in step] for step in rollouts(trainer)]

    assert asked(lost) == asked(whole) and len(asked(lost)) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("prepared")
def test_an_error_of_the_generator_is_the_runs(tmp_path: Path) -> None:
    mine = str(shutil.copy(picture((56, 56), 0), tmp_path / "mine.png"))
    files = (
        album_data(tmp_path / "data", [[mine]] * 4),
        album_data(tmp_path / "data", [[]], "flat"),
    )
    trainer = Trainer(make(tmp_path, files, "broken", APART, {"data": {"on_error": "raise"}}))
    Path(mine).write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"mine\.png"):
        trainer.fit()


def test_where_a_generator_process_cannot_act_it_is_refused(
    tmp_path: Path, files: tuple[str, str]
) -> None:
    with pytest.raises(
        ConfigError, match=r"engine\.generator\.device cuda:1 is of a generator proc"
    ):
        make(tmp_path, files, "bad", {"engine": {"generator": {"device": "cuda:1"}}})


SHAPES = {"a": (300, 700), "b": (5,), "c": ()}


def _write(shared: SharedWeights, enough: Any) -> None:
    for version in itertools.count(1):
        shared.write(version, ((n, torch.full(s, float(version))) for n, s in SHAPES.items()))
        if enough.is_set():
            return


def test_what_is_read_of_shared_weights_is_one_version_while_another_process_writes() -> None:
    shared = SharedWeights((n, torch.empty(s)) for n, s in SHAPES.items())
    mine = [(n, torch.empty(s)) for n, s in SHAPES.items()]
    assert shared.version == -1 and shared.read(mine) is None
    enough = get_context("forkserver").Event()
    writer = get_context("forkserver").Process(target=_write, args=(shared, enough))
    writer.start()
    seen: list[int] = []
    # how soon it meets so many versions is the scheduler's affair
    while len(set(seen)) < 20:
        assert writer.is_alive()
        if (version := shared.read(mine)) is None:
            continue
        assert {float(t.min()) for _, t in mine} | {float(t.max()) for _, t in mine} == {version}
        seen.append(version)
    enough.set()
    writer.join()
    assert seen == sorted(seen) and writer.exitcode == 0
    with pytest.raises(WeightSyncError, match=r"b \(5,\) there, \(6,\) here"):
        shared.read([("a", mine[0][1]), ("b", torch.empty(6)), ("c", mine[2][1])])
    with pytest.raises(WeightSyncError, match="missing"):
        shared.write(1, [("a", mine[0][1])])
