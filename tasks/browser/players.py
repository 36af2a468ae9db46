"""Scripted players of pages: they look for what the goal names among what can be seen, and point at it.

    deeds = PLAYERS["own/menu"](View(page, shown), shown.goal)
    command = next(deeds)                      # looks at the page as it is now; StopIteration when there is nothing left to do

`mmrl env check browser` plays pages with them, and `mmrl sft` learns from them. They read the page's elements,
which a policy does not see.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np
from PIL import Image, ImageColor

from mmrl.tasks.browser.chromium import Command, Shown
from mmrl.tasks.browser.pool import Page

__all__ = ["PLAYERS", "View"]

Element = dict[str, Any]
Deeds = Iterator[Command]

_TOP = 38  # pixels: nothing that can be clicked is above, in MiniWoB++ the goal


@dataclass
class View:
    """What a player knows: the page, and its picture after the last deed. What is not there raises LookupError."""

    page: Page
    shown: Shown

    def see(self, text: str = "", tag: str = "") -> list[Element]:
        """What is visible with this text and tag, below the goal."""
        return [
            e
            for e in self.page.elements()
            if e["box"][1] >= _TOP
            and (not text or text in (e["text"], e["value"], e["name"]))
            and (not tag or e["tag"] == tag)
        ]

    def beside(self, one: Element, *texts: str) -> Element:
        """The button with one of these texts in the line of another element."""
        line = (e for e in self.see(tag="button") if abs(_middle(e)[1] - _middle(one)[1]) < 8)
        return _first(e for e in line if e["text"] in texts)

    def click(self, text: str = "", tag: str = "") -> Command:
        """A click on what is visible so."""
        return Command("click", _middle(self.see(text, tag)[0]))

    def type(self, words: str, place: int) -> Command:
        """Typing into a field, counted from 0."""
        return Command("type", _middle(self.see(tag="input")[place]), text=words)


def _middle(element: Element) -> tuple[float, float]:
    """Where to point."""
    x1, y1, x2, y2 = element["box"]
    return (x1 + x2) / 2, (y1 + y2) / 2


def _first(found: Iterator[Element]) -> Element:
    """The first of them. Raises LookupError without one: StopIteration would end a player."""
    for one in found:
        return one
    raise LookupError("not on the page")


def _parts(pattern: str, goal: str) -> tuple[str, ...]:
    found = re.search(pattern, goal)
    if found is None:
        raise LookupError(f"expected a goal such as {pattern}, found {goal!r}")
    return found.groups()


_COLOURS = {
    "red": (221, 51, 51),
    "green": (34, 170, 34),
    "blue": (51, 102, 221),
    "yellow": (238, 204, 34),
    "purple": (153, 51, 204),
    "orange": (255, 136, 0),
}


def _pick(view: View, goal: str) -> Deeds:
    with Image.open(io.BytesIO(view.shown.png)) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    rows, columns = np.nonzero((pixels == _COLOURS[goal.split()[2]]).all(-1))
    yield Command("click", (float(columns.mean()), float(rows.mean())))


def _form(view: View, goal: str) -> Deeds:
    name, age, city = _parts(r"Enter (\w+), age (\d+), from (\w+), ", goal)
    for label, words in (("name", name), ("age", age)):
        yield Command("type", _middle(view.see(label)[0]), text=words)
    yield Command("select", _middle(view.see("city")[0]), text=city)
    yield view.click("Send")


def _menu(view: View, goal: str) -> Deeds:
    entry, menu = _parts(r"Choose (\w+) in the menu (\w+)\.", goal)
    yield view.click(menu)
    yield view.click(entry)


def _calendar(view: View, goal: str) -> Deeds:
    months = [date(2026, m, 1).strftime("%B") for m in range(1, 13)]
    month, day = _parts(r"Choose (\w+) (\d+), 2026\.", goal)
    while f"{month} 2026" not in (seen := {e["text"] for e in view.see()}):
        now = next((m for m in months if f"{m} 2026" in seen), None)
        if now is None:
            raise LookupError("expected a month on the page")
        yield view.click("<" if months.index(now) > months.index(month) else ">")
    yield view.click(day)


def _settings(view: View, goal: str) -> Deeds:
    wishes = re.findall(r"(\w+) (on|off)", goal)
    for tab, (name, state) in zip(("Sound", "Screen"), wishes, strict=True):
        yield view.click(tab)
        line = view.see(name)[0]
        switch = view.beside(line, "on", "off")
        if switch["text"] != state:
            yield Command("click", _middle(switch))
    yield view.click("Save")


def _shop(view: View, goal: str) -> Deeds:
    count, what, way = _parts(r"Order (\d) (\w+) by (\w+)\.", goal)
    what = what.removesuffix("s") if int(count) > 1 else what

    def line() -> list[Element]:
        return [e for e in view.see() if re.fullmatch(rf"{what} +\d+", e["text"])]

    if not line():
        yield view.click("More")
    for _ in range(int(count)):
        yield Command("click", _middle(view.beside(line()[0], "Add")))
    basket = _first(e for e in view.see() if e["text"].startswith("Basket"))
    yield Command("click", _middle(basket))
    yield view.click(way)
    yield view.click("Order")


def _quoted(goal: str) -> list[str]:
    return re.findall(r'"([^"]*)"', goal)


def _one(text: str, tag: str) -> Callable[[View, str], Deeds]:
    """A player that clicks one thing, whatever the goal says."""

    def play(view: View, goal: str) -> Deeds:
        yield view.click(text, tag)

    return play


def _named(tag: str) -> Callable[[View, str], Deeds]:
    """A player that clicks what the goal quotes."""

    def play(view: View, goal: str) -> Deeds:
        yield view.click(_quoted(goal)[0], tag)

    return play


def _tick(view: View, word: str) -> Command:
    label = view.see(word, "label")[0]
    return Command("click", (label["box"][0] + 6, _middle(label)[1]))


def _checkboxes(view: View, goal: str) -> Deeds:
    words = goal.removeprefix("Select ").removesuffix(" and click Submit.")
    for word in [] if words == "nothing" else words.split(", "):
        yield _tick(view, word)
    yield view.click("Submit", "button")


def _option(view: View, goal: str) -> Deeds:
    yield _tick(view, _parts(r"Select (\S+) and click Submit\.", goal)[0])
    yield view.click("Submit", "button")


def _colour(view: View, goal: str) -> Deeds:
    rgb = ImageColor.getrgb(_parts(r"Click on the (\w+) colored box", goal)[0])
    with Image.open(io.BytesIO(view.shown.png)) as picture:
        pixels = picture.convert("RGB")
    boxes = (e for e in view.see(tag="div") if pixels.getpixel(_whole(_middle(e))) == rgb)
    yield Command("click", _middle(_first(boxes)))


def _whole(place: tuple[float, float]) -> tuple[int, int]:
    return int(place[0]), int(place[1])


def _collapsible(view: View, goal: str) -> Deeds:
    yield Command(
        "click", _middle(_first(e for e in view.see() if e["text"].startswith("Section")))
    )
    yield view.click("Submit", "button")


def _grid(view: View, goal: str) -> Deeds:
    x, y = map(int, _parts(r"\((-?\d),(-?\d)\)", goal))
    points = [_middle(e) for e in view.see(tag="circle")]
    columns, rows = (sorted({round(p[axis]) for p in points}) for axis in (0, 1))
    if (len(columns), len(rows)) != (5, 5):
        raise LookupError("expected 5 x 5 points on the page")
    yield Command("click", (float(columns[x + 2]), float(rows[2 - y])))


def _shape(view: View, goal: str) -> Deeds:
    figures = (e for e in view.see() if e["tag"] in ("circle", "rect", "polygon", "text"))
    figure = _first(figures)
    words = {"circle": "Circle", "rect": "Rectangle", "polygon": "Triangle"}
    letter = "Number" if figure["text"].isdigit() else "Letter"
    yield view.click(words.get(figure["tag"], letter), "button")


def _tab(view: View, goal: str) -> Deeds:
    yield view.click(_parts(r"(Tab #\d)", goal)[0], "a")


def _typed(button: str) -> Callable[[View, str], Deeds]:
    """A player that types what the goal quotes into the fields, from top to bottom, and clicks a button."""

    def play(view: View, goal: str) -> Deeds:
        for place, words in enumerate(_quoted(goal)):
            yield view.type(words, place)
        yield view.click(button, "button")

    return play


def _password(view: View, goal: str) -> Deeds:
    for place in (0, 1):
        yield view.type(_quoted(goal)[0], place)
    yield view.click("Submit", "button")


PLAYERS: dict[str, Callable[[View, str], Deeds]] = {
    "own/pick": _pick,
    "own/form": _form,
    "own/menu": _menu,
    "own/calendar": _calendar,
    "own/settings": _settings,
    "own/shop": _shop,
    "miniwob/click-test": _one("Click Me!", "button"),
    "miniwob/click-test-2": _one("ONE", "button"),
    "miniwob/click-button": _named("button"),
    "miniwob/click-collapsible": _collapsible,
    "miniwob/click-color": _colour,
    "miniwob/click-dialog": _one("Close", "button"),
    "miniwob/click-link": _named("span"),
    "miniwob/click-checkboxes": _checkboxes,
    "miniwob/click-option": _option,
    "miniwob/click-tab": _tab,
    "miniwob/grid-coordinate": _grid,
    "miniwob/identify-shape": _shape,
    "miniwob/enter-text": _typed("Submit"),
    "miniwob/enter-password": _password,
    "miniwob/login-user": _typed("Login"),
    "miniwob/focus-text": _one("", "input"),
}
"""Kinds of pages that have a player."""
