"""Make assets/tiny_vla and assets/tiny_vla_maniskill: tiny robot policies cloned from scripted experts, for the demos.

    OMP_NUM_THREADS=1 python -m assets.make_tiny_vla tiny          # minutes: demonstrations, then cloning
    OMP_NUM_THREADS=1 python -m assets.make_tiny_vla maniskill     # half an hour: 900 episodes are rendered in software
    OMP_NUM_THREADS=1 python -m assets.make_tiny_vla pull          # the same for PullCube-v1, into assets/tiny_vla_pull

All start from assets/tiny_vlm, which can find coloured shapes, and follow the `demos` section of configs/robot_tiny.yaml and
configs/maniskill_tiny.yaml. The weights are stored in bf16; make_tiny_vla.json in the folder says how they came about.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

from mmrl.training.runlog import write_json

ROOT = Path(__file__).resolve().parent.parent
RECIPES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "tiny": (
        "robot_tiny",
        "tiny_vla",
        ("env.options={discs: 1, apart: [0.9, 1.1], tolerance: 0.15}",),
    ),  # nearer discs, too
    "maniskill": ("maniskill_tiny", "tiny_vla_maniskill", ()),
    "pull": ("maniskill_tiny", "tiny_vla_pull", ("env.tasks=[PullCube-v1]", "vla.prompt=pull")),
}
"""Suite -> recipe of configs/, folder of assets/, and what is changed in the recipe."""


def main() -> None:
    """Record, clone, shrink, put into assets/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=tuple(RECIPES))
    parser.add_argument("--out", type=Path, help="default: the folder in assets/")
    parser.add_argument("overrides", nargs="*", help="configuration overrides")
    options = parser.parse_intermixed_args()  # overrides may follow options
    import torch

    from mmrl.robotics.config import load_embodied
    from mmrl.robotics.load import load_vla
    from mmrl.training.sft import run_sft, supervised_source, supervised_world

    torch.set_num_threads(1)
    recipe, name, changes = RECIPES[options.suite]
    config = load_embodied(
        ROOT / "configs" / f"{recipe}.yaml",
        [
            f"model.path={ROOT / 'assets' / 'tiny_vlm'}",
            f"name={name}",
            *changes,
            *options.overrides,
        ],
    )
    torch.manual_seed(config.seed)
    began = time.time()
    world = supervised_world(config)
    source = supervised_source(config, world)
    vla = source.load_policy(print)
    last = run_sft(
        vla,
        config,
        lambda step, m: (
            print(f"step {step}: loss {m['loss']:.3f}", flush=True) if step % 50 == 0 else None
        ),
        world,
        source,
    )
    out = options.out or ROOT / "assets" / name
    shutil.rmtree(out, ignore_errors=True)
    vla.core.model.to(torch.bfloat16)
    source.save(vla, out)
    shutil.rmtree(out / "trainer")  # the configuration, with paths of this machine
    vla = load_vla(
        config.model_copy(update={"model": config.model.model_copy(update={"path": str(out)})})
    )  # it can be read
    write_json(
        out / "make_tiny_vla.json",
        {
            "command": f"python -m assets.make_tiny_vla {options.suite} {' '.join(options.overrides)}".strip(),
            "seconds": round(time.time() - began),
            "loss": round(last["loss"], 4),
            "demos": config.demos.model_dump(mode="json"),
            "parameters": sum(p.numel() for _, p in vla.trainable()),
        },
    )
    print(f"{out}: {sum(f.stat().st_size for f in out.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
