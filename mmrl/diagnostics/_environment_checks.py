"""The checks behind `mmrl env check`: each yields one line per problem it finds, and nothing when all is well.

A check may assume nothing about the environment: what it raises is caught by the runner and reported as a problem.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from mmrl.diagnostics._environment_play import Parts, Played, Player, Stage, play, replay
from mmrl.environment import Environment, Observation, Outcome
from mmrl.registry import task_from_spec
from mmrl.task import Task
from mmrl.types import Sample

__all__ = ["CHECKS", "JUNK", "Check", "Table"]

JUNK: tuple[str, ...] = (
    "",
    "?",
    "yes and no " * 100,
    '{"action": "click", "point": [',
    '{"action": null, "point": [1e999, -5, "x"]}',
    '<tool_call>\n{"name": "none_such", "arguments": [[]]}\n</tool_call>',
    "<tool_call>\n<function=[IMG]>\n<parameter=a>\n[1,\n</function>\n</tool_call>",
    "<tool_call>none_such\n<arg_key>a</arg_key>\n<arg_value>[[]]</arg_value>\n</tool_call>",
    "[-Infinity, NaN]",
    "\x1b[31m\u202e\u2028",
)
"""Turns that no environment expects."""
_REPEATS = 4  # episodes between two looks at what is open


@dataclass
class Table:
    """What the checks look at: the task, some of its samples, and what was played of them."""

    spec: str
    params: dict[str, Any]
    path: str
    limit: int
    task: Task
    samples: list[Sample]
    stage: Stage
    timeout_s: float
    seed: int
    played: list[Played] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def new(self, sample: Sample) -> Environment:
        """An environment of the sample's task. Raises where the task has none."""
        made = self.task.member(sample.task).environment(self.stage.template)
        assert made is not None, "asked before"
        return made

    def play(self, name: str, sample: Sample, player: Player) -> Played:
        """Play an episode and keep it."""
        seed = int(np.random.default_rng([self.seed, len(self.played)]).integers(1 << 31))
        found = play(self.stage, self.task, sample, seed, name, player, self.timeout_s)
        self.played.append(found)
        return found

    def whole(self) -> list[Played]:
        """Episodes that nothing failed in."""
        return [p for p in self.played if p.failure is None and p.first is not None]

    def again(self, played: Played, **kinds: Any) -> list[Parts]:
        """The same turns to a new environment."""
        return replay(
            self.task,
            self.stage.template,
            played.sample,
            played.seed,
            played.script,
            limit_s=self.timeout_s,
            **kinds,
        )


@dataclass(frozen=True)
class Check:
    """One property: its name, what is expected, how to mend it, and what looks for problems."""

    name: str
    expected: str
    fix: str
    run: Callable[[Table], Iterator[str]]


def _why(error: BaseException) -> str:
    from mmrl.rollout.episodes import place_of

    return f"{type(error).__name__}: {error}{place_of(error)}"


def _settings(table: Table) -> Iterator[str]:
    for kind in sorted({s.task for s in table.samples}):
        environment = table.new(next(s for s in table.samples if s.task == kind))
        turns = environment.max_turns
        environment.close()
        if not isinstance(turns, int) or isinstance(turns, bool) or turns < 1:
            yield f"max_turns {turns!r}"


def _begins(table: Table) -> Iterator[str]:
    for p in table.played:
        if p.first is None and p.failure is not None:
            yield f"{p.where}: reset raised {_why(p.failure)}"
        elif not isinstance(p.first, Observation):
            yield f"{p.where}: reset returned {type(p.first).__name__}"
        elif not p.tokens[0]:
            yield f"{p.where}: {_why(p.failure) if p.failure else 'no prompt'}"


def _answers(table: Table) -> Iterator[str]:
    for p in table.played:
        if p.player == "junk" or not p.tokens[0] or p.failure is None:
            continue
        wrote = f"turn {len(p.steps)} {p.steps[-1].text[:60]!r}" if p.steps else "no turn"
        yield f"{p.where}, {wrote}: {_why(p.failure)}"


def _junk(table: Table) -> Iterator[str]:
    for p in table.played:
        if p.player == "junk" and p.failure is not None and p.tokens[0]:
            wrote = f"{p.steps[-1].text[:60]!r}" if p.steps else "nothing"
            yield f"sample {p.sample.id}, after {wrote}: {_why(p.failure)}"


