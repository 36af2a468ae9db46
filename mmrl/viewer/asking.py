"""What requests name: a run, a table, a row, numbers; each checked, with words for what is not there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mmrl.errors import DataError, MMRLError
from mmrl.report.load import Run
from mmrl.viewer.index import KINDS
from mmrl.viewer.samples import clean
from mmrl.viewer.workspace import OpenRun, Workspace

__all__ = [
    "LOOK_S",
    "Missing",
    "Query",
    "cwd_of",
    "json_answer",
    "of_rows",
    "query_of",
    "row_of",
    "run_key",
    "several_runs",
    "table_of",
    "whole",
]

_MOST_RUNS = 7
LOOK_S = 0.35
"""Seconds that a request for rows reads on before it answers with what there is."""
Query = dict[str, list[str]]


class Missing(MMRLError):
    """What was asked for is not there."""


def query_of(request: Request) -> Query:
    out: Query = {}
    for name, value in request.query_params.multi_items():
        out.setdefault(name, []).append(value)
    return out


def json_answer(value: Any) -> Response:
    text = json.dumps(clean(value), allow_nan=False, separators=(",", ":"))
    return Response(text.encode("ascii"), media_type="application/json")


def whole(query: Mapping[str, Sequence[str]], name: str, otherwise: int, most: int) -> int:
    text = query[name][-1] if query.get(name) else str(otherwise)
    if not (text.isdecimal() and len(text) < 16):
        raise DataError(f"expected a whole number for {name}, found {text[:80]!r}")
    return min(int(text), most)


def run_key(query: Query) -> str:
    if not query.get("run"):
        raise DataError("expected the run to look at as run=KEY, found none")
    return query["run"][-1]


def table_of(workspace: Workspace, query: Query) -> tuple[OpenRun, str]:
    opened = workspace.open(run_key(query))
    kind = query.get("table", ["rollouts"])[-1]
    if kind not in opened.tables:
        raise DataError(
            f"expected table={', '.join(KINDS[:-1])} or {KINDS[-1]}, found {kind[:80]!r}"
        )
    return opened, kind


def of_rows(
    answer: Callable[[Workspace, Query], Response],
) -> Callable[[Workspace, Query], Response]:
    """An answer about rows of a table. Raises Missing where the table was read anew meanwhile, since a file was replaced or cut:
    numbers of rows that were taken before mean nothing after it."""

    @wraps(answer)
    def checked(workspace: Workspace, query: Query) -> Response:
        opened, kind = table_of(workspace, query)
        table = opened.tables[kind]
        generation = table.generation
        try:
            return answer(workspace, query)
        except (IndexError, ValueError):
            if table.generation == generation:
                raise
            raise Missing(
                "the files of these rows were replaced or cut meanwhile; load the page again"
            ) from None

    return checked


def row_of(workspace: Workspace, query: Query) -> tuple[OpenRun, str, int]:
    opened, kind = table_of(workspace, query)
    table, row = opened.tables[kind], whole(query, "row", 0, 1 << 40)
    if row >= len(table):  # a link that was opened before the rows were read
        while not table.update(LOOK_S) and row >= len(table):
            pass
    if row >= len(table):
        raise Missing(f"expected one of the {len(table):,} rows, found row={row}")
    return opened, kind, row


def cwd_of(run: Run) -> str:
    return str(run.info.get("cwd") or "")


def several_runs(workspace: Workspace, query: Query) -> list[Run]:
    keys = list(dict.fromkeys(query.get("run", [])))
    if not 1 <= len(keys) <= _MOST_RUNS:
        raise DataError(f"expected 1 to {_MOST_RUNS} runs, found {len(keys)}")
    return [workspace.run(key) for key in keys]
