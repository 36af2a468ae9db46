"""Boxes and clicks out of replies, as the programs for RefCOCO and ScreenSpot take them. Numbers stay in the frame they were
asked for.

    python -c "from mmrl.rewards.official import Asked; from mmrl.rewards.official.places import refcoco
    print(refcoco('At [1, 2, 3, 4].', Asked('grounding', None)))"
"""

from __future__ import annotations

import itertools
import math
import re

from mmrl.rewards.official.asked import NOTHING, Asked, Found
from mmrl.rewards.official.numbers import plain

__all__ = ["points", "refcoco", "seeclick"]

_NUMBER = r"-?\d{1,300}(?:\.\d{1,300})?"
_FOUR = re.compile(
    rf"\[\s{{0,99}}({_NUMBER}),\s{{0,99}}({_NUMBER}),\s{{0,99}}({_NUMBER}),\s{{0,99}}({_NUMBER})\s{{0,99}}\]"
)

_THOUSANDTHS = re.compile(r"<box>\((\d{1,300}),(\d{1,300})\),\((\d{1,300}),(\d{1,300})\)</box>")
_LOOSE = re.compile(r"-?\d+\.?\d*")
_SHARE = r"-?\d{1,300}(?:\.\d{1,300})?%?"
_TOKEN = re.compile(_SHARE)
_PAIR = re.compile(
    rf"[\[(]\s{{0,99}}({_SHARE})\s{{0,99}}(?:,|\s)\s{{0,99}}({_SHARE})\s{{0,99}}[\])]"
)
_NAMED = re.compile(
    rf"""x['"]?\s{{0,99}}[:=]\s{{0,99}}({_SHARE}).*?y['"]?\s{{0,99}}[:=]\s{{0,99}}({_SHARE})""",
    re.IGNORECASE | re.DOTALL,
)
_TAG = re.compile(
    r"<\s{0,99}bbox[^>]{0,99}>(.*?)<\s{0,99}/\s{0,99}bbox\s{0,99}>", re.IGNORECASE | re.DOTALL
)
_MOST_CHARS = 4_000


def refcoco(reply: str, asked: Asked) -> Found:
    """EvolvingLMMs-Lab/lmms-eval, tasks/refcoco/utils_rec.py, parse_float_sequence_within: the first four numbers in one pair of
    brackets; a reply without them is the box of zeros there, which no IoU accepts, and nothing here."""
    found = _FOUR.search(reply)
    return (
        NOTHING
        if found is None
        else Found(f"[{', '.join(plain(float(value)) for value in found.groups())}]")
    )


def seeclick(reply: str, asked: Asked) -> Found:
    """njucckevin/SeeClick, pretrain/screenspot_test.py and process_utils.py (ScreenSpot's own): with "box" in the reply the
    middle of its first <box>(x,y),(x,y)</box> of whole thousandths, else the reply's two numbers, or the middle of its four."""
    if "box" in reply:
        box = _THOUSANDTHS.search(reply)
        if box is None or asked.extent is None:
            return NOTHING
        x1, y1, x2, y2 = (float(value) / 1000 for value in box.groups())
        return _point((x1 + x2) / 2 * asked.extent[0], (y1 + y2) / 2 * asked.extent[1])
    found = [float(value) for value in itertools.islice(map(_match, _LOOSE.finditer(reply)), 5)]
    if len(found) == 2:
        return _point(found[0], found[1])
    return (
        _point((found[0] + found[2]) / 2, (found[1] + found[3]) / 2) if len(found) == 4 else NOTHING
    )


def _match(found: re.Match[str]) -> str:
    return found[0]


def _point(x: float, y: float) -> Found:
    return Found(f"[{plain(x)}, {plain(y)}]") if math.isfinite(x) and math.isfinite(y) else NOTHING


def _share(token: str) -> float:
    return float(token[:-1]) / 100 if token.endswith("%") else float(token)


def _two(reply: str) -> tuple[float, float] | None:
    """The point by the first rule that finds one: <bbox> of four numbers, (x, y), x: and y:, four numbers beside a word for a box,
    two numbers."""
    tag = _TAG.search(reply)
    inside = [_share(token) for token in _TOKEN.findall(tag[1])] if tag else []
    if len(inside) >= 4:
        return (inside[0] + inside[2]) / 2, (inside[1] + inside[3]) / 2
    named = _PAIR.search(reply) or _NAMED.search(reply)
    if named:
        return _share(named[1]), _share(named[2])
    loose = [_share(token) for token in _TOKEN.findall(reply)]
    if len(loose) >= 4 and any(word in reply.lower() for word in ("box", "rect")):
        return (loose[0] + loose[2]) / 2, (loose[1] + loose[3]) / 2
    return (loose[0], loose[1]) if len(loose) >= 2 else None


def points(reply: str, asked: Asked) -> Found:
    """EvolvingLMMs-Lab/lmms-eval, tasks/screenspot_v2/utils.py and screenspot_pro/utils.py, _parse_point: ScreenSpot-v2 has no
    program of its own, ScreenSpot-Pro one per model. Shares of the picture (both at most 1, or in percent) stay shares in every
    frame."""
    found = _two(reply) if len(reply) <= _MOST_CHARS else None
    if found is None:
        return NOTHING
    x, y = found
    if max(x, y) <= 1 and asked.extent is not None:
        x, y = x * asked.extent[0], y * asked.extent[1]
    return _point(x, y)
