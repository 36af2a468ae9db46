"""mmrl from Python: a script or a notebook gives a model, a reward and data, and trains.

    import mmrl

    @mmrl.reward
    def brief(completion: str, sample: mmrl.Sample) -> float:
        return float(completion.strip() == sample.answer) / max(1, len(completion.split()))

    trainer = mmrl.Trainer(model="Qwen/Qwen2.5-VL-3B-Instruct", reward=brief, train_data=[
        {"image": "cup.png", "question": "What colour is the cup?", "answer": "red"}, ...], config={"train.steps": 100})
    trainer.fit()
    print(mmrl.evaluate(trainer.checkpoint, reward=brief, data="held_out.jsonl").results["greedy"]["reward"])

Everything a recipe can do can be done here: `config` takes the same keys, and a run leaves the same folder. Rows in memory are
written beside the runs, named by their content, so that a run can be resumed, checked and reported like any other. No main guard is
needed: worker processes get the reward by value and never import the script.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from pydantic import ValidationError

from mmrl.config import DataSource, RunConfig, config_from, load_config_as, merge, renamed
from mmrl.data.memory_rows import Rows, stored
from mmrl.errors import ConfigError, DataError
from mmrl.evaluation.evaluate import asked_of_model, evaluate_model
from mmrl.evaluation.result import Evaluation
from mmrl.registry import OFFERED, offer, resolve_task, using
from mmrl.task import Task

__all__ = ["Trainer", "evaluate", "reward"]

F = TypeVar("F", bound=Callable[..., Any])
_SETTINGS = "_mmrl_reward"


@overload
def reward(function: F) -> F: ...
@overload
def reward(
    *, low: float = 0.0, high: float = 1.0, metrics: Iterable[str] = ()
) -> Callable[[F], F]: ...
def reward(
    function: Any = None, *, low: float = 0.0, high: float = 1.0, metrics: Iterable[str] = ()
) -> Any:
    """Mark a function (completion, sample) -> reward as one; a third parameter gets the mmrl.RewardContext.

    It returns a number in [low, high], a mapping {"reward": number, further metrics ...}, a mmrl.Score, or None for a completion
    that cannot be judged, which counts as 0 and is recorded. One that raises or hangs costs its completion a recorded 0. It may be
    an `async def` that waits for a judge (mmrl.judges): many completions then wait at once.

    Args:
        low, high: range of the reward; a value outside is a recorded failure.
        metrics: keys of the mapping that evaluations average.
    """

    def mark(wrapped: F) -> F:
        settings = {"low": low, "high": high, "metrics": tuple(metrics)}
        _task_of(wrapped, settings)  # said where it is written, not when it trains
        marked: Any = wrapped
        # a method or an object, which may take no attribute
        if not isinstance(wrapped, types.FunctionType):
            marked = functools.wraps(wrapped)(lambda *given: wrapped(*given))
        setattr(marked, _SETTINGS, settings)
        return marked

    return mark if function is None else mark(function)


class Trainer:
    """One training run. `fit()` trains; `folder`, `checkpoint` and `report()` are what it leaves.

    Args:
        model: folder or hub name of the model; default: config's model.path.
        task: what is asked and how answers are judged: a name (`mmrl tasks list`), a mmrl.Task class, or an instance of one.
        reward: instead of a task, a function (see mmrl.reward).
        train_data, eval_data: a path (or hf://owner/name), or rows: mappings with the keys of mmrl's own JSON Lines (question,
            answer, image or images or video; pictures may be PIL images; other keys go into params), mmrl.Sample, or a
            datasets.Dataset. Default: those of config.
        config: keys of a run (docs/config.md): a YAML file, a RunConfig, or a mapping of dotted keys {"train.steps": 50}.
        overrides: further dotted keys, over a file or a RunConfig.
        params: parameters of the task.
        callbacks: functions (kind, payload) told 'start', 'step' (the row of metrics), 'eval', 'alarm', 'checkpoint' and 'end'.
        resume: continue the run of this folder; 'auto': if there is one.
        overwrite: replace the run of this folder.
        quiet: print nothing but alarms and warnings.

    Raises ConfigError and DataError before a model is loaded, with what to change.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        task: str | type[Task] | Task | None = None,
        reward: Callable[..., Any] | None = None,
        train_data: Rows | None = None,
        eval_data: Rows | None = None,
        config: str | Path | RunConfig | Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[str, Any], Any]] = (),
        resume: bool | Literal["auto"] = False,
        overwrite: bool = False,
        quiet: bool = False,
    ) -> None:
        _check_model(model)
        self.config = _configured(model, config, overrides)
        named = _named(task, reward, params)
        name = named[0] or ""
        self._object = (name, resolve_task(name)) if name.startswith(OFFERED) else None
        _add_data(self.config, named, train_data, eval_data)
        self.callbacks = list(callbacks)
        self._options: dict[str, Any] = {
            "resume": resume,
            "overwrite": overwrite,
            "quiet": quiet,
            "silent": quiet,
        }

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.dir) / self.config.name

    @property
    def checkpoint(self) -> Path:
        """The best checkpoint by eval.best_metric; the last one where there was no evaluation. Raises ConfigError before there is
        one."""
        best = self.folder / "checkpoints" / "best"
        found = (
            best
            if best.exists()
            else max((self.folder / "checkpoints").glob("step_*"), default=None)
        )
        if found is None:
            raise ConfigError(
                f"expected a checkpoint in {best.parent}, found none; call fit() first"
            )
        return found

    def fit(self) -> dict[str, Any]:
        """Train to the end and return the last step's row of metrics. Raises mmrl.errors.MMRLError with what to do."""
        from mmrl.cli.run import run_training  # prints as `mmrl train` does

        with using(*self._object) if self._object else contextlib.nullcontext():
            return run_training(self.config, on_event=self._tell, **self._options)

    def report(self) -> Path:
        """Write RUN/report.html (curves, pictures, timelines) and return its path."""
        from mmrl.report import build_report

        return build_report(self.folder)

    def _tell(self, kind: str, payload: Any) -> None:
        for callback in self.callbacks:
            callback(kind, payload)


