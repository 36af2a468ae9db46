"""Shapes of ours with the names of LIBERO's: what the ten libero_object tasks need, built from boxes and cylinders.

    python -c "from mmrl.robotics.libero_standins import stand_ins; print(stand_ins())"

Groceries have roughly the size and colour their names suggest, rest upright in the poses of LIBERO's recorded initial
states, and fit between the gripper's fingers. Good for testing a pipeline end to end and for learning to act; never for a LIBERO
score. The folder is named after a checksum of its contents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmrl.robotics.libero_assets import cache_root, publish_folder

__all__ = ["GROCERIES", "Grocery", "stand_in_files", "stand_ins"]

_Vector = Sequence[float] | np.ndarray

# Rest orientations (w, x, y, z) of the recorded states: which way a body's own axes lie when it stands on the floor.
_UPRIGHT = (0.5, 0.5, 0.5, 0.5)
_CAN = (0.0, 0.0, 2**-0.5, 2**-0.5)
_TURNED = (2**-0.5, 0.0, 0.0, 2**-0.5)
_BACKWARDS = (0.0, 0.0, 0.0, 1.0)

_FLOOR_Z = -0.035  # where LIBERO's floor problems place the ground
_PEBBLE = "1 0.01 0.0005"  # friction: sliding, torsional, rolling


@dataclass(frozen=True)
class Grocery:
    """`shape`: can, box, carton or bottle; `half`: half sizes (x, y, z) in metres as it rests; `rest`: its orientation then;
    `body`, `label`, `top`: colours 0-1."""

    shape: str
    half: tuple[float, float, float]
    rest: tuple[float, float, float, float]
    body: tuple[float, float, float]
    label: tuple[float, float, float]
    top: tuple[float, float, float]


_WHITE, _STEEL = (0.95, 0.95, 0.92), (0.72, 0.73, 0.75)
GROCERIES: dict[str, Grocery] = {
    "alphabet_soup": Grocery(
        "can", (0.031, 0.031, 0.040), _CAN, (0.80, 0.10, 0.12), _WHITE, _STEEL
    ),
    "tomato_sauce": Grocery(
        "can", (0.031, 0.031, 0.040), _CAN, (0.30, 0.45, 0.15), (0.75, 0.12, 0.08), _STEEL
    ),
    "cream_cheese": Grocery(
        "box", (0.045, 0.027, 0.020), _BACKWARDS, (0.82, 0.87, 0.93), (0.15, 0.35, 0.75), _WHITE
    ),
    "butter": Grocery(
        "box",
        (0.050, 0.025, 0.018),
        _BACKWARDS,
        (0.98, 0.85, 0.25),
        (0.98, 0.96, 0.80),
        (0.9, 0.7, 0.1),
    ),
    "chocolate_pudding": Grocery(
        "box", (0.045, 0.028, 0.018), _BACKWARDS, (0.33, 0.18, 0.09), (0.65, 0.45, 0.25), _WHITE
    ),
    "milk": Grocery(
        "carton", (0.028, 0.028, 0.052), _UPRIGHT, _WHITE, (0.20, 0.40, 0.85), (0.85, 0.88, 0.95)
    ),
    "orange_juice": Grocery(
        "carton",
        (0.028, 0.028, 0.052),
        _UPRIGHT,
        (1.00, 0.55, 0.05),
        (0.20, 0.60, 0.15),
        (0.95, 0.9, 0.8),
    ),
    "salad_dressing": Grocery(
        "bottle",
        (0.027, 0.027, 0.055),
        _UPRIGHT,
        (0.45, 0.65, 0.20),
        (0.95, 0.92, 0.70),
        (0.1, 0.3, 0.1),
    ),
    "ketchup": Grocery(
        "bottle", (0.027, 0.027, 0.055), _UPRIGHT, (0.85, 0.05, 0.05), (0.75, 0.05, 0.05), _WHITE
    ),
    "bbq_sauce": Grocery(
        "bottle",
        (0.027, 0.027, 0.055),
        _TURNED,
        (0.28, 0.08, 0.05),
        (0.90, 0.60, 0.10),
        (0.1, 0.1, 0.1),
    ),
}
"""What the libero_object tasks put on the floor, beside the basket."""

_Part = tuple[str, _Vector, _Vector, _Vector]  # type, half size, position at rest, colour


def _parts(thing: Grocery) -> list[_Part]:
    """What is seen of a grocery, described in the pose in which it rests."""
    x, y, z = thing.half
    if thing.shape == "can":
        return [
            ("cylinder", (x, z * 0.98), (0, 0, 0), thing.body),
            ("cylinder", (x * 1.01, z * 0.45), (0, 0, -0.2 * z), thing.label),
            ("cylinder", (x * 0.94, 0.002), (0, 0, z - 0.002), thing.top),
        ]
    if thing.shape == "box":
        return [
            ("box", (x, y, z), (0, 0, 0), thing.body),
            ("box", (x * 0.6, y * 1.01, z * 1.01), (-0.2 * x, 0, 0), thing.label),
            ("box", (x * 0.12, y * 1.02, z * 1.02), (0.75 * x, 0, 0), thing.top),
        ]
    if thing.shape == "carton":
        return [
            ("box", (x, y, z * 0.78), (0, 0, -0.22 * z), thing.body),
            ("box", (x * 1.01, y * 1.01, z * 0.28), (0, 0, -0.3 * z), thing.label),
            ("box", (x * 0.9, y * 0.55, z * 0.14), (0, 0, 0.66 * z), thing.top),
            ("box", (x * 0.9, y * 0.15, z * 0.11), (0, 0, 0.88 * z), thing.body),
        ]
    return [
        ("cylinder", (x, z * 0.66), (0, 0, -0.34 * z), thing.body),
        ("cylinder", (x * 1.02, z * 0.3), (0, 0, -0.4 * z), thing.label),
        ("cylinder", (x * 0.55, z * 0.2), (0, 0, 0.5 * z), thing.body),
        ("cylinder", (x * 0.6, z * 0.14), (0, 0, 0.86 * z), thing.top),
    ]


def _collision(thing: Grocery) -> _Part:
    """What the fingers feel: one box or one cylinder."""
    x, y, z = thing.half
    if thing.shape in ("can", "bottle"):
        return ("cylinder", (x, z), (0, 0, 0), (0, 0, 0))
    return ("box", (x, y, z), (0, 0, 0), (0, 0, 0))


def _numbers(values: _Vector) -> str:
    return " ".join(f"{value:.6g}" for value in values)


def _rotate(quaternion: _Vector, vector: _Vector) -> np.ndarray:
    """`vector` turned by a unit quaternion (w, x, y, z)."""
    w, axis, v = quaternion[0], np.asarray(quaternion[1:]), np.asarray(vector, dtype=float)
    return v + 2 * np.cross(axis, np.cross(axis, v) + w * v)


def _geom(part: _Part, back: _Vector, visible: bool) -> str:
    """One geom in the body's own axes; `back` undoes the rest orientation."""
    kind, size, position, colour = part
    common = f'type="{kind}" size="{_numbers(size)}" pos="{_numbers(_rotate(back, position))}" quat="{_numbers(back)}"'
    if visible:
        return f'<geom {common} rgba="{_numbers([*colour, 1])}" contype="0" conaffinity="0" mass="1e-8" group="1"/>'
    return f'<geom {common} friction="{_PEBBLE}" condim="4" density="250" solref="0.004 1" group="0" rgba="0 0 0 0"/>'


