#!/usr/bin/env bash
# Fine-tune a Qwen-VL model on tracking with GRPO: one object, its box at each second asked for.
#
#   bash scripts/train_tracking.sh --model Qwen/Qwen2.5-VL-3B-Instruct --data DATA [--eval held_out]
#                                  [--videos DIR] [--format NAME] [--task NAME] [--name RUN] [--gpus N] [--lora] [--preset NAME]
#                                  [--resume] [--overwrite] [section.key=value ...]
#
# DATA: a split of GOT-10k (its folder or list.txt), VideoChat-R1's got_train.json, EasyVideoR1-like rows of type tracking, or
# mmrl's own jsonl: answers are {"boxes": {"0": [x1, y1, x2, y2], "2.5": [...]}}, keys are seconds.
# --videos says where a public set's videos are when they are not where its release has them; paths in mmrl's own jsonl are
# relative to the file, or to --images DIR. A video is a file or a folder of numbered frames.
# Paths are relative to the folder you start from; the run is written to runs/RUN in mmrl's own folder, or to
# dir=/elsewhere. The cache is data.cache.dir of the recipe (`mmrl cache stats FOLDER`), used again by later runs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
launch configs/tracking.yaml tracking "$@"