def _rewards(table: Table) -> Iterator[str]:
    for p in table.whole():
        member, rollout = table.task.member(p.sample.task), p.rollout
        assert rollout is not None
        paid = [s.outcome.reward for s in p.steps]
        if rollout.error is not None:
            low, high = member.value_range
            yield f"{p.where}: rewards {paid} in a value_range of {low:g} to {high:g}: {rollout.error}"
        elif not all(type(r) in (int, float) or isinstance(r, np.floating) for r in paid):
            yield f"{p.where}: rewards {paid}"
        elif (
            p.steps
            and rollout.score is not None
            and member.headline not in ("reward", *rollout.score.metrics)
        ):
            yield (
                f"{p.where}: no '{member.headline}' in the info of the last turn, which has "
                f"{', '.join(sorted(rollout.score.metrics)) or 'nothing'}"
            )


def _differing(before: Sequence[Parts], after: Sequence[Parts]) -> str:
    """The first difference; '' for none."""
    for turn, (a, b) in enumerate(zip(before, after, strict=True)):
        at = "the first observation" if turn == 0 else f"what answered turn {turn}"
        for name in (*a, *(k for k in b if k not in a)):
            if a.get(name) != b.get(name):
                values = (
                    ""
                    if "picture" in name or name == "words"
                    else f", {a.get(name)} and {b.get(name)}"
                )
                return f"{at} differs in its {name}{values}"
    return ""


def _repeats(table: Table) -> Iterator[str]:
    for p in table.whole():
        if found := _differing(table.again(p), table.again(p)):
            yield f"{p.where}, seed {p.seed}: {found}"


def _siblings(table: Table) -> Iterator[str]:
    for p in table.whole()[:4]:
        alone = table.again(p)
        others = [s.text for q in table.whole() if q is not p for s in q.steps][:8] or ["?"]
        if found := _differing(alone, table.again(p, beside=others)):
            yield f"{p.where}: beside an open environment of the same sample {found}"
        environment = table.new(p.sample)
        threads = environment.concurrent
        environment.close()
        if threads:
            with ThreadPoolExecutor(4) as pool:
                runs = [f.result() for f in [pool.submit(table.again, p) for _ in range(4)]]
            for found in filter(None, (_differing(alone, other) for other in runs)):
                yield f"{p.where}: four at once, by threads: {found}"


