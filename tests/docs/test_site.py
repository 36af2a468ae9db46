"""`make docs`: the site builds with --strict, holds every page, refuses a dead link, and a browser asks nobody else."""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from mmrl.tasks.pages import find_chromium
from scripts.docs_hooks import site_links
from tests.docs.pages_kit import REPO, TEXT

EVERY_PAGE = {page.removeprefix("docs/") for page in TEXT if page.startswith("docs/")}
AT_THE_TOP = {"security.md", "contributing.md", "changelog.md"}


def build(config: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """mkdocs as `make docs` runs it, into `target`."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(target)],
        cwd=REPO,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(REPO / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_page_has_a_place_in_the_navigation() -> None:
    text = (REPO / "mkdocs.yml").read_text(encoding="utf-8")
    nav = yaml.safe_load(text)["nav"]
    placed = [page for entry in nav for page in _leaves(entry)]
    assert set(placed) == EVERY_PAGE | AT_THE_TOP and len(placed) == len(set(placed))


def _leaves(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for inside in entry.values():
            for one in inside if isinstance(inside, list) else [inside]:
                yield from _leaves(one)


def test_links_to_files_of_the_repository_lead_into_the_site() -> None:
    text, needed = site_links(
        "[zoom](../../examples/zoom.py), [rules](../rewards.md#packages), [all](../../configs), "
        "[who](../../SECURITY.md), [gone](../../nothing.py), `[no](../link.md)`",
        REPO / "docs/tasks/own.md",
        "tasks/own.md",
    )
    assert text == (
        "[zoom](../source/examples/zoom.py.txt), [rules](../rewards.md#packages), all, "
        "[who](../security.md), [gone](../../nothing.py), `[no](../link.md)`"
    )
    assert set(needed) == {"source/examples/zoom.py.txt"}


@pytest.mark.slow
def test_the_site_holds_every_page_and_the_docstrings(site: Path) -> None:
    for page in EVERY_PAGE | AT_THE_TOP:
        html = (site / page).with_suffix(".html").read_text(encoding="utf-8")
        assert "<h1" in html, page
    api = (site / "api.html").read_text(encoding="utf-8")
    for name in ("mmrl.library.Trainer", "mmrl.task.Task", "mmrl.robotics.contract.Simulator"):
        assert f'id="{name}"' in api, name
    assert (site / "source/examples/rl_loop.py.txt").is_file()
    loaded = re.compile(
        r"<(?:script|img|link rel=\"stylesheet\")[^>]*(?:src|href)=\"(https?:[^\"]+)"
    )
    for html in site.rglob("*.html"):
        assert loaded.findall(html.read_text(encoding="utf-8")) == [], html


@pytest.mark.slow
def test_a_dead_link_fails_the_build(tmp_path: Path) -> None:
    shutil.copytree(REPO / "docs", tmp_path / "docs")
    (tmp_path / "docs" / "data.md").open("a").write("\n[nowhere](nowhere.md)\n")
    text = (REPO / "mkdocs.yml").read_text(encoding="utf-8")
    # hooks and modules are those of the repository
    text = text.replace("hooks: [scripts/", f"hooks: [{REPO}/scripts/")
    text = text.replace("paths: [.]", f"paths: [{REPO}]")
    (tmp_path / "mkdocs.yml").write_text(text, encoding="utf-8")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0 and "nowhere.md" in done.stderr


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.mark.slow
@pytest.mark.render("chromium")
def test_a_browser_shows_it_without_asking_anybody_else(site: Path) -> None:
    from playwright.sync_api import sync_playwright

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    asked: list[str] = []
    errors: list[str] = []
    try:
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 390, "height": 800})
            page.on("request", lambda request: asked.append(request.url))
            page.on("pageerror", lambda error: errors.append(str(error)))
            for name in ("index", "concepts", "coming-from", "tasks/video"):
                page.goto(f"{address}/{name}.html", wait_until="networkidle")
                assert page.locator("h1").count() == 1, name
                wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
                assert wide <= 0, f"{name} scrolls sideways on a phone"
            browser.close()
    finally:
        server.shutdown()
        server.server_close()
    foreign = [url for url in asked if not url.startswith((address, "data:", "blob:"))]
    assert foreign == [] and errors == [] and len(asked) > 4
