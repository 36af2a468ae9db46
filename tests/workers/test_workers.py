"""The supervisor of child processes with real ones: deadlines, ends and how they are told, messages that are too long or none,
what a child started, and the end of the interpreter that started it."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmrl.workers import process
from mmrl.workers.process import MEMORY_EXIT, ChildError, Death, Losses, patience
from mmrl.workers.program import Program
from mmrl.workers.spawned import Worker

REPO = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow  # every test starts interpreters


def python(code: str, *arguments: str, **options: Any) -> Program:
    """An interpreter that runs `code`, with 60 s for what it is asked first."""
    program = Program(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], "the program", **options
    )
    program.begin(60.0)
    return program


def gone(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process has ended within so many seconds (a zombie that its new parent has not waited for has)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


# time and losses


def test_one_waits_until_the_first_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not longer; at once where it has passed; for ever where there is none."""
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: 11.0))
    assert patience([15.0, 19.0, 17.0]) == 4.0 and patience([15.0, 19.0], 3.0) == 3.0
    assert patience([15.0, 10.0]) == 0.0 and patience([11.0]) == 0.0
    assert (
        patience([]) is None and patience([math.inf]) is None and patience([math.inf], 2.0) == 2.0
    )


def test_losses_in_a_row_and_altogether() -> None:
    losses = Losses(2)
    assert [losses.lost() for _ in range(3)] == [False, False, True]
    losses.answered()
    assert [losses.lost(), losses.lost(), losses.lost(), losses.count] == [False, False, True, 3]
    assert Losses(0).lost()


# how a program ends


@pytest.mark.parametrize(
    ("code", "cause", "status", "how"),
    [
        ("raise SystemExit(3)", "exit", 3, "exited with status 3"),
        ("pass", "exit", 0, "exited with status 0"),
        ("import os; os.kill(os.getpid(), 11)", "signal", -11, "was killed by SIGSEGV"),
        ("import os; os.kill(os.getpid(), 40)", "signal", -40, "was killed by signal 40"),
        (
            f"raise SystemExit({MEMORY_EXIT})",
            "memory",
            MEMORY_EXIT,
            f"exited with status {MEMORY_EXIT}",
        ),
    ],
)
def test_how_it_ended_is_told(code: str, cause: str, status: int, how: str) -> None:
    program = python(f"import sys; print('last words', file=sys.stderr, flush=True); {code}")
    with pytest.raises(ChildError, match=how) as raised:
        program.read(1)
    death = raised.value.death
    assert (death.cause, death.code, death.how, death.tail, death.said) == (
        cause,
        status,
        how,
        "last words",
        "closed its stdout",
    )
    assert death.signal == ("SIGSEGV" if status == -11 else "signal 40" if status == -40 else "")
    program.kill()
    program.kill()
    assert program.closed and program.tail() == "" and program.stderr_size == 0


def test_one_that_closes_its_pipe_and_stays_is_told_apart() -> None:
    program = python("import os, time; os.write(1, b'half'); os.close(1); time.sleep(600)")
    program.begin(2.0)
    began = time.monotonic()
    with pytest.raises(ChildError, match="closed its pipe") as raised:
        program.read(5)
    assert (
        raised.value.death == Death("pipe", None, "closed its stdout")
        and bytes(program.held) == b"half"
    )
    assert time.monotonic() - began < 4.0, "its status is awaited within the deadline"
    program.kill()
    assert gone(program.pid)


def test_the_deadline_is_that_of_the_question_and_its_answer() -> None:
    program = python(
        "import sys, time\nfor line in sys.stdin: time.sleep(float(line)); print('done', flush=True)"
    )
    program.write(b"0\n")
    assert program.read_line(100) == b"done\n"
    program.begin(0.5)
    program.write(b"600\n")
    began = time.monotonic()
    with pytest.raises(ChildError, match=r"gave no answer within 0\.5 s") as raised:
        program.read_line(100)
    assert (
        raised.value.death.cause == "timeout" and raised.value.death.code is None and program.late
    )
    assert 0.3 < time.monotonic() - began < 5.0
    program.clear_deadline()
    assert not program.late and program.deadline == math.inf
    program.kill()


def test_a_program_that_does_not_read_is_late_too() -> None:
    program = python("import time; time.sleep(600)")
    program.begin(0.5)
    with pytest.raises(ChildError) as raised:
        program.write(bytes(1 << 20))
    assert raised.value.death.cause == "timeout"
    program.stop()
    with pytest.raises(ChildError) as raised:
        program.begin(60.0)
        program.write(bytes(1 << 20))
    assert (raised.value.death.cause, raised.value.death.code) == ("signal", -signal.SIGKILL)
    program.kill()


def test_messages_are_cut_off_where_they_are_too_long() -> None:
    program = python("import os\nwhile True: os.write(1, b'x' * 100000)")
    with pytest.raises(ChildError, match="sent a line of more than 200,000 bytes") as raised:
        program.read_line(200_000)
    assert raised.value.death.cause == "message" and len(program.held) < 2 << 20
    with pytest.raises(ChildError, match="wrote more than 3,000,000 bytes"):
        program.read_all(3_000_000)
    program.kill()
    program = python("print('a' * 3_000_000); print('b' * 10, end='')")
    assert program.read_line(3_000_000) == b"a" * 3_000_000 + b"\n"
    assert program.read(4) == b"bbbb" and program.read_all(100) == b"b" * 6
    program.close()


def test_one_that_is_gone_is_noticed_though_what_it_started_holds_its_pipe() -> None:
    program = python(
        """
        import subprocess, sys
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
        raise SystemExit(5)
    """,
        group=True,
    )
    child = int(program.read_line(100))
    with pytest.raises(ChildError, match="exited with status 5") as raised:
        program.read(1)
    assert raised.value.death.said == "" and not gone(child, 1.0)
    program.kill()
    assert gone(child), "its group ends with it"


