#!/usr/bin/env bash
# System packages that tests use and pip cannot install. As root on Debian or Ubuntu they are installed, elsewhere the
# command is printed; without them the tests named below are skipped (in CI a skipped test is a failure).
#
#   bash scripts/system_packages.sh               # what `make test` needs
#   bash scripts/system_packages.sh simulators    # and what ManiSkill and LIBERO need to render on a CPU
set -euo pipefail

# package: which tests need it
#   python3-venv       every test: scripts/setup.sh makes the virtual environment with it
#   chromium           pictures of the report page (render)
#   ffmpeg             video clips written and read by an independent decoder (render); torchcodec loads its shared libraries
#   fonts-dejavu-core  text in generated pictures and in the report page (render)
#   libvulkan1         what the doctor says about Vulkan (render)
#   libgl1 libglib2.0-0  OpenCV builds that are not headless, brought by some extras
packages=(python3-venv chromium ffmpeg fonts-dejavu-core libvulkan1 libgl1 libglib2.0-0)
if [ "${1:-}" = simulators ]; then
    # Software Vulkan needs Mesa 25 or newer: on Debian 12 it is in the backports suite (`mmrl doctor` checks it).
    packages+=(mesa-vulkan-drivers libegl1 libosmesa6 libx11-6 libxext6)
fi

command -v dpkg-query >/dev/null 2>&1 || {
    echo "system packages: no apt here; install with your package manager: ${packages[*]}" >&2
    exit 0
}
missing=()
for package in "${packages[@]}"; do
    if [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)" != installed ]; then
        missing+=("$package")
    fi
done
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "$(id -u)" = 0 ]; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq || echo "system packages: apt-get update failed for some source; trying with what is known" >&2
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    echo "system packages: installed ${missing[*]}"
else
    echo "system packages: missing ${missing[*]}" >&2
    echo "system packages: sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
    echo "system packages: without them the tests marked 'render' that use them are skipped" >&2
fi
