"""mmrl against TRL's GRPOTrainer: seconds per optimizer step and peak memory of the same work, as ratios.

    python -m scripts.bench_vs_trl            (about ten minutes, writes assets/results/bench_vs_trl.json)
    python -m scripts.bench_vs_trl --quick    (under a minute, writes nothing)

Both train the same tiny Qwen2.5-VL on the same generated scenes: same prompts, group size, temperature, loss (token
mean, clip 0.2 / 0.28, no KL), one AdamW step per set of rollouts, fp32, one thread, no gradient checkpointing, the
whole step in one micro-batch (or one group per micro-batch, for both), a reward that costs nothing. Every completion
has exactly the allowed length: end-of-turn and media tokens are impossible in both (TRL: `suppress_tokens`; mmrl:
`Policy.banned`). No prompt is seen twice, so mmrl's cache of encoded prompts cannot help it. mmrl runs its real
Trainer, TRL its real GRPOTrainer, each in processes of their own that alternate; a step is the time from the end of
one optimizer step to the end of the next, the first one left out. Evaluation, saving and start-up are not counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmrl import RewardContext, Sample, Score
from mmrl.tasks.grounding import Grounding
from mmrl.tasks.scenes import make_scenes
from scripts import _bench as bench

MODEL = {
    "hidden": 256,
    "layers": 4,
    "heads": 8,
    "kv": 4,
    "vision_hidden": 192,
    "vision_layers": 2,
    "vision_heads": 6,
    "window_vision": True,
    "max_patches": 256,
}
LIBRARIES = ("mmrl", "trl", "torch", "transformers", "accelerate")
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Setting:
    """One comparison. `size` is the pictures' side in pixels: 112 gives 16 visual tokens, 448 gives 256.

    With `accumulate` both put one group into a micro-batch (TRL: gradient accumulation; mmrl: train.token_budget)
    instead of the whole step: peak memory depends on that choice far more than speed does.
    """

    name: str
    what: str
    size: int
    prompt: str | None
    group_size: int
    new_tokens: int
    prompts_per_step: int
    freeze: tuple[str, ...] = ()
    accumulate: bool = False
    required: float | None = None
    fused: bool | None = None
    """mmrl's optim.fused; TRL's AdamW is transformers' default, the fused one."""


SETTINGS = {
    s.name: s
    for s in (
        Setting("a", "small picture, short question", 112, "{question}", 8, 24, 8, required=2.0),
        Setting("b", "large picture, long prompt", 448, None, 8, 32, 2, required=4.0),
        Setting(
            "b1",
            "large picture, long prompt; one group per micro-batch",
            448,
            None,
            8,
            32,
            2,
            accumulate=True,
        ),
        Setting(
            "c",
            "large picture, long prompt; vision tower frozen, G 16",
            448,
            None,
            16,
            32,
            1,
            freeze=("vision",),
        ),
    )
}


def share_of_letters(text: str) -> float:
    """The reward: share of ASCII letters. It costs nothing and differs between random completions."""
    return sum(c.isascii() and c.isalpha() for c in text) / max(1, len(text))


class Letters(Grounding):
    """Grounding prompts with the free reward."""

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        """See share_of_letters."""
        return Score.combine({"letters": share_of_letters(text)}, {"letters": 1.0}, parsed=True)


