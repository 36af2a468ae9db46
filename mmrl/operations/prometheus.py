"""Metrics for Prometheus: GET http://HOST:PORT/metrics while a run is going (config: operations.metrics_port).

    mmrl_train_reward_mean{key="train/reward/mean",rank="0",run="grounding"} 0.61      every number of the last step's row
    mmrl_steps_total 12.0    mmrl_alarms_total{name="logprob_gap",...} 1.0    mmrl_checkpoints_total    mmrl_evaluations_total
    mmrl_up 1.0              mmrl_total_steps    mmrl_last_step_timestamp_seconds (alert when it stops moving)

mmrl_alarms_total exists at 0 for every alarm there is (ALARMS): increase(mmrl_alarms_total[1h]) > 0 sees the first one too.

Characters that Prometheus does not allow in a name become _; the label `key` is the name as in metrics.jsonl.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mmrl.config import OperationsConfig
from mmrl.diagnostics.diagnosis import DIAGNOSES
from mmrl.errors import ConfigError, MissingExtraError, install_command
from mmrl.files import printable

__all__ = ["ALARMS", "RunCollector", "check_metrics_port", "metric_name", "metrics_endpoint"]

Listener = Callable[[str, Any], None]
ALARMS = (
    "non_finite",
    "entropy_collapse",
    "reward_stuck",
    "logprob_gap",
    "prompts_failed",
    "task_failed",
    "checkpoint_failed",
    "checkpoint_damaged",
    "weight_sync",
    "never_trained",
    *DIAGNOSES,
)
"""The names of mmrl.training.alarms."""
_LABELS = ("run", "rank")


def metric_name(key: str) -> str:
    """The name of a metric of a step's row: mmrl_ and the key, with _ for what Prometheus does not allow."""
    return "mmrl_" + re.sub(r"[^a-zA-Z0-9_]+", "_", key).strip("_")


class RunCollector:
    """What a scrape is told. Fed with a trainer's events by its thread, asked by the server's threads."""

    def __init__(self, run: str, rank: int) -> None:
        self.labels = (printable(run), str(rank))
        self._lock = threading.Lock()
        self._row: dict[str, float] = {}
        self._counts: Counter[str] = Counter({"step": 0, "checkpoint": 0, "eval": 0})
        self._alarms: Counter[str] = Counter(dict.fromkeys(ALARMS, 0))
        self._total = 0
        self._last = time.time()

    def hear(self, kind: str, payload: Any) -> None:
        """Take in an event of mmrl.training.trainer.Trainer."""
        with self._lock:
            if kind == "start":
                self._total, self._row["step"] = (
                    payload["config"].train.steps,
                    float(payload["step"]),
                )
            elif kind == "step":
                self._row = {k: float(v) for k, v in payload.items() if isinstance(v, (int, float))}
                self._last = time.time()
            elif kind == "alarm":
                self._alarms[payload.name] += 1
            if kind in self._counts:
                self._counts[kind] += 1

    def collect(self) -> Iterator[Any]:
        """The families of a scrape (the protocol of prometheus_client's collectors)."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            row, counts, alarms = dict(self._row), dict(self._counts), dict(self._alarms)
            total, last = self._total, self._last
        families: dict[str, Any] = {}
        for key, value in row.items():
            key, name = printable(key), metric_name(key)
            if name not in families:
                families[name] = GaugeMetricFamily(
                    name, f"{key} of the last step", labels=("key", *_LABELS)
                )
            families[name].add_metric((key, *self.labels), value)
        yield from families.values()
        for name, text, value in (
            ("mmrl_up", "1 while the run is going", 1.0),
            ("mmrl_total_steps", "train.steps", float(total)),
            (
                "mmrl_last_step_timestamp_seconds",
                "when the last step was written, or the run began",
                last,
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric(self.labels, value)
            yield gauge
        for kind, name in (
            ("step", "mmrl_steps"),
            ("checkpoint", "mmrl_checkpoints"),
            ("eval", "mmrl_evaluations"),
        ):
            counter = CounterMetricFamily(
                name, f"{name.removeprefix('mmrl_')} of this process", labels=_LABELS
            )
            counter.add_metric(self.labels, counts[kind])
            yield counter
        counter = CounterMetricFamily(
            "mmrl_alarms", "alarms of this process, by name", labels=("name", *_LABELS)
        )
        for name, count in alarms.items():
            counter.add_metric((name, *self.labels), count)
        yield counter


def check_metrics_port(settings: OperationsConfig) -> None:
    """Raise ConfigError where `metrics_endpoint` could not listen: the port is taken, or the address is none of this machine."""
    if not settings.metrics_port:
        return  # none, or a free one
    try:
        found = socket.getaddrinfo(
            settings.metrics_host, settings.metrics_port, type=socket.SOCK_STREAM
        )
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
            # as the endpoint does: connections of an ended run that are still closing take no port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[0][4])
            probe.listen(1)
    except OSError as error:
        raise _taken(settings, error) from error


def _taken(settings: OperationsConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"expected to serve metrics at {settings.metrics_host}:{settings.metrics_port}, found that this cannot be done "
        f"({error}); choose another operations.metrics_port (0 takes a free one), or null for none"
    )


@contextmanager
def metrics_endpoint(
    settings: OperationsConfig, run: str, rank: int, listener: Listener
) -> Iterator[Listener]:
    """Serve metrics while it is open; yields the listener to tell events to, which passes them on to `listener`.

    Raises MissingExtraError without prometheus_client, ConfigError when the port is taken.
    """
    if settings.metrics_port is None:
        yield listener
        return
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise MissingExtraError(
            f"operations.metrics_port needs prometheus_client: {install_command('metrics')}"
        ) from error
    collector, registry = RunCollector(run, rank), CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(settings.metrics_port, settings.metrics_host, registry)
    except OSError as error:
        raise _taken(settings, error) from error
    address = f"metrics: http://{settings.metrics_host}:{server.server_port}/metrics"

    def hear(kind: str, payload: Any) -> None:
        collector.hear(kind, payload)
        if kind == "start" and isinstance(payload, Mapping):
            payload = {**payload, "notes": [*payload.get("notes", ()), address]}
        listener(kind, payload)

    try:
        yield hear
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
