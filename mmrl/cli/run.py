"""What `mmrl train` and `mmrl sft` do around the library: settings, progress display, summary, report."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import typer
import yaml
from rich.markup import escape
from rich.table import Table

from mmrl.cli.display import Display, step_parts
from mmrl.config import RunConfig, effective_threads, load_config
from mmrl.config.presets import read_preset
from mmrl.diagnostics.diagnosis import trained
from mmrl.errors import ConfigError, MMRLError
from mmrl.files import optional
from mmrl.operations.console import Console, quiet_transformers
from mmrl.operations.restart import resume_command_of
from mmrl.policy.manifest import write_manifest
from mmrl.report.beside import ReportBeside

__all__ = ["is_embodied", "quieten", "results_table", "run_config", "sft_command", "train_command"]

_RATES = {"success_once": "success rate", "success_at_end": "success at end"}


def run_config(path: Path, overrides: list[str], preset: str | None = None) -> RunConfig:
    """The configuration of a file: embodied where it has an `env` section.

    A `preset` is laid over the file and under the overrides (mmrl/config/presets.py).
    """
    if preset is not None:
        overrides = [*read_preset(preset).overrides, *overrides]
    if is_embodied(path):
        from mmrl.robotics.config import load_embodied

        return load_embodied(path, overrides)
    return load_config(path, overrides)


def is_embodied(path: Path) -> bool:
    """Whether a configuration file has an `env` section."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False  # said when it is loaded
    return isinstance(tree, dict) and "env" in tree


def train_command(
    config: Path,
    overrides: list[str],
    *,
    resume: bool | Literal["auto"],
    overwrite: bool,
    quiet: bool,
    preset: str | None = None,
) -> Path:
    """Run the trainer with a display; returns the run's folder."""
    settings = run_config(config, overrides, preset)
    run = Path(settings.dir) / settings.name

    def how() -> str:
        return resume_command_of(settings) if (run / "config.yaml").exists() else ""

    with _saying_how_to_go_on(how):
        run_training(settings, resume=resume, overwrite=overwrite, quiet=quiet)
    return run


def run_training(
    settings: RunConfig,
    *,
    resume: bool | Literal["auto"],
    overwrite: bool,
    quiet: bool,
    on_event: Callable[[str, Any], None] | None = None,
    silent: bool = False,
) -> dict[str, Any]:
    """Train with a display and write the report, beside the run at evaluations and at its end; returns the last step's row.
    `quiet`: only warnings, errors and the results at the end; `silent`: nothing. `on_event` is told what the trainer tells."""
    quieten(settings)
    from mmrl.training.trainer import Trainer

    display = Display(settings.train.steps, quiet or silent)
    told = _Teller(settings, display, on_event)
    trainer: Any = None
    try:
        with display:
            trainer = Trainer(settings, resume=resume, overwrite=overwrite, on_event=told)
            row: dict[str, Any] = trainer.fit()
    except (MMRLError, KeyboardInterrupt):
        told.reports.close()
        # what evaluated and was ended before its first step has something to report, too
        if (told.steps or told.evaluated) and trainer is not None and trainer.world.is_main:
            _report(trainer.folder.path, silent)
        raise
    finally:
        told.reports.close()
    if trainer.world.is_main:
        if not silent:
            results_table(trainer.folder.path)
        _report(trainer.folder.path, silent)
    trainer.world.close()
    return row


def _report(folder: Path, silent: bool) -> None:
    from mmrl.report import build_report

    with optional("the report"):
        page = build_report(folder)
        if not silent:
            typer.echo(f"report: {page}")


