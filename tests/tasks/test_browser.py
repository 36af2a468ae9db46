"""Pages in a real Chromium: what a scripted player reaches, what hostile pages cannot, and rollouts of a model on them."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.registry import resolve_task
from mmrl.task import Template
from mmrl.tasks.browser.actions import BadAction, command_of, read_action
from mmrl.tasks.browser.chromium import Command, Shown
from mmrl.tasks.browser.players import PLAYERS, View
from mmrl.tasks.browser.pool import Browsers, Page, PageLost
from mmrl.tasks.browser.sites import OWN, Site, find_site, miniwob_kinds
from mmrl.tasks.browser.task import Browser, write_rows
from mmrl.types import ImageSize, Sample, StopReason, Turn

slow = [pytest.mark.slow, pytest.mark.render("chromium")]
browser = pytest.mark.parametrize("_", [pytest.param(0, marks=slow, id="chromium")])


@pytest.fixture(scope="module")
def browsers() -> Iterator[Browsers]:
    with Browsers(1, limit_s=10.0) as made:
        yield made


def pixels(shown: Shown) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(shown.png)).convert("RGB"))


def hostile(folder: Path, script: str, body: str = "") -> Site:
    """A page of a test: `body`, and `script` once an episode begins; its goal is 'g' and its state `won`."""
    (folder / "page.html").write_text(
        f"<!DOCTYPE html><title>t</title><body style='margin:0;background:#fff'>{body}<script>let won = false;\n{script}</script>"
    )
    return Site(
        "test/page",
        folder,
        "page.html",
        (200, 200),
        (200, 200),
        "(seed) => { if (window.begin) begin(seed); return 'g'; }",
        "() => ({done: won, reward: won ? 1 : 0, progress: 0})",
    )


# looking


@browser
def test_pictures_are_there_at_the_first_look(browsers: Browsers, tmp_path: Path, _: int) -> None:
    """Of a style that first applies in the episode, such as a dialog's icon, and of an element that its beginning adds: the page
    was looked at before they came, where the machine was busy."""
    noise = np.random.default_rng(0).integers(0, 256, (2, 1400, 1400, 3), np.uint8)
    for name, picture in zip(("style", "element"), noise, strict=True):
        # six megabytes, which take a while
        Image.fromarray(picture).save(tmp_path / f"{name}.png", compress_level=0)
    site = hostile(
        tmp_path,
        """function begin() {
  const there = performance.getEntriesByType("resource").some((entry) => entry.name.endsWith("style.png"));
  document.querySelector("div").className = "on";
  const image = document.querySelector("img");
  image.onload = () => { won = there; };
  image.src = "element.png";
}""",
        "<style>div, img {display: block; width: 50px; height: 50px; object-fit: none; object-position: 0 0} "
        ".on {background: url('style.png')}</style><div></div><img>",
    )
    page, shown = browsers.open(site, 1)
    assert shown.done, "both had come when the page was looked at"
    seen = pixels(shown)
    assert np.array_equal(seen[:50, :50], noise[0, :50, :50])
    assert np.array_equal(seen[50:100, :50], noise[1, :50, :50])
    page.close()


# playing


@browser
@pytest.mark.parametrize("kind", PLAYERS)
def test_a_scripted_player_reaches_the_goal_and_a_wrong_deed_does_not(browsers, kind, _):
    page, shown = browsers.open(find_site(kind), 11)
    assert not shown.done and shown.reward == 0
    again, same = browsers.open(find_site(kind), 11)
    assert same.goal == shown.goal and np.array_equal(pixels(same), pixels(shown))
    other, next_seed = browsers.open(find_site(kind), 12)
    assert (
        "test" in kind or "dialog" in kind or not np.array_equal(pixels(next_seed), pixels(shown))
    )
    end = played(page, kind, shown)
    assert end.done and end.reward > 0 and end.progress == 1
    # the first deed of the other goal, on this page
    untouched = again.act(Command("click", (shown_size(shown)[0] - 2, shown_size(shown)[1] - 2)))
    assert not untouched.reward
    for opened in (page, again, other):
        opened.close()


@browser
@pytest.mark.parametrize(
    ("kind", "seed"),
    [("miniwob/identify-shape", s) for s in (0, 1, 2, 3, 24)]  # each of the five words once
    + [("miniwob/grid-coordinate", s) for s in (0, 3, 5)],  # (1,-2), (2,2), (-2,1)
)
def test_players_of_figures_and_places_win_whatever_is_drawn(browsers, kind, seed, _):
    page, shown = browsers.open(find_site(kind), seed)
    assert played(page, kind, shown).reward == 1
    page.close()


def played(page: Page, kind: str, shown: Shown) -> Shown:
    """The page after its scripted player."""
    view = View(page, shown)
    for command in PLAYERS[kind](view, shown.goal):
        view.shown = page.act(command)
        if view.shown.done:
            break
    return view.shown


def shown_size(shown: Shown) -> tuple[int, int]:
    return Image.open(io.BytesIO(shown.png)).size


@browser
def test_a_page_that_is_used_again_is_as_new(browsers, _):
    for kind in ("own/settings", "own/shop", "miniwob/enter-text", "miniwob/click-checkboxes"):
        page, first = browsers.open(find_site(kind), 3)
        played(page, kind, first)
        page.close()
        page, second = browsers.open(find_site(kind), 3)
        assert np.array_equal(pixels(first), pixels(second)), kind
        page.close()


@browser
def test_as_many_pages_are_kept_as_were_open_at_once(_):
    with Browsers(1, limit_s=20.0) as made:

        def renderers() -> set[int]:
            below = psutil.Process(made._hosts[0].worker.pid).children(recursive=True)
            return {p.pid for p in below if "--type=renderer" in " ".join(p.cmdline())}

        first = [made.open(find_site("own/pick"), seed)[0] for seed in range(11)]
        before = renderers()
        for page in first:
            page.close()
        second = [made.open(find_site("own/pick"), seed)[0] for seed in range(11)]
        assert renderers() == before  # a page that is made anew has another process
        for page in second:
            page.close()
        # pages of another kind take the place of those that were given back first: no more are held than were ever open
        others = [made.open(find_site("own/menu"), seed)[0] for seed in range(3)]
        deadline = time.monotonic() + 20
        while len(renderers()) > len(before) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(renderers()) <= len(before)
        for page in others:
            page.close()


@browser
def test_a_page_of_another_kind_becomes_as_one_that_was_opened_so(_):
    """Where as many pages are held as may be, one of another kind takes the next episode."""
    kinds = ("miniwob/click-collapsible", "own/menu", "miniwob/enter-text")
    with Browsers(1, limit_s=20.0) as made:
        fresh = {}
        for kind in kinds:
            page, fresh[kind] = made.open(find_site(kind), 7)
            page.close()
        held = [made.open(find_site("own/shop"), seed)[0] for seed in range(9)]
        for page in held:
            page.act(Command("click", (100.0, 100.0)))
            page.close()
        for kind in kinds:
            page, shown = made.open(find_site(kind), 7)
            assert shown.goal == fresh[kind].goal and shown.png == fresh[kind].png, kind
            for keys in ("Alt+ArrowLeft", "Alt+ArrowRight"):  # no way back to what it was
                assert page.act(Command("press", text=keys)).png == shown.png
            assert played(page, kind, shown).reward == 1, kind
            page.close()


@browser
def test_keys_begin_at_the_top_of_a_page_that_is_used_again(browsers, _):
    for keys in ("Tab", "Shift+Tab"):
        earned = []
        for deed in ("press", "click", "press", "press"):
            page, _shown = browsers.open(find_site("miniwob/focus-text"), 0)
            where = (80.0, 200.0) if deed == "click" else (-1.0, -1.0)
            after = page.act(Command(deed, where, text=keys))
            page.close()
            earned += [after.reward] * (deed == "press")
        assert earned == [float(keys == "Tab")] * 3, keys


@browser
@pytest.mark.parametrize("spelling", ["json", "point"])
def test_its_scripted_player_plays_the_task(spelling, _):
    task = Browser(actions=spelling, max_turns=12)
    kinds = ["own/pick", "own/menu", *(["own/form"] if spelling == "json" else [])]
    for kind in kinds:
        world = task.environment(Template("t", CoordFrame.REL1000, ""))
        sample = Sample("1", "browser", "browser", kind, None, params={"kind": kind, "seed": 4})
        world.reset(sample, 0)
        world.shown([ImageSize((224, 224), (224, 224))])
        rng, outcome = np.random.default_rng(0), None
        while outcome is None or not outcome.ended:
            text = world.scripted(rng)
            assert text is not None
            outcome = world.step(Turn((1,), text, (0.0,), StopReason.EOS))
        assert outcome.reward == outcome.info["success"] == 1, kind
        world.close()
    if spelling == "point":  # it has no words for typing
        world = task.environment(Template("t", CoordFrame.REL1000, ""))
        world.reset(replace(sample, params={"kind": "own/form", "seed": 4}), 0)
        world.shown([ImageSize((224, 224), (224, 224))])
        assert world.scripted(rng) is None
        world.close()


@browser
def test_a_player_that_goes_astray_is_wrong_at_times(_):
    task = Browser(actions="point", max_turns=1, astray=0.6)
    won = []
    for seed in range(12):
        world = task.environment(Template("t", CoordFrame.REL1000, ""))
        world.reset(
            Sample(
                "1",
                "browser",
                "browser",
                "own/pick",
                None,
                params={"kind": "own/pick", "seed": seed},
            ),
            0,
        )
        world.shown([ImageSize((224, 224), (224, 224))])
        text = world.scripted(np.random.default_rng(seed))
        won.append(world.step(Turn((1,), str(text), (0.0,), StopReason.EOS)).info["success"])
        world.close()
    assert 2 <= sum(won) <= 10


@browser
def test_pages_do_not_know_of_each_other(browsers, _):
    """What is selected, copied or scrolled on one page is neither on the next episode's nor on the neighbour's."""
    first, before = browsers.open(find_site("own/form"), 3)
    second, _shown = browsers.open(find_site("own/form"), 4)
    field = next(e for e in first.elements() if e["name"] == "name")["box"]
    spot = ((field[0] + field[2]) / 2, (field[1] + field[3]) / 2)
    first.act(Command("type", spot, text="secret"))
    for keys in ("Control+a", "Control+c"):
        first.act(Command("press", text=keys))
    there = next(e for e in second.elements() if e["name"] == "name")["box"]
    second.act(Command("click", ((there[0] + there[2]) / 2, (there[1] + there[3]) / 2)))
    second.act(Command("press", text="Control+v"))
    assert all(e["value"] != "secret" for e in second.elements())
    # its own clipboard is as it should be
    first.act(Command("press", text="ArrowRight"))
    first.act(Command("press", text="Control+v"))
    assert any(e["value"] == "secretsecret" for e in first.elements())
    first.act(Command("press", text="Control+a"))
    first.close()
    again, after = browsers.open(find_site("own/form"), 3)
    assert np.array_equal(pixels(after), pixels(before))
    for page in (again, second):
        page.close()


@browser
def test_a_part_of_a_goal_is_no_success(_):
    """The first card is seldom the greatest; MiniWoB++ pays a part for any other."""
    environment = Browser().environment(Template("t", CoordFrame.ABS_ORIG, ""))
    kind, found = "miniwob/find-greatest", []
    for seed in range(6):
        environment = Browser(actions="point", max_turns=2).environment(environment.template)
        try:
            environment.reset(
                Sample("1", "browser", "browser", kind, None, params={"kind": kind, "seed": seed}),
                0,
            )
            environment.shown([ImageSize((160, 210), (160, 210))])
            environment.step(said("[30, 100]"))
            submit = next(e for e in environment.page.elements() if e["text"] == "Submit")["box"]
            outcome = environment.step(
                said(json.dumps([(submit[0] + submit[2]) / 2, (submit[1] + submit[3]) / 2]))
            )
            found.append((outcome.reward, outcome.info["success"]))
        finally:
            environment.close()
    assert all((reward == 1) == (success == 1) for reward, success in found), found
    assert any(0 < reward < 1 for reward, _success in found), found


@browser
def test_every_page_of_miniwob_can_be_opened_or_says_why(browsers, _):
    """A sample of the package's pages: each has a goal in words and a picture of its size."""
    for kind in miniwob_kinds()[::9]:
        page, shown = browsers.open(find_site(f"miniwob/{kind}"), 1)
        assert shown.goal.strip() and pixels(shown).shape == (210, 160, 3), kind
        page.close()


