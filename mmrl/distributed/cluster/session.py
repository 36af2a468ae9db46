"""A connection to a Ray cluster for the length of a run, and the places reserved in it.

    with Cluster(config.engine.ray, [Demand("simulators", 4, 1.0)]) as cluster:
        actor = cluster.start("simulators", 0, SimulatorHost, ...)

Without an address the cluster is one of this machine alone, started here and ended with the run, also by an error; it lets in
nobody without its own token (mmrl/distributed/cluster/access.py). A cluster of yours asks for what you set there. Actors find
the driver's code by its import path (PYTHONPATH of the job): a node on another machine needs mmrl, the run's tasks and what they
read (data, models) under the same paths, e.g. on a shared disk. On a cluster of yours set RAY_worker_niceness=0 before `ray start`:
else Ray's workers give way to every other process of their machine. Every actor is started once (max_restarts 0): whoever uses it
starts its successor, because only that one knows what was lost with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mmrl.config import RayConfig
from mmrl.distributed.cluster.access import forget_token, own_token, private_folder
from mmrl.distributed.cluster.placement import (
    ClusterError,
    Demand,
    Kind,
    Node,
    check,
    eligible,
    place_of,
)
from mmrl.errors import ConfigError, MissingExtraError, install_command

__all__ = ["Cluster", "check_address", "code_paths", "ending", "import_ray", "stop_if_broken"]

_LOG = logging.getLogger(__name__)

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
}
"""For a cluster of our own: it tells nobody, starts no worker process before somebody needs one, and its workers wait for no other
process of the machine (Ray's own niceness is 15: beside a busy trainer a twentieth of a core)."""


def import_ray() -> Any:
    """The ray package. Raises MissingExtraError."""
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise MissingExtraError(
            f"engine.workers ray needs the ray package: {install_command('ray')}, or set engine.workers: "
            f"local ({error})"
        ) from error
    return ray


def code_paths() -> list[str]:
    """Where this process imports from beside its Python environment: a checkout, the current folder, PYTHONPATH."""
    environment = tuple(
        os.path.join(os.path.realpath(root), "") for root in (sys.prefix, sys.base_prefix)
    )
    found = [os.path.realpath(entry) if entry else os.getcwd() for entry in sys.path]
    own = [p for p in found if not p.startswith(tuple(os.path.join(e, "lib") for e in environment))]
    return list(dict.fromkeys([os.getcwd(), *own]))


def ending(error: BaseException) -> str:
    """How a Ray actor ended, in words: Ray's message without its general advice."""
    text = str(error).split("Some common causes include")[0]
    kept = [
        line.strip()
        for line in text.splitlines()
        if not line.strip().startswith(("class_name:", "namespace:", "actor_id:"))
    ]
    return " ".join(line for line in kept if line)[:1500]


def stop_if_broken(error: BaseException, words: str) -> None:
    """Raise ClusterError if `error`, of a call to an actor, says that its __init__ raised: another one would raise it again."""
    if getattr(error, "actor_init_failed", False):
        said = str(error).strip()[-1500:]  # the end of a traceback is what was raised
        raise ClusterError(
            f"expected {words} to start on their nodes, found that one could not; none is started again. What its "
            f"process said: {said}\nEvery node needs the run's code, models and data under the same paths, and "
            "room for what one of them loads"
        ) from error


def check_address(address: str) -> None:
    """Say at once what Ray takes minutes to find out: that nothing listens at `address` (engine.ray.address). Raises ConfigError,
    and MissingExtraError without ray."""
    if "://" in address:
        raise ConfigError(
            f"engine.ray.address: expected host:port or auto, found {address}: through a Ray client the trainer "
            "is on no node of the cluster; start one here (`ray start --address=HOST:PORT`), set address: auto"
        )
    found = _meant_by_auto() if address == "auto" else address
    host, _, port = found.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"engine.ray.address: expected host:port or auto, found {found!r}")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5.0):
            return
    except (OSError, OverflowError) as error:  # the latter: no such port
        where = address if found == address else f"{address}, which means {found}"
        raise ConfigError(
            f"expected a Ray cluster at engine.ray.address {where}, found none: {error}. Start it there with "
            "`ray start --head` (it prints its address), or leave the address out: this machine alone"
        ) from error


