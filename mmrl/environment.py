"""The Environment contract: what a policy is shown turn by turn, and what it earns.

    class Zoom(Environment):
        max_turns = 2
        def reset(self, sample, seed): ...     # -> Observation: how the chat begins
        def step(self, turn): ...              # -> Outcome: what answers the policy, or the end

A `mmrl.Task` whose `environment` makes one is rolled out turn by turn: the policy is shown the observation, writes a turn, is shown
the next observation behind everything before, until the environment ends or `max_turns` are over. A task without one is the
environment that ends after one turn. examples/zoom.py is a whole one. A class like this may also be named where a task is, by file
or by package (mmrl/data/environment_rows.py); `mmrl env check` plays it and draws what was seen.

The chat grows: later observations are appended to what was shown and written, token by token, and never change it. The learner
packs such rollouts behind one copy of their common prompt (mmrl/policy/pack.py) and trains the policy's own tokens; observations
are context.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mmrl.types import ImageSize, Sample, Turn, VideoSize

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Environment", "Mark", "Observation", "Outcome", "TurnRewards"]


@dataclass(frozen=True)
class Observation:
    """Chat messages in transformers' form, and the pictures of their {'type': 'image'} items in order: each a path (as the sample's
    own pictures it is read with data.image.orientation, which its reader notes), or the pixels, uint8 (H, W, 3).

    The first observation is how the chat begins, with the system text where there is one; a later one is what answers the policy,
    usually one message of the role 'user' or 'tool'.

    `tools`, of the first observation alone, are what the policy may call: function descriptions in JSON schema, as
    transformers' `apply_chat_template(tools=...)` takes them. The model's own chat template writes them; one that has no place for
    tools is given them in the system message as Qwen writes them there, and messages of the role 'tool' as the user's.
    """

    messages: Sequence[Mapping[str, Any]]
    images: Sequence[Any] = ()
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Mark:
    """What a turn did on a picture, for people: the point (x, y) of a click, the box (x1, y1, x2, y2) of a crop, or a drag from
    (x1, y1) to (x2, y2), in pixels of the picture as the observation gave it. `image` counts the pictures of the rollout so far; -1
    is the one shown last. Raises ValueError for what cannot be drawn.
    """

    kind: Literal["point", "box", "drag"]
    at: tuple[float, ...]
    image: int = -1

    def __post_init__(self) -> None:
        vars(self)["at"] = tuple(float(v) for v in self.at)
        numbers = {"point": 2, "box": 4, "drag": 4}.get(self.kind)
        if numbers is None or len(self.at) != numbers or not all(map(math.isfinite, self.at)):
            raise ValueError(
                "expected a mark 'point' of two finite numbers, or 'box' or 'drag' of four, found "
                f"{self.kind!r} of {self.at}"
            )


@dataclass(frozen=True)
class Outcome:
    """What a turn led to: the next observation, or the end (`terminated`: of the environment's own, `truncated`: cut off).

    `reward` is that of this turn. The sum over a rollout must lie in the task's value_range; `info` of the last turn becomes the
    metrics of its score (`correct`, `success` ...). `parsed` False: the turn could not be read; a rollout counts as parsed where
    its last turn was. `marks`: where the turn acted on a picture that it was shown, drawn by the report, the viewer and
    `mmrl env check`. Raises ValueError for an outcome that neither ends nor shows something.
    """

    observation: Observation | None = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, float] = field(default_factory=dict)
    parsed: bool = True
    marks: Sequence[Mark] = ()

    def __post_init__(self) -> None:
        if self.observation is None and not self.ended:
            raise ValueError(
                "expected an observation or the end (terminated, truncated), found neither; give one of them"
            )
        if not math.isfinite(self.reward):
            raise ValueError(f"expected a finite reward, found {self.reward}")

    @property
    def ended(self) -> bool:
        """Whether no further turn follows."""
        return self.terminated or self.truncated


@dataclass(frozen=True)
class TurnRewards:
    """What the turns of a rollout earn beside `Outcome.reward`, one number for each; `info` joins the rollout's metrics. `failure`:
    why there is nothing to learn from, such as a judge that gave no verdict; the rollout is recorded as failed, with `info` as its
    metrics. Raises ValueError for a number that is not finite."""

    rewards: Sequence[float]
    info: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None

    def __post_init__(self) -> None:
        vars(self)["rewards"] = tuple(float(r) for r in self.rewards)
        vars(self)["info"] = {str(name): float(value) for name, value in self.info.items()}
        for what, numbers in (("process rewards", self.rewards), ("info", self.info.values())):
            if not all(map(math.isfinite, numbers)):
                raise ValueError(f"expected finite {what}, found {numbers}")


class Environment(abc.ABC):
    """One rollout's surroundings. Made by `Task.environment`, cheap until `reset`; its calls follow each other.

    It lives in the process of the run: what may hang, crash or hold a graphics context belongs into a process of its own, which
    `close` ends. What it raises costs its rollout alone, which is recorded as failed and not learned from. All rollouts of a round
    of training are open at the same time, and 64 of an evaluation.
    """

    max_turns: ClassVar[int] = 8
    """Turns of a rollout at most; one that goes on is truncated then, with the rewards it has."""
    concurrent: ClassVar[bool] = False
    """Whether `reset` and `step` mostly wait for another process or machine: those of different rollouts are called by threads side
    by side then, up to 32. A rollout's own calls still follow each other, but not in one thread: clients that are bound to a thread
    do not go."""

    process_limit_s: ClassVar[float] = 1800.0
    """Seconds that `process_rewards` of a rollout may take, from when the last rollout is over; more fails the rollout. It ends
    what awaits: code that keeps the processor cannot be ended."""

    headline: ClassVar[str] = "reward"
    """The metric it is judged by, a name in `info` of every last turn, or 'reward'. This and `value_range` are read where the class
    itself is named as the task; see mmrl.Task."""
    value_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    """Bounds of the sum of a rollout's rewards."""

    @abc.abstractmethod
    def reset(self, sample: Sample, seed: int) -> Observation:
        """Begin. The same sample and seed give the same observation: all rollouts of a group get the same ones, and begin alike."""

    def shown(self, sizes: Sequence[ImageSize | VideoSize]) -> None:  # noqa: B027  most need not know
        """Told after each observation with pictures: how large they are, on disk and as the vision tower sees them, in which
        pixels some models point."""

    @abc.abstractmethod
    def step(self, turn: Turn) -> Outcome:
        """Answer what the policy wrote: `turn.text` (parse it, never run it: it is a stranger's), which ended by `turn.stop`."""

    def scripted(self, rng: np.random.Generator) -> str | None:
        """The next turn of a player that knows the environment, wrong at times where `rng` says so; None: there is no such player.
        For checks, and for `mmrl sft`, which learns from it for a start that RL can improve. Asked between `reset` or `step` and
        the next `step`."""
        return None

    def random(self, rng: np.random.Generator) -> str | None:
        """A turn drawn at random from those that the environment understands; None: the check writes words of its own."""
        return None

    async def process_rewards(self, turns: Sequence[Turn]) -> TurnRewards | None:
        """What the turns earn beside their outcomes' rewards, such as a judge's verdict on each; None: nothing. Asked when the
        rollout is over, before `close`, of all rollouts on one event loop: let it `await` what takes time. Rewards and these add up
        within `value_range`. What it raises fails the rollout."""
        return None

    def close(self) -> None:  # noqa: B027  most hold nothing
        """The rollout is over, or has failed. Called once, also where `reset` raised."""
