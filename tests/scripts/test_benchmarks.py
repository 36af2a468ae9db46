"""Benchmark scripts as `make bench` starts them: every one is started, explains itself and refuses unknown names."""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts import _bench, bench_engines, bench_robot_learning, bench_tgrpo
from tests.kits.engine_kit import ENVIRONMENT, REPO

SCRIPTS = sorted(path.stem for path in (REPO / "scripts").glob("bench_*.py"))
HEAVY = ("bench_gpu", "bench_vllm_gap")  # import models or vLLM before they read their arguments


def start(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"scripts.{name}", *arguments],
        cwd=REPO,
        env=ENVIRONMENT,
        text=True,
        capture_output=True,
        timeout=120,
    )


@pytest.mark.check_takes(2)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in HEAVY else n for n in SCRIPTS]
)
def test_a_benchmark_explains_itself(name: str) -> None:
    done = start(name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"scripts.{name}" in done.stdout and "--" in done.stdout


@pytest.mark.check_takes(1)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("bench_learning", ("--only", "iuo")),
        ("bench_families", ("--only", "internvll")),
        ("bench_families_trl", ("--only", "internvll")),
        ("bench_rewards", ("--only", "no-such-reward")),
        ("bench_vs_trl", ("--settings", "z")),
    ],
)
def test_an_unknown_name_is_refused_before_anything_runs(
    name: str, arguments: tuple[str, str]
) -> None:
    done = start(name, *arguments)
    assert done.returncode == 2 and arguments[1] in done.stderr and "Traceback" not in done.stderr


def test_a_child_that_has_not_started_its_program_yet_is_no_training_process() -> None:
    """It has its parent's command line: a run that starts a program just then counted as two processes."""
    forks = "import os, time; os.fork(); print(flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", forks, "mmrl.cli.main"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.read(2) == b"\n\n"
            assert len(psutil.Process(process.pid).children()) == 1
            known: dict[int, float] = {}
            bench_engines._peaks(process.pid, known)
            assert list(known) == [process.pid]
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_larger_half_of_the_engine_benchmark_runs_with_a_small_model(tmp_path: Path) -> None:
    tree = bench_engines._large(tmp_path / "large", 1, {"hidden": 64, "layers": 2})
    (row,) = bench_engines.measure(tree, ("single",), ("own",), tmp_path / "runs")
    assert (row["train"], row["rollout"], row["processes"], row["loss_apart"]) == (
        "single",
        "own",
        1,
        0.0,
    )
    assert (
        len(row["loss"]) == len(row["peak_mib"]) == 1
        and row["grad_norm"][0] > 0
        and 0 < row["reward"][0] < 1
    )
    assert 1e5 < bench_engines._numbers(tmp_path / "large" / "model") < 1e6


