#!/usr/bin/env bash
# One run over many tasks ("one RL to see them all"): every row is scored by its own task's rubric.
#
#   bash scripts/train_mixed.sh --model Qwen/Qwen2.5-VL-3B-Instruct --data DATA [--eval held_out]
#                               [--images DIR] [--format NAME] [--name RUN] [--gpus N] [--lora] [--preset NAME] [--resume]
#                               [--overwrite] [section.key=value ...]
#
# DATA: files whose rows belong to several tasks: Orsta-47k parquet, Video-R1 / EasyVideoR1 json (picture rows), or mmrl's own
# jsonl with a "task" in every row. For one file per task write the sources into a copy of configs/mixed_tiny.yaml.
# Paths are relative to the folder you start from; the run is written to runs/RUN in mmrl's own folder, or to
# dir=/elsewhere.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
launch configs/mixed.yaml mixed "$@"
