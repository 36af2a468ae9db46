"""The task `browsergym` against BrowserGym itself, in a real Chromium: what is shown, done, paid and refused."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import mmrl
from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.registry import task_from_spec
from mmrl.task import Template
from mmrl.tasks.browser.gym import Actions, Begin, Gyms, check_env_id, origin_of
from mmrl.tasks.browser.pool import PageLost
from mmrl.tasks.browsergym_worlds import BrowserGymEnvironment, _gyms
from mmrl.tasks.pages import find_chromium
from mmrl.types import ImageSize, Sample, StopReason, Turn

pytestmark = [pytest.mark.slow, pytest.mark.render("chromium")]
FAST = {"slow_mo": 0, "pre_observation_delay": 0.1}
CLICK = "browsergym/miniwob.click-test"
ACTS = {
    CLICK: ["fly(1)", "click('999')", "mouse_click(5, 5)", "mouse_click(160, 200)", "click('13')"],
    "browsergym/miniwob.enter-text": ["noop(5)", "fill('14', 'no')", "click('15')"],
}


@pytest.fixture(scope="module")
def gyms() -> Iterator[Gyms]:
    with Gyms(1, limit_s=20.0) as made:
        yield made


def row(seed: int | None = 3, **params: Any) -> Sample:
    own = {} if seed is None else {"seed": seed}
    return Sample("1", "browsergym", "worlds", "", None, params={**own, **params})


def said(text: str) -> Turn:
    return Turn((1,), text, (0.0,), StopReason.EOS)


def words(observation: mmrl.Observation | None) -> str:
    assert observation is not None
    return str(observation.messages[-1]["content"][-1]["text"])


# BrowserGym as its own README runs it. Two things are ours: the program of its two browsers is the system's, as its chat takes
# no parameter for it, and the page is given its size back after each screenshot, which such a Chromium loses (_Episode._settle).
OFFICIAL = """
import json, sys
import gymnasium, numpy as np
import browsergym.miniwob
from browsergym.core.action.highlevel import HighLevelActionSet
from browsergym.utils.obs import flatten_axtree_to_str
from playwright.sync_api import BrowserType

program, env_id, actions, out, flags = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4], json.loads(sys.argv[5])
launch = BrowserType.launch
BrowserType.launch = lambda self, args=(), **kw: launch(self, executable_path=program, args=[*args, *flags], **kw)
known = HighLevelActionSet(["bid", "coord"], multiaction=False, demo_mode="off")
env = gymnasium.make(env_id, action_mapping=known.to_python_code, slow_mo=0, pre_observation_delay=0.1)
seen, _ = env.reset(seed=7)
page = env.unwrapped.page
session = page.context.new_cdp_session(page)
rows, pictures = [], []
for action in [None, *actions]:
    paid = (0.0, False, False)
    session.send("Emulation.clearDeviceMetricsOverride")
    session.send("Emulation.setDeviceMetricsOverride", {**page.viewport_size, "deviceScaleFactor": 1.0, "mobile": False})
    if action is not None:
        seen, *paid, _ = env.step(action)
    tree = flatten_axtree_to_str(seen["axtree_object"], seen["extra_element_properties"], with_clickable=True,
                                   filter_visible_only=True)
    rows.append([seen["goal"], tree, " ".join(seen["last_action_error"].split())[:300], *map(float, paid)])
    pictures.append(seen["screenshot"])
