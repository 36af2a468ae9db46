#!/usr/bin/env bash
# Fine-tune a Qwen-VL model on GUI grounding with GRPO: where to click for an instruction.
#
#   bash scripts/train_gui.sh --model Qwen/Qwen2.5-VL-3B-Instruct --data DATA [--eval held_out]
#                             [--images DIR] [--format NAME] [--name RUN] [--gpus N] [--lora] [--preset NAME] [--resume]
#                             [--overwrite] [section.key=value ...]
#
# DATA: a ScreenSpot-style folder or file (of your own: python -m mmrl.tasks.pages FOLDER), GUI-R1 or UI-R1 rows, or mmrl's own
# jsonl. With --task gui_action and params of that task: AndroidControl, GUI-Odyssey, GUI-R1.
# Paths are relative to the folder you start from; the run is written to runs/RUN in mmrl's own folder, or to
# dir=/elsewhere.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
launch configs/gui.yaml gui "$@"
