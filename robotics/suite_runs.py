"""Run suites of simulated tasks with one load of the policy: results, predictions and clips of each, one table over all.

    place = evaluation_place("runs/robot/checkpoints/best", "tiny_reach")
    rows, folder = play_suites("runs/robot/checkpoints/best", load_suites().select("tiny_reach"), base, place=place)

`mmrl eval CHECKPOINT --suite NAME,...` calls it. A suite that cannot run (package, assets, GL) is a row with its error; the others
are evaluated.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from mmrl.config.trust import ALL, CHECKPOINT_KEYS, at_most, checkpoint_settings
from mmrl.evaluation.places import Place
from mmrl.evaluation.progress import Asked, Progress, asked_of, weights_mark
from mmrl.evaluation.result import write_evaluation
from mmrl.evaluation.suite_table import run_suites
from mmrl.policy.manifest import check_loadable
from mmrl.robotics.acting import ActingPolicy
from mmrl.robotics.config import EmbodiedConfig, EnvConfig, read_description
from mmrl.robotics.episodes import pool_settings
from mmrl.robotics.evaluate import EvalPlan, evaluate_policy, states_played
from mmrl.robotics.load import load_vla
from mmrl.robotics.pool import VectorEnv
from mmrl.robotics.remote import RemotePolicy
from mmrl.robotics.rollout import Driver
from mmrl.robotics.source import env_specs
from mmrl.robotics.suite_table import EpisodesRow, failed_row, suite_row
from mmrl.robotics.suites import (
    EnvironmentSuite,
    ProtocolPolicy,
    Setting,
    check_overrides,
    configure,
)
from mmrl.robotics.vector import check_playing

__all__ = ["base_settings", "play_suites"]

_CHECKPOINT_KEYS: Mapping[str, Any] = {
    **CHECKPOINT_KEYS,
    "schedule": ALL,
    "vla": {"cameras": ALL},
    "eval_states": ALL,
    # the suite is compared with the one that is played, never imported
    "env": {
        **{key: ALL for key in EnvConfig.model_fields},
        "image_size": at_most(2048),
        "slots": at_most(256),
        "workers": at_most(max(2, os.cpu_count() or 1)),
        "respawns": at_most(1000),
        "retries": at_most(100),
    },
}
_FILM = 2  # clips of each outcome, where there are so many


def base_settings(
    checkpoint: str,
    config: Path | None,
    overrides: Sequence[str],
    chosen: Mapping[str, EnvironmentSuite] | None = None,
    external: RemotePolicy | None = None,
    *,
    trust_code: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> EmbodiedConfig:
    """`config`, else what the settings of the checkpoint's run may say (mmrl.config.trust), with `overrides`, except for env: it is
    the checkpoint's own, for mmrl.robotics.suites.configure to put the overrides over each of the suites `chosen`.

    Raises ConfigError for an override that is wrong, or that is not for an evaluation.
    """
    if external is None:
        check_loadable(checkpoint, say)  # before anything of it is read
    known = (
        read_description(checkpoint) if external is None else (external.settings, external.codec)
    )
    if known is not None:  # before the rest is read: it would blame the checkpoint's file
        check_overrides(overrides, (chosen or {}).values(), checkpoint, known[0].cameras)
    found = partial(
        checkpoint_settings,
        EmbodiedConfig,
        checkpoint,
        config=config,
        keys=_CHECKPOINT_KEYS,
        trust_code=trust_code,
    )
    own = found([o for o in overrides if not o.startswith(("env.", "env="))])
    return found(list(overrides), say=say).model_copy(update={"env": own.env})


def play_suites(
    checkpoint: str,
    chosen: Mapping[str, EnvironmentSuite],
    base: EmbodiedConfig,
    *,
    place: Place,
    protocol: str | None = None,
    samples: int = 0,
    limit: int | None = None,
    overrides: Sequence[str] = (),
    on_row: Callable[[EpisodesRow], None] = lambda row: None,
    external: RemotePolicy | None = None,
) -> tuple[list[EpisodesRow], Path]:
    """Evaluate all suites and write FOLDER/SUITE/ for each, FOLDER/suites.json and suites.md, renewed after each; FOLDER, that of
    `place`, is returned too. With `external`, that policy acts and `checkpoint` is its name.

    Raises MMRLError when the only suite cannot run, or when a setting is wrong.
    """
    ready = {
        name: configure(
            base, suite, protocol=protocol, samples=samples, overrides=overrides, external=external
        )
        for name, suite in chosen.items()
    }
    vla = external or load_vla(next(iter(ready.values())).config, trainable=False)
    asked = {
        name: _asked(checkpoint, suite, ready[name], limit, external)
        for name, suite in chosen.items()
    }
    with place.begin(asked) as progress:
        rows = run_suites(
            chosen,
            lambda name, suite: _one(vla, name, suite, ready[name], progress, limit),
            failed_row,
            lambda name, suite: {
                **suite.model_dump(),
                "env": ready[name].config.env.model_dump(mode="json"),
            },
            checkpoint=checkpoint,
            folder=progress.folder,
            samples=samples,
            on_row=on_row,
        )
        progress.complete = not any(row.error for row in rows)
    return rows, progress.folder


def _asked(
    checkpoint: str,
    suite: EnvironmentSuite,
    setting: Setting,
    limit: int | None,
    external: RemotePolicy | None,
) -> Asked:
    """What a resume compares (mmrl.evaluation.progress)."""
    config = setting.config
    states = states_played(config, EvalPlan(setting.states), limit)
    more = {
        "suite": suite.model_dump(),
        "mode": setting.mode,
        "sampled": config.eval.samples,
        "states": {task: [repr(state) for state in played] for task, played in states.items()},
        "policy": None if external is None else external.describe(),
    }
    modes = 1 + bool(config.eval.samples)
    weights = checkpoint if external is not None else weights_mark(checkpoint)
    return asked_of(
        config.model_dump(mode="json"), weights, more, modes * sum(map(len, states.values()))
    )


def _one(
    vla: ActingPolicy | RemotePolicy,
    name: str,
    suite: EnvironmentSuite,
    setting: Setting,
    progress: Progress,
    limit: int | None,
) -> EpisodesRow:
    config, env, folder = setting.config, setting.config.env, progress.folder / name
    slots = min(
        env.slots,
        len(env.tasks)
        * min(limit or config.eval_states, config.eval_states)
        * (1 + config.eval.samples),
    )
    stages = 1 if config.schedule.kind == "serial" else config.schedule.stages
    check_playing(env_specs(config), -(-slots // min(env.workers, slots)))
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(
            VectorEnv(slots, min(env.workers, slots), pool_settings(env), batched=env.batched)
        )
        policy = ProtocolPolicy(vla, pool, setting)
        driver = Driver(
            pool,
            cast(ActingPolicy, policy),
            seed=config.seed,
            stages=stages,
            temperature=config.rollout.temperature,
            retries=env.retries,
        )
        said = {"policy": vla.describe()} if isinstance(vla, RemotePolicy) else {}
        plan = EvalPlan(
            setting.states, _protocol(name, suite, setting, policy) | said, _FILM, setting.mode
        )
        found = evaluate_policy(
            config,
            driver,
            0,
            limit=limit,
            videos=folder / "videos",
            plan=plan,
            part=progress.part(name),
        )
    write_evaluation(found, folder)
    return suite_row(name, suite, setting, found.results, limit)


def _protocol(
    name: str, suite: EnvironmentSuite, setting: Setting, policy: ProtocolPolicy
) -> dict[str, Any]:
    """What stands in results.json beside what every evaluation says of itself."""
    rules = setting.protocol
    words: dict[str, Any] = {
        "suite_name": name,
        "mode": setting.mode,
        "deviations": list(setting.deviations),
        "otherwise_than_the_suite": list(setting.changes),
        "notes": " ".join(suite.notes.split()),
    }
    if rules is None:
        return {"name": "own", **words}
    if not setting.whole:
        return {"name": f"own, temperature and seed of {rules.name}", **words}
    return {
        "name": rules.name,
        **words,
        "replan": min(rules.replan or policy.codec.chunk, policy.codec.chunk),
        "published": rules.describe(),
    }
