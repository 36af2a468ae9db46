"""Generated clips: what rows say is seen in the decoded pictures, and questions about order need the order."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.errors import ConfigError
from mmrl.registry import task_from_spec
from mmrl.tasks.clips import DEFAULT_KINDS, KINDS, TWINS, ClipSettings, draw_clip, main, make_clips
from mmrl.tasks.scenes import COLORS
from tests.kits.clock_kit import takes_less

av = pytest.importorskip("av")
Row = dict[str, Any]

ROW_TASKS = {
    "order": "choice",
    "direction": "choice",
    "appear": "temporal_grounding",
    "repeat": "temporal_grounding",
    "track": "tracking",
    "collide": "numeric",
    "st": "st_grounding",
    "gqa": "grounded_qa",
    "ocr": "ocr",
}
EVERY_KIND = [(task, kind) for task, kinds in KINDS.items() for kind in kinds]


def _rows(path: str) -> list[Row]:
    return [json.loads(text) for text in Path(path).read_text(encoding="utf-8").splitlines()]


def _decode(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def _near(frames: np.ndarray, color: str) -> np.ndarray:
    """Pixels (T, H, W) with about that colour; decoding blurs it."""
    return np.asarray(np.abs(frames.astype(int) - COLORS[color]).sum(-1) < 80)


def _clips(
    folder: Path, task: str, count: int, seed: int = 1, **options: Any
) -> list[tuple[np.ndarray, Row]]:
    """Decoded frames and row of every clip of a new set."""
    rows = _rows(make_clips(folder, task, count, seed, **options))
    return [(_decode(folder / row["video"]), row) for row in rows]


# ---------------------------------------------------------------- files and rows


@pytest.mark.check_takes(2)
@pytest.mark.parametrize("task", KINDS)
def test_rows_are_read_by_their_own_task(task: str, tmp_path: Path) -> None:
    path = make_clips(tmp_path, task, 6, 5)
    rows = _rows(path)
    assert {row["task"] for row in rows} == {ROW_TASKS[task]}
    assert {row["params"]["kind"] for row in rows} <= set(DEFAULT_KINDS[task])
    for row in rows:
        facts = row["params"]
        assert (facts["width"], facts["height"], facts["duration"], facts["fps"]) == (
            112,
            112,
            2.0,
            4,
        )
        assert len(row["question"]) <= 40
    if importlib.util.find_spec(f"mmrl.tasks.{ROW_TASKS[task]}") is None and task not in (
        "order",
        "direction",
        "collide",
        "ocr",
    ):
        pytest.skip(f"no task {ROW_TASKS[task]} here")
    samples = list(task_from_spec(ROW_TASKS[task]).load(path))
    assert [s.id for s in samples] == [row["id"] for row in rows]
    assert all(Path(s.videos[0]).is_file() and not s.images for s in samples)


@pytest.mark.check_takes(3)
@pytest.mark.parametrize(("task", "kind"), EVERY_KIND)
def test_same_seed_same_bytes_and_longer_sets_begin_with_shorter_ones(
    task: str, kind: str, tmp_path: Path
) -> None:
    a, b, c, d = (
        _rows(make_clips(tmp_path / name, task, count, seed, 56, prefix=prefix, kinds=[kind]))
        for name, count, seed, prefix in (
            ("a", 2, 3, "x-"),
            ("b", 3, 3, "x-"),
            ("c", 2, 4, "x-"),
            ("d", 2, 3, "y-"),
        )
    )
    assert a == b[:2] and a != c
    for row, other in zip(a, d, strict=True):
        film = (tmp_path / "a" / row["video"]).read_bytes()
        assert film == (tmp_path / "b" / row["video"]).read_bytes()
        assert (
            film != (tmp_path / "c" / row["video"]).read_bytes()
            and film != (tmp_path / "d" / other["video"]).read_bytes()
        )


@pytest.mark.slow
def test_clips_are_small_real_and_cheap(tmp_path: Path) -> None:
    for task in KINDS:
        # 1000 clips take less than a minute of one core
        rows = _rows(takes_less(10 * 0.06, partial(make_clips, tmp_path / task, task, 10, 0)))
        for row in rows:
            assert (tmp_path / task / row["video"]).stat().st_size < 10_000
        with av.open(str(tmp_path / task / rows[0]["video"])) as container:
            stream = container.streams.video[0]
            assert (
                stream.codec_context.name,
                stream.width,
                stream.height,
                stream.average_rate,
            ) == ("h264", 112, 112, 4)
            assert (
                stream.duration * stream.time_base == 2 and len(list(container.decode(stream))) == 8
            )


@pytest.mark.parametrize(
    ("size", "fps", "seconds", "grid"),
    [(56, 4, 2.0, None), (64, 2, 12.0, 1.0), (98, 8, 3.0, 0.5), (48, 1, 9, 1)],
)
def test_other_sizes_rates_and_grids(
    size: int, fps: float, seconds: float, grid: float | None, tmp_path: Path
) -> None:
    for task, kind in EVERY_KIND:
        frames, row = draw_clip(ClipSettings(task, size, fps, seconds, (kind,), grid), 0, 3)
        assert frames.shape == (round(fps * seconds), size, size, 3) and frames.dtype == np.uint8
        step = 2 / fps if grid is None else grid
        spans = row["answer"] if row["task"] == "temporal_grounding" else []
        assert all(0 <= a < b <= seconds and a % step == b % step == 0 for a, b in spans)
        for thing in row["params"]["objects"]:
            for x1, y1, x2, y2 in thing["boxes"].values():
                assert 0 <= x1 < x2 <= size and 0 <= y1 < y2 <= size


# ---------------------------------------------------------------- questions about order


@pytest.mark.check_takes(2)
@pytest.mark.parametrize(("task", "kind"), [(t, k) for t, k in EVERY_KIND if t in TWINS])
def test_twins_show_the_same_pictures_and_have_opposite_answers(
    task: str, kind: str, tmp_path: Path
) -> None:
    clips = _clips(tmp_path, task, 6, kinds=[kind])
    for (one, first), (two, second) in zip(clips[::2], clips[1::2], strict=True):
        assert (one == two[::-1]).all() and (one != two).any(), (
            "decoded pictures, not only drawn ones"
        )
        assert Counter(f.tobytes() for f in one) == Counter(f.tobytes() for f in two)
        assert first["question"] == second["question"] and first["answer"] != second["answer"]
        assert first["params"].get("options") == second["params"].get("options")
        assert (first["params"]["twin"], second["params"]["twin"]) == (second["id"], first["id"])
        if task == "ocr":
            assert first["answer"] == second["answer"][::-1]


@pytest.mark.slow
def test_answers_are_balanced_and_the_first_twin_is_not_always_the_same() -> None:
    for task, kind in [(t, k) for t, k in EVERY_KIND if t in ("order", "direction")]:
        answers = [
            draw_clip(ClipSettings(task, 56, kinds=(kind,)), 2, i)[1]["answer"] for i in range(120)
        ]
        assert Counter(answers) == {"A": 60, "B": 60}
        assert 18 <= Counter(answers[::2])["A"] <= 42


def _places(frames: np.ndarray, color: str, blurred: bool = False) -> np.ndarray:
    """(T, 3) centre x, centre y and area, as shares, of what has that colour."""
    mask, side = (
        (_near(frames, color) if blurred else (frames == COLORS[color]).all(-1)),
        frames.shape[1],
    )
    area = mask.sum((1, 2))
    ramp = (np.arange(side) + 0.5) / side
    x, y = ((mask * ramp[None, None, :]).sum((1, 2)), (mask * ramp[None, :, None]).sum((1, 2)))
    share = np.maximum(area, 1)
    return np.stack(
        [np.where(area, x / share, 0.5), np.where(area, y / share, 0.5), area / side**2 * 8], 1
    )


@cache
def _features(task: str, kind: str, pairs: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """What can be seen of the shapes in question in every frame, (N, T, F), and the answers (N,) as 0 or 1."""
    seen, answers = [], []
    for index in range(2 * pairs):
        frames, row = draw_clip(ClipSettings(task, 48, kinds=(kind,)), seed, index)
        colors = (
            [name.split()[0] for name in row["params"]["options"]]
            if task == "order"
            else [row["question"].split()[0]]
        )
        if kind == "cycle":
            colors.append(row["question"].split()[4])
        if len(set(colors)) == len(colors):
            seen.append(np.concatenate([_places(frames, color) for color in colors], 1))
            answers.append(row["answer"] == "B")
    return np.stack(seen), np.array(answers, dtype=float)


def _logistic(train: np.ndarray, answers: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Answers of a logistic regression (ridge 0.1) for `test`."""
    from scipy.optimize import minimize

    mean, spread = train.mean(0), train.std(0) + 1e-6
    a, b = (np.column_stack([(x - mean) / spread, np.ones(len(x))]) for x in (train, test))

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        z = a @ w
        p = 1 / (1 + np.exp(-np.clip(z, -30, 30)))
        return float(np.logaddexp(0, z).sum() - answers @ z + 0.05 * w @ w), a.T @ (
            p - answers
        ) + 0.1 * w

    return b @ minimize(loss, np.zeros(a.shape[1]), jac=True, method="L-BFGS-B").x > 0


