"""What `mmrl eval` does around the library: one task on data files, or named suites, with one load of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer
from rich.markup import escape
from rich.table import Table

from mmrl.cli.embodied import acts, is_vla, play_command
from mmrl.cli.suites import print_rows
from mmrl.config import DataSource, RunConfig, effective_threads
from mmrl.config.trust import checkpoint_settings, no_new_code
from mmrl.errors import ConfigError
from mmrl.evaluation.places import data_name, evaluation_place, suites_name
from mmrl.operations.console import Console, quiet_transformers
from mmrl.policy.manifest import check_loadable

if TYPE_CHECKING:
    from mmrl.data.sources import LoadedSource
    from mmrl.evaluation.data_rows import DataRow
    from mmrl.evaluation.progress import Part, Progress
    from mmrl.evaluation.result import Evaluation
    from mmrl.evaluation.suites import DataSuite
    from mmrl.policy.policy import Policy
    from mmrl.workers.prefetch import Ahead

__all__ = [
    "choose",
    "eval_command",
    "print_skipped",
    "settings_of",
    "suites_command",
]

_WIDTH = 120


def settings_of(
    checkpoint: str, config: Path | None, overrides: list[str], trust_code: bool = False
) -> RunConfig:
    """`config`, else what the checkpoint's own settings may say (mmrl.config.trust); transformers is told to be quiet.

    Raises CheckpointError for a checkpoint that is not as it was saved.
    """
    check_loadable(checkpoint, typer.echo)  # before its settings are read
    base = checkpoint_settings(
        RunConfig, checkpoint, overrides, config, trust_code=trust_code, say=typer.echo
    )
    quiet_transformers()
    import torch

    if (threads := effective_threads(base)) is not None:
        torch.set_num_threads(threads)
    return base


def print_skipped(sources: Sequence[LoadedSource]) -> None:
    """One line per source whose reader left rows out, on request (counted by reason) or because they are broken; one more where
    rows that are used were adjusted."""
    from mmrl.data.sources import note_lines

    for source in sources:
        if source.skipped:
            reasons = ", ".join(
                f"{count:,} {reason}" for reason, count in sorted(source.skipped.items())
            )
            typer.echo(
                f"{source.config.path}: {sum(source.skipped.values()):,} rows left out: {reasons}"
            )
        if source.rejected:
            typer.echo(
                f"{source.config.path}: {len(source.rejected):,} rows rejected (rejected.jsonl)"
            )
    for line in note_lines(sources):
        typer.echo(line)


def _evaluate(
    policy: Policy,
    config: RunConfig,
    sources: Sequence[LoadedSource],
    samples: int,
    folder: Path,
    protocol: Mapping[str, Any],
    part: Part,
) -> Evaluation:
    """Evaluate, and warn of samples that could not be read and completions that could not be judged."""
    from mmrl.evaluation.evaluate import evaluate_model

    found = evaluate_model(
        policy,
        config,
        sources,
        samples=samples,
        folder=folder,
        protocol=protocol,
        part=part,
    )
    lost, why = found.unjudged
    if lost:
        typer.secho(
            f"{lost} of {len(found.predictions)} completions could not be judged and count as 0; first: {why}",
            err=True,
            fg="yellow",
        )
    if found.unread:
        typer.secho(found.unread, err=True, fg="yellow")
    return found


def eval_command(
    checkpoint: str,
    task: str,
    data: list[Path],
    out: Path | None,
    config: Path | None,
    overrides: list[str],
    samples: int,
    limit: int | None,
    trust_code: bool = False,
    answers: str | None = None,
    resume: bool = False,
) -> None:
    """Evaluate one checkpoint on data files with one task, by default with the settings it was trained with. `answers` goes over
    the task's parameter of that name; `resume`: go on with the newest one that was cut off.

    Exits with status 1 when an official scorer failed.
    """
    if is_vla(checkpoint):
        raise ConfigError(
            f"'{checkpoint}' acts (it has a vla.json): expected --suite with suites of simulated tasks, found --task "
            "and --data, which ask for answers in text (mmrl eval --list-suites prints the suites)"
        )
    base = settings_of(checkpoint, config, overrides, trust_code)
    from mmrl.data.sources import load_sources
    from mmrl.evaluation.evaluate import asked_of_model
    from mmrl.evaluation.settings import taught_params
    from mmrl.evaluation.suites import read_at
    from mmrl.policy.loading import load_policy
    from mmrl.registry import resolve_task
    from mmrl.workers.prefetch import prefetching

    place = evaluation_place(checkpoint, data_name(task, data), out, resume=resume)
    resolve_task(task)  # the user's own word, before the checkpoint has one
    params = taught_params(base, task)
    params = params if answers is None else read_at(task, params, answers)
    with no_new_code(f"the settings of {checkpoint}", trust_code=trust_code or config is not None):
        sources = load_sources(
            [DataSource(task=task, path=str(p), limit=limit, params=params) for p in data],
            on_error=base.data.on_error,
            orientation=base.data.image.orientation,
            where="--data",
        )
    print_skipped(sources)
    policy = load_policy(base.model, base.data, trainable=False)
    with (
        place.begin({"": asked_of_model(policy, base, sources, samples)}) as progress,
        prefetching(base.data, [policy.encoder.visuals]) as [policy.encoder.ahead],
    ):
        folder, part = progress.folder, progress.part("")
        found = _evaluate(policy, base, sources, samples, folder, {}, part)
        progress.complete = not found.scorer_failed
    results = found.results
    console = Console(width=_WIDTH, highlight=False)
    _print_metrics(console, f"{checkpoint} on {task}", results, samples)
    if max(len(results["per_source"]), len(results["per_task"])) > 1:
        for title, table in (("source", "per_source"), ("task", "per_task")):
            _print_parts(console, title, results[table], results["headlines"][table])
    _print_views(console, results)
    _print_benchmark(console, results["benchmark"])
    typer.echo(f"results: {folder / 'results.json'}")
    if found.scorer_failed:
        raise typer.Exit(1)


def _cell(estimate: Mapping[str, Any] | None) -> str:
    return (
        "-"
        if estimate is None
        else f"{estimate['mean']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"
    )


def _print_metrics(console: Console, title: str, results: Mapping[str, Any], samples: int) -> None:
    table = Table(title=escape(title), title_justify="left")
    for heading in ("metric", "greedy", f"avg@{samples}") if samples else ("metric", "greedy"):
        table.add_column(heading, no_wrap=True)
    for name in results["greedy"]:
        if name != "macro" or len(results["per_source"]) > 1:
            cells = [results[mode].get(name) for mode in ("greedy", "sampled") if mode in results]
            table.add_row(escape(name), *map(_cell, cells))
    console.print(table)


def _print_parts(
    console: Console, kind: str, rows: Mapping[str, Any], headlines: Mapping[str, str]
) -> None:
    table = Table()
    for heading in (kind, "n", "headline", "greedy", "parse rate"):
        table.add_column(
            heading,
            justify="right" if heading in ("n", "parse rate") else "left",
            no_wrap=heading not in (kind, "headline"),  # a long name is folded
            overflow="fold",
        )
    for name, row in rows.items():
        table.add_row(
            escape(name),
            str(row["reward"]["n"]),
            escape(headlines[name]),
            _cell(row["headline"]),
            f"{row['parse_rate']['mean']:.3f}",
        )
    console.print(table)


def _print_views(console: Console, results: Mapping[str, Any]) -> None:
    """How much the headline metric loses when a view takes something away."""
    if "views" not in results:
        return
    table = Table(title="how much is the input used?", title_justify="left")
    for heading in ("view", "n", "plain", "changed", "gap"):
        table.add_column(heading, justify="right" if heading == "n" else "left", no_wrap=True)
    for view, row in results["views"].items():
        table.add_row(
            view, f"{row['n']:,}", *(_cell(row.get(name)) for name in ("plain", "changed", "gap"))
        )
    console.print(table)


def _print_benchmark(console: Console, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Official numbers per source, and which official scorers failed."""
    for source, numbers in found.items():
        values = ", ".join(f"{k} {v:.4g}" for k, v in numbers.items() if k != "error")
        if values:
            console.print(f"official, {escape(source)}: {escape(values)}")
        if "error" in numbers:
            console.print(
                f"[red]the official scorer of {escape(source)} failed:[/] {escape(numbers['error'])}"
            )


