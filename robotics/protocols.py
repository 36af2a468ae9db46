"""Named evaluation protocols: what openvla_oft, openpi, lerobot, simplevla_rl and rlinf mean by "success on LIBERO".

    protocol = protocol_of("openvla_oft")
    protocol.steps("libero_spatial")          # 220 control steps, after 10 wait steps
    picture = protocol.picture(picture_HWC)   # the image path: jpeg, resize, crop
    results["protocol"] = protocol.describe()

    python -c "from mmrl.robotics.protocols import protocol_of; print(protocol_of('rlinf').describe())"

Numbers of different protocols are not comparable: lerobot gives libero_spatial 280 steps, openvla_oft 220, simplevla_rl 512;
simplevla_rl and rlinf evaluate on initial states that their RL trained on. Where a project's documents leave something open, the
field is None and the policy decides.

Legend: H x W pixels.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from mmrl.errors import ConfigError, did_you_mean
from mmrl.robotics.actions import GripperConvention
from mmrl.robotics.contract import ActionError

__all__ = [
    "PROTOCOLS",
    "ImagePath",
    "Protocol",
    "center_crop",
    "jpeg",
    "protocol_of",
    "resize",
    "resize_with_pad",
    "rotate180",
]

LIBERO_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")


def _picture(picture_HWC: np.ndarray) -> np.ndarray:
    picture = np.asarray(picture_HWC)
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
        raise ActionError(
            f"expected a uint8 picture (H, W, 3), found {picture.dtype} {tuple(picture.shape)}"
        )
    return picture


def rotate180(picture_HWC: np.ndarray) -> np.ndarray:
    """MuJoCo renders upside down; all five projects turn LIBERO's pictures by [::-1, ::-1]."""
    return np.ascontiguousarray(_picture(picture_HWC)[::-1, ::-1])


