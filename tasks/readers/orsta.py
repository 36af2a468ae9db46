"""Orsta-47k (V-Triune) parquet: every row names its ability, its verifier and its reward ratios.

    train/train_detection_v3det_4000.parquet  train/train_math_mmmath_3539.parquet  ...
    python -c "from mmrl.tasks.readers.orsta import read_orsta as r; print(len(r('train_math.parquet', task='mixed')))"

Columns: data_source, images (embedded), prompt [{content, role}], ability, reward_model {answer, ground_truth,
accuracy_ratio, format_ratio, verifier, verifier_parm}, extra_info. `ability` (or data_source, by reader.types) gives the
task; a single capital letter as the truth of a reasoning row makes it a choice, several boxes make grounding detection.
The ratios become params.reward.weights, non-zero det_reward_ratio params.det_reward_ratio. Boxes are in rel1000 where
det_verifier_normalized says so, else in `frame`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, did_you_mean
from mmrl.tasks.metrics.boxes import label_key
from mmrl.tasks.readers.answers import answer_in_tags, parse_literal
from mmrl.tasks.readers.common import (
    Check,
    Readout,
    RowError,
    SizeOf,
    check_frame,
    collect,
    text_of,
)
from mmrl.tasks.readers.problem_types import Routes, check_by_task
from mmrl.tasks.readers.tables import (
    data_files,
    media_folder,
    parquet_rows,
    picture,
    question_of,
    read_files,
    size_params,
)
from mmrl.types import Sample

__all__ = ["ABILITIES", "VERIFIERS", "read_orsta"]

ABILITIES: Mapping[str, str] = {
    "detection": "detection",
    "object detection": "detection",
    "grounding": "grounding",
    "visual grounding": "grounding",
    "counting": "counting",
    "ocr": "ocr",
    "math": "math",
    "science": "math",
    "puzzle": "math",
    "chart": "chart",
    "choice": "choice",
    "jigsaw": "jigsaw",
}
"""Ability in lower case, with spaces for - and _ : task. Science and puzzle rows are math or, with a letter, choice."""

VERIFIERS = ("mathverify", "detection")

_BOX_TASKS = ("detection", "grounding")
_REASONING = ("math", "science", "puzzle", "choice")
_LETTER = re.compile(r"\(?([A-Z])\)?[.:]?")
_BOXED = re.compile(r"\\boxed\{(.*)\}", re.S)
_BULLET = re.compile(r"^[ \t]*[-*][ \t]+([^\n]{1,200})$", re.M)


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RowError(f"'{name}' as a struct", repr(value)[:60], "is it an Orsta file?")
    return value


def _ratio(model: Mapping[str, Any], key: str) -> float:
    value: Any = model.get(key)
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise RowError(f"reward_model.{key} as a number >= 0", repr(value)[:40], "correct the row")
    return round(float(value), 6)  # the column is float32: 0.1 comes as 0.10000000149


def _weights(model: Mapping[str, Any]) -> dict[str, float]:
    weights = {"accuracy": _ratio(model, "accuracy_ratio"), "format": _ratio(model, "format_ratio")}
    if not sum(weights.values()):
        raise RowError("accuracy_ratio + format_ratio above 0", "0 and 0", "correct the row")
    return weights


def _truth_text(model: Mapping[str, Any]) -> str:
    """`answer`, else `ground_truth`, without <answer> tags and without one \\boxed{} around it."""
    text = next(
        (
            value
            for value in (model.get("answer"), model.get("ground_truth"))
            if isinstance(value, str) and value.strip()
        ),
        None,
    )
    if text is None:
        raise RowError(
            "text in reward_model.answer or ground_truth",
            f"{model.get('answer')!r:.40}",
            "add the truth",
        )
    text = answer_in_tags(text)
    boxed = _BOXED.fullmatch(text)
    if boxed and boxed[1].strip() and "\\boxed" not in boxed[1]:
        return boxed[1].strip()
    return text


def _user_text(prompt: Any, num_images: int) -> str:
    """The user's turn, without placeholders. A system turn before it is the model's business and is left out."""
    if not isinstance(prompt, list) or not all(isinstance(turn, Mapping) for turn in prompt):
        raise RowError(
            "prompt as a list of turns {content, role}", repr(prompt)[:60], "is it an Orsta file?"
        )
    users = [turn for turn in prompt if turn.get("role") == "user"]
    others = [turn.get("role") for turn in prompt if turn.get("role") not in ("user", "system")]
    if len(users) != 1 or others:
        raise RowError(
            "one user turn, and at most a system turn",
            f"roles {[turn.get('role') for turn in prompt]!r:.60}",
            "one question per row",
        )
    return question_of(users[0].get("content"), num_images, "content")


def _objects(text: str) -> list[dict[str, Any]]:
    """[{"bbox", "label"}, ...] of a detection truth such as [{'bbox_2d': [..], 'label': ..}]. Raises RowError."""
    try:
        value = parse_literal(text)
    except ValueError as err:
        raise RowError(
            "a list [{'bbox_2d': [x1, y1, x2, y2], 'label': text}, ...] as truth",
            f"{text[:80]!r} ({err})",
            "correct the row",
        ) from err
    entries = value if isinstance(value, list) else [value]
    found = []
    for entry in entries:
        if (
            not isinstance(entry, Mapping)
            or "label" not in entry
            or not {"bbox_2d", "bbox"} & set(entry)
        ):
            raise RowError(
                "objects with 'bbox_2d' and 'label'", f"{entry!r:.80}", "correct the row"
            )
        found.append(
            {
                "bbox": entry.get("bbox_2d", entry.get("bbox")),
                "label": text_of(entry["label"], "label"),
            }
        )
    return found


def _different(names: Iterable[str]) -> dict[str, str]:
    """Label key -> the first spelling of each name, in order."""
    found: dict[str, str] = {}
    for name in names:
        if label_key(name):
            found.setdefault(label_key(name), name.strip())
    return found


def _asked(question: str, labels: Sequence[str]) -> list[str]:
    """Categories a detection prompt lists as '- name' lines when they hold every label of the truth, else the labels."""
    listed, named = _different(_BULLET.findall(question)), _different(labels)
    return list((listed if listed and named.keys() <= listed.keys() else named).values())


def _frame(parameters: Mapping[str, Any], default: CoordFrame) -> CoordFrame:
    """rel1000 where det_verifier_normalized is true. Raises RowError for anything but true, false or none."""
    normalised = parameters.get("det_verifier_normalized")
    if normalised not in (None, True, False) or type(normalised) in (int, float):
        raise RowError(
            "det_verifier_normalized true, false or none", repr(normalised)[:40], "correct the row"
        )
    return CoordFrame.REL1000 if normalised else default


def _det_ratios(parameters: Mapping[str, Any]) -> dict[str, float]:
    ratios = parameters.get("det_reward_ratio") or {}
    if not isinstance(ratios, Mapping) or not all(
        v is None or (type(v) in (int, float) and math.isfinite(v)) for v in ratios.values()
    ):
        raise RowError("det_reward_ratio as numbers", f"{ratios!r:.80}", "correct the row")
    return {name: round(float(value), 6) for name, value in ratios.items() if value}


def _v_triune(ratios: Mapping[str, float]) -> dict[str, Any]:
    """V-Triune's ratios as parameters of the detection reward of mode v_triune."""
    weights = {name: value for name, value in ratios.items() if name != "iou_completeness"}
    return {
        "mode": "v_triune",
        "iou_completeness": ratios.get("iou_completeness", 0.0),
        **({"weights": weights} if weights else {}),
    }


