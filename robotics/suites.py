"""Named suites of simulated tasks for `mmrl eval`: which environment, tasks, horizon and states, under which protocol.

    mmrl eval runs/robot/checkpoints/best --suite tiny_reach,maniskill_push --samples 4
    mmrl eval runs/libero/checkpoints/best --suite libero_object --protocol openvla_oft

configs/robot_suites.yaml holds them. What a named protocol decides is taken from robotics.protocols; what was done otherwise
(another chunk, an override) is listed with the result as `deviations`.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mmrl.config import parse_overrides
from mmrl.errors import ConfigError, did_you_mean
from robotics.actions import ActionCodec
from robotics.config import ActionConfig, EmbodiedConfig, EnvConfig, VLAConfig
from robotics.contract import InitialState, Observation
from robotics.external import ExternalCodec, ExternalPolicy
from robotics.load import read_description
from robotics.pool import EnvPool
from robotics.protocols import LIBERO_SUITES, Protocol, protocol_of
from robotics.vla import Choice, VLAPolicy

__all__ = ["ProtocolPolicy", "RobotBook", "RobotRow", "RobotSuite", "Setting", "configure", "failed_row", "is_robot_file",
           "load_robot_suites", "markdown", "percent", "suite_row"]

_FILE = "configs/robot_suites.yaml"
_OF_TASK = ("suite", "tasks", "horizon")  # of env: the suite's own, unless the command line says otherwise
_OF_SIMULATOR = ("image_size", "cameras", "options")  # the checkpoint's, where it was trained in the same simulator


class RobotSuite(BaseModel):
    """One suite; see configs/robot_suites.yaml."""

    model_config = ConfigDict(extra="forbid")

    env: str
    tasks: list[str] = Field(min_length=1)
    horizon: int = Field(ge=1)
    image_size: int = Field(224, ge=8)
    cameras: list[str] = Field(["base"], min_length=1)
    options: dict[str, Any] = {}
    states: int = Field(50, ge=1)
    protocol: str | None = None
    official: bool = False  # a published benchmark: comparable under a named protocol, complete, on official assets
    notes: str = ""

    @field_validator("tasks")
    @classmethod
    def _ranges(cls, tasks: list[str]) -> list[str]:
        """'libero_10/0-9' stands for ten tasks."""
        out: list[str] = []
        for task in tasks:
            found = re.fullmatch(r"(.+/)(\d+)-(\d+)", task)
            out += [f"{found[1]}{i}" for i in range(int(found[2]), int(found[3]) + 1)] if found else [task]
        return out

    @field_validator("protocol")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is not None:
            protocol_of(name)
        return name

    @property
    def libero(self) -> str:
        """The LIBERO suite that protocols know, '' for other environments."""
        name = self.tasks[0].partition("/")[0]
        return name if self.env == "libero" and name in LIBERO_SUITES else ""


@dataclass(frozen=True)
class RobotBook:
    """All suites of a file, and names for several at once."""

    file: Path
    suites: Mapping[str, RobotSuite]
    groups: Mapping[str, tuple[str, ...]]

    @property
    def names(self) -> list[str]:
        """Suites and groups."""
        return [*self.suites, *self.groups]

    def select(self, names: Iterable[str]) -> dict[str, RobotSuite]:
        """The suites of those names, groups spelt out, each once. Raises ConfigError for an unknown one."""
        chosen: dict[str, RobotSuite] = {}
        for name in names:
            if name not in self.names:
                raise ConfigError(f"unknown suite '{name}' of simulated tasks.{did_you_mean(name, self.names)} {self.file} has: "
                                  f"{', '.join(self.suites)}; groups: {', '.join(self.groups) or 'none'}")
            for member in self.groups.get(name, (name,)):
                chosen[member] = self.suites[member]
        return chosen


def _tree(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"expected a suites file, found '{file}': {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: expected YAML in UTF-8, found another content: {error}") from error
    if not isinstance(tree, dict) or not isinstance(tree.get("suites"), dict) or not tree["suites"]:
        raise ConfigError(f"{file}: expected a mapping 'suites' of names to suites, found "
                          f"{sorted(map(str, tree)) if isinstance(tree, dict) else type(tree).__name__}")
    return tree


def is_robot_file(path: str | Path) -> bool:
    """Whether the suites of a file are of simulators: they have an env."""
    return any(isinstance(s, dict) and "env" in s for s in _tree(Path(path))["suites"].values())


def load_robot_suites(path: str | Path | None = None) -> RobotBook:
    """Read a file of suites (default: configs/robot_suites.yaml here or of the checkout).

    Raises ConfigError naming every problem.
    """
    places = [Path(_FILE), Path(__file__).resolve().parents[1] / _FILE] if path is None else [Path(path)]
    file = next((p for p in places if p.is_file()), places[0])
    tree = _tree(file)
    suites: dict[str, RobotSuite] = {}
    problems: list[str] = []
    for name, values in tree["suites"].items():
        try:
            suites[str(name)] = RobotSuite.model_validate(values)
        except (ValidationError, ConfigError) as error:
            problems += list(_explain(str(name), error))
    groups = {str(k): tuple(map(str, v)) for k, v in (tree.get("groups") or {}).items()}
    problems += [f"group '{name}': unknown suite '{member}'.{did_you_mean(member, tree['suites'])}"
                 for name, members in groups.items() for member in members if member not in tree["suites"]]
    if problems:
        raise ConfigError(f"{file}: {len(problems)} problem(s)\n  " + "\n  ".join(problems))
    return RobotBook(file, suites, groups)


def _explain(name: str, error: ValidationError | ConfigError) -> Iterable[str]:
    if isinstance(error, ConfigError):
        yield f"suite '{name}': {error}"
        return
    known = list(RobotSuite.model_fields)
    for item in error.errors():
        where = ".".join(map(str, item["loc"])) or "it"
        if item["type"] == "extra_forbidden":
            yield f"suite '{name}': unknown key '{where}'.{did_you_mean(where, known)} Known here: {', '.join(known)}"
        else:
            yield f"suite '{name}': {where}: {item['msg']}, found {item['input']!r}"[:300]


@dataclass(frozen=True)
class Setting:
    """A suite made ready: its configuration, the protocol (None: ours), in which mode the headline is measured, initial states by
    task where the protocol names them, and what is done otherwise than the protocol says."""

    config: EmbodiedConfig
    protocol: Protocol | None
    mode: str
    states: Mapping[str, Sequence[InitialState]] = field(default_factory=dict)
    deviations: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether the protocol decides everything: it speaks of this environment."""
        return self.protocol is not None and bool(self.states)


