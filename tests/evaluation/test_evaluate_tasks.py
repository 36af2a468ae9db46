"""One evaluation over several sources and tasks: whose rows a metric is averaged over, the macro mean, official scorers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from mmrl.config import DataSource
from mmrl.data.sources import LoadedSource
from mmrl.evaluation.evaluate import evaluate
from mmrl.evaluation.official import run_benchmarks
from mmrl.evaluation.rescore import rescore
from mmrl.evaluation.result import Evaluation, write_evaluation
from mmrl.evaluation.settings import EvalSettings
from mmrl.evaluation.stats import Estimate, describe, macro_estimate
from mmrl.rollout import PrefillOnceEngine, SamplingSettings
from mmrl.task import Task
from mmrl.types import RewardContext, Sample, Score
from mmrl.workers.scorer import Scorer
from tests.kits.engine_kit import Album, picture, policy
from tests.kits.medley_task import Medley


class Letters(Album):
    """Every third answer fails without any metric, as an unparsable text of a task that names no metrics there."""

    name, headline, metric_names = "letters", "share", ("share", "never")

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        if int(sample.id[-1]) % 3 == 0:
            return Score.failure("no_answer", self.part_names)
        share = zlib.crc32(f"{sample.id} {text}".encode()) / 2**32
        return Score.combine(
            {"accuracy": share}, {"accuracy": 1.0}, parsed=True, metrics={"share": share}
        )

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        return {"rows": float(len(rows))}

    def benchmark(self, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> Mapping[str, float]:
        (folder / "results.json").write_text(
            json.dumps([[s.id, x.value] for s, x in pairs]), encoding="utf-8"
        )
        return {"AP": math.fsum(x.value for _, x in pairs) / len(pairs)}


class Lengths(Letters):
    """Measures something else, and its official scorer is broken."""

    name, headline, metric_names = "lengths", "long", ()

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        long = min(1.0, len(text) / 40)
        return Score.combine(
            {"accuracy": long}, {"accuracy": 1.0}, parsed=True, metrics={"long": long}
        )

    def benchmark(self, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> Mapping[str, float]:
        raise RuntimeError("the official scorer wants 5000 pictures")


class Both(Album):
    """A mixed task: each sample is judged by the member of its task's name."""

    name: ClassVar[str] = "both"
    members: ClassVar[Mapping[str, Task]] = {"letters": Letters(), "lengths": Lengths()}

    def member(self, name: str) -> Task:
        return self.members[name]

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        return self.members[sample.task].score(sample, text, ctx)


def samples(task: str, source: str, count: int, pictures: Sequence[str] = ()) -> list[Sample]:
    return [
        Sample(
            f"{task}-{i}",
            task,
            source,
            f"Question {i}?",
            None,
            tuple(pictures) or (picture((56, 56), i),),
        )
        for i in range(count)
    ]


def loaded(task: Task, rows: Iterable[Sample]) -> LoadedSource:
    return LoadedSource(DataSource(task=task.name, path=f"{task.name}.jsonl"), task, tuple(rows))


def run(*sources: LoadedSource, k: int = 2, limit: int | None = None) -> Evaluation:
    model = policy()
    with Scorer([], [s.task for s in sources], workers=0) as scorer:
        return evaluate(
            model,
            PrefillOnceEngine(model),
            scorer,
            sources,
            EvalSettings(SamplingSettings(max_new_tokens=12), k, limit=limit),
        )


@pytest.fixture(scope="module")
def mixed() -> Evaluation:
    """A mixed source with two tasks and two source names, beside a plain source."""
    rows = [
        *samples("letters", "books", 5),
        *samples("lengths", "books", 3),
        *samples("lengths", "logs", 4),
    ]
    return run(loaded(Both(), rows), loaded(Letters(), samples("letters", "signs", 4)))


