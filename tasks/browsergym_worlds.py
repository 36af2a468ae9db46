"""The task `browsergym`: environments of BrowserGym (https://github.com/ServiceNow/BrowserGym) in a real Chromium.

    data.train=[{task: browsergym, path: rows.jsonl, params: {env_id: browsergym/miniwob.click-test, show: both}}]
    mmrl env check browsergym --data rows.jsonl --param env_id=browsergym/miniwob.click-test

A row is one episode: {"id": "17", "seed": 17}; it may name an `env_id` and `task_kwargs` of its own, so that one file mixes pages,
and `question` takes the place of the environment's goal. Each turn the policy is shown BrowserGym's screenshot, its accessibility
tree or both, and replies with one action of BrowserGym's HighLevelActionSet, as text or as a call of a tool. What cannot be done,
or is no action, changes nothing: the policy is shown BrowserGym's `last_action_error`, and the turn counts.

The environments run in processes of their own (mmrl.tasks.browser.gym), which see no network but the origins that the source names.
"""

from __future__ import annotations

import atexit
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from mmrl.coords import CoordFrame, from_orig
from mmrl.environment import Environment, Mark, Observation, Outcome
from mmrl.errors import ConfigError, DataError
from mmrl.task import Template
from mmrl.tasks.browser.gym import Actions, Begin, GymPage, Gyms, Seen, check_env_id, origin_of
from mmrl.tasks.parameters import (
    check_mapping,
    check_names,
    check_number,
    check_whole,
    reached,
    reward_bounds,
)
from mmrl.tasks.tool_calls import BadCall, read_call
from mmrl.types import ImageSize, Sample, Turn, VideoSize

__all__ = ["BrowserGymEnvironment"]

_ANSWER = re.compile(r"<(answer|action)>(.*?)</\1>", re.DOTALL | re.IGNORECASE)
_FENCED = re.compile(r"```(?:python)?\n?(.*?)```", re.DOTALL)
_PROMPT = "{goal}\n{actions}"
_SUBSETS: Mapping[str, tuple[str, ...]] = {
    "picture": ("coord",),  # the tree alone says how elements are called
    "tree": ("bid",),
    "both": ("bid", "coord"),
}
_MOST_SEED = (1 << 32) - 1  # of numpy's RandomState, which BrowserGym's tasks draw from


@functools.cache
def _gyms(processes: int, program: str | None, limit_s: float, origins: tuple[str, ...]) -> Gyms:
    """The same processes for all environments of a run that ask for such."""
    made = Gyms(processes, program, limit_s, origins)
    atexit.register(made.close)
    return made


@functools.cache
def _actions(subsets: tuple[str, ...]) -> Actions:
    return Actions(subsets)