def suites_command(
    checkpoint: str,
    wanted: str,
    suites: Path | None,
    data_root: Path,
    out: Path | None,
    config: Path | None,
    overrides: list[str],
    samples: int,
    limit: int | None,
    protocol: str | None = None,
    trust_code: bool = False,
    answers: str | None = None,
    resume: bool = False,
) -> None:
    """Evaluate one checkpoint on named suites with one load of the model, and print one table.

    `protocol` is for suites of simulated tasks, which a VLA checkpoint plays; `answers` goes over the suites' own level;
    `resume`: go on with the newest evaluation that was cut off.

    Writes OUT/SUITE/ for each, and OUT/suites.json and OUT/suites.md over all, renewed after each suite. Exits with
    status 1 when a suite has no number or an official scorer failed.
    """
    from mmrl.evaluation.suite_book import load_suites

    chosen = load_suites(suites).select(wanted)
    if acts(chosen, checkpoint):
        play_command(
            checkpoint,
            chosen,
            out,
            config,
            overrides,
            samples=samples,
            limit=limit,
            protocol=protocol,
            trust_code=trust_code,
            resume=resume,
        )
        return
    if protocol is not None:
        raise ConfigError(
            f"expected --protocol with suites of simulated tasks only, found --protocol {protocol} with --suite "
            f"{wanted}; drop it"
        )
    asked = cast("Mapping[str, DataSuite]", chosen)
    _answer(
        checkpoint,
        asked,
        data_root,
        out,
        config,
        overrides,
        samples=samples,
        limit=limit,
        trust_code=trust_code,
        answers=answers,
        resume=resume,
    )


