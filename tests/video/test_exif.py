"""Pictures with an EXIF orientation: read as displayed, or as stored where the data say so, and told whenever it may matter.

The second party for pixels is OpenCV, which shows a JPEG as displayed by default and as stored with IMREAD_IGNORE_ORIENTATION.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from mmrl.config import DataSource, RunConfig
from mmrl.data.sources import load_sources, note_lines
from mmrl.diagnostics._conformance_pictures import draw_check
from mmrl.diagnostics.conformance import check_task
from mmrl.errors import ConfigError, DataError
from mmrl.report.pictures import Pictures
from mmrl.tasks.grounding import Grounding
from mmrl.tasks.readers import read_any
from mmrl.types import Sample
from mmrl.video.media import image_facts, image_overrides, image_size, open_image, sizes_on_disk
from mmrl.video.store import TensorStore
from mmrl.video.visuals import VisualCache
from tests.kits.engine_kit import tiny_folder

# the file's raster is 96 wide; the object in it, in its pixels
STORED, BOX = (96, 56), [8, 12, 40, 44]
# where orientation 6 (a quarter turn clockwise) shows it: x = 56 - y, y = x
TURNED = [56 - 44, 8, 56 - 12, 40]


def photo(path: Path, tag: int = 6, **options: Any) -> Path:
    """A red square on grey, the picture's corners coloured, with an EXIF orientation."""
    picture = Image.new("RGB", STORED, (120, 120, 120))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((BOX[0], BOX[1], BOX[2] - 1, BOX[3] - 1), fill=(250, 0, 0))
    draw.rectangle((0, 0, 9, 5), fill=(0, 0, 250))
    exif = Image.Exif()
    exif[0x0112] = tag
    picture.save(
        path,
        exif=exif,
        **({"quality": 95, "subsampling": 0} if path.suffix == ".jpg" else {}),
        **options,
    )
    return path


def rows(folder: Path, *extra: dict[str, Any], tag: int = 6, **keys: Any) -> Path:
    photo(folder / "turned.jpg", tag)
    Image.new("RGB", STORED).save(folder / "plain.png")
    first = {"id": "1", "image": "turned.jpg", "question": "the red square", "answer": BOX, **keys}
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (first, *extra)))
    return folder / "data.jsonl"


@pytest.mark.parametrize("tag", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_stored_is_the_raster_of_the_file_and_displayed_what_viewers_show(
    tmp_path: Path, suffix: str, tag: int
) -> None:
    path = photo(tmp_path / f"a.{suffix}", tag, **({"lossless": True} if suffix == "webp" else {}))
    stored, shown = open_image(path, orientation="stored"), open_image(path)
    assert stored.size == image_size(path, "stored") == STORED == image_facts(path).stored
    assert shown.size == image_size(path) == (STORED[::-1] if tag >= 5 else STORED)
    x, y = BOX[0] + 16, BOX[1] + 16
    red, green, _ = stored.getpixel((x, y))  # type: ignore[misc]
    assert red > 200 and green < 60 and image_facts(path).tag == tag
    cv2 = pytest.importorskip("cv2")
    if suffix == "jpg":
        raw = cv2.imread(str(path), cv2.IMREAD_IGNORE_ORIENTATION | cv2.IMREAD_COLOR)[:, :, ::-1]
        turned = cv2.imread(str(path))[:, :, ::-1]
        assert (
            np.abs(np.asarray(stored, int) - raw).max() < 12
            and np.abs(np.asarray(shown, int) - turned).max() < 12
        )


def test_the_copy_of_a_picture_asks_for_no_turn(tmp_path: Path) -> None:
    for orientation in ("displayed", "stored"):
        picture = open_image(photo(tmp_path / "a.jpg"), orientation=orientation)  # type: ignore[arg-type]
        picture.save(tmp_path / "again.jpg")
        assert image_size(tmp_path / "again.jpg") == picture.size


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"answer": [60, 12, 90, 44]}, "inside the picture"),
        ({"params": {"width": 96, "height": 56}}, "as the picture has them, 56 x 96"),
    ],
)
def test_coordinates_and_sizes_of_the_stored_raster_are_told_from_wrong_ones(
    tmp_path: Path, keys: dict[str, Any], words: str
) -> None:
    path = rows(tmp_path, **keys)
    with pytest.raises(DataError) as caught:
        read_any(path)
    message = str(caught.value)
    assert (
        words in message
        and "EXIF orientation is 6: turned.jpg is stored as 96 x 56 and displayed as 56 x 96"
        in message
    )
    assert "reader.orientation=stored" in message and "data.image.orientation=stored" in message
    (sample,) = read_any(path, orientation="stored")
    assert (
        sample.answer == keys.get("answer", BOX)
        and (sample.params["width"], sample.params["height"]) == STORED
    )
    other_way = rows(tmp_path, answer=[12, 60, 44, 90])  # fits the displayed picture only
    with pytest.raises(
        DataError,
        match=r"taken in the stored picture \(if .*displayed one: reader.orientation=displayed",
    ):
        read_any(other_way, orientation="stored")


def test_exif_is_no_explanation_of_other_mistakes(tmp_path: Path) -> None:
    for keys, tag in (
        ({"question": ""}, 6),
        ({"answer": [40, 12, 8, 44]}, 6),
        ({"answer": [60, 12, 190, 44]}, 1),
    ):
        with pytest.raises(DataError) as caught:
            read_any(rows(tmp_path, tag=tag, **keys))
        assert "EXIF" not in str(caught.value)


