"""A row's picture or clip with gold and predicted answers over it, for every state of the page.

A clip is a filmstrip: up to eight frames labelled with their seconds, the boxes of tracks on the frames they belong to, and
below them a time axis with gold and predicted spans as bars. What cannot be decoded is a text in its place.

    python -c "from mmrl.report.filmstrip import Figures; from pathlib import Path; \\
        print(Figures(Path('.')).drawing({'videos': ['a.mp4'], 'score': {'detail': {'gold_spans': [[1, 2]]}}}, []))"
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.report.charts import nice_ticks
from mmrl.report.load import Find, logged_path
from mmrl.report.pictures import Pictures, box_group, overlay
from mmrl.report.rows import boxes_of, seconds, spans_of, spans_text, track_of
from mmrl.report.stills import Box, ClipRef, boxes_at, clip_of, read_stills
from mmrl.report.text import esc, plural

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Figures", "Layer", "encoded", "has_film"]

MAX_BYTES = 8 << 20  # of frames in one page; every further clip is a text
_MAX_TICKS = 64  # seen frames marked on a time axis
_MAX_BARS = 100  # sampled bars of one lane
_KINDS = ("sampled", "greedy")  # from below to above
Row = Mapping[str, Any]
Layer = tuple[str, Sequence[tuple[Row, str]]]
"""HTML attributes ('' for what is always shown), and the answers shown with them, each as greedy or sampled."""


@dataclass(frozen=True)
class _Film:
    """What is drawn of a clip: (second, data address) of each frame, or the reason why there are none."""

    frames: tuple[tuple[float, str], ...]
    size: tuple[int, int]
    duration: float | None
    reach: float
    reason: str = ""


def has_film(row: Row) -> bool:
    """Whether the row is about a clip."""
    return clip_of(row) is not None


class Figures:
    """Draws the media of rows; opens and encodes each picture and clip once. `find` as `Pictures` has it."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES, find: Find | None = None) -> None:
        self.folder, self.pictures = folder, Pictures(folder, find)
        self._find = find or (lambda path: logged_path(path, folder))
        self._left = max_bytes
        self._seen: dict[tuple[ClipRef, tuple[float, ...]], _Film] = {}

    def drawing(self, row: Row, layers: Sequence[Layer]) -> str:
        """The row's clip as a filmstrip, else its picture, with its gold answer and the answers of the layers."""
        if (clip := clip_of(row)) is not None:
            return self._filmstrip(row, clip, layers)
        size, parts = self.pictures.size_of(row), []
        for kind in _KINDS:
            drawn = [
                (attrs, "".join(overlay(r, "pred", k, size) for r, k in rows if k == kind))
                for attrs, rows in layers
            ]
            parts.append(
                "".join(f"<g {attrs}>{shapes}</g>" if attrs else shapes for attrs, shapes in drawn)
            )
        return self.pictures.drawing(row, *parts)

    def _filmstrip(self, row: Row, clip: ClipRef, layers: Sequence[Layer]) -> str:
        keys = sorted(track_of(row, "gold_tracks") or {})
        shown = layers[-1][1] if layers else []
        keys += sorted(
            {k for r, kind in shown if kind == "greedy" for k in track_of(r, "pred_tracks") or {}}
            - set(keys)
        )
        film = self._film(clip, tuple(keys))
        layers = [(attrs, _fewer(rows, len(layers))) for attrs, rows in layers]
        if film.reason:
            strip = f'<div class="frame none without"><span>{esc(film.reason)}</span></div>'
        else:
            wide = " broad" if film.size[0] > 1.25 * film.size[1] else ""
            strip = f'<div class="stills{wide}">{_stills(row, film, layers)}</div>'
        return f'<div class="film">{strip}{_axis(row, clip, film, layers)}{_more(clip, film)}</div>'

    def _film(self, clip: ClipRef, keys: tuple[float, ...]) -> _Film:
        if (clip, keys) not in self._seen:
            self._seen[clip, keys] = self._load(clip, keys)
        film = self._seen[clip, keys]
        cost = sum(len(address) for _, address in film.frames)
        if cost > self._left:
            return _Film(
                (),
                film.size,
                film.duration,
                film.reach,
                f"not shown, this page already holds its share of frames: {Path(clip.path).name}",
            )
        self._left -= cost
        return film

    def _load(self, clip: ClipRef, keys: tuple[float, ...]) -> _Film:
        if self._left <= 0:
            return _Film(
                (),
                (4, 3),
                clip.duration,
                0.0,
                f"not shown, this page already holds its share of frames: {Path(clip.path).name}",
            )
        try:
            found = replace(clip, path=self._find(clip.path))
            stills = read_stills(found, self.folder, keys=keys)
        except Exception as error:  # decoders raise errors of their own; whatever a clip does, the page is written and says it
            kind = getattr(error, "kind", "") or type(error).__name__
            return _Film(
                (),
                (4, 3),
                clip.duration,
                0.0,
                f"the video cannot be shown ({kind}): {Path(clip.path).name}",
            )
        frames = tuple(
            (t, encoded(rgb)) for t, rgb in zip(stills.seconds, stills.frames, strict=True)
        )
        return _Film(frames, stills.size, stills.duration, stills.reach)