def evaluate(
    model: str | Path,
    *,
    data: Rows,
    task: str | type[Task] | Task | None = None,
    reward: Callable[..., Any] | None = None,
    samples: int = 0,
    limit: int | None = None,
    config: str | Path | RunConfig | Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
) -> Evaluation:
    """Answer and judge held-out data; `.results` holds means with 95 % intervals, `.predictions` every completion.

    Without `config` a checkpoint is evaluated with the settings that its run had: length limit, temperature, pixels, and the
    parameters of this task, over which `params` goes.

    Args:
        model: checkpoint of a run, or folder or hub name of a model.
        data: as Trainer's eval_data.
        task, reward, params, config: as Trainer's.
        samples: sampled completions per prompt (avg@k) beside the greedy one.
        limit: the first so many rows.
        out: folder for results.json, predictions.jsonl and submissions, which has no other evaluation; default: nothing is written.
        resume: go on with the same evaluation where it was cut off, in `out`.
    """
    from mmrl.data.sources import load_sources
    from mmrl.evaluation.places import evaluation_place
    from mmrl.evaluation.settings import taught_params
    from mmrl.policy.loading import load_policy

    _check_model(model)
    settings = _configured(model, config, None) if config is not None else _of_checkpoint(model)
    name, known = _named(task, reward, params)
    if name is None:
        raise ConfigError("expected a task or a reward to judge answers by, found neither")
    place = None
    if out is not None:
        again = "the same call with resume=True"
        place = evaluation_place(str(model), "", Path(out), resume=resume, again=again)
    with contextlib.ExitStack() as stack:
        if name.startswith(OFFERED):
            stack.enter_context(using(name, resolve_task(name)))
        rows = (
            place.folder
            if place is not None
            else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mmrl-rows-")))
        )
        # how the run's file was read says nothing of these rows
        taught = {k: v for k, v in taught_params(settings, name).items() if k != "reader"}
        known = {**taught, **known}
        path = stored(data, rows)
        source = DataSource(task=name, path=str(path), params=known, limit=limit)
        with _told_of_rows(path if path is not data and out is None else None):
            sources = load_sources(
                [source],
                on_error=settings.data.on_error,
                orientation=settings.data.image.orientation,
                where="data",
            )
        policy = load_policy(settings.model, settings.data, trainable=False)
        if place is None:
            return evaluate_model(policy, settings, sources, samples=samples)
        asked = asked_of_model(policy, settings, sources, samples)
        with place.begin({"": asked}) as progress:
            folder, part = progress.folder, progress.part("")
            found = evaluate_model(
                policy, settings, sources, samples=samples, folder=folder, part=part
            )
            progress.complete = not found.scorer_failed
            return found


@contextlib.contextmanager
def _told_of_rows(temporary: str | Path | None) -> Iterator[None]:
    """Errors of rows that were given in memory are about `data`, not about a file that is gone when they are read."""
    try:
        yield
    except DataError as error:
        if temporary is None:
            raise
        told = str(error).partition(" (all of them at once: ")[0]
        raise DataError(told.replace(str(temporary), "data")) from error


def _check_model(model: Any) -> None:
    """Raise ConfigError for what is no model, above all a configuration in its place."""
    if model is not None and not isinstance(model, (str, os.PathLike)):
        fix = (
            "give it as config=...; its model.path is the model then"
            if isinstance(model, (RunConfig, Mapping))
            else "give its path, model='...'"
        )
        raise ConfigError(
            f"model: expected a folder or hub name, found {type(model).__name__}; {fix}"
        )