class Stopwatch:
    """Wall-clock and CPU seconds between the ends of optimizer steps, and seconds spent in wrapped functions."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.phases: list[dict[str, float]] = []
        self._open: dict[str, float] = defaultdict(float)
        self._last: tuple[float, float] | None = None

    def step(self, phases: dict[str, float] | None = None) -> None:
        """Called at the end of every optimizer step."""
        now = time.perf_counter(), time.process_time()
        if self._last is not None:  # the first step has no beginning of its own: it is the warm-up
            self.wall.append(now[0] - self._last[0])
            self.cpu.append(now[1] - self._last[1])
            self.phases.append(phases if phases is not None else dict(self._open))
        self._open.clear()
        self._last = now

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its seconds added to phase `name`."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._open[name] += time.perf_counter() - began

        return wrapped

    def row(self, **extra: Any) -> dict[str, Any]:
        """What the child reports: medians over steps, phases with the remainder as 'other'."""
        names = sorted({k for p in self.phases for k in p})
        phases = {k: statistics.median(p.get(k, 0.0) for p in self.phases) for k in names}
        step = statistics.median(self.wall)
        return {
            "step_s": step,
            "step_cpu_s": statistics.median(self.cpu),
            "steps_s": self.wall,
            "phases_s": {**phases, "other": max(0.0, step - sum(phases.values()))},
            "peak_mib": bench.peak_mib(),
            **extra,
        }


def forbidden_tokens(processor: Any, eos_ids: tuple[int, ...]) -> list[int]:
    """Tokens neither may sample: placeholders of media, and the ends of a turn (so that lengths are fixed)."""
    from mmrl.policy.families import family_of_processor

    return sorted({*family_of_processor(processor).banned(processor), *eos_ids})


def model_section(folder: Path) -> dict[str, Any]:
    """The path of the model in `folder`/model, and a frame where its family has none."""
    from transformers import AutoConfig

    from mmrl.policy.families import family_of

    path = folder / "model"
    family = family_of(AutoConfig.from_pretrained(path, trust_remote_code=False))
    return {"path": str(path), **({} if family.frame else {"frame": "rel1000"})}


def mmrl_trainer(setting: Setting, folder: Path, steps: int, on_event: Callable[..., Any]) -> Any:
    """mmrl's Trainer of `setting`, on the model in `folder`/model."""
    import torch

    from mmrl.config import RunConfig
    from mmrl.registry import register
    from mmrl.training.trainer import Trainer

    register("letters")(Letters)
    params = {} if setting.prompt is None else {"prompt": setting.prompt}
    config = RunConfig.model_validate(
        {
            "name": "run",
            "dir": tempfile.mkdtemp(dir=folder),
            "threads": 1,
            "model": {
                **model_section(folder),
                "freeze": list(setting.freeze),
                "device": "cpu",
            },
            "data": {
                "train": [
                    {
                        "task": "letters",
                        "path": str(folder / setting.name / "data.jsonl"),
                        "params": params,
                    }
                ]
            },
            "rollout": {"group_size": setting.group_size, "max_new_tokens": setting.new_tokens},
            "algorithm": {"dynamic_sampling": False},
            "optim": {"lr": LEARNING_RATE, "fused": setting.fused},
            "reward": {"workers": 0},
            "train": {
                "steps": steps,
                "prompts_per_step": setting.prompts_per_step,
                "save_every": 0,
                # 1024 holds a group of 380 + 8 * 32 tokens, and no second one
                "token_budget": 1024 if setting.accumulate else 1 << 20,
            },
        }
    )
    trainer = Trainer(config, on_event=on_event)
    policy = trainer.policy
    policy.banned = torch.tensor(forbidden_tokens(policy.processor, policy.eos_ids))
    return trainer


def child_mmrl(setting: Setting, folder: Path, steps: int) -> None:
    """Trains with mmrl and reports."""
    watch, rows = Stopwatch(), []

    def on_event(kind: str, row: dict[str, Any]) -> None:
        if kind == "step":
            watch.step({k: row[f"time/{k}"] for k in ("rollout", "reward", "update")})
            rows.append(row)

    trainer = mmrl_trainer(setting, folder, steps, on_event)
    loaded = bench.peak_mib()
    trainer.fit()
    prompt_tokens = trainer.rollouts.rollouter.tally.prompt_tokens / setting.prompts_per_step
    bench.finish_child(
        watch.row(
            loaded_mib=loaded,
            prompt_tokens=prompt_tokens,
            completion_tokens=statistics.mean(r["train/length/mean"] for r in rows),
            grad_norm=statistics.mean(r["train/grad_norm"] for r in rows),
        )
    )


def trl_dataset(setting: Setting, folder: Path) -> Any:
    """The same samples with the same messages, in TRL's form: a conversation and its pictures."""
    from datasets import Dataset, Image, List
    from transformers import AutoConfig

    from mmrl.config import ModelConfig
    from mmrl.policy.loading import template_for

    model = ModelConfig(**model_section(folder))
    template = template_for(
        AutoConfig.from_pretrained(model.path, trust_remote_code=False).model_type, model
    )
    task = Letters(**({} if setting.prompt is None else {"prompt": setting.prompt}))
    rows = [
        {
            "prompt": task.messages(s, template),
            "images": list(s.images),
        }
        for s in task.load(str(folder / setting.name / "data.jsonl"))
    ]
    return Dataset.from_list(rows).cast_column("images", List(Image()))