env.close()
np.savez(out, rows=json.dumps(rows), pictures=np.stack(pictures))
"""


@pytest.mark.parametrize("env_id", ACTS)
def test_an_episode_is_the_one_that_browsergym_plays(
    gyms: Gyms, tmp_path: Path, env_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmrl.tasks.browser.pool import EXACT
    from mmrl.tasks.browser.sites import miniwob_folder

    base = f"file://{miniwob_folder()}/miniwob/"
    monkeypatch.setenv("MINIWOB_URL", base)
    out = tmp_path / "official.npz"
    subprocess.run(
        [
            sys.executable,
            "-c",
            OFFICIAL,
            find_chromium(),
            env_id,
            json.dumps(ACTS[env_id]),
            str(out),
            json.dumps(EXACT),
        ],
        check=True,
        timeout=120,
    )
    with np.load(out) as official:
        expected, pictures = json.loads(str(official["rows"])), official["pictures"]
    page, seen = gyms.begin(Begin(env_id, 7, ("bid", "coord"), FAST, {}, True))
    for number, action in enumerate([None, *ACTS[env_id]]):
        if action is not None:
            seen = page.act(action, CoordFrame.ABS_ORIG, None)
        goal, tree, error, *paid = expected[number]
        assert seen.goal == goal and seen.error == error, action
        assert [seen.reward, seen.terminated, seen.truncated] == paid, action
        assert seen.tree.replace("http://127.0.0.1/miniwob/", base) == tree.strip("\n"), action
        # a caret in a field that has the focus blinks: each side's picture may be with it or without
        rows, columns = np.nonzero((seen.pixels != pictures[number]).any(-1))
        assert seen.pixels.shape == pictures[number].shape, action
        assert not len(rows) or (np.ptp(rows) < 24 and np.ptp(columns) < 3), (action, len(rows))
    assert seen.terminated and seen.reward == float(env_id == CLICK)
    page.close()


def environment(**options: Any) -> BrowserGymEnvironment:
    given = {"env_id": CLICK, "env_kwargs": FAST, "limit_s": 20.0, **options}
    frame = given.pop("frame", CoordFrame.ABS_ORIG)
    return BrowserGymEnvironment(template=Template("t", frame, "Be brief."), **given)


def test_an_episode_in_words_pays_what_browsergym_pays() -> None:
    world = environment(show="both")
    first = world.reset(row(), 0)
    assert first.messages[0] == {"role": "system", "content": "Be brief."}
    assert "mouse_click(x: float" in words(first) and "button 'Click Me!'" in words(first)
    assert "upload_file" not in words(first), "it reads files of this machine"
    assert first.images[0].shape == (321, 498, 3) and first.images[0].dtype == np.uint8
    bad = world.step(said("I would rather not"))
    assert not bad.parsed and not bad.ended and "Received an empty action" in words(bad.observation)
    bad = world.step(said("<think>click('13')</think>click('77')"))
    assert bad.parsed and 'Could not find element with bid "77"' in words(bad.observation)
    done = world.step(said("<think>so</think>```click('13')```"))
    assert done.terminated and done.reward == 1 and done.observation is None
    assert done.info == {"success": 1.0, "return": 1.0, "actions": 3.0, "bad_actions": 2.0}
    (mark,) = done.marks
    assert mark.kind == "box" and mark.at[0] < mark.at[2] < 498
    world.close()


def test_places_are_put_into_the_pictures_pixels_and_tools_are_called() -> None:
    world = environment(calls="tools", frame=CoordFrame.REL1000, show="picture")
    first = world.reset(row(), 0)
    assert {t["function"]["name"] for t in first.tools} >= {"noop", "mouse_click"}
    world.shown([ImageSize((498, 321), (249, 160))])
    bad = world.step(said("mouse_click(1, 2)"))
    assert not bad.parsed and "expected a call of one tool" in words(bad.observation)
    assert bad.observation is not None and bad.observation.messages[0]["role"] == "tool"
    call = {"name": "mouse_click", "arguments": {"x": 287, "y": 605}}
    done = world.step(said(f"<tool_call>{json.dumps(call)}</tool_call>"))
    (mark,) = done.marks
    assert mark.kind == "point" and mark.at == pytest.approx((142.9, 194.2), abs=1)
    assert done.terminated and done.reward == 1
    world.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """A folder served on this machine, as the user of browsergym/openended has one."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_pages_reach_the_named_origin_and_nothing_else(site: str, tmp_path: Path) -> None:
    asked = [
        f"{site}/own.txt",
        "http://example.com/",
        "http://93.184.216.34/",
        "http://127.0.0.1:22/",
        f"{site.replace('127.0.0.1', 'localhost')}/own.txt",
        f"{site.replace('http', 'https')}/own.txt",
    ]
    (tmp_path / "own.txt").write_text("own")
    (tmp_path / "index.html").write_text(
        "<title>t</title><p id=p>wait</p><script>"
        f"Promise.all({json.dumps(asked)}.map((u) => fetch(u).then((r) => r.text(), () => 'refused')))"
        ".then((r) => { p.textContent = r.join('+'); });</script>"
    )
    world = environment(
        env_id="browsergym/openended",
        show="tree",
        action_subsets=["bid", "nav", "infeas"],
        task_kwargs={"start_url": f"{site}/", "goal": "Read."},
    )
    first = world.reset(row(), 0)
    assert words(first).startswith("Read.") and not first.images
    shown = world.step(said("noop(300)"))
    assert "+".join(["own", *["refused"] * 5]) in words(shown.observation)
    for address in ("file:///etc/passwd", "http://example.com/", "chrome://version"):
        refused = world.step(said(f"goto('{address}')"))
        assert "cannot be reached from here" in words(refused.observation)
    assert "wait_ms from 0" in words(world.step(said("noop(1e9)")).observation)
    assert "'t'" in words(world.step(said(f"goto('{site}/index.html')")).observation)
    ended = world.step(said("report_infeasible('no')"))
    assert ended.terminated and ended.reward == 0 and ended.info["success"] == 0
    world.close()


