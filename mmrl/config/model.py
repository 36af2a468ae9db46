"""The sections `model` and `rollout`: what is trained, and how it is sampled. Part of mmrl.config."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, field_validator

from mmrl.config.section import HomePath, Section, Seed
from mmrl.config.shipped import shipped
from mmrl.coords import CoordFrame

__all__ = ["LoraSettings", "ModelConfig", "RolloutConfig"]


class _Section(Section, BaseModel):
    """The sections of this file (BaseModel is named so that linters know what their defaults are)."""


class LoraSettings(_Section):
    """A LoRA adapter (Hu et al. 2021) through peft."""

    r: int = Field(16, ge=1)
    """Rank of the adapter's matrices."""
    alpha: float = 32
    """Scale of the adapter: its output is multiplied by alpha / r."""
    dropout: Literal[0] = 0
    """Always 0: rollout and training must compute the same function."""
    target_modules: list[str] = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    """Names of the linear layers that get an adapter. gate_proj and up_proj together also mean GLM-4.1V's one layer for both."""
    vision: bool = False
    """Adapt the vision tower, too, where it has layers of these names."""
    experts: bool = False
    """Adapt the experts of a mixture, too, whatever target_modules names: rank r for each expert's gate_up_proj and down_proj.
    Routers stay as they are. peft adds B A to the weights of all experts of a layer in every forward, in the type that they are
    stored in; rollout.merge_adapter does so once per version for mmrl's own engine."""
    seed: Seed = 0
    """Seed of the adapter's initial weights."""
    quantize: Literal["nf4"] | None = None
    """nf4: the language model's frozen linear layers in 4 bits (QLoRA, Dettmers et al. 2023, by bitsandbytes; extra nf4), 4.13 bits
    a number; slower, as they are dequantized in every product. Not for mixtures of experts, whose experts are no linear layers. The
    adapter fits the quantized model: checkpoints' merged weights are what was trained, the adapter on the model at model.path is
    not quite. null: in model.dtype."""


class ModelConfig(_Section):
    """The model that is trained."""

    path: HomePath = "assets/tiny_vlm"
    """Folder or hub name of a model of a known family (`mmrl families list`), or a checkpoint of a run. The tiny models of assets/
    come with mmrl: where the current folder has none of that name, the installed one is used."""
    template: str | None = None
    """Family whose frame and system message the prompts have (`mmrl families list`); null: the model's own."""
    frame: CoordFrame | None = None
    """Coordinate frame that prompts ask for: abs_orig (pixels of the picture as displayed), abs_resized (pixels after the
    processor's resize), rel1000 or rel1 (0..1000 or 0..1 of width and height); null: that in which the model's family writes boxes.
    Where it writes clicks in another (InternVL: rel1), set it for GUI tasks alone by their own `params: {frame: rel1}`."""
    system: str | None = None
    """System message; '' for none; null: that of the model's family."""
    freeze: list[str] = []
    """Parts whose weights stay as they are: vision, projector, language, and audio of a model that hears."""
    lora: LoraSettings | None = None
    """Train a LoRA adapter instead of the model's own weights; null: full fine-tuning."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the forward passes: bf16 is autocast, trained weights and optimizer stay fp32. auto: bf16 on a GPU that
    has it, else fp32."""
    attn: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex"] = "auto"
    """Attention kernel of the language model and the vision tower (mmrl/policy/attention.py). auto: on a GPU in bf16
    flash_attention_2 where flash-attn is installed, else flex; elsewhere sdpa. Where a GPU gets sdpa (no Triton, fp32, a family
    whose pictures see themselves) the run warns and says why."""
    gradient_checkpointing: bool | None = None
    """Compute activations again in the backward pass instead of keeping them; null: on a GPU."""
    fused_layers: bool | None = None
    """RMSNorm, SiLU times gate and the sum of a LoRA adapter in one kernel each (mmrl/policy/fused_layers.py); null: on a GPU in
    bf16."""
    max_prompt_tokens: int = Field(16384, ge=16)
    """A longer prompt fails with an error that says so; prompts are never cut."""
    device: str | None = None
    """Device of a run of one process, for example cuda:1 or cpu; null: a GPU if there is one."""

    @field_validator("path")
    @classmethod
    def _installed(cls, path: str) -> str:
        return str(shipped(path)) if path.startswith("assets/") else path


class TreeConfig(_Section):
    """Tree sampling of rollouts of several turns (mmrl/rollout/trees.py), Tree-GRPO: branches begin at turns of rollouts that there
    are, so that what comes before is not written again. For tasks with an environment that answers alike when it is asked alike."""

    roots: int = Field(0, ge=0)
    """Rollouts of a group that are played from the start, each the root of a tree (the paper's M); 0: all are, and there are no
    trees. rollout.group_size is roots x (1 + rounds x branches per round)."""
    rounds: int = Field(1, ge=1)
    """Rounds of branches (L); those of a later round may begin at turns of earlier branches."""
    within: bool = True
    """A rollout's advantage is the sum of that within its tree and that within the group (intra-tree and inter-tree); false: the
    group's alone. Needs algorithm.advantage grpo with advantage_scale std or none."""


class RolloutConfig(_Section):
    """How completions are sampled."""

    group_size: int = Field(8, ge=1)
    """Completions per prompt, the G of GRPO; at least 2 (with advantage gae 1). For robots: episodes from one initial state."""
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Sampling temperature. Log-probs of training are taken at the same temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: only the most probable tokens with this total probability; 1: all."""
    top_k: int = Field(0, ge=0)
    """Only the k most probable tokens; 0: all."""
    max_new_tokens: int = Field(64, ge=1)
    """Completions are cut at this length."""
    batch_tokens: int = Field(65536, ge=1)
    """Most KV-cache slots (rows x length) that mmrl's own engine holds at once."""
    tree: TreeConfig = TreeConfig()
    merge_adapter: bool = False
    """mmrl's own engine samples with the LoRA adapter merged: a copy of the adapted layers' weights in the type of the forward,
    made anew when the adapter has changed, in the place of two more products per layer and token. Its log-probs differ from
    training's by that rounding. vLLM's copy is always merged. Not with model.lora.quantize, whose dequantized function rollout and
    training share, nor with engine.ray.rollout_actors, nor for policies that act."""
