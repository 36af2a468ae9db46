"""The timeline: its sums agree with counting by hand, it stays bounded, its trace is valid JSON, processes share its clock.

pytest tests/diagnostics/test_timeline.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrl.diagnostics.timeline import Span, Timeline, merged
from mmrl.errors import ConfigError

SPANS = st.lists(
    st.tuples(
        st.sampled_from(["render", "infer", "train"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 100),
        st.integers(0, 30),
    ),
    max_size=30,
)


@given(SPANS, st.integers(0, 60), st.integers(1, 50))
def test_busy_bubble_and_bound_agree_with_counting_seconds(
    rows: list[tuple[str, str, int, int]], begin: int, wall: int
) -> None:
    timeline = Timeline({"render": 2, "infer": 1, "train": 1})
    timeline.begin_step(1, begin)
    timeline.extend(Span(stage, f"{stage} {lane}", a, a + n) for stage, lane, a, n in rows)
    timeline.end_step(1, begin + wall)
    found = timeline.summary(1)
    # each stage has workers of its own
    rows = [(stage, f"{stage} {lane}", a, n) for stage, lane, a, n in rows]
    seconds = {}
    for stage, workers in (("render", 2), ("infer", 1), ("train", 1)):
        busy = sum(
            any(
                s == stage and name == f"{stage} {lane}" and a <= t < a + n
                for s, name, a, n in rows
            )
            for t in range(begin, begin + wall)
            for lane in "ab"
        )
        row = found["stages"][stage]
        assert row["busy_s"] == pytest.approx(busy) and row["workers"] == workers
        assert row["bubble"] == pytest.approx(max(0.0, 1 - busy / (wall * workers)))
        seconds[stage] = busy / workers
    whole = sum(seconds.values())
    if whole:
        assert found["bound"] == pytest.approx(max(seconds.values()) / whole) and found[
            "ratio"
        ] == pytest.approx(wall / whole)
    else:
        assert found["bound"] is None and found["ratio"] is None


def test_stages_of_the_same_workers_are_idle_together_and_cannot_overlap() -> None:
    timeline = Timeline({"render": 2, "train": 1})
    timeline.begin_step(1, 0)
    for lane in ("worker 0", "worker 1"):
        timeline.add("reset", lane, 0, 2)
        timeline.add("render", lane, 2, 8)
    timeline.add("train", "train", 5, 9)
    timeline.end_step(1, 10)
    found = timeline.summary(1)
    assert {
        k: (v["busy_s"], v["workers"], round(v["bubble"], 9), sorted(v["team"]))
        for k, v in found["stages"].items()
    } == {
        "render": (12, 2, 0.2, ["render", "reset"]),
        "reset": (4, 2, 0.2, ["render", "reset"]),
        "train": (4, 1, 0.6, ["train"]),
    }
    assert found["bound"] == pytest.approx(8 / 12) and found["ratio"] == pytest.approx(10 / 12)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=20))
def test_merged_covers_the_same_points_without_overlap(rows: list[tuple[int, int]]) -> None:
    out = merged((a, a + n) for a, n in rows)
    assert all(x[1] < y[0] for x, y in pairwise(out))
    for t in range(70):
        assert any(a <= t < a + n for a, n in rows) == any(a <= t < b for a, b in out)


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 9)),
        min_size=1,
        max_size=20,
        unique_by=lambda p: p[0],
    )
)
def test_queue_depth_is_the_mean_over_time(points: list[tuple[int, int]]) -> None:
    timeline = Timeline()
    timeline.begin_step(7, 0)
    for at, value in points:  # in any order: threads report late
        timeline.count("queue", value, at)
    timeline.end_step(7, 60)
    known = dict(points)
    depth, seen = None, []
    for t in range(60):
        depth = known.get(t, depth)
        seen.append(depth)
    found = timeline.summary(7)["queues"].get("queue")
    inside = [v for v in seen if v is not None]
    if inside:
        assert found is not None
        assert found["mean"] == pytest.approx(sum(inside) / 60) and found["max"] == max(inside)
    else:
        assert found is None


def test_only_the_last_steps_are_held_with_the_queue_as_they_found_it() -> None:
    timeline = Timeline(keep=2)
    timeline.count("queue", 5, -1.0)
    for step in range(10):
        timeline.begin_step(step, 10.0 * step)
        timeline.add("train", "t", 10.0 * step + 1, 10.0 * step + 3)
        timeline.end_step(step, 10.0 * step + 10)
    assert timeline.steps == (8, 9) and timeline.summary(9)["stages"]["train"][
        "busy_s"
    ] == pytest.approx(2)
    assert len(timeline._spans) == 2 and timeline.summary(8)["queues"]["queue"] == {
        "mean": 5.0,
        "max": 5.0,
    }
    with pytest.raises(ConfigError, match=r"expected one of the steps held \(8, 9\), found 3"):
        timeline.summary(3)


def test_a_step_without_end_stays_bounded() -> None:
    timeline = Timeline(limit=100)
    timeline.begin_step(0, 0.0)
    for number in range(1000):
        timeline.add("train", "t", number, number + 0.5)
        timeline.count("queue", number, number)
    assert (
        timeline.dropped == 900
        and len(timeline._spans) == 100
        and len(timeline._counters["queue"]) == 100
    )


def test_threads_lose_no_span_and_a_failing_block_is_recorded() -> None:
    timeline = Timeline(keep=1)
    timeline.begin_step(1)

    def work(number: int) -> None:
        for _ in range(200):
            with timeline.span("train", f"thread {number}"):
                pass

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(ZeroDivisionError), timeline.span("infer", "me", group=1):
        time.sleep(0.001)
        raise ZeroDivisionError
    assert len(timeline._spans) == 801 and timeline.summary(1)["stages"]["infer"]["busy_s"] >= 0.001


def test_another_process_has_the_same_clock() -> None:
    before = time.monotonic()
    told = subprocess.run(
        [sys.executable, "-S", "-c", "import time; print(time.monotonic())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert before < float(told.stdout) < time.monotonic()


def test_the_trace_is_valid_json_with_every_span_lane_and_counter(tmp_path: Path) -> None:
    timeline = Timeline()
    hostile = 'worker "0"\n</script>\u2028'
    timeline.begin_step(1, 100.0)
    timeline.add(
        "render", hostile, 100.5, 101.25, group=(1, 2, 0), loss=float("nan"), path=tmp_path, slot=3
    )
    timeline.add("train", "train", 101.0, 100.0)  # clocks that disagree: no negative length
    timeline.count("train queue", 2, 100.7)
    timeline.end_step(1, 102.0)
    timeline.begin_step(2, 102.0)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    events = json.loads(
        timeline.write_chrome_trace(tmp_path / "sub" / "trace.json").read_text("utf-8"),
        parse_constant=refuse,
    )["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X" and e["cat"] != "step"]
    assert [(e["name"], names[e["tid"]], e["dur"]) for e in spans] == [
        ("render", hostile, 750000.0),
        ("train", "train", 0.0),
    ]
    assert spans[0]["args"] == {
        "group": "(1, 2, 0)",
        "loss": "nan",
        "path": str(tmp_path),
        "slot": 3,
    }
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"value": 2.0}]
    steps = [e for e in events if e.get("cat") == "step"]
    assert [e["name"] for e in steps] == ["step 1", "step 2"] and spans[0]["ts"] - steps[0][
        "ts"
    ] == pytest.approx(5e5)
    assert [p.name for p in (tmp_path / "sub").iterdir()] == ["trace.json"]


def test_the_file_of_a_step_is_small_and_keeps_the_exact_sums(tmp_path: Path) -> None:
    timeline = Timeline({"render": 1})
    timeline.begin_step(12, 0.0)
    timeline.extend(Span("render", "w", i / 200, i / 200 + 0.0025) for i in range(20_000))
    timeline.end_step(12, 100.0)
    path = timeline.write_step(tmp_path, 12)
    data = json.loads(path.read_text("utf-8"))
    assert path.name == "step_000012.json" and path.stat().st_size < 60_000
    assert data["stages"]["render"]["busy_s"] == pytest.approx(50.0) and data["stages"]["render"][
        "bubble"
    ] == pytest.approx(0.5)
    assert timeline.metrics(12)["schedule/bubble/render"] == pytest.approx(0.5)
    assert data["spans"][0][:3] == ["render", "w", 0.0] and data["spans"][-1][3] <= 100_000


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"limit": 0}, {"workers": {"train": 0}}])
def test_wrong_sizes_are_refused(wrong: dict) -> None:
    with pytest.raises(
        ConfigError, match="at least one step and span to keep and one worker per stage"
    ):
        Timeline(**wrong)
