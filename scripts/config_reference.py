"""Write docs/config.md: every key of a configuration with its type, default, bounds and meaning, from the code that reads it.

python -m scripts.config_reference           # writes the page
python -m scripts.config_reference --check   # exit status 1 where it is out of date (a test runs this)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mmrl.config import RunConfig
from mmrl.config.reference import Key, Place, places
from mmrl.robotics.config import EmbodiedConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"
_HEAD = """# Configuration keys

Written by `python -m scripts.config_reference` (do not edit). A run is one YAML file with the sections below; every key may also be
given on the command line, as in `mmrl train configs/grounding.yaml optim.lr=2e-6 data.train.0.limit=500`. Unknown keys are errors.
On the command line a value is YAML where it is a number, `true`, `false`, `null`, a text in quotes, a list `[a, b]` or a mapping
`{a: 1}`; any other is text as it stands, also with `#` or a colon in it, and so is one that begins with a template's `{word}`.

Names at the top of a file that begin with a dot or with `x-` (`.shared`, `x-shared`) are not read: they hold parts that YAML
anchors (`&name`) and aliases (`*name`, `<<: *name`) use again.

`mmrl config FILE` prints a file with all defaults filled in, `mmrl config --explain KEY` what is written here of one key, and
`mmrl config --schema` a JSON schema for editors.
"""
_ROBOTS = """
# Robot runs

A file with an `env` section is a robot run: it has the sections above and those below.
"""


def page() -> str:
    """The whole page."""
    common, robots = {place.name: place for place in places(RunConfig)}, places(EmbodiedConfig)
    parts = [_HEAD, *map(_section, common.values()), _ROBOTS]
    parts += [_section(place) for place in robots if place.name not in common]
    own = [
        key
        for place in robots
        if place.name in common
        for key in _beyond(place, common[place.name])
    ]
    return "".join(parts) + "\n## Further keys, and other defaults, of robot runs\n\n" + _table(own)


def _beyond(place: Place, common: Place) -> list[Key]:
    """Keys of a section of robot runs that prompt runs do not have there, or with another default."""
    known = common.values()
    return [key for key in place.values() if key not in known]


def _section(place: Place) -> str:
    rows = place.values()
    return f"\n## {place.name or 'At the top'}\n\n{place.about}\n" + (
        f"\n{_table(rows)}" if rows else ""
    )


def _table(rows: Sequence[Key]) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in rows:
        kind = key.kind + (f", {key.bounds}" if key.bounds else "")
        default = "(must be given)" if key.default is None else f"`{key.default}`"
        lines.append(
            f"| `{key.name}` | {_cell(kind)} | {_cell(default)} | {_cell(key.description)} |"
        )
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    # "][" would begin a link of Markdown
    return text.replace("|", "\\|").replace("<", "&lt;").replace("][", "]\\[")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 when --check finds the page out of date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    text = page()
    if options.check:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            print(f"{PAGE} is out of date: python -m scripts.config_reference")
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
