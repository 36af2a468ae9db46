"""Seconds per step of rollouts of several turns beside TRL's GRPOTrainer with its `environment_factory`: the same environment and
tiny model.

    python -m scripts.bench_turns_trl            (a quarter of an hour; writes assets/results/bench_turns_trl.json)
    python -m scripts.bench_turns_trl --quick    (one round of the first setting; writes nothing into assets/results)

A question about a picture; what the policy writes is the call of a tool, whose answer is a quarter of the picture from close by, or
a sentence; after T turns the rollout ends. The model is untrained, so both are told that any text is a call: TRL by a
`response_template` of the tokenizer, which is how it reads calls, mmrl by the environment's `step`. Turns have exactly N tokens,
ends of a turn and media tokens are impossible in both, both have the chat template of Qwen3-VL and the same description of the
tool, and a reward that costs nothing. Both real trainers, as in scripts/bench_vs_trl.py: in processes of their own that alternate,
one thread, fp32, one AdamW step per set of rollouts, the whole step in one micro-batch. Of each side it is checked that
every rollout had T turns of N tokens, and that rollouts were equally long with all that was shown in them. Where a trainer fails,
the end of its error is the row.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmrl import RewardContext, Sample, Score
from mmrl.environment import Environment, Observation, Outcome
from mmrl.task import Template
from mmrl.tasks.grounding import Grounding
from mmrl.tasks.scenes import make_scenes
from mmrl.types import Turn
from scripts import _bench as bench
from scripts.bench_vs_trl import (
    LEARNING_RATE,
    LIBRARIES,
    MODEL,
    Stopwatch,
    forbidden_tokens,
    model_section,
)

SYSTEMS = ("mmrl", "trl")
PROMPTS, GROUP, SIDE = 1, 8, 128
ANY_TEXT_IS_A_CALL = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"(?P<said>[\s\S]+)",
            "close_pattern": "$",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "look", "arguments": {"said": "{said}"}},
            },
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""How TRL reads calls; see transformers' `parse_response`."""


@dataclass(frozen=True)
class Setting:
    """One comparison: `turns` of `new_tokens` each, and whether the tool's answer is a picture or a sentence."""

    name: str
    turns: int
    pictures: bool
    new_tokens: int = 16


SETTINGS = {
    s.name: s
    for s in (
        Setting("2 turns, pictures", 2, True),
        Setting("4 turns, pictures", 4, True),
        Setting("4 turns, sentences", 4, False),
    )
}


def look(said: str) -> list[dict[str, Any]]:
    """
    Look at the picture from close by.

    Args:
        said: Where to look.
    """
    raise NotImplementedError("the description of the tool")


