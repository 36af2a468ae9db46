"""The video part of assets.make_official_goldens: made-up truths and predictions for temporal grounding, grounded video
questions, highlights and tracking. See there for what is done with them.

    python -c "from assets.official_video_inputs import charades; print(charades()['rows'][0])"
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

__all__ = ["VIDEO_INPUTS", "charades", "choices", "got10k", "nextgqa", "qvhighlights"]

Row = dict[str, Any]


def _span(rng: random.Random, duration: float, decimals: int = 1) -> list[float]:
    start = rng.uniform(0, duration * 0.7)
    return [round(start, decimals), round(rng.uniform(start + duration * 0.05, duration), decimals)]


def charades() -> Row:
    """Queries with one true span; `span` is what the answer text holds (null: nothing readable). Half are whole percents. Some true
    ends lie behind the video's end; some answers end far behind it, before they start, or at once."""
    rng, rows = random.Random(71), []
    for number in range(60):
        duration = 100.0 if number % 2 else round(rng.uniform(15, 90), 1)
        true = _span(rng, duration)
        if number % 7 == 0:
            true[1] = round(duration + rng.uniform(0.1, 1.5), 1)
        kind = rng.choice(
            ["same", "near", "near", "half", "other", "none", "over", "reversed", "instant"]
        )
        found: list[float] | None = list(true)
        if kind == "near":
            found = [max(0.0, round(v + rng.uniform(-0.1, 0.1) * duration, 1)) for v in true]
        elif kind == "half":  # an IoU of exactly one half, or next to it
            found = [true[0], round(true[0] + (true[1] - true[0]) / 2, 1)]
        elif kind == "other":
            found = _span(rng, duration)
        elif kind == "none":
            found = None
        elif kind == "over":
            found = [true[0], round(duration + rng.choice([0.5, 8.0, 60.0, 1e6]), 1)]
        elif kind == "reversed":
            found = true[::-1]
        elif kind == "instant":
            found = [true[0], true[0]]
        if found and number % 2:
            found = [float(round(v)) for v in found]
        text = (
            f"{found[0]} - {found[1]} seconds"
            if found
            else rng.choice(["", "never", "I do not know."])
        )
        percent = (
            f"From {found[0]:02.0f} to {found[1]:02.0f}."
            if found and number % 2 and max(found) < 100
            else None
        )
        rows.append(
            {
                "video": f"V{number:03d}.mp4",
                "duration": duration,
                "true": true,
                "span": found,
                "text": text,
                "percent": percent,
            }
        )
    return {"rows": rows}


