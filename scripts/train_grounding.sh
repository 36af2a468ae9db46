#!/usr/bin/env bash
# Fine-tune a Qwen-VL model on visual grounding with GRPO and Dynamic IoU.
#
#   bash scripts/train_grounding.sh --model Qwen/Qwen2.5-VL-3B-Instruct --data train.jsonl [--eval val.jsonl]
#                                   [--split train] [--eval-split val] [--name RUN] [--gpus N] [--lora] [--resume]
#                                   [section.key=value ...]
#
# --data and --eval take a REFER folder (RefCOCO; then the splits count), a VLM-R1 json/jsonl, an EasyR1 parquet or
# mmrl's own jsonl (see README).
set -euo pipefail
cd "$(dirname "$0")/.."

model="" data="" eval_data="" split="train" eval_split="val" name="grounding" processes=1 flags=() overrides=()
while [ $# -gt 0 ]; do
  case "$1" in
    --model) model="$2"; shift 2 ;;
    --data) data="$2"; shift 2 ;;
    --eval) eval_data="$2"; shift 2 ;;
    --split) split="$2"; shift 2 ;;
    --eval-split) eval_split="$2"; shift 2 ;;
    --name) name="$2"; shift 2 ;;
    --gpus) processes="$2"; shift 2 ;;
    --lora) overrides+=("model.lora={r: 16, alpha: 32}" "optim.lr=1e-5"); shift ;;
    --resume|--overwrite|--quiet) flags+=("$1"); shift ;;
    *=*) overrides+=("$1"); shift ;;
    -h|--help) sed -n '2,10p' "$0"; exit 0 ;;
    *) echo "error: expected an option or section.key=value, found '$1'; see --help" >&2; exit 2 ;;
  esac
done
if [ -z "$model" ] || [ -z "$data" ]; then
  echo "error: expected --model and --data; see --help" >&2
  exit 2
fi
user=("${overrides[@]}")
overrides=("name=$name" "model.path=$model" "data.train.0.path=$data")
if [ -d "$data" ]; then overrides+=("data.train.0.params.reader={split: $split}"); fi
if [ -n "$eval_data" ]; then
  overrides+=("data.eval.0.path=$eval_data")
  if [ -d "$eval_data" ]; then overrides+=("data.eval.0.params.reader={split: $eval_split}"); fi
else
  overrides+=("data.eval=[]")
fi

python="${MMRL_PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
launch=("$python" -m mmrl.cli.main)
if [ "$processes" -gt 1 ]; then
  launch=("$python" -m accelerate.commands.launch --multi_gpu --num_processes "$processes" -m mmrl.cli.main)
fi
exec "${launch[@]}" train configs/grounding.yaml "${overrides[@]}" "${user[@]}" "${flags[@]}"
