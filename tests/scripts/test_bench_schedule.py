"""What scripts/bench_schedule.py measures is what `mmrl train` runs: the trainer's own executor, made from a configuration."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from mmrl.training.pipeline import PipelineSettings
from mmrl.training.trainer import Trainer
from scripts import _bench
from scripts._costed import CostedRollouts, Costs, config_of, run
from scripts.bench_schedule import PASSES, SYSTEMS, kept_rows

FREE = Costs(0.0, 0.0, 0.0, groups=2, members=2, decisions=1, slots=2, workers=1)


def executor(folder: Path, *overrides: str) -> PipelineSettings:
    """Of a plain run with these overrides."""
    trainer = Trainer(config_of(FREE, folder, "name=plain", *overrides), overwrite=True)
    with trainer.open_runtime():
        return trainer.pipeline.settings


@pytest.mark.slow
def test_every_measured_system_is_one_that_a_configuration_gives(tmp_path: Path) -> None:
    file = _bench.RESULTS / "bench_schedule.json"
    recorded = json.loads(file.read_text(encoding="utf-8"))["costed"] if file.exists() else []
    for name, overrides in SYSTEMS.items():
        made = executor(tmp_path, *overrides)
        kind = overrides[0].partition("=")[2]
        assert made == PipelineSettings(schedule=kind, staleness=int(kind == "async")), name  # type: ignore[arg-type]
        for row in recorded:
            measured = dict(row["systems"][name]["executor"])
            assert measured.pop("shared", True), (
                "a choice that there was once, which no run ever made otherwise"
            )
            # recorded before there were sources that infer elsewhere
            assert {"apart": False, **measured} == dataclasses.asdict(made), (
                f"{name} was measured otherwise: record it again"
            )
    assert all(row["systems"].keys() == SYSTEMS.keys() for row in recorded)


def test_rows_of_another_machine_or_another_script_are_not_kept() -> None:
    here = {"cpu": "a", "cores": 2, "memory_gib": 8.0, "load_1min": 0.1}
    rows = {
        "tiny": {"systems": {"serial": {}, "streaming": {}}},
        "old": {"systems": {"serial": {}, "stage_overlap": {}}},
    }
    assert list(
        kept_rows(
            {"machine": here, "real": rows}, {**here, "load_1min": 9.0}, ("serial", "streaming")
        )
    ) == ["tiny"]
    for other in ({"cpu": "b"}, {"cores": 4}, {"memory_gib": 16.0}):
        assert (
            kept_rows({"machine": {**here, **other}, "real": rows}, here, ("serial", "streaming"))
            == {}
        )
    assert kept_rows({"machine": {}}, here, ("serial",)) == {}


@pytest.mark.slow
def test_a_costed_run_sleeps_where_it_says(tmp_path: Path) -> None:
    costs = dataclasses.replace(FREE, render=0.4, infer=0.2, train=0.6)
    summaries, settings = run(
        config_of(costs, tmp_path, *SYSTEMS["async_4"]),
        1,
        functools.partial(CostedRollouts, costs=costs),
    )
    (found,) = summaries
    busy = {
        stage: found["wall_s"] * (1 - found["stages"][stage]["bubble"])
        for stage in ("render", "infer", "train")
    }
    assert all(
        busy[stage] >= wanted for stage, wanted in (("render", 0.2), ("infer", 0.2), ("train", 0.6))
    ), busy
    assert settings.schedule == "async" and settings.staleness == 1


@pytest.mark.slow
def test_simulators_are_answered_between_the_passes_of_an_update(tmp_path: Path) -> None:
    """Of a real run: decisions made meanwhile are those of the weights before, so the next step calls them stale."""
    costs = Costs(render=2.0, infer=2.0, train=2.0, groups=4, members=4, slots=4, workers=1)
    config = config_of(costs, tmp_path, *SYSTEMS["async_4"], *PASSES, "train.steps=3")
    rows: dict[int, Any] = {}
    trainer = Trainer(
        config,
        overwrite=True,
        on_event=lambda kind, row: rows.update({row["step"]: row}) if kind == "step" else None,
        rollouts=functools.partial(CostedRollouts, costs=costs),
    )
    trainer.fit()
    spans = trainer.rollouts.timeline.take()
    parts = [s for s in spans if s.args.get("kind") == "finish" and s.args["step"] == 2]
    begin, end = min(s.start for s in parts), max(s.end for s in parts)
    between = [s for s in spans if s.stage == "infer" and begin < s.start < end]
    assert len(parts) > 1 and between and {s.args["version"] for s in between} == {1}
    assert rows[3]["train/offpolicy/share"] > 0 and rows[3]["train/staleness"] == 1
    # the update's own seconds: without those in which simulators were answered
    assert rows[2]["time/update"] < end - begin - sum(s.end - s.start for s in between)
