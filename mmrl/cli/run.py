"""What `mmrl train`, `mmrl sft` and `mmrl eval` do around the library: settings, progress display, summary, report."""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from mmrl.config import DataSource, RunConfig, effective_threads, load_config

__all__ = ["eval_command", "results_table", "sft_command", "train_command"]

_console = Console(stderr=True)


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


def _number(row: dict[str, Any], key: str, form: str = ".3f") -> str:
    value = row.get(key)
    return "-" if value is None else format(value, form)


def train_command(config: Path, overrides: list[str], *, resume: bool, overwrite: bool, quiet: bool) -> Path:
    """Run the trainer with a display; returns the run's folder."""
    settings = load_config(config, overrides)
    _quieten(settings)
    from mmrl.report import build_report
    from mmrl.trainer import Trainer

    display = _Display(settings.train.steps, quiet)

    def on_event(kind: str, payload: Any) -> None:
        if kind == "start":
            display.say(f"run {payload['folder']}: {payload['trainable']:,} trainable parameters"
                        + (f", resumed after step {payload['step']}" if payload["step"] else "")
                        + (f", {payload['rejected']} rows rejected (rejected.jsonl)" if payload["rejected"] else ""))
        elif kind == "step":
            display.step(payload["step"], f"reward {_number(payload, 'train/reward/mean')}  iou {_number(payload, 'train/iou')}  "
                         f"entropy {_number(payload, 'train/entropy')}  gap {_number(payload, 'train/logprob_gap/mean', '.1e')}  "
                         f"{_number(payload, 'time/total', '.1f')} s")
        elif kind == "alarm":
            display.say(f"alarm at step {payload.step}: {payload.name}: {payload.message}", "yellow")
        elif kind == "eval":
            display.say(f"held-out after step {payload.results['step']}: " + "  ".join(
                f"{mode} {name} {payload.results[mode][name]['mean']:.3f}" for mode in ("sampled", "greedy")
                for name in ("iou", "reward") if name in payload.results.get(mode, {})))

    with display.bar:
        trainer = Trainer(settings, resume=resume, overwrite=overwrite, on_event=on_event)
        trainer.fit()
    if trainer.world.is_main:
        page = build_report(trainer.folder.path)
        results_table(trainer.folder.path)
        typer.echo(f"report: {page}")
    trainer.world.close()
    return trainer.folder.path


def _quieten(settings: RunConfig) -> None:
    """Keep transformers' and datasets' progress bars off our display."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def results_table(run: Path, metrics: tuple[str, ...] = ("iou", "acc@0.5", "acc@0.75", "parse_rate")) -> None:
    """Print held-out results before and after training with their intervals, from the run's files."""
    import json

    folders = sorted((run / "eval").glob("step_*")) if (run / "eval").is_dir() else []
    if not folders:
        return
    first, last = (json.loads((f / "results.json").read_text(encoding="utf-8")) for f in (folders[0], folders[-1]))
    table = Table(title=f"held-out, before and after {last['step']} steps", title_justify="left")
    for heading in ("metric", "before", "after", "gain"):
        table.add_column(heading, justify="left" if heading == "metric" else "right", no_wrap=True)
    samples = last["protocol"]["samples_per_prompt"]
    for mode, label in (("sampled", f"avg@{samples}, T = {last['protocol']['temperature']:g}"), ("greedy", "greedy")):
        for name in metrics:
            if name in first.get(mode, {}) and name in last.get(mode, {}):
                a, b = first[mode][name], last[mode][name]
                title = "mIoU" if name == "iou" else name.replace("acc", "Acc")
                table.add_row(f"{title} ({label})", *(f"{e['mean']:.3f} [{e['low']:.3f}, {e['high']:.3f}]" for e in (a, b)),
                              f"{b['mean'] - a['mean']:+.3f}")
    Console(width=110).print(table)


def sft_command(config: Path, overrides: list[str], out: Path, *, quiet: bool) -> None:
    """Warm-start a model on gold answers and save it in Hugging Face format."""
    settings = load_config(config, overrides)
    _quieten(settings)
    import torch

    from mmrl.policy.loading import load_policy
    from mmrl.sft import run_sft

    if (threads := effective_threads(settings)) is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(settings.seed)
    policy = load_policy(settings.model, settings.data)
    display = _Display(settings.train.steps, quiet)
    with display.bar:
        run_sft(policy, settings, lambda step, m: display.step(step, f"loss {m['loss']:.3f}  {m['seconds']:.2f} s"))
    policy.save(out)
    typer.echo(f"model: {out}")


def eval_command(checkpoint: str, task: str, data: list[Path], out: Path | None, config: Path | None,
                 overrides: list[str], samples: int, limit: int | None) -> None:
    """Evaluate one checkpoint on data files with one task, by default with the settings it was trained with."""
    trained = Path(checkpoint) / "trainer" / "config.yaml"
    if config is None and trained.exists():
        config = trained
        typer.echo(f"settings: {trained}")
    base = load_config(config, [f"model.path={checkpoint}", *overrides])
    _quieten(base)
    import torch

    from mmrl.data import load_sources, write_rejected
    from mmrl.evaluate import EvalSettings, evaluate, protocol_of, write_evaluation
    from mmrl.policy.loading import load_policy
    from mmrl.rollout import PrefillOnceEngine
    from mmrl.schedule import sampling_settings
    from mmrl.scoring import Scorer

    if (threads := effective_threads(base)) is not None:
        torch.set_num_threads(threads)
    known = next((s for s in (*base.data.eval, *base.data.train) if s.task == task), None)
    sources = load_sources([DataSource(task=task, path=str(p), limit=limit, params=known.params if known else {})
                            for p in data], on_error=base.data.on_error, where="--data")
    policy = load_policy(base.model, base.data, trainable=False)
    folder = out or (Path(checkpoint) / "eval" if Path(checkpoint).is_dir()
                     else Path("runs/eval") / re.sub(r"[^\w.-]+", "_", checkpoint))
    with Scorer([(s.config.task, dict(s.config.params)) for s in sources], [s.task for s in sources],
                workers=base.reward.workers, timeout_s=base.reward.timeout_s) as scorer:
        result = evaluate(policy, PrefillOnceEngine(policy), scorer, sources,
                          EvalSettings(sampling_settings(base), samples, base.seed, None, protocol=protocol_of(base)))
    write_evaluation(result, folder)
    write_rejected(sources, folder / "rejected.jsonl")
    table = Table(title=f"{checkpoint} on {task}", title_justify="left")
    for heading in ("metric", "greedy", f"avg@{samples}") if samples else ("metric", "greedy"):
        table.add_column(heading, no_wrap=True)
    for name in result.results["greedy"]:
        cells = [result.results[mode][name] for mode in ("greedy", "sampled") if mode in result.results]
        table.add_row(name, *(f"{e['mean']:.3f} [{e['low']:.3f}, {e['high']:.3f}]" for e in cells))
    Console(width=110).print(table)
    typer.echo(f"results: {folder / 'results.json'}")
