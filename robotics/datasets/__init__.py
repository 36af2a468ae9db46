"""Demonstrations on disk: LeRobot data sets (written as v3.0, read as v2.x and v3.0), LIBERO's hdf5 files, and a recorder.

    from mmrl.robotics.datasets import open_demonstrations
    for demo in open_demonstrations("runs/push_demos"):
        print(demo.instruction, demo.actions_TA.shape, demo.pictures("base", [0]).shape)

Readers hold one episode's numbers at a time and decode pictures only when they are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Protocol

from mmrl.errors import DataError
from mmrl.robotics.datasets.demonstration import Demonstration, RecordedEpisode

__all__ = ["Demonstration", "DemonstrationSet", "RecordedEpisode", "open_demonstrations"]


class DemonstrationSet(Protocol):
    """What every reader offers; episodes are read when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Demonstration: ...

    def __iter__(self) -> Iterator[Demonstration]: ...


def open_demonstrations(path: str | os.PathLike[str], **settings: Any) -> DemonstrationSet:
    """A LeRobot folder, one of LIBERO's hdf5 files, or a folder of such files. settings: of LeRobotDataset or LiberoHdf5.
    Raises DataError."""
    from mmrl.robotics.datasets.lerobot import LeRobotDataset
    from mmrl.robotics.datasets.libero_hdf5 import LiberoHdf5

    name = os.fspath(path)
    if os.path.isdir(name) and os.path.exists(os.path.join(name, "meta", "info.json")):
        return LeRobotDataset(name, **settings)
    files = [name] if os.path.isfile(name) else []
    if os.path.isdir(name):
        files = sorted(os.path.join(name, file) for file in os.listdir(name))
    files = [file for file in files if file.endswith((".hdf5", ".h5"))]
    if not files:
        raise DataError(
            f"{name}: expected a LeRobot data set (a folder with meta/info.json) or LIBERO demonstrations (.hdf5), "
            f"found {'neither' if os.path.exists(name) else 'nothing there'}"
        )
    return LiberoHdf5(files, **settings)