# pages that hang, die or reach out


@browser
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("document.onmousedown = () => { while (true) {} };", "did not answer within"),
        ("document.onmousedown = () => { location = 'http://127.0.0.1/gone.html'; };", ""),
        (
            "document.onmousedown = () => { document.body.remove(); window.judge = null; throw 1; };",
            "",
        ),
        (
            "document.onmousedown = () => { const a = []; while (true) a.push(new Array(1e7).fill('x')); };",
            "",
        ),
    ],
    ids=["hangs", "leaves", "breaks", "eats memory"],
)
def test_a_page_that_fails_costs_its_own_episode(browsers, tmp_path, script, words, _):
    other, _shown = browsers.open(find_site("own/menu"), 1)
    page, _shown = browsers.open(hostile(tmp_path, script), 1)
    try:
        page.act(Command("click", (100, 100)))
    except PageLost as lost:
        assert words in str(lost)
    else:
        assert not words
    page.close()
    assert other.act(Command("wait")).goal.startswith("Choose")
    other.close()


@browser
def test_windows_dialogs_and_downloads_stop_nobody(browsers, tmp_path, _):
    script = (
        "document.onmousedown = () => { alert('a'); confirm('b'); prompt('c');"
        " for (let i = 0; i < 5; i++) window.open('about:blank'); const a = document.createElement('a');"
        " a.href = 'data:application/zip,xx'; a.download = 'x.zip'; a.click(); won = true; };"
    )
    page, _shown = browsers.open(hostile(tmp_path, script), 1)
    assert page.act(Command("click", (100, 100))).done
    assert page.act(Command("wait")).done
    page.close()


