"""Scripted players of browser pages: they look for what the goal names among what can be seen, and point at it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from datetime import date
from typing import Any

import numpy as np
from PIL import Image

from mmrl.tasks.browser.chromium import Command, Shown
from mmrl.tasks.browser.pool import Page

Element = dict[str, Any]


def middle(element: Element) -> tuple[float, float]:
    """Where to point."""
    x1, y1, x2, y2 = element["box"]
    return (x1 + x2) / 2, (y1 + y2) / 2


class Player:
    """One episode: `see` finds, `click` and `type` act, `shown` is the page after the last deed."""

    def __init__(self, page: Page, shown: Shown) -> None:
        self.page, self.shown, self.deeds = page, shown, 0

    def do(self, command: Command) -> None:
        """Act, unless the episode is over."""
        if not self.shown.done:
            self.shown, self.deeds = self.page.act(command), self.deeds + 1

    def see(self, text: str = "", tag: str = "", **facts: Any) -> list[Element]:
        """What is visible with this text, tag and facts, below the goal."""
        return [
            e
            for e in self.page.elements()
            if e["box"][1] >= 38
            and (not text or text in (e["text"], e["value"], e["name"]))
            and (not tag or e["tag"] == tag)
            and all(e[k] == v for k, v in facts.items())
        ]

    def click(self, text: str = "", tag: str = "", place: int = 0, **facts: Any) -> None:
        """Click what is visible so."""
        self.do(Command("click", middle(self.see(text, tag, **facts)[place])))

    def type(self, words: str, place: int = 0, tag: str = "input") -> None:
        """Type into a field."""
        self.do(Command("type", middle(self.see(tag=tag)[place]), text=words))


COLOURS = {
    "red": (221, 51, 51),
    "green": (34, 170, 34),
    "blue": (51, 102, 221),
    "yellow": (238, 204, 34),
    "purple": (153, 51, 204),
    "orange": (255, 136, 0),
}


def _pick(player: Player, goal: str) -> None:
    with Image.open(io.BytesIO(player.shown.png)) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    rows, columns = np.nonzero((pixels == COLOURS[goal.split()[2]]).all(-1))
    player.do(Command("click", (float(columns.mean()), float(rows.mean()))))


def _form(player: Player, goal: str) -> None:
    name, age, city = re.fullmatch(r"Enter (\w+), age (\d+), from (\w+), .*", goal).groups()  # type: ignore[union-attr]
    for label, words in (("name", name), ("age", age)):
        field = player.see(label)[0]
        player.do(Command("type", middle(field), text=words))
    player.do(Command("select", middle(player.see("city")[0]), text=city))
    player.click("Send")


def _menu(player: Player, goal: str) -> None:
    entry, menu = re.fullmatch(r"Choose (\w+) in the menu (\w+)\.", goal).groups()  # type: ignore[union-attr]
    player.click(menu)
    player.click(entry)


def _calendar(player: Player, goal: str) -> None:
    months = [date(2026, m, 1).strftime("%B") for m in range(1, 13)]
    month, day = re.fullmatch(r"Choose (\w+) (\d+), 2026\.", goal).groups()  # type: ignore[union-attr]
    while not player.see(f"{month} 2026"):
        shown = next(m for m in months if player.see(f"{m} 2026"))
        player.click("<" if months.index(shown) > months.index(month) else ">")
    player.click(day)


def _settings(player: Player, goal: str) -> None:
    wishes = re.findall(r"(\w+) (on|off)", goal)
    for tab, (name, state) in zip(("Sound", "Screen"), wishes, strict=True):
        player.click(tab)
        line = player.see(name)[0]
        switch = next(
            e
            for e in player.see(tag="button")
            if abs(middle(e)[1] - middle(line)[1]) < 8 and e["text"] in ("on", "off")
        )
        if switch["text"] != state:
            player.do(Command("click", middle(switch)))
    player.click("Save")


def _shop(player: Player, goal: str) -> None:
    count, what, way = re.fullmatch(r"Order (\d) (\w+) by (\w+)\.", goal).groups()  # type: ignore[union-attr]
    what = what.removesuffix("s") if int(count) > 1 else what

    def line() -> list[Element]:
        return [e for e in player.see() if re.fullmatch(rf"{what} +\d+", e["text"])]

    if not line():
        player.click("More")
    for _ in range(int(count)):
        add = next(e for e in player.see("Add") if abs(middle(e)[1] - middle(line()[0])[1]) < 8)
        player.do(Command("click", middle(add)))
    player.do(
        Command("click", middle(next(e for e in player.see() if e["text"].startswith("Basket"))))
    )
    player.click(way)
    player.click("Order")


def _quoted(goal: str) -> list[str]:
    return re.findall(r'"([^"]*)"', goal)


def _button(player: Player, goal: str) -> None:
    player.click(_quoted(goal)[0], "button")


def _link(player: Player, goal: str) -> None:
    player.click(_quoted(goal)[0], "span")


def _checkboxes(player: Player, goal: str) -> None:
    words = goal.removeprefix("Select ").removesuffix(" and click Submit.")
    for word in [] if words == "nothing" else words.split(", "):
        label = player.see(word, "label")[0]
        player.do(Command("click", (label["box"][0] + 6, middle(label)[1])))
    player.click("Submit", "button")


def _option(player: Player, goal: str) -> None:
    word = re.fullmatch(r"Select (\S+) and click Submit\.", goal)[1]  # type: ignore[index]
    label = player.see(word, "label")[0]
    player.do(Command("click", (label["box"][0] + 6, middle(label)[1])))
    player.click("Submit", "button")


def _tab(player: Player, goal: str) -> None:
    player.click(re.search(r"Tab #\d", goal)[0], "a")  # type: ignore[index]


def _text(player: Player, goal: str) -> None:
    player.type(_quoted(goal)[0])
    player.click("Submit", "button")


def _password(player: Player, goal: str) -> None:
    for place in (0, 1):
        player.type(_quoted(goal)[0], place)
    player.click("Submit", "button")


def _login(player: Player, goal: str) -> None:
    for place, words in enumerate(_quoted(goal)):
        player.type(words, place)
    player.click("Login", "button")


PLAYERS: dict[str, Callable[[Player, str], None]] = {
    "own/pick": _pick,
    "own/form": _form,
    "own/menu": _menu,
    "own/calendar": _calendar,
    "own/settings": _settings,
    "own/shop": _shop,
    "miniwob/click-test": lambda player, goal: player.click("Click Me!", "button"),
    "miniwob/click-button": _button,
    "miniwob/click-dialog": lambda player, goal: player.click("Close", "button"),
    "miniwob/click-link": _link,
    "miniwob/click-checkboxes": _checkboxes,
    "miniwob/click-option": _option,
    "miniwob/click-tab": _tab,
    "miniwob/enter-text": _text,
    "miniwob/enter-password": _password,
    "miniwob/login-user": _login,
    "miniwob/focus-text": lambda player, goal: player.click(tag="input"),
}
