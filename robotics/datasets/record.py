"""Recording scripted demonstrations: experts run inside worker processes, episodes are written in the order of their states.

    summary = record(EnvSpec("tiny", "push", 40), initial_states("train", 100), "runs/push_demos", workers=2, noise=0.2)

    python -c "from mmrl.robotics.datasets.record import record; from mmrl.robotics.contract import *; \
               print(record(EnvSpec('tiny', 'push', 40), initial_states('train', 5), '/tmp/push_demos', workers=0, overwrite=True))"

`noise` perturbs what is executed, the label stays the expert's clean action: the data then show how to come back (DART, Laskey et
al. 2017). Pictures are the cost, so `every` renders only each so-many-th control step. An episode's random numbers depend on
`seed`, the environment and the state alone: the data set is the same, byte for byte, whatever the number of workers.
An episode that raises, hangs or loses its process is counted and the recording goes on; a wrong setting stops it.
"""

from __future__ import annotations

import os
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from mmrl.errors import ConfigError, DataError, MissingExtraError
from mmrl.robotics.actions import ActionCodec
from mmrl.robotics.contract import (
    ActionError,
    EnvSpec,
    InitialState,
    Simulator,
    check_finite,
    make_simulator,
)
from mmrl.robotics.datasets.demonstration import RecordedEpisode
from mmrl.robotics.datasets.mp4 import VideoSettings
from mmrl.robotics.datasets.writer import LeRobotWriter
from mmrl.workers.process import END_S, ChildError, Losses, patience
from mmrl.workers.spawned import START_S, Worker, close_all

__all__ = ["RecordSummary", "play_expert", "record"]


_LOOK_S = 0.5  # how often the window is looked at while nothing comes


@dataclass(frozen=True)
class RecordSummary:
    """attempted = succeeded + unsolved + failed; episodes of them are in the data set. errors: the first few failures."""

    path: str
    attempted: int
    succeeded: int
    unsolved: int
    failed: int
    episodes: int
    frames: int
    pictures: int
    seconds: float
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Job:
    number: int
    spec: EnvSpec
    state: InitialState
    noise: float
    speed: float
    every: int
    seed: int
    repeat: int = 0


@dataclass
class _Reply:
    number: int
    episode: RecordedEpisode | None = None
    error: str = ""
    fatal: type[Exception] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def play_expert(
    simulator: Simulator,
    state: InitialState,
    *,
    noise: float = 0.0,
    speed: float = 1.0,
    every: int = 1,
    seed: int = 0,
    repeat: int = 0,
) -> RecordedEpisode:
    """One episode of the scripted expert, until the first success, the end, or the horizon. `speed`: all actions but the
    gripper's are multiplied by it, labels too: a cautious demonstrator. `repeat`: how often this state was played before; the
    noise is another each time. Raises ActionError for an expert that gives actions which are not finite, ConfigError where
    there is no expert."""
    simulator.reset(state)
    spec = simulator.spec
    rng = np.random.default_rng(
        [seed, zlib.crc32(spec.key.encode()), int(state.split == "eval"), state.index, repeat]
    )
    act = simulator.expert(rng, noise)
    steps, seen, labels, executed, success = [], [], [], [], []
    rewards: list[float] = []
    for t in range(spec.horizon):
        if t % every == 0:
            steps.append(t)
            seen.append(simulator.observe())
            check_finite(spec, f"before step {t}", proprio=seen[-1].proprio)
        action, label = (np.asarray(value, np.float64) for value in act())
        if not (np.isfinite(action).all() and np.isfinite(label).all()):
            raise ActionError(
                f"expected finite actions of the expert of {spec.suite}/{spec.task}, found {action.tolist()} in "
                f"step {t}"
            )
        if speed != 1.0:
            scale = np.full(len(action), speed)
            if (gripper := simulator.action_space.gripper) is not None:
                scale[gripper] = 1.0
            action, label = scale * action, scale * label
        result = simulator.step(action)
        check_finite(spec, f"in step {t}", rewards=np.array([result.reward]))
        labels.append(label)
        executed.append(action)
        rewards.append(result.reward)
        success.append(result.success)
        if result.terminated or result.truncated or result.success:
            break
    images = {camera: np.stack([o.images[camera] for o in seen]) for camera in spec.cameras}
    proprio_PS, labels_TA, executed_TA = (
        np.stack(rows).astype(np.float32) for rows in ([o.proprio for o in seen], labels, executed)
    )
    return RecordedEpisode(
        seen[0].instruction,
        images,
        np.array(steps),
        proprio_PS,
        labels_TA,
        executed_TA,
        np.array(rewards, np.float32),
        np.array(success, bool),
        seed=state.seed,
        state=f"{spec.task}/{state.name}",
    )


