"""The task `openenv`: environments of OpenEnv (https://github.com/huggingface/OpenEnv), asked at a running server.

    data.train=[{task: openenv, path: rows.jsonl, params: {url: "http://127.0.0.1:8000"}}]

A row is one episode: {"id": "17", "seed": 17}; `question` stands before what the environment shows, and `reset` ({...}) are
further options of its reset. The server is yours to start: OpenEnv's images and Spaces serve one, or `uvicorn server.app:app`. It
needs as many sessions (max_concurrent_envs) as rollouts are open at once.

Each turn the policy is shown the observation, text and pictures (mmrl.tasks.openenv_views), and what it answers becomes an action
by the JSON schema that the server tells (mmrl.tasks.openenv_actions): the name of an action, the value of the only field, a JSON
object, or a call of one of the server's MCP tools, which the chat template describes. What is no action changes nothing: the policy
is told why, and the turn counts. A server that cannot be reached, hangs, dies or answers junk costs the rollout alone, which is
recorded as failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from mmrl.environment import Environment, Observation, Outcome
from mmrl.errors import ConfigError, DataError, need_package
from mmrl.task import Template
from mmrl.tasks.openenv_actions import ActionForm, NoAction, tools_described
from mmrl.tasks.openenv_client import Refused, ServerError, Session, Step, check_url, key_of
from mmrl.tasks.openenv_views import seen
from mmrl.tasks.parameters import (
    check_mapping,
    check_names,
    check_number,
    check_whole,
    reached,
    reward_bounds,
)
from mmrl.types import Sample, Turn

__all__ = ["OpenEnvEnvironment"]

_PROMPT = "{question}\n{observation}\n{action}"


class OpenEnvEnvironment(Environment):
    """One rollout at an OpenEnv server.

    url: of the server, http(s)://HOST:PORT or ws(s)://. key_env: environment variable that holds its key, sent as a bearer token.
    connect_s: until an episode has begun; answer_s: of each step, seconds. reset: options of every episode's reset.
    actions: names of actions, or {name: value or {field: value}}. field: the field of an action that the whole answer is. tools:
    whether MCP's tools are offered ('auto': where the schema of actions is OpenEnv's own of tool calls).
    fields: of an observation, to show (default: all); pictures: fields of numbers that are pixels; most_chars, most_pictures: of
    an observation. prompt: text with {observation}, {question} (the row's) and {action} (how to answer).
    max_turns: turns at most. reward: 'sum' of the steps' rewards, or the 'last' one. rewards: (lowest, highest) of an episode,
    mapped to 0 and 1; beyond is cut off. success_at: from which an episode that is done is a success (default: the highest).
    errors: an environment that raises in a step fails the rollout ('fail'), or tells the policy ('tell') and counts as no action.

    Raises ConfigError for parameters that make no environment, MissingExtraError without websockets.
    """

    concurrent: ClassVar[bool] = True
    headline: ClassVar[str] = "success"

    def __init__(
        self,
        url: str = "",
        *,
        key_env: str | None = None,
        connect_s: float = 30.0,
        answer_s: float = 60.0,
        reset: Mapping[str, Any] | None = None,
        actions: Sequence[Any] | Mapping[str, Any] = (),
        field: str | None = None,
        tools: Literal["auto"] | bool = "auto",
        fields: Sequence[str] | None = None,
        pictures: Sequence[str] = (),
        most_chars: int = 20_000,
        most_pictures: int = 16,
        prompt: str = _PROMPT,
        max_turns: int = 16,
        reward: Literal["sum", "last"] = "sum",
        rewards: Sequence[float] = (0.0, 1.0),
        success_at: float | None = None,
        errors: Literal["fail", "tell"] = "fail",
        template: Template | None = None,
    ) -> None:
        need_package("websockets", "the task openenv", "openenv")
        if not url:
            raise ConfigError(
                "expected openenv.url, the address of a running server such as http://127.0.0.1:8000, found none; set params.url "
                "of the source"
            )
        check_url(url)
        for name, value in (("connect_s", connect_s), ("answer_s", answer_s)):
            check_number(f"openenv.{name}", value, 0.1, 86_400)
        for name, whole, least in (
            ("max_turns", max_turns, 1),
            ("most_chars", most_chars, 100),
            ("most_pictures", most_pictures, 0),
        ):
            check_whole(f"openenv.{name}", whole, least)
        for name, chosen, known in (
            ("reward", reward, ("sum", "last")),
            ("errors", errors, ("fail", "tell")),
            ("tools", tools, ("auto", True, False)),
        ):
            if chosen not in known:
                raise ConfigError(
                    f"expected openenv.{name} as one of {', '.join(map(str, known))}, found {chosen!r}"
                )
        check_mapping("openenv.reset", reset or {})
        check_names("openenv.pictures", pictures, "[screen]")
        if fields is not None:
            check_names("openenv.fields", fields, "[text, screen]")
        named = list(actions) if isinstance(actions, Mapping) else actions
        check_names("openenv.actions", named, "[left, right] or {left: 2, right: 3}")
        if len({str(a).strip().casefold() for a in named}) != len(named):
            raise ConfigError(
                f"expected openenv.actions as different names, such as [left, right] or {{left: 2, right: 3}}, found {actions!r}"
            )
        if tools is True and (named or field is not None):
            raise ConfigError(
                f"expected openenv.tools: true without openenv.{'actions' if named else 'field'}: a turn is a call of a tool or an "
                "action by name, found both; leave one out"
            )
        if not isinstance(prompt, str) or "{observation}" not in prompt:
            raise ConfigError(
                f"expected an openenv.prompt that contains {{observation}}, found {prompt!r}"
            )
        self.url, self.key, self.options = url, key_of(key_env), dict(reset or {})
        self.connect_s, self.answer_s = float(connect_s), float(answer_s)
        self.actions, self.field, self.tools = actions, field, tools
        self.shows: dict[str, Any] = {
            "fields": fields,
            "pictures": tuple(pictures),
            "most_chars": most_chars,
            "most_pictures": most_pictures,
        }
        self.prompt, self.template = prompt, template
        self.max_turns = max_turns  # type: ignore[misc]  # the source's setting
        self.reward, self.errors = reward, errors
        self.low, self.high, self.success_at = reward_bounds("openenv", rewards, success_at)
        self.session: Session | None = None
        self.form: ActionForm | None = None
        self.total = self.paid = 0.0
        self.turns = self.bad = 0

    def reset(self, sample: Sample, seed: int) -> Observation:
        """Begin an episode with the row's own seed where it has one. Raises ServerError and ConfigError, DataError for a row whose
        seed or options cannot be."""
        own, options = sample.params.get("seed", seed), sample.params.get("reset", {})
        if type(own) is not int or own < 0 or not isinstance(options, Mapping):
            raise DataError(
                f"sample {sample.id}: expected seed as a whole number from 0 and reset as an object, found {own!r} and "
                f"{options!r}"
            )
        self.session = Session(
            self.url, key=self.key, connect_s=self.connect_s, answer_s=self.answer_s
        )
        first = self.session.reset({**self.options, **options, "seed": own})
        if first.done:
            raise ServerError(
                f"OpenEnv server {self.url}: expected an episode that begins, found one that is over at its reset; mend the "
                "row's `reset`"
            )
        self.form = self._form(self.session)
        text, shown = seen(first.observation, **self.shows)
        said = self.prompt
        for name, words in (
            ("{action}", self.form.words),
            ("{question}", sample.question),
            ("{observation}", text),  # last: what the environment says fills no other place
        ):
            said = said.replace(name, words)
        system = (
            [{"role": "system", "content": self.template.system}]
            if self.template is not None and self.template.system
            else []
        )
        message = _message("user", said.strip("\n"), shown)
        return Observation([*system, message], shown, tools_described(self.form.tools))

    def _form(self, session: Session) -> ActionForm:
        schema = session.schema()
        properties = schema.get("properties")
        calls = isinstance(properties, Mapping) and {"tool_name", "arguments"} <= set(properties)
        asks = self.tools is True or (
            self.tools == "auto"
            and not self.actions
            and self.field is None
            and (calls or not set(properties or ()) - {"metadata", "type"})
        )
        tools = session.tools() if asks else []
        if not tools and (self.tools is True or (asks and calls)):
            raise ServerError(
                f"OpenEnv server {self.url}: expected tools to call, found none; set openenv.tools: false for an environment "
                "whose actions are no tool calls"
            )
        return ActionForm.of(schema, actions=self.actions, only=self.field, tools=tools)

    def step(self, turn: Turn) -> Outcome:
        """Do what the policy said. Raises ServerError."""
        assert self.session is not None and self.form is not None, "a rollout begins with reset"
        self.turns += 1
        try:
            action = self.form.action(turn.text)
        except NoAction as none:
            return self._refused(str(none))
        try:
            answer = self.session.step(action, tell=self.errors == "tell")
        except ValueError as error:  # a number that JSON has not
            return self._refused(str(error))
        if isinstance(answer, Refused):
            return self._refused(answer.why)
        return self._outcome(answer)

    def _outcome(self, answer: Step) -> Outcome:
        assert self.form is not None
        said = answer.reward if answer.reward is not None else 0.0
        if self.reward == "sum" or answer.reward is not None:
            self.total = self.total + said if self.reward == "sum" else said
        share = (min(max(self.total, self.low), self.high) - self.low) / (self.high - self.low)
        gained, self.paid = share - self.paid, share  # they add up to what the episode came to
        won = answer.done and reached(self.total, self.success_at)
        shown: Observation | None = None
        if not answer.done:
            text, pictures = seen(answer.observation, **self.shows)
            shown = Observation([_message(self._role, text, pictures)], pictures)
        return Outcome(shown, reward=gained, terminated=answer.done, info=self._info(won))

    def _refused(self, why: str) -> Outcome:
        assert self.form is not None
        self.bad += 1
        said = f"Error: {why}. {self.form.again}"
        return Outcome(
            Observation([_message(self._role, said, [])]), info=self._info(), parsed=False
        )

    @property
    def _role(self) -> str:
        """Who answers the policy."""
        return "tool" if self.form is not None and self.form.kind == "tools" else "user"

    def random(self, rng: np.random.Generator) -> str | None:
        """Some action, by the schema."""
        return None if self.form is None else self.form.random(rng)

    def close(self) -> None:
        """End the environment on the server, with its connection."""
        if self.session is not None:
            self.session.close()

    def _info(self, won: bool = False) -> dict[str, float]:
        return {
            "success": float(won),
            "return": self.total,
            "actions": float(self.turns),
            "bad_actions": float(self.bad),
        }


def _message(role: str, words: str, pictures: Sequence[Any]) -> dict[str, Any]:
    content = [{"type": "image"} for _ in pictures]
    return {"role": role, "content": [*content, {"type": "text", "text": words}]}
