"""`mmrl eval --suite` for policies that act: a checkpoint with a vla.json, a program of its own, or a policy server.

mmrl eval runs/robot/checkpoints/best --suite tiny_reach,tiny_push --samples 4
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from mmrl.cli.suites import print_rows
from mmrl.config import RunConfig, effective_threads
from mmrl.errors import ConfigError
from mmrl.evaluation.places import evaluation_place, suites_name
from mmrl.operations.console import quiet_transformers

if TYPE_CHECKING:
    from mmrl.evaluation.suite_book import Suite
    from mmrl.robotics.remote import RemotePolicy
    from mmrl.robotics.suites import EnvironmentSuite

__all__ = ["acts", "is_vla", "play_command", "quiet", "remote_suites", "told_policy"]


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
    found = (
        f"'{checkpoint}', which answers in text"
        if Path(checkpoint).is_dir()
        else f"no folder '{checkpoint}'"
    )
    raise ConfigError(
        f"suite '{other}' is played by a policy that acts: expected a VLA checkpoint (a folder with "
        f"vla.json), found {found}; make one with mmrl sft CONFIG, where CONFIG has an env section"
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
    resume: bool = False,
) -> None:
    """Evaluate one VLA checkpoint (or a policy elsewhere, `external`) on suites of simulated tasks and print one table;
    status 1 when a suite has no number."""
    from mmrl.robotics.suite_runs import base_settings, play_suites

    suites = cast("Mapping[str, EnvironmentSuite]", chosen)
    base = base_settings(
        checkpoint, config, list(overrides), suites, external, trust_code=trust_code, say=typer.echo
    )
    quiet(base)
    rows, folder = play_suites(
        checkpoint,
        suites,
        base,
        place=evaluation_place(checkpoint, suites_name(list(chosen)), out, resume=resume),
        protocol=protocol,
        samples=samples,
        limit=limit,
        overrides=list(overrides),
        external=external,
        on_row=lambda row: typer.echo(f"{row.suite}: {row.error or row.summary}"),
    )
    print_rows(rows, suites, checkpoint, samples, f"{folder}; clips: {folder}/SUITE/videos")


def quiet(config: RunConfig) -> None:
    """Tell transformers to be quiet, and torch how many threads it has."""
    import torch

    quiet_transformers()
    if (threads := effective_threads(config)) is not None:
        torch.set_num_threads(threads)


def told_policy(
    command: str | None, server: str | None, key: str | None, timeout: float | None = None
) -> tuple[str, Callable[[], RemotePolicy]]:
    """The option that names a policy elsewhere, and what makes it. key: sent to openpi's servers; lerobot's take none. timeout:
    seconds for an answer, and for a server to let us in; None: theirs. Raises ConfigError where both do."""
    if command is not None and server is not None:
        raise ConfigError(
            "expected either --policy-command or --policy-server, found both; drop one of them"
        )
    limits: dict[str, Any] = {} if timeout is None else {"act_s": timeout}
    if command is not None:
        from mmrl.robotics.external import ExternalPolicy

        return "--policy-command", partial(ExternalPolicy, command, **limits)
    assert server is not None, "one of them is there"
    if timeout is not None:
        limits["connect_s"] = timeout
    if server.startswith("lerobot:"):
        from mmrl.robotics.lerobot_client import LerobotPolicy

        return "--policy-server", partial(LerobotPolicy, server, **limits)
    from mmrl.robotics.openpi_client import OpenPIPolicy

    return "--policy-server", partial(OpenPIPolicy, server, key=key, **limits)


def remote_suites(
    option: str,
    made: Callable[[], RemotePolicy],
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
    resume: bool = False,
) -> None:
    """Evaluate a policy that acts elsewhere (mmrl.robotics.remote), which `made` makes and `option` named, on suites of simulated
    tasks. Without a checkpoint the first override stands in its place."""
    if checkpoint is not None and "=" not in checkpoint:
        raise ConfigError(
            f"expected either a checkpoint or {option}, found both ('{checkpoint}'); drop one of them"
        )
    from mmrl.evaluation.suite_book import load_suites

    given = [*([checkpoint] if checkpoint else []), *overrides]
    chosen = load_suites(suites).select(wanted)
    if asked := [name for name, suite in chosen.items() if not suite.acts]:
        raise ConfigError(
            f"suite '{asked[0]}' asks questions that are answered in text: expected suites of simulated tasks with "
            f"{option}, whose policy acts (mmrl eval --list-suites prints them)"
        )
    with made() as policy:
        name = policy.facts.name
        typer.echo(
            ", ".join([f"policy: {name}", *(f"{k} {v}" for k, v in policy.facts.versions.items())])
        )
        ruled = protocol is not None or all(
            suite.protocol is not None
            for suite in cast("Mapping[str, EnvironmentSuite]", chosen).values()
        )
        if policy.advice and not ruled:
            typer.echo(f"note: {policy.advice}")
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
            resume=resume,
        )