def _nearest(train: np.ndarray, answers: np.ndarray, test: np.ndarray, k: int = 9) -> np.ndarray:
    """Answers of the k nearest neighbours."""
    from scipy.spatial import cKDTree

    return np.asarray(answers[cKDTree(train).query(test, k)[1]].mean(1) > 0.5)


def _with_squares(features: np.ndarray) -> np.ndarray:
    products = (features[:, :, None] * features[:, None, :]).reshape(len(features), -1)
    return np.concatenate([features, products], 1)


def _ordered(frames_NTF: np.ndarray) -> np.ndarray:
    """All frames in order: what is where, where it goes and how far (out at one edge and in at the other is no step), round which
    way, and what follows on what."""
    steps = np.diff(frames_NTF, axis=1)
    steps = np.where(np.abs(steps) < 0.45, steps, 0)
    turn = steps[:, :-1, 0] * steps[:, 1:, 1] - steps[:, :-1, 1] * steps[:, 1:, 0]
    follows = np.einsum("ntf,ntg->nfg", frames_NTF[:, :-1], frames_NTF[:, 1:])
    return np.concatenate(
        [
            x.reshape(len(x), -1)
            for x in (frames_NTF, steps.mean(1), np.abs(steps) > 0.01, turn, follows)
        ],
        1,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "kind"), [(t, k) for t, k in EVERY_KIND if t in ("order", "direction")]
)
def test_one_frame_does_not_tell_and_the_order_does(task: str, kind: str) -> None:
    """Logistic regression and nearest neighbours on other clips of the kind: chance from a random frame or from the set of
    frames, near 1 from the frames in order."""
    (train, known), (test, truth) = (_features(task, kind, 90, seed) for seed in (11, 12))
    rng = np.random.default_rng(0)
    count = train.shape[1]
    every = train.reshape(-1, train.shape[2])  # a random frame: all of them to learn from
    one = test[np.arange(len(test)), rng.integers(0, count, len(test))]
    for guess in (
        _logistic(_with_squares(every), np.repeat(known, count), _with_squares(one)),
        _nearest(every, np.repeat(known, count), one),
    ):
        assert 0.4 < (guess == truth).mean() < 0.6
    # sums in another order round elsewhere: without rounding, twins would differ in the last place
    sets_train, sets_test = (
        np.concatenate([x.mean(1).round(9), np.sort(x, 1).reshape(len(x), -1)], 1)
        for x in (train, test)
    )
    for guess in (_logistic(sets_train, known, sets_test), _nearest(sets_train, known, sets_test)):
        assert (guess == truth).mean() == 0.5
    assert (_logistic(_ordered(train), known, _ordered(test)) == truth).mean() > 0.95


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ("direction", "horizontal"),
        ("order", "move"),
        ("order", "cycle"),
        ("direction", "vertical"),
        ("direction", "orbit"),
    ],
)
def test_not_even_a_frame_whose_place_is_known_tells(task: str, kind: str) -> None:
    """Learned for each place in the clip on its own; a straight path inside the picture is the counterexample."""
    shares = _known_place(task, kind)
    assert 0.45 < np.mean(shares) < 0.55 and min(shares) > 0.36 and max(shares) < 0.64
    assert _known_place("direction", "horizontal_inside")[0] > 0.95, "the test can fail"


