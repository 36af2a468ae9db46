"""`mmrl config`: the resolved configuration, what a key means, the JSON schema for editors; and `mmrl recipes`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
import yaml

from mmrl.cli.run import is_embodied, run_config
from mmrl.config import RunConfig
from mmrl.config.reference import explain
from mmrl.config.shipped import recipes
from mmrl.errors import ConfigError

__all__ = ["config_command", "recipe_lines"]


def config_command(
    config: Path | None, overrides: list[str], preset: str | None, asked: list[str], *, schema: bool
) -> None:
    """Print the meaning of the keys `asked`, the schema, or the resolved configuration. Raises ConfigError."""
    if asked:
        typer.echo("\n\n".join(_explained(name, config) for name in asked))
    elif schema:
        model: Any = _robots() if config is not None and is_embodied(config) else RunConfig
        typer.echo(json.dumps(model.model_json_schema(), indent=2))
    elif config is None:
        raise ConfigError(
            "expected a configuration file, found none: mmrl config FILE [KEY=VALUE ...], or mmrl config --explain "
            "KEY"
        )
    else:
        typer.echo(
            yaml.safe_dump(
                run_config(config, overrides, preset).model_dump(mode="json"), sort_keys=False
            ),
            nl=False,
        )


def _explained(name: str, config: Path | None) -> str:
    """A key of prompt runs, else one that only robot runs have; of a robot run's file, as that run has it."""
    if config is not None and is_embodied(config):
        return explain(_robots(), name)
    try:
        return explain(RunConfig, name)
    except ConfigError as error:
        try:
            return explain(_robots(), name)
        except ConfigError:
            raise error from None


def _robots() -> type[RunConfig]:
    from mmrl.robotics.config import EmbodiedConfig

    return EmbodiedConfig


def recipe_lines() -> list[str]:
    """For each installed recipe its name, the command that runs it from any folder, and what it trains on which data."""
    lines = []
    for name, file in recipes().items():
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        model = tree["model"]["path"]
        if name == "demo":
            command, what = "mmrl demo", "grounding on scenes that it draws"
        elif "env" in tree:
            command, what = (
                f"mmrl train {name}",
                f"{tree['env']['suite']} {_few(tree['env']['tasks'])}",
            )
            if not model.startswith("assets/"):  # no policy yet
                command = f"mmrl sft {name} --out POLICY, then {command} model.path=POLICY"
        else:
            sources = tree["data"]["train"]
            tasks = list(dict.fromkeys(source["task"] for source in sources))
            command = f"mmrl {'train' if 'rollout' in tree else 'sft'} {name} ..."
            what = f"{_few(tasks)} on {_few([source['path'] for source in sources], 1)}"
        lines.append(f"{name:19} {command:35} # {what}; {model}")
    return [
        *lines,
        "... are overrides: data.train.0.path=train.jsonl data.eval.0.path=val.jsonl (none: data.eval=[]). `mmrl config NAME` "
        "shows all settings.",
    ]


def _few(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
