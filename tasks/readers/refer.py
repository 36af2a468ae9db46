"""REFER releases (RefCOCO, RefCOCO+, RefCOCOg): refs(<split_by>).p and instances.json -> one sample per sentence.

    refcoco/refs(unc).p  refcoco/instances.json  images/COCO_train2014_*.jpg
    python -c "from mmrl.tasks.readers.refer import read_refer as r; print(len(r('refcoco', image_root='images')))"

refs(X).p is a Python 2 pickle from the internet, hence hostile until proven otherwise: the unpickler builds plain
containers, text and numbers, and refuses every other class. Boxes come from instances.json as [x, y, w, h] in pixels
and become corners. The refs' own file_name ('..._16.jpg') names no existing file and is ignored.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

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
from mmrl.tasks.readers.problem_types import check_by_task, fixed_task
from mmrl.tasks.readers.tables import read_json
from mmrl.types import Sample

__all__ = ["load_plain_pickle", "read_refer"]

_CONTAINERS = {"set": set, "frozenset": frozenset, "list": list, "dict": dict, "tuple": tuple}


class _PlainUnpickler(pickle.Unpickler):
    """Builds builtin containers only; asking for anything else is an error before anything is imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("builtins", "__builtin__") and name in _CONTAINERS:
            return _CONTAINERS[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside the file")


def load_plain_pickle(path: str | Path) -> Any:
    """The plain data in a pickle, Python 2 text read as latin-1. No class is imported, no code of the file runs.

    Raises DataError for a missing or broken file and for pickles that hold anything but containers, text and numbers.
    """
    try:
        with open(path, "rb") as handle:
            return _PlainUnpickler(handle, encoding="latin1").load()
    except OSError as err:
        raise DataError(
            f"expected a pickle at {path}, found none to read ({err.strerror}); check the path"
        ) from err
    except Exception as err:  # hostile bytes make the unpickler raise nearly anything
        raise DataError(
            f"{path}: expected a pickle of plain lists, dicts, text and numbers, found another ({err}); "
            "download the official file again"
        ) from err


def _refs_file(path: Path, split_by: str | None) -> Path:
    if path.is_file():
        return path
    found = sorted(path.glob("refs(*).p"))
    names = [f.name[5:-3] for f in found]
    if split_by is None:
        if len(found) == 1:
            return found[0]
        raise ConfigError(
            f"expected split_by, because {path} holds {len(found)} reference files ({', '.join(names)}); "
            "for example split_by=unc for RefCOCO, umd for RefCOCOg"
        )
    if split_by not in names:
        raise ConfigError(
            f"unknown split_by {split_by!r}; {path} holds {', '.join(names) or 'none'}."
            f"{did_you_mean(split_by, names)}"
        )
    return path / f"refs({split_by}).p"


def _instances(path: Path) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
    """(images by id, annotations by id) of instances.json."""
    try:
        content = read_json(path) if path.is_file() else None
        if content is None:
            raise DataError(
                f"expected instances.json next to the refs file, found none at {path}; copy it there"
            )
        return {i["id"]: i for i in content["images"]}, {a["id"]: a for a in content["annotations"]}
    except (KeyError, TypeError) as err:
        raise DataError(
            f"{path}: expected COCO 'images' and 'annotations' with ids, found another content "
            f"({type(err).__name__}: {err}); download it again"
        ) from err


def _field(entry: Any, name: str, where: str) -> Any:
    if not isinstance(entry, dict) or name not in entry:
        raise RowError(
            f"'{name}' in {where}",
            f"{sorted(entry) if isinstance(entry, dict) else entry!r:.60}",
            "download the official file again",
        )
    return entry[name]


def _look_up(table: dict[int, dict[str, Any]], key: Any, what: str) -> dict[str, Any]:
    if not isinstance(key, int) or key not in table:
        raise RowError(
            f"{what} in instances.json",
            f"none with id {key!r:.40}",
            "take refs and instances of the same release",
        )
    return table[key]


def _default_images(release: Path) -> Path:
    places = (release.parent / "images" / "mscoco" / "images" / "train2014", release / "images")
    return next((place for place in places if place.is_dir()), release)


def read_refer(
    path: str | Path,
    *,
    image_root: str | None = None,
    split: str | None = None,
    split_by: str | None = None,
    task: str = "grounding",
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """One sample per sentence, id '<folder>-<ref_id>-<sent_id>', source '<folder>/<split>'.

    `path` is the release folder or a refs(*).p file; `split` keeps train, val, test, testA or testB (default all);
    `image_root` holds the COCO train2014 pictures; by default they are looked for where the official download puts
    them, <root>/images/mscoco/images/train2014 beside the release folder, then in <release>/images, then in the release
    folder itself. `types={'grounding': TASK}` sends the rows to another task. Row numbers in errors count refs.
    """
    folder_or_file = Path(path)
    file = _refs_file(folder_or_file, split_by)
    refs = load_plain_pickle(file)
    if not isinstance(refs, list):
        raise DataError(
            f"{file}: expected a list of references, found {type(refs).__name__}; download it again"
        )
    images, annotations = _instances(file.parent / "instances.json")
    splits = {str(ref.get("split")) for ref in refs if isinstance(ref, dict)}
    if split is not None and split not in splits:
        raise ConfigError(
            f"unknown split {split!r}; {file} has {', '.join(sorted(splits))}."
            f"{did_you_mean(split, splits)}"
        )
    own = fixed_task("refer", "grounding", task, types)
    root, release = (
        Path(image_root) if image_root else _default_images(file.parent),
        file.parent.name,
    )

    def rows() -> Iterator[tuple[int, Any]]:
        for number, ref in enumerate(refs, 1):
            if split is None or not isinstance(ref, dict) or ref.get("split") == split:
                yield number, ref

    def convert(number: int, ref: Any, size_of: SizeOf) -> Iterable[Sample]:
        picture = _look_up(images, _field(ref, "image_id", "the reference"), "an image")
        annotation = _look_up(annotations, _field(ref, "ann_id", "the reference"), "an annotation")
        xywh = _field(annotation, "bbox", "the annotation")
        if (
            not isinstance(xywh, list)
            or len(xywh) != 4
            or not all(type(v) in (int, float) for v in xywh)
        ):
            raise RowError(
                "bbox as [x, y, width, height]", repr(xywh)[:80], "download instances.json again"
            )
        image = resolve_image(_field(picture, "file_name", "the image"), root)
        width, height = size_of(image)
        x, y, w, h = xywh
        params = {"width": width, "height": height}
        box = check(own, [x, y, x + w, y + h], CoordFrame.ABS_ORIG, [(width, height)], params)
        sentences = _field(ref, "sentences", "the reference")
        if not isinstance(sentences, list) or not sentences:
            raise RowError(
                "a list of sentences", repr(sentences)[:80], "download the official file again"
            )
        for sentence in sentences:
            yield Sample(
                id=f"{release}-{_field(ref, 'ref_id', 'the reference')}-{_field(sentence, 'sent_id', 'the sentence')}",
                task=own,
                source=f"{release}/{ref.get('split')}",
                question=text_of(sentence.get("sent"), "sent"),
                answer=box,
                images=(image,),
                params=params,
            )

    return collect(file, rows(), convert, on_error)
