"""The training loop: groups in, optimizer steps out, metrics, alarms, evaluation, checkpoints, resume.

    Trainer(load_config("configs/grounding.yaml")).fit()

A run killed at any moment and resumed equals the uninterrupted run bit for bit (one CPU process): noise and order are
functions of the seed and the step, and everything else is in the checkpoint. Two kinds of runs differ. Async: after a resume,
the groups that had been rolled out ahead are rolled out with newer weights. Pipelined embodied runs with schedule.order
arrival: gradients are summed in the order in which simulators happen to answer, so any two such runs agree to rounding only,
killed or not; schedule.order key is bit for bit.
"""
from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from mmrl.advice import remarks
from mmrl.alarms import Alarm, AlarmBoard
from mmrl.checkpoint import Checkpoints
from mmrl.cluster.run import check_prompt_workers, cluster_metrics, prompt_demands, run_cluster, run_rollouts, run_scorer
from mmrl.config import RunConfig, effective_threads
from mmrl.data import load_sources, note_lines, prompt_stream, write_rejected, write_skipped
from mmrl.engines import TrainEngine, accelerator_options, build_actor, build_train_engine, train_engine_name
from mmrl.errors import CheckpointError, MMRLError, NonFiniteError, RewardError, WeightSyncError
from mmrl.evaluation.evaluate import EvalSettings, Evaluation, evaluate, flat_metrics, protocol_of, write_evaluation
from mmrl.files import optional
from mmrl.group_rewards import check_filter_key
from mmrl.identity import check_identity, extension_notes, run_identity
from mmrl.media_record import MediaRecord, restore_media
from mmrl.metrics import completion_records, step_metrics
from mmrl.operations.beside import holding, operating, stop_if_asked
from mmrl.operations.restart import find_start, resumes, sound_best
from mmrl.optim import build_policy_optimizer
from mmrl.pipeline import GroupSource, IteratorSource, Outcome, Pipeline, PipelineSettings
from mmrl.policy.encode import Prompt
from mmrl.policy.loading import load_policy
from mmrl.prefetch import prefetching
from mmrl.preflight import Measured, best_metric, check_model_folder, check_packages, measured_by
from mmrl.rollout import build_rollout_engine
from mmrl.rollout.episodes import check_environments
from mmrl.runlog import RunFolder, rollout_rows, write_json
from mmrl.schedule import GroupPlaces, SerialSchedule, StepTally, sampling_settings
from mmrl.timeline import Timeline
from mmrl.trackers import Trackers
from mmrl.training.answer_critic import add_critic, judgement
from mmrl.training.learner import Learner, UpdateResult
from mmrl.types import RolloutGroup, Sample
from mmrl.world import World

__all__ = ["Trainer"]

G = TypeVar("G")


