"""Generated screens: boxes come from the browser and fit what is drawn, sets are seeded, errors say what to install."""

from __future__ import annotations

import http.server
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmrl.errors import ConfigError
from mmrl.tasks.page_parts import page_html
from mmrl.tasks.pages import (
    _CAPTURES,
    LOOKS,
    _capture,
    _pick,
    _render,
    _targets,
    browser_page,
    find_chromium,
    main,
    make_pages,
    simple_html,
)
from mmrl.tasks.scenes import COLORS

render = pytest.mark.render("chromium")
pytestmark = pytest.mark.slow  # a browser starts


def rows_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        look: json.loads(path.read_text())
        for look in LOOKS
        if (path := folder / f"screenspot_{look}.json").exists()
    }


def pixels(folder: Path, row: dict[str, Any]) -> np.ndarray:
    return np.asarray(
        Image.open(folder / "screenspot_imgs" / row["img_filename"]).convert("RGB")
    ).astype(int)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_pages(tmp_path_factory.mktemp("full"), 6, seed=1, width=640, height=400))


@pytest.fixture(scope="module")
def simple(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(
        make_pages(
            tmp_path_factory.mktemp("simple"), 8, seed=1, width=112, height=112, style="simple"
        )
    )


@pytest.fixture
def page() -> Iterator[Any]:
    with browser_page() as one:
        yield one


@render
def test_a_set_has_the_layout_of_screenspot(full: Path) -> None:
    rows = rows_of(full)
    assert set(rows) == set(LOOKS) and not list(full.glob("*.partial"))
    for look, found in rows.items():
        assert {"img_filename", "instruction", "bbox", "data_type", "data_source"} == set(found[0])
        for row in found:
            height, width = pixels(full, row).shape[:2]
            assert (width, height) == ((225, 400) if look == "mobile" else (640, 400))
            x, y, w, h = row["bbox"]
            assert all(type(v) is int for v in row["bbox"]) and min(w, h) >= 6
            assert 0 <= x < x + w <= width and 0 <= y < y + h <= height
            assert row["data_type"] in ("text", "icon") and row["instruction"].strip()
    assert {"text", "icon"} <= {row["data_type"] for found in rows.values() for row in found}


@render
def test_an_instruction_is_asked_once_per_picture_and_targets_are_apart(full: Path) -> None:
    for found in rows_of(full).values():
        counts = Counter((row["img_filename"], row["instruction"]) for row in found)
        assert set(counts.values()) == {1}
        for a, b in itertools.combinations(found, 2):
            if a["img_filename"] == b["img_filename"]:
                (ax, ay, aw, ah), (bx, by, bw, bh) = a["bbox"], b["bbox"]
                assert ax + aw <= bx or bx + bw <= ax or ay + ah <= by or by + bh <= ay


@render
def test_something_is_drawn_in_every_box(full: Path) -> None:
    for found in rows_of(full).values():
        for row in found:
            x, y, w, h = row["bbox"]
            part = pixels(full, row)[y : y + h, x : x + w].reshape(-1, 3)
            assert np.ptp(part, axis=0).max() > 30, row


@render
def test_boxes_of_simple_pages_are_tight_around_their_colour(simple: Path) -> None:
    """An independent look at the pixels: the shape that the instruction names fills its box, edge to edge."""
    assert set(rows_of(simple)) == {"web"}
    for row in rows_of(simple)["web"]:
        color, shape = row["instruction"].split()
        same = np.abs(pixels(simple, row) - np.array(COLORS[color])).max(axis=2) <= 8
        x, y, w, h = row["bbox"]
        inside = same[y : y + h, x : x + w]
        share = {"square": 1.0, "circle": np.pi / 4, "triangle": 0.5}[shape]
        assert inside.mean() == pytest.approx(share, abs=0.08), row
        assert inside.any(axis=0).mean() > 0.85 and inside.any(axis=1).mean() > 0.8, row


@render
def test_simple_pages_lie_on_the_graded_canvas(simple: Path) -> None:
    canvas = pixels(simple, {"img_filename": "web_simple_1_000000.png"})
    corners = {
        (0, 0): (100, 140, 100),
        (0, -1): (190, 140, 100),
        (-1, 0): (100, 140, 190),
        (-1, -1): (190, 140, 190),
    }
    close = sum(
        np.abs(canvas[place] - np.array(color)).max() <= 3 for place, color in corners.items()
    )
    assert close >= 2, "corners that no shape covers"


@render
def test_the_same_seed_gives_the_same_set_and_a_longer_one_begins_with_it(
    simple: Path, tmp_path: Path
) -> None:
    longer = Path(make_pages(tmp_path / "a", 10, seed=1, width=112, height=112, style="simple"))
    first, again = rows_of(simple)["web"], rows_of(longer)["web"]
    assert again[:8] == first and len(again) == 10
    name = first[0]["img_filename"]
    assert (pixels(longer, first[0]) == pixels(simple, first[0])).all(), name


@render
def test_covered_cut_hidden_tiny_and_twice_named_elements_are_no_targets(page: Any) -> None:
    def box(name: str, style: str, body: str = "") -> str:
        return f'<div data-say="{name}" data-type="text" style="position:absolute;{style}">{body}</div>'

    html = "".join(
        [
            box("good", "left:10.3px;top:10px;width:40px;height:20px"),
            box("half out", "left:-30px;top:40px;width:50px;height:20px"),
            box("covered", "left:10px;top:70px;width:40px;height:20px"),
            '<div style="position:absolute;left:5px;top:65px;'
            'width:60px;height:30px;background:red"></div>',
            box("hidden", "left:10px;top:100px;width:9px;height:9px;display:none"),
            box("unseen", "left:10px;top:110px;width:40px;height:20px;visibility:hidden"),
            box("tiny", "left:100px;top:10px;width:4px;height:30px"),
            box("twice", "left:100px;top:50px;width:30px;height:20px"),
            box("twice", "left:100px;top:80px;width:30px;height:20px"),
            box(
                "cut",
                "left:100px;top:110px;width:20px;height:20px;white-space:nowrap;overflow:hidden",
                "a long long label",
            ),
        ]
    )
    page.set_viewport_size({"width": 160, "height": 160})
    page.set_content(f"<body>{html}</body>")
    assert _targets(page) == [{"say": "good", "type": "text", "box": [11, 10, 50, 30]}]


@render
def test_other_seeds_give_other_pages_no_network_is_reached_and_one_browser_is_enough(
    page: Any,
) -> None:
    """A server that would answer stands ready; nothing arrives there. Playwright drives one browser per thread, and none
    where an event loop runs (notebooks): that is said in words."""
    page.set_viewport_size({"width": 112, "height": 112})
    first, again, other, negative = (
        [_render(page, "web", "simple", (seed, "web", index), (112, 112), 1) for index in range(3)]
        for seed in (1, 1, 2, -1)
    )
    assert first == again and first not in (other, negative) and other != negative
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        server.timeout = 0.2
        page.set_content("<p>still here</p>")
        asked = f"fetch('http://127.0.0.1:{server.server_port}/').then(() => 'reached', () => 'refused')"
        assert page.evaluate("navigator.onLine") is False and page.evaluate(asked) == "refused"
        arrived: list[object] = []
        server.process_request = lambda *request: arrived.append(request)  # type: ignore[method-assign]
        server.handle_request()
    assert arrived == []
    with (
        pytest.raises(ConfigError, match=r"plain script.*python -m mmrl.tasks.pages"),
        browser_page(),
    ):
        pass


@render
def test_the_command_line_writes_a_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                str(tmp_path / "set"),
                "--count",
                "2",
                "--width",
                "160",
                "--height",
                "120",
                "--looks",
                "web,mobile",
                "--per-page",
                "1",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.strip() == str(tmp_path / "set")
    assert {look: len(rows) for look, rows in rows_of(tmp_path / "set").items()} == {
        "web": 1,
        "mobile": 1,
    }


def test_pages_are_the_same_for_the_same_seed_and_escape_their_words() -> None:
    for look in LOOKS:
        html = page_html(look, Random("7"), 640, 400)
        assert (
            html == page_html(look, Random("7"), 640, 400) != page_html(look, Random("8"), 640, 400)
        )
        assert "http" not in html, "a page asks for nothing outside itself"
    simple = simple_html(np.random.default_rng(0), 112)
    assert simple == simple_html(np.random.default_rng(0), 112) and "data-say" in simple


def test_texts_and_icons_are_picked_in_turn() -> None:
    targets = [{"say": str(i), "type": "text" if i else "icon", "box": []} for i in range(9)]
    picked = _pick(Random(0), list(targets), 3)
    assert len(picked) == 3 and sum(t["type"] == "icon" for t in picked) == 1
    assert len(_pick(Random(0), targets[:2], 5)) == 2 and _pick(Random(0), [], 5) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 0}, "count >= 1"),
        ({"width": 64}, "112..4096"),
        ({"per_page": 0}, "per_page in 1..50"),
        ({"style": "simpel"}, "Did you mean 'simple'"),
        ({"looks": ("wbe",)}, "Did you mean 'web'"),
        ({"looks": ()}, "one look"),
    ],
)
def test_impossible_settings_are_named(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_pages(tmp_path, **{"count": 1, **settings})
    assert not list(tmp_path.iterdir())


def test_a_missing_browser_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"apt-get install -y .*chromium.*--chromium PATH"):
        find_chromium()
    with pytest.raises(ConfigError, match="found no no-such-browser"):
        find_chromium("no-such-browser")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "set"), "--count", "1"])
    assert "apt-get install" in capsys.readouterr().err
    (tmp_path / "chromium-browser").write_text("#!/bin/sh\n")
    (tmp_path / "chromium-browser").chmod(0o755)
    assert find_chromium() == str(tmp_path / "chromium-browser")