def _elsewhere(table: Table) -> Iterator[str]:
    chosen = [p for p in table.whole() if p.player != "junk"][:6] or table.whole()[:2]
    if not chosen:
        return
    here = [table.again(p) for p in chosen]
    template = table.stage.template
    asked = {
        "spec": table.spec,
        "params": table.params,
        "path": table.path,
        "limit": table.limit,
        "template": [template.name, template.frame.value, template.system],
        "episodes": [
            {
                "index": next(i for i, s in enumerate(table.samples) if s is p.sample),
                "seed": p.seed,
                "script": [[text, [dataclasses.asdict(s) for s in z]] for text, z in p.script],
            }
            for p in chosen
        ],
    }
    hashes = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, "-m", "mmrl.diagnostics._environment_play"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=60 + table.timeout_s * sum(len(p.script) for p in chosen),
        env={**os.environ, "PYTHONHASHSEED": hashes},
    )
    if done.returncode:
        yield f"the other process ended with {done.returncode}: {done.stderr.strip()[-300:]}"
        return
    found: Mapping[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    for number, (p, parts) in enumerate(zip(chosen, here, strict=True)):
        there = found[str(number)]
        if isinstance(there, str):
            yield f"{p.where}: raised there alone: {there}"
        elif differs := _differing(parts, there):
            yield f"{p.where}, seed {p.seed}: {differs}"


def _open_things() -> dict[str, int]:
    gc.collect()
    me = psutil.Process()
    return {
        "threads": me.num_threads(),
        "processes": len(me.children(recursive=True)),
        "files": me.num_fds() if hasattr(me, "num_fds") else 0,
    }


def _closes(table: Table) -> Iterator[str]:
    for sample in table.samples[:2]:
        try:
            table.new(sample).close()
        except (Exception, SystemExit) as error:  # user code
            yield f"sample {sample.id}: close without reset raised {_why(error)}"
    shortest = min(table.whole(), key=lambda p: len(p.steps), default=None)
    if shortest is None:
        return
    table.again(shortest)  # what is made once may stay
    before = _open_things()
    for _ in range(_REPEATS):
        table.again(shortest)
    after = _open_things()
    for what, count in after.items():
        if count - before[what] >= _REPEATS:
            yield f"{_REPEATS} closed episodes left {count - before[what]} more {what} open"


def _travels(table: Table) -> Iterator[str]:
    for sample in table.samples:
        if pickle.loads(pickle.dumps(sample)) != sample:
            yield f"sample {sample.id} is another one after pickling"
    for p in table.whole()[:4]:
        for thing in (p.first, *(s.outcome for s in p.steps)):
            try:
                pickle.loads(pickle.dumps(thing))
            except Exception as error:  # whatever the object's own pickling raises
                yield f"{p.where}: {type(thing).__name__} cannot be sent to another process: {_why(error)}"
                break
    again = task_from_spec(table.spec, table.params)
    if type(again).__qualname__ != type(table.task).__qualname__:
        yield f"{table.spec} gives {type(again).__qualname__} the second time"


def _scripted(table: Table) -> Iterator[str]:
    means = {
        name: [p.rollout.reward for p in table.whole() if p.player == name and p.rollout]
        for name in ("scripted", "random")
    }
    if means["scripted"] and means["random"]:
        knows, guesses = (sum(means[n]) / len(means[n]) for n in ("scripted", "random"))
        if knows <= guesses:
            yield f"the scripted player earned {knows:.3f} on average, the random one {guesses:.3f}"


def _marks(table: Table) -> Iterator[str]:
    for p in table.whole():
        shown = list(p.first.images)
        for number, step in enumerate(p.steps, 1):
            outcome: Outcome = step.outcome
            for mark in outcome.marks:
                if not -len(shown) <= mark.image < len(shown):
                    yield f"{p.where}, turn {number}: a mark on picture {mark.image} of {len(shown)}"
            shown += list(outcome.observation.images) if outcome.observation else []


CHECKS: tuple[Check, ...] = (
    Check(
        "limits",
        "max_turns as a whole number of at least 1",
        "set max_turns of the environment's class, or in its constructor",
        _settings,
    ),
    Check(
        "episodes begin",
        "reset(sample, seed) -> Observation: messages in chat form, a picture for each of their {'type': 'image'} items (a path "
        "or uint8 (H, W, 3)), and a prompt that fits the model",
        "do what it says; the first observation needs a message of the user",
        _begins,
    ),
    Check(
        "turns are answered",
        "step(turn) -> Outcome with the next Observation or an end, within --timeout",
        "return an Outcome for whatever `random` and `scripted` write; give what may hang a limit of its own",
        _answers,
    ),
    Check(
        "bad turns are answered",
        "an Outcome for any text: an observation that says what was wrong (parsed=False), or an end",
        "parse turn.text as a stranger's; a bad call is an observation that says so, not an exception",
        _junk,
    ),
    Check(
        "rewards",
        "finite rewards whose sum lies in the task's value_range, numbers in info, the headline metric in the last",
        "scale the rewards, or set value_range; put the headline into Outcome.info of every turn that may be the last",
        _rewards,
    ),
    Check(
        "the scripted player is better",
        "more reward for the player that knows the environment than for the one that guesses",
        "look at the filmstrips: either the player or the reward is wrong",
        _scripted,
    ),
    Check(
        "same seed, same episode",
        "the same sample, seed and turns give the same observations, rewards and ends",
        "draw all chance from np.random.default_rng(seed) of reset; show no clocks, and wait for pages to settle",
        _repeats,
    ),
    Check(
        "siblings do not meet",
        "an environment answers the same whether or not others of its group are open",
        "keep what changes in the instance, not in the class, the module or a shared file",
        _siblings,
    ),
    Check(
        "another process, other order",
        "the same episodes in another Python process, the last one first, are equal",
        "do not use hash(), the order of a set, addresses, or what an earlier episode left",
        _elsewhere,
    ),
    Check(
        "marks",
        "marks on pictures that were shown",
        "Mark.image counts the pictures of the rollout from 0; -1 is the one shown last",
        _marks,
    ),
    Check(
        "travels",
        "samples, observations and outcomes that pickle, and a name that gives the same class again",
        "hold references and numbers in them, no handles",
        _travels,
    ),
    Check(
        "closes cleanly",
        "close() works before reset, and leaves no thread, process or file per episode",
        "end in close() what reset began",
        _closes,
    ),
)
