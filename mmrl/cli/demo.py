"""The demo that is installed: scenes are drawn where you are, and a tiny model learns on the CPU to draw tighter boxes.

mmrl demo                       # some minutes; results before and after, and the path of the report
mmrl demo --scenes 40 train.steps=2
"""

from __future__ import annotations

from pathlib import Path

import typer

from mmrl.cli.run import train_command
from mmrl.config.shipped import recipe_file
from mmrl.tasks.scenes import make_scenes

__all__ = ["DATA", "demo_command", "make_data"]

DATA = Path("runs/demo_data")  # where the recipe `demo` looks for it
_MIX = {0: 0.5, 1: 0.5}


def make_data(folder: Path, *, train: int = 2000, held_out: int = 200) -> None:
    """Training and held-out scenes, unless so many are there; generated from seeds, so they are the same everywhere and share no
    picture."""
    for name, count, seed in (("train", train, 11), ("eval", held_out, 12)):
        if _rows(folder / name / "data.jsonl") != count:
            make_scenes(folder / name, count, seed, 112, _MIX, f"demo-{name}-", background="graded")


def _rows(file: Path) -> int:
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def demo_command(overrides: list[str], scenes: int = 2000, quiet: bool = False) -> Path:
    """Draw the scenes and train; returns the folder of the run. Raises ConfigError for overrides that fit no key."""
    typer.echo(f"generating scenes in {DATA} ...")
    make_data(DATA, train=scenes, held_out=max(2, scenes // 10))
    return train_command(recipe_file("demo"), overrides, resume=False, overwrite=True, quiet=quiet)
