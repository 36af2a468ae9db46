"""The training loop: groups in, optimizer steps out, metrics, alarms, evaluation, checkpoints, resume.

    Trainer(load_config("configs/grounding.yaml")).fit()

A run killed at any moment and resumed equals the uninterrupted run bit for bit (one CPU process): noise and order are
functions of the seed and the step, and everything else is in the checkpoint. Two kinds of runs differ. Async: after a resume,
the groups that had been rolled out ahead are rolled out with newer weights. Pipelined embodied runs with schedule.order
arrival: gradients are summed in the order in which simulators happen to answer, so any two such runs agree to rounding only,
killed or not; schedule.order key is bit for bit.
"""

from __future__ import annotations

import copy
import logging
import pkgutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch

from mmrl.config import RunConfig, effective_threads, rollout_engine, with_choice
from mmrl.data.sources import note_lines, write_rejected, write_skipped
from mmrl.distributed.cluster.run import cluster_metrics
from mmrl.distributed.engines import (
    TrainEngine,
    accelerator_options,
    build_actor,
    build_saved,
    build_train_engine,
)
from mmrl.distributed.world import World
from mmrl.errors import MMRLError, NonFiniteError, WeightSyncError
from mmrl.evaluation.result import flat_metrics, write_evaluation
from mmrl.files import optional
from mmrl.operations.restart import find_start, resumes, sound_best
from mmrl.operations.run_guard import run_lock, run_signals, stop_if_requested
from mmrl.operations.startup import loaded
from mmrl.training.alarms import Alarm, AlarmBoard
from mmrl.training.checkpoint import Checkpoints
from mmrl.training.checkpoint_saver import CheckpointSaver
from mmrl.training.identity import check_identity, extension_notes, run_identity
from mmrl.training.learner import Learner
from mmrl.training.media_record import MediaRecord, restore_media
from mmrl.training.optim import build_policy_optimizer
from mmrl.training.pipeline import Pipeline, PipelineSettings
from mmrl.training.preflight import (
    best_metric,
    check_addresses,
    check_model_folder,
    check_packages,
    check_router_replay,
    check_servers,
)
from mmrl.training.rollouts import RolloutSource, RunContext
from mmrl.training.runlog import RunFolder, write_json
from mmrl.training.trackers import Trackers
from mmrl.training.update_result import UpdateResult

__all__ = ["Trainer"]

_LOG = logging.getLogger(__name__)
_PATIENCE_S = 7200.0  # of the executor, for a thread that waits for other processes: as long as a collective (distributed/world.py)