class Trainer:
    """One run. `on_event(kind, payload)` is told 'checked' (before the model is loaded), 'start', 'step', 'eval', 'alarm',
    'checkpoint' and 'end' (main process)."""

    updater: Any  # what trains: its number of optimizer steps is in checkpoints
    engine: Any = None  # a RolloutEngine; None where the policy acts by itself
    pipeline: Any = None  # a mmrl.pipeline.Pipeline while the run is open; None for serial runs
    cluster: Any = None  # a mmrl.cluster.session.Cluster while the run is open; None with engine.workers local

    def __init__(self, config: RunConfig, *, resume: bool | Literal["auto"] = False, overwrite: bool = False,
                 on_event: Any = None) -> None:
        if (threads := effective_threads(config)) is not None:
            torch.set_num_threads(threads)
        self.config, self.on_event = config, on_event or (lambda kind, payload: None)
        self.world = World(torch.device(config.model.device) if config.model.device else None, **accelerator_options(config))
        with self.world.telling():
            self._open(resume, overwrite)
        self._build_engines()

    def _open(self, resume: bool | Literal["auto"], overwrite: bool) -> None:
        """The run's folder, data, policy and optimizer."""
        config = self.config
        self.folder = RunFolder(config)
        resume = resumes(resume, self.folder.path, self.world)
        self.resume, self.overwrite = resume, overwrite and not resume
        self.checkpoints = Checkpoints(self.folder.path / "checkpoints", config.train.keep_last)
        if self.world.is_main:
            with self.folder.held(resume=resume, overwrite=overwrite):  # a trainer that never trains keeps nobody out
                self.checkpoints.clean()
        self.world.barrier()
        self.start = find_start(self.checkpoints, resume, self.world)
        self.start_step = self.start.step
        check_packages(config)
        check_model_folder(config.model.path)
        torch.manual_seed(config.seed)
        self._load_data()
        self.best_metric = best_metric(config.eval, self._measured())
        if self.world.is_main:
            self.on_event("checked", {"config": config})
        self.policy = self._load_policy()
        self.optimizer = self._build_optimizer()
        self.alarms = AlarmBoard(config.alarms)
        self.best: float | None = None
        self.best_step = 0
        self.media = MediaRecord()
        self._tally = StepTally()
        self._filled = -1  # optimizer steps taken when the actor got its weights
        self._position: dict[str, Any] | None = None  # async: of the schedule after the step just trained

    def _load_data(self) -> None:
        train_engine_name(self.config, self.world.size)  # what does not go together must fail before a model is loaded
        check_prompt_workers(self.config, self.world.device.type)
        data = self.config.data
        self.train_sources, self.eval_sources = (
            load_sources(configs, on_error=data.on_error, orientation=data.image.orientation, where=where)
            for configs, where in ((data.train, "data.train"), (data.eval, "data.eval")))
        prompt_stream(self.config, self.train_sources)  # a curriculum that does not fit the data must fail before a model is loaded
        check_filter_key(self.config, [s.task for s in self.train_sources])
        check_environments(self.config, [(s.task, {x.task for x in s.samples}) for s in (*self.train_sources, *self.eval_sources)])

    def _measured(self) -> Measured:
        """What held-out data are judged by."""
        return measured_by(self.eval_sources)

    def _load_policy(self) -> Any:
        with self.checkpoints.reading(self.start_step):
            return self._read_policy(self.checkpoints.path(self.start_step) if self.start_step else None)

    def _build_optimizer(self) -> torch.optim.AdamW:
        return build_policy_optimizer(self.policy, self.config.optim, self.config.algorithm.critic.lr)

    def _read_policy(self, weights: Path | None) -> Any:
        """The policy of model.path, or of the checkpoint folder `weights`."""
        policy = load_policy(self.config.model, self.config.data, needs_reference=self.config.algorithm.kl.coef > 0,
                             device=self.world.device, weights=weights)
        return add_critic(policy, self.config, weights, self.config.model.path)

    def _build_engines(self) -> None:
        """What trains, and what samples and is saved: the policy itself, or a whole copy of it before its weights are sharded."""
        with self.world.telling():
            self.actor = build_actor(self.config, self.world, self.policy)
        self.training: TrainEngine = build_train_engine(self.config, self.world, self.policy, self.optimizer)
        with self.world.telling():
            self.engine = build_rollout_engine(self.config, self.policy, self.world, self.train_sources, self.actor)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Everything that answers, scores and trains, while it is open."""
        specs = [(s.task, dict(s.params)) for s in (*self.config.data.train, *self.config.data.eval)]
        tasks = [s.task for s in (*self.train_sources, *self.eval_sources)]
        encoder = self.policy.encoder
        encoder.visuals.witness = self.media.note
        with run_cluster(self.config, self.world.size, prompt_demands(self.config)) as self.cluster, prefetching(
                self.config.data, [encoder.visuals]) as [encoder.ahead], run_scorer(
                self.config, specs, tasks, self.cluster) as self.scorer, run_rollouts(
                self.config, self.actor, self.engine, self.cluster) as self.engine:
            self.schedule = SerialSchedule(self.config, self.actor, self.engine, self.scorer, self.train_sources, self.world)
            self.updater = self._learner()
            self.timeline = self.schedule.timeline = Timeline({"infer": 1, "reward": 1, "train": 1})
            with ExitStack() as stack:
                stack.callback(self.engine.close)
                if self.config.schedule.kind != "serial":
                    source = IteratorSource(self.schedule.groups, self.config.train.prompts_per_step, GroupPlaces())
                    self.pipeline = stack.enter_context(self._pipeline(source))
                    self.schedule.exclusive = self.pipeline.exclusive
                yield

    def _learner(self) -> Learner:
        """What trains on groups of answers to prompts."""
        stream = self.schedule.stream
        self.policy.shared_prefix = self.config.train.forward == "shared"

        def prompt_of(group: RolloutGroup) -> Prompt:
            return self.policy.encoder(*stream.find(group.sample.source, group.sample.id))

        def headline(sample: Sample) -> str:
            return stream.find(sample.source, sample.id)[1].member(sample.task).headline

        advantages, critic = judgement(self.config, self.world, headline)
        learner = Learner(self.config, self.policy, self.training, self.world, advantages, prompt_of=prompt_of, critic=critic)
        learner.on_weights = self._changed
        return learner

    def _changed(self) -> None:
        """The weights have changed: outside serial runs they get their next version here, while the policy is still held."""
        if self.config.schedule.kind != "serial":
            self.policy.publish()
        self._sync()

    def _pipeline(self, source: GroupSource[G]) -> Pipeline[G, Any]:
        """The executor of the run's schedule over `source`."""
        s = self.config.schedule
        settings = PipelineSettings(schedule=s.kind, order=s.order, staleness=s.staleness if s.kind == "async" else 0)
        return Pipeline(source, self.updater, settings, last_step=self.config.train.steps, version=self.start_step,
                        timeline=self.timeline)

    def fit(self) -> dict[str, Any]:
        """Run to the end and return the last step's metrics. Raises MMRLError subclasses with what to do.

        An error in one process ends all of them with its message; with a sharded engine (runs on prompts) or inside its collective
        passes (embodied runs) the launcher ends them.
        """
        if self.training.lockstep:  # who cannot follow into the engine's own collectives must not begin another one
            return self._run()
        with self.world.telling():
            return self._run()

    def _run(self) -> dict[str, Any]:
        with holding(self), self._working(), operating(self) as self.interrupts:
            self._restore()
            trackers: Trackers | None = None
            status, signal = "failed", None
            failure: Exception | None = None
            try:
                trackers = Trackers(self.config, self.folder.path, enabled=self.world.is_main)
                row = self._loop(trackers)
                status = "finished"
            except KeyboardInterrupt as stop:
                status, signal = "interrupted", getattr(stop, "signal", "SIGINT")
                raise
            except Exception as error:
                failure = error
                raise
            finally:
                if self.world.is_main:
                    self.folder.finish(status, signal=signal, error=failure)
                if trackers is not None:
                    trackers.close()
        self.on_event("end", {"row": row, "folder": self.folder.path})
        return row

    def _restore(self) -> None:
        step, notes = self.start_step, list[str]()
        if step:
            state = self.checkpoints.load_state(step, self.training.load_optimizer_state)
            unknown = {"schedule": type(self.config.schedule)().model_dump(mode="json")}  # keys that an older checkpoint may lack
            check_identity({**run_identity(unknown), **state["identity"]}, run_identity(self.config.model_dump(mode="json")))
            notes += extension_notes(self.config, state["identity"].get("train.steps", self.config.train.steps), step)
            self.alarms.load_state_dict(state["alarms"])
            self._load_state(state)
            restore_media(self.media, self.checkpoints.path(step), [*self.train_sources, *self.eval_sources], self.world)
            if state.get("best_metric", self.best_metric) == self.best_metric:  # else numbers of two metrics would be compared
                self.best, self.best_step = sound_best(
                    self.checkpoints, self.start, state["best"], state["best_step"], self.world)
        if self.world.is_main:
            damaged = self.start.put_aside(self.checkpoints)
            if self.best_step in self.checkpoints.steps():  # killed between writing a checkpoint and marking it
                self.checkpoints.mark_best(self.best_step)
            self.folder.start(total_steps=self.config.train.steps, resumed_at=step or None, best_metric=self.best_metric,
                              damaged=damaged)
            self.folder.rewind(step if step else -1)
            sources = [*self.train_sources, *self.eval_sources]
            rejected = write_rejected(sources, self.folder.path / "rejected.jsonl")
            skipped = write_skipped(sources, self.folder.path / "skipped.json", len(self.eval_sources))
            self.on_event("start", {"step": step, "config": self.config, "best_metric": self.best_metric, "rejected": rejected,
                                    "skipped": skipped, "folder": self.folder.path,
                                    "notes": [*self.start.notes, *notes, *note_lines(sources), *self._started()],
                                    "trainable": sum(p.numel() for _, p in self.actor.trainable())})
            self._raise_alarms([Alarm(step, "checkpoint_damaged", words, "error") for words in damaged.values()])
        self.world.barrier()

    def _started(self) -> list[str]:
        """Further lines to say when the run starts."""
        return remarks(self.config)

    def _state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside weights, optimizer and alarms; JSON values."""
        return {"schedule": self._position or self.schedule.state_dict(), "credit": self.updater.advantages.state_dict(),
                "entropy": self.updater.entropy.state_dict(), "updates": self.updater.updates, "version": self.policy.version}

    def _load_state(self, state: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state["schedule"])
        self.updater.advantages.load_state_dict(state["credit"])
        if "entropy" in state:  # not in checkpoints from before there was a bonus
            self.updater.entropy.load_state_dict(state["entropy"])
        self.updater.updates, self.policy.version = state["updates"], state["version"]

    def _loop(self, trackers: Trackers) -> dict[str, Any]:
        c, row = self.config, {}
        with self._alarmed(self.start_step):
            self._sync()
        if self.start_step == 0:
            self._evaluate(0, full=True)
        stop_if_asked(self, self.start_step, saved=True)
        for step in range(self.start_step + 1, c.train.steps + 1):
            last = step == c.train.steps
            row = self._train_step(step) | cluster_metrics(self.cluster, self.world)
            if last or (c.eval.every and step % c.eval.every == 0):
                row.update(self._evaluate(step, full=last))
            alarms = self._write(step, row, trackers)
            if saved := bool(last or (c.train.save_every and step % c.train.save_every == 0)):
                self._checkpoint(step, row)
            if (stop := self.alarms.must_stop(alarms)) is not None:
                raise MMRLError(f"stopped at step {step} by alarm '{stop.name}': {stop.message}")
            if not last:
                stop_if_asked(self, step, saved=saved)
        return row

    def _train_step(self, step: int) -> dict[str, Any]:
        """Roll out and train on one step; its row of metrics. What is written about it is kept until `_write`."""
        began = time.perf_counter()
        if self.pipeline is not None:
            outcome = self._overlapped(step)
            update, records, extra = outcome.result, self._records(step), self._outcome_row(outcome)
        else:
            self.policy.publish()
            self._fill_actor()
            self.timeline.begin_step(step)
            with self.world.telling():
                groups = list(self.schedule.groups(step))
                records, extra = self._records(step), {}
            update = self._update(step, groups)
            self.timeline.end_step(step)
        if self.pipeline is not None or self.config.schedule.timeline:
            extra |= self._times(step)
        tally = self._tally
        tally.rollout_tokens, tally.prompt_tokens = (
            int(n) for n in self.world.sum([tally.rollout_tokens, tally.prompt_tokens]))
        seconds = {"rollout": tally.rollout_s, "reward": tally.reward_s, "logprobs": update.logprobs_s,
                   "update": update.update_s, "total": time.perf_counter() - began}
        return {"step": step, **step_metrics(sorted(records, key=lambda r: r["key"]), tally, update, seconds), **extra, **self.sent}

    def _fill_actor(self, *, save: bool = False) -> None:
        """Give the whole copy of sharded weights, where there is one, those of now, if it samples or is saved. Collective."""
        if self.actor is self.policy:
            return
        self.actor.version = self.policy.version
        if (save or self.config.engine.rollout == "own") and self._filled != self.updater.updates:
            self.world.barrier()  # where the error of another process is heard of, before a collective of the engine's own
            self.training.fill(self.actor)
            self._filled = self.updater.updates

    def _records(self, step: int) -> list[dict[str, Any]]:
        """Records of the step's completions, its tally taken over. Raises RewardError when too many rewards failed."""
        self._tally, self._position = self.schedule.tallies.pop(step), self.schedule.states.pop(step, None)
        records = self.world.gather(completion_records(self._tally.groups, reflection=self.config.train.log_reflection))
        self._check_rewards(step, records)
        return records

    def _overlapped(self, step: int) -> Outcome[UpdateResult]:
        """Roll out and train at the same time; `Learner.finish` gives the weights their next version."""
        if self.policy.version < step:
            self.policy.publish()
        with self._alarmed(step):
            return self.pipeline.step(step)

    def _outcome_row(self, outcome: Outcome[UpdateResult]) -> dict[str, float]:
        return {"train/staleness": float(outcome.staleness), "time/drain": outcome.drain_s}

    def _times(self, step: int) -> dict[str, float]:
        """Busy and idle shares of the step; its timeline is written when one is due."""
        every, folder = self.config.schedule.timeline, self.folder.path / "timeline"
        if every and (step % every == 0 or step == 1) and self.world.is_main:
            with optional("the timeline"):
                self.timeline.write_step(folder, step)
                self.timeline.write_chrome_trace(folder / "trace.json")
        return self.timeline.metrics(step)

    def _update(self, step: int, groups: list[Any]) -> UpdateResult:
        """The optimizer steps of one training step."""
        self.engine.rest()
        with self._alarmed(step), self.timeline.span("train", "train", step=step):
            return self.updater.run(groups, step)

    def _sync(self) -> None:
        """Give an engine that samples with a copy of the weights those of now; what that measures goes into the step's row."""
        self.sent = self.engine.publish(self.training) if self.engine is not None else {}

    @contextmanager
    def _alarmed(self, step: int) -> Iterator[None]:
        """A non-finite loss or gradient, and weights that did not arrive, leave an alarm before they stop the run."""
        try:
            yield
        except (NonFiniteError, WeightSyncError) as error:
            if self.world.is_main:
                self._raise_alarms([Alarm(step, error.alarm, str(error), "error")])
            raise

    def _check_rewards(self, step: int, records: list[dict[str, Any]]) -> None:
        broken = [r for r in records if r["broken"]]
        if broken and len(broken) > self.config.reward.max_failure_share * len(records):
            if self.world.is_main:
                self.folder.append("failures.jsonl", [{"step": step, **{k: r[k] for k in ("source", "id", "reason")}}
                                                      for r in broken])
            raise RewardError(f"{len(broken)} of {len(records)} rewards failed in one step (limit reward.max_failure_share = "
                              f"{self.config.reward.max_failure_share:g}); first: {broken[0]['reason']}")

    def _failures(self) -> list[dict[str, Any]]:
        """Rows of failures.jsonl of the step just trained, on this process."""
        return self._tally.failures

    def _write(self, step: int, row: dict[str, Any], trackers: Trackers) -> list[Alarm]:
        alarms = self.alarms.check(step, row)
        failures = self.world.gather(self._failures())
        if self.world.is_main:
            self.folder.append("metrics.jsonl", [row])
            self.folder.append("failures.jsonl", failures)
            self._raise_alarms(alarms)
            self._log_rollouts(step)
            trackers.log(step, row)
            self.on_event("step", row)
        return alarms

    def _log_rollouts(self, step: int) -> None:
        tally = self._tally
        shown = tally.trained or [g for g in tally.groups if g.error is None]  # no signal at all: the more to look at
        logged = rollout_rows(shown[: self.config.train.log_rollouts], self.policy.template.frame.value,
                              self.config.train.steps, self.config.rollout.max_new_tokens, tally.origins)
        self.folder.append(f"rollouts/step_{step:06d}.jsonl", logged)

    def _raise_alarms(self, alarms: list[Alarm]) -> None:
        self.folder.append("alarms.jsonl", [vars(a) for a in alarms])
        for alarm in alarms:
            self.on_event("alarm", alarm)

    def _evaluation(self, step: int, *, full: bool) -> Evaluation | None:
        """Answer the held-out samples (all, or the first eval.limit); None without any."""
        if not self.eval_sources:
            return None
        e = self.config.eval
        settings = EvalSettings(sampling_settings(self.config), e.samples, self.config.seed, None if full else e.limit,
                                on_error=self.config.data.on_error,
                                protocol=protocol_of(self.config), views=tuple(e.views))
        self._fill_actor()
        with self.world.telling():
            return evaluate(self.actor, self.engine, self.scorer, self.eval_sources, settings, step=step, world=self.world,
                            first_key=len(self.train_sources))

    def _evaluate(self, step: int, *, full: bool) -> dict[str, Any]:
        """Evaluate, write eval/step_*, and return the flat metrics that go into the step's row."""
        began, e = time.perf_counter(), self.config.eval
        evaluation = self._evaluation(step, full=full)
        if evaluation is None:
            return {}
        if self.world.is_main:
            write_evaluation(evaluation, self.folder.path / "eval" / f"step_{step:06d}")
            if step == 0:
                prompts = list(dict.fromkeys((p["source"], p["id"]) for p in evaluation.predictions))[: e.gallery]
                write_json(self.folder.path / "gallery.json", {"prompts": [{"source": s, "id": i} for s, i in prompts]})
            self.on_event("eval", evaluation)
        selection = evaluation.selection(self.best_metric, e.limit)  # the same samples at every step, also when all were used
        return {**flat_metrics(evaluation), "eval/selection": selection, "time/eval": time.perf_counter() - began}

    def _checkpoint(self, step: int, row: dict[str, Any]) -> None:
        began = time.perf_counter()
        metric = row.get("eval/selection")
        better = metric is not None and (self.best is None or metric > self.best)
        best, best_step = (metric, step) if better else (self.best, self.best_step)
        self._fill_actor(save=True)
        self.media.learn(self.world.gather(self.media.take_new()))
        optimizer = self.training.optimizer_state()
        if optimizer is not None:  # the main process
            settings = self.config.model_dump(mode="json")
            state = {"step": step, "identity": run_identity(settings), "best": best,
                     "best_step": best_step, "best_metric": self.best_metric, "alarms": self.alarms.state_dict(), **self._state()}
            try:
                with self._alarmed(step):
                    path = self.checkpoints.save(step, self.actor, optimizer, state, settings, self.media.files())
                if better:
                    self.checkpoints.mark_best(step)
                self.best, self.best_step = best, best_step
                self.on_event("checkpoint", {"step": step, "path": path, "seconds": time.perf_counter() - began})
            except CheckpointError as error:
                if step == self.config.train.steps:
                    raise
                self._raise_alarms([Alarm(step, "checkpoint_failed", str(error), "error")])
        self.world.barrier()