def values(found: Evaluation, mode: str, metric: str, **wanted: str) -> list[float]:
    """Of the rows whose fields are as wanted; a score without the metric is 0."""
    rows = [
        p
        for p in found.predictions
        if p["mode"] == mode and all(p[k] == v for k, v in wanted.items())
    ]
    return [p["score"]["metrics"].get(metric, 0.0) for p in rows]


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_a_metric_is_averaged_over_the_rows_whose_task_measures_it(
    mixed: Evaluation, mode: str
) -> None:
    share, long = (
        values(mixed, mode, "share", task="letters"),
        values(mixed, mode, "long", task="lengths"),
    )
    table = mixed.results[mode]
    assert 0.0 in share and max(share) > 0, "failures without metrics are in the mean"
    assert (
        table["share"]["mean"] == pytest.approx(sum(share) / len(share))
        and table["share"]["n"] == 9
    )
    assert table["long"]["mean"] == pytest.approx(sum(long) / len(long)) and table["long"]["n"] == 7
    assert table["reward"]["n"] == 16 and (table["never"]["mean"], table["never"]["n"]) == (0.0, 9)


def test_tables_per_source_and_per_task_agree_with_the_rows(mixed: Evaluation) -> None:
    results = mixed.results
    assert set(results["per_source"]) == {"books", "logs", "signs"} and set(
        results["per_task"]
    ) == {"letters", "lengths"}
    assert results["headlines"] == {
        "per_source": {"books": "long, share", "logs": "long", "signs": "share"},
        "per_task": {"letters": "share", "lengths": "long"},
    }
    books = values(mixed, "greedy", "share", task="letters", source="books")
    assert results["per_source"]["books"]["share"]["mean"] == pytest.approx(np.mean(books))
    assert (
        results["per_source"]["books"]["share"]["n"] == 5
        and results["per_source"]["books"]["long"]["n"] == 3
    )
    assert (
        "share" not in results["per_source"]["logs"]
        and "long" not in results["per_task"]["letters"]
    )
    both = books + values(mixed, "greedy", "long", task="lengths", source="books")
    assert results["per_source"]["books"]["headline"]["mean"] == pytest.approx(np.mean(both))
    assert (
        results["per_task"]["lengths"]["sampled/headline"]
        == results["per_task"]["lengths"]["sampled/long"]
    )
    for table, name in (("per_source", "logs"), ("per_task", "letters")):
        for estimate in results[table][name].values():
            assert estimate["low"] <= estimate["mean"] <= estimate["high"]


def test_macro_is_the_mean_over_sources_of_their_headlines(mixed: Evaluation) -> None:
    for mode, prefix in (("greedy", ""), ("sampled", "sampled/")):
        means = [row[f"{prefix}headline"]["mean"] for row in mixed.results["per_source"].values()]
        macro = mixed.results[mode]["macro"]
        assert (
            macro["mean"] == pytest.approx(sum(means) / 3)
            and macro["low"] < macro["mean"] < macro["high"]
        )
        assert mixed.metric(f"{mode}/macro") == macro["mean"]


@pytest.mark.parametrize("limit", [1, 3, 6, 100])
def test_a_metric_of_the_first_samples_is_that_of_an_evaluation_of_them(
    mixed: Evaluation, limit: int
) -> None:
    rows = [
        *samples("letters", "books", 5),
        *samples("lengths", "books", 3),
        *samples("lengths", "logs", 4),
    ]
    short = run(
        loaded(Both(), rows), loaded(Letters(), samples("letters", "signs", 4)), limit=limit
    )
    for name in (
        "greedy/macro",
        "sampled/macro",
        "greedy/share",
        "sampled/reward",
        "greedy/parse_rate",
        "sampled/long",
    ):
        assert mixed.metric(name, limit) == pytest.approx(short.metric(name), nan_ok=True), name
    assert mixed.metric("greedy/nothing", limit) is None and mixed.metric("macro") is None


def test_one_source_has_its_own_interval_as_macro() -> None:
    found = run(loaded(Letters(), samples("letters", "signs", 5)))
    assert found.results["greedy"]["macro"] == found.results["greedy"]["share"]


