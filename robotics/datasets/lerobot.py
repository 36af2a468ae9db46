"""Reading LeRobot data sets of versions v2.0, v2.1 and v3.0 from a local folder.

    demos = LeRobotDataset("runs/push_demos")
    for demo in demos: ...                                    # in order, one episode's numbers in memory at a time

    python -c "from mmrl.robotics.datasets.lerobot import LeRobotDataset as L; import sys; \
      print(len(L(sys.argv[1])))" runs/push_demos

v2.x: one parquet and one mp4 per episode, meta/episodes.jsonl and tasks.jsonl. v3.0: files of many episodes; meta/episodes says
which rows of which file, and from which second of which video. Paths come from the templates of info.json. Pictures stored as
image columns (png bytes in the parquet) are read too. Frames are decoded by mmrl.video.decoders, exactly those asked for.

Legend: T control steps, A action dimensions, S proprioception values.
"""

from __future__ import annotations

import functools
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mmrl.data.bounds import check_spelt_out, lines_bounded, open_parquet, read_bounded
from mmrl.errors import ConfigError, DataError, MediaError, did_you_mean
from mmrl.robotics.actions import ActionStatistics
from mmrl.robotics.datasets.demonstration import Demonstration, import_or_say
from mmrl.robotics.datasets.layout import PREFIX, fill
from mmrl.video.media import FORMATS, MAX_PIXELS

__all__ = ["LeRobotDataset"]

_MAX_META = 256 << 20  # bytes of a JSON file of meta/
_VERSION = re.compile(r"v?([23])\.(\d+)(?:\.\d+)?")


