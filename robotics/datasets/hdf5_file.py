"""What an hdf5 file holds by itself: groups and arrays inside it, of bounded size.

    with h5py.File(name) as file:
        actions = array_of(group_of(file, "data", name), "actions", name)

HDF5 can point elsewhere: external and soft links, datasets stored in other files (any file: /etc/passwd as a picture), virtual
datasets. It can declare arrays of any size in a few bytes. None of that is part of a data set of demonstrations: DataError.
"""

from __future__ import annotations

from typing import Any

from mmrl.errors import DataError
from mmrl.robotics.datasets.demonstration import import_or_say

__all__ = ["MAX_BYTES", "array_of", "group_of", "inside"]

MAX_BYTES = 4 << 30  # of an array that is read as a whole, or of one picture of it


def inside(group: Any, key: str, where: str) -> bool:
    """Whether `group` has `key`, as a part of this file. Raises DataError for a link that leads elsewhere."""
    h5py = import_or_say("h5py", "pip install h5py")
    link = group.get(key, getlink=True)
    if link is not None and not isinstance(link, h5py.HardLink):
        raise DataError(
            f"{where}: expected {key} inside the file, found a link ({type(link).__name__}) that may lead to "
            "other files; copy the data into one file"
        )
    return link is not None


def group_of(group: Any, key: str, where: str) -> Any:
    """The group `key`. Raises DataError where there is none."""
    h5py = import_or_say("h5py", "pip install h5py")
    if not inside(group, key, where) or not isinstance(group[key], h5py.Group):
        raise DataError(
            f"{where}: expected a group {key}, found {', '.join(list(group)[:8]) or 'nothing'}"
        )
    return group[key]


def array_of(group: Any, key: str, where: str) -> Any:
    """The dataset `key` of numbers, unread. Raises DataError where it is none, is stored in other files, or is too large."""
    h5py = import_or_say("h5py", "pip install h5py")
    if not inside(group, key, where):
        raise DataError(f"{where}: expected {key}, found {', '.join(list(group)[:8]) or 'nothing'}")
    found = group[key]
    if not isinstance(found, h5py.Dataset) or found.shape is None or found.dtype.kind not in "fiub":
        kind = f"{found.dtype} {found.shape}" if isinstance(found, h5py.Dataset) else "a group"
        raise DataError(f"{where}: expected numbers in {key}, found {kind}")
    if found.external or found.is_virtual:
        raise DataError(
            f"{where}: expected {key} inside the file, found a dataset that is stored in other files; copy the numbers "
            "into this one"
        )
    rows = max(1, found.shape[0]) if len(found.shape) > 2 else 1  # pictures are read one by one
    if found.nbytes > MAX_BYTES * rows:
        raise DataError(
            f"{where}: expected {key} of at most {MAX_BYTES >> 30} GiB, found {found.dtype} {found.shape}; is the file "
            "damaged?"
        )
    return found
