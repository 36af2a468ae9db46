"""A bounded memory of tensors: least recently used first out, open files of the store counted.

python -c "from mmrl.video.memory import Memory; print(Memory(1 << 20).get('a'))"
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Memory"]


@dataclass
class Memory:
    """Least-recently-used values within a number of bytes; of them, those that hold a file of the store open within a number of
    files and of bytes of the store."""

    limit_bytes: int
    limit_files: int = 1024
    limit_held: int = 1 << 62
    values: OrderedDict[Any, tuple[Any, int, bool]] = field(default_factory=OrderedDict)
    used: int = 0
    held: int = 0
    files: int = 0

    def get(self, key: Any) -> Any:
        """The value, now the most recently used one; None when it is not there."""
        if key not in self.values:
            return None
        self.values.move_to_end(key)
        return self.values[key][0]

    def put(self, key: Any, value: Any, nbytes: int, holds: bool) -> None:
        """Keep `value`; one larger than the bounds is not kept. `holds`: it keeps a file of the store open."""
        if nbytes > self.limit_bytes or (holds and nbytes > self.limit_held) or key in self.values:
            return
        self.values[key] = (value, nbytes, holds)
        self._count(nbytes, holds, 1)
        while self.used > self.limit_bytes:
            self._drop(next(iter(self.values)))
        while self.held > self.limit_held or self.files > self.limit_files:
            self._drop(next(k for k, (_, _, holding) in self.values.items() if holding))

    def clear(self) -> None:
        """Forget everything."""
        for key in list(self.values):
            self._drop(key)

    def _drop(self, key: Any) -> None:
        _, nbytes, holds = self.values.pop(key)
        self._count(nbytes, holds, -1)

    def _count(self, nbytes: int, holds: bool, sign: int) -> None:
        self.used += sign * nbytes
        if holds:
            self.held, self.files = self.held + sign * nbytes, self.files + sign
