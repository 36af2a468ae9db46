"""The configuration of a run: one YAML file, dotted overrides, every key documented here and checked on load.

    cfg = load_config("configs/grounding.yaml", ["train.steps=50", "model.path=Qwen/Qwen2.5-VL-3B-Instruct"])

Unknown keys are errors with a did-you-mean. `mmrl config FILE` prints the resolved result.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from mmrl.config_data import CurriculumStage, DataConfig, DataSource, OfflineConfig, PassRateConfig, Section, SelectionConfig
from mmrl.config_data import ScheduleConfig as ScheduleConfig
from mmrl.config_engine import EngineConfig, OperationsConfig
from mmrl.config_read import load_config_as, merge, parse_overrides
from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError

__all__ = [
    "AlarmConfig", "AlgorithmConfig", "ContrastConfig", "CurriculumStage", "DataConfig", "DataSource", "EMAConfig",
    "EngineConfig", "EntropyConfig", "EvalConfig", "FilterConfig",
    "KLConfig", "LoraSettings", "ModelConfig", "OfflineConfig", "OptimConfig", "PassRateConfig", "RewardConfig", "RolloutConfig",
    "RunConfig", "ScheduleConfig", "SelectionConfig", "TrainConfig", "effective_threads", "load_config", "load_config_as", "merge",
    "parse_overrides",
]


class _Section(Section, BaseModel):
    """The sections of this file (BaseModel is named so that linters know what their defaults are)."""


class LoraSettings(_Section):
    """LoRA adapter (Hu et al. 2021) through peft."""

    r: int = Field(16, ge=1)
    alpha: float = 32
    dropout: Literal[0] = 0  # rollout and training must see the same function
    target_modules: list[str] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    vision: bool = False  # adapt the vision tower too (same module names where they exist)
    seed: int = Field(0, ge=0)


class ModelConfig(_Section):
    """What to train."""

    path: str = "assets/tiny_vlm"  # folder or hub name: Qwen2-VL, Qwen2.5-VL, Qwen3-VL
    template: Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"] | None = None  # default: the family's own
    frame: CoordFrame | None = None  # coordinate frame the prompt asks for; default: the family's own
    system: str | None = None  # system text; '' for none; default: the family's own
    freeze: list[str] = []  # of vision, projector, language
    lora: LoraSettings | None = None
    dtype: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 autocast where the GPU has it, else fp32
    attn: Literal["sdpa", "eager", "flash_attention_2", "flex"] = "sdpa"  # of language model and vision tower (policy/attention.py)
    gradient_checkpointing: bool | None = None  # default: on a GPU
    max_prompt_tokens: int = Field(16384, ge=16)
    device: str | None = None  # default: cuda if there is one


class RolloutConfig(_Section):
    """Sampling."""

    group_size: int = Field(8, ge=1)  # completions per prompt, G; at least 2 (see RunConfig._consistent)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)  # 0: off
    max_new_tokens: int = Field(64, ge=1)
    batch_tokens: int = Field(65536, ge=1)  # most KV-cache slots (rows x length) held at once


ADVANTAGE_SCALES = {"grpo": ("std", "none", "batch", "batch_rewards", "ema", "ema_within"), "rloo": ("none", "batch"),
                    "opo": ("none", "batch"), "pass_k": ("std",)}
"""Which advantage_scale each estimator is defined with."""


GSPO = {"clip_low": 3e-4, "clip_high": 4e-4, "aggregate": "sequence_mean"}
"""Defaults of algorithm.importance sequence."""


class KLConfig(_Section):
    """KL penalty against the starting policy (adapter-off for LoRA)."""

    coef: float = Field(0.0, ge=0)  # 0: no reference model is kept
    estimator: Literal["k2", "k3"] = "k3"  # gradient of KL(policy || reference) or of KL(reference || policy)

    @field_validator("estimator", mode="before")
    @classmethod
    def _regularises(cls, value: Any) -> Any:
        if value == "k1":
            raise ValueError("kl.estimator k1 as a loss regularises nothing: its gradient, the mean of grad log pi over samples of "
                             "pi, is 0 in expectation, so that only noise is added; use k3 (or k2, which has the gradient of "
                             "KL(policy || reference))")
        return value


class EMAConfig(_Section):
    """One running standard deviation per task (mmrl/algorithms/ema.py), used with advantage_scale ema (EMA-GRPO as OneThinker's
    code has it, arXiv 2512.03043) and ema_within (mmrl's own)."""

    decay: float = Field(0.99, ge=0, lt=1)
    min_std: float = Field(1e-3, gt=0)
    limit: float = Field(5.0, gt=0)  # a group with any larger |advantage| is divided by its own std instead
    by: Literal["task", "source"] = "task"


class ContrastConfig(_Section):
    """Rollouts on a changed input beside each group: T-GRPO's shuffled frames and relatives (mmrl/algorithms/contrast.py).

    Groups whose input the change cannot touch (pictures and one-frame clips for shuffle, text for all) have none.
    With advantage_scale std and rewards that are only right or wrong, the bonus cancels: it needs a second reward part that
    differs, or advantage_scale none (see there for the others).
    """

    kind: Literal["none", "shuffle", "mirror", "mask", "question_only"] = "none"
    group_size: int | None = Field(None, ge=1)  # changed rollouts per group; null: half of rollout.group_size (Video-R1)
    unit: Literal["frames", "pairs"] = "frames"  # of shuffle; pairs: the tower's own, whose features are reused
    factor: float = Field(0.8, ge=0)  # the bonus is paid where mean accuracy >= factor * mean accuracy of the changed rollouts
    threshold: float = Field(0.1, ge=0)  # .. to completions with an accuracy above this
    bonus: float = Field(0.3, ge=0)  # added to their reward; 0: measured only
    skip: bool = True  # no changed rollouts where they cannot change an advantage; false: always
    measure: float = Field(0.1, ge=0, le=1)  # with skip: share of groups rolled out all the same, by lot: contrast/gap is theirs

    @model_validator(mode="after")
    def _measures(self) -> ContrastConfig:
        if self.kind != "none" and self.bonus == 0 and self.skip and self.measure == 0:
            raise ValueError("contrast.bonus 0 with skip true and measure 0 never rolls anything out; set skip: false to measure")
        return self


class EntropyConfig(_Section):
    """Entropy bonus with gradient (mmrl/algorithms/entropy.py): the loss of a token is lowered by coef * entropy (nats) of its
    whole distribution, which needs no more memory. With a target the coefficient adapts (Skywork-OR1, TRL)."""

    coef: float = Field(0.0, ge=0)  # 0 without a target: off; with one: where it starts. Usual: 1e-3
    target: float | None = Field(None, gt=0)  # nats per token: after an optimizer step at or below it coef rises by delta, above it
    # ^ falls; it acts while the entropy is at or below the target. Choose it a little below train/entropy of the first steps
    delta: float = Field(0.005, gt=0)
    coef_min: float = Field(0.0, ge=0)  # bounds of the adaptive coefficient
    coef_max: float = Field(1.0, ge=0)


class FilterConfig(_Section):
    """By what dynamic sampling tells groups that teach from those that do not (mmrl/group_rewards.py, group_outcome). Values of
    the key must differ inside the group, and their mean must lie between the bounds. Neither the overlong penalty nor the
    contrast bonus counts: a group that differs in length alone teaches nothing of its task."""

    key: str = "accuracy"  # a reward part, or reward: the whole. accuracy: the whole where a task has no such part (DAPO; verl
    # ^ filter_groups.metric acc; EasyR1 filter_key). Equally right answers of different form have signal under reward alone
    low: float | None = None  # bounds of the group's mean, both exclusive (EasyR1 filter_low 0.01, filter_high 0.99); null: none
    high: float | None = None

    @model_validator(mode="after")
    def _ordered(self) -> FilterConfig:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"filter.low ({self.low:g}) must lie below filter.high ({self.high:g}): both are exclusive")
        return self


