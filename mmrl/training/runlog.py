"""The folder of a run: everything the report, `mmrl score` and a resume need, as plain text files.

config.yaml  run.json  metrics.jsonl  alarms.jsonl  failures.jsonl  rejected.jsonl  gallery.json
rollouts/step_000010.jsonl   eval/step_000000/{results.json, predictions.jsonl}   checkpoints/   report.html
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from mmrl.algorithms.group_rewards import score_of
from mmrl.config import RunConfig
from mmrl.errors import ConfigError
from mmrl.files import append, json_line, write_text, writing
from mmrl.operations.lock import RunLock
from mmrl.operations.restart import resume_command_of
from mmrl.operations.versions import versions
from mmrl.types import Rollout, RolloutGroup

__all__ = ["RunFolder", "rollout_rows", "write_json"]

_RESERVE, _RESERVED = ".reserve", 65_536
# what mmrl writes into the folder of a run; last what it is known by, so that a removal that was cut short is told again
_WRITTEN = (
    "alarms.jsonl",
    "config.yaml",
    "eval",
    "failures.jsonl",
    "gallery.json",
    "rejected.jsonl",
    "report.html",
    "rollouts",
    "run.json",
    "skipped.json",
    "tensorboard",
    "timeline",
    "trackers.json",
    "verdicts",
    "wandb",
    _RESERVE,
    "checkpoints",
    "metrics.jsonl",
)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically. Raises StorageError."""
    write_text(path, json_line(value, indent=1) + "\n")


def _token_versions(rollout: Rollout) -> dict[str, Any]:
    """Of a rollout within which newer weights took over: [version, tokens] of each part of each turn."""
    if not any(t.versions for t in rollout.turns):
        return {}
    of_tokens = (t.versions or (t.policy_version,) * len(t.token_ids) for t in rollout.turns)
    return {
        "token_versions": [
            [[version - 1, len(list(run))] for version, run in groupby(versions)]
            for versions in of_tokens
        ]
    }


def rollout_rows(
    groups: Iterable[RolloutGroup],
    frame: str,
    total_steps: int,
    max_tokens: int,
    origins: Mapping[tuple[int, int, int], Mapping[str, Any]],
    *,
    versions: bool = False,
    pictures: Path | None = None,
) -> list[dict[str, Any]]:
    """Logged completions, with all that `mmrl score` needs to score them again; `origins` are those of the tally.

    With `versions` each names the weights that wrote its turns: the number of steps these were trained for.

    What rollouts in environments were shown is written below `pictures`, of those that kept it; not without that folder.

    Demonstrations are marked `offline`: the policy did not write them. Of a group with a changed view (T-GRPO and the like)
    all rows name the `view`, and those written on the changed input are marked `contrast`.
    """
    rows = []
    for group in groups:
        view = {"view": group.view} if group.view else {}
        for number, (trajectory, contrast) in enumerate(
            (
                *((t, False) for t in group.rollouts),
                *((t, True) for t in group.contrast),
            )
        ):
            kept = trajectory.film if pictures is not None else None
            film = kept if kept is not None and kept.pictures else None
            name = "_".join(str(v) for v in (*group.key, number))
            turn, score = trajectory.turns[-1], score_of(trajectory)
            several = (
                {"turns": [t.text for t in trajectory.turns]} if len(trajectory.turns) > 1 else {}
            )
            rows.append(
                {
                    "step": group.key[0],
                    "key": list(group.key),
                    "total_steps": total_steps,
                    "sample": dataclasses.asdict(group.sample),
                    "text": turn.text,
                    **several,
                    "stop": turn.stop.value,
                    "num_tokens": trajectory.num_tokens,
                    "max_tokens": max_tokens,
                    "frame": frame,
                    **(
                        {"versions": [t.policy_version - 1 for t in trajectory.turns]}
                        if versions and not trajectory.offline
                        else {}
                    ),
                    **_token_versions(trajectory),
                    **({"offline": True} if trajectory.offline else {}),
                    **({"replayed": True} if trajectory.replayed else {}),
                    **(
                        {"tree": trajectory.tree, "shared_turns": trajectory.shared_turns}
                        if trajectory.tree is not None
                        else {}
                    ),
                    **view,
                    **({"contrast": True} if contrast else {}),
                    **({"film": film.write(pictures, name)} if film is not None else {}),
                    **origins.get(group.key, {}),
                    "score": dataclasses.asdict(score),
                }
            )
    return rows


