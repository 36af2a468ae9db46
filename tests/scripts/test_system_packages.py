"""scripts/system_packages.sh: the newer Mesa comes from the mirror that the machine's own sources name, in both formats."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "system_packages.sh"
ONE_LINE = "deb [arch=amd64] http://mirror.test/debian bookworm main contrib\n"
DEB822 = "Types: deb\nURIs: http://other.test/some/debian\nSuites: bookworm bookworm-updates\nComponents: main\n"

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None, reason="no apt here")


class Machine:
    """A bookworm machine whose apt, dpkg and id are scripts; only `apt-get indextargets` is the real one, on our sources."""

    def __init__(self, folder: Path, sources: str, name: str) -> None:
        self.bin, self.sources, self.log = folder / "bin", folder / "sources", folder / "log"
        self.bin.mkdir()
        self.sources.mkdir()
        (self.sources / name).write_text(sources)
        (folder / "os-release").write_text("ID=debian\nVERSION_CODENAME=bookworm\n")
        self.release, self.user, self.has_backports, self.mesa = folder / "os-release", 0, True, ""
        self.has_shell = self.has_chromium = True

    def run(self) -> subprocess.CompletedProcess[str]:
        real = shutil.which("apt-get")
        self._write("id", f"echo {self.user}")
        self._write(
            "dpkg-query",
            f'''[ "${{@: -1}}" = mesa-vulkan-drivers ] && [ -n "{self.mesa}" ] || exit 1
case "$*" in *Status*) echo -n installed;; *) echo -n "{self.mesa}";; esac''',
        )
        self._write(
            "apt-get",
            f"""if [ "$1" = indextargets ]; then
    exec {real} -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts={self.sources} "$@"
fi
echo "$@" >> {self.log}
case "$*" in
    *mmrl-backports*) [ {int(self.has_backports)} = 1 ];;
    "install -s"*chromium-headless-shell) [ {int(self.has_shell)} = 1 ];;
    install*" chromium"|install*" chromium "*) [ {int(self.has_chromium)} = 1 ];;
    install*/bookworm-backports) [ {int(self.has_backports)} = 1 ];;
esac""",
        )
        environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "OS_RELEASE": str(self.release),
            "APT_SOURCES": str(self.sources),
        }
        return subprocess.run(
            ["bash", str(SCRIPT)],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
            check=False,
        )

    def _write(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{body}\n")
        (self.bin / name).chmod(0o755)

    @property
    def added(self) -> str:
        file = self.sources / "mmrl-backports.list"
        return file.read_text() if file.exists() else ""

    @property
    def asked(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@pytest.mark.parametrize(
    ("sources", "name", "mirror"),
    [
        (ONE_LINE, "own.list", "http://mirror.test/debian"),
        (DEB822, "own.sources", "http://other.test/some/debian"),
    ],
)
def test_the_newer_mesa_comes_from_the_machines_own_mirror(
    sources: str, name: str, mirror: str, tmp_path: Path
) -> None:
    machine = Machine(tmp_path, sources, name)
    done = machine.run()
    assert done.returncode == 0, done.stderr
    words = machine.added.split()
    assert words[0] == "deb" and words[-3:] == [mirror + "/", "bookworm-backports", "main"]
    assert (
        "mesa-vulkan-drivers/bookworm-backports" in machine.asked and "libosmesa6" in machine.asked
    )


def test_a_suite_that_is_known_already_is_not_added_again(tmp_path: Path) -> None:
    machine = Machine(
        tmp_path, ONE_LINE + "deb http://mirror.test/debian bookworm-backports main\n", "own.list"
    )
    assert machine.run().returncode == 0
    assert not machine.added and "mesa-vulkan-drivers/bookworm-backports" in machine.asked


def test_a_mirror_without_the_suite_leaves_the_sources_alone_and_the_rest_installed(
    tmp_path: Path,
) -> None:
    machine = Machine(tmp_path, ONE_LINE, "own.list")
    machine.has_backports = False
    done = machine.run()
    assert done.returncode == 0 and not machine.added
    assert "expected a suite bookworm-backports with Mesa 25" in done.stderr
    assert any(
        line.startswith("install -y") and "mesa-vulkan-drivers " in line
        for line in machine.asked.splitlines()
    )


def test_an_old_mesa_is_renewed_and_a_new_one_left(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ONE_LINE, "own.list")
    for mesa, renewed in (("22.3.6-1+deb12u2", True), ("25.0.7-2~bpo12+1", False)):
        machine.mesa = mesa
        machine.log.unlink(missing_ok=True)
        assert machine.run().returncode == 0
        assert ("mesa-vulkan-drivers/bookworm-backports" in machine.asked) is renewed


def test_who_is_not_root_is_told_the_command_and_nothing_changes(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ONE_LINE, "own.list")
    machine.user = 1000
    done = machine.run()
    assert (
        done.returncode == 0
        and "sudo bash scripts/system_packages.sh" in done.stderr
        and "bookworm-backports" in done.stderr
    )
    assert not machine.added and not machine.asked


@pytest.mark.parametrize("has_shell", [True, False])
def test_the_browser_without_windows_is_preferred_to_the_whole_one(
    has_shell: bool, tmp_path: Path
) -> None:
    machine = Machine(tmp_path, ONE_LINE, "own.list")
    machine.has_shell = has_shell
    done = machine.run()
    [installed] = [
        line
        for line in machine.asked.splitlines()
        if line.startswith("install -y -qq") and "ffmpeg" in line
    ]
    assert done.returncode == 0 and ("chromium-headless-shell" in installed.split()) is has_shell
    assert ("chromium" in installed.split()) is not has_shell
    assert "chromium" not in done.stderr


def test_a_distribution_without_any_chromium_gets_the_other_packages(tmp_path: Path) -> None:
    """One name that apt-get does not know lets it install nothing of all."""
    machine = Machine(tmp_path, ONE_LINE, "own.list")
    machine.has_shell = machine.has_chromium = False
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert "no package chromium-headless-shell" in done.stderr
    assert "installed" in done.stdout.splitlines()[-1] and "ffmpeg" in done.stdout.splitlines()[-1]


def test_no_mirror_is_named_in_the_script() -> None:
    assert "http" not in SCRIPT.read_text()
