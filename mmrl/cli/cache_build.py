"""`mmrl cache build`: put the media of a run into its tensor cache before it starts. May be stopped and started again."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from mmrl.config import RunConfig, effective_threads, load_config
from mmrl.errors import CacheError, ConfigError, MediaError, MMRLError
from mmrl.files import json_line, write_text
from mmrl.operations.console import Console, quiet_transformers

if TYPE_CHECKING:
    from mmrl.data.sources import LoadedSource
    from mmrl.types import Sample
    from mmrl.workers.prefetch import Media

__all__ = ["build_command"]

_WIDTH = 110
_SHOWN = 10
_FAILURES = "failures.jsonl"


def build_command(
    config: Path,
    overrides: list[str],
    workers: int | None,
    features: bool,
    strict: bool,
    quiet: bool,
) -> None:
    """Fill data.cache.dir for all samples of data.train and data.eval. Status 1 with `strict` when something failed."""
    settings = _settings(config, overrides, workers)
    from mmrl.cli.evaluation import print_skipped
    from mmrl.data.sources import load_sources

    data = settings.data
    sources = [
        source
        for configs, where in ((data.train, "data.train"), (data.eval, "data.eval"))
        for source in load_sources(
            configs, on_error=data.on_error, orientation=data.image.orientation, where=where
        )
    ]
    print_skipped(sources)
    if features:
        settings.data.cache.features = True
    builder = _Builder(settings, {"vision", "audio"} if features else _frozen_senses(settings))
    with _bar(quiet) as bar:
        builder.run(sources, bar)
    folder = Path(data.cache.dir or "")
    _write_failures(folder / _FAILURES, builder.failures)
    _report(builder, folder)
    if strict and builder.failures:
        raise typer.Exit(1)


def _settings(config: Path, overrides: list[str], workers: int | None) -> RunConfig:
    settings = load_config(
        config, overrides if workers is None else [*overrides, f"data.workers={workers}"]
    )
    if settings.data.cache.dir is None:
        raise ConfigError(
            "expected data.cache.dir, the folder to fill, found null; add data.cache.dir=FOLDER"
        )
    if not settings.data.train and not settings.data.eval:
        raise ConfigError(
            "expected data.train or data.eval with at least one source, found neither"
        )
    # what is there is counted by its header; training compares checksums as it reads
    settings.data.cache.verify = "never"
    quiet_transformers()
    return settings


def _frozen_senses(settings: RunConfig) -> set[str]:
    """Senses whose towers are not trained, as the run will find them; none where their features are not kept."""
    model = settings.model
    if not settings.data.cache.features or (model.lora is None and not model.freeze):
        return set()
    from mmrl.diagnostics.shapes import config_of, meta_model
    from mmrl.policy.families import family_of
    from mmrl.policy.loading import freeze_untrained

    shape = meta_model(config_of(str(model.path)))
    freeze_untrained(shape, model)
    family = family_of(shape.config)
    return {e.sense for e in family.parts.frozen_encoders(family.body(shape))}


def _bar(quiet: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=quiet or not sys.stderr.isatty(),
    )


class _Builder:
    """Pixels are prepared by workers, or here without any; features of the `senses` here, by the model's own towers."""

    def __init__(self, settings: RunConfig, senses: Collection[str]) -> None:
        from mmrl.policy.loading import build_visuals, load_policy, load_processor

        self.settings, self.senses, self.policy = settings, senses, None
        self.pixels: Counter[str] = Counter()
        self.features: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []
        self.evicted = 0
        if senses:
            import torch

            if (threads := effective_threads(settings)) is not None:
                torch.set_num_threads(threads)
            self.policy = load_policy(settings.model, settings.data, trainable=False)
            processor = self.policy.processor
        else:
            processor = load_processor(settings.model.path)
        held = settings.data.model_copy(update={"prompt_cache_gib": 0.0})  # nobody asks twice
        self.visuals = build_visuals(processor, held, open_entries=0)

    def run(self, sources: Sequence[LoadedSource], bar: Progress) -> None:
        """Prepare every picture and clip once; one that fails is noted for each sample that shows it."""
        from mmrl.workers.prefetch import prefetching

        samples = [sample for source in sources for sample in source.samples]
        media = dict.fromkeys(m for _, m in _media(samples))
        job = bar.add_task("media", total=len(media))
        before = self.visuals.store.flush(wait_s=5.0)["evicted"]
        failed: dict[Media, MMRLError] = {}
        with ExitStack() as stack:
            (ahead,) = stack.enter_context(prefetching(self.settings.data, [self.visuals]))
            prepare = self._prepare if ahead is None else ahead.pool.wait
            if ahead is not None:
                ahead.pool.expect(media)
            for one in media:
                error = self._one(one, prepare)
                if error is not None:
                    failed[one] = error
                bar.advance(job)
        self.evicted = self.visuals.store.flush(wait_s=5.0)["evicted"] - before
        for sample, one in _media(samples):
            if one in failed:
                error = failed[one]
                self.failures.append(
                    {
                        "source": sample.source,
                        "id": sample.id,
                        "kind": _kind(error),
                        "path": one.path,
                        "reason": str(error),
                    }
                )

    def _prepare(self, media: Media) -> str:
        from mmrl.workers.prefetch import prepare

        return prepare(self.visuals, media)

    def _one(self, media: Media, prepare: Callable[[Media], str]) -> MMRLError | None:
        from mmrl.policy.families.contract import sense_of

        try:
            outcome = prepare(media)
            if outcome.startswith("unsure"):
                outcome = self._prepare(media)
            if outcome == "uncached":
                raise CacheError(
                    f"{media.path}: expected room in the cache, found none; free space, or raise data.cache.limit_gib"
                )
        except (MediaError, ConfigError, CacheError) as error:
            self.pixels["failed"] += 1
            return error
        self.pixels[outcome] += 1
        if sense_of(media.kind) in self.senses:
            self._features(media)
        return None

    def _features(self, media: Media) -> None:
        policy, visuals = self.policy, self.visuals
        assert policy is not None
        tower = policy.tower(media.kind)
        assert tower is not None, "nothing is trained here"
        visual = visuals.refer(media.kind, media.path, media.overrides)
        before = visuals.stats.encoded
        visuals.features([visual], tower, policy.device)
        self.features["built" if visuals.stats.encoded > before else "present"] += 1


