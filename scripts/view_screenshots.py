"""Pictures of the viewer for the docs: a real run of the demo, and one of the same with another rate, in Chromium.

python -m scripts.view_screenshots                 (trains two short demos first: minutes; writes docs/images/view_*.png)
python -m scripts.view_screenshots --runs runs     (of runs that are there: their first two are compared)
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mmrl.tasks.pages import find_chromium
from scripts._bench import ROOT
from scripts.bench_view import viewing

OUT = ROOT / "docs" / "images"
COLORS = 256  # of a palette: half the bytes
# name, address, width, height, dark
SHOTS = (
    ("view_runs", "#/", 1280, 420, False),
    ("view_curves", "#/run?key={a}", 1280, 900, False),
    ("view_samples", "#/run?key={a}&tab=samples&row=3", 1280, 900, True),
    ("view_compare", "#/compare?run={a}&run={b}&tab=gains", 1280, 720, False),
    ("view_phone", "#/run?key={a}", 390, 844, True),
)


def train(folder: Path) -> None:
    """Two runs of the demo below `folder`/runs."""
    # the model by the name that a clone has, not by this machine's folder: the page shows it
    (folder / "assets").symlink_to(ROOT / "assets")
    for name, rate in (("demo", "1e-4"), ("demo_slow", "1e-5")):
        command = [sys.executable, "-m", "mmrl.cli.main", "demo", "--quiet", "--scenes", "400"]
        command += [f"name={name}", f"optim.lr={rate}", "train.steps=60", "eval.every=15"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=folder, env=environment, check=True)


def save(data: bytes, path: Path) -> None:
    """The screenshot with a palette."""
    from PIL import Image

    picture = Image.open(io.BytesIO(data)).convert("RGB")
    picture.quantize(COLORS).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


def shoot(runs: Path, out: Path) -> None:
    """All pictures of the first two runs below `runs`."""
    from playwright.sync_api import sync_playwright

    out.mkdir(parents=True, exist_ok=True)
    with viewing(runs) as viewer, sync_playwright() as started:
        found = sorted(viewer.ask("/api/runs")["runs"], key=lambda r: -(r["started"] or 0))[::-1]
        keys = {"a": quote(found[0]["key"]), "b": quote(found[min(1, len(found) - 1)]["key"])}
        browser = started.chromium.launch(executable_path=find_chromium())
        for name, place, width, height, dark in SHOTS:
            page: Any = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme="dark" if dark else "light",
            )
            page.goto(f"{viewer.url}/{place.format(**keys)}")
            page.wait_for_selector("body[data-ready]")
            page.wait_for_load_state("networkidle")
            page.wait_for_timeout(1500)
            save(page.screenshot(), out / f"{name}.png")
            page.close()
        browser.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, help="take the runs below this folder")
    parser.add_argument("--out", type=Path, default=OUT, help="where the pictures go")
    options = parser.parse_args()
    if options.runs is not None:
        shoot(options.runs, options.out)
        return
    with tempfile.TemporaryDirectory(prefix="mmrl-view-") as folder:
        train(Path(folder))
        shoot(Path(folder) / "runs", options.out)


if __name__ == "__main__":
    main()
