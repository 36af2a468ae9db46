"""scripts/demo_browser.py: pages on record are the pages, and its verdict."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmrl.coords import CoordFrame
from mmrl.task import Template
from mmrl.tasks.browser.environment import BrowserEnvironment
from mmrl.tasks.browser.task import Browser
from mmrl.types import ImageSize, Sample, StopReason, Turn
from scripts import demo_browser

TEMPLATE = Template("t", CoordFrame.REL1000, "")


def played(world: BrowserEnvironment, kind: str, seed: int) -> list[object]:
    """Pixels, words and rewards of an episode of the scripted player."""
    seen = world.reset(
        Sample("1", "browser", kind, kind, None, params={"kind": kind, "seed": seed}), 0
    )
    found: list[object] = []
    outcome = None
    while outcome is None or not outcome.ended:
        if seen is not None and seen.images:
            height, width = np.asarray(seen.images[0]).shape[:2]
            world.shown([ImageSize((width, height), (width, height))])
            found += [str(seen.messages), np.asarray(seen.images[0]).tobytes()]
        said = world.scripted(np.random.default_rng(0))
        outcome = world.step(Turn((1,), str(said), (0.0,), StopReason.EOS))
        found += [said, outcome.reward, outcome.info]
        seen = outcome.observation
    world.close()
    return found


@pytest.mark.slow
@pytest.mark.render("chromium")
def test_recorded_pages_are_the_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kinds = ("miniwob/click-collapsible", "miniwob/click-color", "own/pick")
    monkeypatch.setattr(demo_browser, "KINDS", kinds)
    file = demo_browser.record(tmp_path / "pages.jsonl", range(2))
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [(row["kind"], row["seed"]) for row in rows] == [(k, s) for k in kinds for s in (0, 1)]
    for row in rows:
        kind, seed = row["kind"], row["seed"]
        live = Browser(actions="point", max_turns=3).environment(TEMPLATE)
        kept = demo_browser.BrowserOnRecord(str(file), actions="point", max_turns=3).environment(
            TEMPLATE
        )
        assert isinstance(live, BrowserEnvironment)
        assert played(kept, kind, seed) == played(live, kind, seed), kind
    with Image.open(io.BytesIO(demo_browser.RecordedPage(rows[0]["states"]).shown().png)) as first:
        assert first.size == (160, 210)


def test_the_verdict_asks_for_four_kinds_and_a_flat_control() -> None:
    low, high = {"sampled": [0.3, 0.2, 0.4]}, {"sampled": [0.8, 0.7, 0.9]}
    near = {"sampled": [0.5, 0.39, 0.6]}
    kinds = ["a", "b", "c", "d", "e"]
    before = dict.fromkeys(kinds, low)
    flat = {"before": before, "after": before}
    real = {"before": before, "after": {**dict.fromkeys(kinds, high), "e": near}}
    assert demo_browser.learned(real) == ["a", "b", "c", "d"]
    assert demo_browser.verdict({"real": real, "shuffled": flat}) == []
    less = {"before": before, "after": {**real["after"], "d": near}}
    assert demo_browser.verdict({"real": less, "shuffled": flat}) == [
        "3 kinds were learned, expected 4"
    ]
    assert demo_browser.verdict({"real": real, "shuffled": less}) == [
        "permuted rewards taught a, b, c"
    ]
