"""Filmstrips show the frames of their seconds, boxes where and when they belong, spans on the time axis, and never break a page."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmrl.diagnostics._conformance_pictures import GOLD_COLOR, WRONG_COLOR, draw_check
from mmrl.errors import MediaError
from mmrl.report import build_report
from mmrl.report.contrast import contrast_curves, contrast_names
from mmrl.report.curves import other_metrics
from mmrl.report.filmstrip import Figures
from mmrl.report.load import Run, load_run
from mmrl.report.rollouts import rollouts
from mmrl.report.rows import spans_of, spans_text, text_of, track_of
from mmrl.report.stills import ClipRef, boxes_at, choose, clip_of, read_stills
from mmrl.types import Sample, VideoSize
from mmrl.video.encode import write_video
from tests.report.test_report import Page
from tests.report.video_run import SEEN, SOURCES, STEPS, make_video_run, write_lines

SIDE, FPS = 48, 4
BAD = "</text></svg><script>document.title=1</script>"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that tests only read, with its report."""
    run = make_video_run(tmp_path_factory.mktemp("video") / "run", prompts=1)
    build_report(run)
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def grey(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Five seconds, 64 x 48, whose frame k (at k / 4 s) has the brightness 20 + 10 k."""
    frames = np.stack([np.full((48, 64, 3), 20 + 10 * k, np.uint8) for k in range(20)])
    return write_video(tmp_path_factory.mktemp("grey") / "grey.mp4", frames, FPS, quality=5)


def at_second(rgb_HWC: np.ndarray) -> float:
    """The moment of a grey frame, by its brightness."""
    return (float(rgb_HWC.mean()) - 20) / 10 / FPS


def section(page: Path, key: str) -> str:
    found = re.search(rf'<section id="{key}">.*?</section>', page.read_text(encoding="utf-8"), re.S)
    assert found
    return found.group(0)


def cards(markup: str) -> dict[str, str]:
    """source -> its first card."""
    found = re.findall(r"<article.*?</article>", markup, re.S)
    return {m.group(0): card for card in reversed(found) if (m := re.search(r"clips-\w+", card))}


def rows_of(run: Path, step: int, source: str, mode: str = "greedy") -> list[dict[str, Any]]:
    lines = (run / f"eval/step_{step:06d}/predictions.jsonl").read_text("utf-8").splitlines()
    return [r for r in map(json.loads, lines) if r["source"] == source and r["mode"] == mode]


def decoded(markup: str) -> list[np.ndarray]:
    """The pictures embedded in a piece of the page."""
    data = re.findall(r'href="data:image/(?:png|jpeg);base64,([^"]+)"', markup)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(d))).convert("RGB")) for d in data]


# which frames

moments = st.lists(st.integers(0, 400).map(lambda k: k / 4), min_size=1, max_size=60)


@settings(max_examples=100, deadline=None)
@given(
    moments, st.lists(st.integers(-10, 500).map(lambda k: k / 4), max_size=12), st.integers(3, 10)
)
def test_chosen_frames_are_candidates_in_order_and_hold_what_boxes_need(
    times: list[float], keys: list[float], limit: int
) -> None:
    chosen, unique = choose(times, keys, limit), sorted(set(times))
    assert (
        chosen == sorted(set(chosen))
        and set(chosen) <= set(unique)
        and len(chosen) == min(limit, len(unique))
    )
    exact = sorted(set(keys) & set(unique))
    if len(unique) > limit and set(keys) <= set(unique) and 0 < len(exact) <= limit - 2:
        assert set(exact) <= set(chosen)
    if len(unique) > limit and not keys:
        assert chosen[0] == unique[0] and chosen[-1] == unique[-1]


def test_frames_without_boxes_are_spread_evenly_and_boxes_draw_them() -> None:
    times = [k / 2 for k in range(41)]
    assert choose(times, limit=5) == [0, 5, 10, 15, 20]
    near = choose(times, keys=[18.1, 18.4, 19.0], limit=6)
    assert {18.0, 18.5, 19.0} <= set(near) and near[0] == 0 and len(near) == 6
    assert choose(times, keys=[100.0], limit=5) == [0, 5, 10, 15, 20], (
        "a moment after the clip draws nothing"
    )


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 80).map(lambda k: k / 8), st.just((1.0, 2.0, 3.0, 4.0)), max_size=20
    ),
    moments,
)
def test_a_box_belongs_to_a_frame_only_within_reach(
    track: dict[float, tuple[float, ...]], seconds: list[float]
) -> None:
    marked = {key: (key, 0.0, 1.0, 1.0) for key in track}
    for second, box in zip(seconds, boxes_at(marked, seconds, 0.25), strict=True):
        distances = sorted(abs(key - second) for key in marked)
        if box is None:
            assert not distances or distances[0] > 0.25
        else:
            assert abs(box[0] - second) == distances[0] <= 0.25


# decoding


@pytest.mark.parametrize("start", [0.0, 1.5])
def test_the_frames_are_those_of_the_logged_times_after_the_start(grey: str, start: float) -> None:
    seen = tuple(k / 2 for k in range(6))
    stills = read_stills(ClipRef(grey, start, 3.0, seen), limit=4)
    assert (
        stills.seconds == (0.0, 1.0, 1.5, 2.5)
        and stills.size == (64, 48)
        and stills.duration == 3.0
    )
    assert [at_second(f) for f in stills.frames] == pytest.approx(
        [start + t for t in stills.seconds], abs=0.1
    )


def test_without_logged_times_frames_are_spread_over_the_shown_part(grey: str) -> None:
    stills = read_stills(ClipRef(grey, 1.0), keys=[0.5, 9.0], limit=8)
    assert (
        stills.duration == pytest.approx(4.0) and 0.5 in stills.seconds and max(stills.seconds) < 4
    )
    shown = [at_second(f) for f in stills.frames]
    assert len(shown) == 8 and all(
        t + 1.0 - 0.3 <= s <= t + 1.0 + 0.1 for s, t in zip(shown, stills.seconds, strict=True)
    )
    assert read_stills(ClipRef(grey, 0.0, 50.0), limit=4).duration == pytest.approx(5.0), (
        "a row that says too much is cut"
    )


def test_folders_of_frames_and_shrinking(tmp_path: Path) -> None:
    (tmp_path / "clip").mkdir()
    for k in range(6):
        Image.new("RGB", (400, 200), (20 + 10 * k,) * 3).save(tmp_path / f"clip/{k:03d}.png")
    stills = read_stills(
        ClipRef("clip", seen=(0.0, 1.0, 2.5), duration=3.0), tmp_path, long_side=100
    )
    assert [f.shape for f in stills.frames] == [(50, 100, 3)] * 3 and stills.size == (400, 200)
    assert [round((float(f.mean()) - 20) / 10) for f in stills.frames] == [0, 2, 5], (
        "two frames a second"
    )


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"videos": []},
        {"videos": "a.mp4"},
        {"videos": None, "sample": 7},
        {"sample": {"videos": None}},
    ],
)
def test_rows_without_a_clip(row: dict[str, Any]) -> None:
    assert clip_of(row) is None


def test_odd_facts_of_a_clip_are_left_out() -> None:
    row = {
        "videos": ["a.mp4", "b.mp4"],
        "images": ["c.png"],
        "video_sizes": [{"timestamps_s": [0, "x", None, 1.5, float("nan")], "duration_s": -1}],
        "sample": {"params": {"duration": "long", "video": {"start": "no", "folder_fps": None}}},
    }
    assert clip_of(row) == ClipRef("a.mp4", 0.0, None, (0.0, 1.5), 2.0, 2, 1)
    for sizes in (None, [], "x", [7], [{"timestamps_s": 3}]):
        assert clip_of({"videos": ["a.mp4"], "video_sizes": sizes}) == ClipRef("a.mp4")


# the page


@pytest.mark.slow
def test_every_clip_gets_a_labelled_filmstrip_of_its_own_frames(made: Path) -> None:
    found = cards(section(made / "report.html", "gallery"))
    assert set(found) == {f"clips-{kind}" for kind in SOURCES}
    for card in found.values():
        labels = [float(t) for t in re.findall(r"<figcaption>([\d.]+) s</figcaption>", card)]
        assert (
            len(labels) == len(decoded(card)) == 8
            and labels == sorted(labels)
            and set(labels) <= set(SEEN)
        )
        alts = re.findall(
            r'<svg [^>]*role="img" aria-label="frame (\d) of 8 of clip-\d+ at ([\d.]+) s', card
        )
        assert [float(t) for _, t in alts] == labels and [int(n) for n, _ in alts] == list(
            range(1, 9)
        )
        assert "8 of 16 frames seen" in card and 'class="card pic wide"' in card
    page = Page(made / "report.html")  # every tag closes
    assert "http://" not in page.source and len(page.source) < 1_200_000


def test_embedded_frames_are_those_of_the_file(made: Path) -> None:
    (row,) = rows_of(made, 40, "clips-st")
    stills = read_stills(
        ClipRef(row["videos"][0], seen=SEEN, duration=4.0),
        keys=sorted(float(k) for k in row["score"]["detail"]["gold_tracks"]),
    )
    card = cards(section(made / "report.html", "gallery"))["clips-st"]
    for shown, frame in zip(decoded(card), stills.frames, strict=True):
        assert np.abs(shown.astype(int) - frame).mean() < 4


def test_spans_are_bars_where_and_when_they_belong(made: Path) -> None:
    card = cards(section(made / "report.html", "gallery"))["clips-repeat"]
    for number, step in enumerate(STEPS):
        (row,) = rows_of(made, step, "clips-repeat")
        state = re.search(
            rf'<div class="state" data-step="{number}"( hidden)?><div class="lane greedy".*?</div></div>',
            card,
        )
        assert state and (state.group(1) is None) == (step == STEPS[-1]), (
            "only the last evaluation is shown at first"
        )
        greedy = state.group(0).partition('<div class="lane sampled"')[0]
        bars = re.findall(r"left:([\d.]+)%;width:([\d.]+)%", greedy)
        assert bars == [
            (f"{100 * s / 4:.2f}", f"{100 * e / 4 - 100 * s / 4:.2f}")
            for s, e in row["score"]["detail"]["pred_spans"]
        ]
        assert f"predicted spans: {spans_text(row['score']['detail']['pred_spans'])}" in greedy
    gold = rows_of(made, 0, "clips-repeat")[0]["score"]["detail"]["gold_spans"]
    lane = re.search(r'<div class="lane gold".*?</div>', card)
    assert lane and re.findall(r"left:([\d.]+)%", lane.group(0)) == [
        f"{100 * s / 4:.2f}" for s, _ in gold
    ]
    inside = [float(t) for t in re.findall(r'class="still inside">.*?<figcaption>([\d.]+) s', card)]
    labels = [float(t) for t in re.findall(r"<figcaption>([\d.]+) s", card)]
    assert inside == [t for t in labels if any(s <= t < e for s, e in gold)] and inside
    assert f">{spans_text([(s, e) for s, e in gold])}<" in card


def test_boxes_are_on_the_frames_of_their_seconds(made: Path) -> None:
    (row,) = rows_of(made, STEPS[-1], "clips-track")
    detail = row["score"]["detail"]
    card = cards(section(made / "report.html", "gallery"))["clips-track"]
    figures = re.findall(r"<figure.*?<figcaption>([\d.]+) s</figcaption></figure>", card, re.S)
    stills = dict(
        zip(map(float, figures), re.findall(r"<figure.*?</figure>", card, re.S), strict=True)
    )
    assert len(detail["gold_tracks"]) >= 4 and set(map(float, detail["gold_tracks"])) & set(stills)
    for second, still in stills.items():
        box = next((b for k, b in detail["gold_tracks"].items() if float(k) == second), None)
        drawn = re.findall(r'<rect class="gold" x="([\d.-]+)" y="([\d.-]+)"', still)
        assert drawn == ([] if box is None else [(f"{box[0]:g}", f"{box[1]:g}")])
        states = re.findall(
            r'<g class="state" data-step="(\d)"(?: hidden)?>(<rect class="halo greedy.*?)</g>',
            still,
        )
        for number, shapes in states:
            (said,) = rows_of(made, STEPS[int(number)], "clips-track")
            x, y = next(
                b for k, b in said["score"]["detail"]["pred_tracks"].items() if float(k) == second
            )[:2]
            assert f'<rect class="greedy" x="{x:g}" y="{y:g}"' in shapes
        assert len(states) == (0 if box is None else len(STEPS))
    assert "8 boxes at 0–3.5 s" in card and 'class="time"' not in card, (
        "no axis where nothing has a span"
    )


def test_rollouts_show_groups_and_tell_contrast_groups_apart(made: Path) -> None:
    found = cards(section(made / "report.html", "rollouts"))
    assert set(found) == {"clips-repeat", "clips-order"}
    assert (
        'class="lane sampled"' in found["clips-repeat"]
        and "spans of 4 sampled answers" in found["clips-repeat"]
    )
    plain, _, changed = found["clips-order"].partition("On shuffled frames, never trained on")
    assert (
        plain.count("<li>") == 4
        and changed.count("<li>") == 2
        and "on shuffled frames</p>" in plain
    )
    assert (
        "shuffled" not in found["clips-repeat"]
        and "step 10 · clips-repeat · temporal_grounding" in found["clips-repeat"]
    )


def test_a_group_whose_contrast_was_skipped_says_so_and_broken_lines_are_passed_over(
    run: Path,
) -> None:
    path = run / "rollouts/step_000040.jsonl"
    rows = [
        r for r in map(json.loads, path.read_text("utf-8").splitlines()) if not r.get("contrast")
    ]
    write_lines(path, rows)
    with path.open("a") as file:
        file.write('{"step": 40, "sample"\n[1]\n{"sample": 3}\n')
    for name in ("step_x.jsonl", "note.txt"):
        (run / "rollouts" / name).write_text("{}")
    markup = rollouts(load_run(run), Figures(run))
    assert (
        "contrast not rolled out: it could not change an advantage" in markup
        and markup.count("<article") == 4
    )
    shutil.rmtree(run / "rollouts")
    assert rollouts(load_run(run), Figures(run)) == "", "the page leaves the section out"


def test_contrast_metrics_get_curves_and_leave_the_table(made: Path) -> None:
    curves = section(made / "report.html", "curves")
    title = "Does the policy use what it is shown? <small>training accuracy with the input as it is and changed: shuffled frames"
    assert title in curves and "contrast/" not in curves.partition("Other metrics")[2]
    data = [
        json.loads(x)
        for x in re.findall(
            r'<script type="application/json">(.*?)</script>',
            curves.partition("Does the policy")[2],
            re.S,
        )
    ]
    assert [[line["n"] for line in figure["s"]] for figure in data[:4]] == [
        ["all", "clips-order", "clips-st"],
        *[["as it is", "changed"]] * 3,
    ]
    rows = load_run(made).metrics
    assert data[0]["s"][1]["v"] == [
        None if (v := r["train/clips-order/contrast/gap"]) is None else pytest.approx(v, rel=1e-4)
        for r in rows
    ]


def test_contrast_curves_of_bare_names_and_one_source() -> None:
    run = Run(
        Path(),
        metrics=[
            {"step": s, "contrast/gap": 0.1 * s, "train/a/contrast/gap": 0.1 * s, "train/odd": 1.0}
            for s in (1, 2)
        ],
    )
    assert len(contrast_curves(run)) == 1, "one source is the same as all"
    assert "train/odd" in other_metrics(
        run, contrast_names(run)
    ) and "contrast" not in other_metrics(run, contrast_names(run))
    assert contrast_curves(Run(Path(), metrics=[{"step": 1, "train/reward/mean": 1.0}])) == []


# what goes wrong


@pytest.mark.parametrize(
    ("content", "kind"), [(None, "missing"), (b"", "empty"), (b"no video at all" * 99, "")]
)
def test_a_clip_that_cannot_be_decoded_is_a_text_and_its_spans_stay(
    made: Path, tmp_path: Path, content: bytes | None, kind: str
) -> None:
    (row,) = rows_of(made, 40, "clips-repeat")
    clip = tmp_path / "broken.mp4"
    if content is not None:
        clip.write_bytes(content)
    drawn = Figures(tmp_path).drawing({**row, "videos": ["broken.mp4"]}, [("", [(row, "greedy")])])
    assert (
        re.search(rf"the video cannot be shown \({kind}\w*\): broken.mp4", drawn)
        and "<image" not in drawn
    )
    assert 'class="lane gold"' in drawn and 'class="lane greedy"' in drawn and "4 s</span>" in drawn


@pytest.mark.slow
def test_a_whole_report_survives_vanished_clips(run: Path) -> None:
    for step in STEPS:
        path = run / f"eval/step_{step:06d}/predictions.jsonl"
        path.write_text(re.sub(r'[^"]+/clips/', "/nowhere/", path.read_text("utf-8")), "utf-8")
    markup = section(build_report(run), "gallery")
    assert markup.count("the video cannot be shown (missing): clip-000000.mp4") == len(SOURCES)


def test_without_the_video_package_the_page_says_so(
    grey: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mmrl.video.decode", None)
    assert "the video cannot be shown (ModuleNotFoundError): grey.mp4" in Figures(Path()).drawing(
        {"videos": [grey]}, []
    )


def test_a_page_holds_so_many_bytes_of_frames_and_no_more(grey: str) -> None:
    row = {
        "videos": [grey],
        "video_sizes": [{"timestamps_s": [k / 4 for k in range(20)], "duration_s": 5.0}],
    }
    whole = Figures(Path()).drawing(row, [])
    cost = sum(map(len, re.findall(r'href="([^"]+)"', whole)))
    figures = Figures(Path(), max_bytes=2 * cost + cost // 2)
    drawn = [figures.drawing(row, []) for _ in range(3)]
    assert (
        drawn[0] == drawn[1] == whole
        and "<image" not in drawn[2]
        and "already holds its share" in drawn[2]
    )


def test_many_states_draw_fewer_samples(grey: str) -> None:
    row = {
        "videos": [grey],
        "score": {"parsed": True, "detail": {"gold_spans": [[0, 1]], "pred_spans": [[1, 2]]}},
    }
    layers = [(f'class="state" data-step="{i}"', [(row, "sampled")] * 16) for i in range(40)]
    assert Figures(Path()).drawing(row, layers).count("<i style=") < 40 * 2 + 80
    assert "spans of 16 sampled answers" in Figures(Path()).drawing(row, layers[:1])


@pytest.mark.slow
def test_hostile_rows_stay_text(run: Path) -> None:
    detail = {
        "gold_spans": [["a", 1], [2, 1], [float("nan"), 2], None, [0, 1e308], [-5, 99]],
        "pred_spans": "x",
        "gold_text": BAD,
        "pred_tracks": {
            BAD: [1, 2, 3, 4],
            "1": "box",
            "nan": [1, 2, 3, 4],
            "0.5": [1, 2, 3, None],
            "2": [-1e9, 0, 1e9, 5],
        },
        "gold_tracks": {"0": [1, 2, 30, 40]},
    }
    shutil.rmtree(run / "eval/step_000000")
    path = run / "eval/step_000040/predictions.jsonl"
    rows = [json.loads(x) for x in path.read_text("utf-8").splitlines()]
    for row in rows:
        row["id"] += BAD
        row["score"]["detail"] = detail
    write_lines(path, rows)
    lines = [
        json.loads(x) for x in (run / "rollouts/step_000040.jsonl").read_text("utf-8").splitlines()
    ]
    for row in lines:
        row.update(view=BAD, contrast=True)
        row["sample"]["source"] = row["sample"]["question"] = BAD
        row["score"]["detail"] = detail
    write_lines(run / "rollouts/step_000040.jsonl", lines)
    page = Page(build_report(run))
    assert "<script>document" not in page.source and "nan%" not in page.source
    assert all(0 <= float(v) <= 100 for v in re.findall(r'<i style="left:([^%]+)%', page.source))
    assert spans_of({"score": {"detail": detail}}, "gold_spans") == [(0, 1e308), (-5, 99)]
    assert track_of({"score": {"detail": detail}}, "pred_tracks") == {2.0: (-1e9, 0, 1e9, 5)}


def test_texts_of_spans_and_tracks() -> None:
    def row(parsed: bool, **detail: Any) -> dict[str, Any]:
        return {"score": {"parsed": parsed, "detail": detail}}

    assert text_of(row(True, pred_spans=[[1, 2.5], [3, 4]]), "pred_text") == "1–2.5 and 3–4 s"
    assert (
        text_of(row(True, pred_spans=[]), "pred_text") == "no span"
        and text_of(row(False, pred_spans=[]), "pred_text") is None
    )
    assert text_of(row(False, gold_text="B", gold_spans=[[0, 1]]), "gold_text") == "B · 0–1 s"
    assert text_of(row(True, pred_tracks={"1": [0, 0, 1, 1]}), "pred_text") == "1 box at 1 s"
    assert (
        text_of(row(True), "pred_text") is None
        and text_of(row(False, pred_text="x"), "pred_text") == "x"
    )


def test_a_box_without_a_time_is_drawn_on_a_clip_of_one_frame_only(grey: str) -> None:
    row = {
        "videos": [grey],
        "score": {"detail": {"gold_boxes": [[1, 2, 30, 40]]}},
        "video_sizes": [{"timestamps_s": [1.0], "duration_s": 5.0}],
    }
    assert Figures(Path()).drawing(row, []).count('<rect class="gold"') == 1
    row["video_sizes"] = [{"timestamps_s": [1.0, 2.0], "duration_s": 5.0}]
    assert '<rect class="gold"' not in Figures(Path()).drawing(row, [])


# mmrl tasks check


def test_the_check_draws_boxes_at_their_seconds_and_spans_on_the_axis(
    grey: str, tmp_path: Path
) -> None:
    sample = Sample(
        "a",
        "st_grounding",
        "s",
        "the thing",
        {},
        videos=(grey,),
        params={"width": 64, "height": 48, "duration": 5.0},
    )
    size = VideoSize((64, 48), (64, 48), 5.0, (0.0, 1.0, 2.0, 3.0))
    gold = {"pred_spans": [[0, 1]], "pred_tracks": {"0": [8, 8, 24, 24]}}
    wrong = {"pred_spans": [[3, 4]], "pred_tracks": {"3": [30, 8, 60, 40]}}
    picture = np.asarray(
        draw_check(sample, "gold", "wrong", gold, wrong, tmp_path / "x.png", (size,)).convert("RGB")
    )
    frames, below = picture[8 : 8 + 156], picture[8 + 156 :]
    green, orange = ((frames == color).all(axis=2) for color in (GOLD_COLOR, WRONG_COLOR))
    assert green[:, 12:226].sum() > 100 and not green[:, 226:].any(), (
        "the gold box is on the first frame only"
    )
    assert orange[:, 12 + 3 * 214 :].sum() > 100 and not orange[:, : 12 + 3 * 214].any(), (
        "the wrong one on the last"
    )
    lanes = {
        c: np.flatnonzero((below[:60] == c).all(axis=2).any(axis=0))
        for c in (GOLD_COLOR, WRONG_COLOR)
    }
    width = 4 * 214 - 6
    assert (
        abs(lanes[GOLD_COLOR].max() - 12 - width / 5) < 4
        and abs(lanes[WRONG_COLOR].min() - 12 - 3 * width / 5) < 4
    )
    plain = draw_check(sample, "gold", "wrong", {"pred_text": "x"}, {}, tmp_path / "y.png")
    assert plain.width == picture.shape[1], (
        "without spans there is no axis, and without sizes frames are spread evenly"
    )


def test_the_check_of_a_clip_that_is_gone_raises_a_media_error(tmp_path: Path) -> None:
    sample = Sample(
        "a",
        "temporal_grounding",
        "s",
        "q",
        [],
        videos=(str(tmp_path / "gone.mp4"),),
        params={"duration": 2.0},
    )
    with pytest.raises(MediaError) as caught:
        draw_check(sample, "", "", {}, {}, tmp_path / "x.png")
    assert caught.value.kind == "missing" and not (tmp_path / "x.png").exists()
