"""Generated screens: HTML pages rendered by headless Chromium, with the boxes of their elements, as a ScreenSpot-style set.

Every page is drawn from a seed: buttons, links, icons, inputs, check boxes, lists, cards and dialogs in a desktop, mobile
or web look. Boxes come from the browser's own layout; only elements that are visible, not covered and named by exactly one
instruction become questions. Needs Playwright's Python package and the distribution's Chromium; nothing is fetched.

    python -m mmrl.tasks.pages runs/pages --count 200 --seed 0 --width 1280 --height 800
    python -m mmrl.tasks.pages runs/simple --count 500 --style simple --width 112 --height 112   # for assets/tiny_vlm

Written: screenspot_{mobile,desktop,web}.json (img_filename, instruction, bbox as x, y, width, height in pixels, data_type,
data_source) and the pictures in screenspot_imgs/. Style `simple` shows one or two coloured shapes as in mmrl.tasks.scenes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from mmrl.errors import ConfigError, MissingExtraError, did_you_mean
from mmrl.tasks.page_parts import LOOKS, page_html
from mmrl.tasks.scenes import COLORS, draw_scene
from mmrl.workers.program import CHROMIUM

__all__ = [
    "LOOKS",
    "STYLES",
    "browser_page",
    "find_chromium",
    "make_pages",
    "simple_html",
]

STYLES = ("full", "simple")
FLAGS = (
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-domain-reliability",
    "--no-pings",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--force-device-scale-factor=1",
)
_LEAST_SIDE = 6  # pixels; smaller elements are no targets
_TRIES = 10
# attempts at a screenshot, how long each may take, the first pause
_CAPTURES, _CAPTURE_MS, _WAIT_MS = 5, 60_000, 250
# Box, name and kind of every named element that a person sees: three quarters of it on the screen, its middle and at least
# three of five probes not covered by anything else, its text not cut off.
_TARGETS = """() => [...document.querySelectorAll("[data-say]")].map((e) => {
  const r = e.getBoundingClientRect();
  const x1 = Math.max(0, r.left), y1 = Math.max(0, r.top);
  const x2 = Math.min(innerWidth, r.right), y2 = Math.min(innerHeight, r.bottom);
  const seen = ([fx, fy]) => {
    const hit = document.elementFromPoint(x1 + fx * (x2 - x1), y1 + fy * (y2 - y1));
    return hit !== null && (hit === e || e.contains(hit));
  };
  const probes = [[0.5, 0.5], [0.15, 0.5], [0.85, 0.5], [0.5, 0.15], [0.5, 0.85]].map(seen);
  const whole = x2 > x1 && y2 > y1 && (x2 - x1) * (y2 - y1) >= 0.75 * r.width * r.height;
  const cut = e.clientWidth > 0 && (e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1);
  const ok = whole && !cut && e.checkVisibility() && probes[0] && probes.filter((p) => p).length >= 3;
  return {ok, say: e.dataset.say, type: e.dataset.type, box: [x1, y1, x2, y2]};
})"""


def find_chromium(program: str | None = None) -> str:
    """Path of the browser: `program`, else the first of CHROMIUM on PATH. Raises ConfigError saying how to install it."""
    found = next(filter(None, map(shutil.which, [program] if program else CHROMIUM)), None)
    if found is None:
        raise ConfigError(
            f"expected a Chromium browser, found no {program or ' or '.join(CHROMIUM)}; install one with "
            "`sudo apt-get install -y --no-install-recommends chromium-headless-shell fonts-dejavu-core` (on Ubuntu "
            "chromium; or run "
            "`bash scripts/system_packages.sh`), or name it with --chromium PATH"
        )
    return found


@contextlib.contextmanager
def browser_page(program: str | None = None) -> Iterator[Any]:
    """One page of one headless browser without network access. Raises ConfigError or MissingExtraError."""
    path = find_chromium(program)
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError as err:
        raise MissingExtraError(
            "expected the package playwright, which drives the browser, found none; "
            "pip install playwright (its own browsers are not needed)"
        ) from err
    flags = [*FLAGS, *(["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else [])]
    with contextlib.ExitStack() as stack:
        try:
            driver = stack.enter_context(sync_playwright())
        except Error as err:
            raise ConfigError(
                f"expected a plain script, found one where the browser cannot be driven: "
                f"{' '.join(str(err).split())[:200]}; run `python -m mmrl.tasks.pages` instead"
            ) from err
        try:
            browser = driver.chromium.launch(executable_path=path, args=flags)
        except Error as err:
            raise ConfigError(
                f"expected {path} to start as a headless browser, found: {str(err)[:400]}; try another one with "
                "--chromium PATH"
            ) from err
        stack.callback(browser.close)
        yield browser.new_context(offline=True, device_scale_factor=1).new_page()


def simple_html(rng: np.random.Generator, size: int) -> str:
    """A page of `size` x `size` pixels: one or two shapes of mmrl.tasks.scenes as buttons on its graded canvas."""
    scene = draw_scene(rng, size, int(rng.integers(2)), background="graded")
    forms = {
        "square": "",
        "circle": "border-radius:50%;",
        "triangle": "clip-path:polygon(50% 0, 100% 100%, 0 100%);",
    }
    shapes = "".join(
        f'<div data-say="{thing.color} {thing.shape}" data-type="icon" style="position:absolute;left:{thing.box[0]}px;'
        f"top:{thing.box[1]}px;width:{thing.box[2] - thing.box[0]}px;height:{thing.box[3] - thing.box[1]}px;"
        f'background:rgb{COLORS[thing.color]};{forms[thing.shape]}"></div>'
        for thing in scene.objects
    )
    ramps = "linear-gradient(to right, rgb(100,0,0), rgb(190,0,0)), linear-gradient(to bottom, rgb(0,140,100), rgb(0,140,190))"
    return (
        f'<body style="margin:0;width:{size}px;height:{size}px;background:{ramps};background-blend-mode:screen">'
        f"{shapes}</body>"
    )


def _viewport(look: str, style: str, width: int, height: int) -> tuple[int, int]:
    """Phones are upright (9 : 16 of the height), simple pages square."""
    if style == "simple":
        return min(width, height), min(width, height)
    return (
        (min(width, max(112, round(height * 9 / 16))), height)
        if look == "mobile"
        else (width, height)
    )


def _targets(page: Any) -> list[dict[str, Any]]:
    """Elements one instruction names without doubt: {say, type, box}, box in whole pixels inside the element."""
    found = page.evaluate(_TARGETS)
    names = Counter(item["say"] for item in found)
    chosen = []
    for item in found:
        x1, y1, x2, y2 = item["box"]
        box = [
            math.ceil(x1 - 0.01),
            math.ceil(y1 - 0.01),
            math.floor(x2 + 0.01),
            math.floor(y2 + 0.01),
        ]
        big = min(box[2] - box[0], box[3] - box[1]) >= _LEAST_SIDE
        if item["ok"] and big and names[item["say"]] == 1:
            chosen.append({"say": item["say"], "type": item["type"], "box": box})
    return chosen


def _pick(rng: Random, targets: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Up to `most` targets, texts and icons in turn as far as there are both."""
    piles = [[t for t in targets if t["type"] == kind] for kind in ("text", "icon")]
    for pile in piles:
        rng.shuffle(pile)
    rng.shuffle(piles)
    taken: list[dict[str, Any]] = []
    while len(taken) < most and any(piles):
        taken += [pile.pop() for pile in piles if pile]
    return taken[:most]


