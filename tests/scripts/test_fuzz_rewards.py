"""The reward fuzzer finds nothing in the shipped rewards, and does find planted holes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmrl.registry import BUILT_IN, resolve_task
from mmrl.tasks.grounding import Grounding
from mmrl.types import RewardContext, Sample, Score
from scripts._reward_cases import MODES, RewardCase, all_cases
from scripts.fuzz_rewards import Fuzzer

HOLES = '''
"""Grounding with three planted holes."""
import time

from scripts.fuzz_rewards import LIMIT_MS
from mmrl.tasks.grounding import Grounding

class Raises(Grounding):
    def score(self, sample, text, ctx):
        if "{" in text:
            raise ZeroDivisionError(text)
        return super().score(sample, text, ctx)

class Sloppy(Grounding):
    def score(self, sample, text, ctx):
        return super().score(sample, text[text.rfind("<answer>"):] if "<answer>" in text else text, ctx)

class Slow(Grounding):
    def score(self, sample, text, ctx):
        began = time.thread_time()
        while len(text) > 600 and time.thread_time() - began < 2 * LIMIT_MS / 1000:  # slow on any processor
            pass
        return super().score(sample, text, ctx)
'''


def test_every_task_preset_and_mode_is_a_case() -> None:
    names = {case.name for case in all_cases()}
    assert set(BUILT_IN) - {"mixed"} <= names
    for task in set(BUILT_IN) - {"mixed"}:
        assert {f"{task}:{preset}" for preset in resolve_task(task).presets} <= names
    assert set(MODES) <= set(BUILT_IN)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(all_cases()), ids=lambda c: c.name)
def test_hundreds_of_inputs_find_nothing(case: RewardCase) -> None:
    # presets share most of a task's code; the script tries 200,000
    wanted = 1000 if case.name == case.task != "math" else 400
    found = Fuzzer(case, seed=2).run(wanted)
    found.kinds.pop("slow", None)  # measured by the script on a quiet machine, not by a test
    assert not found.kinds, found.shown[:3]
    assert found.inputs >= wanted and 0 < found.parsed < found.inputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("Raises", "exception"), ("Sloppy", "pays: two answers"), ("Slow", "slow")]
)
def test_planted_holes_are_found(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "holes.py").write_text(HOLES, encoding="utf-8")
    found = Fuzzer(RewardCase(name, f"{tmp_path / 'holes.py'}:{name}"), seed=0).run(300)
    assert found.kinds[kind], dict(found.kinds)
    assert any(shown["kind"] == kind for shown in found.shown)


@pytest.mark.slow
def test_a_value_outside_its_range_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Grounding.score

    def generous(self: Grounding, sample: Sample, text: str, ctx: RewardContext) -> Score:
        score = honest(self, sample, text, ctx)
        return Score(1.5, True) if score.value > 0.8 else score

    monkeypatch.setattr(Grounding, "score", generous)
    found = Fuzzer(RewardCase("grounding", "grounding"), seed=0).run(300)
    assert found.kinds["range"]
