"""GUI benchmarks: ScreenSpot's cells, and AndroidControl under each published rule with that rule's own denominators.

ScreenSpot (v1, v2, Pro): a point in the element's box, edges included, is a hit; no point is a miss. Per cell (platform x
text / icon), the mean of the cells (the SeeClick paper's "average") and micro (hits / all) both, since papers use either.

AndroidControl: `os_atlas`, `gui_r1`, `ui_r1`, `odyssey` and `strict` (mmrl.rewards.gui_actions.RULES). The 14 % radius of the
first four is lenient and belongs beside the number.

    python -c "from mmrl.tasks.metrics.gui import screenspot, Spot as S; \
      print(screenspot([S('web', 'text', (5, 5), (0, 0, 9, 9))]))"
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmrl.rewards.gui import centre, in_box
from mmrl.rewards.gui_actions import RULES, Action, Match, match_action
from mmrl.rewards.parsing import Box
from mmrl.tasks.truths import of_sample
from mmrl.types import Sample, Score

__all__ = [
    "PLATFORM_OF",
    "PRESETS",
    "Spot",
    "Step",
    "android_control",
    "screenspot",
    "screenspot_pro",
    "true_action",
    "write_actions",
    "write_grounding",
]

PLATFORM_OF = {
    "ios": "mobile",
    "android": "mobile",
    "windows": "desktop",
    "macos": "desktop",
    "linux": "desktop",
    **dict.fromkeys(("gitlab", "shop", "forum", "tool"), "web"),
}
"""ScreenSpot's data_source -> platform, for files that name no platform."""
PRESETS = {
    "os_atlas": "os_atlas",
    "gui_r1": "gui_r1_benchmark",
    "ui_r1": "ui_r1_benchmark",
    "odyssey": "odyssey",
    "strict": "strict",
}
"""Name of an evaluation -> its MatchRule."""


_STEP_ID = re.compile(r"(.+)(?:_screenshot_|-)\d+")


class Spot(NamedTuple):
    """One grounding answer: `point` in pixels (None: no answer), `box` = (x1, y1, x2, y2) in pixels."""

    platform: str
    ui_type: str
    point: tuple[float, float] | None
    box: tuple[float, float, float, float]
    group: str | None = None

    @property
    def hit(self) -> bool:
        """Inside the box, edges included."""
        return self.point is not None and in_box(self.point, self.box)


class Step(NamedTuple):
    """One step: the predicted action (None: no answer), the right one, the picture's size, the episode it belongs to, and
    whether the prompt asked where to type and select."""

    found: Action | None
    true: Action
    size: tuple[int, int]
    episode: str | None = None
    asked: bool = False

    def match(self, preset: str) -> Match:
        """What agrees by the rule of an evaluation, one of PRESETS."""
        rule = RULES[PRESETS[preset]]
        return match_action(self.found, self.true, rule, self.size, asked=self.asked)


def _share(hits: Iterable[bool | None]) -> float:
    """Mean of what is not None; 0 for nothing."""
    counted = [bool(hit) for hit in hits if hit is not None]
    return sum(counted) / len(counted) if counted else 0.0


def screenspot(spots: Sequence[Spot]) -> dict[str, float]:
    """'<platform>_<ui_type>' per cell that has rows, 'mean_of_<n>_cells', 'micro' and 'wrong_format' (share without a point).

    With all six cells, mean_of_6_cells is the average of the SeeClick paper.
    """
    if not spots:
        return {}
    cells: dict[str, list[bool]] = {}
    for spot in spots:
        cells.setdefault(f"{spot.platform}_{spot.ui_type}", []).append(spot.hit)
    numbers = {name: _share(hits) for name, hits in sorted(cells.items())}
    return {
        **numbers,
        f"mean_of_{len(cells)}_cells": sum(numbers.values()) / len(cells),
        "micro": _share(spot.hit for spot in spots),
        "wrong_format": _share(spot.point is None for spot in spots),
    }


