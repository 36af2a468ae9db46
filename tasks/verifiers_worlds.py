"""The task `verifiers`: environments written with the library of that name (https://github.com/PrimeIntellect-ai/verifiers).

    data.train=[{task: verifiers, path: train, params: {env: wordle, args: {num_train_examples: 200}}}]
    data.eval=[{task: verifiers, path: eval, params: {env: wordle}}]
    mmrl env check verifiers --param env=wordle

`env` is what verifiers.load_environment takes: the name of an installed package (or of a module in one of `folders`) with a
function load_environment, which is given `args`. The rows are the environment's own data set, by its split as `path`; a file of
JSON lines may choose among them: {"id": "a", "split": "train", "row": 17}.

Each rollout is verifiers' own, in a process with a Python of its own (mmrl.tasks.verifiers_process): its set-up, stop conditions,
tools, clean-up and rubric, with the policy in place of the model behind OpenAI's API. What the environment asks with (system
prompt, examples, pictures, tools) is what the policy is shown, what it writes is the completion, and the rubric's weighted sum is
paid when the rollout is over. An environment that raises, hangs or dies costs its rollout alone.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from mmrl.data.environment_rows import EnvironmentTask
from mmrl.environment import Environment, Observation, Outcome
from mmrl.errors import ConfigError, DataError, MissingExtraError
from mmrl.registry import check_code, register
from mmrl.tasks.openenv_actions import ActionForm
from mmrl.tasks.parameters import check_number, check_whole
from mmrl.tasks.verifiers_chat import said, shown
from mmrl.tasks.verifiers_process import Asked, Over, Session, Settings, WorldError, Worlds
from mmrl.types import Sample, StopReason, Turn

__all__ = ["Verifiers", "VerifiersEnvironment"]

_SPLITS = ("train", "eval")
_POLICYS_OWN = ("EmptyModelResponseError", "ToolParseError")
"""Errors of verifiers that the policy made: such a rollout is scored, others failed."""
_MOST_NAME = 60  # characters of a metric


@functools.cache
def _worlds(settings: Settings) -> Worlds:
    """The same processes for all rollouts of a run that ask for such."""
    return Worlds(settings)


def _python(named: str | None) -> str:
    """The program that verifiers is installed for. Raises MissingExtraError."""
    if named is not None:
        return str(Path(named).expanduser())
    beside = Path(sys.prefix) / "verifiers" / "bin" / "python"
    if beside.is_file():
        return str(beside)
    if importlib.util.find_spec("verifiers") is not None:
        return sys.executable
    raise MissingExtraError(
        f"expected a Python with the package verifiers, found none at {beside}: it asks for other releases than vLLM and lives in "
        f"an environment of its own; make it with: python3 -m venv {beside.parents[1]} && {beside} -m pip install "
        "'verifiers>=0.1.11,<0.4' and the package of your environment; or name another one as verifiers.python"
    )


class VerifiersEnvironment(Environment):
    """One rollout of an environment of verifiers.

    env: name of the environment, as load_environment takes it; args: what it is called with. folders: of modules that are not
    installed. python: the program that verifiers is installed for (default: that of verifiers/ in mmrl's own environment, else
    mmrl's own). variables: names of environment variables that the environment may read, such as a judge's key; all others but
    those of paths, locales, proxies and Hugging Face's caches are taken away.
    max_turns: turns at most, beside the environment's own limit; a longer rollout ends as one whose prompt is too long, and is
    scored. rewards: (lowest, highest) weighted sum; beyond is cut off. reasoning: what stands before </think> is kept from the
    content, as servers with a reasoning parser do.
    errors: an error of the environment fails its rollout ('fail'), or what its rubric says counts ('score'); reward_errors: a
    reward function that raises counts as 0 as with verifiers itself ('zero'), or fails its rollout ('fail').
    start_s: seconds until the environment is loaded; answer_s: of one answer, the rubric's at the end included. processes: in which
    the environment is loaded.

    Raises ConfigError for parameters that make no environment, MissingExtraError without verifiers.
    """

    concurrent: ClassVar[bool] = True

    def __init__(
        self,
        env: str = "",
        *,
        args: Mapping[str, Any] | None = None,
        folders: Sequence[str] = (),
        python: str | None = None,
        variables: Sequence[str] = (),
        max_turns: int = 16,
        rewards: Sequence[float] = (0.0, 1.0),
        reasoning: bool = False,
        errors: Literal["fail", "score"] = "fail",
        reward_errors: Literal["zero", "fail"] = "zero",
        start_s: float = 300.0,
        answer_s: float = 120.0,
        processes: int = 1,
    ) -> None:
        if not isinstance(env, str) or not env:
            raise ConfigError(
                "expected verifiers.env, the name of an environment as verifiers.load_environment takes it, found "
                f"{env!r}; set params.env of the source"
            )
        for name, names in (("folders", folders), ("variables", variables)):
            if isinstance(names, str) or not all(isinstance(n, str) and n for n in names):
                raise ConfigError(f"expected verifiers.{name} as a list of names, found {names!r}")
        for code in (*([python] if python is not None else []), *folders):
            check_code(code)
        missing = [folder for folder in folders if not Path(folder).expanduser().is_dir()]
        if missing:
            raise ConfigError(f"expected verifiers.folders as folders, found none at {missing[0]}")
        check_whole("verifiers.max_turns", max_turns, 1)
        check_whole("verifiers.processes", processes, 1)
        check_number("verifiers.start_s", start_s, 1, 86_400)
        check_number("verifiers.answer_s", answer_s, 0.1, 86_400)
        for name, chosen, known in (
            ("errors", errors, ("fail", "score")),
            ("reward_errors", reward_errors, ("zero", "fail")),
            ("reasoning", reasoning, (True, False)),
        ):
            if chosen not in known:
                raise ConfigError(
                    f"expected verifiers.{name} as one of {', '.join(map(str, known))}, found {chosen!r}"
                )
        self.low, self.high = _bounds(rewards)
        try:
            arguments = json.dumps(dict(args or {}), sort_keys=True)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"expected verifiers.args as names and plain values, found {args!r} ({error})"
            ) from error
        self.settings = Settings(
            _python(python),
            env,
            arguments,
            tuple(str(Path(folder).expanduser().resolve()) for folder in folders),
            tuple(variables),
            float(start_s),
            float(answer_s),
            processes,
        )
        self.max_turns = max_turns  # type: ignore[misc]  # the source's setting
        self.reasoning, self.errors, self.reward_errors = reasoning, errors, reward_errors
        self.session: Session | None = None
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.turns = 0

    def reset(self, sample: Sample, seed: int) -> Observation:
        """Begin a rollout of the sample's row. Raises WorldError, DataError for a row that is none of the environment's."""
        row, split = sample.params.get("row"), sample.params.get("split", "train")
        if type(row) is not int or row < 0 or split not in _SPLITS:
            raise DataError(
                f"sample {sample.id}: expected row as a number from 0 and split as train or eval, found {row!r} and {split!r}"
            )
        self.session = _worlds(self.settings).session()
        first = self.session.begin(split, row, seed=seed, limit=self.max_turns)
        if isinstance(first, Over):
            why = first.error["said"] if first.error else first.stopped
            raise WorldError(
                f"verifiers {self.settings.env}: expected an environment that asks its model, found that row {row} of {split} "
                f"was over before ({why})"
            )
        self.tools = first.tools
        messages, pictures = shown(first.messages)
        return Observation(messages, pictures, self.tools)

    def step(self, turn: Turn) -> Outcome:
        """Answer what the policy wrote. Raises WorldError."""
        assert self.session is not None, "a rollout begins with reset"
        self.turns += 1
        message, readable = said(turn.text, self.turns, self.tools, reasoning=self.reasoning)
        answer = self.session.say(
            message, cut=turn.stop is StopReason.LENGTH, tokens=len(turn.token_ids)
        )
        if isinstance(answer, Asked):
            messages, pictures = shown(answer.messages)
            return Outcome(Observation(messages, pictures), parsed=readable)
        return self._ended(answer, readable)

    def _ended(self, over: Over, readable: bool) -> Outcome:
        name = f"verifiers {self.settings.env}"
        if over.error is not None:
            own = any(kind in over.error["kinds"] for kind in _POLICYS_OWN)
            readable = readable and not own
            if not own and self.errors == "fail":
                raise WorldError(f"{name}: the environment failed: {over.error['said']}")
        if over.reward_errors and self.reward_errors == "fail":
            raise WorldError(f"{name}: {over.reward_errors[0]}")
        threshold = float(_worlds(self.settings).facts()["threshold"])
        return Outcome(
            None,
            reward=min(max(over.reward, self.low), self.high),
            terminated=not over.truncated,
            truncated=over.truncated,
            info={
                "return": over.reward,
                "success": float(over.reward >= threshold),
                "turns": float(self.turns),
                "reward_errors": float(len(over.reward_errors)),
                **{key[:_MOST_NAME]: value for key, value in over.metrics.items()},
            },
            parsed=readable,
        )

    def random(self, rng: np.random.Generator) -> str | None:
        """A call of some tool, where tools are offered."""
        functions = [tool["function"] for tool in self.tools]
        if not functions:
            return None
        told = [{"name": f["name"], "inputSchema": f.get("parameters", {})} for f in functions]
        return ActionForm("tools", tools=told).random(rng)

    def close(self) -> None:
        """End the rollout, with the environment's own clean-up."""
        if self.session is not None:
            self.session.close()


def _bounds(rewards: Any) -> tuple[float, float]:
    try:
        low, high = (float(r) for r in rewards)
    except (TypeError, ValueError):
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(
            f"expected verifiers.rewards as (lowest, highest) weighted sum of the rubric, found {rewards!r}"
        )
    return low, high


@register("verifiers")
class Verifiers(EnvironmentTask):
    """The rows of an environment of verifiers, each a rollout in it; see VerifiersEnvironment for the parameters."""

    environment_class: ClassVar[type[Environment]] = VerifiersEnvironment
    own_rows: ClassVar[tuple[str, ...]] = _SPLITS

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        one = VerifiersEnvironment(**params)
        self.settings, self.value_range = one.settings, (one.low, one.high)

    def load(self, path: str) -> Iterable[Sample]:
        """The rows of the split `path`, or those that a file of JSON lines names. Raises ConfigError for an environment that cannot
        be played, DataError."""
        worlds = _worlds(self.settings)
        self._check(worlds.facts())
        if path not in _SPLITS:
            yield from super().load(path)
            return
        for number, row in enumerate(worlds.rows(path)):
            kind = row["task"]
            source = f"{self.settings.env}/{kind}" if kind else self.settings.env
            yield Sample(
                f"{path}-{number}",
                self.name,
                source,
                str(row["question"]),
                row["answer"],
                params={"split": path, "row": number},
            )

    def _check(self, facts: Mapping[str, Any]) -> None:
        """Raises ConfigError for an environment that cannot be played as it is."""
        env = self.settings.env
        if not facts["chat"]:
            raise ConfigError(
                f"expected an environment that asks in chats, found {env!r}, which asks a model to complete plain text "
                "(message_type); a policy with a chat template cannot be shown it"
            )
        if facts["group"]:
            raise ConfigError(
                f"expected reward functions that judge one rollout, found {', '.join(facts['group'])} of {env!r}, which judge a "
                "whole group at once: rollouts of mmrl end and are paid one by one; leave them out of the rubric, or write such a "
                "reward as a task with score_in_group"
            )
        low, high = self.value_range
        if facts["lowest"] < low - 1e-9 or facts["highest"] > high + 1e-9:
            reach = [min(low, facts["lowest"]), max(high, facts["highest"])]
            raise ConfigError(
                f"expected verifiers.rewards to hold what the weights of {env!r} can add up to ({facts['lowest']:g} to "
                f"{facts['highest']:g}, of functions between 0 and 1), found [{low:g}, {high:g}]; set params.rewards: "
                f"[{reach[0]:g}, {reach[1]:g}]"
            )

    def example_data(self, folder: str) -> str:
        """The environment's own rows."""
        return "train"