def _known_place(task: str, kind: str) -> list[float]:
    (train, known), (test, truth) = (_features(task, kind, 90, seed) for seed in (11, 12))
    return [
        float(
            (
                _logistic(_with_squares(train[:, k]), known, _with_squares(test[:, k])) == truth
            ).mean()
        )
        for k in range(train.shape[1])
    ]


# ---------------------------------------------------------------- answers are true of the decoded pictures


def _is_there(frames: np.ndarray, color: str) -> list[bool]:
    return [bool(v) for v in _near(frames, color).sum((1, 2)) > 20]


def _spans(there: list[bool], fps: float) -> list[list[float]]:
    edges = np.flatnonzero(np.diff([0, *map(int, there), 0]))
    return [
        [a / fps, b / fps] for a, b in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    ]


def _box(mask: np.ndarray) -> list[float]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return [float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)]


@pytest.mark.check_takes(1)
@pytest.mark.parametrize("task", ["appear", "repeat"])
def test_spans_are_when_the_color_is_there(task: str, tmp_path: Path) -> None:
    for number, distractors in enumerate((0, 2)):
        for frames, row in _clips(tmp_path / str(number), task, 12, distractors=distractors):
            colors = [thing["color"] for thing in row["params"]["objects"]]
            color = row["question"].split()[0]
            assert (
                len(row["answer"]) == (1 if task == "appear" else 2)
                and len(colors) == 1 + distractors
            )
            if colors.count(color) == 1:
                assert _spans(_is_there(frames, color), 4) == row["answer"]
    longer = [
        draw_clip(ClipSettings("repeat", 56, seconds=6.0), 0, i)[1]["answer"] for i in range(30)
    ]
    assert {len(spans) for spans in longer} == {2, 3}
    assert all(a[1] < b[0] for spans in longer for a, b in pairwise(spans))