def test_a_program_that_is_no_browser_is_an_error_not_a_crash(tmp_path: Path) -> None:
    fake = tmp_path / "browser"
    fake.write_text(f"#!{sys.executable}\nraise SystemExit(3)\n")
    os.chmod(fake, 0o755)
    with (
        pytest.raises(ConfigError, match="to start as a headless browser"),
        browser_page(str(fake)),
    ):
        pass


@render
@pytest.mark.slow
def test_the_gui_recipe_trains_on_rendered_pages(simple: Path, tmp_path: Path) -> None:
    """The launch script with the recipe's own reward (GUI-G2), and the same without any truth (GUI-RCPO)."""
    from tests.kits.engine_kit import read_jsonl, tiny_folder  # torch: only where it is needed
    from tests.kits.launch_kit import launch

    small = [
        "train.steps=2",
        "train.prompts_per_step=2",
        "rollout.group_size=3",
        "rollout.max_new_tokens=6",
        "train.save_every=2",
        "eval.limit=2",
        "eval.every=2",
        "threads=1",
        "reward.workers=0",
    ]
    for name, extra in (("truth", []), ("votes", ["data.train.0.params.preset=gui_rcpo"])):
        done = launch(
            "--model",
            tiny_folder("qwen2_5_vl"),
            "--data",
            str(simple),
            "--eval",
            str(simple),
            "--name",
            name,
            f"dir={tmp_path}",
            *small,
            *extra,
            script="gui",
        )
        assert done.returncode == 0, done.stderr[-2000:]
        rows = read_jsonl(tmp_path / name / "metrics.jsonl")
        assert [row["step"] for row in rows] == [1, 2] and all(
            row["train/groups/failed"] == 0 for row in rows
        )
        assert json.loads((tmp_path / name / "run.json").read_text())["status"] == "finished"
        assert {
            row["source"]
            for row in read_jsonl(tmp_path / name / "eval" / "step_000002" / "predictions.jsonl")
        } == {"ScreenSpot/web"}


