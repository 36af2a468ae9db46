"""Filmstrips of rollouts in environments: marks in pixels of what was shown, in report and viewer; nothing from outside the run."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmrl.report.build import build_report
from mmrl.report.turns import TurnStrips
from mmrl.viewer.folders import Roots
from mmrl.viewer.media import MediaPolicy
from mmrl.viewer.samples import detail
from mmrl.viewer.workspace import Workspace
from tests.report.conftest import Plan, make_run


def film(*marks: dict[str, Any], file: Any = "a.png", size: Any = (1280, 720)) -> dict[str, Any]:
    turns = [{"picture": 0, "marks": list(marks), "words": "look", "reward": 0.5}]
    return {"pictures": [{"file": file, "size": list(size)}], "turns": turns}


def run_of_one(folder: Path) -> Path:
    pictures = folder / "pictures"
    pictures.mkdir(parents=True)
    Image.fromarray(np.full((90, 160, 3), 90, np.uint8)).save(pictures / "a.png")
    return pictures


def test_marks_are_drawn_in_pixels_of_what_was_shown(tmp_path: Path) -> None:
    pictures = run_of_one(tmp_path / "run")
    marks = (
        {"kind": "point", "at": [640.0, 360.0]},
        {"kind": "box", "at": [300.0, 200.0, 100.0, 50.0]},
        {"kind": "drag", "at": [10.0, 20.0, 700.0, 600.0]},
    )
    row = {"turns": ["click <here> & there"], "film": film(*marks)}
    found = TurnStrips(tmp_path / "run").strip(row, pictures)
    assert "click &lt;here&gt; &amp; there" in found and "+0.50" in found
    svg = re.search(r"<svg.*</svg>", found)
    assert svg is not None
    drawn = ET.fromstring(svg.group())
    assert [float(v) for v in drawn.attrib["viewBox"].split()] == [0, 0, 1280, 720]
    # the kept picture is smaller than what was shown: it is stretched to its size
    image = drawn.find("image")
    assert image is not None and float(image.attrib["width"]) == 1280
    box = drawn.find("rect[@class='greedy']")
    assert box is not None
    assert [float(box.attrib[k]) for k in ("x", "y", "width", "height")] == [100, 50, 200, 150]
    paths = [p.attrib["d"] for p in drawn.findall("path[@class='mark greedy']")]
    assert len(paths) == 3, "a cross, a line, and a cross at its end"
    for path, centre in ((paths[0], (640, 360)), (paths[2], (700, 600))):
        x, y, dx, dy = (float(v) for v in re.findall(r"-?[\d.]+", path)[:4])
        assert (x + dx / 2, y + dy / 2) == pytest.approx(centre, abs=0.1)
    assert paths[1] == "M10.0 20.0L700.0 600.0"
    assert drawn.attrib["aria-label"].startswith("what turn 1 saw, a click at 640, 360; a crop of")


@pytest.mark.parametrize("file", ["../secret.png", "link.png", "missing.png", "", None, "x" * 5000])
def test_pictures_of_other_places_never_enter_a_page(file: Any, tmp_path: Path) -> None:
    pictures = run_of_one(tmp_path / "run")
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "run" / "secret.png")
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "outside.png")
    (pictures / "link.png").symlink_to(tmp_path / "outside.png")
    found = TurnStrips(tmp_path / "run").strip({"text": "x", "film": film(file=file)}, pictures)
    assert "data:image" not in found and ("cannot be shown" in found or "not a picture" in found)


def test_damaged_rows_and_a_full_page_are_texts(tmp_path: Path) -> None:
    pictures = run_of_one(tmp_path / "run")
    strips = TurnStrips(tmp_path / "run", max_bytes=2000)
    damaged = [{"kind": "point", "at": [math.nan, 1]}, {"kind": "box", "at": [1]}, {"at": "x"}, 3]
    found = strips.strip({"turns": 7, "film": film(*damaged, size=("a", 2))}, pictures)
    assert found.count("<svg") == 1 and "<path" not in found and "<rect" not in found
    for broken in (None, 3, {"turns": 3}, {"pictures": 1, "turns": [{"picture": 9}, 4]}):
        assert "<svg" not in strips.strip({"film": broken}, pictures)
    row = {"text": "x", "film": film()}
    shown = [strips.strip(row, pictures) for _ in range(20)]
    assert "<svg" in shown[0] and "already holds its share" in shown[-1]


def test_report_and_viewer_show_the_turns(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "first", Plan(name="first", pictures=2))
    for folder in sorted((run / "eval").glob("step_*")):
        run_of_one(folder)
        file = folder / "predictions.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        greedy = next(r for r in rows if r["mode"] == "greedy")
        greedy["film"] = film({"kind": "box", "at": [1, 2, 30, 40]})
        file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    page = build_report(run).read_text(encoding="utf-8")
    gallery = page[page.index('class="gallery"') :]
    states = re.findall(
        r'<div class="state" data-step="(\d+)"[^>]*><div class="stills turns">', gallery
    )
    assert states == ["0", "3"], "the first and the last of four evaluations"
    assert gallery.count("the turns of this evaluation are shown by mmrl view") == 2
    table = Workspace(Roots([tmp_path / "runs"]), MediaPolicy()).open("first").tables["predictions"]
    while not table.update(1.0):
        pass
    found = [detail(table, n, MediaPolicy(), "", group=False) for n in range(len(table))]
    strips = [f["strip"] for f in found if f is not None and f["strip"]]
    assert len(strips) == 4 and all("a crop of 1, 2, 30, 40" in s for s in strips)
