"""While a command loads its libraries garbage is looked for seldom, and as usual once it trains."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmrl.cli import main
from mmrl.config import load_config
from mmrl.operations import startup
from mmrl.operations.startup import loaded, loading
from mmrl.training.trainer import Trainer
from tests.kits.engine_kit import album_data, config_file, picture, small_run


@pytest.fixture(autouse=True)
def usual() -> Iterator[tuple[int, int, int]]:
    found, pythons = gc.get_threshold(), startup._USUAL
    gc.set_threshold(*pythons)
    yield pythons
    gc.set_threshold(*found)


def collections(objects: int) -> int:
    """How often garbage is looked for while so many objects are made that stay."""
    seen: list[str] = []

    def note(phase: str, info: object) -> None:
        seen.append(phase)

    gc.callbacks.append(note)
    try:
        kept = [[] for _ in range(objects)]
    finally:
        gc.callbacks.remove(note)
    assert len(kept) == objects
    return seen.count("start")


def test_garbage_is_looked_for_seldom_while_loading_and_then_as_before(
    usual: tuple[int, int, int],
) -> None:
    before = collections(100_000)
    loading()
    loading()
    assert collections(100_000) <= 2 < 10 < before
    loaded()
    assert gc.get_threshold() == usual and collections(100_000) > 10


def test_thresholds_of_the_program_itself_are_kept() -> None:
    gc.set_threshold(123, 4, 5)
    loading()
    assert gc.get_threshold() == (123, 4, 5)
    loaded()
    assert gc.get_threshold() == (123, 4, 5)


def test_the_command_begins_so_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, usual: tuple[int, int, int]
) -> None:
    seen = []
    monkeypatch.setattr(main, "app", lambda: seen.append(gc.get_threshold()))
    main._main()
    assert seen[0][0] > 10 * usual[0] and gc.get_threshold() == usual


def test_a_run_trains_as_usual(usual: tuple[int, int, int], tmp_path: Path) -> None:
    data = album_data(tmp_path / "data", [[picture((56, 56), i)] for i in range(2)])
    tree = small_run(tmp_path / "runs", data, train={"steps": 1, "prompts_per_step": 1})
    trainer = Trainer(load_config(config_file(tmp_path / "c.yaml", tree)))
    seen = []
    trainer.on_event = lambda kind, payload: seen.append(gc.get_threshold())
    loading()
    trainer.fit()
    assert set(seen) == {usual}
