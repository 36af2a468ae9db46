"""Rollouts of several turns as filmstrips: the picture that each turn saw, its click, drag or crop on it, its words and its reward.

    mmrl report runs/pages        # eval/step_*/pictures/, named by `film` of the rows of predictions.jsonl (mmrl.rollout.film)

The first and the last evaluation's strips are in the page until it holds its share of bytes; the viewer (`mmrl view`) shows all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.report.load import number
from mmrl.report.pictures import Pictures, box_group, point_group
from mmrl.report.text import cut_text, esc, plural

__all__ = ["TurnStrips", "has_turns"]

MAX_BYTES = 8 << 20  # of pictures in one page; a strip beyond it is a text
_MOST_TURNS = 24  # drawn of one rollout
_MOST_MARKS = 16  # of one turn
_SAID = 160  # characters of a turn
_NUMBERS = {"point": 2, "box": 4, "drag": 4}
Row = Mapping[str, Any]


def has_turns(row: Row) -> bool:
    """Whether pictures of the row's turns were kept."""
    film = row.get("film")
    return isinstance(film, Mapping) and isinstance(film.get("turns"), list)


class TurnStrips:
    """Draws the turns of rows. `folder`: of the run, the only place whose pictures are shown."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self.folder, self._left = folder.resolve(), max_bytes
        self._pictures = Pictures(folder, lambda path: path)

    def strip(self, row: Row, pictures: Path) -> str:
        """HTML of the row's turns, whose pictures lie in `pictures`; '' where none were kept. What cannot be shown is a text."""
        if not has_turns(row):
            return ""
        film = row["film"]
        turns = [t for t in film["turns"] if isinstance(t, Mapping)]
        texts = row.get("turns")
        said = texts if isinstance(texts, list) else [row.get("text", "")]
        kept = film.get("pictures") if isinstance(film.get("pictures"), list) else []
        figures = [
            self._figure(place, turn, said[place] if place < len(said) else "", kept, pictures)
            for place, turn in enumerate(turns[:_MOST_TURNS])
        ]
        if any(f is None for f in figures):
            return (
                '<p class="note">turns not shown, this page already holds its share of pictures</p>'
            )
        left = len(turns) - len(figures)
        more = f'<p class="note">and {plural(left, "further turn")}</p>' if left > 0 else ""
        return f'<div class="stills turns">{"".join(f or "" for f in figures)}</div>{more}'

    def _figure(
        self, place: int, turn: Row, said: Any, kept: list[Any], pictures: Path
    ) -> str | None:
        """One turn; None where the page has no room for its picture."""
        at = turn.get("picture")
        shown = kept[at] if isinstance(at, int) and 0 <= at < len(kept) else None
        reward = number(turn.get("reward")) or 0.0
        paid = f' <span class="badge">{reward:+.2f}</span>' if reward else ""
        below = (
            f"<figcaption><b>turn {place + 1}</b>{paid}<br><span dir=auto>"
            f"{cut_text(str(said), _SAID) or '(nothing)'}</span></figcaption>"
        )
        if not isinstance(shown, Mapping):
            words = cut_text(str(turn.get("words") or ""), _SAID) or "no picture"
            inside = f'<div class="frame none without"><span dir=auto>{words}</span></div>'
            return f'<figure class="still">{inside}{below}</figure>'
        address, reason = self._address(shown.get("file"), pictures)
        if reason:
            inside = f'<div class="frame none without"><span>{esc(reason)}</span></div>'
            return f'<figure class="still">{inside}{below}</figure>'
        if len(address) > self._left:
            return None
        self._left -= len(address)
        width, height = size = _size(shown.get("size"))
        marks, deeds = _marks(turn.get("marks"), size)
        about = esc(f"what turn {place + 1} saw" + (f", {deeds}" if deeds else ""))
        return (
            f'<figure class="still"><svg viewBox="0 0 {width} {height}" role="img" aria-label="{about}">'
            f'<image href="{address}" width="{width}" height="{height}" preserveAspectRatio="none"/>{marks}</svg>'
            f"{below}</figure>"
        )

    def _address(self, file: Any, pictures: Path) -> tuple[str, str]:
        """(data address, '') or ('', why not). Pictures are decoded and encoded anew: bytes of other files never enter a page."""
        if not isinstance(file, str) or not file or Path(file).name != file:
            return "", "not a picture in the folder of the run"
        try:
            if not (pictures / file).resolve().is_relative_to(self.folder):
                return "", "not a picture in the folder of the run"
        except (OSError, ValueError):  # no name of a file: too long, or with a zero byte
            return "", "not a picture in the folder of the run"
        address, _, reason = self._pictures.get(str(pictures / file))
        return address, reason


def _size(value: Any) -> tuple[float, float]:
    """The picture's (width, height) as the turn's marks count it."""
    found = [number(v) for v in value] if isinstance(value, list) and len(value) == 2 else []
    width, height = (found[0] or 0.0, found[1] or 0.0) if found else (0.0, 0.0)
    return (width, height) if 0 < width < 1e6 and 0 < height < 1e6 else (4.0, 3.0)


def _marks(marks: Any, size: tuple[float, float]) -> tuple[str, str]:
    """(SVG of the marks in pixels of the picture, what they are in words)."""
    out, words = [], []
    around = (round(size[0]), round(size[1]))
    for mark in marks[:_MOST_MARKS] if isinstance(marks, list) else []:
        kind = mark.get("kind") if isinstance(mark, Mapping) else None
        at = mark.get("at") if isinstance(mark, Mapping) else None
        values = tuple(number(v) for v in at) if isinstance(at, list) else ()
        numbers = tuple(v for v in values if v is not None)
        if len(numbers) != len(values) or len(values) != _NUMBERS.get(str(kind)):
            continue
        if kind == "box":
            out.append(box_group([numbers], "greedy"))
        if kind == "drag":
            line = "M{:.1f} {:.1f}L{:.1f} {:.1f}".format(*numbers)
            out.append(
                f'<path class="mark halo" d="{line}"/><path class="mark greedy" d="{line}"/>'
            )
        if kind in ("point", "drag"):
            out.append(point_group([numbers[-2:]], "greedy", around))
        name = {"point": "a click at", "box": "a crop of", "drag": "a drag along"}[str(kind)]
        words.append(f"{name} {', '.join(f'{v:g}' for v in numbers)}")
    return "".join(out), "; ".join(words)
