"""What tasks around another one share: its data, prompt, gold answers and official numbers, and its question for a judge."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.task import Task, Template
from mmrl.types import RewardContext, Sample, Score

__all__ = ["AroundTask"]


class AroundTask(Task):
    """Base class: `inner` is the other task, `has_rule` whether its score says anything."""

    inner: Task
    has_rule: bool
    show: str
    shows_gold: bool

    def load(self, path: str) -> Iterable[Sample]:
        """The other task's samples."""
        self.inner.on_error, self.inner.orientation = self.on_error, self.orientation
        samples = list(self.inner.load(path))
        for name in ("rejected", "skipped", "places", "notes"):
            setattr(self, name, getattr(self.inner, name))
        return samples

    def messages(self, sample: Sample, template: Template) -> list[dict[str, Any]]:
        """The other task's prompt."""
        return self.inner.messages(sample, template)

    def gold(self, sample: Sample, ctx: RewardContext) -> str:
        """The other task's right answer."""
        return self.inner.gold(sample, ctx)

    def wrong(self, sample: Sample, ctx: RewardContext) -> str:
        """The other task's wrong answer."""
        return self.inner.wrong(sample, ctx)

    def benchmark(self, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> Mapping[str, float]:
        """The other task's official numbers."""
        return self.inner.benchmark(pairs, folder)

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """The other task's."""
        return self.inner.summarize(rows)

    # as a judge is told it

    def is_open(self, sample: Sample) -> bool:
        """Whether a row has no answer that a rule could compare with."""
        return False

    def question(self, sample: Sample, ctx: RewardContext) -> str:
        """The prompt's texts, as the policy was asked."""
        messages = self.inner.messages(sample, Template("judge", ctx.frame))
        contents = [m["content"] for m in messages if m.get("role") == "user"]
        return "\n".join(
            part if isinstance(part, str) else str(part.get("text", ""))
            for content in contents
            for part in ([content] if isinstance(content, str) else content)
            if isinstance(part, str) or part.get("type") == "text"
        )

    def reference(self, sample: Sample, ctx: RewardContext) -> str | None:
        """The gold answer; None where there is none, or it is not to be shown."""
        if not self.shows_gold or sample.answer is None or self.is_open(sample):
            return None
        if not self.has_rule:
            return (
                sample.answer
                if isinstance(sample.answer, str)
                else json.dumps(sample.answer, default=str)
            )
        return self.shown(self.inner.gold(sample, ctx))

    def shown(self, text: str) -> str:
        """The answer alone, where it can be told from the thoughts."""
        if self.show == "text":
            return text
        extract: Callable[[str], Any] | None = getattr(self.inner, "extract", None)
        answer = extract(text).answer if extract is not None else None
        return text.rpartition("</think>")[2].strip() if answer is None else str(answer)
