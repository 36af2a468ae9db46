"""Rollouts of a run on prompts: data sets are drawn from, answered by the rollout engine, and scored by rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mmrl.algorithms.group_rewards import check_filter_key
from mmrl.config import RunConfig
from mmrl.data.sources import load_sources, prompt_stream
from mmrl.diagnostics.timeline import Timeline
from mmrl.distributed.cluster.run import (
    check_prompt_workers,
    prompt_demands,
    run_cluster,
    run_rollouts,
    run_scorer,
)
from mmrl.distributed.engines import held_back, train_engine_name
from mmrl.distributed.world import World
from mmrl.errors import RewardError
from mmrl.evaluation.evaluate import evaluate
from mmrl.evaluation.result import Evaluation
from mmrl.evaluation.settings import eval_settings
from mmrl.policy.encode import Prompt
from mmrl.policy.loading import load_policy
from mmrl.policy.policy import Policy
from mmrl.policy.storage import Stored
from mmrl.rollout import RolloutEngine, build_rollout_engine
from mmrl.rollout.episodes import check_environments, turns_of
from mmrl.rollout.group_generator import StepTally
from mmrl.rollout.prompt_rollouter import GroupIndex, PromptRollouter
from mmrl.training.advice import remarks
from mmrl.training.answer_critic import add_critic, build_advantages
from mmrl.training.generated_prompts import HostedPrompts, PromptLedger
from mmrl.training.generator import GeneratedGroups, Generator, weights_room
from mmrl.training.learner import Learner
from mmrl.training.metrics import completion_records, step_metrics
from mmrl.training.pipeline import GroupSource, IteratorSource, Outcome
from mmrl.training.preflight import Measured, measured_by
from mmrl.training.rollouts import HostableRollouts, RunContext
from mmrl.training.runlog import rollout_rows
from mmrl.training.update_result import UpdateResult
from mmrl.types import RolloutGroup, Sample
from mmrl.workers.prefetch import prefetching

__all__ = ["PromptRollouts"]


class PromptRollouts:
    """A RolloutSource; see mmrl.rollout.prompt_rollouter for which prompts a step gets, mmrl.training.rollouts for when what is
    called.

    `scorer`, `rollouter` and `engine` (the one that samples, on this process or through Ray) are there while it is open.
    """

    cluster: Any = None
    # of a run whose rollouts are made in a process of their own: there is no engine and no scorer here then
    generator: Generator | None = None
    rollouter: PromptRollouter | PromptLedger

    def __init__(self, config: RunConfig, world: World) -> None:
        self.config, self.world = config, world
        # what does not go together must fail before a model is loaded
        train_engine_name(config, world.size)
        check_prompt_workers(config, world.device.type)
        data = config.data
        self.train_sources, self.eval_sources = (
            load_sources(
                configs, on_error=data.on_error, orientation=data.image.orientation, where=where
            )
            for configs, where in ((data.train, "data.train"), (data.eval, "data.eval"))
        )
        # nor may a curriculum that does not fit the data wait for it
        prompt_stream(config, self.train_sources)
        check_filter_key(config, [s.task for s in self.train_sources])
        check_environments(
            config,
            [
                (s.task, {x.task for x in s.samples})
                for s in (*self.train_sources, *self.eval_sources)
            ],
        )
        self._step, self._tally = 0, StepTally()
        self.sent: dict[str, float] = {}  # what giving away the weights measured
        self._records: list[dict[str, Any]] = []
        # rewards that failed in a step of which too many did
        self._broken: list[dict[str, Any]] = []
        # async: of the rollouter after the step just trained
        self._position: dict[str, Any] | None = None

    @property
    def measured(self) -> Measured:
        """See RolloutSource."""
        return measured_by(self.eval_sources)

    @property
    def serial(self) -> bool:
        """Whether a step is trained when all of its groups have closed, before the next one begins."""
        return self.config.schedule.kind == "serial"

    def load_policy(self, weights: Path | None, stored: Stored = "masters") -> Policy:
        """See RolloutSource."""
        policy = load_policy(
            self.config.model,
            self.config.data,
            needs_reference=self.config.algorithm.kl.coef > 0,
            device=self.world.device,
            weights=weights,
            hold=held_back(self.config, self.world.size),
            stored=stored,
        )
        return add_critic(policy, self.config, weights, self.config.model.path)

    def build(self, policy: Policy, actor: Policy) -> None:
        """See RolloutSource."""
        if self._apart:
            self._room = weights_room(policy, self.config, self.world)
            return
        self.engine: RolloutEngine = build_rollout_engine(
            self.config, policy, self.world, self.train_sources, actor
        )

    @contextmanager
    def open(self, context: RunContext) -> Iterator[None]:
        """See RolloutSource."""
        self.policy, self.actor, self.training = context.policy, context.actor, context.training
        self.timeline = Timeline({"infer": 1, "reward": 1, "train": 1})
        if self._apart:
            with self._open_apart(context):
                yield
            return
        specs = [
            (s.task, dict(s.params)) for s in (*self.config.data.train, *self.config.data.eval)
        ]
        tasks = [s.task for s in (*self.train_sources, *self.eval_sources)]
        encoder = self.policy.encoder
        encoder.visuals.witness = context.media.note
        with (
            run_cluster(self.config, self.world.size, prompt_demands(self.config)) as self.cluster,
            prefetching(self.config.data, [encoder.visuals]) as [encoder.ahead],
            run_scorer(self.config, specs, tasks, self.cluster) as self.scorer,
            run_rollouts(self.config, self.actor, self.engine, self.cluster) as self.engine,
            ExitStack() as stack,
        ):
            stack.callback(self.engine.close)
            rollouter = self.rollouter = PromptRollouter(
                self.config, self.actor, self.engine, self.scorer, self.train_sources, self.world
            )
            rollouter.generator.timeline = self.timeline
            self._generates = rollouter.generator
            self.groups: GroupSource[RolloutGroup] = IteratorSource(
                self._groups, self.config.train.prompts_per_step, GroupIndex()
            )
            yield

    @property
    def _apart(self) -> bool:
        return self.config.engine.generator.kind == "process"

    @contextmanager
    def _open_apart(self, context: RunContext) -> Iterator[None]:
        """Rollouts are made elsewhere: what remains here is to train on them."""
        ledger = self.rollouter = PromptLedger(prompt_stream(self.config, self.train_sources))
        self.policy.encoder.visuals.witness = context.media.note
        with Generator(
            self.config,
            self.world,
            self.maker,
            ledger,
            self._room,
            media=context.media,
            timeline=self.timeline,
        ) as self.generator:
            self.groups = GeneratedGroups(self.generator, self.config.train.prompts_per_step)
            yield

    def _groups(self, step: int) -> Iterator[RolloutGroup]:
        """The step's groups; in serial runs the step ends with the last of them: what samples has no more to do."""
        assert isinstance(self.rollouter, PromptRollouter)
        if not self.serial or self.rollouter.keeps_states:
            yield from self.rollouter.groups(step)
            return
        with self.world.raise_on_all_ranks():
            groups = list(self.rollouter.groups(step))
            self._end(step)
        self.engine.sleep()
        yield from groups

    def learner(self) -> Learner:
        """See RolloutSource."""
        stream = self.rollouter.stream
        self.policy.shared_prefix = self.config.train.forward == "shared"

        def prompt_of(group: RolloutGroup) -> Prompt:
            return self.policy.encoder(*stream.find(group.sample.source, group.sample.id))

        def headline(sample: Sample) -> str:
            return stream.find(sample.source, sample.id)[1].member(sample.task).headline

        advantages, critic = build_advantages(self.config, self.world, headline)
        learner = Learner(
            self.config,
            self.policy,
            self.training,
            self.world,
            advantages,
            prompt_of=prompt_of,
            critic=critic,
            longest=self.config.rollout.max_new_tokens * self._most_turns(),
        )
        learner.on_weights = self._changed
        return learner

    def _most_turns(self) -> int:
        """Of a rollout of any task that is trained on."""
        template = self.policy.template
        kinds = {(s.task, x.task) for s in self.train_sources for x in s.samples}
        return max((turns_of(task, kind, template) or 1 for task, kind in kinds), default=1)

    def _changed(self) -> None:
        """A step's weights get the name of the next one, while the policy is still held."""
        self.policy.publish()
        self.sync()

    def share_policy(
        self,
        exclusive: Callable[[], AbstractContextManager[Any]],
        make_way: Callable[[], None],
    ) -> None:
        """See RolloutSource; a generator process shares nothing with training. Completions are not written between micro-batches:
        what engines keep of prompts is told apart by versions."""
        if not self._apart:
            self._generates.exclusive = exclusive

    def sync(self) -> None:
        """See RolloutSource."""
        with self.training.collective_section():  # sharded weights are gathered on the way
            if self.generator is not None:
                # completions name the step that their weights begin
                version = max(self.policy.version - 1, 0)
                self.sent = self.generator.publish(self.training, version)
            else:
                self.sent = self.engine.publish(self.training)

    def begin(self, step: int) -> None:
        """See RolloutSource. Completions name the step that their weights begin."""
        self._step, self._tally, self._broken = step, StepTally(), []
        if self.policy.version < step:
            self.policy.publish()
        if isinstance(self.rollouter, PromptLedger):
            self.rollouter.forget(step)
            self.policy.encoder.visuals.unpin()

    def _end(self, step: int) -> None:
        """Take over the step's tally and the records of its completions. Collective. Raises RewardError when too many failed."""
        # of a generator process the main process has it all
        self._tally = self.rollouter.tallies.pop(step, StepTally())
        self._position = self.rollouter.states.pop(step, None)
        if self._apart:
            same = self.world.gather([(self._tally.report, self._tally.notes)])
            self._tally.report, self._tally.notes = same[0]
        self._records = self.world.gather(
            completion_records(self._tally.groups, reflection=self.config.train.log_reflection)
        )
        broken, limit = (
            [r for r in self._records if r["broken"]],
            self.config.reward.max_failure_share,
        )
        if broken and len(broken) > limit * len(self._records):
            if self.world.is_main:
                self._broken = [
                    {"step": step, **{k: r[k] for k in ("source", "id", "reason")}} for r in broken
                ]
            raise RewardError(
                f"{len(broken)} of {len(self._records)} rewards failed in one step (limit reward.max_failure_share = "
                f"{limit:g}); first: {broken[0]['reason']}"
            )

    def row(self, step: int, outcome: Outcome[UpdateResult], seconds: float) -> dict[str, Any]:
        """See RolloutSource. Raises RewardError as `_end`."""
        extra: dict[str, float] = {}
        if self._apart or not self.serial:
            self._end(step)
        if self.generator is not None and self.world.is_main:
            extra["train/generator/restarts"] = float(self.generator.restarts)
        if isinstance(self.rollouter, PromptLedger):
            extra |= self.rollouter.synced.pop(step, {})
        if not self.serial:
            extra |= {"train/staleness": float(outcome.staleness), "time/drain": outcome.drain_s}
        tally, update = self._tally, outcome.result
        tally.rollout_tokens, tally.prompt_tokens = (
            int(n) for n in self.world.sum([tally.rollout_tokens, tally.prompt_tokens])
        )
        parts = {
            "rollout": tally.rollout_s,
            **({"environment": tally.environment_s} if tally.environment_s else {}),
            "reward": tally.reward_s,
            "logprobs": update.logprobs_s,
            "update": update.update_s,
            "total": seconds,
        }
        return {
            **step_metrics(sorted(self._records, key=lambda r: r["key"]), tally, update, parts),
            **extra,
            **self.sent,
        }

    def failures(self) -> list[dict[str, Any]]:
        """See RolloutSource."""
        return self.rollouter.tallies.get(self._step, self._tally).failures + self._broken

    def answered(self) -> list[RolloutGroup]:
        """The groups of the step just trained that could be rolled out, also those not trained on."""
        return [g for g in self._tally.groups if g.error is None]

    def logged(self, limit: int, pictures: Path) -> list[dict[str, Any]]:
        """See RolloutSource: groups that were trained on; where no group was, those that taught nothing are the more to look at."""
        groups = (self._tally.trained or self.answered())[:limit]
        return self.rows_of(groups, pictures=pictures)

    def rows_of(
        self,
        groups: list[RolloutGroup],
        steps: int | None = None,
        max_tokens: int | None = None,
        *,
        pictures: Path | None = None,
    ) -> list[dict[str, Any]]:
        """Rows of rollouts/ of groups of the step just trained; `steps` and `max_tokens` of another run's settings than these."""
        return rollout_rows(
            groups,
            self.policy.template.frame.value,
            steps or self.config.train.steps,
            max_tokens or self.config.rollout.max_new_tokens,
            self._tally.origins,
            versions=self.config.schedule.kind == "async",
            pictures=pictures,
        )

    def evaluate(self, step: int, *, full: bool, folder: Path) -> Evaluation | None:
        """See RolloutSource."""
        if not self.eval_sources:
            return None
        if self.generator is not None:
            return self.generator.evaluate(step, full=full, folder=folder)
        settings = eval_settings(self.config, limit=None if full else self.config.eval.limit)
        with self.world.raise_on_all_ranks():
            found = evaluate(
                self.actor,
                self.engine,
                self.scorer,
                self.eval_sources,
                settings,
                step=step,
                world=self.world,
                first_key=len(self.train_sources),
                pictures=folder / "pictures",
            )
            (lost, why), limit = found.unjudged, self.config.reward.max_failure_share
            # else a table of zeros would pass for a result
            if lost > limit * len(found.predictions):
                raise RewardError(
                    f"{lost} of {len(found.predictions)} rewards failed in the evaluation of step {step} (limit "
                    f"reward.max_failure_share = {limit:g}); first: {why}"
                )
            return found

    @property
    def maker(self) -> Callable[[Any, World], HostableRollouts]:
        """What makes the rollouts in a generator process; picklable."""
        return type(self)

    def hosted(self) -> HostedPrompts:
        """See RolloutSource."""
        return HostedPrompts(self)

    def notes(self) -> list[str]:
        """See RolloutSource."""
        return remarks(self.config)

    def state_dict(self) -> dict[str, Any]:
        """See RolloutSource."""
        return {
            "schedule": self._position or self.rollouter.state_dict(),
            "version": self.policy.version,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See RolloutSource."""
        self.rollouter.load_state_dict(state["schedule"])
        self.policy.version = state["version"]


# for type checkers: a run's configuration names this class by its text
_CHECKED: type[HostableRollouts] = PromptRollouts
