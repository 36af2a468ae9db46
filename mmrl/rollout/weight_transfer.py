"""Weights between a run and its rollout server without being made into files first: shared memory, or a broadcast.

    segment = Segment.make(bytes)                      # the run: a file of /dev/shm that only this user can open
    layout = segment.fill(group)                       # [{name, dtype, shape, offset}, ...]
    taken = Segment.open(name, size, nonce).take(layout, checksum)      # the server: copies, after the checksum has been compared

    channel = Channel("nccl", store, rank, timeout_s, device)  # or gloo: tensors go over it in the order of a layout

What is sent over HTTP is the layout alone. A segment is unlinked as soon as the server has opened it, so that it goes with the two
processes, however they end; that of a run killed between making it and the server's answer stays in /dev/shm as
mmrl-<32 digits> until somebody removes it. On another host, or in a container with a /dev/shm of its own, it is not found, and the
run sends weights in the bodies of its requests. Whether all arrived is judged behind the transfer, too: digests of everything that
vLLM holds.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import stat
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch

from mmrl.errors import RolloutError
from mmrl.rollout.vllm_wire import MalformedError

__all__ = ["Channel", "NoTransfer", "Segment", "ServerGone", "host_id", "layout_of"]

Layout = list[dict[str, Any]]

_FOLDER = "/dev/shm"
_NAME = re.compile(r"mmrl-[0-9a-f]{32}")
_ALIGNED = 64  # bytes
_HEAD = 64  # bytes before the first tensor, with the nonce
_DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.bfloat16, torch.float16)}


class NoTransfer(RolloutError):
    """This way of sending weights is not open between the two sides; another one may be."""


class ServerGone(RolloutError):
    """A rollout server does not answer, or was started again and has no weights: another one may."""


def host_id() -> str:
    """The running system, by the number that its kernel drew when it started; '' where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def layout_of(group: Sequence[tuple[str, torch.Tensor]]) -> tuple[Layout, int]:
    """Where each tensor lies behind the head, one tensor of two names once; and the bytes of all."""
    layout: Layout = []
    places: dict[int, int] = {}
    end = _HEAD
    for name, tensor in group:
        if id(tensor) not in places:
            places[id(tensor)] = end
            end += _padded(tensor.numel() * tensor.element_size())
        layout.append(
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "offset": places[id(tensor)],
            }
        )
    return layout, end


