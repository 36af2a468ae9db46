"""Episodes before and after training side by side: the same initial state as a small video and as a strip of stills.

    mmrl report runs/robot        # eval/step_*/videos/*.mp4, named by `video` of the rows of predictions.jsonl

Small clips are embedded (MAX_CLIPS, MAX_BYTES in all), others are linked. The stills say the same on paper. A clip that cannot be
decoded is a text in its place.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from mmrl.report.filmstrip import encoded
from mmrl.report.load import EvalStep, Run, number
from mmrl.report.rows import metric_of, unit_of
from mmrl.report.stills import ClipRef, read_stills
from mmrl.report.text import cut_text, esc, plural

__all__ = ["MAX_BYTES", "MAX_CLIPS", "episode_clip", "episode_strip", "episodes", "own_clip"]

MAX_CLIPS = 12
MAX_BYTES = 4 << 20  # of embedded clips, as files
_STILLS = 5
_FPS = 10.0
_MOST_STEPS = 4096
Row = dict[str, Any]
Unit = tuple[str, str]


def _filmed(evaluation: EvalStep) -> dict[Unit, Row]:
    """Greedy rows by task and state."""
    rows = evaluation.rows(lambda r: r.get("mode") == "greedy")
    return {unit_of(r): r for r in rows}


def _success(row: Row | None) -> bool | None:
    return None if row is None else metric_of(row, "success_once") >= 0.5


def _chosen(before: Mapping[Unit, Row], after: Mapping[Unit, Row], count: int) -> list[Unit]:
    """`count` states that have a clip, taken in turns from each pair of outcomes: what changed first."""
    kinds: dict[tuple[bool | None, bool | None], list[Unit]] = defaultdict(list)
    for unit, row in after.items():
        if "video" in row or "video" in before.get(unit, {}):
            kinds[_success(before.get(unit)), _success(row)].append(unit)
    order = [
        (False, True),
        (True, False),
        (True, True),
        (False, False),
        (None, True),
        (None, False),
    ]
    turns = chain.from_iterable(zip_longest(*(kinds[k] for k in order if k in kinds)))
    return [unit for unit in turns if unit is not None][:count]


class _Clips:
    """Embeds clips until the page holds its share."""

    def __init__(self, run: Run) -> None:
        self.run, self.clips, self.bytes, self.linked = run, 0, 0, 0

    def _video(self, path: Path, name: str, poster: str) -> str:
        link = path.relative_to(self.run.folder).as_posix()
        size = path.stat().st_size
        if self.clips >= MAX_CLIPS or self.bytes + size > MAX_BYTES:
            self.linked += 1
            return f'<p class="note"><a href="{esc(link)}">{esc(link)}</a></p>'
        self.clips, self.bytes = self.clips + 1, self.bytes + size
        data = base64.b64encode(path.read_bytes()).decode("ascii")
        shown = f' poster="{poster}"' if poster else ""
        return (
            f'<video controls loop muted playsinline preload="metadata" aria-label="{esc(name)}"{shown} '
            f'src="data:video/mp4;base64,{data}"></video>'
        )

    def side(self, evaluation: EvalStep, row: Row | None, mark: str) -> str:
        """One episode: when, how it ended, its clip and its stills."""
        head = f'<p class="mode">step {evaluation.step:,}</p>'
        if row is None:
            return f'<div>{head}<p class="dim">not played</p></div>'
        steps, won = int(metric_of(row, "steps")), _success(row)
        words = "not finished" if row.get("stop") == "error" else "success" if won else "failure"
        lost = won and metric_of(row, "success_at_end") < 0.5
        badges = (
            f'<p class="badges"><span class="badge {"good" if won else "bad"}">{words}</span>{mark}'
            f'<span class="badge soft">{plural(steps, "control step")}{", lost again at the end" if lost else ""}</span></p>'
        )
        file = row.get("video")
        if not isinstance(file, str) or Path(file).name != file:
            return f'<div>{head}{badges}<p class="dim">no clip of this episode</p></div>'
        path = evaluation.folder / "videos" / file
        if not _is_file(path):
            return f'<div>{head}{badges}<p class="dim">the clip is missing: {esc(file)}</p></div>'
        if not own_clip(path, self.run.folder):
            return f'<div>{head}{badges}<p class="dim">not a clip in the folder of the run: {esc(file)}</p></div>'
        name = f"{row.get('task', '')} {row.get('id', '')} at step {evaluation.step}: {words}"
        stills, poster = episode_strip(path, row, name)
        return f"<div>{head}{badges}{self._video(path, name, poster)}{stills}</div>"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no name of a file: too long, or with a zero byte
        return False


def episode_clip(row: Mapping[str, Any], videos: Path, folder: Path) -> Path | None:
    """The clip of a robot's episode in `videos`, which its row names; None where there is none inside `folder`."""
    name = row.get("video")
    if not isinstance(name, str) or not name or len(name) > 255 or Path(name).name != name:
        return None
    path = videos / name
    try:
        return path if path.is_file() and own_clip(path, folder) else None
    except (OSError, ValueError):
        return None