class Busy:
    """A real page whose browser has no frame to give the first `failures` times, as under load."""

    def __init__(self, page: Any, failures: int) -> None:
        self.page, self.failures, self.asked = page, failures, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.page, name)

    def wait_for_timeout(self, ms: float) -> None:
        assert ms <= 250 * 2**_CAPTURES

    def screenshot(self, **options: Any) -> None:
        from playwright.sync_api import Error

        self.asked += 1
        if self.asked <= self.failures:
            raise Error(
                "Page.screenshot: Protocol error (Page.captureScreenshot): Unable to capture screenshot"
            )
        self.page.screenshot(**options)


@render
def test_a_browser_without_a_frame_is_asked_again_but_not_for_ever(tmp_path: Path) -> None:
    with browser_page() as page:
        page.set_content("<p>hello</p>")
        late = Busy(page, _CAPTURES - 1)
        _capture(late, tmp_path / "late.png")
        assert Image.open(tmp_path / "late.png").size[0] > 0 and late.asked == _CAPTURES
        never = Busy(page, 10**6)
        with pytest.raises(
            ConfigError,
            match=rf"Unable to capture screenshot \({_CAPTURES} attempts\).*fewer pages at a time",
        ):
            _capture(never, tmp_path / "never.png")
        assert never.asked == _CAPTURES and not (tmp_path / "never.png").exists()
        page.close()
        with pytest.raises(ConfigError, match=r"\(1 attempts\)"):
            _capture(page, tmp_path / "closed.png")