class LeRobotDataset:
    """A sequence of Demonstrations. cameras: short names ("base" for observation.images.base) to offer, None: all. state_key
    None or a column that is not there: S is 0. keep: "all", or "success" to leave out episodes marked as failures.

    Raises DataError when the folder, a file or a row is not what info.json says, ConfigError for a camera it has not.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        cameras: Sequence[str] | None = None,
        keep: str = "all",
        action_key: str = "action",
        state_key: str | None = "observation.state",
    ) -> None:
        if keep not in ("all", "success"):
            raise ConfigError(
                f"expected keep as all or success, found {keep!r}.{did_you_mean(keep, ('all', 'success'))}"
            )
        self.path = os.fspath(path)
        self.info = _json(
            self._file("meta/info.json"), "copy the whole data set, with its meta folder"
        )
        self.version = self._version()
        features = self.info.get("features")
        if not isinstance(features, dict) or not all(
            isinstance(f, dict) for f in features.values()
        ):
            raise DataError(
                f"{self.path}/meta/info.json: expected features as an object of objects, found "
                f"{type(features).__name__}"
            )
        self.features: dict[str, Any] = features
        self.fps = float(self._number("fps"))
        self.action_key, self.state_key = (
            action_key,
            state_key if state_key in self.features else None,
        )
        asked = [("action_key", action_key)]
        if state_key not in (None, "observation.state"):
            asked.append(("state_key", str(state_key)))
        for setting, key in asked:
            if key not in self.features:
                raise DataError(
                    f"{self.path}: expected a column {key}, found {', '.join(self.features)}; name it with "
                    f"demos.{setting} ({setting} in Python).{did_you_mean(key, self.features)}"
                )
        known = {
            key.removeprefix(PREFIX).removeprefix("observation."): key
            for key, feature in self.features.items()
            if feature.get("dtype") in ("video", "image")
        }
        for camera in cameras or ():
            if camera not in known:
                raise ConfigError(
                    f"{self.path}: expected cameras among {', '.join(known) or 'none'}, found {camera!r}."
                    f"{did_you_mean(camera, known)}"
                )
        self._camera_keys = {
            name: key for name, key in known.items() if cameras is None or name in cameras
        }
        import_or_say("pyarrow.parquet", "pip install pyarrow")
        self.tasks, self._episodes = self._read_v3() if self.version[0] == 3 else self._read_v2()
        if keep == "success":
            self._episodes = [row for row in self._episodes if row.get("success") is not False]
        self._opened: tuple[str, Any] = ("", None)

    def __len__(self) -> int:
        return len(self._episodes)

    def __iter__(self) -> Iterator[Demonstration]:
        for number in range(len(self)):
            yield self[number]

    def __getitem__(self, number: int) -> Demonstration:
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.path} has {len(self)} episodes, found number {number}")
        return self._demonstration(self._episodes[number])

    @property
    def cameras(self) -> tuple[str, ...]:
        """Short names."""
        return tuple(self._camera_keys)

    def action_statistics(self) -> ActionStatistics:
        """q01, q99 and the like of the actions, from meta/stats.json (v3.0) or computed from all episodes."""
        file = self._file("meta/stats.json")
        stats = _json(file, "").get(self.action_key) if os.path.exists(file) else None
        if isinstance(stats, dict) and "q01" in stats and "q99" in stats:
            found = ActionStatistics.of_entry(
                {k: v for k, v in stats.items() if k != "mask"}, {}, f"{file}, {self.action_key}"
            )
            return replace(
                found, transitions=int(self.info.get("total_frames", 0)), trajectories=len(self)
            )
        return ActionStatistics.of(
            np.concatenate([demo.actions_TA for demo in self]), trajectories=len(self)
        )

    # -- meta -----------------------------------------------------------------------------------------------------------------

    def _file(self, relative: str) -> str:
        return os.path.join(self.path, relative)

    def _version(self) -> tuple[int, int]:
        found = self.info.get("codebase_version")
        match = _VERSION.fullmatch(found) if isinstance(found, str) else None
        if match is None:
            raise DataError(
                f"{self.path}/meta/info.json: expected codebase_version v2.0, v2.1 or v3.0, found {str(found)[:40]!r}; "
                "convert the data set with lerobot's own scripts"
            )
        return int(match[1]), int(match[2])

    def _number(self, key: str) -> Any:
        value = self.info.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
            raise DataError(
                f"{self.path}/meta/info.json: expected {key} as a number above 0 and below a million, found {value!r}"
            )
        return value

    def _read_v2(self) -> tuple[dict[int, str], list[dict[str, Any]]]:
        tasks = {}
        for row in _lines(self._file("meta/tasks.jsonl")):
            tasks[int(row["task_index"])] = str(row["task"])
        size = int(self.info.get("chunks_size", 1000))
        episodes = []
        for row in _lines(self._file("meta/episodes.jsonl")):
            number = int(row["episode_index"])
            place = {"episode_chunk": number // max(1, size), "episode_index": number}
            videos = {
                key: (self._video(place | {"video_key": key}), 0.0) for key in self._video_keys()
            }
            episodes.append(
                {
                    "episode_index": number,
                    "length": int(row["length"]),
                    "tasks": row.get("tasks") or [],
                    "from": 0,
                    "file": fill(self.info.get("data_path"), place, self.path),
                    "videos": videos,
                }
            )
        return tasks, episodes

    def _read_v3(self) -> tuple[dict[int, str], list[dict[str, Any]]]:
        table = self._table(self._file("meta/tasks.parquet"))
        text = next(
            (name for name in ("task", "__index_level_0__") if name in table.column_names), None
        )
        if text is None or "task_index" not in table.column_names:
            raise DataError(
                f"{self.path}/meta/tasks.parquet: expected columns task and task_index, found "
                f"{', '.join(table.column_names)}"
            )
        tasks = {
            int(i): str(t)
            for i, t in zip(table["task_index"].to_pylist(), table[text].to_pylist(), strict=True)
        }
        folder = self._file("meta/episodes")
        files = sorted(
            os.path.join(root, name)
            for root, _, names in os.walk(folder)
            for name in names
            if name.endswith(".parquet")
        )
        if not files:
            raise DataError(
                f"{self.path}: expected parquet files under meta/episodes, found none; copy the whole data set"
            )
        episodes = []
        for file in files:
            table = self._table(file, lambda name: not name.startswith("stats/"))
            episodes += [self._episode_v3(row, file) for row in table.to_pylist()]
        episodes.sort(key=lambda row: row["episode_index"])
        first: dict[str, int] = {}
        for row in episodes:
            first[row["file"]] = min(first.get(row["file"], row["from"]), row["from"])
        for row in episodes:
            row["from"] -= first[row["file"]]  # rows of the file, not of the data set
        return tasks, episodes

    def _episode_v3(self, row: dict[str, Any], file: str) -> dict[str, Any]:
        try:
            place = {key: int(row[f"data/{key}"]) for key in ("chunk_index", "file_index")}
            found: dict[str, Any] = {
                "episode_index": int(row["episode_index"]),
                "length": int(row["length"]),
                "tasks": row.get("tasks") or [],
                "from": int(row["dataset_from_index"]),
                "success": row.get("success"),
                "state": row.get("state") or "",
                "file": fill(self.info.get("data_path"), place, self.path),
                "videos": {},
            }
            for key in self._video_keys():
                at = {
                    name: int(row[f"videos/{key}/{name}"]) for name in ("chunk_index", "file_index")
                }
                found["videos"][key] = (
                    self._video(at | {"video_key": key}),
                    float(row[f"videos/{key}/from_timestamp"]),
                )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{file}: expected the columns of LeRobot v3.0, found none or a wrong {error}; "
                "convert the data set again"
            ) from error
        return found

    def _video_keys(self) -> list[str]:
        return [key for key in self._camera_keys.values() if self.features[key]["dtype"] == "video"]

    def _video(self, values: dict[str, Any]) -> str:
        return fill(self.info.get("video_path"), values, self.path)

    def _table(self, path: str, wanted: Callable[[str], bool] | None = None) -> Any:
        with _Reading(path):
            file = open_parquet(path)
            names = [name for name in file.schema_arrow.names if wanted is None or wanted(name)]
            return check_spelt_out(file.read(columns=names), path)

    # -- episodes -------------------------------------------------------------------------------------------------------------

    def _rows(self, row: dict[str, Any]) -> Any:
        """The table of an episode, its pictures apart."""
        path = self._file(row["file"])
        begin, end = row["from"], row["from"] + row["length"]
        images = {k for k in self._camera_keys.values() if self.features[k]["dtype"] == "image"}
        table = self._cut(row, lambda name: name not in images)
        if "episode_index" in table.column_names and set(table["episode_index"].to_pylist()) != {
            row["episode_index"]
        }:
            raise DataError(
                f"{path}: expected only episode {row['episode_index']} in rows {begin} to {end}, found "
                f"{sorted(set(table['episode_index'].to_pylist()))[:5]}; meta and data do not belong together"
            )
        return table

    def _cut(self, row: dict[str, Any], wanted: Callable[[str], bool]) -> Any:
        """The wanted columns of an episode: of the row groups that hold it, cut to its rows."""
        path = self._file(row["file"])
        begin, end = row["from"], row["from"] + row["length"]
        with _Reading(path):
            if self._opened[0] != path:
                self._opened = path, open_parquet(path)
            file = self._opened[1]
            columns = [name for name in file.schema_arrow.names if wanted(name)]
            sizes = [
                file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)
            ]
            starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
            groups = [g for g in range(len(sizes)) if starts[g] < end and starts[g + 1] > begin]
            if end > starts[-1] or (self.version[0] == 2 and end != starts[-1]):
                raise DataError(
                    f"{path}: expected rows {begin} to {end} (episode {row['episode_index']}), found "
                    f"{starts[-1]} rows; the recording was interrupted or the meta folder is another data set's"
                )
            return file.read_row_groups(groups, columns=columns).slice(
                begin - int(starts[groups[0]]), row["length"]
            )

    def _demonstration(self, row: dict[str, Any]) -> Demonstration:
        source = f"{self.path}, episode {row['episode_index']}"
        if row["length"] < 1:
            raise DataError(
                f"{source}: expected at least one control step, found length {row['length']}"
            )
        table = self._rows(row)
        T = row["length"]
        actions = self._matrix(table, self.action_key, source)
        proprio = (
            np.zeros((T, 0), np.float32)
            if self.state_key is None
            else self._matrix(table, self.state_key, source)
        )
        executed = (
            self._matrix(table, "executed_action", source)
            if "executed_action" in table.column_names
            else None
        )
        steps = np.arange(T)
        if "picture_age" in table.column_names:
            steps = np.flatnonzero(np.asarray(table["picture_age"].to_pylist()) == 0)
        times = (
            table["timestamp"].to_numpy()
            if "timestamp" in table.column_names
            else np.arange(T) / self.fps
        )
        success = row.get("success")
        if success is None and "next.success" in table.column_names:
            success = bool(np.any(table["next.success"].to_numpy(zero_copy_only=False)))
        load = functools.partial(self._pictures, row, np.asarray(times, np.float64), source)
        return Demonstration(
            self._instruction(row, table, source),
            self.cameras,
            proprio,
            actions,
            steps,
            success,
            source,
            self.fps,
            load,
            executed,
            row.get("state", ""),
        )

    def _instruction(self, row: dict[str, Any], table: Any, source: str) -> str:
        if "task_index" in table.column_names:
            task = self.tasks.get(int(table["task_index"][0].as_py()))
            if task is not None:
                return task
        if row["tasks"]:
            return str(row["tasks"][0])
        raise DataError(
            f"{source}: expected an instruction in meta/tasks, found none for its task_index"
        )

    def _matrix(self, table: Any, key: str, source: str) -> np.ndarray:
        """Column as float32 (T, D). Raises DataError for rows of different length or values that are not finite."""
        if key not in table.column_names:
            raise DataError(
                f"{source}: expected a column {key}, found {', '.join(table.column_names)}"
            )
        try:
            values = np.asarray(table[key].to_pylist(), dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{source}: expected rows of equal length and numbers in {key}, found others ({error})"
            ) from error
        values = values.reshape(len(values), -1)
        shape = self.features.get(key, {}).get("shape")
        known = isinstance(shape, list) and all(isinstance(n, int) for n in shape)
        dim = int(np.prod(shape)) if known else values.shape[1]
        if values.shape[1] != dim:
            raise DataError(
                f"{source}: expected {dim} values of {key} as in info.json, found {values.shape[1]}"
            )
        if not np.isfinite(values).all():
            row = int(np.argwhere(~np.isfinite(values))[0][0])
            raise DataError(
                f"{source}: expected finite {key}, found NaN or infinity in row {row}; leave the episode out"
            )
        return values

    # -- pictures -------------------------------------------------------------------------------------------------------------

    def _pictures(
        self,
        row: dict[str, Any],
        times_T: np.ndarray,
        source: str,
        camera: str,
        steps: Sequence[int],
    ) -> np.ndarray:
        key = self._camera_keys[camera]
        if self.features[key]["dtype"] == "image":
            return self._stored_pictures(row, key, steps, source)
        from mmrl.video.decoders import decode_frames
        from mmrl.video.probing import scan

        relative, begin = row["videos"][key]
        path = self._file(relative)
        try:
            index = scan(path)
            wanted = begin + times_T[list(steps)]
            known = index.info.timestamps_s
            numbers = _nearest(known, wanted)
            far = np.abs(known[numbers] - wanted) > 0.25 / self.fps
            if far.any():
                raise DataError(
                    f"{source}: expected a frame at {float(wanted[far][0]):.4f} s of {path}, the nearest is at "
                    f"{float(known[numbers[far][0]]):.4f} s; the video was cut short or belongs to another data set"
                )
            unique = sorted({int(n) for n in numbers})
            frames = np.stack(list(decode_frames(index, unique, "pyav")))
        except MediaError as error:
            raise DataError(
                f"{source}: expected a readable video of {camera}, found: {error}"
            ) from error
        if len(frames) != len(unique):
            raise DataError(
                f"{source}: expected {len(unique)} frames of {path}, found {len(frames)}; copy the file again"
            )
        return frames[np.searchsorted(unique, numbers)]

    def _stored_pictures(
        self, row: dict[str, Any], key: str, steps: Sequence[int], source: str
    ) -> np.ndarray:
        """Of an image column: {"bytes": png or jpeg}."""
        from PIL import Image

        table = self._cut(row, lambda name: name == key)
        if key not in table.column_names:
            raise DataError(
                f"{source}: expected pictures in column {key}, as meta/info.json says, found no such column in "
                f"{row['file']}; copy the data set again"
            )
        out = []
        for step in steps:
            cell = table[key][step].as_py()
            data = cell.get("bytes") if isinstance(cell, dict) else None
            if not data:
                raise DataError(
                    f"{source}: expected picture bytes in column {key}, step {step}, found none"
                )
            try:
                with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
                    if picture.width * picture.height > MAX_PIXELS:
                        raise DataError(
                            f"{source}: expected a picture of at most {MAX_PIXELS:,} pixels in column {key}, step "
                            f"{step}, found {picture.width} x {picture.height}; shrink it"
                        )
                    out.append(np.asarray(picture.convert("RGB")))
            except (OSError, SyntaxError, Image.DecompressionBombError) as error:
                raise DataError(
                    f"{source}: expected a picture in column {key}, step {step}, found {error}"
                ) from error
        return np.stack(out)


def _nearest(known_N: np.ndarray, wanted_n: np.ndarray) -> np.ndarray:
    """Index of the nearest of ascending times, for each wanted one."""
    right = np.minimum(np.searchsorted(known_N, wanted_n), len(known_N) - 1)
    left = np.maximum(right - 1, 0)
    return np.where(
        np.abs(known_N[left] - wanted_n) <= np.abs(known_N[right] - wanted_n), left, right
    )


class _Reading:
    """Turns what pyarrow and the file system raise into DataError."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None:
        if not os.path.exists(self.path):
            raise DataError(
                f"expected a file {self.path}, found none; copy the whole data set (git lfs pull, if it came by git)"
            )

    def __exit__(self, kind: Any, error: BaseException | None, _: object) -> None:
        pa = import_or_say("pyarrow", "pip install pyarrow")
        if isinstance(
            error, (pa.ArrowException, OSError, MemoryError, OverflowError)
        ) and not isinstance(error, DataError):
            raise DataError(
                f"{self.path}: expected a parquet file, found {str(error)[:200]}; copy or download it again"
            ) from error


