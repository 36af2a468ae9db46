"""Where each constant of mmrl.robotics.protocols stands in its project: file, line and commit, and how the line is read.

    for source in SOURCES:
        print(source.protocol, source.field, source.file, source.line)

`python -m scripts.check_protocols --checkouts FOLDER` reads the lines of checkouts and compares them with PROTOCOLS.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mmrl.robotics.protocols import LIBERO_SUITES, PROTOCOLS

__all__ = ["COMMITS", "SOURCES", "Source"]

COMMITS = {
    "moojink/openvla-oft": "213c5ff",
    "Physical-Intelligence/openpi": "15a9616",
    "huggingface/lerobot": "7427f31",
    "PRIME-RL/SimpleVLA-RL": "7c51662",
    "RLinf/RLinf": "a3816b5",
}
"""Repository -> the commit whose lines are named."""


@dataclass(frozen=True)
class Source:
    """One line of a project. pattern: a regular expression found in the line; its group is the number or word that `field` is, and
    without a group the line itself is the proof. value: what the field then must be; None: the group."""

    protocol: str
    field: str
    repository: str
    file: str
    line: int
    pattern: str
    value: Any = None

    def ours(self) -> Any:
        """The field's value here; "max_steps.libero_10" and "image.side" are parts of fields."""
        name, _, part = self.field.partition(".")
        whole = getattr(PROTOCOLS[self.protocol], name)
        if not part:
            return whole
        return whole[part] if name == "max_steps" else getattr(whole, part)

    def read(self, line: str) -> Any:
        """What the project's line says of the field. Raises ValueError where the pattern is not in it."""
        found = re.search(self.pattern, line)
        if found is None:
            raise ValueError(f"expected a line with {self.pattern!r}, found {line.strip()!r}")
        return self.value if self.value is not None else float(found[1])


def _of(protocol: str, repository: str, *rows: tuple[Any, ...]) -> Iterator[Source]:
    for row in rows:
        yield Source(protocol, row[0], repository, *row[1:])


def _steps(*rows: tuple[str, int, str]) -> Iterator[tuple[Any, ...]]:
    for suite, row in zip(LIBERO_SUITES, rows, strict=True):
        yield (f"max_steps.{suite}", *row)


_OFT = "experiments/robot/libero/run_libero_eval.py"
_PI = "examples/libero/main.py"
_LR = "src/lerobot/envs/libero.py"
_SV = "verl/workers/rollout/rob_rollout.py"
_SV_RUN = "examples/run_openvla_oft_rl_libero.sh"
_RL = "examples/embodiment/config/libero_{}_grpo_openvlaoft.yaml"
_RL_SPATIAL = _RL.format("spatial")

