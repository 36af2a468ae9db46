"""Held-out evaluation of a VLA policy: fresh initial states, greedy and sampled, per task, with intervals and the protocol.

An episode is a row as a completion is one (mmrl.evaluation.result), so tables, reports, comparisons and resumes treat both alike.
One that could not be finished counts as a failure and is named. Intervals: Wilson where each state gave one outcome,
else cluster bootstrap over states, 95 %. What the simulators say of themselves (packages, render backend, assets) stands beside
the numbers; on stand-in assets `protocol.assets` is 'stand-in', and every place that prints a number says so.

Of several processes each plays every size-th state and writes its clips; all have the whole evaluation in the end.

    evaluation = evaluate_policy(config, driver, step=0, limit=50, videos=Path("videos"))
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.distributed.world import World
from mmrl.evaluation.progress import Part, entries_of, judged_of
from mmrl.evaluation.result import Evaluation, evaluation_of, gathered, judged
from mmrl.evaluation.tables import Judged
from mmrl.operations.versions import versions
from mmrl.robotics.config import EmbodiedConfig
from mmrl.robotics.contract import EnvSpec, InitialState, initial_states, simulator_class
from mmrl.robotics.rollout import Driver, Failure, GroupRequest
from mmrl.robotics.source import env_specs, states_of
from mmrl.types import Rollout, Sample, Score, StopReason

__all__ = [
    "HEADLINE",
    "METRICS",
    "EvalPlan",
    "describe_states",
    "evaluate_policy",
    "held_out_states",
    "simulator_versions",
    "states_played",
    "write_video",
]

METRICS = ("success_once", "success_at_end", "return", "steps")
HEADLINE = "success_once"


def held_out_states(config: EmbodiedConfig, spec: EnvSpec, count: int) -> list[InitialState]:
    """The first `count` held-out states of a task; fewer where only fewer are recorded."""
    known = states_of(spec, "eval")
    return initial_states("eval", count) if known is None else known[:count]


@dataclass(frozen=True)
class EvalPlan:
    """What an evaluation does other than a run's own: initial states by task, entries that go over the protocol's, how many
    episodes of a kind (success, failure) to film again where the first eval.gallery states show none, in which mode to film."""

    states: Mapping[str, Sequence[InitialState]] = field(default_factory=dict)
    protocol: Mapping[str, Any] = field(default_factory=dict)
    film: int = 0
    filmed: str = "greedy"


def states_played(
    config: EmbodiedConfig, plan: EvalPlan, limit: int | None = None
) -> dict[str, Sequence[InitialState]]:
    """The initial states of each task: those of `plan`, else held-out ones; the first `limit`."""
    count = min(config.eval_states, limit or config.eval_states)
    return {
        spec.task: plan.states[spec.task][:limit]
        if spec.task in plan.states
        else held_out_states(config, spec, count)
        for spec in env_specs(config)
    }


def describe_states(spec: EnvSpec, states: Sequence[InitialState]) -> str:
    """Which initial states, in words: rows of an init file, or how many of the held-out split."""
    return simulator_class(spec.suite).describe_states(states)


def simulator_versions(
    driver: Driver,
    specs: Sequence[EnvSpec],
    world: World | None = None,
    before: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, str]:
    """What the simulators that ran say of themselves; values that differ between tasks or processes one after the other. `before`:
    what those of an earlier start said, by EnvSpec.key."""
    ran = [*(before or {}).items()] + [
        (spec.key, facts.versions)
        for spec in specs
        if (facts := driver.pool.facts.get(spec.key)) is not None
    ]
    known, found = _everywhere(world, ran), defaultdict(list)
    for spec in specs:
        for name, value in (
            item for key, said in known if key == spec.key for item in said.items()
        ):
            found[name].append(value)
    return {name: ", ".join(dict.fromkeys(values)) for name, values in found.items()}


Place = tuple[int, int, str]
"""(number of the task, of the state, mode)."""


def evaluate_policy(
    config: EmbodiedConfig,
    driver: Driver,
    step: int,
    *,
    limit: int | None = None,
    videos: Path | None = None,
    plan: EvalPlan | None = None,
    world: World | None = None,
    part: Part | None = None,
) -> Evaluation:
    """Play eval_states held-out states of every task (the first `limit`): once greedily, eval.samples times sampled.

    `videos`: folder for the pictures of the first eval.gallery states, as H.264 clips. `world`: the processes that share the
    states; collective. `part` (of one process) keeps the states whose episodes have ended; those that it has are not played again.
    """
    plan, specs = plan or EvalPlan(), env_specs(config)
    played = states_played(config, plan, limit)
    asked = _requests(config, specs, played, plan.filmed if videos is not None else None)
    places = {request.key: place for place, request in asked.items()}
    before = len(driver.failures)
    earlier = _Earlier(part, asked, driver)
    rows = list(earlier.rows)
    for group in driver.play(_share(world, earlier.left)):
        place, found = places[group.key], []
        for member, episode in enumerate(group.rollouts):
            film = _filmed(group.sample, episode, place[0], videos) if member == 0 else {}
            found.append(_row(group.sample, episode, place, member, film))
        earlier.add(place, found, [f for f in driver.failures[before:] if f.key == group.key])
        rows += found
    rows = gathered(rows, world)
    # others are of steps under way (async)
    failed = _everywhere(
        world,
        earlier.failures
        + [dataclasses.asdict(f) for f in driver.failures[before:] if f.key in places],
    )
    if videos is not None and plan.film:
        filmed = {place: r for place, r in asked.items() if place[2] == plan.filmed}
        earlier.write(_film_more(driver, filmed, rows, videos, plan.film, world))
    simulator = simulator_versions(driver, specs, world, earlier.versions)
    return evaluation_of(
        rows,
        {(number, spec.task): frozenset(METRICS) for number, spec in enumerate(specs)},
        step=step,
        task=", ".join(config.env.tasks),
        protocol={**_protocol(config, driver, specs, played, simulator), **plan.protocol},
        seed=config.seed,
        more={"failed_attempts": failed},
    )


def _requests(
    config: EmbodiedConfig,
    specs: Sequence[EnvSpec],
    played: Mapping[str, Sequence[InitialState]],
    filmed: str | None,
) -> dict[Place, GroupRequest]:
    """What is played; the first eval.gallery states of each task with pictures, in mode `filmed`."""
    found = {}
    for number, spec in enumerate(specs):
        noise = zlib.crc32(f"{spec.suite}/{spec.task}".encode())
        for order, state in enumerate(played[spec.task]):
            for mode, members in (("greedy", 1), ("sampled", config.eval.samples)):
                if members:
                    found[number, order, mode] = GroupRequest(
                        (noise, order, int(mode == "sampled")),
                        spec,
                        state,
                        members,
                        greedy=mode == "greedy",
                        frames=order < config.eval.gallery and mode == filmed,
                    )
    return found


def _share(world: World | None, requests: Sequence[GroupRequest]) -> list[GroupRequest]:
    """Those of this process: of every size-th state."""
    if world is None:
        return list(requests)
    states = {key: number for number, key in enumerate(dict.fromkeys(r.key[:2] for r in requests))}
    return [r for r in requests if states[r.key[:2]] % world.size == world.rank]


def _everywhere(world: World | None, items: Iterable[Any]) -> list[Any]:
    """The items of all processes, in order of rank. Collective."""
    return list(items) if world is None else world.gather(list(items))


def _filmed(sample: Sample, episode: Rollout, number: int, videos: Path | None) -> dict[str, Any]:
    """The row's entry of its clip, which is written; {} without pictures. Of several samples the first has one."""
    if videos is None or not episode.frames or episode.error is not None:
        return {}
    return {"video": write_video(videos / f"{number}_{sample.id}.mp4", episode.frames).name}


