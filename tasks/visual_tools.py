"""Tools with which a policy looks again at its picture: how they are described, and what they show or tell.

    call = ToolCall("zoom", {"bbox_2d": [10, 20, 60, 70]})        # mmrl.tasks.tool_calls.read_call reads it
    tools = PictureTools(pixels, ("zoom",), side=448)
    closer = tools.use(call, frame, size)                  # uint8 (h, w, 3), its longer side 448 pixels; text of read and measure

A policy is offered them through its chat template (`mmrl.environment.Observation.tools`); places are in the frame that
the model's family points in, of the picture that it was shown first. What a model wrote is data: its arguments are checked, and
what is wrong with them is a BadCall.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmrl.coords import CoordFrame, to_orig
from mmrl.errors import ConfigError, did_you_mean
from mmrl.tasks.picture_text import (
    LEAST_SIDE,
    MOST_PIXELS,
    MOST_SIDE,
    ReadingTooLong,
    need_reader,
    parted,
    read_text,
)
from mmrl.tasks.tool_calls import BadCall, ToolCall
from mmrl.types import ImageSize

__all__ = [
    "TOOLS",
    "PictureTools",
    "check_tools",
    "described",
    "fitted",
    "function",
]

_LEAST_SIDE = 4  # pixels of a region
_MOST_ASPECT = 4  # a narrower region is widened around its middle: processors refuse strips
_LINE = (255, 0, 255)
_READ_LIMIT_S = 20.0


def _box(arguments: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """The argument `bbox_2d`. Raises BadCall."""
    box = arguments.get("bbox_2d")
    if (
        not isinstance(box, (list, tuple))
        or len(box) != 4
        or not all(type(v) in (int, float) and abs(v) < 1e7 for v in box)
        or box[0] >= box[2]
        or box[1] >= box[3]
    ):
        raise BadCall("expected bbox_2d as [x1, y1, x2, y2] with x1 < x2 and y1 < y2")
    x1, y1, x2, y2 = (float(v) for v in box)
    return x1, y1, x2, y2


def _points(arguments: Mapping[str, Any]) -> list[tuple[float, float]]:
    """The argument `points`. Raises BadCall."""
    points = arguments.get("points")
    if (
        not isinstance(points, (list, tuple))
        or len(points) not in (2, 3)
        or not all(isinstance(point, (list, tuple)) and len(point) == 2 for point in points)
        or not all(type(v) in (int, float) and abs(v) < 1e7 for point in points for v in point)
    ):
        raise BadCall("expected points as [[x, y], [x, y]], or three of them for an angle")
    return [(float(x), float(y)) for x, y in points]


def fitted(pixels: np.ndarray, side: int) -> np.ndarray:
    """`pixels` with a longer side of `side` pixels: averaged where they shrink (a whole number of times exactly), bicubic where
    they grow."""
    from PIL import Image

    height, width = pixels.shape[:2]
    longer = max(height, width)
    if longer == side:
        return pixels
    picture = Image.fromarray(pixels)
    factor, rest = divmod(longer, side)
    if not rest and height % factor == 0 and width % factor == 0:
        return np.array(picture.reduce(factor))
    size = tuple(max(1, round(v * side / longer)) for v in (width, height))
    filter_ = Image.Resampling.BOX if longer > side else Image.Resampling.BICUBIC
    return np.array(picture.resize((size[0], size[1]), filter_))


def _widened(low: float, high: float, least: float, most: float) -> tuple[int, int]:
    """A stretch of at least `least` around the same middle, within [0, most], in whole pixels."""
    middle, half = (low + high) / 2, max(high - low, min(least, most)) / 2
    middle = min(max(middle, half), most - half)
    return max(0, math.floor(middle - half + 0.5)), min(int(most), math.floor(middle + half + 0.5))


class PictureTools:
    """The picture of one rollout and what can be done with it. `side`: pixels of the longer side of what the tools show; None until
    it is known. `read_limit_s`: seconds that `read` may take. `names` are those of `TOOLS` (`check_tools`)."""

    def __init__(
        self,
        pixels: np.ndarray,
        names: Sequence[str],
        side: int | None = None,
        read_limit_s: float = _READ_LIMIT_S,
    ) -> None:
        self.pixels, self.names, self.side = pixels, tuple(names), side
        self.read_limit_s, self.out_of_time = read_limit_s, 0
        self.regions: list[tuple[int, int, int, int]] = []
        self.marks: list[tuple[int, int, int, int]] = []

    def use(self, call: ToolCall, frame: CoordFrame, size: ImageSize) -> np.ndarray | str:
        """What `call` shows, uint8 (h, w, 3), or tells; places are in `frame` of the picture shown first, whose size is `size`.
        Raises BadCall."""
        if call.name not in self.names:
            found = parted(call.name[:40])
            raise BadCall(f"expected a call of {', '.join(self.names)}, found {found!r}")
        shown = TOOLS[call.name].use(self, call.arguments, frame, size)
        return shown if isinstance(shown, str) else fitted(shown, self.side or max(size.resized_wh))

    def place(
        self, arguments: Mapping[str, Any], frame: CoordFrame, size: ImageSize
    ) -> tuple[float, float, float, float]:
        """The box of a call in pixels of the picture, inside of it. Raises BadCall."""
        height, width = self.pixels.shape[:2]
        # the picture that was shown first may have been a smaller one
        orig = (size.orig_wh[0], size.orig_wh[1])
        x1, y1, x2, y2 = to_orig(_box(arguments), frame, size.resized_wh, orig)
        sx, sy = width / orig[0], height / orig[1]
        x1, x2 = (min(max(v * sx, 0), width) for v in (x1, x2))
        y1, y2 = (min(max(v * sy, 0), height) for v in (y1, y2))
        if x2 - x1 < _LEAST_SIDE or y2 - y1 < _LEAST_SIDE:
            raise BadCall(
                "expected a bbox_2d inside the picture, found one outside or next to nothing"
            )
        return x1, y1, x2, y2

    def region(
        self, arguments: Mapping[str, Any], frame: CoordFrame, size: ImageSize
    ) -> tuple[int, int, int, int]:
        """The same in whole pixels, and no narrow strip. Raises BadCall."""
        height, width = self.pixels.shape[:2]
        x1, y1, x2, y2 = self.place(arguments, frame, size)
        left, right = _widened(x1, x2, max(_LEAST_SIDE, (y2 - y1) / _MOST_ASPECT), width)
        top, bottom = _widened(y1, y2, max(_LEAST_SIDE, (x2 - x1) / _MOST_ASPECT), height)
        return left, top, right, bottom


def _zoom(
    tools: PictureTools, arguments: Mapping[str, Any], frame: CoordFrame, size: ImageSize
) -> np.ndarray:
    left, top, right, bottom = region = tools.region(arguments, frame, size)
    tools.regions.append(region)
    return tools.pixels[top:bottom, left:right]


def _rotate(
    tools: PictureTools, arguments: Mapping[str, Any], frame: CoordFrame, size: ImageSize
) -> np.ndarray:
    degrees = arguments.get("degrees")
    if type(degrees) is not int or degrees not in (90, 180, 270):
        raise BadCall("expected degrees as 90, 180 or 270, clockwise")
    return np.ascontiguousarray(np.rot90(tools.pixels, -(degrees // 90)))


def _mark(
    tools: PictureTools, arguments: Mapping[str, Any], frame: CoordFrame, size: ImageSize
) -> np.ndarray:
    tools.marks.append(tools.region(arguments, frame, size))
    marked = tools.pixels.copy()
    width = max(1, max(marked.shape) // 150)
    for left, top, right, bottom in tools.marks:
        inside = marked[top + width : bottom - width, left + width : right - width].copy()
        marked[top:bottom, left:right] = _LINE
        if inside.size:
            marked[top + width : bottom - width, left + width : right - width] = inside
    return marked


def _read(
    tools: PictureTools, arguments: Mapping[str, Any], frame: CoordFrame, size: ImageSize
) -> str:
    x1, y1, x2, y2 = tools.place(arguments, frame, size)
    # no wider than asked: the lines above and below are not meant
    left, top, right, bottom = math.floor(x1), math.floor(y1), math.ceil(x2), math.ceil(y2)
    if min(right - left, bottom - top) < LEAST_SIDE or max(right - left, bottom - top) > MOST_SIDE:
        raise BadCall(
            f"expected a region of {LEAST_SIDE} to {MOST_SIDE} pixels of the file a side to read, found {right - left} x "
            f"{bottom - top}"
        )
    if (pixels := (right - left) * (bottom - top)) > MOST_PIXELS:
        raise BadCall(
            f"expected a region of at most {MOST_PIXELS / 1e6:g} million pixels of the file to read, found {pixels / 1e6:.1f} "
            "million; read a part of it"
        )
    try:
        words = read_text(tools.pixels[top:bottom, left:right], tools.read_limit_s)
    except ReadingTooLong:
        tools.out_of_time += 1
        return f"Nothing was read: it took longer than {tools.read_limit_s:g} seconds. A smaller region takes less."
    tools.regions.append((left, top, right, bottom))
    return f"Text in the region:\n{words}" if words else "No text could be read in the region."


def _measure(
    tools: PictureTools, arguments: Mapping[str, Any], frame: CoordFrame, size: ImageSize
) -> str:
    width, height = size.orig_wh[0], size.orig_wh[1]
    points = [
        to_orig(point, frame, size.resized_wh, (width, height)) for point in _points(arguments)
    ]
    if not all(0 <= x <= width and 0 <= y <= height for x, y in points):
        raise BadCall("expected points inside the picture, found one outside")
    (x1, y1), (x2, y2) = points[:2]
    if len(points) == 2:
        return f"Distance: {math.hypot(x2 - x1, y2 - y1):.1f} pixels of the first picture, which is {width} wide and {height} high."
    x3, y3 = points[2]
    a, b, c, d = x1 - x2, y1 - y2, x3 - x2, y3 - y2
    if not (a or b) or not (c or d):
        raise BadCall("expected the first and the last point apart from the middle one")
    # of cross and dot product: exact near 0 and 180 too, where the arc cosine is not
    angle = math.degrees(math.atan2(abs(a * d - b * c), a * c + b * d))
    return f"Angle at the second point: {angle:.1f} degrees."


@dataclass(frozen=True)
class _Tool:
    """A tool: what it is good for, its arguments in JSON schema, and its work."""

    words: str
    properties: Mapping[str, Any]
    use: Callable[[PictureTools, Mapping[str, Any], CoordFrame, ImageSize], np.ndarray | str]
    needs: Callable[[str], None] | None = None


_REGION = {
    "bbox_2d": {
        "type": "array",
        "items": {"type": "number"},
        "description": "The region as [x1, y1, x2, y2] of the first picture.",
    }
}
TOOLS: Mapping[str, _Tool] = {
    "zoom": _Tool("Look at a region of the picture, enlarged.", _REGION, _zoom),
    "rotate": _Tool(
        "Look at the whole picture, turned clockwise.",
        {"degrees": {"type": "integer", "enum": [90, 180, 270]}},
        _rotate,
    ),
    "mark": _Tool("Draw a box around a region and look at the picture.", _REGION, _mark),
    "read": _Tool(
        "Read the text in a region of the picture at its full resolution.",
        _REGION,
        _read,
        need_reader,
    ),
    "measure": _Tool(
        "Measure the distance of two points in pixels of the first picture, or the angle at the second of three in degrees.",
        {
            "points": {
                "type": "array",
                "items": {"type": "array", "items": {"type": "number"}},
                "minItems": 2,
                "maxItems": 3,
                "description": "Two or three points [x, y] of the first picture.",
            }
        },
        _measure,
    ),
}
"""Name -> tool."""


def check_tools(names: Sequence[str]) -> None:
    """Raises ConfigError for names of no tool, and MissingExtraError where a tool lacks what it needs: before a run starts."""
    for name in names:
        if not isinstance(name, str) or name not in TOOLS:
            raise ConfigError(
                f"expected tools of {', '.join(TOOLS)}, found {name!r}.{did_you_mean(name, TOOLS)}"
            )
        if (needs := TOOLS[name].needs) is not None:
            needs(f"the tool {name}")


def described(names: Sequence[str]) -> list[dict[str, Any]]:
    """The tools as transformers' `apply_chat_template(tools=...)` takes them."""
    return [function(name, TOOLS[name].words, TOOLS[name].properties) for name in names]


def function(
    name: str,
    words: str,
    properties: Mapping[str, Any],
    required: Sequence[str] | None = None,
) -> dict[str, Any]:
    """A tool in JSON schema, as `apply_chat_template` takes it; `required`: the arguments that a call must have (default: all)."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": words,
            "parameters": {
                "type": "object",
                "properties": dict(properties),
                "required": list(properties if required is None else required),
            },
        },
    }
