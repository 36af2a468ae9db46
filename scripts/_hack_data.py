"""Data for the search for answers that pay without looking: rows as benchmarks have them, and half-right answers to them.

Rows are written as files and read by the task's own reader. Boxes, spans, counts and words are drawn at random (sizes and places as
in RefCOCO, COCO, Charades-STA and ScreenSpot, roughly), so that a row tells nothing of another.
"""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mmrl.coords import CoordFrame
from mmrl.task import Task
from mmrl.types import ImageSize, RewardContext, Sample, VideoSize

__all__ = ["Asked", "asked", "half_list", "half_right", "rows_of", "spelled"]

WIDTH, HEIGHT = 640, 480
LABELS = ("person", "car", "dog", "chair", "bottle", "tree")
PREDICATES = ("on", "near", "behind", "holding", "under")
CLASSES = ("red", "green", "blue", "yellow", "black", "white", "brown", "grey")
DURATIONS = (8.0, 12.0, 20.0, 30.0)
RESIZED = ImageSize((WIDTH, HEIGHT), (644, 476))
Rows = list[dict[str, Any]]


class Asked(NamedTuple):
    """A sample with the context its answers are scored in: in the preset's frame, else thousandths, at the end of the run."""

    sample: Sample
    ctx: RewardContext


def _box(rng: random.Random, size: float) -> list[int]:
    """A box in pixels whose sides are about `size` of the picture's, nearer to the middle than to the edges."""
    box = []
    for side in (WIDTH, HEIGHT):
        length = min(0.95, max(0.03, size * rng.lognormvariate(0, 0.5)))
        start = min(1 - length, max(0.0, rng.gauss(0.5, 0.22) - length / 2))
        box += [round(start * side), max(round(start * side) + 4, round((start + length) * side))]
    return [box[0], box[2], min(box[1], WIDTH), min(box[3], HEIGHT)]


def _word(rng: random.Random) -> str:
    return "".join(
        rng.choice(("ba", "lo", "ti", "mer", "sun", "ka", "ro", "vel", "ny", "dos"))
        for _ in range(rng.randint(1, 3))
    )


def _grounding(rng: random.Random, number: int) -> dict[str, Any]:
    return {"question": "the thing", "answer": _box(rng, 0.3), "frame": "abs_orig"}


def _objects(rng: random.Random, count: int, labels: Sequence[str]) -> list[dict[str, Any]]:
    return [{"bbox": _box(rng, 0.14), "label": rng.choice(labels)} for _ in range(count)]


def _detection(rng: random.Random, number: int) -> dict[str, Any]:
    labels = rng.sample(LABELS, 1 + number % 3)
    return {
        "question": ", ".join(labels),
        "answer": _objects(rng, 2 + number % 9, labels),
        "frame": "abs_orig",
        "params": {"categories": labels},
    }


def _counting(rng: random.Random, number: int) -> dict[str, Any]:
    points = [
        [rng.uniform(10, WIDTH - 10), rng.uniform(10, HEIGHT - 10)]
        for _ in range(2 + rng.randrange(11))
    ]
    return {"question": "birds", "answer": len(points), "params": {"points": points}}


def _ocr(rng: random.Random, number: int) -> dict[str, Any]:
    return {
        "question": "Read the text.",
        "answer": " ".join(_word(rng) for _ in range(rng.randint(2, 12))),
    }


def _choice(rng: random.Random, number: int) -> dict[str, Any]:
    return {
        "question": "Which?",
        "answer": "ABCD"[rng.randrange(4)],
        "params": {"options": rng.sample(CLASSES, 4)},
    }


def _boolean(rng: random.Random, number: int) -> dict[str, Any]:
    return {"question": "Is it so?", "answer": rng.random() < 0.5}


def _numeric(rng: random.Random, number: int) -> dict[str, Any]:
    return {"question": "How far, in metres?", "answer": round(rng.lognormvariate(2, 1), 1)}


def _math(rng: random.Random, number: int) -> dict[str, Any]:
    a, b, c = (rng.randint(2, 30) for _ in range(3))
    return {
        "question": "Compute.",
        "answer": (str(a * b - c), rf"\frac{{{a}}}{{{a + b}}}", f"{a}x+{b}")[number % 3],
    }