def _configured(
    model: str | Path | None, config: Any, overrides: Mapping[str, Any] | None
) -> RunConfig:
    """A configuration of our own, to be changed at will; that of a robot run where it is one. Raises ConfigError.

    Only what was set is set: defaults that follow from other keys (those of GSPO) are made anew.
    """
    over = _tree({**(overrides or {}), **({} if model is None else {"model.path": str(model)})})
    if isinstance(config, (str, Path)):
        from mmrl.cli.run import is_embodied

        robot = is_embodied(Path(config))
        return load_config_as(
            _robots() if robot else RunConfig, config, keep=lambda tree: merge(tree, over)
        )
    if isinstance(config, RunConfig):
        return config_from(type(config), merge(config.given(), over))
    tree = merge(_tree(config or {}), over)
    return config_from(_robots() if "env" in tree else RunConfig, tree)


def _robots() -> type[RunConfig]:
    from mmrl.robotics.config import EmbodiedConfig

    return EmbodiedConfig


def _of_checkpoint(model: str | Path) -> RunConfig:
    """The settings that a checkpoint brings, as `mmrl eval` takes them; the defaults for a model that is none. Raises ConfigError
    for a run's folder."""
    if (Path(model) / "checkpoints").is_dir():
        raise ConfigError(
            f"expected a checkpoint or a model, found the folder of a run, {model}; give {model}/checkpoints/best, "
            "or a step_* next to it"
        )
    from mmrl.config.trust import checkpoint_settings
    from mmrl.policy.manifest import check_loadable

    check_loadable(str(model), lambda words: None)
    return checkpoint_settings(
        RunConfig, str(model), [], None, trust_code=False, say=lambda words: None
    )


def _tree(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """{"train.steps": 5, "optim": {"lr": 1e-5}} -> nested. Raises ConfigError where one key goes below another's value."""
    tree: dict[str, Any] = {}
    for name, value in dotted.items():
        node = tree
        *parents, leaf = name.split(".")
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(
                    f"the key '{name}' goes below '{part}', which another key sets to a value"
                )
        value = copy.deepcopy(dict(value) if isinstance(value, Mapping) else value)
        node[leaf] = merge(node[leaf], value) if leaf in node else value
    return renamed(tree, "the settings given")


def _named(
    task: Any, function: Callable[..., Any] | None, params: Mapping[str, Any] | None
) -> tuple[str | None, dict[str, Any]]:
    """(name of the task in a configuration, its parameters). Raises ConfigError."""
    if task is not None and function is not None:
        raise ConfigError("expected a task or a reward, found both; a task has its own reward")
    if function is not None:
        cls = _task_of(function, getattr(function, _SETTINGS, {}))
        from mmrl.tasks.function import version_of

        version = version_of(function)
        return offer(cls, cls.name), {**({"version": version} if version else {}), **(params or {})}
    if task is None or isinstance(task, str):
        if task is not None:
            resolve_task(task)
        return task, dict(params or {})
    cls, known = (task, {}) if isinstance(task, type) else (type(task), getattr(task, "params", {}))
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise ConfigError(
            f"expected a task's name, a mmrl.Task class or an instance of one, found {task!r}"
        )
    return offer(cls, cls.name or cls.__name__), {**known, **(params or {})}


def _task_of(function: Callable[..., Any], settings: Mapping[str, Any]) -> type[Task]:
    from mmrl.tasks.function import function_task

    return function_task(function, **settings)


def _add_data(
    config: RunConfig,
    named: tuple[str | None, dict[str, Any]],
    train: Rows | None,
    held_out: Rows | None,
) -> None:
    """Put the data that were given into the configuration. Raises ConfigError and DataError."""
    name, params = named
    if name is None and (train is not None or held_out is not None):
        raise ConfigError(
            "expected a task or a reward for the data, found neither: give task='grounding' (`mmrl tasks list` names "
            "them all), a mmrl.Task, or reward=function"
        )
    if name is not None and train is None and not config.data.train:
        raise ConfigError(
            "expected train_data, found none: give rows, a path, or data.train in config"
        )
    for key, data in (("train", train), ("eval", held_out)):
        if data is not None:
            sources = [
                DataSource(
                    task=str(name), path=str(stored(data, Path(config.dir), key)), params=params
                )
            ]
        elif name is not None:
            sources = [
                s.model_copy(update={"task": name, "params": {**s.params, **params}})
                for s in getattr(config.data, key)
            ]
        else:
            continue
        try:
            setattr(config.data, key, sources)
        except ValidationError as error:
            raise ConfigError("; ".join(item["msg"] for item in error.errors())) from error