def jpeg(picture_HWC: np.ndarray) -> np.ndarray:
    """Encode and decode at quality 95, TensorFlow's default, since the RLDS data that OpenVLA trains on are JPEG (openvla-oft,
    resize_image_for_policy)."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(_picture(picture_HWC)).save(buffer, "JPEG", quality=95, subsampling="4:2:0")
    return np.asarray(Image.open(buffer, formats=["JPEG"]).convert("RGB"))


def resize(picture_HWC: np.ndarray, side: int, kernel: str = "lanczos") -> np.ndarray:
    """To side x side with antialiasing, by kernel lanczos (openvla-oft: tf.image.resize(method="lanczos3", antialias=True)) or
    bicubic (RLinf: torchvision's resize); PIL's are the same kernels, values differ by rounding."""
    from PIL import Image

    return np.asarray(
        Image.fromarray(_picture(picture_HWC)).resize(
            (side, side), Image.Resampling[kernel.upper()]
        )
    )


def resize_with_pad(picture_HWC: np.ndarray, side: int) -> np.ndarray:
    """Into side x side, bilinear, proportions kept, black borders (openpi_client.image_tools.resize_with_pad)."""
    from PIL import Image

    picture = _picture(picture_HWC)
    height, width = picture.shape[:2]
    scale = max(height, width) / side
    small_height, small_width = max(1, int(height / scale)), max(1, int(width / scale))
    small = np.asarray(
        Image.fromarray(picture).resize((small_width, small_height), Image.Resampling.BILINEAR)
    )
    out = np.zeros((side, side, 3), np.uint8)
    top, left = (side - small_height) // 2, (side - small_width) // 2
    out[top : top + small_height, left : left + small_width] = small
    return out


def center_crop(picture_HWC: np.ndarray, area: float, side: int | None = None) -> np.ndarray:
    """The middle `area` of the picture, scaled back to its size (or to side x side), bilinear: sqrt(area) of each side (openvla-oft
    and SimpleVLA-RL, center_crop_image with crop_scale 0.9, for policies trained with random crops; tf.image.crop_and_resize
    takes the corners of the box as centres of the outermost pixels)."""
    picture = _picture(picture_HWC)
    if not 0 < area <= 1:
        raise ConfigError(f"expected the cropped area above 0 and at most 1, found {area}")
    height, width = picture.shape[:2]
    part = area**0.5
    rows, columns = (height, width) if side is None else (side, side)
    y = (height - 1) * np.linspace((1 - part) / 2, (1 + part) / 2, rows)
    x = (width - 1) * np.linspace((1 - part) / 2, (1 + part) / 2, columns)
    return _bilinear(picture, y, x)


def _bilinear(picture: np.ndarray, y_H: np.ndarray, x_W: np.ndarray) -> np.ndarray:
    """Values at the crossings of rows y and columns x (pixel centres are whole numbers)."""
    top, left = np.floor(y_H).astype(int), np.floor(x_W).astype(int)
    bottom, right = (
        np.minimum(top + 1, picture.shape[0] - 1),
        np.minimum(left + 1, picture.shape[1] - 1),
    )
    v, u = (y_H - top)[:, None, None], (x_W - left)[None, :, None]
    pixels = picture.astype(np.float64)
    above = pixels[top][:, left] * (1 - u) + pixels[top][:, right] * u
    below = pixels[bottom][:, left] * (1 - u) + pixels[bottom][:, right] * u
    return np.clip(np.round(above * (1 - v) + below * v), 0, 255).astype(np.uint8)


@dataclass(frozen=True)
class ImagePath:
    """What happens to a picture after the rotation: jpeg, then resize ("lanczos", "bicubic", "pad" or None: as rendered) to `side`,
    then the middle crop_area, which comes out `side` pixels large. side None: as rendered."""

    jpeg: bool = False
    method: str | None = None
    side: int | None = 224
    crop_area: float = 1.0

    def __call__(self, picture_HWC: np.ndarray) -> np.ndarray:
        picture = jpeg(picture_HWC) if self.jpeg else _picture(picture_HWC)
        if self.method is not None and self.side is not None:
            if self.method == "pad":
                picture = resize_with_pad(picture, self.side)
            else:
                picture = resize(picture, self.side, self.method)
        return center_crop(picture, self.crop_area, self.side) if self.crop_area < 1 else picture


@dataclass(frozen=True)
class Protocol:
    """max_steps: control steps by suite, without wait_steps, in which nothing moves and the gripper gets wait_gripper.
    trials: episodes per task. seed: of evaluation; env_seed: what env.seed is given, env_draws: how the positions
    of fixtures follow from it (mmrl.robotics.libero.Draws). image_size: rendered pixels. chunk: action
    steps predicted, replan: executed before the next prediction. temperature: 0 is greedy, None the policy's own (flow
    matching). training_states: whether the published numbers come from initial states that RL trained on. success: when an
    episode counts. None: left to the policy or the command line."""

    name: str
    source: str
    max_steps: Mapping[str, int]
    wait_steps: int
    wait_gripper: float
    trials: int
    seed: int
    env_seed: int
    env_draws: str
    image_size: int
    rotate: bool
    image: ImagePath
    chunk: int | None
    replan: int | None
    temperature: float | None
    training_states: bool
    gripper: GripperConvention
    success: str = "done at any step (the episode stops there)"

    def steps(self, suite: str) -> int:
        """Control steps of an episode of `suite`. Raises ConfigError for a suite the protocol does not know."""
        if suite not in self.max_steps:
            raise ConfigError(
                f"protocol {self.name}: expected a suite of {', '.join(self.max_steps)}, found {suite!r}; set "
                f"env.horizon yourself for others.{did_you_mean(suite, self.max_steps)}"
            )
        return self.max_steps[suite]

    def picture(self, picture_HWC: np.ndarray, *, rotated: bool = False) -> np.ndarray:
        """The picture as this project's policies see it. `rotated`: it already was, as mmrl.robotics.libero's pictures are."""
        return self.image(rotate180(picture_HWC) if self.rotate and not rotated else picture_HWC)

    def describe(self) -> dict[str, Any]:
        """Everything, as plain JSON values, to stand beside a result."""
        image = {
            "rendered": self.image_size,
            "rotated_180": self.rotate,
            "jpeg": self.image.jpeg,
            "resize": self.image.method,
            "side": self.image.side or self.image_size,
            "center_crop_area": self.image.crop_area,
        }
        names = (
            "name",
            "source",
            "wait_steps",
            "wait_gripper",
            "trials",
            "seed",
            "env_seed",
            "env_draws",
            "chunk",
            "replan",
            "temperature",
            "training_states",
            "gripper",
            "success",
        )
        return {
            **{name: getattr(self, name) for name in names},
            "max_steps": dict(self.max_steps),
            "image": image,
        }


def _suites(*steps: int) -> Mapping[str, int]:
    return MappingProxyType(dict(zip(LIBERO_SUITES, steps, strict=True)))


_OFT_IMAGE = ImagePath(jpeg=True, method="lanczos", side=224, crop_area=0.9)

PROTOCOLS: Mapping[str, Protocol] = MappingProxyType(
    {
        p.name: p
        for p in (
            Protocol(
                "openvla_oft",
                "moojink/openvla-oft experiments/robot/libero/run_libero_eval.py, openvla_utils.py",
                _suites(220, 280, 300, 520, 400),
                wait_steps=10,
                wait_gripper=-1.0,
                trials=50,
                seed=7,
                env_seed=0,
                env_draws="in-turn",
                image_size=256,
                rotate=True,
                image=_OFT_IMAGE,
                chunk=8,
                replan=8,
                temperature=0.0,
                training_states=False,
                gripper="openvla",
            ),
            Protocol(
                "openpi",
                "Physical-Intelligence/openpi examples/libero/main.py",
                _suites(220, 280, 300, 520, 400),
                wait_steps=10,
                wait_gripper=-1.0,
                trials=50,
                seed=7,
                env_seed=7,
                env_draws="in-turn",
                image_size=256,
                rotate=True,
                image=ImagePath(method="pad", side=224),
                chunk=None,
                replan=5,
                temperature=None,
                training_states=False,
                gripper="raw",
            ),
            Protocol(
                "lerobot",
                "huggingface/lerobot src/lerobot/envs/libero.py, configs/eval.py",
                _suites(280, 280, 300, 520, 400),
                wait_steps=10,
                wait_gripper=-1.0,
                trials=50,
                seed=1000,
                env_seed=1000,
                env_draws="per-episode",
                image_size=360,
                rotate=True,
                image=ImagePath(side=None),
                chunk=None,
                replan=None,
                temperature=None,
                training_states=False,
                gripper="raw",
            ),
            Protocol(
                "simplevla_rl",
                "PRIME-RL/SimpleVLA-RL verl/workers/rollout/rob_rollout.py, utils/libero_utils.py",
                _suites(512, 512, 512, 512, 512),
                wait_steps=10,
                wait_gripper=-1.0,
                trials=50,
                seed=0,
                env_seed=0,
                env_draws="constant",
                image_size=256,
                rotate=True,
                image=_OFT_IMAGE,
                chunk=8,
                replan=8,
                temperature=0.0,
                training_states=True,
                gripper="openvla",
            ),
            Protocol(
                "rlinf",
                "RLinf/RLinf rlinf/envs/libero, examples/embodiment/config/libero_*_grpo_openvlaoft.yaml",
                _suites(512, 512, 512, 512, 512),
                wait_steps=15,
                wait_gripper=0.0,
                trials=50,
                seed=0,
                env_seed=0,
                env_draws="constant",
                image_size=256,
                rotate=True,
                image=ImagePath(method="bicubic", side=224),
                chunk=8,
                replan=8,
                temperature=1.6,
                training_states=True,
                gripper="openvla",
            ),
        )
    }
)
"""File, line and commit of each constant: mmrl.robotics.protocol_sources, which `python -m scripts.check_protocols` compares with
checkouts of the five projects.

What no line says: a greedy or regressing policy has temperature 0 (openvla_oft), flow matching leaves it to the policy (openpi,
lerobot). rlinf is the recipe of its OpenVLA-OFT runs, which override the simulator's own files (env/libero_spatial.yaml: 240
steps, gripper open while it settles) in training and in evaluation; `center_crop: True` of its model files reaches the model's
configuration only, and no picture. simplevla_rl trains and validates on the same 50 states, rlinf draws both from the same files.
"""


def protocol_of(name: str) -> Protocol:
    """By name. Raises ConfigError."""
    if name not in PROTOCOLS:
        raise ConfigError(
            f"expected protocol as one of {', '.join(PROTOCOLS)}, found {name!r}.{did_you_mean(name, PROTOCOLS)}"
        )
    return PROTOCOLS[name]
