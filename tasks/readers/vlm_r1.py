"""VLM-R1 files: rec_jsons_processed/*.json (image, problem, normal_caption, solution, normalized_solution) and training
JSON Lines (id, image, conversations).

`solution` is a box in pixels of the original picture, `normalized_solution` in 0..1000; the first is used when both are
present. Boxes in conversations stand in the text, in `frame` (default abs_orig). Perception-R1's JSON is the same.

    python -c "from tasks.readers.vlm_r1 import read_vlm_r1 as r; print(len(r('rec.json', image_root='coco')))"
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.errors import DataError
from mmrl.types import Sample
from rewards.parsing import extract_answer, parse_boxes
from tasks.readers.common import Readout, RowError, SizeOf, check_box, check_frame, collect, resolve_image, text_of
from tasks.readers.own import json_lines

__all__ = ["box_in_text", "json_rows", "read_vlm_r1"]

_QUADRUPLE = re.compile(r"\[[0-9eE+\-., \t]{1,200}\]")
_ASKING = re.compile(r"Please provide the bounding box coordinates? of the region this sentence describes:", re.I)


def json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(row number from 1, row) of a JSON list or a JSON Lines file. Raises DataError when it cannot be read at all."""
    if path.suffix != ".json":
        yield from json_lines(path)
        return
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as err:
        raise DataError(f"expected a data file, found none to read at {path} ({err.strerror}); check the path") from err
    except (ValueError, RecursionError) as err:
        raise DataError(f"{path}: expected JSON, found {err}; is it JSON Lines? then name it .jsonl") from err
    if not isinstance(rows, list):
        raise DataError(f"{path}: expected a list of rows, found {type(rows).__name__}; give the file with the rows")
    for number, row in enumerate(rows, 1):
        if isinstance(row, dict):
            yield number, row
        else:
            yield number, RowError("a JSON object", f"{type(row).__name__} {row!r:.60}", "wrap it in {...}")


def box_in_text(text: str) -> list[float]:
    """The only box of a reference answer: the whole text, its <answer>, or one [..] in a sentence. Raises RowError."""
    answer = extract_answer(text).answer if "<answer>" in text else text
    parsed = parse_boxes(answer or "")
    if len(parsed.boxes) == 1:
        return list(parsed.boxes[0])
    found = [boxes[0] for m in _QUADRUPLE.findall(answer or "") if (boxes := parse_boxes(m).boxes)]
    if len(found) != 1:
        raise RowError("exactly one box [x1, y1, x2, y2] in the answer text", f"{len(found)} in {text[:80]!r}",
                       "one object per row")
    return list(found[0])


def _turns(conversations: Any) -> tuple[str, str]:
    """(question, answer) of a two-turn conversation."""
    if not isinstance(conversations, list) or len(conversations) != 2 or not all(
            isinstance(turn, dict) for turn in conversations):
        raise RowError("a conversation of two turns", f"{conversations!r:.80}", "split it into one row per question")
    human, model = conversations
    if human.get("from") not in ("human", "user") or model.get("from") not in ("gpt", "assistant"):
        raise RowError("turns from 'human' and then 'gpt'", f"{human.get('from')!r}, {model.get('from')!r}", "reorder")
    return text_of(human.get("value"), "value"), text_of(model.get("value"), "value")


def _question(text: str, num_images: int) -> str:
    placeholders = text.count("<image>")
    if placeholders not in (0, num_images):
        raise RowError(f"{num_images} <image> placeholders", str(placeholders), "one per picture, or none")
    return text_of(_ASKING.sub("", text.replace("<image>", " ")).strip(), "the question")


def read_vlm_r1(path: str | Path, *, image_root: str | None = None, frame: str = "abs_orig", task: str = "grounding",
                on_error: str = "raise") -> Readout:
    """Read VLM-R1 JSON or JSON Lines. `frame` is that of `solution` and of boxes in text. Picture paths are relative to
    `image_root` (default: the file's folder). The box belongs to the first picture."""
    file = Path(path)
    text_frame, root = check_frame(frame), Path(image_root) if image_root else file.parent

    def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
        names = row.get("image", row.get("images"))
        images = tuple(resolve_image(n, root) for n in (names if isinstance(names, list) else [names]))
        if not images:
            raise RowError("at least one picture in 'image'", "an empty list", "name the picture")
        values: Any
        box_frame = text_frame
        if "conversations" in row:
            text, answer = _turns(row["conversations"])
            values = box_in_text(answer)
        else:
            text = text_of(row.get("normal_caption") or row.get("problem"), "problem")
            if "solution" not in row and "normalized_solution" not in row:
                raise RowError("'solution' or 'normalized_solution'", f"keys {sorted(row)}", "add the box")
            values = row.get("solution", row.get("normalized_solution"))
            box_frame = text_frame if "solution" in row else CoordFrame.REL1000
            values = box_in_text(values) if isinstance(values, str) else values
        sizes = [size_of(image) for image in images]  # all of them: a missing second picture is an error as well
        width, height = sizes[0]
        box = check_box(values, box_frame, (width, height))
        yield Sample(
            id=str(row.get("id", f"{file.stem}-{number}")), task=task, source=str(row.get("dataset", file.stem)),
            question=_question(text, len(images)), answer=list(box), images=images,
            params={"width": width, "height": height})

    return collect(file, json_rows(file), convert, on_error)
