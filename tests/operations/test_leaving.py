"""A launched process ends with its status, its files and its exit functions, whatever threads of C++ are still doing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kits.engine_kit import ENVIRONMENT, REPO
from tests.kits.fast_kit import first_fast

# Forked, so that torch is imported once: two processes end while a thread of gloo's is about to run a Python callback of rank 0.
_PENDING = """
import os, sys, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import mmrl.cli.main as command
from mmrl.cli.main import main

def work(rank, path):
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(path, 2))
    globals()["mesh"] = init_device_mesh("cpu", (2,))  # keeps the group, as an FSDP2 run's does
    dist.barrier()
    if rank == 0:
        dist.all_reduce(torch.ones(8), async_op=True).get_future().then(lambda done: time.sleep(0.05))
    else:
        time.sleep(0.02 * (os.getpid() % 7))
        dist.all_reduce(torch.ones(8))
        time.sleep(0.3)  # rank 0 goes first

statuses = []
for number in range(10):
    children = []
    for rank in (0, 1):
        child = os.fork()
        if not child:
            os.environ["LOCAL_RANK"] = str(rank)
            command.app = lambda: work(rank, os.path.join(sys.argv[1], str(number)))
            main()
            sys.exit(0)
        children.append(child)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    statuses.append(ended[0])  # the other one may miss its partner
print("ended with", sorted(set(statuses)))
"""


def started(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        cwd=REPO,
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
        env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo", **environment},
    )


@pytest.mark.slow
def test_a_launched_process_is_not_aborted_by_a_thread_of_its_process_group(tmp_path: Path) -> None:
    done = started(_PENDING, str(tmp_path))
    assert "terminate called" not in done.stderr and done.stdout.split("\n")[-2:] == [
        "ended with [0]",
        "",
    ], done.stderr[-2000:]


@pytest.mark.check_takes(2)
@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit(143)", 143, ""),
        ("sys.exit('no')", 1, "no"),
        ("raise MMRLError('fix it')", 2, "error: fix it"),
        ("raise KeyError('x')", 1, "KeyError: 'x'"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
    ],
)
@pytest.mark.parametrize("launched", first_fast([True, False]))
def test_the_status_and_what_is_owed_at_the_end_are_pythons_own(
    ending: str, status: int, said: str, launched: bool, tmp_path: Path
) -> None:
    code = (
        "import atexit, sys, threading, time\nimport mmrl.cli.main as command\nfrom mmrl.errors import MMRLError\n"
        "def work():\n    print('printed')\n    atexit.register(lambda: print('at exit'))\n"
        "    threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        f"    {ending}\n"
        "command.app = work\ncommand.main()\n"
    )
    done = started(code, **({"LOCAL_RANK": "0"} if launched else {}))
    assert done.returncode == status and said in done.stderr, done.stderr
    assert done.stdout.split() == ["printed", "thread", "at", "exit"]
