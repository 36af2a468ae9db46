"""How the code is laid out, by numbers, of two commits side by side.

    python -m scripts.measure_house                                # the commit that the redesign began at, and this one
    python -m scripts.measure_house --commits e1ea5ab HEAD --record  # writes assets/results/house.json

Read from the sources as git holds them (AST): nothing of a commit is imported but for two rows, calls to the loss and settings
without a description, for which its own code runs in a process of its own.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import networkx  # type: ignore[import-untyped]  # which torch brings along

from scripts._bench import ROOT, parse, print_table, write_results

PACKAGES = ("mmrl", "tasks", "rewards", "robotics", "video")
BEFORE = "e1ea5ab"

RECORDS = (
    "Completion",
    "Trajectory",
    "Group",
    "Decision",
    "DecisionLike",
    "Episode",
    "EpisodeLike",
    "EpisodeGroup",
    "Item",
    "Played",
    "Turn",
    "Rollout",
    "RolloutGroup",
    "TrainingTurn",
    "TrainingSample",
)
"""Classes that hold what a policy wrote, at any stage between its sampling and the loss."""

_LOSS = """
import os, sys
depth = []
def watch(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "policy_loss":
        names, here = [], frame.f_back
        while here is not None and not (here.f_code.co_name == "fit" and "trainer" in here.f_code.co_filename):
            if {package!r} in here.f_code.co_filename and here.f_code.co_name != "__exit__":
                names.append(here.f_code.co_name)
            here = here.f_back
        print("FRAMES", " ".join(reversed(names)), flush=True)
        os._exit(0)
from mmrl.config import load_config
try:
    from mmrl.training.trainer import Trainer
except ImportError:
    from mmrl.trainer import Trainer
trainer = Trainer(load_config("configs/demo.yaml", {overrides!r}))
sys.setprofile(watch)
trainer.fit()
"""
_KEYS = """
from mmrl.config import RunConfig
from robotics.config import EmbodiedConfig
def leaves(model):
    for name, field in model.model_fields.items():
        kind = field.annotation
        if hasattr(kind, "model_fields"):
            yield from leaves(kind)
        else:
            yield bool(field.description)
for model in (RunConfig, EmbodiedConfig):
    found = list(leaves(model))
    print("KEYS", len(found), found.count(False))
"""


def checkout(commit: str, folder: Path) -> Path:
    """The files of a commit, without its history."""
    packed = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def sources(tree: Path) -> dict[str, Path]:
    """Modules of the packages by name; a package that is a link to another folder counts once, under its folder's name."""
    found: dict[str, Path] = {}
    for package in PACKAGES:
        for path in sorted((tree / package).rglob("*.py")):
            inside = path.relative_to(tree)
            if not any((tree / parent).is_symlink() for parent in inside.parents):
                found[".".join(inside.with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def classes(trees: Sequence[ast.Module]) -> Iterator[ast.ClassDef]:
    for tree in trees:
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def imported(name: str, tree: ast.Module, known: set[str], package: bool) -> set[str]:
    """Modules of `known` that a module imports, inside functions too, but not for types alone."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                f"{node.module}.{a.name}" if f"{node.module}.{a.name}" in known else node.module
                for a in node.names
            }
        waiting += ast.iter_child_nodes(node)
    clean = {
        f.removeprefix("mmrl.") if f.split(".")[1:2] and f.split(".")[1] in PACKAGES[1:] else f
        for f in found
    }
    return {
        f for f in clean if f in known and f != name and not (package and f.startswith(name + "."))
    }


def circles(files: Mapping[str, Path], parsed: Mapping[str, ast.Module]) -> list[list[str]]:
    """Modules that import each other, at whatever length."""
    arrows = networkx.DiGraph(
        [
            (name, other)
            for name, code in parsed.items()
            for other in imported(name, code, set(files), files[name].name == "__init__.py")
        ]
    )
    parts = networkx.strongly_connected_components(arrows)
    return [sorted(part) for part in parts if len(part) > 1]


def by_string(trees: Sequence[ast.Module]) -> int:
    """Calls of import_module with a text that names a module of ours."""
    calls = (
        node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("import_module")
        and node.args
    )
    return sum(
        isinstance(c.args[0], (ast.Constant, ast.JoinedStr))
        and ast.unparse(c.args[0]).lstrip("f").strip("'\"").startswith(PACKAGES)
        for c in calls
    )


def formatted(files: Sequence[Path], folder: Path) -> int:
    """Lines of the files when ruff formats them at 100 columns."""
    lines = 0
    for number, path in enumerate(files):
        copy = folder / f"{number}.py"
        copy.write_bytes(path.read_bytes())
    subprocess.run(
        [
            sys.executable,
            "-m",
            "ruff",
            "format",
            "--isolated",
            "--line-length",
            "100",
            "-q",
            str(folder),
        ],
        check=True,
    )
    for path in folder.glob("*.py"):
        lines += path.read_text(encoding="utf-8").count("\n")
    return lines


def run(tree: Path, code: str, mark: str) -> list[list[str]]:
    """What the commit's own code prints behind `mark`, line by line."""
    env = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=env, capture_output=True, text=True, timeout=600
    )
    found = [line.split()[1:] for line in told.stdout.splitlines() if line.startswith(mark + " ")]
    if not found:
        raise SystemExit(f"expected a line {mark} of {tree}, found none: {told.stderr[-2000:]}")
    return found


def frames(tree: Path, folder: Path) -> list[str]:
    """Names of the functions of mmrl between Trainer.fit and the loss, of the first step of configs/demo.yaml."""
    data = folder / "scenes"
    make = (
        "import sys\ntry:\n    from mmrl.tasks.scenes import make_scenes\nexcept ImportError:\n    from tasks.scenes import "
        "make_scenes\nmake_scenes(sys.argv[1], 16, seed=3)"
    )
    subprocess.run(
        [sys.executable, "-c", make, str(data)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        check=True,
    )
    overrides = [
        f"model.path={ROOT / 'assets' / 'tiny_vlm'}",
        f"dir={folder}",
        "name=frames",
        "eval.samples=0",
        "data.eval=[]",
        "train.steps=1",
        f"data.train.0.path={data / 'data.jsonl'}",
        "reward.workers=0",
        "train.prompts_per_step=2",
    ]
    return run(tree, _LOSS.format(package=str(tree / "mmrl"), overrides=overrides), "FRAMES")[0]


def measured(commit: str, folder: Path) -> dict[str, Any]:
    """The numbers of one commit."""
    tree = checkout(commit, folder / "tree")
    files = sources(tree)
    parsed = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in files.items()}
    found = list(classes(list(parsed.values())))
    large = {
        c.name: n
        for c in found
        if (n := sum(isinstance(node, ast.FunctionDef) for node in c.body)) > 15
    }
    (folder / "run").mkdir()
    between = frames(tree, folder / "run")
    ask = (
        _KEYS.replace("from robotics", "from mmrl.robotics")
        if (tree / "mmrl" / "robotics").exists()
        else _KEYS
    )
    keys = [[int(n) for n in numbers] for numbers in run(tree, ask, "KEYS")]
    lines: dict[str, int] = {}
    for package in PACKAGES:
        (folder / package).mkdir()
        lines[package] = formatted(
            [p for p in files.values() if p.relative_to(tree).parts[0] == package], folder / package
        )
    named = subprocess.run(
        ["git", "rev-parse", "--short", commit],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return {
        "commit": named.strip(),
        "record types": sorted({c.name for c in found} & set(RECORDS)),
        "large classes": large,
        "circles": circles(files, parsed),
        "top": len([p for p in (tree / "mmrl").glob("*.py") if p.name != "__init__.py"]),
        "by string": by_string(list(parsed.values())),
        "frames": between,
        "lines": lines,
        "keys": {"prompts": keys[0], "robots": keys[1]},
    }


def longest(found: Mapping[str, int]) -> str:
    return f"{len(found)} (most: {max(found.values(), default=0)})"


def rows(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """What is printed: one line per question, one column per commit."""
    asked: list[tuple[str, Any]] = [
        (
            "types that hold what a policy wrote",
            lambda r: f"{len(r['record types'])}: {', '.join(r['record types'])}",
        ),
        ("classes with over 15 methods", lambda r: longest(r["large classes"])),
        ("modules at the top of mmrl/", lambda r: str(r["top"])),
        (
            "import circles, of modules",
            lambda r: f"{len(r['circles'])}, {sum(map(len, r['circles']))}",
        ),
        ("modules imported by a text", lambda r: str(r["by string"])),
        ("calls from Trainer.fit to the loss", lambda r: str(len(r["frames"]))),
        *((f"lines of {p} at 100 columns", lambda r, p=p: f"{r['lines'][p]:,}") for p in PACKAGES),
        *(
            (
                f"keys of {kind} without a description",
                lambda r, kind=kind: f"{r['keys'][kind][1]} of {r['keys'][kind][0]}",
            )
            for kind in ("prompts", "robots")
        ),
    ]
    return [[name, *(tell(r) for r in results)] for name, tell in asked]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commits", nargs=2, default=[BEFORE, "HEAD"], help="before, after")
    parser.add_argument("--record", action="store_true", help="write assets/results/house.json")
    options = parse(parser, argv)
    results = []
    for commit in options.commits:
        with tempfile.TemporaryDirectory(prefix="mmrl-house-") as folder:
            results.append(measured(commit, Path(folder)))
    print_table(["", *(r["commit"] for r in results)], rows(results))
    print(
        json.dumps(
            {
                r["commit"]: {
                    "large classes": r["large classes"],
                    "circles": r["circles"],
                    "frames": r["frames"],
                }
                for r in results
            },
            indent=1,
        )
    )
    if options.record:
        write_results("house", {"before": results[0], "after": results[1]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
