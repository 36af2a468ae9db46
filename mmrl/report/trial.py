"""The contact sheet of `mmrl try`: every prompt with its picture, the truth, and all answers drawn over it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.report.build import page, write_page
from mmrl.report.filmstrip import Figures
from mmrl.report.load import Run
from mmrl.report.rollouts import rollouts
from mmrl.report.text import esc

if TYPE_CHECKING:
    from mmrl.diagnostics.diagnosis import Finding

__all__ = ["build_trial"]

_MAX_GROUPS = 64
_NONE = '<p class="missing">Of this kind of run no pictures are kept.</p>'


def build_trial(folder: Path, config: Any, lines: Iterable[str], dead: Sequence[Finding]) -> Path:
    """Write FOLDER/try.html from rollouts/ of the folder and the lines that were printed; returns its path."""
    run = Run(folder, info={"name": config.name})
    verdict = "".join(
        f'<p class="dead">Would learn nothing: {esc(f.name)}: {esc(f.message)}</p>' for f in dead
    )
    cards = rollouts(run, Figures(folder), max_groups=_MAX_GROUPS)
    body = (
        f'<header class="top"><p class="kicker">mmrl try</p><h1>{esc(config.name)}</h1></header>{verdict}<main>'
        f'<section id="numbers"><h2>Before a run</h2><pre class="code">{esc(chr(10).join(lines))}</pre></section>'
        f'<section id="answers"><h2>Answers</h2>{cards or _NONE}</section>'
        "</main><footer>Written by mmrl try: one small step of the run, thrown away.</footer>"
    )
    return write_page(folder / "try.html", page(f"try {config.name} · mmrl", body))
