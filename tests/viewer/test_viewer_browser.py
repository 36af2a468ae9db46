"""The page in a real browser: every control, live growth, deep links, downloads, keys, narrow windows, both themes, axe-core.

pytest tests/viewer/test_viewer_browser.py
"""

from __future__ import annotations

import csv
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmrl.tasks.pages import find_chromium
from tests.report.conftest import Plan, step_row
from tests.report.mixed_run import make_mixed_run
from tests.viewer.conftest import Viewer, rows_of

pytestmark = [pytest.mark.render("chromium"), pytest.mark.slow]
View = Callable[..., Viewer]
AXE = Path(__file__).with_name("axe.min.js")
WAIT = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One Chromium for the file."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        one = started.chromium.launch(executable_path=find_chromium())
        yield one
        one.close()


@pytest.fixture
def new_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """new_page(url, width=..., dark=...) opens a page; afterwards no page may have had an error."""
    made: list[tuple[Any, Any, list[str]]] = []

    def start(url: str, width: int = 1280, height: int = 900, dark: bool = False) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            accept_downloads=True,
        )
        page, said = context.new_page(), list[str]()
        page.set_default_timeout(WAIT)
        page.on(
            "console", lambda m: said.append(m.text) if m.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda e: said.append(str(e)))
        page.goto(url)
        page.wait_for_selector("body[data-ready]")
        made.append((context, page, said))
        return page

    yield start
    for context, page, said in made:
        said = [s for s in said if not (page.url.endswith("#/gone") and "status of 400" in s)]
        errors = page.evaluate("document.body.dataset.errors ?? null")
        context.close()
        assert said == [] and errors is None


def fits(page: Any) -> bool:
    """Whether nothing sticks out of the window sideways."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def query(page: Any) -> str:
    """The page's state."""
    return str(page.evaluate("decodeURIComponent(location.hash)"))


def test_the_table_sorts_filters_and_leads_to_a_comparison(
    view: View, runs: Path, new_page: Any
) -> None:
    page = new_page(view(runs).url)

    def names() -> list[str]:
        return list(page.locator("tbody tr th a").all_inner_texts())

    assert set(names()) == {"first", "live", "sweep/second"}
    page.get_by_role("button", name="held-out").click()
    assert names()[0] == "first" and "sort=headline" in query(page)
    page.get_by_role("button", name="held-out").click()
    assert names()[-1] == "first" and "order=up" in query(page)
    page.get_by_label("filter runs by status").select_option("running")
    assert names() == ["live"]
    page.get_by_label("filter runs by status").select_option("")
    page.get_by_label("filter runs by name").fill("SECOND")
    page.locator("tbody tr").first.get_by_text("sweep/second").wait_for()
    page.get_by_label("filter runs by name").fill("")
    page.get_by_label("compare first", exact=True).check()
    page.get_by_label("compare sweep/second").check()
    page.get_by_role("button", name="Compare 2 runs").click()
    page.get_by_role("heading", name="2 runs").wait_for()
    page.locator(".chart-card").first.wait_for()
    assert page.locator(".chart-card canvas").count() > 15
    page.get_by_role("link", name="Paired gains").click()
    page.get_by_role("cell", name="lower").first.wait_for()
    page.get_by_label("compared with").select_option("sweep/second")
    page.get_by_role("cell", name="higher").first.wait_for()
    page.get_by_role("link", name="Configuration").click()
    page.get_by_role("rowheader", name="optim.lr").wait_for()
    assert page.get_by_role("rowheader", name="model.path").count() == 0
    page.get_by_label("also equal keys").check()
    page.get_by_role("rowheader", name="model.path").wait_for()
    page.get_by_label("find a key").fill("best_metric")
    page.get_by_role("rowheader", name="optim.lr").wait_for(state="detached")