def _render(
    page: Any,
    look: str,
    style: str,
    seed: tuple[int, str, int],
    size: tuple[int, int],
    per_page: int,
) -> list[dict[str, Any]]:
    """Show page number `seed` and return the questions about it; raises ConfigError when the screen is too small for any."""
    for attempt in range(_TRIES):
        number = [abs(seed[0]), int(seed[0] < 0), zlib.crc32(seed[1].encode()), seed[2], attempt]
        rng = Random(repr(number))
        page.set_content(
            simple_html(np.random.default_rng(number), size[0])
            if style == "simple"
            else page_html(look, rng, *size)
        )
        chosen = _pick(rng, _targets(page), per_page)
        if chosen:
            return chosen
    raise ConfigError(
        f"expected a page with at least one visible target, found none in {_TRIES} tries at "
        f"{size[0]} x {size[1]} pixels; enlarge --width and --height, or use --style simple"
    )


def _check(
    count: int, width: int, height: int, style: str, looks: tuple[str, ...], per_page: int
) -> None:
    if count < 1 or not 1 <= per_page <= 50 or not (112 <= width <= 4096 and 112 <= height <= 4096):
        raise ConfigError(
            f"expected count >= 1, per_page in 1..50, width and height in 112..4096, found count={count}, "
            f"per_page={per_page}, width={width} and height={height}"
        )
    for value, known, name in (
        (style, STYLES, "style"),
        *((look, LOOKS, "look") for look in looks),
    ):
        if value not in known:
            raise ConfigError(
                f"unknown {name} {value!r}; expected {', '.join(known)}.{did_you_mean(str(value), known)}"
            )
    if not looks:
        raise ConfigError(f"expected at least one look, found none; choose from {', '.join(LOOKS)}")


