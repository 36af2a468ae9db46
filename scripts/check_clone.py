"""Whether a policy that was cloned before is the one that a launch asks for: same tasks, horizon, pictures, demonstrations, model.

    python -m scripts.check_clone configs/maniskill.yaml runs/maniskill_sft/model "env.tasks=[PickCube-v1]" name=maniskill

scripts/_launch_robot.sh asks before it starts from runs/NAME_sft/model. Status 2, with what was recorded and what is asked, where
they differ.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError
from mmrl.robotics.config import EmbodiedConfig, load_embodied

__all__ = ["check_clone"]

_COMPARED: dict[str, tuple[str, ...] | None] = {
    "model": ("path", "system", "template"),
    "env": ("suite", "tasks", "horizon", "image_size", "cameras", "options"),
    "action": None,
    "vla": ("decode", "cameras", "prompt", "proprio"),  # a critic is made when training needs one
    "demos": None,
}
"""What makes a cloned policy, by section; None: all of it. How many simulators recorded it, say, does not."""


def _known(config: EmbodiedConfig) -> dict[str, Any]:
    tree = config.model_dump(mode="json")
    return {
        f"{section}.{key}": value
        for section, keys in _COMPARED.items()
        for key, value in tree[section].items()
        if (keys is None or key in keys) and (section, key) != ("demos", "save_every")
    }


def check_clone(asked: EmbodiedConfig, folder: Path) -> None:
    """Raises ConfigError where the policy in `folder`, which mmrl sft wrote, was made with other settings than `asked`."""
    fix = (
        f"remove {folder} to clone again, give the run another --name, or start from that policy as it is with "
        f"--model {folder}"
    )
    record = folder / "trainer" / "config.yaml"
    if not record.is_file():
        raise ConfigError(
            f"expected the settings that {folder} was cloned with in {record}, found no such file: {fix}"
        )
    recorded, wanted = _known(load_embodied(record)), _known(asked)
    changed = [
        f"expected {key} {value!r}, found {recorded[key]!r}"
        for key, value in wanted.items()
        if recorded[key] != value
    ]
    if changed:
        raise ConfigError(
            f"{folder} was cloned with other settings: {'; '.join(changed)}. Either {fix}"
        )


def main(arguments: list[str]) -> int:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args(arguments)
    try:
        check_clone(load_embodied(given.recipe, given.overrides), given.folder)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
