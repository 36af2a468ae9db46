"""rich's console for tables and progress, which shows control characters of what it prints; see mmrl.operations.terminal.

console = Console(width=120, highlight=False)
console.print(escape(name_found_in_a_file))
"""

from __future__ import annotations

from typing import IO, Any

import rich.console
from rich.text import Text

from mmrl.operations.terminal import unwrapped, visible

__all__ = ["Console", "quiet_transformers"]


class Console(rich.console.Console):
    """Texts and cells of tables come to `render_str`; what is printed while a progress bar is shown comes to `print` as Text."""

    @property
    def file(self) -> IO[str]:
        """The stream to write to, control characters of rich's own included."""
        return unwrapped(super().file)

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render_str(self, text: str, **options: Any) -> Text:
        """See rich."""
        return super().render_str(visible(text), **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """See rich."""
        for found in objects:
            if isinstance(found, Text):
                found.plain = visible(found.plain)
        super().print(*objects, **options)


def quiet_transformers() -> None:
    """Keep transformers' warnings and progress bars off the display."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
