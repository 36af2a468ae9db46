"""One cache entry: a safetensors file whose header also names its key, its schema and a checksum, read as a memory map.

The checksum (XXH3, 128 bits) covers the header and the data, so a flipped bit in a shape or in the metadata is found too.
Any safetensors library can read the files. Reading copies nothing: each tensor is a view of a private map of the file, in
which a write changes this process's memory only, never the file.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import resource
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import xxhash

from mmrl.errors import CacheError, ConfigError
from mmrl.video.file_identity import canonical_json

if TYPE_CHECKING:
    import torch

__all__ = [
    "SCHEMA",
    "DamagedError",
    "Entry",
    "Packed",
    "load",
    "map_limit",
    "pack",
    "read_header",
    "write",
]

SCHEMA = 1
_ALIGN = 64
_LONGEST_HEADER = 16 << 20
_NAMES = {  # safetensors' name of each torch dtype
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "F32": "float32",
    "I32": "int32",
    "U32": "uint32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I16": "int16",
    "U16": "uint16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_open_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class DamagedError(Exception):
    """Bytes that are not an intact entry of this schema and key; the store removes such a file and builds it again."""


class Entry:
    """Tensors of one key with their metadata. `cached` is false when they could not be written and live in memory only.

    The file stays in use (never evicted) as long as the entry or one of its tensors lives; `close()` lets go of the
    entry's own. Never write to the tensors: other users of the same entry would not see it, and a later reader neither.
    Between processes send the key, not the entry.
    """

    def __init__(
        self,
        key: str,
        tensors: Mapping[str, torch.Tensor],
        meta: Mapping[str, Any],
        digest: str,
        nbytes: int,
        *,
        cached: bool = True,
    ) -> None:
        self.key, self.meta, self.digest, self.nbytes, self.cached = (
            key,
            MappingProxyType(dict(meta)),
            digest,
            nbytes,
            cached,
        )
        self._tensors: Mapping[str, torch.Tensor] | None = MappingProxyType(dict(tensors))

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Name -> tensor, a map of the file; CacheError after close()."""
        if self._tensors is None:
            raise CacheError(
                f"expected an open entry, found that {self.key} was closed; take tensors out before close()"
            )
        return self._tensors

    def close(self) -> None:
        """Let go of the tensors; the file's lock goes with the last of them. May be called twice."""
        self._tensors = None

    def __enter__(self) -> Entry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        shapes = {k: tuple(v.shape) for k, v in (self._tensors or {}).items()}
        return f"Entry({self.key}, {shapes}, {self.nbytes} bytes{'' if self.cached else ', not cached'})"

    def __reduce__(self) -> tuple:
        raise TypeError(
            "an Entry maps a file of this machine; send entry.key and call get() in the other process"
        )


@dataclass(frozen=True)
class Packed:
    """A file before it is written: `head` (length, header, padding), then the bytes of the tensors in this order."""

    key: str
    head: bytes
    blocks: tuple[memoryview, ...]
    digest: str
    tensors: Mapping[str, torch.Tensor]
    meta: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return len(self.head) + sum(block.nbytes for block in self.blocks)


def _plain(name: str, tensor: Any) -> torch.Tensor:
    import torch

    if type(name) is not str or not name or name == "__metadata__":
        raise ConfigError(f"expected a name of a tensor, found {name!r}")
    if (
        not isinstance(tensor, torch.Tensor)
        or tensor.layout != torch.strided
        or tensor.is_quantized
    ):
        kind = (
            type(tensor).__name__
            if not isinstance(tensor, torch.Tensor)
            else f"a {tensor.layout} tensor"
        )
        raise ConfigError(
            f"tensor '{name}': expected a dense torch.Tensor, found {kind}; convert it with torch.as_tensor() "
            "or .to_dense()"
        )
    if str(tensor.dtype).removeprefix("torch.") not in _NAMES.values():
        raise ConfigError(
            f"tensor '{name}': expected one of {', '.join(sorted(_NAMES.values()))}, found {tensor.dtype}"
        )
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _canonical(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def pack(key: str, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> Packed:
    """Header and blocks for `tensors` (any device, made contiguous on the CPU). Raises ConfigError for what cannot be kept."""
    if not tensors:
        raise ConfigError(f"entry {key}: expected at least one tensor, found none")
    plain = {name: _plain(name, tensor) for name, tensor in tensors.items()}
    order = sorted(plain, key=lambda name: (-plain[name].element_size(), name))
    codes = {value: code for code, value in _NAMES.items()}
    text = canonical_json({"key": key, "meta": dict(meta), "schema": SCHEMA}, "meta")
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "mmrl": text}}
    blocks, at = [], 0
    for name in order:
        block = _bytes_of(plain[name])
        header[name] = {
            "dtype": codes[str(plain[name].dtype).removeprefix("torch.")],
            "shape": list(plain[name].shape),
            "data_offsets": [at, at + block.nbytes],
        }
        blocks.append(block)
        at += block.nbytes
    check = xxhash.xxh3_128(_canonical(header))
    for block in blocks:
        check.update(block)
    header["__metadata__"]["digest"] = check.hexdigest()
    body = _canonical(header)
    body += b" " * (-(len(body) + 8) % _ALIGN)
    if len(body) > _LONGEST_HEADER:
        raise ConfigError(
            f"entry {key}: expected metadata of less than {_LONGEST_HEADER >> 20} MiB, found {len(body) >> 20} MiB"
        )
    return Packed(
        key,
        len(body).to_bytes(8, "little") + body,
        tuple(blocks),
        check.hexdigest(),
        plain,
        json.loads(text)["meta"],
    )


