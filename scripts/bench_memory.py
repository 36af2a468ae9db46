"""The memory estimate (`mmrl memory`) against resident memory, phase by phase, at true widths: assets/results/bench_memory.json.

    python -m scripts.bench_memory                     # a quarter of an hour on one core, 20 GiB
    python -m scripts.bench_memory --only lora         # one case, not recorded; with --rows and --keep the lines it printed are

Qwen2.5-VL with widths and vocabulary of the 3B model, two layers of the language model and two vision blocks, random weights. Each
case runs in processes of its own: they load the policy as a run does, roll out, differentiate, step (twice: the first step makes
the optimizer's moments) and save. Linux gives the peak of each phase (VmHWM, set back between phases); glibc is told to give freed
tensors back at once.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from scripts import _bench as bench

_MIB = 2**20
PIXELS = 112  # side of the picture: 16 visual tokens
BASE: dict[str, Any] = {
    "algorithm": {"kl": {"coef": 0.0}},
    "model": {"freeze": [], "gradient_checkpointing": True, "device": "cpu"},
    "rollout": {"group_size": 4, "max_new_tokens": 16},
    "train": {"prompts_per_step": 1},
}
FROZEN = {"freeze": ["vision", "projector"]}
# name: (processes, words of text in the prompt, or decisions of an update, changes of BASE)
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "single": (1, 20, {}),
    "frozen": (1, 20, {"model": FROZEN}),
    "frozen_bf16": (1, 20, {"model": {**FROZEN, "dtype": "bf16"}}),
    "lora": (1, 20, {"model": {"dtype": "bf16", "lora": {"r": 16, "alpha": 32}}}),
    "qlora": (
        1,
        20,
        {"model": {"dtype": "bf16", "lora": {"r": 16, "alpha": 32, "quantize": "nf4"}}},
    ),
    "long": (1, 1500, {"model": FROZEN, "rollout": {"max_new_tokens": 4}}),
    "sharded": (2, 20, {"model": FROZEN, "engine": {"train": "fsdp2"}}),
    "zero3": (2, 20, {"model": FROZEN, "engine": {"train": "deepspeed_zero3"}}),
    "sharded_bf16": (
        2,
        20,
        {"model": {**FROZEN, "dtype": "bf16"}, "engine": {"train": "fsdp2"}},
    ),
    "robot": (
        1,
        4,
        {
            "model": FROZEN,
            "env": {"image_size": PIXELS, "slots": 16},
            "schedule": {"kind": "serial"},
            "action": {"chunk": 8},
        },
    ),
}


def run_of(folder: Path, name: str) -> Any:
    """The configuration of a case."""
    from mmrl.config import RunConfig
    from mmrl.robotics.config import EmbodiedConfig

    tree = {section: dict(values) for section, values in BASE.items()}
    for section, values in CASES[name][2].items():
        tree.setdefault(section, {}).update(values)
    tree["model"]["path"] = str(folder / "model")
    if "env" not in tree:
        return RunConfig.model_validate(tree)
    del tree["rollout"]["max_new_tokens"]
    return EmbodiedConfig.model_validate(tree)


class Watch:
    """Largest resident memory of each phase, in bytes."""

    def __init__(self) -> None:
        self.peaks: dict[str, float] = {}
        self.before = self._value("VmRSS")

    @staticmethod
    def _value(field: str) -> float:
        text = Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024.0 * int(text.split(f"{field}:")[1].split()[0])

    def phase(self, name: str, work: Callable[[], Any]) -> Any:
        """What `work` returns; the peak of the last call with a name stands."""
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        found = work()
        self.peaks[name] = self._value("VmHWM")
        return found


def prompt_of(policy: Any, words: int, picture: str) -> Any:
    """A prompt of one picture and so many words."""
    from mmrl.registry import resolve_task
    from mmrl.types import Sample

    sample = Sample("s", "grounding", "made", " ".join(["red"] * words), None, (picture,))
    return policy.encoder(sample, resolve_task("grounding")())


class Answers:
    """A group of answers to one prompt: how they are sampled, and the log-probs that an update takes of them."""

    micro_batches = 1

    def __init__(self, config: Any, words: int, folder: Path) -> None:
        self.config, self.words, self.folder = config, words, folder

    def load(self, hold: Any) -> Any:
        """The policy."""
        from mmrl.policy.loading import load_policy

        return load_policy(self.config.model, self.config.data, hold=hold)

    def begin(self, policy: Any, actor: Any, rank: int) -> None:
        """Make the prompt and the tokens."""
        from mmrl.policy.pack import PackItem, pack
        from mmrl.rollout import Request

        self.policy, self.actor = policy, actor
        actor.eos_ids = (-1,)  # no row ends early
        prompt = prompt_of(policy, self.words, str(self.folder / "picture.png"))
        size, new = self.config.rollout.group_size, self.config.rollout.max_new_tokens
        self.asked = [Request(prompt, size, (1, rank))]
        answers = tuple(tuple(range(100 + g, 100 + g + new)) for g in range(size))
        self.batch = pack([PackItem(prompt, answers)])
        self.prompt_tokens, self.tokens = prompt.length, prompt.length + size * new

    def roll_out(self) -> None:
        """A group."""
        from mmrl.rollout import PrefillOnceEngine, SamplingSettings

        settings = SamplingSettings(max_new_tokens=self.config.rollout.max_new_tokens)
        PrefillOnceEngine(self.actor).generate(self.asked, settings)

    def logp(self) -> Any:
        """Of all tokens."""
        return self.policy.logp(self.batch).logp_N


class Decisions:
    """Decisions of a robot policy, as many as there are simulators; an update takes `count` of them at a time."""

    micro_batches = 2  # of the many in a step, which add to gradients that are there

    def __init__(self, config: Any, count: int) -> None:
        self.config, self.count = config, count

    def load(self, hold: Any) -> Any:
        """The policy, with action tokens that it has not learned."""
        from mmrl.robotics.load import load_vla
        from mmrl.robotics.robosuite import ARM_ACTIONS

        return load_vla(self.config, space=ARM_ACTIONS, hold=hold)

    def begin(self, policy: Any, actor: Any, rank: int) -> None:
        """Make what is seen."""
        import numpy as np

        from mmrl.robotics.contract import Observation

        rng, side = np.random.default_rng(rank), self.config.env.image_size
        self.policy, self.actor = policy, actor
        pictures = rng.integers(0, 256, (self.config.env.slots, side, side, 3)).astype("uint8")
        proprio = np.zeros(0, np.float32)
        self.seen = [Observation({"base": p}, proprio, "push the red block") for p in pictures]
        self.outputs = self.act()
        length = self.outputs[0].prompt.length
        self.prompt_tokens = length
        self.tokens = self.count * (length + policy.tokens_per_decision)

    def act(self) -> Any:
        """One decision of each simulator."""
        return self.actor.act(self.seen, [(0, n) for n in range(len(self.seen))])

    def roll_out(self) -> None:
        """One decision of each simulator."""
        self.act()

    def logp(self) -> Any:
        """Of `count` decisions."""
        chosen = self.outputs[: self.count]
        return self.policy.evaluate([o.prompt for o in chosen], [o.tokens for o in chosen]).logp_N


def child(folder: Path, name: str) -> dict[str, Any]:
    """One process of a case: the peak of each phase."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    import torch
    import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl  # noqa: F401

    from mmrl.distributed.engines import (
        accelerator_options,
        build_actor,
        build_saved,
        build_train_engine,
        held_back,
    )
    from mmrl.distributed.world import World
    from mmrl.training.checkpoint import Checkpoints
    from mmrl.training.optim import build_policy_optimizer

    processes, words, _ = CASES[name]
    config = run_of(folder, name)
    work = Decisions(config, words) if "env" in CASES[name][2] else Answers(config, words, folder)
    world = World(torch.device("cpu"), **accelerator_options(config))
    watch = Watch()

    def start() -> tuple[Any, Any, Any, Any]:
        # as a run does, see PromptRollouts.load_policy
        hold = held_back(config, world.size)
        policy = work.load(hold)
        optimizer = build_policy_optimizer(policy, config.optim)
        actor = build_actor(config, world, policy)
        saved = build_saved(config, world, policy, actor)
        return policy, actor, saved, build_train_engine(config, world, policy, optimizer)

    policy, actor, saved, engine = watch.phase("start-up", start)
    work.begin(policy, actor, world.rank)
    for step in range(2):

        def update() -> None:
            engine.begin(float(work.tokens))
            for number in range(work.micro_batches):
                (logp_N,) = engine.run(lambda: (work.logp(),))
                engine.backward(logp_N.sum(), last=number + 1 == work.micro_batches)

        if actor is not policy:
            watch.phase("gather", lambda: engine.gather_into(actor))
        watch.phase("rollout", work.roll_out)
        watch.phase("update", update)
        watch.phase("optimizer step", lambda: engine.step(float(work.tokens), step, 2, str))  # noqa: B023

    def save() -> None:
        if saved is not policy:
            engine.gather_into(saved)
        state = engine.optimizer_state()
        if world.is_main:
            assert state is not None
            Checkpoints(folder / f"checkpoints-{name}", 1).save(1, saved, state, {})
        world.barrier()

    watch.phase("checkpoint", save)
    return {
        "case": name,
        "processes": processes,
        "prompt_tokens": work.prompt_tokens,
        "tokens": work.tokens,
        "libraries_mib": round(watch.before / _MIB),
        "measured_mib": {n: round(b / _MIB) for n, b in watch.peaks.items()},
    }