def test_curves_grow_while_a_run_writes(view: View, runs: Path, new_page: Any) -> None:
    page = new_page(f"{view(runs).url}/#/run?key=live")
    card = page.locator('[data-title="Gradient norm"]')
    card.wait_for()
    assert card.get_attribute("data-points") == "20"
    rng = random.Random(3)
    with (runs / "live" / "metrics.jsonl").open("a") as file:
        for step in range(21, 27):
            file.write(json.dumps(step_row(Plan(), step, rng) | {"train/novel": 1.0}) + "\n")
    page.locator('[data-title="Gradient norm"][data-points="26"]').wait_for()
    page.get_by_text("live, step 26").wait_for()
    shutil.copytree(runs / "first/eval/step_000030", runs / "live/eval/step_000030")
    page.locator('[data-title="mIoU"][data-points="8"]').wait_for()  # four evaluations, two modes
    info = json.loads((runs / "live/run.json").read_text()) | {"status": "finished"}
    (runs / "live/run.json").write_text(json.dumps(info))
    page.locator("h1 .chip", has_text="finished").wait_for()
    page.get_by_text("All other metrics").click()
    page.locator('[data-title="train/novel"]').wait_for()
    assert page.evaluate("performance.getEntriesByType('navigation').length") == 1


def test_every_control_of_a_chart_works(
    view: View, runs: Path, new_page: Any, tmp_path: Path
) -> None:
    page = new_page(f"{view(runs).url}/#/run?key=first")
    card = page.locator('[data-title="Training IoU"]')
    card.wait_for()
    key = card.get_by_role("button", name="mIoU")
    key.click()
    assert key.get_attribute("aria-pressed") == "false"
    log = card.get_by_role("button", name="log: ")
    log.click()
    assert log.get_attribute("aria-pressed") == "true"
    page.get_by_label("smoothing").select_option("5")
    assert "smooth=5" in query(page)
    box = card.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 80)
    card.get_by_text(re.compile(r"^step \d+$")).wait_for()
    assert re.search(
        r"\d", card.get_by_role("button", name="Acc@0.5").inner_text().replace("Acc@0.5", "")
    )

    with page.expect_download() as started:
        card.get_by_role("button", name="PNG: ").click()
    started.value.save_as(tmp_path / "chart.png")
    with Image.open(tmp_path / "chart.png") as picture:
        assert picture.size[0] > 200 and len(picture.convert("RGB").getcolors(1 << 20) or []) > 4
    with page.expect_download() as started:
        card.get_by_role("link", name="CSV: Training IoU").click()
    started.value.save_as(tmp_path / "chart.csv")
    rows = list(csv.DictReader((tmp_path / "chart.csv").open()))
    assert set(rows[0]) == {"step", "train/iou", "train/acc@0.5"} and len(rows) == 30
    with page.expect_download() as started:
        page.get_by_role("link", name="Export the report").click()
    started.value.save_as(tmp_path / "report.html")
    assert "Held-out mIoU" in (tmp_path / "report.html").read_text(encoding="utf-8")
    page.get_by_label("find a chart or metric").fill("entropy")
    page.locator('[data-title="Training IoU"]').wait_for(state="detached")
    assert page.locator('[data-title="Entropy"]').is_visible()
    for tab, text in (
        ("Alarms", "entropy collapse"),
        ("Configuration", "best_metric: sampled/iou"),
    ):
        page.get_by_role("link", name=tab).click()
        page.get_by_text(text).first.wait_for()


