"""Draw the README's picture from a run of the demo: the same held-out pictures before and after training.

    python -m scripts.demo && python -m scripts.draw_pictures runs/demo      # writes docs/pictures/demo.svg

Shown are the first held-out pictures whose greedy answers before and after can both be read: the true box, the answer before the
first step and the one after the last. Nothing is chosen by how much it improved.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.rewards.iou import box_iou
from scripts._bench import ROOT

__all__ = ["draw", "picked"]

TARGET = ROOT / "docs" / "pictures" / "demo.svg"
_SIDE, _GAP, _HEAD, _FOOT = 168, 14, 30, 42
_COLOURS = {"truth": "#111111", "before": "#d6336c", "after": "#2b8a3e"}


def _greedy(run: Path, step: str) -> dict[str, dict[str, Any]]:
    lines = (run / "eval" / step / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = (json.loads(line) for line in lines)
    return {row["id"]: row for row in rows if row["mode"] == "greedy"}


def _box(row: Mapping[str, Any]) -> tuple[float, float, float, float] | None:
    found = re.search(r"\[([\d., ]+)\]", row["text"])
    numbers = [float(part) for part in found[1].split(",")] if found else []
    return (numbers[0], numbers[1], numbers[2], numbers[3]) if len(numbers) == 4 else None


def picked(run: Path, count: int) -> list[dict[str, Any]]:
    """The first `count` held-out pictures with a box before and after: question, picture, boxes and IoUs."""
    steps = sorted(path.name for path in (run / "eval").glob("step_*"))
    before, after = _greedy(run, steps[0]), _greedy(run, steps[-1])
    shown: list[dict[str, Any]] = []
    for name in sorted(after):
        first, last = _box(before[name]), _box(after[name])
        truth = after[name]["sample"]["answer"]
        if first is None or last is None or len(shown) == count:
            continue
        shown.append(
            {
                "question": after[name]["question"],
                "image": after[name]["images"][0],
                "truth": truth,
                "before": first,
                "after": last,
                "iou": (box_iou(first, truth), box_iou(last, truth)),
            }
        )
    return shown


def _one(item: Mapping[str, Any], left: int, size: int) -> list[str]:
    scale, data = _SIDE / size, base64.b64encode(Path(item["image"]).read_bytes()).decode()
    parts = [
        f'<image x="{left}" y="{_HEAD}" width="{_SIDE}" height="{_SIDE}" '
        f'href="data:image/png;base64,{data}"/>'
    ]
    for who, dash in (("truth", ' stroke-dasharray="5 4"'), ("before", ""), ("after", "")):
        x0, y0, x1, y1 = (scale * number for number in item[who])
        parts.append(
            f'<rect x="{left + x0:.1f}" y="{_HEAD + y0:.1f}" width="{x1 - x0:.1f}" '
            f'height="{y1 - y0:.1f}" fill="none" stroke="{_COLOURS[who]}" stroke-width="2.5"{dash}/>'
        )
    middle, below = left + _SIDE / 2, _HEAD + _SIDE
    iou = f"IoU {item['iou'][0]:.2f} to {item['iou'][1]:.2f}"
    for words, y in ((item["question"], below + 17), (iou, below + 34)):
        parts.append(f'<text x="{middle}" y="{y}" text-anchor="middle">{words}</text>')
    return parts


def draw(items: Sequence[Mapping[str, Any]], size: int = 112) -> str:
    """SVG of the pictures side by side; `size` is the side of a picture in its own pixels."""
    width = len(items) * (_SIDE + _GAP) + _GAP
    legend, at = [], _GAP
    for who, words in (
        ("truth", "truth"),
        ("before", "before training"),
        ("after", "after 150 steps"),
    ):
        legend.append(
            f'<rect x="{at}" y="9" width="14" height="12" fill="none" stroke="{_COLOURS[who]}" '
            f'stroke-width="2.5"/><text x="{at + 20}" y="20">{words}</text>'
        )
        at += 46 + 7 * len(words)
    body = [
        part
        for place, item in enumerate(items)
        for part in _one(item, _GAP + place * (_SIDE + _GAP), size)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEAD + _SIDE + _FOOT}" '
            'font-family="sans-serif" font-size="13" role="img" '
            'aria-label="Boxes of the demo before and after training">',
            f'<rect width="{width}" height="{_HEAD + _SIDE + _FOOT}" fill="#ffffff"/>',
            *legend,
            *body,
            "</svg>\n",
        ]
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="?", default=ROOT / "runs" / "demo")
    options = parser.parse_args()
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(draw(picked(options.run, 4)), encoding="utf-8")
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
