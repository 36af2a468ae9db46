"""What the viewer answers about run folders: the numbers of their files, live, page by page.

pytest tests/viewer/test_viewer_api.py
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from starlette.responses import Response

from mmrl.report.load import load_run
from mmrl.viewer.asking import Missing, Query, json_answer, of_rows
from mmrl.viewer.between import config_table, flat_config
from mmrl.viewer.folders import Roots
from mmrl.viewer.media import MediaPolicy
from mmrl.viewer.workspace import Workspace
from tests.report.conftest import Plan, step_row
from tests.viewer.conftest import ROOT, Viewer, rows_of

pytestmark = pytest.mark.slow
View = Callable[..., Viewer]


def append(path: Path, *rows: object) -> None:
    """Lines at the end of a file, as a run writes them."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def test_the_server_is_loaded_in_a_second_and_without_torch() -> None:
    code = (
        "import time; began = time.process_time()\nimport mmrl.viewer.server, sys\n"
        "print(time.process_time() - began, [m for m in ('torch', 'transformers', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    seconds, _, heavy = done.stdout.partition(" ")
    assert heavy.strip() == "[]" and float(seconds) < 1.5


def test_the_table_says_of_each_run_what_its_files_say(view: View, runs: Path) -> None:
    found = {r["key"]: r for r in view(runs).get("/api/runs").json["runs"]}
    assert list(found) == ["first", "live", "sweep/second"]
    first = found["first"]
    last = json.loads((runs / "first/eval/step_000030/results.json").read_text())["sampled"]["iou"]
    assert first["headline"]["metric"] == "iou" and first["headline"]["mode"] == "sampled"
    assert first["headline"]["last"] == {k: last[k] for k in ("mean", "low", "high", "n")}
    assert (first["status"], first["step"], first["total"], first["task"]) == (
        "finished",
        30,
        30,
        "grounding",
    )
    assert found["live"]["status"] == "running" and found["live"]["step"] == 20


@pytest.mark.parametrize(
    ("said", "lock_age", "written_age", "status"),
    [
        ("finished", None, 0, "finished"),
        ("interrupted", None, 0, "stopped"),
        ("failed", None, 0, "failed"),
        ("running", 5, 9999, "running"),  # a long step: the lock is touched all the same
        ("running", 999, 0, "stale"),  # killed: nobody touches it any more
        ("running", None, 5, "running"),  # a copy of a run has no lock beside it
        ("running", None, 9999, "stale"),
        ("napping", None, 0, "unknown"),
    ],
)
def test_a_run_is_stale_when_nothing_is_alive(
    tmp_path: Path, said: str, lock_age: float | None, written_age: float, status: str
) -> None:
    import os

    from mmrl.viewer.glance import status_of

    run, now = tmp_path / "run", time.time()
    run.mkdir()
    for path, age in ((run / "run.json", written_age), (tmp_path / ".run.lock", lock_age)):
        if age is not None:
            path.write_text("{}")
            os.utime(path, (now - age, now - age))
    assert status_of(run, {"status": said}, now) == status


def test_metrics_are_those_of_the_file_and_grow_with_it(view: View, runs: Path) -> None:
    viewer, path = view(runs), runs / "live" / "metrics.jsonl"
    names = ["train/reward/mean", "train/kl", "train/never"]
    first = viewer.get("/api/metrics", run="live", names=names).json
    want = load_run(runs / "live")
    for name in names[:2]:
        assert list(zip(first["steps"], first["series"][name], strict=True)) == want.series(name)
    assert "train/never" not in first["series"] and first["next"] == 20

    row = step_row(Plan(), 21, __import__("random").Random(5))
    whole = json.dumps(row) + "\n"
    with path.open("a") as file:  # a line that is half written counts when it is whole
        file.write(whole[:50])
        file.flush()
        torn = viewer.get(
            "/api/metrics", run="live", names=names, **{"from": 20, "generation": 0}
        ).json
        assert torn["steps"] == [] and torn["next"] == 20
        file.write(whole[50:])
    more = viewer.get("/api/metrics", run="live", names=names, **{"from": 20, "generation": 0}).json
    assert more["steps"] == [21] and more["series"]["train/kl"] == [row["train/kl"]]

    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))  # resumed from step 5
    rewound = viewer.get(
        "/api/metrics", run="live", names=names, **{"from": 21, "generation": 0}
    ).json
    assert (
        rewound["generation"] == 1 and rewound["from"] == 0 and rewound["steps"] == [1, 2, 3, 4, 5]
    )


