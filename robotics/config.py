"""The configuration of an embodied run: mmrl's own sections, and those of environments, actions, demonstrations and scheduling.

    cfg = load_embodied("configs/maniskill.yaml", ["env.horizon=48", "schedule.kind=serial"])

`mmrl train`, `sft` and `eval` take a file as embodied when it has an `env` section.
"""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from mmrl.config import OptimConfig, RunConfig, Section, load_config_as
from mmrl.config import ScheduleConfig as _ScheduleConfig

__all__ = ["ActionConfig", "DemoConfig", "EmbodiedConfig", "EnvConfig", "RLConfig", "ScheduleConfig", "VLAConfig", "learner_config",
           "load_embodied"]


class _Section(Section, BaseModel):
    """The sections of this file (BaseModel is named so that linters know what their defaults are)."""


class EnvConfig(_Section):
    """Where the policy acts; see robotics.contract.EnvSpec.

    In a run of several processes (torchrun, accelerate launch: one per GPU) each has slots, workers and respawns of its own and
    plays its share of a step's train.prompts_per_step groups: 8 processes with slots 16 and workers 2 hold 128 simulators in 16
    workers. Choose train.prompts_per_step as a multiple of the processes.
    """

    suite: str = "tiny"
    """tiny, maniskill, libero, robosuite, or module:Class of a robotics.contract.Simulator."""
    tasks: list[str] = Field(["push"], min_length=1)
    """Tasks of the suite: one policy for all, groups are drawn from them in turn."""
    horizon: int = Field(40, ge=1)
    """Control steps until an episode is truncated."""
    image_size: int = Field(64, ge=8)
    """Width and height in pixels of what a camera renders."""
    cameras: list[str] = ["base"]
    """Cameras that are rendered."""
    options: dict[str, Any] = {}
    """Options of the suite."""
    slots: int = Field(16, ge=1)
    """Simulators held at once, by each process of the run."""
    workers: int = Field(2, ge=1)
    """Worker processes that they live in, for each process of the run."""
    start_s: float = Field(180.0, gt=0)
    """Seconds for a worker to answer its handshake."""
    reset_s: float = Field(120.0, gt=0)
    """Seconds for a reset; the first one opens the simulator."""
    step_s: float = Field(60.0, gt=0)
    """Seconds for an action chunk."""
    respawns: int = Field(20, ge=0)
    """Workers started anew before the run gives up."""
    restart_after_resets: int = Field(0, ge=0)
    """Simulators are made anew after so many resets, against leaks; 0: never."""
    memory_gib: float | None = Field(None, gt=0)
    """A worker with more memory than this is restarted between episodes; null: never."""
    retries: int = Field(2, ge=0)
    """An episode that failed (crash, hang) is played again so often, from the same state."""


class ActionConfig(_Section):
    """Action tokens; see robotics.actions.ActionCodec. A checkpoint brings its own, which these must not contradict."""

    bins: int = Field(33, ge=2, le=1000)
    """Tokens per action dimension."""
    chunk: int = Field(4, ge=1)
    """Action steps of one decision."""
    repeat: int = Field(2, ge=1)
    """Control steps each of them is executed for."""
    statistics: str | None = None
    """dataset_statistics.json with q01 and q99; null: the simulator's bounds."""
    gripper: Literal["raw", "binary_sign", "openvla", "maniskill"] = "raw"
    """Convention of the policy's gripper values."""


class VLAConfig(_Section):
    """How the model sees and decides; written to vla.json of a checkpoint."""

    decode: Literal["parallel", "autoregressive"] = "parallel"
    """All tokens of a chunk in one forward pass, or one after the other."""
    cameras: list[str] = ["base"]
    """Cameras whose pictures the policy is shown, in this order."""
    prompt: str = "{instruction}"
    """Text of the prompt; {instruction} stands for the task's."""
    proprio: bool = False
    """The policy also gets proprioception."""
    proprio_dim: int = Field(0, ge=0)
    """Length of the proprioception vector; set when a policy is made."""
    proprio_low: list[float] = []
    """Its lower bounds, for normalisation; set when a policy is made."""
    proprio_high: list[float] = []
    """Its upper bounds, for normalisation; set when a policy is made."""
    value_head: bool = False
    """Add a critic (rl.kind ppo)."""
    value_hidden: int = Field(256, ge=1)
    """Width of the critic's hidden layer."""
    value_steps: int = Field(1, ge=1)
    """Values of a decision: 1, or with rl.level action one per action step; set when a policy is made."""


def _cloning() -> OptimConfig:
    return OptimConfig(lr=5e-4, schedule="cosine", min_lr_ratio=0.1, warmup_steps=20)