def _padded(size: int) -> int:
    """Bytes that a tensor has to itself; an empty one, too, has a place of its own."""
    return max(_ALIGNED, -(-size // _ALIGNED) * _ALIGNED)


def _bytes_of(layout: Any, limit: int) -> dict[int, tuple[torch.dtype, tuple[int, ...], int]]:
    """(type, shape, bytes) of each offset of a layout that came from elsewhere. Raises MalformedError beyond `limit` bytes."""
    found: dict[int, tuple[torch.dtype, tuple[int, ...], int]] = {}
    try:
        for each in layout:
            dtype, shape = _DTYPES[each["dtype"]], tuple(each["shape"])
            offset, count = each["offset"], 1
            for size in shape:
                if type(size) is not int or size < 0:
                    raise ValueError(f"size {size!r}")
                count *= size
            entry = (dtype, shape, count * dtype.itemsize)
            if type(each["name"]) is not str or type(offset) is not int:
                raise ValueError("name or offset")
            if offset < _HEAD or offset % _ALIGNED or found.setdefault(offset, entry) != entry:
                raise ValueError(f"offset {offset!r}")
        if found and (sum(e[2] for e in found.values()) > limit or _overlap(found, limit)):
            raise ValueError(f"more than {limit:,} bytes")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise MalformedError(
            f"expected the layout of weights within {limit:,} bytes, found something else ({error})"
        ) from error
    return found


def _overlap(found: dict[int, tuple[torch.dtype, tuple[int, ...], int]], limit: int) -> bool:
    ends = sorted((offset, offset + _padded(e[2])) for offset, e in found.items())
    starts = [start for start, _ in ends[1:]] + [limit]
    return any(end > start for (_, end), start in zip(ends, starts, strict=True))


def _checksum(bytes_N: torch.Tensor) -> int:
    """Sum of the 64-bit words, modulo 2^64: at the speed of memory, for what was written halfway or elsewhere."""
    return int(bytes_N.view(torch.int64).sum()) % 2**64


class Segment:
    """Bytes that two processes of one host see. `nonce` lies at its beginning: who finds it has the same segment."""

    def __init__(self, name: str, memory: mmap.mmap, nonce: str) -> None:
        self.name, self.nonce, self.size = name, nonce, len(memory)
        self._memory: mmap.mmap | None = memory
        self._bytes: torch.Tensor | None = torch.frombuffer(memory, dtype=torch.uint8)

    @staticmethod
    def make(size: int) -> Segment:
        """A new one with room for `size` bytes. Raises NoTransfer where there is no shared memory, or too little of it."""
        name, nonce = f"mmrl-{secrets.token_hex(16)}", secrets.token_hex(_HEAD // 2)
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        path = os.path.join(_FOLDER, name)
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
            try:
                os.posix_fallocate(handle, 0, size)  # else a full /dev/shm would end the process
                memory = mmap.mmap(handle, size)
            except OSError:
                os.unlink(path)
                raise
            finally:
                os.close(handle)
        except OSError as error:
            raise NoTransfer(f"no {size:,} bytes of shared memory in {_FOLDER}: {error}") from error
        memory[:_HEAD] = nonce.encode()
        return Segment(name, memory, nonce)

    @staticmethod
    def open(name: Any, size: Any, nonce: Any) -> Segment:
        """One that a run of the same user has made. Raises NoTransfer where it is not that one, MalformedError for other words."""
        if not (isinstance(name, str) and isinstance(nonce, str) and type(size) is int):
            raise MalformedError(
                "expected name, size and nonce of shared memory, found something else"
            )
        if not _NAME.fullmatch(name) or size < _HEAD:
            raise MalformedError(
                f"expected shared memory of a run, found {name[:80]!r} of {size} bytes"
            )
        try:
            handle = os.open(os.path.join(_FOLDER, name), os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise NoTransfer(f"the server cannot open the run's shared memory: {error}") from error
        try:
            about = os.fstat(handle)
            if (
                not stat.S_ISREG(about.st_mode)
                or about.st_uid != os.geteuid()
                or about.st_size < size
            ):
                raise NoTransfer("the run's shared memory is of another user or another size")
            memory = mmap.mmap(handle, size)
        except (OSError, ValueError) as error:
            raise NoTransfer(f"the server cannot map the run's shared memory: {error}") from error
        finally:
            os.close(handle)
        if memory[:_HEAD] != nonce.encode():
            memory.close()
            raise NoTransfer("the shared memory of that name is another host's")
        return Segment(name, memory, nonce)

    def unlink(self) -> None:
        """Take its name away: it lives on for those that have it open."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(_FOLDER, self.name))

    def close(self) -> None:
        """Let the memory go."""
        self._bytes = None
        memory, self._memory = self._memory, None
        if memory is not None:
            with contextlib.suppress(BufferError):  # a view is still somewhere: it goes with that
                memory.close()

    def fill(self, layout: Layout, group: Sequence[tuple[str, torch.Tensor]]) -> int:
        """Write the tensors of a layout; the checksum of them. From a GPU this is the copy to the host."""
        assert self._bytes is not None, "closed"
        end, done = _HEAD, set[int]()
        for place, (_, tensor) in zip(layout, group, strict=True):
            offset, size = place["offset"], tensor.numel() * tensor.element_size()
            end = max(end, offset + _padded(size))
            if offset not in done:
                done.add(offset)
                target = self._bytes[offset : offset + size].view(tensor.dtype)
                target.view(tensor.shape).copy_(tensor.detach())
        return _checksum(self._bytes[_HEAD:end])

    def take(self, layout: Any, checksum: Any, device: torch.device) -> dict[str, torch.Tensor]:
        """Copies of the tensors of a layout on `device`. Raises MalformedError, and RolloutError for bytes that are others."""
        assert self._bytes is not None, "closed"
        found = _bytes_of(layout, self.size)
        last = max(found, default=_HEAD)
        end = last + _padded(found[last][2]) if found else _HEAD
        # one copy of the piece: the run writes the next one into its place
        taken = self._bytes[_HEAD:end].clone()
        if _checksum(taken) != checksum:
            raise RolloutError(
                "the weights in shared memory are not those that the run wrote: the checksums differ; resume the run, or "
                "set engine.vllm.transfer: http"
            )
        tensors = {
            offset: taken[offset - _HEAD : offset - _HEAD + size].view(dtype).view(shape).to(device)
            for offset, (dtype, shape, size) in found.items()
        }
        return {each["name"]: tensors[each["offset"]] for each in layout}


class Channel:
    """Two processes that broadcast tensors: a run (rank 0) and its server (rank 1).

    torch's own groups, made without the default one of training, so that NCCL between GPUs and gloo between hosts are one code; the
    run's machine needs no vLLM. `device`: the GPU that tensors go from and to with NCCL, named since torch's current one belongs
    to a thread and is the first in every new one.
    """

    def __init__(
        self,
        kind: Literal["nccl", "gloo"],
        store: Any,
        rank: int,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        self.kind, self._store, self._rank = kind, store, rank
        self.device = device if kind == "nccl" else _CPU
        dist: Any = torch.distributed
        patience = timedelta(seconds=timeout_s)
        prefixed = dist.PrefixStore(f"mmrl-{kind}", store)
        if kind == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = patience
            self._group: Any = dist.ProcessGroupNCCL(prefixed, rank, 2, options)
        else:
            self._group = dist.ProcessGroupGloo(prefixed, rank, 2, patience)

    def announce(self, piece: str) -> None:
        """The server has room for this piece and takes it now."""
        self._store.set(f"ready/{piece}", "1")

    def announced(self, piece: str) -> bool:
        """Whether it has said so: before, a broadcast would wait for one that refused the piece."""
        return bool(self._store.check([f"ready/{piece}"]))

    def send(self, layout: Layout, group: Sequence[tuple[str, torch.Tensor]]) -> None:
        """The tensors of a layout, one of two names once. Returns when they may change again."""
        done: set[int] = set()
        for place, (_, tensor) in zip(layout, group, strict=True):
            if place["offset"] not in done:
                done.add(place["offset"])
                self._broadcast(tensor.detach().to(self.device).contiguous())
        self._finish()

    def take(self, layout: Any, limit: int, piece: str) -> dict[str, torch.Tensor]:
        """The tensors of a layout that came from a run, on this side's device. Raises MalformedError, before it is announced."""
        tensors: dict[int, torch.Tensor] = {}
        for offset, (dtype, shape, _) in _bytes_of(layout, limit).items():
            tensors[offset] = torch.empty(shape, dtype=dtype, device=self.device)
        # only now: a run that has been told to send waits until all is taken
        self.announce(piece)
        for tensor in tensors.values():
            self._broadcast(tensor)
        self._finish()
        return {each["name"]: tensors[each["offset"]] for each in layout}

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with self._current():
            self._group.broadcast([tensor], options).wait()

    def _finish(self) -> None:
        if self.kind == "nccl":
            torch.cuda.current_stream(self.device).synchronize()

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.kind == "nccl" else contextlib.nullcontext()

    def close(self) -> None:
        """Leave the group."""
        if self.kind == "nccl":
            self._group.abort()
        self._group = self._store = None


_CPU = torch.device("cpu")
