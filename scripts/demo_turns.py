"""Learning to look: a rollout of two turns with a picture in its second observation, trained with GRPO on the CPU.

    python -m scripts.demo_turns [--seed 0] [--steps 30] [--record]       (one core, about two minutes)

The task is examples/zoom.py: name the quarter that holds stripes, see it from close by, name the stripes. A tiny Qwen2.5-VL with
random weights is first shown answers of which half are right and half drawn by lot, so that it answers in the task's form and is
wrong most of the time. Then it is trained twice by `mmrl.Trainer`: with its rewards, and with the rewards of each group
permuted among its rollouts (reward.shuffle), where nothing can be learned. Exit status 1 when rewards taught nothing or permuted
ones did.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts._bench import parse, print_table, write_results

ROOT = Path(__file__).resolve().parent.parent
TASK = f"{ROOT / 'examples' / 'zoom.py'}:Zoom"
HELD_OUT = 64
# what real rewards must gain at least, and permuted ones may move at most
_GAIN, _DRIFT = 0.25, 0.15


def warm_model(
    folder: Path, rows: Path, seed: int, *, steps: int = 120, batch: int = 16, gain: float = 4.0
) -> Path:
    """A tiny model that learned from answers half of which are right, saved in `folder`. Its weights begin `gain` times as large as
    usual: so small a model otherwise says the same whatever it sees, and takes long to leave that."""
    import torch

    from examples.zoom import QUARTERS, STRIPES
    from mmrl.config import ModelConfig
    from mmrl.policy.loading import load_policy
    from mmrl.policy.tiny import TinySpec, build_tiny
    from mmrl.registry import task_from_spec
    from mmrl.rollout.episodes import begin
    from mmrl.types import StopReason, Turn

    torch.manual_seed(seed)
    model, processor = build_tiny(
        TinySpec(hidden=64, heads=2, kv=1, vision_hidden=32, vision_heads=2, seed=seed)
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(gain if weight.ndim > 1 else 1.0)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    policy, task = (
        load_policy(ModelConfig(path=str(folder), device="cpu", system="")),
        task_from_spec(TASK),
    )
    samples, rng = list(task.load(str(rows))), np.random.default_rng(seed)
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable()], lr=1e-3)
    for _ in range(steps):
        prompts, tokens = [], []
        for place in rng.integers(len(samples), size=batch):
            (episode,) = begin(policy, samples[place], task, 1, (seed, int(place)))
            truths = (
                (QUARTERS[samples[place].params["quarter"]], list(QUARTERS)),
                (samples[place].answer, list(STRIPES)),
            )
            for truth, names in truths:
                said = truth if rng.random() < 0.5 else str(rng.choice(names))
                ids = (*policy.processor.tokenizer(said)["input_ids"], policy.eos_ids[0])
                assert episode.prompt is not None
                prompts.append(episode.prompt)
                tokens.append(ids)
                turn = Turn(ids, said, (0.0,) * len(ids), StopReason.EOS)
                episode.take(policy, turn, episode.step(turn))
        optimizer.zero_grad()
        (-policy.evaluate(prompts, tokens).logp_N.mean()).backward()
        optimizer.step()
    policy.save(folder)
    return folder


def train(
    model: Path, rows: Path, held_out: Path, folder: Path, seed: int, steps: int, *, shuffle: bool
) -> dict[str, Any]:
    """One run; the held-out rewards before and after, and the mean reward of every step."""
    import mmrl

    curve: list[float] = []
    evaluations: list[dict[str, Any]] = []

    def watch(kind: str, payload: Any) -> None:
        if kind == "step":
            curve.append(round(payload["train/reward/mean"], 4))
        if kind == "eval":
            evaluations.append(payload.results)

    began = time.time()
    trainer = mmrl.Trainer(
        model,
        task=TASK,
        train_data=str(rows),
        eval_data=str(held_out),
        overwrite=True,
        quiet=True,
        callbacks=[watch],
        config={
            "name": "turns_shuffled" if shuffle else "turns",
            "dir": str(folder),
            "seed": seed,
            "threads": 1,
            "model.system": "",
            "model.device": "cpu",
            "rollout.group_size": 8,
            "rollout.max_new_tokens": 5,
            "train.steps": steps,
            "train.prompts_per_step": 16,
            "train.save_every": 0,
            "optim.lr": 5e-4,
            "optim.warmup_steps": 3,
            "algorithm.dynamic_sampling": False,
            "reward.shuffle": shuffle,
            "reward.workers": 0,
            "eval.every": 0,
            "eval.samples": 4,
            "eval.best_metric": "sampled/correct",
        },
    )
    trainer.fit()
    before, after = (
        {name: _estimate(e["sampled"][name]) for name in ("correct", "found")}
        for e in (evaluations[0], evaluations[-1])
    )
    return {
        "before": before,
        "after": after,
        "curve": curve,
        "seconds": round(time.time() - began, 1),
    }


def _estimate(found: dict[str, Any]) -> list[float]:
    return [round(found[name], 4) for name in ("mean", "low", "high")]


def results(folder: Path, seed: int, steps: int) -> dict[str, Any]:
    """Both runs."""
    from examples.zoom import make_rows

    rows, held_out = (
        make_rows(folder / name, count, number)
        for name, count, number in (("train", 512, seed), ("held_out", HELD_OUT, seed + 1_000))
    )
    model = warm_model(folder / "model", rows, seed)
    runs = {
        name: train(model, rows, held_out, folder, seed, steps, shuffle=name == "shuffled")
        for name in ("real", "shuffled")
    }
    return {
        "seed": seed,
        "steps": steps,
        "prompts_per_step": 16,
        "group_size": 8,
        "held_out": HELD_OUT,
        **runs,
    }


def verdict(found: dict[str, Any]) -> list[str]:
    """What is wrong with the numbers; [] where rewards taught and permuted ones did not."""
    gain = {
        name: found[name]["after"]["correct"][0] - found[name]["before"]["correct"][0]
        for name in ("real", "shuffled")
    }
    wrong = (
        [f"rewards gained {gain['real']:+.3f}, expected at least {_GAIN:+}"]
        if gain["real"] < _GAIN
        else []
    )
    return wrong + (
        [f"permuted rewards moved it by {gain['shuffled']:+.3f}, expected at most {_DRIFT:+}"]
        if gain["shuffled"] > _DRIFT
        else []
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "turns")
    parser.add_argument(
        "--record", action="store_true", help="write assets/results/demo_turns.json"
    )
    options = parse(parser, arguments)
    found = results(options.folder, options.seed, options.steps)
    print_table(
        ("rewards", "correct before", "after", "found before", "after", "seconds"),
        [
            (
                name,
                *(
                    "{:.2f} [{:.2f}, {:.2f}]".format(*found[name][when][metric])
                    for metric in ("correct", "found")
                    for when in ("before", "after")
                ),
                found[name]["seconds"],
            )
            for name in ("real", "shuffled")
        ],
    )
    if options.record:
        print(f"recorded in {write_results('demo_turns', found, 'torch', 'transformers')}")
    wrong = verdict(found)
    print("\n".join(wrong) or "rewards taught it, permuted rewards did not")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
