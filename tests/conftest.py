"""Rules for the whole suite: what a marker asks of the machine, that nothing is skipped quietly in CI, and that no property
fails because the machine is busy.

With `CI` or `MMRL_NO_SKIP` set, a skipped test or module counts as failed unless its reason names a missing GPU.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import re
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("mmrl", deadline=None)  # speed belongs in benchmarks
settings.load_profile("mmrl")

# whichever test imports robosuite first: the software renderer
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("MUJOCO_GL", "osmesa")
# one thread renders, as in the pool's workers: on busy cores Mesa's threads wait for each other
os.environ.setdefault("LP_NUM_THREADS", "1")

NO_SKIP = any(
    os.environ.get(name, "").lower() not in ("", "0", "false") for name in ("CI", "MMRL_NO_SKIP")
)


LONG = (
    "test_vllm_run.py",
    "test_vllm_server.py",
    "test_families.py",
    "test_simulator_runs.py",
    "test_torture_run.py",
    "test_vllm_families.py",
    "test_viewer_browser.py",
    "test_libero.py",
    "test_sharded_processes.py",
    "test_verifiers.py",
    "test_bench_gpu.py",
    "test_maniskill.py",
    "test_vllm.py",
    "test_ray_strangers.py",
    "test_ray_pool.py",
    "test_operations_runs.py",
    "test_demo_turns.py",
    "test_browser.py",
    "test_ray_prompts.py",
    "test_browsergym_worlds.py",
    "test_maniskill_vector.py",
    "test_embodied_run.py",
    "test_memory.py",
    "test_environments.py",
    "test_recipes.py",
    "test_library.py",
    "test_other_device.py",
    "test_distributed.py",
    "test_torture_turns.py",
    "test_embodied_processes.py",
    "test_resume.py",
    "test_pool_faults.py",
    "test_maniskill_experts.py",
    "test_plugin_package.py",
    "test_wheel.py",
    "test_family_sharded.py",
    "test_fuzz_rewards.py",
    "test_viewer_attacks.py",
    "test_answer_critic.py",
    "test_vllm_parallel.py",
    "test_attention.py",
    "test_sharded_checkpoint.py",
    "test_vllm_servers.py",
    "test_new_task.py",
    "test_openenv.py",
    "test_doctor.py",
)
"""Files of over 25 seconds of processor time, or of over a minute of a whole run of the suite, the longest first."""


_ALL_SLOW = re.compile(r"^pytestmark = \[?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files in which every test is slow are not even imported for `-m "not slow"`: half of them import what only they need."""
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    return True if _ALL_SLOW.search(collection_path.read_text(encoding="utf-8")) else None


def _leave_out(items: list[pytest.Item]) -> None:
    """Of the parameters of a test that has the mark `check_takes(n)`, mark all but n slow: these n lie evenly in their order."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("check_takes"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in tests.values():
        marker = found[0].get_closest_marker("check_takes")
        assert marker is not None
        taken = {place * len(found) // marker.args[0] for place in range(marker.args[0])}
        for place, item in enumerate(found):
            if place not in taken:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files begin first: a worker that takes one at the end would let the others wait for it."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    _leave_out(items)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is imported and collected stays until the end: to look through it again and again for what is not used any more takes
    a fifteenth of the time of the whole suite."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# libraries count at the end what was not given back; not before pytest's own end, which looks through everything ten times
atexit.register(gc.unfreeze)


def _available(need: str) -> bool:
    """A program on PATH, Chromium under any of its names, or a shared library (a name with '.so') that loads."""
    if need == "chromium":
        from mmrl.workers.program import CHROMIUM

        return any(map(shutil.which, CHROMIUM))
    if ".so" not in need:
        return shutil.which(need) is not None
    try:
        ctypes.CDLL(need)
    except OSError:
        return False
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("render"):
        missing = [need for need in marker.args if not _available(need)]
        if missing:
            pytest.skip(f"needs {', '.join(missing)}: bash scripts/system_packages.sh")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


def _refuse_skip(report: Any) -> None:
    """Turn a skip into a failure, in place. `wasxfail` reports are expected failures, not skips."""
    if not (NO_SKIP and report.skipped) or hasattr(report, "wasxfail"):
        return
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    if "GPU" not in reason:
        report.outcome = "failed"
        report.longrepr = (
            f"{report.nodeid}: skipped in CI ({reason}); only a missing GPU excuses a test here"
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    report = yield
    _refuse_skip(report)
    return report
