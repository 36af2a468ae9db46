"""What mkdocs.yml asks of the build beside its plugins: files of the repository that docs/ links to become part of the site.

SECURITY.md, CONTRIBUTING.md and CHANGELOG.md are pages. A link to any other file (`../examples/zoom.py`) leads to a copy below
source/, so that it works from a disk without a network; a link to a file that is not there stays as it is, and --strict refuses it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

__all__ = ["on_files", "on_page_markdown", "site_links"]

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files at the top that are pages of the site, and their names there."""
_LINK = re.compile(r"(?<!\!)\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def _place(path: Path) -> str | None:
    """Where a file of the repository stands in the site; None for a folder, and for what is not there."""
    if not path.is_file() or not path.is_relative_to(ROOT):
        return None
    inside = path.relative_to(ROOT).as_posix()
    if inside.startswith("docs/"):
        return inside.removeprefix("docs/")
    # text, whatever the suffix: a browser shows it instead of saving it
    return PAGES.get(inside, f"source/{inside}.txt")


def site_links(text: str, source: Path, place: str) -> tuple[str, dict[str, Path]]:
    """(the page's text with links as they are in the site, files below source/ that it needs by their place).

    `source` is the page's file in the repository, `place` its name in the site. A link to a folder becomes its words.
    """
    needed: dict[str, Path] = {}

    def renamed(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        path = (source.parent / target).resolve()
        if path.is_dir():
            return words
        where = _place(path)
        if where is None:
            return match[0]
        if where.startswith("source/"):
            needed[where] = path
        return f"[{words}]({posixpath.relpath(where, posixpath.dirname(place) or '.')}{anchor})"

    # between fences and in code nothing is a link
    parts = re.split(r"(^```.*?^```$|`[^`\n]+`)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [_LINK.sub(renamed, part) for part in parts[::2]]
    return "".join(parts), needed


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the top and every file that some page links to."""
    sources = [(Path(f.abs_src_path), f.src_uri) for f in files if f.src_uri.endswith(".md")]
    sources += [(ROOT / name, place) for name, place in PAGES.items()]
    for source, place in sources:
        text, needed = site_links(source.read_text(encoding="utf-8"), source, place)
        if source.name in PAGES and source.parent == ROOT:
            files.append(File.generated(config, place, content=text))
        for where, path in needed.items():
            if files.get_file_from_path(where) is None:
                files.append(File.generated(config, where, content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links of a page of docs/ as they are in the site; those of the top's pages were made so when they were added."""
    if page.file.generated_by is not None:
        return markdown
    return site_links(markdown, Path(page.file.abs_src_path), page.file.src_uri)[0]