def write(fd: int, packed: Packed) -> None:
    """Write the whole file to `fd`, an empty file; short writes are continued."""
    for block in (memoryview(packed.head), *packed.blocks):
        done = 0
        while done < block.nbytes:
            done += os.write(fd, block[done:])


def read_header(fd: int, size: int) -> tuple[dict[str, Any], int]:
    """The header and where the data begin. Raises DamagedError unless it is one that `pack` could have written."""
    raw = os.pread(fd, 8, 0)
    length = int.from_bytes(raw, "little")
    if len(raw) < 8 or not 2 <= length <= min(_LONGEST_HEADER, size - 8):
        raise DamagedError("no header of a plausible length")
    try:
        header = json.loads(os.pread(fd, length, 8))
        parsed = json.loads(header["__metadata__"]["mmrl"])
        schema = parsed["schema"]
        if schema != SCHEMA or type(schema) is not int:
            raise DamagedError(f"schema {schema!r}, expected {SCHEMA}")
        if (
            type(header["__metadata__"]["digest"]) is not str
            or type(parsed["meta"]) is not dict
            or set(parsed) != {"key", "meta", "schema"}
        ):
            raise DamagedError("metadata of another form")
        header["__metadata__"]["parsed"] = parsed
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise DamagedError(f"the header cannot be read ({type(error).__name__})") from None
    return header, 8 + length


def _layout(
    header: Mapping[str, Any], data_bytes: int
) -> Iterator[tuple[str, Any, tuple[int, ...], int]]:
    """(name, dtype, shape, offset) of each tensor; DamagedError unless they fill the data without gap or overlap."""
    import torch

    at = 0
    try:
        items = sorted(
            ((k, v) for k, v in header.items() if k != "__metadata__"),
            key=lambda kv: kv[1]["data_offsets"],
        )
        for name, facts in items:
            dtype, shape, (start, end) = (
                getattr(torch, _NAMES[facts["dtype"]]),
                facts["shape"],
                facts["data_offsets"],
            )
            if any(type(n) is not int or n < 0 for n in (*shape, start, end)):
                raise DamagedError(f"tensor '{name}' has an impossible shape")
            if (
                start != at
                or end - start != math.prod(shape) * dtype.itemsize
                or start % dtype.itemsize
            ):
                raise DamagedError(f"tensor '{name}' lies outside its place")
            yield name, dtype, tuple(shape), start
            at = end
    except (LookupError, TypeError, ValueError) as error:
        raise DamagedError(f"the header cannot be read ({type(error).__name__})") from None
    if at != data_bytes:
        raise DamagedError(f"{data_bytes} bytes of data, expected {at}")


def map_limit() -> int:
    """How many mapped entries of this process may hold a file descriptor: half of what the system allows, at most 4096."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 4096 if soft == resource.RLIM_INFINITY else max(16, min(4096, soft // 2))


def _map(fd: int, size: int) -> Any:
    """A private map of the whole file, as a buffer. It keeps the descriptor's lock until the last tensor of it dies.

    Beyond map_limit() maps the file is mapped without a descriptor: as valid, even when evicted, but not kept from eviction.
    """
    import torch

    if len(_open_maps) < map_limit() or not os.path.exists(f"/proc/self/fd/{fd}"):
        mapped = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
        _open_maps.add(mapped)
        return mapped
    storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", shared=False, nbytes=size)
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()  # type: ignore[arg-type]


def load(fd: int, key: str, *, check: bool) -> Entry:
    """The entry in the open file `fd`; it keeps its own duplicate of the descriptor. `check`: compare the checksum.

    Raises DamagedError when the file is not an intact entry of `key`.
    """
    import torch

    size = os.fstat(fd).st_size
    header, begin = read_header(fd, size)
    parsed = header["__metadata__"].pop("parsed")
    digest = header["__metadata__"].pop("digest")
    if parsed["key"] != key:
        raise DamagedError(f"it is the entry of another key, {parsed['key']!r:.60}")
    layout = list(_layout(header, size - begin))
    buffer = _map(fd, size)
    if check:
        sum_ = xxhash.xxh3_128(_canonical(header))
        sum_.update(memoryview(buffer)[begin:])
        if sum_.hexdigest() != digest:
            raise DamagedError("the checksum differs")
    tensors = {}
    for name, dtype, shape, start in layout:
        count = math.prod(shape)
        tensors[name] = (
            torch.frombuffer(buffer, dtype=dtype, count=count, offset=begin + start).view(shape)
            if count
            else (torch.empty(shape, dtype=dtype))
        )
    return Entry(key, tensors, parsed["meta"], digest, size)
