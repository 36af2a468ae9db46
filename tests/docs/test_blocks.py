"""Every block of code or commands in the README and docs/ is run or checked by a test, or says beside it why not."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from mmrl.config import load_config
from mmrl.robotics.config import load_embodied
from tests.docs.pages_kit import REPO, TEXT, Block, blocks, commands
from tests.docs.test_documented_settings import LINES
from tests.packaging.test_installs import EXTRAS

BLOCKS = [block for page in TEXT for block in blocks(page)]
PYTHON = {
    "# parity.py": "tests/docs/test_readme.py checks the task",
    "# look.py": "tests/docs/test_readme.py plays it",
    "import mmrl\n\n\n@mmrl.reward": "tests/library trains with it",
    "from mmrl.tasks.gymnasium_worlds": "tests/tasks/test_gymnasium_worlds.py plays one made so",
}
"""How a program begins, and what runs it."""


def _options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def _script(words: list[str]) -> str | None:
    """None where a launch script takes these words, else what is wrong."""
    path = REPO / words[0]
    if not path.is_file():
        return f"{words[0]} does not exist"
    known = "".join(
        file.read_text(encoding="utf-8")
        for file in (path, REPO / "scripts/_launch.sh", REPO / "scripts/_launch_robot.sh")
    )
    unknown = [option for option in _options(words) if f"{option}" not in known]
    return f"{words[0]} does not know {unknown}" if unknown else None


def _module(words: list[str]) -> str | None:
    """None where `python -m MODULE ...` names a module that has these options in its text, else what is wrong."""
    found = importlib.util.find_spec(words[0])
    if found is None or found.origin is None:
        return f"there is no module {words[0]}"
    text = Path(found.origin).read_text(encoding="utf-8")
    unknown = [option for option in _options(words) if option not in text]
    return f"{words[0]} does not know {unknown}" if unknown else None


def _pip(words: list[str]) -> str | None:
    extras = {name for word in words for name in re.findall(r"[\w-]+", word.partition("[")[2])}
    return f"unknown extras {extras - set(EXTRAS)}" if extras - set(EXTRAS) else None


def wrong_with(page: str, line: str) -> str | None:
    """None for a line that can be typed as it stands, else what is wrong with it."""
    if (page, line) in LINES or (page, re.sub(r"\s+", " ", line)) in LINES:
        return None
    if line.startswith("{"):
        return None if json.loads(line) else "an empty row"
    words = shlex.split(line)
    if words[0] == "make":
        target = re.search(
            rf"^{words[1]}:", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
        return None if target else f"make has no {words[1]}"
    if words[0] == "bash":
        return _script(words[1:])
    if words[:2] == ["python", "-m"]:
        return _module(words[2:])
    if words[:2] == ["pip", "install"]:
        return _pip(words)
    if words[:2] == ["git", "clone"]:
        return None
    # a map of folders
    if words[0].endswith("/") and (REPO / words[0]).is_dir():
        return None
    return "nothing that a test knows"


def test_there_are_blocks_of_every_kind() -> None:
    kinds = {block.language for block in BLOCKS}
    assert {"", "python", "yaml"} <= kinds and len(BLOCKS) > 50
    assert sum(bool(block.not_run) for block in BLOCKS) < 8, "few are left to their word"


@pytest.mark.parametrize(("page", "line"), sorted(set(commands())))
def test_a_command_can_be_typed_as_it_stands(page: str, line: str) -> None:
    assert wrong_with(page, line) is None


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "python"], ids=lambda b: f"{b.page}:{b.text[:12]}"
)
def test_a_program_is_run_by_a_test_or_says_why_not(block: Block) -> None:
    if block.not_run:
        compile(block.text, block.page, "exec")
        assert len(block.not_run) > 20
        return
    assert any(block.text.startswith(begin) for begin in PYTHON), (block.page, block.text[:60])
    twins = {b.text for b in BLOCKS if b.text[:20] == block.text[:20] and not b.not_run}
    if not block.text.startswith("# parity.py"):
        assert len(twins) == 1, "the same program on two pages: the test runs one of them"


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "yaml"], ids=lambda b: f"{b.page}"
)
def test_settings_are_accepted(block: Block, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(block.text, encoding="utf-8")
    settings = yaml.safe_load(block.text)
    assert settings
    if "env" in settings:
        assert load_embodied(str(tmp_path / "run.yaml"), [])
    else:
        assert load_config(tmp_path / "run.yaml")


def test_other_fences_say_why_they_are_not_run() -> None:
    for block in BLOCKS:
        if block.language not in ("", "python", "yaml"):
            assert len(block.not_run) > 20, (block.page, block.text[:60])


@pytest.mark.parametrize(
    "line",
    [
        "mmrl trian grounding",
        "make everything",
        "bash scripts/train_grounding.sh --modle x",
        "bash scripts/train_nothing.sh",
        "python -m scripts.bench_turns --fast",
        "python -m scripts.bench_nothing",
        "pip install -e '.[vide]'",
        "frobnicate --now",
    ],
)
def test_wrong_commands_are_seen(line: str) -> None:
    assert wrong_with("README.md", line) is not None
