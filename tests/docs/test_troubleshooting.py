"""The page of symptoms names metrics that a run logs, alarms that it can raise, charts of the report and keys of the configuration."""

from __future__ import annotations

import re
import typing

import pytest

from mmrl.config import AlarmConfig
from mmrl.training.alarms import AlarmBoard
from tests.docs.pages_kit import REPO, TEXT

PAGE = TEXT["docs/troubleshooting.md"]
ROWS = re.findall(
    r"^## (.+)\n\n\| metric \| alarm \| chart \|\n\|---\|---\|---\|\n\| (.+) \| (.+) \| (.+) \|$",
    PAGE,
    re.MULTILINE,
)
ALARMS = {*typing.get_args(typing.get_args(AlarmConfig.model_fields["stop"].annotation)[0])}
"""What may be named in alarms.stop; weight_sync always ends the run and is raised by the engine."""


def logged() -> set[str]:
    """Metrics in the records of real runs: pictures, PPO, robots."""
    found: set[str] = set()
    for path in (REPO / "tests" / "golden").glob("*.json"):
        found |= set(re.findall(r'"((?:train|time)/[\w/@.-]+)"', path.read_text(encoding="utf-8")))
    return found


def test_every_symptom_has_a_metric_an_alarm_and_a_chart() -> None:
    titles = [title for title, *_ in ROWS]
    assert len(titles) >= 8
    for words in ("flat", "format", "long", "Entropy", "disagree", "answers get worse"):
        assert any(words in title for title in titles), words
    for _, metrics, alarms, charts in ROWS:
        assert all(part.count("`") >= 2 for part in (metrics, alarms)) and charts.count("*") >= 2


def test_alarms_exist_and_all_are_explained() -> None:
    named = {name for _, _, cell, _ in ROWS for name in re.findall(r"`(\w+)`", cell)}
    assert named - {"weight_sync"} <= ALARMS, named - ALARMS
    explained = set(re.findall(r"`(\w+)`", PAGE))
    assert ALARMS - {"checkpoint_failed"} <= explained, ALARMS - explained
    source = (REPO / "mmrl/errors.py").read_text(encoding="utf-8")
    assert 'alarm = "weight_sync"' in source and AlarmBoard(AlarmConfig()).must_stop([]) is None


def test_metrics_are_logged_by_runs() -> None:
    known = logged()
    assert len(known) > 60, "the records hold metrics"
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("training", "diagnostics", "evaluation")
        for path in (REPO / "mmrl" / folder).glob("*.py")
    )
    for name in set(re.findall(r"`((?:train|time)/[\w/@.]+)`", PAGE)):
        tail = name.partition("/")[2]
        if tail.endswith("REASON"):  # one metric for each reason
            assert 'f"failed/{reason}"' in code
            continue
        assert name in known or f'"{tail}"' in code, name
    assert "train/no_such_metric" not in known


def test_charts_are_in_the_report() -> None:
    code = "\n".join(
        path.read_text(encoding="utf-8") for path in (REPO / "mmrl" / "report").glob("*.py")
    )
    charts = {name for *_, cell in ROWS for name in re.findall(r"\*([^*]+)\*", cell)}
    assert len(charts) > 8
    for chart in charts | {"Each step"}:
        assert f'"{chart}"' in code, chart


@pytest.mark.parametrize("name", ["pages", "site"])
def test_other_pages_lead_here(name: str) -> None:
    if name == "pages":
        assert sum("troubleshooting.md" in text for text in TEXT.values()) >= 3
    else:
        assert "troubleshooting.md" in (REPO / "mkdocs.yml").read_text(encoding="utf-8")