def estimated(folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with what `mmrl memory` says of their phases."""
    from mmrl.diagnostics.memory import estimate

    for row in rows:
        config, processes = run_of(folder, row["case"]), row["processes"]
        train = {"token_budget": row["tokens"], "prompts_per_step": processes}
        config = config.model_copy(update={"train": config.train.model_copy(update=train)})
        found = estimate(
            config, processes=processes, kind="cpu", prompt_tokens=row["prompt_tokens"]
        )
        row["estimated_mib"] = {n: round(found.during(n) / _MIB) for n in found.phases}
        row["parts_mib"] = {k: round(v / _MIB) for k, v in found.parts.items()}
        row["phases_mib"] = {
            n: {k: round(v / _MIB) for k, v in phase.items()} for n, phase in found.phases.items()
        }
        worst = max(
            abs(row["estimated_mib"][n] / measured - 1)
            for n, measured in row["measured_mib"].items()
        )
        row["worst_apart"] = round(worst, 4)
    return rows


def launch(folder: Path, name: str) -> dict[str, Any]:
    """The row of a case: of several processes the first one's, which also saves."""
    processes = CASES[name][0]
    arguments = ["--child", name, "--folder", str(folder)]
    if processes == 1:
        return bench.run_child("scripts.bench_memory", arguments)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    others = []
    launched = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for rank in range(1, processes):
        environment = {**os.environ, **launched, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-m", "scripts.bench_memory", *arguments]
        others.append(
            subprocess.Popen(
                command,
                cwd=bench.ROOT,
                env={**environment, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
    before = dict(os.environ)
    os.environ.update(launched, RANK="0", LOCAL_RANK="0")
    try:
        return bench.run_child("scripts.bench_memory", arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)
        for other in others:
            other.wait(timeout=60)


def child_of(kind: str, folder: Path) -> dict[str, Any]:
    """What the process of `--child kind` finds."""
    if kind == "model":
        from scripts._efficiency import child_model
        from scripts._gpu_kit import make_pictures

        os.replace(make_pictures(folder, 1, PIXELS * PIXELS)[0], folder / "picture.png")
        child_model(folder)
        return {}
    if kind == "shape":
        from scripts._efficiency import LAYERS, SHAPE
        from scripts._gpu_kit import shape_and_processor

        config, _ = shape_and_processor(SHAPE)
        text, vision = config.text_config, config.vision_config
        text.num_hidden_layers, text.layer_types = LAYERS, text.layer_types[:LAYERS]
        vision.depth, vision.fullatt_block_indexes = LAYERS, [LAYERS - 1]
        config.save_pretrained(folder / "model")
        return {}
    if kind == "estimates":
        rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
        return {"rows": estimated(folder, rows)}
    return child(folder, kind)


def measured(folder: Path, names: list[str]) -> list[dict[str, Any]]:
    """Every case, one after the other."""
    bench.run_child("scripts.bench_memory", ["--child", "model", "--folder", str(folder)])
    rows = []
    for name in names:
        rows.append(launch(folder, name))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def replaced(known: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a record, of the cases of `new` these, which say when and where they were measured."""
    now = {"date": datetime.now(timezone.utc).date().isoformat(), "machine": bench.machine()}
    fresh = {row["case"]: {**row, **now} for row in new}
    kept = [fresh.pop(row["case"], row) for row in known]
    return [*kept, *fresh.values()]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", dest="overrides", choices=list(CASES), default=[])
    parser.add_argument(
        "--estimate", action="store_true", help="estimate anew beside the recorded measurements"
    )
    parser.add_argument(
        "--rows", type=Path, help="take the rows that an earlier run printed instead of measuring"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="put the cases of --rows into the record, with their own date and machine, and leave its other cases as they are",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = bench.parse(parser)
    if options.keep and not options.rows:
        parser.error(
            "expected --rows FILE with --keep, found no rows; give those that an earlier run printed"
        )
    if options.child:
        found = child_of(options.child, Path(options.folder))
        if options.child != "model" and int(os.environ.get("RANK", 0)) == 0:
            bench.finish_child(found)
        return 0
    file = bench.RESULTS / "bench_memory.json"
    with tempfile.TemporaryDirectory(prefix="mmrl-memory-") as name:
        folder, at = Path(name), ["--folder", name]
        if options.estimate:
            head = json.loads(file.read_text(encoding="utf-8"))
            bench.run_child("scripts.bench_memory", ["--child", "shape", *at])
        elif options.rows:
            lines = options.rows.read_text(encoding="utf-8").splitlines()
            head = {"rows": [json.loads(line) for line in lines if line.startswith("{")]}
            bench.run_child("scripts.bench_memory", ["--child", "shape", *at])
        else:
            head = {"rows": measured(folder, list(options.overrides or CASES))}
        (folder / "rows.json").write_text(json.dumps(head["rows"]), encoding="utf-8")
        rows = bench.run_child("scripts.bench_memory", ["--child", "estimates", *at])["rows"]
    for row in rows:
        print(f"\n{row['case']}: {row['tokens']} tokens, at most {row['worst_apart']:.1%} apart")
        table = [
            [phase, row["estimated_mib"][phase], found, row["phases_mib"][phase]]
            for phase, found in row["measured_mib"].items()
        ]
        bench.print_table(["phase", "estimate, MiB", "measured, MiB", "the phase's own"], table)
        print(row["parts_mib"])
    if options.keep:
        head = json.loads(file.read_text(encoding="utf-8"))
        rows = replaced(head["rows"], rows)
    if options.estimate or options.keep:
        file.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    else:
        bench.write_results("bench_memory", {"rows": rows}, "torch", "transformers")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
