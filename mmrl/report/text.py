"""Text for the page: escaped model output, numbers with sensible digits, names people read."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["cut_text", "esc", "interval", "metric_name", "plural", "short", "span"]

_CONTROLS = {i: 0x2400 + i for i in range(32) if chr(i) not in "\t\n"} | {0x7F: 0x2421}
_NAMES = {
    "iou": "mIoU",
    "giou": "gIoU",
    "reward": "Reward",
    "parse_rate": "Parse rate",
    "outside_image": "Outside picture",
    "ned": "1 − NED",
    "macro": "Mean of sources",
    "headline": "Headline",
    "acc_gqa": "Acc@GQA",
    "success_once": "Success rate",
    "success_at_end": "Success at end",
    "steps": "Control steps",
}


def esc(value: Any) -> str:
    """`value` as HTML text or a quoted attribute: escaped, control characters visible, lone surrogates replaced."""
    text = (
        str(value)
        .replace("\r\n", "\n")
        .translate(_CONTROLS)
        .encode("utf-8", "replace")
        .decode("utf-8")
    )
    return html.escape(text, quote=True)


def cut_text(value: Any, limit: int) -> str:
    """Escaped text of at most `limit` characters, with a note of the full length where something was left out."""
    text = str(value)
    if len(text) <= limit:
        return esc(text)
    return f'{esc(text[:limit])}<span class="cut"> … cut: {len(text):,} characters in all</span>'


def plural(n: int, noun: str, many: str = "") -> str:
    """'1 step', '1,200 steps'; `many` is an irregular plural."""
    return f"{n:,} {noun if n == 1 else many or noun + 's'}"


def metric_name(name: str) -> str:
    """'acc@0.5' -> 'Acc@0.5', 'iou' -> 'mIoU', 'viou' -> 'vIoU', 'some_metric' -> 'Some metric'."""
    if name in _NAMES:
        return _NAMES[name]
    if re.fullmatch(r"acc@[\d.]+", name):
        return name.replace("acc", "Acc")
    words = re.sub(r"\b([tv]?)iou\b", r"\1IoU", name.replace("_", " "))
    return words if words[1:4] == "IoU" else words[:1].upper() + words[1:]


def short(value: float | None) -> str:
    """About three significant digits: 0.0421, 3.14, 1,234; '–' for nothing."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e7 or size < 1e-4:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}".replace("-", "−")
    decimals = max(0, 2 - math.floor(math.log10(size))) if size < 1000 else 0
    text = f"{value:,.{min(decimals, 6)}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return text.replace("-", "−")


def _decimals(estimate: Mapping[str, float | None]) -> int:
    """Three, as mIoU is usually quoted; four for a very narrow interval, one for numbers from 10 on."""
    mean, low, high = estimate.get("mean"), estimate.get("low"), estimate.get("high")
    if abs(mean or 0.0) >= 10:
        return 1
    return 4 if low is not None and high is not None and 0 < high - low < 0.004 else 3


def interval(estimate: Mapping[str, float | None], signed: bool = False) -> tuple[str, str]:
    """('0.583', '[0.551, 0.612]') with digits that fit the interval's width; the second is '' without an interval."""
    mean, low, high = estimate.get("mean"), estimate.get("low"), estimate.get("high")
    if mean is None or not math.isfinite(mean):
        return "–", ""
    form = f"{'+' if signed else ''}.{_decimals(estimate)}f"
    first = format(mean, form).replace("-", "−")
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return first, ""
    return first, f"[{format(low, form)}, {format(high, form)}]".replace("-", "−")


def span(seconds: float) -> str:
    """'48 s', '12 min', '3 h 05 min'."""
    if seconds < 10:
        return f"{short(seconds)} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60:,} h {minutes % 60:02d} min"