def test_spans_are_of_all_lengths_and_never_everything() -> None:
    seen = Counter(
        str(draw_clip(ClipSettings("appear", 56), 0, i)[1]["answer"]) for i in range(200)
    )
    assert len(seen) == 9 and "[[0.0, 2.0]]" not in seen  # 4 steps: 10 spans, less the whole clip
    assert max(seen.values()) < 50


@pytest.mark.check_takes(1)
@pytest.mark.parametrize("kind", KINDS["track"])
def test_tracks_are_where_the_color_is(kind: str, tmp_path: Path) -> None:
    missing = 0
    for frames, row in _clips(tmp_path, "track", 15, distractors=0, kinds=[kind]):
        color, shape = row["question"].split()
        mask, boxes = _near(frames, color), row["answer"]["boxes"]
        assert (
            row["params"]["objects"][-1]["shape"] == shape
            and set(boxes) <= {"0", "0.5", "1", "1.5"}
            and "0" in boxes
        )
        for step, key in enumerate(("0", "0.5", "1", "1.5")):
            drawn = mask[step * 2]
            if key not in boxes:
                missing += 1
                assert drawn.sum() == 0
            elif drawn.sum() > 60:  # a last sliver at the edge is blurred
                assert np.abs(np.array(_box(drawn)) - boxes[key]).max() <= 4
        assert all(row["params"]["objects"][-1]["boxes"][k] == box for k, box in boxes.items())
    assert (missing > 0) == (kind == "leave")


def test_boxes_are_tight_around_drawn_pixels_also_at_the_edge() -> None:
    """Against the drawn picture itself: exact, for every frame of every kind with one shape."""
    partly = 0
    for task, kind in (
        ("track", "leave"),
        ("track", "bounce"),
        ("st", "move"),
        ("direction", "orbit"),
    ):
        for index in range(12):
            frames, row = draw_clip(ClipSettings(task, 64, kinds=(kind,), distractors=0), 5, index)
            thing = row["params"]["objects"][-1]
            exact = (frames == COLORS[thing["color"]]).all(-1)
            for number, mask in enumerate(exact):
                box = thing["boxes"].get(f"{number / 4:g}")
                assert (box is None) == (not mask.any())
                if box is not None:
                    assert _box(mask) == box
                    partly += box[0] == 0 or box[1] == 0 or box[2] == 64 or box[3] == 64
    assert partly > 5


def test_first_box_is_what_tells_two_equal_shapes_apart() -> None:
    alike = 0
    for index in range(40):
        _, row = draw_clip(ClipSettings("track", first_box=True, distractors=1), 0, index)
        assert row["params"]["first_box"] == row["answer"]["boxes"]["0"]
        other, target = row["params"]["objects"]
        assert row["question"] == f"{target['color']} {target['shape']}"
        alike += (other["color"], other["shape"]) == (target["color"], target["shape"])
    assert 10 < alike < 30
    for index in range(40):
        _, row = draw_clip(ClipSettings("track", distractors=2), 0, index)
        kinds = [(o["color"], o["shape"]) for o in row["params"]["objects"]]
        assert "first_box" not in row["params"] and len(set(kinds)) == 3


@pytest.mark.slow
def test_hits_are_the_turns_of_the_path(tmp_path: Path) -> None:
    counts = Counter()
    for frames, row in _clips(tmp_path, "collide", 24):
        places = _places(frames, row["question"].split()[3], blurred=True)[:, :2]
        along = places[:, int(np.ptp(places[:, 1]) > np.ptp(places[:, 0]))]
        moves = np.sign(np.diff(along))
        turns = np.flatnonzero(moves[1:] != moves[:-1]) + 1
        assert len(turns) == row["answer"] and [t / 4 for t in turns] == row["params"]["events"]
        counts[row["answer"]] += 1
    assert set(counts) == {0, 1, 2, 3}


