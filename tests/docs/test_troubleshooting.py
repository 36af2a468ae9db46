"""The page of symptoms names metrics that runs log, alarms that they can raise, and charts of the report."""

from __future__ import annotations

import re
import typing

import pytest

from mmrl.config import AlarmConfig, load_config
from mmrl.training.alarms import AlarmBoard
from mmrl.training.trainer import Trainer
from tests.docs.pages_kit import REPO, TEXT
from tests.kits.engine_kit import (
    album_data,
    config_file,
    picture,
    read_jsonl,
    small_run,
    tiny_folder,
)

PAGE = TEXT["docs/troubleshooting.md"]
ROWS = re.findall(
    r"^## (.+)\n\n\| metric \| alarm \| chart \|\n\|---\|---\|---\|\n\| (.+) \| (.+) \| (.+) \|$",
    PAGE,
    re.MULTILINE,
)
ALARMS: set[str] = {
    *typing.get_args(typing.get_args(AlarmConfig.model_fields["stop"].annotation)[0])
}
"""What may be named in alarms.stop; weight_sync always ends the run and is raised by the engine."""


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Metrics of small runs: GRPO, PPO with a critic, and a mixture of experts with routing replay."""
    folder = tmp_path_factory.mktemp("runs")
    found: set[str] = set()
    pictures = [[picture((56, 56), i)] for i in range(8)]
    ppo = {"advantage": "gae", "advantage_scale": "batch", "dynamic_sampling": False}
    replay = {"router_replay": {"mode": "R3"}}
    for name, algorithm, arch in (
        ("grpo", {}, "qwen2_5_vl"),
        ("ppo", ppo, "qwen2_5_vl"),
        ("mixture", replay, "qwen3_vl_moe"),
    ):
        data = album_data(folder / "data", pictures)
        model = {"path": tiny_folder(arch)}
        tree = small_run(folder, data, name=name, algorithm=algorithm, model=model)
        Trainer(load_config(config_file(folder / f"{name}.yaml", tree))).fit()
        for row in read_jsonl(folder / name / "metrics.jsonl"):
            found |= set(row)
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


@pytest.mark.slow
def test_metrics_are_logged_by_runs(logged: set[str]) -> None:
    named = set(re.findall(r"`((?:train|time)/[\w/@.]+)`", PAGE))
    # one for each reason; right and wrong answers only where there are some
    by_chance = {"train/failed/REASON", "train/length/right", "train/length/wrong"}
    # tests/rollout/test_episodes.py has runs with environments
    by_chance |= {"time/environment"}
    # the small task has no truth that could be compared: named where alarms and charts read them
    readers = ("mmrl/diagnostics/diagnosis.py", "mmrl/report/curves.py")
    code = "".join((REPO / path).read_text(encoding="utf-8") for path in readers)
    of_truths = {f"train/{name}" for name in ("same_answer", "same_truth", "correct")}
    assert all(f'/{name.partition("/")[2]}"' in code for name in of_truths)
    assert len(named) > 20 and named - by_chance - of_truths <= logged, named - logged


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
