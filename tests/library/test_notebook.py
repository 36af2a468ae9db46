"""examples/library.ipynb in a fresh kernel: every cell runs, the model learns, and what is stored has no outputs."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from PIL import Image

from tests.kits.engine_kit import ENVIRONMENT, REPO

NOTEBOOK = REPO / "examples" / "library.ipynb"


def printed(cell: Any) -> str:
    return "".join(o["text"] for o in cell["outputs"] if o["output_type"] == "stream")


def pictures(cell: Any) -> list[Image.Image]:
    found = (o["data"].get("image/png") for o in cell["outputs"] if "data" in o)
    return [Image.open(io.BytesIO(base64.b64decode(data))) for data in found if data]


def test_the_notebook_is_valid_and_stored_without_outputs() -> None:
    stored = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(stored)
    cells = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert len(cells) >= 6
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)


@pytest.mark.slow
def test_the_notebook_runs_and_its_model_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env={**ENVIRONMENT, "IPYTHONDIR": str(tmp_path / "ipython")})
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    text = "".join(printed(cell) for cell in cells)
    assert "64 rows to train on, 32 held out" in text and "8 steps" in text
    means = dict(re.findall(r"(before|after): ([\d.]+) \(", text))
    assert 0.3 < float(means["before"]) < float(means["after"]) <= 1, text
    example, curve, compared = (p for cell in cells for p in pictures(cell))
    assert example.size == (336, 336) and compared.size == (4 * 224, 224)
    assert curve.width > 200
    pixels = np.asarray(compared.convert("RGB")).reshape(-1, 3)
    for color in ((255, 255, 255), (0, 0, 0), (255, 0, 255)):
        assert (pixels == color).all(1).sum() > 100, f"no box in {color}"
