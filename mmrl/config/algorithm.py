"""The section `algorithm`: GRPO and its published variants. Part of mmrl.config; formulas stand in mmrl/algorithms."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from mmrl.config.section import Section

__all__ = [
    "ADVANTAGE_SCALES",
    "GAE",
    "GSPO",
    "PROMPT_CRITIC",
    "AlgorithmConfig",
    "ContrastConfig",
    "CriticConfig",
    "EMAConfig",
    "EntropyConfig",
    "FilterConfig",
    "KLConfig",
    "OfflineConfig",
    "ReplayConfig",
    "RouterReplayConfig",
    "TurnsConfig",
]

ADVANTAGE_SCALES = {
    "grpo": ("std", "none", "batch", "batch_rewards", "ema", "ema_within"),
    "rloo": ("none", "batch"),
    "opo": ("none", "batch"),
    "pass_k": ("std",),
    "gae": ("batch",),
}
"""Which advantage_scale each estimator is defined with."""

GSPO = {"clip_low": 3e-4, "clip_high": 4e-4, "loss_aggregation": "sequence_mean"}
"""Defaults of algorithm.importance_sampling_level sequence."""

PROMPT_CRITIC = {"level": "token", "gamma": 1.0, "lr": 1e-3, "bootstrap": "never"}
"""Defaults of algorithm.critic in a run on prompts with advantage gae."""

GAE = {"advantage_scale": "batch", "dynamic_sampling": False}
"""Defaults of algorithm.advantage gae: advantages are normalised over the step, and a group teaches whatever its rewards."""


class _Section(Section, BaseModel):
    """The sections of this file (BaseModel is named so that linters know what their defaults are)."""


class KLConfig(_Section):
    """KL penalty against the policy that the run started from (with LoRA: the model without its adapter)."""

    coef: float = Field(0.0, ge=0)
    """Weight of the penalty in the loss; 0: no reference model is kept."""
    estimator: Literal["k2", "k3"] = "k3"
    """Estimator of Schulman (2020): k2 has the gradient of KL(policy || reference), k3 that of KL(reference || policy)."""

    @field_validator("estimator", mode="before")
    @classmethod
    def _regularises(cls, value: Any) -> Any:
        if value == "k1":
            raise ValueError(
                "kl.estimator k1 as a loss regularises nothing: its gradient, the mean of grad log pi over samples of "
                "pi, is 0 in expectation, so that only noise is added; use k3 (or k2, which has the gradient of "
                "KL(policy || reference))"
            )
        return value


class EMAConfig(_Section):
    """The running standard deviation of each task's rewards (mmrl/algorithms/ema.py), used with advantage_scale ema (EMA-GRPO as
    OneThinker's code has it, arXiv 2512.03043) and ema_within (mmrl's own)."""

    decay: float = Field(0.99, ge=0, lt=1)
    """Share of the old average that a step keeps."""
    min_std: float = Field(1e-3, gt=0)
    """Smaller standard deviations count as this one."""
    limit: float = Field(5.0, gt=0)
    """A group with an |advantage| above it is divided by its own standard deviation instead."""
    by: Literal["task", "source"] = "task"
    """One average per task, or per source of data.train."""


class ContrastConfig(_Section):
    """Rollouts on a changed input for each group: T-GRPO's shuffled frames and relatives (mmrl/algorithms/contrast.py).

    Groups whose input the change cannot touch (pictures and one-frame clips for shuffle, text for all) have none. With
    advantage_scale std and rewards that are only right or wrong, the bonus cancels: it needs a second reward part that differs,
    or advantage_scale none (see there for the others).
    """

    kind: Literal["none", "shuffle", "mirror", "mask", "question_only"] = "none"
    """The change: frames in another order (T-GRPO), pictures mirrored, pixels masked, or no media at all."""
    group_size: int | None = Field(None, ge=1)
    """Rollouts on the changed input per group; null: half of rollout.group_size (Video-R1)."""
    unit: Literal["frames", "pairs"] = "frames"
    """What shuffle moves: single frames, or the vision tower's pairs of frames, whose cached features are used again."""
    factor: float = Field(0.8, ge=0)
    """The bonus is paid where the group's mean accuracy >= factor * mean accuracy on the changed input ..."""
    threshold: float = Field(0.1, ge=0)
    """... to completions with an accuracy above this."""
    bonus: float = Field(0.3, ge=0)
    """Added to their reward; 0: the contrast is only measured."""
    skip: bool = True
    """Leave out rollouts on the changed input where they cannot change an advantage."""
    measure: float = Field(0.1, ge=0, le=1)
    """With skip: share of groups, drawn by lot, that get them all the same; the metric contrast/gap is of these."""

    @model_validator(mode="after")
    def _measures(self) -> ContrastConfig:
        if self.kind != "none" and self.bonus == 0 and self.skip and self.measure == 0:
            raise ValueError(
                "contrast.bonus 0 with skip true and measure 0 never rolls anything out; set skip: false to measure"
            )
        return self


