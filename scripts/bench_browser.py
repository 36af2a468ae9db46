"""What a browser without windows saves where pages are shown to a policy: processor time and memory, beside the whole Chromium.

    python -m scripts.bench_browser        (two minutes, writes assets/results/bench_browser.json)

Each of the two that this machine has is started in a process of its own, alternating. Seconds of processor time, with all processes
below it: of its start with a first page; of each further page in a context of its own, as the task `browser` opens one per episode,
with a generated screen in it and one screenshot; of a screenshot more. And the memory of its processes with four pages open, as the
sum of their proportional shares.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from random import Random
from typing import Any

import psutil

from scripts import _bench as bench

KINDS = {"without windows": "chromium-headless-shell", "whole": "chromium"}
SIZE = (1280, 720)
PAGES, SHOTS = 4, 20


def _used() -> float:
    """Seconds of processor time of this process and all below it, those that ended included."""
    own = psutil.Process()
    return sum(
        sum((t.user, t.system, t.children_user, t.children_system))
        for t in (p.cpu_times() for p in (own, *own.children(recursive=True)))
    )


def one(program: str) -> dict[str, float]:
    """One start of a browser, in this process."""
    from mmrl.tasks.page_parts import LOOKS, page_html
    from mmrl.tasks.pages import browser_page

    def show(page: Any, number: int) -> None:
        page.set_viewport_size({"width": SIZE[0], "height": SIZE[1]})
        page.set_content(page_html(LOOKS[number % len(LOOKS)], Random(number), *SIZE))
        page.screenshot()

    at = [_used()]
    with browser_page(program) as page:
        show(page, 0)
        at.append(_used())
        for number in range(1, PAGES):
            show(page.context.browser.new_context(offline=True).new_page(), number)
        at.append(_used())
        for _ in range(SHOTS):
            page.screenshot()
        at.append(_used())
        below = psutil.Process().children(recursive=True)
        memory = sum(p.memory_full_info().pss for p in below) / 2**20
    return {
        "start_s": at[1] - at[0],
        "page_s": (at[2] - at[1]) / (PAGES - 1),
        "screenshot_s": (at[3] - at[2]) / SHOTS,
        "memory_mib": memory,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--one", metavar="PROGRAM", help=argparse.SUPPRESS)
    options = bench.parse(parser)
    if options.one:
        bench.finish_child(one(options.one))
        return
    missing = [program for program in KINDS.values() if shutil.which(program) is None]
    if missing:
        raise SystemExit(
            f"expected {' and '.join(KINDS.values())} on PATH, found no {' and no '.join(missing)}; "
            f"sudo apt-get install {' '.join(missing)}"
        )
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for order in bench.alternation(list(KINDS), options.rounds):
        for kind in order:
            rounds[kind].append(bench.run_child("scripts.bench_browser", ["--one", KINDS[kind]]))
    names = list(rounds["whole"][0])
    found = {
        kind: {name: bench.spread([row[name] for row in rows]) for name in names}
        for kind, rows in rounds.items()
    }
    ratios = {
        name: round(
            statistics.median(
                w[name] / s[name]
                for w, s in zip(rounds["whole"], rounds["without windows"], strict=True)
            ),
            2,
        )
        for name in names
    }
    bench.print_table(
        ("", *KINDS, "ratio"),
        [(name, *(found[kind][name]["median"] for kind in KINDS), ratios[name]) for name in names],
    )
    value = {"programs": KINDS, "size": SIZE, "pages": PAGES, "browsers": found, "ratio": ratios}
    print(bench.write_results("bench_browser", value, "playwright"))


if __name__ == "__main__":
    main()