SOURCES: tuple[Source, ...] = (
    *_of(
        "openvla_oft",
        "moojink/openvla-oft",
        *_steps(*((_OFT, 64 + i, r": (\d+),") for i in range(5))),
        ("wait_steps", _OFT, 113, r"num_steps_wait: int = (\d+)"),
        ("wait_gripper", "experiments/robot/libero/libero_utils.py", 30, r"0, (-1)\]"),
        ("trials", _OFT, 114, r"num_trials_per_task: int = (\d+)"),
        ("seed", _OFT, 128, r"seed: int = (\d+)"),
        ("env_seed", "experiments/robot/libero/libero_utils.py", 24, r"env\.seed\((\d+)\)"),
        ("env_draws", _OFT, 293, r"env\.reset\(\)", "in-turn"),
        ("image_size", _OFT, 116, r"env_img_res: int = (\d+)"),
        ("rotate", "experiments/robot/libero/libero_utils.py", 36, r"\[::-1, ::-1\]", True),
        ("image.jpeg", "experiments/robot/openvla_utils.py", 538, "encode_jpeg", True),
        ("image.method", "experiments/robot/openvla_utils.py", 540, '"lanczos3"', "lanczos"),
        ("image.side", "experiments/robot/openvla_utils.py", 40, r"OPENVLA_IMAGE_SIZE = (\d+)"),
        ("image.crop_area", "experiments/robot/openvla_utils.py", 607, r"crop_scale = ([\d.]+)"),
        ("chunk", "prismatic/vla/constants.py", 27, r'"NUM_ACTIONS_CHUNK": (\d+)'),
        ("replan", _OFT, 100, r"num_open_loop_steps: int = (\d+)"),
        ("gripper", _OFT, 273, r"invert_gripper_action\(", "openvla"),
    ),
    *_of(
        "openpi",
        "Physical-Intelligence/openpi",
        *_steps(*((_PI, 61 + 2 * i, r"max_steps = (\d+)") for i in range(5))),
        ("wait_steps", _PI, 37, r"num_steps_wait: int = (\d+)"),
        ("wait_gripper", _PI, 17, r"\[(-1\.0)\]"),
        ("trials", _PI, 38, r"num_trials_per_task: int = (\d+)"),
        ("seed", _PI, 45, r"seed: int = (\d+)"),
        ("env_seed", _PI, 45, r"seed: int = (\d+)"),
        ("env_seed", _PI, 85, r"LIBERO_ENV_RESOLUTION, args\.seed\)", 7),
        ("env_draws", _PI, 93, r"env\.reset\(\)", "in-turn"),
        ("image_size", _PI, 18, r"LIBERO_ENV_RESOLUTION = (\d+)"),
        ("rotate", _PI, 115, r"\[::-1, ::-1\]", True),
        ("image.method", _PI, 118, "resize_with_pad", "pad"),
        ("image.side", _PI, 28, r"resize_size: int = (\d+)"),
        ("replan", _PI, 29, r"replan_steps: int = (\d+)"),
    ),
    *_of(
        "lerobot",
        "huggingface/lerobot",
        *_steps(*((_LR, 99 + i, r'": (\d+),') for i in range(5))),
        ("wait_steps", _LR, 127, r"num_steps_wait: int = (\d+)"),
        ("wait_gripper", _LR, 92, r"0, (-1)\]"),
        ("trials", "src/lerobot/configs/default.py", 108, r"n_episodes: int = (\d+)"),
        ("seed", "src/lerobot/configs/eval.py", 39, r"seed: int \| None = (\d+)"),
        ("env_seed", "src/lerobot/scripts/lerobot_eval.py", 801, r"start_seed=cfg\.seed", 1000),
        ("env_draws", "src/lerobot/scripts/lerobot_eval.py", 532, r"start_seed \+", "per-episode"),
        ("image_size", "src/lerobot/envs/configs.py", 333, r"observation_height: int = (\d+)"),
        (
            "rotate",
            "src/lerobot/processor/env_processor.py",
            59,
            r"torch\.flip\(img, dims=\[2, 3\]\)",
            True,
        ),
    ),
    *_of(
        "simplevla_rl",
        "PRIME-RL/SimpleVLA-RL",
        *_steps(*((_SV, 430 + i, r": (\d+),") for i in range(5))),
        ("wait_steps", _SV_RUN, 65, r"num_steps_wait=(\d+)"),
        ("wait_gripper", "verl/utils/libero_utils.py", 36, r"0, (-1)\]"),
        ("trials", _SV_RUN, 26, r"num_trials_per_task=(\d+)"),
        ("env_seed", "verl/utils/libero_utils.py", 30, r"env\.seed\((\d+)\)"),
        ("env_draws", _SV, 795, r"p = Process\(", "constant"),
        ("image_size", _SV, 347, r"resolution=(\d+)"),
        ("rotate", "verl/utils/libero_utils.py", 63, r"\[::-1, ::-1\]", True),
        ("image.jpeg", "verl/utils/libero_utils.py", 49, "encode_jpeg", True),
        ("image.method", "verl/utils/libero_utils.py", 51, '"lanczos3"', "lanczos"),
        ("image.side", _SV, 1097, r"get_libero_image\(obs, (\d+)\)"),
        ("image.crop_area", _SV, 113, r"crop_scale = ([\d.]+)"),
        ("chunk", _SV_RUN, 39, r"action_chunks_len=(\d+)"),
        ("replan", _SV, 862, r"step \+= self\.config\.action_chunks_len", 8),
        ("temperature", "verl/trainer/ppo/ray_trainer.py", 347, r"'do_sample': False", 0.0),
        (
            "training_states",
            "verl/utils/dataset/rob_dataset.py",
            88,
            r"range\(0, int\(self\.num_trials_per_task\)\)",
            True,
        ),
        ("gripper", _SV, 399, r"invert_gripper_action\(", "openvla"),
    ),
    *_of(
        "rlinf",
        "RLinf/RLinf",
        *_steps(
            *(
                (_RL.format(suite), line, r"max_episode_steps: (\d+)")
                for suite, line in (
                    ("spatial", 85),
                    ("object", 86),
                    ("goal", 87),
                    ("10", 86),
                    ("90", 85),
                )
            )
        ),
        ("wait_steps", "rlinf/envs/libero/libero_env.py", 842, r"range\((\d+)\)"),
        *(
            ("wait_gripper", _RL.format(suite), line, "reset_gripper_open: False", 0.0)
            for suite, line in (
                ("spatial", 88),
                ("object", 90),
                ("goal", 91),
                ("10", 91),
                ("90", 90),
            )
        ),
        ("trials", _RL_SPATIAL, 82, r"total_num_envs: 500", 50),
        ("seed", "examples/embodiment/config/env/libero_spatial.yaml", 19, r"seed: (\d+)"),
        ("env_seed", "examples/embodiment/config/env/libero_spatial.yaml", 19, r"seed: (\d+)"),
        ("env_draws", "rlinf/envs/libero/libero_env.py", 804, r"self\.env\.seed\(", "constant"),
        (
            "image_size",
            "examples/embodiment/config/env/libero_spatial.yaml",
            35,
            r"camera_heights: (\d+)",
        ),
        ("rotate", "rlinf/envs/libero/utils.py", 90, r"\[::-1, ::-1\]", True),
        (
            "image.method",
            "rlinf/models/embodiment/prismatic/processing_prismatic.py",
            51,
            r"TVF\.resize\(img, \*\*self\.tvf_resize_params",
            "bicubic",
        ),
        ("chunk", "examples/embodiment/config/model/openvla_oft.yaml", 16, r"chunks: (\d+)"),
        ("temperature", _RL_SPATIAL, 98, r"temperature_eval: ([\d.]+)"),
        ("gripper", "rlinf/envs/action_utils.py", 80, r"np\.sign\(.*\) \* -1\.0", "openvla"),
    ),
)
"""Every constant that a line says. Not here, since no line does: temperature 0 of a regressing policy, what flow matching leaves to
the policy, and success, which is that of the simulator at any step."""