class RunFolder:
    """Creates, continues and writes the folder of a run."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.path = Path(config.dir) / config.name
        self.lock = RunLock(self.path)
        self._replace = False
        self._run: str | None = ""  # run.json as `held` first found it

    @contextmanager
    def held(self, *, resume: bool, overwrite: bool) -> Iterator[None]:
        """Make the folder, and keep it for this launch until `finish` or the end of the block.

        Raises ConfigError when another launch trains there, when it holds a run and neither resume nor overwrite was asked, or when
        that run is not the one that was there the first time.
        """
        with writing(self.path):
            self.lock.acquire()
        try:
            used = self.begun()
            self._replace = used and overwrite and not resume
            if used and not resume and not overwrite:
                raise ConfigError(
                    f"{self.path} already holds a run; continue it with {resume_command_of(self.config)}, replace "
                    "it with --overwrite, or choose another name="
                )
            self._check_replaced()
            yield
        finally:
            self.lock.release()

    def begun(self) -> bool:
        """Whether the folder holds a run that has taken a step. A start that failed before leaves nothing worth keeping: the next
        one writes over it. Whatever cannot be read counts as a run."""
        metrics, checkpoints = self.path / "metrics.jsonl", self.path / "checkpoints"
        return (metrics.exists() and metrics.stat().st_size > 0) or next(
            checkpoints.glob("step_*"), None
        ) is not None

    def _check_replaced(self) -> None:
        if self._replace:
            others = [p.parent for p in self.path.glob("*/**/run.json")]
            if others:
                raise ConfigError(
                    f"expected --overwrite to replace one run, found others in its folder: {others[0]} and {len(others) - 1} more "
                    f"below {self.path}; move them, or choose another name="
                )
        info = self.path / "run.json"
        found = info.read_text(encoding="utf-8") if info.exists() else None
        if self._run == "":
            self._run = found
        elif self._replace and found != self._run:
            raise ConfigError(
                f"expected {self.path} as it was when this trainer was made, found a run that was started or changed "
                "since; make a new trainer with overwrite=True to replace that one, or choose another name="
            )

    def start(
        self,
        *,
        total_steps: int,
        resumed_at: int | None,
        best_metric: str = "",
        damaged: Mapping[int, str] | None = None,
    ) -> None:
        """Write config.yaml and run.json; only now, when model and data have loaded, a replaced run is removed. `damaged`: what was
        said of checkpoints that could not be resumed from, by step."""
        with writing(self.path):
            if self._replace:
                self._remove()
                self._replace = False
            self.path.mkdir(parents=True, exist_ok=True)
            # room for the last words, whatever the run fills
            (self.path / _RESERVE).write_bytes(bytes(_RESERVED))
        write_text(
            self.path / "config.yaml",
            yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False),
        )
        info = {
            "name": self.config.name,
            "command": " ".join(sys.argv),
            "cwd": os.getcwd(),
            "started": datetime.now(timezone.utc).isoformat(),
            "versions": versions(),
            "machine": {
                "platform": platform.platform(),
                "cpu": platform.processor() or platform.machine(),
                "cores": os.cpu_count(),
            },
            "model": self.config.model.path,
            "task": ", ".join(sorted({s.task for s in self.config.data.train})),
            "total_steps": total_steps,
            "resumed_at": resumed_at,
            "best_metric": best_metric,
            "status": "running",
            **(
                {"damaged_checkpoints": {str(step): words for step, words in damaged.items()}}
                if damaged
                else {}
            ),
        }
        write_json(self.path / "run.json", info)

    def _remove(self) -> None:
        """Remove the run from its folder, not what else somebody put there."""
        for path in (self.path / name for name in _WRITTEN):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def finish(
        self, status: str, *, signal: str | None = None, error: BaseException | None = None
    ) -> None:
        """Set the status in run.json (finished, interrupted, failed), the signal that ended the run and the words of the error;
        unlock the folder. Raises nothing: where run.json cannot be written, standard error says so."""
        file = self.path / "run.json"
        try:
            if file.exists():  # else nothing was begun
                info = json.loads(file.read_text(encoding="utf-8"))
                with suppress(OSError):
                    (self.path / _RESERVE).unlink()
                words = (
                    {"error": f"{type(error).__name__}: {error}"[:2000]}
                    if error is not None
                    else {}
                )
                write_json(
                    file,
                    {**info, "status": status, **({"signal": signal} if signal else {}), **words},
                )
        except (OSError, ValueError) as problem:
            print(
                f"warning: {file} still says what it said before, the run's status is '{status}': {problem}",
                file=sys.stderr,
            )
        finally:
            self.lock.release()

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to a jsonl file of the run: all or none. Raises StorageError."""
        (self.path / name).parent.mkdir(exist_ok=True)
        append(self.path / name, [json_line(row) for row in rows])

    def last_metrics(self) -> dict[str, Any]:
        """The last whole row of metrics.jsonl; {} where there is none."""
        file = self.path / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else []
        whole = [line for line in lines if _step_of(line, -1) >= 0]
        return dict(json.loads(whole[-1])) if whole else {}

    def rewind(self, step: int) -> None:
        """Forget everything after `step`: it will be written again, identically, by the resumed run."""
        for name in ("metrics.jsonl", "alarms.jsonl", "failures.jsonl"):
            file = self.path / name
            if file.exists():
                lines = [
                    line
                    for line in file.read_text(encoding="utf-8").split("\n")
                    if _step_of(line, step + 1) <= step
                ]
                write_text(file, "".join(line + "\n" for line in lines))
        for folder in (self.path / "eval", self.path / "rollouts"):
            for entry in folder.glob("step_*") if folder.is_dir() else ():
                if int(entry.stem.removeprefix("step_")) > step:
                    with writing(entry):
                        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _step_of(line: str, otherwise: int) -> int:
    """Step of a jsonl line; a line cut short by a kill counts as `otherwise`."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return otherwise