class _Player:
    """Plays jobs with one simulator, made anew when the environment changes."""

    def __init__(self) -> None:
        self.key = ""
        self.simulator: Simulator | None = None

    def play(self, job: _Job) -> _Reply:
        try:
            if self.simulator is None or self.key != job.spec.key:
                self.close()
                self.simulator, self.key = make_simulator(job.spec), job.spec.key
            episode = play_expert(
                self.simulator,
                job.state,
                noise=job.noise,
                speed=job.speed,
                every=job.every,
                seed=job.seed,
                repeat=job.repeat,
            )
            facts = {
                "versions": self.simulator.versions(),
                "action_names": list(self.simulator.action_space.names),
            }
            return _Reply(job.number, episode, facts=facts)
        except ActionError as error:
            return _Reply(job.number, error=str(error))
        except (ConfigError, MissingExtraError) as error:  # every episode would fail alike
            return _Reply(job.number, error=str(error), fatal=type(error))
        except Exception:  # whatever a simulator raises: the episode is lost, the next one starts from a new simulator
            text = traceback.format_exc(limit=-4).strip()
            self.close()
            return _Reply(job.number, error=text)

    def close(self) -> None:
        if self.simulator is not None:
            simulator, self.simulator = self.simulator, None
            simulator.close()


def _serve(connection: Connection, progress: Any) -> None:
    """A worker process: jobs come, replies go, until None comes."""
    player = _Player()
    connection.send(None)
    try:
        while (job := connection.recv()) is not None:
            connection.send(player.play(job))
    finally:
        player.close()


class _Recorder(Worker):
    """A worker with at most one job."""

    job: _Job | None = None

    def play(self, job: _Job, episode_s: float) -> None:
        """Give it a job, whose time begins once the process is there."""
        self.job = job
        self.give(job, episode_s if self.ready else START_S)


class _Crew:
    """Worker processes that play jobs. Replies come in any order; at most `ahead` jobs are beyond the oldest unfinished one, so
    that memory stays bounded."""

    def __init__(self, jobs: Sequence[_Job], workers: int, episode_s: float, respawns: int) -> None:
        self.jobs, self.count, self.episode_s = jobs, min(workers, len(jobs)), episode_s
        self.losses = Losses(respawns)
        self.workers: list[_Recorder] = []

    def _lose(self, worker: _Recorder, why: str) -> _Reply:
        """End a worker; its episode is lost. Raises ConfigError when too many were."""
        worker.kill()
        self.workers.remove(worker)
        assert worker.job is not None
        if self.losses.lost():
            raise ConfigError(
                f"recording stopped, its workers ended too often: {worker.job.state.name} {why}; try workers=0 to "
                "see where"
            )
        return _Reply(
            worker.job.number, error=f"{worker.job.spec.task}/{worker.job.state.name}: {why}"
        )

    def replies(self, window: Callable[[], int]) -> Iterator[_Reply]:
        """Every job's reply. `window()`: the highest job number that may be begun now."""
        waiting = list(reversed(self.jobs))
        while waiting or any(worker.job for worker in self.workers):
            while len(self.workers) < self.count and waiting:
                self.workers.append(_Recorder(_serve, (), "mmrl-record"))
            for worker in self.workers:
                if worker.job is None and waiting and waiting[-1].number <= window():
                    worker.play(waiting.pop(), self.episode_s)
            busy = [worker for worker in self.workers if worker.job is not None]
            ready = wait(
                [worker.connection for worker in busy],
                patience((worker.deadline for worker in busy), _LOOK_S),
            )
            for worker in busy:
                if worker.connection in ready:
                    if (reply := self._receive(worker)) is not None:
                        yield reply
                elif worker.late:
                    yield self._lose(worker, f"took longer than {worker.limit_s:g} s")

    def _receive(self, worker: _Recorder) -> _Reply | None:
        """Its reply; None when it has just come up."""
        try:
            if not worker.ready:
                worker.await_ready(0.0)
                worker.begin(self.episode_s)
                return None
            reply: _Reply = worker.receive()
        except ChildError as error:
            death = error.death
            return self._lose(
                worker,
                f"its process {death.said}"
                if death.cause == "message"
                else f"its process ended with code {worker.death(END_S).code}",
            )
        worker.job = None
        worker.clear_deadline()
        return reply

    def close(self) -> None:
        """End all workers; those at work are killed."""
        close_all(self.workers, [worker for worker in self.workers if worker.job is None])


def _check(
    specs: Sequence[EnvSpec],
    states: Sequence[InitialState],
    keep: str,
    noise: float,
    every: int,
    workers: int,
    codec: ActionCodec | None,
) -> None:
    if not specs or not states:
        raise ConfigError(
            f"expected at least one environment and one state to record, found {len(specs)} and {len(states)}"
        )
    if keep not in ("success", "all"):
        raise ConfigError(f"expected keep as success or all, found {keep!r}")
    if not noise >= 0 or every < 1 or workers < 0:
        raise ConfigError(
            f"expected noise >= 0, every >= 1 and workers >= 0, found {noise}, {every} and {workers}"
        )
    if workers and (here := [spec.suite for spec in specs if spec.suite.startswith("__main__:")]):
        raise ConfigError(
            f"expected a suite that worker processes can import, found {here[0]}, of the script that was started; "
            "move it into a module, or record with workers=0"
        )
    if codec is not None and codec.steps % every:
        raise ConfigError(
            f"expected every to divide the {codec.steps} control steps of a decision (chunk {codec.chunk} x repeat "
            f"{codec.repeat}), so that decisions start at a picture, found {every}"
        )
    if len({(spec.image_size, spec.cameras) for spec in specs}) > 1:
        raise ConfigError(
            "expected the same cameras and image_size in all environments of a data set, found different ones"
        )