class Trainer:
    """One run, of a VLM on prompts or of a VLA in simulators.

    Args:
        config: all of its settings.
        resume: continue the run of its folder; 'auto': if there is one.
        overwrite: replace the run of its folder.
        on_event: called with (kind, payload) of 'checked' (before the model is loaded), 'start', 'step', 'eval', 'alarm',
            'checkpoint' and 'end', in the main process.
        rollouts: (config, world) -> what makes the rollouts (mmrl.training.rollouts); default: what the configuration names.
    """

    learner: Learner  # while the run is open
    pipeline: Pipeline[Any, UpdateResult]  # while the run is open
    trackers: Trackers | None = None  # while it trains

    def __init__(
        self,
        config: RunConfig,
        *,
        resume: bool | Literal["auto"] = False,
        overwrite: bool = False,
        on_event: Any = None,
        rollouts: Callable[[Any, World], RolloutSource] | None = None,
    ) -> None:
        if (threads := effective_threads(config)) is not None:
            torch.set_num_threads(threads)
        self.on_event, self._source = on_event or (lambda kind, payload: None), rollouts
        self.world = World(
            torch.device(config.model.device) if config.model.device else None,
            **accelerator_options(config),
        )
        self.config, self._sampler = self._with_rollout_engine(config)
        with self.world.raise_on_all_ranks():
            self._open(resume, overwrite)
        self._build_engines()

    def _with_rollout_engine(self, config: Any) -> tuple[Any, list[str]]:
        """The configuration with the engine that engine.rollout auto means for all processes, and what is said of the choice."""
        if config.engine.rollout != "auto" or not config.samples_text:
            return config, []
        kind: Literal["cuda", "cpu"] = "cuda" if self.world.device.type == "cuda" else "cpu"
        choices = self.world.gather([rollout_engine(config, kind)])
        # one process that lacks vLLM decides for all: they wait for each other in every sync
        choice = next((each for each in choices if each.name == "own"), choices[0])
        said = [f"engine.rollout auto: {choice.name}, for {choice.why}"]
        return with_choice(config, choice), said if kind == "cuda" or choice.name != "own" else []

    def _open(self, resume: bool | Literal["auto"], overwrite: bool) -> None:
        """The run's folder, data, policy and optimizer."""
        config = self.config
        self.folder = RunFolder(config)
        resume = resumes(resume, self.folder.path, self.world)
        self.resume, self.overwrite = resume, overwrite and not resume
        self.checkpoints = Checkpoints(self.folder.path / "checkpoints", config.train.keep_last)
        if self.world.is_main:
            # a trainer that never trains keeps nobody out
            with self.folder.held(resume=resume, overwrite=overwrite):
                self.checkpoints.clean()
        self.world.barrier()
        self.start = find_start(self.checkpoints, resume, self.world)
        self.start_step = self.start.step
        check_packages(config)
        check_model_folder(config.model.path)
        check_router_replay(config)
        check_addresses(config, main=self.world.is_main)
        torch.manual_seed(config.seed)
        make = self._source or pkgutil.resolve_name(config.rollout_source)
        self.rollouts: RolloutSource = make(config, self.world)
        self.best_metric = best_metric(config.eval, self.rollouts.measured)
        if self.world.is_main:
            self.on_event("checked", {"config": config})
        check_servers(config)
        with self.checkpoints.reading(self.start_step):
            self.policy = self.rollouts.load_policy(
                self.checkpoints.path(self.start_step) if self.start_step else None
            )
        self.optimizer = self._build_optimizer()
        self.alarms = AlarmBoard(config.alarms)
        self.media = MediaRecord()
        # optimizer steps taken when the actor, and what is saved, got their weights
        self._filled: dict[str, int] = {}
        # a copy of `_state_to_save` of the last step, while it has no checkpoint
        self._unsaved: dict[str, Any] | None = None
        # rows for failures.jsonl of a step that failed, which the main process does not have
        self._lost: list[dict[str, Any]] = []

    def _build_optimizer(self) -> torch.optim.Optimizer:
        return build_policy_optimizer(
            self.policy, self.config.optim, self.config.algorithm.critic.lr
        )

    @property
    def _generates_apart(self) -> bool:
        """Whether a process of its own has the weights that sample."""
        return self.config.engine.generator.kind == "process"

    @property
    def _actor_works(self) -> bool:
        """Whether the actor samples here, or values what was sampled."""
        return not self._generates_apart or self.config.algorithm.advantage == "gae"

    def _build_engines(self) -> None:
        """What trains, and what samples and is saved: the policy itself, or full replicas of it before its weights are sharded."""
        with self.world.raise_on_all_ranks():
            self.actor = build_actor(
                self.config, self.world, self.policy, samples=self._actor_works
            )
            self.saved = build_saved(self.config, self.world, self.policy, self.actor)
        self.training: TrainEngine = build_train_engine(
            self.config, self.world, self.policy, self.optimizer
        )
        with self.world.raise_on_all_ranks():
            self.rollouts.build(self.policy, self.actor)
        self.context = RunContext(self.policy, self.actor, self.saved, self.training, self.media)
        self.saver = CheckpointSaver(
            self.config,
            self.world,
            self.checkpoints,
            self.context,
            tell=lambda kind, payload: self.on_event(
                kind, payload
            ),  # it is another one within run_signals
            alarm=lambda alarm: self._raise_alarms([alarm]),
        )

    @contextmanager
    def open_runtime(self) -> Iterator[None]:
        """Everything that rolls out, scores and trains, while it is open."""
        s, c = self.config.schedule, self.config
        with self.rollouts.open(self.context):
            self.learner = self.rollouts.learner()
            settings = PipelineSettings(
                schedule=s.kind,
                order=s.order,
                staleness=s.staleness if s.kind == "async" else 0,
                apart=self._generates_apart,
            )
            with Pipeline(
                self.rollouts.groups,
                self.learner,
                settings,
                last_step=c.train.steps,
                version=self.start_step,
                timeline=self.rollouts.timeline,
            ) as self.pipeline:
                # a thread that waits for other processes may not be left behind: see World.stop
                if self.world.size > 1:
                    self.pipeline.patience_s = _PATIENCE_S
                self.rollouts.share_policy(self.pipeline.exclusive, self.pipeline.make_way)
                yield

    def fit(self) -> dict[str, Any]:
        """Run to the end and return the last step's metrics. Raises MMRLError subclasses with what to do.

        An error in one process ends all of them with its message; where it arises inside of a pass through a sharded model, which
        the others wait in, the launcher ends them.
        """
        loaded()
        try:
            return self._run()
        except Exception as error:
            if not (self.training.lockstep and self.training.in_collective):
                self.world.stop(error)
            with suppress(RuntimeError):  # others are gone: the error that is raised says more
                if self.world.stopping:
                    lost = self.world.gather(self._lost)
                    if self.world.is_main:
                        self.folder.append("failures.jsonl", lost)
            raise

    def _run(self) -> dict[str, Any]:
        with run_lock(self), self.open_runtime(), run_signals(self) as self.interrupts:
            self._restore()
            status, signal = "failed", None
            failure: Exception | None = None
            try:
                self.trackers = Trackers(
                    self.config,
                    self.folder.path,
                    enabled=self.world.is_main,
                    resumed=self.start_step > 0,
                )
                row = self._loop(self.trackers)
                status = "finished"
            except KeyboardInterrupt as stop:
                status, signal = "interrupted", getattr(stop, "signal", "SIGINT")
                raise
            except Exception as error:
                failure = error
                raise
            finally:
                self.saver.close()
                if self.world.is_main:
                    self.folder.finish(status, signal=signal, error=failure)
                if self.trackers is not None:
                    self.trackers.close(failed=status == "failed")
                    self.trackers = None
        self.on_event("end", {"row": row, "folder": self.folder.path})
        return row

    def _restore(self) -> None:
        step, notes = self.start_step, list[str]()
        if step:
            state = self.checkpoints.load_state(step, self.training.load_optimizer_state)
            # keys that an older checkpoint may lack
            unknown = {"schedule": type(self.config.schedule)().model_dump(mode="json")}
            check_identity(
                {**run_identity(unknown), **state["identity"]},
                run_identity(self.config.model_dump(mode="json")),
            )
            notes += extension_notes(
                self.config, state["identity"].get("train.steps", self.config.train.steps), step
            )
            self.alarms.load_state_dict(state["alarms"])
            self.learner.load_state_dict(state)
            self.rollouts.load_state_dict(state)
            restore_media(self.media, self.checkpoints.path(step), self._sources(), self.world)
            # else numbers of two metrics would be compared
            if state.get("best_metric", self.best_metric) == self.best_metric:
                self.saver.best, self.saver.best_step = sound_best(
                    self.checkpoints, self.start, state["best"], state["best_step"], self.world
                )
        if self.world.is_main:
            damaged = self.start.put_aside(self.checkpoints)
            # killed between writing a checkpoint and marking it
            if self.saver.best_step in self.checkpoints.steps():
                self.checkpoints.mark_best(self.saver.best_step)
            self.folder.start(
                total_steps=self.config.train.steps,
                resumed_at=step or None,
                best_metric=self.best_metric,
                damaged=damaged,
            )
            self.folder.rewind(step if step else -1)
            sources = self._sources()
            rejected = write_rejected(sources, self.folder.path / "rejected.jsonl")
            skipped = write_skipped(
                sources, self.folder.path / "skipped.json", len(self.rollouts.eval_sources)
            )
            self.on_event(
                "start",
                {
                    "step": step,
                    "config": self.config,
                    "best_metric": self.best_metric,
                    "rejected": rejected,
                    "skipped": skipped,
                    "folder": self.folder.path,
                    "notes": [
                        *self._sampler,
                        *self.start.notes,
                        *notes,
                        *note_lines(sources),
                        *self.rollouts.notes(),
                    ],
                    "trainable": sum(p.numel() for _, p in self.actor.trainable()),
                },
            )
            self._raise_alarms(
                [Alarm(step, "checkpoint_damaged", words, "error") for words in damaged.values()]
            )
        self.world.barrier()

    def _sources(self) -> list[Any]:
        """The data sets of the run."""
        return [*self.rollouts.train_sources, *self.rollouts.eval_sources]

    def _loop(self, trackers: Trackers) -> dict[str, Any]:
        c, row = self.config, self.folder.last_metrics() if self.start_step else {}
        with self._alarmed(self.start_step):
            self.rollouts.sync()
        if self.start_step == 0:
            trackers.log(0, self._evaluate(0, full=True))
        stop_if_requested(self, self.start_step, saved=True)
        for step in range(self.start_step + 1, c.train.steps + 1):
            last, updates = step == c.train.steps, self.learner.updates
            try:
                row = self._train_step(step) | cluster_metrics(self.rollouts.cluster, self.world)
            except Exception as error:
                if self._unsaved is not None and self._still_whole(step, updates, error):
                    self._save_late(step - 1, self._unsaved)
                raise
            if last or (c.eval.every and step % c.eval.every == 0):
                row.update(self._evaluate(step, full=last))
            self.saver.settle(wait=False)
            alarms = self._write(step, row, trackers)
            if saved := bool(last or (c.train.save_every and step % c.train.save_every == 0)):
                self.save_checkpoint(step, row.get("eval/selection"))
            if (stop := self.alarms.must_stop(alarms)) is not None:
                raise MMRLError(f"stopped at step {step} by alarm '{stop.name}': {stop.message}")
            # what the next step changes must not change it
            self._unsaved = None if saved else copy.deepcopy(self._state_to_save())
            if not last:
                stop_if_requested(self, step, saved=saved)
        return row

    def _still_whole(self, step: int, updates: int, error: Exception) -> bool:
        """Whether weights and optimizer are those of the step before `step`, which failed with `error`. Collective: of several
        processes all hear of the error here; they are not asked where a pass through a sharded model may have been cut off."""
        # an error that is not ours may have come from inside of an optimizer step
        before = self.learner.step < step or isinstance(error, MMRLError)
        whole = before and self.pipeline.at_rest and self.learner.updates == updates
        if self.world.size == 1 or self.training.lockstep:
            return whole and self.world.size == 1
        self.world.stop(error)
        try:
            return all(self.world.gather([whole]))
        except RuntimeError:  # the others are gone
            return False

    def _save_late(self, step: int, state: dict[str, Any]) -> None:
        """Write the checkpoint of `step`, which was done before another one failed. The failure is what ends the run."""
        try:
            self.save_checkpoint(step, state=state)
            self.saver.settle()
        except Exception as lost:
            _LOG.warning("the checkpoint of step %d could not be written: %s", step, lost)

    def _train_step(self, step: int) -> dict[str, Any]:
        """Roll out and train on one step; its row of metrics. What else is written about it is kept until `_write`."""
        began = time.perf_counter()
        self.rollouts.begin(step)
        self._fill_actor()
        try:
            with self._alarmed(step):
                outcome = self.pipeline.step(step)
            row = self.rollouts.row(step, outcome, time.perf_counter() - began)
        except Exception:  # a step that is never finished: what failed in it is the reason
            if self.world.is_main:
                self.folder.append("failures.jsonl", self.rollouts.failures())
            else:
                self._lost = self.rollouts.failures()
            raise
        return {"step": step, **row, **self._times(step)}

    def _fill_actor(self) -> None:
        """Give the full replica of sharded weights, where there is one that samples, those of now. Collective."""
        if self.actor is not self.policy:
            self.actor.version = self.policy.version
            if self.config.engine.rollout != "vllm" and self._actor_works:
                self._fill("actor", self.actor)

    def _fill_saved(self) -> None:
        """The same for what is saved, which may be the actor. Collective."""
        if self.saved is not self.policy:
            self.saved.version = self.policy.version
            self._fill("actor" if self.saved is self.actor else "saved", self.saved)

    def _fill(self, name: str, replica: Any) -> None:
        """Copy the weights of now into `replica`, unless it has them. Collective."""
        if self._filled.get(name) == self.learner.updates:
            return
        self.world.barrier()  # where the error of another process is heard of, before a collective of the engine's own
        with self.training.collective_section():
            self.training.gather_into(replica)
        self._filled[name] = self.learner.updates

    def _times(self, step: int) -> dict[str, float]:
        """Busy and idle shares of the step, where stages overlap or timelines are wanted; the step's is written when one is due."""
        every, folder = self.config.schedule.timeline, self.folder.path / "timeline"
        timeline = self.rollouts.timeline
        if self.config.schedule.kind == "serial" and not every:
            return {}
        if every and (step % every == 0 or step == 1) and self.world.is_main:
            with optional("the timeline"):
                timeline.write_step(folder, step)
                timeline.write_chrome_trace(folder / "trace.json")
        return timeline.metrics(step)

    @contextmanager
    def _alarmed(self, step: int) -> Iterator[None]:
        """A non-finite loss or gradient, and weights that did not arrive, leave an alarm before they stop the run."""
        try:
            yield
        except (NonFiniteError, WeightSyncError) as error:
            if self.world.is_main:
                self._raise_alarms([Alarm(step, error.alarm, str(error), "error")])
            raise

    def _write(self, step: int, row: dict[str, Any], trackers: Trackers) -> list[Alarm]:
        alarms = self.alarms.check(step, row)
        failures = self.world.gather(self.rollouts.failures())
        if self.world.is_main:
            self.folder.append("metrics.jsonl", [row])
            self.folder.append("failures.jsonl", failures)
            self._raise_alarms(alarms)
            self._log_rollouts(step)
            trackers.log(step, row)
            self.on_event("step", row)
        return alarms

    def _log_rollouts(self, step: int) -> None:
        self.folder.append(
            f"rollouts/step_{step:06d}.jsonl",
            self.rollouts.logged(
                self.config.train.log_rollouts, self.folder.path / "rollouts" / "pictures"
            ),
        )

    def _raise_alarms(self, alarms: list[Alarm]) -> None:
        self.folder.append("alarms.jsonl", [vars(a) for a in alarms])
        for alarm in alarms:
            self.on_event("alarm", alarm)

    def _evaluate(self, step: int, *, full: bool) -> dict[str, Any]:
        """Evaluate, write eval/step_*, and return the flat metrics that go into the step's row."""
        began, e = time.perf_counter(), self.config.eval
        folder = self.folder.path / "eval" / f"step_{step:06d}"
        self._fill_actor()
        evaluation = self.rollouts.evaluate(step, full=full, folder=folder)
        if evaluation is None:
            return {}
        if self.world.is_main:
            write_evaluation(evaluation, folder)
            if step == 0:
                prompts = list(
                    dict.fromkeys((p["source"], p["id"]) for p in evaluation.predictions)
                )[: e.gallery]
                write_json(
                    self.folder.path / "gallery.json",
                    {"prompts": [{"source": s, "id": i} for s, i in prompts]},
                )
            if self.trackers is not None:
                self.trackers.evaluated(step, evaluation.predictions)
            self.on_event("eval", evaluation)
        # the same samples at every step, also when all were used
        selection = evaluation.selection(self.best_metric, e.limit)
        return {
            **flat_metrics(evaluation),
            "eval/selection": selection,
            "time/eval": time.perf_counter() - began,
        }

    def _state_to_save(self) -> dict[str, Any]:
        """What a checkpoint of now keeps beside weights and optimizer; of the main process, which writes it."""
        if not self.world.is_main:
            return {}
        state = {"best_metric": self.best_metric, "alarms": self.alarms.state_dict()}
        return state | self.learner.state_dict() | self.rollouts.state_dict()

    def save_checkpoint(
        self, step: int, metric: float | None = None, state: dict[str, Any] | None = None
    ) -> None:
        """Write the checkpoint of `step`; `metric`, if there is one, makes it a candidate for the best; `state`: what
        `_state_to_save` gave after it, if another step has begun. Collective."""
        if not self.saver.sharded:
            self._fill_saved()
        with self._alarmed(step):
            self.saver.save(step, metric, self._state_to_save() if state is None else state)
