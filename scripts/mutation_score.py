"""Do the tests notice a defect? Small defects (mutants) are put into modules one by one; a mutant that no test notices survives.

    OMP_NUM_THREADS=1 python -m scripts.mutation_score                     (hours, writes assets/results)
    python -m scripts.mutation_score --only mmrl/training/alarms.py                 (writes this module's part)
    python -m scripts.mutation_score --only mmrl/training/alarms.py --limit 20      (a sample, writes nothing)

Mutants are made by cosmic-ray's operators (a comparison, an arithmetic or boolean operator, a number, a constant, a loop, an
exception handler is replaced; a decorator is removed). Where several operators apply at one place one of them is drawn, by a
seed. What cannot change behaviour is no mutant: annotations, and what compiles to the same syntax tree.

Each mutant is written to a copy of the project and the module's tests run on it, in a process forked from one that has
imported torch, so that a mutant costs the time of its tests. It is killed by a failing test, by an import that
fails, or by taking more than five times as long as the tests need. scripts/mutation_equivalents.json lists survivors
that no test can kill, each with its reason; the score is killed / (all - equivalent). The least score asked for is 0.9.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from scripts._bench import RESULTS, ROOT, parse, print_table, write_results
from scripts._mutation_worker import Zygote

_STATE = ("tests/attacks/test_state_checkpoints.py", "tests/training/test_checkpoint.py")
_SCORES = (
    "tests/workers/test_scoring_parts.py",
    "tests/workers/test_scoring_workers.py",
    "tests/workers/test_scoring.py",
    "tests/attacks/test_state_scores.py",
)
TESTS: dict[str, tuple[str, ...]] = {
    "mmrl/training/alarms.py": ("tests/training/test_alarms.py", "tests/training/test_collapse.py"),
    "mmrl/diagnostics/diagnosis.py": (
        "tests/training/test_alarms.py",
        "tests/training/test_collapse.py",
    ),
    "mmrl/algorithms/advantages.py": (
        "tests/algorithms/test_advantages.py",
        "tests/algorithms/test_estimators.py",
    ),
    "mmrl/algorithms/ema.py": ("tests/algorithms/test_estimators.py",),
    "mmrl/algorithms/filters.py": (
        "tests/algorithms/test_overlong.py",
        "tests/algorithms/test_dynamic_sampling.py",
    ),
    "mmrl/algorithms/group_rewards.py": (
        "tests/algorithms/test_group_rewards.py",
        "tests/training/test_group_filter.py",
    ),
    "mmrl/policy/manifest.py": ("tests/policy/test_manifest.py",),
    "mmrl/training/checkpoint.py": ("tests/training/test_checkpoint_files.py", *_STATE),
    "mmrl/workers/scoring.py": _SCORES,
    "mmrl/workers/scorer.py": _SCORES,
    "mmrl/workers/reward_pipe.py": ("tests/workers/test_reward_pipe.py",),
    "mmrl/workers/async_scoring.py": ("tests/workers/test_async_scoring.py",),
}
"""Module -> the test files that are to notice its defects, quick ones first."""
REQUIRED = 0.9
EQUIVALENTS = ROOT / "scripts" / "mutation_equivalents.json"
_COPIED = (
    "mmrl",
    "tasks",
    "rewards",
    "video",
    "robotics",
    "scripts",
    "tests",
    "configs",
    "pyproject.toml",
    "README.md",
)
_LINKED = ("assets",)


@dataclass(frozen=True)
class Mutant:
    """One defect: `before` and `after` are the changed lines without indentation."""

    module: str
    operator: str
    line: int
    before: str
    after: str
    source: str


@dataclass(frozen=True)
class Verdict:
    """What the tests said of a mutant: killed, timeout (killed, too), survived or equivalent (survived, with a reason)."""

    mutant: Mutant
    outcome: str
    seconds: float
    reason: str = ""


def _without_annotations(source: str) -> str | None:
    """The syntax tree of a module without annotations; None where it cannot be compiled."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
    return ast.dump(tree)


