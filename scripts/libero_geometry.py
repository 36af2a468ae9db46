"""Write what mmrl ships of LIBERO's assets from a folder of them: collision geometry in numbers, and which files a task needs.

    python -m scripts.libero_geometry FOLDER            # robotics/libero_geometry.json and libero_needs.json anew
    python -m scripts.libero_geometry FOLDER --check    # exit status 1 when they differ from FOLDER's XML files

FOLDER holds LIBERO's `assets` (its XML files suffice). Visual meshes, textures and materials stay out: what is kept are bodies,
joints, colliding geoms, sites, cameras and lights, defaults resolved. Needs LIBERO, whose classes say which file a category reads.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmrl.robotics.libero_assets import libero_folder, write_config
from mmrl.robotics.libero_manifest import categories_of, problem_of

DATA = Path(__file__).resolve().parents[1] / "robotics"
GEOMETRY, NEEDS = DATA / "libero_geometry.json", DATA / "libero_needs.json"
SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
_CONTACT = ("solimp", "solref", "density", "friction", "condim", "margin", "contype", "conaffinity")
_LOOKS = ("material", "rgba", "class", "mesh")
_ARENA_LOOKS = ("material", "rgba")
_PROBLEMS = {
    "floor": "scenes/libero_floor_base_style.xml",
    "tabletop": "scenes/libero_tabletop_base_style.xml",
    "kitchen_tabletop": "scenes/libero_kitchen_tabletop_base_style.xml",
    "living_room_tabletop": "scenes/libero_living_room_tabletop_base_style.xml",
    "study_tabletop": "scenes/libero_study_base_style.xml",
    "coffee_table": "scenes/libero_coffee_table_base_style.xml",
}


def _task_files() -> Iterator[str]:
    for suite in SUITES:
        for path in sorted((libero_folder() / "bddl_files" / suite).glob("*.bddl")):
            yield path.read_text(encoding="utf-8")


def _xml_of_categories(folder: Path) -> dict[str, str]:
    """Category -> its XML file: each of LIBERO's classes is asked to read it from `folder`."""
    write_config()
    from libero import libero

    libero._assets_path_cache = str(folder)
    import robosuite.models.objects as models
    from libero.libero.envs.objects import OBJECTS_DICT

    found: dict[str, str] = {}
    wanted = set().union(*map(categories_of, _task_files()))

    class Asked(Exception):
        pass

    def ask(self: Any, fname: str, *_: Any, **__: Any) -> None:
        raise Asked(fname)

    original = models.MujocoXMLObject.__init__
    models.MujocoXMLObject.__init__ = ask
    try:
        for category in sorted(wanted & set(OBJECTS_DICT)):
            try:
                OBJECTS_DICT[category]()
            except Asked as asked:
                found[category] = str(Path(str(asked)).relative_to(folder))
    finally:
        models.MujocoXMLObject.__init__ = original
    return found


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value == int(value) else value


def _value(text: str) -> Any:
    """Numbers where the attribute holds numbers."""
    parts = text.split()
    try:
        numbers = [_number(part) for part in parts]
    except ValueError:
        return text
    return numbers[0] if len(numbers) == 1 else numbers


def _defaults(root: ET.Element) -> dict[tuple[str, str], dict[str, str]]:
    """(class, tag) -> attributes."""
    return {
        (one.get("class", ""), child.tag): dict(child.attrib)
        for one in root.iter("default")
        for child in one
        if child.tag != "default"
    }