def own_clip(path: Path, folder: Path) -> bool:
    """Whether an mp4 file is at `path` and lies in `folder`: a page holds the bytes of clips as they are, and must not hold those
    of other files that a link, or a name, leads to."""
    if not path.resolve().is_relative_to(folder.resolve()):
        return False
    with path.open("rb") as file:
        return file.read(8)[4:] == b"ftyp"


def episode_strip(path: Path, row: Row, name: str) -> tuple[str, str]:
    """The stills of an episode's clip, which has one picture per control step, and the data address of the last one."""
    steps = min(int(metric_of(row, "steps")), _MOST_STEPS)
    fps = number(row.get("video_fps")) or _FPS
    try:
        found = read_stills(
            ClipRef(str(path), seen=tuple(i / fps for i in range(steps + 1))),
            limit=_STILLS,
            long_side=160,
        )
    except Exception as error:  # decoders raise errors of their own; the page is written whatever a clip does, and says it
        kind = getattr(error, "kind", "") or type(error).__name__
        return f'<p class="note">stills cannot be shown ({esc(str(kind))})</p>', ""
    shots = [
        (round(t * fps), encoded(rgb)) for t, rgb in zip(found.seconds, found.frames, strict=True)
    ]
    figures = "".join(
        f'<figure class="still"><img src="{data}" alt="{esc(name)}, control step {at}">'
        f"<figcaption>{at}</figcaption></figure>"
        for at, data in shots
    )
    return f'<div class="strip">{figures}</div>', shots[-1][1] if shots else ""


def episodes(run: Run, mark: str = "") -> str:
    """Cards of the first and the last evaluation; '' where none has a clip. `mark` is HTML beside every outcome."""
    ends: Sequence[EvalStep] = (
        run.evals[:1] if len(run.evals) < 2 else (run.evals[0], run.evals[-1])
    )
    if not ends:
        return ""
    tables = [_filmed(e) for e in ends]
    before = tables[0] if len(tables) > 1 else {}
    clips = _Clips(run)
    cards = []
    for unit in _chosen(before, tables[-1], MAX_CLIPS // len(ends)):
        sides = "".join(clips.side(e, t.get(unit), mark) for e, t in zip(ends, tables, strict=True))
        row = tables[-1][unit]
        title = (
            f"{unit[0]} · {unit[1]}"
            if row.get("row") is None
            else f"{unit[0]} · {unit[1]} (row {row['row']})"
        )
        cards.append(
            f'<article class="card pic"><h4>{cut_text(title, 120)}</h4><div class="pair">{sides}</div></article>'
        )
    if not cards:
        return ""
    note = (
        "Greedy episodes from the same initial state"
        + (", before and after" if len(ends) > 1 else "")
        + "; numbers under the stills are control steps."
        + (" Clips beyond the page's share are linked." if clips.linked else "")
    )
    return f'<p class="note">{esc(note)}</p><div class="episodes">{"".join(cards)}</div>'
