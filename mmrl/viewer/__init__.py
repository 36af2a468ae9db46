"""The viewer: `mmrl view runs/` serves a local page over run folders, live while they train.

It reads the folders and what their rows name (pictures, clips), writes nothing there, and imports no torch.
"""

from __future__ import annotations

__all__: list[str] = []
