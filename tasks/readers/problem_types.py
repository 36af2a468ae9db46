"""Which mmrl task a row belongs to: names of problem types, as each format spells them, to task names.

A file may hold rows of several tasks. Asked for one task, a row of another is an error, unless `only_mine` leaves it
out and counts it; asked for `mixed`, each row goes to its own task; a type that is not in the table is an error. The
reader option `types` adds names or sends a type elsewhere: reader.types={'free-form': 'chart'}.

    python -c "from mmrl.tasks.readers.problem_types import Routes; print(Routes('video_r1', 'mixed').task_of('OCR'))"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, did_you_mean
from mmrl.registry import BUILT_IN, resolve_task, task_from_spec
from mmrl.task import Task
from mmrl.tasks.readers.common import RowError, SkipRow

__all__ = [
    "PROBLEM_TYPES",
    "Routes",
    "check_by_task",
    "fixed_task",
    "refuse_sounds",
    "refuse_video",
    "type_params",
]

_VIDEO_R1 = {
    "multiple choice": "choice",
    "numerical": "numeric",
    "ocr": "ocr",
    "free form": "open_text",
    "regression": "numeric",
    "math": "math",
    "boolean": "boolean",
    "open ended": "open_text",
    "spatial grounding": "grounding",
    "temporal grounding": "temporal_grounding",
    "spatial temporal grounding": "st_grounding",
    "tracking": "tracking",
    "grounded qa": "grounded_qa",
    "video qa": "open_text",
    "video description": "open_text",
    "number": "numeric",
    "mathematics": "math",
    "binary classification": "boolean",
}
PROBLEM_TYPES: Mapping[str, Mapping[str, str]] = {
    "video_r1": _VIDEO_R1,
    "easyr1": {
        **_VIDEO_R1,
        "grounding": "grounding",
        "detection": "detection",
        "counting": "counting",
    },
    "llama_factory": _VIDEO_R1,
    "vlm_r1": {
        **_VIDEO_R1,
        "mcq": "choice",
        "yes no": "boolean",
        "math": "math",
        "map": "detection",
        "map 50": "detection",
        "od ap": "detection",
        "od ap50": "detection",
        "odlength": "detection",
        "weighted sum": "detection",
        "rec": "grounding",
        "grounding": "grounding",
    },
    "mathvista": {
        "multi choice": "choice",
        "integer": "numeric",
        "float": "numeric",
        "text": "open_text",
        "list": "open_text",
    },
    "mmmu": {"multiple choice": "choice", "open": "open_text"},
    "ui_r1": {"grounding": "gui_grounding", "action": "gui_action"},
}
"""Format -> {problem type in lower case, with spaces for - and _ : task}. VLM-R1's accu_reward_method counts as a type."""


def _plain(name: str) -> str:
    return " ".join(name.replace("_", " ").replace("-", " ").lower().split())


class Routes:
    """Sends the rows of one format to tasks. `table` may be {type: task}, or the name of a format of PROBLEM_TYPES.

    Task names that are not built in (plug-ins) take every row: they know what they asked for.
    """

    def __init__(
        self,
        format: str,
        task: str,
        types: Mapping[str, str] | None = None,
        only_mine: bool = False,
        table: Mapping[str, str] | None = None,
    ) -> None:
        self.format, self.task, self.only_mine = format, task, only_mine
        if not isinstance(only_mine, bool):
            raise ConfigError(f"expected reader.only_mine true or false, found {only_mine!r}")
        if types is not None and not isinstance(types, Mapping):
            raise ConfigError(
                f"expected reader.types as a mapping of problem types to tasks, found {types!r}; for example "
                "{'free-form': 'chart'}"
            )
        known = [name for name in (*BUILT_IN, task) if name != "mixed"]
        for kind, target in (types or {}).items():
            # a mixed task checks every row's task itself: it has its own members
            if task != "mixed" and target not in known:
                raise ConfigError(
                    f"reader.types sends {kind!r} to unknown task {target!r}; expected one of "
                    f"{', '.join(known)}.{did_you_mean(str(target), known)}"
                )
        names = table if table is not None else PROBLEM_TYPES.get(format, {})
        self.table = {
            _plain(str(kind)): target for kind, target in {**names, **(types or {})}.items()
        }

    def task_of(self, kind: Any) -> str:
        """The task of a row of problem type `kind` (None when the row has none). Raises RowError or SkipRow."""
        if kind is None or kind == "":
            if self.task != "mixed":
                return self.task
            raise RowError(
                "a problem type, because the task is mixed",
                "none in the row",
                "name the task of the file instead, or add the type",
            )
        if not isinstance(kind, str):
            raise RowError(
                "a problem type as text", repr(kind)[:60], f"write one of {', '.join(self.table)}"
            )
        own = self.table.get(_plain(kind))
        if (
            own == self.task
            or (own is not None and self.task == "mixed")
            or self.task not in BUILT_IN
        ):
            return own if self.task == "mixed" and own is not None else self.task
        if self.only_mine:
            raise SkipRow(f"task {own}" if own else f"problem type {kind!r}, which no task takes")
        if own is None:
            raise RowError(
                f"one of the problem types {', '.join(self.table)}",
                repr(kind)[:60],
                f"say where it belongs: reader.types={{{kind!r:.60}: 'choice'}}, or set reader.only_mine=true to "
                f"leave such rows out.{did_you_mean(_plain(kind), self.table)}",
            )
        raise RowError(
            f"rows of task {self.task}",
            f"a row of type {kind!r:.60} (task {own})",
            "use task mixed, or set reader.only_mine=true to leave rows of other tasks out",
        )


