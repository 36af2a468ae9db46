"""Playing an environment for `mmrl env check`: what a rollout does with it, recorded; and the same turns again, here or elsewhere.

    played = play(stage, task, sample, seed, player)                       # as training plays it, through the chat template
    parts = replay(task, stage.template, sample, seed, played.script)      # without a model: digests of all that was answered

`python -m mmrl.diagnostics._environment_play` replays what it is given as JSON on its standard input: another process, where hashes
of words, addresses and the order of episodes differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.coords import CoordFrame
from mmrl.environment import Environment, Observation, Outcome, TurnRewards
from mmrl.errors import DataError, MediaError
from mmrl.registry import task_from_spec
from mmrl.task import Task, Template
from mmrl.types import ImageSize, Rollout, Sample, StopReason, Turn, VideoSize

if TYPE_CHECKING:
    from mmrl.policy.encode import Encoder

__all__ = ["Parts", "Played", "Stage", "Step", "play", "replay", "time_limit"]

Sizes = Sequence[ImageSize | VideoSize]
Parts = dict[str, str]
"""What the environment answered to one turn (or first showed), part by part: its name -> a digest."""
Script = list[tuple[str, Sizes]]
"""The turns that were written, each with the sizes that the environment was told after its answer; the first entry's text is that
of no turn ('')."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError where the block takes longer; in the main thread alone, where a signal can end it."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(
        signal, "setitimer"
    ):
        yield
        return

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"expected an answer within {seconds:g} s, found none")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Step:
    """One call of `step`: what was written, what it led to (None where it raised), seconds."""

    text: str
    outcome: Any
    seconds: float


class _Recorder(Environment):
    """An environment that notes down what another one is asked and answers."""

    def __init__(self, inner: Environment, limit_s: float) -> None:
        self.inner, self.limit_s = inner, limit_s
        self.max_turns = inner.max_turns  # type: ignore[misc]  # may be the task's setting
        self.first: Any = None
        self.reset_s = 0.0
        self.steps: list[Step] = []
        self.sizes: list[Sizes] = [()]

    def reset(self, sample: Sample, seed: int) -> Observation:
        begun = time.perf_counter()
        with time_limit(self.limit_s):
            self.first = self.inner.reset(sample, seed)
        self.reset_s = time.perf_counter() - begun
        return self.first

    def shown(self, sizes: Sizes) -> None:
        self.sizes[-1] = tuple(sizes)
        self.inner.shown(sizes)

    def step(self, turn: Turn) -> Outcome:
        begun, outcome = time.perf_counter(), None
        self.sizes.append(())
        try:
            with time_limit(self.limit_s):
                outcome = self.inner.step(turn)
        finally:
            self.steps.append(Step(turn.text, outcome, time.perf_counter() - begun))
        return outcome

    async def process_rewards(self, turns: Sequence[Turn]) -> TurnRewards | None:
        from mmrl.rollout.process_rewards import asked

        try:
            return await asyncio.wait_for(asked(self.inner, turns), self.limit_s)
        except asyncio.TimeoutError as error:
            raise TimeoutError(
                f"expected process_rewards within {self.limit_s:g} s, found none"
            ) from error

    def close(self) -> None:
        with time_limit(self.limit_s):
            self.inner.close()


class Stage:
    """What a rollout needs of a policy: the encoder (no weights) and its template."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.template = encoder, encoder.template

    def pin(self, visuals: Sequence[Any]) -> None:
        """Keep their pixels: no weights, no features."""
        self.encoder.visuals.pin(visuals)

    def turn(self, text: str) -> Turn:
        """`text` as a policy's whole turn."""
        tokenizer = self.encoder.processor.tokenizer
        ids = (
            *tokenizer(text, add_special_tokens=False)["input_ids"],
            int(tokenizer.eos_token_id),
        )
        return Turn(ids, text, (0.0,) * len(ids), StopReason.EOS)


@dataclass
class Played:
    """One episode: who played, what was shown first, every step, and the rollout that training would have had."""

    player: str
    sample: Sample
    seed: int
    first: Any = None
    steps: list[Step] = field(default_factory=list)
    sizes: list[Sizes] = field(default_factory=list)
    reset_s: float = 0.0
    tokens: tuple[int, int] = (0, 0)  # of the first prompt and of the last
    rollout: Rollout | None = None
    failure: BaseException | None = None

    @property
    def script(self) -> Script:
        """The turns, for `replay`."""
        return list(zip(["", *(s.text for s in self.steps)], self.sizes, strict=True))

    @property
    def where(self) -> str:
        """For messages."""
        return f"sample {self.sample.id}, {self.player} player"


Player = Callable[[Environment, int], str | None]
"""(environment, turns so far) -> the next turn's text; None: it leaves."""


