#!/usr/bin/env bash
# Fine-tune a Qwen-VL model on questions about videos with T-GRPO (Video-R1), or on clips and pictures together.
#
#   bash scripts/train_video_qa.sh --model Qwen/Qwen2.5-VL-3B-Instruct --data DATA [--eval held_out]
#                                  [--videos DIR] [--format NAME] [--task NAME] [--name RUN] [--gpus N] [--lora] [--preset NAME]
#                                  [--resume] [--overwrite] [section.key=value ...]
#
# DATA: Video-R1 or EasyVideoR1 json (clips and pictures), or mmrl's own jsonl with a "task" in every row: choice, numeric,
# open_text, ocr, boolean, grounded_qa ... Every video file is read once before the run starts; --format video_r1 and
# data.train.0.params.reader.probe=false leave that out.
# --videos says where a public set's videos are when they are not where its release has them; paths in mmrl's own jsonl are
# relative to the file, or to --images DIR. A video is a file or a folder of numbered frames.
# Paths are relative to the folder you start from; the run is written to runs/RUN in mmrl's own folder, or to
# dir=/elsewhere. The cache is data.cache.dir of the recipe (`mmrl cache stats FOLDER`), used again by later runs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"
launch configs/video_qa.yaml video_qa "$@"