def _answer(
    checkpoint: str,
    chosen: Mapping[str, DataSuite],
    data_root: Path,
    out: Path | None,
    config: Path | None,
    overrides: list[str],
    *,
    samples: int,
    limit: int | None,
    trust_code: bool,
    answers: str | None,
    resume: bool,
) -> None:
    """`suites_command` on suites of questions."""
    from mmrl.evaluation.data_rows import DataRow
    from mmrl.evaluation.evaluate import asked_of_model
    from mmrl.evaluation.suite_table import run_suites
    from mmrl.evaluation.suites import check_files, configure
    from mmrl.policy.loading import load_policy
    from mmrl.registry import task_from_spec

    check_files(chosen, data_root)
    place = evaluation_place(checkpoint, suites_name(list(chosen)), out, resume=resume)
    base = settings_of(checkpoint, config, overrides, trust_code)
    for suite in chosen.values():
        # the suites file is the user's: what it names may be loaded
        task_from_spec(suite.task, dict(suite.params))
    # all data first: a mistake in the last suite must not cost the work of the others
    with no_new_code(f"the settings of {checkpoint}", trust_code=trust_code or config is not None):
        loaded = {
            name: _loaded(name, suite, base, data_root, limit, answers)
            for name, suite in chosen.items()
        }
    policy = load_policy(base.model, base.data, trainable=False)
    settings = {name: configure(base, suite, overrides) for name, suite in chosen.items()}
    asked = {name: asked_of_model(policy, settings[name], loaded[name], samples) for name in chosen}
    with ExitStack() as stack:
        progress = stack.enter_context(place.begin(asked))
        # of one that goes on each suite knows what is left only when it begins
        ahead = {} if resume else loaded
        workers = _workers(stack, policy, base, settings, ahead)

        def one(name: str, suite: DataSuite) -> DataRow:
            policy.encoder = _encoder(policy, settings[name])
            policy.encoder.ahead = workers[name]
            return _one_suite(
                policy,
                settings[name],
                name,
                suite,
                loaded[name],
                samples,
                limit,
                progress,
                answers,
            )

        rows = run_suites(
            chosen,
            one,
            lambda name, suite, error: DataRow(suite=name, metric=suite.metric, error=error),
            lambda name, suite: suite.model_dump(),
            checkpoint=checkpoint,
            folder=progress.folder,
            samples=samples,
        )
        progress.complete = not any(row.error for row in rows)
    print_rows(rows, chosen, checkpoint, samples, str(progress.folder))


