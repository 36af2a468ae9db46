#!/usr/bin/env bash
# Fine-tune a Qwen-VL model on object detection with GRPO: all objects of the asked categories.
#
#   bash scripts/train_detection.sh --model Qwen/Qwen2.5-VL-3B-Instruct --data DATA [--eval held_out]
#                                   [--images DIR] [--format NAME] [--name RUN] [--gpus N] [--lora] [--preset NAME] [--resume]
#                                   [--overwrite] [section.key=value ...]
#
# DATA: COCO json (with --images), OVDEval, Orsta-47k parquet (only its detection rows: data.train.0.params.reader.only_mine=true)
# or mmrl's own jsonl. --format names the reader when the file does not tell (coco, lvis, ovdeval, orsta, own).
# Paths are relative to the folder you start from; the run is written to runs/RUN in mmrl's own folder, or to
# dir=/elsewhere.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
launch configs/detection.yaml detection "$@"