def _fewer(rows: Sequence[tuple[Row, str]], states: int) -> list[tuple[Row, str]]:
    """The rows with at most so many sampled ones that a page with many states stays small."""
    sampled = [r for r in rows if r[1] == "sampled"][: max(1, 48 // max(1, states))]
    return sampled + [r for r in rows if r[1] != "sampled"]


def encoded(rgb_HWC: np.ndarray) -> str:
    """A data address: JPEG, or PNG where that is about as small (drawings)."""
    from PIL import Image

    picture, found = Image.fromarray(rgb_HWC), []
    for kind, options in (("png", {}), ("jpeg", {"quality": 78})):
        data = io.BytesIO()
        picture.save(data, kind.upper(), optimize=True, **options)
        found.append((data.tell() / (1.5 if kind == "png" else 1), kind, data.getvalue()))
    _, kind, raw = min(found)
    return f"data:image/{kind};base64,{base64.b64encode(raw).decode('ascii')}"


def _on_frames(row: Row, side: str, film: _Film) -> list[list[Box]]:
    """Boxes of one side for each frame: those of its track; of an answer without time only where the clip is one frame."""
    times = [t for t, _ in film.frames]
    track = track_of(row, f"{side}_tracks")
    if track is None:
        return [boxes_of(row, f"{side}_boxes")] if len(times) == 1 else [[] for _ in times]
    return [[] if box is None else [box] for box in boxes_at(track, times, film.reach)]


def _stills(row: Row, film: _Film, layers: Sequence[Layer]) -> str:
    """The frames with their boxes."""
    (width, height), count = film.size, len(film.frames)
    gold = _on_frames(row, "gold", film)
    drawn: dict[str, list[list[str]]] = {kind: [[] for _ in film.frames] for kind in _KINDS}
    for attrs, rows in layers:
        for kind in _KINDS:
            found = [_on_frames(r, "pred", film) for r, k in rows if k == kind]
            for place, shapes in enumerate(drawn[kind]):
                if group := "".join(box_group(boxes[place], kind) for boxes in found):
                    shapes.append(f"<g {attrs}>{group}</g>" if attrs else group)
    out, spans, name = (
        [],
        spans_of(row, "gold_spans") or [],
        row.get("id") or _mapping(row.get("sample")).get("id", ""),
    )
    for place, (second, address) in enumerate(film.frames):
        inside = any(start <= second < end or start == end == second for start, end in spans)
        about = f"frame {place + 1} of {count} of {name} at {seconds(second)} s" + (
            ", inside a gold span" if inside else ""
        )
        below, above = ("".join(drawn[kind][place]) for kind in _KINDS)
        out.append(
            f'<figure class="still{" inside" if inside else ""}"><svg viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{esc(about)}"><image href="{address}" width="{width}" height="{height}" '
            f'preserveAspectRatio="none"/>{below}{box_group(gold[place], "gold")}{above}</svg>'
            f"<figcaption>{seconds(second)} s</figcaption></figure>"
        )
    return "".join(out)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _lane(kind: str, words: str, spans: Sequence[tuple[float, float]], duration: float) -> str:
    """Bars of the spans, cut at the ends of the clip, on a line of their own."""
    bars = []
    for start, end in spans[:_MAX_BARS]:
        left, right = (100 * min(1.0, max(0.0, t / duration)) for t in (start, end))
        bars.append(f'<i style="left:{left:.2f}%;width:{right - left:.2f}%"></i>')
    return f'<div class="lane {kind}" role="img" aria-label="{esc(words)}">{"".join(bars)}</div>'


def _lanes(layer: Layer, duration: float) -> str:
    """Greedy spans on one line, those of all samples over each other on the next."""
    attrs, rows = layer
    out = []
    for kind in reversed(_KINDS):
        found = [spans_of(r, "pred_spans") for r, k in rows if k == kind]
        if found and any(spans is not None for spans in found):
            spans = [span for part in found for span in part or []]
            what = (
                "predicted spans" if kind == "greedy" else f"spans of {len(found)} sampled answers"
            )
            out.append(_lane(kind, f"{what}: {spans_text(spans[:20])}", spans, duration))
    lanes = "".join(out)
    return f"<div {attrs}>{lanes}</div>" if attrs and lanes else lanes


def _axis(row: Row, clip: ClipRef, film: _Film, layers: Sequence[Layer]) -> str:
    """The time axis with spans; '' where neither gold nor an answer has any."""
    gold = spans_of(row, "gold_spans")
    answered = [
        spans
        for _, rows in layers
        for r, _ in rows
        if (spans := spans_of(r, "pred_spans")) is not None
    ]
    if gold is None and not answered:
        return ""
    ends = [end for part in (gold or [], *answered) for _, end in part]
    duration = film.duration or clip.duration or max([*clip.seen, *ends], default=0.0) or 1.0
    lanes = (
        _lane("gold", f"gold spans: {spans_text(gold)}", gold, duration) if gold is not None else ""
    )
    lanes += "".join(_lanes(layer, duration) for layer in layers)
    seen = sorted(set(clip.seen)) or [t for t, _ in film.frames]
    marks = (
        "".join(f'<i style="left:{100 * min(1.0, max(0.0, t / duration)):.2f}%"></i>' for t in seen)
        if len(seen) <= _MAX_TICKS
        else ""
    )
    ticks = [t for t in nice_ticks(0.0, duration, 5) if t < 0.93 * duration]
    labels = "".join(
        f'<span style="left:{100 * t / duration:.2f}%">{seconds(t)}</span>' for t in ticks
    )
    return (
        f'<div class="time">{lanes}<div class="marks" aria-hidden="true">{marks}</div><div class="secs" aria-hidden="true">'
        f'{labels}<span style="left:100%">{seconds(duration)} s</span></div></div>'
    )


def _more(clip: ClipRef, film: _Film) -> str:
    """What else the sample shows."""
    shown, seen = len(film.frames), len(set(clip.seen))
    notes = [f"{shown} of {seen} frames seen"] if 0 < shown < seen else []
    notes += [f"video 1 of {clip.videos}"] if clip.videos > 1 else []
    notes += [f"beside {plural(clip.images, 'picture')}"] if clip.images else []
    return f'<p class="note">{esc(", ".join(notes))}</p>' if notes else ""
