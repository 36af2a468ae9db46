"""Learning to look again: a tiny model with the tool zoom against itself before, without the tool, and with permuted rewards.

    python -m scripts.bench_zoom                      (an hour a seed on a slow core; writes assets/results/zoom.json)
    python -m scripts.bench_zoom --jobs 3             # so many seeds at a time, on one thread each
    python -m scripts.bench_zoom --resume             # go on after a kill
    python -m scripts.bench_zoom --first 2 --seeds 1 --add     # one more seed for the record
    python -m scripts.bench_zoom --seeds 1 --steps 20

The task is mmrl.tasks.zoom on generated pictures whose answer the whole picture does not show, bit by bit. For each seed a tiny
Qwen2.5-VL of random weights learns from the task's scripted player (configs/zoom_warmstart.yaml), which guesses without a look in
two of three rollouts, and looks at a wrong place at times. It is then trained by configs/zoom.yaml three times: with its rewards,
with the rewards of each group permuted among its rollouts (reward.shuffle), and without the tool for at least as many
seconds of processor time. Held-out pictures have a seed of their own. Exit status 1 where the claim of `verdict` does not hold.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mmrl.files import write_text
from scripts._bench import (
    finish_child,
    parse,
    print_table,
    results_folder,
    run_child,
    warm_start,
    write_results,
)

ROOT = Path(__file__).resolve().parent.parent
HELD_OUT, TRAIN, LOOKS, PLAIN = 200, 2000, 4000, 200
RUNS = ("real", "without", "shuffled")
_GAIN, _DRIFT = 0.25, 0.10  # what rewards must gain at least, and permuted ones may at most
_SETTINGS = {"held_out": HELD_OUT, "pictures": TRAIN, "prompts_per_step": 16, "group_size": 8}
_ROW = "row.json"  # what a seed has found so far
_METRICS = ("correct", "looked", "found")
_TOOLS = "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>\n{% endif -%}\n"
_CALL = '{"name": "zoom", "arguments": {"bbox_2d":'


def blank_model(folder: Path, seed: int, gain: float = 4.0) -> Path:
    """A tiny Qwen2.5-VL of random weights whose chat template has a place for tools, as its family's later ones do, and whose
    tokenizer has Qwen's tokens of a call and the start of one, as frequent words of its task. Weights begin `gain` times as large
    as usual: so small a model otherwise says the same whatever it sees, and takes long to leave that."""
    import torch

    from mmrl.policy.tiny import TinySpec, build_tiny

    torch.manual_seed(seed)
    model, processor = build_tiny(
        TinySpec(hidden=96, heads=3, kv=1, vision_hidden=64, vision_heads=2, seed=seed)
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(gain if weight.ndim > 1 else 1.0)
    processor.chat_template = _TOOLS + processor.chat_template
    processor.tokenizer.chat_template = processor.chat_template
    processor.tokenizer.add_tokens(["<tool_call>", "</tool_call>", _CALL])
    model.resize_token_embeddings(64 * math.ceil(len(processor.tokenizer) / 64))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def pictures(folder: Path, seed: int) -> dict[str, Path]:
    """Pictures of a seed: to train on, to learn where signs are from, to learn guessing without a tool from, and held out."""
    from mmrl.tasks.zoom_pictures import make_zoom_pictures

    return {
        name: Path(make_zoom_pictures(folder / name, count, seed + part * 1_000_000)).parent
        for part, (name, count) in enumerate(
            {"train": TRAIN, "val": HELD_OUT, "plain": PLAIN, "looks": LOOKS}.items()
        )
    }


def warm_model(
    blank: Path, found: Mapping[str, Path], folder: Path, seed: int, overrides: Sequence[str] = ()
) -> float:
    """What `mmrl sft` makes of it, saved in `folder`; returns its seconds of processor time."""
    data = [
        f"data.train.{place}.path={found[name]}"
        for place, name in enumerate(("train", "looks", "plain"))
    ]
    asked = [f"model.path={blank}", *data, f"seed={seed}", *overrides]
    return warm_start("zoom_warmstart.yaml", asked, folder)


def trained(
    name: str, start: Path, data: tuple[Path, Path], folder: Path, seed: int, steps: int
) -> dict[str, Any]:
    """One run of configs/zoom.yaml: held-out numbers before and after, mean rewards of its steps, seconds of processor time
    without evaluations."""
    import mmrl

    curve: list[float] = []
    evaluations: list[dict[str, Any]] = []
    marks: dict[str, float] = {}

    def watch(kind: str, payload: Any) -> None:
        if kind == "step":
            curve.append(round(payload["train/reward/mean"], 4))
            marks["end"] = time.process_time()
        if kind == "eval":
            evaluations.append(payload.results)
            marks.setdefault("begin", time.process_time())

    params = {"tools": [] if name == "without" else ["zoom"]}
    mmrl.Trainer(
        config=ROOT / "configs" / "zoom.yaml",
        overrides={
            "name": name,
            "dir": str(folder),
            "seed": seed,
            "model.path": str(start),
            "data.train.0.path": str(data[0]),
            "data.eval.0.path": str(data[1]),
            "train.steps": steps,
            "reward.shuffle": name == "shuffled",
            **{
                f"data.{part}.0.params.{k}": v
                for part in ("train", "eval")
                for k, v in params.items()
            },
        },
        overwrite=True,
        quiet=True,
        callbacks=[watch],
    ).fit()
    return {
        "steps": steps,
        "seconds": round(marks["end"] - marks["begin"], 1),
        "before": _numbers(evaluations[0]),
        "after": _numbers(evaluations[-1]),
        "curve": curve,
    }


def _numbers(found: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Held-out means with their intervals: sampled and greedy."""
    return {
        mode: {
            metric: [round(found[mode][metric][k], 4) for k in ("mean", "low", "high")]
            for metric in _METRICS
            if metric in found[mode]
        }
        for mode in ("sampled", "greedy")
    }


