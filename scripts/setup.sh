#!/usr/bin/env bash
# Makes a working mmrl in a virtual environment: the active one, $VENV, or .venv in the repository.
# Torch comes first and never brings CUDA packages to a machine without an NVIDIA GPU (scripts/install_torch.py, which adds
# torchcodec too where the pinned release fits).
# Runs again in a blink when nothing changed: a stamp inside the environment holds a hash of what was installed, and the extras.
# An environment never loses an extra: asked for fewer, it keeps those it has.
#
#   bash scripts/setup.sh            # everything, also the tools for development; or: make dev
#   bash scripts/setup.sh core       # what `make demo` needs
#   bash scripts/setup.sh all        # every task and part, no tools; or: make install
#   bash scripts/setup.sh video,serve
#   VENV=~/envs/mmrl PYTHON=python3.12 bash scripts/setup.sh
#   MMRL_TORCH_INDEX=https://mirror/whl/cpu bash scripts/setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV="${VENV:-${VIRTUAL_ENV:-.venv}}"
stamp="$VENV/.mmrl-setup"
# The location is part of the hash: an editable install points into this very folder.
wanted="$( (pwd; cat pyproject.toml constraints.txt scripts/setup.sh scripts/install_torch.py) | sha256sum | cut -d' ' -f1)"

# One set-up of an environment at a time (`make -j` starts several targets): the others wait, and find it done.
beside="$(dirname "$VENV")"
if command -v flock >/dev/null && [ -z "${MMRL_SETUP_LOCKED:-}" ] && [ -w "$beside" ]; then
    MMRL_SETUP_LOCKED=1 exec flock "$beside/$(basename "$VENV").setup-lock" bash scripts/setup.sh "$@"
fi

# The stamp: the hash, then the extras. One that holds the hash alone is of before there was a choice: everything.
hash="" had=""
if [ -f "$stamp" ]; then
    read -r hash had < "$stamp" || true
    had="${had:-dev}"
fi
# What is there and what is asked for, each once; dev holds all, and core is what there is without any.
extras="$(printf '%s\n' ${had//,/ } ${1:-dev} | tr ', ' '\n\n' | sort -u | grep -vx core | paste -sd, || true)"
case ",$extras," in *,dev,*) extras="${extras/#all,/}" ;; esac
extras="${extras:-core}"
if [ "$hash $had" = "$wanted $extras" ] && [ -x "$VENV/bin/mmrl" ]; then
    exit 0
fi
has() { case ",$extras," in *",$1,"*) return 0 ;; *) return 1 ;; esac; }

if [ ! -x "$VENV/bin/python" ]; then
    base=""
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            base="$candidate"
            break
        fi
    done
    if [ -z "$base" ]; then
        echo "setup: expected Python 3.10 or newer, found $("${PYTHON:-python3}" --version 2>&1 | head -n 1)." \
            "Name one: PYTHON=/path/to/python3.11 make install" >&2
        exit 2
    fi
    existed=no
    [ -e "$VENV" ] && existed=yes
    if ! "$base" -m venv "$VENV"; then
        [ "$existed" = yes ] || rm -rf "$VENV"  # half an environment; never a folder that was there before
        echo "setup: $base cannot make a virtual environment. On Debian or Ubuntu: apt-get install -y python3-venv" >&2
        exit 2
    fi
fi
python="$VENV/bin/python"
"$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip  # environments made by uv have no pip