def test_what_hangs_or_dies_costs_its_episodes_and_is_replaced(site: str, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        "<title>t</title><script>addEventListener('mousedown', () => { for (;;) {} });</script><button>b</button>"
    )
    with Gyms(1, limit_s=2.0, origins=[site]) as gyms:
        hung, _ = gyms.begin(
            Begin(
                "browsergym/openended", 1, ("coord",), FAST, {"start_url": f"{site}/", "goal": "g"}
            )
        )
        first = gyms._hosts[0].worker.pid
        with pytest.raises(PageLost):
            hung.act("mouse_click(5, 5)", CoordFrame.ABS_ORIG, None)
            hung.act("noop(1)", CoordFrame.ABS_ORIG, None)
        hung.close()
        page, seen = gyms.begin(Begin(CLICK, 1, ("bid",), FAST))
        assert seen.goal == "Click the button."
        process = psutil.Process(gyms._hosts[0].worker.pid)
        # the page's renderer: its tab crashes
        for child in process.children(recursive=True):
            if "--type=renderer" in " ".join(child.cmdline()):
                child.kill()
        with pytest.raises(PageLost):
            page.act("click('13')", CoordFrame.ABS_ORIG, None)
        page.close()
        page, seen = gyms.begin(Begin(CLICK, 1, ("bid",), FAST))
        assert page.act("click('13')", CoordFrame.ABS_ORIG, None).reward == 1
        assert not psutil.pid_exists(first) or first == process.pid
        page.close()


