"""What is printed is data: a file of a stranger (names in a checkpoint's settings, texts of a log) may hold control characters that
move a terminal's cursor, rename its window, hide lines or turn text round. They are shown instead of sent.

    from mmrl.operations.terminal import show_controls, visible
    show_controls()                 # from here on all that print writes; tables go through mmrl.operations.console
    visible("a\\x1b[2Jb")            # 'a␛[2Jb'

Left as they are: line ends and tabs, the carriage return that begins a line of a progress bar, and colours that libraries write.
"""

from __future__ import annotations

import re
import sys
from typing import IO, Any

__all__ = ["Shown", "show_controls", "unwrapped", "visible"]

# Unicode's orders to write in the other direction
_TURNS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SHOWN = (
    {i: 0x2400 + i for i in range(32) if chr(i) not in "\t\n"}
    | {0x7F: 0x2421}  # the pictures of control characters
    | dict.fromkeys((*range(0x80, 0xA0), *_TURNS), 0xFFFD)
)
# bold, italics, underlined, colours but black
_COLOUR = re.compile(r"(\x1b\[(?:(?:0|1|3|4|2[234]|3[1-79]|9[1-7])(?:;|(?=m)))*m)")


def visible(text: str) -> str:
    """`text` with control characters as pictures (U+2400 ff.) or U+FFFD, one for one but for '\\r\\n', which is a line end."""
    return text.replace("\r\n", "\n").translate(_SHOWN)


class Shown:
    """A text stream of which `write` shows control characters; all else is the stream's own."""

    def __init__(self, stream: IO[str]) -> None:
        # where rich, which writes control characters of its own, goes on writing
        self.rich_proxied_file = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)

    def write(self, text: str) -> int:
        """Write `text`; returns its length."""
        bar = "\r" if text.startswith("\r") else ""
        parts = _COLOUR.split(text[len(bar) :])  # colours at odd places
        self.rich_proxied_file.write(
            bar + "".join(part if n % 2 else visible(part) for n, part in enumerate(parts))
        )
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of `lines`."""
        for line in lines:
            self.write(line)


def show_controls() -> None:
    """Let standard output and standard error of this process show control characters, from now on."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Shown):
            setattr(sys, name, Shown(stream))


def unwrapped(stream: IO[str]) -> IO[str]:
    """The stream itself, below whatever shows control characters."""
    return stream.rich_proxied_file if isinstance(stream, Shown) else stream