def quarter(path: str, said: str) -> Any:
    """The quarter of a picture that a text names, equal texts the same one, as a PIL picture."""
    from PIL import Image

    with Image.open(path) as picture:
        w, h = (n // 2 for n in picture.size)
        column, row = divmod(sum(map(ord, said)) % 4, 2)
        return picture.convert("RGB").crop((column * w, row * h, (column + 1) * w, (row + 1) * h))


def answered(path: str, said: str, pictures: bool) -> tuple[list[dict[str, Any]], list[Any]]:
    """What the tool answers: the items of its message, and the pictures of them."""
    if pictures:
        return [{"type": "image"}], [quarter(path, said)]
    return [{"type": "text", "text": f"{len(said)} letters were read there"}], []


def odd_share(ids: Any) -> float:
    """The reward: share of tokens with an odd number. It costs nothing and differs between random completions."""
    return sum(int(i) % 2 for i in ids) / max(1, len(ids))


class LookEnvironment(Environment):
    """mmrl's side."""

    def __init__(self, task: Looking, template: Template) -> None:
        self.task, self.template = task, template
        self.max_turns = task.turns  # type: ignore[misc]  # the setting's
        self.written: list[int] = []
        self.played = 0

    def reset(self, sample: Sample, seed: int) -> Observation:
        """The question and its picture."""
        from transformers.utils import get_json_schema

        self.path = sample.images[0]
        messages = self.task.messages(sample, self.template)
        return Observation(messages, list(sample.images), [get_json_schema(look)])

    def step(self, turn: Turn) -> Outcome:
        """A look, or the end."""
        import numpy as np

        self.written += turn.token_ids
        self.played += 1
        if self.played == self.task.turns:
            return Outcome(reward=odd_share(self.written), terminated=True)
        content, pictures = answered(self.path, turn.text, self.task.pictures)
        return Outcome(
            Observation(
                [{"role": "tool", "name": "look", "content": content}],
                [np.array(p) for p in pictures],
            )
        )


class Looking(Grounding):
    """Grounding prompts with the tool; `turns` and `pictures` are the setting's."""

    turns, pictures = 0, False

    def environment(self, template: Template) -> Environment:
        """A rollout."""
        return LookEnvironment(self, template)

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        """Of one answer alone, which nothing here asks for."""
        return Score.combine({"reward": 0.0}, {"reward": 1.0}, parsed=True)


def looking(setting: Setting) -> type[Looking]:
    """The task of a setting."""
    return type("Looking", (Looking,), {"turns": setting.turns, "pictures": setting.pictures})


def child_mmrl(setting: Setting, folder: Path, steps: int) -> None:
    """Trains with mmrl and reports."""
    import torch

    from mmrl.config import RunConfig
    from mmrl.registry import register
    from mmrl.rollout.episodes import Episode
    from mmrl.training.trainer import Trainer

    register("looking")(looking(setting))
    watch, made = Stopwatch(), list[tuple[int, int, int]]()
    rollout = Episode.rollout

    def noted(self: Episode) -> Any:
        own = [len(t.token_ids) for t in self.turns]
        if self.failure is None and self.prompt is not None:
            made.append((len(own), sum(own), self.prompt.length + own[-1]))
        return rollout(self)

    Episode.rollout = noted  # type: ignore[method-assign]

    def on_event(kind: str, row: dict[str, Any]) -> None:
        if kind == "step":
            # TRL's clock holds its environments, too
            rollout = row["time/rollout"] + row.get("time/environment", 0.0)
            watch.step({"rollout": rollout, "update": row["time/update"]})

    config = RunConfig.model_validate(
        {
            "name": "run",
            "dir": tempfile.mkdtemp(dir=folder),
            "threads": 1,
            "model": {**model_section(folder), "device": "cpu"},
            "data": {
                "train": [
                    {
                        "task": "looking",
                        "path": str(folder / "data" / "data.jsonl"),
                        "params": {"prompt": "{question}"},
                    }
                ]
            },
            "rollout": {"group_size": GROUP, "max_new_tokens": setting.new_tokens},
            "algorithm": {"dynamic_sampling": False},
            "optim": {"lr": LEARNING_RATE},
            "reward": {"workers": 0},
            "train": {
                "steps": steps,
                "prompts_per_step": PROMPTS,
                "save_every": 0,
                "token_budget": 1 << 20,
            },
        }
    )
    trainer = Trainer(config, on_event=on_event)
    policy = trainer.policy
    policy.banned = torch.tensor(forbidden_tokens(policy.processor, policy.eos_ids))
    loaded = bench.peak_mib()
    trainer.fit()
    bench.finish_child(watch.row(loaded_mib=loaded, **played(made)))


def played(made: list[tuple[int, int, int]]) -> dict[str, float]:
    """Of rollouts (turns, tokens written, tokens in all): how many there were, and their means."""
    names = ("turns", "written", "length")
    columns = zip(*made, strict=True)
    return {
        "rollouts": len(made),
        **{n: statistics.mean(c) for n, c in zip(names, columns, strict=True)},
    }


def child_trl(setting: Setting, folder: Path, steps: int) -> None:
    """Trains with TRL's GRPOTrainer and reports."""
    import torch
    from datasets import Dataset, Image, List
    from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from mmrl.config import ModelConfig
    from mmrl.policy.loading import template_for

    torch.set_num_threads(1)
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(folder / "model")
    processor.tokenizer.response_template = ANY_TEXT_IS_A_CALL
    eos = model.generation_config.eos_token_id
    task = looking(setting)(prompt="{question}")
    template = template_for(model.config.model_type, ModelConfig(**model_section(folder)))
    samples = list(task.load(str(folder / "data" / "data.jsonl")))
    rows = [
        {"prompt": task.messages(s, template), "images": list(s.images), "path": s.images[0]}
        for s in samples
    ]

    class Look:
        """TRL's side of the environment."""

        def reset(self, path: str, **_: Any) -> None:
            self.path = path

        def look(self, said: str) -> list[dict[str, Any]]:
            content, pictures = answered(self.path, said, setting.pictures)
            return [{"type": "image", "image": p} for p in pictures] or content

    Look.look.__doc__ = look.__doc__

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.step()

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [odd_share(ids) for ids in completion_ids]

    watch, made = Stopwatch(), list[tuple[int, int, int]]()
    room = setting.turns * (setting.new_tokens + 64)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(dir=folder),
            max_steps=steps,
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=room,
            max_tool_calling_iterations=setting.turns - 1,
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
            generation_kwargs={
                "max_new_tokens": setting.new_tokens,
                "suppress_tokens": forbidden_tokens(
                    processor, tuple(eos) if isinstance(eos, list) else (eos,)
                ),
            },
        ),
        train_dataset=Dataset.from_list(rows).cast_column("images", List(Image())),
        processing_class=processor,
        callbacks=[Clock()],
        environment_factory=Look,
    )
    loop = trainer._tool_call_loop

    def noted(prompts: Any, prompt_ids: Any, *rest: Any) -> Any:
        found = loop(prompts, prompt_ids, *rest)
        masks, messages, ids = found[0], found[1], found[2]
        for mask, said, shown, written in zip(masks, messages, prompt_ids, ids, strict=True):
            turns = sum(m["role"] == "assistant" for m in said)
            made.append((turns, sum(mask), len(shown) + len(written)))
        return found

    trainer._tool_call_loop = noted
    trainer._generate = watch.timed("rollout", trainer._generate)
    trainer._compute_loss = watch.timed("forward", trainer._compute_loss)
    trainer.accelerator.backward = watch.timed("backward", trainer.accelerator.backward)
    loaded = bench.peak_mib()
    trainer.train()
    bench.finish_child(watch.row(loaded_mib=loaded, **played(made)))