def test_environments_that_begin_side_by_side_share_their_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Begun(Exception):
        """In place of an episode."""

    def begin(self: Gyms, episode: Begin) -> Any:
        pools.append(self)
        raise Begun

    class Slow(Gyms):
        def __init__(self, *settings: Any) -> None:
            time.sleep(0.05)
            super().__init__(*settings)

    pools: list[Gyms] = []
    monkeypatch.setattr(Gyms, "begin", begin)
    monkeypatch.setattr("mmrl.tasks.browsergym_worlds.Gyms", Slow)
    worlds = [environment(limit_s=77.5) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(world.reset, row(), 0) for world in worlds]
        assert all(isinstance(a.exception(), Begun) for a in asked)
    assert len(pools) == 4 and len({id(pool) for pool in pools}) == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"show": "sound"}, "browsergym.show picture, tree or both, found 'sound'"),
        ({"calls": "json"}, "browsergym.calls text or tools"),
        ({"prompt": "{goal}"}, "contains {goal} and {actions}"),
        ({"max_turns": 0}, "browsergym.max_turns"),
        ({"rewards": (1, 1)}, "browsergym.rewards as (lowest, highest)"),
        ({"rewards": 5}, "browsergym.rewards as (lowest, highest)"),
        ({"success_at": "x"}, "browsergym.success_at as the sum"),
        ({"env_kwargs": [1]}, "browsergym.env_kwargs as a mapping"),
        ({"task_kwargs": 3}, "browsergym.task_kwargs as a mapping"),
        ({"show": ["tree"]}, "browsergym.show picture, tree or both"),
        ({"origins": "http://127.0.0.1:80"}, "browsergym.origins as a list of names"),
        ({"action_subsets": "bid"}, "as names such as [bid, coord]"),
        ({"origins": ["https://example.com"]}, "an address on this machine"),
        ({"task_kwargs": {"start_url": "file:///etc"}}, "an address on this machine"),
    ],
)
def test_parameters_that_make_no_environment_are_refused(options: Any, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        environment(**options)
    assert why in str(refused.value)


def test_names_that_browsergym_does_not_know_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'browsergym/miniwob.click-test'"):
        check_env_id("browsergym/miniwob.click-tes")
    with pytest.raises(ConfigError, match=r"such as browsergym/miniwob\.click-test"):
        check_env_id("os:FrozenLake-v1")
    with pytest.raises(ConfigError, match=r"expected browsergym\.env_id"):
        environment(env_id="").reset(row(), 0)
    with pytest.raises(DataError, match="found -1"):
        environment().reset(row(-1), 0)
    with pytest.raises(ConfigError, match="Did you mean 'coord'"):
        Actions(["cord"])
    assert origin_of("http://localhost:80/x?y") == "http://localhost:80"


def test_what_a_model_writes_is_data() -> None:
    actions = Actions(["bid", "coord", "nav"], ["http://127.0.0.1:8000"])
    assert actions.read("click('a', button='right')") == ("click", {"bid": "a", "button": "right"})
    assert actions.read("click('a') click('b')") is None
    assert actions.read("__import__('os').system('x')") is None
    assert actions.read("upload_file('1', '/etc/passwd')") is None
    for hostile in ("goto('http://127.0.0.1:8000@example.com/')", "goto(3)", "noop(-1)"):
        found = actions.read(hostile)
        assert found is not None
        with pytest.raises(ValueError):
            actions.code(*found)
    code = actions.code("fill", {"bid": "1", "value": "'); import os #"})
    assert code.rstrip().endswith("""fill(bid='1',value="'); import os #")""".replace(",v", ", v"))


def test_a_model_is_trained_and_evaluated_on_pages(tmp_path: Path) -> None:
    """A whole run on the tiny model's own words, which are no actions: every episode is accounted for."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"id": "{n}", "seed": {n}}}\n' for n in range(2))
    )
    source = {
        "task": "browsergym",
        "path": str(tmp_path / "rows.jsonl"),
        "params": {"env_id": CLICK, "env_kwargs": FAST, "max_turns": 2, "prompt": "{goal}"}
        | {"calls": "tools", "action_subsets": ["miniwob_liu18"]},
    }
    trainer = mmrl.Trainer(
        str(Path(__file__).parents[2] / "assets" / "tiny_vlm_mixed"),
        config={
            "name": "pages",
            "dir": str(tmp_path),
            "model": {"system": "", "device": "cpu"},
            "data": {"train": [source], "eval": [source]},
            "train": {"steps": 1, "prompts_per_step": 1, "save_every": 1},
            "rollout": {"group_size": 2, "max_new_tokens": 8},
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
    assert len(rows) == 2 and all(row["score"]["metrics"]["bad_actions"] == 2 for row in rows)
    results = json.loads((trainer.folder / "eval" / "step_000001" / "results.json").read_text())
    assert results["greedy"]["success"]["n"] == 2


def test_the_task_is_built_in() -> None:
    task = task_from_spec("browsergym", {"env_id": CLICK})
    assert task.name == "browsergym" and task.headline == "success"


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    """The processes of this file's environments end with it."""
    yield
    made = [(1, None, 20.0, ()), (1, None, 30.0, ())]
    for settings in made:
        _gyms(*settings).close()
