"""`mmrl eval` for policies that act: which of the named suites are of simulators, and the table of success rates.

    mmrl eval runs/robot/checkpoints/best --suite tiny_reach,tiny_push --samples 4

A checkpoint acts where it has a vla.json.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from mmrl.errors import ConfigError, did_you_mean
from mmrl.operations.console import Console

__all__ = [
    "acting_suites",
    "is_vla",
    "list_robot_suites",
    "policy_command_suites",
    "robot_book",
    "robot_suites_command",
]

_WIDTH = 130


def is_vla(checkpoint: str) -> bool:
    """Whether a checkpoint acts: it has a vla.json."""
    return (Path(checkpoint) / "vla.json").is_file()


def robot_book(suites: Path | None) -> tuple[Any, Path | None]:
    """(the suites of simulated tasks, the file for all others): --suites names either."""
    from mmrl.robotics.suites import is_robot_file, load_robot_suites

    if suites is not None and is_robot_file(suites):
        return load_robot_suites(suites), None
    return load_robot_suites(), suites


def acting_suites(checkpoint: str, wanted: str, suites: Path | None) -> list[str] | None:
    """The names in `wanted` when they are suites of simulated tasks, None when they are of questions and answers.

    Raises ConfigError where names or the checkpoint do not fit together.
    """
    book, other = robot_book(suites)
    names = [part.strip() for part in wanted.split(",") if part.strip()]
    acting = [n for n in names if n in book.names]
    vla = is_vla(checkpoint)
    if acting and not vla:
        raise ConfigError(
            f"suite '{acting[0]}' is played by a policy that acts: expected a VLA checkpoint (a folder with "
            f"vla.json), found '{checkpoint}', which answers in text; make one with mmrl sft CONFIG, where CONFIG "
            "has an env section"
        )
    if not acting and not vla:
        return None
    rest = [n for n in names if n not in book.names]
    if rest and rest[0] in _text_names(other):
        raise ConfigError(
            f"suite '{rest[0]}' asks questions that are answered in text, '{checkpoint}' acts (it has a vla.json): "
            f"expected suites of simulated tasks, of which {book.file} has: {', '.join(book.names)}"
        )
    if rest or not names:
        raise _unknown(rest, book, "checkpoint")
    return names


def _unknown(rest: Sequence[str], book: Any, actor: str) -> ConfigError:
    meant = did_you_mean(rest[0], book.names) if rest else ""
    return ConfigError(
        f"unknown suite '{', '.join(rest)}' for a {actor} that acts.{meant} {book.file} has: "
        f"{', '.join(book.names)}"
    )


def _text_names(suites: Path | None) -> list[str]:
    from mmrl.evaluation.suites import load_suites

    try:
        book = load_suites(suites)
    except ConfigError:
        if suites is not None:
            raise
        return []  # no configs/suites.yaml here: then no name is one of its suites
    return [*book.suites, *book.groups]


def robot_suites_command(
    checkpoint: str,
    names: Sequence[str],
    suites: Path | None,
    folder: Path,
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
    from mmrl.robotics.suite_runs import base_settings, run_suites
    from mmrl.robotics.suite_table import percent

    chosen = robot_book(suites)[0].select(names)
    base = base_settings(
        checkpoint, config, list(overrides), chosen, external, trust_code=trust_code, say=typer.echo
    )
    _quiet(base)
    rows = run_suites(
        checkpoint,
        chosen,
        base,
        folder=folder,
        protocol=protocol,
        samples=samples,
        limit=limit,
        overrides=list(overrides),
        external=external,
        on_row=lambda row: typer.echo(
            f"{row.suite}: "
            + (
                f"error: {row.error}"
                if row.error
                else f"success rate {percent(row.success_once)}{row.mark}, {row.n:,} states"
            )
        ),
    )
    _print(rows, checkpoint, samples, percent)
    typer.echo(
        f"results: {folder / 'suites.json'}, {folder / 'suites.md'}; clips: {folder}/SUITE/videos"
    )
    if any(row.error for row in rows):
        raise typer.Exit(1)


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
    given = [*([checkpoint] if checkpoint else []), *overrides]
    book, _ = robot_book(suites)
    names = [part.strip() for part in wanted.split(",") if part.strip()]
    if (rest := [n for n in names if n not in book.names]) or not names:
        raise _unknown(rest, book, "policy")
    from mmrl.robotics.external import ExternalPolicy

    with ExternalPolicy(command) as policy:
        name = policy.facts.name
        typer.echo(
            f"policy: {name}, " + ", ".join(f"{k} {v}" for k, v in policy.facts.versions.items())
        )
        folder = out or Path("runs/eval") / re.sub(r"[^\w.-]+", "_", name)
        robot_suites_command(
            name,
            names,
            suites,
            folder,
            config,
            given,
            samples=samples,
            limit=limit,
            protocol=protocol,
            external=policy,
        )


def _quiet(config: Any) -> None:
    import torch
    import transformers

    from mmrl.config import effective_threads

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if (threads := effective_threads(config)) is not None:
        torch.set_num_threads(threads)


def _print(rows: Sequence[Any], checkpoint: str, samples: int, percent: Any) -> None:
    console = Console(width=_WIDTH, highlight=False)
    table = Table(title=escape(checkpoint), title_justify="left")
    headings = [
        "suite",
        "protocol",
        "mode",
        "states",
        "success rate",
        "success at end",
        *([f"avg@{samples}"] if samples else []),
    ]
    for heading in headings:
        table.add_column(
            heading,
            justify="right" if heading == "states" else "left",
            no_wrap=heading in ("suite", "states", "mode"),
        )
    for row in rows:
        cells = [
            row.suite,
            escape(row.protocol.partition(",")[0]),
            row.mode,
            f"{row.n:,}",
            percent(row.success_once) + row.mark,
            row.at_end(row.success_at_end),
        ]
        table.add_row(
            *cells, *([percent(row.sampled) + (row.mark if row.sampled else "")] if samples else [])
        )
        if row.tasks > 1:
            for task, found in row.per_task.items():
                once, at_end = found["success_once"], found["success_at_end"]
                table.add_row(
                    f"  {escape(task)}",
                    "",
                    "",
                    f"{once['n']:,}",
                    percent(once) + row.mark,
                    row.at_end(at_end),
                    *([""] if samples else []),
                )
    console.print(table)
    for row in rows:
        for line in _facts(row):
            console.print(f"{escape(row.suite)}: {escape(line)}")


def _facts(row: Any) -> list[str]:
    """What a number was measured on, and what went wrong."""
    if row.error:
        return [f"error: {row.error}"]
    out = [
        f"protocol: {row.protocol}; states: {row.states}; assets: {row.assets}; GL backend: {row.render}"
    ]
    if row.simulator:
        out.append(
            ", ".join(f"{k} {v}" for k, v in row.simulator.items() if k not in ("render", "assets"))
        )
    if row.stand_in:
        out.append("measured on stand-in assets: not a score of the benchmark")
    if row.deviations:
        out.append(f"otherwise than the protocol: {'; '.join(row.deviations)}")
    if row.changes:
        out.append(f"otherwise than the suite: {'; '.join(row.changes)}")
    if row.failed_attempts:
        out.append(
            f"{row.failed_attempts:,} failed attempts, {row.unfinished:,} episodes not finished (counted as failures)"
        )
    return [line for line in out if line]


def list_robot_suites(suites: Path | None) -> None:
    """Print every suite of simulated tasks."""
    book, _ = robot_book(suites)
    table = Table(title=f"{book.file} (policies that act)", title_justify="left")
    for heading in ("suite", "simulator", "tasks", "control steps", "states per task", "protocol"):
        table.add_column(heading, overflow="fold")
    for name, suite in book.suites.items():
        tasks = (
            ", ".join(suite.tasks)
            if len(suite.tasks) < 3
            else f"{suite.tasks[0]} to {suite.tasks[-1]}"
        )
        table.add_row(
            name,
            suite.env,
            escape(tasks),
            str(suite.horizon),
            str(suite.states),
            suite.protocol or "own",
        )
    console = Console(width=120, highlight=False)
    console.print(table)
    for name, members in book.groups.items():
        console.print(f"{escape(name)} = {escape(','.join(members))}")
