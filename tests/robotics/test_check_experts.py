"""scripts/check_experts.py: real episodes of the scripted experts, recorded task by task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.errors import ConfigError
from mmrl.evaluation.suite_book import load_suites
from mmrl.robotics.contract import EnvSpec, initial_states, make_simulator
from scripts import _bench, check_experts, update_readme


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # both places: these runs are of fewer episodes than a record, and each goes on from what the one before it wrote
    for place in ("RESULTS", "UNRECORDED"):
        monkeypatch.setattr(_bench, place, tmp_path / "assets" / "results")
    monkeypatch.setattr(update_readme, "ROOT", tmp_path)


def recorded(suite: str) -> dict[str, Any]:
    return json.loads((_bench.RESULTS / f"experts_{suite}.json").read_text(encoding="utf-8"))


def by_hand(task: str, horizon: int, episodes: int) -> list[tuple[bool, int]]:
    """Solved, and control steps, of the tiny simulator's expert in this process."""
    found = []
    for state in initial_states("eval", episodes):
        simulator = make_simulator(EnvSpec("tiny", task, horizon))
        simulator.reset(state)
        act = simulator.expert(np.random.default_rng(0))
        results = []
        while not results or not (results[-1].terminated or results[-1].truncated):
            results.append(simulator.step(act()[0]))
        found.append((any(r.success for r in results), len(results)))
    return found


@pytest.mark.slow
def test_counts_are_those_of_episodes_played_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_experts.main(["tiny", "--episodes", "3", "--workers", "1"]) == 0
    found = recorded("tiny")
    assert [row["task"] for row in found["tasks"]] == ["push", "reach", "pick"] and found[
        "missing"
    ] == []
    for row in found["tasks"]:
        played = by_hand(row["task"], row["horizon"], 3)
        assert row["horizon"] == load_suites().suites[f"tiny_{row['task']}"].horizon
        assert (row["solved"], row["episodes"]) == (sum(solved for solved, _ in played), 3)
        assert row["steps"]["max"] == max(steps for _, steps in played) and row["unsolved"] == []
    said = capsys.readouterr().out
    assert "push: solved 3/3" in said and "tiny: solved 9/9 in 3 tasks" in said
    assert "| tiny push | 3/3 |" in update_readme.experts()


@pytest.mark.slow
def test_unsolved_episodes_are_named_and_filmed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import av

    clips = tmp_path / "clips"
    arguments = [
        "tiny",
        "--tasks",
        "pick",
        "--episodes",
        "2",
        "--workers",
        "1",
        "--noise",
        "30",
        "--clips",
        str(clips),
    ]
    assert check_experts.main(arguments) == 1
    (row,) = recorded("tiny")["tasks"]
    assert row["solved"] == 0 and row["steps"] is None and row["share"]["high"] < 1
    assert [one["state"] for one in row["unsolved"]] == ["eval-0", "eval-1"]
    assert {one["steps"] for one in row["unsolved"]} == {row["horizon"]}
    assert "unsolved: eval-0 within 40 steps" in capsys.readouterr().out
    assert sorted(path.name for path in clips.iterdir()) == ["pick_eval-0.mp4", "pick_eval-1.mp4"]
    with av.open(str(clips / "pick_eval-0.mp4")) as clip:
        pictures = [frame.to_ndarray(format="rgb24") for frame in clip.decode(video=0)]
    assert (
        len(pictures) == row["horizon"]
        and pictures[0].std() > 10
        and (pictures[0] != pictures[-1]).any()
    )
    assert "| tiny pick | 0/2 | - |" in update_readme.experts()