def _kind(row: Mapping[str, Any], routes: Routes) -> str:
    """What the row is: its data_source where reader.types names it, else its ability. Raises RowError for none."""
    source, ability = row.get("data_source"), row.get("ability")
    if (
        isinstance(source, str)
        and " ".join(source.replace("_", " ").replace("-", " ").lower().split()) in routes.table
    ):
        return source
    return text_of(ability, "ability")


def _verifier(model: Mapping[str, Any]) -> str:
    verifier = model.get("verifier")
    if verifier not in VERIFIERS:
        raise RowError(
            f"verifier {' or '.join(VERIFIERS)}",
            repr(verifier)[:40],
            f"no rule of V-Triune has this name.{did_you_mean(str(verifier), VERIFIERS)}",
        )
    return str(verifier)


def _task_of(
    kind: str, verifier: str, text: str, routes: Routes
) -> tuple[str, list[dict[str, Any]]]:
    """(task, objects of a box task). Raises RowError or SkipRow."""
    plain = " ".join(kind.replace("_", " ").replace("-", " ").lower().split())
    target = routes.table.get(plain)
    if target is None:
        own = routes.task_of(kind)  # names the known ones, unless a plug-in task takes every row
        return own, _objects(text) if verifier == "detection" else []
    objects: list[dict[str, Any]] = []
    if (verifier == "detection") != (target in _BOX_TASKS):
        raise RowError(
            f"verifier {'detection' if target in _BOX_TASKS else 'mathverify'} for {kind!r:.40} (task {target})",
            repr(verifier),
            "correct the row, or say where it belongs: reader.types",
        )
    if target in _BOX_TASKS:
        objects = _objects(text)
        target = "detection" if target == "grounding" and len(objects) != 1 else target
    elif target == "math" and plain in _REASONING and _LETTER.fullmatch(text):
        target = "choice"
    return Routes("orsta", routes.task, None, routes.only_mine, {plain: target}).task_of(
        kind
    ), objects


