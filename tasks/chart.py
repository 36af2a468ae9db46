"""Questions about charts: the answer is a number or a short text. Relaxed accuracy: numbers may be off by 5 %.

ChartQA's rule (Masry et al. 2022; its code is Pix2Struct's relaxed_correctness): both texts are read as numbers, a final
'%' divides by 100, and |prediction - truth| <= 0.05 |truth| is right; anything else must be equal but for case. Mode
`chartqa` is that rule to the letter and stays a metric of that name. The default mode `relaxed` departs from it where the
rule is an accident:

    thousands separators   '1,234' is 1234 (there it is a text)
    percent and currency   '12 %' equals both 12 and 0.12, since truths leave the unit out or not; '$5' is 5
    a truth of 0           needs a 0 in any spelling (there only the same spelling is right)
    nan, inf               are texts (there 'nan' is a number)
    texts                  are compared in Unicode's NFKC form, white space collapsed, without a final full stop

    years                  are met exactly: a tolerance of 5 % lets 1950 pass for 2017; a truth from 1000 to 2100 that is a whole
                           number without separators is a year (`exact_years: false` gives it the tolerance again)

Several accepted answers: any of them.

    mmrl tasks check chart
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, did_you_mean
from mmrl.registry import register
from mmrl.rewards.reading import unwrap
from mmrl.rewards.router import Part, PartFactory
from mmrl.rewards.text import check_names, check_number, normalise
from mmrl.tasks.base import AnswerTask
from mmrl.tasks.examples import write_rows
from mmrl.tasks.texts import accepted_texts, check_texts, foreign_text, read_text
from mmrl.types import RewardContext, Sample, Score

__all__ = ["MODES", "Chart", "chartqa_correct", "read_number", "relaxed_correct"]

_MAX_CHARS = 500
_NUMBER = re.compile(
    r"([+-]?)\s?([$€£¥]?)\s?((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,30})(?:\.[0-9]{0,30})?|\.[0-9]{1,30})"
    r"(?:[eE]([+-]?[0-9]{1,3}))?\s?(%?)"
)
_YEAR = re.compile(r"1[0-9]{3}|20[0-9]{2}|2100")
_STEPS = ("nfkc", "lower", "collapse", "strip")


def read_number(text: str) -> tuple[float, bool] | None:
    """(value as written, whether a percent sign follows) of a text that is one number, else None. Never raises.

    Allowed around digits: a sign, one of $ € £ ¥, commas between thousands, a decimal point, an exponent, '%'.
    """
    found = _NUMBER.fullmatch(text.strip()) if len(text) <= _MAX_CHARS else None
    if found is None:
        return None
    value = float(f"{found[1]}{found[3].replace(',', '')}e{found[4] or 0}")
    return (value, bool(found[5])) if math.isfinite(value) else None


def _close(value: float, truth: float, tolerance: float) -> bool:
    return abs(value - truth) <= tolerance * abs(truth) * (1 + 1e-12)


@functools.lru_cache(maxsize=1024)  # each completion of a group is compared with the same truths
def _of_truth(truth: str) -> tuple[bool, tuple[float, bool] | None, str]:
    """(whether it wears no wrapper, its number, its form as a text)"""
    return unwrap(truth) == truth, read_number(truth), _text_form(truth)


def relaxed_correct(
    prediction: str, truth: str, tolerance: float = 0.05, exact_years: bool = True
) -> bool:
    """mmrl's reading of ChartQA's rule, see above. Not symmetric: the tolerance is a share of the truth."""
    bare, meant, form = _of_truth(truth)
    if bare:
        prediction = unwrap(prediction)
    said = read_number(prediction)
    if said is None or meant is None:
        return _text_form(prediction) == form
    if exact_years and _YEAR.fullmatch(truth.strip()):
        tolerance = 0.0
    values, targets = {said[0]}, {meant[0]}
    if said[1] != meant[1]:  # one side names the unit: 12 % may be meant as 12 or as 0.12
        values |= {said[0] / 100} if said[1] else set()
        targets |= {meant[0] / 100} if meant[1] else set()
    return any(_close(value, target, tolerance) for value in values for target in targets)


def _text_form(text: str) -> str:
    return normalise(text, _STEPS).removesuffix(".").rstrip()


def _official_number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        return None


def chartqa_correct(prediction: str, truth: str, tolerance: float = 0.05) -> bool:
    """ChartQA's official rule, with its readings of '%', 'nan' and a truth of 0."""
    said, meant = _official_number(prediction), _official_number(truth)
    if said is not None and meant:
        return abs(said - meant) / abs(meant) <= tolerance
    return prediction.lower() == truth.lower()


def _relaxed(tolerance: float = 0.05, exact_years: bool = True) -> Callable[[str, str], bool]:
    share, years = check_number("tolerance", tolerance, 0, 1), bool(exact_years)
    return lambda said, truth: relaxed_correct(said, truth, share, years)


def _chartqa(tolerance: float = 0.05) -> Callable[[str, str], bool]:
    share = check_number("tolerance", tolerance, 0, 1)
    return lambda said, truth: chartqa_correct(said, truth, share)


MODES: Mapping[str, Callable[..., Callable[[str, str], bool]]] = {
    "relaxed": _relaxed,
    "chartqa": _chartqa,
}
"""Rule factories by mode: relaxed(tolerance, exact_years), chartqa(tolerance)."""