def qvhighlights() -> Row:
    """The official submission and ground truth, every query answered with one window at least (the program needs one). Windows
    reach behind the video's end, end before they start, are there twice or without length."""
    rng, truth, submission = random.Random(72), [], []
    for number in range(24):
        duration = rng.choice([150, 150, 60, 90])
        clips = duration // 2
        windows, at = [], 0
        for _ in range(rng.randrange(1, 4)):
            start = at + rng.randrange(0, 10)
            length = rng.choice([1, 3, 5, 8, 15, 20])
            if start + length > clips:
                break
            windows.append([2 * start, 2 * (start + length)])
            at = start + length + 1
        windows = windows or [[0, 10]]
        ids = [i for s, e in windows for i in range(s // 2, e // 2)]
        same = number % 6 == 0  # every clip with the same marks
        marks = [[3, 3, 3] if same else [rng.randrange(0, 5) for _ in range(3)] for _ in ids]
        truth.append(
            {
                "qid": 1000 + number,
                "query": f"query {number}",
                "duration": duration,
                "vid": f"v{number}",
                "relevant_windows": windows,
                "relevant_clip_ids": ids,
                "saliency_scores": marks,
            }
        )
        found: list[list[float]] = []
        for window in windows:
            if rng.random() < 0.85:
                shift = (window[1] - window[0]) * rng.choice([0.0, 0.0, 0.04, 0.1, 0.18, 0.3, 0.6])
                found.append([round(max(0.0, window[0] - shift), 2), round(window[1] + shift, 2)])
        for _ in range(rng.choice([0, 1, 3, 12])):
            start = rng.randrange(0, duration - 4)
            found.append([float(start), float(rng.randrange(start + 1, duration))])
        if number % 4 == 1:
            found.insert(
                rng.randrange(len(found) + 1),
                rng.choice([[*windows[0]][::-1], [float(duration), 2.0], [6.0, 6.0]]),
            )
        if number % 5 == 0 and found:
            found.append(list(found[0]))
        if number % 5 == 2:
            found.append([float(windows[-1][0]), 1e6])
        if number % 3 == 0:
            rng.shuffle(found)
        found = found or [[0.0, 2.0]]
        scores = (
            [0.5] * len(found)
            if number % 4 == 0
            else sorted((rng.random() for _ in found), reverse=number % 4 != 1)
        )
        liked = {i: sum(mark) / 6 for i, mark in zip(ids, marks, strict=True)}
        saliency = [
            round(rng.uniform(-1, 1) + liked.get(i, 0.0), 2 if number % 3 else 0)
            for i in range(clips + rng.choice([0, 0, -3, 2]))
        ]
        submission.append(
            {
                "qid": 1000 + number,
                "query": f"query {number}",
                "vid": f"v{number}",
                "pred_relevant_windows": [
                    [*w, round(s, 4)] for w, s in zip(found, scores, strict=True)
                ],
                "pred_saliency_scores": saliency,
            }
        )
    return {"truth": truth, "submission": submission}


def nextgqa() -> Row:
    """gsub.json's form, one predicted span per question, and answers. `missing` are questions without a prediction, which the
    program leaves out of every mean. Some truths start before 0; some predictions end behind the video or before they start."""
    rng = random.Random(73)
    truth: Row = {}
    spans: dict[str, list[float]] = {}
    answers: dict[str, Row] = {}
    missing = []
    for video in range(12):
        duration = round(rng.uniform(20, 120), 1)
        location: dict[str, list[list[float]]] = {}
        for question in range(rng.randrange(1, 5)):
            key = f"v{video}_{question}"
            where = sorted(_span(rng, duration) for _ in range(rng.randrange(1, 4)))
            location[str(question)] = where
            if video % 3 == 0:
                where[0][0] = -0.1
            start, end = rng.choice(where)
            kind = rng.choice(
                [
                    "same",
                    "inside",
                    "around",
                    "other",
                    "instant",
                    "instant outside",
                    "missing",
                    "over",
                    "reversed",
                ]
            )
            spans[key] = {
                "same": [start, end],
                "inside": [start, round((start + end) / 2, 1)],
                "around": [round(start - (end - start), 1), round(end + (end - start) / 2, 1)],
                "over": [start, round(duration + rng.choice([3.0, 40.0, 1e6]), 1)],
                "reversed": [end, start],
                "other": _span(rng, duration),
                "instant": [start, start],
                "instant outside": [duration + 5, duration + 5],
                "missing": [0.0, 0.0],
            }[kind]
            if kind == "missing":
                del spans[key]
                missing.append(key)
            answers[key] = {"answer": rng.randrange(5), "prediction": rng.randrange(5)}
            if rng.random() < 0.6:
                answers[key]["prediction"] = answers[key]["answer"]
        truth[f"v{video}"] = {"duration": duration, "location": location, "fps": 30.0}
    return {"truth": truth, "spans": spans, "answers": answers, "missing": missing}


def got10k() -> Row:
    """Sequences: size, boxes [x, y, w, h] per frame, the share of the target that is visible (cover, 0 to 8), and predictions."""
    rng, sequences = random.Random(74), []
    for number in range(6):
        width, height = rng.choice([(320, 240), (640, 360)])
        frames = rng.randrange(8, 18)
        x, y, w, h = (
            width * rng.choice([0.2, 0.7]),
            height * rng.choice([0.2, 0.6]),
            width * 0.2,
            height * 0.25,
        )
        true, found, cover = [], [], []
        for frame in range(frames):
            x, y = x + rng.uniform(-12, 25), y + rng.uniform(-8, 14)
            w, h = max(6.0, w + rng.uniform(-4, 4)), max(6.0, h + rng.uniform(-4, 4))
            true.append([round(v, 3) for v in (x, y, w, h)])
            off = rng.choice([0.0, 0.05, 0.1, 0.12, 0.14, 0.25, 0.4, 3.0])
            guess = [x + off * w * rng.choice([-1, 1]), y + off * h * 0.5, w * (1 + off / 3), h]
            # wholly outside
            guess = guess if rng.random() > 0.07 else [width + 50.0, height + 50.0, 20.0, 20.0]
            found.append([round(v, 3) for v in (guess if frame else true[0])])
            cover.append(0 if frame and rng.random() < 0.15 else rng.randrange(1, 9))
        sequences.append(
            {
                "name": f"GOT-10k_Val_{number + 1:06d}",
                "size": [width, height],
                "boxes": true,
                "cover": cover,
                "predictions": found,
            }
        )
    return {"sequences": sequences}


_MLVU_DEV = ("anomaly_reco", "count", "ego", "needle", "order", "plotQA", "topic_reasoning")
_MLVU_TEST = (
    "anomaly_reco",
    "count",
    "ego",
    "needleQA",
    "order",
    "plotQA",
    "sportsQA",
    "topic_reasoning",
    "tutorialQA",
)
_MVBENCH = ("action_count", "moving_direction", "object_shuffle")


def choices() -> Row:
    """Multiple-choice answers of MLVU, MVBench and Video-MME: category, right letter, answer text. MLVU's test set has six options,
    MVBench's last task has empty answers."""
    rng = random.Random(75)

    def rows(categories: tuple[str, ...], count: int, letters: str) -> list[Row]:
        made = []
        for number in range(count):
            right = rng.choice(letters)
            said = right if rng.random() < 0.6 else rng.choice(letters)
            category = (
                categories[number]
                if number < len(categories)
                else rng.choice(categories[: 1 + number % len(categories)])
            )
            made.append(
                {
                    "category": category,
                    "answer": right,
                    "said": rng.choice([said, said, f"{said}.", f"({said})"]),
                }
            )
        return made

    mvbench = rows(_MVBENCH, 45, "ABCD")
    for row in mvbench:
        if row["category"] == _MVBENCH[-1] and rng.random() < 0.4:
            row["said"] = ""
    return {
        "mlvu_dev": rows(_MLVU_DEV, 60, "ABCD"),
        "mlvu_test": rows(_MLVU_TEST, 70, "ABCDEF"),
        "mvbench": mvbench,
        "videomme": rows(("short", "medium", "long"), 40, "ABCD"),
    }


VIDEO_INPUTS: tuple[Callable[[], Row], ...] = (charades, choices, qvhighlights, nextgqa, got10k)