def screenspot_pro(spots: Sequence[Spot]) -> dict[str, dict[str, float]]:
    """'overall' and 'group:<name>' -> the official script's fields (action_acc, text_acc, icon_acc and the counts)."""
    groups = {"overall": list(spots)}
    for spot in spots:
        if spot.group is not None:
            groups.setdefault(f"group:{spot.group}", []).append(spot)
    return {
        name: {
            "num_correct_action": sum(spot.hit for spot in some),
            "num_total": len(some),
            "wrong_format_num": sum(spot.point is None for spot in some),
            "action_acc": _share(spot.hit for spot in some),
            "text_acc": _share(spot.hit for spot in some if spot.ui_type == "text"),
            "icon_acc": _share(spot.hit for spot in some if spot.ui_type == "icon"),
        }
        for name, some in groups.items()
    }


def android_control(steps: Sequence[Step], preset: str = "os_atlas") -> dict[str, float]:
    """The numbers of one evaluation; a step without an answer is wrong in each it belongs to.

    os_atlas  type_accuracy, step_success over all steps; grounding over the clicks that were answered with a click
    gui_r1    type_accuracy over all; grounding over the steps with a place; step_success = (place hits + text hits) / (their
              counts), whatever the predicted type: steps without arguments are left out, as in its script
    ui_r1     type_accuracy over all, click_accuracy over the clicks: the type and the place must be right
    odyssey   ams over all steps; success_rate over the episodes whose steps are all right (when episodes are known)
    strict    type_accuracy, step_success over all; grounding and text over the steps that have one, with the type right
    """
    matches = [step.match(preset) for step in steps]
    kinds, places, texts = (
        [m.type for m in matches],
        [m.place for m in matches],
        [m.text for m in matches],
    )
    if preset == "odyssey":
        numbers = {"ams": _share(m.step for m in matches)}
        episodes: dict[str, bool] = {}
        for step, match in zip(steps, matches, strict=True):
            if step.episode is not None:
                episodes[step.episode] = episodes.get(step.episode, True) and match.step
        return {**numbers, "success_rate": _share(episodes.values())} if episodes else numbers
    if preset == "ui_r1":
        tapped = [
            m.place and m.type
            for m, step in zip(matches, steps, strict=True)
            if step.true.action == "click"
        ]
        return {"type_accuracy": _share(kinds), "click_accuracy": _share(tapped)}
    if preset == "gui_r1":
        return {
            "type_accuracy": _share(kinds),
            "grounding": _share(places),
            "step_success": _share([*places, *texts]),
        }
    if preset == "strict":
        return {
            "type_accuracy": _share(kinds),
            "step_success": _share(m.step for m in matches),
            "grounding": _share(
                m.place and m.type if m.place is not None else None for m in matches
            ),
            "text": _share(m.text and m.type if m.text is not None else None for m in matches),
        }
    clicks = [
        m.place
        for m, step in zip(matches, steps, strict=True)
        if m.type and step.true.action == "click"
    ]
    return {
        "type_accuracy": _share(kinds),
        "grounding": _share(clicks),
        "step_success": _share(m.step for m in matches),
    }


# evaluations -> numbers and files


def _spot(sample: Sample, score: Score) -> Spot:
    params, points = sample.params, score.detail.get("pred_points") or []
    source = str(params.get("data_source", sample.source))
    platform = str(params.get("platform") or PLATFORM_OF.get(source.lower(), source))
    x1, y1, x2, y2 = sample.answer
    point = (points[0][0], points[0][1]) if score.parsed and points else None
    return Spot(
        platform,
        str(params.get("ui_type", "any")),
        point,
        (x1, y1, x2, y2),
        params.get("group") if "application" in params else None,
    )


def _over(values: Sequence[float], params: Mapping[str, Any]) -> list[float] | None:
    """Pixels as shares of the picture, as SeeClick's file has them; None without the picture's size."""
    width, height = params.get("width"), params.get("height")
    return (
        [v / (height if i % 2 else width) for i, v in enumerate(values)]
        if width and height
        else None
    )


