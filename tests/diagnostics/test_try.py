"""`mmrl try` and real runs in which nothing is learned: the tiny model is asked in a format that it does not know."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.algorithms import DynamicSampler, SamplerSettings
from mmrl.config import load_config
from mmrl.diagnostics.trial import expected_time, rounds_per_place, trial_overrides, try_out
from mmrl.errors import ConfigError
from mmrl.tasks.scenes import make_scenes
from mmrl.training.trainer import Trainer
from tests.kits.engine_kit import (
    ALBUM,
    REPO,
    album_data,
    config_file,
    picture,
    read_jsonl,
    small_run,
)
from tests.kits.robot_kit import config_of, saved_vla

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_scenes(tmp_path_factory.mktemp("scenes"), 12, 1)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command line in this process: (exit status, standard output, standard error)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        from mmrl.cli.main import main

        monkeypatch.setattr(sys, "argv", ["mmrl", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def recipe(name: str, scenes: str, *more: str) -> list[str]:
    return [
        str(REPO / "configs" / f"{name}.yaml"),
        f"model.path={REPO / 'assets' / 'tiny_vlm'}",
        f"data.train.0.path={scenes}",
        f"data.eval.0.path={scenes}",
        "model.device=cpu",
        "threads=1",
        "reward.workers=0",
        *more,
    ]


def test_a_model_that_does_not_know_the_format_is_refused_with_numbers_texts_and_pictures(
    scenes: str, tmp_path: Path, command: Any
) -> None:
    status, out, err = command(
        "try",
        *recipe("grounding", scenes, "rollout.max_new_tokens=40"),
        "--prompts",
        "3",
        "--samples",
        "4",
        "--out",
        str(tmp_path / "try"),
    )
    assert status == 1, out + err
    assert (
        "keep the format     0 %" in out
        and "pass rates          0: 3," in out
        and "groups with signal  0 % [0, 56] of 3" in out
    )
    assert (
        "would learn nothing: parse_rate: 0% of the answers keep the format" in err
        and "raise rollout.max_new_tokens" in err
    )
    assert "update not measured" in out and "failed: truncated" in out
    page = (tmp_path / "try" / "try.html").read_text()
    assert page.count("data:image/") >= 3 and "Would learn nothing: parse_rate" in page
    assert sorted(p.name for p in (tmp_path / "try").iterdir()) == [
        "failures.jsonl",
        "rollouts",
        "try.html",
    ], "no run, no weights"


def test_a_model_that_knows_it_passes_with_times_and_a_contact_sheet(
    scenes: str, tmp_path: Path, command: Any
) -> None:
    options = [*recipe("demo", scenes), "--prompts", "3", "--out", str(tmp_path / "try")]
    status, out, err = command("try", *options)
    assert status == 0 and "would learn nothing" not in err, out + err
    assert (
        "3 prompts x 8" in out and "update " in out and "(measured: " in out and "150 steps" in out
    )
    assert len(read_jsonl(tmp_path / "try" / "rollouts" / "step_000001.jsonl")) == 24
    status, *_ = command("try", *options)
    assert (
        status == 0 and len(read_jsonl(tmp_path / "try" / "rollouts" / "step_000001.jsonl")) == 24
    ), "a second trial replaces it"


def test_a_dead_run_ends_with_an_alarm_a_report_and_an_error(
    scenes: str, tmp_path: Path, command: Any
) -> None:
    status, _, err = command(
        "train",
        *recipe(
            "grounding",
            scenes,
            "rollout.max_new_tokens=24",
            "train.prompts_per_step=2",
            "rollout.group_size=2",
            "algorithm.max_rounds=1",
            "data.eval=[]",
            "alarms.steps=2",
            "alarms.untrained_steps=4",
            f"dir={tmp_path}",
            "name=dead",
        ),
    )
    assert status == 2 and "stopped at step 4 by alarm 'never_trained'" in err
    assert [(a["step"], a["name"]) for a in read_jsonl(tmp_path / "dead" / "alarms.jsonl")] == [
        (2, "parse_rate"),
        (2, "truncated"),
        (2, "no_signal"),
        (4, "never_trained"),
    ]
    assert (
        "Nothing was trained in any of the 4 steps"
        in (tmp_path / "dead" / "report.html").read_text()
    )
    assert (
        "step 1/500" in err
        and json.loads((tmp_path / "dead" / "run.json").read_text())["status"] == "failed"
    )


def album(tmp_path: Path, **sections: Any) -> Any:
    data = album_data(tmp_path / "data", [[picture((56, 56), i)] * (i % 2) for i in range(6)])
    sections = {
        "train": {"steps": 9, "prompts_per_step": 4},
        "data": {"train": [{"task": ALBUM, "path": data, "params": sections.pop("params", {})}]},
        **sections,
    }
    return lambda *overrides: load_config(
        config_file(tmp_path / "run.yaml", small_run(tmp_path / "runs", data, **sections)),
        list(overrides),
    )


def test_a_trial_is_the_first_step_of_the_run_itself(tmp_path: Path) -> None:
    load = album(tmp_path)
    run = load()
    trial = try_out(
        Trainer(load(*trial_overrides(run, 4, 3, tmp_path / "try")), overwrite=True), run
    )
    Trainer(load("algorithm.max_rounds=1", "train.steps=9", "alarms.stop=[]", "eval.every=0")).fit()
    first = read_jsonl(tmp_path / "runs" / "run" / "metrics.jsonl")[0]
    names = [n for n in first if n.startswith("train/")]
    assert len(names) > 30 and {n: trial.row[n] for n in names} == {n: first[n] for n in names}
    assert sum(trial.histogram.values()) == 4 and trial.signal is not None and trial.dead == []
    with pytest.raises(ConfigError, match="found a run in"):
        trial_overrides(run, 4, 3, tmp_path / "runs" / "run")


def test_rewards_that_fail_and_prompts_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    load = album(tmp_path, params={"raises": True})
    run = load()
    trial = try_out(
        Trainer(load(*trial_overrides(run, 2, 3, tmp_path / "try")), overwrite=True), run
    )
    [found] = trial.dead
    assert (
        found.name == "reward_failures"
        and "100% of the rewards" in found.message
        and trial.signal is None
    )


def test_the_groups_a_step_asks_for_are_those_that_dynamic_sampling_asks_for() -> None:
    rng = np.random.default_rng(0)
    for signal, rounds in ((0.3, 3), (0.0, 3), (1.0, 4), (0.8, 1)):
        sampler = DynamicSampler(SamplerSettings(quota=4000, max_attempts=rounds, carry_share=0.0))
        sampler.begin_step(1)
        drawn = iter(range(10**6))
        while tickets := sampler.request(lambda drawn=drawn: ("source", str(next(drawn)))):
            for ticket in tickets:
                sampler.submit(ticket.key, [0.0, float(rng.random() < signal)])
        assert sampler.end_step().counts["asked"] / 4000 == pytest.approx(
            rounds_per_place(signal, rounds), rel=0.05
        )


def test_expected_times_grow_with_the_answers_of_a_step(tmp_path: Path) -> None:
    load = album(tmp_path)
    run, small = (
        load("train.prompts_per_step=40"),
        load("train.prompts_per_step=4", "algorithm.max_rounds=1"),
    )
    row = {
        "time/rollout": 2.0,
        "time/reward": 1.0,
        "time/update": 4.0,
        "train/groups/asked": 4,
        "train/groups/kept": 4,
        "train/groups/failed": 0,
    }
    linear = expected_time(row, small, run, linear=True)
    assert (linear.rollout, linear.update) == ((30.0, 30.0), (40.0, 40.0)) and linear.run == (
        630.0,
        630.0,
    )
    assert expected_time(row, small, run, linear=False).rollout == (3.0, 30.0)
    slower = expected_time({**row, "time/environment": 5.0}, small, run, linear=True)
    assert slower.rollout == (80.0, 80.0)
    slower = expected_time({**row, "time/environment": 5.0}, small, run, linear=False)
    assert slower.rollout == (3.0 + 50.0, 30.0 + 50.0), "environments wait for no device"
    dead = expected_time({**row, "train/groups/kept": 0}, small, run, linear=True)
    assert dead.update is None and dead.rollout == (90.0, 90.0), (
        "every place is asked for three times"
    )


def test_robots_are_tried_too(tmp_path: Path) -> None:
    from mmrl.training.trainer import Trainer

    policy = saved_vla(tmp_path)
    run = config_of(policy, f"dir={tmp_path}", "schedule.kind=pipelined")
    small = config_of(policy, f"dir={tmp_path}", *trial_overrides(run, 2, 2, tmp_path / "try"))
    trial = try_out(Trainer(small, overwrite=True), run)
    assert trial.row["train/episodes"] >= 4 and trial.timing.run[1] > 0
    assert bool(trial.dead) == (trial.row["train/groups/trained"] == 0)
    assert len(read_jsonl(tmp_path / "try" / "rollouts" / "step_000001.jsonl")) >= 2


def test_what_native_would_have_read_is_told(tmp_path: Path) -> None:
    """Levels by the run's own task: read as it is, in a dialect, not at all."""
    from mmrl.data.sources import LoadedSource
    from mmrl.diagnostics.trial import _levels
    from mmrl.registry import task_from_spec
    from mmrl.types import Sample

    task = task_from_spec("numeric", {"answer_format": "bare"})
    sample = Sample("1", "numeric", "s", "q", 5, ("a.png",))
    source = LoadedSource.__new__(LoadedSource)
    object.__setattr__(source, "samples", [sample])
    object.__setattr__(source, "task", task)
    rows = [
        {
            "sample": dataclasses.asdict(sample),
            "text": text,
            "step": 1,
            "total_steps": 1,
            "image_sizes": [],
            "frame": "rel1000",
            "stop": "eos",
            "num_tokens": 3,
            "max_tokens": 9,
            "score": {"parsed": text == "5"},
        }
        for text in ("5", "5 apples", "5 or 6")
    ]
    assert dict(_levels(rows, [source])) == {"read": 1, "native": 1, "unread": 1}