def _object_xml(name: str, geoms: Sequence[str], half: _Vector, inner: str = "") -> str:
    """robosuite's shape of an object file: a body 'object' and three sites that say how large it is."""
    radius = float(np.hypot(half[0], half[1]))
    sites = {
        "bottom_site": (0, 0, -half[2]),
        "top_site": (0, 0, half[2]),
        "horizontal_radius_site": (radius, 0, 0),
    }
    marks = "\n      ".join(
        f'<site name="{key}" pos="{_numbers(pos)}" size="0.005" rgba="0 0 0 0"/>'
        for key, pos in sites.items()
    )
    shapes = "\n        ".join(geoms)
    return f"""<mujoco model="{name}">
  <asset/>
  <worldbody>
    <body>
      <body name="object">
        {shapes}
        {inner}
      </body>
      {marks}
    </body>
  </worldbody>
</mujoco>
"""


def _grocery_xml(name: str, thing: Grocery) -> str:
    back = (thing.rest[0], *(-value for value in thing.rest[1:]))
    geoms = [
        _geom(_collision(thing), back, False),
        *(_geom(part, back, True) for part in _parts(thing)),
    ]
    return _object_xml(name, geoms, thing.half)


def _basket_xml() -> str:
    """Open box with a rim; the site contain_region is its inside, which the goal (In x basket_1_contain_region) tests."""
    side, height, wall = 0.105, 0.05, 0.006
    walls: list[_Part] = [("box", (side, side, wall), (0, 0, wall - height), (0.55, 0.36, 0.18))]
    for x, y in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        size = (wall, side, height) if x else (side, wall, height)
        walls.append(("box", size, (x * side, y * side, 0), (0.72, 0.52, 0.30)))
    rims = [
        (
            "box",
            (size[0] + 0.003, size[1] + 0.003, 0.006),
            (pos[0], pos[1], height),
            (0.50, 0.30, 0.12),
        )
        for _, size, pos, _ in walls[1:]
    ]
    none = (1.0, 0.0, 0.0, 0.0)
    geoms = [
        *(_geom(part, none, False) for part in walls),
        *(_geom(part, none, True) for part in [*walls, *rims]),
    ]
    room = _numbers((side - 0.015, side - 0.015, height + 0.01))
    inside = f'<site name="contain_region" type="box" pos="0 0 0.01" quat="1 0 0 0" size="{room}" rgba="0 0 0 0" group="0"/>'
    return _object_xml("basket", geoms, (side, side, height), inside)