def configure(base: EmbodiedConfig, suite: RobotSuite, *, protocol: str | None = None, samples: int = 0,
              overrides: Sequence[str] = (), external: ExternalPolicy | None = None) -> Setting:
    """The configuration of one suite: `base` are the checkpoint's settings, `overrides` those of the command line, which are in it
    already; `external`: the policy, where it has no vla.json. Raises ConfigError for an unknown protocol, or one that does not know
    the suite."""
    name = protocol or suite.protocol
    rules = protocol_of(name) if name is not None else None
    tree = parse_overrides(list(overrides))
    given = dict(tree.get("env", {})) if isinstance(tree.get("env"), dict) else {}
    known = read_description(base.model.path) if external is None else (external.settings, external.codec)
    assert known is not None, "only VLA checkpoints come here"
    settings, codec = known
    kept = base.env.model_dump(include=base.env.model_fields_set, exclude=set(_OF_TASK))
    if base.env.suite != suite.env:
        kept = {k: v for k, v in kept.items() if k not in _OF_SIMULATOR}
    env: dict[str, Any] = {"suite": suite.env, "tasks": suite.tasks, "horizon": suite.horizon,
                           "image_size": suite.image_size, **kept, "cameras": list(settings.cameras),
                           "options": {**suite.options, **kept.get("options", {})}}
    states: dict[str, Sequence[InitialState]] = {}
    count, deviations = suite.states, []
    if rules is not None and suite.libero:
        env["horizon"], env["image_size"], count = rules.steps(suite.libero), rules.image_size, rules.trials
        env["options"] |= {"wait_steps": rules.wait_steps, "settle_gripper": rules.wait_gripper, "env_seed": rules.env_seed}
    wanted = {**env, **given, "options": {**env["options"], **given.get("options", {})}, "suite": suite.env}
    count = int(tree.get("eval_states", count))
    if rules is not None and suite.libero:
        deviations = [f"env.{k} {wanted[k]} instead of {env[k]}" for k in ("horizon", "image_size", "options")
                      if wanted[k] != env[k]]
        deviations += _policy_deviations(rules, codec)
        image = rules.describe()["image"]
        if external is not None and external.facts.image is not None:
            deviations += [f"pictures: {k} {v} instead of {image.get(k)}" for k, v in external.facts.image.items()
                           if v != image.get(k)]
        deviations += [f"{count} trials instead of {rules.trials}"] if count != rules.trials else []
        from robotics.libero import libero_states

        states = {task: libero_states(task, "eval", rows="all", count=count) for task in wanted["tasks"]}
    sampled = rules is not None and bool(rules.temperature)
    temperature = rules.temperature if sampled and rules is not None and rules.temperature else base.rollout.temperature
    temperature = tree.get("rollout", {}).get("temperature", temperature) if isinstance(tree.get("rollout"), dict) else temperature
    gallery = tree.get("eval", {}).get("gallery", 2 if len(wanted["tasks"]) <= 4 else 1)
    return Setting(base.model_copy(update={
        "env": EnvConfig.model_validate(wanted), "action": ActionConfig(), "vla": VLAConfig(), "eval_states": count,
        "seed": base.seed if rules is None or "seed" in tree else rules.seed,
        "rollout": base.rollout.model_copy(update={"temperature": temperature}),
        "eval": base.eval.model_copy(update={"samples": max(samples, 1) if sampled else samples, "gallery": gallery}),
    }), rules, "sampled" if sampled else "greedy", states, tuple(deviations))


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

    def __init__(self, vla: VLAPolicy | ExternalPolicy, pool: EnvPool, setting: Setting) -> None:
        self._vla, self._pool, self._setting = cast(VLAPolicy, vla), pool, setting
        self._rules, self._agreed = setting.protocol if setting.whole else None, False
        self._own_pictures = getattr(vla, "own_pictures", False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vla, name)

    def act(self, observations: Sequence[Observation], keys: Sequence[tuple[int, ...]], *, greedy: bool = False,
            temperature: float = 1.0) -> list[Choice]:
        """See VLAPolicy.act."""
        if observations and not self._agreed:
            self._agree()
        if self._rules is not None and not self._own_pictures:
            observations = [replace(o, images={c: self._rules.picture(p, rotated=True) for c, p in o.images.items()})
                            for o in observations]
        return self._vla.act(observations, keys, greedy=greedy, temperature=temperature)

    def actions(self, choice: Choice) -> np.ndarray:
        """Control steps until the protocol replans, (min(replan, chunk) * repeat, A)."""
        found, codec = self._vla.actions(choice), self._vla.codec
        replan = self._rules.replan if self._rules is not None else None
        return found if replan is None else found[:replan * codec.repeat]

    def _agree(self) -> None:
        env, codec = self._setting.config.env, self._vla.codec
        for facts in self._pool.facts.values():
            if facts.action_space.dim != codec.dim:
                raise ConfigError(f"{env.suite}/{env.tasks[0]}: expected a policy with {facts.action_space.dim} action dimensions "
                                  f"({', '.join(facts.action_space.names)}), found {codec.dim}; choose a suite it was "
                                  "made for, or set env.options as in training (--config FILE gives them)")
        self._agreed = True


