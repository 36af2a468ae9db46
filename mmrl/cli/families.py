"""`mmrl families list` and `mmrl families check`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

__all__ = ["families_app"]

families_app = typer.Typer(
    no_args_is_help=True, help="List the families of models that mmrl knows, and check one of them."
)


@families_app.command("list")
def list_command() -> None:
    """Every family: model types, frame of its prompts' coordinates, answers with another frame, and what it cannot do here."""
    from mmrl.policy.families import families

    for family in families().values():
        frame = "set model.frame" if family.frame is None else family.frame.value
        typer.echo(f"{family.name:14s} model_type {', '.join(family.model_types)}; frame {frame}")
        if family.texts:
            others = ", ".join(f"{family.name}:{text}" for text in family.texts[1:])
            typer.echo(f"{'':14s} text model {', '.join(family.texts)} (check {others}, too)")
        for kind, answer in family.answers.items():
            if answer.frame is not None and answer.frame != family.frame:
                whose = f", {answer.of}" if answer.of else ""
                typer.echo(f"{'':14s} {kind}: frame {answer.frame.value}{whose}")
        if not family.no_audio:
            typer.echo(f"{'':14s} hears: samples may have audio files")
        for what, reason in family.refused.items():
            typer.echo(f"{'':14s} {what}: {reason}")


@families_app.command("check")
def check_command(
    target: Annotated[
        str, typer.Argument(help="name of a family, NAME:TEXT, or a folder with a model")
    ],
    only: Annotated[
        list[str] | None, typer.Option("--only", help="this check alone; may be repeated")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per check")] = False,
) -> None:
    """Hold a family against transformers: prompts, log-probs, gradients, rollouts, files. Status 1 when a check fails."""
    from dataclasses import asdict

    from mmrl.diagnostics.families import check_family
    from mmrl.operations.console import quiet_transformers

    quiet_transformers()
    failed = False
    for cell in check_family(target, only or ()):
        failed |= cell.verdict == "failed"
        line = f"{cell.check:10s} {cell.verdict:8s} {cell.found}"
        typer.echo(json.dumps(asdict(cell)) if as_json else line)
    raise typer.Exit(int(failed))
