#!/usr/bin/env bash
# Fine-tune a Qwen-VL model on reading text with GRPO: lines, pages, documents.
#
#   bash scripts/train_ocr.sh --model Qwen/Qwen2.5-VL-3B-Instruct --data DATA [--eval held_out]
#                             [--images DIR] [--format NAME] [--name RUN] [--gpus N] [--lora] [--preset NAME] [--resume]
#                             [--overwrite] [section.key=value ...]
#
# DATA: PageOCR json, OCRBench rows, Orsta-47k parquet, EasyR1 rows, or mmrl's own jsonl.
# Paths are relative to the folder you start from; the run is written to runs/RUN in mmrl's own folder, or to
# dir=/elsewhere.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
launch configs/ocr.yaml ocr "$@"
