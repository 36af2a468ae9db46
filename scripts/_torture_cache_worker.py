"""One process of the cache torture: asks for entries in random order, compares every tensor, and tells what it is doing.

Everything it counts lies in memory shared with the parent, one row per process, so that a SIGKILL loses nothing and no lock
can be left held.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import multiprocessing.sharedctypes
import os
import random
import resource
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.errors import CacheError

if TYPE_CHECKING:
    import torch

    from mmrl.video.store import TensorStore, Verify

__all__ = [
    "Answer",
    "Board",
    "PHASES",
    "Plan",
    "answer",
    "edit_source",
    "run_worker",
    "source_path",
    "write_sources",
]

PHASES = ("starting", "asking", "building", "using")
_COUNTS = (
    "checked",
    "wrong",
    "lost in use",
    "edited under way",
    "hits",
    "misses",
    "builds",
    "rebuilt",
    "evicted",
    "waited",
    "uncached",
    "damaged",
)
_SOURCE_BYTES = 2048


@dataclass(frozen=True)
class Plan:
    """What a process needs to know. `sequence`: ask for every entry in order of a shuffle rather than at random."""

    cache: Path
    sources_in: Path
    sources: int
    verify: Verify
    limit_bytes: int | None
    errors: Path
    file_limit: int | None
    sequence: bool

    def replaced(self, **changes: Any) -> Plan:
        """A copy with other values."""
        return dataclasses.replace(self, **changes)


class Board:
    """Shared memory without locks: one row of counts and one phase per process, and what the parent tells all of them."""

    def __init__(self, size: int) -> None:
        self._rows = multiprocessing.sharedctypes.RawArray("q", size * len(_COUNTS))
        self.phase = multiprocessing.sharedctypes.RawArray("b", size)
        self.stop = multiprocessing.sharedctypes.RawValue("b", 0)
        self.processor = multiprocessing.sharedctypes.RawValue("b", 0)
        self._size = size

    def value(self, slot: int, name: str) -> int:
        """One count of one process."""
        return int(self._rows[slot * len(_COUNTS) + _COUNTS.index(name)])

    def set(self, slot: int, name: str, value: int) -> None:
        """Set one count; only the process of that slot does."""
        self._rows[slot * len(_COUNTS) + _COUNTS.index(name)] = value

    def total(self, name: str) -> int:
        """A count summed over processes."""
        return sum(self.value(slot, name) for slot in range(self._size))

    def totals(self) -> dict[str, int]:
        """All counts summed over processes."""
        return {name: self.total(name) for name in _COUNTS}


def source_path(plan: Plan, number: int) -> Path:
    """The file of one source."""
    return plan.sources_in / f"{number:04d}.mp4"


def _content(number: int, version: int) -> bytes:
    return f"source {number} version {version} ".encode().ljust(_SOURCE_BYTES, b"=")


def _digest(content: bytes) -> str:
    """The store's content digest, computed here independently."""
    return hashlib.blake2b(content, digest_size=20, person=b"mmrl-file-1").hexdigest()