def test_a_long_run_is_thinned_and_keeps_its_spikes(view: View, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "long"
    run.mkdir(parents=True)
    spike = 54_321
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 100_001):
            file.write(
                f'{{"step": {step}, "train/loss": {100.0 if step == spike else step % 7}}}\n'
            )
    found = view(tmp_path / "runs").get("/api/metrics", run="long", names="train/loss").json
    assert found["next"] == 100_000 and 1000 < len(found["steps"]) <= 6001
    assert found["steps"] == sorted(found["steps"]) and found["steps"][-1] == 100_000
    assert dict(zip(found["steps"], found["series"]["train/loss"], strict=True))[spike] == 100.0


@pytest.mark.parametrize(
    ("wish", "keep"),
    [
        ({}, lambda r: True),
        ({"mode": "greedy"}, lambda r: r["mode"] == "greedy"),
        (
            {"source": ["screens", "refcoco-mini"], "step_min": 10, "step_max": 20},
            lambda r: 10 <= r["step"] <= 20,
        ),
        (
            {"reward_max": 0.4, "parsed": 1},
            lambda r: r["score"]["parsed"] and r["score"]["value"] <= 0.4,
        ),
        ({"parsed": 0}, lambda r: not r["score"]["parsed"]),
        (
            {"reason": "wrong_count"},
            lambda r: (r["score"]["reason"] or "").startswith("wrong_count"),
        ),
        ({"q": "The RED"}, lambda r: "the red" in (r["question"] + r["text"]).lower()),
        ({"q": "</think><answer>"}, lambda r: "</think><answer>" in r["text"]),
        ({"q": "grounding"}, lambda r: False),  # a task's name is no text of the row
        ({"source": "nowhere"}, lambda r: False),
    ],
)
def test_filters_choose_the_rows_that_a_plain_loop_chooses(
    standing: tuple[Viewer, Path], wish: dict, keep: Callable
) -> None:
    viewer, runs = standing
    wanted = [i for i, r in enumerate(rows_of(runs)) if keep(r)]
    found = viewer.get(
        "/api/samples", run="first", table="predictions", sort="file", order="up", limit=200, **wish
    ).json
    assert found["total"] == len(wanted) and [r["row"] for r in found["rows"]] == wanted[:200]
    lines = viewer.get(
        "/download/samples.jsonl", run="first", table="predictions", sort="file", order="up", **wish
    ).body
    rows = rows_of(runs)
    assert [json.loads(line) for line in lines.splitlines()] == [
        {k: v for k, v in rows[i].items() if k != "step"} for i in wanted
    ]


def test_pages_and_orders_cover_every_row_once(standing: tuple[Viewer, Path]) -> None:
    viewer, rows = standing[0], rows_of(standing[1])
    seen = []
    for page in range(0, len(rows) + 50, 50):
        found = viewer.get(
            "/api/samples", run="first", table="predictions", sort="reward", order="up", offset=page
        ).json
        seen += [r["row"] for r in found["rows"]]
    assert sorted(seen) == list(range(len(rows)))
    rewards = [rows[i]["score"]["value"] for i in seen]
    assert rewards == sorted(rewards)


def test_one_row_is_shown_whole_with_its_group_and_its_past(view: View, runs: Path) -> None:
    viewer = view(runs)
    found = viewer.get("/api/sample", run="first", table="rollouts", row=0).json
    first = json.loads((runs / "first/rollouts/step_000001.jsonl").read_text().splitlines()[0])
    assert (
        found["turn_texts"] == first["turns"] and found["question"] == first["sample"]["question"]
    )
    assert [m["row"] for m in found["group"]] == [0, 1] and found["score"] == first["score"]
    assert [p[0] for p in found["past"]] == [1, 2] and found["past"][1][2] == 20
    assert found["figure"].count("<image ") == 1 and 'class="gold"' in found["figure"]
    assert json.loads(found["raw"])["sample"] == first["sample"]
    full = viewer.get("/api/picture", run="first", table="rollouts", row=0, size="full")
    with Image.open(runs / "first" / first["sample"]["images"][0]) as original:
        shown = Image.open(io.BytesIO(full.body))
        assert full.headers["content-type"] == "image/png" and shown.tobytes() == original.tobytes()
    thumb = Image.open(
        io.BytesIO(viewer.get("/api/picture", run="first", table="rollouts", row=0).body)
    )
    assert max(thumb.size) <= 144


