"""`mmrl config`: the resolved configuration, what a key means, the JSON schema for editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
import yaml

from mmrl.cli.run import is_embodied, run_config
from mmrl.config import RunConfig
from mmrl.config.reference import explain
from mmrl.errors import ConfigError

__all__ = ["config_command"]


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
