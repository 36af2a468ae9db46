"""Runs of several turns that are killed: one kill with a real Chromium; and the torture would see a process that stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from scripts import _torture_runs
from scripts._torture_runs import Run, held_elsewhere, killed
from scripts.torture_turns import PARTS, TURNS, earned, place_of, torture
from scripts.update_readme import BLOCKS
from tests.kits.engine_kit import REPO
from tests.kits.prepared_kit import Prepared

RECORD = REPO / "assets" / "results" / "torture_turns.json"

_LEAVES = """import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(120)"""


def test_the_record_keeps_its_claim() -> None:
    found = json.loads(RECORD.read_text(encoding="utf-8"))
    assert found["passed"] and set(found["parts"]) == set(PARTS)
    kills = [kill for part in found["parts"].values() for kill in part["kills"]]
    assert len(kills) == found["num_kills"] == sum(found["phases"].values())
    assert any(kill["phase"] == "later turn" for kill in found["parts"]["pages"]["kills"])
    assert f"{len(kills)} kills" in BLOCKS["turns_killed"]()


def test_equal_texts_are_equal_places_and_what_turns_earn_is_within_the_tasks_range() -> None:
    places = [place_of(text) for text in ("", "a", "ab", "ba", "ab")]
    assert places[2] == places[4] != places[3]
    assert all(0 <= share < 1 for place in places for share in place)
    assert earned("") == earned("xyz") == 0.0 and TURNS * earned("abc") == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.render("chromium")
def test_a_run_that_is_killed_in_the_midst_of_turns_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole one: python -m scripts.torture_turns."""
    monkeypatch.setattr(Run, "popen", Prepared)
    record = torture(tmp_path, kills=1, seed=0, steps=3, parts=("pages",))
    [kill] = record["parts"]["pages"]["kills"]
    assert record["passed"], record
    # trainer, browsers with their drivers, pages
    assert kill["workers"] > 10 and kill["phase"] not in ("imports", "loading", "report"), kill


@pytest.mark.slow
def test_a_process_that_stays_is_seen_whoever_its_parent_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torture_runs, "_GONE_S", 0.5)
    with Run(tmp_path, {"train": {"steps": 1}}, "run", {}) as run:
        for number in range(2):
            run.began = time.monotonic()
            run.process = subprocess.Popen(
                [sys.executable, "-c", _LEAVES],
                stdout=subprocess.PIPE,
                env={**os.environ, "TMPDIR": str(run.scratch)},
            )
            left = psutil.Process(int(run.process.stdout.readline()))
            try:
                if number:  # what has ended by itself is waited for no longer
                    left.kill()
                kill = killed(run, "doing")
            finally:
                with suppress(psutil.NoSuchProcess):
                    left.kill()
                run.process.stdout.close()
            assert kill is not None and kill.workers >= 1 - number
            assert (kill.gone_s == 0.5) == (number == 0)


@pytest.mark.slow
def test_a_process_started_after_the_list_was_made_has_its_time_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed while it starts its workers: the list of them was made before the last one began."""

    class StartsOneMore(Run):
        def family(self) -> list[psutil.Process]:
            found = super().family()
            if self.process.returncode is None:
                late.append(
                    subprocess.Popen(
                        [sys.executable, "-c", "import time; time.sleep(1)"],
                        env={**os.environ, "TMPDIR": str(self.scratch)},
                    )
                )
            return found

    late: list[subprocess.Popen[bytes]] = []
    with StartsOneMore(tmp_path, {"train": {"steps": 1}}, "run", {}) as run:
        run.began = time.monotonic()
        run.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
        kill = killed(run, "doing")
    assert kill is not None and kill.workers == 0 and 0.3 < kill.gone_s < 20.0
    [started] = late
    assert started.wait() == 0


def test_a_name_in_shared_memory_is_not_taken_for_a_longer_one_that_is_in_use() -> None:
    """What a killed run left counts as left, whatever somebody else has mapped beside it."""
    name = f"psm_mmrl_{os.getpid()}"
    maps = "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); f.close()"
    left, used = Path("/dev/shm", name), Path("/dev/shm", f"{name}1")
    try:
        for path in (left, used):
            path.write_bytes(bytes(8))
        with subprocess.Popen(
            [sys.executable, "-c", f"{maps}; print(flush=True); sys.stdin.read()", str(used)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as other:
            assert other.stdout is not None
            other.stdout.readline()
            try:
                assert held_elsewhere(used.name) and not held_elsewhere(left.name)
            finally:
                other.communicate(timeout=20)
    finally:
        left.unlink(missing_ok=True)
        used.unlink(missing_ok=True)