class DemoConfig(_Section):
    """`mmrl sft`: demonstrations (a data set, recorded from the scripted expert when it is not there yet) and how they are
    cloned."""

    path: str | None = None
    """LeRobot folder or LIBERO hdf5; null: RUN dir/NAME_demos."""
    episodes: int = Field(200, ge=1)
    """Episodes per task, when they are recorded."""
    noise: float = Field(0.2, ge=0)
    """Standard deviation of the noise added to the executed actions."""
    labels: Literal["clean", "executed"] = "clean"
    """What is cloned: what the expert wanted, or what it did, noise included."""
    horizon: int | None = Field(None, ge=1)
    """Control steps the expert has; null: env.horizon."""
    speed: float = Field(1.0, gt=0, le=1)
    """All actions but the gripper's are multiplied by this: a cautious demonstrator."""
    every: int = Field(1, ge=1)
    """Control steps from one recorded picture to the next."""
    first_state: int = Field(500_000, ge=0)
    """Number of the first training state that is used: RL starts from 0."""
    steps: int = Field(1500, ge=1)
    """Optimizer steps."""
    batch: int = Field(32, ge=1)
    """Decisions per step."""
    optim: OptimConfig = Field(default_factory=_cloning)


class RLConfig(_Section):
    """Embodied reinforcement learning; the GRPO settings are those of `algorithm`."""

    kind: Literal["grpo", "ppo"] = "grpo"
    """grpo: an episode's advantage is compared within its group; ppo: a critic judges each decision (GAE)."""
    reward: Literal["success", "shaped", "relative"] = "success"
    """success: paid once, at the end; shaped: the simulator's rewards; relative: their differences from step to step."""
    reward_coef: float = Field(1.0, gt=0)
    """Rewards are multiplied by this."""
    success: Literal["once", "at_end"] = "once"
    """Which success is paid: ever reached, or still there at the end."""
    length_norm: Literal["trajectory", "token"] = "trajectory"
    """Every trajectory weighs the same, or every token does. ppo normalises advantages over decisions (or action steps) first,
    all alike; weighed by 1 / length of their trajectory their mean is then not 0 but leans towards that of short episodes;
    token keeps it near 0. RLinf does the same."""
    filter_low: float = Field(0.0, ge=0, le=1)
    """grpo: groups whose mean success lies below this are drawn again. Included, other than algorithm.filter.low (SimpleVLA-RL:
    0.1)."""
    filter_high: float = Field(1.0, ge=0, le=1)
    """grpo: groups whose mean success lies above this are drawn again. Included (SimpleVLA-RL: 0.9)."""
    level: Literal["chunk", "action"] = "chunk"
    """ppo: one value and advantage per decision, or per executed action step of it."""
    gamma: float = Field(0.99, gt=0, le=1)
    """ppo: discount per decision; with level action per action step."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """ppo: lambda of generalised advantage estimation."""
    value_coef: float = Field(0.5, ge=0)
    """ppo: weight of the value loss."""
    value_clip: float | None = Field(0.2, gt=0)
    """ppo: a value's change from the old one is clipped to this; null: not clipped."""
    huber_delta: float = Field(10.0, gt=0)
    """ppo: where the value loss turns from quadratic to linear."""
    value_lr: float | None = Field(None, gt=0)
    """ppo: learning rate of the critic; null: optim.lr."""
    critic_warmup: int = Field(0, ge=0)
    """ppo: training steps (not optimizer steps) at the start in which only the critic learns."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    bootstrap: Literal["standard", "always", "never"] = "standard"
    """ppo: the value of the final state is added at truncation, at every end, or never."""


class ScheduleConfig(_ScheduleConfig):
    """When rendering, inference and training run: kind, order, staleness, correction and threshold as for prompts, and stages of
    environments. `wave` is of prompts and stays unset here."""

    stages: int = Field(2, ge=1)
    """Parts of the environments: the policy decides for one while the others render (serial: 1). More stages mean smaller
    inference batches; on one device, where training takes turns with inference, four were no faster than two
    (scripts/bench_schedule.py)."""
    timeline: int = Field(20, ge=0)
    """Every how many steps (and in the first) RUN/timeline is written, for the report; 0: never."""

    @model_validator(mode="after")
    def _no_prompts(self) -> ScheduleConfig:
        if self.wave is not None:
            raise ValueError(f"schedule.wave ({self.wave}) is of prompts: remove it; simulators are split by schedule.stages")
        return self


_UNUSED = {"algorithm": ("advantage", "critic", "aggregate", "importance", "aggregation", "contrast", "difficulty", "entropy",
                         "filter", "offline", "overlong", "carry_share"),
           "engine": ("rollout", "vllm"), "rollout": ("top_p", "top_k", "max_new_tokens"),
           "data": ("train", "eval", "selection", "curriculum"),
           "reward": ("shuffle",), "eval": ("views",), "train": ("forward",)}
"""Keys of the other kind of run, by section: an embodied run refuses them rather than ignore them."""

_OF_KIND: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "grpo": ("ppo judges each decision by its critic and trains on every episode that finished, whatever its group (only a group "
             "of which none finished is replaced, up to algorithm.max_rounds states)",
             {"rl": ("filter_low", "filter_high"), "algorithm": ("dynamic_sampling", "advantage_scale")}),
    "ppo": ("grpo gives a whole episode one advantage, from its group, and has no critic",
            {"rl": ("level", "gamma", "gae_lambda", "value_coef", "value_clip", "huber_delta", "value_lr", "critic_warmup",
                    "bootstrap")})}
"""Keys of one rl.kind: why the other has no use for them, and which, by section."""


def _changed(section: BaseModel, key: str) -> bool:
    """Whether `key` is set to something else than its default. A file written by a run names every key."""
    default = type(section).model_fields[key].get_default(call_default_factory=True)
    return key in section.model_fields_set and getattr(section, key) != default


class EmbodiedConfig(RunConfig):
    """Everything an embodied run needs. train.prompts_per_step counts groups (initial states), rollout.group_size episodes
    of each; eval.limit counts held-out states."""

    critic_defaults: ClassVar[Mapping[str, Any]] = {}
    overlaps_in_processes: ClassVar[bool] = True  # each has a whole policy, and waits for the others in between two steps

    env: EnvConfig = EnvConfig()
    action: ActionConfig = ActionConfig()
    vla: VLAConfig = VLAConfig()
    demos: DemoConfig = DemoConfig()
    rl: RLConfig = RLConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    eval_states: int = Field(100, ge=1)
    """Held-out initial states per task, before and after training."""

    @model_validator(mode="after")
    def _embodied(self) -> EmbodiedConfig:
        for section, keys in _UNUSED.items():
            part = getattr(self, section)
            for key in keys:
                if getattr(part, key) != type(part).model_fields[key].get_default(call_default_factory=True):
                    raise ValueError(f"{section}.{key} means nothing to an embodied run (episodes come from env, rewards from rl): "
                                     "remove it")
        if self.algorithm.advantage_scale not in ("std", "none"):
            raise ValueError(f"algorithm.advantage_scale of an embodied run is std or none, found {self.algorithm.advantage_scale}")
        if self.rl.success == "at_end" and self.stops_at_success:
            raise ValueError("rl.success at_end needs episodes that go on after a success: set env.options.stop_at_success: false "
                             "(tiny, maniskill; LIBERO and robosuite always stop)")
        missing = [c for c in self.vla.cameras if c not in self.env.cameras]
        if missing:
            raise ValueError(f"vla.cameras needs {', '.join(missing)}, which env.cameras ({', '.join(self.env.cameras)}) does not "
                             "render")
        if self.rl.filter_low >= self.rl.filter_high:
            raise ValueError(f"rl.filter_low ({self.rl.filter_low}) must lie below rl.filter_high ({self.rl.filter_high})")
        if self.rl.kind == "ppo" and not self.vla.value_head:
            raise ValueError("rl.kind ppo needs a critic: set vla.value_head: true")
        self._check_kind()
        return self

    def _check_critic_of_kind(self) -> None:
        """See RunConfig: the rl section has it."""

    def _check_kind(self) -> None:
        """Refuse what was set and means nothing to rl.kind, rather than ignore it."""
        for kind, (why, sections) in _OF_KIND.items():
            wrong = [f"{name}.{key} {getattr(getattr(self, name), key)}" for name, keys in sections.items() for key in keys
                     if _changed(getattr(self, name), key)]
            if kind != self.rl.kind and wrong:
                raise ValueError(f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} of rl.kind {kind}: {why}; remove "
                                 f"{'it' if len(wrong) == 1 else 'them'} (or set the default), or set rl.kind: {kind}")

    @property
    def stops_at_success(self) -> bool:
        """Whether a success ends an episode, so that success at the end says nothing beyond success once."""
        return self.env.suite in ("libero", "robosuite") or bool(self.env.options.get("stop_at_success", True))


def learner_config(config: EmbodiedConfig) -> EmbodiedConfig:
    """The configuration with the rl section's entropy bonus and length normalisation where the learner reads them."""
    a = config.algorithm
    own = {"aggregate": "sequence_mean" if config.rl.length_norm == "trajectory" else "token_mean",
           "entropy": a.entropy.model_copy(update={"coef": config.rl.entropy_coef})}
    return config.model_copy(update={"algorithm": a.model_copy(update=own)})


def load_embodied(path: str | Path | None = None, overrides: list[str] | None = None) -> EmbodiedConfig:
    """Read a YAML file of an embodied run with dotted overrides. Raises ConfigError listing every problem."""
    return load_config_as(EmbodiedConfig, path, overrides)
