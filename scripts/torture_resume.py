"""Kill a training run with SIGKILL at random moments, resume it each time, and compare it with one nobody disturbed.

    OMP_NUM_THREADS=1 python -m scripts.torture_resume --kills 5 --seed 0 --out assets/results/torture_resume.json

Two runs of one configuration start from the same tiny model: one undisturbed, one killed. They must end identical:
metrics (but for clock, speed and memory), evaluations, logged rollouts, alarms, weights, optimizer and run state, bit
for bit. Exit status 1 when anything differs. A few minutes on one CPU core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from mmrl.tasks.grounding import Grounding
from mmrl.types import RewardContext, Sample, Score
from scripts._bench import parse, results_folder

__all__ = ["Kill", "Letters", "differences", "phase", "torture"]

REPO = Path(__file__).resolve().parent.parent
_CLOCK = ("time/", "speed/", "memory/", "perf/", "schedule/")


class Letters(Grounding):
    """Grounding data with a reward that random text earns in part: an untrained model has groups with signal."""

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        """Share of the characters that lie in the first half of the alphabet."""
        share = sum("a" <= c <= "m" for c in text.lower()) / max(1, len(text))
        return Score.combine(
            {"accuracy": share}, {"accuracy": 1.0}, parsed=True, metrics={"iou": share}
        )


@dataclass(frozen=True)
class Kill:
    """One SIGKILL: seconds after the process started, what the files say it was doing, steps already in checkpoints."""

    seconds: float
    phase: str
    checkpoint: int


def prepare(folder: Path, steps: int) -> Path:
    """Make model, data and configuration under `folder`; returns the configuration file."""
    from mmrl.policy.tiny import TinySpec, build_tiny
    from mmrl.tasks.scenes import make_scenes

    build_tiny(
        TinySpec(hidden=64, heads=2, kv=1, vision_hidden=32, vision_heads=2), folder / "model"
    )
    task = f"{Path(__file__).resolve()}:Letters"
    tree = {
        "dir": str(folder / "runs"),
        "model": {"path": str(folder / "model"), "device": "cpu"},
        "data": {
            "train": [{"task": task, "path": make_scenes(folder / "train", 24, seed=1)}],
            "eval": [{"task": task, "path": make_scenes(folder / "eval", 6, seed=2)}],
        },
        "rollout": {"group_size": 4, "max_new_tokens": 8},
        "optim": {"lr": 0.003, "schedule": "cosine", "warmup_steps": 3},
        "algorithm": {"epochs": 2, "minibatches": 2},
        "eval": {"every": 3, "samples": 2, "limit": 4},
        "train": {"steps": steps, "prompts_per_step": 4, "save_every": 1},
    }
    path = folder / "torture.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


popen: Any = subprocess.Popen
"""What starts a run; tests have one that need not import everything."""


def _start(config: Path, name: str, log: Path, *, resume: bool) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPO),
        "TOKENIZERS_PARALLELISM": "false",
    }
    with log.open("ab") as output:
        return popen(
            [
                sys.executable,
                "-m",
                "mmrl.cli.main",
                "train",
                str(config),
                f"name={name}",
                *(["--auto-resume"] if resume else []),
            ],
            cwd=REPO,
            env=environment,
            stdout=output,
            stderr=output,
        )


def _wait_for_start(process: subprocess.Popen[bytes], run: Path, began: float) -> float:
    """Seconds until this process has written run.json, or until it ended."""
    while process.poll() is None:
        file = run / "run.json"
        if file.exists() and file.stat().st_mtime >= began:
            break
        time.sleep(0.01)
    return time.time() - began


def phase(run: Path, began: float) -> tuple[str, int]:
    """What a run killed just now was doing, as far as its files tell, and the last step it had saved."""
    steps = sorted(int(p.name.removeprefix("step_")) for p in run.glob("checkpoints/step_*"))
    saved = steps[-1] if steps else 0
    info = run / "run.json"
    if not info.exists() or info.stat().st_mtime < began:
        return "starting: imports, model, data", saved
    if json.loads(info.read_text(encoding="utf-8"))["status"] == "finished":
        return "after training: report", saved
    if any(p.name.startswith(".partial-step") for p in (run / "checkpoints").glob(".partial-*")):
        return f"writing the checkpoint of step {saved + 1}", saved
    if not (run / "eval" / "step_000000" / "results.json").exists():
        return "evaluation before training", saved
    rows = (
        (run / "metrics.jsonl").read_text(encoding="utf-8").count("\n")
        if (run / "metrics.jsonl").exists()
        else 0
    )
    if rows > saved:
        return f"between metrics and checkpoint of step {saved + 1}", saved
    if (run / "eval" / f"step_{saved + 1:06d}").exists():
        return f"evaluation of step {saved + 1}", saved
    return f"rollout or update of step {saved + 1}", saved


def _rows_written(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _killed_run(
    config: Path,
    name: str,
    run: Path,
    kills: int,
    steps: int,
    rng: random.Random,
    step_s: float,
    start_s: float,
) -> Iterator[Kill]:
    """Start, kill, resume ...; yields each kill and leaves the run finished.

    Kill i comes at a random step of the i-th share of the run, at a random moment of it; now and then, in addition,
    while the process still starts.
    """
    log = run.parent.parent / f"{name}.log"
    for number in range(kills):
        began = time.time()
        process = _start(config, name, log, resume=number > 0)
        if rng.random() < 0.2:
            time.sleep(rng.random() * start_s)
        else:
            target = (number + rng.random()) * steps / kills
            _wait_for_start(process, run, began)
            while process.poll() is None and _rows_written(run) < int(target):
                time.sleep(0.005)
            time.sleep(rng.random() * 1.2 * step_s)
        ended = process.poll() is not None
        process.send_signal(signal.SIGKILL)
        process.wait()
        if ended:
            break
        yield Kill(round(time.time() - began, 2), *phase(run, began))
    process = _start(config, name, log, resume=True)
    if process.wait() != 0:
        raise SystemExit(
            f"the resumed run failed, see {log}:\n{log.read_text(encoding='utf-8')[-2000:]}"
        )


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(_CLOCK)} for row in rows]


def _tensor_digest(folder: Path) -> str:
    """SHA-256 over names, shapes and bytes of all saved weights and of the optimizer's state."""
    import torch
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    named = [
        item
        for file in sorted(folder.glob("*.safetensors"))
        for item in sorted(load_file(file).items())
    ]
    optimizer = torch.load(folder / "trainer" / "optimizer.pt", weights_only=True)["state"]
    named += [
        (f"{i}.{name}", value)
        for i in sorted(optimizer)
        for name, value in sorted(optimizer[i].items())
    ]
    for name, tensor in named:
        digest.update(
            f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode()
            + tensor.contiguous().numpy().tobytes()
        )
    return digest.hexdigest()


