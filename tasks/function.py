"""A task made of one plain function: what `mmrl.Trainer(reward=function)` and `mmrl.evaluate(reward=function)` use.

    @mmrl.reward
    def close(completion: str, sample: mmrl.Sample) -> float:
        return 1.0 if completion.strip() == str(sample.answer) else 0.0

The prompt is the row's media and its question; every row of mmrl's own form is taken as it is (mmrl.tasks.readers.own).
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, ClassVar

from mmrl.errors import ConfigError, DataError
from mmrl.task import Task, Template, sample_chat
from mmrl.types import RewardContext, Sample, Score

__all__ = ["AsyncFunctionTask", "FunctionTask", "function_task", "version_of"]


class FunctionTask(Task):
    """Base class of such tasks; `function_task` makes one. Parameters, all optional:

    prompt   text with {question}, default "{question}"
    reader   options of mmrl.tasks.readers.read_any (columns, image_root, on_error ...)
    version  digest of the function's text, so that a run is not resumed with another one unnoticed
    """

    function: ClassVar[Callable[..., Any]]
    takes_context: ClassVar[bool] = False
    part_names = ("reward",)

    def __init__(
        self, prompt: str = "{question}", reader: Mapping[str, Any] | None = None, version: str = ""
    ) -> None:
        super().__init__(prompt=prompt, reader=dict(reader or {}), version=version)
        if "{question}" not in prompt:
            raise ConfigError(f"expected a prompt that contains {{question}}, found {prompt!r}")

    def load(self, path: str) -> Iterable[Sample]:
        """The rows of a data file; answers are taken as they are. Raises DataError."""
        from mmrl.tasks.readers import read_any

        options = {
            "on_error": self.on_error,
            "orientation": self.orientation,
            **self.params["reader"],
        }
        found = read_any(
            path, task=self.name, check=lambda task, value, frame, sizes, params: value, **options
        )
        self.rejected, self.skipped, self.notes = found.rejected, found.skipped, found.notes
        return found.samples

    def messages(self, sample: Sample, template: Template) -> list[dict[str, Any]]:
        """[system, if the template has one], then videos, pictures, sounds and the text."""
        text = self.params["prompt"].replace("{question}", sample.question)
        return sample_chat(sample, template, text)

    def _asked(self, sample: Sample, text: str, ctx: RewardContext) -> Any:
        given = (text, sample, ctx) if self.takes_context else (text, sample)
        return type(self).function(*given)

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        """What the function returns, a number or a mapping with 'reward' and metrics; None is not judged: a recorded failure
        ('reward_none'), as where a reward raises, and left out of training.

        Raises TypeError for anything else, which is recorded with the completion as every error of a reward is.
        """
        return self._score(self._asked(sample, text, ctx))

    def _score(self, found: Any) -> Score:
        if isinstance(found, Score):
            return found
        table = found if isinstance(found, Mapping) else {"reward": found}
        if "reward" not in table:
            raise TypeError(
                f"expected a mapping with the key 'reward', found the keys {', '.join(map(str, table)) or 'none'}"
            )
        if table["reward"] is None:
            return Score.failure("reward_none", self.part_names)
        for name, value in table.items():
            # numpy's and torch's scalars are numbers
            if not isinstance(value, Real) and getattr(value, "shape", None) != ():
                raise TypeError(
                    f"expected a number for {name!r}, found {type(value).__name__} {value!r:.60}"
                )
        numbers = {str(name): float(value) for name, value in table.items()}
        return Score.combine(
            {"reward": numbers.pop("reward")}, {"reward": 1.0}, parsed=True, metrics=numbers
        )

    def gold(self, sample: Sample, ctx: RewardContext) -> str:
        """The row's answer where it is a text, for warm starts. Raises DataError for another one."""
        if not isinstance(sample.answer, str):
            raise DataError(
                f"sample {sample.id!r}: expected an answer as text to learn from, found {sample.answer!r:.60}; "
                "write a mmrl.Task with gold() for answers of another kind"
            )
        return sample.answer

    def wrong(self, sample: Sample, ctx: RewardContext) -> str:
        """No text, which a function is expected not to pay."""
        return ""


class AsyncFunctionTask(FunctionTask):
    """Base class of tasks of an `async def`: many completions are scored at once (mmrl.workers.async_scoring)."""

    async def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:  # type: ignore[override]  # awaited
        """See FunctionTask.score."""
        return self._score(await self._asked(sample, text, ctx))


def version_of(function: Callable[..., Any]) -> str:
    """A digest of the function's text; what it calls and closes over is not part of it. '' where Python has kept no text."""
    function = inspect.unwrap(function)
    try:
        text = inspect.getsource(function if inspect.isroutine(function) else type(function))
    except (OSError, TypeError):
        return ""
    return hashlib.blake2s(
        inspect.cleandoc(text).encode("utf-8", "surrogatepass"), digest_size=8
    ).hexdigest()


def _is_async(function: Callable[..., Any]) -> bool:
    """Also of an object whose __call__ is one, and of what functools.wraps put around either."""
    function = inspect.unwrap(function)
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def function_task(
    function: Callable[..., Any],
    *,
    low: float = 0.0,
    high: float = 1.0,
    metrics: Iterable[str] = (),
) -> type[FunctionTask]:
    """A task that asks `function(completion, sample)` or `function(completion, sample, context)`. Its rewards lie in [low, high];
    `metrics` are the further keys of its result that evaluations average. Raises ConfigError for another function."""
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(
            f"expected a function (completion, sample) -> float as a reward, found {function!r}"
        )
    parameters = inspect.signature(function).parameters.values()
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in places)
    if (
        needed > 3
        or len(places) < 2
        or any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters)
    ):
        raise ConfigError(
            f"expected a reward that takes (completion, sample) or (completion, sample, context), found "
            f"{getattr(function, '__name__', 'function')}{inspect.signature(function)}"
        )
    name = getattr(function, "__name__", "reward")
    return type(
        name,
        (AsyncFunctionTask if _is_async(function) else FunctionTask,),
        {
            "__doc__": inspect.getdoc(function) or f"The reward function {name}.",
            "function": staticmethod(function),
            "name": name,
            "takes_context": needed == 3,
            "value_range": (float(low), float(high)),
            "part_ranges": {"reward": (float(low), float(high))},
            "metric_names": tuple(metrics),
        },
    )