# results


@dataclass(frozen=True)
class RobotRow:
    """One line of the table. `success_once`, `success_at_end`: mean, low, high (95 %) in the headline's mode."""

    suite: str
    protocol: str
    mode: str
    tasks: int
    n: int
    success_once: Mapping[str, float]
    success_at_end: Mapping[str, float]
    sampled: Mapping[str, float] | None
    per_task: Mapping[str, Mapping[str, Mapping[str, float]]]
    states: str
    assets: str
    render: str
    simulator: Mapping[str, str]
    failed_attempts: int
    unfinished: int
    official: bool
    limited: bool
    deviations: tuple[str, ...] = ()
    error: str = ""

    @property
    def stand_in(self) -> bool:
        """Whether it was measured on stand-in assets, and so is no score of the benchmark."""
        return "stand-in" in self.assets

    @property
    def mark(self) -> str:
        """What stands beside every number of the row."""
        return " (stand-in assets)" if self.stand_in else ""

    def as_dict(self) -> dict[str, Any]:
        """For suites.json."""
        return {**asdict(self), "stand_in": self.stand_in}


def percent(estimate: Mapping[str, float] | None) -> str:
    """'55.0 % [41.2, 68.0]', '-' for nothing."""
    if not estimate:
        return "-"
    return f"{100 * estimate['mean']:.1f} % [{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]"


