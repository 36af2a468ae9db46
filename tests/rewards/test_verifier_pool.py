"""The pool for real: hangs killed, crashes survived, threads, forks, daemonic processes, bounded failures, no SIGALRM."""

from __future__ import annotations

import ast
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import mmrl.rewards
from mmrl.errors import ConfigError, RewardError
from mmrl.rewards import verifier_pool
from mmrl.rewards.verifier_pool import VerifierPool

_VERIFIERS = """
import os, sys, time

def act(what, value=None):
    if what == "sleep":
        time.sleep(value)
    if what == "spin":
        return len(str(9 ** 9 ** 9))  # one C call that holds the GIL for minutes
    if what == "die":
        os._exit(7)
    if what == "raise":
        raise ArithmeticError("no such luck")
    if what == "recurse":
        return act(what, value)
    if what == "memory":
        return len(bytearray(64 << 30))
    if what == "print":
        print("noise on stdout " * 1000)
        sys.stdout.flush()
    if what == "set":
        return {1, 2}
    if what == "write":
        for pipe in map(int, os.listdir("/proc/self/fd")):
            if pipe < 3:
                continue
            try:
                os.write(pipe, value.encode("latin-1"))
            except OSError:
                pass
    if what == "big":
        return "x" * value
    return [os.getpid(), value]
"""

pytestmark = pytest.mark.slow  # processes hang, crash and start again for real


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "odd_verifiers.py").write_text(_VERIFIERS)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [before])])
    yield "odd_verifiers:act"
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def _gone(pid: int) -> bool:
    """True when no such process runs any more (a zombie of someone else would not count)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_one_process_answers_many_questions(target: str) -> None:
    with VerifierPool(target) as pool:
        answers = [pool.call("echo", {"text": "é\n\u2028", "n": i}).value for i in range(20)]
        assert len({pid for pid, _ in answers}) == 1 and answers[7][1] == {
            "text": "é\n\u2028",
            "n": 7,
        }
        assert answers[0][0] != os.getpid()
        assert pool.stats == (20, 0, 0, 0, 0)
    assert _gone(answers[0][0])


@pytest.mark.parametrize("hang", ["sleep", "spin"])
def test_a_hang_is_killed_at_its_deadline_and_the_next_question_is_answered(
    target: str, hang: str
) -> None:
    with VerifierPool(target, deadline_s=0.3) as pool:
        pid = pool.call("echo").value[0]
        start = time.monotonic()
        assert pool.call(hang, 60) == (None, "verifier_timeout")
        assert time.monotonic() - start < 20
        assert _gone(pid)
        again = pool.call("echo", 1)
        assert again.value[1] == 1 and again.value[0] != pid
        assert pool.stats == (3, 1, 0, 0, 1)


def test_a_crash_costs_one_answer(target: str) -> None:
    with VerifierPool(target) as pool:
        assert pool.call("die") == (None, "verifier_crash")
        assert pool.call("echo", 2).value[1] == 2
        assert pool.stats == (2, 0, 1, 0, 1)


def test_a_process_that_died_while_idle_costs_nothing(target: str) -> None:
    with VerifierPool(target) as pool:
        pid = pool.call("echo").value[0]
        os.kill(pid, 9)
        while not _gone(pid):
            time.sleep(0.01)
        assert pool.call("echo", 3).value[1] == 3
        assert (pool.stats.crashes, pool.stats.restarts) == (0, 1)


def test_exceptions_recursion_memory_and_odd_values_are_reported_without_a_restart(
    target: str,
) -> None:
    with VerifierPool(target, deadline_s=5) as pool:
        assert pool.call("raise").reason == "verifier_error: ArithmeticError: no such luck"
        assert str(pool.call("recurse").reason).startswith("verifier_error: RecursionError")
        assert str(pool.call("memory").reason).startswith("verifier_error: MemoryError")
        assert str(pool.call("set").reason).startswith("verifier_error: TypeError")
        assert pool.stats == (4, 0, 0, 4, 0)


def test_prints_and_large_texts_pass(target: str) -> None:
    with VerifierPool(target, deadline_s=5) as pool:
        assert pool.call("print", 4).value[1] == 4, (
            "what a verifier prints is not taken for an answer"
        )
        assert pool.call("echo", "y" * 1_000_000).value[1] == "y" * 1_000_000
        assert len(pool.call("big", 1_000_000).value) == 1_000_000


def test_an_answer_without_end_is_cut_off_and_the_next_question_is_answered(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything up to the deadline was taken into memory: a gigabyte in two seconds."""
    monkeypatch.setattr(verifier_pool, "MOST_BYTES", 2_000_000)
    with VerifierPool(target, deadline_s=20) as pool:
        first = pool.call("echo").value[0]
        assert pool.call("big", 1_900_000).reason is None
        assert pool.call("big", 8_000_000) == (None, "verifier_crash")
        assert _gone(first) and pool.call("echo", 7).value[1] == 7
        assert pool.stats == (4, 0, 1, 0, 1)


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000 + "\n", "\xff\n", "{\n", '{"id": 7, "value": 1}\n'],
    ids=["deep", "bytes", "half", "other"],
)
def test_what_is_no_answer_is_a_crash(target: str, line: str) -> None:
    """A verifier may write where its answers go: RecursionError of JSON that is too deep went to whoever asked."""
    with VerifierPool(target, deadline_s=20) as pool:
        assert pool.call("write", line) == (None, "verifier_crash")
        assert pool.call("echo", 8).value[1] == 8