class _Teller:
    """Says what a trainer tells of (Trainer.on_event), and tells `on_event`, too."""

    def __init__(
        self,
        settings: RunConfig,
        display: Display,
        on_event: Callable[[str, Any], None] | None = None,
    ) -> None:
        self.settings, self.display, self.watched, self.on_event = settings, display, "", on_event
        self.steps = self.steps_trained = 0
        self.evaluated = False
        self.folder: Path | None = None
        self.reports = ReportBeside()
        self.alarms: dict[str, int] = {}

    def __call__(self, kind: str, payload: Any) -> None:
        if hear := getattr(self, f"_{kind}", None):
            hear(payload)
        if self.on_event is not None:
            self.on_event(kind, payload)

    def _checked(self, payload: Any) -> None:
        from mmrl.diagnostics.memory import announce_memory

        announce_memory(self.settings, self.display.say)

    def _start(self, payload: Any) -> None:
        self.folder = payload["folder"]
        self.watched = payload["best_metric"].partition("/")[2]
        self.display.begin(payload["step"])
        self.display.say(
            f"run {payload['folder']}: {payload['trainable']:,} trainable parameters"
            + (f", resumed after step {payload['step']}" if payload["step"] else "")
            + (
                f", {payload['rejected']} rows rejected (rejected.jsonl)"
                if payload["rejected"]
                else ""
            )
        )
        if skipped := payload.get("skipped"):
            self.display.say(
                f"{sum(skipped.values()):,} rows left out (skipped.json): "
                + ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
            )
        for note in payload.get("notes", ()):
            self.display.say(note)

    def _step(self, row: Any) -> None:
        self.steps, self.steps_trained = self.steps + 1, self.steps_trained + trained(row)
        self.display.step(row["step"], step_parts(row, self.watched))

    def _alarm(self, alarm: Any) -> None:
        self.alarms[alarm.name] = self.alarms.get(alarm.name, 0) + 1
        self.display.say(
            f"alarm at step {alarm.step}: {alarm.name}: {alarm.message}",
            "bold red" if alarm.severity == "error" else "yellow",
        )

    def _eval(self, evaluation: Any) -> None:
        self.display.say(_eval_note(evaluation.results, self.watched))
        if evaluation.unread:
            self.display.say(evaluation.unread, "yellow")
        self.evaluated = True
        if self.folder is not None:
            self.reports.begin(self.folder)
        if evaluation.results["step"] == 0:
            self.display.begin(0)  # its time says nothing about the time of a step

    def _end(self, payload: Any) -> None:
        if self.steps and not self.steps_trained:
            self.display.say(
                f"nothing was trained in any of the {self.steps} steps: the weights are those the run began with",
                "bold red",
            )
        elif self.alarms:
            self.display.say(
                "alarms of this run (alarms.jsonl): "
                + ", ".join(f"{name} {count}x" for name, count in sorted(self.alarms.items())),
                "yellow",
            )


@contextmanager
def _saying_how_to_go_on(command: Callable[[], str]) -> Iterator[None]:
    """A signal that ended the run (mmrl.operations.interrupts, Ctrl-C) is told by the main process; status 128 + its number.
    `command()`: what continues it; '' where it has not begun."""
    try:
        yield
    except KeyboardInterrupt as stop:  # typer would end with status 130 and say nothing
        if os.environ.get("RANK", "0") == "0":
            how = command()
            told = f"continue with {how}" if how else "nothing had begun; start it again"
            print(str(stop) or f"interrupted; {told}", file=sys.stderr)
        raise SystemExit(getattr(stop, "status", 130)) from None


def _stand_in(results: Mapping[str, Any]) -> str:
    """What stands beside numbers measured on stand-in assets; '' elsewhere."""
    return (
        " (stand-in assets: no benchmark score)"
        if "stand-in" in str(results["protocol"].get("assets"))
        else ""
    )


def _eval_note(results: Mapping[str, Any], watched: str) -> str:
    """One line: the watched metric and the reward, and with several sources each one's headline."""
    modes = [m for m in ("sampled", "greedy") if m in results]
    if any("success_once" in results[m] for m in modes):
        rates = ", ".join(f"{m} {_percent(results[m]['success_once'])}" for m in modes)
        parts = ", ".join(
            f"{s} {row['headline']['mean']:.0%}"
            for s, row in results["per_source"].items()
            if "headline" in row
        )
        return (
            f"held-out success rate after step {results['step']}: {rates}"
            f"{f' ({parts})' if len(results['per_source']) > 1 else ''}{_stand_in(results)}"
        )
    many = len(results.get("per_source", {})) > 1
    names = list(dict.fromkeys([watched, *(["macro"] if many else ["iou"]), "reward"]))
    words = [
        f"{m} {n} {results[m][n]['mean']:.3f}" for m in modes for n in names if n in results[m]
    ]
    if many:
        words.append(
            "("
            + ", ".join(
                f"{source} {row['headline']['mean']:.3f}"
                for source, row in results["per_source"].items()
                if "headline" in row
            )
            + ")"
        )
    return f"held-out after step {results['step']}: " + "  ".join(words)