_WALLS = {  # name: position, orientation, half size
    "left": ((1.25, 3, 1.5), (0.7071, 0.7071, 0, 0), (4.25, 1.6, 0.01)),
    "right": ((1.25, -3, 1.5), (0.7071, -0.7071, 0, 0), (4.25, 1.6, 0.01)),
    "rear": ((-2, 0, 1.5), (0.5, 0.5, 0.5, 0.5), (3, 1.6, 0.01)),
    "front": ((4, 0, 1.5), (0.5, 0.5, -0.5, -0.5), (3, 1.6, 0.01)),
}


def _floor_xml() -> str:
    """The arena of LIBERO's floor problems: a floor body, walls, a plinth under the robot, lights, cameras."""
    walls = "\n    ".join(
        f'<geom name="wall_{key}_visual" type="box" pos="{_numbers(pos)}" quat="{_numbers(quat)}" size="{_numbers(size)}" '
        'contype="0" conaffinity="0" group="1" material="walls_mat"/>'
        for key, (pos, quat, size) in _WALLS.items()
    )
    return f"""<mujoco model="floor">
  <asset>
    <texture type="skybox" builtin="gradient" rgb1="0.9 0.9 1" rgb2="0.2 0.3 0.4" width="64" height="64"/>
    <texture name="texplane" type="2d" file="../textures/light-gray-floor-tile.png"/>
    <material name="floorplane" texture="texplane" texrepeat="2 2" texuniform="true" reflectance="0" shininess="0" specular="0"/>
    <texture name="tex-wall" type="2d" file="../textures/light-gray-plaster.png"/>
    <material name="walls_mat" texture="tex-wall" texrepeat="1 1" texuniform="true" reflectance="0" shininess="0.1" specular="0.1"/>
  </asset>
  <worldbody>
    <body name="floor" pos="0 0 {_FLOOR_Z}">
      <geom name="floor" type="plane" size="4 4 0.125" condim="3" group="1" material="floorplane"/>
      <geom name="plinth_visual" type="cylinder" pos="-0.6 0 0.0175" size="0.12 0.0175" contype="0" conaffinity="0" group="1"
            rgba="0.25 0.25 0.27 1"/>
    </body>
    {walls}
    <light pos="1 1 2.5" dir="-0.3 -0.3 -1" diffuse="0.6 0.6 0.6" specular="0.2 0.2 0.2" directional="true" castshadow="false"/>
    <light pos="-1 -1 2.5" dir="0.3 0.3 -1" diffuse="0.3 0.3 0.3" specular="0 0 0" directional="true" castshadow="false"/>
    <camera name="frontview" mode="fixed" pos="1 0 0.65" quat="0.56 0.43 0.43 0.56"/>
    <camera name="birdview" mode="fixed" pos="-0.2 0 3" quat="0.7071 0 0 0.7071"/>
    <camera name="sideview" mode="fixed" pos="0 1.3 1.2" quat="0.0099 0.0069 0.5912 0.8064"/>
  </worldbody>
</mujoco>
"""


def _tiles() -> np.ndarray:
    """Floor: grey tiles with darker joints, uint8 (128, 128, 3)."""
    rng = np.random.default_rng(1)
    grey = 165 + rng.integers(-4, 5, (128, 128))
    grey[::32], grey[:, ::32] = 130, 130
    return np.repeat(grey[..., None], 3, axis=2).astype(np.uint8)


def _plaster() -> np.ndarray:
    """Wall: light, slightly warm noise, uint8 (64, 64, 3)."""
    grey = 205 + np.random.default_rng(2).integers(-6, 7, (64, 64))
    return np.stack([grey, grey - 4, grey - 10], axis=2).astype(np.uint8)


def stand_in_files() -> dict[str, str | np.ndarray]:
    """All files by relative path: XML text, or a picture uint8 (H, W, 3)."""
    files: dict[str, str | np.ndarray] = {
        "scenes/libero_floor_base_style.xml": _floor_xml(),
        "textures/light-gray-floor-tile.png": _tiles(),
        "textures/light-gray-plaster.png": _plaster(),
        "stable_scanned_objects/basket/basket.xml": _basket_xml(),
    }
    for name, thing in GROCERIES.items():
        files[f"stable_hope_objects/{name}/{name}.xml"] = _grocery_xml(name, thing)
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
