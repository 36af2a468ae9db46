"""The task `gymnasium`: environments of Gymnasium (https://gymnasium.farama.org), whose actions have names.

    data.train=[{task: gymnasium, path: rows.jsonl, params: {env_id: FrozenLake-v1, actions: [left, down, right, up],
                 show: text, env_kwargs: {is_slippery: false}}}]

A row is one episode: {"id": "17", "seed": 17}; `question` takes the place of the task's own words. Each turn the policy is shown
what the environment renders and replies with the name of one action, alone or in <answer></answer>. An answer that is no action
changes nothing: the policy is told so, and the turn counts.

Gymnasium's own packages are not installed with mmrl (extra `gymnasium`); an environment that Gymnasium does not register is made
by a subclass, in a file that is named as a task:

    class Mine(GymnasiumEnvironment):
        def make(self):
            return MyEnv()
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from mmrl.environment import Environment, Observation, Outcome
from mmrl.errors import ConfigError, DataError, MissingExtraError, did_you_mean, install_command
from mmrl.task import Template
from mmrl.tasks.parameters import check_mapping, check_names, reached, reward_bounds
from mmrl.types import Sample, Turn

__all__ = ["GymnasiumEnvironment"]

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_PROMPT = "{goal}\nReply with one of: {actions}."
_SHOWS = {"picture": "rgb_array", "text": "ansi"}


class GymnasiumEnvironment(Environment):
    """An environment with discrete actions.

    env_id: as Gymnasium registers it. env_kwargs: for its constructor. actions: names of action 0, 1, ...; show: 'picture'
    (render_mode rgb_array) or 'text' (ansi). prompt: text with {actions}, and {goal} for the row's question or `goal`. max_turns:
    turns at most. rewards: (lowest, highest) sum of an episode's rewards, mapped to 0 and 1; beyond is cut off. success_at: the sum
    from which on an episode that ended by itself is a success (default: the highest).

    Raises ConfigError for parameters that make no environment, MissingExtraError where Gymnasium is missing.
    """

    headline: ClassVar[str] = "success"

    def __init__(
        self,
        env_id: str = "",
        *,
        actions: Sequence[str] = (),
        env_kwargs: Mapping[str, Any] | None = None,
        show: Literal["picture", "text"] = "picture",
        goal: str = "Reach the goal.",
        prompt: str = _PROMPT,
        max_turns: int = 16,
        rewards: Sequence[float] = (0.0, 1.0),
        success_at: float | None = None,
        template: Template | None = None,
    ) -> None:
        check_mapping("gymnasium.env_kwargs", env_kwargs or {})
        check_names("gymnasium.actions", actions, "[left, right]")
        self.env_id, self.env_kwargs = env_id, dict(env_kwargs or {})
        self.actions = [str(a).strip().casefold() for a in actions]
        self.show, self.goal, self.prompt, self.template = show, goal, prompt, template
        self.max_turns = max_turns  # type: ignore[misc]  # the source's setting
        if ":" in env_id:
            raise ConfigError(
                f"expected gymnasium.env_id as the name of a registered environment, found {env_id!r}, which names a module to "
                "import; write a file with a subclass of GymnasiumEnvironment whose `make` returns your environment, and name that"
            )
        if len(set(self.actions)) != len(self.actions) or not all(self.actions):
            raise ConfigError(
                f"expected gymnasium.actions as different names, such as [left, down, right, up], found {list(actions)}"
            )
        if show not in _SHOWS:
            raise ConfigError(f"expected gymnasium.show picture or text, found {show!r}")
        if not isinstance(prompt, str) or "{actions}" not in prompt:
            raise ConfigError(
                f"expected a gymnasium.prompt that contains {{actions}}, found {prompt!r}"
            )
        if type(max_turns) is not int or max_turns < 1:
            raise ConfigError(
                f"expected gymnasium.max_turns as a whole number from 1, found {max_turns!r}"
            )
        self.low, self.high, self.success_at = reward_bounds("gymnasium", rewards, success_at)
        self.world: Any = None
        self.total = self.paid = 0.0
        self.turns = self.bad = 0

    def make(self) -> Any:
        """The gymnasium.Env of an episode. Raises ConfigError for a name that is not registered."""
        try:
            import gymnasium
        except ImportError as error:
            raise MissingExtraError(
                f"the task gymnasium needs Gymnasium; install it with: {install_command('gymnasium')}"
            ) from error
        if not self.env_id:
            raise ConfigError(
                "expected gymnasium.env_id, such as FrozenLake-v1, found none; set params.env_id of the source"
            )
        if self.env_id not in gymnasium.registry:
            raise ConfigError(
                f"expected gymnasium.env_id as the name of a registered environment, found {self.env_id!r}."
                f"{did_you_mean(self.env_id, list(gymnasium.registry))}"
            )
        return gymnasium.make(self.env_id, render_mode=_SHOWS[self.show], **self.env_kwargs)

    def reset(self, sample: Sample, seed: int) -> Observation:
        """Begin with the row's own seed where it has one. Raises ConfigError where the actions are not the environment's."""
        self.world = self.make()
        count = getattr(self.world.action_space, "n", None)
        if count is None or int(count) != len(self.actions):
            raise ConfigError(
                f"expected gymnasium.actions as the names of all actions of {self.env_id or type(self.world).__name__}, found "
                f"{len(self.actions)} for {self.world.action_space}; it must be a Discrete space"
            )
        own = sample.params.get("seed", seed)
        if type(own) is not int or own < 0:
            raise DataError(
                f"sample {sample.id}: expected seed as a whole number from 0, found {own!r}"
            )
        self.world.reset(seed=own)
        asked = self.prompt.replace("{goal}", sample.question or self.goal)
        words = asked.replace("{actions}", ", ".join(self.actions))
        system = (
            [{"role": "system", "content": self.template.system}]
            if self.template is not None and self.template.system
            else []
        )
        return self._seen(words, system)

    def step(self, turn: Turn) -> Outcome:
        """Do what the policy said."""
        self.turns += 1
        named = self._named(turn.text)
        if named is None:
            self.bad += 1
            said = f"That was no action. Reply with one of: {', '.join(self.actions)}."
            content = [{"type": "text", "text": said}]
            return Outcome(
                Observation([{"role": "user", "content": content}]), info=self._info(), parsed=False
            )
        _, reward, terminated, truncated, _ = self.world.step(named)
        self.total += float(reward)
        ended = bool(terminated or truncated)
        share = (min(max(self.total, self.low), self.high) - self.low) / (self.high - self.low)
        gained, self.paid = share - self.paid, share  # they add up to what the episode came to
        won = bool(terminated) and reached(self.total, self.success_at)
        return Outcome(
            None if ended else self._seen(f"You chose {self.actions[named]}."),
            reward=gained,
            terminated=bool(terminated),
            truncated=bool(truncated) and not terminated,
            info=self._info(won),
        )

    def random(self, rng: np.random.Generator) -> str:
        """The name of some action."""
        return self.actions[int(rng.integers(len(self.actions)))]

    def close(self) -> None:
        """Close the environment."""
        if self.world is not None:
            self.world.close()

    def _named(self, text: str) -> int | None:
        """The number of the action that a turn names."""
        found = _ANSWER.findall(text)
        said = (found[-1] if found else text.rpartition("</think>")[2]).strip().casefold()
        if said not in self.actions:  # names may be signs themselves
            said = said.strip(".!'\"` ")
        return self.actions.index(said) if said in self.actions else None

    def _seen(self, words: str, before: Sequence[Mapping[str, Any]] = ()) -> Observation:
        """What is rendered now, with words."""
        shown = self.world.render()
        if self.show == "text":
            if not isinstance(shown, str):
                raise ConfigError(
                    f"expected {self.env_id} to render text, found {type(shown).__name__}; set gymnasium.show: picture"
                )
            content: list[dict[str, Any]] = [{"type": "text", "text": f"{words}\n{_plain(shown)}"}]
            return Observation([*before, {"role": "user", "content": content}])
        picture = np.asarray(shown)
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
            raise ConfigError(
                f"expected {self.env_id} to render pictures of uint8 (H, W, 3), found {picture.dtype} {picture.shape}; set "
                "gymnasium.show: text, or render_mode rgb_array in `make`"
            )
        content = [{"type": "image"}, {"type": "text", "text": words}]
        return Observation([*before, {"role": "user", "content": content}], [picture])

    def _info(self, won: bool = False) -> dict[str, float]:
        return {
            "success": float(won),
            "return": self.total,
            "actions": float(self.turns),
            "bad_actions": float(self.bad),
        }


def _plain(text: str) -> str:
    """Text that terminals colour: what is in colour stands in brackets, as FrozenLake's place of the player."""
    marked = re.sub(r"\x1b\[[1-9][0-9;]*m(.*?)\x1b\[0m", r"[\1]", text, flags=re.DOTALL)
    return re.sub(r"\x1b\[[0-9;]*m", "", marked).strip("\n")
