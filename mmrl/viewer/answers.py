"""What the page asks for as JSON: the table of runs, one run, its metrics, its rows, and runs beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response

from mmrl.errors import DataError
from mmrl.viewer.asking import (
    LOOK_S,
    Missing,
    Query,
    cwd_of,
    json_answer,
    of_rows,
    row_of,
    run_key,
    several_runs,
    table_of,
    whole,
)
from mmrl.viewer.between import config_table, paired
from mmrl.viewer.catalog import charts, held_out
from mmrl.viewer.glance import headline, status_of, timing
from mmrl.viewer.query import Wish
from mmrl.viewer.samples import detail, facets, lines
from mmrl.viewer.series import Columns, thin
from mmrl.viewer.workspace import Workspace

__all__ = ["compare", "diff", "metrics", "run", "runs", "sample", "samples"]

_MOST_PAGE = 200
_MOST_NAMES = 100
_MOST_POINTS = 6000  # rows of metrics sent at once; more are thinned
_MOST_ALARMS = 500


def runs(workspace: Workspace, query: Query) -> Response:
    return json_answer({"roots": [p.name for p in workspace.roots.paths], "runs": workspace.runs()})


def run(workspace: Workspace, query: Query) -> Response:
    opened = workspace.open(run_key(query))
    run = opened.live()
    return json_answer(
        {
            "key": opened.key,
            "name": run.name,
            "info": run.info,
            **timing(run.folder, run.info),
            "version": opened.version,
            "step": run.last_step,
            "rows": len(opened.columns),
            "headline": headline(run),
            "charts": charts(run),
            "evals": held_out(run),
            "alarms": run.alarms[-_MOST_ALARMS:],
            "notes": run.notes,
            "data": run.data[:200],
            "config": run.config_text[:200_000],
            "samples": {kind: table.any() for kind, table in opened.tables.items()},
        }
    )


def metrics(workspace: Workspace, query: Query) -> Response:
    opened = workspace.open(run_key(query))
    run, columns = opened.live(), opened.columns
    names = query.get("names", [])[:_MOST_NAMES]
    start = whole(query, "from", 0, 1 << 40)
    generation = whole(query, "generation", columns.generation, 1 << 40)
    if generation != columns.generation or start > len(columns):
        start = 0
    rows = _rows_of(columns, names, start)
    return json_answer(
        {
            "generation": columns.generation,
            "from": start,
            "next": len(columns),
            "version": opened.version,
            "status": status_of(run.folder, run.info),
            "step": run.last_step,
            "columns": len(columns.names),
            "steps": [columns.steps[r] for r in rows],
            "series": {n: [s[r] for r in rows] for n in names if (s := columns.series(n))},
        }
    )


def _rows_of(columns: Columns, names: Sequence[str], start: int) -> list[int]:
    """Row numbers in order of step: all new ones, or of a long run those that show its shape."""
    known = [s for n in names if (s := columns.series(n))]
    rows = thin(known, start, len(columns), _MOST_POINTS)
    return sorted(rows, key=columns.steps.__getitem__)


@of_rows
def samples(workspace: Workspace, query: Query) -> Response:
    wish = Wish.read(query)
    opened, kind = table_of(workspace, query)
    table = opened.tables[kind]
    done = table.update(LOOK_S)
    found = opened.finders[kind].find(wish)
    start = whole(query, "offset", 0, 1 << 40)
    page = list(found.rows[start : start + whole(query, "limit", 50, _MOST_PAGE)])
    return json_answer(
        {
            "rows": lines(table, page),
            "total": len(found.rows),
            "read": len(table),
            "done": done,
            "complete": found.complete,
            "broken": table.broken,
            "generation": table.generation,
            "facets": facets(table),
        }
    )


@of_rows
def sample(workspace: Workspace, query: Query) -> Response:
    opened, kind, row = row_of(workspace, query)
    found = detail(
        opened.tables[kind],
        row,
        workspace.media,
        cwd_of(opened.live()),
        group=query.get("group", ["1"])[-1] != "0",
    )
    if found is None:
        raise Missing("the file of this row is no longer what it was; load the page again")
    return json_answer(found)


def compare(workspace: Workspace, query: Query) -> Response:

    runs = several_runs(workspace, query)
    if len(runs) != 2:
        raise DataError(f"expected two runs to pair, found {len(runs)}")
    with workspace.exporting:
        return json_answer(paired(runs[0], runs[1]))


def diff(workspace: Workspace, query: Query) -> Response:

    return json_answer({"keys": config_table(several_runs(workspace, query))})
