#!/usr/bin/env bash
# Fine-tune a Qwen-VL model on puzzles with GRPO: jigsaws (default) or mazes (--task maze).
#
#   bash scripts/train_puzzles.sh --model Qwen/Qwen2.5-VL-3B-Instruct --data DATA [--task maze] [--eval held_out]
#                                 [--images DIR] [--format NAME] [--name RUN] [--gpus N] [--lora] [--preset NAME] [--resume]
#                                 [--overwrite] [section.key=value ...]
#
# DATA: made by `python -m mmrl.tasks.jigsaw OUT --images DIR` or `python -m mmrl.tasks.maze OUT`, or mmrl's own jsonl.
# Paths are relative to the folder you start from; the run is written to runs/RUN in mmrl's own folder, or to
# dir=/elsewhere.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
launch configs/puzzles.yaml puzzles "$@"