def differences(one: Path, other: Path) -> dict[str, bool]:
    """What was compared between two run folders -> whether it is identical."""
    verdicts = {}
    for name in ("metrics.jsonl", "alarms.jsonl", "failures.jsonl"):
        verdicts[name] = _rows(one / name) == _rows(other / name)
    for pattern in ("eval/*/predictions.jsonl", "rollouts/*.jsonl"):
        files, theirs = (
            sorted(str(f.relative_to(run)) for f in run.glob(pattern)) for run in (one, other)
        )
        verdicts[pattern] = files == theirs and all(
            (one / f).read_bytes() == (other / f).read_bytes() for f in files
        )
    last, theirs_last = (max((run / "checkpoints").glob("step_*")) for run in (one, other))
    verdicts["weights and optimizer"] = last.name == theirs_last.name and _tensor_digest(
        last
    ) == _tensor_digest(theirs_last)
    verdicts["run state"] = (last / "trainer/state.json").read_bytes() == (
        theirs_last / "trainer/state.json"
    ).read_bytes()
    best, theirs_best = ((run / "checkpoints" / "best").resolve().name for run in (one, other))
    verdicts["best checkpoint"] = best == theirs_best
    return verdicts


def torture(folder: Path, *, kills: int, seed: int, steps: int) -> dict[str, Any]:
    """Run everything under `folder`; returns the record that is written to --out."""
    config = prepare(folder, steps)
    runs, rng = folder / "runs", random.Random(seed)
    began = time.time()
    calm = _start(config, "calm", folder / "calm.log", resume=False)
    start_s = _wait_for_start(calm, runs / "calm", began)
    if calm.wait() != 0:
        raise SystemExit(
            f"the undisturbed run failed, see {folder / 'calm.log'}:\n{(folder / 'calm.log').read_text()[-2000:]}"
        )
    total_s = time.time() - began
    print(
        f"undisturbed: {steps} steps in {total_s:.1f} s, of which {start_s:.1f} s to start",
        flush=True,
    )
    record: list[Kill] = []
    for kill in _killed_run(
        config, "killed", runs / "killed", kills, steps, rng, (total_s - start_s) / steps, start_s
    ):
        record.append(kill)
        print(
            f"killed after {kill.seconds:6.2f} s: {kill.phase} (checkpoint {kill.checkpoint})",
            flush=True,
        )
    verdicts = differences(runs / "calm", runs / "killed")
    for name, same in verdicts.items():
        print(f"{'identical' if same else 'DIFFERENT':10} {name}", flush=True)
    from mmrl.operations.versions import versions

    digest = _tensor_digest(max((runs / "killed" / "checkpoints").glob("step_*")))
    return {
        "what": "SIGKILL at random moments, then --resume; compared with an undisturbed run",
        "seed": seed,
        "steps": steps,
        "undisturbed_s": round(total_s, 2),
        "start_s": round(start_s, 2),
        "kills": [asdict(k) for k in record],
        "identical": verdicts,
        "passed": all(verdicts.values()) and len(record) > 0,
        "sha256": digest,
        "machine": {
            "platform": platform.platform(),
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        },
        "versions": versions(),
    }


def main() -> int:
    """Command line; exit status 1 when the runs differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5, help="number of kills")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    parser.add_argument(
        "--out", type=Path, help="record (JSON); default: assets/results/torture_resume.json"
    )
    parser.add_argument("--keep", type=Path, default=None, help="work here and keep the runs")
    args = parse(parser)
    with tempfile.TemporaryDirectory() as scratch:
        record = torture(
            args.keep or Path(scratch), kills=args.kills, seed=args.seed, steps=args.steps
        )
    out = args.out or results_folder() / "torture_resume.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{'passed' if record['passed'] else 'FAILED'}: {len(record['kills'])} kills; {out}")
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
