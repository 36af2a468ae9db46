"""The Task contract: data, prompt, reward and metrics of one kind of question, in one readable file.

    from mmrl import Task, Sample, Score, register

    @register("parity")
    class Parity(Task):
        def load(self, path): ...
        def messages(self, sample, template): ...
        def score(self, sample, text, ctx): ...
        def gold(self, sample, ctx): ...
        def wrong(self, sample, ctx): ...

`mmrl tasks check path/to/file.py:Parity --data my.jsonl` tells whether it keeps the contract.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from mmrl.coords import CoordFrame
from mmrl.environment import Environment
from mmrl.types import RewardContext, Sample, Score
from mmrl.video.media import Orientation

__all__ = ["Task", "Template", "sample_chat"]


CallSpelling = Literal["json", "function", "arg_key"]
"""How calls of tools are spelled: see mmrl.tasks.tool_calls."""


@dataclass(frozen=True)
class Template:
    """How a model family is prompted: the coordinate frame it emits and its system text ('' for none). `calls`: how its chat
    template asks for calls of tools, as JSON or in tags of functions or of arguments (mmrl.tasks.tool_calls)."""

    name: str
    frame: CoordFrame
    system: str = ""
    calls: CallSpelling = "json"


def sample_chat(sample: Sample, template: Template, text: str) -> list[dict[str, Any]]:
    """[system, if the template has one], then the user's turn: a placeholder for each video, picture and sound, then `text`."""
    media = (("video", sample.videos), ("image", sample.images), ("audio", sample.audios))
    content = [{"type": kind} for kind, paths in media for _ in paths]
    user = {"role": "user", "content": [*content, {"type": "text", "text": text}]}
    system = {"role": "system", "content": [{"type": "text", "text": template.system}]}
    return [system, user] if template.system else [user]


class Task(abc.ABC):
    """Base class of tasks. Instances are cheap, hold only their parameters, and import neither torch nor transformers.

    Class attributes: `name` is set by `register`; `headline` names the metric that picks the best checkpoint
    (higher is better), one of the keys of `Score.metrics`, or 'reward'.
    """

    name: ClassVar[str] = ""
    headline: ClassVar[str] = "reward"
    part_names: tuple[str, ...] = ()
    # of the total reward; wider only where a paper's preset says so
    value_range: tuple[float, float] = (0.0, 1.0)
    # of reward parts that leave [0, 1]
    part_ranges: Mapping[str, tuple[float, float]] = MappingProxyType({})
    # metrics every parsed answer has; a failure counts as 0 in each
    metric_names: ClassVar[tuple[str, ...]] = ()
    # True: `score_in_group` is asked once all completions of a group have scores
    in_group: ClassVar[bool] = False
    # what may stand for a path of data though no file has that name: rows that come from elsewhere, such as an installed package
    own_rows: ClassVar[tuple[str, ...]] = ()
    # seconds that an `async def` score may take, in place of reward.timeout_s; inf: it bounds what it waits for by itself
    deadline_s: float | None = None
    on_error: str = "raise"  # set by the run before `load`: 'record' keeps broken rows in `rejected` instead of raising
    rejected: Sequence[Any] = ()
    # rows left out on request by the last `load`, counted by reason
    skipped: Mapping[str, int] = MappingProxyType({})
    orientation: Orientation = "displayed"  # set by the run before `load` (data.image.orientation): which pixels the data count
    # sample id -> (file, row) of the last `load`, where it knows
    places: Mapping[str, tuple[str, int]] = MappingProxyType({})
    # what the last `load` did to rows that are used, counted by what it was
    notes: Mapping[str, int] = MappingProxyType({})

    def __init__(self, **params: Any) -> None:
        self.params: dict[str, Any] = params

    @abc.abstractmethod
    def load(self, path: str) -> Iterable[Sample]:
        """Read a data file or folder into samples. Raises DataError naming file, row and fix for a broken row."""

    @abc.abstractmethod
    def messages(self, sample: Sample, template: Template) -> list[dict[str, Any]]:
        """Chat messages in transformers' form; each picture is a {'type': 'image'} item, in the order of sample.images."""

    @abc.abstractmethod
    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        """The reward of `text`. Never raises on model text; a parse failure is Score.failure(reason, ...). May be an `async def`,
        as `score_in_group` may, where it waits for a judge: many completions are then scored at once."""

    @abc.abstractmethod
    def gold(self, sample: Sample, ctx: RewardContext) -> str:
        """A text that must score 1 (to rounding of coordinates); used by `mmrl tasks check` and `mmrl sft`."""

    @abc.abstractmethod
    def wrong(self, sample: Sample, ctx: RewardContext) -> str:
        """A well-formed wrong answer: its accuracy parts must be 0."""

    def environment(self, template: Template) -> Environment | None:
        """A new environment for one rollout of a sample, where the policy acts in several turns; its rewards are the reward then,
        and `messages` and `score` serve the tools that look at one answer. Cheap: work begins in `reset`. Default: none, the
        rollout ends after one turn and `score` judges it."""
        return None

    def member(self, name: str) -> Task:
        """The task that judges samples whose `task` is `name`: itself, or for a task of several (mmrl.tasks.mixed) one of them.
        Ranges, headline, metrics and group rewards are the member's."""
        return self

    def score_in_group(self, sample: Sample, scores: Sequence[Score], index: int) -> Score:
        """The final score of completion `index` given those of its whole group (label-free rewards such as region
        consistency). A group is what one prompt gave in training, or several samples of it in an evaluation. Asked only
        when `in_group` is True, in the reward worker. Default: unchanged."""
        return scores[index]

    def benchmark(self, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> Mapping[str, float]:
        """Official numbers of an evaluation (one score per sample) by the official scorer, and its submission files
        written into `folder` (which exists). Default: no numbers, no files."""
        return {}

    def example_data(self, folder: str) -> str | None:
        """Write a small data set of this task into `folder` and return what `load` reads; None when it has none."""
        return None

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """Benchmark metrics of many scores beyond the mean of each `Score.metrics` entry. Default: none."""
        return {}
