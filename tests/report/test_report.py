"""The page says what the run's files say, survives missing and broken ones, and lets no model text act."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from mmrl.errors import DataError
from mmrl.report import build_comparison, build_report

NewRun = Callable[..., Path]
HOSTILE = (
    "<script>document.title='x'</script><img src=x onerror=alert(1)>]]>\x00\x1b[0m 🙂 مرحبا \u202e"
)
VOID = {"meta", "link", "input", "br", "img"}


class Page(HTMLParser):
    """Text, tags, links and whether every tag that opens also closes."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))


def change_rows(run: Path, step: int, change: Callable[[dict], None]) -> None:
    """Edit every row of an evaluation's predictions."""
    path = run / "eval" / f"step_{step:06d}" / "predictions.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_the_page_says_what_the_files_say(new_run: NewRun) -> None:
    run = new_run()
    page = Page(build_report(run))
    first, last = (
        json.loads((run / "eval" / f"step_{s:06d}" / "results.json").read_text()) for s in (0, 30)
    )
    for results in (first, last):
        estimate = results["sampled"]["iou"]
        assert (
            f"{estimate['mean']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]" in page.text
        )
    assert (
        "Held-out mIoU (sampled, avg@2) rose from" in page.text
        and "on the same 10 prompts" in page.text
    )
    facts = (
        "grounding-tiny",
        "Qwen/Qwen2.5-VL-3B-Instruct",
        "step 30 of 30",
        "refcoco-mini",
        "screens",
        "wrong_count",
        "train/odd_number",
        "entropy collapse",
        "the red square",
        "mmrl train configs/grounding.yaml",
    )
    titles = (
        "Training reward",
        "Parts of the reward",
        "Entropy",
        "KL",
        "Log-prob gap",
        "Clipped tokens",
        "Gradient norm",
        "Completion length",
        "Cut by the length limit",
        "Parse rate",
        "Groups without signal",
        "Each step",
        "Speed",
        "Peak memory",
    )
    assert [words for words in facts + titles if words not in page.text] == []


def test_the_gain_in_the_sentence_is_the_mean_of_paired_differences(new_run: NewRun) -> None:
    run, means = new_run(), []
    for step in (0, 30):
        rows = [
            json.loads(x)
            for x in (run / f"eval/step_{step:06d}/predictions.jsonl").read_text().splitlines()
        ]
        values = [r["score"]["metrics"]["iou"] for r in rows if r["mode"] == "sampled"]
        means.append(sum(values) / len(values))
    assert f"steps: +{means[1] - means[0]:.3f} [+" in Page(build_report(run)).text


def test_nothing_is_loaded_from_outside(new_run: NewRun) -> None:
    page = Page(build_report(new_run()))
    for tag, attrs in page.tags:
        for name in ("src", "href", "srcset", "action", "poster", "data", "xlink:href"):
            value = attrs.get(name)
            assert value is None or value.startswith(("data:", "#")), f"{tag} {name}={value}"
        assert not any(name.startswith("on") for name in attrs), f"{tag} {attrs}"
    assert "url(" not in page.source and "@import" not in page.source
    assert "http://" not in page.source and "https://" not in page.source
    assert "default-src 'none'" in page.source and "unsafe-inline'; script" in page.source
    assert len(page.source) < 1_000_000


def test_boxes_are_drawn_in_original_pixels_over_small_pictures(new_run: NewRun) -> None:
    run = new_run()
    Image.new("RGB", (3000, 2000), (90, 120, 90)).save(run / "pictures" / "000.png")
    change_rows(
        run, 30, lambda r: r["score"]["detail"].update(gold_boxes=[[2500, 1500, 2900, 1900]])
    )
    source = build_report(run).read_text(encoding="utf-8")
    [drawing] = re.findall(r'<svg viewBox="0 0 3000 2000".*?</svg>', source, re.S)[:1]
    assert '<rect class="gold" x="2500" y="1500" width="400" height="400"/>' in drawing
    found = re.search(r'href="data:image/(?:jpeg|png);base64,([^"]+)"', drawing)
    assert found
    picture = Image.open(io.BytesIO(base64.b64decode(found.group(1))))
    assert picture.size == (480, 320)
    assert {"gold", "greedy", "sampled"} <= set(re.findall(r'<rect class="(\w+)"', drawing))


