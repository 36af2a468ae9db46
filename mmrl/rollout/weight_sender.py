"""The run's side of giving weights to a rollout server: in pieces, by the fastest way that both sides have (engine.vllm.transfer).

    sender = WeightSender(client, "auto", timeout_s)
    for piece in pieces(weights, sync, base):
        held = sender.send(piece)

`auto`: NCCL where both sides compute on GPUs of their own, shared memory where they are on one host, else the bodies of requests.
A broadcast is not encrypted: where the server's address begins with https `auto` does not take it.
The first two cost a copy, the last makes the weights into a file and reads it again.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, Protocol

import torch

from mmrl.errors import ConfigError
from mmrl.rollout.vllm_wire import chunks, dump
from mmrl.rollout.weight_transfer import (
    Channel,
    NoTransfer,
    Segment,
    ServerGone,
    host_id,
    layout_of,
)

__all__ = ["Piece", "Post", "TransferKind", "WeightSender", "address_towards", "pieces"]

TransferKind = Literal["auto", "nccl", "gloo", "shared_memory", "http"]

_CHUNK_BYTES = 64 << 20
_POLL_S = 0.002
_GLANCE_S = 5.0  # for the server to say why a broadcast broke off
_log = logging.getLogger(__name__)


class Post(Protocol):
    """What a way of sending needs of a client: requests, and what the server says of itself."""

    url: str
    transfer: Any
    """The way that is open, kept between syncs; None: none yet."""

    def post(self, path: str, body: bytes) -> Any:
        """The server's answer. Raises RolloutError."""

    def health(self) -> dict[str, Any]:
        """What GET /health says."""

    def own_address(self) -> str:
        """The address of this side as the server reaches it."""


@dataclass(frozen=True)
class Piece:
    """Some of the weights of a sync. Several senders may send it; its body is made once, if at all."""

    document: dict[str, Any]
    group: list[tuple[str, torch.Tensor]]
    last: bool
    name: str
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @cached_property
    def layout(self) -> tuple[list[dict[str, Any]], int]:
        """See layout_of."""
        return layout_of(self.group)

    @cached_property
    def _body(self) -> bytes:
        names = [name for name, _ in self.group]
        return dump({**self.document, "names": names}, dict(self.group))

    def body(self) -> bytes:
        """With its tensors."""
        with self._lock:
            return self._body

    def head(self, **rest: Any) -> bytes:
        """Without them."""
        return dump({**self.document, "layout": self.layout[0], **rest}, {})


def pieces(weights: Iterable[tuple[str, torch.Tensor]], sync: str, base: str) -> Iterator[Piece]:
    """The weights of a sync, which lie on top of those of `base`."""
    for number, (group, last) in enumerate(chunks(weights, _CHUNK_BYTES)):
        document = {"sync": sync, "base": base, "first": number == 0, "last": last}
        yield Piece(document, group, last, f"{sync}/{number}")


class WeightSender:
    """Gives weights to one server, sync after sync."""

    def __init__(self, client: Post, kind: TransferKind, timeout_s: float) -> None:
        self._client, self._kind, self._timeout_s = client, kind, timeout_s

    def send(self, piece: Piece) -> list[dict[str, int]]:
        """What the server holds, after the last piece. Raises ServerGone, ConfigError for a way that is not open, and RolloutError
        for weights that the server does not take."""
        if self._client.transfer is None:
            self._client.transfer = self._open(piece)
            _log.info("weights go to %s by %s", self._client.url, self._client.transfer.kind)
        try:
            return self._client.transfer.send(self._client, piece)["held"]
        except BaseException:
            self.close()  # a broadcast that broke off cannot be gone on with
            raise
        finally:
            if piece.last and self._client.transfer is not None:
                self._client.transfer.rest()

    def close(self) -> None:
        """Forget the way: the next sync opens one."""
        found, self._client.transfer = self._client.transfer, None
        if found is not None:
            found.close()

    def _open(self, piece: Piece) -> Any:
        there, url = self._client.health(), self._client.url
        auto = self._kind == "auto"
        kinds: list[Any] = _fitting(there, piece.group, url) if auto else [self._kind]
        for kind in kinds:
            try:
                if kind == "http":
                    return _Http()
                if kind == "shared_memory":
                    _check_host(there)
                    return _Shared(only=not auto)
                return _Broadcast(kind, self._client, self._timeout_s, _gpu_of(piece.group))
            except NoTransfer as error:
                if not auto:
                    raise _refusal(kind, url, error) from error
                _log.warning("weights do not go to %s by %s: %s", url, kind, error)
        raise AssertionError("http is never refused")


def _refusal(kind: str, url: str, why: Exception) -> ConfigError:
    return ConfigError(
        f"engine.vllm.transfer {kind}: the rollout server {url} cannot be sent weights that way ({why}); "
        "set engine.vllm.transfer: auto"
    )


def _gpu_of(group: Sequence[tuple[str, torch.Tensor]]) -> torch.device:
    """Where the weights lie; the first GPU for weights of a CPU."""
    return next((t.device for _, t in group if t.device.type == "cuda"), torch.device("cuda", 0))


def _fitting(
    there: dict[str, Any], group: Sequence[tuple[str, torch.Tensor]], url: str
) -> list[Any]:
    """Ways to send in the order to try them."""
    cuda = [t.device for _, t in group if t.device.type == "cuda"]
    found: list[Any] = []
    plain = not url.startswith("https:")
    # NCCL refuses two processes on one GPU
    if plain and cuda and there.get("gpu") and there["gpu"] != _gpu_id(cuda[0]):
        found.append("nccl")
    if there.get("host") and there["host"] == host_id():
        found.append("shared_memory")
    return [*found, "http"]