@browser
def test_nothing_but_the_pages_own_folder_can_be_read(browsers, tmp_path, _):
    """Names, addresses, other ports, files and the folder above: every request fails, and one to its own folder does not."""
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (site / "own.txt").write_text("own")
    os.symlink(tmp_path / "secret.txt", site / "link.txt")
    asked = [
        "http://example.com/",
        "http://93.184.216.34/",
        "http://127.0.0.1:22/",
        "http://localhost/own.txt",
        "https://127.0.0.1/own.txt",
        f"file://{tmp_path}/secret.txt",
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/link.txt",
        "//127.0.0.1:8080/own.txt",
    ]
    script = (
        f"const asked = {json.dumps(['/own.txt', *asked])};\n"
        "window.read = Promise.all(asked.map((u) => fetch(u).then((r) => r.text(), () => 'refused')));\n"
        "window.read.then((r) => { document.title = r.join('|'); });"
    )
    opened = hostile(site, script)
    opened = replace(opened, begin="async () => { await window.read; return document.title; }")
    page, shown = browsers.open(opened, 1)
    assert shown.goal.split("|") == ["own", *["refused"] * len(asked)]
    page.close()


@browser
def test_killed_browsers_are_replaced_and_leave_nothing(tmp_path, _):
    def renderers(host: psutil.Process) -> list[psutil.Process]:
        return [
            p for p in host.children(recursive=True) if "--type=renderer" in " ".join(p.cmdline())
        ]

    with Browsers(1, limit_s=10.0) as browsers:
        page, _shown = browsers.open(find_site("own/menu"), 1)
        process = psutil.Process(browsers._hosts[0].worker.pid)
        family = process.children(recursive=True)
        # the renderer of the page: the page is lost, the next one works
        for child in renderers(process):
            child.kill()
        with pytest.raises(PageLost):
            page.act(Command("click", (20, 60)))
        page.close()
        page, shown = browsers.open(find_site("own/menu"), 1)
        assert shown.goal.startswith("Choose")
        # the browser's driver, which the process cannot replace: another process takes its place
        page.close()
        for child in psutil.Process(browsers._hosts[0].worker.pid).children():
            child.kill()
        for _attempt in range(20):
            try:
                page, shown = browsers.open(find_site("own/menu"), 1)
                break
            except PageLost:
                time.sleep(0.2)
        assert shown.goal.startswith("Choose")
        process = psutil.Process(browsers._hosts[0].worker.pid)
        # the process of the browser: another one is started
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(PageLost, match="ended"):
            page.act(Command("wait"))
        page.close()
        page, shown = browsers.open(find_site("own/menu"), 1)
        assert shown.goal.startswith("Choose")
        family += psutil.Process(browsers._hosts[0].worker.pid).children(recursive=True)
    _gone, alive = psutil.wait_procs(family, timeout=20)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