def _json(path: str, fix: str) -> dict[str, Any]:
    try:
        data = json.loads(read_bounded(path, _MAX_META))
    except FileNotFoundError as error:
        raise DataError(f"expected a file {path}, found none; {fix}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: expected JSON, found {error}; copy it again") from error
    if not isinstance(data, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def _lines(path: str) -> Iterator[dict[str, Any]]:
    """Rows of a jsonl file."""
    if not os.path.exists(path):
        raise DataError(
            f"expected a file {path}, found none; copy the whole data set, with its meta folder"
        )
    with open(path, "rb") as file:
        for number, line in lines_bounded(file):
            if isinstance(line, DataError):
                raise DataError(f"{path}, line {number}: {line}")
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(
                        f"{path}, line {number}: expected JSON, found {error}"
                    ) from error
                needed = (
                    ("task_index", "task")
                    if path.endswith("tasks.jsonl")
                    else ("episode_index", "length")
                )
                whole = [key for key in needed if key != "task"]
                if (
                    not isinstance(row, dict)
                    or any(key not in row for key in needed)
                    or any(type(row[key]) is not int for key in whole)
                ):
                    raise DataError(
                        f"{path}, line {number}: expected keys {', '.join(needed)}, whole numbers in "
                        f"{', '.join(whole)}, found {line.strip()[:80]!r}"
                    )
                yield row
