"""What `mmrl train` and `mmrl sft` do around the library: settings, progress display, summary, report."""
from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from mmrl.config import RunConfig, effective_threads, load_config
from mmrl.presets import read_preset

if TYPE_CHECKING:
    from mmrl.world import World

__all__ = ["is_embodied", "results_table", "run_config", "sft_command", "train_command"]

_console = Console(stderr=True)
_RATES = {"success_once": "success rate", "success_at_end": "success at end"}


class _Display:
    """Progress bar with ETA on a terminal, one line now and then elsewhere."""

    def __init__(self, total: int, quiet: bool) -> None:
        self.quiet, self.total = quiet, total
        self.bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                            TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=_console,
                            disable=quiet or not _console.is_terminal)
        self.line = self.bar.add_task("training", total=total, note="")

    def step(self, step: int, note: str) -> None:
        self.bar.update(self.line, completed=step, note=note)
        if not self.quiet and not _console.is_terminal and (step % max(1, self.total // 20) == 0 or step == self.total):
            _console.print(f"step {step}/{self.total}  {note}", highlight=False)

    def say(self, text: str, style: str = "") -> None:
        if not self.quiet or style:
            self.bar.console.print(text, style=style, highlight=False)


def _number(row: Mapping[str, Any], key: str, form: str = ".3f") -> str:
    value = row.get(key)
    return "-" if value is None else format(value, form)


def run_config(path: Path, overrides: list[str], preset: str | None = None) -> RunConfig:
    """The configuration of a file: embodied where it has an `env` section (the engine imports robotics by name only).

    A `preset` is laid over the file and under the overrides (mmrl/presets.py).
    """
    if preset is not None:
        overrides = [*read_preset(preset).overrides, *overrides]
    if is_embodied(path):
        return importlib.import_module("robotics.config").load_embodied(path, overrides)
    return load_config(path, overrides)


def is_embodied(path: Path) -> bool:
    """Whether a configuration file has an `env` section."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False  # said when it is loaded
    return isinstance(tree, dict) and "env" in tree


def _trainer_class(settings: RunConfig) -> Any:
    from mmrl.trainer import Trainer

    return Trainer if type(settings) is RunConfig else importlib.import_module("robotics.trainer").EmbodiedTrainer


def train_command(config: Path, overrides: list[str], *, resume: bool | Literal["auto"], overwrite: bool, quiet: bool,
                  preset: str | None = None) -> Path:
    """Run the trainer with a display; returns the run's folder."""
    settings = run_config(config, overrides, preset)
    _quieten(settings)
    from mmrl.memory import announce_memory
    from mmrl.report import build_report

    display = _Display(settings.train.steps, quiet)
    watched = ""

    def on_event(kind: str, payload: Any) -> None:
        nonlocal watched
        if kind == "checked":
            announce_memory(settings, display.say)
        elif kind == "start":
            watched = payload["best_metric"].partition("/")[2]
            display.say(f"run {payload['folder']}: {payload['trainable']:,} trainable parameters"
                        + (f", resumed after step {payload['step']}" if payload["step"] else "")
                        + (f", {payload['rejected']} rows rejected (rejected.jsonl)" if payload["rejected"] else ""))
            if skipped := payload.get("skipped"):
                display.say(f"{sum(skipped.values()):,} rows left out (skipped.json): " + ", ".join(
                    f"{count:,} {reason}" for reason, count in sorted(skipped.items())))
            for note in payload.get("notes", ()):
                display.say(note)
        elif kind == "step":
            display.step(payload["step"], _step_note(payload, watched))
        elif kind == "alarm":
            display.say(f"alarm at step {payload.step}: {payload.name}: {payload.message}", "yellow")
        elif kind == "eval":
            display.say(_eval_note(payload.results, watched))

    with _saying_how_to_go_on(), display.bar:
        trainer = _trainer_class(settings)(settings, resume=resume, overwrite=overwrite, on_event=on_event)
        trainer.fit()
    if trainer.world.is_main:
        page = build_report(trainer.folder.path)
        results_table(trainer.folder.path)
        typer.echo(f"report: {page}")
    trainer.world.close()
    return trainer.folder.path


@contextmanager
def _saying_how_to_go_on() -> Iterator[None]:
    """A signal that ended the run (mmrl.operations.interrupts, Ctrl-C) is told by the main process; status 128 + its number."""
    try:
        yield
    except KeyboardInterrupt as stop:  # typer would end with status 130 and say nothing
        if os.environ.get("RANK", "0") == "0":
            print(str(stop) or "interrupted; continue with --resume", file=sys.stderr)
        raise SystemExit(getattr(stop, "status", 130)) from None


def _step_note(row: Mapping[str, Any], watched: str) -> str:
    """Reward, then the metric that picks the best checkpoint, else the first of the usual ones that training measures."""
    if "train/success_once" in row:
        return _embodied_note(row)
    usual = ("correct", "iou") if watched == "macro" else ("iou", "correct")
    shown = next((n for n in (watched, *usual) if n != "reward" and f"train/{n}" in row), None)
    metric = f"{shown} {_number(row, f'train/{shown}')}  " if shown else ""
    return (f"reward {_number(row, 'train/reward/mean')}  {metric}entropy {_number(row, 'train/entropy')}  "
            f"gap {_number(row, 'train/logprob_gap/mean', '.1e')}  {_number(row, 'time/total', '.1f')} s")


def _embodied_note(row: Mapping[str, Any]) -> str:
    """Success rate, groups trained on of those played, entropy, gap, seconds."""
    failed = row.get("train/failed_attempts") or 0
    return (f"success rate {_number(row, 'train/success_once', '.0%')}  groups {_number(row, 'train/groups/trained', '.0f')}/"
            f"{_number(row, 'train/groups/asked', '.0f')}  entropy {_number(row, 'train/entropy')}  gap "
            f"{_number(row, 'train/logprob_gap/mean', '.1e')}  {_number(row, 'time/total', '.1f')} s"
            + (f"  failed attempts {failed:.0f}" if failed else ""))


def _stand_in(results: Mapping[str, Any]) -> str:
    """What stands beside numbers measured on stand-in assets; '' elsewhere."""
    return " (stand-in assets: no benchmark score)" if "stand-in" in str(results["protocol"].get("assets")) else ""


def _eval_note(results: Mapping[str, Any], watched: str) -> str:
    """One line: the watched metric and the reward, and with several sources each one's headline."""
    modes = [m for m in ("sampled", "greedy") if m in results]
    if any("success_once" in results[m] for m in modes):
        rates = ", ".join(f"{m} {_percent(results[m]['success_once'])}" for m in modes)
        parts = ", ".join(f"{s} {row['headline']['mean']:.0%}" for s, row in results["per_source"].items() if "headline" in row)
        return (f"held-out success rate after step {results['step']}: {rates}"
                f"{f' ({parts})' if len(results['per_source']) > 1 else ''}{_stand_in(results)}")
    many = len(results.get("per_source", {})) > 1
    names = list(dict.fromkeys([watched, *(["macro"] if many else ["iou"]), "reward"]))
    words = [f"{m} {n} {results[m][n]['mean']:.3f}" for m in modes for n in names if n in results[m]]
    if many:
        words.append("(" + ", ".join(f"{source} {row['headline']['mean']:.3f}"
                                     for source, row in results["per_source"].items() if "headline" in row) + ")")
    return f"held-out after step {results['step']}: " + "  ".join(words)


def _quieten(settings: RunConfig) -> None:
    """Keep transformers' and datasets' progress bars off our display."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def results_table(run: Path) -> None:
    """Print held-out results before and after training with their intervals, from the run's files.

    With several sources: one row per source with its headline metric, then the mean over sources.
    """
    folders = sorted((run / "eval").glob("step_*")) if (run / "eval").is_dir() else []
    if not folders:
        return
    first, last = (json.loads((f / "results.json").read_text(encoding="utf-8")) for f in (folders[0], folders[-1]))
    many = len(last["per_source"]) > 1
    table = Table(title=f"held-out, before and after {last['step']} steps{_stand_in(last)}", title_justify="left")
    for heading in (["source"] if many else []) + ["metric", "before", "after", "gain"]:
        table.add_column(heading, justify="left" if heading in ("source", "metric") else "right", no_wrap=True)
    for cells in _source_rows(first, last) if many else _metric_rows(first, last):
        table.add_row(*map(escape, cells))
    Console(width=120 if many else 110).print(table)


def _percent(estimate: Mapping[str, Any]) -> str:
    """'55.0 % [41.2, 68.0]'."""
    return f"{100 * estimate['mean']:.1f} % [{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]"


def _before_after(before: Mapping[str, Any], after: Mapping[str, Any], *, percent: bool = False) -> list[str]:
    if percent:
        return [_percent(before), _percent(after), f"{100 * (after['mean'] - before['mean']):+.1f}"]
    return [*(f"{e['mean']:.3f} [{e['low']:.3f}, {e['high']:.3f}]" for e in (before, after)),
            f"{after['mean'] - before['mean']:+.3f}"]


def _modes(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    p = results["protocol"]
    return [("sampled", f"avg@{p.get('samples_per_prompt', '?')}, T = {p['temperature']:g}"), ("greedy", "greedy")]


def _metric_rows(first: Mapping[str, Any], last: Mapping[str, Any]) -> list[list[str]]:
    """The headline and the usual companions, sampled and greedy."""
    headline = next(iter(last.get("headlines", {}).get("per_source", {}).values()), "iou")
    rows = []
    if headline == "success_once":
        return [[f"{title} ({label})", *_before_after(first[mode][name], last[mode][name], percent=True)]
                for mode, label in _modes(last) for name, title in _RATES.items()
                if name in first.get(mode, {}) and name in last.get(mode, {})]
    for mode, label in _modes(last):
        for name in dict.fromkeys((headline, "iou", "acc@0.5", "acc@0.75", "correct", "parse_rate")):
            if name in first.get(mode, {}) and name in last.get(mode, {}):
                title = "mIoU" if name == "iou" else name.replace("acc", "Acc")
                rows.append([f"{title} ({label})", *_before_after(first[mode][name], last[mode][name])])
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
            rows.append([source, f"{_RATES.get(name, name)} ({label})",
                         *_before_after(before[key], after[key], percent=name in _RATES)])
    if "macro" in first.get(mode, {}) and "macro" in last.get(mode, {}):
        rates = set(last["headlines"]["per_source"].values()) <= set(_RATES)
        rows.append(["(mean of tasks)" if rates else "(mean of sources)", f"{'success rate' if rates else 'headline'} ({label})",
                     *_before_after(first[mode]["macro"], last[mode]["macro"], percent=rates)])
    return rows


def sft_command(config: Path, overrides: list[str], out: Path, *, quiet: bool) -> None:
    """Warm-start a model on gold answers, or on demonstrations, and save it in Hugging Face format."""
    settings = run_config(config, overrides)
    _quieten(settings)
    import torch

    from mmrl.engines import accelerator_options, train_engine_name
    from mmrl.sft import supervised
    from mmrl.world import World

    if (threads := effective_threads(settings)) is not None:
        torch.set_num_threads(threads)
    plain = type(settings) is RunConfig
    asked = supervised(settings, None if plain else settings.demos.optim)  # type: ignore[attr-defined]
    world = World(torch.device(settings.model.device) if settings.model.device else None, **accelerator_options(asked))
    train_engine_name(asked, world.size)  # what does not go together must fail before a model is loaded
    torch.manual_seed(settings.seed)
    (_sft if plain else _embodied_sft)(settings, out, quiet or not world.is_main, world)
    world.close()


def _sft(settings: RunConfig, out: Path, quiet: bool, world: World) -> None:
    """Train on the gold answers of the data, save the policy and a list of samples that could not be read."""
    from mmrl.policy.loading import load_policy
    from mmrl.sft import run_sft

    with world.telling():
        policy = load_policy(settings.model, settings.data, device=world.device)
    world.barrier()
    display = _Display(settings.train.steps, quiet)
    with display.bar:
        last = run_sft(policy, settings, lambda step, m: display.step(step, f"loss {m['loss']:.3f}  {m['seconds']:.2f} s"), world)
    with world.telling():
        if world.is_main:
            policy.save(out)
            record = out / "failures.jsonl"
            record.unlink(missing_ok=True)
            if failures := last["failures"]:
                record.write_text("".join(json.dumps(row) + "\n" for row in failures), encoding="utf-8")
                display.say(f"samples left out because they could not be read: {len(failures)} ({escape(str(record))}); first: "
                            f"{escape(failures[0]['reason'])}", "yellow")
            typer.echo(f"model: {out}")
    world.barrier()


def _embodied_sft(settings: RunConfig, out: Path, quiet: bool, world: World) -> None:
    """Record demonstrations where there are none, clone them, save the policy."""
    warmstart = importlib.import_module("robotics.warmstart")
    display = _Display(settings.demos.steps, quiet)  # type: ignore[attr-defined]
    with display.bar:
        vla, last = warmstart.warm_start(
            settings, on_step=lambda step, m: display.step(step, f"loss {m['loss']:.3f}  {m['seconds']:.2f} s"),
            on_episode=lambda done, total: display.say(f"recorded {done}/{total} demonstrations")
            if done * 10 // total > (done - 1) * 10 // total else None, world=world)
    with world.telling():
        if world.is_main:
            warmstart.save_policy(vla, settings, out)
            typer.echo(f"model: {out}  (loss {last['loss']:.3f})")
    world.barrier()
