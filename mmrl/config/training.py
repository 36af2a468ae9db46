"""The sections `optim`, `reward`, `eval`, `alarms`, `train` and `schedule`: the loop and what watches it. Part of mmrl.config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from mmrl.config.section import HomePath, Section

__all__ = [
    "AlarmConfig",
    "EvalConfig",
    "OptimConfig",
    "RewardConfig",
    "ScheduleConfig",
    "TrackingConfig",
    "TrainConfig",
]


Decay = Annotated[float, Field(ge=0, lt=1)]


class _Section(Section, BaseModel):
    """The sections of this file (BaseModel is named so that linters know what their defaults are)."""


class OptimConfig(_Section):
    """AdamW and its learning rate."""

    lr: float = Field(1e-6, gt=0, allow_inf_nan=False)
    """Learning rate after the warmup."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of AdamW's averages of gradients and of their squares."""
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False)
    """Added to AdamW's denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices; biases, norms and other vectors are not decayed."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps in which the learning rate rises linearly, from lr / warmup_steps in the first."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after the warmup."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Where cosine and linear end, as a share of lr."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this global norm."""
    fused: bool | None = None
    """torch's fused AdamW kernel: without copies of its own, and several times as fast on a CPU, too; equal to rounding. null: on
    a GPU, its offloaded moments included."""
    states: Literal["fp32", "int8"] = "fp32"
    """Bits of AdamW's moments. int8: 8 each, with a scale per block of 256 (Dettmers et al. 2022, by torchao; extra int8): a
    quarter of their memory. Not with DeepSpeed, whose optimizer is its own. Checkpoints hold them in fp32 either way. Where
    gradients are all below about 1e-6, levels are lost and steps become longer than those of fp32."""

    @model_validator(mode="after")
    def _one_kernel(self) -> OptimConfig:
        if self.states == "int8" and self.fused:
            raise ValueError(
                "optim.fused true is torch's kernel for moments of fp32, found optim.states int8, whose step is compiled; remove "
                "one of them"
            )
        return self


class RewardConfig(_Section):
    """How rewards are computed; their rules belong to the task (data.train[].params)."""

    workers: int = Field(1, ge=0)
    """Worker processes; 0: in the training process, without protection against a reward that hangs."""
    timeout_s: float = Field(10.0, gt=0)
    """Seconds per completion; beyond it the completion's reward is a recorded failure."""
    concurrency: int = Field(64, ge=1)
    """Completions whose `async def` rewards (judges) may wait at once, in each training process; other rewards are not affected."""
    verdicts: HomePath | None = None
    """Folder in which verdicts of judges are kept, so that a question asked again (a resumed run, another run) is answered from it.
    null: RUN/verdicts in training, nowhere in evaluations."""
    max_failure_share: float = Field(0.2, ge=0, le=1)
    """The run stops when more of a step's rewards raised or hung."""
    shuffle: bool = False
    """Control experiment: rewards are permuted within each group (advantage gae, whose baseline is no group: over the whole step),
    so that nothing can be learned."""


class EvalConfig(_Section):
    """Held-out evaluation."""

    every: int = Field(50, ge=0)
    """Steps between evaluations; 0: only before and after training."""
    samples: int = Field(8, ge=0)
    """Sampled completions per prompt at the rollout temperature (avg@k), in addition to the greedy one; 0: greedy only."""
    limit: int | None = Field(None, ge=1)
    """Held-out samples of each source used during training; before and after all are used. null: all."""
    gallery: int = Field(12, ge=0)
    """Held-out prompts that the report follows through training; of those of environments, what each turn was shown is kept."""
    best_metric: str | None = None
    """What picks checkpoints/best: greedy/NAME or sampled/NAME. null: the headline of the task of data.eval (macro, the mean
    over sources, where there are several), sampled unless samples is 0."""
    views: list[Literal["shuffle", "mirror", "mask", "question_only"]] = []
    """Ask each sample again without its order, sides, pixels or media: how much are the media used (mmrl/evaluation/views.py)."""

    @model_validator(mode="after")
    def _selectable(self) -> EvalConfig:
        mode, _, name = (self.best_metric or "greedy/null").partition("/")
        if mode not in ("greedy", "sampled") or not name:
            raise ValueError(
                f"eval.best_metric: expected greedy/NAME, sampled/NAME or null, found '{self.best_metric}'"
            )
        if mode == "sampled" and not self.samples:
            raise ValueError(
                f"eval.best_metric '{self.best_metric}' is of sampled answers, and eval.samples 0 samples none: set "
                "eval.samples to 1 or more, or eval.best_metric to greedy/NAME or null (the task's own headline)"
            )
        return self


