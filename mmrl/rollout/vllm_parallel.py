"""One vLLM engine over several processes of a rollout server, for a model that is too large for one GPU: tensor parallelism.

    with processes(config, overrides, memory, size) as rank:      # the server's own process is 0
        backend = VLLMBackend(VLLMSettings(..., tensor_parallel=size))
        leader = Leader(backend)             # rank 0: answers requests
        follow(backend)                      # the others: do what it does, until it closes

Every process holds a whole vLLM with a part of each matrix (vLLM's external_launcher, as torchrun starts it, and as TRL does): they
are given the same prompts in the same order, draw the same tokens, and meet in the middle of every layer. What the leader is asked
goes to the others before it begins, tensor by tensor where it is weights, of which each keeps its part.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mmrl.errors import MMRLError, RolloutError
from mmrl.rollout.vllm_backend import VLLMBackend, Written, import_vllm
from mmrl.rollout.vllm_inputs import WirePrompt, WireSampling

__all__ = ["Leader", "follow", "processes"]

_RANK = "MMRL_ROLLOUT_RANK"


@contextlib.contextmanager
def processes(arguments: Sequence[str], size: int) -> Iterator[int]:
    """This process's number among `size`. Number 0 starts the others, each as `mmrl` with these arguments, and ends with them: one
    that is lost takes the engine with it."""
    rank = int(os.environ.get(_RANK, "0"))
    if size == 1 or rank:
        _name_memory(size)
        yield rank
        return
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update({**shared, "RANK": "0", "LOCAL_RANK": "0"})
    _name_memory(size)
    command = [sys.executable, "-m", "mmrl.cli.main", *arguments]
    others = [
        subprocess.Popen(
            command,
            env={**os.environ, "RANK": str(n), "LOCAL_RANK": str(n), _RANK: str(n)},
        )
        for n in range(1, size)
    ]
    ending = threading.Event()

    def watch(other: subprocess.Popen[bytes]) -> None:
        status = other.wait()
        if not ending.is_set():
            print(
                f"process {others.index(other) + 1} of {size} of the engine ended with status {status}: the server ends, too",
                file=sys.stderr,
                flush=True,
            )
            for each in others:
                each.kill()
            for file in Path("/dev/shm").glob(f"mmrl-{port}-*"):  # what vLLM leaves behind
                file.unlink(missing_ok=True)
            os._exit(1)

    for other in others:
        threading.Thread(target=watch, args=(other,), daemon=True).start()
    try:
        yield rank
    finally:
        ending.set()
        for other in others:
            with contextlib.suppress(subprocess.TimeoutExpired):
                other.wait(30)
            other.kill()


def _name_memory(size: int) -> None:
    """Give the shared memory that a vLLM built for the CPU reduces in a name of this engine's: left to itself every engine that is
    started so takes the same one, also one that was killed."""
    if size == 1 or torch.cuda.is_available():
        return
    import_vllm()
    found: Any = importlib.import_module("vllm.distributed.device_communicators.cpu_communicator")
    usual = found._CPUSHMDistributed.make_group_name
    found._CPUSHMDistributed.make_group_name = staticmethod(
        lambda communicator: f"/mmrl-{os.environ['MASTER_PORT']}-{usual(communicator).lstrip('/-')}"
    )


def _group() -> Any:
    return importlib.import_module("vllm.distributed.parallel_state").get_tp_group()


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU


class Leader:
    """A VLLMBackend that tells the other processes what it is asked."""

    def __init__(self, backend: VLLMBackend) -> None:
        self.backend, self.settings = backend, backend.settings

    def generate(self, asked: Sequence[tuple[WirePrompt, WireSampling]]) -> list[list[Written]]:
        """See VLLMBackend.generate."""
        _group().broadcast_object(("generate", list(asked)))
        return self.backend.generate(asked)

    def score(self, asked: Sequence[tuple[WirePrompt, Sequence[int]]]) -> list[list[float]]:
        """See VLLMBackend.score."""
        _group().broadcast_object(("score", list(asked)))
        return self.backend.score(asked)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[dict[str, int]]:
        """See VLLMBackend.load."""
        _group().broadcast_object(("load", None))
        return self.backend.load(self._told(weights))

    def _told(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        group, ended = _group(), "broken off"
        try:
            for name, tensor in weights:
                here = tensor.to(_device()).contiguous()
                group.broadcast_object((name, here.dtype, tuple(here.shape)))
                group.broadcast(here)
                yield name, here
            ended = ""
        finally:
            group.broadcast_object(ended)

    def close(self) -> None:
        """See VLLMBackend.close."""
        _group().broadcast_object(("close", None))
        self.backend.close()


def follow(backend: VLLMBackend) -> None:
    """Do what the leader is asked, until it closes. What fails here fails there, too, and is told by it."""
    while True:
        what, asked = _group().broadcast_object()
        if what == "close":
            backend.close()
            return
        with contextlib.suppress(MMRLError):
            if what == "load":
                backend.load(_heard())
            else:
                getattr(backend, what)(asked)


def _heard() -> Iterator[tuple[str, torch.Tensor]]:
    group = _group()
    while not isinstance(about := group.broadcast_object(), str):
        name, dtype, shape = about
        yield name, group.broadcast(torch.empty(shape, dtype=dtype, device=_device()))
    if about:
        raise RolloutError(f"the weights were {about} by the leader")


_CPU = torch.device("cpu")
