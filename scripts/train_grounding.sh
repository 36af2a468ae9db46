#!/usr/bin/env bash
# Fine-tune a Qwen-VL model on visual grounding with GRPO and Dynamic IoU.
#
#   bash scripts/train_grounding.sh --model Qwen/Qwen2.5-VL-3B-Instruct --data train.jsonl [--eval val.jsonl]
#                                   [--images DIR] [--split train] [--eval-split val] [--split-by unc] [--format NAME]
#                                   [--name RUN] [--gpus N] [--lora] [--preset NAME] [--resume] [--overwrite]
#                                   [section.key=value ...]
#
# --data and --eval take a REFER folder (RefCOCO; then --split, --eval-split and --split-by count), a VLM-R1 json/jsonl,
# an EasyR1 parquet or mmrl's own jsonl (see docs/data.md). --images says where the pictures are when they are not beside the
# data. Paths are relative to the folder you start from; the run is written to runs/RUN in mmrl's own folder, or to
# dir=/elsewhere.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
launch configs/grounding.yaml grounding "$@"
