"""GUI-Odyssey: annotations/*.json, one episode per file; one sample per step, coordinates 0..1000.

    <root>/annotations/<episode>.json   <root>/screenshots/*.png   <root>/splits/{random,task,device,app}_split.json

CLICK holds [[x, y]] or a key (KEY_HOME, KEY_BACK, KEY_APPSELECT); SCROLL holds two points, from which its direction
follows as in the official converter: where the finger goes, hence a `swipe` (mmrl's `scroll` says where the view goes,
which is the opposite). Both releases are read (2024: TEXT and INCOMPLETE; 2025: sam2_bbox, the element's box).

    python -c "from mmrl.tasks.readers.gui_odyssey import read_gui_odyssey as r; print(len(r('GUIOdyssey', split='random')))"
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.tasks.readers.common import (
    Check,
    Readout,
    RowError,
    SizeOf,
    collect,
    resolve_image,
    text_of,
)
from mmrl.tasks.readers.gui_steps import direction_of, number_list, step_answer
from mmrl.tasks.readers.problem_types import check_by_task, fixed_task
from mmrl.tasks.readers.tables import data_files, read_files, read_json, row_id, size_params
from mmrl.types import Sample

__all__ = ["read_gui_odyssey"]

_SPLITS = ("random", "task", "device", "app")
_PARTS = ("train", "test")
_KEYS = ("KEY_HOME", "KEY_BACK", "KEY_APPSELECT")


def _point(info: Any) -> list[float]:
    """[[x, y]] or [x, y]."""
    return number_list(info[0] if isinstance(info, list) and len(info) == 1 else info, "info", (2,))


def _answer(step: Mapping[str, Any]) -> dict[str, Any]:
    """The step as action, its place in 0..1000."""
    name, info = text_of(step.get("action"), "action").upper(), step.get("info")
    if name in ("CLICK", "LONG_PRESS"):
        if isinstance(info, str):
            if info not in _KEYS:
                raise RowError(
                    f"info as [[x, y]] or one of {', '.join(_KEYS)}",
                    repr(info)[:60],
                    "correct the step",
                )
            return step_answer(info)
        return step_answer(name, place=_point(info))
    if name == "SCROLL":
        if not isinstance(info, list) or len(info) != 2:
            raise RowError("info of SCROLL as two points", repr(info)[:80], "correct the step")
        start, end = (number_list(point, "info", (2,)) for point in info)
        return step_answer("swipe", words=direction_of(start, end))
    return step_answer(name, words=info)


def _said(answer: Mapping[str, Any]) -> str:
    """A step as one short text for the history: 'click', 'scroll up', 'type hello'."""
    return " ".join(
        str(answer[key]) for key in ("action", "direction", "text", "app") if key in answer
    )


def _chosen(where: Path, split: str | None, part: str) -> list[Path]:
    """The episode files: all of them, or those of one part of a split."""
    files = data_files(where, "annotations/*.json", "*.json")
    if split is None:
        return files
    for given, known, name in ((split, _SPLITS, "split"), (part, _PARTS, "part")):
        if given not in known:
            raise ConfigError(
                f"unknown {name} {given!r}; expected one of {', '.join(known)}.{did_you_mean(given, known)}"
            )
    folder = (
        where
        if (where / "splits").is_dir()
        else where.parent
        if where.is_dir()
        else where.parent.parent
    )
    file = folder / "splits" / f"{split}_split.json"
    listed = read_json(file)
    names = listed.get(part) if isinstance(listed, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"{file}: expected an object with a list of file names in '{part}', found another content; download it "
            "again"
        )
    by_name = {f.stem: f for f in files}
    wanted = [name.removesuffix(".json") for name in names]
    missing = [name for name in wanted if name not in by_name]
    if missing:
        raise DataError(
            f"{file}: expected every episode of '{part}' in the annotations, found {len(missing)} missing, the first "
            f"is {missing[0]}; complete the download"
        )
    return [by_name[name] for name in wanted]


def _steps(file: Path) -> Iterator[tuple[int, Any]]:
    """(step number from 1, (episode, step, earlier steps)) of one episode."""
    episode = read_json(file)
    steps = episode.get("steps") if isinstance(episode, dict) else None
    if not isinstance(steps, list):
        yield (
            1,
            RowError(
                "an episode with 'steps'", f"{episode!r:.60}", "download the official file again"
            ),
        )
        return
    for number, step in enumerate(steps, 1):
        if isinstance(step, dict):
            yield number, (episode, step, steps[: number - 1])
        else:
            yield (
                number,
                RowError(
                    "a step that is an object", repr(step)[:60], "download the official file again"
                ),
            )


def read_gui_odyssey(
    path: str | Path,
    *,
    image_root: str | None = None,
    split: str | None = None,
    part: str = "test",
    history: int = 4,
    task: str = "gui_action",
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read GUI-Odyssey: its root folder, the annotations folder or one episode. Row numbers in errors count steps.

    `split` (random, task, device, app) and `part` (train, test) keep those episodes; `image_root` holds the screenshots,
    by default screenshots beside annotations; `history` is the number of earlier actions in params.history.
    """
    if type(history) is not int or history < 0:
        raise ConfigError(f"expected reader.history as a whole number >= 0, found {history!r}")
    own, where = fixed_task("gui_odyssey", "gui_action", task, types), Path(path)

    def read_one(file: Path) -> Readout:
        beside = file.parent.parent / "screenshots"
        root = Path(image_root) if image_root else beside if beside.is_dir() else file.parent

        def convert(number: int, row: Any, size_of: SizeOf) -> Iterable[Sample]:
            episode, step, earlier = row
            about = episode.get("task_info") if isinstance(episode.get("task_info"), dict) else {}
            answer = _answer(step)
            image = resolve_image(step.get("screenshot"), root)
            size = size_of(image)
            params: dict[str, Any] = {
                **size_params([size]),
                "platform": "mobile",
                "space": "mobile",
            }
            if history and earlier:
                params["history"] = [
                    _said(_answer(s)) for s in earlier[-history:] if isinstance(s, dict)
                ]
            params |= {k: about[k] for k in ("category",) if isinstance(about.get(k), str)}
            if step.get("sam2_bbox") and "point" in answer:
                answer["bbox"] = number_list(step["sam2_bbox"], "sam2_bbox", (4,))
            name = row_id(episode.get("episode_id"), file.stem)
            yield Sample(
                id=f"{name}-{row_id(step.get('step'), str(number - 1))}",
                task=own,
                source="GUI-Odyssey",
                question=text_of(about.get("instruction"), "task_info.instruction"),
                answer=check(own, answer, CoordFrame.REL1000, [size], params),
                images=(image,),
                params=params,
            )

        return collect(file, _steps(file), convert, on_error)

    return read_files(_chosen(where, split, part), read_one, on_error)