def _film_more(
    driver: Driver,
    requests: Mapping[Place, GroupRequest],
    rows: Sequence[Judged],
    videos: Path,
    count: int,
    world: World | None,
) -> list[Place]:
    """Play up to `count` episodes of a kind that no clip shows once more, with pictures. The clip enters its row only where it ends
    as the row says; where one did is returned."""
    first = {
        (j.source, j.place, j.row["mode"]): j for j in rows if j.number == 0 and j.score.parsed
    }
    again: dict[tuple[int, ...], Place] = {}
    for wanted in (1.0, 0.0):
        kind = {
            place: request
            for place, request in requests.items()
            if place in first and first[place].score.metrics[HEADLINE] == wanted
        }
        lacking = [place for place in kind if "video" not in first[place].row]
        have = len(kind) - len(lacking)
        again |= {kind[place].key: place for place in lacking[: max(0, count - have)]}
    wanted_again = [
        dataclasses.replace(requests[place], members=1, frames=True) for place in again.values()
    ]
    clips = []
    for group in driver.play(_share(world, wanted_again)):
        place, episode = again[group.key], group.rollouts[0]
        if episode.info.get(HEADLINE, 0.0) == first[place].score.metrics[HEADLINE]:
            clips.append((place, _filmed(group.sample, episode, place[0], videos)))
    filmed = _everywhere(world, clips)
    for place, clip in filmed:
        first[place].row.update(clip)
    return [place for place, _ in filmed]