def _gpu_id(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _check_host(there: dict[str, Any]) -> None:
    if not there.get("host") or there["host"] != host_id():
        raise NoTransfer("the server is on another host")


class _Http:
    """In the bodies of requests."""

    kind = "http"

    def send(self, client: Post, piece: Piece) -> Any:
        return client.post("/weights", piece.body())

    def rest(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""


class _Shared:
    """In a segment of shared memory, piece after piece in the same place; one of the size of a piece is all there is."""

    kind = "shared_memory"

    def __init__(self, *, only: bool) -> None:
        self._only = only  # whether there is no other way to fall back to
        self._segment: Segment | None = None
        self._plain: _Http | None = None  # where the server does not find segments

    def send(self, client: Post, piece: Piece) -> Any:
        layout, size = piece.layout
        if self._plain is None:
            try:
                segment = self._room(client, size)
            except NoTransfer as error:
                if self._only:
                    raise _refusal(self.kind, client.url, error) from error
                _log.warning("weights go in the bodies of requests from here on: %s", error)
                self._plain = _Http()
            else:
                checksum = segment.fill(layout, piece.group)
                return client.post("/weights", piece.head(segment=segment.name, checksum=checksum))
        return self._plain.send(client, piece)

    def _room(self, client: Post, size: int) -> Segment:
        if self._segment is None or self._segment.size < size:
            self.rest()
            segment = Segment.make(max(size, _CHUNK_BYTES))
            try:
                answer = client.post(
                    "/transfer",
                    dump(
                        {
                            "kind": "shared_memory",
                            "name": segment.name,
                            "size": segment.size,
                            "nonce": segment.nonce,
                        },
                        {},
                    ),
                )
            except BaseException:
                segment.close()
                raise
            finally:
                segment.unlink()
            if "refused" in answer:
                segment.close()
                raise NoTransfer(answer["refused"])
            self._segment = segment
        return self._segment

    def rest(self) -> None:
        """Between two syncs the memory is given back."""
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()

    close = rest


class _Broadcast:
    """Over a process group of this run's main process and the server."""

    def __init__(
        self,
        kind: Literal["nccl", "gloo"],
        client: Post,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        self.kind, self._channel, self._name = kind, None, secrets.token_hex(8)
        if kind == "nccl" and not (
            torch.cuda.is_available() and torch.distributed.is_nccl_available()
        ):
            raise NoTransfer("this side has no GPU, or a torch without NCCL")
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="weights")
        try:
            self._channel = self._joined(client, timeout_s, device)
        except BaseException:
            self.close()
            raise

    _channel: Channel | None

    def _joined(self, client: Post, timeout_s: float, device: torch.device) -> Channel:
        address, secret = client.own_address(), secrets.token_hex(32)
        served = _store_at(address, timeout_s)
        dist: Any = torch.distributed
        store = dist.PrefixStore(secret, served)
        document = {
            "kind": self.kind,
            "address": address,
            "port": served.port,
            "name": self._name,
            "secret": secret,
        }
        joining = self._calls.submit(client.post, "/transfer", dump(document, {}))
        while not joining.done() and not store.check(["joining"]):
            time.sleep(_POLL_S)
        if joining.done() and "refused" in joining.result():
            raise NoTransfer(joining.result()["refused"])
        try:
            channel = Channel(self.kind, store, 0, timeout_s, device)
        except RuntimeError as error:
            raise _broken(client.url, joining, error) from error
        joining.result()
        return channel

    def send(self, client: Post, piece: Piece) -> Any:
        assert self._channel is not None, "closed"
        layout, _ = piece.layout
        answer = self._calls.submit(
            client.post, "/weights", piece.head(channel=self._name, piece=piece.name)
        )
        while not answer.done() and not self._channel.announced(piece.name):
            time.sleep(_POLL_S)
        if not answer.done():
            try:
                self._channel.send(layout, piece.group)
            except RuntimeError as error:
                raise _broken(client.url, answer, error) from error
        return answer.result()

    def rest(self) -> None:
        """The group stays: to make one takes seconds."""

    def close(self) -> None:
        """Leave the group."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        self._calls.shutdown(wait=False)


def _store_at(address: str, timeout_s: float) -> Any:
    """A store that listens at this address alone, where torch's own would at all of the machine's. Raises NoTransfer."""
    dist: Any = torch.distributed
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as listening:
            port, handle = listening.getsockname()[1], listening.detach()
        return dist.TCPStore(
            address,
            port,
            2,
            True,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=handle,
        )
    except (OSError, RuntimeError) as error:
        raise NoTransfer(f"no port for a process group at {address}: {error}") from error


def _broken(url: str, answer: Future[Any], error: Exception) -> Exception:
    """What to raise for a broadcast that broke off: what the server says, or that it is gone."""
    with contextlib.suppress(TimeoutError):
        said = answer.exception(_GLANCE_S)
        if isinstance(said, Exception):
            return said
    return ServerGone(
        f"the broadcast of the weights to the rollout server {url} broke off ({error}); look at its log, start it "
        "again if it is gone, then resume the run"
    )


def address_towards(host: str, port: int) -> str:
    """The address of this machine that packets to another one leave from, of IPv4 or IPv6 as the other's is. Raises OSError."""
    found = socket.getaddrinfo(host, port or 80, type=socket.SOCK_DGRAM)
    for place, (family, kind, protocol, _, there) in enumerate(found):
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.connect(there)
                return str(sock.getsockname()[0])
        except OSError:
            if place == len(found) - 1:
                raise
    raise OSError(f"no address of {host}")