rm -f "$stamp"  # an interrupted run leaves no stamp, so the next one repairs it
"$python" -m pip install --quiet 'pip>=24'
# Environments of their own, made beside the large one: pip unpacks a package at a time, on one processor.
made_apart() {
    # OpenEnv's servers, for tests of the task openenv, which speaks to them over a socket: they need an MCP of another major version
    # than vLLM does. Beside it the release under OpenEnv's former name, which uses the same packages. fastmcp and mcp are pinned as
    # in constraints.txt, which does not hold for this environment.
    wanted_server="openenv==0.10.0 fastmcp==3.4.11 mcp==1.30.0"
    former_server="openenv-core==0.3.0"
    if has dev && [ "$(cat "$VENV/.mmrl-openenv" 2>/dev/null)" != "$wanted_server $former_server" ]; then
        rm -rf "$VENV/openenv" "$VENV/.mmrl-openenv"
        "$python" -m venv --without-pip "$VENV/openenv"
        # shellcheck disable=SC2086  # several packages
        "$python" -m pip --python "$VENV/openenv/bin/python" install --quiet $wanted_server
        "$python" -m pip --python "$VENV/openenv/bin/python" install --quiet --no-deps --target "$VENV/openenv/former" "$former_server"
        echo "$wanted_server $former_server" > "$VENV/.mmrl-openenv"
    fi
    # verifiers, for the task of that name, which plays its environments in processes of their own: it asks for an mcp of another
    # major version than vLLM does, and its environments bring requirements of their own. 0.3.1 is the last release with
    # load_environment; pillow is for the environments of the tests.
    wanted_verifiers="verifiers==0.3.1 mcp==1.30.0 openai==3.57.0 anthropic==2.14.0 datasets==5.2.0 pydantic==2.14.4 pillow"
    if { has verifiers || has dev; } && [ "$(cat "$VENV/.mmrl-verifiers" 2>/dev/null)" != "$wanted_verifiers" ]; then
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            rm -f "$VENV/.mmrl-verifiers"
            "$python" -m venv --without-pip "$VENV/verifiers"  # one that is there keeps the packages of its environments
            # shellcheck disable=SC2086  # several packages
            "$python" -m pip --python "$VENV/verifiers/bin/python" install --quiet $wanted_verifiers
            echo "$wanted_verifiers" > "$VENV/.mmrl-verifiers"
        else
            echo "setup: verifiers needs Python 3.11 or newer, found $("$python" --version 2>&1); the task verifiers can be given" \
                "another one (params.python)" >&2
        fi
    fi
}
set -m  # a process group of its own, which ends with this script
made_apart &
apart=$!
set +m
trap 'kill -- "-$apart" 2>/dev/null || true' EXIT

"$python" scripts/install_torch.py constraints.txt "$VENV/.mmrl-constraints.txt"
"$python" -m pip uninstall --quiet --yes mmrl 2>/dev/null || true  # this project's former name: two would own the command `mmrl`
if [ "$extras" = core ]; then
    "$python" -m pip install -c "$VENV/.mmrl-constraints.txt" -e .
else
    "$python" -m pip install -c "$VENV/.mmrl-constraints.txt" -e ".[$extras]"
fi
has_version() { "$python" -c 'import importlib.metadata as m, sys; m.version(sys.argv[1])' "$1" 2>/dev/null; }
robots=no
if has robotics || has all || has dev; then robots=yes; fi
# LIBERO without its declared requirements (see pyproject.toml); what it imports came with the extra 'robotics'.
[ "$robots" = no ] || "$python" -m pip install --quiet -c "$VENV/.mmrl-constraints.txt" --no-deps hf-libero robosuite bddl
# BrowserGym likewise: its pins would take Playwright back to 1.44.
if has browsergym || has dev; then
    "$python" -m pip install --quiet -c "$VENV/.mmrl-constraints.txt" --no-deps browsergym-core browsergym-miniwob
fi
# Tests run with the newest Pillow and with Trackio, which asks for an older one and works with both.
! has dev || "$python" -m pip install --quiet -c "$VENV/.mmrl-constraints.txt" --no-deps trackio brotli gradio-client orjson python-multipart
wait "$apart"  # its failure is ours
trap - EXIT
# Two OpenCVs overwrite each other's files: of both, the headless one stays (see pyproject.toml).
if has_version opencv-python && has_version opencv-python-headless; then
    "$python" -m pip uninstall --quiet --yes opencv-python opencv-python-headless
    "$python" -m pip install --quiet -c "$VENV/.mmrl-constraints.txt" --no-deps opencv-python-headless
fi
if [ "$robots" = yes ] && ! has_version mani_skill; then
    echo "setup: ManiSkill has no release for $("$python" --version 2>&1) on $(uname -sm): it needs Python 3.10 to 3.12" \
        "(on Linux: x86-64). Everything else works; for ManiSkill: rm -rf $VENV && PYTHON=python3.12 make install" >&2
fi

if ! "$python" scripts/install_torch.py --has-gpu; then
    cuda="$("$python" -m pip list --format=freeze | grep -iE '^(nvidia|cuda)-' | grep -viE '^nvidia-ml-py' || true)"
    if [ -n "$cuda" ]; then
        echo "setup: this machine has no NVIDIA GPU, yet CUDA packages are installed:" $cuda >&2
        echo "setup: they only cost disk; to be rid of them: remove $VENV and set up again" >&2
    fi
fi
echo "$wanted $extras" > "$stamp"
echo "setup: done ($extras). Next: make demo"
