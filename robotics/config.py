"""The configuration of an embodied run: mmrl's own sections, and those of environments, actions, demonstrations and scheduling.

    cfg = load_embodied("configs/maniskill.yaml", ["env.horizon=48", "schedule.kind=serial"])

`mmrl train`, `sft` and `eval` take a file as embodied when it has an `env` section.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from mmrl.config import (
    AlgorithmConfig,
    OptimConfig,
    RolloutShape,
    RunConfig,
    Section,
    load_config_as,
)
from mmrl.config import ScheduleConfig as _ScheduleConfig
from mmrl.config.section import HomePath
from mmrl.errors import CheckpointError, did_you_mean
from mmrl.robotics.actions import ActionCodec
from mmrl.robotics.contract import simulator_class
from mmrl.robotics.metaworld_tasks import expand

__all__ = [
    "ActionConfig",
    "DemoConfig",
    "EmbodiedAlgorithmConfig",
    "EmbodiedConfig",
    "EnvConfig",
    "FlowConfig",
    "RLConfig",
    "ScheduleConfig",
    "VLAConfig",
    "load_embodied",
    "read_description",
]

C = TypeVar("C", bound="EmbodiedConfig")


class _Section(Section, BaseModel):
    """The sections of this file (BaseModel is named so that linters know what their defaults are)."""


class EnvConfig(_Section):
    """Where the policy acts; see mmrl.robotics.contract.EnvSpec.

    In a run of several processes (torchrun, accelerate launch: one per GPU) each has slots, workers and respawns of its own and
    plays its share of a step's train.prompts_per_step groups: 8 processes with slots 16 and workers 2 hold 128 simulators in 16
    workers. Choose train.prompts_per_step as a multiple of the processes.
    """

    suite: str = "tiny"
    """tiny, maniskill, libero, robosuite, metaworld, or module:Class of a mmrl.robotics.contract.Simulator."""
    tasks: list[str] = Field(["push"], min_length=1)
    """Tasks of the suite: one policy for all, groups are drawn from them in turn. Of metaworld also its groups of tasks: MT10,
    MT50, ML10-train, ML10-test, ML45-train, ML45-test, easy, medium, hard, very-hard."""
    horizon: int = Field(40, ge=1)
    """Control steps until an episode is truncated."""
    image_size: int = Field(64, ge=8)
    """Width and height in pixels of what a camera renders."""
    cameras: list[str] = ["base"]
    """Cameras that are rendered."""
    options: dict[str, Any] = {}
    """Options of the suite."""
    slots: int = Field(16, ge=1)
    """Simulators held at once, by each process of the run. Where they are stepped in batches (maniskill with options.sim_backend
    gpu), each worker has a batch of slots / workers of them: take schedule.stages as many as workers, so that the policy decides
    for one batch while another is stepped, or 1."""
    workers: int = Field(2, ge=1)
    """Worker processes that they live in, for each process of the run."""
    start_s: float = Field(180.0, gt=0)
    """Seconds for a worker to answer its handshake."""
    reset_s: float = Field(120.0, gt=0)
    """Seconds for a reset; the first one opens the simulator."""
    step_s: float = Field(60.0, gt=0)
    """Seconds for an action chunk."""
    respawns: int = Field(20, ge=0)
    """Workers that may die or hang before the run gives up; each 50 episodes that finish make up for one. A state that kills its
    simulator costs no more of them than one of its episodes may (1 + retries)."""
    restart_after_resets: int = Field(0, ge=0)
    """Simulators are made anew after so many resets, against leaks; 0: never. Not those that are stepped in batches."""
    memory_gib: float | None = Field(None, gt=0)
    """A worker with more memory than this is restarted between episodes; null: never."""
    retries: int = Field(2, ge=0)
    """An episode that failed (crash, hang) is played again so often, from the same state."""

    @property
    def batched(self) -> bool:
        """Whether the simulators of a worker are the rows of a batch; see mmrl.robotics.vector."""
        return simulator_class(self.suite).batches(self.options)

    @field_validator("tasks")
    @classmethod
    def _groups(cls, tasks: list[str], info: ValidationInfo) -> list[str]:
        return expand(tasks) if info.data.get("suite") == "metaworld" else tasks


class ActionConfig(_Section):
    """Action tokens; see mmrl.robotics.actions.ActionCodec. A checkpoint brings its own, which these must not contradict."""

    bins: int = Field(33, ge=2, le=1000)
    """Tokens per action dimension."""
    chunk: int = Field(4, ge=1)
    """Action steps of one decision."""
    repeat: int = Field(2, ge=1)
    """Control steps each of them is executed for."""
    statistics: HomePath | None = None
    """dataset_statistics.json with q01 and q99; null: the simulator's bounds."""
    gripper: Literal["raw", "binary_sign", "openvla", "maniskill"] = "raw"
    """Convention of the policy's gripper values."""


