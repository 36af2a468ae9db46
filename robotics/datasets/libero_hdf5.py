"""Reading LIBERO's own demonstrations: one hdf5 file per task, data/demo_0 ... (format of robomimic).

    demos = LiberoHdf5("libero_object/pick_up_the_milk_and_place_it_in_the_basket_demo.hdf5")

    python -c "from mmrl.robotics.datasets.libero_hdf5 import LiberoHdf5; import sys; print(len(LiberoHdf5(sys.argv[1])))" FILE.hdf5

data.attrs["problem_info"] is JSON with language_instruction; each demo holds actions (T, 7), dones, rewards, states (the
simulator's), robot_states and obs/ with agentview_rgb, eye_in_hand_rgb (T, 128, 128, 3), ee_pos, ee_ori, gripper_states,
joint_states. The stored pictures are as MuJoCo renders them, upside down; they are turned by 180 degrees (`rotate180`), as in
mmrl.robotics.libero, OpenVLA's and openpi's data. Proprioception is ee_pos, ee_ori, gripper_states (8 values), as those projects
use it. The actions are those of the simulator: gripper -1 opens, 1 closes.

Legend: T control steps, P pictures.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.robotics.datasets.demonstration import Demonstration, import_or_say
from mmrl.robotics.datasets.hdf5_file import array_of, group_of, inside
from mmrl.video.media import MAX_PIXELS

__all__ = ["LiberoHdf5"]

_CAMERAS = {"base": "agentview_rgb", "wrist": "eye_in_hand_rgb"}
_PROPRIO = ("ee_pos", "ee_ori", "gripper_states")
_FPS = 20.0  # LIBERO's control frequency
_DEMO = re.compile(r"demo_(\d+)")


class LiberoHdf5:
    """A sequence of Demonstrations of one or several files, in the order of the files and of their demos' numbers.

    cameras: of "base" and "wrist", None: those there are. rotate180: turn the pictures, as LiberoSimulator does. keep: "all", or
    "success" to leave out demos without a done or reward. Raises DataError for a file that is damaged or of another layout,
    MissingExtraError without h5py.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        cameras: Sequence[str] | None = None,
        rotate180: bool = True,
        keep: str = "all",
    ) -> None:
        for camera in cameras or ():
            if camera not in _CAMERAS:
                raise ConfigError(
                    f"expected cameras of {', '.join(_CAMERAS)}, found {camera!r}.{did_you_mean(camera, _CAMERAS)}"
                )
        if keep not in ("all", "success"):
            raise ConfigError(
                f"expected keep as all or success, found {keep!r}.{did_you_mean(keep, ('all', 'success'))}"
            )
        self._asked, self.rotate180 = cameras, rotate180
        self._demos: list[tuple[str, str]] = []
        self._instructions: dict[str, str] = {}
        for file in [path] if isinstance(path, (str, os.PathLike)) else path:
            name = os.fspath(file)
            with _opened(name) as data:
                self._instructions[name] = _instruction(data, name)
                names = [demo for demo in data if _DEMO.fullmatch(demo)]
                for demo in sorted(names, key=lambda demo: int(demo[5:])):
                    if (
                        keep == "all"
                        or _success(group_of(data, demo, name), f"{name}, {demo}") is not False
                    ):
                        self._demos.append((name, demo))
                if not names:
                    found = ", ".join(list(data)[:5]) or "nothing"
                    raise DataError(
                        f"{name}: expected data/demo_0 and so on, found {found} under data"
                    )

    def __len__(self) -> int:
        return len(self._demos)

    def __iter__(self) -> Iterator[Demonstration]:
        for number in range(len(self)):
            yield self[number]

    def __getitem__(self, number: int) -> Demonstration:
        name, demo = self._demos[number]
        source = f"{name}, {demo}"
        with _opened(name) as data:
            group = group_of(data, demo, source)
            actions = _matrix(group, "actions", source)
            T = len(actions)
            if not inside(group, "obs", source):
                raise DataError(
                    f"{source}: expected a group obs, found {', '.join(group)}; a file of states only must be "
                    "replayed first"
                )
            obs = group_of(group, "obs", source)
            parts = [_matrix(obs, key, source, T) for key in _PROPRIO if inside(obs, key, source)]
            proprio = np.concatenate(parts or [np.zeros((T, 0), np.float32)], axis=1)
            cameras = tuple(
                camera
                for camera, key in _CAMERAS.items()
                if inside(obs, key, source) and (self._asked is None or camera in self._asked)
            )
            for camera in self._asked or ():
                if camera not in cameras:
                    raise DataError(
                        f"{source}: expected pictures obs/{_CAMERAS[camera]}, found {', '.join(obs)}"
                    )
            for camera in cameras:
                pictures = array_of(obs, _CAMERAS[camera], source)
                shape = pictures.shape
                if (
                    len(shape) != 4
                    or shape[0] != T
                    or shape[3] != 3
                    or pictures.dtype != np.uint8
                    or (shape[1] * shape[2] > MAX_PIXELS)
                ):
                    raise DataError(
                        f"{source}: expected uint8 pictures ({T}, H, W, 3) of at most {MAX_PIXELS:,} pixels in "
                        f"obs/{_CAMERAS[camera]}, found {pictures.dtype} {tuple(shape)}"
                    )
            success = _success(group, source)
        load = functools.partial(self._pictures, name, demo)
        return Demonstration(
            self._instructions[name],
            cameras,
            proprio,
            actions,
            np.arange(T),
            success,
            source,
            _FPS,
            load,
        )

    def _pictures(self, name: str, demo: str, camera: str, steps: Sequence[int]) -> np.ndarray:
        unique = sorted(set(steps))  # h5py wants ascending indices without repeats
        with _opened(name) as data:
            obs = group_of(group_of(data, demo, name), "obs", name)
            frames = array_of(obs, _CAMERAS[camera], f"{name}, {demo}")[unique]
        frames = frames[np.searchsorted(unique, steps)]
        return np.ascontiguousarray(frames[:, ::-1, ::-1]) if self.rotate180 else frames