def fixed_task(format: str, kind: str, task: str, types: Mapping[str, str] | None = None) -> str:
    """The task of a format that holds one kind of rows, whose usual task is `kind`. Raises ConfigError for another task, and for
    one that `types` names and that cannot take their answers."""
    try:
        own = Routes(format, task, types, table={kind: kind}).task_of(kind)
    except RowError:
        raise ConfigError(
            f"the {format} format holds task {kind}, found task {task}; use task {kind} or mixed, "
            + _another_way(format, kind, task)
        ) from None
    # labelled boxes
    if kind == "detection" and own != kind and not _singles(format, own) and not _alike(kind, own):
        raise ConfigError(
            f"reader.types sends task {kind}, which the {format} format holds, to task {own}: use task {kind} or "
            "mixed, " + _another_way(format, kind, own)
        )
    return own


def _singles(format: str, task: str) -> bool:
    """Whether the reader makes rows of one object out of its pictures."""
    return task == "grounding" and format in ("coco", "lvis")


def _shapes(kind: str, task: str) -> tuple[str, str]:
    """How answers of two tasks look in words; '' for tasks that are not built in."""
    theirs, wanted = (
        getattr(resolve_task(name), "shape", "") if name in BUILT_IN else ""
        for name in (kind, task)
    )
    return theirs, wanted


def _alike(kind: str, task: str) -> bool:
    """Whether a task can take the answers of another: words are read as words, lists and objects only as what they are."""
    theirs, wanted = _shapes(kind, task)
    return not wanted or theirs == wanted or not {theirs[:1], wanted[:1]} & {"[", "{"}


def _another_way(format: str, kind: str, task: str) -> str:
    """How rows of `kind` may become rows of `task`: by sending them there where the reader can or the answers look alike, else
    only by hand."""
    if _singles(format, task):
        return (
            "or ask for each category of which a picture shows exactly one object: reader.types={'detection': 'grounding'}, in "
            "data.train[].params or --param"
        )
    if _alike(kind, task):
        return f"or send its rows there: reader.types={{{kind!r}: {task!r}}}"
    theirs, wanted = _shapes(kind, task)
    return (
        f"whose answers are {theirs}; those of task {task} are {wanted}, so that the rows have to be written anew, as mmrl's "
        'own ({"image": ..., "question": ..., "answer": ...}, tasks/readers/own.py)'
    )


def refuse_video(what: str, images_only: bool) -> None:
    """A row with a video: SkipRow when `images_only`, else RowError."""
    if images_only:
        raise SkipRow(f"not pictures only: {what}")
    raise RowError(
        "a row with pictures only", what, "set reader.images_only=true to leave such rows out"
    )


def refuse_sounds(images_only: bool) -> None:
    """A row that is about sounds, which a format does not read: SkipRow when `images_only`, else RowError."""
    if images_only:
        raise SkipRow("not pictures only: a row with audios")
    raise RowError(
        "a row without sounds, which this format does not read",
        "a row with audios",
        "name its columns, reader.columns={audio: ..., question: ..., answer: ...}, or set reader.images_only=true to leave rows "
        "with sounds or videos out",
    )


def type_params(task: str, kind: Any) -> dict[str, Any]:
    """Params that follow from the problem type: `regression` is marked, and scored as the task's preset does: Video-R1 and
    EasyVideoR1 have different rules for it."""
    if task == "numeric" and isinstance(kind, str) and _plain(kind) == "regression":
        return {"regression": True}
    return {}


@lru_cache(maxsize=64)
def _default_task(name: str) -> Task:
    return task_from_spec(name)


def check_by_task(
    task: str,
    value: Any,
    frame: CoordFrame,
    sizes: Sequence[tuple[int, int]],
    params: Mapping[str, Any],
) -> Any:
    """The check of the built-in task called `task`, with its default parameters: what readers do when used alone."""
    return _default_task(task).check_answer(value, frame, sizes, params)  # type: ignore[attr-defined]
