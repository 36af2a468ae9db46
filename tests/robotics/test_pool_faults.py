"""Pools that must survive hangs, leaks and their own end; each test has a pool of its own."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from mmrl.errors import ConfigError, MMRLError
from mmrl.robotics.contract import EnvSpec
from mmrl.robotics.pool import PoolError, PoolSettings, Reply, VectorEnv
from mmrl.robotics.pool_types import EPISODES_PER_RESPAWN
from tests.kits.pool_kit import PUSH, REPO, STATES, adds_up, direct, equal, faulty, gone, one, play


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang", "hang_reset"])
def test_a_hang_is_ended_and_says_where(fault: str) -> None:
    spec = faulty(fault, states=(4,))
    with VectorEnv(2, 1, PoolSettings(step_s=4.0, reset_s=4.0)) as pool:
        assert play(pool, {0: (spec, STATES[1]), 1: (PUSH, STATES[1])})[0][1] is None
        begin = time.monotonic()
        pool.reset(0, spec, STATES[4])
        reply = one(pool)
        if fault == "hang":
            pool.step(0, np.zeros((2, 2)))
            reply = one(pool)
        error = str(reply.error)
        assert reply.cause == "timeout" and "within 4 s, worker ended; where it was:" in error
        assert (
            f"no answer to a {reply.kind}" in error and "faulty.py" in error and "in _do" in error
        )
        assert 3.9 <= time.monotonic() - begin < 60 and 3.9 <= reply.seconds < 60
        assert (
            pool.stats().error_causes == {"timeout": 1}
            and pool.stats().respawns == 1
            and adds_up(pool)
        )
        assert play(pool, {0: (PUSH, STATES[0]), 1: (PUSH, STATES[1])})[0][1] is None


@pytest.mark.slow
def test_a_simulator_that_writes_into_the_pipe_of_its_worker_costs_its_episode() -> None:
    """What came could not be unpickled, which ended the run."""
    with VectorEnv(2, 1) as pool:
        found = play(
            pool, {0: (EnvSpec("tests.robotics.robot_faults:Babbling", "push", 12, 32), STATES[0])}
        )
        error = str(found[0][1])
        assert "the worker process sent a message that cannot be read" in error
        assert pool.stats().error_causes == {"crash": 1} and adds_up(pool)
        assert equal(play(pool, {0: (PUSH, STATES[0])})[0][0], direct(PUSH, STATES[0]))


@pytest.mark.slow
def test_the_last_words_of_a_simulator_that_warned_much_are_told() -> None:
    """A stderr that had been cut was a hole of zeros with the words behind it, and was cut again after every answer."""
    with VectorEnv(1, 1) as pool:
        pool.reset(0, EnvSpec("tests.robotics.robot_faults:Warned", "push", 12, 32), STATES[0])
        one(pool)
        for steps in (2, 1):
            pool.step(0, np.zeros((steps, 2)))
            reply = one(pool)
        assert (
            str(reply.error)
            == "the worker process exited with status 3; the end of its stderr:\nthese are my last words"
        )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["late", "killed"])
def test_what_a_simulator_started_ends_with_its_worker(how: str, tmp_path: Path) -> None:
    """Whether the worker is ended for its time, or ends itself since the run was killed."""
    code = f"""
        import os, signal, sys, time
        from pathlib import Path
        import numpy as np
        from mmrl.robotics.contract import EnvSpec
        from mmrl.robotics.pool import VectorEnv, PoolSettings
        from tests.kits.pool_kit import STATES, one
        file = Path({str(tmp_path / "pid")!r})
        pool = VectorEnv(1, 1, PoolSettings(step_s=3.0))
        pool.reset(0, EnvSpec("tests.robotics.robot_faults:Starting", "push", 12, 32, options={{"file": str(file)}}), STATES[0])
        one(pool)
        print(pool.pids()[0], flush=True)
        pool.step(0, np.zeros((1, 2)))
        while {how!r} == "killed" and not (file.exists() and file.read_text()):
            time.sleep(0.05)
        if {how!r} == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        print(one(pool).cause, flush=True)
        assert int(file.read_text())
        time.sleep(600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=REPO, text=True, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        pids = [int(run.stdout.readline())]
        assert run.stdout.readline() == ("timeout\n" if how == "late" else "")
        pids.append(int((tmp_path / "pid").read_text(encoding="ascii")))
        try:
            assert gone(pids)
        finally:
            run.kill()


@pytest.mark.slow
def test_a_busy_parent_is_no_hang() -> None:
    """Time limits count the worker's work only: not the queue in the worker, nor a parent that does something else."""
    spec = EnvSpec("tiny", "push", 12, 32, options={"reset_s": 0.7})
    with VectorEnv(6, 1, PoolSettings(reset_s=2.5)) as pool:
        for _ in range(2):  # the second time the simulators are there: only reset_s counts
            for slot in range(6):
                pool.reset(slot, spec, STATES[slot])  # 4.2 s of work in one worker
            time.sleep(3.0)
            replies: list[Reply] = []
            while len(replies) < 6:
                replies += pool.ready(60.0)
            assert [r.error for r in replies] == [None] * 6 and pool.stats().respawns == 0


@pytest.mark.slow
def test_the_budget_of_respawns_stops_the_run_after_handing_out_replies() -> None:
    with VectorEnv(2, 1, PoolSettings(respawns=2)) as pool:
        for attempt in range(3):
            found = play(pool, {0: (faulty("kill_reset"), STATES[0])})
            assert found[0][1] is not None and pool.stats().respawns == attempt + 1
        with pytest.raises(
            PoolError,
            match=r"expected at most 2 workers to die or hang, found one more .*; raise env.respawns",
        ):
            pool.reset(0, PUSH, STATES[0])
        with pytest.raises(PoolError, match="SIGKILL"):
            pool.ready()
        assert adds_up(pool) and pool.stats().errors == 3


@pytest.mark.slow
def test_a_leaking_worker_is_replaced_between_episodes_without_losing_one() -> None:
    leak = faulty("leak", leak_mib=60)
    with VectorEnv(4, 2, PoolSettings(memory_gib=0.2)) as pool:
        for round_ in range(5):
            found = play(pool, {slot: (leak, STATES[round_ + slot]) for slot in range(4)})
            for slot, (rows, error) in found.items():
                assert error is None and equal(rows, direct(PUSH, STATES[round_ + slot]))
        stats = pool.stats()
        assert (
            stats.restarts >= 2
            and stats.respawns == stats.errors == 0
            and stats.finished == 20
            and adds_up(pool)
        )
        assert max(stats.peak_rss_gib) < 0.45


@pytest.mark.slow
def test_memory_that_explodes_in_an_episode_ends_that_episode() -> None:
    with VectorEnv(1, 1, PoolSettings(memory_gib=0.3)) as pool:
        error = play(pool, {0: (faulty("memory"), STATES[0])})[0][1]
        assert (
            error is not None
            and "is above the limit of 0.45 GiB" in error
            and pool.stats().error_causes == {"memory": 1}
        )
        assert play(pool, {0: (PUSH, STATES[0])})[0][1] is None
    with pytest.raises(
        ConfigError,
        match=r"expected memory_gib above the 0\.\d\d GiB of a worker without simulators, found 0.001",
    ):
        VectorEnv(1, 1, PoolSettings(memory_gib=0.001))


@pytest.mark.slow
def test_simulators_are_made_anew_after_n_resets() -> None:
    leak = faulty("leak_object", leak_mib=40)
    with VectorEnv(1, 1, PoolSettings(restart_after_resets=3)) as pool:
        for state in STATES[:10]:
            rows, error = play(pool, {0: (leak, state)})[0]
            assert error is None and equal(rows, direct(PUSH, state))
        assert pool.stats().simulators == 4 and pool.stats().restarts == 0
        assert pool.stats().peak_rss_gib[0] < 0.25  # 10 leaks would be 0.43


@pytest.mark.slow
def test_workers_use_one_thread_and_the_given_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with VectorEnv(1, 1, PoolSettings(environment={"MMRL_TEST": "here"})) as pool:
        environment = psutil.Process(pool.pids()[0]).environ()
        assert (
            environment["OMP_NUM_THREADS"]
            == environment["OPENBLAS_NUM_THREADS"]
            == environment["LP_NUM_THREADS"]
            == "1"
            and environment["MMRL_TEST"] == "here"
        )
    assert os.environ["OMP_NUM_THREADS"] == "7"


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _left()
    monkeypatch.setattr(sys, "path", ["/nowhere"])
    with pytest.raises(PoolError, match=r"(?s)expected worker 0 to start.*ModuleNotFoundError"):
        VectorEnv(2, 2)
    assert _left() == before


# what is left behind


def _left() -> tuple[int, set[str], set[int]]:
    """Descriptors, shared memory, children: this process's own, since others of the machine share /dev/shm with it."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    shared = {line for line in maps if "/memfd:" in line or "/dev/shm/" in line}
    return (
        len(os.listdir("/proc/self/fd")),
        shared,
        {child.pid for child in psutil.Process().children()},
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "exception", "interrupt", "forgotten"])
def test_nothing_is_left_behind(how: str) -> None:
    def use() -> list[int]:
        pool = VectorEnv(3, 2, PoolSettings())
        play(pool, {slot: (PUSH, STATES[slot]) for slot in range(3)}, frames=True)
        pool.reset(0, faulty("hang_reset"), STATES[0])
        if how in ("close", "forgotten"):
            if how == "close":
                pool.close()
                pool.close()
                with pytest.raises(PoolError, match="found a closed one"):
                    pool.ready()
            return pool.pids()
        with pytest.raises(KeyboardInterrupt if how == "interrupt" else ZeroDivisionError), pool:
            raise KeyboardInterrupt if how == "interrupt" else ZeroDivisionError
        return pool.pids()

    use()
    before = _left()
    pids = use()
    assert gone(pids) and _left() == before


_SCRIPT = """
    import signal, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job of a shell in the background ignores it
    from mmrl.robotics.contract import EnvSpec, initial_states
    from mmrl.robotics.pool import VectorEnv
    pool = VectorEnv(2, 2)
    pool.reset(0, EnvSpec("tests.robotics.faulty:FaultySimulator", "push", 12, 32, options={{"fault": "hang_reset"}}),
               initial_states("train", 1)[0])
    print(*pool.pids(), flush=True)
    {end}
"""


def _killed(process: subprocess.Popen[str]) -> None:
    process.kill()


def _interrupted(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)


def _left_alone(process: subprocess.Popen[str]) -> None:
    return


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "act"),
    [("time.sleep(60)", _killed), ("pool.ready()", _interrupted), ("sys.exit(0)", _left_alone)],
)
def test_workers_never_outlive_their_parent(
    end: str, act: Callable[[subprocess.Popen[str]], None]
) -> None:
    script = textwrap.dedent(_SCRIPT).format(end=end)
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2 and (act is _left_alone or all(psutil.pid_exists(pid) for pid in pids))
    time.sleep(1.0)
    act(process)
    process.wait(30)
    assert gone(pids)


@pytest.mark.slow
def test_a_fork_of_the_parent_does_not_end_its_workers() -> None:
    with VectorEnv(1, 1) as pool:
        pid = os.fork()
        if pid == 0:
            pool.fleet._closer()
            os._exit(0)
        os.waitpid(pid, 0)
        assert play(pool, {0: (PUSH, STATES[0])})[0][1] is None
    assert issubclass(PoolError, MMRLError)


@pytest.mark.slow
def test_a_short_torture_adds_up() -> None:
    """The whole one: python -m scripts.torture_pool --seconds 60."""
    from scripts.torture_pool import torture

    record = torture(6.0, seed=3)
    rare = {"all_kinds_of_errors_seen", "workers_replaced_for_memory"}
    assert {name for name, good in record["checks"].items() if not good} <= rare
    # how many depends on how busy the machine is
    assert record["errors"] and record["finished"] > 0


@pytest.mark.slow
def test_episodes_that_finish_make_up_for_lost_workers() -> None:
    with VectorEnv(1, 1, PoolSettings(respawns=1)) as pool:
        for _ in range(3):
            pool.reset(0, faulty("kill_reset"), STATES[0])
            assert one(pool).cause == "crash"
            for _ in range(EPISODES_PER_RESPAWN):
                pool.reset(0, PUSH, STATES[0])
                assert one(pool).error is None
                while pool.state(0) == "waiting":
                    pool.step(0, np.zeros((12, 2)))
                    one(pool)
        assert pool.stats().respawns == 3
