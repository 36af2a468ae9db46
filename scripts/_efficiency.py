"""What scripts/bench_efficiency.py measures, each in a process of its own: the model, phases of a step, tokens per second, kernels.

Seconds are processor time of one thread: waiting for a core that others use does not count as work done slowly.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from scripts import _bench as bench
from scripts.bench_vs_trl import Setting, forbidden_tokens, mmrl_trainer, trl_trainer

__all__ = ["CHILDREN", "STEPS", "child_model", "counted_anew", "flop_counter"]

SHAPE = "Qwen2.5-VL-3B-Instruct"
LAYERS = (
    2  # of the language model, and blocks of the vision tower: the last of them sees whole pictures
)
STEPS = ("counted", "timed", "timed", "profiled")  # the first is the warm-up, too
_MATRICES = {
    "aten::mm",
    "aten::addmm",
    "aten::addmm_",
    "aten::bmm",
    "aten::baddbmm",
    "aten::mkldnn_convolution",
    "mkldnn::_linear_pointwise",
}
_KERNELS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_Shape = Sequence[int]


def child_model(folder: Path) -> None:
    """Writes the model that all load: true widths and vocabulary, two layers each, random weights."""
    from transformers import AutoModelForImageTextToText, GenerationConfig

    from scripts._gpu_kit import shape_and_processor

    config, processor = shape_and_processor(SHAPE)
    text, vision = config.text_config, config.vision_config
    text.num_hidden_layers, text.layer_types = LAYERS, text.layer_types[:LAYERS]
    text.max_window_layers = LAYERS
    vision.depth, vision.fullatt_block_indexes = LAYERS, [LAYERS - 1]
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    tokenizer = processor.tokenizer
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    bench.finish_child({"parameters": model.num_parameters()})


# ---- phases of a step


def matmul_peak() -> float:
    """FLOPs per second of this machine's own fp32 matrix product: the best of three of (1024, 2048) by (2048, 2048)."""
    a, b, best = torch.ones(1024, 2048), torch.ones(2048, 2048), 0.0
    for _ in range(3):
        began = time.process_time()
        torch.mm(a, b)
        best = max(best, 2 * 1024 * 2048 * 2048 / (time.process_time() - began))
    return best