def test_no_readable_picture_still_gives_every_column_as_zero(tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n cut")
    rows = [
        *samples("letters", "books", 3, [str(broken)]),
        *samples("lengths", "books", 2, [str(broken)]),
    ]
    found = run(loaded(Both(), rows))
    for mode in ("greedy", "sampled"):
        table = found.results[mode]
        assert [table[k]["mean"] for k in ("share", "never", "long", "macro", "reward")] == [
            0.0
        ] * 5
        assert table["share"]["n"] == 3 and 0 < table["share"]["high"] < 1, (
            "three zeros are no certainty"
        )
        assert found.metric(f"{mode}/share", 2) == 0.0
        assert found.results["failures"][mode] == {
            "input_error": 5 * (1 if mode == "greedy" else 2)
        }
    told, _, why = found.unread.partition("; first: ")
    assert told == "5 of 5 held-out samples could not be read and count as 0"
    assert "broken.png" in why


def test_samples_that_could_not_be_read_are_told_of_with_the_number(tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"cut")
    lost = samples("letters", "books", 3, [str(broken)])
    found = run(loaded(Letters(), lost), loaded(Letters(), samples("letters", "signs", 5)))
    assert found.unread.startswith("3 of 8 held-out samples could not be read and count as 0;")
    assert run(loaded(Letters(), samples("letters", "signs", 2))).unread == ""


def test_summaries_of_a_mixed_source_are_per_task(mixed: Evaluation) -> None:
    assert mixed.results["summary"]["greedy"] == {
        "both.jsonl": {"letters/rows": 5.0, "lengths/rows": 7.0},
        "letters.jsonl": {"rows": 4.0},
    }


def test_what_readers_left_out_is_in_the_protocol() -> None:
    source = dataclasses.replace(
        loaded(Letters(), samples("letters", "signs", 2)), skipped={"wrong split": 12}
    )
    [entry] = run(source, k=0).results["protocol"]["data"]
    assert entry["skipped"] == {"wrong split": 12} and entry["samples"] == 2


def test_official_numbers_and_files_per_data_source_and_task(
    mixed: Evaluation, tmp_path: Path
) -> None:
    sources = [loaded(Both(), []), loaded(Letters(), [])]
    found = run_benchmarks(mixed, sources, tmp_path / "submissions")
    assert set(found) == {"books", "both", "signs"} and mixed.results["benchmark"] is found
    rewards = [
        p["score"]["value"]
        for p in mixed.predictions
        if p["mode"] == "greedy" and p["source"] == "signs"
    ]
    assert found["signs"] == {"AP": pytest.approx(np.mean(rewards))}
    assert found["both"] == {"error": "RuntimeError: the official scorer wants 5000 pictures"}
    written = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert written == ["submissions/books/results.json", "submissions/signs/results.json"]
    assert [i for i, _ in json.loads((tmp_path / written[1]).read_text())] == [
        f"letters-{i}" for i in range(4)
    ]
    write_evaluation(mixed, tmp_path / "eval")
    assert json.loads((tmp_path / "eval" / "results.json").read_text())["benchmark"]["both"][
        "error"
    ]


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (("Spot/web", "Spot/mobile"), {"Spot": 4}),
        (("Spot/a", "Spotted/a"), {"letters": 4}),
        (("Spot", "Spot/a"), {"Spot": 4}),
    ],
)
def test_the_parts_of_a_benchmark_are_scored_together(
    tmp_path: Path, sources: tuple[str, str], expected: dict
) -> None:
    rows = [s for part in sources for s in samples("letters", part, 2)]
    found = run(loaded(Letters(), rows), k=0)
    numbers = run_benchmarks(found, [loaded(Letters(), [])], tmp_path)
    assert list(numbers) == list(expected)
    assert {
        p.name: len(json.loads((p / "results.json").read_text())) for p in tmp_path.iterdir()
    } == expected


def test_entries_and_folders_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    parts = [loaded(Letters(), samples("letters", name, 2)) for name in ("a/b", "a_b", "a b")]
    found = run(*parts, k=0)
    assert len(run_benchmarks(found, parts, tmp_path)) == 3
    assert len(list(tmp_path.iterdir())) == 3