def one_seed(folder: Path, seed: int, steps: int) -> dict[str, Any]:
    """The start of a seed and what its three runs make of it. What has ended is kept in the folder: called again, it goes on."""
    kept = folder / _ROW
    row: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {"seed": seed}

    def part(name: str, make: Callable[[], Any]) -> Any:
        if name not in row:
            row[name] = make()
            write_text(kept, json.dumps(row))
        return row[name]

    made, start = pictures(folder, seed), folder / "start"

    def run(name: str, count: int) -> dict[str, Any]:
        return trained(name, start, (made["train"], made["val"]), folder, seed, count)

    part(
        "start_seconds",
        lambda: warm_model(blank_model(folder / "blank", seed), made, start, seed),
    )

    def without() -> dict[str, Any]:
        # its rollouts take less time, which only a run tells
        count, found = steps, run("without", steps)
        while found["seconds"] < real["seconds"]:
            # a busy machine takes more time for a step at one time than at another
            count = math.ceil(1.25 * count * real["seconds"] / found["seconds"])
            found = run("without", count)
        return found

    real = part("real", lambda: run("real", steps))
    part("without", without)
    part("shuffled", lambda: run("shuffled", steps))
    return row


def verdict(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with the numbers; [] where every seed gained over its start and over the run without the tool, sampled and
    greedy, with intervals apart, and permuted rewards did not."""
    wrong = [
        f"seed {row['seed']}: without the tool it had {row['without']['seconds']} s, with it {row['real']['seconds']} s"
        for row in rows
        if row["without"]["seconds"] < row["real"]["seconds"]
    ]
    for row in rows:
        for mode in ("sampled", "greedy"):
            after = row["real"]["after"][mode]["correct"]
            others = {
                "its start": row["real"]["before"][mode]["correct"],
                "the run without the tool": row["without"]["after"][mode]["correct"],
            }
            for words, other in others.items():
                if after[0] - other[0] < _GAIN or after[1] <= other[2]:
                    wrong.append(
                        f"seed {row['seed']}, {mode}: {after} is not {_GAIN:+} over {words}, {other}"
                    )
        shuffled = row["shuffled"]
        drift = (
            shuffled["after"]["sampled"]["correct"][0] - shuffled["before"]["sampled"]["correct"][0]
        )
        if drift > _DRIFT:
            wrong.append(f"seed {row['seed']}: permuted rewards gained {drift:+.3f}")
    return wrong


def together(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """These rows and those of other seeds in the record, by seed. Raises ValueError where that was made otherwise."""
    path = results_folder() / "zoom.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"seeds": []}
    played = {row["seed"]: row for row in (*record["seeds"], *rows)}
    made = {name: record[name] for name in _SETTINGS if name in record}
    steps = {row["real"]["steps"] for row in played.values()}
    if (record["seeds"] and made != _SETTINGS) or len(steps) > 1:
        raise ValueError(
            f"expected a record of {_SETTINGS} and equal steps, found {made} and steps {sorted(steps)} in {path}; "
            "record all seeds again, without --add"
        )
    return [played[seed] for seed in sorted(played)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time, a process each")
    parser.add_argument(
        "--resume", action="store_true", help="keep what an earlier try has finished in the folder"
    )
    parser.add_argument("--add", action="store_true", help="keep the other seeds of the record")
    parser.add_argument("--one", type=int, metavar="SEED", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "zoom_bench")
    adds = "--add" in (sys.argv if arguments is None else arguments)
    options = parse(parser, arguments, adds=("seeds",) if adds else ())
    if options.one is not None:
        row = one_seed(options.folder / str(options.one), options.one, options.steps)
        finish_child(row)
        return 0
    folder = str(options.folder.resolve())
    seeds = range(options.first, options.first + options.seeds)
    if not options.resume:
        for seed in seeds:
            (options.folder / str(seed) / _ROW).unlink(missing_ok=True)

    def child(seed: int) -> dict[str, Any]:
        asked = ["--one", str(seed), "--steps", str(options.steps), "--folder", folder]
        return run_child("scripts.bench_zoom", asked, timeout=4 * 3600)

    if options.add:
        together([])  # a record that cannot be added to is named before hours have gone
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(child, seeds))
    if options.add:
        rows = together(rows)
    print_table(
        (
            "seed, run",
            "sampled before",
            "after",
            "greedy before",
            "after",
            "looked",
            "found",
            "steps",
            "s",
        ),
        [
            (
                f"{row['seed']}, {name}",
                *(
                    "{:.2f} [{:.2f}, {:.2f}]".format(*row[name][when][mode]["correct"])
                    for mode in ("sampled", "greedy")
                    for when in ("before", "after")
                ),
                *(row[name]["after"]["sampled"].get(m, [0.0])[0] for m in ("looked", "found")),
                row[name]["steps"],
                row[name]["seconds"],
            )
            for row in rows
            for name in RUNS
        ],
    )
    record = {**_SETTINGS, "seeds": rows}
    print(f"recorded in {write_results('zoom', record, 'torch', 'transformers')}")
    wrong = verdict(rows)
    print("\n".join(wrong) or "looking again was learned, by its rewards alone")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
