"""The README and every page of docs/, and the blocks of code and commands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["REPO", "TEXT", "Block", "blocks", "commands"]

REPO = Path(__file__).resolve().parents[2]
PAGES = [
    REPO / "README.md",
    REPO / "SECURITY.md",
    REPO / "CONTRIBUTING.md",
    *sorted((REPO / "docs").rglob("*.md")),
]
TEXT = {page.relative_to(REPO).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
"""Text by path in the repository."""
_FENCED = re.compile(
    r"^```(\w*)\n(.*?)^```\n(?:\s*<!-- not run: (.*?) -->)?", re.MULTILINE | re.DOTALL
)
_INDENTED = re.compile(
    r"(?:\A|(?<=\n\n))((?:    [^\n]*\n)(?:(?:    [^\n]*)?\n)*)(?:\s*<!-- not run: (.*?) -->)?",
    re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of a page: its language ('' for an indented one), its text without the indentation, and why it is not run."""

    page: str
    language: str
    text: str
    not_run: str

    def lines(self) -> list[str]:
        """Lines with continuations joined and comments cut."""
        joined = self.text.replace("\\\n", " ")
        cut = (re.split(r"\s#\s", line, maxsplit=1)[0].strip() for line in joined.splitlines())
        return [line for line in cut if line]


def blocks(page: str) -> Iterator[Block]:
    """All blocks of a page, those of generated tables and of the API's directives left out."""
    text = TEXT[page]
    for found in _FENCED.finditer(text):
        yield Block(page, found[1] or "text", found[2], found[3] or "")
    rest = _FENCED.sub("", text)
    # options of a directive of mkdocstrings
    rest = re.sub(r"^::: .*\n(?:    .*\n|\n(?=    ))*", "", rest, flags=re.MULTILINE)
    for found in _INDENTED.finditer(rest):
        plain = re.sub(r"^    ", "", found[1], flags=re.MULTILINE).strip("\n")
        # what is indented below an item of a list is a paragraph of it
        before = rest[: found.start()].rstrip().rpartition("\n")[2]
        if not re.match(r"\s*(?:[-*]|\d+\.) ", before):
            yield Block(page, "", plain, found[2] or "")


def commands() -> Iterator[tuple[str, str]]:
    """(page, line) of every command on a page that is not marked as not run."""
    for page in TEXT:
        for block in blocks(page):
            if block.language in ("", "bash") and not block.not_run:
                yield from ((page, line) for line in block.lines())
