"""Slow or untrusted pure-Python verifiers behind a hard deadline, from any thread and any process.

A verifier is a module-level function of JSON values, named "module:function". It runs in its own interpreter, which is
killed when it misses the deadline (not even a C loop that holds the GIL survives that) and started again. No SIGALRM,
and no multiprocessing: reward workers are daemonic processes, which may have no multiprocessing children.

    pool = VerifierPool("mmrl.rewards.math_expression:verify_texts", deadline_s=2.0)
    pool.call("1/2", "0.5")        # Verdict(value={...}, reason=None), or reason 'verifier_timeout', 'verifier_crash' ...

Protocol: one JSON object per line. To the process {"id", "args"}; back {"id", "value"} or {"id", "error"}, and once
{"ready": true} after the module is imported. Started as `python -m mmrl.rewards.verifier_pool module:function`.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmrl.errors import ConfigError, RewardError
from mmrl.operations.startup import loaded, loading
from mmrl.workers.process import ChildError
from mmrl.workers.program import Program

__all__ = ["PoolStats", "Verdict", "VerifierPool"]

MEMORY_BYTES = 4 << 30
"""Address space a verifier may use; beyond it gets a MemoryError, which is a recorded 'verifier_error'."""
MOST_BYTES = 64 << 20
"""Bytes of one answer, as JSON; a longer one is a recorded 'verifier_crash'."""
START_TIMEOUT_S = 60.0
MAX_FAILURES_IN_A_ROW = 20
"""Timeouts and crashes without one answer between them after which the pool asks its probe before it goes on."""
PROBE_TIMEOUT_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Between two probes that fail: the pause doubles from the first to the longest; calls within it raise at once."""
# the folder that holds mmrl; not resolved: mmrl/rewards may be a link
_ROOT = str(Path(__file__).absolute().parents[2])


class Verdict(NamedTuple):
    """What the verifier returned, or None with the reason: verifier_timeout, verifier_crash or 'verifier_error: ...'."""

    value: Any
    reason: str | None = None


class PoolStats(NamedTuple):
    """Counts since the pool was made: calls, timeouts, crashes, errors (exceptions of the verifier), restarts."""

    calls: int = 0
    timeouts: int = 0
    crashes: int = 0
    errors: int = 0
    restarts: int = 0


class _Process(Program):
    """One interpreter; used by one thread at a time."""

    def __init__(self, target: str) -> None:
        path = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH", "")])])
        super().__init__(
            [sys.executable, "-m", "mmrl.rewards.verifier_pool", target],
            f"verifier {target}",
            cwd=_ROOT,
            errors=False,
            environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )
        self.ready, self.number = False, 0

    def wait_ready(self, target: str) -> None:
        """Raises RewardError when the verifier cannot be imported or takes too long."""
        if self.ready:
            return
        self.begin(START_TIMEOUT_S)
        try:
            answer = self._answer()
        except ChildError as error:
            found = "no sign of life" if error.death.cause == "timeout" else "the process ended"
            answer = {"failed": found}
        if not answer.get("ready"):
            raise RewardError(
                f"expected the verifier {target} to start within {START_TIMEOUT_S:g} s, found: "
                f"{answer.get('failed')}; run `{sys.executable} -m mmrl.rewards.verifier_pool {target}` to see why"
            )
        self.ready = True

    def ask(self, args: tuple[Any, ...], limit_s: float) -> dict[str, Any]:
        """Raises ChildError."""
        self.number += 1
        self.begin(limit_s)
        self.write(json.dumps({"id": self.number, "args": args}).encode() + b"\n")
        answer = self._answer()
        if answer.get("id") != self.number:
            # out of step: never trust it again
            raise self.error("message", "answered another question")
        return answer

    def _answer(self) -> dict[str, Any]:
        line = self.read_line(MOST_BYTES)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self.error("message", f"answered with what is no JSON: {error}") from error
        return answer if isinstance(answer, dict) else {}