# what a model says


SIZE = ImageSize((200, 100), (400, 200))


@pytest.mark.parametrize(
    ("text", "spelling", "frame", "command"),
    [
        (
            '{"action": "click", "point": [10, 20]}',
            "json",
            CoordFrame.ABS_ORIG,
            Command("click", (10, 20)),
        ),
        (
            '<answer>{"action": "click", "point": [10, 20]}</answer>',
            "json",
            CoordFrame.ABS_RESIZED,
            Command("click", (5, 10)),
        ),
        ("[500, 500]", "point", CoordFrame.REL1000, Command("click", (100, 50))),
        ("click(start_box='(500,500)')", "native", CoordFrame.REL1000, Command("click", (100, 50))),
        (
            '{"action": "type", "text": "a b"}',
            "json",
            CoordFrame.ABS_ORIG,
            Command("type", text="a b"),
        ),
        (
            '{"action": "hotkey", "keys": "ctrl+a"}',
            "json",
            CoordFrame.ABS_ORIG,
            Command("press", text="Control+a"),
        ),
        ('{"action": "press_enter"}', "json", CoordFrame.ABS_ORIG, Command("press", text="Enter")),
        (
            '{"action": "scroll", "direction": "down"}',
            "json",
            CoordFrame.ABS_ORIG,
            Command("scroll", text="down"),
        ),
        ('{"action": "complete"}', "json", CoordFrame.ABS_ORIG, None),
    ],
)
def test_actions_become_deeds_in_pixels_of_the_page(text, spelling, frame, command):
    assert command_of(read_action(text, spelling), frame, SIZE.resized_wh, SIZE.orig_wh) == command


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not_an_action"),
        ("click somewhere", "not_an_action"),
        ('[{"action": "click", "point": [1, 2]}, {"action": "wait"}]', "several_actions"),
        ("<answer>[1, 2]</answer><answer>[3, 4]</answer>", "several_answers"),
        ('{"action": "click"}', "no_point"),
        ('{"action": "type", "text": ""}', "no_text"),
        ('{"action": "type", "text": "' + "x" * 501 + '"}', "text_too_long"),
        ('{"action": "goto", "text": "http://example.com"}', "not_on_a_page"),
        ('{"action": "hotkey", "keys": "hyper+q"}', "unknown_key"),
        ('{"action": "click", "point": [1e999, 2]}', "bad_point"),
    ],
)
def test_what_is_no_action_says_why(text, reason):
    with pytest.raises(BadAction, match=reason):
        command_of(read_action(text, "json"), CoordFrame.ABS_ORIG, SIZE.resized_wh, SIZE.orig_wh)


