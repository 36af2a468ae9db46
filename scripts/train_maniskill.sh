#!/usr/bin/env bash
# Fine-tune a vision-language-action policy in ManiSkill 3 with GRPO (or PPO: algorithm.advantage=gae vla.value_head=true
# algorithm.filter.low=null algorithm.filter.high=null algorithm.filter.key=accuracy).
#
#   bash scripts/train_maniskill.sh [--model FOLDER] [--tasks PushCube-v1,PickCube-v1] [--horizon 80] [--demos FOLDER]
#                                   [--name RUN] [--gpus N] [--resume] [--overwrite] [section.key=value ...]
#
# --model is a policy that `mmrl sft` wrote (a folder with vla.json), or any Qwen-VL model; without a policy the scripted experts'
# demonstrations (or those of --demos, a LeRobot data set) are cloned first, into runs/RUN_sft/model. The run is written to
# runs/RUN in mmrl's own folder; dir=/elsewhere puts it and the cloned policy there. A policy cloned before is used again where
# these settings are those it was cloned with. --gpus N clones and trains with one process per GPU (torchrun).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch_robot.sh"
launch_robot configs/maniskill.yaml maniskill "$@"