def test_model_text_cannot_act(new_run: NewRun) -> None:
    run = new_run()
    clean = Page(build_report(run))

    def poison(row: dict) -> None:
        row["text"], row["question"], row["source"] = HOSTILE + "y" * 100_000, HOSTILE, HOSTILE
        if not row["score"]["parsed"]:
            row["score"]["reason"] = HOSTILE

    for step in (0, 10, 20, 30):
        change_rows(run, step, poison)
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(
        json.dumps(info | {"name": HOSTILE, "model": HOSTILE, "command": HOSTILE})
    )
    with (run / "alarms.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": 9, "name": HOSTILE, "message": HOSTILE, "severity": HOSTILE}) + "\n"
        )
    page = Page(build_report(run))
    count = [sum(tag == "script" for tag, _ in p.tags) for p in (clean, page)]
    assert count[0] == count[1] and not any(tag == "img" for tag, _ in page.tags)
    assert (
        "<script>document.title='x'</script><img src=x onerror=alert(1)>" in page.text
        and "🙂" in page.text
    )
    assert "\x00" not in page.source and "\x1b" not in page.source
    assert (
        re.search(r"… cut: 100,\d{3} characters in all", page.text) and len(page.source) < 1_500_000
    )


def test_lone_surrogates_in_a_file_do_not_stop_the_report(new_run: NewRun) -> None:
    run = new_run()
    path = run / "eval/step_000030/predictions.jsonl"
    path.write_text(path.read_text().replace("the red", "\\ud83d the red"))
    assert "? the red" in Page(build_report(run)).text


@pytest.mark.check_takes(3)
@pytest.mark.parametrize(
    "missing",
    [
        "run.json",
        "config.yaml",
        "metrics.jsonl",
        "alarms.jsonl",
        "skipped.json",
        "gallery.json",
        "eval",
        "pictures",
        "eval/step_000030/results.json",
        "eval/step_000030/predictions.jsonl",
    ],
)
def test_whatever_is_missing_is_said(new_run: NewRun, missing: str) -> None:
    run = new_run()
    path = run / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = Page(build_report(run))
    expected = {
        "gallery.json": "the red square",
        "pictures": "the picture cannot be shown (missing)",
    }
    assert (
        expected.get(missing, f"{missing}{'/' if missing == 'eval' else ''} is missing")
        in page.text
    )


def test_an_empty_folder_gives_a_page_and_no_folder_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    page = Page(build_report(tmp_path / "empty"))
    assert (
        "There is no held-out evaluation yet." in page.text
        and "metrics.jsonl holds no steps yet" in page.text
    )
    with pytest.raises(DataError, match="found nothing at"):
        build_report(tmp_path / "nowhere")


def test_a_run_in_progress_can_be_reported(new_run: NewRun) -> None:
    page = Page(build_report(new_run(steps=30, done=14, every=20)))
    assert (
        "step 14 of 30" in page.text
        and "there is no later evaluation yet" in page.text
        and "running" in page.text
    )


def test_broken_lines_nulls_and_infinities_leave_gaps(new_run: NewRun) -> None:
    run = new_run()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 31, "train/grad_norm": Infinity, "train/entropy": NaN, "train/kl": null}\n[1, 2]\n'
        )
        file.write('{"step": 32, "tra')
    odd = '{"greedy": {"iou": {"mean": null}}, "sampled": 7, "per_source": []}'
    (run / "eval/step_000020/results.json").write_text(odd)
    page = Page(build_report(run))
    assert "2 lines could not be read" in page.text and "2 values not finite" in page.text
    for found in re.findall(r'<script type="application/json">(.*?)</script>', page.source, re.S):
        json.loads(found, parse_constant=lambda name: pytest.fail(f"{name} in the page's data"))