def test_make_bench_starts_every_benchmark_and_says_which_failed(tmp_path: Path) -> None:
    """The target itself, on a copy of the scripts' names, with a python that only writes down what it was told."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    shutil.copy(REPO / "Makefile", tmp_path)
    (tmp_path / "scripts" / "setup.sh").write_text("exit 0\n")
    for name in SCRIPTS:
        (tmp_path / "scripts" / f"{name}.py").touch()
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" >> "{tmp_path}/started"\n[ "$2" != scripts.{SCRIPTS[0]} ]\n'
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "bench", f"VENV={tmp_path}/venv"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert (tmp_path / "started").read_text().splitlines() == [
        f"-m scripts.{name}" for name in SCRIPTS
    ]
    assert done.returncode != 0 and f"failed: scripts/{SCRIPTS[0]}.py" in done.stdout


@pytest.mark.parametrize("broken", ["", "mypy", "python"])
def test_make_check_runs_linters_and_tests_beside_each_other_and_fails_with_either(
    broken: str, tmp_path: Path
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    shutil.copy(REPO / "Makefile", tmp_path)
    (tmp_path / "scripts" / "setup.sh").write_text("exit 0\n")
    started_file = tmp_path / "started"
    # make starts nothing more after a failure: it must not come before the other side of `-j2` has begun
    waits = f"until grep -q '^python' {started_file} && grep -q '^ruff' {started_file}; do sleep 0.02; done"
    for name in ("python", "ruff", "mypy", "lint-imports"):
        program = tmp_path / "venv" / "bin" / name
        fails = f"{waits}\nexit 1" if name == broken else "exit 0"
        program.write_text(f'#!/bin/sh\necho "{name} $@" >> "{started_file}"\n{fails}\n')
        program.chmod(0o755)
    done = subprocess.run(
        ["make", "check", f"VENV={tmp_path}/venv", "JOBS=3"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=60,
    )
    started = started_file.read_text()
    assert (
        "python -m pytest -n 3 " in started
        and "-m not slow" in started
        and "ruff check ." in started
        and "mypy" in started
    )
    assert (done.returncode != 0) == bool(broken), done.stdout + done.stderr
    assert broken == "mypy" or "lint-imports" in started


def test_runs_of_a_killed_benchmark_are_kept_under_their_settings_and_what_they_are_made_from(
    tmp_path: Path,
) -> None:
    root, rows, made = tmp_path / "root", tmp_path / "rows", []

    def run(settings: list[str], *, killed: bool = False) -> dict[str, Any]:
        def measure() -> dict[str, Any]:
            made.append(settings)
            if killed:
                raise KeyboardInterrupt
            return {"number": len(made)}

        return bench_tgrpo.kept(rows, settings, bench_tgrpo.made_from(root), measure)

    for folder in ("mmrl", "configs", "assets/tiny_video", "runs/video_data/train/direction"):
        (root / folder).mkdir(parents=True)
    (root / "mmrl" / "a.py").write_text("x = 1\n")
    (root / "configs" / "tgrpo_tiny.yaml").write_text("seed: 0\n")
    first, second = (
        bench_tgrpo.settings_of("grpo", 0, None),
        bench_tgrpo.settings_of("grpo", 1, None),
    )
    assert first != second and run(first) == {"number": 1}
    with pytest.raises(KeyboardInterrupt):
        run(second, killed=True)
    assert (run(first), run(second), run(second)) == (
        {"number": 1},
        {"number": 3},
        {"number": 3},
    ) and len(made) == 3
    for path, text in (
        ("mmrl/a.py", "x = 2\n"),
        ("configs/tgrpo_tiny.yaml", "seed: 1\n"),
        ("assets/tiny_video/w", "w"),
        ("runs/video_data/train/direction/clip.mp4", "v"),
        ("mmrl/b.py", ""),
    ):
        (root / path).write_text(text)
        run(first)
    assert len(made) == 8, "code, configuration, model or data changed: nothing old is taken"
    for row in rows.glob("*.json"):
        row.write_text('{"settings": [], "code": "", "row": {}}')
    with pytest.raises(AssertionError, match="is not its own"):
        run(first)


# ---- what replaces a record


def calls(tree: ast.AST) -> list[str]:
    """Names of the functions and methods that are called."""
    return [
        n.func.attr if isinstance(n.func, ast.Attribute) else n.func.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute | ast.Name)
    ]


RECORDING = sorted(
    path
    for path in (REPO / "scripts").glob("*.py")
    if path.name != "_bench.py"
    and (
        {"write_results", "results_folder"}
        & set(calls(ast.parse(path.read_text(encoding="utf-8"))))
    )
)


@pytest.mark.parametrize("path", RECORDING, ids=lambda path: path.stem)
def test_a_script_that_records_cannot_parse_its_arguments_past_the_rule(path: Path) -> None:
    """`_bench.parse` is what knows that a run is shorter than a record: nobody reads arguments without it, or writes beside it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = calls(tree)
    assert not {"parse_args", "parse_known_args", "parse_intermixed_args"} & set(used)
    assert "parse" in used or "ArgumentParser" not in used
    assert not [
        n for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value == "assets/results"
    ], "a way past it"


def test_all_benchmarks_and_demos_record_by_the_same_function() -> None:
    names = {path.stem for path in RECORDING}
    assert {*SCRIPTS, "demo", "demo_gui", "demo_mixed", "demo_robot"} <= names
    quick = [
        path.stem
        for path in (REPO / "scripts").glob("*.py")
        if {"--quick", "--smoke"}
        & {
            n.value
            for n in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(n, ast.Constant)
        }
    ]
    assert {"bench_engines", "bench_gpu", "bench_schedule"} <= set(quick) <= {*names, "_bench"}


