"""Whether a video file is cut short, by the lengths its own container declares. Standard library only; a few bytes are read.

MP4 and MOV list boxes, Matroska and WebM a segment, AVI a RIFF chunk, GIF ends in a trailer. MPEG-TS, Ogg and raw streams
declare nothing: a cut there is a shorter video.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO

__all__ = ["is_cut", "looks_like_video", "most_frames", "mp3_frames"]

_SIGNATURES = (
    b"\x1a\x45\xdf\xa3",
    b"RIFF",
    b"FLV",
    b"OggS",
    b"GIF8",
    b"\x00\x00\x01\xba",
    b"\x00\x00\x01\xb3",
    b"\x30\x26\xb2\x75",
    b"\x47\x40",
)
_BOXES = {
    b"ftyp",
    b"moov",
    b"mdat",
    b"free",
    b"skip",
    b"wide",
    b"moof",
    b"styp",
    b"sidx",
    b"uuid",
    b"pnot",
}
_HOLD_BOXES = {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf"}
_COUNTS = {b"stsz": 8, b"trun": 4}  # where they say how many frames
_MOST_BOXES = 100_000


def looks_like_video(head: bytes) -> bool:
    """Whether the first 16 bytes belong to a known video container."""
    return head[4:8] in _BOXES or head.startswith(_SIGNATURES)


def _mp4_is_cut(handle: BinaryIO, size: int) -> bool:
    """Whether a top-level box runs past the end of the file, or the index (moov) never comes."""
    position, index_seen = 0, False
    for _ in range(_MOST_BOXES):
        if position + 8 > size:
            break
        handle.seek(position)
        head = handle.read(16)
        length, kind = int.from_bytes(head[:4], "big"), head[4:8]
        if length == 1:
            length = int.from_bytes(head[8:16], "big")
        elif length == 0:
            length = size - position
        if length < 8:
            return False  # damaged, not cut
        index_seen = index_seen or kind == b"moov"
        position += length
    return position > size or not index_seen


def _boxes(handle: BinaryIO, begin: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(kind, begin of its content, end) of MP4 boxes, those inside others too."""
    left, todo = _MOST_BOXES, [(begin, end)]
    while todo and left:
        position, limit = todo.pop()
        while position + 8 <= limit and left:
            left -= 1
            handle.seek(position)
            head = handle.read(16)
            length, kind, content = int.from_bytes(head[:4], "big"), head[4:8], position + 8
            if length == 1:
                length, content = int.from_bytes(head[8:16], "big"), position + 16
            elif length == 0:
                length = limit - position
            if length < 8:
                break
            if kind in _HOLD_BOXES:
                todo.append((content, min(limit, position + length)))
            yield kind, content, min(limit, position + length)
            position += length


def most_frames(path: str, head: bytes) -> int:
    """The most frames that one table of an MP4 declares; 0 for other files. A table of frames of one size has no bytes for each of
    them: FFmpeg makes room for as many as it says."""
    if head[4:8] not in _BOXES:
        return 0
    most = 0
    with open(path, "rb") as handle:
        for kind, content, end in _boxes(handle, 0, os.path.getsize(path)):
            if kind in _COUNTS and content + _COUNTS[kind] + 4 <= end:
                handle.seek(content + _COUNTS[kind])
                most = max(most, int.from_bytes(handle.read(4), "big"))
    return most


def _vint(handle: BinaryIO, keep_marker: bool) -> tuple[int, bool]:
    """An EBML number and whether it means "unknown" (all ones); (0, True) at the end of the file."""
    first = handle.read(1)
    if not first or first[0] == 0:
        return 0, True
    extra = 8 - first[0].bit_length()
    rest = handle.read(extra)
    value = first[0] if keep_marker else first[0] & ((1 << (7 - extra)) - 1)
    value = int.from_bytes(bytes([value]) + rest, "big")
    return value, len(rest) < extra or (not keep_marker and value == (1 << (7 * (extra + 1))) - 1)


def _matroska_is_cut(handle: BinaryIO, size: int) -> bool:
    """Whether the segment (EBML element 18538067) is declared longer than the file. Live recordings declare nothing."""
    handle.seek(4)
    header, unknown = _vint(handle, keep_marker=False)
    if unknown:
        return size < 64
    handle.seek(header, os.SEEK_CUR)
    name, ended = _vint(handle, keep_marker=True)
    if ended:
        return handle.tell() >= size
    length, unknown = _vint(handle, keep_marker=False)
    return name == 0x18538067 and not unknown and handle.tell() + length > size


def is_cut(path: str, head: bytes) -> bool:
    """Whether the file holds fewer bytes than its container declares. `head`: its first 16 bytes."""
    size = os.path.getsize(path)
    with open(path, "rb") as handle:
        if head[4:8] in _BOXES:
            return _mp4_is_cut(handle, size)
        if head.startswith(b"\x1a\x45\xdf\xa3"):
            return _matroska_is_cut(handle, size)
        if head.startswith(b"RIFF"):
            return int.from_bytes(head[4:8].ljust(4, b"\xff"), "little") + 8 > size
        if head.startswith(b"GIF8"):
            handle.seek(max(size - 64, 0))
            return b";" not in handle.read().rstrip(b"\0")[-1:]
    return looks_like_video(head) and size < 256


def mp3_frames(path: str) -> int | None:
    """How many frames an MP3 says that it has, in a header of Xing, LAME or Fraunhofer (VBRI); None without one."""
    with open(path, "rb") as handle:
        begin = 0
        for _ in range(_MOST_BOXES):
            handle.seek(begin)
            head = handle.read(10)
            if len(head) < 10 or not head.startswith(b"ID3"):
                break
            a, b, c, d = (byte & 0x7F for byte in head[6:10])
            begin += 10 + (a << 21 | b << 14 | c << 7 | d) + 10 * (head[5] >> 4 & 1)
        handle.seek(begin)
        first = handle.read(4096)
    # of layer III, behind padding
    at = next(
        (i for i in range(len(first) - 3) if first[i] == 0xFF and first[i + 1] & 0xE6 == 0xE2), None
    )
    if at is None:
        return None
    mpeg1, mono = first[at + 1] & 0x18 == 0x18, first[at + 3] & 0xC0 == 0xC0
    side = (17 if mono else 32) if mpeg1 else (9 if mono else 17)
    info, fraunhofer = first[at + 4 + side :], first[at + 36 :]
    if info[:4] in (b"Xing", b"Info") and len(info) >= 12 and info[7] & 1:
        return int.from_bytes(info[8:12], "big")
    if fraunhofer[:4] == b"VBRI" and len(fraunhofer) >= 18:
        return int.from_bytes(fraunhofer[14:18], "big")
    return None
