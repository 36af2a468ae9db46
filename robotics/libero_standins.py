"""Stand-ins for LIBERO's meshes and textures: LIBERO's own collision geometry, drawn in plain colours.

    python -c "from mmrl.robotics.libero_standins import stand_ins; print(stand_ins())"

What the fingers feel is LIBERO's: bodies, joints, colliding shapes with their friction and density, sites, cameras and lights come
as numbers from robotics/libero_geometry.json (scripts/libero_geometry.py wrote it), so a recorded state starts, and an action
moves, what it moves with the official files. What the camera sees is not: every colliding shape is drawn in a colour of ours, floor
and walls have textures of ours. Good for testing a pipeline end to end, for scripted experts and for learning to act; a policy that
was trained on LIBERO's pictures sees another world, so results are never a LIBERO score. The folder is named after a checksum of
its contents.
"""

from __future__ import annotations

import colorsys
import functools
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

import numpy as np

from mmrl.robotics.cached_folders import cache_root, publish_folder

__all__ = ["geometry", "stand_in_files", "stand_ins"]

_COLOURS: dict[str, tuple[float, float, float]] = {
    "alphabet_soup": (0.80, 0.10, 0.12),
    "tomato_sauce": (0.30, 0.45, 0.15),
    "cream_cheese": (0.82, 0.87, 0.93),
    "butter": (0.98, 0.85, 0.25),
    "chocolate_pudding": (0.33, 0.18, 0.09),
    "milk": (0.95, 0.95, 0.92),
    "orange_juice": (1.00, 0.55, 0.05),
    "salad_dressing": (0.45, 0.65, 0.20),
    "new_salad_dressing": (0.55, 0.70, 0.30),
    "ketchup": (0.85, 0.05, 0.05),
    "bbq_sauce": (0.28, 0.08, 0.05),
    "popcorn": (0.90, 0.20, 0.25),
    "cookies": (0.72, 0.42, 0.16),
    "macaroni_and_cheese": (0.20, 0.35, 0.75),
    "basket": (0.72, 0.52, 0.30),
    "plate": (0.92, 0.90, 0.88),
    "akita_black_bowl": (0.08, 0.08, 0.09),
    "white_bowl": (0.93, 0.93, 0.92),
    "red_bowl": (0.75, 0.12, 0.10),
    "porcelain_mug": (0.96, 0.96, 0.96),
    "white_yellow_mug": (0.95, 0.85, 0.45),
    "red_coffee_mug": (0.80, 0.10, 0.10),
    "wine_bottle": (0.20, 0.05, 0.08),
    "moka_pot": (0.62, 0.63, 0.66),
    "chefmate_8_frypan": (0.15, 0.15, 0.16),
    "wooden_cabinet": (0.35, 0.20, 0.11),
    "white_cabinet": (0.88, 0.87, 0.84),
    "flat_stove": (0.30, 0.30, 0.33),
    "microwave": (0.22, 0.22, 0.24),
    "black_book": (0.10, 0.10, 0.12),
    "yellow_book": (0.93, 0.80, 0.20),
}
"""Of objects by file name; others get one from their name."""

_TAGS = {
    "joints": "joint",
    "inertials": "inertial",
    "sites": "site",
    "cameras": "camera",
    "lights": "light",
}
_Tree = Mapping[str, Any]


