"""AndroidControl: GZIP TFRecords of episodes, read without tensorflow; one sample per step.

    <root>/android_control-00000-of-00020 ...   <root>/splits.json   <root>/test_subsplits.json

Each record is a tf.train.Example with episode_id, goal, screenshots, accessibility_trees, screenshot_widths,
screenshot_heights, actions (JSON texts) and step_instructions; there is one action fewer than screenshots. `level` low
asks with the goal and the step's instruction, high with the goal only. Earlier step instructions are params.history. The
id of a step is that of OS-Atlas's test list, episode_140_screenshot_0.

    python -c "from mmrl.tasks.readers.android_control import read_android_control as r; print(len(r('android_control')))"
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError, MediaError, did_you_mean
from mmrl.tasks.readers.common import Check, Readout, RowError, SizeOf, SkipRow, collect, text_of
from mmrl.tasks.readers.gui_steps import step_answer
from mmrl.tasks.readers.problem_types import check_by_task, fixed_task
from mmrl.tasks.readers.tables import data_files, media_folder, read_files, read_json
from mmrl.tasks.readers.tfrecord import Feature, fields, parse_example, read_records
from mmrl.types import Sample
from mmrl.video.media import store_bytes

__all__ = ["element_at", "read_android_control"]

_LEVELS = ("high", "low")
_KINDS: Mapping[str, type] = {
    "episode_id": int,
    "goal": bytes,
    "screenshots": bytes,
    "screenshot_widths": int,
    "screenshot_heights": int,
    "actions": bytes,
    "step_instructions": bytes,
}


class _Episode(NamedTuple):
    """One record, decoded; lists as long as the actions, the screenshots one longer."""

    name: str
    goal: str
    screenshots: list[bytes]
    trees: list[bytes]
    widths: list[int]
    heights: list[int]
    actions: list[str]
    instructions: list[str]


def _texts(values: Iterable[Any], name: str) -> list[str]:
    try:
        return [value.decode("utf-8") for value in values]
    except UnicodeDecodeError as err:
        raise RowError(
            f"UTF-8 text in '{name}'", str(err), "download the official file again"
        ) from err


def _episode(data: bytes) -> _Episode:
    """The episode in a record. Raises RowError."""
    try:
        found: dict[str, Feature] = parse_example(data)
    except ValueError as err:
        raise RowError(
            "a tf.train.Example", f"other bytes ({err})", "download the official file again"
        ) from err
    for name, kind in _KINDS.items():
        if name not in found:
            raise RowError(
                f"feature '{name}'",
                f"{', '.join(sorted(found)) or 'none'}",
                "is it AndroidControl?",
            )
        if not all(isinstance(value, kind) for value in found[name]):
            raise RowError(
                f"'{name}' as a list of {kind.__name__}",
                "another kind of list",
                "download the official file again",
            )
    values: dict[str, list[Any]] = {name: list(content) for name, content in found.items()}
    steps = len(values["actions"])
    for name, wanted in (
        ("episode_id", 1),
        ("goal", 1),
        ("step_instructions", steps),
        ("screenshots", steps + 1),
        ("screenshot_widths", steps + 1),
        ("screenshot_heights", steps + 1),
    ):
        if len(values[name]) != wanted:
            raise RowError(
                f"{wanted} values of '{name}' for {steps} actions",
                str(len(values[name])),
                "download the official file again",
            )
    return _Episode(
        str(values["episode_id"][0]),
        _texts(values["goal"], "goal")[0],
        values["screenshots"],
        values.get("accessibility_trees", []),
        values["screenshot_widths"],
        values["screenshot_heights"],
        _texts(values["actions"], "actions"),
        _texts(values["step_instructions"], "step_instructions"),
    )


def _answer(text: str) -> dict[str, Any]:
    """The JSON text of an action as a step; points in pixels."""
    try:
        action = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise RowError(
            "an action as JSON", f"{text[:60]!r} ({err})", "download the official file again"
        ) from err
    if not isinstance(action, dict):
        raise RowError(
            "an action as a JSON object", repr(action)[:60], "download the official file again"
        )
    place = [action["x"], action["y"]] if "x" in action and "y" in action else None
    if place is not None and not all(type(v) in (int, float) for v in place):
        raise RowError("x and y as numbers", repr(place)[:60], "download the official file again")
    words = next(
        (action[key] for key in ("text", "app_name", "direction") if action.get(key) is not None),
        None,
    )
    return step_answer(action.get("action_type"), place=place, words=words)


def element_at(tree: bytes, point: tuple[float, float]) -> list[int] | None:
    """[x1, y1, x2, y2] in pixels of the smallest visible element around `point`, None when there is none.

    `tree` is a serialized AndroidAccessibilityForest (android_env/proto/a11y: windows = 1, tree = 11, nodes = 1,
    bounds_in_screen = 2, is_visible_to_user = 23; ProtoRect left, top, right, bottom = 1..4). Raises ValueError.
    """
    best: list[int] | None = None
    for _, _, window in (f for f in fields(memoryview(tree)) if f[:2] == (1, 2)):
        for _, _, nodes in (f for f in fields(window) if f[:2] == (11, 2)):
            for _, _, node in (f for f in fields(nodes) if f[:2] == (1, 2)):
                bounds, visible = [0, 0, 0, 0], False
                for number, wire, value in fields(node):
                    if (number, wire) == (23, 0):
                        visible = bool(value)
                    elif (number, wire) == (2, 2):
                        for side, kind, edge in fields(value):
                            if kind == 0 and 1 <= side <= 4:
                                bounds[side - 1] = edge - (1 << 64) if edge >> 63 else edge
                x1, y1, x2, y2 = bounds
                inside = (
                    visible
                    and x1 <= point[0] <= x2
                    and y1 <= point[1] <= y2
                    and x1 < x2
                    and y1 < y2
                )
                if inside and (
                    best is None
                    or (x2 - x1) * (y2 - y1) < (best[2] - best[0]) * (best[3] - best[1])
                ):
                    best = bounds
    return best


def _ids(file: Path, part: str, what: str) -> set[str]:
    """Episode ids of one part of splits.json or test_subsplits.json."""
    parts = read_json(file)
    if not isinstance(parts, dict) or not all(isinstance(ids, list) for ids in parts.values()):
        raise DataError(
            f"{file}: expected an object of lists of episode ids, found another content; download it again"
        )
    if part not in parts:
        raise ConfigError(
            f"unknown {what} {part!r}; {file} has {', '.join(parts)}.{did_you_mean(part, parts)}"
        )
    return {str(i) for i in parts[part]}


def _steps(file: Path, wanted: set[str] | None, verify: bool) -> Iterator[tuple[int, Any]]:
    """(record number, (episode, step)) of every step of the wanted episodes."""
    for number, data in read_records(file, verify=verify):
        try:
            if isinstance(data, RowError):
                raise data
            episode = _episode(data)
            if wanted is not None and episode.name not in wanted:
                raise SkipRow("episodes of other splits")
        except (RowError, SkipRow) as err:
            yield number, err
            continue
        for step in range(len(episode.actions)):
            yield number, (episode, step)


def _sample(
    episode: _Episode,
    step: int,
    size_of: SizeOf,
    *,
    own: str,
    low: bool,
    elements: bool,
    media: Path,
    check: Check,
) -> Sample:
    answer = _answer(episode.actions[step])
    image = store_bytes(episode.screenshots[step], media)
    size = size_of(image)
    if size != (episode.widths[step], episode.heights[step]):
        raise RowError(
            "a screenshot of the size the record says",
            f"{size}, and {episode.widths[step]} x {episode.heights[step]} in the record",
            "download the official file again",
        )
    instruction = text_of(episode.instructions[step], "step_instructions") if low else ""
    goal = text_of(episode.goal, "goal")
    params: dict[str, Any] = {
        "width": size[0],
        "height": size[1],
        "platform": "mobile",
        "space": "mobile",
        "level": "low" if low else "high",
        "history": [text.strip() for text in episode.instructions[:step]],
    }
    if elements and "point" in answer and len(episode.trees) > step:
        try:
            box = element_at(episode.trees[step], tuple(answer["point"]))
        except ValueError as err:
            raise RowError(
                "an accessibility tree",
                f"other bytes ({err})",
                "set reader.elements=false to do without",
            ) from err
        answer |= {"bbox": box} if box else {}
    return Sample(
        id=f"episode_{episode.name}_screenshot_{step}",
        task=own,
        source="AndroidControl",
        question=f"{goal}\nStep: {instruction}" if low else goal,
        answer=check(own, answer, CoordFrame.ABS_ORIG, [size], params),
        images=(image,),
        params=params,
    )


def read_android_control(
    path: str | Path,
    *,
    level: str = "high",
    split: str | None = None,
    subsplit: str | None = None,
    elements: bool = False,
    verify: bool = True,
    media_dir: str | None = None,
    task: str = "gui_action",
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read AndroidControl: its folder or one TFRecord file. Row numbers in errors count records of the file.

    `split` is a part of splits.json (train, validation, test), `subsplit` one of test_subsplits.json (IDD, app_unseen ...),
    both beside the data; `elements` adds to a point the box of the smallest element of the accessibility tree around it;
    `verify` checks the data's checksums (0.02 s per MB); screenshots are written to `media_dir` (default '<file>.media').
    """
    if level not in _LEVELS:
        raise ConfigError(
            f"unknown level {level!r}; expected {' or '.join(_LEVELS)}.{did_you_mean(str(level), _LEVELS)}"
        )
    own, where = fixed_task("android_control", "gui_action", task, types), Path(path)
    folder = where if where.is_dir() else where.parent
    files = [
        f
        for f in data_files(where, "android_control*", "*tfrecord*")
        if f == where or f.suffix != ".json"
    ]
    wanted: set[str] | None = None
    for part, name, what in (
        (split, "splits.json", "split"),
        (subsplit, "test_subsplits.json", "subsplit"),
    ):
        if part is not None:
            ids = _ids(folder / name, part, what)
            wanted = ids if wanted is None else wanted & ids

    def read_one(file: Path) -> Readout:
        media = media_folder(file, media_dir)

        def convert(number: int, row: Any, size_of: SizeOf) -> Iterable[Sample]:
            episode, step = row
            try:
                return [
                    _sample(
                        episode,
                        step,
                        size_of,
                        own=own,
                        low=level == "low",
                        elements=elements,
                        media=media,
                        check=check,
                    )
                ]
            except (RowError, MediaError) as err:
                raise DataError(f"episode {episode.name}, step {step}: {err}") from err

        return collect(file, _steps(file, wanted, verify), convert, on_error)

    return read_files(files, read_one, on_error)