@pytest.mark.parametrize(
    ("arguments", "recorded"),
    [
        ((), True),
        (("--rounds", "3"), True),
        (("--quick",), False),
        (("--qui",), False),
        (("--rounds", "2"), False),
        (("--seconds", "1.5"), False),
        (("--seconds", "3"), True),
        (("--clips", "7"), False),
        (("--cases", "a"), False),
        (("--cases", "b", "c", "a"), True),
        (("--seeds", "1"), True),
        (("--jobs", "1"), True),
        (("train.steps=2",), False),
        (("train.steps=2", "--rounds", "4"), False),
    ],
)
def test_less_than_a_record_is_written_elsewhere(
    arguments: tuple[str, ...], recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_bench, "RESULTS", tmp_path / "records")
    monkeypatch.setattr(_bench, "UNRECORDED", tmp_path / "runs")
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--steps", type=int)  # by the case
    parser.add_argument("--clips", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3, help="added to those of the record")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cases", nargs="+", default=["a", "b"])
    parser.add_argument("overrides", nargs="*")
    _bench.write_results("speed", {"rows": 1})
    _bench.parse(parser, arguments, least=("clips", "cases"), adds=("seeds",))
    try:
        written = _bench.write_results("speed", {"rows": 2})
    finally:
        _bench.parse(parser, [])
    assert written == tmp_path / ("records" if recorded else "runs") / "speed.json"
    assert json.loads((tmp_path / "records" / "speed.json").read_text())["rows"] == (
        2 if recorded else 1
    )


def test_an_interrupted_benchmark_goes_on_from_what_it_has(tmp_path: Path) -> None:
    path, measured = tmp_path / "rows" / "1.json", iter([{"s": 1.5}, {"s": 2.5}, {"s": 3.5}])

    def fails() -> dict[str, Any]:
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError):
        _bench.kept(path, fails, keep=True)
    assert _bench.kept(path, lambda: next(measured), keep=True) == {"s": 1.5}
    assert _bench.kept(path, fails, keep=True) == {"s": 1.5}
    assert _bench.kept(path, lambda: next(measured), keep=False) == {"s": 2.5}
    assert _bench.kept(path, fails, keep=True) == {"s": 2.5}


def test_a_quick_run_of_the_engine_benchmark_leaves_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its command line to its file; what is measured takes minutes and is left out."""
    row: dict[str, Any] = {
        "train": "single",
        "rollout": "own",
        "step_s": 1.0,
        "peak_mib": [1],
        "loss_apart": 0.0,
        "grad_norm_apart": 0.0,
    }
    monkeypatch.setattr(bench_engines, "measure", lambda *_: [row])
    monkeypatch.setattr(bench_engines, "_small", lambda *_: {})
    monkeypatch.setattr(_bench, "UNRECORDED", tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_engines.py", "--quick"])
    record = _bench.RESULTS / "bench_engines.json"
    before = record.read_bytes()
    try:
        bench_engines.main()
    finally:
        _bench.parse(argparse.ArgumentParser(), [])
    assert record.read_bytes() == before and json.loads(
        (tmp_path / "bench_engines.json").read_text()
    )["small"] == [row]


def test_robots_have_learned_only_where_the_shuffled_control_has_not() -> None:
    def run(variant: str, after: float) -> dict[str, Any]:
        held = {
            "before": {"mean": 0.2, "low": 0.1, "high": 0.3},
            "after": {"mean": after, "low": after, "high": after},
        }
        return {"variant": variant, "held_out": {"sampled": {"success_once": held}}}

    learned = bench_robot_learning.learned
    assert learned([run("rloo", 0.8), run("rloo, shuffled", 0.25)])
    assert not learned([run("rloo", 0.25), run("rloo, shuffled", 0.25)]), (
        "within the interval before"
    )
    assert not learned([run("rloo", 0.8), run("rloo, shuffled", 0.8)]), (
        "the meaning of the rewards decided nothing"
    )