class _Reader:
    """One file as a tree of numbers; contact settings are gathered in `contacts`."""

    def __init__(self, contacts: list[dict[str, Any]]) -> None:
        self.contacts = contacts

    def read(self, path: Path, arena: bool) -> dict[str, Any]:
        root = ET.parse(path).getroot()
        self.defaults, self.arena = _defaults(root), arena
        world = root.find("worldbody")
        assert world is not None
        tree: dict[str, Any] = {"model": root.get("model", path.stem), **self._body(world)}
        if arena:
            tree["materials"] = self._materials(root)
        return tree

    def _materials(self, root: ET.Element) -> list[dict[str, Any]]:
        """Those that primitive geoms show; a texture is named, not shipped."""
        used = {g.get("material") for g in root.iter("geom") if g.get("type") != "mesh"}
        keep = ("name", "reflectance", "shininess", "specular", "texrepeat", "texuniform", "rgba")
        found = []
        for one in root.iter("material"):
            if one.get("name") in used:
                row = {k: _value(v) for k, v in one.attrib.items() if k in keep}
                if one.get("texture") in ("texplane", "tex-wall"):
                    row["texture"] = one.get("texture")
                found.append(row)
        return found

    def _resolved(self, element: ET.Element) -> dict[str, str]:
        return {**self.defaults.get((element.get("class", ""), element.tag), {}), **element.attrib}

    def _geom(self, element: ET.Element) -> dict[str, Any] | None:
        given = self._resolved(element)
        ghost = given.get("contype") == "0" and given.get("conaffinity") == "0"
        if given.get("mesh") is not None or (ghost and not self.arena):
            return None
        contact = {k: _value(v) for k, v in given.items() if k in _CONTACT}
        if contact not in self.contacts:
            self.contacts.append(contact)
        looks = [k for k in _LOOKS if not (self.arena and k in _ARENA_LOOKS)]
        left = {k: _value(v) for k, v in given.items() if k not in _CONTACT and k not in looks}
        return {**left, "contact": self.contacts.index(contact)}

    def _body(self, element: ET.Element) -> dict[str, Any]:
        tree: dict[str, Any] = {
            k: _value(v) if k != "name" else v for k, v in element.attrib.items()
        }
        for child in element:
            if child.tag == "body":
                tree.setdefault("bodies", []).append(self._body(child))
            elif child.tag == "geom":
                geom = self._geom(child)
                if geom is not None:
                    tree.setdefault("geoms", []).append(geom)
            elif child.tag in ("joint", "site", "camera", "light", "inertial"):
                kept = {k: v for k, v in self._resolved(child).items() if k not in _LOOKS[2:]}
                kept.pop("material", None)
                row = {k: v if k == "name" else _value(v) for k, v in kept.items()}
                tree.setdefault(f"{child.tag}s", []).append(row)
        return tree


def _files_of(folder: Path, xml: str) -> list[str]:
    """The XML file and what it refers to, as paths below the folder."""
    base = Path(xml).parent
    found = {xml}
    for element in ET.parse(folder / xml).getroot().iter():
        name = element.get("file")
        if name:
            parts: list[str] = []
            for part in (base / name).as_posix().split("/"):
                if part == "..":
                    parts.pop()
                elif part != ".":
                    parts.append(part)
            found.add("/".join(parts))
    return sorted(found)


def _styles() -> dict[str, list[str]]:
    """Problem -> textures of floor and wall that its class names, in place of those of the arena's XML file."""
    from libero.libero.envs.arenas.style import get_texture_filename

    found = {}
    for problem in _PROBLEMS:
        path = libero_folder() / "envs" / "problems" / f"libero_{problem}_manipulation.py"
        text = path.read_text(encoding="utf-8")
        found[problem] = [
            get_texture_filename(kind, re.search(rf'"{kind}_style": "([\w-]+)"', text)[1])  # type: ignore[index]
            for kind in ("floor", "wall")
        ]
    return found


def collect(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(geometry, needs) of a folder of assets."""
    xmls, styles = _xml_of_categories(folder), _styles()
    problems = sorted(set(map(problem_of, _task_files())))
    contacts: list[dict[str, Any]] = []
    reader = _Reader(contacts)
    files = {xml: reader.read(folder / xml, False) for xml in sorted(set(xmls.values()))}
    arenas = {_PROBLEMS[p]: reader.read(folder / _PROBLEMS[p], True) for p in problems}
    geometry = {
        "source": "numbers of LIBERO's asset files (MIT licence) at commit 8f1084e, read by scripts/libero_geometry.py",
        "contacts": contacts,
        "styles": {_PROBLEMS[p]: styles[p] for p in problems},
        "objects": files,
        "arenas": arenas,
    }
    needs = {
        "categories": {category: _files_of(folder, xml) for category, xml in xmls.items()},
        "problems": {
            p: sorted({*_files_of(folder, _PROBLEMS[p]), *(f"textures/{t}" for t in styles[p])})
            for p in problems
        },
    }
    return geometry, needs


def _text(value: dict[str, Any]) -> str:
    """JSON with a line for each object, so that a change shows which one it is."""
    lines = []
    for key, inner in value.items():
        if isinstance(inner, dict):
            rows = ",\n".join(
                f" {json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}"
                for k, v in inner.items()
            )
            lines.append(f"{json.dumps(key)}: {{\n{rows}\n}}")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(inner, separators=(',', ':'))}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="LIBERO's assets")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    o = parser.parse_args(arguments)
    differ = 0
    for path, value in zip((GEOMETRY, NEEDS), collect(o.folder.resolve()), strict=True):
        text = _text(value)
        if o.check:
            same = path.is_file() and path.read_text(encoding="utf-8") == text
            print(
                f"{path.name}: {'equal' if same else 'differs from'} {'to' if same else ''} {o.folder}"
            )
            differ += not same
        else:
            path.write_text(text, encoding="utf-8")
            print(f"{path} ({len(text) // 1024} KiB)")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