class BrowserGymEnvironment(Environment):
    """An environment of BrowserGym.

    env_id: as BrowserGym registers it, where rows do not name their own. env_kwargs: for BrowserGym's BrowserEnv, such as
    {slow_mo: 0, pre_observation_delay: 0.1}, which makes MiniWoB++ twice as fast as with BrowserGym's own settings.
    task_kwargs: for its task, such as {start_url: ..., goal: ...} of browsergym/openended. action_subsets: BrowserGym's names
    (bid, coord, chat, infeas, nav, tab, miniwob_all ...; default: coord for pictures, bid for trees); actions that read files
    of this machine are left out. calls: 'text' (BrowserGym's description in the prompt) or 'tools' (of the chat template,
    called as <tool_call>). show: 'picture' (screenshot), 'tree' (accessibility tree as text) or 'both'. prompt: text with
    {goal} and, for calls as text, {actions}. max_turns: turns at most. origins: http addresses of this machine that pages may
    reach, beside that of task_kwargs.start_url. rewards: (lowest, highest) sum of an episode's rewards, mapped to 0 and 1;
    beyond is cut off. success_at: the sum from which on an episode that ended by itself is a success (default: the highest).
    processes: of browsers, which the open episodes share; limit_s: seconds for one step; one that needs more costs its process
    and the episodes in it. chromium: the browser's program (default: the one on PATH).

    Places in actions are in the frame that the model's family points in, and put into the screenshot's pixels.

    Raises ConfigError for parameters that make no environment, MissingExtraError where BrowserGym is missing, PageLost where a page
    hangs or its browser dies.
    """

    headline: ClassVar[str] = "success"
    concurrent: ClassVar[bool] = True

    def __init__(
        self,
        env_id: str = "",
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        task_kwargs: Mapping[str, Any] | None = None,
        action_subsets: Sequence[str] | None = None,
        calls: Literal["text", "tools"] = "text",
        show: Literal["picture", "tree", "both"] = "picture",
        prompt: str = _PROMPT,
        max_turns: int = 10,
        origins: Sequence[str] = (),
        rewards: Sequence[float] = (0.0, 1.0),
        success_at: float | None = None,
        processes: int = 1,
        limit_s: float = 30.0,
        chromium: str | None = None,
        template: Template | None = None,
    ) -> None:
        if show not in tuple(_SUBSETS):
            raise ConfigError(f"expected browsergym.show picture, tree or both, found {show!r}")
        if calls not in ("text", "tools"):
            raise ConfigError(f"expected browsergym.calls text or tools, found {calls!r}")
        needed = ["{goal}"] if calls == "tools" else ["{goal}", "{actions}"]
        if not isinstance(prompt, str) or not all(word in prompt for word in needed):
            raise ConfigError(
                f"expected a browsergym.prompt that contains {' and '.join(needed)}, found {prompt!r}"
            )
        check_mapping("browsergym.env_kwargs", env_kwargs or {})
        check_mapping("browsergym.task_kwargs", task_kwargs or {})
        check_names("browsergym.origins", origins, "[http://127.0.0.1:8000]")
        check_whole("browsergym.max_turns", max_turns, 1)
        check_whole("browsergym.processes", processes, 1)
        check_number("browsergym.limit_s", limit_s, 1.0, 600.0)
        if action_subsets is not None and (isinstance(action_subsets, str) or not action_subsets):
            raise ConfigError(
                f"expected browsergym.action_subsets as names such as [bid, coord], found {action_subsets!r}"
            )
        self.env_id, self.show, self.calls, self.prompt = env_id, show, calls, prompt
        self.env_kwargs, self.task_kwargs = dict(env_kwargs or {}), dict(task_kwargs or {})
        self.subsets = _SUBSETS[show] if action_subsets is None else tuple(action_subsets)
        self.max_turns = max_turns  # type: ignore[misc]  # the source's setting
        named = [*origins, *filter(None, [self.task_kwargs.get("start_url")])]
        self.origins = tuple(sorted({origin_of(str(url)) for url in named}))
        self.low, self.high, self.success_at = reward_bounds("browsergym", rewards, success_at)
        self.template = template
        # here, where environments are made one by one: threads that reset side by side would make one each
        self.gyms = _gyms(processes, chromium, float(limit_s), self.origins)
        self.page: GymPage | None = None
        self.size: ImageSize | None = None
        self.total = self.paid = 0.0
        self.turns = self.bad = 0
        self.wh = (0, 0)

    def reset(self, sample: Sample, seed: int) -> Observation:
        """Begin with the row's own seed where it has one. Raises DataError for a row that begins nothing."""
        env_id = sample.params.get("env_id", self.env_id)
        own, kwargs = sample.params.get("seed", seed), sample.params.get("task_kwargs", {})
        if not isinstance(env_id, str) or not env_id:
            raise ConfigError(
                "expected browsergym.env_id, such as browsergym/miniwob.click-test, found none; set params.env_id of the source, "
                f"or env_id in the row (sample {sample.id})"
            )
        if type(own) is not int or not 0 <= own <= _MOST_SEED:
            raise DataError(
                f"sample {sample.id}: expected seed as a whole number from 0 to {_MOST_SEED}, found {own!r}"
            )
        if not isinstance(kwargs, Mapping):
            raise DataError(
                f"sample {sample.id}: expected task_kwargs as an object, found {kwargs!r}"
            )
        check_env_id(env_id)
        begin = Begin(
            env_id,
            own,
            self.subsets,
            self.env_kwargs,
            {**self.task_kwargs, **kwargs},
            self.show != "picture",
        )
        actions = _actions(self.subsets)
        self.page, seen = self.gyms.begin(begin)
        asked = self.prompt.replace(
            "{actions}", actions.words() if self.calls == "text" else ""
        ).replace("{goal}", sample.question or seen.goal)
        system = (
            [{"role": "system", "content": self.template.system}]
            if self.template is not None and self.template.system
            else []
        )
        first = self._shown(seen, asked.strip(), "user", system)
        tools = actions.tools() if self.calls == "tools" else ()
        return Observation(first.messages, first.images, tools)

    def shown(self, sizes: Sequence[ImageSize | VideoSize]) -> None:
        """See Environment.shown: coordinates may be in pixels of the resized picture."""
        self.size = next((s for s in reversed(sizes) if isinstance(s, ImageSize)), self.size)

    def step(self, turn: Turn) -> Outcome:
        """Do what the policy said."""
        assert self.page is not None, "an episode begins with reset"
        self.turns += 1
        frame = CoordFrame.ABS_ORIG if self.template is None else self.template.frame
        readable = True
        try:
            text = self._said(turn.text)
            readable = _actions(self.subsets).read(text) is not None
        except BadCall as bad:
            self.bad += 1
            return self._told(str(bad))
        # BrowserGym is asked all the same, and says what is wrong
        seen = self.page.act(text, frame, self.size)
        self.bad += bool(seen.error)
        self.total += seen.reward
        ended = seen.terminated or seen.truncated
        share = (min(max(self.total, self.low), self.high) - self.low) / (self.high - self.low)
        gained, self.paid = share - self.paid, share  # they add up to what the episode came to
        won = seen.terminated and reached(self.total, self.success_at)
        words = f"Your last action failed: {seen.error}" if seen.error else ""
        return Outcome(
            None if ended else self._shown(seen, words, self._role),
            reward=gained,
            terminated=seen.terminated,
            truncated=seen.truncated and not seen.terminated,
            info=self._info(won),
            parsed=readable,
            marks=[Mark(kind, at) for kind, at in seen.marks] if self.show != "tree" else [],
        )

    def random(self, rng: np.random.Generator) -> str:
        """A click somewhere, a key, or nothing."""
        known = _actions(self.subsets).set.action_set
        choices: list[tuple[str, dict[str, Any]]] = [("noop", {"wait_ms": 10})]
        if "mouse_click" in known:
            place = [float(rng.integers(0, max(n, 1))) for n in self.wh]
            if self.size is not None and self.template is not None:
                place = list(
                    from_orig(place, self.template.frame, self.size.resized_wh, self.size.orig_wh)
                )
            choices += [("mouse_click", {"x": round(place[0]), "y": round(place[1])})] * 4
        if "click" in known:
            choices += [("click", {"bid": str(rng.integers(10, 30))})] * 2
        if "keyboard_press" in known:
            choices.append(("keyboard_press", {"key": "Tab"}))
        name, given = choices[int(rng.integers(len(choices)))]
        if self.calls == "tools":
            call = json.dumps({"name": name, "arguments": given})
            return f"<tool_call>\n{call}\n</tool_call>"
        return f"{name}({', '.join(f'{k}={v!r}' for k, v in given.items())})"

    def close(self) -> None:
        """End the episode."""
        if self.page is not None:
            self.page.close()

    @property
    def _role(self) -> str:
        return "tool" if self.calls == "tools" else "user"

    def _said(self, text: str) -> str:
        """The action of a turn in BrowserGym's words. Raises BadCall."""
        if self.calls == "tools":
            call = read_call(text, _actions(self.subsets).tools())
            if call is None:
                raise BadCall("expected a call of one tool, found none")
            if not all(key.isidentifier() for key in (call.name, *call.arguments)):
                raise BadCall("expected names of a tool and its arguments")
            given = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
            return f"{call.name}({given})"
        said = text.rpartition("</think>")[2]
        if found := _ANSWER.findall(said):
            said = found[-1][1]
        if fenced := _FENCED.findall(said):
            said = fenced[-1]
        return said.strip()

    def _told(self, error: str) -> Outcome:
        """Of a turn that BrowserGym was not asked about."""
        content = [{"type": "text", "text": f"Your last action failed: {error}"}]
        told = Observation([{"role": self._role, "content": content}])
        return Outcome(told, info=self._info(), parsed=False)

    def _shown(
        self, seen: Seen, words: str, role: str, before: Sequence[Mapping[str, Any]] = ()
    ) -> Observation:
        """What BrowserGym observes now, behind words."""
        self.wh = (seen.pixels.shape[1], seen.pixels.shape[0])
        text = "\n".join(filter(None, [words, seen.tree]))
        picture = self.show != "tree"
        content: list[dict[str, Any]] = [{"type": "image"}] * picture
        if text or not picture:
            content.append({"type": "text", "text": text or "The page is empty."})
        return Observation(
            [*before, {"role": role, "content": content}], [seen.pixels] if picture else []
        )

    def _info(self, won: bool = False) -> dict[str, float]:
        return {
            "success": float(won),
            "return": self.total,
            "actions": float(self.turns),
            "bad_actions": float(self.bad),
        }