def test_a_coco_file_with_raw_sizes_is_read_as_stored(tmp_path: Path) -> None:
    photo(tmp_path / "turned.jpg")
    x1, y1, x2, y2 = BOX
    (tmp_path / "instances.json").write_text(
        json.dumps(
            {
                "images": [{"id": 1, "file_name": "turned.jpg", "width": 96, "height": 56}],
                "annotations": [
                    {
                        "id": 1,
                        "image_id": 1,
                        "category_id": 1,
                        "bbox": [x1, y1, x2 - x1, y2 - y1],
                        "iscrowd": 0,
                    }
                ],
                "categories": [{"id": 1, "name": "square"}],
            }
        )
    )
    with pytest.raises(
        DataError, match=r"right picture.*EXIF orientation is 6.*reader.orientation=stored"
    ):
        read_any(tmp_path / "instances.json", task="detection")
    (sample,) = read_any(tmp_path / "instances.json", task="detection", orientation="stored")
    assert sample.answer == [{"bbox": BOX, "label": "square"}] and image_overrides(sample) == {
        "orientation": "stored"
    }


def test_only_turned_pictures_are_marked_and_all_are_counted(tmp_path: Path) -> None:
    path = rows(tmp_path, {"id": "2", "image": "plain.png", "question": "x", "answer": BOX})
    (displayed,) = load_sources([DataSource(task="grounding", path=str(path))])
    (stored,) = load_sources([DataSource(task="grounding", path=str(path))], orientation="stored")
    (own,) = load_sources(
        [DataSource(task="grounding", path=str(path), params={"reader": {"orientation": "stored"}})]
    )
    assert own.samples == stored.samples and [
        "image_orientation" in s.params for s in stored.samples
    ] == [True, False]
    assert not any("image_orientation" in s.params for s in displayed.samples)
    for source, word in ((displayed, "displayed"), (stored, "stored"), (own, "stored")):
        assert note_lines([source]) == [
            f"{path}: 1 x pictures with an EXIF orientation, taken as {word} (data.image.orientation)"
        ]
    with pytest.raises(
        ConfigError, match=r"'displayed' or 'stored', found 'store'.*Did you mean 'stored'"
    ):
        read_any(path, orientation="store")


def _cache(store: TensorStore | None = None) -> VisualCache:
    from transformers import AutoProcessor

    return VisualCache(AutoProcessor.from_pretrained(tiny_folder()), store=store)


def test_the_policy_sees_the_pixels_that_the_data_count(tmp_path: Path) -> None:
    """The stored view of a turned file is that of the same raster without the tag; both views may lie in one cache."""
    photo(tmp_path / "turned.png")
    Image.open(tmp_path / "turned.png").save(tmp_path / "plain.png", exif=b"")
    visuals = _cache(TensorStore(tmp_path / "cache"))
    plain, stored, shown = (
        visuals.image(str(tmp_path / name), turn)
        for name, turn in (
            ("plain.png", None),
            ("turned.png", {"orientation": "stored"}),
            ("turned.png", None),
        )
    )
    assert (
        plain.digest == stored.digest != shown.digest
        and stored.key != shown.key
        and stored.content == shown.content
    )
    assert stored.orig_wh == STORED and shown.orig_wh == STORED[::-1]
    again = _cache(TensorStore(tmp_path / "cache"))
    for visual in (stored, shown):
        again.pin([visual])
        assert (again.pixels(visual) == visuals.pixels(visual)).all()
    assert (
        visuals.cost("image", str(tmp_path / "turned.png"), {"orientation": "stored"})[0] == 96 * 56
    )


@pytest.mark.parametrize("orientation", ["displayed", "stored"])
def test_sizes_drawings_and_report_follow_the_sample(tmp_path: Path, orientation: str) -> None:
    box = BOX if orientation == "stored" else TURNED
    (sample,) = read_any(rows(tmp_path, answer=box), orientation=orientation)
    (size,) = sizes_on_disk(sample) or ()
    assert size.orig_wh == (STORED if orientation == "stored" else STORED[::-1])
    detail = {"pred_boxes": [box]}
    page = draw_check(sample, "gold", "wrong", detail, {}, tmp_path / "page.png")
    assert page.height == (261 if orientation == "stored" else 448) + 18 * 3 + 24
    row = {"images": list(sample.images), "sample": {"params": dict(sample.params)}}
    assert Pictures(tmp_path).size_of(row) == size.orig_wh
    scale = 448 / 96
    x, y = (round((v + 4) * scale) for v in box[:2])
    red, green, _ = page.getpixel((x + 12, y + 8))  # type: ignore[misc]
    assert red > 180 and green < 90, "the drawn box lies on the red square"


@pytest.mark.slow
def test_a_run_configuration_says_it_for_all_of_its_data(tmp_path: Path) -> None:
    path = rows(tmp_path, answer=[60, 12, 90, 44])
    tree: dict[str, Any] = {
        "model": {"path": tiny_folder()},
        "data": {
            "train": [{"task": "grounding", "path": str(path)}],
            "image": {"orientation": "stored"},
        },
    }
    result = check_task("grounding", config=RunConfig.model_validate(tree), out=tmp_path / "out")
    assert result.ok, [f for f in result.findings if not f.ok]
    assert sum(result.notes.values()) == 1 and "taken as stored" in next(iter(result.notes))
    with pytest.raises(ValueError, match="orientation"):
        RunConfig.model_validate(
            {**tree, "data": {**tree["data"], "image": {"orientation": "raw"}}}
        )


def test_a_sample_with_another_value_is_displayed() -> None:
    assert (
        image_overrides(Sample("1", "t", "s", "q", None, params={"image_orientation": 3})) is None
    )
    assert Grounding().orientation == "displayed"