def play(
    stage: Stage, task: Task, sample: Sample, seed: int, name: str, player: Player, limit_s: float
) -> Played:
    """One episode as training plays it. What the environment raises is in `failure`."""
    from mmrl.rollout.episodes import Episode
    from mmrl.rollout.process_rewards import add_process_rewards

    environment = task.member(sample.task).environment(stage.template)
    assert environment is not None, "a task of several turns"
    recorder, policy = _Recorder(environment, limit_s), _as_policy(stage)
    episode, played = Episode(sample, task, recorder, (seed,)), Played(name, sample, seed)
    first = episode.reset(seed)
    try:
        if isinstance(first, (MediaError, DataError)):
            episode.failure = first
        elif episode.failure is None:
            episode.show(policy, first)
    except (MediaError, DataError) as error:
        episode.failure = error
    begun = episode.prompt.length if episode.prompt is not None else 0
    while episode.prompt is not None and episode.open:
        text = player(environment, len(episode.turns))
        if text is None:
            break
        turn = stage.turn(text)
        episode.take(policy, turn, episode.step(turn))
    add_process_rewards([episode])
    episode.close()
    played.first, played.steps, played.sizes = recorder.first, recorder.steps, recorder.sizes
    played.reset_s, played.failure = recorder.reset_s, episode.failure
    played.tokens = (begun, episode.prompt.length if episode.prompt is not None else 0)
    played.rollout = episode.rollout()
    return played


def _as_policy(stage: Stage) -> Any:
    """What an Episode asks of a policy, it asks of its encoder."""
    return stage


def replay(
    task: Task,
    template: Template,
    sample: Sample,
    seed: int,
    script: Script,
    beside: Sequence[str] = (),
    limit_s: float = 60.0,
) -> list[Parts]:
    """What a new environment answers to the same turns. With `beside` another one of the same sample stands open meanwhile, and is
    given these turns in between."""
    member = task.member(sample.task)
    environment, other = member.environment(template), None
    assert environment is not None, "a task of several turns"
    others, out = iter(beside), []
    try:
        with time_limit(limit_s):
            out.append(_parts(environment.reset(sample, seed)))
        if script[0][1]:
            environment.shown(script[0][1])
        if beside:
            other = member.environment(template)
            assert other is not None
            other.reset(sample, seed)
            other.shown(script[0][1])
        for text, sizes in script[1:]:
            if other is not None and (word := next(others, None)) is not None:
                with time_limit(limit_s):
                    answer = other.step(Turn((), word, (), StopReason.EOS))
                others = others if not answer.ended else iter(())
            with time_limit(limit_s):
                outcome = environment.step(Turn((), text, (), StopReason.EOS))
            out.append(_parts(outcome))
            if sizes:
                environment.shown(sizes)
    finally:
        environment.close()
        if other is not None:
            other.close()
    return out


def _digest(value: bytes) -> str:
    return hashlib.blake2b(value, digest_size=8).hexdigest()


def _picture(image: Any) -> bytes:
    if isinstance(image, (str, os.PathLike)):
        return Path(image).read_bytes()
    array = np.ascontiguousarray(image)
    return f"{array.shape}{array.dtype}".encode() + array.tobytes()


def _parts(answer: Observation | Outcome) -> Parts:
    """Digests of what was answered."""
    if isinstance(answer, Outcome):
        shown = answer.observation
        out = {
            "reward": repr(float(answer.reward)),
            "end": f"{bool(answer.terminated)}, {bool(answer.truncated)}",
            "info": json.dumps({k: float(v) for k, v in answer.info.items()}, sort_keys=True),
            "parsed": str(bool(answer.parsed)),
        }
    else:
        shown, out = answer, {}
    if shown is not None:
        out["words"] = _digest(
            json.dumps([dict(m) for m in shown.messages], sort_keys=True, default=str).encode()
        )
        for number, image in enumerate(shown.images, 1):
            out[f"picture {number}"] = _digest(_picture(image))
    return out


def _sizes(values: Sequence[Mapping[str, Any]]) -> Sizes:
    return [
        ImageSize(tuple(v["orig_wh"]), tuple(v["resized_wh"])) for v in values if "orig_wh" in v
    ]


def _main() -> None:
    """Replay the episodes of a JSON object on standard input, the last one first; their parts as JSON."""
    given = json.load(sys.stdin)
    task = task_from_spec(given["spec"], given["params"])
    name, frame, system = given["template"]
    template = Template(name, CoordFrame(frame), system)
    out: dict[int, list[Parts] | str] = {}
    samples = list(itertools.islice(task.load(given["path"]), given["limit"]))
    for number in reversed(range(len(given["episodes"]))):
        episode = given["episodes"][number]
        sample = samples[episode["index"]]
        script: Script = [(text, _sizes(sizes)) for text, sizes in episode["script"]]
        try:
            out[number] = replay(task, template, sample, episode["seed"], script)
        except Exception as error:  # the environment's own code
            out[number] = f"{type(error).__name__}: {error}"
    sys.stdout.write("\n" + json.dumps(out) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main()