def quieten(settings: RunConfig) -> None:
    """Keep transformers' and datasets' progress bars off our display."""
    quiet_transformers()


def results_table(run: Path) -> None:
    """Print held-out results before and after training with their intervals, from the run's files.

    With several sources: one row per source with its headline metric, then the mean over sources.
    """
    folders = sorted((run / "eval").glob("step_*")) if (run / "eval").is_dir() else []
    if not folders:
        return
    first, last = (
        json.loads((f / "results.json").read_text(encoding="utf-8"))
        for f in (folders[0], folders[-1])
    )
    many = len(last["per_source"]) > 1
    table = Table(
        title=f"held-out, before and after {last['step']} steps{_stand_in(last)}",
        title_justify="left",
    )
    for heading in (["source"] if many else []) + ["metric", "before", "after", "gain"]:
        text = heading in ("source", "metric")
        # a long name is folded: numbers keep their room
        table.add_column(
            heading, justify="left" if text else "right", no_wrap=not text, overflow="fold"
        )
    for cells in _source_rows(first, last) if many else _metric_rows(first, last):
        table.add_row(*map(escape, cells))
    Console(width=120 if many else 110).print(table)


def _percent(estimate: Mapping[str, Any]) -> str:
    """'55.0 % [41.2, 68.0]'; the mean alone where one prompt gives no interval."""
    low, high = 100 * estimate["low"], 100 * estimate["high"]
    return f"{100 * estimate['mean']:.1f} %" + (
        f" [{low:.1f}, {high:.1f}]" if math.isfinite(low + high) else ""
    )


def _fraction(estimate: Mapping[str, Any]) -> str:
    """'0.606 [0.412, 0.680]'; the mean alone where one prompt gives no interval."""
    low, high = estimate["low"], estimate["high"]
    return f"{estimate['mean']:.3f}" + (
        f" [{low:.3f}, {high:.3f}]" if math.isfinite(low + high) else ""
    )


def _before_after(
    before: Mapping[str, Any], after: Mapping[str, Any], *, percent: bool = False
) -> list[str]:
    if percent:
        return [_percent(before), _percent(after), f"{100 * (after['mean'] - before['mean']):+.1f}"]
    return [
        _fraction(before),
        _fraction(after),
        f"{after['mean'] - before['mean']:+.3f}",
    ]


