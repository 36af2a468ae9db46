"""What short runs of every kind compute, step by step: rewards, loss, gradient norm, KL, entropy and the weights they end with.

    python -m scripts.record_golden                           # all kinds, a quarter of an hour on two cores
    python -m scripts.record_golden grounding robots_grpo     # these kinds
    python -m scripts.record_golden --against main            # runs both commits here and compares them bit for bit
    python -m scripts.record_golden --record                  # writes tests/golden/KIND.json

A redesign that is meant to change nothing must leave all of it as it was. On one machine and one process equal means equal: every
reward and metric as it is printed, and the digest of every trained tensor; another processor rounds otherwise. Each kind is
started as a user starts it, `mmrl train` or `mmrl sft` in a process of its own (two processes under torchrun for ddp and fsdp2),
so that the recorder needs nothing of the code it watches but the files that a run leaves.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts._bench import ROOT, machine, parse, print_table

GOLDEN = ROOT / "tests" / "golden"
METRICS = (
    "train/loss",
    "train/grad_norm",
    "train/kl",
    "train/entropy",
    "train/ratio",
    "train/reward/mean",
    "train/reward/std",
)
"""What is kept of a row of metrics.jsonl, where it is there."""
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_SHORT = (
    "train.steps=3",
    "train.prompts_per_step=4",
    "train.save_every=3",
    "train.log_rollouts=1000",
    "data.eval=[]",
)
_ROBOT = (
    "train.steps=2",
    "train.prompts_per_step=3",
    "train.save_every=2",
    "train.log_rollouts=0",
    "eval_states=2",
    "eval.limit=2",
    "eval.gallery=0",
    "env.slots=8",
    "rollout.group_size=4",
)


@dataclass(frozen=True)
class Kind:
    """A short run: recipe of configs/, what is changed in it, the command and how many processes train."""

    recipe: str
    overrides: tuple[str, ...]
    command: str = "train"
    processes: int = 1


def _grounding(*extra: str, **options: Any) -> Kind:
    return Kind(
        "demo", (*_SHORT, "data.train.0.path={data}/demo/train/data.jsonl", *extra), **options
    )


def _mixed() -> Kind:
    names = (
        "grounding",
        "detection",
        "counting",
        "classification",
        "choice",
        "boolean",
        "ocr",
        "gui_grounding",
    )
    paths = (
        f"data.train.{i}.path={{data}}/mixed/train/{name}/data.jsonl"
        for i, name in enumerate(names)
    )
    return Kind("mixed_tiny", (*_SHORT, *paths, "train.prompts_per_step=8"))


def _robots(*extra: str) -> Kind:
    return Kind("robot_tiny", (*_ROBOT, *extra))


_VIDEO = ("data.train.0.path={data}/video/train/direction/data.jsonl", "data.cache.dir={out}/cache")
_PPO = ("algorithm.advantage=gae", "vla.value_head=true")
KINDS: dict[str, Kind] = {
    "grounding": _grounding(),
    "grounding_kl": _grounding(
        "algorithm.kl.coef=0.05", "algorithm.epochs=2", "algorithm.minibatches=2"
    ),
    "grounding_lora": _grounding("model.lora={r: 8}"),
    "grounding_ppo": _grounding(
        "algorithm.advantage=gae",
        "algorithm.advantage_scale=batch",
        "algorithm.filter.key=accuracy",
        "algorithm.epochs=2",
    ),
    "grounding_pipelined": _grounding("schedule.kind=pipelined"),
    "luffy": _grounding("algorithm.offline={per_group: 1, gold: true}"),
    "mixed": _mixed(),
    "video_contrast": Kind("tgrpo_tiny", (*_SHORT, *_VIDEO)),
    "sft": Kind(
        "tiny_warmstart",
        (
            "model.path=assets/tiny_vlm",
            "train.steps=3",
            "train.prompts_per_step=4",
            "data.train.0.path={data}/demo/train/data.jsonl",
        ),
        command="sft",
    ),
    "robots_sft": Kind(
        "robot_tiny",
        (
            "dir={out}",
            "demos.path=null",
            "demos.episodes=2",
            "demos.steps=3",
            "demos.batch=8",
        ),
        command="sft",
    ),
    "robots_grpo": _robots("schedule.kind=serial"),
    "robots_pipelined": _robots(),
    "robots_ppo_chunk": _robots(*_PPO, "algorithm.critic.level=turn"),
    "robots_ppo_action": _robots(*_PPO, "algorithm.critic.level=action"),
    "ddp": _grounding("engine.train=ddp", processes=2),
    "fsdp2": _grounding("engine.train=fsdp2", processes=2),
}


def make_data(folder: Path) -> None:
    """A few samples of every kind, generated from seeds."""
    from scripts import demo, demo_mixed, demo_video

    demo.make_data(folder / "demo", train=24, held_out=1)
    demo_mixed.make_data(folder / "mixed", train=8, held_out=1)
    demo_video.make_data(folder / "video", train=12, held_out=dict.fromkeys(demo_video.USED, 1))


def run_kind(kind: Kind, data: Path, out: Path, root: Path) -> dict[str, Any]:
    """Start the run with the code of the checkout `root`, and return what is recorded of it. RuntimeError where it fails."""
    head = [sys.executable, "-m"]
    if kind.processes > 1:
        head += [
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={kind.processes}",
            "-m",
        ]
    overrides = [o.replace("{data}", str(data)).replace("{out}", str(out)) for o in kind.overrides]
    tail = ["--overwrite", *([] if kind.command == "train" else ["--out", str(out / "sft")])]
    names = [f"dir={out}", "name=run"] if kind.command == "train" else []
    command = [
        *head,
        "mmrl.cli.main",
        kind.command,
        f"configs/{kind.recipe}.yaml",
        *overrides,
        *names,
        *tail,
    ]
    done = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(root)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=1800,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-4000:]}"
        )
    if kind.command == "sft":
        return {"steps": [], "weights": weights(out / "sft")}
    (checkpoint,) = (out / "run" / "checkpoints").glob("step_*")
    return {"steps": steps(out / "run"), "weights": weights(checkpoint)}


def steps(run: Path) -> list[dict[str, Any]]:
    """Of every step METRICS and, in the order of their groups, the rewards of the rollouts that were trained on."""
    rows = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    out = []
    for row in rows:
        logged = run / "rollouts" / f"step_{row['step']:06d}.jsonl"
        found = {name: row[name] for name in METRICS if row.get(name) is not None}
        if logged.exists():
            lines = [json.loads(line) for line in logged.read_text(encoding="utf-8").splitlines()]
            # groups arrive in any order under a pipeline; members keep theirs
            lines.sort(key=lambda r: r["key"])
            found["rewards"] = [line["score"]["value"] for line in lines if line.get("score")]
        out.append(found)
    return out


def weights(folder: Path) -> dict[str, Any]:
    """Number of tensors, the digest of them all, and the norm of each, which bears rounding."""
    import torch
    from safetensors.torch import load_file

    tensors = {
        f"{path.stem}/{name}": tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    if not tensors:
        raise RuntimeError(f"expected *.safetensors in {folder}, found none")
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    norms = {
        name: float(torch.linalg.vector_norm(tensor.double()))
        for name, tensor in sorted(tensors.items())
    }
    return {"tensors": len(tensors), "digest": digest.hexdigest(), "norms": norms}


def processor() -> str:
    """What the bits of a run depend on beside its code: the processor's kind and the instructions that torch uses."""
    import torch

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    known = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    parts = [known.get(name, "?") for name in ("vendor_id", "cpu family", "model", "stepping")]
    return " ".join([*parts, torch.backends.cpu.get_cpu_capability(), f"torch {torch.__version__}"])


