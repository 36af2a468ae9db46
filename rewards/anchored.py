"""Timestamps anchored reasoning: estimates of the span inside the thoughts that come nearer to the truth step by step.

    <think>It starts after the cut, <timestamp>10 to 20</timestamp>, more exactly <timestamp>12.5 to 17.8</timestamp>.</think>

The idea is TAR-TVG's (arXiv 2508.07683): tags in the thoughts are checked by IoU, later ones weigh more, and accuracy must not
fall from one to the next. Its constants are not used; this rule is our own, made so that anchors cannot be farmed. With the
IoUs a_1 .. a_K of the anchors, in the order written, and f of the answer,

    value = (early * min(a_1, .., a_K, f) + min(a_K, f)) / (early + 1)

and 0 for fewer than `least` or more than `most` anchors, for an anchor that is no span, and for a tag left open. Hence the value
never exceeds the answer's own IoU, nor the last anchor's; another anchor anywhere before the last never raises it; and thoughts
that wander off earn what their worst estimate is worth. `early` (default 0.5) is the weight of a good first estimate.

    python -c "from mmrl.rewards.anchored import anchored_value; print(anchored_value([0.4, 0.9], 0.9))"
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mmrl.errors import ConfigError
from mmrl.rewards.times import SpanParse, parse_spans

__all__ = ["Anchors", "anchored_value", "check_anchor_numbers", "read_anchors"]

Anchors = list[SpanParse]

_MOST = 64
_TAG = re.compile(r"<timestamp>([^<]{0,200})</timestamp>")


def read_anchors(text: str, most: int = _MOST) -> Anchors | None:
    """What stands in the <timestamp> tags of the thoughts, in order; None without thoughts, for a tag that is not closed or
    holds something else than text, and for more than `most`. Linear time; never raises."""
    head, found, _ = text.partition("</think>")
    if not found:
        return None
    thoughts = head.partition("<think>")[2] if "<think>" in head else head
    opened, closed = thoughts.count("<timestamp>"), thoughts.count("</timestamp>")
    if opened != closed or opened > most:
        return None
    inside = _TAG.findall(thoughts)
    return [parse_spans(piece.strip()) for piece in inside] if len(inside) == opened else None


def anchored_value(anchors: Sequence[float], answer: float, early: float = 0.5) -> float:
    """The rule above for the IoUs of the anchors and of the answer; 0 without anchors."""
    if not anchors:
        return 0.0
    return (early * min(*anchors, answer) + min(anchors[-1], answer)) / (early + 1.0)


def check_anchor_numbers(least: int, most: int, early: float) -> None:
    """Raises ConfigError unless 1 <= least <= most <= 64 and 0 <= early <= 1."""
    for name, value in (("least", least), ("most", most)):
        if type(value) is not int or not 1 <= value <= _MOST:
            raise ConfigError(
                f"expected anchors.{name} as a whole number from 1 to {_MOST}, found {value!r}"
            )
    if least > most:
        raise ConfigError(f"expected anchors.least <= anchors.most, found {least} and {most}")
    if isinstance(early, bool) or not isinstance(early, (int, float)) or not 0 <= early <= 1:
        raise ConfigError(f"expected anchors.early to be a number in [0, 1], found {early!r}")
