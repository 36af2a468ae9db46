"""`mmrl eval --suite` for policies that act: a checkpoint with a vla.json, or a program of its own.

mmrl eval runs/robot/checkpoints/best --suite tiny_reach,tiny_push --samples 4
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from mmrl.cli.suites import print_rows
from mmrl.config import RunConfig, effective_threads
from mmrl.errors import ConfigError
from mmrl.evaluation.places import evaluation_folder, suites_name
from mmrl.operations.console import quiet_transformers

if TYPE_CHECKING:
    from mmrl.evaluation.suite_book import Suite
    from mmrl.robotics.suites import EnvironmentSuite

__all__ = ["acts", "is_vla", "play_command", "policy_command_suites"]


def is_vla(checkpoint: str) -> bool:
    """Whether a checkpoint acts: it has a vla.json."""
    return (Path(checkpoint) / "vla.json").is_file()


def acts(chosen: Mapping[str, Suite], checkpoint: str) -> bool:
    """Whether the suites are played, not answered. Raises ConfigError where the checkpoint cannot do what one of them asks."""
    vla = is_vla(checkpoint)
    other = next((name for name, suite in chosen.items() if suite.acts is not vla), None)
    if other is None:
        return vla
    if vla:
        raise ConfigError(
            f"suite '{other}' asks questions that are answered in text, '{checkpoint}' acts (it has a vla.json): "
            "expected suites of simulated tasks (mmrl eval --list-suites prints them)"
        )
    raise ConfigError(
        f"suite '{other}' is played by a policy that acts: expected a VLA checkpoint (a folder with "
        f"vla.json), found '{checkpoint}', which answers in text; make one with mmrl sft CONFIG, where CONFIG "
        "has an env section"
    )


def play_command(
    checkpoint: str,
    chosen: Mapping[str, Suite],
    out: Path | None,
    config: Path | None,
    overrides: Sequence[str],
    *,
    samples: int,
    limit: int | None,
    protocol: str | None,
    external: Any = None,
    trust_code: bool = False,
) -> None:
    """Evaluate one VLA checkpoint (or a policy in another process, `external`) on suites of simulated tasks and print one table;
    status 1 when a suite has no number."""
    from mmrl.robotics.suite_runs import base_settings, play_suites

    suites = cast("Mapping[str, EnvironmentSuite]", chosen)
    base = base_settings(
        checkpoint, config, list(overrides), suites, external, trust_code=trust_code, say=typer.echo
    )
    _quiet(base)
    folder = evaluation_folder(checkpoint, suites_name(list(chosen)), out)
    rows = play_suites(
        checkpoint,
        suites,
        base,
        folder=folder,
        protocol=protocol,
        samples=samples,
        limit=limit,
        overrides=list(overrides),
        external=external,
        on_row=lambda row: typer.echo(f"{row.suite}: {row.error or row.summary}"),
    )
    print_rows(rows, suites, checkpoint, samples, f"{folder}; clips: {folder}/SUITE/videos")


def _quiet(config: RunConfig) -> None:
    import torch

    quiet_transformers()
    if (threads := effective_threads(config)) is not None:
        torch.set_num_threads(threads)


def policy_command_suites(
    command: str,
    checkpoint: str | None,
    wanted: str,
    suites: Path | None,
    out: Path | None,
    config: Path | None,
    overrides: Sequence[str],
    *,
    samples: int,
    limit: int | None,
    protocol: str | None,
) -> None:
    """Evaluate a program that acts (mmrl.robotics.external) on suites of simulated tasks. Without a checkpoint the first override
    stands in its place."""
    if checkpoint is not None and "=" not in checkpoint:
        raise ConfigError(
            f"expected either a checkpoint or --policy-command, found both ('{checkpoint}'); drop one of them"
        )
    from mmrl.evaluation.suite_book import load_suites
    from mmrl.robotics.external import ExternalPolicy

    given = [*([checkpoint] if checkpoint else []), *overrides]
    chosen = load_suites(suites).select(wanted)
    if asked := [name for name, suite in chosen.items() if not suite.acts]:
        raise ConfigError(
            f"suite '{asked[0]}' asks questions that are answered in text: expected suites of simulated tasks with "
            "--policy-command, whose program acts (mmrl eval --list-suites prints them)"
        )
    with ExternalPolicy(command) as policy:
        name = policy.facts.name
        typer.echo(
            f"policy: {name}, " + ", ".join(f"{k} {v}" for k, v in policy.facts.versions.items())
        )
        play_command(
            name,
            chosen,
            out,
            config,
            given,
            samples=samples,
            limit=limit,
            protocol=protocol,
            external=policy,
        )
