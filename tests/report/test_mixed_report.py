"""A run over several sources and tasks: every source has its curve, its line before and after, and its pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrl.evaluation.stats import Estimate
from mmrl.report import build_comparison, build_report
from mmrl.report.load import load_run
from mmrl.report.rows import gains, part_gains, points_of, unit_of
from mmrl.report.sources import verdict_of
from mmrl.report.verdict import outcome
from tests.kits.fast_kit import first_fast
from tests.report.mixed_run import HEADLINES, SOURCES

MixedRun = Callable[..., Path]


@pytest.fixture
def run(mixed_run: MixedRun) -> Path:
    return mixed_run(prompts=10)


def rows_of(run: Path, step: int) -> list[dict[str, Any]]:
    path = run / "eval" / f"step_{step:06d}" / "predictions.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def write_rows(run: Path, step: int, rows: list[dict[str, Any]]) -> None:
    path = run / "eval" / f"step_{step:06d}" / "predictions.jsonl"
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )


def section(page: Path, key: str) -> str:
    found = re.search(rf'<section id="{key}">.*?</section>', page.read_text(encoding="utf-8"), re.S)
    assert found
    return found.group(0)


def words(markup: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", markup))


def test_every_source_has_its_held_out_and_training_curves(run: Path) -> None:
    curves = section(build_report(run), "curves")
    data = [
        json.loads(x)
        for x in re.findall(r'<script type="application/json">(.*?)</script>', curves, re.S)
    ]
    named = {line["n"] for figure in data for line in figure["s"]}
    titles = re.findall(r'<div class="title">([^<]+)', curves)
    for source, tasks in SOURCES.items():
        assert any(t.strip() == source for t in titles), "a held-out chart of its own"
        assert source in named, "its training reward"
        metric = HEADLINES[tasks[0]] if len(tasks) == 1 else "correct"
        title = {"iou": "mIoU"}.get(metric, metric[:1].upper() + metric[1:])
        assert f"{source}: {title}" in named
    results = json.loads((run / "eval/step_000040/results.json").read_text())
    greedy = next(f for f, t in zip(data, titles, strict=True) if t.strip() == "screens")["s"][1]
    assert greedy["v"][-1] == pytest.approx(
        results["per_source"]["screens"]["hit"]["mean"], abs=1e-4
    )


def test_more_sources_than_colours_get_several_charts(run: Path) -> None:
    rows = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.update({f"train/extra-{i}/reward/mean": 0.1 * i for i in range(9)})
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    curves = section(build_report(run), "curves")
    assert "Reward per source (3 of 3)" in curves and all(
        f'"extra-{i}"' in curves for i in range(9)
    )


def test_the_table_names_each_source_and_task_with_gain_and_verdict(run: Path) -> None:
    page = build_report(run)
    table = words(section(page, "sources"))
    for name in (*SOURCES, *HEADLINES):
        assert name in table
    assert re.search(
        r"pixmo-mini Correct fell −0\.\d+ \[−0\.\d+, −0\.\d+\] 0\.\d+ \[[^]]+\] 0\.\d+ \[[^]]+\] 10",
        table,
    )
    assert re.search(r"refcoco-mini mIoU rose \+0\.\d+", table) and "Correct / Similarity" in table
    last = json.loads((run / "eval/step_000040/results.json").read_text())["per_source"]["screens"][
        "sampled/hit"
    ]
    assert f"{last['mean']:.3f} [{last['low']:.3f}, {last['high']:.3f}]" in table
    top = words(page.read_text(encoding="utf-8").partition("</header>")[0])
    assert (
        "Held-out mean of 6 sources (sampled, avg@2) rose from" in top
        and "pixmo-mini fell for certain" in top
    )


def test_gains_are_of_the_rows_that_measure_the_metric(run: Path) -> None:
    loaded = load_run(run)
    first, last = loaded.evals[0], loaded.evals[-1]
    found = gains(first, last, ["iou", "reward", "macro"])
    assert found["greedy", "iou"].n == 10 and found["greedy", "reward"].n == 70
    before, after = (
        [
            r["score"]["metrics"].get("iou", 0.0)
            for r in rows_of(run, step)
            if r["task"] == "grounding" and r["mode"] == "greedy"
        ]
        for step in (0, 40)
    )
    assert found["greedy", "iou"].mean == pytest.approx((sum(after) - sum(before)) / 10)
    parts = part_gains(first, last, lambda row: unit_of(row)[0])
    each = [gain.mean for (mode, _), gain in parts.items() if mode == "greedy"]
    assert len(each) == 6 and found["greedy", "macro"].mean == pytest.approx(sum(each) / 6)


@pytest.mark.slow
def test_the_gallery_shows_every_source_and_task_whatever_gallery_json_says(
    mixed_run: MixedRun,
) -> None:
    covering = [f"{t}-1" for t in HEADLINES]
    for number, (ids, count) in enumerate(
        ((None, 14), (["grounding-3"], 14), ([], 14), (covering, 7))
    ):
        gallery = section(
            build_report(mixed_run(f"run-{number}", prompts=4, gallery=ids)), "gallery"
        )
        tags = re.findall(r'<p class="tag">([^<]+)</p>', gallery)
        assert tags[:7] == [f"{s} · {t}" for s, ts in SOURCES.items() for t in ts], (
            "in turns, each once before any twice"
        )
        assert len(tags) == count
        assert ("picture of grounding-3" in gallery) == (ids == ["grounding-3"])


def test_equal_ids_of_two_sources_are_told_apart_in_the_gallery(run: Path) -> None:
    for step in (0, 20, 40):
        rows = rows_of(run, step)
        for row in rows:
            row["id"] = row["id"].removeprefix("grounding-").removeprefix("detection-")
        write_rows(run, step, rows)
    followed = [
        ("refcoco-mini", "1"),
        ("coco-mini", "2"),
        *((source, f"{task}-1") for source, tasks in list(SOURCES.items())[2:] for task in tasks),
    ]
    for listed in (
        {"prompts": [{"source": s, "id": i} for s, i in followed]},
        {"ids": [i for _, i in followed]},
    ):
        (run / "gallery.json").write_text(json.dumps(listed), encoding="utf-8")
        tags = re.findall(r'<p class="tag">([^<]+)</p>', section(build_report(run), "gallery"))
        # older runs hold ids alone: those of both sources are shown
        twice = 2 if "ids" in listed else 1
        assert (
            tags.count("refcoco-mini · grounding") == tags.count("coco-mini · detection") == twice
        )
        assert len(tags) == 5 + 2 * twice


@pytest.mark.parametrize(
    "content",
    first_fast(
        [{"prompts": [{"source": "screens"}, 7, None]}, {}, [], {"prompts": None}, {"ids": "x"}]
    ),
)
def test_a_gallery_file_with_odd_content_follows_what_the_evaluations_hold(
    run: Path, content: Any
) -> None:
    (run / "gallery.json").write_text(json.dumps(content), encoding="utf-8")
    assert len(re.findall(r'<p class="tag">', section(build_report(run), "gallery"))) == 14


def test_boxes_labels_points_and_texts_are_drawn(run: Path) -> None:
    def change(row: dict[str, Any]) -> None:
        detail = row["score"]["detail"]
        if row["id"] == "gui_grounding-0":
            detail.update(pred_points=[[100, 50]], gold_points=[[300, 200]])
        if row["id"] == "detection-0":
            detail.update(
                gold_boxes=[[10, 40, 90, 120]],
                gold_labels=["<b>odd</b>"],
                pred_boxes=[[12, 40, 90, 120]],
                pred_labels=["cat"],
            )
        if row["id"] == "ocr-0" and row["mode"] == "greedy":
            detail.update(gold_text="gold <i>&", pred_text="other")
            row["score"]["metrics"]["correct"] = 0.0

    rows = rows_of(run, 40)
    for row in rows:
        change(row)
    write_rows(run, 40, rows)
    gallery = section(build_report(run), "gallery")
    cards = re.findall(r"<article.*?</article>", gallery, re.S)
    arm = 0.028 * 640
    click = next(c for c in cards if "picture of gui_grounding-0" in c)
    assert (
        f'<path class="mark gold" d="M{300 - arm:.1f} 200.0h' in click
        and click.count('class="mark halo"') >= 2
    )
    assert f'<path class="mark greedy" d="M{100 - 0.75 * arm:.1f} {50 - 0.75 * arm:.1f}l' in click
    found = next(c for c in cards if "picture of detection-0" in c)
    assert (
        "&lt;b&gt;odd&lt;/b&gt;</text>" in found
        and '<text class="word greedy"' in found
        and "<b>odd" not in found
    )
    text = next(c for c in cards if "gold &lt;i&gt;&amp;" in c)
    assert 'class="no">wrong' in text and ">other<" in text
    assert "no picture" in next(c for c in cards if "sums · math" in c)


def test_worst_cases_are_taken_from_every_source(run: Path) -> None:
    worst = section(build_report(run), "worst")
    tags = re.findall(r'<p class="tag">([^ <]+)', worst.partition("Fell most")[0])
    assert set(tags[:6]) == set(SOURCES) and "Lowest scores of each source" in worst
    assert set(re.findall(r'<p class="tag">([^ <]+)', worst.partition("Fell most")[2])) == {
        "pixmo-mini"
    }


def test_details_that_are_no_numbers_are_left_out() -> None:
    row = {
        "score": {
            "detail": {
                "pred_points": [[1, 2], ["a", 3], [1], None, [float("nan"), 1], [True, 1], 7]
            }
        }
    }
    assert points_of(row, "pred_points") == [(1.0, 2.0)]
    assert (
        points_of(
            {"score": {"detail": {"pred_points": [[1, 2]], "frame": "rel1000"}}}, "pred_points"
        )
        == []
    )
    assert points_of({"score": None}, "pred_points") == points_of({}, "gold_points") == []


def test_hostile_details_stay_text(run: Path) -> None:
    bad = "</text></svg><script>document.title=1</script>"
    rows = rows_of(run, 40)
    for row in rows:
        row["source"], row["headline"] = row["source"] + bad, "x" + bad
        row["score"]["detail"] = {
            "pred_text": bad * 50,
            "gold_text": bad,
            "pred_boxes": [[1, 2, 30, 40]],
            "pred_labels": [bad],
            "gold_boxes": [[1, 2, 30, 40]],
            "gold_labels": [bad],
            "pred_points": "no list",
        }
    write_rows(run, 40, rows)
    page = build_report(run).read_text(encoding="utf-8")
    assert "<script>document" not in page and page.count("</svg><") < page.count("&lt;/svg&gt;")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.01, 0.2, "rose"),
        (-0.2, -0.01, "fell"),
        (-0.1, 0.1, "no certain change"),
        (0.0, 0.2, "no certain change"),
        (float("nan"), float("nan"), "too few prompts"),
    ],
)
def test_a_verdict_needs_an_interval_that_leaves_out_zero(
    low: float, high: float, expected: str
) -> None:
    assert verdict_of(Estimate((low + high) / 2, low, high, 9))[0] == expected
    assert verdict_of(None)[0] == "no pairs"


def test_a_run_whose_files_name_no_headlines_is_still_reported(run: Path) -> None:
    for step in (0, 20, 40):
        path = run / f"eval/step_{step:06d}/results.json"
        results = json.loads(path.read_text())
        for table in ("per_source", "per_task"):
            for row in results[table].values():
                row.pop("headline"), row.pop("sampled/headline")
        del results["headlines"], results["per_task"]
        path.write_text(json.dumps(results))
        write_rows(
            run,
            step,
            [{k: v for k, v in row.items() if k != "headline"} for row in rows_of(run, step)],
        )
    page = build_report(run)
    assert (
        "screens" in words(section(page, "sources")) and outcome(load_run(run)).headline == "macro"
    )


def test_two_mixed_runs_are_compared_by_their_mean_of_sources(
    mixed_run: MixedRun, tmp_path: Path
) -> None:
    page = build_comparison(
        [mixed_run("a", prompts=4), mixed_run("b", prompts=4)], tmp_path / "both.html"
    )
    assert "Mean of sources" in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_stays_small_and_the_same(run: Path) -> None:
    first = build_report(run).read_bytes()
    assert build_report(run).read_bytes() == first and len(first) < 1_500_000
    assert b"http://" not in first and b"https://" not in first and b"url(" not in first
