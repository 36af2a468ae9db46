"""What every preset needs with every recipe and model it is for, by estimate: writes assets/results/presets.json.

python -m scripts.estimate_presets            (seconds, no weights, no GPU)
python -m scripts.estimate_presets --check    (fails when the file is out of date)
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from mmrl.config import load_config
from mmrl.config.presets import preset_names, read_preset
from mmrl.diagnostics.memory import estimate
from scripts._bench import RESULTS, ROOT, parse, print_table, write_results

_GIB = 2**30


def rows_of(name: str) -> list[dict[str, Any]]:
    """One row per model and recipe of a preset."""
    preset, rows = read_preset(name), []
    for model in preset.models:
        for recipe in preset.recipes:
            config = load_config(
                ROOT / "configs" / f"{recipe}.yaml", [*preset.overrides, f"model.path={model}"]
            )
            found = estimate(config, processes=preset.gpus, available=preset.gpu_gib * _GIB)
            rows.append(
                {
                    "preset": name,
                    "gpus": preset.gpus,
                    "gpu_gib": preset.gpu_gib,
                    "model": model,
                    "recipe": recipe,
                    "needs_gib": round(found.total / _GIB, 1),
                    "host_gib": round(found.host / _GIB, 1),
                    "fits": found.warning(preset.gpu_gib * _GIB) is None,
                    "parts_gib": {
                        k: round(v / _GIB, 1) for k, v in {**found.parts, **found.peak}.items()
                    },
                }
            )
    return rows


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with the file instead of writing it"
    )
    check = parse(parser).check
    rows = [row for name in preset_names() for row in rows_of(name)]
    if check:
        old = json.loads((RESULTS / "presets.json").read_text(encoding="utf-8"))["presets"]
        if old != rows:
            print(
                "assets/results/presets.json is out of date; run python -m scripts.estimate_presets",
                file=sys.stderr,
            )
        return int(old != rows)
    print_table(
        ["preset", "model", "recipe", "needs, GiB", "of", "fits"],
        [
            [r["preset"], r["model"], r["recipe"], r["needs_gib"], r["gpu_gib"], r["fits"]]
            for r in rows
        ],
    )
    write_results("presets", {"presets": rows}, "torch", "transformers")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