# h5py raises any of these where the bytes make no sense
_DAMAGE = (OSError, LookupError, RuntimeError, ValueError, TypeError, MemoryError)


class _opened:
    """The group "data" of a file; what h5py raises becomes DataError."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> Any:
        h5py = import_or_say("h5py", "pip install h5py")
        if not os.path.exists(self.name):
            raise DataError(
                f"expected a file {self.name}, found none; LIBERO's benchmark_scripts/"
                "download_libero_datasets.py fetches it"
            )
        try:
            self.file = h5py.File(self.name, "r")
        except OSError as error:
            raise DataError(
                f"{self.name}: expected an hdf5 file, found {str(error)[:200]}; download it again"
            ) from error
        try:
            return self._data()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def _data(self) -> Any:
        if not inside(self.file, "data", self.name):
            raise DataError(
                f"{self.name}: expected a group data (robomimic's layout), found "
                f"{', '.join(self.file) or 'an empty file'}"
            )
        return group_of(self.file, "data", self.name)

    def __exit__(self, kind: Any, error: BaseException | None, _: object) -> None:
        self.file.close()
        if isinstance(error, _DAMAGE) and not isinstance(error, DataError):
            raise DataError(
                f"{self.name}: expected LIBERO demonstrations, found damage: {str(error)[:200]}; download it "
                "again"
            ) from error


def _instruction(data: Any, name: str) -> str:
    """problem_info's language_instruction, which older files hold as a list of words; else from the file name."""
    try:
        told = json.loads(data.attrs.get("problem_info", "{}")).get("language_instruction", "")
        text = "".join(told) if isinstance(told, list) else str(told)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{name}: expected JSON in data.attrs['problem_info'], found {error}"
        ) from error
    text = text.strip().strip('"').strip()
    if not text:
        stem = re.sub(r"(_demo)?\.(hdf5|h5)$", "", os.path.basename(name))
        text = re.sub(r"^[A-Z0-9_]*SCENE\d+_", "", stem).replace("_", " ")
    return text


def _success(group: Any, source: str) -> bool | None:
    """Whether the last steps say so; None when the file does not."""
    known = [key for key in ("dones", "rewards") if inside(group, key, source)]
    return (
        bool(any(np.any(array_of(group, key, source)[()] > 0) for key in known)) if known else None
    )


def _matrix(group: Any, key: str, source: str, rows: int | None = None) -> np.ndarray:
    """Float32 (T, D) of a column. Raises DataError."""
    values = np.asarray(array_of(group, key, source)[()], np.float32)
    if values.ndim != 2 or len(values) < 1 or (rows is not None and len(values) != rows):
        raise DataError(
            f"{source}: expected {key} of shape ({rows or 'T'}, D), found {values.shape}"
        )
    if not np.isfinite(values).all():
        raise DataError(
            f"{source}: expected finite {key}, found NaN or infinity; leave the demonstration out"
        )
    return values
