"""Does a task keep its contract? Checked on your own data, before any GPU hour is spent on it.

    mmrl tasks check grounding --data my.jsonl --model Qwen/Qwen2.5-VL-3B-Instruct --out runs/check
    mmrl tasks check grounding --config my.yaml     # as that run would see it: model, pixels, frame, parameters, data

Loads the samples twice, encodes every prompt with the model's own processor (its weights are not loaded), scores gold,
wrong and garbage answers in every coordinate frame, in this process and in a reward worker, and draws the boxes. What
fails is reported as expected, found and how to fix it. The checks are listed in mmrl/diagnostics/_conformance_checks.py.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.config.shipped import SHIPPED
from mmrl.data.sources import data_name
from mmrl.diagnostics._conformance_checks import CHECKS, Bench, Check
from mmrl.diagnostics._conformance_levels import spellings_read
from mmrl.diagnostics._conformance_pictures import draw_check
from mmrl.diagnostics._conformance_rounding import HALF
from mmrl.errors import ConfigError, MediaError, did_you_mean
from mmrl.registry import task_from_spec
from mmrl.task import Task
from mmrl.types import Sample
from mmrl.video.media import sizes_on_disk
from mmrl.workers.scorer import Scorer

if TYPE_CHECKING:
    from mmrl.config import DataSource, RunConfig
    from mmrl.policy.encode import Encoder

__all__ = ["Conformance", "Finding", "check_task", "load_encoder", "settings_of", "source_of"]

_SHOWN = 3  # problems quoted per check
_PICTURES = 12
_DEFAULT_MODEL = SHIPPED / "assets" / "tiny_vlm"


@dataclass(frozen=True)
class Finding:
    """Outcome of one check; `problems` quotes the first few of `count`."""

    check: str
    ok: bool
    expected: str
    fix: str
    problems: tuple[str, ...] = ()
    count: int = 0


@dataclass
class Conformance:
    """What `mmrl tasks check` found; `tokens` are prompt lengths in tokens, media included (min, median, max).

    `lowest_gold` is the lowest score of a gold answer per coordinate frame; with `rounds` it is what rounding of
    coordinates costs.
    """

    task: str
    data: str
    model: str
    samples: int = 0
    rejected: int = 0
    # the first few, with file, row and reason
    rejected_shown: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    tokens: dict[str, float] = field(default_factory=dict)
    lowest_gold: dict[str, float] = field(default_factory=dict)
    rounds: bool = False
    skipped: dict[str, int] = field(default_factory=dict)  # rows left out on request, by reason
    notes: dict[str, int] = field(default_factory=dict)  # what was done to rows that are used
    pictures: list[str] = field(default_factory=list)
    # of right answers -> how many each level reads first
    spellings: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True when every check passed."""
        return all(finding.ok for finding in self.findings)