def test_rows_that_a_run_adds_are_found(view: View, runs: Path) -> None:
    viewer, folder = view(runs), runs / "first" / "rollouts"
    before = viewer.get("/api/samples", run="first", table="rollouts").json
    lines = (folder / "step_000001.jsonl").read_text().splitlines(keepends=True)
    (folder / "step_000003.jsonl").write_text("".join(lines[:4]))
    after = viewer.get("/api/samples", run="first", table="rollouts").json
    assert after["total"] == before["total"] + 4 and after["generation"] == before["generation"]
    assert [r["step"] for r in after["rows"][:4]] == [3] * 4
    (folder / "step_000003.jsonl").unlink()  # a resume rewinds
    rewound = viewer.get("/api/samples", run="first", table="rollouts").json
    assert rewound["total"] == before["total"] and rewound["generation"] > after["generation"]


def test_evaluations_of_checkpoints_are_a_table_of_their_own(view: View, runs: Path) -> None:
    """What `mmrl eval` writes beside the run: one evaluation, one repeated, and one with two suites."""
    own = rows_of(runs)
    viewer = view(runs)
    assert viewer.get("/api/run", run="first").json["samples"]["evaluations"] is False
    places = ("val@step_000030", "val@step_000030-2", "suites@step_000030/a", "not_of_a_step")
    for place in places:
        folder = runs / "first/eval" / place
        folder.mkdir(parents=True)
        append(folder / "predictions.jsonl", *own[:4])
    viewer = view(runs)
    ask = {"run": "first", "table": "evaluations", "limit": 200}
    found = viewer.get("/api/samples", **ask).json
    assert found["total"] == 12 and {r["step"] for r in found["rows"]} == {30}
    assert dict(found["facets"]["evaluation"]) == dict.fromkeys(places[:3], 4)
    one = viewer.get("/api/samples", **ask, evaluation="suites@step_000030/a").json
    assert [r["id"] for r in one["rows"]] == [r["id"] for r in own[:4]]
    # a repeated evaluation has groups of its own
    row = viewer.get("/api/sample", run="first", table="evaluations", row=0).json
    assert len(row["group"]) == sum(r["id"] == own[0]["id"] for r in own[:4])
    assert viewer.get("/api/run", run="first").json["samples"]["predictions"] is True
    assert viewer.get("/api/samples", run="first", table="predictions").json["total"] == len(own)


def test_csv_holds_every_number_of_the_file(view: View, runs: Path) -> None:
    text = view(runs).get("/download/metrics.csv", run="first").body.decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    want = load_run(runs / "first")
    assert len(rows) == 30 and set(rows[0]) == {"step", *want.names()}
    for row, metrics in zip(rows, want.metrics, strict=True):
        for name, value in metrics.items():
            assert (float(row[name]) if row[name] else None) == value, name


def test_pairs_are_those_of_the_report(view: View, runs: Path) -> None:
    from mmrl.report.rows import gains

    old, new = load_run(runs / "sweep/second"), load_run(runs / "first")
    found = view(runs).get("/api/compare", run=["sweep/second", "first"]).json
    want = gains(old.evals[-1], new.evals[-1], ["iou", "reward"])
    for row in found["gains"]:
        if row["metric"] in ("iou", "reward"):
            gain = want[row["mode"], row["metric"]]
            assert row["gain"] == {
                "mean": gain.mean,
                "low": gain.low,
                "high": gain.high,
                "n": gain.n,
            }
    assert found["gains"][0]["metric"] == "iou" and found["gains"][0]["gain"]["mean"] > 0