def trl_trainer(setting: Setting, folder: Path, steps: int, on_step_end: Callable[..., Any]) -> Any:
    """TRL's GRPOTrainer of `setting`, on the model in `folder`/model. Frozen parts are frozen before it sees the model."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from mmrl.policy.loading import freeze_parts

    model = AutoModelForImageTextToText.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="sdpa"
    )
    freeze_parts(model, list(setting.freeze))
    processor = AutoProcessor.from_pretrained(folder / "model")
    eos = tuple(model.generation_config.eos_token_id)

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            on_step_end()

    def reward(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
        return [share_of_letters(c[0]["content"]) for c in completions]

    rows = setting.prompts_per_step * setting.group_size
    parts = setting.prompts_per_step if setting.accumulate else 1
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=folder),
        max_steps=steps,
        per_device_train_batch_size=rows // parts,
        gradient_accumulation_steps=parts,
        num_generations=setting.group_size,
        max_completion_length=setting.new_tokens,
        beta=0.0,
        temperature=1.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        shuffle_dataset=False,
        generation_kwargs={"suppress_tokens": forbidden_tokens(processor, eos)},
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=trl_dataset(setting, folder),
        processing_class=processor,
        callbacks=[Clock()],
    )


def child_trl(setting: Setting, folder: Path, steps: int) -> None:
    """Trains with TRL's GRPOTrainer and reports."""
    watch = Stopwatch()
    trainer = trl_trainer(setting, folder, steps, watch.step)
    trainer._generate_single_turn = watch.timed("rollout", trainer._generate_single_turn)
    trainer._calculate_rewards = watch.timed("reward", trainer._calculate_rewards)
    trainer._compute_loss = watch.timed("forward", trainer._compute_loss)
    trainer.accelerator.backward = watch.timed("backward", trainer.accelerator.backward)
    loaded = bench.peak_mib()
    trainer.train()
    logged = [row for row in trainer.state.log_history if "completions/mean_length" in row]
    lengths, norms = (
        [float(row[key]) for row in logged] for key in ("completions/mean_length", "grad_norm")
    )
    rows = setting.prompts_per_step * setting.group_size
    prompt_tokens = trainer.state.num_input_tokens_seen / steps / rows - setting.new_tokens
    bench.finish_child(
        watch.row(
            loaded_mib=loaded,
            prompt_tokens=prompt_tokens,
            completion_tokens=statistics.mean(lengths),
            grad_norm=statistics.mean(norms),
        )
    )


def token_bound(prompt: float, group: int, new: int) -> float:
    """G (P + C) / (P + G C): how many times fewer tokens the language model sees when a group shares its prompt."""
    return group * (prompt + new) / (prompt + group * new)


def prepare(folder: Path, settings: list[Setting], steps: int) -> None:
    """Model and scenes on disk, made in a child: the parent must not import torch."""
    bench.run_child("scripts.bench_vs_trl", ["--child", "model", "--folder", str(folder)])
    for setting in settings:
        make_scenes(
            folder / setting.name,
            steps * setting.prompts_per_step,
            3,
            setting.size,
            1,
            f"bench-{setting.name}-",
        )


def child_model(folder: Path) -> None:
    """Writes the model both load."""
    from mmrl.policy.tiny import TinySpec, build_tiny

    model, _ = build_tiny(TinySpec(**MODEL), folder / "model")  # type: ignore[arg-type]
    bench.finish_child({"parameters": model.num_parameters()})