class FlowConfig(_Section):
    """How a policy with a flow head (SmolVLA, pi0) makes its noise into actions, and which part of that is its decision; see
    mmrl.robotics.flow. A run's own: a checkpoint may be trained with another."""

    denoising_steps: int = Field(4, ge=1)
    """Steps from noise to actions. lerobot evaluates SmolVLA with 10; RL is done with 3 to 5 (RLinf)."""
    noise: Literal["sde", "learned"] = "sde"
    """Where the chance in a decision comes from. sde: Flow-SDE, noise that the flow itself takes out again (Flow-GRPO, pi_RL).
    learned: Flow-Noise, a head of the model says how much noise each step of the ODE gets (ReinFlow)."""
    noise_level: float = Field(0.5, gt=0)
    """With noise sde: its strength a, in std a sqrt(t / (1 - t)) sqrt(1 / denoising_steps). pi_RL 0.5, Flow-GRPO 0.7."""
    noisy_steps: Literal["one", "all"] = "one"
    """With noise sde: one step of each decision, drawn at random, or all of them. learned: all."""
    noise_low: float = Field(0.08, gt=0)
    """With noise learned: the smallest standard deviation, in units of the action's half range."""
    noise_high: float = Field(0.16, gt=0)
    """With noise learned: the largest."""
    logprob: Literal["sum", "mean"] = "sum"
    """Log-prob of a chain with several noisy steps: sum, its density; mean over the steps (RLinf), with ratios nearer to 1."""

    @model_validator(mode="after")
    def _order(self) -> FlowConfig:
        if self.noise_high < self.noise_low:
            raise ValueError(
                f"expected noise_low up to noise_high, found {self.noise_low} and {self.noise_high}: exchange them"
            )
        return self


class VLAConfig(_Section):
    """How the model sees and decides; written to vla.json of a checkpoint."""

    decode: Literal["parallel", "autoregressive", "flow"] = "parallel"
    """All tokens of a chunk in one forward pass, or one after the other. flow: of a policy with a flow head; set
    when it is made."""
    flow: FlowConfig = FlowConfig()
    """Of a policy with a flow head."""
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
    image_size: int | None = None
    """Width and height of the pictures it was trained on, env.image_size, where the policy does not resize them itself; set when it
    is trained. Clients of `mmrl policy-server` have to send pictures of this size; null: of any."""
    value_head: bool = False
    """Add a critic (algorithm.advantage gae)."""
    value_hidden: int = Field(256, ge=1)
    """Width of the critic's hidden layer."""
    value_steps: int = Field(1, ge=1)
    """Values of a decision: 1, or with algorithm.critic.level action one per action step; set when a policy is made."""


def read_description(folder: str | Path) -> tuple[VLAConfig, ActionCodec] | None:
    """What vla.json of a checkpoint says; None where there is none. Raises CheckpointError for a damaged one."""
    file = Path(folder) / "vla.json"
    if not file.is_file():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return VLAConfig.model_validate(data["vla"]), ActionCodec.from_dict(data["action"])
    except (OSError, KeyError, TypeError, ValueError, ValidationError) as error:
        raise CheckpointError(
            f"{file}: expected the action settings of a VLA checkpoint, found: {error}"
        ) from error