def _meant_by_auto() -> str:
    """The address that Ray takes auto for: RAY_ADDRESS, else that of a cluster of this machine. Raises ConfigError for none."""
    import_ray()
    from ray._private.services import (  # there is no public way
        canonicalize_bootstrap_address_or_die,
    )

    try:
        return str(canonicalize_bootstrap_address_or_die("auto"))
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"expected a Ray cluster of this machine for engine.ray.address auto, found none: {error} Start one with "
            "`ray start --head`, or join one with `ray start --address=HOST:PORT`"
        ) from error


@contextlib.contextmanager
def _kept_signals(environment: dict[str, str]) -> Iterator[None]:
    """Ray replaces the handler of SIGTERM, which is not its to decide; and its settings are read from the environment."""
    main = threading.current_thread() is threading.main_thread()
    before = {name: os.environ.get(name) for name in environment}
    handler = signal.getsignal(signal.SIGTERM) if main else None
    os.environ.update({name: value for name, value in environment.items() if before[name] is None})
    try:
        yield
    finally:
        if main and handler is not None:
            signal.signal(signal.SIGTERM, handler)
        for name, value in before.items():
            if value is None:
                del os.environ[name]


class Cluster:
    """Ray for one run: connects, checks `demands` against what the nodes have, reserves their places, ends what it started.

    `restarts` counts by kind the actors started in place of lost ones. `processes`: of the run on this node; each makes a Cluster
    with the same demands, and all have to fit. Raises MissingExtraError, ConfigError (no cluster at the address, no node or room
    for the placement, not granted within engine.ray.start_s) and, later, ClusterError.
    """

    def __init__(self, config: RayConfig, demands: Sequence[Demand], processes: int = 1) -> None:
        self.config, self.demands, self._processes = (
            config,
            {d.kind: d for d in demands if d.count},
            processes,
        )
        self.restarts: Counter[str] = Counter()
        self.ray = import_ray()
        self._groups: dict[str, Any] = {}
        self._connected = self._open = False
        # of a cluster of our own, and what holds it
        self._folder: Path | None = None
        self._lock = -1
        self._seen: dict[str, Node] = {}

    def __enter__(self) -> Cluster:
        try:
            self._connect()
            self._open = True
            self._here = self.ray.get_runtime_context().get_node_id()
            nodes = self.nodes()
            check(self.config.placement, list(self.demands.values()), nodes, self._processes)
            self._reserve(nodes)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # connection

    @property
    def open(self) -> bool:
        """Whether actors can be called; without a connection Ray would start a cluster for the call."""
        return self._open and bool(self.ray.is_initialized())

    def _connect(self) -> None:
        address = self.config.address
        if self.ray.is_initialized():  # by whoever calls us: theirs to end
            found = self.ray.get_runtime_context().gcs_address
            if address not in (None, "auto", found):
                raise ConfigError(
                    f"engine.ray.address: expected the cluster that this process is connected to, {found}, found "
                    f"{address}; leave it out, or call ray.shutdown() first"
                )
            return
        variables = {"PYTHONPATH": os.pathsep.join(code_paths()), **self.config.environment}
        options: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "include_dashboard": False,
            "runtime_env": {"env_vars": variables},
        }
        if address is None:
            self._folder, self._lock = private_folder()
            options |= {
                "address": "local",
                "num_cpus": self.config.cpus,
                "_temp_dir": str(self._folder / "r"),
            }
            with own_token(self._folder), _kept_signals(_QUIET):
                self._init(options, "on this machine")
        else:
            check_address(address)
            # a driver that still demands an earlier cluster's token refuses the calls of one that has none
            forget_token()
            with _kept_signals({}):
                self._init(options | {"address": address}, f"at engine.ray.address {address}")
        self._connected = True

    def _init(self, options: dict[str, Any], where: str) -> None:
        try:
            self.ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            self.ray.shutdown()
            raise ConfigError(
                f"expected a Ray cluster {where}, found that Ray cannot start or join it: {error}. `ray status` "
                "shows whether one runs; every node needs the same versions of Python and ray, and one that asks for a "
                "token needs RAY_AUTH_MODE=token and the token here, too"
            ) from error

    def nodes(self) -> list[Node]:
        """Nodes that are alive, the trainer's first."""
        found = [
            Node(
                n["NodeID"],
                n["NodeManagerAddress"],
                n["Resources"].get("CPU", 0.0),
                n["Resources"].get("GPU", 0.0),
                n["NodeID"] == self._here,
            )
            for n in self.ray.nodes()
            if n["Alive"]
        ]
        self._seen.update({node.id: node for node in found})
        return sorted(found, key=lambda n: not n.here)

    # places

    def _reserve(self, nodes: Sequence[Node]) -> None:
        from ray.util.placement_group import placement_group

        for kind, demand in self.demands.items():
            place = place_of(self.config.placement, kind)
            bundle = {"CPU": demand.cpus} | ({"GPU": demand.gpus} if demand.gpus else {})
            wanted = {"here": self._here, "elsewhere": f"!{self._here}"}.get(place)
            labels = None if wanted is None else [{"ray.io/node-id": wanted}] * demand.count
            group = self._groups[kind] = placement_group(
                [bundle] * demand.count,
                strategy="PACK" if place == "here" else "SPREAD",
                bundle_label_selector=labels,
            )
            if not group.wait(self.config.start_s):
                free = self.ray.available_resources()
                raise ConfigError(
                    f"engine.ray: expected {demand.count} {demand.words} of {demand.size()} to be granted within start_s = "
                    f"{self.config.start_s:g} s, found the cluster ({', '.join(map(str, nodes))}) with {free.get('CPU', 0.0):g} "
                    f"CPUs and {free.get('GPU', 0.0):g} GPUs free: others use it; wait for them, or ask for less"
                )

    def check(self, kind: Kind) -> None:
        """Raise ClusterError when no node is left that workers of this kind may run on."""
        nodes = self.nodes()
        place = place_of(self.config.placement, kind)
        if eligible(place, nodes):
            return
        alive = {n.id for n in nodes}
        lost = [str(n) for n in self._seen.values() if n.id not in alive]
        raise ClusterError(
            f"expected a node for the {self.demands[kind].words} (engine.ray.placement {self.config.placement}), "
            f"found none left: lost {', '.join(lost)}. Start a node again and resume, or change the placement"
        )

    def start(self, kind: Kind, index: int, cls: type, *args: Any) -> Any:
        """An actor of `cls` in place `index` of its kind; returns at once. Raises ClusterError when no node is left for it."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.check(kind)
        demand = self.demands[kind]
        where = PlacementGroupSchedulingStrategy(
            self._groups[kind], placement_group_bundle_index=index
        )
        return (
            self.ray.remote(cls)
            .options(
                num_cpus=demand.cpus,
                num_gpus=demand.gpus,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=where,
            )
            .remote(*args)
        )

    def count_restart(self, kind: Kind, how: str) -> None:
        """An actor of this kind is about to be replaced. Raises ClusterError when engine.ray.restarts are used up."""
        self.restarts[kind] += 1
        if self.restarts[kind] > self.config.restarts:
            raise ClusterError(
                f"expected at most {self.config.restarts} {self.demands[kind].words} to be lost (engine.ray."
                f"restarts), found one more. The last: {how}"
            )
        _LOG.warning(
            "one of the %s was lost, another one is started (%d of engine.ray.restarts %d): %s",
            self.demands[kind].words,
            self.restarts[kind],
            self.config.restarts,
            how,
        )

    def end(self, actor: Any) -> None:
        """End an actor by force, if it still runs."""
        if self.open:
            self.ray.kill(actor, no_restart=True)

    def close(self) -> None:
        """Give the places back; end the connection, and the cluster if it is our own. May be called more than once."""
        if self.open:
            from ray.util.placement_group import remove_placement_group

            for group in self._groups.values():
                remove_placement_group(group)
        self._groups.clear()
        self._open = False
        if self._connected:
            self._connected = False
            self.ray.shutdown()
        if self._folder is not None:
            forget_token()
            # a process that was told to end may still write its log
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder = None