def _operators() -> Iterator[tuple[str, Any]]:
    """cosmic-ray's operators that need no arguments, but for `is` in the place of other comparisons."""
    from cosmic_ray.plugins import get_operator, operator_names

    for name in sorted(operator_names()):
        if name.endswith(("_Is", "_IsNot")) and "_Is_" not in name and "_IsNot_" not in name:
            continue  # x is 3 in place of x == 3: a matter of the interpreter's small integers
        if "Variable" not in name:
            yield name, get_operator(name)()


def _places(source: str) -> dict[Any, list[tuple[str, Any, int]]]:
    """Where a module can be changed -> the operators that apply there, each with its occurrence."""
    from cosmic_ray.ast import ast_nodes, get_ast

    nodes = list(ast_nodes(get_ast(source)))
    found: dict[Any, list[tuple[str, Any, int]]] = {}
    for name, operator in _operators():
        positions = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, place in enumerate(positions):
            found.setdefault((place[0], place[1]), []).append(
                (name.removeprefix("core/"), operator, occurrence)
            )
    return found


def _changed_lines(source: str, changed: str) -> tuple[list[str], list[str]]:
    marks = [
        line
        for line in difflib.ndiff(source.splitlines(), changed.splitlines())
        if line[:2] in ("- ", "+ ")
    ]
    return [m[2:] for m in marks if m[0] == "-"], [m[2:] for m in marks if m[0] == "+"]


def mutants(module: str, source: str, seed: int, limit: int | None = None) -> list[Mutant]:
    """One mutant for each place of a module that can be changed, drawn by `seed`; at most `limit` of them."""
    from cosmic_ray.mutating import mutate_code

    rng = random.Random(f"{seed}:{module}")
    plain, chosen = _without_annotations(source), []
    for place, choices in sorted(_places(source).items(), key=lambda item: item[0]):
        for name, operator, occurrence in rng.sample(choices, len(choices)):
            try:
                changed = mutate_code(source, operator, occurrence)
            except AttributeError:  # cosmic-ray 8.7 cannot replace an exception with a dotted name
                continue
            if changed is not None and _without_annotations(changed) not in (None, plain):
                before, after = (
                    "\n".join(t.strip() for t in lines) for lines in _changed_lines(source, changed)
                )
                chosen.append(Mutant(module, name, place[0][0], before, after, changed))
                break
    if limit is not None and len(chosen) > limit:
        chosen = sorted(rng.sample(chosen, limit), key=lambda m: m.line)
    return chosen