def _cloning() -> OptimConfig:
    return OptimConfig(lr=5e-4, schedule="cosine", min_lr_ratio=0.1, warmup_steps=20)


class DemoConfig(_Section):
    """`mmrl sft`: demonstrations (a data set, recorded from the scripted expert when it is not there yet) and how they are
    cloned."""

    path: HomePath | None = None
    """LeRobot folder or LIBERO hdf5; null: RUN dir/NAME_demos."""
    cameras: dict[str, str] = {}
    """Names of the policy's cameras (vla.cameras) in the data set, where they are others: {base: image, wrist: wrist_image}."""
    action_key: str | None = None
    """Column of a LeRobot folder that holds the actions; null: action."""
    state_key: str | None = None
    """Column of a LeRobot folder that holds the proprioception; null: observation.state."""
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
    save_every: int = Field(500, ge=0)
    """Steps between checkpoints, from which `mmrl sft --resume` goes on; 0: none."""
    optim: OptimConfig = Field(default_factory=_cloning)


Reward = Literal["success", "shaped", "relative", "brevity"]


class RLConfig(_Section):
    """What an episode earns. How its policy learns from that is set in `algorithm`, as for answers."""

    reward: Reward | dict[Reward, float] = "success"
    """success: paid once, at the end; shaped: the simulator's rewards; relative: their differences from step to step; brevity: the
    share of env.horizon that a successful episode did not need. Or several with their weights, {success: 1.0, brevity: 0.2}: with
    algorithm.reward_aggregation gdpo each is normalised by itself."""
    reward_coef: float = Field(1.0, gt=0)
    """Rewards are multiplied by this."""
    success: Literal["once", "at_end"] = "once"
    """Which success is paid: ever reached, or still there at the end."""

    @property
    def weights(self) -> dict[Reward, float]:
        """Kinds of reward and their weights."""
        return {self.reward: 1.0} if isinstance(self.reward, str) else self.reward


class EmbodiedAlgorithmConfig(AlgorithmConfig):
    """The algorithm section with the default of episodes."""

    loss_aggregation: Literal["token_mean", "sequence_mean", "dr_grpo"] = "sequence_mean"
    """How token losses become one loss: mean over all tokens of the step (SimpleVLA-RL), mean over episodes of their means (every
    episode weighs the same), or sum over a constant length, that of the longest episode (Dr.GRPO). Advantages of gae are normalised
    over decisions (or action steps) first, all alike; weighed by 1 / length of their episode their mean is then not 0 but leans
    towards that of short episodes; token_mean keeps it near 0. RLinf weighs by length."""
    importance_sampling_level: Literal["token", "sequence", "action", "chunk"] = "token"  # type: ignore[assignment]
    """Level of the importance ratio. token: each number of a decision has its own (SimpleVLA-RL). action, chunk: the product of
    the ratios of an action step, or of a whole decision, as far as it was executed (RLinf for policies with flow heads).
    sequence: GSPO, the geometric mean of a decision's ratios; clip_low 3e-4, clip_high 4e-4 and loss_aggregation sequence_mean
    are then the defaults."""


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
            raise ValueError(
                f"schedule.wave ({self.wave}) is of prompts: remove it; simulators are split by schedule.stages"
            )
        return self