def _loaded(
    name: str,
    suite: DataSuite,
    base: RunConfig,
    data_root: Path,
    limit: int | None,
    answers: str | None,
) -> list[LoadedSource]:
    """The suite's samples; what is left out of them is printed."""
    from mmrl.data.sources import load_sources
    from mmrl.evaluation.settings import taught_params
    from mmrl.evaluation.suites import source_of

    found = load_sources(
        [source_of(suite, data_root, limit, taught_params(base, suite.task), answers)],
        on_error=base.data.on_error,
        orientation=base.data.image.orientation,
        where=f"--data-root (suite {name})",
    )
    print_skipped(found)
    return found


def _encoder(policy: Policy, config: RunConfig) -> Any:
    """The policy's encoder with the pixel budget and the longest prompt of `config`."""
    from mmrl.policy.loading import build_encoder

    return build_encoder(
        policy.processor,
        policy.body,
        policy.template,
        config.data,
        config.model.max_prompt_tokens,
    )


def _workers(
    stack: ExitStack,
    policy: Policy,
    base: RunConfig,
    settings: Mapping[str, RunConfig],
    loaded: Mapping[str, Sequence[LoadedSource]],
) -> dict[str, Ahead | None]:
    """Media workers of all suites, which know the samples `loaded` from the beginning: one suite's last answers are written while
    the next one's clips are decoded."""
    from mmrl.policy.loading import build_visuals
    from mmrl.workers.prefetch import prefetching

    visuals = (
        [build_visuals(policy.processor, s.data) for s in settings.values()]
        if base.data.workers
        else [None] * len(settings)
    )
    workers = dict(zip(settings, stack.enter_context(prefetching(base.data, visuals)), strict=True))
    for name, ahead in workers.items():
        if ahead is not None:
            ahead.expect(s for source in loaded.get(name, ()) for s in source.samples)
    return workers


def _one_suite(
    policy: Policy,
    config: RunConfig,
    name: str,
    suite: DataSuite,
    sources: Sequence[LoadedSource],
    samples: int,
    limit: int | None,
    progress: Progress,
    answers: str | None,
) -> DataRow:
    from mmrl.evaluation.data_rows import suite_row

    protocol = {
        "suite": {
            "name": name,
            **suite.model_dump(
                include={"split", "count", "metric", "official", "settings", "notes"}
            ),
        },
        "answers": getattr(sources[0].task, "answers", suite.level(answers)),
        "extractor": suite.extractor if suite.level(answers) == "official" else None,
        "prompt": getattr(sources[0].task, "prompt", None),
    }
    folder, part = progress.folder / name, progress.part(name)
    found = _evaluate(policy, config, sources, samples, folder, protocol, part)
    row = suite_row(name, suite, found.results, found.predictions, limit, config, answers)
    typer.echo(f"{name}: {row.summary}")
    _print_views(Console(width=_WIDTH, highlight=False), found.results)
    return row


def choose(
    checkpoint: str | None, task: str | None, data: list[Path] | None, suite: str | None
) -> str:
    """'suites' or 'data', whichever the options ask for; raises ConfigError when they ask for neither or both."""
    if checkpoint is None:
        raise ConfigError(
            "expected a checkpoint: mmrl eval CHECKPOINT --suite NAME,... or --task NAME --data FILE"
        )
    if suite is not None and (task or data):
        raise ConfigError(
            "expected either --suite or --task with --data, found both; drop one of them"
        )
    if suite is None and not (task and data):
        raise ConfigError(
            "expected --task NAME with --data FILE, or --suite NAME,... (mmrl eval --list-suites prints them)"
        )
    return "data" if suite is None else "suites"