def child_model(folder: Path, steps: int) -> None:
    """Writes model and scenes, which both load; the chat template is Qwen3-VL's, which writes tools."""
    from trl.chat_template_utils import qwen3_vl_chat_template

    from mmrl.policy.tiny import TinySpec, build_tiny

    options = {**MODEL, "window_vision": False, "max_patches": 64}
    model, _ = build_tiny(TinySpec(arch="qwen3_vl", **options), folder / "model")  # type: ignore[arg-type]
    (folder / "model" / "chat_template.jinja").write_text(qwen3_vl_chat_template, encoding="utf-8")
    make_scenes(folder / "data", steps * PROMPTS, 3, SIDE, 1, "bench-turns-")
    bench.finish_child({"parameters": model.num_parameters()})


def compare(setting: Setting, folder: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Medians of both on one setting, and TRL / mmrl of the same round; or what failed."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SYSTEMS}
    failed: dict[str, str] = {}
    common = ["--folder", str(folder), "--steps", str(steps), "--setting", setting.name]
    for order in bench.alternation(SYSTEMS, rounds):
        for system in order:
            if system in failed:
                continue
            try:
                row = bench.run_child("scripts.bench_turns_trl", ["--child", system, *common])
            except RuntimeError as error:
                failed[system] = str(error).strip().splitlines()[-1]
                continue
            assert (row["turns"], row["written"]) == (
                setting.turns,
                setting.turns * setting.new_tokens,
            ), row
            found[system].append(row)
            print(f"  {setting.name}: {system:4} {row['step_s']:.3f} s/step", flush=True)
    pairs = [] if failed else list(zip(found["mmrl"], found["trl"], strict=True))
    for ours, theirs in pairs:
        # the end of a turn that was cut off is written by one and not by the other
        assert abs(ours["length"] - theirs["length"]) <= 2 * setting.turns, (ours, theirs)

    def ratio(key: str) -> dict[str, float] | None:
        values = [t[key] / m[key] for m, t in pairs]
        return bench.spread(values, 2) if values else None

    return {
        **asdict(setting),
        "speed_ratio": ratio("step_s"),
        "cpu_time_ratio": ratio("step_cpu_s"),
        "peak_memory_ratio": ratio("peak_mib"),
        "failed": failed,
        "rounds": found,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of three steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=4, help="optimizer steps per process, the first is the warm-up"
    )
    parser.add_argument("--child", choices=(*SYSTEMS, "model"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--setting", choices=SETTINGS, help=argparse.SUPPRESS)
    options = bench.parse(parser)
    if options.child == "model":
        return child_model(options.folder, options.steps)
    if options.child:
        train = {"mmrl": child_mmrl, "trl": child_trl}[options.child]
        return train(SETTINGS[options.setting], options.folder, options.steps)
    rounds, steps = (1, 3) if options.quick else (options.rounds, options.steps)
    with tempfile.TemporaryDirectory(prefix="mmrl-turns-") as place:
        common = ["--child", "model", "--folder", place, "--steps", str(steps)]
        bench.run_child("scripts.bench_turns_trl", common)
        chosen = list(SETTINGS.values())[:1] if options.quick else list(SETTINGS.values())
        rows = [compare(setting, Path(place), rounds, steps) for setting in chosen]
    bench.print_table(
        ("setting", "mmrl s", "TRL s", "speed", "CPU time", "peak memory"),
        [
            (
                r["name"],
                *(
                    f"{statistics.median(x['step_s'] for x in r['rounds'][s]):.3f}"
                    if r["rounds"][s]
                    else r["failed"].get(s, "-")
                    for s in SYSTEMS
                ),
                *(
                    f"{r[key]['median']:.2f}x" if r[key] else "-"
                    for key in ("speed_ratio", "cpu_time_ratio", "peak_memory_ratio")
                ),
            )
            for r in rows
        ],
    )
    record = {
        "prompts_per_step": PROMPTS,
        "group_size": GROUP,
        "picture_side": SIDE,
        "model": MODEL,
        "settings": rows,
    }
    print(bench.write_results("bench_turns_trl", record, *LIBRARIES))


if __name__ == "__main__":
    main()
