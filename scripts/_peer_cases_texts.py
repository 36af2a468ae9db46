"""Completions for letters, numbers, words, texts, mathematics and clicks, see scripts._peer_cases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from scripts._peer_cases import Case, Wrap, around

__all__ = [
    "action_cases",
    "boolean_cases",
    "choice_cases",
    "click_cases",
    "math_cases",
    "number_cases",
    "text_cases",
]

_OPTIONS = {"options": ["a dog", "a red cat", "two birds", "nothing"]}


def _all(
    wrap: Wrap, truth: Any, right: str, wrong: str, answers: Sequence[tuple[str, str]], **about: Any
) -> Iterator[Case]:
    for what, text in around(wrap, right, wrong):
        yield Case(what, text, truth, **about)
    for what, answer in answers:
        yield Case(what, wrap(answer), truth, **about)


def choice_cases(wrap: Wrap) -> Iterator[Case]:
    """The letter of four options, B being right."""
    yield from _all(
        wrap,
        "B",
        "B",
        "C",
        [
            ("a wrong letter", "A"),
            ("another wrong letter", "D"),
            ("a lower-case letter", "b"),
            ("a letter in brackets", "(B)"),
            ("a letter and a full stop", "B."),
            ("a letter and its text", "B. a red cat"),
            ("the text of the option", "a red cat"),
            ("a wrong letter and its text", "A. a dog"),
            ("a letter in bold", "**B**"),
            ("a boxed letter", r"\boxed{B}"),
            ("Option B", "Option B"),
            ("The answer is B.", "The answer is B."),
            ("The answer is C.", "The answer is C."),
            ("a letter that is no option", "G"),
            ("a letter and a bracket", "B)"),
            ("a wrong letter in brackets", "(C)"),
            ("two letters", "B, C"),
            ("words", "the animal"),
            ("a number", "2"),
        ],
        params=_OPTIONS,
    )


def boolean_cases(wrap: Wrap) -> Iterator[Case]:
    """Yes or no, to a question whose answer is yes, and to one whose answer is no."""
    yield from _all(
        wrap,
        True,
        "Yes",
        "No",
        [
            ("yes in lower case", "yes"),
            ("true", "True"),
            ("no", "no"),
            ("false", "False"),
            ("with a full stop", "Yes."),
            ("with an exclamation mark", "Yes!"),
            ("a sentence with yes", "Yes, there is a dog."),
            ("a sentence with no", "No, the room is empty."),
            ("maybe", "maybe"),
            ("yes and no", "yes and no"),
            ("a word that holds yes", "yesterday"),
            ("in bold", "**Yes**"),
        ],
    )
    for what, answer in (
        ("no is right", "No"),
        ("no is right, yes said", "Yes"),
        ("no is right, false said", "false"),
        ("no is right, a sentence", "No, the room is empty."),
        ("no is right, with a full stop", "no."),
        ("no is right, true said", "true"),
    ):
        yield Case(what, wrap(answer), False)


def number_cases(wrap: Wrap) -> Iterator[Case]:
    """Whole numbers, decimals, units, words."""
    yield from _all(
        wrap,
        "12",
        "12",
        "7",
        [
            ("off by one", "13"),
            ("half of it", "6"),
            ("with decimals", "12.0"),
            ("nearly", "12.01"),
            ("off by a tenth", "12.1"),
            ("a unit", "12 meters"),
            ("a currency", "$12"),
            ("a word", "twelve"),
            ("a sentence", "There are 12 of them."),
            ("x = 12", "x = 12"),
            ("a fraction", "24/2"),
            ("negative", "-12"),
            ("far off", "120"),
            ("two numbers", "12 or 13"),
            ("boxed", r"\boxed{12}"),
            ("no number", "many"),
        ],
    )
    for truth, answers in (
        ("3.14", ("3.14", "3.141", "3.15", "3.2", "3", "3,14")),
        ("1200", ("1200", "1,200", "1250", "600", "1300")),
        ("0.5", ("0.5", "0.50", "50%", "1/2", ".5", "0.51")),
    ):
        for answer in answers:
            yield Case(f"{answer} for {truth}", wrap(answer), truth)


_LONG = "a man opens the door and walks into the room"


def text_cases(wrap: Wrap, short: str = "stop") -> Iterator[Case]:
    """Texts of nine words and of one."""
    yield from _all(
        wrap,
        _LONG,
        _LONG,
        "it rains",
        [
            ("one word more", f"{_LONG} slowly"),
            ("one word less", _LONG.replace("the door ", "door ")),
            ("half of it", _LONG[:21]),
            ("capitals", _LONG.upper()),
            ("a full stop", f"{_LONG}."),
            ("other words", "somebody enters through an entrance"),
            ("words exchanged", "a man walks into the room and opens the door"),
            ("forms of words", "a man opened the doors and walked in"),
            ("twice", f"{_LONG} {_LONG}"),
            ("one word", "man"),
            ("something else", "two dogs sleep"),
        ],
    )
    for what, answer in (
        ("the one word", short),
        ("the one word in capitals", short.upper()),
        ("the one word and a full stop", f"{short}."),
        ("the one word in a sentence", f"It says {short}"),
        ("another word", "go"),
        ("a letter wrong", short[:-1] + "b"),
        ("the one word in quotes", f'"{short}"'),
    ):
        yield Case(what, wrap(answer), short)


def math_cases(wrap: Wrap, box: bool) -> Iterator[Case]:
    """Numbers, fractions, roots and terms; boxed where the prompt asks for it."""

    def put(text: str) -> str:
        return rf"\boxed{{{text}}}" if box else text

    yield from _all(
        wrap,
        "5",
        put("5"),
        put("7"),
        [
            ("a wrong number", put("6")),
            ("with decimals", put("5.0")),
            ("in dollars", put("$5$")),
            ("a sum", put("2 + 3")),
            ("words", put("five")),
            ("an equation", put("x = 5")),
            ("far off", put("500")),
        ],
    )
    for truth, answers in (
        (
            r"\frac{1}{2}",
            ("1/2", "0.5", r"\frac{1}{2}", r"\frac{2}{4}", r"\frac{1}{3}", r"\dfrac{1}{2}"),
        ),
        (r"2\sqrt{3}", (r"2\sqrt{3}", r"\sqrt{12}", r"2\sqrt{2}")),
        ("x+1", ("x+1", "1+x", "x-1")),
        ("(1, 2)", ("(1, 2)", "(2, 1)")),
        ("12\\%", ("12\\%", "12", "0.12")),
        ("-3", ("-3", "3", "- 3")),
    ):
        for answer in answers:
            yield Case(f"{answer} for {truth}", wrap(put(answer)), truth)


def click_cases(wrap: Wrap, spell: str, reply: str = "point") -> Iterator[Case]:
    """Clicks on an element; `spell` holds X for the numbers, `reply` says whether these are a point or a box."""
    box = (300, 200, 500, 300)

    def at(x: float, y: float) -> str:
        numbers = (
            f"{x:g}, {y:g}"
            if reply == "point"
            else f"{x - 40:g}, {y - 20:g}, {x + 40:g}, {y + 20:g}"
        )
        return spell.replace("X", numbers)

    for what, text in around(wrap, at(400, 250), at(900, 900)):
        yield Case(what, text, list(box))
    for what, place in (
        ("in the middle", (400, 250)),
        ("near an edge", (310, 205)),
        ("on an edge", (300, 250)),
        ("on a corner", (500, 300)),
        ("one pixel beside", (299, 250)),
        ("a little beside", (520, 250)),
        ("139 px beside", (400, 389)),
        ("far beside", (900, 900)),
        ("at the origin", (0, 0)),
        ("inside, not in the middle", (450, 280)),
    ):
        yield Case(what, wrap(at(*place)), list(box))
    for what, numbers in (
        ("decimals", "400.5, 250.5" if reply == "point" else "300.5, 200.5, 500.5, 300.5"),
        ("a negative number", "-400, 250" if reply == "point" else "-300, 200, 500, 300"),
        ("one number", "400"),
        ("no spaces", "400,250" if reply == "point" else "300,200,500,300"),
        ("the exact box", "300, 200, 500, 300"),
        ("a box twice as large", "200, 150, 600, 350"),
        ("corners swapped", "500, 300, 300, 200"),
        ("a box without area", "400, 250, 400, 250"),
    ):
        if reply == "box" or numbers.count(",") != 3:
            yield Case(what, wrap(spell.replace("X", numbers)), list(box))
    for name, element, places in (
        (
            "a small element",
            (20, 700, 44, 724),
            (("in the middle", (32, 712)), ("at its edge", (42, 722)), ("beside it", (60, 712))),
        ),
        (
            "a bar across the screen",
            (0, 2, 1000, 42),
            (("in the middle", (500, 22)), ("at its end", (950, 30)), ("below it", (500, 70))),
        ),
    ):
        for what, place in places:
            yield Case(f"{name}: {what}", wrap(at(*place)), list(element))


def action_cases(
    wrap: Wrap, keys: tuple[str, str | None], point_truth: bool = False
) -> Iterator[Case]:
    """Actions as a Python list of one dict with `keys` = (the point's, the text's); truths with a box, a text, a direction."""
    place, text_key = keys

    def act(action: str, at: str = "[0, 0]", said: str = "no input text") -> str:
        extra = f", '{text_key}': '{said}'" if text_key else ""
        return f"[{{'action': '{action}', '{place}': {at}{extra}}}]"

    click = {"action": "click", "bbox": [300, 200, 500, 300]}
    for what, text in around(wrap, act("click", "[400, 250]"), act("click", "[900, 900]")):
        yield Case(what, text, click)
    back, kind = ("press_back", "type") if text_key else ("navigate_back", "input_text")
    for what, answer, truth in (
        ("inside", act("click", "[310, 210]"), click),
        ("on an edge", act("click", "[300, 250]"), click),
        ("one pixel beside", act("click", "[299, 250]"), click),
        ("far beside", act("click", "[900, 900]"), click),
        ("another action", act(back), click),
        ("scroll for click", act("scroll", said="down"), click),
        ("no brackets around it", act("click", "[400, 250]")[1:-1], click),
        ("decimals", act("click", "[400.5, 250.5]"), click),
        ("double quotes", act("click", "[400, 250]").replace("'", '"'), click),
        ("two actions", act("click", "[400, 250]")[:-1] + ", " + act(back)[1:], click),
        ("no point", f"[{{'action': 'click'{extra_of(text_key)}}}]", click),
        ("back for back", act(back), {"action": "navigate_back"}),
        ("click for back", act("click", "[4, 5]"), {"action": "navigate_back"}),
        ("the app", act("open_app", said="Clock"), {"action": "open_app", "app": "Clock"}),
        ("another app", act("open_app", said="Camera"), {"action": "open_app", "app": "Clock"}),
        ("scroll down", act("scroll", said="down"), {"action": "scroll", "direction": "down"}),
        (
            "scroll the wrong way",
            act("scroll", said="up"),
            {"action": "scroll", "direction": "down"},
        ),
        ("the text", act(kind, said="red shoes"), {"action": "type", "text": "red shoes"}),
        (
            "a word of the text more",
            act(kind, said="red shoes size"),
            {"action": "type", "text": "red shoes"},
        ),
        ("another text", act(kind, said="blue hat"), {"action": "type", "text": "red shoes"}),
        (
            "a text in capitals",
            act(kind, said="RED SHOES"),
            {"action": "type", "text": "red shoes"},
        ),
        ("part of a word", act(kind, said="a"), {"action": "type", "text": "amazon"}),
        ("no text said", act(kind), {"action": "type", "text": "red shoes"}),
    ):
        yield Case(what, wrap(answer), truth)
    if point_truth:
        spot = {"action": "click", "point": [400, 250]}
        for what, at in (
            ("at the point", "[400, 250]"),
            ("139 px beside", "[400, 389]"),
            ("140 px beside", "[400, 390]"),
        ):
            yield Case(f"{what}, the truth a point", wrap(act("click", at)), spot)


def extra_of(text_key: str | None) -> str:
    """The text's key with what says that there is none."""
    return f", '{text_key}': 'no input text'" if text_key else ""