def against_record(name: str, new: Mapping[str, Any]) -> list[str]:
    """Where a run differs from its record. On another kind of processor only the first step is compared, to rounding: AdamW divides
    what rounding leaves of a small gradient by itself, and later steps sample from other weights."""
    old = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    if old["processor"] == processor():
        return differences(old, new)
    first, again = (
        {**record, "steps": record["steps"][:1], "weights": {"digest": "", "norms": {}}}
        for record in (old, new)
    )
    found = differences(first, again, rel=2e-3)
    if old["weights"]["norms"].keys() != new["weights"]["norms"].keys():
        found.append("the names of the weights differ")
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any], rel: float = 0.0) -> list[str]:
    """Where two records differ by more than `rel` of the larger value; without `rel`, also in the digest of the weights."""
    found: list[str] = []
    if len(old["steps"]) != len(new["steps"]):
        return [f"{len(old['steps'])} steps and {len(new['steps'])}"]
    for number, (a, b) in enumerate(zip(old["steps"], new["steps"], strict=True), 1):
        for name in sorted(a.keys() | b.keys()):
            if not _equal(a.get(name), b.get(name), rel):
                found.append(
                    f"step {number}, {name}: {_short(a.get(name))} and {_short(b.get(name))}"
                )
    a, b = old["weights"]["norms"], new["weights"]["norms"]
    found += [
        f"norm of {name}: {a.get(name)} and {b.get(name)}"
        for name in sorted(a.keys() | b.keys())
        if not _equal(a.get(name), b.get(name), rel)
    ]
    if not rel and old["weights"]["digest"] != new["weights"]["digest"]:
        found.append("the weights' digests differ")
    return found


