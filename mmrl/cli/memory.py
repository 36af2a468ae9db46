"""`mmrl memory`: what a run needs, phase by phase."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer
from rich.table import Table

from mmrl.cli.run import run_config
from mmrl.config.presets import read_preset
from mmrl.diagnostics.memory import device_memory, estimate
from mmrl.operations.console import Console

__all__ = ["memory_command"]


def memory_command(
    config: Path,
    overrides: list[str],
    *,
    processes: int | None,
    gpu_gib: float | None,
    prompt_tokens: int | None,
    preset: str | None = None,
) -> None:
    """Print the estimate of a run's memory per device; gpu_gib: of a GPU that need not be here, else this machine's device.

    A preset says how many processes and which GPU it is for, where they are not given.
    """
    settings = run_config(config, overrides, preset)
    if preset is not None:
        wanted = read_preset(preset)
        processes, gpu_gib = processes or wanted.gpus, gpu_gib or wanted.gpu_gib
    kind: Literal["cuda", "cpu"] = "cuda"
    if gpu_gib is None:
        kind, available = device_memory(settings)
    else:
        available = gpu_gib * 2**30
    found = estimate(
        settings,
        processes=processes or 1,
        kind=kind,
        prompt_tokens=prompt_tokens,
        available=available,
    )
    table = Table(
        title=f"{settings.model.path} on a {'GPU' if kind == 'cuda' else 'CPU'}, GiB per process",
        title_justify="left",
    )
    table.add_column("part")
    table.add_column("held throughout", justify="right")
    for title in found.phases:
        table.add_column(f"during {title}", justify="right")
    digits = 1 if found.total >= 2**30 else 3

    def gib(size: float) -> str:
        return f"{size / 2**30:.{digits}f}"

    for name, size in found.parts.items():
        table.add_row(name, gib(size), *[""] * len(found.phases))
    for number, phase in enumerate(found.phases.values()):
        for name, size in phase.items():
            table.add_row(
                name, "", *[gib(size) if n == number else "" for n in range(len(found.phases))]
            )
    Console(width=120).print(table)
    typer.echo(found.line(available))
    if warning := found.warning(available):
        typer.echo(f"memory: {warning}")
