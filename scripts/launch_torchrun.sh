#!/usr/bin/env bash
# Train on one or several nodes: starts this node's torchrun agent. Run it once on every node, with the same arguments.
#
#   bash scripts/launch_torchrun.sh --nodes 2 --gpus 8 --rdzv node0:29500 -- configs/grounding.yaml name=big dir=/shared/runs
#
# What stands after -- goes to `mmrl train`: the recipe, section.key=value, --quiet. The run folder (dir=) and the data
# must be at the same paths on all nodes. A run that was begun before is continued (--auto-resume), so the same line starts a run,
# restarts it, and starts it again after a node was lost. Slurm: scripts/slurm_train.sbatch calls this.
#
#   --nodes N or MIN:MAX   nodes; with a range the run goes on with fewer, and takes more in (default 1)
#   --gpus N               processes on this node (default: its GPUs, or 1)
#   --rdzv HOST:PORT       where the nodes meet: an address of one of them and a free port (default: this node alone)
#   --id NAME              the same on all nodes of a launch; keeps launches apart (default: made of --rdzv and what stands after --)
#   --rank R               number of this node, 0 on the node that --rdzv names: fixed ranks, no elasticity
#   --restarts N           restarts after a process died (default 3)
#   --grace S              seconds between SIGTERM and SIGKILL for the step at hand and its checkpoint (default 120; recent torch);
#                          sets operations.grace_s 20 s lower, unless the recipe or a section.key=value says it
#   --address HOST         how the other nodes reach this one, where its host name does not resolve
#   --interface NAME       network interface for NCCL and gloo, for example ib0 or eth0
#   --dry-run              print the command and stop
#
# Asked to end (SIGTERM to this process), the workers write their checkpoint and end with 143; torchrun then ends with status 1.
set -euo pipefail

usage() { awk 'NR > 1 && /^#/ { sub(/^# ?/, ""); print; next } NR > 1 { exit }' "${BASH_SOURCE[0]}"; }
die() { echo "error: $1; see --help" >&2; exit 2; }

nodes=1 gpus="" rdzv="" id="" rank="" restarts=3 grace=120 address="" interface="" dry=""
while [ $# -gt 0 ]; do
  case "$1" in
    --nodes|--gpus|--rdzv|--id|--rank|--restarts|--grace|--address|--interface)
      [ $# -ge 2 ] || die "expected a value after $1" ;;&
    --nodes) nodes="$2"; shift 2 ;;
    --gpus) gpus="$2"; shift 2 ;;
    --rdzv) rdzv="$2"; shift 2 ;;
    --id) id="$2"; shift 2 ;;
    --rank) rank="$2"; shift 2 ;;
    --restarts) restarts="$2"; shift 2 ;;
    --grace) grace="$2"; shift 2 ;;
    --address) address="$2"; shift 2 ;;
    --interface) interface="$2"; shift 2 ;;
    --dry-run) dry=yes; shift ;;
    -h|--help) usage; exit 0 ;;
    --) shift; break ;;
    *) die "expected an option, or -- and then the recipe, found '$1'" ;;
  esac
done
[ $# -ge 1 ] || die "expected -- and then the recipe (configs/grounding.yaml)"
[[ "$nodes" =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || die "expected --nodes N or MIN:MAX, found '$nodes'"
for pair in "gpus:$gpus" "rank:$rank" "restarts:$restarts" "grace:$grace"; do
  [[ "${pair#*:}" =~ ^[0-9]*$ ]] || die "expected a number after --${pair%%:*}, found '${pair#*:}'"
done
if [ "$nodes" != 1 ] && [ -z "$rdzv" ]; then die "expected --rdzv HOST:PORT with --nodes $nodes"; fi
if [ -n "$rdzv" ] && ! [[ "$rdzv" =~ ^.+:[0-9]+$ ]]; then die "expected --rdzv HOST:PORT, found '$rdzv'"; fi
if [ -n "$rank" ] && [[ "$nodes" == *:* ]]; then die "expected a fixed number of --nodes with --rank, found '$nodes'"; fi

if [ "${grace:=120}" -lt 2 ]; then die "expected --grace of 2 s or more, found '$grace'"; fi
# Two launches must not share a name: the lock of a run's folder goes by it.
if [ -z "$id" ]; then id="mmrl-$(printf '%s\0' "$rdzv" "$@" | cksum | cut -d ' ' -f 1)"; fi
grace_given=""
for word in "$@"; do
  if [[ "$word" == operations.grace_s=* ]] || { [ -f "$word" ] && grep -q '^[^#]*\bgrace_s:' "$word"; }; then grace_given=yes; fi
done

here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${MMRL_PYTHON:-$([ -x "$here/.venv/bin/python" ] && echo "$here/.venv/bin/python" || echo python3)}"
if [ -z "$gpus" ]; then
  gpus="$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)"
  if [ "$gpus" = 0 ]; then gpus=1; fi
fi
command=("$python" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$gpus" --max-restarts "$restarts")
if [ -z "$rdzv" ]; then
  command+=(--standalone)
elif [ -n "$rank" ]; then
  command+=(--rdzv-backend static --node-rank "$rank" --master-addr "${rdzv%:*}" --master-port "${rdzv##*:}" --rdzv-id "$id")
else
  command+=(--rdzv-backend c10d --rdzv-endpoint "$rdzv" --rdzv-id "$id")
fi
if [ -n "$address" ]; then command+=(--local-addr "$address"); fi
command+=(-m mmrl.cli.main train "$@")
# mmrl gives the step up, with a message, before torchrun kills it without one
if [ -z "$grace_given" ]; then command+=("operations.grace_s=$((grace > 40 ? grace - 20 : grace / 2))"); fi
command+=(--auto-resume)

export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="$grace"  # torch that does not know it waits 30 s
# torch 2.13's agents keep one store for all restarts, where restarted processes find addresses of dead ones (gloo: "connectFullMesh
# failed", or rank 0's lost node, pytorch #135712). With this, every restart has a store of its own.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
if [ -n "$interface" ]; then export NCCL_SOCKET_IFNAME="$interface" GLOO_SOCKET_IFNAME="$interface"; fi
echo "$(hostname): $nodes node(s), $gpus process(es) here, meeting at ${rdzv:-this node}, launch '$id', $restarts restart(s):"
printf '  '; printf '%q ' "${command[@]}"; echo
if [ -n "$dry" ]; then exit 0; fi
exec "${command[@]}"