class AlarmConfig(_Section):
    """Thresholds of alarms. An alarm is logged, printed and shown in the report; `stop` lists those that end the run."""

    logprob_gap: float = Field(0.05, gt=0)
    """logprob_gap: mean |sampler - trainer| log-prob per token above this."""
    entropy_floor: float = Field(0.005, ge=0)
    """entropy_collapse: nats per token below this."""
    zero_reward_steps: int = Field(5, ge=1)
    """reward_stuck, task_failed: so many steps in a row whose answers parse with an accuracy near 0, or without a finished
    episode; also per source."""
    steps: int = Field(3, ge=1)
    """Steps in a row until parse_rate, no_signal, zero_gradient, truncated, same_answer, reward_failures, critic and judge are
    raised."""
    parse_rate: float = Field(0.05, ge=0, lt=1)
    """parse_rate: at most this share of answers keeps the format; also per source."""
    truncated: float = Field(0.95, gt=0, le=1)
    """truncated: at least this share of answers is cut at rollout.max_new_tokens."""
    same_answer: float = Field(0.9, gt=0, le=1)
    """same_answer: at least this share of the prompts' answers is one answer, while rewards are positive and the truths are at
    least 0.2 less alike: the reward can be guessed; also per source."""
    reward_failures: float = Field(0.02, ge=0, lt=1)
    """reward_failures: more of the rewards than this raised, hung or crashed (beyond reward.max_failure_share they end the
    run)."""
    explained_variance: float = Field(-1.0, lt=0)
    """critic: PPO's values explain less of the variance of the returns than this (0: as much as a constant)."""
    judge: float = Field(0.7, ge=0, le=1)
    """judge: a judge agrees on less than this share of the answers held out to compare it with the rule (params.audit of the task
    judged), or with itself on fewer comparisons when their order is swapped."""
    untrained_steps: int = Field(10, ge=1)
    """never_trained: so many steps from the run's start, and no gradient in any of them."""
    stop: list[
        Literal[
            "non_finite",
            "logprob_gap",
            "entropy_collapse",
            "reward_stuck",
            "prompts_failed",
            "task_failed",
            "parse_rate",
            "no_signal",
            "zero_gradient",
            "truncated",
            "same_answer",
            "reward_failures",
            "critic",
            "judge",
            "never_trained",
        ]
    ] = ["non_finite", "never_trained"]
    """Alarms that end the run. parse_rate and no_signal only warn by default: a cold start may keep the format rarely for some
    steps and learn it from the few groups with signal. Where no group had any for untrained_steps steps there is nothing to
    wait for: weights are still those that the run began with, and the same policy is asked prompts of the same kind."""


class TrackingConfig(_Section):
    """What TensorBoard, Trackio and Weights & Biases get in addition to the metrics (train.tensorboard, train.trackio,
    train.wandb)."""

    project: str | None = Field(None, min_length=1)
    """Project of Trackio and Weights & Biases; null: TRACKIO_PROJECT or WANDB_PROJECT, else mmrl."""
    entity: str | None = None
    """User or team of Weights & Biases that the project belongs to; null: your default."""
    group: str | None = None
    """Group of runs in Trackio and Weights & Biases, for example the seeds of one experiment."""
    tags: list[Annotated[str, Field(min_length=1, max_length=64)]] = []
    """Words to find the run by; none: WANDB_TAGS."""
    samples: int = Field(0, ge=0)
    """Held-out prompts per evaluation that are shown with picture, answer and reward. They leave the machine with
    train.wandb, and with train.trackio where it writes into a Space."""