def test_threads_share_the_processes(target: str) -> None:
    with VerifierPool(target, size=2) as pool, ThreadPoolExecutor(8) as threads:
        jobs = ["echo"] * 30 + ["die"] + ["echo"] * 30
        answers = list(
            threads.map(lambda job: pool.call(*job), [(what, i) for i, what in enumerate(jobs)])
        )
        assert [a.value[1] for i, a in enumerate(answers) if i != 30] == [
            i for i in range(61) if i != 30
        ]
        assert answers[30].reason == "verifier_crash"
        assert len({a.value[0] for a in answers if a.value}) <= 3


def test_after_many_failures_a_known_good_question_decides(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_pool, "MAX_FAILURES_IN_A_ROW", 3)
    with VerifierPool(target, probe=("echo", 1)) as pool:
        assert [pool.call("die").reason for _ in range(2)] == ["verifier_crash"] * 2
        assert pool.call("echo").reason is None, "an answer starts the count again"
        assert [pool.call("die").reason for _ in range(7)] == ["verifier_crash"] * 7, (
            "hostile texts alone never stop the pool"
        )
        assert pool.call("echo", 2).value[1] == 2
        assert pool.stats.calls == 11 and pool.stats.crashes == 9
    with VerifierPool(target) as pool:  # without a probe, a fresh start is enough
        assert [pool.call("die").reason for _ in range(4)] == ["verifier_crash"] * 4


def test_a_probe_that_fails_stops_the_pool_until_one_is_answered(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_pool, "MAX_FAILURES_IN_A_ROW", 2)
    with VerifierPool(target, probe=("die",)) as pool:
        assert [pool.call("die").reason for _ in range(2)] == ["verifier_crash"] * 2
        for _ in range(2):  # the second time within the pause: no process is started for it
            with pytest.raises(
                RewardError,
                match=r"failed 2 times in a row and fails a question that it should answer",
            ):
                pool.call("echo")
        assert pool.stats.restarts == 3
        pool.probe, pool._paused_until = ("echo",), 0.0
        assert pool.call("echo", 5).value[1] == 5, "the machine is well again"


def test_a_probe_that_hangs_is_killed(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_pool, "MAX_FAILURES_IN_A_ROW", 1)
    monkeypatch.setattr(verifier_pool, "PROBE_TIMEOUT_S", 0.3)
    with VerifierPool(target, deadline_s=0.3, probe=("spin",)) as pool:
        assert pool.call("die").reason == "verifier_crash"
        start = time.monotonic()
        with pytest.raises(RewardError, match="overloaded or short of memory"):
            pool.call("echo")
        assert time.monotonic() - start < 20 and not pool._busy


def test_a_verifier_that_cannot_start_says_why() -> None:
    with (
        VerifierPool("no_such_module_here:act") as pool,
        pytest.raises(RewardError, match="ModuleNotFoundError: No module"),
    ):
        pool.call("echo")
    with (
        VerifierPool("json:no_such_function") as pool,
        pytest.raises(RewardError, match="no_such_function"),
    ):
        pool.call("echo")
    for wrong in ("json", ":dumps", "json:"):
        with pytest.raises(ConfigError, match="module:function"):
            VerifierPool(wrong)
    with pytest.raises(ConfigError, match="deadline_s > 0"):
        VerifierPool("json:dumps", deadline_s=0)


def _in_process(target: str, results: multiprocessing.Queue[list[int]]) -> None:
    with VerifierPool(target) as pool:
        results.put([*pool.call("echo", 5).value, os.getpid()])


def test_a_daemonic_process_may_use_a_pool(target: str) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_in_process, args=(target, results), daemon=True)
    process.start()
    verifier, value, worker = results.get(timeout=60)
    process.join(30)
    assert value == 5 and len({verifier, worker, os.getpid()}) == 3
    assert _gone(verifier)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_leaves_the_parents_process_alone(target: str) -> None:
    with VerifierPool(target) as pool:
        mine = pool.call("echo").value[0]
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                theirs = pool.call("echo").value[0]
                pool.close()
                os.write(write, str(theirs).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        theirs = int(os.read(read, 100))
        os.close(read)
        os.close(write)
        assert theirs != mine
        assert pool.call("echo").value[0] == mine


def test_closing_ends_a_hanging_call_and_a_later_call_starts_again(target: str) -> None:
    pool = VerifierPool(target, deadline_s=30)
    pool.call("echo")
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(pool.call("sleep", 30).reason))
    thread.start()
    time.sleep(0.3)
    pool.close()
    thread.join(10)
    assert found == ["verifier_crash"]
    assert pool.call("echo", 6).value[1] == 6
    pool.close()


def test_no_reward_uses_sigalrm_or_evaluates_text() -> None:
    """Scorers run in threads: signals would fail there. Model text is data: eval, exec and pickle are never called."""
    for path in Path(next(iter(mmrl.rewards.__path__))).glob("*.py"):
        tree = ast.parse(path.read_text())
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
            n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)
        }
        imported = {
            alias.name
            for n in ast.walk(tree)
            if isinstance(n, (ast.Import, ast.ImportFrom))
            for alias in n.names
        }
        assert not names & {
            "SIGALRM",
            "alarm",
            "setitimer",
            "eval",
            "exec",
            "parse_expr",
            "sympify",
        }, path
        assert not imported & {"signal", "pickle", "parse_expr", "sympify"}, path
