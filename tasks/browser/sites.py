"""Which pages there are: how each is begun with a seed, what it shows, and how it says whether its goal is reached.

    site = find_site("miniwob/click-test")      # of the package miniwob
    site = find_site("own/shop")                # of mmrl.tasks.browser

A page is a file below its folder, which the browser is given as http://127.0.0.1/...: nothing listens there, and nothing else can
be reached. It is begun by one JavaScript function of a seed, which returns the goal in words, and judged by another one, which
returns {done, reward, progress}: `reward` 1 for the goal reached, less for a part of it, `progress` in [0, 1] for pages of several
steps. The same seed gives the same page, pixel by pixel.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from mmrl.errors import ConfigError, MissingExtraError, did_you_mean

__all__ = ["OWN", "Site", "find_site", "miniwob_folder", "miniwob_kinds", "site_names"]

OWN = Path(__file__).resolve().parent / "sites"
"""Folder of our own pages."""
_OWN_SIZE = (224, 224)
_MINIWOB_SIZE = (160, 210)
# The reward decays with the clock and the default limit is ten seconds: both are for people. The limit becomes 23 days, and the raw
# reward counts, of which some pages give a part for a part of the goal. What a page has focused by itself looks focused in the
# window in front only: nothing is, at first. Goals of the natural-language tasks are objects with the words in them.
# Sections and tabs that jQuery opens slowly would be seen half open, by chance.
_MINIWOB_BEGIN = """async (seed) => {
  if (document.activeElement) document.activeElement.blur();
  Math.seedrandom(seed);
  core.EPISODE_MAX_TIME = 2e9;
  if (window.jQuery) jQuery.fx.off = true;
  core.startEpisodeReal();
  const until = performance.now() + 5000;
  while (!WOB_TASK_READY && performance.now() < until) await new Promise((r) => setTimeout(r, 10));
  await new Promise((r) => requestAnimationFrame(() => setTimeout(r, 0)));
  if (document.activeElement) document.activeElement.blur();
  const goal = core.getUtterance();
  return typeof goal === "string" ? goal : String(goal.utterance ?? "");
}"""
_MINIWOB_JUDGE = """() => ({
  done: WOB_DONE_GLOBAL, reward: WOB_DONE_GLOBAL ? WOB_RAW_REWARD_GLOBAL : 0,
  progress: WOB_DONE_GLOBAL ? Math.max(0, Math.min(1, WOB_RAW_REWARD_GLOBAL)) : 0,
})"""
_OWN_BEGIN = "(seed) => { if (document.activeElement) document.activeElement.blur(); return site.begin(seed); }"
_OWN_JUDGE = "() => site.judge()"


@dataclass(frozen=True)
class Site:
    """One kind of page. `size`: width and height in pixels of what the policy sees; `viewport` may be wider, as some pages lay
    themselves out by it."""

    name: str
    folder: Path
    file: str
    size: tuple[int, int]
    viewport: tuple[int, int]
    begin: str
    judge: str


@functools.cache
def miniwob_folder() -> Path:
    """Folder of MiniWoB++'s pages. Raises MissingExtraError. The package is never imported: it would bring Selenium along."""
    found = importlib.util.find_spec("miniwob")
    if found is None or found.origin is None:
        raise MissingExtraError(
            "expected the package miniwob, which holds the pages of MiniWoB++, found none; pip install 'mmrl-rft[browser]'"
        )
    return Path(found.origin).resolve().parent / "html"


@functools.cache
def miniwob_kinds() -> tuple[str, ...]:
    """Names of MiniWoB++'s pages. Raises MissingExtraError."""
    return tuple(sorted(path.stem for path in (miniwob_folder() / "miniwob").glob("*.html")))


def site_names() -> tuple[str, ...]:
    """All pages that can be opened here."""
    own = [f"own/{path.stem}" for path in sorted(OWN.glob("*.html"))]
    try:
        return (*own, *(f"miniwob/{kind}" for kind in miniwob_kinds()))
    except MissingExtraError:
        return tuple(own)


def find_site(name: str) -> Site:
    """The page of that name. Raises ConfigError for an unknown one, MissingExtraError without its package."""
    family, _, kind = name.partition("/")
    if family == "own" and (OWN / f"{kind}.html").is_file() and kind.isidentifier():
        return Site(name, OWN, f"{kind}.html", _OWN_SIZE, _OWN_SIZE, _OWN_BEGIN, _OWN_JUDGE)
    if family == "miniwob" and kind in miniwob_kinds():
        # at a width of 160 pixels some dialogs lie outside of the page
        return Site(
            name,
            miniwob_folder(),
            f"miniwob/{kind}.html",
            _MINIWOB_SIZE,
            (500, 320),
            _MINIWOB_BEGIN,
            _MINIWOB_JUDGE,
        )
    known = site_names()
    raise ConfigError(
        f"expected a page such as own/shop or miniwob/click-test, found {name!r}.{did_you_mean(name, known)} "
        f"{len(known)} are known: python -m mmrl.tasks.browser.task --list"
    )
