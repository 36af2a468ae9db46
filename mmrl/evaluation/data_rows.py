"""The line that a suite of questions gets in the table of mmrl.evaluation.suite_table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrl.config import RunConfig
from mmrl.errors import did_you_mean
from mmrl.evaluation.result import input_error, unread_words
from mmrl.evaluation.suite_table import SuiteRow
from mmrl.evaluation.suites import DataSuite, video_words

__all__ = ["DataRow", "suite_row"]


@dataclass(frozen=True, kw_only=True)
class DataRow(SuiteRow):
    """low and high are None where the metric is one number of a whole set (AP)."""

    metric: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    parse_failures: int = 0
    truncated: int = 0
    unread: int = 0  # samples whose pictures, clips or sounds could not be read
    sampled: float | None = None
    # as they were, overrides included
    settings: Mapping[str, int] = field(default_factory=dict)
    # data.video as it was; {} for a suite without clips
    video: Mapping[str, Any] = field(default_factory=dict)
    answers: str = ""  # how freely answers were read; "": the task's own default
    extractor: str = ""  # the benchmark whose own extractor read them; "": none
    whole: int | None = None  # how many samples the split has; None: not known

    @property
    def shown(self) -> str:
        """'0.873 [0.851, 0.893]', '0.412', or '-'."""
        if self.value is None:
            return "-"
        spread = (
            f" [{self.low:.3f}, {self.high:.3f}]"
            if self.low is not None and self.high is not None
            else ""
        )
        return f"{self.value:.3f}{spread}"

    @property
    def summary(self) -> str:
        """See SuiteRow."""
        shown = f" ({video_words(self.video)})" if self.video else ""
        return f"{self.metric} {self.shown}, n = {self.n:,}{shown}"

    def cells(self, samples: int) -> dict[str, str]:
        """See SuiteRow."""
        sampled = "-" if self.sampled is None else f"{self.sampled:.3f}"
        return {
            "suite": self.suite,
            "n": self.count,
            "metric": self.metric,
            "value (95 %)": self.shown,
            "parse failures": str(self.parse_failures),
            "truncated": str(self.truncated),
            "official": ("yes" if self.official and not self.limited else "no")
            + ("" if self.whole in (None, self.n) else f" ({self.n} of {self.whole})"),
            **({f"avg@{samples}": sampled} if samples else {}),
        }

    def remarks(self) -> list[str]:
        """See SuiteRow."""
        return [unread_words(self.unread, self.n)] if self.unread else []

    def facts(self, suite: DataSuite) -> list[str]:
        """See SuiteRow."""
        return [
            f"task {suite.task}",
            f"split {suite.split}" if suite.split else "",
            f"answers: {self.answers}{f' ({self.extractor})' if self.extractor else ''}"
            if self.answers
            else "",
            ", ".join(f"{k} {v}" for k, v in self.settings.items()),
            f"video: {video_words(self.video)}" if self.video else "",
        ]


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _numbers(results: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """{'mean', 'low', 'high'} of the suite's metric; {} when it was not measured."""
    kind, _, name = metric.partition("/")
    if kind not in ("summary", "benchmark"):
        return dict(results.get("greedy", {}).get(metric, {}))
    tables = (
        results.get("summary", {}).get("greedy", {})
        if kind == "summary"
        else results.get("benchmark", {})
    )
    values = [table[name] for table in tables.values() if name in table]
    return {"mean": math.fsum(values) / len(values)} if values else {}


def suite_row(
    name: str,
    suite: DataSuite,
    results: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    limit: int | None,
    config: RunConfig | None = None,
    answers: str | None = None,
) -> DataRow:
    """The line of one evaluated suite, from its results and prediction rows, and the settings it ran with. A metric that
    was not measured, or an official scorer that failed, is an error in it."""
    greedy = [r for r in rows if r["mode"] == "greedy"]
    found = _numbers(results, suite.metric)
    errors = [
        f"{source}: {table['error']}"
        for source, table in results.get("benchmark", {}).items()
        if "error" in table
    ]
    if not found and not errors:
        known = [
            *results.get("greedy", {}),
            *(
                f"summary/{k}"
                for t in results.get("summary", {}).get("greedy", {}).values()
                for k in t
            ),
            *(f"benchmark/{k}" for t in results.get("benchmark", {}).values() for k in t),
        ]
        errors = [
            f"expected metric '{suite.metric}', found {', '.join(known)}.{did_you_mean(suite.metric, known)}"
        ]
    sampled = results.get("sampled", {}).get(suite.metric, {}).get("mean")
    level = suite.level(answers)
    unread = sum(bool(input_error(r["score"].get("reason"))) for r in greedy)
    return DataRow(
        suite=name,
        n=len(greedy),
        metric=suite.metric,
        value=_finite(found.get("mean")),
        low=_finite(found.get("low")),
        high=_finite(found.get("high")),
        parse_failures=sum(not r["score"]["parsed"] for r in greedy),
        truncated=sum(r["stop"] == "length" for r in greedy),
        unread=unread,
        official=suite.official
        and level in (suite.answers, "official")
        and suite.count in (None, len(greedy))
        and not unread,
        limited=limit is not None and len(greedy) >= limit,
        sampled=_finite(sampled),
        error="; ".join(errors),
        settings=_used(config) if config else {},
        video=config.data.video.model_dump()
        if config and any(r.get("videos") for r in rows)
        else {},
        answers=level or "",
        extractor=suite.extractor or "" if level == "official" else "",
        whole=suite.count,
    )


def _used(config: RunConfig) -> dict[str, int]:
    found = {
        "max_new_tokens": config.rollout.max_new_tokens,
        "max_prompt_tokens": config.model.max_prompt_tokens,
        "min_pixels": config.data.min_pixels,
        "max_pixels": config.data.max_pixels,
    }
    return {k: v for k, v in found.items() if v is not None}