class EntropyConfig(_Section):
    """Entropy bonus with gradient (mmrl/algorithms/entropy.py): the loss of a token is lowered by coef * entropy (nats) of its
    whole distribution, which needs no more memory. With a target the coefficient adapts (Skywork-OR1, TRL)."""

    coef: float = Field(0.0, ge=0)
    """Weight of the bonus; 0 without a target: off; with a target: its first value. Usual: 1e-3."""
    target: float | None = Field(None, gt=0)
    """Nats per token. After an optimizer step at or below it coef rises by delta, above it coef falls; the bonus acts while the
    entropy is at or below the target. Choose it a little below train/entropy of the first steps. null: coef is fixed."""
    delta: float = Field(0.005, gt=0)
    """Change of the adaptive coefficient per optimizer step."""
    coef_min: float = Field(0.0, ge=0)
    """Lower bound of the adaptive coefficient."""
    coef_max: float = Field(1.0, ge=0)
    """Upper bound of the adaptive coefficient."""


class FilterConfig(_Section):
    """How dynamic sampling tells groups with signal from those without (mmrl/algorithms/group_rewards.py, group_outcome): values of
    the key differ inside the group, and their mean lies between the bounds. Neither the overlong penalty nor the contrast bonus
    counts: a group that differs in length alone teaches nothing of its task."""

    key: str = "accuracy"
    """A reward part, or `reward` for the whole reward. accuracy: the whole reward where a task has no such part (DAPO; verl's
    filter_groups.metric acc; EasyR1's filter_key). Equally right answers of different form have signal only with `reward`. For
    robots: success (0 or 1), a kind of rl.reward, or the whole return (accuracy and reward alike)."""
    low: float | None = None
    """The group's mean must be above it (EasyR1 filter_low 0.01; SimpleVLA-RL 0.1 of key success, which it includes: with its
    groups of 8 that is the same); null: no bound."""
    high: float | None = None
    """The group's mean must be below it (EasyR1 filter_high 0.99; SimpleVLA-RL 0.9 of key success); null: no bound."""

    @model_validator(mode="after")
    def _ordered(self) -> FilterConfig:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(
                f"filter.low ({self.low:g}) must lie below filter.high ({self.high:g}): both are exclusive"
            )
        return self


class OfflineConfig(_Section):
    """Demonstrations in each group, LUFFY (mmrl/algorithms/offline.py).

    They count in the group's advantages, their tokens are weighed by f(pi / b) and not clipped, and no KL term applies to
    them. Not with advantage pass_k (it counts what the policy itself gets right) nor importance_sampling_level sequence (f is per
    token).
    """

    per_group: int = Field(0, ge=0)
    """Most demonstrations per group; 0: off. LUFFY: 1 of 8."""
    gold: bool = False
    """For rows without demonstrations: the task's own gold answer."""
    gamma: float | None = Field(0.1, gt=0, allow_inf_nan=False)
    """f(x) = x / (x + gamma), strongest where pi / b = gamma; null: f(x) = x."""
    behaviour: Literal["one", "given"] = "one"
    """b: 1 (LUFFY), or the row's own log-probs where it has them."""
    cap: float = Field(2.0, ge=1, allow_inf_nan=False)
    """Largest pi / b."""
    replace: bool = True
    """Demonstrations take the place of rollouts; false: groups grow."""
    only_when_failing: bool = False
    """Only in groups without a right rollout (all rollouts are made, then the last ones replaced)."""
    until: float = Field(1.0, gt=0, le=1)
    """Share of train.steps after which none are added."""


