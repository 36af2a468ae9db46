"""Media prepared ahead of time by worker processes: decoded, processed, put into the tensor cache, before anybody waits for them.

    with prefetching(config.data, [encoder.visuals]) as [encoder.ahead]:      # data.workers: 4, data.cache.dir: runs/cache
        encoder.ahead.expect(samples)                                         # in the order in which they will be asked for
        encoder(samples[0], task)                                             # waits for its media, if they are not there yet

Only descriptions of media go to a worker and only the outcome comes back; tensors go through the cache on disk. The engine's own
process decodes nothing, so a clip that kills or hangs a decoder costs that clip (MediaError of kind crashed or timeout) and
nothing else. What is prepared is what would have been made without workers, bit for bit.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mmrl.errors import ConfigError, MediaError, MMRLError
from mmrl.types import Sample
from mmrl.video.media import image_overrides
from mmrl.workers import spawned
from mmrl.workers.process import END_S, ChildError, Losses, patience
from mmrl.workers.spawned import Worker, close_all

if TYPE_CHECKING:
    from mmrl.config import DataConfig

__all__ = ["Ahead", "Media", "Prefetcher", "media_of", "prefetching", "prepare", "warm_up"]

_LOG = logging.getLogger(__name__)
_MOST_BYTES = 64 << 20  # of what is said about one picture or clip, both ways


@dataclass(frozen=True)
class Media:
    """One picture, clip or sound of a sample, for the visual cache with the number `recipe`."""

    recipe: int
    kind: str  # image, video or audio
    path: str
    overrides: Mapping[str, Any] | None = field(default=None, compare=False)
    mark: str = ""  # the overrides as text, for comparison


def media_of(sample: Sample, recipe: int = 0) -> list[Media]:
    """Pictures, then clips, then sounds of `sample`, in the order in which the encoder asks for them."""
    return [
        *(_media(recipe, "image", path, image_overrides(sample)) for path in sample.images),
        *(_media(recipe, "video", path, sample.params.get("video")) for path in sample.videos),
        *(_media(recipe, "audio", path, None) for path in sample.audios),
    ]


def _media(recipe: int, kind: str, path: str, overrides: Mapping[str, Any] | None) -> Media:
    return Media(recipe, kind, path, overrides, repr(overrides) if overrides else "")


def prepare(visuals: Any, media: Media) -> str:
    """Put `media` into a visual cache, in this process. Raises MediaError, ConfigError.

    'present' when it was there, 'built' when it was not, 'uncached' when there is no room for it on the disk.
    """
    built, uncached = visuals.stats.built, visuals.store.counts["uncached"]
    visuals.refer(media.kind, media.path, media.overrides)
    return (
        "uncached"
        if visuals.store.counts["uncached"] > uncached
        else "built"
        if visuals.stats.built > built
        else "present"
    )


def _portable(visuals: Any) -> bytes:
    """A visual cache of the same keys and contents as pickled bytes: processors, settings and store, nothing held in memory."""
    whole = visuals.processor
    parts = SimpleNamespace(
        image_processor=whole.image_processor,
        video_processor=getattr(whole, "video_processor", None),
    )
    # a map held by a worker would keep its entry from eviction
    bare = type(visuals)(
        parts,
        image_options=visuals.image_options,
        settings=visuals.settings,
        reader=visuals.reader,
        no_clips=visuals.no_clips,
        clips=visuals.own_clips,
        ears=visuals.ears,
        no_audio=visuals.no_audio,
        max_seconds=visuals.max_seconds,
        store=visuals.store,
        memory_bytes=0,
        keep_features=False,
        open_entries=0,
    )
    return pickle.dumps(bare)


def warm_up() -> None:
    """Start the fork server that media workers come from, without waiting for it: it imports for seconds, best while a model is
    loaded."""
    spawned.warm_up(["mmrl.workers.media_preload"])


def _serve(connection: Connection, progress: Any, recipes: Sequence[bytes]) -> None:
    """Prepare media until None comes; answers what `prepare` says, 'unsure', or the error."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    try:
        import torch

        torch.set_num_threads(1)
        caches = [pickle.loads(recipe) for recipe in recipes]  # made by the process that started us
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}")
        raise
    connection.send(None)
    while (media := connection.recv()) is not None:
        connection.send(_outcome(caches[media.recipe], media))
    for visuals in caches:
        visuals.store.flush(wait_s=1.0)


def _outcome(visuals: Any, media: Media) -> str | MediaError:
    try:
        return prepare(visuals, media)
    except MediaError as error:
        return error
    except Exception as error:  # not the clip's fault: whoever asks for it meets the same error, with its traceback
        return f"unsure: {type(error).__name__}: {error}"