def _open_text(rng: random.Random, number: int) -> dict[str, Any]:
    who, what = (
        rng.choice(("man", "woman", "child", "dog", "cook", "driver", "player", "teacher")),
        _word(rng),
    )
    verb = rng.choice(
        ("opens", "closes", "carries", "drops", "paints", "washes", "hides", "throws")
    )
    end = rng.choice(("and leaves", "in the kitchen", "twice"))
    return {"question": "What happens?", "answer": f"The {who} {verb} the {what} {end}"}


def _chart(rng: random.Random, number: int) -> dict[str, Any]:
    return {
        "question": "What is the value?",
        "answer": str(rng.randrange(3, 99)) if number % 3 else _word(rng),
    }


def _classification(rng: random.Random, number: int) -> dict[str, Any]:
    return {
        "question": "Which colour?",
        "answer": rng.choice(CLASSES),
        "params": {"labels": list(CLASSES)},
    }


def _spatial(rng: random.Random, number: int) -> dict[str, Any]:
    return {
        "question": "Where is it?",
        "answer": rng.choice(("left", "right", "above", "below")),
        "params": {"relations": ["left", "right", "above", "below"]},
    }


def _jigsaw(rng: random.Random, number: int) -> dict[str, Any]:
    grid = [2, 2 + number % 2]
    return {
        "question": "Restore it.",
        "answer": rng.sample(range(1, grid[0] * grid[1] + 1), grid[0] * grid[1]),
        "params": {"grid": grid},
    }


def _scene_graph(rng: random.Random, number: int) -> dict[str, Any]:
    objects = [
        {"id": str(i + 1), **item} for i, item in enumerate(_objects(rng, 2 + number % 4, LABELS))
    ]
    pairs = [(a["id"], b["id"]) for a in objects for b in objects if a is not b]
    relations = [
        [a, rng.choice(PREDICATES), b] for a, b in rng.sample(pairs, min(len(pairs), len(objects)))
    ]
    return {
        "question": "Describe the picture.",
        "answer": {"objects": objects, "relations": relations},
        "frame": "abs_orig",
    }


def _gui(rng: random.Random) -> list[int]:
    width, height = rng.randint(24, 160), rng.randint(14, 44)
    x, y = rng.randint(0, WIDTH - width), rng.randint(0, HEIGHT - height)
    return [x, y, x + width, y + height]


def _gui_grounding(rng: random.Random, number: int) -> dict[str, Any]:
    return {"question": "the button", "answer": _gui(rng), "frame": "abs_orig"}


def _gui_action(rng: random.Random, number: int) -> dict[str, Any]:
    kind = rng.random()
    answer: dict[str, Any] = {"action": "click", "bbox": _gui(rng)}
    if kind > 0.6:
        answer = rng.choice(
            (
                {"action": "scroll", "direction": rng.choice(("up", "down", "left", "right"))},
                {"action": "type", "text": f"{_word(rng)} {_word(rng)}"},
                {"action": "open_app", "app": _word(rng)},
                {"action": "wait"},
                {"action": "complete"},
            )
        )
    return {"question": "the next step", "answer": answer, "frame": "abs_orig"}


def _span(rng: random.Random, duration: float) -> list[float]:
    length = duration * rng.uniform(0.12, 0.4)
    start = rng.uniform(0, duration - length)
    return [round(start, 1), round(start + length, 1)]


def _clip(number: int) -> dict[str, Any]:
    duration = DURATIONS[number % len(DURATIONS)]
    return {
        "video": f"clips/{duration:g}",
        "params": {"width": WIDTH, "height": HEIGHT, "duration": duration},
    }


def _temporal(rng: random.Random, number: int) -> dict[str, Any]:
    row = _clip(number)
    return {**row, "question": "it happens", "answer": [_span(rng, row["params"]["duration"])]}


def _grounded_qa(rng: random.Random, number: int) -> dict[str, Any]:
    row = _clip(number)
    return {
        **row,
        "question": "Which?",
        "params": {**row["params"], "options": rng.sample(CLASSES, 4)},
        "answer": {
            "choice": "ABCD"[rng.randrange(4)],
            "spans": [_span(rng, row["params"]["duration"])],
        },
    }