def test_configurations_are_compared_key_by_key(view: View, runs: Path) -> None:
    found = {
        k["key"]: k for k in view(runs).get("/api/diff", run=["first", "sweep/second"]).json["keys"]
    }
    assert found["name"]["values"] == ["grounding-tiny", "second"] and found["name"]["differs"]
    assert found["optim.lr"]["values"] == [None, "1e-05"] and not found["model.path"]["differs"]


def test_keys_that_were_renamed_do_not_differ(runs: Path) -> None:
    """Runs of before and after the names of today differ in what they mean alone."""
    old, new = (
        flat_config(
            "rl: {kind: ppo, gamma: 0.9, reward: success}\nalgorithm: {aggregate: dr_grpo, clip_low: 0.1}\n"
        ),
        flat_config(
            "rl: {reward: success}\nalgorithm:\n  {advantage: gae, advantage_scale: batch, dynamic_sampling: false,\n"
            "   critic: {gamma: 0.9}, loss_aggregation: dr_grpo, clip_low: 0.2}\n"
        ),
    )
    assert {k for k in {*old, *new} if old.get(k) != new.get(k)} == {"algorithm.clip_low"}
    for name, text in (("first", "aggregate"), ("sweep/second", "loss_aggregation")):
        (runs / name / "config.yaml").write_text(f"algorithm: {{{text}: dr_grpo}}\n")
    table = config_table([load_run(runs / "first"), load_run(runs / "sweep/second")])
    assert [(k["key"], k["differs"]) for k in table] == [("algorithm.loss_aggregation", False)]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("algorithm: 5\nrl: {gamma: 0.9}\n", {"algorithm": "5", "rl.gamma": "0.9"}),
        ("algorithm: {aggregate: a, loss_aggregation: b}\n", {"algorithm.aggregate": "a"}),
        ("rl: {filter_low: .inf, gamma: 1}\nrl.gamma.x: 2\n", {"rl.gamma.x": "2"}),
        (
            "rl: {filter_low: 0.1234567890123}\nrollout: {group_size: 10000000000000}\n",
            {"algorithm.filter.low": "0.1234567890123"},
        ),
    ],
)
def test_configurations_that_cannot_be_renamed_are_shown_as_written(
    text: str, kept: dict[str, str]
) -> None:
    began = time.monotonic()
    assert kept.items() <= flat_config(text).items()
    assert time.monotonic() - began < 5


def test_rows_of_a_file_that_was_cut_are_gone(runs: Path) -> None:
    """Row numbers that were taken before the table was read anew: no lines, and a word instead of a fault."""
    workspace = Workspace(Roots([runs]), MediaPolicy())
    table = workspace.open("first").tables["rollouts"]
    while not table.update(1.0):
        pass
    last = len(table) - 1

    def cut() -> None:
        for path in (runs / "first/rollouts").glob("*.jsonl"):
            path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
        while not table.update(1.0):
            pass

    def asked(workspace: Workspace, query: Query) -> Response:
        cut()
        return json_answer(table.facts(last).step)

    with pytest.raises(Missing, match="replaced or cut"):
        of_rows(asked)(workspace, {"run": ["first"]})
    assert len(table) <= last
    assert table.lines([0, last])[1] == b"" and table.lines([0])[0]
    assert table.row(last) is None
    with pytest.raises(IndexError):  # nothing changed meanwhile: a fault is not taken for one
        of_rows(lambda w, q: json_answer(table.facts(last).step))(workspace, {"run": ["first"]})


def test_the_report_is_exported_and_the_folder_left_as_it_was(view: View, runs: Path) -> None:
    viewer = view(runs)
    before = {p: p.stat().st_mtime_ns for p in runs.rglob("*")}
    page = viewer.get("/download/report.html", run="first")
    both = viewer.get("/download/comparison.html", run=["first", "sweep/second"])
    viewer.get("/api/samples", run="first", table="rollouts", q="red")
    assert (
        page.status == both.status == 200
        and b"Held-out mIoU" in page.body
        and b"2 runs" in both.body
    )
    assert "attachment" in page.headers["content-disposition"]
    assert {p: p.stat().st_mtime_ns for p in runs.rglob("*")} == before