def _modes(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    p = results["protocol"]
    return [
        ("sampled", f"avg@{p.get('samples_per_prompt', '?')}, T = {p['temperature']:g}"),
        ("greedy", "greedy"),
    ]


def _metric_rows(first: Mapping[str, Any], last: Mapping[str, Any]) -> list[list[str]]:
    """The headline and the usual companions, sampled and greedy."""
    headline = next(iter(last.get("headlines", {}).get("per_source", {}).values()), "iou")
    rows = []
    if headline == "success_once":
        return [
            [
                f"{title} ({label})",
                *_before_after(first[mode][name], last[mode][name], percent=True),
            ]
            for mode, label in _modes(last)
            for name, title in _RATES.items()
            if name in first.get(mode, {}) and name in last.get(mode, {})
        ]
    for mode, label in _modes(last):
        for name in dict.fromkeys(
            (headline, "iou", "acc@0.5", "acc@0.75", "correct", "parse_rate")
        ):
            if name in first.get(mode, {}) and name in last.get(mode, {}):
                title = "mIoU" if name == "iou" else name.replace("acc", "Acc")
                rows.append(
                    [f"{title} ({label})", *_before_after(first[mode][name], last[mode][name])]
                )
    return rows


def _source_rows(first: Mapping[str, Any], last: Mapping[str, Any]) -> list[list[str]]:
    """Per source its headline metric, sampled where it was, and the mean over sources."""
    mode, label = next((m for m in _modes(last) if m[0] in last), ("greedy", "greedy"))
    key = "sampled/headline" if mode == "sampled" and "greedy" in last else "headline"
    rows = []
    for source, after in last["per_source"].items():
        before = first["per_source"].get(source, {})
        if key in before and key in after:
            name = last["headlines"]["per_source"][source]
            rows.append(
                [
                    source,
                    f"{_RATES.get(name, name)} ({label})",
                    *_before_after(before[key], after[key], percent=name in _RATES),
                ]
            )
    if "macro" in first.get(mode, {}) and "macro" in last.get(mode, {}):
        rates = set(last["headlines"]["per_source"].values()) <= set(_RATES)
        rows.append(
            [
                "(mean of tasks)" if rates else "(mean of sources)",
                f"{'success rate' if rates else 'headline'} ({label})",
                *_before_after(first[mode]["macro"], last[mode]["macro"], percent=rates),
            ]
        )
    return rows


def _check_free(out: Path, model: str, *, overwrite: bool) -> None:
    """Raises ConfigError where saving the trained model in `out` would write over something that nobody asked to replace."""
    if out.exists() and Path(model).exists() and out.resolve() == Path(model).resolve():
        raise ConfigError(
            f"expected --out to be another folder than that of the model that is trained, found {out}; name a new one"
        )
    if os.path.ismount(out):
        raise ConfigError(
            f"expected --out to be a folder that mmrl may replace, found a mount point, {out}; name a folder in it, as in --out "
            f"{out / 'model'}"
        )
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise ConfigError(
            f"expected --out to be a new or empty folder, found files in {out}; name another one, or replace the model in it with "
            "--overwrite"
        )
    if not (out / "config.json").is_file():
        raise ConfigError(
            f"expected --overwrite to replace a model, found no config.json in {out}; it holds something else: name another folder"
        )


def sft_command(
    config: Path,
    overrides: list[str],
    out: Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool,
) -> None:
    """Fine-tune a model on gold answers, or on demonstrations, and save it in Hugging Face format (in `out`; default
    DIR/NAME_sft/model); failures.jsonl lists the samples that could not be read. With `overwrite` a model that is there is replaced
    when the new one is trained. Raises ConfigError where anything else is there.

    Until then OUT_checkpoints holds the last checkpoint, from which `resume` goes on.
    """
    settings = run_config(config, overrides)
    out = Path(settings.dir) / f"{settings.name}_sft" / "model" if out is None else out
    if out.is_symlink() or not out.name:  # its checkpoints lie beside it, under its own name
        out = out.resolve()
    quieten(settings)
    import torch

    from mmrl.training.sft import run_sft, supervised_source, supervised_world
    from mmrl.training.supervised_checkpoints import GO_ON, SupervisedCheckpoints

    if (threads := effective_threads(settings)) is not None:
        torch.set_num_threads(threads)
    # what does not go together must fail before a model is loaded
    world = supervised_world(settings)
    torch.manual_seed(settings.seed)
    with world.raise_on_all_ranks():
        _check_free(out, settings.model.path, overwrite=overwrite)
    source = supervised_source(settings, world)
    display = Display(source.steps, quiet or not world.is_main)
    checkpoints = SupervisedCheckpoints(
        out, settings, world, resume=resume, overwrite=overwrite, say=display.say
    )
    with _saying_how_to_go_on(lambda: GO_ON), display:
        with checkpoints.reading():
            policy = source.load_policy(display.say, checkpoints.weights)
        display.begin(checkpoints.step)
        last = run_sft(
            policy,
            settings,
            lambda step, m: display.step(
                step, [(1, f"loss {m['loss']:.3f}"), (2, f"{m['seconds']:.2f} s")]
            ),
            world,
            source,
            checkpoints,
        )
    with world.raise_on_all_ranks():
        if world.is_main:
            partial = out.with_name(f".{out.name}.partial")  # whole, or not there
            shutil.rmtree(partial, ignore_errors=True)
            source.save(policy, partial)
            _write_failures(last["failures"], partial / "failures.jsonl")
            write_manifest(partial, source.steps)
            shutil.rmtree(out, ignore_errors=True)
            partial.replace(out)
            checkpoints.remove()
            if lost := last["failures"]:
                display.say(
                    f"samples left out because they could not be read: {len(lost)} ({out / 'failures.jsonl'}); first: "
                    f"{lost[0]['reason']}",
                    "yellow",
                )
            typer.echo(f"model: {out}  (loss {last['loss']:.3f})")
    world.barrier()
    world.close()


def _write_failures(failures: Sequence[Mapping[str, Any]], record: Path) -> None:
    record.unlink(missing_ok=True)
    if failures:
        record.write_text("".join(json.dumps(row) + "\n" for row in failures), encoding="utf-8")