def _path(rng: random.Random, seconds: Sequence[int]) -> dict[str, list[int]]:
    """A box that moves in a straight line."""
    first, last = _box(rng, 0.22), _box(rng, 0.22)
    width, height, most = first[2] - first[0], first[3] - first[1], max(1, len(seconds) - 1)
    x2, y2 = min(last[0], WIDTH - width), min(last[1], HEIGHT - height)
    places = [
        (round(first[0] + i / most * (x2 - first[0])), round(first[1] + i / most * (y2 - first[1])))
        for i in range(len(seconds))
    ]
    return {
        str(second): [x, y, x + width, y + height]
        for second, (x, y) in zip(seconds, places, strict=True)
    }


def _st_grounding(rng: random.Random, number: int) -> dict[str, Any]:
    row = _clip(number)
    length = max(3, round(row["params"]["duration"] * rng.uniform(0.2, 0.5)))
    start = rng.randrange(int(row["params"]["duration"]) - length)
    boxes = _path(rng, range(start, start + length))
    return {
        **row,
        "question": "the thing",
        "answer": {"time": [start, start + length], "boxes": boxes},
    }


def _tracking(rng: random.Random, number: int) -> dict[str, Any]:
    row = _clip(0)
    return {
        **row,
        "question": "the thing",
        "answer": {"boxes": _path(rng, range(8))},
        "params": {**row["params"], **({"first_box": True} if number % 2 else {})},
    }


_MAKERS: Mapping[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "grounding": _grounding,
    "detection": _detection,
    "counting": _counting,
    "ocr": _ocr,
    "choice": _choice,
    "boolean": _boolean,
    "numeric": _numeric,
    "math": _math,
    "open_text": _open_text,
    "chart": _chart,
    "classification": _classification,
    "spatial": _spatial,
    "jigsaw": _jigsaw,
    "scene_graph": _scene_graph,
    "gui_grounding": _gui_grounding,
    "gui_action": _gui_action,
    "temporal_grounding": _temporal,
    "grounded_qa": _grounded_qa,
    "st_grounding": _st_grounding,
    "tracking": _tracking,
}


def rows_of(task: str, count: int, seed: int) -> Rows:
    """`count` rows of the task's own format, without their pictures."""
    rng = random.Random(f"{task}/{seed}")
    return [
        {"id": f"{task}-{i}", "source": "search", **_MAKERS[task](rng, i)} for i in range(count)
    ]


def _write(task: str, folder: Path, count: int, seed: int) -> str:
    from PIL import Image

    from mmrl.tasks.maze import make_mazes

    if task == "maze":
        return make_mazes(str(folder), count, size=4, seed=seed)
    rows = rows_of(task, count, seed)
    if "video" in rows[0]:
        for duration in DURATIONS:  # two frames a second
            clip = folder / f"clips/{duration:g}"
            clip.mkdir(parents=True)
            for frame in range(round(2 * duration)):
                Image.new("RGB", (WIDTH, HEIGHT), (9, 9, frame)).save(clip / f"{frame + 1:08d}.png")
    else:
        Image.new("RGB", (WIDTH, HEIGHT), (9, 9, 9)).save(folder / "picture.png")
        rows = [{"image": "picture.png", **row} for row in rows]
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@functools.lru_cache(maxsize=2)
def _written(task: str, count: int, seed: int) -> tuple[tempfile.TemporaryDirectory[str], str]:
    """A task's data file in a folder that lives as long as it is remembered: its presets ask the same questions."""
    folder = tempfile.TemporaryDirectory()
    return folder, _write(task, Path(folder.name), count, seed)


def asked(task: Task, count: int, seed: int = 0) -> list[Asked]:
    """`count` samples of a task, read by its own reader, with their contexts."""
    _, path = _written(task.name, count, seed)
    samples = list(task.load(path))
    if len(samples) != count:
        raise AssertionError(
            f"expected {count} rows of {task.name} to be readable, found {len(samples)}"
        )
    out, frame = [], getattr(task, "frame", None) or CoordFrame.REL1000
    for sample in samples:
        videos = tuple(
            VideoSize((WIDTH, HEIGHT), RESIZED.resized_wh, float(sample.params["duration"]))
            for _ in sample.videos
        )
        out.append(
            Asked(
                sample,
                RewardContext(
                    1,
                    1,
                    frame,
                    tuple(RESIZED for _ in sample.images),
                    num_tokens=24,
                    max_tokens=1024,
                    videos=videos,
                ),
            )
        )
    return out


