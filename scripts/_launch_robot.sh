# Shared by scripts/train_maniskill.sh and train_libero.sh: turns options into configuration overrides and starts `mmrl train RECIPE`.
#
#   source scripts/_launch_robot.sh; launch_robot configs/maniskill.yaml maniskill "$@"
#
# Without a warm-started --model the recipe is first cloned from demonstrations with `mmrl sft`, all weights unless the user's own
# arguments say model.lora.

quoted() { printf "'%s'" "${1//\'/\'\'}"; }
absolute() { if [ -e "$1" ]; then realpath -s -- "$1"; else printf '%s\n' "$1"; fi; }

launch_robot() {
  local recipe="$1" name="$2"; shift 2
  local model="" demos="" folder=runs processes=1 flags=() overrides=() user=() python mmrl
  while [ $# -gt 0 ]; do
    case "$1" in
      --model|--tasks|--demos|--assets|--suite|--horizon|--name|--gpus)
        if [ $# -lt 2 ]; then echo "error: expected a value after $1; see --help" >&2; exit 2; fi ;;&
      --model) model="$(absolute "$2")"; shift 2 ;;
      --tasks) overrides+=("env.tasks=[$2]"); shift 2 ;;
      --suite)
        local last=9; if [ "$2" = libero_90 ]; then last=89; fi
        overrides+=("env.tasks=[$(printf "$2/%s, " $(seq 0 $last))]"); shift 2 ;;
      --demos) demos="$2"; overrides+=("demos.path=$(quoted "$(absolute "$2")")"); shift 2 ;;
      --assets)
        if [ ! -d "$2" ]; then echo "error: expected a folder of LIBERO assets after --assets, found '$2'" >&2; exit 2; fi
        overrides+=("env.options.assets=$(quoted "$(absolute "$2")")"); shift 2 ;;
      --horizon) overrides+=("env.horizon=$2"); shift 2 ;;
      --name) name="$2"; shift 2 ;;
      --gpus) processes="$2"; shift 2 ;;
      --resume|--overwrite|--quiet) flags+=("$1"); shift ;;
      model.path=*) model="$(absolute "${1#*=}")"; shift ;;
      name=*) name="${1#*=}"; shift ;;
      dir=*) folder="${1#*=}"; user+=("$1"); shift ;;
      *=*) user+=("$1"); shift ;;
      -h|--help) awk 'NR > 1 && /^#/ { sub(/^# ?/, ""); print; next } NR > 1 { exit }' "$0"; exit 0 ;;
      *) echo "error: expected an option of --help or section.key=value, found '$1'" >&2; exit 2 ;;
    esac
  done
  if ! [[ "$processes" =~ ^[1-9][0-9]*$ ]]; then
    echo "error: expected a number of processes after --gpus, found '$processes'" >&2
    exit 2
  fi
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  python="${MMRL_PYTHON:-${VENV:-${VIRTUAL_ENV:-.venv}}/bin/python}"
  command -v -- "$python" > /dev/null || { echo "error: expected mmrl in $python; run make install" >&2; exit 2; }
  mmrl=("$python" -m mmrl.cli.main)
  if [ "$processes" -gt 1 ]; then
    mmrl=("$python" -m torch.distributed.run --standalone --nproc_per_node "$processes" -m mmrl.cli.main)
  fi
  overrides+=("name=$(quoted "$name")")
  if [ -n "$model" ] && [ -f "$model/vla.json" ]; then
    if [ -n "$demos" ]; then
      echo "error: expected --demos with a model to be cloned from them, found --model $model, a policy already (it has" \
           "vla.json): drop --demos, or name the model that shall learn them" >&2
      exit 2
    fi
    overrides+=("model.path=$(quoted "$model")")
  else
    local start="$folder/${name}_sft/model"
    if [ -n "$model" ]; then overrides+=("model.path=$(quoted "$model")"); fi
    if [ ! -f "$start/vla.json" ]; then
      echo "no warm-started policy yet: cloning demonstrations into $start"
      local whole=(model.lora=null)
      if [[ " ${user[*]}" == *" model.lora"[.=]* ]]; then whole=(); fi
      local again=()
      if compgen -G "${start}_checkpoints/step_*" > /dev/null; then again=(--resume); fi
      if [[ " ${flags[*]} " == *" --overwrite "* ]]; then again=(--overwrite); fi
      "${mmrl[@]}" sft "$recipe" "${overrides[@]}" "${user[@]}" "${whole[@]}" --out "$start" "${again[@]}"
      flags=("${flags[@]/#--resume/--auto-resume}")  # there was no policy, so perhaps no run either
    else
      "$python" -m scripts.check_clone "$recipe" "$start" "${overrides[@]}" "${user[@]}" || exit 2
      echo "using the policy cloned before, $start (remove that folder to clone again)"
    fi
    overrides+=("model.path=$(quoted "$start")")
  fi
  exec "${mmrl[@]}" train "$recipe" "${overrides[@]}" "${user[@]}" "${flags[@]}"
}