class ReplayConfig(_Section):
    """Experience pool (mmrl/algorithms/replay.py): a group in which no rollout succeeded gets a past success of the policy's own on
    its prompt, with the log-probs of the weights that wrote it. For prompts, of one turn or several; an environment plays it again.

    Serial and pipelined runs. Not with advantage gae or pass_k, algorithm.contrast, algorithm.offline or rewards of a whole group.
    """

    per_group: int = Field(0, ge=0)
    """Most past successes in a group that has none, in the place of its last rollouts; 0: off. ARPO: 1 of 8."""
    max_age: int = Field(50, ge=1)
    """Steps after which a success is forgotten: its importance weights are far from 1 by then."""
    cap: float = Field(2.0, ge=1, allow_inf_nan=False)
    """Bound of the importance weights pi_now / pi_then of their tokens (truncated importance sampling). The clip is around the
    weights of now (decoupled PPO): around those of then it would stop at 1 + clip_high times the old probability, for good."""
    size: int = Field(1000, ge=1)
    """Most rollouts kept; beyond it the oldest go."""


class RouterReplayConfig(_Section):
    """Routing replay for mixtures of experts (mmrl/policy/routing.py; verl: actor.router_replay): the update computes each token
    with the experts that it had before, and lets routers decide only what they weigh. Routers still learn. Without it a small
    change of the weights sends some tokens to other experts, and their ratios jump; importance_sampling_level sequence averages
    over such jumps.

    All tokens that the update computes are replayed, prompts, pictures and observations included. A reference model (kl) is another
    policy and chooses for itself. The metric train/router/changed is the share of replayed tokens that the routers of now would
    have sent elsewhere in some layer, train/router/changed_layers the share over tokens and layers.
    """

    mode: Literal["disabled", "R2", "R3"] = "disabled"
    """R2 (arXiv 2507.18071, section 5.3): the experts that the training model chooses before the first of a step's optimizer steps,
    found by one more forward; needs algorithm.epochs or minibatches above 1. R3 (arXiv 2510.11370): those that computed the
    rollout, by mmrl's own engine; not with schedule.partial_rollouts. They are kept with the turns until they are trained on: a
    byte (two beyond 256 experts) per token, layer and chosen expert, 384 bytes a token for 48 layers with 8. Answers of a group
    share those of their prompt; of several turns each keeps those of all that precedes it. Tokens that no rollout read
    (demonstrations, past successes, the last of an answer) go where routers send them."""


class TurnsConfig(_Section):
    """Rollouts of several turns (mmrl/algorithms/turns.py): what each turn answers for, and which turns are trained on. For prompts
    with an environment, and for robots, whose turns are decisions. At the defaults all turns of a rollout have its advantage.

    Groups are told from those without signal by their rollouts' whole rewards as ever (algorithm.filter): one whose rollouts earned
    the same by different turns is replaced, unless dynamic_sampling is false.
    """

    advantage: Literal["rollout", "turn"] = "rollout"
    """rollout: all turns have the advantage of the rollout's reward. turn: each has one of its own, of the discounted sum of its
    reward and those of the turns after it; what environments pay turn by turn (Outcome.reward, process_rewards) counts there, what
    else the rollout earned in its last turn. With advantage grpo (advantage_scale std or none) and rloo (none)."""
    gamma: float = Field(1.0, ge=0, le=1)
    """With advantage turn: discount per turn. 1: all that follows counts alike; 0: a turn's own reward alone."""
    normalise: Literal["turn_index", "all_turns"] = "turn_index"
    """With advantage turn: what a turn is compared with. turn_index: the group's turns at the same place of their rollouts, of
    those that got so far; a turn that is alone there gets 0. all_turns: all turns of the group; where less is left to earn towards
    the end of rollouts, this favours their early turns."""
    keep_entropy: float = Field(1.0, gt=0, le=1)
    """Share of a group's turns that are trained on, those with the highest mean entropy of their tokens first (DART: 0.8); what
    mask_rollouts or overlong leaves out is not counted. The entropy is that of the whole distributions that the tokens were drawn
    from, by the weights before the update (of stale rollouts: not quite those that wrote them), which costs a forward pass more
    per step, unless one is made anyway (schedule.kind async, router_replay R2, each with several optimizer steps per step). It
    depends on no reward: advantages are those of the whole group. Groups whose rollouts all have one turn are kept whole."""

    def changed(self) -> list[str]:
        """The keys that are not at their defaults."""
        return [
            name
            for name, field in type(self).model_fields.items()
            if getattr(self, name) != field.default
        ]

    @model_validator(mode="after")
    def _used(self) -> TurnsConfig:
        unused = [name for name in self.changed() if name in ("gamma", "normalise")]
        if unused and self.advantage == "rollout":
            raise ValueError(
                f"turns.{' and turns.'.join(unused)}: only advantages of single turns have returns; set turns.advantage: turn, or "
                "remove it"
            )
        return self