def record(
    spec: EnvSpec | Sequence[EnvSpec],
    states: Sequence[InitialState],
    out: str | os.PathLike[str],
    *,
    workers: int = 2,
    noise: float = 0.0,
    speed: float = 1.0,
    keep: str = "success",
    every: int = 1,
    seed: int = 0,
    fps: int = 20,
    codec: ActionCodec | None = None,
    video: str | VideoSettings = "lossless",
    overwrite: bool = False,
    episode_s: float = 300.0,
    respawns: int = 5,
    on_episode: Callable[[int, int], None] | None = None,
) -> RecordSummary:
    """Record every state of every environment to a LeRobot v3.0 data set at `out`; a state given twice gets other noise.

    workers: processes, 0 plays here. keep: "success" leaves episodes out that the expert did not solve. every: control steps
    from picture to picture; with `codec` it must divide a decision. episode_s: an episode that takes longer is given up.
    respawns: worker processes replaced before the recording stops. on_episode(done, total) after each.
    Raises ConfigError, MissingExtraError (simulator, PyAV), DataError when no episode could be kept; nothing is left then.
    """
    specs = [spec] if isinstance(spec, EnvSpec) else list(spec)
    _check(specs, states, keep, noise, every, workers, codec)
    if not 0 < speed <= 1:
        raise ConfigError(f"expected a speed above 0 and up to 1, found {speed}")
    jobs: list[_Job] = []
    played: Counter[tuple[str, InitialState]] = Counter()
    for one in specs:
        for state in states:
            jobs.append(
                _Job(len(jobs), one, state, noise, speed, every, seed, played[one.key, state])
            )
            played[one.key, state] += 1
    began = time.perf_counter()
    notes = {
        "recorded": {
            "environments": [asdict(s) for s in specs],
            "noise": noise,
            "speed": speed,
            "keep": keep,
            "every": every,
            "seed": seed,
            "states": [state.name for state in states],
        }
    }
    writer = LeRobotWriter(
        out, fps=fps, robot=specs[0].suite, video=video, notes=notes, overwrite=overwrite
    )
    crew = _Crew(jobs, workers, episode_s, respawns)
    tally = _Tally(keep)
    try:
        with writer:
            player = _Player()
            source = (
                (player.play(job) for job in jobs)
                if workers == 0
                else crew.replies(lambda: tally.next + 2 * workers + 2)
            )
            for reply in source:
                tally.take(reply, writer)
                if on_episode is not None:
                    on_episode(tally.done, len(jobs))
            player.close()
            tally.finish(writer, os.fspath(out))
    finally:
        crew.close()
    return RecordSummary(
        os.fspath(out),
        len(jobs),
        tally.succeeded,
        tally.unsolved,
        tally.failed,
        writer.episodes,
        writer.frames,
        tally.pictures,
        time.perf_counter() - began,
        tuple(tally.errors),
    )


class _Tally:
    """Puts replies in order, writes them and counts."""

    def __init__(self, keep: str) -> None:
        self.keep, self.next, self.done = keep, 0, 0
        self.held: dict[int, _Reply] = {}
        self.succeeded = self.unsolved = self.failed = self.pictures = 0
        self.errors: list[str] = []

    def take(self, reply: _Reply, writer: LeRobotWriter) -> None:
        """Raises what no later episode could fix."""
        if reply.fatal is not None:
            raise reply.fatal(reply.error)
        self.done += 1
        self.held[reply.number] = reply
        while self.next in self.held:
            self._write(self.held.pop(self.next), writer)
            self.next += 1

    def _write(self, reply: _Reply, writer: LeRobotWriter) -> None:
        episode = reply.episode
        if episode is None:
            self._fail(reply.error)
            return
        try:
            episode.check()
        except DataError as error:
            self._fail(str(error))
            return
        self.succeeded += episode.success
        self.unsolved += not episode.success
        if episode.success or self.keep == "all":
            writer.notes.setdefault("versions", reply.facts["versions"])
            writer.action_names = writer.action_names or reply.facts["action_names"]
            writer.add(episode)
            self.pictures += sum(len(frames) for frames in episode.images.values())

    def _fail(self, error: str) -> None:
        self.failed += 1
        if len(self.errors) < 5:
            self.errors.append(error)

    def finish(self, writer: LeRobotWriter, out: str) -> None:
        """Counts go into info.json. Raises DataError when there is nothing to keep."""
        if not writer.episodes:
            why = "the expert solved none; raise the horizon or lower noise"
            if self.errors:
                why = f"the first failed with: {self.errors[0]}"
            raise DataError(
                f"expected at least one demonstration for {out}, found none of {self.done} ({self.failed} failed, "
                f"{self.unsolved} unsolved); {why}"
            )
        writer.notes["counts"] = {
            "attempted": self.done,
            "succeeded": self.succeeded,
            "unsolved": self.unsolved,
            "failed": self.failed,
        }
