"""The fork server outlives signals that are sent to all processes, and ends quietly; processes that others start by it can be
ended."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.kits.engine_kit import ENVIRONMENT, REPO

_PRELOAD = """
from mmrl.workers.fork_server import import_for_all
import_for_all(["wave", "no_such_module", "triton._C.libtriton"])
"""
_PROGRAM = """
    import multiprocessing, os, signal, sys, time
    from multiprocessing import forkserver

    from mmrl.workers.spawned import warm_up

    def told(pipe):
        ours = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
        usual = [signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL]
        pipe.send((os.getppid(), "wave" in sys.modules, ours == usual))
        time.sleep(60)

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        warm_up(["preload_of_the_test"])
        context = multiprocessing.get_context("forkserver")
        mine, theirs = context.Pipe()
        first = context.Process(target=told, args=(theirs,))
        first.start()
        server, *found = mine.recv()
        assert server == forkserver._forkserver._forkserver_pid and found == [True, True], found
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(server, number)
        first.terminate()
        first.join(20)
        assert first.exitcode == -signal.SIGTERM, first.exitcode
        second = context.Process(target=told, args=(theirs,))
        second.start()
        assert mine.recv()[0] == server
        second.kill()
"""


def test_it_outlives_what_is_sent_to_all_processes(tmp_path: Path) -> None:
    (tmp_path / "preload_of_the_test.py").write_text(_PRELOAD)
    (tmp_path / "program.py").write_text(textwrap.dedent(_PROGRAM))
    path = os.pathsep.join([str(tmp_path), str(REPO)])
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        env={**ENVIRONMENT, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, (
        "extension modules complain at its end of objects that were kept from the garbage collector"
    )