# rows and settings


def test_rows_are_read_and_wrong_ones_are_named(tmp_path):
    write_rows(tmp_path / "rows.jsonl", ["own/shop", "own/pick"], range(5, 7))
    samples = list(Browser().load(str(tmp_path / "rows.jsonl")))
    assert [s.id for s in samples] == ["own/shop-5", "own/pick-5", "own/shop-6", "own/pick-6"]
    for row, words in (
        ('{"kind": "own/shoop", "seed": 1}', "own/shop"),
        ('{"kind": "own/shop", "seed": -1}', "whole number"),
        ('{"seed": 1}', "kind"),
        ('{"kind": "../../etc/passwd", "seed": 1}', "expected a page"),
        ("{", "JSON"),
    ):
        (tmp_path / "bad.jsonl").write_text(row + "\n")
        with pytest.raises(DataError, match=f"bad.jsonl:1.*{words}"):
            list(Browser().load(str(tmp_path / "bad.jsonl")))


@pytest.mark.parametrize(
    "params",
    [{"actions": "js"}, {"max_turns": 0}, {"prompt": "no"}, {"milestones": 2}, {"turns": 3}],
)
def test_wrong_parameters_are_refused(params):
    with pytest.raises(ConfigError, match=r"expected|unknown"):
        Browser(**params)