def _media(samples: Sequence[Sample]) -> Iterator[tuple[Sample, Media]]:
    from mmrl.workers.prefetch import media_of

    return ((sample, one) for sample in samples for one in media_of(sample))


def _kind(error: MMRLError) -> str:
    if isinstance(error, MediaError):
        return error.kind
    return "uncached" if isinstance(error, CacheError) else "wrong_row"


def _write_failures(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Replace the list of the last build; no file when nothing failed."""
    if not rows:
        path.unlink(missing_ok=True)
        return
    write_text(path, "".join(json_line(row) + "\n" for row in rows))


def _report(builder: _Builder, folder: Path) -> None:
    console = Console(width=_WIDTH, highlight=False)
    table = Table(title=escape(f"cache {folder}"), title_justify="left")
    for head in ("", "built", "present", "failed"):
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    table.add_row("pixels", *(f"{builder.pixels[k]:,}" for k in ("built", "present", "failed")))
    if builder.policy is not None:
        table.add_row("features", *(f"{builder.features[k]:,}" for k in ("built", "present")), "")
    console.print(table)
    for kind, count in sorted(Counter(row["kind"] for row in builder.failures).items()):
        console.print(f"{count:,} samples without media: {kind}")
    for row in builder.failures[:_SHOWN]:
        console.print(f"  {escape(row['source'])}/{escape(row['id'])}: {escape(row['reason'])}")
    if builder.failures:
        console.print(f"all of them: {escape(str(folder / _FAILURES))}")
    if builder.evicted:
        console.print(
            f"{builder.evicted:,} entries were removed again to keep data.cache.limit_gib: it is too small for this data"
        )