def test_stderr_is_kept_within_bounds() -> None:
    program = python("""
        import os
        for _ in range(60):
            os.write(2, b"w" * 99999 + bytes([10]))
        print(flush=True)
        input()
        os.write(2, b"end")
    """)
    program.read_line(10)
    assert (
        program.stderr_size == 6_000_000
        and len(program.tail()) == 2999
        and len(program.tail(10)) == 9
    )
    program.trim()
    assert program.stderr_size == 0
    program.write(b"\n")
    program.wait(60.0)
    assert program.tail() == "end"
    program.trim()
    assert program.tail() == "end", "a short one stays"
    program.kill()


def test_a_program_that_nobody_holds_is_ended() -> None:
    program = python("import time; time.sleep(600)")
    pid = program.pid
    del program
    gc.collect()
    assert gone(pid)


def test_a_program_that_cannot_be_started_leaves_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        Program(["/nowhere/python"], "none")
    assert len(os.listdir("/proc/self/fd")) == before


EXIT = """
    import os, sys, time
    from mmrl.workers.program import Program
    from mmrl.workers.spawned import Worker
    from tests.workers.test_workers import hang
    program = Program([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"], "p")
    worker = Worker(hang, (), "w")
    worker.await_ready(60.0)
    worker.give("job", 600.0)
    print(program.pid, worker.pid, flush=True)
    if sys.argv[1] == "fork" and os.fork() == 0:
        sys.exit(0)  # a fork that ends leaves them to the process that started them
    if sys.argv[1] == "fork":
        os.wait()
        print(program.alive, worker.alive, flush=True)
    if sys.argv[1] == "raise":
        raise RuntimeError("no more")
"""


def hang(connection: Any, progress: Any) -> None:
    """A target that never answers."""
    connection.send(None)
    connection.recv()
    time.sleep(600)


@pytest.mark.parametrize("how", ["end", "raise", "fork"])
def test_the_end_of_the_interpreter_is_theirs(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EXIT), how],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
    )
    first, *more = done.stdout.splitlines()
    assert all(gone(int(pid)) for pid in first.split()) and more == (
        ["True True"] if how == "fork" else []
    ), done.stderr


# a spawned Python


class Odd:
    """Cannot be read."""

    def __reduce__(self) -> Any:
        return len, (3,)


def obey(connection: Any, progress: Any, fault: str) -> None:
    """A target that does what it is told."""
    if fault == "late":
        time.sleep(600)
    connection.send(fault or None)
    while (what := connection.recv()) is not None:
        if what == "die":
            os._exit(7)
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "close":
            connection.close()
            time.sleep(600)
        if what == "odd":
            what = Odd()
        if what == "rubbish":
            connection.send_bytes(b"\x80\x04N.garbage"[3:])
            continue
        connection.send(what)


@pytest.mark.parametrize(
    ("what", "cause", "code"),
    [
        ("die", "exit", 7),
        ("killed", "signal", -9),
        ("odd", "message", None),
        ("rubbish", "message", None),
        ("x" * 4000, "message", None),
    ],
)
def test_what_a_worker_does_is_told_and_another_takes_its_place(
    what: str, cause: str, code: int | None
) -> None:
    worker = Worker(obey, ("",), "obedient", most=4020)
    try:
        assert not worker.ready and worker.deadline < math.inf
        worker.await_ready(60.0)
        assert worker.ready and worker.deadline == math.inf
        worker.give("good", 60.0)
        assert not worker.late and worker.receive() == "good"
        worker.give(what, 60.0)
        if len(what) > 1000:
            assert worker.receive() == what, "within the limit"
            worker.most = 100
            with pytest.raises(
                ValueError, match="expected a message of at most 100 bytes, found 4,0"
            ):
                worker.give(what, 60.0)
            worker.connection.send(what)
        with pytest.raises(ChildError) as raised:
            worker.receive()
        assert (raised.value.death.cause, raised.value.death.code) == (cause, code)
        worker.restart()
        assert not worker.ready
        worker.await_ready(60.0)
        worker.give("again", 60.0)
        assert worker.receive() == "again"
    finally:
        worker.close()
    assert not worker.alive and worker.code == 0


def test_a_thread_that_blocks_on_a_late_worker_meets_its_end() -> None:
    worker = Worker(hang, (), "hanging")
    worker.await_ready(60.0)
    with worker.within(0.4) as late, pytest.raises(ChildError) as raised:
        worker.connection.send("job")
        worker.receive()
    assert late.is_set() and (raised.value.death.cause, raised.value.death.code) == (
        "signal",
        -signal.SIGKILL,
    )
    worker.restart()
    worker.await_ready(60.0)
    with worker.within(60.0) as late:
        assert worker.deadline < math.inf
    assert not late.is_set() and worker.deadline == math.inf and worker.alive, (
        "in time, it is left alone"
    )
    worker.kill()


def test_a_worker_that_does_not_come_up_says_why() -> None:
    for fault, cause, said in (
        ("no licence", "refused", "no licence"),
        ("late", "timeout", "was not ready within 0.2 s"),
    ):
        worker = Worker(obey, (fault,), "obedient")
        with pytest.raises(ChildError, match=f"obedient: .* {said}") as raised:
            worker.await_ready(0.2 if cause == "timeout" else 60.0)
        assert (raised.value.death.cause, raised.value.death.said, worker.ready) == (
            cause,
            said,
            False,
        )
        worker.kill()
        worker.kill()
