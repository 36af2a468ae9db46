"""The demo of two turns: what is recorded keeps its claim, the claim can fail, and the first model answers in the task's form."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path

import pytest

from mmrl.config import ModelConfig, load_config
from mmrl.policy.loading import load_policy
from mmrl.registry import task_from_spec
from mmrl.rollout import PrefillOnceEngine, SamplingSettings
from mmrl.rollout.episodes import begin, check_environments, play
from mmrl.training.preflight import best_metric, measured_by
from scripts import _bench, bench_turns, demo_turns
from scripts._readme_turns import turns, turns_cost
from tests.kits.engine_kit import REPO
from tests.kits.prepared_kit import prepared_subprocess

RECORDS = REPO / "assets" / "results"


def test_the_record_keeps_its_claim_and_others_would_not() -> None:
    found = json.loads((RECORDS / "demo_turns.json").read_text(encoding="utf-8"))
    assert demo_turns.verdict(found) == [] and len(found["real"]["curve"]) == found["steps"] == len(
        found["shuffled"]["curve"]
    )
    swapped = {**found, "real": found["shuffled"], "shuffled": found["real"]}
    assert len(demo_turns.verdict(swapped)) == 2
    flat = copy.deepcopy(found)
    flat["real"]["after"] = flat["real"]["before"]
    assert [words for words in demo_turns.verdict(flat) if "rewards gained +0.000" in words]
    assert turns(found).count("\n") == 5 and "permuted within each group" in turns(found)


def test_the_command_of_the_example_is_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    import examples.zoom

    [line] = [x for x in str(examples.zoom.__doc__).splitlines() if "mmrl train" in x]
    program, verb, recipe, *overrides = shlex.split(line)
    assert (program, verb) == ("mmrl", "train") and all("=" in o for o in overrides)
    monkeypatch.chdir(REPO)
    config = load_config(REPO / "configs" / f"{recipe}.yaml", overrides)
    assert [(s.task, s.path) for s in config.data.train] == [("examples/zoom.py:Zoom", "ROWS")]
    assert config.data.eval == [] and config.model.path == "MODEL"
    zoom = task_from_spec(config.data.train[0].task, config.data.train[0].params)
    check_environments(config, [(zoom, {"zoom"})])
    best_metric(config.eval, measured_by([]))  # that of the recipe is of its own data


@pytest.mark.slow
def test_the_model_it_begins_with_answers_in_the_tasks_form(tmp_path: Path) -> None:
    from examples.zoom import make_rows

    rows = make_rows(tmp_path / "rows", 16, 0)
    model = demo_turns.warm_model(tmp_path / "model", rows, 0, steps=80)
    policy = load_policy(ModelConfig(path=str(model), device="cpu", system=""))
    task = task_from_spec(demo_turns.TASK)
    groups = [
        begin(policy, sample, task, 4, (1, number))
        for number, sample in enumerate(task.load(str(rows)))
    ]
    found = [
        r
        for group in play(
            policy, PrefillOnceEngine(policy), groups, SamplingSettings(max_new_tokens=5)
        )
        for r in group
    ]
    assert (
        all(r.error is None for r in found)
        and sum(len(r.turns) == 2 for r in found) > len(found) / 2
    )


@pytest.mark.slow
def test_the_benchmark_compares_the_same_log_probs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmrl.policy.tiny import TinySpec, build_tiny

    monkeypatch.setattr(_bench, "subprocess", prepared_subprocess())
    build_tiny(TinySpec(hidden=64, heads=2, kv=1, vision_hidden=32, vision_heads=2), tmp_path)
    row = bench_turns.measure(str(tmp_path), 3, True, False, 1)
    tokens = [row["tokens"][way] for way in bench_turns.WAYS]
    assert bench_turns.WAYS == ("packed", "rollouts", "turns", "rows") and tokens == sorted(tokens)
    assert len(set(tokens)) == 4 and all(mib > 0 for mib in row["peak_mib"].values())
    assert row["pictures"] == {
        "packed": 1 + 2 * 8,
        "rollouts": (1 + 2) * 8,
        "turns": 1 + (2 + 3) * 8,
        "rows": (1 + 2 + 3) * 8,
    }
    assert row["largest_difference"] < 1e-4
    grown = bench_turns.measure(str(tmp_path), 3, True, True, 1)
    assert (
        list(grown["tokens"])[:2] == ["packed", "branches"] and grown["largest_difference"] < 1e-4
    )
    assert grown["tokens"]["packed"] < grown["tokens"]["branches"] < grown["tokens"]["rollouts"]
    record = json.loads((RECORDS / "bench_turns.json").read_text(encoding="utf-8"))
    assert len(record["rows"]) == len(bench_turns.SETTINGS) and turns_cost(record).count(
        "\n"
    ) == 3 + len(record["rows"])