class CriticConfig(_Section):
    """PPO's critic, with algorithm.advantage gae: a value head judges what the policy writes, and generalised advantage estimation
    (mmrl/algorithms/gae.py) makes advantages of its values; its loss is added to the policy's (mmrl/algorithms/ppo.py)."""

    level: Literal["turn", "action", "token"] = "turn"
    """What has a value and an advantage of its own: each turn (an answer, a robot's decision; RLinf's chunk level), each executed
    action step of a robot's decision, or each token of an answer (on prompts the default)."""
    hidden: int = Field(256, ge=1)
    """Answers: width of the value head's hidden layer (robots: vla.value_hidden)."""
    detach: bool = False
    """The value loss trains the value head alone; false: also the model below it, which the policy shares."""
    gamma: float = Field(0.99, gt=0, le=1)
    """Discount per turn, action step or token, as level says; on prompts 1 by default."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation: 1 gives returns minus values, 0 one-step errors."""
    value_coef: float = Field(0.5, ge=0)
    """Weight of the value loss, relative to the policy's."""
    value_clip: float | None = Field(0.2, gt=0)
    """A value's change from the old one is clipped to this; null: not clipped."""
    huber_delta: float = Field(10.0, gt=0)
    """Where the value loss turns from quadratic to linear."""
    lr: float | None = Field(None, gt=0)
    """Learning rate of the value head; null: optim.lr. It begins from nothing, so that what is right for the model is too little
    for it: on prompts 1e-3 by default."""
    warmup: int = Field(0, ge=0)
    """Training steps (not optimizer steps) at the start in which only the critic learns."""
    bootstrap: Literal["standard", "always", "never"] = "standard"
    """The value of what comes after the last turn is added where the rollout was cut off (standard), at every end, or never. On
    prompts never is the default, as in TRL and verl: the length limit is part of the task, an answer that it cuts has failed."""

    def changed(self) -> list[str]:
        """The keys that are not at their defaults."""
        return [
            name
            for name, field in type(self).model_fields.items()
            if getattr(self, name) != field.default
        ]


