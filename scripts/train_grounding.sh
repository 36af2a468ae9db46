#!/usr/bin/env bash
# Fine-tune a Qwen-VL model on visual grounding with GRPO and Dynamic IoU.
#
#   bash scripts/train_grounding.sh --model Qwen/Qwen2.5-VL-3B-Instruct --data train.jsonl [--eval val.jsonl]
#                                   [--images DIR] [--split train] [--eval-split val] [--split-by unc] [--name RUN]
#                                   [--gpus N] [--lora] [--resume] [section.key=value ...]
#
# --data and --eval take a REFER folder (RefCOCO; then --split, --eval-split and --split-by count), a VLM-R1 json/jsonl,
# an EasyR1 parquet or mmrl's own jsonl (see README). --images says where the pictures are when they are not beside the
# data. Paths are relative to the folder you start from; the run is written to runs/RUN in mmrl's own folder, or to
# dir=/elsewhere.
set -euo pipefail

# absolute PATH: PATH as seen from here when it exists (links are kept: pictures are looked for beside them), else as it is,
# since it may be a hub name or a folder of mmrl's own.
absolute() { if [ -e "$1" ]; then realpath -s -- "$1"; else printf '%s\n' "$1"; fi; }
# quoted TEXT: as a YAML string, whatever is in it.
quoted() { printf "'%s'" "${1//\'/\'\'}"; }
# is_refer PATH: a REFER release, as its folder or its refs(*).p file.
is_refer() {
  local file
  for file in "$1" "$1"/refs\(*\).p; do
    if [[ "$file" == *.p && -f "$file" ]]; then return 0; fi
  done
  return 1
}

model="" data="" eval_data="" images="" split="train" eval_split="val" split_by="" name="grounding" processes=1 flags=() overrides=()
while [ $# -gt 0 ]; do
  case "$1" in
    --model|--data|--eval|--images|--split|--eval-split|--split-by|--name|--gpus)
      if [ $# -lt 2 ]; then echo "error: expected a value after $1; see --help" >&2; exit 2; fi ;;&
    --model) model="$(absolute "$2")"; shift 2 ;;
    --data) data="$(absolute "$2")"; shift 2 ;;
    --eval) eval_data="$(absolute "$2")"; shift 2 ;;
    --images)
      if [ ! -d "$2" ]; then echo "error: expected a folder of pictures after --images, found '$2'" >&2; exit 2; fi
      images="$(absolute "$2")"; shift 2 ;;
    --split-by) split_by="$2"; shift 2 ;;
    --split) split="$2"; shift 2 ;;
    --eval-split) eval_split="$2"; shift 2 ;;
    --name) name="$2"; shift 2 ;;
    --gpus) processes="$2"; shift 2 ;;
    --lora) overrides+=("model.lora={r: 16, alpha: 32}" "optim.lr=1e-5"); shift ;;
    --resume|--overwrite|--quiet) flags+=("$1"); shift ;;
    *=*) overrides+=("$1"); shift ;;
    -h|--help) sed -n '2,12p' "$0"; exit 0 ;;
    *) echo "error: expected an option or section.key=value, found '$1'; see --help" >&2; exit 2 ;;
  esac
done
if [ -z "$model" ] || [ -z "$data" ]; then
  echo "error: expected --model and --data; see --help" >&2
  exit 2
fi
user=("${overrides[@]}")
overrides=("name=$(quoted "$name")" "model.path=$(quoted "$model")")
source_overrides() {  # list (train or eval), path, split
  local reader="data.$1.0.params.reader"
  overrides+=("data.$1.0.path=$(quoted "$2")")
  if is_refer "$2"; then overrides+=("$reader.split=$(quoted "$3")"); fi
  if [ -n "$split_by" ]; then overrides+=("$reader.split_by=$(quoted "$split_by")"); fi
  if [ -n "$images" ]; then overrides+=("$reader.image_root=$(quoted "$images")"); fi
}
cd "$(dirname "$0")/.."
source_overrides train "$data" "$split"
if [ -n "$eval_data" ]; then source_overrides eval "$eval_data" "$eval_split"; else overrides+=("data.eval=[]"); fi

python="${MMRL_PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
launch=("$python" -m mmrl.cli.main)
if [ "$processes" -gt 1 ]; then
  launch=("$python" -m accelerate.commands.launch --multi_gpu --num_processes "$processes" -m mmrl.cli.main)
fi
exec "${launch[@]}" train configs/grounding.yaml "${overrides[@]}" "${user[@]}" "${flags[@]}"
