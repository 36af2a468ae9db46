"""Tracking: GOT-10k's AO and SR with its result files; the VLM protocol of a few asked frames; tubes in time and space.

GOT-10k: boxes (x, y, width, height) per frame, both sides clipped to the picture, the first frame and frames in which the object
is not visible (cover 0) left out, frames of all sequences pooled; AO = mean IoU, SR = share of IoUs above 0.5 / 0.75, shares.
Only sequences of which every frame was asked for have an AO; of others `asked_frames` gives what a VLM was asked for, with and
without the frame whose box stood in the prompt.

    python -c "from mmrl.tasks.metrics.tracking import got10k; print(got10k({'a': [[0, 0, 4, 4]] * 3}, {'a': [[0, 0, 4, 4]] * 3}))"
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import DataError
from mmrl.tasks.spans import video_id
from mmrl.types import Sample, Score

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

__all__ = [
    "asked_frames",
    "got10k",
    "rect_iou",
    "success_curve",
    "tracking_benchmark",
    "tube_benchmark",
]

# N frames; rects_N4 has (x, y, width, height) per row


def _clipped(rects_N4: Floats, size: Sequence[float]) -> Floats:
    x, y = np.clip(rects_N4[:, 0], 0, size[0]), np.clip(rects_N4[:, 1], 0, size[1])
    return np.stack(
        [x, y, np.clip(rects_N4[:, 2], 0, size[0] - x), np.clip(rects_N4[:, 3], 0, size[1] - y)], 1
    )


def rect_iou(
    rects: npt.ArrayLike, others: npt.ArrayLike, size: Sequence[float] | None = None
) -> Floats:
    """IoU of each pair of rows (N, 4) -> (N,), clipped to a picture of `size` = (width, height) first; 0 without area."""
    a, b = (np.asarray(values, float).reshape(-1, 4) for values in (rects, others))
    if a.shape != b.shape:
        raise DataError(
            f"expected as many boxes as the sequence has frames, {len(b)}, found {len(a)}"
        )
    if size is not None:
        a, b = _clipped(a, size), _clipped(b, size)
    sides = np.minimum(a[:, :2] + a[:, 2:], b[:, :2] + b[:, 2:]) - np.maximum(a[:, :2], b[:, :2])
    common = np.clip(sides, 0, None).prod(1)
    union = a[:, 2:].prod(1) + b[:, 2:].prod(1) - common
    return np.clip(common / (union + np.finfo(float).eps), 0.0, 1.0)


def success_curve(ious: npt.ArrayLike) -> Floats:
    """Share of IoUs above each of the 101 levels 0, 0.01 .. 1, (101,)."""
    found: Floats = (np.asarray(ious, float)[:, None] > np.linspace(0, 1, 101)[None, :]).mean(0)
    return found


def got10k(
    predictions: Mapping[str, npt.ArrayLike],
    truths: Mapping[str, npt.ArrayLike],
    *,
    sizes: Mapping[str, Sequence[float]] | None = None,
    covers: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, float]:
    """AO, SR0.50, SR0.75 over all frames of all sequences of `truths`, the first frame of each left out.

    `sizes` are (width, height) of the pictures, `covers` the visible shares per frame, the first included (frames with 0 are left
    out). A sequence without prediction counts with IoU 0 in every frame. {} when no frame is left. Raises DataError for a wrong
    number of boxes.
    """
    pooled = []
    for name, truth in truths.items():
        rects = np.asarray(truth, float).reshape(-1, 4)
        mine = predictions.get(name)
        ious = rect_iou(
            np.zeros_like(rects) if mine is None else mine,
            rects,
            None if sizes is None else sizes.get(name),
        )[1:]
        cover = covers.get(name) if covers is not None else None
        if cover is not None and len(cover) != len(rects):
            raise DataError(
                f"expected one visible share per frame of {name}, {len(rects)}, found {len(cover)}"
            )
        pooled.append(ious if cover is None else ious[np.asarray(cover, float)[1:] > 0])
    ious = np.concatenate(pooled) if pooled else np.zeros(0)
    if not len(ious):
        return {}
    return {
        "AO": float(ious.mean()),
        "SR0.50": float((ious > 0.5).mean()),
        "SR0.75": float((ious > 0.75).mean()),
    }


def asked_frames(pairs: Sequence[tuple[Sample, Score]]) -> dict[str, float]:
    """Mean IoU and success over samples of what was asked for: mIoU and SR of all true frames, and the same without the first
    one where its box stood in the prompt (*_after_first)."""
    names = {"mIoU": "iou", "SR0.50": "sr@0.5", "SR0.75": "sr@0.75", "AUC": "auc"}
    return (
        {
            f"{name}{after}": sum(score.metrics.get(f"{key}{after}", 0.0) for _, score in pairs)
            / len(pairs)
            for after in ("", "_after_first")
            for name, key in names.items()
        }
        if pairs
        else {}
    )


def _rect(box: Sequence[float]) -> list[float]:
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]


def _whole(sample: Sample) -> bool:
    """Every frame of the sequence was asked for: as many true boxes as params.frame_count (or frames_in_file)."""
    return (
        sample.params.get("frame_count", sample.params.get("frames_in_file"))
        == len(sample.answer["boxes"])
        > 1
    )


def tracking_benchmark(pairs: Sequence[tuple[Sample, Score]], folder: Path) -> dict[str, float]:
    """`asked_frames` of all samples and tracking.jsonl (id, object, gt, pred); for samples whose every frame was asked for
    (as many true boxes as params.frame_count or frames_in_file) also AO, SR0.50, SR0.75 and the files of GOT-10k's toolkit,
    GOT-10k/mmrl/<sequence>/<sequence>_001.txt with x,y,width,height per frame. A missing box is written as zeros.

    Params used: sequence (or the clip's name), cover (visible share per frame), width and height, rects (true x, y, width, height
    by key where they are not those of the answer's box). Boxes are written as they were said, also beyond the picture or with
    their corners swapped (a negative width, which the toolkit bounds to 0).
    """
    if not pairs:
        return {}
    with (folder / "tracking.jsonl").open("w", encoding="utf-8") as file:
        for sample, score in pairs:
            mine = score.detail.get("pred_boxes_by_key", {}) if score.parsed else {}
            file.write(
                json.dumps(
                    {
                        "id": sample.id,
                        "object": sample.question,
                        "gt": sample.answer["boxes"],
                        "pred": mine,
                    }
                )
                + "\n"
            )
    predictions: dict[str, npt.ArrayLike] = {}
    truths: dict[str, npt.ArrayLike] = {}
    sizes: dict[str, Sequence[float]] = {}
    covers: dict[str, Sequence[float]] = {}
    for sample, score in pairs:
        if not _whole(sample):
            continue
        name = (
            re.sub(
                r"[^A-Za-z0-9_.-]", "_", str(sample.params.get("sequence", video_id(sample)))
            ).strip(".")
            or "sequence"
        )
        mine = score.detail.get("pred_boxes_by_key", {}) if score.parsed else {}
        keys = sorted(sample.answer["boxes"], key=float)
        rects = [_rect(mine[key]) if key in mine else [0.0] * 4 for key in keys]
        # what the annotation holds where the truth was cut to the picture
        raw = sample.params.get("rects", {})
        predictions[name], truths[name] = (
            rects,
            [raw.get(key) or _rect(sample.answer["boxes"][key]) for key in keys],
        )
        if "width" in sample.params and "height" in sample.params:
            sizes[name] = sample.params["width"], sample.params["height"]
        if "cover" in sample.params:
            covers[name] = sample.params["cover"]
        place = folder / "GOT-10k" / "mmrl" / name
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{name}_001.txt").write_text(
            "".join(",".join(f"{v:.3f}" for v in rect) + "\n" for rect in rects)
        )
    return {**asked_frames(pairs), **got10k(predictions, truths, sizes=sizes, covers=covers)}


def tube_benchmark(pairs: Sequence[tuple[Sample, Score]], folder: Path) -> dict[str, float]:
    """m_tIoU, m_vIoU, vIoU@0.3, vIoU@0.5 over all samples (VidSTG, HC-STVG), and st_grounding.jsonl: id, the true and the
    predicted time and boxes (pixels of the displayed frame), null for a failure."""
    if not pairs:
        return {}
    rows: list[dict[str, Any]] = []
    for sample, score in pairs:
        found = (
            {"time": score.detail["pred_spans"][0], "boxes": dict(score.detail["pred_tracks"])}
            if score.parsed
            else None
        )
        rows.append(
            {
                "id": sample.id,
                "video": video_id(sample),
                "query": sample.question,
                "gt": sample.answer,
                "pred": found,
            }
        )
    (folder / "st_grounding.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    names = {"m_tIoU": "tiou", "m_vIoU": "viou", "vIoU@0.3": "viou@0.3", "vIoU@0.5": "viou@0.5"}
    return {
        name: sum(score.metrics.get(key, 0.0) for _, score in pairs) / len(pairs)
        for name, key in names.items()
    }
