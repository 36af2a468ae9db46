"""Named suites of simulated tasks for `mmrl eval`: which environment, tasks, horizon and states, under which protocol.

    mmrl eval runs/robot/checkpoints/best --suite tiny_reach,maniskill_push --samples 4
    mmrl eval runs/libero/checkpoints/best --suite libero_object --protocol openvla_oft

configs/robot_suites.yaml holds them. What a named protocol decides is taken from mmrl.robotics.protocols; what was done otherwise
(another chunk, an override) is listed with the result as `deviations`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from pydantic import BaseModel, Field, ValidationInfo, field_validator

from mmrl.config import merge, parse_overrides
from mmrl.errors import ConfigError
from mmrl.evaluation.suite_book import Suite
from mmrl.robotics.acting import ActingPolicy, ActionOutput
from mmrl.robotics.actions import ActionCodec
from mmrl.robotics.config import (
    ActionConfig,
    EmbodiedConfig,
    EnvConfig,
    VLAConfig,
    read_description,
)
from mmrl.robotics.contract import InitialState, Observation
from mmrl.robotics.metaworld_tasks import expand
from mmrl.robotics.pool import VectorEnv
from mmrl.robotics.protocols import LIBERO_SUITES, Protocol, protocol_of
from mmrl.robotics.remote import ExternalCodec, RemotePolicy

__all__ = [
    "EnvironmentSuite",
    "ProtocolPolicy",
    "Setting",
    "check_overrides",
    "configure",
]

# of env: the suite's own, unless the command line says otherwise
_OF_TASK = ("suite", "tasks", "horizon")
# the checkpoint's, where it was trained in the same simulator
_OF_SIMULATOR = ("image_size", "cameras", "options")


class EnvironmentSuite(Suite, BaseModel):
    """One suite; see configs/robot_suites.yaml. `official`: a published benchmark: comparable under a named protocol, complete, on
    official assets."""

    acts = True

    env: str
    tasks: list[str] = Field(min_length=1)
    horizon: int = Field(ge=1)
    image_size: int = Field(224, ge=8)
    cameras: list[str] = Field(["base"], min_length=1)
    options: dict[str, Any] = {}
    states: int = Field(50, ge=1)
    protocol: str | None = None

    @field_validator("tasks")
    @classmethod
    def _ranges(cls, tasks: list[str], info: ValidationInfo) -> list[str]:
        """'libero_10/0-9' stands for ten tasks, 'MT10' for MetaWorld's."""
        out: list[str] = []
        for task in expand(tasks) if info.data.get("env") == "metaworld" else tasks:
            found = re.fullmatch(r"(.+/)(\d+)-(\d+)", task)
            out += (
                [f"{found[1]}{i}" for i in range(int(found[2]), int(found[3]) + 1)]
                if found
                else [task]
            )
        return out

    @field_validator("protocol")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is not None:
            protocol_of(name)
        return name

    @property
    def listed(self) -> dict[str, str]:
        """See Suite."""
        few = len(self.tasks) < 3
        return {
            "simulator": self.env,
            "tasks": ", ".join(self.tasks) if few else f"{self.tasks[0]} to {self.tasks[-1]}",
            "control steps": str(self.horizon),
            "states per task": str(self.states),
            "protocol": self.protocol or "own",
        }

    @property
    def libero(self) -> str:
        """The LIBERO suite that protocols know, '' for other environments."""
        name = self.tasks[0].partition("/")[0]
        return name if self.env == "libero" and name in LIBERO_SUITES else ""