def test_touching_is_when_there_is_one_patch(tmp_path: Path) -> None:
    from scipy.ndimage import binary_dilation, label

    for frames, row in _clips(tmp_path, "collide", 12, kinds=["touch"]):
        words = row["question"].split()
        both = _near(frames, words[0]) | _near(frames, words[3])
        # decoding blurs the seam of two colours
        wide = [binary_dilation(mask, iterations=3) for mask in both]
        patches = [int((np.bincount(label(mask)[0].ravel())[1:] > 60).sum()) for mask in wide]
        assert set(patches) <= {1, 2} and _spans([n == 1 for n in patches], 4) == row["answer"]


def test_st_boxes_lie_in_the_span_and_only_there(tmp_path: Path) -> None:
    for frames, row in _clips(tmp_path, "st", 12, distractors=0):
        (start, end), boxes = row["answer"]["time"], row["answer"]["boxes"]
        assert _spans(_is_there(frames, row["question"].split()[0]), 4) == [[start, end]]
        assert list(boxes) == [f"{t:g}" for t in np.arange(start, end, 0.5)]


def test_the_color_asked_for_is_seen_in_its_span(tmp_path: Path) -> None:
    letters = Counter()
    for frames, row in _clips(tmp_path, "gqa", 12):
        options = row["params"]["options"]
        color = options["ABC".index(row["answer"]["choice"])]
        letters[row["answer"]["choice"]] += 1
        assert (
            len(set(options)) == 3
            and row["params"]["objects"][-1]["shape"] == row["question"].split()[-1]
        )
        assert _spans(_is_there(frames, color), 4) == row["answer"]["spans"]
    assert set(letters) == {"A", "B", "C"}


def test_digits_change_as_often_as_the_text_says() -> None:
    for index in range(40):
        frames, row = draw_clip(ClipSettings("ocr"), 0, index)
        changes = (frames[1:] != frames[:-1]).any((1, 2, 3)).sum()
        assert row["answer"].isdigit() and len(row["answer"]) == changes + 1 in (2, 3)
        assert row["answer"] != row["answer"][::-1] and (frames[0] != frames[-1]).any()


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "ordr"}, r"found 'ordr'\. Did you mean 'order'"),
        (
            {"kinds": ["mve"]},
            r"expected kinds of order among move, cycle, turn, grow, found 'mve'\. Did you mean 'move'",
        ),
        ({"size": 20}, r"expected an even size in 48\.\.2048"),
        ({"size": 57}, r"even size"),
        ({"background": "blue"}, r"background in"),
        ({"distractors": 9}, r"expected 0 to 3 distractors, found 9"),
        ({"first_box": True}, r"first_box with task track only"),
        ({"fps": 0}, r"expected fps in 0\.\.120"),
        ({"seconds": 2.1}, r"whole frames and whole steps of its time grid, found 2\.1 s"),
        ({"grid": 0.3}, r"with a grid of 0\.3 s"),
        ({"grid": 1.0}, r"at least 4 steps of the time grid, found 2"),
        ({"count": 0}, r"expected count >= 1"),
        ({"prefix": "a/b"}, r"usable in file names"),
        ({"codec": "vp9"}, r"expected a codec of"),
    ],
)
def test_wrong_requests_are_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    asked = {"task": "order", "count": 1, "seed": 0, **options}
    with pytest.raises(ConfigError, match=message):
        make_clips(tmp_path, **asked)
    assert not (tmp_path / "data.jsonl").exists()


@pytest.mark.parametrize("task", KINDS)
def test_the_command_line_writes_clips_and_a_sheet(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    assert main([str(tmp_path / "out"), "--task", task, "--count", "3", "--size", "56"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / "data.jsonl")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "data.jsonl",
        "sheet.png",
        "videos",
    ]
    sheet = np.asarray(Image.open(tmp_path / "out" / "sheet.png"))
    assert sheet.shape == (3 * (56 + 34) + 4, 8 * 60 + 4, 3)
    green = (sheet == (60, 220, 90)).all(-1)  # the bar of a true span
    assert green.any() == (task in ("appear", "repeat", "st", "gqa"))


def test_the_command_line_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--task", "nothing"])