_OF_PROMPTS = {
    "algorithm.contrast": "there is no changed view of a simulator to roll out on",
    "algorithm.offline": "demonstrations of a simulator are cloned beforehand (mmrl sft), none belongs to the state of a group",
    "algorithm.replay": "an episode of a simulator is not played again for its observations",
    "algorithm.mask_rollouts": "an episode has no words to read, and is cut off at env.horizon, which is part of its task",
    "algorithm.overlong": "an episode is cut off at env.horizon, which is part of its task",
    "algorithm.overlong_buffer": "an episode is cut off at env.horizon, which is part of its task",
    "algorithm.overlong_weight": "an episode is cut off at env.horizon, which is part of its task",
    "algorithm.carry_share": "a place's initial states follow from its number alone, so none is carried to another step",
    "engine.rollout": "a policy that acts decides by its own forward pass",
    "engine.sequence_parallel": "each decision is a short row of its own, there is nothing to split",
    "engine.vllm": "a policy that acts decides by its own forward pass",
    "rollout.tree": "an episode of a simulator is not played again up to a decision",
    "rollout.top_p": "actions are drawn from all of their bins",
    "rollout.top_k": "actions are drawn from all of their bins",
    "rollout.max_new_tokens": "a decision has the tokens of action.chunk action steps, no more and no fewer",
    "model.frame": "a policy that acts writes actions, no coordinates",
    "reward.workers": "rewards come from the simulators, which live in env.workers processes",
    "reward.timeout_s": "rewards come from the simulators, whose time env.step_s bounds",
    "reward.max_failure_share": "rewards come from the simulators, whose failures env.retries and env.respawns bound",
    "data.train": "episodes come from env",
    "data.eval": "held-out episodes come from env (eval_states)",
    "data.selection": "episodes come from env",
    "data.curriculum": "episodes come from env",
    "eval.views": "there is no changed view of a simulator to answer on",
    "train.log_reflection": "an episode has actions, no text that could reflect",
    "train.balance_batch": "a decision's pictures lie in the process that saw them",
    "train.checkpoint": "the main process saves a policy that acts, with its action tokens",
    "train.forward": "each decision has a prompt of its own, none is shared",
}
"""Keys that an episode has no use for, and why: an embodied run refuses them rather than ignore them."""
_ARM = 7  # numbers of an action: pose and gripper
_ONCE_DEFAULT = {"engine.rollout": "own"}


