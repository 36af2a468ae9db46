"""The offline pass-rate filter: averages of logged completions, bounds, missing records, and what is reported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mmrl.config import DataSource, PassRateConfig, load_config
from mmrl.data.pass_rates import filter_by_rate, read_pass_rates
from mmrl.data.sources import load_sources, skipped_report, write_skipped
from mmrl.errors import ConfigError, DataError
from mmrl.types import Sample
from tests.kits.engine_kit import REPO

MEDLEY = f"{REPO / 'tests' / 'kits' / 'medley_task.py'}:Medley"


def row(
    name: str,
    correct: float | None,
    mode: str | None = "sampled",
    source: str = "s",
    value: float = 0.25,
) -> dict[str, Any]:
    """A line of predictions.jsonl (or, without mode, of rollouts); `correct` None: the completion failed."""
    metrics = {} if correct is None else {"correct": correct}
    score = {
        "value": value,
        "parsed": correct is not None,
        "parts": {"accuracy": 0.5},
        "metrics": metrics,
    }
    if mode is None:
        return {"sample": {"id": name, "source": source}, "score": score}
    return {"id": name, "source": source, "mode": mode, "score": score}


def logged(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) + "\n", encoding="utf-8")
    return str(path)


def config(file: str, **options: Any) -> PassRateConfig:
    return PassRateConfig(file=file, **options)


def test_a_separator_of_unicode_ends_no_line(tmp_path: Path) -> None:
    """As pandas and json.dumps(ensure_ascii=False) write it; the name is a part of the line before it is read."""
    rows = [{**row("a\u2028b", 1.0), "text": "one\u2028two\x85three"}, row("c", 0.0)]
    file = tmp_path / "p.jsonl"
    text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
    file.write_text(text, encoding="utf-8")
    rates = read_pass_rates(config(str(file), metric="correct"))
    assert rates == {("s", "a\u2028b"): 1.0, ("s", "c"): 0.0}


def samples(*names: str, source: str = "s") -> list[Sample]:
    return [Sample(n, "t", source, "q", None) for n in names]


ROWS = [
    row("a", 1.0),
    row("a", 0.0),
    row("a", None),
    row("a", 1.0, "greedy"),
    row("b", 1.0),
    row("b", 1.0),
    row("c", 0.0),
    row("a", 0.0, source="other"),
]


def test_rates_are_means_over_a_sample_s_completions_and_failures_count(tmp_path: Path) -> None:
    file = logged(tmp_path / "p.jsonl", ROWS)
    assert read_pass_rates(config(file)) == {
        ("s", "a"): pytest.approx(1 / 3),
        ("s", "b"): 1.0,
        ("s", "c"): 0.0,
        ("other", "a"): 0.0,
    }
    assert read_pass_rates(config(file, mode="greedy")) == {("s", "a"): 1.0}
    assert read_pass_rates(config(file, mode="all"))["s", "a"] == 0.5
    assert read_pass_rates(config(file, metric="reward"))["s", "a"] == 0.25
    assert read_pass_rates(config(file, metric="parse_rate"))["s", "a"] == pytest.approx(2 / 3)
    assert read_pass_rates(config(file, metric="accuracy"))["s", "b"] == 0.5, "a reward part"


def test_rollouts_of_a_run_count_as_sampled(tmp_path: Path) -> None:
    file = logged(tmp_path / "r.jsonl", [row("a", 1.0, None), row("a", 0.0, None)])
    assert read_pass_rates(config(file)) == {("s", "a"): 0.5}


def test_bounds_are_inclusive_and_every_drop_has_its_reason(tmp_path: Path) -> None:
    c = config("p", min=0.1, max=0.9)
    rates = {
        ("s", n): r
        for n, r in (("low", 0.0), ("edge", 0.1), ("mid", 0.5), ("top", 0.9), ("high", 1.0))
    }
    kept, dropped = filter_by_rate(samples("high", "edge", "mid", "low", "top"), rates, c)
    assert [s.id for s in kept] == ["edge", "mid", "top"], "in the order of the data"
    assert dropped == {"pass_rate_low": 1, "pass_rate_high": 1}


def test_samples_without_a_record_are_an_error_kept_or_dropped() -> None:
    rates, asked = {("s", "a"): 0.5}, samples("a", "b", "c")
    with pytest.raises(
        DataError, match=r"found none of 2 of 3 samples, first 'b' of source 's'.*keep or drop"
    ):
        filter_by_rate(asked, rates, config("p"))
    assert len(filter_by_rate(asked, rates, config("p", missing="keep"))[0]) == 3
    kept, dropped = filter_by_rate(asked, rates, config("p", missing="drop"))
    assert [s.id for s in kept] == ["a"] and dropped == {"pass_rate_missing": 2}
    with pytest.raises(DataError):
        filter_by_rate(samples("a", source="elsewhere"), rates, config("p"))


def test_files_that_tell_nothing_are_named(tmp_path: Path) -> None:
    file = logged(tmp_path / "p.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"p\.jsonl: .*'corect'.*Did you mean 'correct'"):
        read_pass_rates(config(file, metric="corect"))
    with pytest.raises(ConfigError, match=r"mode 'greedy'.*found 1 sampled"):
        read_pass_rates(config(logged(tmp_path / "s.jsonl", [row("a", 1.0)]), mode="greedy"))
    with pytest.raises(DataError, match=r"data\.train\[\]\.pass_rate\.file"):
        read_pass_rates(config(str(tmp_path / "none.jsonl")))
    for broken in (
        '{"id": "a"}',
        "no json",
        "[1]",
        '{"id": "a", "source": "s", "score": {"value": "x"}}',
        '[{"id": "a"}]',
    ):
        (tmp_path / "b.jsonl").write_text(
            json.dumps(row("a", 1.0)) + "\n" + broken + "\n", encoding="utf-8"
        )
        with pytest.raises(DataError, match=r"b\.jsonl:2: expected .*logged completion"):
            read_pass_rates(config(str(tmp_path / "b.jsonl")))
    for value in (math.nan, math.inf, "1"):
        file = logged(tmp_path / "n.jsonl", [row("a", 1.0), row("b", value)])  # type: ignore[arg-type]
        with pytest.raises(DataError, match=r"n\.jsonl:2: expected a finite number for 'correct'"):
            read_pass_rates(config(file, metric="correct"))
    with pytest.raises(ConfigError, match=r"pass_rate\.min \(0\.9\) cannot exceed"):
        load_config(
            None, ["data.train=[{task: t, path: p, pass_rate: {file: f, min: 0.9, max: 0.1}}]"]
        )


def test_sources_are_filtered_on_load_and_the_run_folder_tells(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(
            json.dumps({"id": f"{i}", "question": "q", "source": "s" if i % 2 else "t"}) + "\n"
            for i in range(8)
        ),
        encoding="utf-8",
    )
    file = logged(
        tmp_path / "p.jsonl", [row(f"{i}", i / 8, source="s" if i % 2 else "t") for i in range(8)]
    )
    entry = DataSource(
        task=MEDLEY,
        path=str(data),
        params={"skip": 2},
        limit=2,
        pass_rate=PassRateConfig(file=file, min=0.3, max=0.8),
    )
    [loaded] = load_sources([entry])
    assert [s.id for s in loaded.samples] == ["3", "4"], "limit counts what passed"
    assert loaded.skipped == {"on_request": 2, "pass_rate_high": 1, "pass_rate_low": 1}
    assert loaded.pass_rates["s", "3"] == 3 / 8
    assert write_skipped([loaded], tmp_path / "skipped.json") == loaded.skipped
    [told] = json.loads((tmp_path / "skipped.json").read_text())
    assert told == skipped_report([loaded])[0]
    assert told["kept"] == 2 and told["by_source"] == {"s": 1, "t": 1} and told["rejected"] == 0
    with pytest.raises(DataError, match=r"found none; left out: 2 on_request, 6 pass_rate_low"):
        load_sources(
            [entry.model_copy(update={"pass_rate": PassRateConfig(file=file, min=0.99, max=1.0)})]
        )
