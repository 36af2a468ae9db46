"""The rollout server's side of getting weights: in a request's body, in shared memory, or by a broadcast.

    transfers = Transfers(limit)
    transfers.open({"kind": "shared_memory", "name": ..., "size": ..., "nonce": ...})
    named = transfers.piece(document, tensors)       # [(name, tensor), ...] for vLLM

A server belongs to one run: it has one way open, and a new one ends the one before.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from mmrl.rollout.vllm_wire import MalformedError
from mmrl.rollout.weight_transfer import Channel, NoTransfer, Segment

__all__ = ["Transfers", "gpu_id"]

_JOIN_S = 15.0  # to reach the run's port: behind a firewall this is how long it takes to say so
_PATIENCE_S = 600.0  # for the run to join a group and to send a piece


def gpu_id() -> str:
    """Of the GPU that vLLM computes on; '' on a CPU."""
    return str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else ""


class Transfers:
    """See the module. For one thread at a time. `limit`: bytes of a piece."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: dict[str, Segment | Channel] = {}

    def open(self, document: Any) -> dict[str, str]:
        """{} or {"refused": why}. Raises MalformedError for other words."""
        self.close()
        try:
            if document.get("kind") == "shared_memory":
                found = Segment.open(*(document.get(k) for k in ("name", "size", "nonce")))
                self._open[found.name] = found
            else:
                self._join(document)
        except NoTransfer as error:
            return {"refused": str(error)}
        return {}

    def _join(self, document: Any) -> None:
        kind, port = document.get("kind"), document.get("port")
        name, address, secret = words = [document.get(k) for k in ("name", "address", "secret")]
        if (
            kind not in ("nccl", "gloo")
            or not all(isinstance(word, str) and word for word in words)
            or type(port) is not int
        ):
            raise MalformedError(
                "expected kind shared_memory, nccl or gloo with the name, address, port and secret of a run, found something else"
            )
        if kind == "nccl" and not torch.cuda.is_available():
            raise NoTransfer("the server has no GPU")
        try:
            dist: Any = torch.distributed
            reached = dist.TCPStore(
                address, port, 2, False, timedelta(seconds=_JOIN_S), wait_for_workers=False
            )
            reached.set_timeout(timedelta(seconds=_PATIENCE_S))
            store = dist.PrefixStore(secret, reached)
            store.set("joining", "1")
            self._open[name] = Channel(kind, store, 1, _PATIENCE_S, torch.device("cuda", 0))
        except RuntimeError as error:
            raise NoTransfer(f"the server cannot join {address}:{port}: {error}") from error

    def piece(
        self, document: Any, tensors: dict[str, torch.Tensor]
    ) -> list[tuple[str, torch.Tensor]]:
        """The tensors that a request is about, under vLLM's names. Raises KeyError for names that did not come, MalformedError,
        and RolloutError for bytes that are not those of the run."""
        if "layout" not in document:
            return [(name, tensors[name]) for name in document["names"]]
        way = self._open.get(str(document.get("segment", document.get("channel"))))
        if way is None:
            raise MalformedError("expected weights by a way that is open, found one that is not")
        layout = document["layout"]
        if isinstance(way, Segment):
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            found = way.take(layout, document.get("checksum"), device)
        else:
            found = way.take(layout, self._limit, str(document.get("piece")))
        if document["last"] and isinstance(way, Segment):
            self.close()  # the run gives its memory back, too
        return [(each["name"], found[each["name"]]) for each in layout]

    def close(self) -> None:
        """End what is open."""
        for way in self._open.values():
            way.close()
        self._open.clear()
