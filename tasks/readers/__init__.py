"""Public data formats -> samples. `read_any` looks at the file (never at the numbers in it) and dispatches.

    own            mmrl's JSON Lines: question, answer, image                     mmrl.tasks.readers.own
    refer          RefCOCO / + / g release folder: refs(unc).p                    mmrl.tasks.readers.refer
    vlm_r1         JSON or JSON Lines with solution or conversations              mmrl.tasks.readers.vlm_r1
    easyr1         parquet or JSON with problem, answer, images                   mmrl.tasks.readers.easyr1
    video_r1       Video-R1 / EasyVideoR1 JSON: problem_type, options, solution   mmrl.tasks.readers.video_r1
    llama_factory  sharegpt data with its dataset_info.json                       mmrl.tasks.readers.llama_factory
    coco, lvis     instances JSON; ovdeval with text and neg_text per picture     mmrl.tasks.readers.coco, .lvis, .ovdeval
    orsta          Orsta-47k / V-Triune parquet: prompt, reward_model             mmrl.tasks.readers.orsta
    pixmo_count    PixMo-Count: count, label, points                              mmrl.tasks.readers.pixmo
    pageocr        Fox pages: {en,cn}_page_ocr.json                               mmrl.tasks.readers.pageocr
    ocrbench, mathvista, mmmu                                                     mmrl.tasks.readers.ocrbench ...
    screenspot     v1 and v2 JSON, pixels [x, y, width, height]                   mmrl.tasks.readers.screenspot
    screenspot_hf  the hub's copy, shares 0..1 [x1, y1, x2, y2]                   mmrl.tasks.readers.screenspot
    screenspot_pro pixels [x1, y1, x2, y2], img_size                              mmrl.tasks.readers.screenspot
    android_control  GZIP TFRecords of episodes                                   mmrl.tasks.readers.android_control
    gui_odyssey    annotations/*.json, 0..1000                                    mmrl.tasks.readers.gui_odyssey
    gui_r1, ui_r1  gt_action, gt_bbox (shares 0..1); img_filename, bbox (pixels)  mmrl.tasks.readers.gui_r1
    charades_sta, activitynet, qvhighlights   sentences and their times            mmrl.tasks.readers.temporal
    nextgqa        test.csv, gsub_test.json, map_vid_vidorID.json                 mmrl.tasks.readers.nextgqa
    videomme, mvbench, tempcompass, vsibench, videommmu, longvideobench, mlvu     mmrl.tasks.readers.video_mme ...
    got10k, videochat_got                     sequences of frames with boxes       mmrl.tasks.readers.got10k
    mapped         any rows, by reader.columns: {image, question, answer ...}     mmrl.tasks.readers.mapped

hf://owner/name[/subset][:split] names a data set of the hub (mmrl.tasks.readers.hub); it is detected and mapped like a file.

    python -c "from mmrl.tasks.readers import read_any; print(len(read_any('data.jsonl')))"
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError, did_you_mean
from mmrl.tasks.readers.common import Readout, Rejected, RowError, SkipRow, read_pictures_as
from mmrl.tasks.readers.detect import detect_format
from mmrl.tasks.readers.easyr1 import read_easyr1
from mmrl.tasks.readers.hub import hub_file, is_hub_name
from mmrl.tasks.readers.own import read_own
from mmrl.tasks.readers.refer import read_refer
from mmrl.tasks.readers.vlm_r1 import read_vlm_r1

__all__ = [
    "READERS",
    "Readout",
    "Rejected",
    "RowError",
    "SkipRow",
    "detect_format",
    "read_any",
    "read_easyr1",
    "read_own",
    "read_refer",
    "read_vlm_r1",
    "reader_of",
]

READERS: dict[str, str] = {
    "own": "own:read_own",
    "refer": "refer:read_refer",
    "vlm_r1": "vlm_r1:read_vlm_r1",
    "easyr1": "easyr1:read_easyr1",
    "video_r1": "video_r1:read_video_r1",
    "llama_factory": "llama_factory:read_llama_factory",
    "coco": "coco:read_coco",
    "lvis": "lvis:read_lvis",
    "ovdeval": "ovdeval:read_ovdeval",
    "orsta": "orsta:read_orsta",
    "pixmo_count": "pixmo:read_pixmo_count",
    "pageocr": "pageocr:read_pageocr",
    "ocrbench": "ocrbench:read_ocrbench",
    "mathvista": "mathvista:read_mathvista",
    "mmmu": "mmmu:read_mmmu",
    "screenspot": "screenspot:read_screenspot",
    "screenspot_hf": "screenspot:read_screenspot_hf",
    "screenspot_pro": "screenspot:read_screenspot_pro",
    "android_control": "android_control:read_android_control",
    "gui_odyssey": "gui_odyssey:read_gui_odyssey",
    "gui_r1": "gui_r1:read_gui_r1",
    "ui_r1": "gui_r1:read_ui_r1",
    "charades_sta": "temporal:read_charades_sta",
    "activitynet": "temporal:read_activitynet",
    "qvhighlights": "temporal:read_qvhighlights",
    "nextgqa": "nextgqa:read_nextgqa",
    "videomme": "video_mme:read_videomme",
    "mvbench": "mvbench:read_mvbench",
    "tempcompass": "tempcompass:read_tempcompass",
    "vsibench": "vsi_bench:read_vsibench",
    "videommmu": "video_mmmu:read_videommmu",
    "longvideobench": "long_video_bench:read_longvideobench",
    "mlvu": "mlvu:read_mlvu",
    "got10k": "got10k:read_got10k",
    "videochat_got": "got10k:read_videochat_got",
    "mapped": "mapped:read_mapped",
}
"""Format -> "module:function" below mmrl.tasks.readers; a module is imported when its format is read."""

_ROWS_IN_DATA_JSONL = ("own", "vlm_r1", "video_r1")


def reader_of(format: str) -> Callable[..., Readout]:
    """The function that reads `format`. Raises ConfigError for an unknown name."""
    if format not in READERS:
        raise ConfigError(
            f"unknown format {format!r}; expected {', '.join(READERS)}.{did_you_mean(format, READERS)}"
        )
    module, _, function = READERS[format].partition(":")
    reader: Callable[..., Readout] = getattr(
        importlib.import_module(f"{__name__}.{module}"), function
    )
    return reader


def read_any(
    path: str | Path, format: str | None = None, orientation: str = "displayed", **options: Any
) -> Readout:
    """Read any supported file or folder into a Readout (samples, rejected, skipped).

    `path` may name a data set of the hub (hf://owner/name:split); `columns` maps the columns of any rows
    (mmrl.tasks.readers.mapped). `format` names a reader of READERS instead of detecting it; `orientation` ('displayed' or 'stored')
    says which pixels of pictures with an EXIF orientation the data count; `options` are the reader's own (image_root, split, frame,
    on_error ...). Raises ConfigError for an unknown format or option and DataError for unusable data.
    """
    if is_hub_name(path):
        path = hub_file(path)
    name = (
        format if format is not None else "mapped" if "columns" in options else detect_format(path)
    )
    reader, where = reader_of(name), Path(path)
    known = [p for p in inspect.signature(reader).parameters if p != "path"]
    if "check" not in known:
        # a reader of one fixed kind of answer, which it checks by itself
        options.pop("check", None)
    for option in options:
        if option not in known:
            raise ConfigError(
                f"unknown option {option!r} of the {name} reader; expected {', '.join([*known, 'orientation'])}."
                f"{did_you_mean(option, [*known, 'orientation'])}"
            )
    if where.is_dir() and name in _ROWS_IN_DATA_JSONL:
        where = where / "data.jsonl"
    with read_pictures_as(orientation):
        readout = reader(where, **options)
    if any(sample.videos for sample in readout):
        from mmrl.tasks.spans import note_outside

        readout.notes += note_outside(readout)
    return readout