@functools.cache
def geometry() -> dict[str, Any]:
    """The numbers: 'objects' and 'arenas' by LIBERO's file name, 'contacts' that their geoms refer to, 'styles' (textures)."""
    path = Path(__file__).with_name("libero_geometry.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _written(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(_written(one) for one in value)
    return value if isinstance(value, str) else repr(value)


def _element(tag: str, attributes: Mapping[str, Any]) -> str:
    text = " ".join(f"{key}={quoteattr(_written(value))}" for key, value in attributes.items())
    return f"<{tag} {text}/>"


def _shape(geom: _Tree) -> dict[str, Any]:
    """What of a geom says where it is and what it looks like."""
    return {k: v for k, v in geom.items() if k in ("type", "size", "pos", "quat", "euler")}


def _colour(name: str) -> tuple[float, float, float]:
    """Of an object; one that is not listed gets a hue from its name."""
    if name in _COLOURS:
        return _COLOURS[name]
    return colorsys.hsv_to_rgb(zlib.crc32(name.encode()) % 360 / 360, 0.5, 0.7)


def _shade(colour: tuple[float, float, float], number: int) -> list[float]:
    """A little darker for every second shape, so that an object is not one flat patch."""
    return [round(part * (1.0, 0.82, 0.92)[number % 3], 4) for part in colour] + [1.0]


class _Writer:
    """One file: `materials` are those an arena's geoms may name, `colour` is what everything else is drawn in."""

    def __init__(self, name: str, materials: frozenset[str] = frozenset()) -> None:
        self.colour, self.materials, self.drawn = _colour(name), materials, 0

    def geom(self, given: _Tree, twins: Sequence[_Tree] = ()) -> list[str]:
        """The geom that collides and, beside it, one that only shows where it is, unless a twin does; what the camera sees
        already stays alone."""
        contact = geometry()["contacts"][given["contact"]]
        geom = {key: value for key, value in given.items() if key != "contact"} | contact
        shown = str(geom.get("group", 0)) == "1"
        if "material" in geom and geom["material"] not in self.materials:
            del geom["material"]
        if shown:
            if "material" not in geom and "rgba" not in geom:
                geom["rgba"] = _shade(self.colour, self.drawn)
            return [_element("geom", geom)]
        geom["rgba"] = [0, 0, 0, 0]
        geom.pop("material", None)
        ghost = _shape(geom)
        # LIBERO sizes a table's twins by their names when it builds the arena: a ghost would keep the file's size, a box as high
        # as the arm that hides all that stands on the table
        if ghost in twins:
            return [_element("geom", geom)]
        look = {"contype": 0, "conaffinity": 0, "group": 1, "mass": 0}
        ghost |= {**look, "rgba": _shade(self.colour, self.drawn)}
        self.drawn += 1
        return [_element("geom", geom), _element("geom", ghost)]

    def body(self, tree: _Tree, tag: str) -> str:
        """A body and all below it."""
        own = {
            k: v
            for k, v in tree.items()
            if not isinstance(v, list) or k in ("pos", "quat", "euler")
        }
        own.pop("model", None)
        lines = [_element(_TAGS[k], row) for k, v in tree.items() if k in _TAGS for row in v]
        geoms = tree.get("geoms", [])
        twins = [_shape(one) for one in geoms if str(one.get("group", 0)) == "1"]
        for geom in geoms:
            lines += self.geom(geom, twins)
        lines += [self.body(one, "body") for one in tree.get("bodies", [])]
        head = _element(tag, own)[:-2].rstrip()
        return f"{head}>\n" + "\n".join(lines) + f"\n</{tag}>"


def _object_xml(name: str, tree: _Tree) -> str:
    body = _Writer(Path(name).stem).body(tree, "worldbody")
    return f'<mujoco model="{tree["model"]}">\n<asset/>\n{body}\n</mujoco>\n'


def _arena_xml(tree: _Tree, styles: list[str]) -> str:
    """Floor, walls and tables; LIBERO puts the file names of a style into the two textures."""
    writer = _Writer("arena", frozenset(str(one["name"]) for one in tree["materials"]))
    writer.colour = (0.62, 0.47, 0.33)
    sky = {"type": "skybox", "builtin": "gradient", "rgb1": "0.9 0.9 1", "rgb2": "0.2 0.3 0.4"}
    lines = [_element("texture", sky | {"width": 64, "height": 64})]
    for label, file in zip(("texplane", "tex-wall"), styles, strict=True):
        lines.append(
            _element("texture", {"name": label, "type": "2d", "file": f"../textures/{file}"})
        )
    for one in tree["materials"]:
        plain = {} if "texture" in one or "rgba" in one else {"rgba": _shade(writer.colour, 0)}
        lines.append(_element("material", {**one, **plain}))
    rest = {key: value for key, value in tree.items() if key != "materials"}
    assets, world = "\n".join(lines), writer.body(rest, "worldbody")
    return f'<mujoco model="{tree["model"]}">\n<asset>\n{assets}\n</asset>\n{world}\n</mujoco>\n'


def _texture(file: str) -> np.ndarray:
    """Floor: tiles with darker joints, uint8 (128, 128, 3); wall: plaster, (64, 64, 3). Tinted by the name of LIBERO's own."""
    rng = np.random.default_rng(zlib.crc32(file.encode()))
    if "wall" in file or "plaster" in file:
        grey = 205 + rng.integers(-6, 7, (64, 64))
        tint = (0, -4, -30) if "yellow" in file else (0, -4, -10)
    else:
        grey = 165 + rng.integers(-4, 5, (128, 128))
        grey[::32], grey[:, ::32] = 130, 130
        tint = (20, -15, -50) if "wood" in file else (0, 0, 0)
    return np.stack([grey + part for part in tint], axis=2).clip(0, 255).astype(np.uint8)


@functools.cache
def stand_in_files() -> dict[str, str | np.ndarray]:
    """All files by relative path: XML text, or a picture uint8 (H, W, 3)."""
    known = geometry()
    files: dict[str, str | np.ndarray] = {
        name: _object_xml(name, tree) for name, tree in known["objects"].items()
    }
    for name, tree in known["arenas"].items():
        styles = known["styles"][name]
        files[name] = _arena_xml(tree, styles)
        files |= {f"textures/{file}": _texture(file) for file in styles}
    return files


def stand_ins() -> Path:
    """The folder with the stand-ins, written on first use: <cache>/libero_standins/<checksum of the contents>."""
    files = stand_in_files()
    checksum = hashlib.sha256()
    for name, content in sorted(files.items()):
        data = content.encode() if isinstance(content, str) else content.tobytes()
        checksum.update(f"{name} {len(data)}\n".encode())
        checksum.update(data)

    def write(folder: Path) -> None:
        from PIL import Image

        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                path.write_text(content, encoding="utf-8")
            else:
                Image.fromarray(content).save(path)

    return publish_folder(cache_root() / "libero_standins" / checksum.hexdigest()[:16], write)
