"""`mmrl report` on run folders that strangers made: no bytes of other files in the page, and a page whatever the logs hold."""

from __future__ import annotations

import base64
import json
import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrl.report import build_report
from tests.report.test_report_embodied import make_run as robot_run

SECRET = "root:x:0:0:secret words of another file " * 9
ESTIMATE = {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 4}
ROW: dict[str, Any] = {
    "source": "s",
    "id": "1",
    "mode": "greedy",
    "question": "q",
    "text": "t",
    "images": ["x.png"],
    "videos": [],
    "stop": "eos",
    "sample": {"id": "1", "images": ["x.png"], "videos": [], "params": {}},
    "gold_boxes": [[1, 2, 3, 4]],
    "pred_boxes": [[1, 2, 3, 4]],
    "score": {"value": 0.5, "parsed": True, "reason": None, "parts": {}, "metrics": {}},
}
FILES: dict[str, list[Any]] = {
    "run.json": [
        {
            "name": "r",
            "status": "finished",
            "versions": {},
            "machine": {},
            "task": "counting",
            "model": "m",
            "total_steps": 2,
        }
    ],
    "metrics.jsonl": [
        {"step": step, "train/s/reward/mean": 0.5, "time/step": 1.0, "reward/mean": 0.4}
        for step in (1, 2)
    ],
    "alarms.jsonl": [{"step": 1, "kind": "x", "message": "y"}],
    "gallery.json": [{"prompts": [{"source": "s", "id": "1"}]}],
    **{
        f"eval/step_00000{step}/results.json": [
            {
                "step": step,
                "greedy": {"reward": ESTIMATE, "parse_rate": ESTIMATE},
                "sampled": {"reward": ESTIMATE},
                "per_source": {
                    "s": {"reward": ESTIMATE, "parse_rate": ESTIMATE, "headline": ESTIMATE}
                },
                "per_task": {"counting": {}},
                "headlines": {"per_source": {"s": "reward"}},
                "protocol": {"seed": 0},
            }
        ]
        for step in (0, 2)
    },
    **{
        f"eval/step_00000{step}/predictions.jsonl": [ROW, {**ROW, "mode": "sampled"}]
        for step in (0, 2)
    },
    "rollouts/step_000001.jsonl": [{**ROW, "step": 1, "key": 1, "advantage": 0.1}],
    "timeline/step_000001.json": [{"step": 1, "spans": [{"name": "x", "start": 0, "end": 1}]}],
}
JUNK: list[Any] = [
    None,
    True,
    0,
    -1,
    10**400,
    1e308,
    math.nan,
    math.inf,
    "",
    "x" * 1000,
    "\ud800",
    "</script><script>alert(1)</script>",
    "../../etc/passwd",
    "\0",
    [],
    [[]],
    [None] * 3,
    {},
    {"a": {"b": [1]}},
    {"mean": "x"},
    [1e308, -1e308, math.nan],
]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    for key in (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        yield from places(value[key], (*at, key))


def put(value: Any, at: tuple[Any, ...], junk: Any) -> Any:
    if not at:
        return junk
    node = value
    for key in at[:-1]:
        node = node[key]
    node[at[-1]] = junk
    return value


@pytest.mark.parametrize("seed", range(3))
def test_a_page_is_written_whatever_the_logs_hold(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    for number in range(25):
        run = tmp_path / str(number)
        files = json.loads(json.dumps(FILES))
        for _ in range(rng.choice([1, 1, 2, 4])):
            name = rng.choice(list(files))
            line = rng.randrange(len(files[name]))
            files[name][line] = put(
                files[name][line], rng.choice(list(places(files[name][line]))), rng.choice(JUNK)
            )
        for name, rows in files.items():
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_text(
                "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
            )
        page = build_report(run).read_text(encoding="utf-8")
        assert "</script><script>alert" not in page
        shutil.rmtree(run)


@pytest.mark.parametrize(
    "known",
    [
        (10**400, "metrics.jsonl", "step"),
        ([[]], "gallery.json", None),
        ("x" * 1000, "images", None),
    ],
)
def test_what_broke_it_once(known: tuple[Any, str, str | None], tmp_path: Path) -> None:
    junk, name, key = known
    files = json.loads(json.dumps(FILES))
    if name == "images":
        for row in [
            r for n, rows in files.items() if n.endswith("predictions.jsonl") for r in rows
        ]:
            row["images"] = [junk]
    elif key is None:
        files[name] = [junk]
    else:
        files[name][0][key] = junk
    for file, rows in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    assert build_report(tmp_path).is_file()


@pytest.mark.parametrize(
    "kind", ["link", "bytes", "link to a folder", "link to a clip", "long name"]
)
def test_only_clips_of_the_run_are_embedded(kind: str, tmp_path: Path) -> None:
    """The page holds the bytes of clips: a link, or a clip that is none, would carry another file to whoever gets the page."""
    run = robot_run(tmp_path / "run")
    (tmp_path / "secret.txt").write_text(SECRET, encoding="utf-8")
    clips = sorted(run.glob("eval/*/videos/*.mp4"))
    private = clips[0].read_bytes() + SECRET.encode()
    (tmp_path / "private.mp4").write_bytes(private)
    for clip in clips:
        clip.unlink()
        if kind == "bytes":
            clip.write_text(SECRET, encoding="utf-8")
        elif kind.startswith("link"):
            clip.symlink_to(
                tmp_path
                / {"link": "secret.txt", "link to a folder": ".", "link to a clip": "private.mp4"}[
                    kind
                ]
            )
    if kind == "long name":
        for file in run.glob("eval/*/predictions.jsonl"):
            file.write_text(file.read_text().replace("_eval-0.mp4", "x" * 3000), encoding="utf-8")
    page = build_report(run).read_text(encoding="utf-8")
    assert (
        base64.b64encode(SECRET.encode()).decode()[:60] not in page and "secret words" not in page
    )
    assert base64.b64encode(private).decode()[:200] not in page
    assert "not a clip in the folder of the run" in page or "the clip is missing" in page


def test_a_picture_that_is_none_is_not_embedded(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text(SECRET, encoding="utf-8")
    for file, rows in json.loads(
        json.dumps(FILES).replace("x.png", str(tmp_path / "secret.txt"))
    ).items():
        (tmp_path / "run" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / file).write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    page = build_report(tmp_path / "run").read_text(encoding="utf-8")
    assert (
        base64.b64encode(SECRET.encode()).decode()[:60] not in page and "secret words" not in page
    )
    assert "cannot be shown (unsupported): secret.txt" in page