@dataclass(frozen=True)
class Setting:
    """A suite made ready: its configuration, the protocol (None: ours), in which mode the headline is measured, initial states by
    task where the protocol names them, what is done otherwise than the protocol says, and otherwise than the suite."""

    config: EmbodiedConfig
    protocol: Protocol | None
    mode: str
    states: Mapping[str, Sequence[InitialState]] = field(default_factory=dict)
    deviations: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether the protocol decides everything: it speaks of this environment."""
        return self.protocol is not None and bool(self.states)


def check_overrides(
    overrides: Sequence[str], chosen: Iterable[EnvironmentSuite], actor: str, cameras: Sequence[str]
) -> None:
    """Refuse what an evaluation cannot change: the simulator is the suites', cameras and actions are the policy's.

    `actor`: the policy's name, `cameras`: those it sees through. Raises ConfigError, before anything else is read from overrides.
    """
    tree = parse_overrides(list(overrides))
    for section in ("action", "vla"):
        if section in tree:
            given = ", ".join(o for o in overrides if o.startswith((f"{section}.", f"{section}=")))
            raise ConfigError(
                f"mmrl eval: expected the policy's own {section} settings, found the override {given}: {actor} "
                "decodes and sees as it was made to; remove it (another chunk or decoding needs another policy)"
            )
    env = tree.get("env")
    if not isinstance(env, dict):
        return
    suites = list(dict.fromkeys(s.env for s in chosen))
    if "suite" in env and suites and suites != [env["suite"]]:
        raise ConfigError(
            f"mmrl eval: expected the simulator of --suite ({', '.join(suites)}), found the override "
            f"env.suite={env['suite']}: remove it, or choose a suite of {env['suite']} (mmrl eval --list-suites)"
        )
    if "cameras" in env and merge(list(cameras), env["cameras"]) != list(cameras):
        raise ConfigError(
            f"mmrl eval: expected the cameras that {actor} sees through, [{', '.join(cameras)}], found the override "
            f"env.cameras={env['cameras']}: remove it"
        )


def configure(
    base: EmbodiedConfig,
    suite: EnvironmentSuite,
    *,
    protocol: str | None = None,
    samples: int = 0,
    overrides: Sequence[str] = (),
    external: RemotePolicy | None = None,
) -> Setting:
    """The configuration of one suite: `base` are the checkpoint's settings, in which `overrides`, those of the command line, are
    already but for env, which is the checkpoint's own; `external`: the policy, where it has no vla.json. Raises ConfigError for an
    unknown protocol, one that does not know the suite, or an override that is not for an evaluation."""
    name = protocol or suite.protocol
    rules = protocol_of(name) if name is not None else None
    tree = parse_overrides(list(overrides))
    given = dict(tree.get("env", {})) if isinstance(tree.get("env"), dict) else {}
    known = (
        read_description(base.model.path)
        if external is None
        else (external.settings, external.codec)
    )
    assert known is not None, "only VLA checkpoints come here"
    settings, codec = known
    check_overrides(overrides, [suite], base.model.path, settings.cameras)
    env = _environment(base.env, suite, settings.cameras)
    states: dict[str, Sequence[InitialState]] = {}
    count, deviations = suite.states, []
    # a protocol decides sampling everywhere, the rest in LIBERO
    ruling = rules if suite.libero else None
    if ruling is not None and suite.libero:
        env["horizon"], env["image_size"], count = (
            ruling.steps(suite.libero),
            ruling.image_size,
            ruling.trials,
        )
        env["options"] |= _start(ruling)
    wanted = merge(env, given)
    count = int(tree.get("eval_states", count))
    temperature = (rules.temperature if rules is not None else None) or base.rollout.temperature
    sampled = rules is not None and bool(rules.temperature)
    temperature = (
        tree.get("rollout", {}).get("temperature", temperature)
        if isinstance(tree.get("rollout"), dict)
        else temperature
    )
    seed = base.seed if rules is None or "seed" in tree else rules.seed
    if rules is not None:
        deviations = _sampling_deviations(rules, temperature, seed, sampled)
    if ruling is not None:
        deviations += [
            *_simulator_deviations(ruling, env, wanted),
            *_policy_deviations(ruling, codec),
            *_picture_deviations(ruling, external),
        ]
        deviations += (
            [f"{count} trials instead of {ruling.trials}"] if count != ruling.trials else []
        )
        from mmrl.robotics.libero import libero_states

        states = {
            task: libero_states(task, "eval", rows="all", count=count) for task in wanted["tasks"]
        }
    gallery = tree.get("eval", {}).get("gallery", 2 if len(wanted["tasks"]) <= 4 else 1)
    return Setting(
        base.model_copy(
            update={
                "env": EnvConfig.model_validate(wanted),
                "action": ActionConfig(),
                "vla": VLAConfig(),
                "eval_states": count,
                "seed": seed,
                "rollout": base.rollout.model_copy(update={"temperature": temperature}),
                "eval": base.eval.model_copy(
                    update={"samples": max(samples, 1) if sampled else samples, "gallery": gallery}
                ),
            }
        ),
        rules,
        "sampled" if sampled else "greedy",
        states,
        tuple(deviations),
        _changes(
            suite,
            wanted,
            {} if ruling is None else _start(ruling) | {"horizon": 0, "image_size": 0},
        ),
    )


def _environment(
    trained: EnvConfig, suite: EnvironmentSuite, cameras: Sequence[str]
) -> dict[str, Any]:
    """env of a suite: its own, with the checkpoint's resources and, in the same simulator, its pictures and options."""
    kept = trained.model_dump(include=trained.model_fields_set, exclude=set(_OF_TASK))
    if trained.suite != suite.env:
        kept = {k: v for k, v in kept.items() if k not in _OF_SIMULATOR}
    return {
        "suite": suite.env,
        "tasks": suite.tasks,
        "horizon": suite.horizon,
        "image_size": suite.image_size,
        **kept,
        "cameras": list(cameras),
        "options": {**suite.options, **kept.get("options", {})},
    }


