"""Replies in the place of a model's, through everything else that `mmrl eval --suite` does, and then `mmrl score`.

`evaluate_suite` reads a shipped suite's data from a folder as the release has it, scores the replies, sums them
up, runs the official scorers with their submission files, and gives the suite's line of the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from mmrl.coords import CoordFrame
from mmrl.data.sources import load_sources
from mmrl.evaluation.data_rows import DataRow, suite_row
from mmrl.evaluation.evaluate import evaluate
from mmrl.evaluation.official import run_benchmarks
from mmrl.evaluation.rescore import rescore
from mmrl.evaluation.result import write_evaluation
from mmrl.evaluation.settings import EvalSettings
from mmrl.evaluation.suite_book import load_suites
from mmrl.evaluation.suites import source_of
from mmrl.rollout import SamplingSettings
from mmrl.types import ImageSize, Sample, StopReason, Turn
from mmrl.workers.scorer import Scorer

__all__ = [
    "BOOK",
    "FIXTURES",
    "Golden",
    "Outcome",
    "Reply",
    "agree",
    "evaluate_suite",
    "golden",
    "put",
    "put_parquet",
    "put_picture",
    "told",
]

FIXTURES = Path(__file__).resolve().parents[2] / "assets" / "fixtures"
BOOK = load_suites(Path(__file__).resolve().parents[2] / "configs" / "suites.yaml")
Reply = Callable[[Sample], str]


@dataclass(frozen=True)
class Golden:
    """A fixture of scripts.record_suites: whole rows, their replies, what the program made of each, and its numbers."""

    rows: list[dict[str, Any]]
    replies: list[str]
    values: list[float]
    official: Mapping[str, Any]


def golden(name: str) -> Golden:
    """The fixture assets/fixtures/suites/<name>.json."""
    found = json.loads((FIXTURES / "suites" / f"{name}.json").read_text(encoding="utf-8"))
    cases = found["cases"]
    return Golden(
        [{**found["row"], **case["row"]} for case in cases],
        [case["reply"] for case in cases],
        [case["value"] for case in cases],
        found["official"],
    )


def told(found: Golden, ids: list[str]) -> Reply:
    """Sample -> the reply of its row."""
    replies = dict(zip(ids, found.replies, strict=True))
    return lambda sample: replies[sample.id]


def agree(found: Golden, ids: list[str], *mine: Mapping[str, float]) -> None:
    """Every reply has the value that the program gives it, in the one table of `mine` that has it."""
    known = {name: value for table in mine for name, value in table.items()}
    assert known.keys() == set(ids), "every row is a sample"
    assert {
        name: (reply, known[name], value)
        for name, reply, value in zip(ids, found.replies, found.values, strict=True)
        if known[name] != pytest.approx(value, abs=1e-6)
    } == {}


@dataclass(frozen=True)
class Outcome:
    """What an evaluation left: the suite's line, results.json, lines of predictions.jsonl, the folder with the submissions."""

    line: DataRow
    results: Mapping[str, Any]
    predictions: Sequence[Mapping[str, Any]]
    folder: Path

    def values(self, metric: str) -> dict[str, float]:
        """Sample id -> its value of a metric; 0 for what the answer's score lacks."""
        return {
            row["id"]: float(row["score"]["metrics"].get(metric, 0.0)) for row in self.predictions
        }


def _prompt(sample: Sample, task: Any) -> Any:
    """Stands for an encoded prompt: the sizes of the sample's pictures as they are."""
    size = (int(sample.params.get("width", 32)), int(sample.params.get("height", 32)))
    return SimpleNamespace(
        audios=(), sample=sample, images=(ImageSize(size, size),) * len(sample.images), videos=()
    )


class _Speaker:
    """Stands for the engine: says what `reply` gives, and why it stops."""

    def __init__(self, reply: Reply, stop: StopReason) -> None:
        self.reply, self.stop = reply, stop

    def generate(self, requests: Iterable[Any], settings: SamplingSettings) -> list[list[Turn]]:
        return [
            [Turn((1,), self.reply(r.prompt.sample), (0.0,), self.stop)] * r.count for r in requests
        ]


def evaluate_suite(
    name: str,
    root: Path,
    reply: Reply,
    out: Path,
    *,
    answers: str | None = None,
    frame: CoordFrame = CoordFrame.ABS_ORIG,
    stop: StopReason = StopReason.EOS,
) -> Outcome:
    """Evaluate the shipped suite `name` on the data below `root` as `mmrl eval --suite NAME --answers ANSWERS` does; every reply
    ended because of `stop`.

    Also scores predictions.jsonl again as `mmrl score` does, and fails where that gives another score.
    """
    suite, folder = BOOK.suites[name], out / name
    sources = load_sources([source_of(suite, root, None, None, answers)], where="--data-root")

    def encode(sample: Sample, task: Any) -> Any:
        return _prompt(sample, task)

    encode.ahead = None  # type: ignore[attr-defined]
    policy: Any = SimpleNamespace(
        encoder=encode, template=SimpleNamespace(name="told", frame=frame)
    )
    engine: Any = _Speaker(reply, stop)
    settings = EvalSettings(
        SamplingSettings(max_new_tokens=suite.settings.max_new_tokens or 64), 0, on_error="raise"
    )
    specs = [(s.config.task, dict(s.config.params)) for s in sources]
    with Scorer(specs, [s.task for s in sources], workers=0) as scorer:
        found = evaluate(policy, engine, scorer, sources, settings)
    run_benchmarks(found, sources, folder / "submissions")
    write_evaluation(found, folder)
    again = rescore(folder / "predictions.jsonl")
    assert not again.broken and [r.line for r in again.rows if r.changed] == [], (
        "mmrl score gives another score"
    )
    return Outcome(
        suite_row(name, suite, found.results, found.predictions, None, None, answers),
        found.results,
        found.predictions,
        folder,
    )


def put(path: Path, value: Any = b"") -> Path:
    """Write bytes, or a value as JSON (JSON Lines for .jsonl), and the folders above."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(value, bytes):
        path.write_bytes(value)
    else:
        lines = (
            "".join(json.dumps(row) + "\n" for row in value)
            if path.suffix == ".jsonl"
            else json.dumps(value)
        )
        path.write_text(lines, encoding="utf-8")
    return path


def put_picture(path: Path, size: tuple[int, int] = (40, 30)) -> Path:
    """Write a grey picture of width and height in pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (90, 120, 90)).save(path)
    return path


def put_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    return path