def load_encoder(
    model: str | None, folder: Path, config: RunConfig | None = None
) -> tuple[Encoder, str]:
    """The encoder of a model folder or hub name, without its weights, and its name.

    With `config` it is the encoder of that run: its model (unless `model` names another), template, coordinate frame,
    system text, pixel budget and longest prompt. Without `model` and `config`: the installed assets/tiny_vlm, else a tiny
    model built in `folder`. Raises ConfigError.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    from mmrl.config import ModelConfig
    from mmrl.policy.families import family_of, part_config
    from mmrl.policy.loading import build_encoder, template_for

    asked = model or (config.model.path if config is not None else None)
    name = asked or (str(_DEFAULT_MODEL) if (_DEFAULT_MODEL / "config.json").is_file() else "")
    path = name
    if not path:
        from mmrl.policy.tiny import TinySpec, build_tiny

        name, path = "a tiny model built for this check", str(folder / "tiny_vlm")
        build_tiny(TinySpec(), path)
    try:
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        key = "--model" if model or config is None else "model.path"
        raise ConfigError(
            f"expected {key} to be a folder or hub name of a vision-language model, found '{path}': {error}"
        ) from error
    settings, data = (
        (config.model, config.data) if config is not None else (ModelConfig(path=path), None)
    )
    template = template_for(model_config.model_type, settings)
    # rotary positions need the model's class and configuration, not its weights
    with torch.device("meta"):
        shell = AutoModelForImageTextToText.from_config(part_config(model_config))
    body = family_of(shell.config).body(shell)
    encoder = build_encoder(processor, body, template, data, settings.max_prompt_tokens)
    return encoder, name


def source_of(config: RunConfig, spec: str, data: str | Path | None) -> DataSource:
    """The run's data source that uses the task: the one that reads `data` if there is one, else the first, training first.

    Raises ConfigError when the configuration does not use the task."""
    sources = [*config.data.train, *config.data.eval]
    matching = [s for s in sources if s.task == spec]
    if not matching:
        known = sorted({s.task for s in sources})
        raise ConfigError(
            f"expected a source with task '{spec}' in data.train or data.eval of the configuration, found "
            f"{', '.join(known) or 'no source at all'}.{did_you_mean(spec, known)}"
        )
    return next(
        (s for s in matching if data is not None and Path(s.path) == Path(data)), matching[0]
    )


def settings_of(
    config: RunConfig | None, spec: str, data: str | Path | None, params: Mapping[str, Any] | None
) -> tuple[dict[str, Any], str | Path | None]:
    """(parameters, data) to check the task with: those of the run's source with this task, see `source_of`, over which what is
    given here goes."""
    from mmrl.config import merge

    settings = dict(params or {})
    if config is None:
        return settings, data
    source = source_of(config, spec, data)
    return merge(dict(source.params), settings), source.path if data is None else data


def check_task(
    spec: str,
    data: str | Path | None = None,
    *,
    model: str | None = None,
    params: Mapping[str, Any] | None = None,
    out: str | Path = "runs/check",
    limit: int = 200,
    timeout_s: float = 10.0,
    config: RunConfig | None = None,
) -> Conformance:
    """Check the task `spec` on the first `limit` samples of `data` (default: its own examples, made under `out`).

    With `config`, prompts are made as that run makes them (see `load_encoder`), and the task's parameters, its handling
    of broken rows and, without `data`, the data come from the run's source with this task; `params` go over them.
    A reward that takes longer than `timeout_s` on one text is a finding. Writes conformance.json and
    up to 12 pictures with boxes into `out`. Raises RegistryError or ConfigError for a task, model or parameter that
    does not exist; everything the task itself does wrong is a finding.
    """
    from mmrl.training.runlog import write_json

    folder = Path(out)
    settings, data = settings_of(config, spec, data, params)
    task = task_from_spec(spec, settings)
    if config is not None:
        task.on_error, task.orientation = config.data.on_error, config.data.image.orientation
    folder.mkdir(parents=True, exist_ok=True)
    path = data_name(data) if data is not None else task.example_data(str(folder / "examples"))
    if path is None:
        raise ConfigError(
            f"task '{spec}' has no examples of its own: give --data FILE (or write {type(task).__name__}."
            "example_data)"
        )
    with tempfile.TemporaryDirectory() as scratch:
        encoder, name = load_encoder(model, Path(scratch), config)
        result = Conformance(spec, path, name)
        samples = _load(task, path, limit, result)
        if samples:
            with Scorer([(spec, settings)], [task], workers=1, timeout_s=timeout_s) as scorer:
                bench = Bench(spec, settings, path, limit, task, samples, encoder, scorer)
                _encode(bench, result)
                result.findings += [_run(check, bench) for check in CHECKS]
            result.lowest_gold, result.rounds = dict(bench.lowest_gold), bench.rounds
            if thin := {name for ids in bench.thin.values() for name in ids}:
                result.notes[
                    f"truth too thin for the grid of {', '.join(bench.thin)}: rounded to it, the right answer scores "
                    f"under {HALF}"
                ] = len(thin)
            result.pictures = _draw(bench, folder)
            result.spellings = {} if bench.hangs else spellings_read(bench)
    write_json(folder / "conformance.json", {**asdict(result), "ok": result.ok})
    return result


def _load(task: Task, path: str, limit: int, result: Conformance) -> list[Sample]:
    """Samples of the first load; [] with a finding when there are none or loading fails."""
    check = Check(
        "data loads",
        "at least one usable sample",
        "do what it says; a row that it names is the first wrong one, --all lists all of them",
        lambda _: iter(()),
    )
    samples: list[Sample] = []
    try:
        samples = list(itertools.islice(task.load(path), limit))
        problems = [] if samples else [f"no samples in {path}"]
    except Exception as error:  # the task's own code: whatever it raises is the finding
        problems = [f"{type(error).__name__}: {error}"]
    result.samples, result.rejected, result.skipped = (
        len(samples),
        len(task.rejected),
        dict(task.skipped),
    )
    result.notes = dict(task.notes)
    result.rejected_shown = [str(row)[:300] for row in itertools.islice(task.rejected, _SHOWN)]
    result.findings.append(_finding(check, problems))
    return [] if problems else samples


def _encode(bench: Bench, result: Conformance) -> None:
    """Encode every prompt: token counts, picture sizes as the model sees them, and what went wrong."""
    for sample in bench.samples:
        try:
            prompt = bench.encoder(sample, bench.task)
            bench.tokens.append(prompt.length)
            bench.sizes.append((*prompt.images, *prompt.videos))
        except Exception as error:
            # the task's messages, a picture, or the processor's template: all are findings
            bench.encode_errors.append(
                f"sample {getattr(sample, 'id', '?')}: {type(error).__name__}: {error}"
            )
            bench.sizes.append(sizes_on_disk(sample))
    if bench.tokens:
        result.tokens = {
            "min": min(bench.tokens),
            "median": statistics.median(bench.tokens),
            "max": max(bench.tokens),
        }


def _run(check: Check, bench: Bench) -> Finding:
    problems: list[str] = []
    try:
        problems.extend(check.run(bench))
    except Exception as error:  # the task's own code: whatever it raises is the finding
        problems.append(f"raised {type(error).__name__}: {error}")
    return _finding(check, problems)


def _finding(check: Check, problems: list[str]) -> Finding:
    return Finding(
        check.name,
        not problems,
        check.expected,
        check.fix,
        tuple(p[:500] for p in problems[:_SHOWN]),
        len(problems),
    )


def _in_turns(bench: Bench) -> list[Sample]:
    """Usable samples, one of each task after the other, so that a mixed file shows them all."""
    by_task: dict[str, list[Sample]] = {}
    for sample, _ in bench.usable:
        by_task.setdefault(sample.task, []).append(sample)
    return [
        sample
        for turn in itertools.zip_longest(*by_task.values())
        for sample in turn
        if sample is not None
    ]


def _draw(bench: Bench, folder: Path) -> list[str]:
    """Pictures of gold and wrong answers in the frame the model emits; samples that cannot be drawn are left out."""
    frame = bench.encoder.template.frame
    paths: list[str] = []
    answers = {
        (label, id(job.sample)): (job.text, score, job.ctx.videos)
        for label, job, score in bench.scored
        if label in ("gold", "wrong") and job.ctx.frame is frame and job.ctx.progress == 1
    }
    for sample in _in_turns(bench):
        gold, wrong = answers.get(("gold", id(sample))), answers.get(("wrong", id(sample)))
        if len(paths) < _PICTURES and gold and wrong:
            target = folder / f"check_{len(paths):02d}.png"
            with contextlib.suppress(MediaError):  # already a finding of the encoding check
                draw_check(
                    sample,
                    gold[0],
                    wrong[0],
                    gold[1].detail,
                    wrong[1].detail,
                    target,
                    videos=gold[2],
                )
                paths.append(str(target))
    return paths
