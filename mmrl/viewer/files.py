"""What the page shows or keeps as files: pictures, frames, episodes, CSV, JSON Lines, and the report's own pages."""

from __future__ import annotations

import csv
import io
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from starlette.concurrency import iterate_in_threadpool
from starlette.responses import FileResponse, Response, StreamingResponse

from mmrl.errors import DataError
from mmrl.report import build_comparison, build_report
from mmrl.report.clips import episode_clip
from mmrl.report.load import Run, number
from mmrl.report.pictures import orientation_of, pictures_of
from mmrl.viewer.asking import (
    Missing,
    Query,
    cwd_of,
    of_rows,
    row_of,
    run_key,
    several_runs,
    table_of,
    whole,
)
from mmrl.viewer.media import (
    frame_bytes,
    picture_bytes,
    texts_of,
)
from mmrl.viewer.query import Wish
from mmrl.viewer.workspace import OpenRun, Workspace

__all__ = [
    "comparison",
    "episode",
    "frame",
    "metrics_csv",
    "picture",
    "report",
    "samples_jsonl",
]

_MOST_NAMES = 100
_DOWNLOAD_LINES = 256


def _media_row(workspace: Workspace, query: Query) -> tuple[OpenRun, str, int, dict[str, Any]]:
    opened, kind, number_ = row_of(workspace, query)
    row = opened.tables[kind].row(number_)
    if row is None:
        raise Missing("the file of this row is no longer what it was; load the page again")
    return opened, kind, number_, row


@of_rows
def picture(workspace: Workspace, query: Query) -> Response:

    opened, _, _, row = _media_row(workspace, query)
    paths, shown = pictures_of(row)
    place = whole(query, "i", shown, 1 << 20)
    path = (
        workspace.media.find(paths[place], opened.folder, cwd_of(opened.live()))
        if place < len(paths)
        else None
    )
    if path is None:
        raise Missing("the row names no picture that can be shown here")
    orientation = orientation_of(row)
    if query.get("size", ["thumb"])[-1] == "full":
        data, kind = picture_bytes(path, orientation, None)
    else:
        data, kind = workspace.thumbs.get(path, orientation)
    return _kept(data, kind)


@of_rows
def frame(workspace: Workspace, query: Query) -> Response:

    opened, _, _, row = _media_row(workspace, query)
    videos = texts_of(row, "videos")
    second = _seconds(query)
    path = workspace.media.find(videos[0], opened.folder, cwd_of(opened.live())) if videos else None
    if path is None:
        raise Missing("the row names no clip that can be shown here")
    return _kept(*frame_bytes(path, row, second))


def _seconds(query: Query) -> float:
    text = query.get("t", ["0"])[-1]
    try:
        found = number(float(text))
    except ValueError:
        found = None
    if found is None:
        raise DataError(f"expected seconds for t, found {text[:80]!r}; such as t=1.5")
    return found


def _kept(data: bytes, kind: str) -> Response:
    """An answer that the browser keeps for some minutes: pages are turned back and forth."""
    return Response(data, media_type=kind, headers={"cache-control": "private, max-age=300"})


@of_rows
def episode(workspace: Workspace, query: Query) -> Response:

    opened, kind, number_, row = _media_row(workspace, query)
    path = episode_clip(row, opened.tables[kind].folder_of(number_) / "videos", opened.folder)
    if path is None:
        raise Missing("the row names no clip in the folder of its run")
    return FileResponse(path, media_type="video/mp4")


def _file_name(run: Run, end: str) -> dict[str, str]:
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in run.name)
    return {"content-disposition": f'attachment; filename="{plain[:80]}-{end}"'}


def metrics_csv(workspace: Workspace, query: Query) -> Response:
    opened = workspace.open(run_key(query))
    run, columns = opened.live(), opened.columns
    wanted = query.get("names", [])[:_MOST_NAMES]
    names = [n for n in wanted if columns.series(n)] or columns.names

    def rows() -> Iterator[str]:
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow(["step", *names])
        for row in sorted(range(len(columns)), key=columns.steps.__getitem__):
            values = (columns.series(n)[row] for n in names)
            writer.writerow([_plain(columns.steps[row]), *(_plain(v) for v in values)])
            if out.tell() > 1 << 16:
                yield out.getvalue()
                out.seek(0)
                out.truncate()
        yield out.getvalue()

    return StreamingResponse(
        iterate_in_threadpool(rows()),
        media_type="text/csv; charset=utf-8",
        headers=_file_name(run, "metrics.csv"),
    )


def _plain(value: float) -> str:
    """A number as its shortest text, '' for none."""
    if value != value:
        return ""
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


@of_rows
def samples_jsonl(workspace: Workspace, query: Query) -> Response:
    wish = Wish.read(query)
    opened, kind = table_of(workspace, query)
    table = opened.tables[kind]
    while not table.update(1.0):
        pass
    found = opened.finders[kind].find(wish).rows

    def rows() -> Iterator[bytes]:
        for start in range(0, len(found), _DOWNLOAD_LINES):
            part = table.lines(list(found[start : start + _DOWNLOAD_LINES]))
            yield b"".join(line.rstrip(b"\r\n") + b"\n" for line in part if line)

    return StreamingResponse(
        iterate_in_threadpool(rows()),
        media_type="application/x-ndjson",
        headers=_file_name(opened.live(), f"{kind}.jsonl"),
    )


def _page(build: Callable[[Path], Path], headers: Mapping[str, str]) -> Response:
    """A page that `build` writes, as a download; nothing is left behind."""
    with tempfile.TemporaryDirectory(prefix="mmrl_view_") as folder:
        data = build(Path(folder) / "page.html").read_bytes()
    return Response(data, media_type="text/html; charset=utf-8", headers=dict(headers))


def report(workspace: Workspace, query: Query) -> Response:

    opened = workspace.open(run_key(query))
    cwd = cwd_of(opened.live())

    def find(path: str) -> str:
        return workspace.media.place(path, opened.folder, cwd)

    with workspace.exporting:
        return _page(
            lambda out: build_report(opened.folder, out, find=find),
            _file_name(opened.live(), "report.html"),
        )


def comparison(workspace: Workspace, query: Query) -> Response:

    runs = several_runs(workspace, query)
    with workspace.exporting:
        return _page(
            lambda out: build_comparison([r.folder for r in runs], out),
            _file_name(runs[0], "comparison.html"),
        )
