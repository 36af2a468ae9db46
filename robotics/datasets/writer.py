"""LeRobot v3.0 data sets, written episode by episode: parquet for numbers, one mp4 per camera, and the index of episodes.

    with LeRobotWriter("runs/push_demos", fps=20) as writer:
        for episode in episodes:            # RecordedEpisode
            writer.add(episode)

Memory holds one episode (and the low-dimensional columns, for exact quantiles). Everything goes to a hidden folder beside the
target, which gets its name when all is written: an interrupted recording leaves nothing, never half a data set.

Beside LeRobot's own columns: executed_action (what the simulator was given; `action` is the clean label), next.reward,
next.success, picture_age (control steps since the picture and state shown here were taken, 0 = own), seed; in meta/episodes
also success, seed and state. Their names start with neither observation nor action, so lerobot gives them to no policy.

Legend: T control steps, P steps with a picture of their own, A action dimensions, S proprioception values.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmrl.errors import ConfigError, DataError
from mmrl.robotics.datasets.demonstration import RecordedEpisode, import_or_say
from mmrl.robotics.datasets.layout import (
    DATA_PATH,
    DEFAULT_FEATURES,
    EPISODES_PATH,
    PREFIX,
    VERSION,
    VIDEO_PATH,
    Histogram,
    column_stats,
    tasks_table,
    vector,
)
from mmrl.robotics.datasets.mp4 import Mp4File, VideoSettings, video_settings

__all__ = ["LeRobotWriter"]

_CHUNK_FILES = 1000  # lerobot: files of a chunk folder
_OWN = {"next.reward": "float32", "next.success": "bool", "picture_age": "int64", "seed": "int64"}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it lives, as somebody else's
    return True


class LeRobotWriter:
    """Use as a context manager: leaving it normally completes the data set, leaving it by an exception removes everything.

    fps: control steps per second, a whole number. robot: info.json's robot_type. video: "lossless", "high", "small" or
    VideoSettings. notes: kept in info.json under "mmrl". data_mb, video_mb: a new file is begun beyond this size.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        fps: int,
        robot: str = "unknown",
        video: str | VideoSettings = "lossless",
        action_names: Sequence[str] | None = None,
        notes: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        data_mb: float = 100,
        video_mb: float = 200,
    ) -> None:
        if isinstance(fps, bool) or not isinstance(fps, int) or fps < 1:
            raise ConfigError(f"expected fps as a whole number of at least 1, found {fps!r}")
        self.out = os.path.abspath(os.fspath(out))
        self.fps, self.robot, self.video, self.overwrite = (
            fps,
            robot,
            video_settings(video),
            overwrite,
        )
        self.action_names, self.notes = action_names, dict(notes or {})
        self.data_mb, self.video_mb = data_mb, video_mb
        self._refuse_existing()
        self._pa = import_or_say("pyarrow", "pip install pyarrow")
        self._pq = import_or_say("pyarrow.parquet", "pip install pyarrow")
        self._folder = os.path.join(
            os.path.dirname(self.out), f".{os.path.basename(self.out)}.{os.getpid()}.writing"
        )
        self._clean_leftovers()
        os.makedirs(self._folder)
        self.frames = 0
        self.tasks: list[str] = []
        self.shapes: dict[str, Any] = {}
        self._episodes: list[dict[str, Any]] = []
        self._columns: dict[str, list[np.ndarray]] = {}
        self._pixels: dict[str, Histogram] = {}
        self._data: Any = None
        self._data_file, self._data_bytes = 0, 0
        self._videos: dict[str, Mp4File] = {}
        self._video_file: dict[str, int] = {}
        self._open = True

    def __enter__(self) -> LeRobotWriter:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _refuse_existing(self) -> None:
        if not os.path.exists(self.out) or (os.path.isdir(self.out) and not os.listdir(self.out)):
            return
        if not self.overwrite:
            raise ConfigError(
                f"expected a new folder to write to, found {self.out}; name another one or pass overwrite"
            )
        if not os.path.exists(os.path.join(self.out, "meta", "info.json")):
            raise ConfigError(
                f"{self.out} is no data set (no meta/info.json) and is not overwritten; name another folder"
            )

    def _clean_leftovers(self) -> None:
        """Folders of recordings of this name whose process is gone."""
        pattern = os.path.join(
            os.path.dirname(self.out), f".{glob.escape(os.path.basename(self.out))}.*.writing"
        )
        for folder in glob.glob(pattern):
            pid = folder.split(".")[-2]
            if pid.isdigit() and (int(pid) == os.getpid() or not _alive(int(pid))):
                shutil.rmtree(folder, ignore_errors=True)

    # -- episodes -------------------------------------------------------------------------------------------------------------

    @property
    def episodes(self) -> int:
        """How many were added."""
        return len(self._episodes)

    def add(self, episode: RecordedEpisode) -> int:
        """Write an episode; returns its number. Raises DataError for one that fits neither itself nor those before."""
        if not self._open:
            raise DataError("expected an open writer, found one that was closed")
        episode.check()
        self._check_shapes(episode)
        if episode.instruction not in self.tasks:
            self.tasks.append(episode.instruction)
        number, T = len(self._episodes), len(episode.actions_TA)
        shown_T = np.searchsorted(episode.steps_P, np.arange(T), side="right") - 1
        columns = self._rows(episode, shown_T, number)
        row: dict[str, Any] = {"episode_index": number, "tasks": [episode.instruction], "length": T}
        row |= self._write_rows(columns)
        row |= {"dataset_from_index": self.frames, "dataset_to_index": self.frames + T}
        for camera, frames in episode.images.items():
            row |= self._write_pictures(PREFIX + camera, frames, shown_T)
        row |= {"success": episode.success, "seed": int(episode.seed), "state": episode.state}
        for name, values in columns.items():
            self._columns.setdefault(name, []).append(values)
            row |= {f"stats/{name}/{key}": value for key, value in column_stats(values).items()}
        self._episodes.append(row)
        self.frames += T
        return number

    def _check_shapes(self, episode: RecordedEpisode) -> None:
        found: dict[str, Any] = {
            "actions": episode.actions_TA.shape[1:],
            "executed actions": episode.executed_TA.shape[1:],
            "proprio": episode.proprio_PS.shape[1:],
        }
        found |= {
            f"pictures of {camera}": frames.shape[1:] for camera, frames in episode.images.items()
        }
        if not self.shapes:
            odd = [
                camera
                for camera in episode.images
                if not re.fullmatch(r"[\w.-]{1,60}", camera) or ".." in camera
            ]
            if odd:
                raise DataError(
                    f"expected camera names of letters, digits, '_', '.' and '-', found {', '.join(odd)}"
                )
            if not episode.images or found["actions"] != found["executed actions"]:
                raise DataError(
                    f"expected pictures of at least one camera, and executed actions as wide as actions, found {found}"
                )
            self.shapes = found
        if found != self.shapes:
            wrong = {
                key: found.get(key)
                for key in {*found, *self.shapes}
                if found.get(key) != self.shapes.get(key)
            }
            raise DataError(
                f"episode {episode.state or '?'}: expected the shapes of the first episode {self.shapes}, found "
                f"{wrong}; write another data set for it"
            )

    def _rows(
        self, episode: RecordedEpisode, shown_T: np.ndarray, number: int
    ) -> dict[str, np.ndarray]:
        """Column name -> values (T,) or (T, D), in file order."""
        T = len(episode.actions_TA)
        columns: dict[str, np.ndarray] = {}
        if episode.proprio_PS.shape[1]:
            columns["observation.state"] = np.asarray(episode.proprio_PS, np.float32)[shown_T]
        columns["action"] = np.asarray(episode.actions_TA, np.float32)
        columns["executed_action"] = np.asarray(episode.executed_TA, np.float32)
        columns["next.reward"] = np.asarray(episode.rewards_T, np.float32)
        columns["next.success"] = np.asarray(episode.success_T, bool)
        columns["picture_age"] = np.arange(T) - np.asarray(episode.steps_P)[shown_T]
        columns["seed"] = np.full(T, episode.seed, np.int64)
        columns["timestamp"] = (np.arange(T) / self.fps).astype(np.float32)
        columns["frame_index"] = np.arange(T)
        columns["episode_index"] = np.full(T, number)
        columns["index"] = self.frames + np.arange(T)
        columns["task_index"] = np.full(T, self.tasks.index(episode.instruction))
        return columns

    def _write_rows(self, columns: Mapping[str, np.ndarray]) -> dict[str, int]:
        pa = self._pa
        arrays, fields = [], []
        for name, values in columns.items():
            array = pa.array(values.reshape(-1))
            # lerobot stores a single value as a plain number
            if values.ndim == 2 and values.shape[1] > 1:
                array = pa.FixedSizeListArray.from_arrays(array, values.shape[1])
            arrays.append(array)
            fields.append(pa.field(name, array.type))
        table = pa.Table.from_arrays(arrays, schema=pa.schema(fields))
        if self._data is not None and self._data_bytes + table.nbytes > self.data_mb * 2**20:
            self._data.close()
            self._data, self._data_bytes, self._data_file = None, 0, self._data_file + 1
        place = _place(self._data_file)
        if self._data is None:
            path = self._path(DATA_PATH.format(**place))
            self._data = self._pq.ParquetWriter(path, table.schema, compression="snappy")
        self._data.write_table(table)
        self._data_bytes += table.nbytes
        return {f"data/{key}": value for key, value in place.items()}

    def _write_pictures(
        self, key: str, frames_PHWC: np.ndarray, shown_T: np.ndarray
    ) -> dict[str, Any]:
        file = self._videos.get(key)
        if file is not None and file.bytes > self.video_mb * 2**20:
            file.close()
            file = None
            self._video_file[key] += 1
        place = _place(self._video_file.setdefault(key, 0))
        if file is None:
            path = self._path(VIDEO_PATH.format(video_key=key, **place))
            height, width = frames_PHWC.shape[1:3]
            file = self._videos[key] = Mp4File(path, self.fps, height, width, self.video)
        begin = file.seconds
        for t, p in enumerate(shown_T):
            file.add(frames_PHWC[p], first=t == 0)
        counts = Histogram()
        counts.add(frames_PHWC, np.bincount(shown_T, minlength=len(frames_PHWC)))
        self._pixels.setdefault(key, Histogram()).merge(counts)
        row: dict[str, Any] = {f"videos/{key}/{name}": value for name, value in place.items()}
        row |= {f"videos/{key}/from_timestamp": begin, f"videos/{key}/to_timestamp": file.seconds}
        return row | {f"stats/{key}/{name}": value for name, value in counts.stats().items()}

    def _path(self, relative: str) -> str:
        path = os.path.join(self._folder, relative)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    # -- the end --------------------------------------------------------------------------------------------------------------

    def close(self) -> str:
        """Complete the data set and return its folder. Raises DataError when it has no episode (nothing is left then)."""
        if not self._open:
            return self.out
        if not self._episodes:
            self.abort()
            raise DataError(
                f"expected at least one episode for {self.out}, found none; nothing was written"
            )
        try:
            self._close_files()
            self._write_meta()
            self._refuse_existing()
            self._move()
        except BaseException:
            self.abort()
            raise
        self._open = False
        return self.out

    def _move(self) -> None:
        if os.path.isdir(self.out) and os.listdir(self.out):
            old = f"{self._folder}.old"
            os.rename(self.out, old)
            os.rename(self._folder, self.out)
            shutil.rmtree(old)
        else:
            os.rename(self._folder, self.out)  # over an empty folder, or to a new name

    def abort(self) -> None:
        """Remove what was written."""
        if self._open:
            self._open = False
            self._close_files()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _close_files(self) -> None:
        if self._data is not None:
            self._data.close()
            self._data = None
        for file in self._videos.values():
            file.close()
        self._videos = {}

    def _write_meta(self) -> None:
        pa = self._pa
        place = {f"meta/episodes/{key}": value for key, value in _place(0).items()}
        rows = [row | place for row in self._episodes]
        self._pq.write_table(
            pa.Table.from_pylist(rows), self._path(EPISODES_PATH.format(**_place(0)))
        )
        self._pq.write_table(tasks_table(self.tasks), self._path("meta/tasks.parquet"))
        stats = {name: column_stats(np.concatenate(parts)) for name, parts in self._columns.items()}
        stats |= {key: counts.stats() for key, counts in self._pixels.items()}
        self._write_json("meta/stats.json", stats)
        self._write_json("meta/info.json", self._info())

    def _info(self) -> dict[str, Any]:
        features: dict[str, Any] = {}
        if self.shapes["proprio"][0]:
            features["observation.state"] = vector(self.shapes["proprio"][0])
        features["action"] = vector(self.shapes["actions"][0], self.action_names)
        features["executed_action"] = vector(self.shapes["actions"][0], self.action_names)
        features |= {
            name: {"dtype": kind, "shape": [1], "names": None} for name, kind in _OWN.items()
        }
        quality, value = self.video.quality
        pix_fmt = "gbrp" if self.video.codec == "libx264rgb" else self.video.pix_fmt
        for name, shape in self.shapes.items():
            if name.startswith("pictures of "):
                features[PREFIX + name.removeprefix("pictures of ")] = {
                    "dtype": "video",
                    "shape": list(shape),
                    "names": ["height", "width", "channels"],
                    "info": {
                        "video.height": shape[0],
                        "video.width": shape[1],
                        "video.channels": 3,
                        "video.codec": "h264",
                        "video.pix_fmt": pix_fmt,
                        "video.fps": self.fps,
                        "video.is_depth_map": False,
                        "has_audio": False,
                        "video.g": self.video.keyframe_every,
                        f"video.{quality}": value,
                        "video.preset": self.video.preset,
                        "video.lossless": self.video.lossless,
                    },
                }
        return {
            "codebase_version": VERSION,
            "robot_type": self.robot,
            "total_episodes": len(self._episodes),
            "total_frames": self.frames,
            "total_tasks": len(self.tasks),
            "chunks_size": _CHUNK_FILES,
            "data_files_size_in_mb": self.data_mb,
            "video_files_size_in_mb": self.video_mb,
            "fps": self.fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH,
            "features": {**features, **DEFAULT_FEATURES},
            "mmrl": self.notes,
        }

    def _write_json(self, relative: str, data: Any) -> None:
        with open(self._path(relative), "w", encoding="utf-8") as file:
            json.dump(data, file, indent=4, ensure_ascii=False)


def _place(number: int) -> dict[str, int]:
    """File `number` as chunk and file index."""
    return {"chunk_index": number // _CHUNK_FILES, "file_index": number % _CHUNK_FILES}
