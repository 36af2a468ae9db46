"""Many processes, one store: one builds, a killed builder is replaced, an entry mapped elsewhere is never evicted."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmrl.video.locks import exclusive, remove_unused
from mmrl.video.store import TensorStore
from scripts.torture_cache import Round, leftovers, torture
from tests.video.store_kit import KEY, at_rest, build_slowly, builder, hold, numbers, path_of

SPAWN = multiprocessing.get_context("spawn")


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def test_a_lock_dies_with_its_process_and_only_with_it(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom mmrl.video.locks import create_shared, exclusive\n"
        "fd, path = create_shared(Path(sys.argv[1]))\n"
        "with exclusive(Path(sys.argv[1]) / 'name', wait_s=9) as held:\n    print(held, path, flush=True)\n"
        "    time.sleep(600)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        held, temporary = child.stdout.readline().split()
        waits: list[int] = []
        with exclusive(tmp_path / "name", wait_s=0.2, on_wait=lambda: waits.append(1)) as got:
            assert held == "True" and not got and waits == [1]
        assert remove_unused(Path(temporary)) is None and (tmp_path / "name").exists()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    with exclusive(tmp_path / "name", wait_s=5) as got:
        assert got
    assert remove_unused(Path(temporary)) == 0 and not list(tmp_path.iterdir())


def test_a_file_that_its_writer_removes_while_it_is_looked_at_is_gone(tmp_path: Path) -> None:
    left = tmp_path / "1-1-1.tmp"
    left.touch()
    looked: list[int] = []

    def writer_gives_up(facts: os.stat_result) -> bool:
        looked.append(facts.st_size)
        left.unlink()
        return False

    assert remove_unused(left, unless=writer_gives_up) is None and looked == [0]


@pytest.mark.slow
def test_no_two_hold_a_name_at_once_although_it_comes_and_goes(tmp_path: Path) -> None:
    """The name is removed on every release: locking a file that just lost its name must not count as holding it."""
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom mmrl.video.locks import exclusive\nfolder = Path(sys.argv[1])\n"
        "for _ in range(300):\n    with exclusive(folder / 'name', wait_s=60) as held:\n        assert held\n"
        "        fd = os.open(folder / 'inside', os.O_CREAT | os.O_EXCL)\n        os.close(fd)\n"
        "        os.unlink(folder / 'inside')\n"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    assert [(c.communicate(timeout=120)[1], c.returncode) for c in children] == [("", 0)] * 4
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_one_process_builds_and_the_others_wait(tmp_path: Path) -> None:
    log = tmp_path / "log"
    children = [
        SPAWN.Process(target=build_slowly, args=(str(tmp_path / "cache"), KEY, str(log), 1.0))
        for _ in range(3)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0, 0] and len(
        log.read_text().splitlines()
    ) == 1
    got = [json.loads(line) for line in (tmp_path / "log.got").read_text().splitlines()]
    store = TensorStore(tmp_path / "cache")
    assert len(got) == 3 and all(right for _, right in got) and at_rest(store)
    totals = store.stats().totals
    assert totals["builds"] == 1 and totals["hits"] + totals["misses"] == 3


@pytest.mark.slow
def test_when_the_builder_is_killed_a_waiting_process_builds(tmp_path: Path) -> None:
    log, root = tmp_path / "log", str(tmp_path / "cache")
    first = SPAWN.Process(target=build_slowly, args=(root, KEY, str(log), 0.0, True))
    first.start()
    wait_until(lambda: log.exists() and bool(log.read_text()))
    second = SPAWN.Process(target=build_slowly, args=(root, KEY, str(log), 0.0))
    second.start()
    time.sleep(0.3)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join(20)
    second.join(120)
    assert second.exitcode == 0 and [int(x) for x in log.read_text().split()] == [
        first.pid,
        second.pid,
    ]
    store = TensorStore(root)
    assert at_rest(store) and not store.verify().damaged and store.stats().entries == 1


@pytest.mark.slow
def test_an_entry_mapped_by_another_process_is_kept_until_that_dies(tmp_path: Path) -> None:
    store = TensorStore(tmp_path / "cache")
    store.put(KEY, numbers()).close()
    child = SPAWN.Process(target=hold, args=(str(tmp_path / "cache"), KEY, str(tmp_path / "log")))
    child.start()
    wait_until(lambda: (tmp_path / "log").exists())
    assert store.prune(max_bytes=0)[0] == 0 and path_of(store).exists()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(20)
    assert store.prune(max_bytes=0) == (1, 0)
    assert torch.equal(store.get_or_build(KEY, builder()).tensors["x"], numbers()["x"])


@pytest.mark.slow
def test_small_torture(tmp_path: Path) -> None:
    calm = Round("undisturbed", 0.0, kills=0.0, edits=False)
    storm = Round("storm", 1.0, "always", flips="silent", limit_share=0.5)
    full = Round("full", 0.5, full_disk=True)
    record = torture(
        tmp_path, seconds=4.0, seed=3, sources=40, processes=4, only=(calm, storm, full)
    )
    assert record["passed"], json.dumps(record, indent=1)
    assert (
        record["totals"]["builds"] > 40
        and record["totals"]["wrong"] == 0
        and record["totals"]["uncached"] > 0
    )
    assert any(name.startswith("killed") for row in record["rounds"] for name in row["done"])


@pytest.mark.slow
def test_torture_where_mounting_is_not_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    record = torture(
        tmp_path,
        seconds=2.0,
        seed=4,
        sources=20,
        processes=3,
        only=(Round("full", 1.0, full_disk=True),),
    )
    [row] = record["rounds"]
    assert (
        record["passed"] and row["disk"] == "file size limit" and row["counts"]["uncached"] > 0
    ), json.dumps(row, indent=1)


def test_the_torture_sees_what_was_left(tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    store.put(KEY, numbers()).close()
    assert leftovers(tmp_path) == []
    entry = store.get(KEY)
    (store.folder / "tmp/1-1-1.tmp").touch()
    (store.folder / "ab/stray").touch()
    assert entry is not None and sorted(leftovers(tmp_path)) == [
        "left: tensors-v1/tmp/1-1-1.tmp",
        f"locked: {KEY}.safetensors",
        "other: stray",
    ]
