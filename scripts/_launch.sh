# Shared by scripts/train_*.sh: turns options into configuration overrides and starts `mmrl train RECIPE`.
#
#   source scripts/_launch.sh; launch configs/detection.yaml detection "$@"     # recipe, default run name, the user's arguments
#
# Paths are relative to the folder one starts from; the run is written to runs/NAME in mmrl's own folder, or to
# dir=/elsewhere. The header comment of the calling script is its --help.

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

source_overrides() {  # list (train or eval), path, split
  local reader="data.$1.0.params.reader"
  overrides+=("data.$1.0.path=$(quoted "$2")")
  if [ -n "$task" ]; then overrides+=("data.$1.0.task=$(quoted "$task")"); fi
  if is_refer "$2"; then overrides+=("$reader.split=$(quoted "$3")"); fi
  if [ -n "$split_by" ]; then overrides+=("$reader.split_by=$(quoted "$split_by")"); fi
  if [ -n "$images" ]; then overrides+=("$reader.image_root=$(quoted "$images")"); fi
  if [ -n "$videos" ]; then overrides+=("$reader.video_root=$(quoted "$videos")"); fi
  if [ -n "$format" ]; then overrides+=("$reader.format=$(quoted "$format")"); fi
}

launch() {
  local recipe="$1" name="$2"; shift 2
  local model="" data="" eval_data="" images="" videos="" format="" task="" split="train" eval_split="val" split_by="" processes=1
  local flags=() overrides=() user python start
  while [ $# -gt 0 ]; do
    case "$1" in
      --model|--data|--eval|--images|--videos|--format|--task|--split|--eval-split|--split-by|--name|--gpus|--preset)
        if [ $# -lt 2 ]; then echo "error: expected a value after $1; see --help" >&2; exit 2; fi ;;&
      --model) model="$(absolute "$2")"; shift 2 ;;
      --data) data="$(absolute "$2")"; shift 2 ;;
      --eval) eval_data="$(absolute "$2")"; shift 2 ;;
      --images)
        if [ ! -d "$2" ]; then echo "error: expected a folder of pictures after --images, found '$2'" >&2; exit 2; fi
        images="$(absolute "$2")"; shift 2 ;;
      --videos)
        if [ ! -d "$2" ]; then echo "error: expected a folder of videos after --videos, found '$2'" >&2; exit 2; fi
        videos="$(absolute "$2")"; shift 2 ;;
      --format) format="$2"; shift 2 ;;
      --task) task="$2"; shift 2 ;;
      --split-by) split_by="$2"; shift 2 ;;
      --split) split="$2"; shift 2 ;;
      --eval-split) eval_split="$2"; shift 2 ;;
      --name) name="$2"; shift 2 ;;
      --gpus) processes="$2"; shift 2 ;;
      --preset)
        if [ -f "$2" ]; then flags+=(--preset "$(absolute "$2")"); else flags+=(--preset "$2"); fi
        shift 2 ;;
      --lora) overrides+=("model.lora={r: 16, alpha: 32}" "optim.lr=1e-5"); shift ;;
      --resume|--overwrite|--quiet) flags+=("$1"); shift ;;
      *=*) overrides+=("$1"); shift ;;
      -h|--help) awk 'NR > 1 && /^#/ { sub(/^# ?/, ""); print; next } NR > 1 { exit }' "$0"; exit 0 ;;
      *) echo "error: expected an option or section.key=value, found '$1'; see --help" >&2; exit 2 ;;
    esac
  done
  if ! [[ "$processes" =~ ^[1-9][0-9]*$ ]]; then
    echo "error: expected a number of processes after --gpus, found '$processes'" >&2
    exit 2
  fi
  if [ -z "$model" ] || [ -z "$data" ]; then
    echo "error: expected --model and --data; see --help" >&2
    exit 2
  fi
  user=("${overrides[@]}")
  overrides=("name=$(quoted "$name")" "model.path=$(quoted "$model")")
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  source_overrides train "$data" "$split"
  if [ -n "$eval_data" ]; then source_overrides eval "$eval_data" "$eval_split"; else overrides+=("data.eval=[]"); fi
  python="${MMRL_PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
  start=("$python" -m mmrl.cli.main)
  if [ "$processes" -gt 1 ]; then
    start=("$python" -m accelerate.commands.launch --multi_gpu --num_processes "$processes" -m mmrl.cli.main)
  fi
  exec "${start[@]}" train "$recipe" "${overrides[@]}" "${user[@]}" "${flags[@]}"
}
