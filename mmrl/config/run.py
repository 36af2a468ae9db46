"""The whole configuration of a run, and what its sections owe each other. Part of mmrl.config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mmrl.config.algorithm import ADVANTAGE_SCALES, PROMPT_CRITIC, AlgorithmConfig
from mmrl.config.data import DataConfig
from mmrl.config.engine import EngineConfig, OperationsConfig
from mmrl.config.model import ModelConfig, RolloutConfig
from mmrl.config.renamed import warn_of_old_names, with_new_names
from mmrl.config.section import HomePath, Section, Seed
from mmrl.config.training import (
    AlarmConfig,
    EvalConfig,
    OptimConfig,
    RewardConfig,
    ScheduleConfig,
    TrainConfig,
)
from mmrl.errors import ConfigError

__all__ = ["RolloutShape", "RunConfig", "effective_threads"]

C = TypeVar("C", bound="RunConfig")


class _Section(Section, BaseModel):
    """The sections of this file (BaseModel is named so that linters know what their defaults are)."""


@dataclass(frozen=True)
class RolloutShape:
    """How large a run's rollouts are, for estimates. `answers` share a prompt and have at most `tokens` each. pictures: (how many,
    their side in pixels) of every prompt; None: what `data` has. at_once: prompts that are answered together; None: a process's
    share of a step. turns: prompts of a rollout. classes: that a token is chosen from; None: the vocabulary. cached: whether keys
    and values are kept from token to token, of at most rollout.batch_tokens."""

    answers: int
    tokens: int
    pictures: tuple[int, int] | None = None
    at_once: int | None = None
    turns: int = 1
    classes: int | None = None
    cached: bool = True


class RunConfig(_Section):
    """Everything a run needs; written resolved to RUN/config.yaml."""

    # for editors: a file's shared parts (mmrl.config.read)
    model_config = ConfigDict(json_schema_extra={"patternProperties": {r"^(\.|x-)": {}}})

    # makes this run's rollouts, imported when it trains
    rollout_source: ClassVar[str] = "mmrl.training.prompts:PromptRollouts"
    # makes the examples of `mmrl sft`
    supervised_source: ClassVar[str] = "mmrl.training.gold_answers:GoldAnswers"
    # whether schedule.kind pipelined and async go with several processes
    overlaps_in_processes: ClassVar[bool] = False
    # whether a rollout engine writes answers (engine.rollout); else the policy itself decides
    samples_text: ClassVar[bool] = True
    # of algorithm.critic with advantage gae
    critic_defaults: ClassVar[Mapping[str, Any]] = PROMPT_CRITIC

    name: str = "run"
    """Name of the run's folder, below `dir`; a name with slashes (study/first) lies in folders of its own."""
    dir: HomePath = "runs"
    """Folder of runs: the run is written to dir/name. Here and in other paths a ~ at the beginning is your home folder."""
    seed: Seed = 0
    """Seed of everything that is drawn."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of torch per process; null: 1 on a CPU, torch's own choice on a GPU."""
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

    @field_validator("name")
    @classmethod
    def _below_dir(cls, name: str) -> str:
        path = PurePath(name)
        if str(path) != name or path == PurePath() or path.is_absolute() or ".." in path.parts:
            raise ValueError(
                "expected the name of a folder below dir, such as first or study/first; set dir to write elsewhere"
            )
        return name

    @property
    def rollout_shape(self) -> RolloutShape:
        """Of groups of answers."""
        return RolloutShape(self.rollout.group_size, self.rollout.max_new_tokens)

    def supervised(self: C) -> C:
        """As the training engines of `mmrl sft` are to see it: with its optimizer, and without rollouts to overlap with."""
        schedule = self.schedule.model_copy(update={"kind": "serial"})
        return self.model_copy(update={"schedule": schedule})

    @model_validator(mode="before")
    @classmethod
    def _with_new_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        tree, said = with_new_names(data)
        warn_of_old_names(said)
        return tree

    @model_validator(mode="after")
    def _defaults_of_the_critic(self) -> RunConfig:
        """What is usual differs between answers and robots. A section that was given as an object stays as it is."""
        critic = self.algorithm.critic.model_copy()
        critic.follow(self.critic_defaults, applies=self.algorithm.advantage == "gae")
        if critic != self.algorithm.critic:
            self.__dict__["algorithm"] = self.algorithm.model_copy()
            self.algorithm.__dict__["critic"] = critic
        return self

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        a = self.algorithm
        if self.rollout.group_size == 1 and a.advantage != "gae":
            raise ValueError(
                "rollout.group_size must be at least 2: a group of one has nothing to be compared with, so its "
                "advantage is 0 and it never has signal"
            )
        if self.train.checkpoint == "sharded" and self.model.lora is not None:
            raise ValueError(
                "train.checkpoint sharded is for all weights of a model, found model.lora: an adapter is small and saved by "
                "the main process; set train.checkpoint: whole"
            )
        if self.optim.states == "int8" and self.engine.train.startswith("deepspeed"):
            raise ValueError(
                f"optim.states int8 needs engine.train single, ddp or fsdp2, found {self.engine.train}, which has an optimizer of "
                "its own; set engine.train: fsdp2, or optim.states: fp32 with engine.deepspeed.offload: optimizer"
            )
        if (
            self.model.lora is not None
            and self.model.lora.quantize
            and self.engine.train not in ("auto", "single", "ddp")
        ):
            raise ValueError(
                f"model.lora.quantize {self.model.lora.quantize} needs engine.train auto, single or ddp, found "
                f"{self.engine.train}, which shares out weights of one type; set engine.train: auto, or quantize: null"
            )
        self._check_merging()
        self._check_partial_rollouts()
        self._check_router_replay()
        self._check_advantages()
        self._check_critic()
        self._check_offline()
        self._check_replay()
        self._check_tree()
        self._check_turns()
        if a.minibatches > self.train.prompts_per_step:
            raise ValueError(
                f"algorithm.minibatches ({a.minibatches}) cannot exceed train.prompts_per_step "
                f"({self.train.prompts_per_step})"
            )
        if a.overlong == "soft" and not 0 < a.overlong_buffer <= self.rollout.max_new_tokens:
            raise ValueError(
                "algorithm.overlong soft needs 0 < overlong_buffer <= rollout.max_new_tokens"
            )
        try:
            self._build_algorithm_settings()
        except ConfigError as error:
            raise ValueError(f"algorithm: {error}") from error
        return self

    def _check_partial_rollouts(self) -> None:
        if not self.schedule.partial_rollouts:
            return
        e = self.engine
        against = [
            (f"schedule.kind {self.schedule.kind}", self.schedule.kind != "async"),
            (f"engine.generator.kind {e.generator.kind}", e.generator.kind != "process"),
            (
                "engine.rollout vllm, which takes weights between answers",
                e.rollout == "vllm" or e.vllm.mode == "server",
            ),
            (f"engine.ray.rollout_actors {e.ray.rollout_actors}", e.ray.rollout_actors > 0),
            ("a policy that acts, whose decisions are whole", not self.samples_text),
        ]
        if wrong := [what for what, found in against if found]:
            raise ValueError(
                "schedule.partial_rollouts needs schedule.kind async, engine.generator.kind process and mmrl's own engine "
                f"(engine.rollout own), found {' and '.join(wrong)}; set them, or partial_rollouts: false"
            )

    def _check_router_replay(self) -> None:
        a, e, mode = self.algorithm, self.engine, self.algorithm.router_replay.mode
        if mode == "disabled":
            return
        key, mend = (
            f"algorithm.router_replay.mode {mode}",
            "or algorithm.router_replay.mode: disabled",
        )
        if not self.samples_text:
            raise ValueError(
                f"{key} is of mixtures of experts, found a policy that acts, none of which is one; set {mend[3:]}"
            )
        if mode == "R2" and a.epochs == a.minibatches == 1:
            raise ValueError(
                f"{key} keeps the experts of the weights before an update for its later optimizer steps, found algorithm.epochs 1 "
                "and minibatches 1: the only step has those weights and chooses the same; set one of them above 1, "
                f"mode: R3, {mend}"
            )
        if mode == "R3" and (e.rollout == "vllm" or e.vllm.mode == "server"):
            raise ValueError(
                f"{key} needs mmrl's own engine (engine.rollout own), found vLLM: it samples no family with experts here yet, and "
                "vLLM 0.32 returns experts by its Model Runner V2 alone, which a CPU does not have (it needs Triton); set "
                f"engine.rollout: own, mode: R2, {mend}"
            )
        if mode == "R3" and self.schedule.partial_rollouts:
            raise ValueError(
                f"{key} needs rollouts of one version each, found schedule.partial_rollouts: newer weights read prompts and "
                "beginnings anew, with other experts for each answer of a group, and training computes a prompt once; set "
                f"partial_rollouts: false, mode: R2, {mend}"
            )

    def _check_merging(self) -> None:
        if not self.rollout.merge_adapter:
            return
        lora, mend = self.model.lora, "set rollout.merge_adapter: false"
        if lora is None:
            raise ValueError(
                f"rollout.merge_adapter merges a LoRA adapter, found model.lora null; set model.lora, or {mend[4:]}"
            )
        against = {
            f"model.lora.quantize {lora.quantize}: rollout and training share one dequantized function": lora.quantize,
            "engine.rollout vllm, whose copy of the weights is merged anyway": self.engine.rollout
            == "vllm",
            f"engine.ray.rollout_actors {self.engine.ray.rollout_actors}, which have policies of their own": (
                self.engine.ray.rollout_actors
            ),
            "a policy that acts, which decides by the forward that is trained": not self.samples_text,
        }
        for why, found in against.items():
            if found:
                raise ValueError(
                    f"rollout.merge_adapter is of mmrl's own engine within a process, found {why}; {mend}"
                )

    def _check_advantages(self) -> None:
        a = self.algorithm
        if a.advantage == "gae":
            return  # _check_critic names all that is against it at once
        fitting = ADVANTAGE_SCALES[a.advantage]
        if a.advantage_scale not in fitting:
            raise ValueError(
                f"algorithm.advantage {a.advantage} is defined with algorithm.advantage_scale "
                f"{' or '.join(fitting)}, found {a.advantage_scale}"
            )
        if a.reward_aggregation == "gdpo" and (a.advantage, a.advantage_scale) != ("grpo", "std"):
            raise ValueError(
                "algorithm.reward_aggregation gdpo normalises by itself: it needs advantage grpo and advantage_scale std, "
                f"found {a.advantage} and {a.advantage_scale}"
            )
        if self.data.selection.kind != "none" and not a.dynamic_sampling:
            raise ValueError(
                f"data.selection {self.data.selection.kind} replaces groups: it needs algorithm.dynamic_sampling "
                "true (max_rounds: 1 only filters)"
            )
        if (a.filter.low is not None or a.filter.high is not None) and not a.dynamic_sampling:
            raise ValueError(
                "algorithm.filter.low and high choose groups: they need algorithm.dynamic_sampling true (with "
                "max_rounds: 1 groups are left out and not replaced)"
            )

    def _check_critic(self) -> None:
        a = self.algorithm
        if (changed := a.critic.changed()) and a.advantage != "gae":
            raise ValueError(
                f"algorithm.critic.{', '.join(changed)}: only advantage gae has a critic, found {a.advantage}, whose "
                "advantages come from the group; remove it, or set algorithm.advantage: gae"
            )
        if a.advantage != "gae":
            return
        against = [*self._against_gae(), *self._against_critic_of_kind()]
        if len(against) == 1:
            raise ValueError(against[0][1])
        if against:
            raise ValueError(
                f"with algorithm.advantage gae {len(against)} settings must change; over a recipe: "
                f"{' '.join(override for override, _ in against)}"
                + "".join(f"\n    {why}" for _, why in against)
            )

    def _against_gae(self) -> list[tuple[str, str]]:
        """What does not go with advantage gae: (the overrides that fix it, why)."""
        a, found = self.algorithm, []
        if a.advantage_scale not in ADVANTAGE_SCALES["gae"]:
            found.append(
                (
                    "algorithm.advantage_scale=batch",
                    "algorithm.advantage gae is defined with algorithm.advantage_scale batch, found "
                    f"{a.advantage_scale}",
                )
            )
        if a.reward_aggregation == "gdpo":
            found.append(
                (
                    "algorithm.reward_aggregation=plain",
                    "algorithm.reward_aggregation gdpo normalises by itself: it needs advantage grpo and advantage_scale "
                    f"std, found gae and {a.advantage_scale}",
                )
            )
        if self.data.selection.kind != "none":
            found.append(
                (
                    "data.selection=none",
                    f"data.selection {self.data.selection.kind} replaces groups by how their rewards differ, and with "
                    "advantage gae groups teach whatever theirs are: remove it",
                )
            )
        bounds = [b for b in ("low", "high") if getattr(a.filter, b) is not None]
        if bounds:
            found.append(
                (
                    " ".join(f"algorithm.filter.{bound}=null" for bound in bounds),
                    "algorithm.filter.low and high choose groups by their rewards, and with advantage gae groups "
                    "teach whatever theirs are: set both to null",
                )
            )
        if a.filter.key != type(a.filter).model_fields["key"].default:
            found.append(
                (
                    "algorithm.filter.key=accuracy",
                    f"algorithm.filter.key {a.filter.key} is what groups are chosen by, and with advantage gae groups "
                    "teach whatever their rewards are: remove it (over a recipe: algorithm.filter.key=accuracy)",
                )
            )
        if a.dynamic_sampling:
            found.append(
                (
                    "algorithm.dynamic_sampling=false",
                    "algorithm.dynamic_sampling true replaces groups whose rewards are equal, and with advantage gae "
                    "those teach as well: a critic judges each turn by itself; remove it, or set it to false",
                )
            )
        if a.difficulty != "none":
            found.append(
                (
                    "algorithm.difficulty=none",
                    f"algorithm.difficulty {a.difficulty} weighs a group by its mean accuracy, and with advantage gae "
                    "advantages come from no group: the critic knows what is hard; remove it",
                )
            )
        return found

    def _against_critic_of_kind(self) -> list[tuple[str, str]]:
        """What a run on prompts cannot do with a critic: (the overrides that fix it, why)."""
        a, found = self.algorithm, []
        if a.critic.level == "action":
            found.append(
                (
                    "algorithm.critic.level=token",
                    "algorithm.critic.level action is of robots, whose decisions are chunks of actions: an answer has "
                    "turns and tokens; set algorithm.critic.level to token or turn",
                )
            )
        if a.critic.level == "token" and a.importance_sampling_level == "sequence":
            found.append(
                (
                    "algorithm.critic.level=turn",
                    "algorithm.importance_sampling_level sequence gives an answer one ratio, algorithm.critic.level token "
                    "each token an advantage of its own; set algorithm.critic.level: turn, or "
                    "algorithm.importance_sampling_level: token",
                )
            )
        if a.offline.per_group:
            found.append(
                (
                    "algorithm.offline.per_group=0",
                    "algorithm.offline compares demonstrations with the policy's own answers in their group; with "
                    "advantage gae nothing does: start from `mmrl sft`, or use advantage grpo",
                )
            )
        return found

    def _check_offline(self) -> None:
        a, o = self.algorithm, self.algorithm.offline
        if o.gold and not o.per_group:
            raise ValueError(
                "algorithm.offline.gold true with per_group 0 adds nothing; set per_group to 1"
            )
        if o.per_group and a.advantage == "pass_k":
            raise ValueError(
                "algorithm.offline adds completions the policy did not write, and advantage pass_k counts what the "
                "policy itself gets right: use grpo, rloo or opo, or per_group 0"
            )
        if o.per_group and a.importance_sampling_level == "sequence":
            raise ValueError(
                "algorithm.offline shapes each token's ratio: it needs importance_sampling_level token, or per_group 0"
            )
        if o.replace and o.per_group >= self.rollout.group_size:
            raise ValueError(
                f"algorithm.offline.per_group ({o.per_group}) with replace true leaves no rollouts: it must be below "
                f"rollout.group_size ({self.rollout.group_size})"
            )

    def _check_replay(self) -> None:
        a, number = self.algorithm, self.algorithm.replay.per_group
        if not number:
            return
        why = {
            "advantage gae": (
                a.advantage == "gae",
                "a critic judges each answer by itself, so that no group is without signal",
            ),
            "advantage pass_k": (
                a.advantage == "pass_k",
                "it counts what the policy of now gets right",
            ),
            "contrast": (a.contrast.kind != "none", "a success of before has no changed view"),
            "offline.per_group": (
                a.offline.per_group > 0,
                "demonstrations fill the same places; keep one of both",
            ),
            "schedule.kind async": (
                self.schedule.kind == "async",
                "the pool changes between steps, which overlap there; set schedule.kind: pipelined",
            ),
            "engine.generator.kind process": (
                self.engine.generator.kind == "process",
                "the pool changes between steps, which overlap there; set engine.generator.kind: inline",
            ),
        }
        for key, (used, reason) in why.items():
            if used:
                raise ValueError(
                    f"expected algorithm.replay.per_group 0 with {key}, found {number}: {reason}"
                )
        if number >= self.rollout.group_size:
            raise ValueError(
                f"algorithm.replay.per_group ({number}) leaves no rollouts of now: it must be below rollout.group_size "
                f"({self.rollout.group_size})"
            )

    def _check_tree(self) -> None:
        tree, a, size = self.rollout.tree, self.algorithm, self.rollout.group_size
        if not tree.roots:
            return
        if size % tree.roots or (size // tree.roots - 1) % tree.rounds or size == tree.roots:
            raise ValueError(
                "expected rollout.group_size = tree.roots x (1 + tree.rounds x branches per round) with at least one branch, found "
                f"{size} with {tree.roots} roots and {tree.rounds} rounds; for example "
                f"{tree.roots * (1 + tree.rounds)} or {tree.roots * (1 + 2 * tree.rounds)}"
            )
        plain = (
            a.advantage == "grpo"
            and a.advantage_scale in ("std", "none")
            and a.reward_aggregation == "plain"
        )
        if tree.within and not plain:
            raise ValueError(
                "rollout.tree.within adds advantages within trees, which are those of algorithm.advantage grpo with "
                "advantage_scale std or none and reward_aggregation plain; set them, or rollout.tree.within: false"
            )
        for key, number in (
            ("algorithm.offline.per_group", a.offline.per_group),
            ("algorithm.replay.per_group", a.replay.per_group),
        ):
            if number:
                raise ValueError(
                    f"expected {key} 0 with rollout.tree, found {number}: what was written elsewhere is in no tree"
                )

    def _check_turns(self) -> None:
        a = self.algorithm
        changed = a.turns.changed()
        if not changed:
            return
        own, selects = a.turns.advantage == "turn", a.turns.keep_entropy < 1
        both = [
            (
                "algorithm.advantage gae",
                a.advantage == "gae",
                "a critic judges each turn by itself, and learns from all of them",
            ),
            (
                "rollout.tree",
                self.rollout.tree.roots > 0,
                "a turn that several rollouts of a tree share would count once for each of them",
            ),
            (
                "algorithm.offline.per_group",
                a.offline.per_group > 0,
                "a demonstration is one answer that somebody else wrote",
            ),
            (
                "algorithm.contrast",
                a.contrast.kind != "none",
                "its bonus is paid to an answer on the prompt alone",
            ),
        ]
        of_advantages = [
            (
                "algorithm.advantage pass_k",
                a.advantage == "pass_k",
                "it pays the best rollout of a group for its whole reward, which no turn has of its own",
            ),
            (
                "algorithm.advantage opo",
                a.advantage == "opo",
                "its baseline weighs rollouts by their whole length, and a return is of what follows a turn",
            ),
            (
                "algorithm.reward_aggregation gdpo",
                a.reward_aggregation == "gdpo",
                "reward parts are of whole rollouts, and environments pay turns one number",
            ),
            (
                f"algorithm.advantage_scale {a.advantage_scale}",
                a.advantage_scale not in ("std", "none"),
                "it is the spread of rollouts' rewards over groups, and returns are of single turns",
            ),
        ]
        of_selection = [
            (
                "algorithm.replay.per_group",
                a.replay.per_group > 0,
                "the policy of now did not draw a past success, and its entropies there say nothing of where it hesitated",
            ),
        ]
        for keys, applies, against in (
            ("algorithm.turns", own or selects, both),
            ("algorithm.turns.advantage turn", own, of_advantages),
            (f"algorithm.turns.keep_entropy {a.turns.keep_entropy:g}", selects, of_selection),
        ):
            for key, found, why in against:
                if applies and found:
                    raise ValueError(
                        f"{keys} does not go with {key}: {why}; switch one of them off (algorithm.turns: {{advantage: rollout, "
                        "keep_entropy: 1.0}})"
                    )

    def _build_algorithm_settings(self) -> None:
        """Settings of loss and sampler have rules of their own: a run must break them here, not after loading a model."""
        # brings torch; reading this module must not
        from mmrl.algorithms import EntropySettings, ObjectiveSettings, SamplerSettings

        a = self.algorithm
        ObjectiveSettings(
            clip_low=a.clip_low,
            clip_high=a.clip_high,
            dual_clip=a.dual_clip,
            importance_sampling_level=a.importance_sampling_level,
            loss_aggregation=a.loss_aggregation,
            max_completion_length=self.rollout.max_new_tokens,
            kl_coef=a.kl.coef,
            kl_estimator=a.kl.estimator,
        )
        e = a.entropy
        EntropySettings(
            coef=e.coef, target=e.target, delta=e.delta, low=e.coef_min, high=e.coef_max
        )
        SamplerSettings(
            quota=self.train.prompts_per_step, max_attempts=a.max_rounds, carry_share=a.carry_share
        )


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
