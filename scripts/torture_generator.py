"""Kill a trainer, its generator process, or both with SIGKILL at random moments, and compare the run with one nobody disturbed.

    OMP_NUM_THREADS=1 python -m scripts.torture_generator --kills 3 --seed 0

Three parts, each of `--kills` kills. A run whose trainer was killed is resumed; a generator that was killed is replaced by its run.

exact   one process, schedule.kind serial: the killed run with a generator process must end as an undisturbed inline run without
        one: metrics (but for clock, speed and memory), evaluations, logged rollouts, weights, optimizer and run state, bit for bit
ahead   two training processes (engine.train fsdp2 over gloo), schedule.kind async, staleness 2: which weights wrote an answer
        depends on timing, so what must hold is: every step trained on every one of its places, once, on the prompts of the
        undisturbed run, and each answer was written by one version, at most two steps old, never by one yet to come
vllm    as `ahead`, and the generator samples with vLLM: each new one starts it again and has its weights compared

Exit status 1 when anything is not so. Some 15 minutes on two CPU cores; writes assets/results/torture_generator.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from mmrl.operations.versions import versions
from scripts._bench import machine, parse, results_folder
from scripts.torture_resume import REPO, differences, phase, prepare

WHO = ("generator", "trainer", "both")
_VLLM = {"kv_cache_gib": 0.125, "max_model_len": 1024}
_AHEAD: dict[str, Any] = {
    "engine": {"train": "fsdp2"},
    "schedule": {"kind": "async", "staleness": 2, "wave": 1},
    "algorithm": {"dynamic_sampling": False},
}
PARTS: dict[str, tuple[int, dict[str, Any]]] = {
    "exact": (1, {}),
    "ahead": (2, _AHEAD),
    "vllm": (2, {**_AHEAD, "engine": {"train": "fsdp2", "rollout": "vllm", "vllm": _VLLM}}),
}
"""Name -> training processes, and changes of the configuration."""
_STALENESS, _PLACES = 2, 4
_MARK = "memfd:mmrl-weights"


def start(config: Path, name: str, processes: int, *overrides: str) -> subprocess.Popen[bytes]:
    """`mmrl train` of that name, resumed where it can be, in a process group of its own."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"]
    with config.with_name(f"{name}.log").open("ab") as output:
        return subprocess.Popen(
            [
                sys.executable,
                *(launcher if processes > 1 else []),
                "-m",
                "mmrl.cli.main",
                "train",
                str(config),
                f"name={name}",
                "--auto-resume",
                *overrides,
            ],
            cwd=REPO,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(REPO),
                "TOKENIZERS_PARALLELISM": "false",
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _parents() -> dict[int, int]:
    """Of all processes."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except OSError:
                continue  # ended meanwhile
    return found


def _has_weights(pid: int) -> bool:
    try:
        return _MARK in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def pair(launched: int) -> tuple[int, int] | None:
    """Process ids of the main trainer and of its generator below the process `launched`; None while both do not run."""
    parents = _parents()
    mine = {launched}
    while more := {p for p, above in parents.items() if above in mine} - mine:
        mine |= more
    sharing = [p for p in mine if _has_weights(p)]
    for pid in sharing:
        if parents.get(pid) in sharing:
            return parents[pid], pid
    return None


def strike(process: subprocess.Popen[bytes], who: str) -> bool:
    """Kill them; whether they were there."""
    found = pair(process.pid)
    if found is None or process.poll() is not None:
        return False
    trainer, generator = found
    for pid, hit in ((generator, who != "trainer"), (trainer, who != "generator")):
        if hit:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return False
    return True


def disturbed(
    config: Path, name: str, processes: int, kills: int, steps: int, rng: random.Random
) -> list[dict[str, Any]]:
    """Run to the end through so many kills, each in its share of the steps; what each of them met."""
    run, record, number = config.parent / "runs" / name, list[dict[str, Any]](), 0
    while True:
        process = start(config, name, processes, "engine.generator.kind=process")
        while process.poll() is None:
            rows = run / "metrics.jsonl"
            done = rows.read_bytes().count(b"\n") if rows.exists() else 0
            if number < kills and done >= number * steps // kills and pair(process.pid):
                time.sleep(rng.random() * 1.5)
                who = WHO[number % len(WHO)]
                doing = phase(run, 0.0)
                if strike(process, who):
                    record.append({"who": who, "phase": doing[0], "checkpoint": doing[1]})
                    print(f"killed {who}: {doing[0]} (checkpoint {doing[1]})", flush=True)
                    number += 1
                    if who != "generator":
                        process.wait(120)
                        break
            time.sleep(0.05)
        if process.wait() == 0:
            return record
        if len(record) < number or not record or record[-1]["who"] == "generator":
            tail = config.with_name(f"{name}.log").read_text(errors="replace")[-3000:]
            raise SystemExit(f"{name}: the run failed by itself\n{tail}")


def _answers(run: Path) -> list[list[dict[str, Any]]]:
    files = sorted((run / "rollouts").glob("*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def kept_promises(calm: Path, killed: Path, steps: int) -> dict[str, bool]:
    """What the parts `ahead` and `vllm` ask for -> whether it is so."""
    found, expected = _answers(killed), _answers(calm)

    def prompts(step: list[dict[str, Any]]) -> list[Any]:
        return sorted({(tuple(r["key"]), r["sample"]["id"]) for r in step})

    ages = [r["step"] - 1 - v for step in found for r in step for v in r["versions"]]
    trained = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    return {
        "every step is there once": [r["step"] for r in trained] == list(range(1, steps + 1)),
        "every place was trained on once": all(
            [key[1] for key, _ in prompts(step)] == list(range(_PLACES)) for step in found
        )
        and all(r["train/groups/kept"] == _PLACES for r in trained),
        "on the prompts of the undisturbed run": list(map(prompts, found))
        == list(map(prompts, expected)),
        "versions are within the bound": len(ages) > 0
        and 0 <= min(ages) <= max(ages) <= _STALENESS,
        "some were rolled out ahead": max(ages) > 0,
    }


def _without_restarts(run: Path) -> None:
    """An inline run has no generator to count."""
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row.pop("train/generator/restarts", None)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def torture(folder: Path, part: str, *, kills: int, seed: int, steps: int) -> dict[str, Any]:
    """One part; its record."""
    processes, changes = PARTS[part]
    folder.mkdir(parents=True)
    config, rng = prepare(folder, steps), random.Random(seed)
    tree = yaml.safe_load(config.read_text())
    for section, keys in changes.items():
        tree.setdefault(section, {}).update(keys)
    tree["train"]["log_rollouts"] = _PLACES
    config.write_text(yaml.safe_dump(tree))
    inline = () if part == "exact" else ("engine.generator.kind=process",)
    if start(config, "calm", processes, *inline).wait() != 0:
        raise SystemExit((folder / "calm.log").read_text(errors="replace")[-3000:])
    record = disturbed(config, "killed", processes, kills, steps, rng)
    calm, killed = folder / "runs" / "calm", folder / "runs" / "killed"
    if part == "exact":
        _without_restarts(killed)
        verdicts = differences(calm, killed)
    else:
        verdicts = kept_promises(calm, killed, steps)
    for name, good in verdicts.items():
        print(f"{part}: {'yes' if good else 'NO ':4} {name}", flush=True)
    return {"kills": record, "verdicts": verdicts, "passed": all(verdicts.values())}


def main() -> int:
    """Command line; exit status 1 when a promise is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=3, help="of each part")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--steps", type=int, default=6, help="training steps of each part")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--keep", type=Path, default=None, help="work here and keep the runs")
    o = parse(parser)
    with tempfile.TemporaryDirectory() as scratch:
        parts = {
            part: torture(
                (o.keep or Path(scratch)) / part, part, kills=o.kills, seed=o.seed, steps=o.steps
            )
            for part in o.parts
        }
    record = {
        "seed": o.seed,
        "steps": o.steps,
        "parts": parts,
        "passed": all(p["passed"] and len(p["kills"]) == o.kills for p in parts.values()),
        "machine": machine(),
        "versions": versions(),
    }
    out = results_folder() / "torture_generator.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{'passed' if record['passed'] else 'FAILED'}; {out}")
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
