"""The page in a real browser: its script finishes without an error, charts and slider work, nothing is blank.

pytest tests/report/test_render.py -m render
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmrl.report import build_comparison, build_report
from mmrl.tasks.pages import find_chromium
from tests.report.video_run import make_video_run

pytestmark = [pytest.mark.render("chromium"), pytest.mark.slow]
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
)


def browse(page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Chromium on a page, with a profile of its own."""
    return subprocess.run(
        [
            find_chromium(),
            *FLAGS,
            f"--user-data-dir={page.parent / 'profile'}",
            *flags,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def console(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What the page wrote to the console, refusals of its security policy included."""
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def with_probe(page: Path, script: str) -> Path:
    """A copy of the page that runs `script` at its end, with the security policy opened for it."""
    text = re.sub(
        r"script-src 'sha256-[^']+'", "script-src 'unsafe-inline'", page.read_text(encoding="utf-8")
    )
    copy = page.with_name("probe.html")
    copy.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    return copy


def test_the_page_runs_without_errors_and_shows_its_content(new_run: Callable[..., Path]) -> None:
    done = browse(build_report(new_run()), "--dump-dom")
    assert (
        'data-ready="true"' in done.stdout
        and "data-errors" not in done.stdout
        and console(done) == []
    )
    charts = re.search(r'data-charts="(\d+)"', done.stdout)
    assert charts and int(charts.group(1)) >= 20
    assert "Held-out mIoU" in done.stdout and "step 30" in done.stdout


def test_slider_readout_and_theme_work(new_run: Callable[..., Path]) -> None:
    probe = with_probe(
        build_report(new_run()),
        """
      const range = document.querySelector(".slider input"), seen = [];
      const shown = () => [...document.querySelectorAll(".gallery .state:not([hidden])")].map((s) => s.dataset.step);
      range.value = 1; range.dispatchEvent(new Event("input"));
      seen.push([...new Set(shown())].join(), document.querySelector(".slider output").textContent);
      const figure = document.querySelector("figure.chart"), canvas = figure.querySelector(".canvas");
      const box = canvas.getBoundingClientRect(), clientX = box.left + box.width * 0.34;
      canvas.dispatchEvent(new PointerEvent("pointermove", { clientX }));
      seen.push(figure.querySelector(".readout").innerText.replaceAll("\\n", " "));
      const crosses = [...document.querySelectorAll(".cross:not([hidden])")].length;
      seen.push(crosses > 10);
      document.querySelector(".theme").click();
      seen.push(document.documentElement.dataset.theme, getComputedStyle(document.body).backgroundColor);
      document.body.dataset.seen = seen.join(";");""",
    )
    found = re.search(r'data-seen="([^"]*)"', browse(probe, "--dump-dom").stdout)
    assert found
    state, output, readout, many, theme, background = found.group(1).split(";")
    assert (state, output, many, theme, background) == (
        "1",
        "step 10",
        "true",
        "dark",
        "rgb(20, 23, 26)",
    )
    assert readout.startswith("step 10 ") and re.search(
        r"sampled 0\.\d+ \[0\.\d+, 0\.\d+\] n = 10", readout
    )


@pytest.mark.parametrize("width", [1280, 500])
def test_the_screenshot_is_not_blank_and_nothing_sticks_out(
    new_run: Callable[..., Path], tmp_path: Path, width: int
) -> None:
    page, picture = build_report(new_run()), tmp_path / "page.png"
    browse(page, f"--window-size={width},2400", f"--screenshot={picture}")
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)
    assert pixels.shape[1] == width
    for top in range(0, 2400, 400):  # every stretch of the page has ink
        part = pixels[top : top + 400]
        assert (np.abs(part - pixels[2, 2]).sum(axis=2) > 120).mean() > 0.003
    probe = with_probe(
        page, "document.body.dataset.wide = document.documentElement.scrollWidth - innerWidth"
    )
    found = re.search(
        r'data-wide="(-?\d+)"', browse(probe, "--dump-dom", f"--window-size={width},2400").stdout
    )
    assert found and int(found.group(1)) <= 0


def test_hostile_text_does_nothing_in_a_browser(new_run: Callable[..., Path]) -> None:
    run = new_run()
    for path in run.glob("eval/*/predictions.jsonl"):
        bad = (
            "</pre></script><script>document.body.dataset.hacked=1</script>"
            "<img src=x onerror=document.body.dataset.hacked=1>"
        )
        path.write_text(path.read_text().replace("the red", bad), encoding="utf-8")
    done = browse(build_report(run), "--dump-dom")
    assert (
        "data-hacked" not in done.stdout.replace("document.body.dataset.hacked", "")
        and console(done) == []
    )
    assert 'data-ready="true"' in done.stdout


def test_empty_and_comparison_pages_run_too(new_run: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    both = build_comparison([new_run("a"), new_run("b", seed=1)], tmp_path / "both.html")
    for page in (build_report(tmp_path / "empty"), both):
        done = browse(page, "--dump-dom")
        assert 'data-ready="true"' in done.stdout and console(done) == []


@pytest.mark.parametrize("width", [1280, 500])
def test_a_mixed_run_fits_the_window_and_shows_boxes_points_and_texts(
    mixed_run: Callable[..., Path], width: int
) -> None:
    page = build_report(mixed_run(prompts=6))
    probe = with_probe(
        page,
        """
      const box = (name) => Math.max(0, ...[...document.querySelectorAll(".gallery " + name)].map(
        (e) => e.getBoundingClientRect().width));
      document.querySelector(".samples").click();
      const hidden = [...document.querySelectorAll(".gallery .sampled:not(.key)")].every((e) => !e.checkVisibility());
      document.body.dataset.probe = [document.documentElement.scrollWidth - innerWidth, box(".mark.gold"), box(".mark.greedy"),
        box("rect.gold"), box(".word.gold"), box(".texts"), hidden].join(";");
    """,
    )
    done = browse(probe, "--dump-dom", f"--window-size={width},2400")
    found = re.search(r'data-probe="([^"]+)"', done.stdout)
    assert found and 'data-ready="true"' in done.stdout and console(done) == []
    wide, *sizes, hidden = found.group(1).split(";")
    assert int(wide) <= 0 and hidden == "true"
    cross = float(sizes[0])
    assert 6 < cross < 30 and all(float(s) > 6 for s in sizes), (
        "large enough to see, small enough to point"
    )


@pytest.mark.parametrize("width", [1280, 500, 390])
def test_filmstrips_fit_the_window_and_follow_the_slider(tmp_path: Path, width: int) -> None:
    page = build_report(make_video_run(tmp_path / "run", prompts=1))
    probe = with_probe(
        page,
        """
      const all = (name) => [...document.querySelectorAll(".gallery " + name)].filter((e) => e.checkVisibility());
      const widths = (name) => all(name).map((e) => e.getBoundingClientRect().width);
      const bars = () => all(".lane.greedy i").map((e) => e.style.left).join();
      const range = document.querySelector(".slider input"), last = bars(), frames = widths(".still image");
      range.value = 0; range.dispatchEvent(new Event("input"));
      const first = bars();
      document.querySelector(".samples").click();
      const seen = [document.documentElement.scrollWidth - innerWidth, frames.length, Math.min(...frames), first !== last,
                    Math.min(...widths(".still rect.gold")), all(".lane.sampled").length, all(".lane.gold").length,
                    Math.max(...all(".still").map((e) => e.getBoundingClientRect().right)) <= innerWidth];
      (window.frameElement?.ownerDocument ?? document).body.dataset.probe = seen.join(";");
    """,
    )
    if width < 500:  # the browser's own window is never narrower
        text = probe.read_text(encoding="utf-8").replace("&", "&amp;").replace('"', "&quot;")
        probe.write_text(
            f'<body><iframe width="{width}" height="2000" srcdoc="{text}"></iframe></body>',
            encoding="utf-8",
        )
    done = browse(probe, "--dump-dom", f"--window-size={max(width, 500)},2400")
    found = re.search(r'data-probe="([^"]+)"', done.stdout)
    assert found and console(done) == []
    wide, count, narrowest, moved, box, sampled, gold, inside = found.group(1).split(";")
    assert int(wide) <= 0 and inside == "true" and moved == "true"
    assert int(count) == 8 * 5 and float(narrowest) > 60 and float(box) > 8
    assert int(sampled) == 0 and int(gold) == 3, (
        "three of the tasks have spans, and samples can be hidden"
    )