def _rule(mode: str, params: Mapping[str, Any]) -> Callable[[str, str], bool]:
    if mode not in MODES:
        raise ConfigError(
            f"unknown chart mode {mode!r}; expected one of {', '.join(MODES)}.{did_you_mean(str(mode), MODES)}"
        )
    check_names(f"chart mode {mode!r}", MODES[mode], params)
    return MODES[mode](**params)


@functools.lru_cache(maxsize=64)  # made once, not for each answer
def _metric(mode: str, params: tuple[tuple[str, Any], ...]) -> Callable[[str, str], bool]:
    return _rule(mode, dict(params))


def _accuracy_part(mode: str, **params: Any) -> Part:
    """1 when any accepted answer is met under the rule."""
    rule = _rule(mode, params)
    return lambda predicted, sample, ctx: float(
        any(rule(predicted.value, truth) for truth in accepted_texts(sample))
    )


@register("chart")
class Chart(AnswerTask):
    """Read a chart. Beside the parameters of AnswerTask:

    mode  relaxed (default; accuracy: {tolerance: 0.05, exact_years: true}) or chartqa (accuracy: {tolerance: 0.05})

    Metrics: correct (by the task's own mode and parameters), chartqa (the official rule), exact (equal text or number).
    """

    shape: ClassVar[str] = "a number or a short text"
    default_mode: ClassVar[str] = "relaxed"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"chartqa": {"mode": "chartqa"}}
    metric_names: ClassVar[tuple[str, ...]] = ("correct", "chartqa", "exact")

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self._params = tuple(
            (k, v) for k, v in self._accuracy_settings(self.settings).items() if k != "mode"
        )

    def factories(self) -> Mapping[str, PartFactory]:
        """accuracy and format."""
        return {"accuracy": _accuracy_part, "format": self.format_factory()}

    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> str | list[str]:
        """A text, or a list of accepted texts; plain numbers become text."""
        if isinstance(value, list):
            value = [_number_text(item) for item in value]
        return check_texts(_number_text(value), "answer", _MAX_CHARS)

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> str:
        """The text as it stands. Reasons: empty, answer_too_long, not_text."""
        read_text(answer, accepted_texts(sample), _MAX_CHARS)
        return answer  # as it stands: the official rule knows no wrappers

    def measure(self, value: str, sample: Sample, ctx: RewardContext) -> Mapping[str, float]:
        """correct, chartqa, exact: right by any accepted answer."""
        truths, rule = accepted_texts(sample), _metric(self.settings["mode"], self._params)
        return {
            "correct": float(any(rule(value, truth) for truth in truths)),
            "chartqa": float(any(chartqa_correct(value, truth) for truth in truths)),
            "exact": float(any(relaxed_correct(value, truth, 0.0) for truth in truths)),
        }

    def describe(self, value: str | None, sample: Sample, ctx: RewardContext) -> Mapping[str, Any]:
        """pred_text and gold_text, accepted texts joined by ' | '."""
        shown = {} if value is None else {"pred_text": value}
        return {**shown, "gold_text": " | ".join(accepted_texts(sample))}

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The first accepted text."""
        return accepted_texts(sample)[0]

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """A number ten times above every number of the truth, or a foreign text where the truth is text."""
        truths = accepted_texts(sample)
        numbers = [number[0] for number in map(read_number, truths) if number is not None]
        return f"{10 * max(map(abs, numbers)) + 7:.0f}" if numbers else foreign_text(truths)

    def example_data(self, folder: str) -> str:
        """16 bar charts with labelled bars: a value or the name of the highest bar is asked for."""
        rng, rows = random.Random(3), []
        for number in range(16):
            names = rng.sample(["Mon", "Tue", "Wed", "Thu", "Fri"], 3)
            values = rng.sample(range(10, 95, 5), 3)
            _draw_bars(Path(folder) / f"{number}.png", names, values)
            pick = rng.randrange(3)
            rows.append(
                {
                    "id": f"chart-{number}",
                    "image": f"{number}.png",
                    "question": "Which bar is the highest?"
                    if number % 2
                    else f"What is the value of {names[pick]}?",
                    "answer": names[values.index(max(values))] if number % 2 else str(values[pick]),
                }
            )
        return write_rows(folder, rows)

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """relaxed_accuracy: the share right by ChartQA's official rule."""
        if not rows:
            return {}
        return {
            "relaxed_accuracy": sum(row.metrics.get("chartqa", 0.0) for row in rows) / len(rows),
            **super().summarize(rows),
        }


def _number_text(value: Any) -> Any:
    return repr(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _draw_bars(path: Path, names: Sequence[str], values: Sequence[int]) -> None:
    from PIL import Image, ImageDraw, ImageFont

    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", (168, 140), (255, 255, 255))
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(13)
    for number, (name, value) in enumerate(zip(names, values, strict=True)):
        left = 12 + 52 * number
        draw.rectangle((left, 118 - value, left + 34, 118), fill=(70, 110, 200))
        draw.text((left + 8, 102 - value), str(value), fill=(0, 0, 0), font=font)
        draw.text((left + 4, 121), name, fill=(0, 0, 0), font=font)
    picture.save(path)