class _Preparer(Worker):
    """A worker with at most one clip."""

    method = "forkserver"
    media: Media | None = None

    def start(self) -> None:
        super().start()
        self.media = None

    def take(self, media: Media, limit_s: float) -> None:
        self.media = media
        self.give(media, limit_s)


class Prefetcher:
    """A pool of `workers` processes from a fork server, one thread each, that prepare media for visual caches with a store.

    `timeout_s` bounds one picture or clip. At most `ahead` of the expected media are prepared before they are asked for, so
    that a bounded cache does not evict them again. After `restarts` deaths or timeouts in a row the pool gives up: MMRLError
    to whoever waits. A context manager; `close` leaves no worker behind (the fork server ends with the program). Raises
    ConfigError for a cache without a store.
    """

    def __init__(
        self,
        visuals: Sequence[Any],
        workers: int,
        *,
        timeout_s: float = 300.0,
        ahead: int = 256,
        restarts: int = 10,
    ) -> None:
        if workers < 1 or any(v.store is None for v in visuals):
            raise ConfigError(
                f"expected at least one worker and a cache folder for what they prepare, found {workers} worker(s) "
                "and data.cache.dir null; set data.cache.dir, or data.workers to 0"
            )
        self.timeout_s, self.ahead = timeout_s, ahead
        self._changed = threading.Condition()
        self._urgent: deque[Media] = deque()
        self._plan: deque[Media] = deque()
        self._planned: set[Media] = set()
        self._unasked: set[Media] = set()  # begun for the plan, and not asked for yet
        self._done: dict[Media, str] = {}
        self._failed: dict[Media, MediaError] = {}
        self._fatal: BaseException | None = None
        self._losses = Losses(restarts)
        self._closing = self._rung = self._warned = False
        self._bell, self._ring = Pipe(duplex=False)
        recipes = [_portable(v) for v in visuals]
        warm_up()
        self._workers = [
            _Preparer(_serve, (recipes,), "mmrl-media", most=_MOST_BYTES) for _ in range(workers)
        ]
        self._thread = threading.Thread(target=self._run, daemon=True, name="mmrl-prefetch")
        self._thread.start()

    def expect(self, media: Iterable[Media]) -> None:
        """These will be asked for, in this order, after those already expected."""
        with self._changed:
            for one in media:
                if one not in self._planned and one not in self._done:
                    self._planned.add(one)
                    self._plan.append(one)
            self._wake()

    def forget(self) -> None:
        """Nothing is expected any more; what is being prepared is finished."""
        with self._changed:
            self._plan.clear()
            self._planned.clear()
            self._unasked.clear()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    def wait(self, media: Media) -> str:
        """Return once `media` lies in the cache: 'built', 'present' or 'uncached' as `prepare` said, or 'unsure: WHY' when this
        process has to find out what is wrong. Raises its MediaError, or MMRLError."""
        with self._changed:
            self._unasked.discard(media)
            if media not in self._done and media not in self._failed:
                self._urgent.append(media)
            self._wake()
            while media not in self._done and media not in self._failed:
                if self._fatal is not None:
                    raise MMRLError(f"media workers: {self._fatal}") from self._fatal
                if self._closing:
                    raise MMRLError("media workers: closed while media were waited for")
                self._changed.wait(1.0)
            if media in self._done:
                return self._done[media]
            error = self._failed[media]
            # a file may be fixed; one that kills is not tried again
            if error.kind not in ("crashed", "timeout"):
                del self._failed[media]
            raise error

    def close(self) -> None:
        """End all processes; those at work are killed, which the cache survives."""
        with self._changed:
            self._closing = True
            self._wake()
            self._changed.notify_all()
        self._thread.join()
        close_all(self._workers, [w for w in self._workers if w.ready and w.media is None])
        self._workers = []

    def _wake(self) -> None:
        """Let the feeding thread look again; asked with the lock held. At most one byte is on its way: this never blocks."""
        if not self._rung:
            self._rung = True
            self._ring.send_bytes(b"!")

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # in the thread that feeds the workers

    def _run(self) -> None:
        try:
            while not self._closing:
                self._feed()
                sources = [self._bell, *(w.connection for w in self._workers)]
                ready = wait(sources, patience(w.deadline for w in self._workers))
                if self._bell in ready:
                    with self._changed:
                        self._bell.recv_bytes()
                        self._rung = False
                for worker in self._workers:
                    if worker.connection in ready:
                        self._receive(worker)
                    elif worker.late and not worker.connection.poll():
                        self._lost(worker, "timeout", f"no result within {worker.limit_s:g} s")
        except BaseException as error:
            with self._changed:
                self._fatal = error
                self._changed.notify_all()

    def _next(self) -> Media | None:
        """What to prepare next: what is waited for, else the plan's next while there is room ahead."""
        busy = {w.media for w in self._workers}
        while self._urgent:
            media = self._urgent.popleft()
            if media not in busy and media not in self._done and media not in self._failed:
                return media
        while self._plan and len(self._unasked) < self.ahead:
            media = self._plan.popleft()
            self._planned.discard(media)
            if media not in busy and media not in self._done and media not in self._failed:
                self._unasked.add(media)
                return media
        return None

    def _feed(self) -> None:
        with self._changed:
            for worker in self._workers:
                if not worker.ready or worker.media is not None:
                    continue
                if not worker.alive:
                    # of one that has ended reading will tell: no clip's fault; of one that is silent the fork server has ended, and
                    # nobody sees any more whether it lives
                    if not worker.connection.poll():
                        worker.restart()
                else:
                    media = self._next()
                    if media is None:
                        return
                    worker.take(media, self.timeout_s)

    def _receive(self, worker: _Preparer) -> None:
        try:
            if not worker.ready:
                worker.await_ready(0.0)
                return
            answer = worker.receive()
        except ChildError as error:
            if error.death.cause == "refused":
                raise MMRLError(
                    f"one did not start ({error.death.said}); set data.workers to 0 to see where"
                ) from error
            why = (
                error.death.said
                if error.death.cause == "message"
                else f"died (exit code {worker.death(END_S).code})"
            )
            self._lost(worker, "crashed", f"the process that read it {why}")
            return
        worker.clear_deadline()
        media, worker.media = worker.media, None
        assert media is not None
        self._losses.answered()
        self._settle(media, answer)

    def _settle(self, media: Media, answer: str | MediaError) -> None:
        with self._changed:
            if isinstance(answer, str) and answer.startswith("unsure") and not self._warned:
                self._warned = True
                _LOG.warning(
                    "a media worker could not prepare %s (%s); media like it are prepared here (shown once)",
                    media.path,
                    answer,
                )
            if isinstance(answer, MediaError):
                self._failed[media] = answer
            else:
                self._done[media] = answer
            self._changed.notify_all()

    def _lost(self, worker: _Preparer, kind: str, why: str) -> None:
        """A worker died or hangs: its clip has failed, and another process takes its place."""
        media = worker.media
        too_many = self._losses.lost()
        if media is not None:
            self._settle(
                media,
                MediaError(
                    f"{media.path}: expected media that can be read, found that a worker {kind} on it: {why}; remove the row, or "
                    "encode the file again"
                    + (" (or raise data.media_timeout_s)" if kind == "timeout" else ""),
                    kind=kind,
                    path=media.path,
                ),
            )
        if too_many:
            raise MMRLError(
                f"{self._losses.count} crashed or hung in a row, the last one: {why}; set data.workers to 0 to see "
                "where"
            )
        worker.restart()


