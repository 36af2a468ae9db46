"""`mmrl try`: asks the model of a run a few prompts, says whether the run would learn, and draws what it answered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from mmrl.cli.display import clock
from mmrl.cli.run import quieten, run_config
from mmrl.diagnostics.trial import BINS, Trial, rollout_seconds, trial_overrides, try_out
from mmrl.distributed.launch import processes_launched
from mmrl.errors import ConfigError
from mmrl.operations.prometheus import check_metrics_port

__all__ = ["LEARNS_NOTHING", "try_command", "trial_lines"]

LEARNS_NOTHING = 1
"""Exit status where the run would learn nothing."""
_TEXT = 160  # characters of an example


def try_command(
    config: Path,
    overrides: list[str],
    prompts: int,
    samples: int | None,
    out: Path | None,
    preset: str | None = None,
) -> None:
    """Ask, print, draw; exit status 1 where the run would learn nothing."""
    from mmrl.report.trial import build_trial

    if processes_launched()[1] > 1:
        raise ConfigError(
            "expected `mmrl try` in one process, found a launcher's; start it without torchrun"
        )
    from mmrl.training.trainer import Trainer

    run = run_config(config, overrides, preset)
    folder = out or Path("runs") / "try" / run.name
    samples = min(run.rollout.group_size, 8) if samples is None else samples
    small = run_config(
        config, [*overrides, *trial_overrides(run, prompts, samples, folder)], preset
    )
    quieten(small)

    def told(kind: str, payload: Any) -> None:
        if kind == "checked":
            from mmrl.diagnostics.memory import announce_memory

            announce_memory(run, lambda text, style: typer.secho(text, err=True, fg=style or None))
            typer.secho(
                f"asking {run.model.path} {prompts} prompts, {samples} answers each ...", err=True
            )

    trainer = Trainer(small, overwrite=True, on_event=told)
    _warn_of_port(run)
    trial = try_out(trainer, run)
    trainer.world.close()
    for line in trial_lines(trial, run):
        typer.echo(line)
    typer.echo(
        f"pictures and all answers: {build_trial(folder, run, trial_lines(trial, run), trial.dead)}"
    )
    if trial.dead:
        for finding in trial.dead:
            typer.secho(
                f"would learn nothing: {finding.name}: {finding.message}",
                err=True,
                fg="red",
                bold=True,
            )
        raise typer.Exit(LEARNS_NOTHING)
    for finding in trial.findings:
        typer.secho(f"warning: {finding.name}: {finding.message}", err=True, fg="yellow")


def _warn_of_port(run: Any) -> None:
    """A trial serves no metrics, so that it may be made beside a run that does: a port that is taken ends no trial."""
    try:
        check_metrics_port(run.operations)
    except ConfigError as error:
        typer.secho(f"warning: mmrl train would stop here: {error}", err=True, fg="yellow")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _seconds(bounds: tuple[float, float]) -> str:
    low, high = bounds
    return f"{high:.1f} s" if high - low < 0.1 * high else f"{low:.1f} to {high:.1f} s"


def trial_lines(trial: Trial, run: Any) -> Iterator[str]:
    """What a trial showed, line by line."""
    row, signal = trial.row, trial.signal
    robot = "train/success_once" in row
    yield f"{run.name}: {trial.prompts} {'initial states' if robot else 'prompts'} x {trial.samples}, in {trial.seconds:.1f} s"
    if robot:
        yield f"  success rate        {_percent(row['train/success_once'])} (at the end {_percent(row['train/success_at_end'])})"
        yield (
            f"  episodes            {row['train/episode_steps'] or 0:.0f} control steps on average, "
            f"{row['train/failed_attempts']:.0f} failed attempts"
        )
    else:
        yield f"  keep the format     {_percent(row.get('train/parse_rate'))} of the answers"
        if trial.answers["native"]:
            total, read = trial.answers.total(), trial.answers["read"]
            yield (
                f"                      {read} of {total} answers read as they are, {read + trial.answers['native']} with "
                "answers: native (data.train[].params)"
            )
        yield (
            f"  cut at the limit    {_percent(row.get('train/clipped_share'))} of {run.rollout.max_new_tokens} tokens; length "
            f"{row.get('train/length/mean') or 0:.0f} on average, at most {trial.longest}"
        )
        yield (
            "  pass rates          "
            + ", ".join(f"{name}: {trial.histogram.get(name, 0)}" for name in BINS)
            + " (prompts)"
        )
        parts = {
            k.removeprefix("train/reward/part/"): v
            for k, v in row.items()
            if k.startswith("train/reward/part/")
        }
        yield f"  reward              {row.get('train/reward/mean') or 0:.3f}" + (
            f" ({', '.join(f'{name} {value or 0:.3f}' for name, value in parts.items())})"
            if parts
            else ""
        )
    if signal is None:
        yield "  groups with signal: none could be judged"
    else:
        larger = run.rollout.group_size > trial.samples
        yield (
            f"  groups with signal  {_percent(signal.mean)} [{100 * signal.low:.0f}, {100 * signal.high:.0f}] of {signal.n}"
            + (
                f"; the run's groups of {run.rollout.group_size} have it more often"
                if larger
                else ""
            )
        )
    failed = {
        k.removeprefix("train/failed/"): v
        for k, v in row.items()
        if k.startswith("train/failed/") and v
    }
    for reason, share in sorted(failed.items(), key=lambda item: -item[1]):
        yield f"  failed: {reason} {_percent(share)}"
        for text in trial.examples.get(reason, [])[:3]:
            shown = " ".join(text.split())
            yield f"    {shown[:_TEXT]!r}{' ...' if len(shown) > _TEXT else ''}"
    yield from _times(trial, run)


def _times(trial: Trial, run: Any) -> Iterator[str]:
    timing, row = trial.timing, trial.row
    yield (
        f"  a step of the run   rollout and rewards {_seconds(timing.rollout)} (measured: "
        f"{rollout_seconds(row):.1f} s for {trial.prompts * trial.samples})"
    )
    if timing.update is None:
        yield "                      update not measured: nothing to train on"
    else:
        yield f"                      update {_seconds(timing.update)} (measured: {row['time/update']:.1f} s)"
    low, high = timing.run
    span = clock(high) if high - low < 0.1 * high else f"{clock(low)} to {clock(high)}"
    yield (
        f"  {f'{timing.steps} steps':<20}{'at least ' if timing.update is None else ''}{span} in one process like this, without "
        "evaluations and checkpoints"
    )