def _copy(folder: Path) -> Path:
    """The project as it is tracked, without its history, to be changed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *_COPIED], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        # mmrl/tasks and three more are links
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    for name in _LINKED:
        (folder / name).symlink_to(ROOT / name)
    return folder


def reasons() -> dict[tuple[str, str, str], str]:
    """(module, before, after) of mutants that no test can kill -> why."""
    rows = json.loads(EQUIVALENTS.read_text(encoding="utf-8"))
    return {(r["module"], r["before"], r["after"]): r["reason"] for r in rows}


def judge(
    zygotes: Sequence[Zygote],
    module: str,
    found: Sequence[Mutant],
    tests: Sequence[str],
    least_timeout_s: float = 10.0,
) -> list[Verdict]:
    """The verdict on every mutant of one module. Raises SystemExit where its tests fail without a defect."""
    began = time.monotonic()
    outcome, output = zygotes[0].run(tests, timeout_s=1200)
    usual = time.monotonic() - began
    if outcome != 0:
        raise SystemExit(
            f"expected the tests of {module} to pass without a defect, found exit status {outcome}:\n{output[-3000:]}"
        )
    free: SimpleQueue[Zygote] = SimpleQueue()
    for zygote in zygotes:
        free.put(zygote)
    known = reasons()

    def one(mutant: Mutant) -> Verdict:
        zygote = free.get()
        target = zygote.folder / mutant.module
        whole = target.read_text(encoding="utf-8")
        started = time.monotonic()
        try:
            target.write_text(mutant.source, encoding="utf-8")
            status, text = zygote.run(tests, timeout_s=5 * usual + least_timeout_s)
        finally:
            target.write_text(whole, encoding="utf-8")
            free.put(zygote)
        # 3: pytest could not show a failure, of a loop that was ended where no line is
        if status not in (0, 1, 2, 3, None):
            raise SystemExit(f"expected pytest to run, found exit status {status}:\n{text[-3000:]}")
        reason = known.get((mutant.module, mutant.before, mutant.after), "")
        name = (
            "timeout"
            if status is None
            else "killed"
            if status
            else "equivalent"
            if reason
            else "survived"
        )
        return Verdict(mutant, name, round(time.monotonic() - started, 2), reason)

    with ThreadPoolExecutor(len(zygotes)) as pool:
        return list(pool.map(one, found))


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Counts, the score, and every survivor with its line."""
    count = {
        name: sum(v.outcome == name for v in verdicts)
        for name in ("killed", "timeout", "survived", "equivalent")
    }
    real = len(verdicts) - count["equivalent"]
    listed = [
        {k: v for k, v in asdict(v.mutant).items() if k not in ("source", "module")}
        | {"reason": v.reason}
        for v in verdicts
        if v.outcome in ("survived", "equivalent")
    ]
    return {
        "mutants": len(verdicts),
        **count,
        "score": round((count["killed"] + count["timeout"]) / real, 4) if real else None,
        "survivors": [r for r in listed if not r["reason"]],
        "equivalents": [r for r in listed if r["reason"]],
    }


def _recorded() -> dict[str, Any]:
    """What earlier runs found of modules that are still listed."""
    path = RESULTS / "mutation_score.json"
    modules = json.loads(path.read_text(encoding="utf-8"))["modules"] if path.exists() else {}
    return {name: modules[name] for name in TESTS if name in modules}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=sorted(TESTS), help="this module; may be given again"
    )
    parser.add_argument("--limit", type=int, help="at most so many mutants of each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    return parse(parser)


def main() -> None:
    """Command line."""
    options = _arguments()
    results: dict[str, Any] = {}
    written: Any = None
    with tempfile.TemporaryDirectory(prefix="mmrl-mutants-") as folder:
        zygotes = [Zygote(_copy(Path(folder) / str(number))) for number in range(options.jobs)]
        try:
            for module in options.only or TESTS:
                found = mutants(
                    module, (ROOT / module).read_text(encoding="utf-8"), options.seed, options.limit
                )
                verdicts = judge(zygotes, module, found, TESTS[module])
                results[module] = {
                    "date": date.today().isoformat(),
                    "seed": options.seed,
                    **summary(verdicts),
                }
                print(
                    module,
                    {k: v for k, v in results[module].items() if not isinstance(v, list)},
                    flush=True,
                )
                for s in results[module]["survivors"]:
                    print(
                        f"  {module}:{s['line']} {s['operator']}\n    - {s['before']}\n    + {s['after']}",
                        flush=True,
                    )
                # now: a run of hours may be ended, and another may have recorded its modules meanwhile
                if options.limit is None:
                    written = write_results(
                        "mutation_score",
                        {"required": REQUIRED, "modules": _recorded() | {module: results[module]}},
                        "cosmic-ray",
                    )
        finally:
            for zygote in zygotes:
                zygote.close()
    columns = ("mutants", "killed", "timeout", "equivalent", "survived", "score")
    print_table(("module", *columns), [(m, *(r[c] for c in columns)) for m, r in results.items()])
    print("a sample: nothing recorded" if options.limit is not None else written)
    low = [m for m, r in results.items() if r["score"] is not None and r["score"] < REQUIRED]
    sys.exit(f"below {REQUIRED:.0%}: {', '.join(low)}" if low else 0)


if __name__ == "__main__":
    main()