def test_the_explorer_filters_shows_and_keeps_rows(
    view: View, runs: Path, new_page: Any, tmp_path: Path
) -> None:
    page = new_page(f"{view(runs).url}/#/run?key=first&tab=samples")
    count = page.locator(".list-side > .note")
    count.get_by_text("120 rows").wait_for()
    page.get_by_label("filter by mode").select_option("greedy")
    count.get_by_text("40 rows of 120").wait_for()
    page.get_by_label("filter by source").select_option("screens")
    count.get_by_text("20 rows of 120").wait_for()
    page.get_by_label("sort by").select_option("reward|up")
    page.get_by_label("reward to").fill("0.9")
    page.get_by_label("first step").fill("10")
    kept = [
        r
        for r in rows_of(runs)
        if r["mode"] == "greedy"
        and r["source"] == "screens"
        and r["step"] >= 10
        and r["score"]["value"] <= 0.9
    ]
    assert 3 < len(kept) < 20
    count.get_by_text(f"{len(kept)} rows of 120").wait_for()
    rewards = [float(t.replace("✕", "")) for t in page.locator(".sample .reward").all_inner_texts()]
    assert rewards == sorted(rewards) and len(rewards) == len(kept)
    page.locator(".sample-list a").first.click()
    page.locator(".detail .frame image").wait_for()
    assert page.locator(".detail rect.gold").count() == 1
    state = query(page)
    for part in (
        "mode=greedy",
        "source=screens",
        "sort=reward",
        "reward_max=0.9",
        "step_min=10",
        "row=",
    ):
        assert part in state

    other = new_page(page.url)  # a link to all of it
    other.locator(".detail .frame image").wait_for()
    assert other.get_by_label("reward to").input_value() == "0.9"
    assert other.get_by_label("filter by source").input_value() == "screens"
    assert other.locator(".sample-list a").count() == len(kept)
    assert other.locator(".sample-list a[aria-current=true]").count() == 1

    with page.expect_download() as started:
        page.get_by_role("link", name="Download JSONL").click()
    started.value.save_as(tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").open()]
    assert len(rows) == len(kept) and {r["source"] for r in rows} == {"screens"}
    page.get_by_role("button", name="Clear filters").click()
    count.get_by_text("120 rows", exact=True).wait_for()
    page.get_by_role("button", name="next page").click()
    page.get_by_text("page 2 of 3").wait_for()
    page.go_back()
    page.get_by_text("page 1 of 3").wait_for()
    page.get_by_label("rows of").select_option("rollouts")
    count.get_by_text("40 rows").wait_for()
    page.get_by_label("search prompts and answers").fill("<zoom>[1, 2, 31")
    count.get_by_text("0 rows of 40").wait_for()
    page.get_by_label("search prompts and answers").fill("<zoom>[1, 2, 30")
    count.get_by_text("2 rows of 40").wait_for()
    page.locator(".sample-list a").last.click()
    page.get_by_text("turn 2").wait_for()
    assert "<zoom>[1, 2, 30, 40]</zoom>" in page.locator(".detail .turn").first.inner_text()


def test_a_picture_opens_at_full_resolution_and_moves(
    view: View, runs: Path, new_page: Any
) -> None:
    page = new_page(f"{view(runs).url}/#/run?key=first&tab=samples&row=0")
    page.locator(".detail .openable").click()
    zoom = page.locator("dialog.zoom")
    zoom.wait_for()
    page.wait_for_load_state("networkidle")
    address = zoom.locator("image").get_attribute("href")
    assert "size=full" in address and zoom.locator("rect.gold").count() == 1
    zoom.get_by_role("button", name="larger").click()
    assert zoom.get_by_label("zoom").inner_text() == "140 %"
    zoom.get_by_role("button", name="smaller").click()
    page.keyboard.press("+")
    before = zoom.locator("svg").bounding_box()
    page.keyboard.press("ArrowLeft")
    assert zoom.locator("svg").bounding_box()["x"] == pytest.approx(before["x"] + 60, abs=1)
    zoom.get_by_role("button", name="fit").click()
    assert zoom.get_by_label("zoom").inner_text() == "100 %"
    zoom.get_by_role("button", name="boxes").click()
    assert not zoom.locator("rect.gold").is_visible()
    page.keyboard.press("Escape")
    zoom.wait_for(state="hidden")
    page.get_by_label("others of its group").uncheck()
    assert page.locator(".detail svg rect.sampled").first.is_hidden()


def test_keys_alone_lead_from_the_table_to_a_picture(view: View, runs: Path, new_page: Any) -> None:
    page = new_page(f"{view(runs).url}/#/?q=first")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "first":
            break
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Samples").wait_for()
    page.get_by_role("link", name="Samples").focus()
    page.keyboard.press("Enter")
    page.locator(".sample-list a").first.wait_for()
    page.keyboard.press("/")
    page.keyboard.type("the")
    page.locator(".sample-list a").first.focus()
    page.keyboard.press("Enter")
    first = page.locator(".detail h2").inner_text()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.locator(".sample-list li:nth-child(4) a[aria-current]").wait_for()
    page.keyboard.press("k")
    page.locator(".sample-list li:nth-child(3) a[aria-current]").wait_for()
    assert first
    page.locator(".detail .openable").focus()
    page.keyboard.press("Enter")
    page.locator("dialog.zoom[open]").wait_for()
    page.keyboard.press("Escape")
    page.locator("dialog.zoom[open]").wait_for(state="detached")


PLACES = (
    "#/",
    "#/run?key=first",
    "#/run?key=first&tab=samples&row=1",
    "#/run?key=mixed&tab=samples&q=",
    "#/run?key=first&tab=alarms",
    "#/run?key=first&tab=config",
    "#/compare?run=first&run=sweep/second",
    "#/compare?run=first&run=sweep/second&tab=gains",
    "#/compare?run=first&run=sweep/second&tab=config",
)


@pytest.mark.parametrize("dark", [False, True])
def test_no_serious_finding_of_axe_and_nothing_sticks_out(
    view: View, runs: Path, browser: Any, dark: bool
) -> None:
    make_mixed_run(runs / "mixed", prompts=6)
    viewer, found = view(runs), []
    context = browser.new_context(
        viewport={"width": 390, "height": 844} if dark else {"width": 1280, "height": 900},
        color_scheme="dark" if dark else "light",
        bypass_csp=True,  # axe is brought in from outside
    )
    for place in PLACES:
        page = context.new_page()
        page.set_default_timeout(WAIT)
        page.goto(f"{viewer.url}/{place}")
        page.wait_for_selector("body[data-ready]")
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(500)
        assert fits(page), place
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(20, 23, 26)" if dark else "rgb(250, 249, 246)")
        page.add_script_tag(path=str(AXE))
        report = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        assert report["testEngine"]["name"] == "axe-core" and len(report["passes"]) > 5
        found += [
            (place, v["id"], v["nodes"][0]["html"][:200], v["nodes"][0]["failureSummary"][:300])
            for v in report["violations"]
            if v["impact"] in ("serious", "critical")
        ]
        page.close()
    context.close()
    assert not found, "\n".join(map(str, found))


def test_the_theme_is_switched_and_kept(view: View, runs: Path, new_page: Any) -> None:
    page = new_page(view(runs).url)
    page.get_by_role("button", name="switch between light and dark").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"


def test_a_run_that_goes_away_is_said(view: View, runs: Path, new_page: Any) -> None:
    page = new_page(f"{view(runs).url}/#/run?key=live")
    page.locator(".chart-card").first.wait_for()
    shutil.rmtree(runs / "live")
    page.locator("#live.lost", has_text="expected a run").wait_for()
    page.goto(f"{page.url.partition('#')[0]}#/")
    page.locator("tbody tr").first.wait_for()
    assert page.locator("tbody tr").count() == 2
    page.goto(f"{page.url.partition('#')[0]}#/gone")
    page.get_by_text("There is nothing at this address.").wait_for()


def test_text_of_models_and_files_is_text(view: View, runs: Path, new_page: Any) -> None:
    bad = "</pre><script>document.body.dataset.hacked=1</script><img src=x onerror=document.body.dataset.hacked=1>"
    for path in runs.glob("first/eval/*/predictions.jsonl"):
        path.write_text(path.read_text().replace("the red", bad.replace('"', "")))
    info = json.loads((runs / "first/run.json").read_text())
    (runs / "first/run.json").write_text(
        json.dumps(info | {"task": bad, "model": bad, "error": bad})
    )
    viewer = view(runs)
    for place in ("#/", "#/run?key=first", "#/run?key=first&tab=samples&q=hacked&row=0"):
        page = new_page(f"{viewer.url}/{place}")
        page.wait_for_timeout(800)
        assert page.evaluate("document.body.dataset.hacked ?? null") is None, place