def test_a_reason_that_did_not_occur_counts_as_zero_not_as_a_gap(new_run: NewRun) -> None:
    run = new_run()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows[5:]:
        del row["train/failed/wrong_count"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = re.findall(
        r'<script type="application/json">(.*?)</script>',
        build_report(run).read_text("utf-8"),
        re.S,
    )
    [line] = [s for f in figures for s in json.loads(f)["s"] if s["n"] == "wrong count"]
    assert line["v"][4] > 0 and line["v"][5:] == [0.0] * 25


def test_a_rewritten_step_counts_once(new_run: NewRun) -> None:
    run = new_run()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    again = lines[4].replace('"train/odd_number": ', '"train/odd_number": 7')
    (run / "metrics.jsonl").write_text("\n".join([*lines, again]) + "\n")
    data = re.search(
        r"train/odd_number</td>.*?</tr>", build_report(run).read_text(encoding="utf-8"), re.S
    )
    assert data and re.search(r'<td class="num">70?\.', data.group(0))


def test_fewer_prompts_in_the_last_evaluation_are_named(new_run: NewRun) -> None:
    run = new_run()
    folder = run / "eval/step_000030"
    rows = [
        x
        for x in (folder / "predictions.jsonl").read_text().splitlines()
        if json.loads(x)["id"] < "scene-004"
    ]
    (folder / "predictions.jsonl").write_text("\n".join(rows) + "\n")
    results = json.loads((folder / "results.json").read_text())
    for mode in ("greedy", "sampled"):
        for estimate in results[mode].values():
            estimate["n"] = 4
    (folder / "results.json").write_text(json.dumps(results))
    page = Page(build_report(run))
    assert "on the same 4 prompts" in page.text and "n = 10, the last n = 4" in page.text
    assert "not among the prompts of this evaluation" in page.text


def test_a_task_without_boxes_or_pictures_is_reported_by_reward(new_run: NewRun) -> None:
    run = new_run()
    for step in (0, 10, 20, 30):
        change_rows(
            run, step, lambda r: r.update(images=[]) or r["score"].update(detail={}, metrics={})
        )
        path = run / f"eval/step_{step:06d}/results.json"
        results = json.loads(path.read_text())
        for mode in ("greedy", "sampled"):
            results[mode] = {
                k: v for k, v in results[mode].items() if k in ("reward", "parse_rate")
            }
        path.write_text(json.dumps(results))
    page = Page(build_report(run))
    assert "Held-out Reward (sampled, avg@2)" in page.text and "no picture" in page.text


@pytest.mark.slow
def test_long_runs_stay_small(new_run: NewRun) -> None:
    run = new_run(steps=3000, done=3000, every=1000, pictures=4)
    page = build_report(run)
    assert page.stat().st_size < 1_500_000 and "mean of 10 step" in Page(page).text


def test_the_report_is_deterministic_and_replaces_itself(new_run: NewRun) -> None:
    run = new_run()
    first = build_report(run).read_bytes()
    assert build_report(run).read_bytes() == first
    assert not list(run.glob(".*partial"))


def test_comparison_lays_runs_over_each_other(new_run: NewRun, tmp_path: Path) -> None:
    runs = [
        new_run("a", name="small steps"),
        new_run("b", name="large steps", final_skill=0.6, seed=1),
    ]
    page = Page(build_comparison(runs, tmp_path / "out" / "compare.html"))
    assert (
        "small steps" in page.text
        and "large steps" in page.text
        and "Training reward over time" in page.text
    )
    for run in runs:
        last = json.loads((run / "eval/step_000030/results.json").read_text())["greedy"]["iou"]
        assert f"{last['mean']:.3f}" in page.text
    with pytest.raises(DataError, match="found 0"):
        build_comparison([], tmp_path / "none.html")
