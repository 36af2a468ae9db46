"""What generated screens are made of: words, icons and layouts, as HTML text. Rendered by mmrl.tasks.pages.

An element that may be asked for carries data-say (its instruction) and data-type (text or icon). Each word is used once per
page, so an instruction names one element.

    python -c "from random import Random; from mmrl.tasks.page_parts import page_html; print(page_html('web', Random(0), 640, 400))"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from random import Random

__all__ = ["LOOKS", "Parts", "page_html"]

LOOKS = ("mobile", "desktop", "web")

BUTTONS = {
    "Save": "save the changes",
    "Cancel": "cancel",
    "Apply": "apply the settings",
    "Delete": "choose 'Delete'",
    "Export": "export the data",
    "Print": "print the document",
    "Sign in": "sign in",
    "Sign up": "create an account",
    "Next": "go to the next step",
    "Subscribe": "subscribe",
    "Upload": "upload a file",
    "Refresh": "refresh the view",
    "Compare": "compare the versions",
    "Publish": "publish the draft",
    "Archive": "archive the message",
    "Reply": "reply",
    "Connect": "connect the device",
    "Install": "install the update",
    "Restart": "restart the program",
    "Retry": "try again",
}
LINKS = (
    "Pricing",
    "About us",
    "Contact",
    "Help centre",
    "Careers",
    "Privacy policy",
    "Terms of use",
    "Documentation",
    "Release notes",
    "Forgot password?",
    "Site map",
    "Press",
    "Community",
    "Gift cards",
    "Store finder",
    "Size guide",
)
FIELDS = {
    "First name": "enter the first name",
    "Email address": "type an email address",
    "Phone number": "fill in the phone number",
    "City": "enter the city",
    "Postal code": "type the postal code",
    "Company": "enter the company",
    "Coupon": "enter a coupon",
    "Date of birth": "fill in the date of birth",
    "Street": "type the street",
    "Card number": "enter the card number",
}
CHECKS = {
    "Remember me": "tick 'remember me'",
    "Dark mode": "turn on dark mode",
    "Send me news": "agree to receive news",
    "Show hidden files": "show hidden files",
    "Use metric units": "switch to metric units",
    "Automatic backup": "turn on backups",
    "Accept the terms": "accept the terms",
    "Airplane mode": "toggle airplane mode",
    "Large text": "make the text larger",
}
ITEMS = (
    "Blue lamp",
    "Oak table",
    "Travel mug",
    "Garden chair",
    "Wool blanket",
    "Desk clock",
    "Paper kite",
    "Rain coat",
    "Chess set",
    "Tea pot",
    "Night light",
    "Running shoes",
    "Photo frame",
    "Bread knife",
    "Wall map",
    "Bird feeder",
)
ENTRIES = (
    "Inbox",
    "Drafts",
    "Calendar",
    "Reports",
    "Downloads",
    "Music",
    "Pictures",
    "Projects",
    "Backups",
    "Team",
    "Budget",
    "Wi-Fi",
    "Bluetooth",
    "Battery",
    "Storage",
    "Display",
    "Sound",
    "Accounts",
    "Security",
    "Languages",
    "Accessibility",
)
MENUS = ("File", "Edit", "View", "Insert", "Format", "Tools", "Window", "Help")
HEADINGS = (
    "Settings",
    "Overview",
    "My library",
    "Weekly report",
    "Orders",
    "New message",
    "Profile",
    "Travel plans",
)
PROSE = (
    "Changes are kept for thirty days.",
    "Your last visit was on Monday.",
    "Delivered within two working days.",
    "Choose what others can see.",
    "Nothing new since this morning.",
    "Three people share this folder.",
)
ICONS = {  # instruction: strokes on a 24 x 24 grid
    "search": '<circle cx="10" cy="10" r="6"/><path d="M15 15l6 6"/>',
    "close this window": '<path d="M5 5l14 14M19 5L5 19"/>',
    "open the menu": '<path d="M4 6h16M4 12h16M4 18h16"/>',
    "add an item": '<path d="M12 4v16M4 12h16"/>',
    "go back": '<path d="M20 12H5M11 5l-7 7 7 7"/>',
    "go to the home screen": '<path d="M4 11l8-7 8 7v9h-5v-6h-6v6H4z"/>',
    "add to favourites": '<path d="M12 3l2.7 6 6.3.6-4.8 4.2 1.5 6.2L12 16.7 6.300 20l1.500-6.200L3 9.600 9.300 9z"/>',
    "like this": '<path d="M12 20S4 14.500 4 9a4 4 0 018-1 4 4 0 018 1c0 5.500-8 11-8 11z"/>',
    "move to the bin": '<path d="M5 7h14M9 7V4h6v3M7 7l1 13h8l1-13"/>',
    "show notifications": '<path d="M6 17V11a6 6 0 0112 0v6l2 1H4zM10 21h4"/>',
    "open the profile": '<circle cx="12" cy="8" r="4"/><path d="M4 21c0-9 16-9 16 0"/>',
    "write an email": '<path d="M3 6h18v12H3zM3 6l9 7 9-7"/>',
    "play": '<path d="M7 4l13 8-13 8z"/>',
    "pause": '<path d="M8 4v16M16 4v16"/>',
    "download": '<path d="M12 3v12M6 10l6 6 6-6M4 21h16"/>',
    "lock the screen": '<path d="M5 11h14v10H5zM8 11V7a4 4 0 018 0v4"/>',
    "take a photo": '<path d="M3 8h4l2-3h6l2 3h4v11H3z"/><circle cx="12" cy="13" r="4"/>',
    "minimise the window": '<path d="M5 18h14"/>',
    "show more options": '<path d="M12 5v.1M12 12v.1M12 19v.1" stroke-width="4"/>',
    "zoom out": '<circle cx="10" cy="10" r="6"/><path d="M15 15l6 6M7 10h6"/>',
}
STYLE = """
*{{box-sizing:border-box;margin:0}} body{{width:{w}px;height:{h}px;overflow:hidden;font:{font}px/1.35 {family};
background:{ground};color:{ink};position:relative;display:flex;flex-direction:column}}
button,input{{font:inherit}} button,.b{{background:{accent};color:#fff;border:0;border-radius:{radius}px;padding:.45em 1em}}
button.q{{background:{soft};color:{ink}}} a{{color:{accent}}} svg{{display:block;width:1.6em;height:1.6em;fill:none;
stroke:currentColor;stroke-width:2;stroke-linecap:round;stroke-linejoin:round}} .i{{display:inline-flex;padding:.3em;
border-radius:{radius}px}} .bar{{display:flex;align-items:center;gap:.6em;padding:.35em .8em;background:{soft};flex:none}}
.grow{{flex:1 1 auto;min-height:0;min-width:0}} .col{{display:flex;flex-direction:column;gap:.7em;align-items:flex-start}}
.row{{display:flex;gap:.7em;align-items:center;flex-wrap:wrap}} .pad{{padding:1em}} .side{{width:22%;min-width:6em;padding:.6em;
border-right:1px solid {line};flex:none}} .card{{background:{card};border:1px solid {line};border-radius:{radius}px;padding:.8em}}
.entry{{display:flex;gap:.6em;align-items:center;width:100%;padding:.45em .6em;border-radius:{radius}px;
border-bottom:1px solid {line};white-space:nowrap}} input[type=text]{{border:1px solid {line};border-radius:{radius}px;
padding:.4em .6em;background:{card};color:{ink};width:14em;max-width:100%}} .grid{{display:grid;width:100%;gap:.8em;
grid-template-columns:repeat(auto-fill,minmax(10em,1fr))}} .pic{{height:4.5em;border-radius:{radius}px;margin-bottom:.5em}}
.veil{{position:absolute;inset:0;background:rgba(0,0,0,.45);display:flex;align-items:center;justify-content:center}}
.veil .card{{width:min(24em,86%)}} .fab{{position:absolute;right:1em;bottom:4.5em;padding:.2em}} h1{{font-size:1.4em}}
p{{opacity:.75}}
"""


class Parts:
    """Elements with their instructions; every word is taken from its pile once per page."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self._piles = {
            name: rng.sample(list(words), len(words))
            for name, words in {
                "button": BUTTONS,
                "link": LINKS,
                "field": FIELDS,
                "check": CHECKS,
                "item": ITEMS,
                "entry": ENTRIES,
                "menu": MENUS,
                "icon": ICONS,
            }.items()
        }

    def _take(self, pile: str) -> str:
        return self._piles[pile].pop() if self._piles[pile] else ""

    def _many(self, make: Callable[[], str], count: int) -> str:
        return "".join(make() for _ in range(count))

    def _say(self, instruction: str, kind: str = "text") -> str:
        return f'data-say="{escape(instruction)}" data-type="{kind}"'

    def button(self, quiet: bool = False) -> str:
        """A labelled button, asked for by its label or by what it does."""
        label = self._take("button")
        if not label:
            return ""
        say = self.rng.choice([f'press the "{label}" button', BUTTONS[label]])
        return f'<button class="{"q" if quiet else ""}" {self._say(say)}>{label}</button>'

    def icon(self, name: str = "") -> str:
        """An icon without words: `name`, or any that is left."""
        pile = self._piles["icon"]
        name = name if name in pile else (pile[-1] if pile and not name else "")
        if not name:
            return ""
        pile.remove(name)
        return f'<span class="i" {self._say(name, "icon")}><svg viewBox="0 0 24 24">{ICONS[name]}</svg></span>'

    def link(self) -> str:
        """A text link."""
        label = self._take("link")
        return (
            f"<a {self._say(f'open {label!r}' if '?' not in label else 'reset the password')}>{label}</a>"
            if label
            else ""
        )

    def field(self) -> str:
        """An input with its label; the input is the target."""
        label = self._take("field")
        return (
            f'<div>{label}<br><input type="text" {self._say(FIELDS[label])} placeholder="{label}"></div>'
            if label
            else ""
        )

    def check(self) -> str:
        """A check box with its label; both are the target."""
        label = self._take("check")
        mark = "checked" if self.rng.random() < 0.4 else ""
        return (
            f'<label {self._say(CHECKS[label])}><input type="checkbox" {mark}> {label}</label>'
            if label
            else ""
        )

    def entry(self) -> str:
        """A line of a list."""
        label = self._take("entry")
        return f'<div class="entry" {self._say(f"open {label}")}>{label}</div>' if label else ""

    def menu(self) -> str:
        """A word of the menu bar."""
        label = self._take("menu")
        return f"<span {self._say(f'open the {label} menu')}>{label}</span>" if label else ""

    def card(self) -> str:
        """A product with a picture and a button that names it."""
        label = self._take("item")
        if not label:
            return ""
        hue, say = (
            self.rng.randrange(360),
            self.rng.choice(["buy the {}", "add the {} to the cart"]).format(label.lower()),
        )
        return (
            f'<div class="card"><div class="pic" style="background:linear-gradient(hsl({hue},60%,60%),hsl({hue + 40},'
            f'55%,40%))"></div><b>{label}</b><p>{self.rng.randrange(5, 90)}.50</p><button {self._say(say)}>Buy</button></div>'
        )

    def dialog(self) -> str:
        """A dialog over the page, which it covers."""
        return (
            f'<div class="veil"><div class="card col"><h1>{self.rng.choice(HEADINGS)}</h1><p>{self.rng.choice(PROSE)}</p>'
            f'{self.check()}<div class="row">{self.button()}{self.button(True)}</div></div></div>'
        )


def _mobile(parts: Parts) -> str:
    rng = parts.rng
    body = rng.choice(
        [
            lambda: parts._many(parts.entry, 9),
            lambda: f'<div class="grid">{parts._many(parts.card, 6)}</div>',
            lambda: parts._many(parts.field, 3) + parts._many(parts.check, 2) + parts.button(),
        ]
    )()
    back, search, more, add = (
        parts.icon(name) for name in ("go back", "search", "show more options", "add an item")
    )
    bottom = "".join(parts.icon() for _ in range(4))
    return (
        f'<div class="bar"><b class="grow">{rng.randrange(1, 13)}:{rng.randrange(60):02d}</b><span>LTE</span></div>'
        f'<div class="bar">{back}<h1 class="grow">{rng.choice(HEADINGS)}</h1>{search}'
        f'{more}</div><div class="grow col pad" style="overflow:hidden">{body}</div>'
        f'<div class="fab b">{add}</div>'
        f'<div class="bar" style="justify-content:space-around">{bottom}</div>'
    )


def _desktop(parts: Parts) -> str:
    rng = parts.rng
    form = parts._many(parts.field, 3) + parts._many(parts.check, 3)
    return (
        f'<div class="bar"><b class="grow">{rng.choice(HEADINGS)}</b>{parts.icon("minimise the window")}'
        f'{parts.icon("close this window")}</div><div class="row" style="padding:.3em .8em">{parts._many(parts.menu, 5)}</div>'
        f'<div class="bar">{"".join(parts.icon() for _ in range(rng.randrange(4, 8)))}</div>'
        f'<div class="grow row" style="flex-wrap:nowrap;align-items:stretch;gap:0"><div class="side">'
        f'{parts._many(parts.entry, rng.randrange(5, 10))}</div><div class="grow col pad"><h1>{rng.choice(HEADINGS)}</h1>'
        f'<p>{rng.choice(PROSE)}</p>{form}<div class="row">{parts.button()}{parts.button(True)}{parts.link()}</div>'
        "</div></div>"
    )


def _web(parts: Parts) -> str:
    rng = parts.rng
    top = f'<h1>{rng.choice(HEADINGS)}</h1><p>{rng.choice(PROSE)}</p><div class="row">{parts.button()}{parts.button(True)}</div>'
    return (
        f'<div class="bar"><b>{rng.choice(("Northwind", "Lumen", "Fable", "Orbit"))}</b><div class="row grow">'
        f"{parts._many(parts.link, 3)}</div>{parts.icon('search')}{parts.icon('open the profile')}{parts.button()}</div>"
        f'<div class="grow col pad" style="align-items:stretch;overflow:hidden">{top}<div class="grid">'
        f"{parts._many(parts.card, 8)}</div>{parts.field() if rng.random() < 0.5 else ''}</div>"
        f'<div class="bar row">{parts._many(parts.link, 4)}</div>'
    )


_LAYOUTS: dict[str, Callable[[Parts], str]] = {"mobile": _mobile, "desktop": _desktop, "web": _web}


def _theme(rng: Random, width: int, height: int, look: str) -> dict[str, object]:
    dark, hue = rng.random() < 0.3, rng.randrange(360)
    letters: Sequence[str] = (
        "'DejaVu Sans',sans-serif",
        "'DejaVu Serif',serif",
        "'DejaVu Sans Mono',monospace",
    )
    font = max(
        7,
        min(
            rng.choice((13, 14, 15, 16)),
            round(width / (24 if look == "mobile" else 44)),
            round(height / 18),
        ),
    )

    def tone(light: int) -> str:
        return f"hsl({hue},15%,{100 - light if dark else light}%)"

    return {
        "w": width,
        "h": height,
        "font": font,
        "family": rng.choices(letters, (6, 2, 1))[0],
        "radius": rng.choice((0, 3, 6, 14)),
        "ground": tone(96),
        "soft": tone(89),
        "card": tone(99),
        "line": tone(78),
        "ink": tone(12),
        "accent": f"hsl({hue},65%,{45 if not dark else 52}%)",
    }


def page_html(look: str, rng: Random, width: int, height: int) -> str:
    """The HTML of one page of `width` x `height` CSS pixels; the same for the same state of `rng`."""
    parts = Parts(rng)
    theme = _theme(rng, width, height, look)
    body = _LAYOUTS[look](parts) + (parts.dialog() if rng.random() < 0.15 else "")
    return (
        f'<!DOCTYPE html><html><head><meta charset="utf-8"><style>{STYLE.format(**theme)}</style></head>'
        f"<body>{body}</body></html>"
    )