@pytest.mark.slow
def test_tasks_done_survive_an_interrupt_and_missing_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, done = check_experts._row, []

    def interrupted(*arguments: Any) -> dict[str, Any]:
        if done:
            raise KeyboardInterrupt
        done.append(1)
        return real(*arguments)

    monkeypatch.setattr(check_experts, "_row", interrupted)
    assert check_experts.main(["tiny", "--episodes", "1", "--workers", "1"]) == 130
    assert [row["task"] for row in recorded("tiny")["tasks"]] == ["push"] and recorded("tiny")[
        "missing"
    ] == ["reach", "pick"]
    monkeypatch.setattr(check_experts, "_row", real)
    first = recorded("tiny")["tasks"][0]
    assert check_experts.main(["tiny", "--episodes", "1", "--workers", "1", "--missing"]) == 0
    assert [row["task"] for row in recorded("tiny")["tasks"]] == [
        "push",
        "reach",
        "pick",
    ] and recorded("tiny")["tasks"][0] == first
    # a row that is kept keeps its own date and machine; one that has none, as in older records, gets its record's
    old = recorded("tiny") | {"date": "2001-02-03", "machine": {"cpu": "an older one"}}
    del old["tasks"][0]["date"], old["tasks"][0]["machine"]
    (_bench.RESULTS / "experts_tiny.json").write_text(json.dumps(old), encoding="utf-8")
    again = ["tiny", "--episodes", "1", "--workers", "1", "--tasks", "pick"]
    assert check_experts.main(again) == 0
    push, reach, pick = recorded("tiny")["tasks"]
    assert (push["date"], push["machine"]) == ("2001-02-03", {"cpu": "an older one"})
    assert recorded("tiny")["date"] == pick["date"] == reach["date"] == first["date"]
    assert pick["machine"]["cpu"] == reach["machine"]["cpu"] == _bench.machine()["cpu"]
    assert (
        check_experts.main(["tiny", "--episodes", "2", "--workers", "1", "--tasks", "reach"]) == 0
    )
    # rows of another setting do not mix
    assert [(r["task"], r["episodes"]) for r in recorded("tiny")["tasks"]] == [("reach", 2)]


@pytest.mark.slow
def test_fewer_episodes_than_a_record_go_on_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_bench, "UNRECORDED", tmp_path / "runs")
    few = ["tiny", "--episodes", "1", "--workers", "1"]
    assert check_experts.main([*few, "--tasks", "reach"]) == 0
    assert check_experts.main([*few, "--missing"]) == 0
    found = json.loads((tmp_path / "runs" / "experts_tiny.json").read_text(encoding="utf-8"))
    assert [row["task"] for row in found["tasks"]] == ["push", "reach", "pick"]
    assert not _bench.RESULTS.exists()


def test_a_task_without_an_expert_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"expected tasks among .* found 'libero_object/10'\. Did you mean 'libero_object/1'\?",
    ):
        check_experts.expert_specs("libero", ["libero_object/10"])
    assert check_experts.main(["tiny", "--tasks", "pusch"]) == 2
    assert "error: expected tasks among push, reach, pick, found 'pusch'" in capsys.readouterr().err
    assert (
        not _bench.RESULTS.exists() and "No number has been recorded yet" in update_readme.experts()
    )


@pytest.mark.slow
def test_maniskill_without_pictures() -> None:
    assert (
        check_experts.main(
            [
                "maniskill",
                "--tasks",
                "PushCube-v1,StackCube-v1",
                "--episodes",
                "2",
                "--workers",
                "1",
            ]
        )
        == 0
    )
    found = recorded("maniskill")
    assert [(r["task"], r["solved"], r["simulator"]["render"]) for r in found["tasks"]] == [
        ("PushCube-v1", 2, "none"),
        ("StackCube-v1", 2, "none"),
    ]
    assert all(
        r["states"] == f"held out: 2 of split eval, from seed {1 << 30}" for r in found["tasks"]
    )


@pytest.mark.slow
@pytest.mark.render("libOSMesa.so.8")
def test_libero_says_stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("libero", reason="needs LIBERO: see mmrl.robotics.libero_assets.INSTALL")
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))  # no official meshes there
    monkeypatch.delenv("MMRL_LIBERO_ASSETS", raising=False)
    assert (
        check_experts.main(
            ["libero", "--tasks", "libero_object/6", "--episodes", "2", "--workers", "1"]
        )
        == 0
    )
    found = recorded("libero")
    (row,) = found["tasks"]
    assert (row["solved"], row["horizon"], row["states"]) == (2, 280, "rows 40-41, held out")
    assert (
        found["assets"] == row["assets"] == "stand-ins" and row["simulator"]["assets"] == "stand-in"
    )
    assert (
        "| libero_object, 1 tasks | 2/2 |" in update_readme.experts()
        and "| stand-ins |" in update_readme.experts()
    )
