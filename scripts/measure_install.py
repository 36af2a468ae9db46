"""What an installation costs: seconds, packages and disk of fresh virtual environments, each made by scripts/setup.sh.

    python -m scripts.measure_install                  # core, which `make demo` needs, then all, which `make install` adds
    python -m scripts.measure_install core --record    # also writes assets/results/install.json

In each environment two steps of the demo are trained, so that a figure stands for an installation that works, and OpenCV's
distributions are counted. Sizes are those of files as `du` counts them, in GiB of 2**30 bytes and in GB of 10**9. Seconds depend on
the network and on what pip has cached.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts._bench import ROOT, parse, print_table, write_results

__all__ = ["TARGETS", "bytes_on_disk", "measure"]

TARGETS = {"core": "make demo", "all": "make install"}
"""Extras that scripts/setup.sh is asked for, and the command that asks for them."""
_TWO_STEPS = (
    "train.steps=2",
    "train.prompts_per_step=2",
    "rollout.group_size=2",
    "eval.limit=4",
    "eval.samples=1",
    "eval.gallery=1",
)


def bytes_on_disk(folder: Path) -> int:
    """Bytes of all blocks of the files below `folder`, hard links counted once."""
    seen: dict[tuple[int, int], int] = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            state = path.stat()
            seen[state.st_dev, state.st_ino] = state.st_blocks * 512
    return sum(seen.values())


def _largest(site: Path, count: int = 6) -> dict[str, int]:
    """MiB of the largest folders of an environment's packages."""
    sizes = {path.name: bytes_on_disk(path) >> 20 for path in site.iterdir() if path.is_dir()}
    return dict(sorted(sizes.items(), key=lambda item: -item[1])[:count])


def measure(extras: str, folder: Path) -> dict[str, Any]:
    """One fresh environment with `extras` in `folder`: what it took, what it holds, and whether the demo trains in it."""
    place = folder / extras
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    began = time.perf_counter()
    subprocess.run(
        ["bash", str(ROOT / "scripts" / "setup.sh"), extras],
        env={**clean, "VENV": str(place)},
        check=True,
    )
    seconds = time.perf_counter() - began
    size = bytes_on_disk(place)
    listed = subprocess.run(
        [str(place / "bin" / "python"), "-m", "pip", "list", "--format=json"],
        env=clean,
        capture_output=True,
        text=True,
        check=True,
    )
    packages = [one["name"] for one in json.loads(listed.stdout)]
    (folder / f"{extras}_demo").mkdir()
    demo = subprocess.run(
        [str(place / "bin" / "mmrl"), "demo", "--quiet", "--scenes", "20", *_TWO_STEPS],
        cwd=folder / f"{extras}_demo",
        env={**clean, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    [site] = place.glob("lib/python*/site-packages")
    return {
        "command": TARGETS.get(extras, f"bash scripts/setup.sh {extras}"),
        "seconds": round(seconds),
        "packages": len(packages),
        "gib": round(size / 2**30, 2),
        "gb": round(size / 1e9, 2),
        "largest_mib": _largest(site),
        "opencv": sorted(name for name in packages if name.startswith("opencv")),
        "demo_trains": demo.returncode == 0,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("extras", nargs="*", help="what to install; default core and all")
    parser.add_argument("--record", action="store_true", help="write assets/results/install.json")
    options = parse(parser)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for extras in options.extras or TARGETS:
            rows[extras] = measure(extras, Path(folder))
            print(extras, json.dumps(rows[extras]), flush=True)
    print_table(
        ["extras", "seconds", "packages", "GB", "OpenCV", "demo trains"],
        [
            [name, r["seconds"], r["packages"], r["gb"], ", ".join(r["opencv"]), r["demo_trains"]]
            for name, r in rows.items()
        ],
    )
    if options.record:
        known = ROOT / "assets" / "results" / "install.json"
        before = json.loads(known.read_text(encoding="utf-8"))["installs"] if known.exists() else {}
        print(f"recorded in {write_results('install', {'installs': before | rows})}")
    failed = [name for name, r in rows.items() if not r["demo_trains"] or len(r["opencv"]) > 1]
    raise SystemExit(
        f"the demo fails or OpenCV is there twice in: {', '.join(failed)}" if failed else 0
    )


if __name__ == "__main__":
    main()
