#!/usr/bin/env bash
# Fine-tune a vision-language-action policy in LIBERO with GRPO.
#
#   bash scripts/train_libero.sh [--model FOLDER] [--suite libero_object] [--tasks libero_object/0,libero_object/3] [--assets DIR]
#                                [--demos FILES] [--horizon 280] [--name RUN] [--gpus N] [--resume] [--overwrite]
#                                [section.key=value ...]
#
# --model is a policy that `mmrl sft` wrote (a folder with vla.json), or any Qwen-VL model; without a policy demonstrations are
# cloned first, into runs/RUN_sft/model: those of --demos (LIBERO's hdf5 files or a LeRobot data set), else the scripted expert's.
# Pictures of --demos must be as large as those of the simulator: env.image_size=128 for LIBERO's own files. A clone that was
# interrupted goes on where it stood.
# --assets is the folder of LIBERO's meshes and textures; without it, and without a network, stand-ins are used and every result
# says so. The run is written to runs/RUN in mmrl's own folder; dir=/elsewhere puts it and the cloned policy there. A policy cloned
# before is used again where these settings are those it was cloned with. --gpus N clones and trains with one process per GPU
# (torchrun).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch_robot.sh"
launch_robot configs/libero.yaml libero "$@"
