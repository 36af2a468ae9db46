"""`mmrl resume RUN`: continue a run by its own configuration, unchanged or with more steps."""

from __future__ import annotations

import json
import os
from pathlib import Path

import typer

from mmrl.cli.run import run_config, train_command
from mmrl.config import RunConfig
from mmrl.config.trust import no_new_code
from mmrl.errors import ConfigError, RegistryError
from mmrl.training.identity import check_identity, run_identity

__all__ = ["resume_command", "with_steps"]


def resume_command(
    run: Path, overrides: list[str], *, quiet: bool, trust_code: bool = False
) -> Path:
    """Train on in the folder `run`; returns it. `overrides` may change what run_identity leaves out, and train.steps to more:
    train.steps=700, or train.steps=+200 for 200 more than it has now. Raises ConfigError for anything else, with the list.

    The configuration was found in the folder: code that it names is imported only with `trust_code` (mmrl.config.trust).
    """
    run = run.resolve()
    file = run / "config.yaml"
    if not file.is_file():
        raise ConfigError(
            f"expected the folder of a run with config.yaml, found none in {run}; give the folder that `mmrl train` "
            "wrote (runs/NAME)"
        )
    _go_to(run)
    before = run_config(file, [])
    settings = [*with_steps(overrides, before.train.steps)]
    if (Path(before.dir) / before.name).resolve() != run:  # it was moved or renamed
        settings += [f"dir={json.dumps(str(run.parent))}", f"name={json.dumps(run.name)}"]
    now = run_config(file, settings)
    check_identity(*(run_identity(c.model_dump(mode="json")) for c in (before, now)))
    _check_suite(now, file, trust_code)
    if now.train.steps == before.train.steps and _status(run).get("status") == "finished":
        raise ConfigError(
            f"expected a run with steps left, found that {run} has taken all of its {now.train.steps}; add some: "
            f"mmrl resume {run} train.steps=+{max(1, now.train.steps // 2)}"
        )
    with no_new_code(str(file), trust_code=trust_code):
        return train_command(file, settings, resume=True, overwrite=False, quiet=quiet)


def with_steps(overrides: list[str], steps: int) -> list[str]:
    """The overrides with train.steps=+N as a number of steps, counted from `steps`."""
    found = []
    for item in overrides:
        key, _, value = item.partition("=")
        if key == "train.steps" and value.startswith("+"):
            if not value[1:].isdecimal() or int(value) == 0:
                raise ConfigError(
                    f"expected train.steps=+N with a number of further steps, found '{item}'"
                )
            item = f"train.steps={steps + int(value)}"
        found.append(item)
    return found


def _status(run: Path) -> dict[str, object]:
    """run.json, {} where there is none or it cannot be read: then the run is just resumed."""
    try:
        found = json.loads((run / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _go_to(run: Path) -> None:
    """Work in the folder that the run was started from: its configuration may name data and model relative to that."""
    cwd = str(_status(run).get("cwd") or os.getcwd())
    if cwd != os.getcwd() and Path(cwd).is_dir():
        typer.echo(f"in {cwd}, where the run was started", err=True)
        os.chdir(cwd)


def _check_suite(config: RunConfig, file: Path, trust_code: bool) -> None:
    suite = getattr(getattr(config, "env", None), "suite", "")
    if ":" in suite and not trust_code:
        raise RegistryError(
            f"{file}: expected env.suite to be the name of a built-in suite, found '{suite}', which is code to "
            "run; say --trust-code when the run is yours"
        )