def _value(task: str, text: str) -> Any:
    if task == "counting":
        number = re.fullmatch(r"\+?([0-9]{1,9})(?:\.0*)?", text)
        return int(number[1]) if number else text  # the task's check says what it expected
    letter = _LETTER.fullmatch(text) if task == "choice" else None
    if task == "jigsaw":
        try:
            return parse_literal(text)
        except ValueError:
            return text
    return letter[1] if letter else text


def _sample(
    number: int,
    row: Mapping[str, Any],
    size_of: SizeOf,
    *,
    file: Path,
    root: Path,
    media: Path,
    routes: Routes,
    default_frame: CoordFrame,
    det_ratios: bool,
    check: Check,
) -> Sample:
    model = _mapping(row.get("reward_model"), "reward_model")
    verifier, text = _verifier(model), _truth_text(model)
    parameters = _mapping(model.get("verifier_parm") or {}, "reward_model.verifier_parm")
    task, objects = _task_of(_kind(row, routes), verifier, text, routes)
    values = row.get("images") or []
    if not isinstance(values, list):
        raise RowError("images as a list", repr(values)[:60], "is it an Orsta file?")
    images = tuple(picture(value, root, media) for value in values)
    sizes = [size_of(image) for image in images]
    question = prompt = _user_text(row.get("prompt"), len(images))
    extra = row.get("extra_info") or {}
    params: dict[str, Any] = {
        **size_params(sizes),
        "reward": {"weights": _weights(model)},
        "ability": row.get("ability"),
        "verifier": verifier,
        **({"row_id": extra["id"]} if isinstance(extra, Mapping) and extra.get("id") else {}),
    }
    frame, value = default_frame, _value(task, text)
    if verifier == "detection":
        if not sizes:
            raise RowError("a picture for the boxes", "none", "add it to 'images'")
        frame = _frame(parameters, default_frame)
        asked = _asked(prompt, [entry["label"] for entry in objects])
        value = objects[0]["bbox"] if task == "grounding" else objects
        ratios = _det_ratios(parameters)
        params |= {"categories": asked, "prompt": prompt, "det_reward_ratio": ratios}
        if det_ratios and task == "detection":
            params["reward"]["accuracy"] = _v_triune(ratios)
        question = ", ".join(asked) or prompt
    return Sample(
        id=f"{file.stem}-{number}",
        task=task,
        source=text_of(row.get("data_source") or file.stem, "data_source"),
        question=question,
        answer=check(task, value, frame, sizes, params),
        images=images,
        params=params,
    )


def read_orsta(
    path: str | Path,
    *,
    image_root: str | None = None,
    media_dir: str | None = None,
    task: str = "mixed",
    frame: str = "abs_orig",
    types: Mapping[str, str] | None = None,
    only_mine: bool = False,
    det_ratios: bool = False,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read one parquet file or the *.parquet of a folder (train/ or test/). Ids are '<file>-<row>', sources data_source.

    `task` 'mixed' (default) sends each row to its own task; a single task refuses the others, or leaves them out and
    counts them with `only_mine`. `types` sends an ability or a data_source elsewhere: {'mmk12': 'numeric'}. `frame` holds
    for boxes that are not declared normalised. Pictures are written once to `media_dir` (default '<file>.media'). For
    boxes the question is what to look for; params.prompt keeps the row's own words. With `det_ratios` detection rows are
    rewarded by V-Triune's rule with the row's own det_reward_ratio. Unknown abilities are errors.
    """
    box_frame = check_frame(frame)
    if not isinstance(det_ratios, bool):
        raise ConfigError(f"expected reader.det_ratios true or false, found {det_ratios!r}")
    routes = Routes("orsta", task, types, only_mine, ABILITIES)

    def read_one(file: Path) -> Readout:
        root, media = Path(image_root) if image_root else file.parent, media_folder(file, media_dir)

        def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
            return [
                _sample(
                    number,
                    row,
                    size_of,
                    file=file,
                    root=root,
                    media=media,
                    routes=routes,
                    default_frame=box_frame,
                    det_ratios=det_ratios,
                    check=check,
                )
            ]

        rows = parquet_rows(
            file, ("images", "prompt", "ability", "reward_model"), "is it an Orsta file?"
        )
        return collect(file, rows, convert, on_error)

    return read_files(data_files(Path(path), "*.parquet"), read_one, on_error)