def _equal(a: Any, b: Any, rel: float) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_equal(x, y, rel) for x, y in zip(a, b, strict=True))
    if a is None or b is None:
        return a is b
    return a == b or abs(a - b) <= rel * max(abs(a), abs(b), 1e-6)


def _short(value: Any) -> str:
    return f"{len(value)} values" if isinstance(value, list) else repr(value)


def _checkout(commit: str, folder: Path) -> Path:
    """The files of a commit, without touching this checkout."""
    archive = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, capture_output=True, check=True
    ).stdout
    folder.mkdir(parents=True)
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 where something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--record", action="store_true", help="write tests/golden/KIND.json")
    parser.add_argument(
        "--against",
        metavar="COMMIT",
        help="run this commit's code, too, and compare; else the records",
    )
    options = parse(parser, argv)
    if unknown := set(options.kinds) - KINDS.keys():
        parser.error(f"expected kinds of {', '.join(KINDS)}, found {', '.join(sorted(unknown))}")
    table: list[tuple[str, int, str]] = []
    with tempfile.TemporaryDirectory(prefix="mmrl-golden-") as scratch:
        folder = Path(scratch)
        make_data(folder / "data")
        other = _checkout(options.against, folder / "other") if options.against else None
        for name in options.kinds or KINDS:
            new = run_kind(KINDS[name], folder / "data", folder / "new" / name, ROOT)
            path = GOLDEN / f"{name}.json"
            if other is not None:
                old = run_kind(KINDS[name], folder / "data", folder / "old" / name, other)
            else:
                old = None
            if old is not None:
                found = differences(old, new)
            else:
                found = against_record(name, new) if path.exists() else ["nothing recorded"]
            table.append(
                (
                    name,
                    len(new["steps"]),
                    "equal" if not found else f"{len(found)} differ: {found[0]}",
                )
            )
            print(*table[-1], flush=True)
            if options.record:
                GOLDEN.mkdir(exist_ok=True)
                head = {"machine": machine()["cpu"], "processor": processor()}
                path.write_text(json.dumps({**head, **new}, indent=1) + "\n", encoding="utf-8")
    print_table(("kind", "steps", f"against {options.against or 'the record'}"), table)
    return int(any(row[2] != "equal" for row in table) and not options.record)


if __name__ == "__main__":
    sys.exit(main())