def _row(
    sample: Sample, episode: Rollout, place: Place, member: int, film: Mapping[str, Any]
) -> Judged:
    """An episode as a row; one that could not be finished counts as a failure, with its reason."""
    metrics = {
        "success_once": 0.0,
        "success_at_end": 0.0,
        **episode.info,
        "return": episode.reward,
        "steps": float(episode.steps),
    }
    reason = None
    if episode.error is not None:
        metrics = dict.fromkeys(METRICS, 0.0) | {"steps": float(episode.steps)}
        reason = f"simulator_error: {episode.error}"
    state, (number, order, mode) = sample.params["state"], place
    return judged(
        sample,
        Score(metrics[HEADLINE], reason is None, reason, metrics=metrics),
        place=(number, order),
        number=member,
        source=f"{sample.source}/{sample.task}",
        mode=mode,
        text="",
        stop=StopReason.EOS if reason is None else StopReason.ERROR,
        num_tokens=episode.num_tokens,
        headline=HEADLINE,
        seed=state.seed,
        row=state.row,
        **film,
    )


def _protocol(
    config: EmbodiedConfig,
    driver: Driver,
    specs: Sequence[EnvSpec],
    played: Mapping[str, Sequence[InitialState]],
    simulator: Mapping[str, str],
) -> dict[str, Any]:
    e, codec = config.env, driver.vla.codec
    states = list(dict.fromkeys(describe_states(spec, played[spec.task]) for spec in specs))
    return {
        "name": "own",
        "suite": e.suite,
        "tasks": list(e.tasks),
        "max_steps": e.horizon,
        "image_size": e.image_size,
        "cameras": list(e.cameras),
        "options": dict(e.options),
        "states": "; ".join(states),
        "states_per_task": max((len(s) for s in played.values()), default=0),
        "chunk": codec.chunk,
        "repeat": codec.repeat,
        "bins": codec.bins,
        "decode": driver.vla.settings.decode,
        "temperature": driver.temperature,
        "samples_per_prompt": config.eval.samples,
        "seed": config.seed,
        "model": config.model.path,
        "interval": "95 %: Wilson, or cluster bootstrap over states",
        "success_at_end": "the same as success once: episodes stop at success"
        if config.stops_at_success
        else "measured",
        "render": simulator.get("render", "unknown"),
        "assets": simulator.get("assets", "the simulator's own"),
        "simulator": dict(simulator),
        "versions": versions(),
    }


class _Earlier:
    """What an earlier start of an evaluation has played, as `part` knows it: rows, failed attempts, what the simulators said of
    themselves (by EnvSpec.key), and the requests that are left. Without `part` nothing."""

    def __init__(
        self, part: Part | None, asked: Mapping[Place, GroupRequest], driver: Driver
    ) -> None:
        self._part, self._asked, self._driver = part, asked, driver
        self.failures: list[dict[str, Any]] = []
        self.versions: dict[str, Mapping[str, str]] = {}
        self.left: list[GroupRequest] = []
        self._rows: dict[Place, Sequence[Judged]] = {}
        self._more: dict[Place, dict[str, Any]] = {}
        for place, request in asked.items():
            known = None if part is None else part.judged(place)
            if known is None:
                self.left.append(request)
                continue
            number, order, _ = place
            self._rows[place] = judged_of(known["rows"], number, {order: request.sample})
            self._more[place] = {k: v for k, v in known.items() if k != "rows"}
            self.failures += known["failures"]
            self.versions[request.spec.key] = known["simulator"]
        self.rows = [row for rows in self._rows.values() for row in rows]

    def add(self, place: Place, rows: Sequence[Judged], failures: Sequence[Failure]) -> None:
        """The episodes of `place` have ended. Where one failed nothing is kept: the next start plays them again."""
        if self._part is None or not all(j.score.parsed for j in rows):
            return
        facts = self._driver.pool.facts.get(self._asked[place].spec.key)
        self._rows[place] = rows
        self._more[place] = {
            "failures": [dataclasses.asdict(f) for f in failures],
            "simulator": {} if facts is None else dict(facts.versions),
        }
        self.write([place])

    def write(self, places: Sequence[Place]) -> None:
        """Keep the rows of these as they are now: one may have got a clip."""
        if self._part is not None:
            for place in self._more.keys() & places:
                rows = entries_of(self._rows[place])
                self._part.keep(place, {"rows": rows, **self._more[place]}, 1)


def write_video(path: Path, frames: Sequence[np.ndarray], fps: int = 10) -> Path:
    """An H.264 clip of uint8 (H, W, 3) pictures with even sides."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = (n - n % 2 for n in frames[0].shape[:2])
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "18"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in frames:
            container.mux(
                stream.encode(
                    av.VideoFrame.from_ndarray(
                        np.ascontiguousarray(frame[:height, :width]), format="rgb24"
                    )
                )
            )
        container.mux(stream.encode())
    return path
