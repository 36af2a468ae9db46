"""Eight processes share one tensor cache while processes are killed, bits flip, sources are edited and the disk is full.

    OMP_NUM_THREADS=1 python -m scripts.torture_cache --seconds 60 --record

Four rounds on the same 200 sources: undisturbed (each entry must be built exactly once), checksums on every read with
silent bit flips, a size bound with eviction and checksums on first read, and a full disk (a small tmpfs, or a limit on file
size where mounting is not allowed). In all but the first, processes are killed with SIGKILL at random moments, sources are
edited under their name, and the processor changes halfway. Every tensor that a process gets is compared with one computed
from the source's text. Exit status 1 when a tensor was wrong, a process stood still, or anything was left behind.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmrl.operations.versions import versions
from mmrl.video.store import Verify
from scripts._bench import machine, parse, results_folder
from scripts._torture_cache_worker import (
    PHASES,
    Board,
    Plan,
    answer,
    edit_source,
    run_worker,
    write_sources,
)

__all__ = ["Round", "leftovers", "rounds", "torture"]

# a process that finished nothing for so long stands still; a build takes milliseconds
_STILL_S = 60.0


@dataclass(frozen=True)
class Round:
    """How one round disturbs: flips and damage to files ("silent": the file's times are put back), kills, a bound, a full disk."""

    name: str
    share: float
    verify: Verify = "first"
    kills: float = 0.5  # chance per moment, about 30 moments a second
    flips: str = ""
    edits: bool = True
    limit_share: float | None = None
    full_disk: bool = False


def rounds() -> tuple[Round, ...]:
    """The rounds of a whole torture, with their shares of the time."""
    return (
        Round("undisturbed", 0.0, kills=0.0, edits=False),
        Round("kills, silent flips, checked always", 0.35, "always", flips="silent"),
        Round(
            "kills, flips, eviction, checked first",
            0.35,
            kills=0.15,
            flips="plain",
            limit_share=0.4,
        ),
        Round("kills, full disk", 0.3, full_disk=True),
    )


def _damage(path: Path, rng: random.Random, silent: bool) -> str:
    """Damage an entry nobody uses: flip a bit, cut it, empty it, or give it another entry's content. '' when it is in use."""
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        facts, kind = (
            os.fstat(fd),
            rng.choice(("flip", "flip", "flip", "flip", "flip", "flip", "cut", "empty", "swap")),
        )
        if facts.st_nlink == 0 or facts.st_size == 0:
            return ""
        if kind == "flip":
            at = (
                rng.randrange(min(facts.st_size, 1200))
                if rng.random() < 0.4
                else rng.randrange(facts.st_size)
            )
            os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1 << rng.randrange(8)]), at)
        elif kind == "swap":
            other = rng.choice(sorted(path.parent.parent.glob("??/*.safetensors")))
            content = other.read_bytes()
            os.ftruncate(fd, 0)
            os.pwrite(fd, content, 0)
        else:
            os.ftruncate(fd, 0 if kind == "empty" else rng.randrange(facts.st_size))
        if silent:
            os.utime(fd, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        return kind
    except (BlockingIOError, FileNotFoundError):
        return ""
    finally:
        os.close(fd)


@contextmanager
def _small_disk(folder: Path, mebibytes: int) -> Iterator[str]:
    """A disk of that size at `folder`; yields how it was made: 'tmpfs', or 'file size limit' for its users to set."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)]
    mounted = (
        shutil.which("mount") is not None
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )
    try:
        yield "tmpfs" if mounted else "file size limit"
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=False)


class _Crew:
    """The worker processes of one round, forked so that a killed one is replaced within milliseconds."""

    def __init__(self, plan: Plan, board: Board, seed: int, size: int) -> None:
        self.plan, self.board, self.seed, self.started = plan, board, seed, 0
        self.pids = [self._start(slot) for slot in range(size)]
        self.moved = [(-1, time.monotonic())] * size

    def _start(self, slot: int) -> int:
        self.started += 1
        pid = os.fork()
        if pid == 0:
            run_worker(self.plan, self.board, slot, self.seed * 1_000_003 + self.started)
        return pid

    def _writing(self) -> int | None:
        """A slot whose process is writing an entry right now, as its temporary file tells; None when none does for a while."""
        folder, deadline = self.plan.cache / "tensors-v1/tmp", time.monotonic() + 0.1
        while time.monotonic() < deadline:
            for name in os.listdir(folder) if folder.is_dir() else ():
                pid = int(name.partition("-")[0])
                if pid in self.pids:
                    return self.pids.index(pid)
            time.sleep(0.0005)
        return None

    def kill(self, rng: random.Random) -> str:
        """SIGKILL one process, half of the time one that is writing; put a new one in its place; what the old one was doing."""
        slot = self._writing() if rng.random() < 0.5 else None
        slot = rng.randrange(len(self.pids)) if slot is None else slot
        os.kill(self.pids[slot], signal.SIGKILL)
        os.waitpid(self.pids[slot], 0)
        doing = PHASES[self.board.phase[slot]]
        if any(
            p.name.startswith(f"{self.pids[slot]}-")
            for p in (self.plan.cache / "tensors-v1/tmp").glob("*")
        ):
            doing = "writing"
        self.board.phase[slot] = 0
        self.pids[slot] = self._start(slot)
        return doing

    def standing_still(self) -> list[int]:
        """Slots that finished nothing for too long."""
        for slot, (count, _) in enumerate(self.moved):
            now = self.board.value(slot, "checked") + self.board.value(slot, "edited under way")
            if now != count:
                self.moved[slot] = now, time.monotonic()
        return [
            slot
            for slot, (_, since) in enumerate(self.moved)
            if time.monotonic() - since > _STILL_S
        ]

    def stop(self) -> tuple[int, int]:
        """Ask all to end; (how many failed, how many had to be killed since they did not)."""
        self.board.stop.value = 1
        failed = stuck = 0
        deadline = time.monotonic() + _STILL_S
        for pid in self.pids:
            while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
                time.sleep(0.01)
            if ended[0] == 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                stuck += 1
            else:
                failed += os.waitstatus_to_exitcode(ended[1]) != 0
        return failed, stuck


def leftovers(cache: Path) -> list[str]:
    """What should not lie in a cache at rest: temporaries, lock files, entries somebody has locked, other files."""
    found = [
        f"left: {p.relative_to(cache)}"
        for name in ("tmp", "locks", "files/tmp")
        for p in (cache / "tensors-v1" / name).glob("*")
    ]
    for path in (cache / "tensors-v1").glob("??/*"):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(f"locked: {path.name}")
        if path.suffix != ".safetensors":
            found.append(f"other: {path.name}")
    return found


def _disturb(
    kind: Round, crew: _Crew, plan: Plan, rng: random.Random, seconds: float
) -> tuple[Counter[str], list[int]]:
    """Disturb the crew for so long; what was done, and slots that stood still."""
    done: Counter[str] = Counter()
    began, entries = time.monotonic(), list[Path]()
    while (spent := time.monotonic() - began) < seconds:
        time.sleep(rng.expovariate(1 / 0.03))
        crew.board.processor.value = int(spent > seconds / 2)
        if rng.random() < kind.kills:
            done["killed while " + crew.kill(rng)] += 1
        if kind.flips:
            entries = (
                entries
                if rng.random() < 0.8 and entries
                else sorted((plan.cache / "tensors-v1").glob("??/*"))
            )
            for path in rng.sample(entries, min(4, len(entries))):
                if what := _damage(path, rng, kind.flips == "silent"):
                    done[f"damage: {what}"] += 1
        if kind.edits:
            done["edited sources"] += sum(edit_source(plan, rng) for _ in range(rng.randrange(4)))
        if still := crew.standing_still():
            return done, still
    return done, []


def _final_check(plan: Plan) -> dict[str, Any]:
    """After the round, in this process, which has no limit on file size: every entry once more, what lies there, and whether
    a cache that was full caches again once there is room."""
    from mmrl.video.store import TensorStore

    logging.disable(logging.WARNING)
    store = TensorStore(plan.cache)
    damaged, again = len(store.verify(delete=True).damaged), len(store.verify().damaged)
    wrong = uncached = 0
    for number in range(plan.sources):
        for processor in (0, 1):
            got = answer(store, plan, number, processor)
            wrong += got.right is False
            uncached += not got.cached
    store.flush(wait_s=5.0)
    store.prune(max_bytes=0)
    recovered = answer(store, plan, 0, 0).cached
    logging.disable(logging.NOTSET)
    return {
        "damaged_found": damaged,
        "damaged_after_removal": again,
        "wrong": wrong,
        "uncached": uncached,
        "caches_again": recovered,
        "left_behind": leftovers(plan.cache),
    }


def _calm(
    plan: Plan, board: Board, seed: int, size: int, seconds: float
) -> tuple[list[int], float]:
    """Let the crew work undisturbed until every entry was asked for; slots that stood still, and seconds."""
    began, crew = time.monotonic(), _Crew(plan, board, seed, size)
    still: list[int] = []
    while board.total("builds") < plan.sources and not still and time.monotonic() - began < seconds:
        time.sleep(0.02)
        still = crew.standing_still()
    spent = time.monotonic() - began
    time.sleep(0.5)
    failed, stuck = crew.stop()
    assert not failed, f"{failed} processes failed"
    return still + [-1] * stuck, spent


def play(
    kind: Round, folder: Path, *, sources: int, processes: int, seconds: float, seed: int
) -> dict[str, Any]:
    """One round in `folder`; its record."""
    rng, began = random.Random(seed), time.monotonic()
    folder.mkdir()
    plan = Plan(
        cache=folder / "cache",
        sources_in=folder / "sources",
        sources=sources,
        verify=kind.verify,
        limit_bytes=None,
        errors=folder / "errors.txt",
        file_limit=None,
        sequence=not kind.kills,
    )
    per_entry = write_sources(plan)
    if kind.limit_share:
        plan = plan.replaced(limit_bytes=int(kind.limit_share * sources * per_entry))
    board = Board(processes)
    with (
        _small_disk(plan.cache, max(1, sources * per_entry // (3 << 20)))
        if kind.full_disk
        else nullcontext() as disk
    ):
        if disk == "file size limit":
            plan = plan.replaced(file_limit=per_entry // 2)
        if not kind.kills:
            still, spent = _calm(plan, board, seed, processes, 300.0)
            done: Counter[str] = Counter()
            failed = 0
        else:
            crew = _Crew(plan, board, seed, processes)
            done, still = _disturb(kind, crew, plan, rng, seconds)
            failed, stuck = crew.stop()
            still, spent = still + [-1] * stuck, time.monotonic() - began
        counts = board.totals()
        size = sum(p.stat().st_size for p in (plan.cache / "tensors-v1").glob("??/*"))
        end = _final_check(plan)
    errors = plan.errors.read_text(encoding="utf-8") if plan.errors.exists() else ""
    good = end["caches_again"] and not (
        end["wrong"]
        or counts["wrong"]
        or counts["lost in use"]
        or still
        or failed
        or errors
        or end["left_behind"]
        or end["damaged_after_removal"]
    )
    if kind.name == "undisturbed":
        good = good and counts["builds"] == sources
    # what was being written while others made room may come on top
    if plan.limit_bytes is not None:
        good = good and size <= plan.limit_bytes + processes * 2 * per_entry
    if kind.kills:
        good = good and sum(n for name, n in done.items() if name.startswith("killed")) > 0
    return {
        "round": asdict(kind),
        "seconds": round(spent, 1),
        "disk": disk or "as is",
        "done": dict(sorted(done.items())),
        "counts": counts,
        "bytes": size,
        "limit_bytes": plan.limit_bytes,
        "at_the_end": end,
        "stood_still": still,
        "failed_processes": failed,
        "errors": errors[-2000:],
        "passed": good,
    }


def torture(
    folder: Path,
    *,
    seconds: float,
    seed: int,
    sources: int = 200,
    processes: int = 8,
    only: tuple[Round, ...] | None = None,
) -> dict[str, Any]:
    """All rounds under `folder`; returns the record that --record writes."""
    played = []
    for number, kind in enumerate(only or rounds()):
        row = play(
            kind,
            folder / f"round{number}",
            sources=sources,
            processes=processes,
            seconds=seconds * kind.share,
            seed=seed + number,
        )
        shutil.rmtree(folder / f"round{number}", ignore_errors=True)
        played.append(row)
        _print(row)
    totals: Counter[str] = Counter()
    for row in played:
        totals.update(row["counts"])
    return {
        "what": "processes share one tensor cache under SIGKILL, bit flips, edited sources, a changed processor, a size "
        "bound and a full disk; every tensor is compared with one computed from its source",
        "seed": seed,
        "sources": sources,
        "processes": processes,
        "rounds": played,
        "totals": dict(totals),
        "passed": all(row["passed"] for row in played),
        "machine": machine(),
        "versions": versions(),
    }


def _print(row: dict[str, Any]) -> None:
    counts = row["counts"]
    print(
        f"{'passed' if row['passed'] else 'FAILED':7} {row['round']['name']} ({row['seconds']:.0f} s, disk {row['disk']})"
    )
    print(
        f"        {counts['checked']:,} tensors compared, {counts['wrong'] + row['at_the_end']['wrong']} wrong, "
        f"{len(row['stood_still'])} processes stood still, {len(row['at_the_end']['left_behind'])} things left behind"
    )
    print(
        "        "
        + ", ".join(f"{name} {n:,}" for name, n in {**row["done"], **counts}.items() if n),
        flush=True,
    )
    if row["errors"]:
        print(row["errors"])


def main() -> int:
    """Command line; exit status 1 when a round failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="time of the disturbed rounds together"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments and the damage")
    parser.add_argument("--sources", type=int, default=200, help="entries per processor")
    parser.add_argument("--processes", type=int, default=8, help="processes at once")
    parser.add_argument(
        "--record", type=Path, nargs="?", const=Path(), help="write the record (JSON)"
    )
    args = parse(parser, least=("sources", "processes"))
    with tempfile.TemporaryDirectory(prefix="mmrl-torture-") as scratch:
        record = torture(
            Path(scratch),
            seconds=args.seconds,
            seed=args.seed,
            sources=args.sources,
            processes=args.processes,
        )
    if args.record is not None:
        file = results_folder() / "torture_cache.json" if args.record == Path() else args.record
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(
        f"{'passed' if record['passed'] else 'FAILED'}: {record['totals']['checked']:,} tensors compared"
    )
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
