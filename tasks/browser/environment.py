"""One episode on a page as an environment: the policy sees the page, acts, and sees what came of it.

The reward is the page's own: 1 where its goal is reached, which is a success, a part of 1 where the page pays parts. With
`milestones` that share of it is paid on the way, for what the page says is reached of a goal of several steps. An answer that is no
action changes nothing: the policy is told why, and the turn counts.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from mmrl.environment import Environment, Mark, Observation, Outcome
from mmrl.task import Template
from mmrl.tasks.browser.actions import BadAction, command_of, read_action, written
from mmrl.tasks.browser.chromium import Command, Shown
from mmrl.tasks.browser.players import PLAYERS, View
from mmrl.tasks.browser.pool import Browsers, Page
from mmrl.tasks.browser.sites import find_site
from mmrl.types import ImageSize, Sample, Turn, VideoSize

__all__ = ["BrowserEnvironment", "Rules"]


@dataclass(frozen=True)
class Rules:
    """What a task says of its episodes: the prompt (with {goal}), how actions are spelled, turns at most, the share of the reward
    that is paid on the way, and of the scripted player's turns that click anywhere."""

    prompt: str
    spelling: str
    max_turns: int
    milestones: float
    astray: float = 0.0


class BrowserEnvironment(Environment):
    """See the module. Raises PageLost where the page hangs or its browser dies."""

    concurrent: ClassVar[bool] = True

    def __init__(self, browsers: Browsers, template: Template, rules: Rules) -> None:
        self.browsers, self.template, self.rules = browsers, template, rules
        self.max_turns = rules.max_turns  # type: ignore[misc]  # the task's setting
        self.page: Page | None = None
        self.view: View | None = None
        self.deeds: Iterator[Command] | None = None
        self.sizes: tuple[ImageSize, ...] = ()
        self.turns = self.bad = self.idle = 0
        self.progress = 0.0

    def reset(self, sample: Sample, seed: int) -> Observation:
        """The page of the sample's seed: what the rollouts of a group share is the sample, so `seed` is not asked."""
        site = find_site(str(sample.params["kind"]))
        self.page, shown = self.browsers.open(site, int(sample.params["seed"]))
        if site.name in PLAYERS:
            self.view = View(self.page, shown)
            self.deeds = PLAYERS[site.name](self.view, shown.goal)
        system = (
            [{"role": "system", "content": self.template.system}] if self.template.system else []
        )
        asked = _user(self.rules.prompt.replace("{goal}", shown.goal), picture=True)
        return Observation([*system, *asked], [_pixels(shown)])

    def shown(self, sizes: Sequence[ImageSize | VideoSize]) -> None:
        """See Environment.shown: coordinates may be in pixels of the resized picture."""
        self.sizes = tuple(s for s in sizes if isinstance(s, ImageSize)) or self.sizes

    def step(self, turn: Turn) -> Outcome:
        """Do what the policy said."""
        assert self.page is not None, "an episode begins with reset"
        self.turns += 1
        size = self.sizes[-1]
        try:
            command = command_of(
                read_action(turn.text, self.rules.spelling),
                self.template.frame,
                size.resized_wh,
                size.orig_wh,
            )
        except BadAction as bad:
            self.bad += 1
            said = f"That was no action ({bad}). Reply with one action."
            return Outcome(Observation(_user(said, picture=False)), info=self._info(), parsed=False)
        if command is None:
            return Outcome(terminated=True, info=self._info())
        shown = self.page.act(command)
        if self.view is not None:
            self.view.shown = shown
        self.idle += not shown.acted
        reward, marks = self._paid(shown), _marks(command)
        if shown.done:
            return Outcome(
                reward=reward, terminated=True, info=self._info(shown.reward >= 1), marks=marks
            )
        words = "" if shown.acted else "That could not be done here."
        return Outcome(
            Observation(_user(words, picture=True), [_pixels(shown)]),
            reward=reward,
            info=self._info(),
            marks=marks,
        )

    def scripted(self, rng: np.random.Generator) -> str | None:
        """The next deed of the page's player, where it has one that gets by in this spelling. A share `astray` of turns click
        anywhere; so does a player that is lost, since such a click changed the page."""
        if self.deeds is None:
            return None
        if rng.random() < self.rules.astray:
            return self._click(rng)
        try:
            command = next(self.deeds)
        except (LookupError, StopIteration):
            return self._click(rng)
        return self._written(command)

    def random(self, rng: np.random.Generator) -> str:
        """A click on a point of the page; where the spelling has more than clicks, at times a key, a scroll or a word."""
        if self.rules.spelling == "point":
            return self._click(rng)
        choices = [
            *[self._click(rng)] * 5,
            str(self._written(Command("type", self._anywhere(rng), text="ab"))),
            '{"action": "scroll", "direction": "down"}',
            '{"action": "hotkey", "keys": "tab"}',
        ]
        return choices[int(rng.integers(len(choices)))]

    def _anywhere(self, rng: np.random.Generator) -> tuple[float, float]:
        width, height = self.sizes[-1].orig_wh
        return float(rng.integers(0, width)), float(rng.integers(0, height))

    def _click(self, rng: np.random.Generator) -> str:
        return str(self._written(Command("click", self._anywhere(rng))))

    def _written(self, command: Command) -> str | None:
        size, spelling = self.sizes[-1], self.rules.spelling
        return written(command, spelling, self.template.frame, size.resized_wh, size.orig_wh)

    def _paid(self, shown: Shown) -> float:
        gained = max(0.0, min(shown.progress, 1.0) - self.progress)
        self.progress += gained
        won = max(0.0, min(shown.reward, 1.0)) if shown.done else 0.0
        return self.rules.milestones * gained + (1.0 - self.rules.milestones) * won

    def _info(self, won: bool = False) -> dict[str, float]:
        return {
            "success": float(won),
            "progress": 1.0 if won else self.progress,
            "actions": float(self.turns),
            "bad_actions": float(self.bad),
            "idle_actions": float(self.idle),
        }

    def close(self) -> None:
        """Give the page back."""
        if self.page is not None:
            self.page.close()


def _user(words: str, *, picture: bool) -> list[dict[str, Any]]:
    content = [{"type": "image"}] if picture else []
    return [
        {
            "role": "user",
            "content": [*content, *([{"type": "text", "text": words}] if words else [])],
        }
    ]


def _marks(command: Command) -> list[Mark]:
    """Where the command acted on the page."""
    if not command.placed:
        return []
    if command.kind == "drag":
        return [Mark("drag", (*command.point, *command.end))]
    return [Mark("point", command.point)]


def _pixels(shown: Shown) -> np.ndarray:
    with Image.open(io.BytesIO(shown.png)) as picture:
        return np.array(picture.convert("RGB"))