def test_the_task_is_built_in_and_travels_to_workers():
    task = pickle.loads(pickle.dumps(resolve_task("browser")(milestones=0.5)))
    assert task.rules.milestones == 0.5 and task.headline == "success"
    assert {p.stem for p in OWN.glob("*.html")} >= {
        "pick",
        "form",
        "menu",
        "calendar",
        "settings",
        "shop",
    }


# episodes


def said(text: str) -> Turn:
    return Turn((1,), text, (0.0,), StopReason.EOS)


@browser
def test_an_episode_pays_its_way_and_its_end(_):
    template = Template("t", CoordFrame.ABS_ORIG, "")
    environment = Browser(milestones=0.5, max_turns=9).environment(template)
    try:
        sample = Sample(
            "1", "browser", "browser", "own/menu", None, params={"kind": "own/menu", "seed": 4}
        )
        first = environment.reset(sample, 0)
        environment.shown([ImageSize((224, 224), (224, 224))])
        assert first.images[0].shape == (224, 224, 3)
        goal = first.messages[-1]["content"][-1]["text"].splitlines()[0]
        bad = environment.step(said("I would rather not"))
        assert (
            not bad.parsed
            and bad.reward == 0
            and "no action" in bad.observation.messages[0]["content"][0]["text"]
        )
        outside = environment.step(said('{"action": "click", "point": [900, 5]}'))
        assert "could not be done" in outside.observation.messages[0]["content"][-1]["text"]
        earned = []
        for text in goal.removesuffix(".").split()[-1], goal.split()[1]:
            spot = next(e for e in environment.page.elements() if e["text"] == text)["box"]
            outcome = environment.step(
                said(
                    json.dumps(
                        {
                            "action": "click",
                            "point": [(spot[0] + spot[2]) / 2, (spot[1] + spot[3]) / 2],
                        }
                    )
                )
            )
            earned.append(outcome.reward)
        assert earned == [0.25, 0.75] and outcome.terminated
        assert outcome.info == {
            "success": 1.0,
            "progress": 1.0,
            "actions": 4.0,
            "bad_actions": 1.0,
            "idle_actions": 1.0,
        }
    finally:
        environment.close()


@browser
def test_a_model_is_trained_on_pages_and_every_episode_is_accounted_for(tmp_path, _):
    """A whole run on a model's own clicks: rollouts of several turns side by side, their metrics, and a page that is lost."""
    import mmrl

    write_rows(tmp_path / "train.jsonl", ["own/pick", "own/menu"], range(4))
    write_rows(tmp_path / "val.jsonl", ["own/pick"], range(100, 102))
    task = {
        "task": "browser",
        "params": {"actions": "point", "max_turns": 2, "prompt": "click {goal}"},
    }
    trainer = mmrl.Trainer(
        str(Path(__file__).parents[2] / "assets" / "tiny_vlm_mixed"),
        config={
            "name": "pages",
            "dir": str(tmp_path),
            "model": {"system": "", "device": "cpu"},
            "data": {
                "train": [{**task, "path": str(tmp_path / "train.jsonl")}],
                "eval": [{**task, "path": str(tmp_path / "val.jsonl")}],
            },
            "train": {"steps": 2, "prompts_per_step": 2, "save_every": 2},
            "rollout": {"group_size": 3, "max_new_tokens": 24},
            "algorithm": {"dynamic_sampling": False},
            "eval": {"every": 0, "samples": 1},
        },
        quiet=True,
    )
    trainer.fit()
    rows = [
        json.loads(line)
        for file in sorted((trainer.folder / "rollouts").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    assert len(rows) == 2 * 2 * 3 and all(1 <= len(row["turns"]) <= 2 for row in rows)
    assert all({"success", "actions"} <= set(row["score"]["metrics"]) for row in rows)
    results = json.loads((trainer.folder / "eval" / "step_000002" / "results.json").read_text())
    assert results["greedy"]["success"]["n"] == 2