class AlgorithmConfig(_Section):
    """GRPO and its published variants; formulas in mmrl/algorithms."""

    advantage: Literal["grpo", "rloo", "opo", "pass_k", "gae"] = "grpo"
    """Baseline of the advantage: the group's mean reward (grpo), the mean of the other completions (rloo), the mean weighted by
    length in tokens (opo), pass@k over the group (pass_k), or what a critic expected (gae: PPO, see critic). rloo and opo need
    advantage_scale none or batch; gae has batch, and dynamic_sampling false."""
    critic: CriticConfig = CriticConfig()
    turns: TurnsConfig = TurnsConfig()
    advantage_scale: Literal["std", "none", "batch", "batch_rewards", "ema", "ema_within"] = "std"
    """What advantages are divided by. std: the standard deviation of the group's rewards; none: nothing (Dr.GRPO); batch: the std
    of the step's advantages, rewards minus their baseline (REINFORCE++ baseline); batch_rewards: that of the step's rewards, the
    spread between prompts included (Lite PPO; TRL's scale_rewards batch); ema: the running std of all rewards of the task
    (OneThinker's EMA-GRPO); ema_within: the running mean of the std inside the task's groups."""
    ema: EMAConfig = EMAConfig()
    reward_aggregation: Literal["plain", "gdpo"] = "plain"
    """How reward parts become one advantage: of their weighted sum, or (gdpo) each part normalised in its group before the
    sum."""
    contrast: ContrastConfig = ContrastConfig()
    offline: OfflineConfig = OfflineConfig()
    replay: ReplayConfig = ReplayConfig()
    router_replay: RouterReplayConfig = RouterReplayConfig()
    difficulty: Literal["none", "univg_exp", "univg_power", "univg_log", "softmax"] = "none"
    """Multiply a group's advantages by a weight that falls with its mean accuracy, of episodes their success rate
    (mmrl/algorithms/difficulty.py)."""
    difficulty_power: float = Field(1.0, ge=0)
    """The exponent w of univg_power."""
    difficulty_temperature: float = Field(2.0, gt=0)
    """The temperature T of softmax."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "dr_grpo"] = "token_mean"
    """How token losses become one loss: mean over all tokens of the step (DAPO), mean over sequences of their means (GRPO), or
    sum over a constant length (Dr.GRPO)."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Level of the importance ratio. sequence: GSPO, one ratio for each turn, the geometric mean of its tokens': an answer, or a
    robot's decision, of which only what was executed counts (SimpleVLA-RL has token ratios). clip_low 3e-4, clip_high 4e-4 and
    loss_aggregation sequence_mean are then the defaults, as in its paper (arXiv 2507.18071, section 5.1)."""
    clip_low: float = Field(0.2, ge=0)
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(0.28, ge=0)
    """The ratio is clipped above 1 + clip_high (clip-higher, DAPO)."""
    dual_clip: float | None = 3.0
    """Bound of the loss of tokens with a negative advantage, as a multiple of it (dual-clip PPO); null: none."""
    kl: KLConfig = KLConfig()
    entropy: EntropyConfig = EntropyConfig()
    epochs: int = Field(1, ge=1)
    """Passes over each step's groups."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per pass."""
    dynamic_sampling: bool = True
    """Replace groups without signal (DAPO); false: train on all groups, whatever their rewards."""
    filter: FilterConfig = FilterConfig()
    max_rounds: int = Field(3, ge=1)
    """Prompts tried for each place of a step; 1: groups without signal are left out and not replaced."""
    carry_share: float = Field(0.25, ge=0, le=1)
    """Largest share of a step's places given to prompts that had no signal earlier."""
    overlong: Literal["none", "mask", "soft"] = "none"
    """Completions cut at the length limit: judged as they are, left out of the loss (mask), or punished from overlong_buffer
    tokens before the limit on (soft; DAPO)."""
    mask_rollouts: list[Literal["unparsed", "truncated"]] = []
    """Rollouts of several turns that are left out of the loss, and still count in their group: those with a turn that the
    environment could not read (unparsed: SimpleTIR's void turns), those that it or its max_turns cut off (truncated)."""
    overlong_buffer: int = Field(0, ge=0)
    """soft: tokens before the limit where the penalty begins."""
    overlong_weight: float = Field(1.0, ge=0)
    """soft: the penalty at the limit."""

    @model_validator(mode="after")
    def _defaults_of_methods(self) -> AlgorithmConfig:
        """Those of GSPO and GAE, unless they are given.

        A sequence's ratio is the geometric mean of its tokens' and hardly leaves 1: the ranges of tokens would never bind.
        """
        self.follow(GSPO, applies=self.importance_sampling_level == "sequence")
        self.follow(GAE, applies=self.advantage == "gae")
        return self

    @field_validator("difficulty", mode="before")
    @classmethod
    def _not_vitals(cls, value: Any) -> Any:
        if value == "dgrpo":
            raise ValueError(
                "difficulty dgrpo is called softmax now: it is a formula of mmrl's own "
                "(mmrl/algorithms/difficulty.py), not that of VITAL's DGRPO; set algorithm.difficulty: softmax"
            )
        return value
