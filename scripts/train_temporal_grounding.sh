#!/usr/bin/env bash
# Fine-tune a Qwen-VL model on temporal grounding with GRPO: when does something happen?
#
#   bash scripts/train_temporal_grounding.sh --model Qwen/Qwen2.5-VL-3B-Instruct --data DATA [--eval held_out]
#                                            [--videos DIR] [--format NAME] [--task NAME] [--name RUN] [--gpus N] [--lora]
#                                            [--preset NAME] [--resume] [--overwrite] [section.key=value ...]
#
# DATA: charades_sta_train.txt, ActivityNet or VTimeLLM json, QVHighlights jsonl (data.train.0.params.spans=many), Video-R1-like
# rows of type temporal grounding, or mmrl's own jsonl: answers are [[start, end]] in seconds.
# --videos says where a public set's videos are when they are not where its release has them; paths in mmrl's own jsonl are
# relative to the file, or to --images DIR. A video is a file or a folder of numbered frames.
# Paths are relative to the folder you start from; the run is written to runs/RUN in mmrl's own folder, or to
# dir=/elsewhere. The cache is data.cache.dir of the recipe (`mmrl cache stats FOLDER`), used again by later runs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
launch configs/temporal_grounding.yaml temporal_grounding "$@"