class AlgorithmConfig(_Section):
    """GRPO and its published variants; formulas in mmrl/algorithms."""

    advantage: Literal["grpo", "rloo", "opo", "pass_k"] = "grpo"  # what a reward is compared with; see ADVANTAGE_SCALES
    advantage_scale: Literal["std", "none", "batch", "batch_rewards", "ema", "ema_within"] = "std"
    # ^ std: by that of the group's rewards; none: Dr.GRPO; batch: by the std of the step's advantages, rewards minus their baseline
    # (REINFORCE++ baseline); batch_rewards: by that of the step's rewards, the spread between prompts included (Lite PPO; what TRL
    # calls scale_rewards batch); ema: by the running std of all rewards of the task (OneThinker's EMA-GRPO); ema_within: by the
    # running mean of the std inside the task's groups
    ema: EMAConfig = EMAConfig()
    aggregation: Literal["plain", "gdpo"] = "plain"  # of reward parts; gdpo: each normalised in its group before the sum
    contrast: ContrastConfig = ContrastConfig()
    offline: OfflineConfig = OfflineConfig()
    difficulty: Literal["none", "univg_exp", "univg_power", "univg_log", "softmax"] = "none"
    # ^ multiplies a group's advantages by a weight that falls with its mean accuracy (mmrl/algorithms/difficulty.py)
    difficulty_power: float = Field(1.0, ge=0)  # w of univg_power
    difficulty_temperature: float = Field(2.0, gt=0)  # T of softmax
    aggregate: Literal["token_mean", "sequence_mean", "dr_grpo"] = "token_mean"
    importance: Literal["token", "sequence"] = "token"  # sequence: GSPO; clip_low 3e-4, clip_high 4e-4 and aggregate
    # ^ sequence_mean are then the defaults, as its paper has them (arXiv 2507.18071, section 5.1)
    clip_low: float = Field(0.2, ge=0)
    clip_high: float = Field(0.28, ge=0)  # clip-higher (DAPO)
    dual_clip: float | None = 3.0
    kl: KLConfig = KLConfig()
    entropy: EntropyConfig = EntropyConfig()
    epochs: int = Field(1, ge=1)  # passes over each step's groups
    minibatches: int = Field(1, ge=1)  # optimizer steps per pass
    dynamic_sampling: bool = True  # replace groups without signal (DAPO); false: train on all, whatever their rewards
    filter: FilterConfig = FilterConfig()  # what has signal
    max_rounds: int = Field(3, ge=1)  # prompts tried per place in a step (1: no replacement)
    carry_share: float = Field(0.25, ge=0, le=1)  # share of a step given to prompts that had no signal earlier
    overlong: Literal["none", "mask", "soft"] = "none"  # completions cut by the length limit
    overlong_buffer: int = Field(0, ge=0)  # soft: tokens before the limit where the penalty starts
    overlong_weight: float = Field(1.0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _of_gspo(cls, data: Any) -> Any:
        """A sequence's ratio is the geometric mean of its tokens' and hardly leaves 1: the ranges of tokens would never bind."""
        return {**GSPO, **data} if isinstance(data, dict) and data.get("importance") == "sequence" else data

    @field_validator("difficulty", mode="before")
    @classmethod
    def _not_vitals(cls, value: Any) -> Any:
        if value == "dgrpo":
            raise ValueError("difficulty dgrpo is called softmax now: it is a formula of mmrl's own "
                             "(mmrl/algorithms/difficulty.py), not that of VITAL's DGRPO; set algorithm.difficulty: softmax")
        return value


class OptimConfig(_Section):
    """AdamW."""

    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    max_grad_norm: float = Field(1.0, gt=0)


class RewardConfig(_Section):
    """How rewards are computed; their rules belong to the task (data.train[].params)."""

    workers: int = Field(1, ge=0)  # 0: in the training process (no protection against a reward that hangs)
    timeout_s: float = Field(10.0, gt=0)  # per completion; beyond it the completion's reward is a recorded failure
    max_failure_share: float = Field(0.2, ge=0, le=1)  # stop when more of a step's rewards raised or hung
    shuffle: bool = False  # control experiment: rewards permuted within each group


class EvalConfig(_Section):
    """Held-out evaluation."""

    every: int = Field(50, ge=0)  # steps; 0: only before and after
    samples: int = Field(8, ge=0)  # avg@k at the rollout temperature; 0: greedy only
    limit: int | None = Field(None, ge=1)  # held-out samples used during training; before and after use all
    gallery: int = Field(12, ge=0)  # pictures followed through training in the report
    best_metric: str | None = None  # picks checkpoints/best: greedy/NAME or sampled/NAME; null: the headline of the task of
    # ^ data.eval (macro, the mean over sources, where there are several), sampled unless samples is 0
    views: list[Literal["shuffle", "mirror", "mask", "question_only"]] = []
    # ^ asks each sample again without its order, sides, pixels or media: how much is the video used (mmrl/eval_views.py)

    @model_validator(mode="after")
    def _selectable(self) -> EvalConfig:
        mode, _, name = (self.best_metric or "greedy/null").partition("/")
        if mode not in ("greedy", "sampled") or not name:
            raise ValueError(f"eval.best_metric: expected greedy/NAME, sampled/NAME or null, found '{self.best_metric}'")
        if mode == "sampled" and not self.samples:
            raise ValueError(f"eval.best_metric '{self.best_metric}' is of sampled answers, and eval.samples 0 samples none: set "
                             "eval.samples to 1 or more, or eval.best_metric to greedy/NAME or null (the task's own headline)")
        return self


class AlarmConfig(_Section):
    """Thresholds; an alarm is logged, printed and shown in the report. `stop` lists those that end the run."""

    logprob_gap: float = Field(0.05, gt=0)  # mean |sampler - trainer| log-prob per token
    entropy_floor: float = Field(0.005, ge=0)  # nats per token
    zero_reward_steps: int = Field(5, ge=1)  # steps in a row with accuracy ~0 but parsing, or no episode finished; also per source
    steps: int = Field(3, ge=1)  # steps in a row until parse_rate, no_signal, zero_gradient, truncated, same_answer and
    # ^ reward_failures are raised
    parse_rate: float = Field(0.05, ge=0, lt=1)  # at most this share of answers keeps the format; also per source
    truncated: float = Field(0.95, gt=0, le=1)  # at least this share of answers is cut at rollout.max_new_tokens
    same_answer: float = Field(0.9, gt=0, le=1)  # at least this share of the prompts' answers is one answer, while rewards are
    # ^ positive and the truths are at least 0.2 less alike: the reward can be guessed; also per source
    reward_failures: float = Field(0.02, ge=0, lt=1)  # more of the rewards than this raised, hung or crashed (all of them end the
    # ^ run beyond reward.max_failure_share)
    untrained_steps: int = Field(10, ge=1)  # never_trained: so many steps from the run's start, and no gradient in any of them
    stop: list[Literal[
        "non_finite", "logprob_gap", "entropy_collapse", "reward_stuck", "prompts_failed", "task_failed", "parse_rate", "no_signal",
        "zero_gradient", "truncated", "same_answer", "reward_failures", "never_trained"]] = ["non_finite", "never_trained"]
    # ^ parse_rate and no_signal only warn by default: a cold start may keep the format rarely for some steps and learn it from the
    # few groups with signal. Where no group of a run had any for untrained_steps steps there is nothing to wait for: weights are
    # still those it began with, and the same policy asks prompts of the same kind


class TrainConfig(_Section):
    """The loop."""

    steps: int = Field(100, ge=1)
    prompts_per_step: int = Field(16, ge=1)
    token_budget: int = Field(16384, ge=1)  # packed tokens per micro-batch
    forward: Literal["shared", "padded"] = "shared"
    save_every: int = Field(50, ge=0)  # steps; 0: only at the end
    keep_last: int = Field(2, ge=1)
    log_rollouts: int = Field(2, ge=0)  # groups written to rollouts/ per step
    log_reflection: bool = False  # shares of completions with reflection words (wait, re-check ..), per source
    tensorboard: bool = False
    wandb: bool = False


class RunConfig(_Section):
    """Everything a run needs; written resolved to RUN/config.yaml."""

    overlaps_in_processes: ClassVar[bool] = False  # whether schedule.kind pipelined and async go with several processes

    name: str = "run"
    dir: str = "runs"
    seed: int = Field(0, ge=0)
    threads: int | None = Field(None, ge=1)  # CPU threads of torch per process; null: 1 on a CPU, torch's own choice on a GPU
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: OptimConfig = OptimConfig()
    reward: RewardConfig = RewardConfig()
    eval: EvalConfig = EvalConfig()
    alarms: AlarmConfig = AlarmConfig()
    train: TrainConfig = TrainConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    engine: EngineConfig = EngineConfig()
    operations: OperationsConfig = OperationsConfig()

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        a = self.algorithm
        if self.rollout.group_size == 1:
            raise ValueError("rollout.group_size must be at least 2: a group of one has nothing to be compared with, so its "
                             "advantage is 0 and it never has signal")
        self._check_advantages()
        self._check_offline()
        if a.minibatches > self.train.prompts_per_step:
            raise ValueError(f"algorithm.minibatches ({a.minibatches}) cannot exceed train.prompts_per_step "
                             f"({self.train.prompts_per_step})")
        if a.overlong == "soft" and not 0 < a.overlong_buffer <= self.rollout.max_new_tokens:
            raise ValueError("algorithm.overlong soft needs 0 < overlong_buffer <= rollout.max_new_tokens")
        try:
            self._build_algorithm_settings()
        except ConfigError as error:
            raise ValueError(f"algorithm: {error}") from error
        return self

    def _check_advantages(self) -> None:
        a = self.algorithm
        fitting = ADVANTAGE_SCALES[a.advantage]
        if a.advantage_scale not in fitting:
            raise ValueError(f"algorithm.advantage {a.advantage} is defined with algorithm.advantage_scale "
                             f"{' or '.join(fitting)}, found {a.advantage_scale}")
        if a.aggregation == "gdpo" and (a.advantage, a.advantage_scale) != ("grpo", "std"):
            raise ValueError("algorithm.aggregation gdpo normalises by itself: it needs advantage grpo and advantage_scale std, "
                             f"found {a.advantage} and {a.advantage_scale}")
        if self.data.selection.kind != "none" and not a.dynamic_sampling:
            raise ValueError(f"data.selection {self.data.selection.kind} replaces groups: it needs algorithm.dynamic_sampling "
                             "true (max_rounds: 1 only filters)")
        if (a.filter.low is not None or a.filter.high is not None) and not a.dynamic_sampling:
            raise ValueError("algorithm.filter.low and high choose groups: they need algorithm.dynamic_sampling true (with "
                             "max_rounds: 1 groups are left out and not replaced)")

    def _check_offline(self) -> None:
        a, o = self.algorithm, self.algorithm.offline
        if o.gold and not o.per_group:
            raise ValueError("algorithm.offline.gold true with per_group 0 adds nothing; set per_group to 1")
        if o.per_group and a.advantage == "pass_k":
            raise ValueError("algorithm.offline adds completions the policy did not write, and advantage pass_k counts what the "
                             "policy itself gets right: use grpo, rloo or opo, or per_group 0")
        if o.per_group and a.importance == "sequence":
            raise ValueError("algorithm.offline shapes each token's ratio: it needs importance token, or per_group 0")
        if o.replace and o.per_group >= self.rollout.group_size:
            raise ValueError(f"algorithm.offline.per_group ({o.per_group}) with replace true leaves no rollouts: it must be below "
                             f"rollout.group_size ({self.rollout.group_size})")

    def _build_algorithm_settings(self) -> None:
        """Settings of loss and sampler have rules of their own: a run must break them here, not after loading a model."""
        from mmrl.algorithms import (  # brings torch; reading this module must not
            EntropySettings,
            ObjectiveSettings,
            SamplerSettings,
        )

        a = self.algorithm
        ObjectiveSettings(clip_low=a.clip_low, clip_high=a.clip_high, dual_clip=a.dual_clip, importance=a.importance,
                          aggregate=a.aggregate, max_completion_length=self.rollout.max_new_tokens, kl_coef=a.kl.coef,
                          kl_estimator=a.kl.estimator)
        e = a.entropy
        EntropySettings(coef=e.coef, target=e.target, delta=e.delta, low=e.coef_min, high=e.coef_max)
        SamplerSettings(quota=self.train.prompts_per_step, max_attempts=a.max_rounds, carry_share=a.carry_share)


def effective_threads(config: RunConfig) -> int | None:
    """CPU threads to give torch: `threads` when it is set, else 1 on a CPU and None (torch's own choice) on a GPU.

    One thread keeps CPU runs reproducible bit for bit and leaves the other cores to reward workers; on a GPU the CPU only
    prepares pictures and launches kernels, where torch's own choice is better.
    """
    if config.threads is not None:
        return config.threads
    if config.model.device is not None:
        return 1 if config.model.device == "cpu" else None
    import torch

    return None if torch.cuda.is_available() else 1


def load_config(path: str | Path | None = None, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file (or start from the defaults) and apply dotted overrides. Raises ConfigError listing every problem."""
    return load_config_as(RunConfig, path, overrides)
