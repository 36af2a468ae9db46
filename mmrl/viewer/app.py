"""The HTTP side of the viewer: routes, all of them GET. Needs the extra `view` (starlette, uvicorn).

    /  /static/*  /api/runs  /api/run  /api/metrics  /api/samples  /api/sample  /api/picture  /api/frame  /api/episode
    /api/compare  /api/diff  /download/{metrics.csv, samples.jsonl, report.html, comparison.html}

A run is named by ?run=KEY. Work is done in threads, so that one slow request does not hold the others.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from mmrl.errors import MediaError, MissingExtraError, MMRLError, install_command

try:
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as error:
    raise MissingExtraError(
        f"mmrl view needs starlette and uvicorn ({error}): {install_command('view')}"
    ) from error

from mmrl.viewer import answers, files
from mmrl.viewer.asking import Missing, Query, json_answer, query_of
from mmrl.viewer.workspace import Workspace

__all__ = ["application"]

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
}

_ROUTES: dict[str, Callable[[Workspace, Query], Response]] = {
    "/api/runs": answers.runs,
    "/api/run": answers.run,
    "/api/metrics": answers.metrics,
    "/api/samples": answers.samples,
    "/api/sample": answers.sample,
    "/api/picture": files.picture,
    "/api/frame": files.frame,
    "/api/episode": files.episode,
    "/api/compare": answers.compare,
    "/api/diff": answers.diff,
    "/download/metrics.csv": files.metrics_csv,
    "/download/samples.jsonl": files.samples_jsonl,
    "/download/report.html": files.report,
    "/download/comparison.html": files.comparison,
}


def _static() -> dict[str, tuple[bytes, str]]:
    """Every file of the page by its address; requests choose among these and name no file."""
    out: dict[str, tuple[bytes, str]] = {}
    folder = resources.files("mmrl.viewer").joinpath("static")
    waiting = [("", folder)]
    while waiting:
        prefix, place = waiting.pop()
        for item in place.iterdir():
            if item.is_dir():
                waiting.append((f"{prefix}{item.name}/", item))
            elif (kind := _TYPES.get(Path(item.name).suffix)) is not None:
                out[f"/static/{prefix}{item.name}"] = item.read_bytes(), kind
    style = resources.files("mmrl.report").joinpath("page.css").read_bytes()
    out["/static/report.css"] = style, _TYPES[".css"]
    return out


def _route(
    workspace: Workspace, answer: Callable[[Workspace, Query], Response]
) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        return await run_in_threadpool(answer, workspace, query_of(request))

    return endpoint


def application(workspace: Workspace) -> Starlette:
    """The viewer without its guard (mmrl.viewer.guard)."""
    pages = _static()

    async def page(request: Request) -> Response:
        found = pages.get("/static/index.html" if request.url.path == "/" else request.url.path)
        if found is None:
            raise HTTPException(404)
        return Response(found[0], media_type=found[1], headers={"cache-control": "no-cache"})

    async def refused(request: Request, error: Exception) -> Response:
        status = 404 if isinstance(error, (Missing, MediaError)) else 400
        return _error(str(error), status)

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _error("there is nothing at this address", error.status_code)

    async def fault(request: Request, error: Exception) -> Response:
        return _error(f"the viewer failed ({type(error).__name__}); its terminal says more", 500)

    routes = [Route(path, _route(workspace, answer)) for path, answer in _ROUTES.items()]
    return Starlette(
        routes=[Route("/", page), Route("/static/{path:path}", page), *routes],
        exception_handlers={MMRLError: refused, HTTPException: unknown, Exception: fault},
    )


def _error(words: str, status: int) -> Response:
    response = json_answer({"error": words[:2000]})
    response.status_code = status
    return response