class EmbodiedConfig(RunConfig):
    """Everything an embodied run needs. train.prompts_per_step counts groups (initial states), rollout.group_size episodes
    of each; eval.limit counts held-out states."""

    samples_text: ClassVar[bool] = False
    critic_defaults: ClassVar[Mapping[str, Any]] = {}
    rollout_source: ClassVar[str] = "mmrl.robotics.episodes:EpisodeRollouts"
    supervised_source: ClassVar[str] = "mmrl.robotics.sft:Demonstrations"
    # each has a whole policy, and waits for the others in between two steps
    overlaps_in_processes: ClassVar[bool] = True

    env: EnvConfig = EnvConfig()
    action: ActionConfig = ActionConfig()
    vla: VLAConfig = VLAConfig()
    demos: DemoConfig = DemoConfig()
    algorithm: EmbodiedAlgorithmConfig = EmbodiedAlgorithmConfig()
    rl: RLConfig = RLConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    eval_states: int = Field(100, ge=1)
    """Held-out initial states per task, before and after training."""

    @property
    def rollout_shape(self) -> RolloutShape:
        """Of decisions, each a prompt of its own: those of the checkpoint; of a model that is none yet, of an arm."""
        stages = 1 if self.schedule.kind == "serial" else self.schedule.stages
        vla, action = self.vla, self.action
        tokens, steps, bins = action.chunk * _ARM, action.chunk * action.repeat, action.bins
        if (known := read_description(self.model.path)) is not None:
            vla, codec = known
            tokens, steps, bins = codec.tokens, codec.chunk * codec.repeat, codec.bins
        return RolloutShape(
            answers=1,
            tokens=tokens,
            pictures=(len(vla.cameras), self.env.image_size),
            at_once=-(-self.env.slots // stages),
            turns=-(-self.env.horizon // steps),
            classes=bins,
            cached=vla.decode == "autoregressive",
        )

    @model_validator(mode="after")
    def _embodied(self) -> EmbodiedConfig:
        for name, why in _OF_PROMPTS.items():
            section, key = name.split(".")
            part = getattr(self, section)
            default = type(part).model_fields[key].get_default(call_default_factory=True)
            # what was the default is in the config.yaml of older runs, and means the same
            if getattr(part, key) not in (default, _ONCE_DEFAULT.get(name, default)):
                raise ValueError(f"{name} means nothing to an embodied run: {why}; remove it")
        if self.model.system:
            raise ValueError(
                "model.system means nothing to an embodied run: the text of its prompts is vla.prompt; remove it"
            )
        self._check_rewards()
        if missing := [c for c in self.vla.cameras if c not in self.env.cameras]:
            raise ValueError(
                f"vla.cameras needs {', '.join(missing)}, which env.cameras ({', '.join(self.env.cameras)}) does not "
                "render"
            )
        return self

    def _check_rewards(self) -> None:
        weights = self.rl.weights
        if not weights or not all(math.isfinite(w) and w > 0 for w in weights.values()):
            raise ValueError(
                f"rl.reward needs at least one kind, each with a weight above 0, found {self.rl.reward}"
            )
        if self.rl.success == "at_end" and self.stops_at_success:
            raise ValueError(
                "rl.success at_end needs episodes that go on after a success: set env.options.stop_at_success: false "
                "(tiny, maniskill, metaworld; LIBERO and robosuite always stop), or in a simulator of your own the class method "
                "stops_at_success"
            )
        if "brevity" in weights and not self.stops_at_success:
            raise ValueError(
                "rl.reward brevity needs episodes that end with their success, here they go on to env.horizon: remove "
                "env.options.stop_at_success: false, or brevity"
            )
        known = ("accuracy", "reward", "success", *weights)
        if (key := self.algorithm.filter.key) not in known:
            raise ValueError(
                f"algorithm.filter.key: expected accuracy or reward (the whole), success, or a kind of rl.reward "
                f"({', '.join(weights)}), found {key!r}.{did_you_mean(key, known)}"
            )

    def _against_critic_of_kind(self) -> list[tuple[str, str]]:
        """What a robot's critic cannot judge: (the overrides that fix it, why)."""
        a, found = self.algorithm, []
        if a.critic.level == "token":
            found.append(
                (
                    "algorithm.critic.level=turn",
                    "algorithm.critic.level token is of answers: a robot's tokens are bins of one decision, which is "
                    "executed as a whole, so nothing is earned between two of them; use turn or action",
                )
            )
        if a.critic.level == "action" and a.importance_sampling_level in ("sequence", "chunk"):
            found.append(
                (
                    "algorithm.critic.level=turn",
                    f"algorithm.importance_sampling_level {a.importance_sampling_level} gives a decision one ratio, "
                    "algorithm.critic.level action an advantage for each of its action steps: use critic.level turn, or "
                    "importance_sampling_level action or token",
                )
            )
        if a.critic.hidden != type(a.critic).model_fields["hidden"].default:
            found.append(
                (
                    f"algorithm.critic.hidden={type(a.critic).model_fields['hidden'].default}",
                    f"algorithm.critic.hidden {a.critic.hidden} is of answers: the width of a robot's critic is that "
                    "of its checkpoint; remove it, or set vla.value_hidden",
                )
            )
        if not self.vla.value_head:
            found.append(
                (
                    "vla.value_head=true",
                    "algorithm.advantage gae needs a critic: set vla.value_head: true",
                )
            )
        if self.reward.shuffle:
            found.append(
                (
                    "reward.shuffle=false",
                    "reward.shuffle deals the rewards of a group's episodes anew, and a critic learns from those of "
                    "single steps, which have no counterpart in another episode: use advantage grpo, rloo, opo or "
                    "pass_k for this control, or set it to false",
                )
            )
        return found

    def supervised(self: C) -> C:
        """See RunConfig: demonstrations are cloned with an optimizer of their own."""
        return super().supervised().model_copy(update={"optim": self.demos.optim})

    @property
    def stops_at_success(self) -> bool:
        """Whether a success ends an episode, so that success at the end says nothing beyond success once."""
        return simulator_class(self.env.suite).stops_at_success(self.env.options)


def load_embodied(
    path: str | Path | None = None, overrides: list[str] | None = None
) -> EmbodiedConfig:
    """Read a YAML file of an embodied run with dotted overrides. Raises ConfigError listing every problem."""
    return load_config_as(EmbodiedConfig, path, overrides)