def _capture(page: Any, path: Path) -> None:
    """The page's picture in `path`. A busy machine's compositor may have no frame to give ("Unable to capture screenshot"): waited
    for, longer each time. Raises ConfigError when the browser gives none."""
    from playwright.sync_api import Error

    for attempt in range(_CAPTURES):
        try:
            page.screenshot(path=path, timeout=_CAPTURE_MS)
            return
        except Error as err:
            if attempt + 1 == _CAPTURES or page.is_closed():
                raise ConfigError(
                    f"expected Chromium to give a picture of a page of {page.viewport_size}, found "
                    f"{' '.join(str(err).split())[:200]} ({attempt + 1} attempts): the machine is short of memory or "
                    "very busy; make fewer pages at a time, or take another browser with --chromium PATH"
                ) from err
            page.wait_for_timeout(_WAIT_MS * 2**attempt)


def make_pages(
    out_dir: str | os.PathLike[str],
    count: int,
    seed: int = 0,
    width: int = 1280,
    height: int = 800,
    style: str = "full",
    looks: tuple[str, ...] = LOOKS,
    per_page: int = 3,
    chromium: str | None = None,
) -> str:
    """Render `count` pages into `out_dir` (looks in turn, up to `per_page` questions each) and return `out_dir`.

    Page i depends on (seed, look, i) only. Every screenspot_LOOK.json is written last: its existence means that its pictures
    are complete. Raises ConfigError for impossible parameters, a missing browser, or screens too small for any element.
    """
    looks = ("web",) if style == "simple" and looks == LOOKS else looks
    _check(count, width, height, style, looks, per_page)
    folder = Path(out_dir)
    (folder / "screenspot_imgs").mkdir(parents=True, exist_ok=True)
    with browser_page(chromium) as page:
        for place, look in enumerate(looks):
            size = _viewport(look, style, width, height)
            page.set_viewport_size({"width": size[0], "height": size[1]})
            rows: list[dict[str, Any]] = []
            for index in range(place, count, len(looks)):
                name = f"{look}_{style}_{seed}_{index:06d}.png"
                questions = _render(
                    page,
                    look,
                    style,
                    (seed, look, index),
                    size,
                    1 if style == "simple" else per_page,
                )
                _capture(page, folder / "screenspot_imgs" / name)
                for target in questions:
                    x1, y1, x2, y2 = target["box"]
                    rows.append(
                        {
                            "img_filename": name,
                            "bbox": [x1, y1, x2 - x1, y2 - y1],
                            "instruction": target["say"],
                            "data_type": target["type"],
                            "data_source": f"pages-{style}",
                        }
                    )
            if rows:
                partial = folder / f"screenspot_{look}.json.partial"
                partial.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
                os.replace(partial, folder / f"screenspot_{look}.json")
    return str(folder)


def main(argv: list[str] | None = None) -> int:
    """Command line: writes a set and prints its folder."""
    parser = argparse.ArgumentParser(
        prog="python -m mmrl.tasks.pages",
        description="Render generated screens with their targets.",
    )
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--count", type=int, default=200, help="number of pages")
    parser.add_argument("--seed", type=int, default=0, help="seed of the set")
    parser.add_argument(
        "--width",
        type=int,
        default=1280,
        help="width of desktop and web screens in pixels, 112..4096",
    )
    parser.add_argument(
        "--height", type=int, default=800, help="height of all screens in pixels, 112..4096"
    )
    parser.add_argument(
        "--style", default="full", choices=STYLES, help="full pages, or one or two coloured shapes"
    )
    parser.add_argument(
        "--looks", default="", help=f"comma-separated, default {','.join(LOOKS)} (simple: web)"
    )
    parser.add_argument(
        "--per-page", type=int, default=3, help="most questions about one page (simple: always 1)"
    )
    parser.add_argument(
        "--chromium", default=None, help="browser to use instead of the first found on PATH"
    )
    args = parser.parse_args(argv)
    try:
        looks = tuple(args.looks.split(",")) if args.looks else LOOKS
        path = make_pages(
            args.out,
            args.count,
            args.seed,
            args.width,
            args.height,
            args.style,
            looks,
            args.per_page,
            args.chromium,
        )
    except (ConfigError, MissingExtraError) as err:
        parser.error(str(err))
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