class VerifierPool:
    """`size` interpreters that answer `call`. Thread-safe, safe after fork, closed at exit, started when first needed.

    `deadline_s` is the time one call may take, from when an interpreter is free and ready. `probe` are arguments that a
    working verifier answers at once: after MAX_FAILURES_IN_A_ROW failures a fresh interpreter is asked, and only when it
    fails too (or, without a probe, does not start) calls raise, until a later probe is answered. Raises ConfigError for
    settings that cannot be.
    """

    def __init__(
        self,
        target: str,
        *,
        deadline_s: float = 2.0,
        size: int = 1,
        probe: Sequence[Any] | None = None,
    ) -> None:
        module, colon, function = target.partition(":")
        if not (module and colon and function):
            raise ConfigError(f"expected a verifier as 'module:function', found {target!r}")
        if not deadline_s > 0 or size < 1:
            raise ConfigError(
                f"expected deadline_s > 0 and size >= 1, found {deadline_s!r} and {size!r}"
            )
        self.target, self.deadline_s, self.size = target, float(deadline_s), size
        self.counts = dict.fromkeys(PoolStats._fields, 0)
        self.probe = None if probe is None else tuple(probe)
        self._failures, self._pause_s, self._paused_until = 0, FIRST_PAUSE_S, 0.0
        self._after_fork()
        _pools.add(self)

    def _after_fork(self) -> None:
        """Fresh locks and no processes; those of the parent stay the parent's."""
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(self.size)
        for process in getattr(self, "_idle", []):
            process.abandon()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()

    @property
    def stats(self) -> PoolStats:
        """Counts since the pool was made."""
        return PoolStats(**self.counts)

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def call(self, *args: Any) -> Verdict:
        """The verifier's answer to JSON-able `args`, or the reason why there is none. Blocks while all are busy.

        Raises RewardError when the verifier cannot be started, or failed MAX_FAILURES_IN_A_ROW times in a row and then
        failed its probe as well.
        """
        self._count("calls")
        with self._slots:
            if self._failures >= MAX_FAILURES_IN_A_ROW:
                self._probe()
            process = self._take()
            verdict: Verdict | None = None
            try:
                verdict = self._ask(process, args)
            finally:
                self._give_back(process, verdict)
        return verdict

    def _probe(self) -> None:
        """Start the count of failures again when a fresh interpreter works; raises RewardError when it does not."""
        works = False
        if time.monotonic() >= self._paused_until:
            process = _Process(self.target)
            with self._lock:
                self._busy.add(process)
                self.counts["restarts"] += 1
            try:
                process.wait_ready(self.target)
                if self.probe is not None:
                    process.ask(self.probe, max(self.deadline_s, PROBE_TIMEOUT_S))
                self._failures, self._pause_s, works = 0, FIRST_PAUSE_S, True
            except ChildError:
                self._pause()
            except RewardError:
                self._pause()
                raise
            finally:
                process.kill()
                with self._lock:
                    self._busy.discard(process)
        if not works:
            raise RewardError(
                f"the verifier {self.target} failed {self._failures} times in a row and fails a question that it "
                f"should answer ({self.stats}); is the machine overloaded or short of memory?"
            )

    def _pause(self) -> None:
        self._paused_until = time.monotonic() + self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)

    def _take(self) -> _Process:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.alive:
                    break
                process.kill()  # it ended while idle: no question is to blame
                self.counts["restarts"] += 1
            else:
                process = _Process(self.target)
            self._busy.add(process)
            return process

    def _ask(self, process: _Process, args: tuple[Any, ...]) -> Verdict:
        process.wait_ready(self.target)
        try:
            answer = process.ask(args, self.deadline_s)
        except ChildError as error:
            if error.death.cause == "timeout":
                self._count("timeouts")
                return Verdict(None, "verifier_timeout")
            self._count("crashes")
            return Verdict(None, "verifier_crash")
        if "error" in answer:
            self._count("errors")
            return Verdict(None, f"verifier_error: {answer['error']}"[:300])
        return Verdict(answer.get("value"))

    def _give_back(self, process: _Process, verdict: Verdict | None) -> None:
        """An answered process is used again; any other is killed, and replaced at once so that it is ready when needed."""
        answered = verdict is not None and verdict.reason not in (
            "verifier_timeout",
            "verifier_crash",
        )
        if not answered:
            process.kill()
        with self._lock:
            self._busy.discard(process)
            self._failures = 0 if answered else self._failures + 1
            if answered:
                self._idle.append(process)
            elif verdict is not None:
                # None: it could not be started, or this thread was interrupted
                self.counts["restarts"] += 1
                self._idle.append(_Process(self.target))

    def close(self) -> None:
        """End all processes; a later `call` starts new ones."""
        with self._lock:
            processes, self._idle = [*self._idle, *self._busy], []
        for process in processes:
            process.stop()  # a thread that waits for a busy one notices and gives it back
        for process in processes:
            if process not in self._busy:
                process.kill()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _close_all() -> None:
    for pool in list(_pools):
        pool.close()


def _reset_all() -> None:
    for pool in list(_pools):
        pool._after_fork()


_pools: weakref.WeakSet[VerifierPool] = weakref.WeakSet()
atexit.register(_close_all)
os.register_at_fork(after_in_child=_reset_all)


# in the verifier's process


def _limit_memory() -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _limit_time(seconds: int) -> None:
    """Let the kernel end this process after `seconds` more of computing: nobody may be left to kill it."""
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + seconds, hard))


def _serve(target: str) -> int:
    """Answer questions from stdin until it closes. What the verifier prints goes to stderr, not into the protocol."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    loading()
    try:
        module, _, function = target.partition(":")
        verify = getattr(importlib.import_module(module), function)
        warm_up = getattr(importlib.import_module(module), f"warm_up_{function}", None)
        if warm_up is not None:
            warm_up()
    except Exception as error:
        send({"failed": f"{type(error).__name__}: {error}"[:500]})
        return 1
    loaded()
    _limit_memory()
    send({"ready": True})
    for line in sys.stdin:
        question = json.loads(line)
        _limit_time(60)
        try:
            answer = {"id": question["id"], "value": verify(*question["args"])}
            json.dumps(answer)
        except (Exception, RecursionError, MemoryError) as error:
            # the verifier's own failure, reported as such
            answer = {"id": question["id"], "error": f"{type(error).__name__}: {error}"[:300]}
        send(answer)
    return 0


if __name__ == "__main__":
    raise SystemExit(_serve(sys.argv[1]))