def _changes(
    suite: EnvironmentSuite, wanted: Mapping[str, Any], ruled: Mapping[str, Any]
) -> tuple[str, ...]:
    """What is played otherwise than the suite says, in words: options came with the checkpoint, or from the command line. `ruled`:
    what a protocol decides."""
    found = [
        f"{k} {wanted[k]} instead of {getattr(suite, k)}"
        for k in ("horizon", "image_size")
        if k not in ruled and wanted[k] != getattr(suite, k)
    ]
    if wanted["tasks"] != suite.tasks:
        found.insert(
            0, f"tasks {', '.join(wanted['tasks'])} instead of the suite's {len(suite.tasks)}"
        )
    for key, value in wanted["options"].items():
        if key not in ruled and (key not in suite.options or suite.options[key] != value):
            found.append(
                f"options.{key} {value}"
                + (f" instead of {suite.options[key]}" if key in suite.options else "")
            )
    return tuple(found)


def _sampling_deviations(
    rules: Protocol, temperature: float, seed: int, sampled: bool
) -> list[str]:
    """Of a greedy protocol the temperature decides nothing that is compared: only --samples uses it."""
    found = (
        [f"rollout.temperature {temperature} instead of {rules.temperature}"]
        if sampled and temperature != rules.temperature
        else []
    )
    return [*found, f"seed {seed} instead of {rules.seed}"] if seed != rules.seed else found


def _simulator_deviations(
    rules: Protocol, env: Mapping[str, Any], wanted: Mapping[str, Any]
) -> list[str]:
    found = [
        f"env.{k} {wanted[k]} instead of {env[k]}"
        for k in ("horizon", "image_size")
        if wanted[k] != env[k]
    ]
    return found + [
        f"env.options.{k} {wanted['options'][k]} instead of {v}"
        for k, v in _start(rules).items()
        if wanted["options"][k] != v
    ]  # other options (assets, gl) are no matter of a protocol


def _picture_deviations(rules: Protocol, external: RemotePolicy | None) -> list[str]:
    """Of a remote policy that prepares its pictures itself."""
    if external is None or external.facts.image is None:
        return []
    image = rules.describe()["image"]
    return [
        f"pictures: {k} {v} instead of {image.get(k)}"
        for k, v in external.facts.image.items()
        if v != image.get(k)
    ]


def _start(rules: Protocol) -> dict[str, Any]:
    """Options of LIBERO that a protocol decides: how an episode starts."""
    return {
        "wait_steps": rules.wait_steps,
        "settle_gripper": rules.wait_gripper,
        "env_seed": rules.env_seed,
        "env_draws": rules.env_draws,
    }


def _policy_deviations(rules: Protocol, codec: ActionCodec | ExternalCodec) -> list[str]:
    found = []
    if rules.chunk is not None and rules.chunk != codec.chunk:
        found.append(f"chunk {codec.chunk} of the policy instead of {rules.chunk}")
    if rules.replan is not None and rules.replan > codec.chunk:
        found.append(f"replanned every {codec.chunk} action steps instead of {rules.replan}")
    if codec.repeat != 1:
        found.append(f"every action executed {codec.repeat} times")
    return found


class ProtocolPolicy:
    """A policy as a protocol wants it: pictures through its image path (unless the policy prepares them itself), chunks cut where
    it replans.

    Checks at the first decision that the simulator takes the actions the policy gives (ConfigError).
    """

    def __init__(self, vla: ActingPolicy | RemotePolicy, pool: VectorEnv, setting: Setting) -> None:
        self._vla, self._pool, self._setting = cast(ActingPolicy, vla), pool, setting
        self._rules, self._agreed = setting.protocol if setting.whole else None, False
        self._own_pictures = getattr(vla, "own_pictures", False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vla, name)

    def act(
        self,
        observations: Sequence[Observation],
        keys: Sequence[tuple[int, ...]],
        *,
        greedy: bool = False,
        temperature: float = 1.0,
    ) -> list[ActionOutput]:
        """See ActingPolicy.act."""
        if observations and not self._agreed:
            self._agree()
        if self._rules is not None and not self._own_pictures:
            observations = [
                replace(
                    o, images={c: self._rules.picture(p, rotated=True) for c, p in o.images.items()}
                )
                for o in observations
            ]
        return self._vla.act(observations, keys, greedy=greedy, temperature=temperature)

    def actions(self, output: ActionOutput) -> np.ndarray:
        """Control steps until the protocol replans, (min(replan, chunk) * repeat, A)."""
        found, codec = self._vla.actions(output), self._vla.codec
        replan = self._rules.replan if self._rules is not None else None
        return found if replan is None else found[: replan * codec.repeat]

    def _agree(self) -> None:
        env, codec = self._setting.config.env, self._vla.codec
        for facts in self._pool.facts.values():
            if facts.action_space.dim != codec.dim:
                raise ConfigError(
                    f"{env.suite}/{env.tasks[0]}: expected a policy with {facts.action_space.dim} action dimensions "
                    f"({', '.join(facts.action_space.names)}), found {codec.dim}; choose a suite it was "
                    "made for, or set env.options as in training (--config FILE gives them)"
                )
        self._agreed = True