def compare(setting: Setting, folder: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Alternate both systems on one setting; ratios are TRL / mmrl of the same round."""
    found: dict[str, list[dict[str, Any]]] = {"mmrl": [], "trl": []}
    for order in bench.alternation(("mmrl", "trl"), rounds):
        for system in order:
            found[system].append(
                bench.run_child(
                    "scripts.bench_vs_trl",
                    [
                        "--child",
                        system,
                        "--folder",
                        str(folder),
                        "--setting",
                        setting.name,
                        "--steps",
                        str(steps),
                    ],
                )
            )
            print(
                f"  {setting.name} {system:4} {found[system][-1]['step_s']:.3f} s/step", flush=True
            )
    ours, theirs = found["mmrl"], found["trl"]
    for row in (*ours, *theirs):
        assert row["completion_tokens"] == setting.new_tokens, row
    prompt = ours[0]["prompt_tokens"]
    assert math.isclose(prompt, theirs[0]["prompt_tokens"], rel_tol=0.02), (
        prompt,
        theirs[0]["prompt_tokens"],
    )

    def ratio(key: str, base: str | None = None) -> dict[str, float]:
        def value(row: dict[str, Any]) -> float:
            return float(row[key] - (row[base] if base else 0.0))

        return bench.spread([value(t) / value(m) for m, t in zip(ours, theirs, strict=True)], 2)

    bound = token_bound(prompt, setting.group_size, setting.new_tokens)
    speed = ratio("step_s")
    return {
        **asdict(setting),
        "prompt_tokens": round(prompt, 1),
        "speed_ratio": speed,
        "cpu_time_ratio": ratio("step_cpu_s"),
        "peak_memory_ratio": ratio("peak_mib"),
        "memory_above_loaded_ratio": ratio("peak_mib", "loaded_mib"),
        "token_bound": round(bound, 2),
        "share_of_bound": round(speed["median"] / bound, 2),
        "rounds": found,
    }


def phase_medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median over rounds of each phase, seconds per step."""
    return {k: statistics.median(r["phases_s"][k] for r in rows) for k in rows[0]["phases_s"]}


def report(results: list[dict[str, Any]]) -> None:
    """Print the comparison and where the time goes."""
    bench.print_table(
        (
            "setting",
            "P",
            "G",
            "C",
            "mmrl s",
            "TRL s",
            "speed",
            "range",
            "CPU time",
            "memory",
            "bound",
            "needed",
        ),
        [
            (
                f"{r['name']}: {r['what']}",
                f"{r['prompt_tokens']:.0f}",
                r["group_size"],
                r["new_tokens"],
                *(
                    f"{statistics.median(x['step_s'] for x in r['rounds'][s]):.3f}"
                    for s in ("mmrl", "trl")
                ),
                f"{r['speed_ratio']['median']:.2f}x",
                f"{r['speed_ratio']['min']:.2f}-{r['speed_ratio']['max']:.2f}",
                f"{r['cpu_time_ratio']['median']:.2f}x",
                f"{r['peak_memory_ratio']['median']:.2f}x",
                f"{r['token_bound']:.2f}x",
                f"{r['required']:g}x" if r["required"] else "-",
            )
            for r in results
        ],
    )
    print()
    for r in results:
        for system in ("mmrl", "trl"):
            phases = ", ".join(
                f"{k} {v:.3f}" for k, v in phase_medians(r["rounds"][system]).items()
            )
            peak = statistics.median(x["peak_mib"] for x in r["rounds"][system])
            print(f"{r['name']} {system:4} seconds per step: {phases}; peak {peak:.0f} MiB")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round of two steps of setting a; writes nothing"
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--steps", type=int, default=6, help="optimizer steps per process, the first is the warm-up"
    )
    parser.add_argument(
        "--settings", nargs="*", choices=SETTINGS, help="these settings; nothing is recorded then"
    )
    parser.add_argument("--child", choices=("mmrl", "trl", "model"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--setting", choices=SETTINGS, help=argparse.SUPPRESS)
    options = bench.parse(parser)
    if options.child == "model":
        return child_model(options.folder)
    if options.child:
        train = {"mmrl": child_mmrl, "trl": child_trl}[options.child]
        return train(SETTINGS[options.setting], options.folder, options.steps)
    if importlib.util.find_spec("trl") is None:
        parser.error(
            "expected TRL beside mmrl, found none; it needs Python 3.11 or later: pip install -e '.[dev]'"
        )
    names, rounds, steps = (
        (["a"], 1, 3)
        if options.quick
        else (options.settings or list(SETTINGS), options.rounds, options.steps)
    )
    chosen = [SETTINGS[name] for name in names]
    with tempfile.TemporaryDirectory(prefix="mmrl-bench-") as folder:
        prepare(Path(folder), chosen, steps)
        results = [compare(setting, Path(folder), rounds, steps) for setting in chosen]
    report(results)
    if not options.quick and not options.settings:
        print(
            f"\nwritten to {bench.write_results('bench_vs_trl', {'model': MODEL, 'settings': results}, *LIBRARIES)}"
        )
    missed = [
        r["name"] for r in results if r["required"] and r["speed_ratio"]["median"] < r["required"]
    ]
    if missed and not options.quick:
        raise SystemExit(f"below the required ratio: {', '.join(missed)}")


if __name__ == "__main__":
    main()
