"""`mmrl score` on logs that strangers wrote: every broken line is listed with its number and reason, the others are scored."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mmrl.cli.main import app
from mmrl.errors import ConfigError
from mmrl.evaluation.rescore import rescore, summary_rows, write_rescored

GOOD: dict[str, Any] = {
    "task_spec": "counting",
    "task_params": {},
    "text": "<answer>3</answer>",
    "mode": "greedy",
    "frame": "abs_orig",
    "stop": "eos",
    "num_tokens": 3,
    "max_tokens": 9,
    "image_sizes": [{"orig_wh": [56, 56], "resized_wh": [56, 56]}],
    "sample": {
        "id": "1",
        "task": "counting",
        "source": "s",
        "question": "red circles",
        "answer": 3,
        "images": ["1.png"],
        "videos": [],
        "params": {},
    },
    "score": {
        "value": 1.0,
        "parsed": True,
        "reason": None,
        "parts": {},
        "weights": {},
        "metrics": {},
        "detail": {},
    },
}
WRONG = {
    "task_spec": [5, None, ["a"], {"a": 1}, "x" * 10**6, "mixed/\ud800", "evil.py:T"],
    "task_params": [
        5,
        [1],
        None,
        {"zzz": 1},
        {"weights": {"count": 1e308}},
        {"prompt": "x" * 10**6},
    ],
    "sample": [5, None, []],
    "score": [5, {}],
    "text": [5, None, ["a"]],
    "image_sizes": [
        5,
        [5],
        [{"orig_wh": "ab", "resized_wh": [1]}],
        [{"orig_wh": [1e999, 1], "resized_wh": [1, 1]}],
        [{"orig_wh": [0, 1], "resized_wh": [1, 1]}],
        [{"orig_wh": [10**400, 1], "resized_wh": [1, 1]}],
    ],
    "frame": ["x", []],
    "stop": ["x"],
    "num_tokens": ["x", None, 1.5],
    "max_tokens": [None],
    "video_sizes": [5, [{}], [5]],
    "step": [5, "x", float("nan")],
    "sample.id": [5, None],
    "sample.source": [5, None],
    "sample.question": [5],
    "sample.images": [5, [5]],
    "sample.videos": ["x"],
    "sample.params": [5],
    "score.value": ["x", float("nan"), 10**400],
    "score.parsed": [5],
    "score.reason": [5],
    "score.parts": [5, {"a": "x"}, {"a": float("inf")}],
    "score.weights": [[]],
    "score.metrics": [{"a": None}],
    "score.detail": [5],
}


def changed(key: str, value: Any) -> dict[str, Any]:
    row = copy.deepcopy(GOOD)
    *parents, leaf = key.split(".")
    node = row
    for part in parents:
        node = node[part]
    node[leaf] = value
    return row


def log(path: Path, *lines: Any) -> Path:
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    )
    return path


@pytest.mark.slow
def test_whatever_a_line_holds_only_that_line_is_broken(tmp_path: Path) -> None:
    rows = [changed(key, value) for key, values in WRONG.items() for value in values]
    raw = [
        b"[" * 10**6,
        b'{"a":' * 10**6,
        b"\xff\xfe\x00",
        b"9" * 10**5,
        b"null",
        b'{"text": "' + b"x" * (65 << 20),
    ]
    path = log(tmp_path / "log.jsonl", GOOD, *rows, GOOD, *raw)
    found = rescore(path)
    assert [r.line for r in found.rows] == [1, len(rows) + 2] and all(
        r.new.value == 1.0 for r in found.rows
    )
    assert [b.line for b in found.broken] == [
        *range(2, len(rows) + 2),
        *range(len(rows) + 3, len(rows) + 3 + len(raw)),
    ]
    assert all(b.reason for b in found.broken)
    summary_rows(found.rows)
    write_rescored(found, tmp_path / "out.jsonl")
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == len(rows) + len(raw) + 2
    result = CliRunner().invoke(app, ["score", str(path)])
    assert (
        result.exit_code == 0
        and f"{len(found.broken)} lines could not be scored" in result.output.replace("\n", " ")
    )


@pytest.mark.slow
def test_odd_values_that_a_reward_may_see_are_its_failures(tmp_path: Path) -> None:
    odd = [changed("sample.answer", value) for value in ("x", None, [[[]]], {"a": 1})]
    texts = [
        "<answer>\ud800</answer>",
        "\0" * 1000,
        "<answer>" * 100_000,
        "9" * 10**6,
        "{" * 10**6,
        "<think>" * 140_000,
        "\u0663" * 500_000,
    ]
    path = log(
        tmp_path / "log.jsonl",
        GOOD,
        *odd,
        *[changed("text", text) for text in texts],
        changed("sample.source", "\ud800"),
    )
    found = rescore(path)
    assert len(found.rows) == 13 and not found.broken
    assert all(r.new.value == 0 and r.new.reason for r in found.rows[1:12]), [
        r.new for r in found.rows[1:12]
    ]
    write_rescored(found, tmp_path / "out.jsonl")
    assert (
        json.loads((tmp_path / "out.jsonl").read_text().splitlines()[-1])["sample"]["source"]
        == "\ud800"
    )


def test_a_log_whose_tasks_are_all_wrong_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="zzz"):
        rescore(
            log(
                tmp_path / "log.jsonl",
                changed("task_params", {"zzz": 1}),
                changed("task_params", {"zzz": 2}),
            )
        )
    with pytest.raises(ConfigError, match="zzz"):
        rescore(log(tmp_path / "log.jsonl", GOOD), params={"zzz": 1})