def _tensors(content: bytes, processor: int) -> dict[str, torch.Tensor]:
    """What a processor makes of a source: a pure function of both."""
    import torch

    seed = hashlib.blake2b(content + bytes([processor]), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
    frames = 2 + seed[0] % 5
    return {
        "pixels": torch.randint(
            0, 256, (frames, 3, 48, 64), dtype=torch.uint8, generator=generator
        ),
        "features": torch.randn(frames, 12, 32, generator=generator).to(torch.bfloat16),
    }


def write_sources(plan: Plan) -> int:
    """Make the sources; returns the mean size of an entry in bytes."""
    plan.sources_in.mkdir(parents=True)
    for number in range(plan.sources):
        source_path(plan, number).write_bytes(_content(number, 0))
    sizes = [
        sum(t.nbytes for t in _tensors(_content(n, 0), 0).values())
        for n in range(min(20, plan.sources))
    ]
    return sum(sizes) // len(sizes)


def edit_source(plan: Plan, rng: random.Random) -> int:
    """Give one source its next content under the same name, size and time of change: in place, or by another file. Returns 1."""
    number = rng.randrange(plan.sources)
    path = source_path(plan, number)
    facts, version = path.stat(), int(path.read_bytes().split()[3])
    content = _content(number, version + 1)
    if rng.random() < 0.5:
        fd = os.open(path, os.O_WRONLY)
        os.pwrite(fd, content, 0)
        os.close(fd)
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    else:
        other = path.with_suffix(".new")
        other.write_bytes(content)
        os.utime(other, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        os.replace(other, path)
    return 1


@dataclass(frozen=True)
class Answer:
    """One request: whether the tensors were right (None: the source was edited under way), cached, still there in use."""

    right: bool | None
    cached: bool = True
    kept: bool = True


def answer(
    store: TensorStore,
    plan: Plan,
    number: int,
    processor: int,
    phase: Any = None,
    use_s: float = 0.0,
) -> Answer:
    """Ask for one entry as training does, and compare it with what its source stands for. `phase` is told what happens."""
    from mmrl.video.store import content_digest, make_key

    tell = phase or (lambda _: None)
    path = source_path(plan, number)
    tell(1)
    digest = content_digest(path, store)
    key = make_key(content=digest, processor=processor, fps=2.0)

    def build() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tell(2)
        time.sleep(use_s)
        tensors = _tensors(path.read_bytes(), processor)
        return tensors, {"kind": "pixels", "processor": processor}

    try:
        entry = store.get_or_build(key, build, sources={str(path): digest})
    except CacheError as error:
        if "unchanged while it was read" in str(error):
            return Answer(None)
        raise
    tell(3)
    now = int(path.read_bytes().split()[3])
    of = [v for v in range(max(0, now - 50), now + 1) if _digest(_content(number, v)) == digest]
    right = (
        len(of) == 1
        and entry.key == key
        and _same(entry.tensors, _tensors(_content(number, of[0]), processor))
    )
    time.sleep(use_s)
    kept = not entry.cached or (plan.cache / "tensors-v1" / key[:2] / f"{key}.safetensors").exists()
    with entry:
        return Answer(right, entry.cached, kept)


def _same(got: Any, want: dict[str, torch.Tensor]) -> bool:
    import torch

    return set(got) == set(want) and all(
        got[k].dtype == want[k].dtype
        and got[k].shape == want[k].shape
        and torch.equal(got[k], want[k])
        for k in want
    )


@contextmanager
def _errors_to(path: Path) -> Iterator[None]:
    """Write an exception's traceback to `path` and end the process with status 1; else with status 0."""
    status = 0
    try:
        yield
    except BaseException:
        status = 1
        with path.open("a", encoding="utf-8") as file:
            file.write(traceback.format_exc() + "\n")
    finally:
        os._exit(status)


def run_worker(plan: Plan, board: Board, slot: int, seed: int) -> None:
    """Work until told to stop; never returns (the process was forked)."""
    with _errors_to(plan.errors):
        import torch

        from mmrl.video.store import TensorStore

        torch.set_num_threads(1)
        logging.disable(logging.WARNING)
        if plan.file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (plan.file_limit, plan.file_limit))
        rng = random.Random(seed)
        store = TensorStore(
            plan.cache, limit_bytes=plan.limit_bytes, verify=plan.verify, wait_s=600.0
        )
        begin = {name: board.value(slot, name) for name in _COUNTS}
        order: list[int] = []

        def phase(number: int) -> None:
            board.phase[slot] = number

        while not board.stop.value:
            order = order or rng.sample(range(plan.sources), plan.sources)
            number = order.pop() if plan.sequence else rng.randrange(plan.sources)
            got = answer(store, plan, number, board.processor.value, phase, rng.random() * 0.004)
            counts = {
                "checked": got.right is not None,
                "wrong": got.right is False,
                "lost in use": not got.kept,
                "edited under way": got.right is None,
            }
            for name, more in counts.items():
                board.set(slot, name, board.value(slot, name) + more)
            for name, n in store.counts.items():
                board.set(slot, name, begin[name] + n)