def test_a_benchmark_without_numbers_leaves_nothing_and_infinite_ones_are_an_error(
    tmp_path: Path,
) -> None:
    class Quiet(Letters):
        def benchmark(
            self, pairs: Sequence[tuple[Sample, Score]], folder: Path
        ) -> Mapping[str, float]:
            return {}

    class Infinite(Letters):
        def benchmark(
            self, pairs: Sequence[tuple[Sample, Score]], folder: Path
        ) -> Mapping[str, float]:
            return {"AP": math.nan, "AR": 0.5}

    found = run(loaded(Quiet(), samples("letters", "../up", 2)), k=0)
    assert "benchmark" not in found.results, "training evaluations never ask an official scorer"
    assert (
        run_benchmarks(found, [loaded(Quiet(), [])], tmp_path / "out") == {}
        and not (tmp_path / "out").exists()
    )
    numbers = run_benchmarks(found, [loaded(Infinite(), [])], tmp_path / "out")["../up"]
    assert numbers["AR"] == 0.5 and "finite" in numbers["error"] and "AP" not in numbers
    run_benchmarks(found, [loaded(Letters(), [])], tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["_up"], (
        "a source's name is no way out of the folder"
    )


def test_macro_intervals_agree_with_a_stratified_bootstrap() -> None:
    rng = np.random.default_rng(0)
    columns = [rng.beta(a, b, n) for a, b, n in ((2, 5, 80), (5, 2, 200), (1, 1, 50))]
    macro = macro_estimate([describe(list(c)) for c in columns])
    draws = np.mean([rng.choice(c, (4000, len(c))).mean(axis=1) for c in columns], axis=0)
    low, high = np.quantile(draws, [0.025, 0.975])
    assert macro.mean == pytest.approx(np.mean([c.mean() for c in columns])) and macro.n == 330
    assert (macro.low, macro.high) == (
        pytest.approx(low, abs=0.006),
        pytest.approx(high, abs=0.006),
    )


def test_macro_of_certain_and_single_units() -> None:
    zeros = describe([0.0] * 20)
    both = macro_estimate([zeros, zeros])
    assert both.mean == 0 == both.low and 0 < both.high < zeros.high, (
        "all zero is not certainly zero, and two say more"
    )
    assert macro_estimate([zeros]) == zeros
    assert math.isnan(macro_estimate([zeros, Estimate(1.0, math.nan, math.nan, 1)]).high)


def test_rows_name_their_headline_and_carry_what_scoring_again_needs(mixed: Evaluation) -> None:
    for j in itertools.islice(mixed.judged, 20):
        row, sample, score = j.row, j.sample, j.score
        assert row["headline"] == {"letters": "share", "lengths": "long"}[row["task"]]
        assert row["sample"] == dataclasses.asdict(sample) and row["score"] == dataclasses.asdict(
            score
        )
        assert not any(key.startswith("_") for key in row)


def test_the_same_evaluation_twice_is_the_same(mixed: Evaluation) -> None:
    again: Any = run(
        loaded(
            Both(),
            [
                *samples("letters", "books", 5),
                *samples("lengths", "books", 3),
                *samples("lengths", "logs", 4),
            ],
        ),
        loaded(Letters(), samples("letters", "signs", 4)),
    )
    assert {k: v for k, v in again.results.items()} == {
        k: v for k, v in mixed.results.items() if k != "benchmark"
    }


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 4])
def test_group_rewards_judge_the_samples_of_a_prompt_together_and_the_greedy_answer_alone(
    k: int, tmp_path: Path
) -> None:
    """Medley's group reward is the rank of an answer's share of letters a-m among those of its group."""
    spec = str(Path(__file__).parents[1] / "kits" / "medley_task.py") + ":Medley"
    source = LoadedSource(
        DataSource(task=spec, path="medley.jsonl", params={"peers": True}),
        Medley(peers=True),
        tuple(samples("share", "books", 3)),
    )
    found = run(source, k=k)
    shares = {
        id(p): sum(c in "abcdefghijklm" for c in p["text"].lower()) / max(1, len(p["text"]))
        for p in found.predictions
    }
    ranked = set()
    for row in found.predictions:
        peers = [
            shares[id(p)]
            for p in found.predictions
            if p["id"] == row["id"] and p["mode"] == "sampled"
        ]
        rank = sum(share <= shares[id(row)] for share in peers) / len(peers)
        alone = row["mode"] == "greedy" or k == 1
        assert row["score"]["parts"]["accuracy"] == pytest.approx(
            shares[id(row)] if alone else rank
        )
        ranked.add(row["score"]["parts"]["accuracy"])
    assert k == 1 or {0.25, 1.0} & ranked
    write_evaluation(found, tmp_path)
    # the log names a file of ours as the task
    again = rescore(tmp_path / "predictions.jsonl", trust_code=True)
    assert len(again.rows) == 3 * (k + 1) and not any(row.changed for row in again.rows)