def suite_row(name: str, suite: RobotSuite, setting: Setting, results: Mapping[str, Any], limit: int | None) -> RobotRow:
    """The line of an evaluated suite."""
    mode, protocol = setting.mode, results["protocol"]
    found, prefix = results[mode], "" if mode == "greedy" else "sampled/"
    per_task = {task: {m: row[f"{prefix}{m}"] for m in ("success_once", "success_at_end")}
                for task, row in results["per_task"].items()}
    wanted = setting.config.eval_states
    limited = limit is not None and limit < wanted
    sampled = results.get("sampled", {}).get("success_once") if mode == "greedy" else None
    complete = setting.whole and not limited and not setting.deviations and setting.config.env.tasks == suite.tasks
    return RobotRow(
        name, protocol["name"], mode, len(setting.config.env.tasks), int(found["success_once"]["n"]), found["success_once"],
        found["success_at_end"], sampled, per_task, protocol["states"], protocol["assets"], protocol["render"],
        protocol["simulator"], len(results["failed_attempts"]), sum(int(t["error"]) for t in results["failures"].values()),
        suite.official and complete and "stand-in" not in protocol["assets"], limited, setting.deviations)


def failed_row(name: str, suite: RobotSuite, error: str) -> RobotRow:
    """The line of a suite that could not be evaluated."""
    return RobotRow(name, suite.protocol or "own", "greedy", len(suite.tasks), 0, {}, {}, None, {}, "", "unknown", "unknown", {}, 0,
                    0, False, False, (), error)


def markdown(rows: Sequence[RobotRow], suites: Mapping[str, RobotSuite], checkpoint: str) -> str:
    """The table as Markdown, and what each number was measured on below it."""
    lines = [f"# {checkpoint}", "", "| suite | protocol | states | success rate (95 %) | success at end (95 %) | comparable |",
             "|---|---|--:|--:|--:|---|"]
    for row in rows:
        count = f"{row.n}{' (first n)' if row.limited else ''}"
        lines.append(f"| {row.suite} | {row.protocol} | {count} | {percent(row.success_once)}{row.mark} | "
                     f"{percent(row.success_at_end)}{row.mark} | {'yes' if row.official else 'no'} |")
    lines.append("")
    for row in rows:
        words = [row.mode, f"states: {row.states}", f"assets: {row.assets}", f"GL backend: {row.render}",
                 ", ".join(f"{k} {v}" for k, v in row.simulator.items()), f"failed attempts: {row.failed_attempts}",
                 f"not finished: {row.unfinished}", *row.deviations, " ".join(suites[row.suite].notes.split())]
        lines.append(f"- {row.suite}: " + ("; ".join(w for w in words if w) if not row.error else f"error: {row.error}"))
        if row.stand_in:
            lines.append("  - measured on stand-in assets: not a score of the benchmark")
        if row.tasks > 1:
            lines += [f"  - {task}: {percent(found['success_once'])}, at end {percent(found['success_at_end'])}{row.mark}"
                      for task, found in row.per_task.items()]
    return "\n".join(lines) + "\n"
