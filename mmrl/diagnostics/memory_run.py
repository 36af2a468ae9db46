"""A run as the estimate of its memory sees it, and the batches that its settings lead to. Part of mmrl.diagnostics.memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mmrl.config import RunConfig
from mmrl.diagnostics.memory_activations import Micro, Precision
from mmrl.diagnostics.memory_parameters import ParameterBytes, storage
from mmrl.policy.families import family_of

__all__ = ["TEXT_TOKENS", "PlannedRun", "micro_batch", "prompt_tokens_of", "samples_apart"]

TEXT_TOKENS = 128  # of a prompt beside its picture: system text, question, markup
_PICTURE_TOKENS = 1280  # where data.max_pixels is not set
_SHARED_OUT = ("fsdp2", "deepspeed_zero2", "deepspeed_zero3")  # the optimizer's state, or more
_SHARDED = ("fsdp2", "deepspeed_zero3")  # the weights, too


@dataclass(frozen=True)
class PlannedRun:
    """What an estimate is made of. `shape`: the model's configuration; `engine`: of training, in `processes` processes with a
    device of `kind` ("cuda" or "cpu") each; `prompt`: tokens of the longest one; `available`: bytes of a
    device, where they count."""

    config: RunConfig
    shape: Any
    parameters: ParameterBytes
    engine: str
    processes: int
    kind: str
    prompt: int
    available: float | None = None

    @property
    def text(self) -> Any:
        """The language model's configuration."""
        return self.shape.text_config

    @cached_property
    def autocast(self) -> Any:
        """The type that products are cast to, or None."""
        return storage(self.config, self.kind)[1]

    @cached_property
    def precision(self) -> Precision:
        """Bytes of a number in products, and as weights are loaded."""
        dtype, autocast = storage(self.config, self.kind)
        return Precision(2 if autocast is not None else 4, dtype.itemsize)

    @property
    def micro(self) -> Micro:
        """The largest micro-batch of the update; processes that compute rows together have their prompts in it."""
        together = self.config.engine.sequence_parallel
        return micro_batch(self.config, self.prompt, self.prompts_each * together)

    @property
    def micro_batches(self) -> float:
        """Of a step and process, as far as they are full."""
        rollouts = self.prompts_each * self.config.rollout.group_size
        together = self.micro.groups * self.micro.group_size
        return rollouts * self.config.rollout_shape.turns / together

    @property
    def prompts_each(self) -> int:
        """Groups per step and process."""
        return -(-self.config.train.prompts_per_step // self.processes)

    @property
    def shares_out(self) -> bool:
        """Whether processes share out the optimizer's state."""
        return self.engine in _SHARED_OUT

    @property
    def sharded(self) -> bool:
        """Whether they share out the weights, too."""
        return self.engine in _SHARDED

    @property
    def by_deepspeed(self) -> bool:
        """Whether DeepSpeed trains."""
        return self.engine.startswith("deepspeed")

    @property
    def checkpointing(self) -> bool:
        """Whether activations are computed again (default: on a GPU)."""
        wanted = self.config.model.gradient_checkpointing
        return wanted if wanted is not None else self.kind == "cuda"

    @property
    def fused_optimizer(self) -> bool:
        """Whether AdamW steps in one kernel (default: on a GPU)."""
        wanted = self.config.optim.fused
        return wanted if wanted is not None else self.kind == "cuda"

    @property
    def fused_layers(self) -> bool:
        """Whether model.fused_layers spares the update memory: where it is compiled, of models of which most is fused."""
        wanted = self.config.model.fused_layers
        on = self.autocast is not None if wanted is None else wanted
        return on and self.kind == "cuda" and self.parameters.fusable

    @property
    def attention(self) -> str:
        """model.attn; auto: flash attention needs no more than flex."""
        if self.config.model.attn != "auto":
            return self.config.model.attn
        return "flex" if self.autocast is not None and self.kind == "cuda" else "sdpa"

    @property
    def file_bytes(self) -> int:
        """Of one number in the model's files."""
        import torch

        return int((getattr(self.shape, "dtype", None) or torch.float32).itemsize)


def samples_apart(config: RunConfig) -> bool:
    """Whether training processes neither sample nor value what was sampled, see Trainer."""
    return config.engine.generator.kind == "process" and config.algorithm.advantage != "gae"


def prompt_tokens_of(config: RunConfig, shape: Any) -> int:
    """Tokens of the longest prompt that `data`, or a robot's cameras, lead to: a picture or clip at its largest, and text."""
    patch, merge = family_of(shape).patches(shape)
    area = (patch * merge) ** 2
    if (pictures := config.rollout_shape.pictures) is not None:
        count, side = pictures
        each = (-(-side // (patch * merge))) ** 2
        if config.data.max_pixels:
            each = min(each, config.data.max_pixels // area)
        if config.data.min_pixels:
            each = max(each, -(-config.data.min_pixels // area))
        return int(min(count * each + TEXT_TOKENS, config.model.max_prompt_tokens))
    picture = config.data.max_pixels / area if config.data.max_pixels else _PICTURE_TOKENS
    video = config.data.video
    clip = 0.0
    if video.total_pixels:
        clip = video.total_pixels / area
    elif video.max_pixels:
        clip = (
            video.max_pixels
            / area
            * (video.num_frames or video.max_frames)
            / getattr(shape.vision_config, "temporal_patch_size", 1)
        )
    return int(min(max(picture, clip) + TEXT_TOKENS, config.model.max_prompt_tokens))


def micro_batch(config: RunConfig, prompt: int, prompts: int) -> Micro:
    """The largest micro-batch of the update: train.token_budget tokens, or all of a step of `prompts` groups; of a longer group as
    many rollouts as fit, at least one."""
    size, new = config.rollout_shape.answers, config.rollout_shape.tokens
    budget = config.train.token_budget
    # of rollouts with several turns, those that share a prompt
    there = prompts * config.rollout.group_size * config.rollout_shape.turns / size
    groups = min(budget / (prompt + size * new), there)
    if config.train.forward == "padded":  # each row with its own copy of the prompt
        return Micro(size * max(1.0, groups), prompt, new, 1)
    if budget < prompt + size * new:
        return Micro(1.0, prompt, new, int(min(max((budget - prompt) // new, 1), size)))
    return Micro(groups, prompt, new, size)