class TrainConfig(_Section):
    """Length and size of the training loop, checkpoints and logs."""

    steps: int = Field(100, ge=1)
    """Training steps; each has rollouts of prompts_per_step prompts."""
    prompts_per_step: int = Field(16, ge=1)
    """Groups per step, over all processes. For robots: initial states."""
    token_budget: int = Field(16384, ge=1)
    """Tokens of a packed micro-batch. A longer group is split between its rollouts, each part behind a copy of the prompt; one
    rollout with its prompt is the least."""
    balance_batch: bool = False
    """Several processes: before training, groups go from those with many tokens to those with few (longest first; verl:
    trainer.balance_batch). Pictures and clips are read again where a group goes: set data.cache.dir. The step is the same to
    rounding."""
    forward: Literal["shared", "padded"] = "shared"
    """shared: all completions of a prompt in one sequence behind one copy of the prompt; padded: the usual batch, for
    comparison."""
    save_every: int = Field(50, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints that are kept, in addition to the best one."""
    checkpoint: Literal["whole", "sharded"] = "whole"
    """Who writes a checkpoint. whole: the main process, one file of weights and one of the optimizer, while the others wait.
    sharded: every process a share of both, in the background while training goes on. Both are Hugging Face folders, and resume
    under any engine with any number of processes. Adapters (model.lora) are small: whole."""
    log_rollouts: int = Field(2, ge=0)
    """Groups per step that are written to rollouts/. Of those of environments, in the first step, the last one and some between,
    what the turns of one rollout were shown is kept, too."""
    log_reflection: bool = False
    """Log the share of completions with words of reflection (wait, re-check ...), per source."""
    tensorboard: bool = False
    """Also log to TensorBoard (extra: tensorboard)."""
    trackio: bool = False
    """Also log to Trackio (extra: trackio), by default into a database of this machine (`trackio show`); a resumed run goes on
    in the same one, where no other run has taken its name since."""
    wandb: bool = False
    """Also log to Weights & Biases (extra: wandb); a resumed run goes on in the same W&B run."""
    tracking: TrackingConfig = TrackingConfig()


class ScheduleConfig(_Section):
    """When rollouts, rewards and training run (mmrl/training/pipeline.py). All kinds train on the same groups, but async rolls some
    of them out with older weights. With engine.generator process rollouts and training overlap wholly; without it they take turns
    on one copy of the weights, and several training processes on prompts are serial only."""

    kind: Literal["serial", "pipelined", "async"] = "serial"
    """serial: rollouts, then training; pipelined: a group is trained on while the next ones are rolled out; async: so are groups
    of the steps after it."""
    order: Literal["arrival", "key"] = "arrival"
    """key: groups are trained on in fixed order, bit for bit as serial where the micro-batches are the same; prompts close in
    fixed order by themselves, so that both are one for them."""
    staleness: int = Field(1, ge=0)
    """async: oldest weights, in versions, that a group may have been rolled out with."""
    partial_rollouts: bool = False
    """async with engine.generator process and mmrl's own engine: answers go on over a weight sync (AReaL's interruptible
    generation, arXiv 2505.24298). What was written stays, its keys and values are computed anew, the tokens to come are of the
    new weights; each token carries its version and is corrected by it, and staleness counts from the oldest. Off: newer weights
    wait for the wave of answers under way."""
    wave: int | None = Field(None, ge=1)
    """Prompts answered, scored and handed to training together; null: an eighth of train.prompts_per_step, at least 1 (serial:
    always all)."""
    correction: Literal["none", "truncate", "mask"] = "truncate"
    """async: importance weights w = new / old probability for tokens of older weights, at most `threshold` (truncate), or 0
    beyond it (mask); see mmrl/algorithms/staleness.py."""
    correction_level: Literal["token", "sequence"] = "token"
    """async: weights of each token, or of a whole answer (a turn of it): the product over its tokens, as verl's sequence level."""
    threshold: float = Field(2.0, gt=0)
    """Bound of the importance weights of `correction`."""
    timeline: int = Field(0, ge=0)
    """Every how many steps (and in the first) RUN/timeline is written, for the report; 0: never."""

    @model_validator(mode="after")
    def _bounded(self) -> ScheduleConfig:
        if self.kind == "async" and self.staleness < 1:
            raise ValueError(
                "schedule.kind async needs schedule.staleness of at least 1; with 0 it is pipelined"
            )
        return self
