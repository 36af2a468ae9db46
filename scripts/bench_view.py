"""What the viewer costs: time and memory by the number of rows, and what a viewer beside a training run costs the run.

    python -m scripts.bench_view                 (half an hour; writes assets/results/bench_view.json)
    python -m scripts.bench_view --quick         (1,000 rows, no training run)

Rows: a run with so many predictions in ten evaluations is made, and `mmrl view` started on it in a process of its own. `start` is
from the command to the printed address, `first_page` from asking for rows to having the first ones, `all_rows` until every row has
been read, then a filter, a search of all texts, a page far behind, and the process's resident memory.

Beside a run: a tiny model trains; every few steps a viewer with a client that asks as an open page does is stopped, or goes on.
Compared are the times (time/total) of the same steps of two runs of one seed, one with a viewer and one without, with a bootstrap
interval over pairs of neighbouring stretches.
`viewer_cpu_share` is what the viewer computed of the time that it was there: other work on the machine blurs it less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from scripts import _bench as bench

ROWS = (1_000, 10_000, 100_000)
STEPS = 10
WORDS = (
    "the cup",
    "left",
    "of",
    "a red box",
    "near",
    "two small doors",
    "under",
    "every blue lamp",
    "my chair",
)
SECONDS = 2.0  # between the requests of an open page


def make_rows(run: Path, count: int) -> int:
    """A run folder with `count` predictions; returns their bytes."""
    rng, size = random.Random(0), 0
    run.mkdir(parents=True)
    (run / "run.json").write_text(
        json.dumps({"name": run.name, "status": "finished", "total_steps": STEPS})
    )
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            file.write(json.dumps({"step": step, "train/reward/mean": rng.random()}) + "\n")
    for step in range(STEPS):
        folder = run / "eval" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        with (folder / "predictions.jsonl").open("w") as file:
            for number in range(count // STEPS):
                size += file.write(json.dumps(_row(rng, number)) + "\n")
        (folder / "results.json").write_text("{}")
    return size


def _row(rng: random.Random, number: int) -> dict[str, Any]:
    value = rng.random()
    box = [rng.randrange(400) for _ in range(4)]
    sample = {
        "id": f"p{number}",
        "task": "grounding",
        "source": f"source-{number % 5}",
        "question": " ".join(rng.choices(WORDS, k=5)),
        "answer": box,
        "images": [f"pictures/{number}.png"],
        "videos": [],
        "params": {"width": 640, "height": 480},
    }
    metrics = {name: value for name in ("iou", "giou", "acc@0.3", "acc@0.5", "acc@0.75", "correct")}
    return {
        **{k: sample[k] for k in ("id", "source", "task", "question", "images", "videos")},
        "mode": "greedy" if number % 5 == 0 else "sampled",
        "text": f"<think>{' '.join(rng.choices(WORDS, k=24))}</think><answer>{box}</answer>",
        "stop": "eos",
        "num_tokens": 60,
        "sample": sample,
        "score": {
            "value": value,
            "parsed": value > 0.05,
            "reason": None if value > 0.05 else "wrong_count: 3 numbers",
            "parts": {"accuracy": value, "format": 1.0},
            "weights": {"accuracy": 0.9, "format": 0.1},
            "metrics": metrics,
            "detail": {"pred_boxes": [box], "gold_boxes": [box], "frame": "abs_orig"},
        },
    }


class Viewer:
    """`mmrl view` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mmrl.cli.main", "view", str(folder), "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=bench.ROOT,
        )
        assert self.process.stdout is not None
        found = re.search(r"http://\S+/", self.process.stdout.readline())
        assert found is not None, "the viewer did not start"
        self.url, self.ready_at = found.group(0).rstrip("/"), time.perf_counter()
        self.seconds = self.ready_at - began
        used = psutil.Process(self.process.pid).cpu_times()
        self.started_cpu = used.user + used.system

    def ask(self, path: str, **query: Any) -> Any:
        """The answer to a request of the page."""
        address = f"{self.url}{path}?{urllib.parse.urlencode(query, doseq=True)}"
        with urllib.request.urlopen(address, timeout=120) as answer:
            return json.loads(answer.read())

    def resident_mib(self) -> float:
        """Memory of the process."""
        return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20

    def end(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def viewing(folder: Path) -> Iterator[Viewer]:
    """A viewer that is ended afterwards."""
    viewer = Viewer(folder)
    try:
        yield viewer
    finally:
        viewer.end()


def _timed(work: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work()
    return round(time.perf_counter() - began, 3), found


def measure_rows(count: int) -> dict[str, Any]:
    """Times in seconds and memory for a run of so many rows."""
    with tempfile.TemporaryDirectory(prefix="mmrl-bench-") as folder:
        size = make_rows(Path(folder) / "runs" / "many", count)
        with viewing(Path(folder) / "runs") as viewer:
            many = {"run": "many", "table": "predictions"}
            table, _ = _timed(lambda: viewer.ask("/api/runs"))
            began = time.perf_counter()
            page, found = _timed(lambda: viewer.ask("/api/samples", **many))
            while not found["done"]:
                found = viewer.ask("/api/samples", **many)
            whole = round(time.perf_counter() - began, 3)
            assert found["total"] == count
            narrow, found = _timed(
                lambda: viewer.ask("/api/samples", **many, mode="greedy", reward_max=0.2)
            )
            assert 0 < found["total"] < count
            search, found = _timed(
                lambda: viewer.ask("/api/samples", **many, q="cup left of a red")
            )
            assert found["complete"]
            far, found = _timed(
                lambda: viewer.ask("/api/samples", **many, sort="reward", offset=count - 50)
            )
            assert len(found["rows"]) == 50
            one, _ = _timed(lambda: viewer.ask("/api/sample", **many, row=count // 2))
            return {
                "rows": count,
                "megabytes": round(size / 1e6, 1),
                "start_s": round(viewer.seconds, 3),
                "table_s": table,
                "first_page_s": page,
                "all_rows_s": whole,
                "filter_s": narrow,
                "search_s": search,
                "far_page_s": far,
                "one_row_s": one,
                "resident_mib": round(viewer.resident_mib(), 1),
            }


class _Page(threading.Thread):
    """Asks as an open page of a run does: its metrics every two seconds, its rows as often."""

    def __init__(self, viewer: Viewer, run: str) -> None:
        super().__init__(daemon=True)
        self.viewer, self.run_name, self.over, self.asked = viewer, run, threading.Event(), 0
        self.running, self.seconds, self.since = True, 0.0, time.perf_counter()

    def let_run(self, on: bool) -> None:
        """Stop the viewer's process (SIGSTOP), which then computes nothing, or let it go on; the page waits with it."""
        if on is self.running:
            return
        self.viewer.process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
        now = time.perf_counter()
        self.seconds += (now - self.since) * self.running
        self.running, self.since = on, now

    def run(self) -> None:
        """Until `over` is set."""
        names = [
            n for c in self.viewer.ask("/api/run", run=self.run_name)["charts"] for n in c["names"]
        ][:60]
        start, generation = 0, 0
        while not self.over.wait(SECONDS):
            ask = {"run": self.run_name, "names": names, "from": start, "generation": generation}
            found = self.viewer.ask("/api/metrics", **ask)
            start, generation = found["next"], found["generation"]
            self.viewer.ask("/api/samples", run=self.run_name, table="rollouts")
            self.asked += 2


def _steps(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def measure_beside(steps: int, stretch: int) -> dict[str, Any]:
    """Seconds of a step with and without a viewer. Two runs of one seed, which compute and write the same to the last bit: the
    first has the viewer in every second stretch of so many steps, the second in the others; every step is compared with itself.
    Stretches are short and the viewer is only stopped between them: how fast a machine is drifts by more than a viewer costs."""
    work = {"requests": 0, "seconds": 0.0, "cpu": 0.0}
    times = [_beside(steps, stretch, odd, work) for odd in (1, 0)]
    return {
        "requests": work["requests"],
        "viewer_s": round(work["seconds"], 1),
        "viewer_cpu_share": round(work["cpu"] / max(1e-9, work["seconds"]), 4),
        **_compared(times[0], times[1], stretch),
    }


def _beside(steps: int, stretch: int, odd: int, work: dict[str, float]) -> dict[int, float]:
    """Seconds of each step of a run that has a viewer in its odd stretches (odd 1), or in the even ones (odd 0)."""
    with tempfile.TemporaryDirectory(prefix="mmrl-bench-") as folder:
        command = [sys.executable, "-m", "mmrl.cli.main", "demo", "--quiet", "--scenes", "200"]
        command += [
            f"train.steps={steps}",
            "eval.every=0",
            "eval.limit=10",
            "eval.samples=1",
            "train.save_every=0",
        ]
        training = subprocess.Popen(
            [*command, "train.log_rollouts=8"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(bench.ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        run = Path(folder) / "runs" / "demo"
        viewer: Viewer | None = None
        page: _Page | None = None
        while training.poll() is None:
            step = _steps(run)
            if viewer is None and step:
                viewer = Viewer(run.parent)
                page = _Page(viewer, "demo")
                page.start()
            if page is not None:
                page.let_run((step // stretch) % 2 == odd)
            time.sleep(0.02)
        if viewer is not None and page is not None:
            _close(viewer, page, work)
        if training.returncode:
            raise RuntimeError("the training run failed")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    return {r["step"]: r["time/total"] for r in rows}


def _close(viewer: Viewer, page: _Page, work: dict[str, float]) -> None:
    """End both; `work` gets the requests, and the seconds that the viewer ran and computed once it had started."""
    page.let_run(True)
    page.over.set()
    page.join(60)
    used = psutil.Process(viewer.process.pid).cpu_times()
    work["requests"] += page.asked
    work["seconds"] += page.seconds + time.perf_counter() - page.since
    work["cpu"] += used.user + used.system - viewer.started_cpu
    viewer.end()


def _compared(first: dict[int, float], second: dict[int, float], stretch: int) -> dict[str, Any]:
    """Ratios of the seconds of the same steps with and without a viewer, their median in each stretch, and the mean over pairs of
    neighbouring stretches, in which either run has the viewer once: what one run does slower by itself cancels. The first stretches
    do not count, in which everything starts."""
    from mmrl.evaluation.stats import bootstrap_mean

    ratios: dict[int, list[float]] = {}
    for step, seconds in first.items():
        number = (step - 1) // stretch
        ratio = seconds / second[step]
        ratios.setdefault(number, []).append(ratio if number % 2 else 1 / ratio)
    begun = 20 // stretch + 1
    middle = {n: statistics.median(r) for n, r in ratios.items() if len(r) == stretch and n > begun}
    pairs = [(middle[n] * middle[n + 1]) ** 0.5 for n in middle if n % 2 == 0 and n + 1 in middle]
    found = bootstrap_mean(pairs)
    return {
        "steps": len(first) + len(second),
        "stretch": stretch,
        "pairs": len(pairs),
        "seconds": round(statistics.median([*first.values(), *second.values()]), 4),
        "ratio_on_to_off": {
            "mean": round(found.mean, 4),
            "low": round(found.low, 4),
            "high": round(found.high, 4),
        },
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="1,000 rows and no training run")
    parser.add_argument("--steps", type=int, default=500, help="of each of two training runs")
    parser.add_argument("--stretch", type=int, default=3, help="steps with or without a viewer")
    options = bench.parse(parser)
    rows = []
    for count in ROWS[:1] if options.quick else ROWS:
        rows.append(measure_rows(count))
        print(json.dumps(rows[-1]), flush=True)
    facts: dict[str, Any] = {"rows": rows}
    if not options.quick:
        facts["beside_a_run"] = measure_beside(options.steps, options.stretch)
        print(json.dumps(facts["beside_a_run"]))
    print(f"recorded in {bench.write_results('bench_view', facts, 'starlette', 'uvicorn')}")


if __name__ == "__main__":
    main()