# half-right answers


def spelled(task: Any, one: Asked, truth: Any, **params: Any) -> str:
    """The task's own right answer to the question, were `truth` its truth: in the form and the frame of its preset."""
    return str(
        task.gold_answer(
            replace(one.sample, answer=truth, params={**one.sample.params, **params}), one.ctx
        )
    )


def half_list(items: Sequence[Any], number: int) -> Any:
    """The first half of a list (of an odd one, one more or one less by turns)."""
    return items[: (len(items) + number % 2) // 2]


def _half_box(box: Sequence[float]) -> tuple[float, ...]:
    """The left half of a box: IoU 0.5."""
    return box[0], box[1], (box[0] + box[2]) / 2, box[3]


def _half_graph(truth: Mapping[str, Any], number: int) -> dict[str, Any]:
    objects = half_list(truth["objects"], number)
    ids = {str(item["id"]) for item in objects}
    return {
        "objects": objects,
        "relations": [r for r in truth["relations"] if str(r[0]) in ids and str(r[2]) in ids],
    }


def _half_boxes(boxes: Mapping[str, Any]) -> dict[str, Any]:
    """Right boxes at every second time, a corner of the picture at the others."""
    return {key: box if i % 2 == 0 else [0, 0, 1, 1] for i, (key, box) in enumerate(boxes.items())}


def _half_tube(truth: Mapping[str, Any]) -> dict[str, Any]:
    (start, end), boxes = truth["time"], truth["boxes"]
    return {
        "time": [start, (start + end) / 2],
        "boxes": {key: boxes[key] for key in list(boxes)[: len(boxes) // 2]},
    }


def _half_grounded(truth: Mapping[str, Any], number: int) -> dict[str, Any]:
    letter = truth["choice"] if number % 2 else "ABCD"[("ABCD".index(truth["choice"]) + 1) % 4]
    return {"choice": letter, "spans": [[s, (s + e) / 2] for s, e in truth["spans"]]}


def _half_text(task: Any, one: Asked, number: int) -> tuple[str, str] | None:
    """As `half_right`, of answers that are texts."""
    mode, truth = task.settings["mode"], one.sample.answer
    if task.name in ("ocr", "open_text"):
        words = task.gold_answer(one.sample, one.ctx).split()
        return "half of the words", " ".join(words[: (len(words) + 1) // 2])
    if task.name == "counting" and mode != "exact":
        return "half of the objects", str((truth + number % 2) // 2)
    if task.name == "maze" and mode == "progress":
        return "half of the way", ", ".join(truth[: (len(truth) + 1) // 2])
    if task.name == "jigsaw" and mode == "pieces":
        middle = len(truth) // 2
        return "half of the pieces", str([*truth[:middle], *truth[middle + 1 :], truth[middle]])
    return None


def half_right(task: Any, one: Asked, number: int) -> tuple[str, str] | None:
    """(what it is, answer text) that an honest policy gives which is half right; None where an answer is right or wrong."""
    truth, name = one.sample.answer, task.name
    if name == "grounding" or (name == "gui_grounding" and task.settings["reply"] == "box"):
        return "a box of IoU 0.5", spelled(task, one, _half_box(truth))
    if name == "detection":
        return "half of the objects", spelled(task, one, half_list(truth, number))
    if name == "counting" and task.settings["mode"] == "points":
        half = half_list(one.sample.params["points"], number)
        return "half of the points", spelled(task, one, len(half), points=half)
    if name == "scene_graph":
        return "half of the graph", spelled(task, one, _half_graph(truth, number))
    if name == "tracking":
        return "every second box", spelled(task, one, {"boxes": _half_boxes(truth["boxes"])})
    if name == "st_grounding":
        return "half of the tube", spelled(task, one, _half_tube(truth))
    if name == "grounded_qa":
        return "half of the letters, half of each span", spelled(
            task, one, _half_grounded(truth, number)
        )
    if name == "temporal_grounding":
        return "half of the span", spelled(task, one, [[s, (s + e) / 2] for s, e in truth])
    return _half_text(task, one, number)