def _attention_flops(query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward_flops(
    grad: _Shape, query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _linear_flops(rows: _Shape, weight: _Shape, *_: Any, **__: Any) -> int:
    return int(2 * rows[0] * weight[0] * weight[1])


def _addmm_flops(added: _Shape, left: _Shape, right: _Shape, *_: Any, **__: Any) -> int:
    return int(2 * left[0] * left[1] * right[1])


def flop_counter() -> FlopCounterMode:
    """torch's counter with the attention kernels of the CPU, oneDNN's product and addmm in place, which it does not know.

    It counts 2 per multiplication and addition of matrix products, convolutions and attention (masked parts too), as they are run:
    recomputation counts again, all else nothing.
    """
    return FlopCounterMode(
        display=False,
        custom_mapping={
            _KERNELS: _attention_flops,
            torch.ops.mkldnn._linear_pointwise: _linear_flops,
            torch.ops.aten.addmm_: _addmm_flops,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
        },
    )


class Phases:
    """Calls of wrapped functions by phase: their seconds, their FLOPs or their operations, as the step now running asks."""

    def __init__(self, steps: Sequence[str] = STEPS) -> None:
        self.steps, self.number = steps, 0
        self.seconds: list[dict[str, float]] = []
        self.flops: Counter[str] = Counter()
        self.operations: dict[str, Counter[str]] = defaultdict(Counter)
        self.peak = 0.0
        self._open: dict[str, float] = defaultdict(float)
        self._began = time.process_time()

    @property
    def kind(self) -> str:
        """Of STEPS."""
        return self.steps[min(self.number, len(self.steps) - 1)]

    @property
    def done(self) -> bool:
        """Whether all steps that were asked for are over."""
        return self.number == len(self.steps)

    def end_step(self) -> None:
        """The next kind of step begins."""
        now = time.process_time()
        if self.kind == "timed":
            self.seconds.append({**self._open, "step": now - self._began})
        self._open.clear()
        self.number, self._began = self.number + 1, now

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, measured as a part of `phase`."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            if self.kind == "counted":
                with flop_counter() as counter:
                    found = function(*args, **kwargs)
                self.flops[phase] += counter.get_total_flops()
                return found
            if self.kind == "profiled":
                with torch.profiler.profile(
                    activities=[torch.profiler.ProfilerActivity.CPU]
                ) as profile:
                    found = function(*args, **kwargs)
                for row in profile.key_averages():
                    self.operations[phase][row.key] += row.self_cpu_time_total
                return found
            self.peak = max(self.peak, matmul_peak())
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._open[phase] += time.process_time() - began

        return measured

    def row(self) -> dict[str, Any]:
        """Of each phase: seconds, FLOPs, their share of the peak, and the operations that took most, as shares of its time. FLOPs
        alone where no step was timed."""
        if not self.seconds:
            return {"tflop": {phase: flops / 1e12 for phase, flops in self.flops.items()}}
        phases: dict[str, Any] = {}
        for phase, flops in self.flops.items():
            seconds = sorted(s[phase] for s in self.seconds)[len(self.seconds) // 2]
            total = sum(self.operations[phase].values())
            shares = {
                name: round(us / total, 4) for name, us in self.operations[phase].most_common(16)
            }
            phases[phase] = {
                "seconds": round(seconds, 3),
                "tflop": round(flops / 1e12, 4),
                "efficiency": round(flops / seconds / self.peak, 4),
                "matrix_share": round(
                    sum(us for n, us in self.operations[phase].items() if n in _MATRICES) / total, 4
                ),
                "operations": shares,
            }
        return {
            "peak_gflops": round(self.peak / 1e9, 1),
            "step_s": round(sorted(s["step"] for s in self.seconds)[len(self.seconds) // 2], 3),
            "phases": phases,
            "peak_mib": round(bench.peak_mib()),
        }


class _DoneError(Exception):
    """All that is wanted of the run has been measured."""


def child_mmrl(folder: Path, setting: Setting, steps: Sequence[str] = STEPS) -> None:
    """mmrl's Trainer."""
    phases = Phases(steps)

    def on_event(kind: str, row: dict[str, Any]) -> None:
        if kind == "start":
            engine, learner = trainer.rollouts.engine, trainer.learner
            engine.generate = phases.wrap("rollout", engine.generate)
            learner.add = phases.wrap("update", learner.add)
            learner.finish = phases.wrap("update", learner.finish)
        if kind == "step":
            assert row["train/length/mean"] == setting.new_tokens, row
            phases.end_step()
            if phases.done:
                raise _DoneError  # before anything is saved

    trainer = mmrl_trainer(setting, folder, len(steps) + 1, on_event)
    try:
        trainer.fit()
    except _DoneError:
        bench.finish_child(phases.row())


def child_trl(folder: Path, setting: Setting, steps: Sequence[str] = STEPS) -> None:
    """TRL's GRPOTrainer."""
    phases = Phases(steps)

    def on_step_end() -> None:
        phases.end_step()
        if phases.done:
            raise _DoneError

    trainer = trl_trainer(setting, folder, len(steps) + 1, on_step_end)
    trainer._generate_single_turn = phases.wrap("rollout", trainer._generate_single_turn)
    trainer._compute_loss = phases.wrap("update", trainer._compute_loss)
    trainer.accelerator.backward = phases.wrap("update", trainer.accelerator.backward)
    make = trainer.create_optimizer

    def create_optimizer(*args: Any, **kwargs: Any) -> Any:
        optimizer = make(*args, **kwargs)
        optimizer.step = phases.wrap("update", optimizer.step)
        return optimizer

    trainer.create_optimizer = create_optimizer
    try:
        trainer.train()
    except _DoneError:
        bench.finish_child(phases.row())


# ---- tokens per second


class Kernels(TorchDispatchMode):
    """Counts operations that are not views: on a GPU each is at least one kernel, or a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += not func.is_view and func not in (
            torch.ops.aten.detach.default,
            torch.ops.aten._unsafe_view.default,
        )
        return func(*args, **(kwargs or {}))


def _per_token(generate: Callable[[int], Any]) -> float:
    """Kernels of one token-step: what 12 more tokens cost."""
    counts = []
    for tokens in (4, 16):
        with Kernels() as kernels:
            generate(tokens)
        counts.append(kernels.count)
    return (counts[1] - counts[0]) / 12


def _policy(folder: Path, **options: Any) -> Any:
    """The model as a policy that ends no completion early."""
    from mmrl.config import ModelConfig
    from mmrl.policy.loading import load_policy

    policy = load_policy(ModelConfig(path=str(folder / "model"), **options))
    forbidden = forbidden_tokens(policy.processor, policy.eos_ids)
    policy.banned, policy.eos_ids = torch.tensor(forbidden), (-1,)
    return policy


def _samples(folder: Path, setting: Setting) -> tuple[Any, list[Any]]:
    from scripts.bench_vs_trl import Letters

    task = Letters()
    return task, list(task.load(str(folder / setting.name / "data.jsonl")))


def _rates(generate: Callable[[int, int], Any], setting: Setting) -> dict[str, Any]:
    """Tokens per second for each number of prompts, prefill included: the better of two after a warm-up."""
    rates = {}
    generate(1, 2)
    for prompts in PROMPTS:
        seconds = []
        for _ in range(2):
            began = time.process_time()
            generate(prompts, setting.new_tokens)
            seconds.append(time.process_time() - began)
        rates[str(prompts)] = round(
            prompts * setting.group_size * setting.new_tokens / min(seconds), 2
        )
    return rates


PROMPTS = (1, 4)


def child_own(folder: Path, setting: Setting, **options: Any) -> None:
    """mmrl's own engine."""
    from mmrl.rollout import PrefillOnceEngine, Request, SamplingSettings

    policy = _policy(folder, **options)
    task, samples = _samples(folder, setting)
    asked = [
        Request(policy.encoder(s, task), setting.group_size, (n,))
        for n, s in enumerate(samples[: max(PROMPTS)])
    ]
    engine = PrefillOnceEngine(policy)

    def generate(prompts: int, tokens: int) -> Any:
        policy.encoder.visuals.unpin()
        return engine.generate(asked[:prompts], SamplingSettings(max_new_tokens=tokens))

    rates = _rates(generate, setting)
    bench.finish_child(
        {
            "tokens_per_s": rates,
            "kernels": _per_token(lambda tokens: generate(1, tokens)),
            "peak_mib": round(bench.peak_mib()),
        }
    )


def child_lora(folder: Path, setting: Setting) -> None:
    """mmrl's own engine under a LoRA adapter."""
    child_own(folder, setting, lora={})


def child_hf(folder: Path, setting: Setting) -> None:
    """transformers' generate, as TRL calls it without vLLM: each completion with a prompt of its own."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from mmrl.config import ModelConfig
    from mmrl.policy.loading import template_for
    from mmrl.video.media import open_image

    model = AutoModelForImageTextToText.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    processor = AutoProcessor.from_pretrained(folder / "model")
    eos = tuple(model.generation_config.eos_token_id)
    forbidden = forbidden_tokens(processor, eos)
    task, samples = _samples(folder, setting)

    def generate(prompts: int, tokens: int) -> Any:
        chosen = samples[:prompts]
        inputs = processor(
            text=[
                processor.apply_chat_template(
                    task.messages(s, template_for("qwen2_5_vl", ModelConfig())),
                    add_generation_prompt=True,
                    tokenize=False,
                )
                for s in chosen
            ],
            images=[open_image(i) for s in chosen for i in s.images],
            padding=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            return model.generate(
                **inputs,
                do_sample=True,
                top_k=0,
                num_return_sequences=setting.group_size,
                max_new_tokens=tokens,
                suppress_tokens=forbidden,
            )

    rates = _rates(generate, setting)
    bench.finish_child(
        {
            "tokens_per_s": rates,
            "kernels": _per_token(lambda tokens: generate(1, tokens)),
            "peak_mib": round(bench.peak_mib()),
        }
    )


def child_vllm(folder: Path, setting: Setting) -> None:
    """vLLM built for the CPU, in this process, asked as mmrl asks it. Its prefix cache is emptied before each call."""
    from mmrl.rollout.vllm_backend import VLLMBackend, VLLMSettings
    from mmrl.rollout.vllm_inputs import WireSampling, wire_prompt

    policy = _policy(folder)
    task, samples = _samples(folder, setting)
    asked = [wire_prompt(policy, policy.encoder(s, task)) for s in samples[: max(PROMPTS)]]
    banned = tuple(policy.banned.tolist())
    del policy
    backend = VLLMBackend(VLLMSettings(str(folder / "model"), "float32", 1024))

    def generate(prompts: int, tokens: int) -> Any:
        sampling = WireSampling(setting.group_size, 0, 1.0, tokens, (), banned)
        return backend.generate([(p, sampling) for p in asked[:prompts]])

    rates = _rates(generate, setting)
    bench.finish_child({"tokens_per_s": rates, "peak_mib": round(bench.peak_mib())})
    backend.close()


def counted_anew(row: dict[str, Any], tflop: Mapping[str, float]) -> dict[str, Any]:
    """A row of a trainer with other FLOPs than it was written with, and with the share of what counts as matrix products now."""
    phases = {
        name: {
            **phase,
            "tflop": round(tflop[name], 4),
            "efficiency": round(tflop[name] * 1e3 / phase["seconds"] / row["peak_gflops"], 4),
            "matrix_share": round(
                sum(share for n, share in phase["operations"].items() if n in _MATRICES), 4
            ),
        }
        for name, phase in row["phases"].items()
    }
    return {**row, "phases": phases}


CHILDREN: dict[str, Callable[..., None]] = {
    "mmrl": child_mmrl,
    "trl": child_trl,
    "own": child_own,
    "lora": child_lora,
    "hf": child_hf,
    "vllm": child_vllm,
}