@dataclass(frozen=True)
class Ahead:
    """A pool as one encoder sees it: `recipe` is the number of its visual cache there."""

    pool: Prefetcher
    recipe: int = 0

    def media(self, samples: Iterable[Sample]) -> Iterator[Media]:
        """All media of `samples`."""
        return (media for sample in samples for media in media_of(sample, self.recipe))

    def expect(self, samples: Iterable[Sample]) -> None:
        """These samples will be encoded, in this order, after those already expected."""
        if not self.pool.closed:
            self.pool.expect(self.media(samples))

    def forget(self) -> None:
        """See Prefetcher.forget."""
        self.pool.forget()

    def wait(self, kind: str, path: str, overrides: Mapping[str, Any] | None = None) -> None:
        """Return once that picture or clip lies in the cache, or at once when the pool was closed. Raises MediaError, MMRLError."""
        if not self.pool.closed:
            self.pool.wait(_media(self.recipe, kind, path, overrides))


@contextmanager
def prefetching(data: DataConfig, visuals: Sequence[Any]) -> Iterator[list[Ahead | None]]:
    """`data.workers` processes that prepare media for these visual caches inside a with statement: what goes into the `ahead` of
    each one's encoder; None for each when data.workers is 0."""
    if not data.workers:
        yield [None] * len(visuals)
        return
    with Prefetcher(visuals, data.workers, timeout_s=data.media_timeout_s) as pool:
        yield [Ahead(pool, number) for number in range(len(visuals))]