def write_grounding(pairs: Sequence[tuple[Sample, Score]], folder: Path) -> dict[str, float]:
    """ScreenSpot's numbers, and its prediction files in `folder`.

    screenspot.json: SeeClick's list (img_path, text, bbox, pred, type, source; shares of the picture; pred null for an
    answer without a point, which SeeClick leaves out of the list and in the denominators). With params.application and
    params.group (ScreenSpot-Pro) also screenspot_pro.json: the official script's {"metrics", "details"} in pixels, without
    raw_response, which is in predictions.jsonl.
    """
    if not pairs:
        return {}
    spots = [_spot(sample, score) for sample, score in pairs]
    rows = [
        {
            "img_path": next(iter(sample.images), ""),
            "text": sample.question,
            "bbox": _over(spot.box, sample.params),
            "pred": _over(spot.point, sample.params) if spot.point else None,
            "type": spot.ui_type,
            "source": sample.params.get("data_source", sample.source),
        }
        for (sample, _), spot in zip(pairs, spots, strict=True)
    ]
    _write(folder / "screenspot.json", rows)
    numbers = screenspot(spots)
    if all(spot.group is None for spot in spots):
        return numbers
    table = screenspot_pro(spots)
    details = [
        {
            "img_path": next(iter(sample.images), ""),
            "group": spot.group,
            "platform": spot.platform,
            "application": sample.params.get("application"),
            "lang": "en",
            "instruction_style": "instruction",
            "prompt_to_evaluate": sample.question,
            "gt_type": "positive",
            "ui_type": spot.ui_type,
            "task_filename": sample.source,
            "pred": list(spot.point) if spot.point else None,
            "raw_response": None,
            "bbox": list(spot.box),
            "correctness": "correct" if spot.hit else "wrong" if spot.point else "wrong_format",
        }
        for (sample, _), spot in zip(pairs, spots, strict=True)
    ]
    metrics = {
        "overall": table["overall"],
        "leaderboard_simple_style": {name: row for name, row in table.items() if name != "overall"},
    }
    _write(folder / "screenspot_pro.json", {"metrics": metrics, "details": details})
    return {
        **numbers,
        **{
            f"{name}/{field}": row[field]
            for name, row in table.items()
            for field in ("action_acc", "text_acc", "icon_acc")
        },
    }


def _episode(sample: Sample) -> str | None:
    """params.episode, else what the ids of AndroidControl (episode_7_screenshot_2) and GUI-Odyssey (name-2) begin with."""
    if "episode" in sample.params:
        return str(sample.params["episode"])
    found = (
        _STEP_ID.fullmatch(sample.id)
        if sample.source.startswith(("AndroidControl", "GUI-Odyssey"))
        else None
    )
    return found[1] if found else None


@of_sample
def true_action(sample: Sample) -> Action:
    """Sample.answer as an Action; a box without a point gets its middle, a point takes the box of params.sam2_bbox."""
    answer = sample.answer
    corners = answer.get("bbox") or (
        sample.params.get("sam2_bbox") if answer.get("point") else None
    )
    box: Box | None = tuple(corners) if corners else None
    point = (
        tuple(answer["point"])
        if answer.get("point") is not None
        else (centre(box) if box else None)
    )
    end = tuple(answer["end"]) if answer.get("end") is not None else None
    text = next(
        (answer[key] for key in ("text", "app", "keys") if answer.get(key) is not None), None
    )
    return Action(answer["action"], point, box, end, text, answer.get("direction"))


def write_actions(pairs: Sequence[tuple[Sample, Score]], folder: Path) -> dict[str, float]:
    """'<preset>/<number>' under every rule, and gui_actions.jsonl: id, both actions, and per preset what was right."""
    if not pairs:
        return {}
    steps = []
    for sample, score in pairs:
        found = score.detail.get("pred_action") if score.parsed else None
        width, height = score.detail.get("size") or (
            sample.params.get("width", 1),
            sample.params.get("height", 1),
        )
        steps.append(
            Step(
                true_action(Sample("", "", "", "", found)) if found else None,
                true_action(sample),
                (width, height),
                _episode(sample),
                bool(score.detail.get("place_asked")),
            )
        )
    with (folder / "gui_actions.jsonl").open("w", encoding="utf-8") as file:
        for (sample, score), step in zip(pairs, steps, strict=True):
            matches = {name: step.match(name) for name in PRESETS}
            row = {
                "id": sample.id,
                "episode": step.episode,
                "pred_action": score.detail.get("pred_action"),
                "gold_action": sample.answer,
                "matches": {
                    name: {"type": m.type, "place": m.place, "text": m.text}
                    for name, m in matches.items()
                },
            }
            file.write(json.dumps(row) + "\n")
    return {
        f"{preset}/{name}": value
        for preset in PRESETS
        for name, value in android_control(steps, preset).items()
    }


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
