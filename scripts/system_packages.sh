#!/usr/bin/env bash
# System packages that tests use and pip cannot install. As root on Debian or Ubuntu they are installed, elsewhere the
# command is printed; without them the tests named below are skipped (in CI a skipped test is a failure).
#
#   bash scripts/system_packages.sh
set -euo pipefail

# package: which tests need it
#   python3-venv       every test: scripts/setup.sh makes the virtual environment with it
#   chromium-headless-shell  the browser of the tasks browser, browsergym and pages, pictures of the report (render)
#   ffmpeg             video clips written and read by an independent decoder (render); torchcodec loads its shared libraries
#   fonts-dejavu-core  text in generated pictures and in the report page (render)
#   tesseract-ocr      text read in pictures: the tool read of the task zoom (with English data)
#   libvulkan1         pictures from ManiSkill, and what the doctor says about Vulkan (render)
#   mesa-vulkan-drivers  software Vulkan for ManiSkill, from Mesa 25 on (render)
#   libegl1 libosmesa6   pictures from LIBERO and robosuite (render)
#   g++ python3-dev    flex attention, which torch compiles
#   libgl1 libglib2.0-0 libx11-6 libxext6  OpenCV builds that are not headless, and SAPIEN, brought by the robotics extra
packages=(python3-venv chromium-headless-shell ffmpeg fonts-dejavu-core tesseract-ocr libvulkan1 mesa-vulkan-drivers libegl1 libosmesa6 libgl1 libglib2.0-0
    libx11-6 libxext6 g++ python3-dev)
oldest_mesa=25

command -v dpkg-query >/dev/null 2>&1 || {
    echo "system packages: no apt here; install with your package manager: ${packages[*]} (Mesa $oldest_mesa or newer)" >&2
    exit 0
}

installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null || true)" = installed ]; }
mesa() { dpkg-query -W -f='${Version}' mesa-vulkan-drivers 2>/dev/null || true; }
codename="$(. "${OS_RELEASE:-/etc/os-release}" 2>/dev/null && echo "${VERSION_CODENAME:-}" || true)"
backports="$codename-backports"

missing=()
for package in "${packages[@]}"; do
    installed "$package" || missing+=("$package")
done
# Debian 12's own Mesa renders nothing for ManiSkill; its backports suite has a Mesa that does.
newer_mesa=no
if [ "$codename" = bookworm ] && { ! installed mesa-vulkan-drivers || dpkg --compare-versions "$(mesa)" lt $oldest_mesa; }; then
    newer_mesa=yes
fi
[ ${#missing[@]} -gt 0 ] || [ $newer_mesa = yes ] || exit 0

if [ "$(id -u)" != 0 ]; then
    if [ ${#missing[@]} -gt 0 ]; then
        echo "system packages: missing ${missing[*]}" >&2
    fi
    if [ $newer_mesa = yes ]; then
        echo "system packages: mesa-vulkan-drivers must come from $backports (Mesa $oldest_mesa or newer)" >&2
    fi
    echo "system packages: sudo bash scripts/system_packages.sh" >&2
    echo "system packages: without them the tests marked 'render' that use them are skipped" >&2
    exit 0
fi

# Sources as apt itself reads them, in whatever format they are written: 'mirror suite component'.
targets() { apt-get indextargets --no-release-info --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' | sort -u; }

# Make the backports suite known, on the mirror that the release itself comes from. Fails, and leaves no file, where that
# mirror has no such suite.
enable_backports() {
    local list="${APT_SOURCES:-/etc/apt/sources.list.d}/mmrl-backports.list" mirror key=/usr/share/keyrings/debian-archive-keyring.gpg options=""
    if targets | awk -v suite="$backports" '$2 == suite && $3 == "main" {found = 1} END {exit !found}'; then
        return 0
    fi
    mirror="$(targets | awk -v suite="$codename" '$2 == suite && $3 == "main" {print $1; exit}')"
    [ -n "$mirror" ] || return 1
    if [ -f "$key" ]; then
        options="[signed-by=$key] "
    fi
    echo "deb $options$mirror $backports main" > "$list"
    if ! apt-get update -qq -o Dir::Etc::sourcelist="$list" -o Dir::Etc::sourceparts=- -o APT::Get::List-Cleanup=0 \
            -o APT::Update::Error-Mode=any; then
        rm -f "$list"
        return 1
    fi
}

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq || echo "system packages: apt-get update failed for some source; trying with what is known" >&2

if [ $newer_mesa = yes ]; then
    if enable_backports && apt-get install -y -qq --no-install-recommends "mesa-vulkan-drivers/$backports" >/dev/null; then
        echo "system packages: installed mesa-vulkan-drivers $(mesa) from $backports"
    else
        echo "system packages: expected a suite $backports with Mesa $oldest_mesa on the mirror of $codename, found none;" \
            "pictures from ManiSkill will not work with Mesa of $codename itself. Name a mirror that has it in" \
            "/etc/apt/sources.list.d and run this again" >&2
    fi
fi
known() { apt-get install -s -qq --no-install-recommends "$1" >/dev/null 2>&1; }
wanted=()
for package in "${missing[@]}"; do
    if installed "$package"; then
        continue
    elif known "$package"; then
        wanted+=("$package")
    elif [ "$package" = chromium-headless-shell ] && installed chromium; then
        continue
    elif [ "$package" = chromium-headless-shell ] && known chromium; then  # a distribution that has the whole browser only
        wanted+=(chromium)
    else
        echo "system packages: no package $package in the sources of this machine; tests that need it are skipped" >&2
    fi
done
[ ${#wanted[@]} -gt 0 ] || exit 0
apt-get install -y -qq --no-install-recommends "${wanted[@]}" >/dev/null
echo "system packages: installed ${wanted[*]}"
