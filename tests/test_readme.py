"""The README's numbers equal the result files, and the commands and files it names exist."""
from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scripts.update_readme import BLOCKS, ROOT, rendered

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_numbers_come_from_result_files() -> None:
    assert set(re.findall(r"<!-- results:(\w+) -->", README)) == set(BLOCKS)
    assert rendered(README) == README, "run python -m scripts.update_readme"
    assert rendered(README.replace("mIoU", "m-IoU")) == README, "the check above can fail"


def test_linked_files_and_make_targets_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links and all((ROOT / link).exists() for link in links)
    targets = set(re.findall(r"^    make (\w+)", README, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets and all(re.search(rf"^{t}:", makefile, re.MULTILINE) for t in targets)


def test_documented_commands_exist() -> None:
    from mmrl.cli.main import app

    commands = set(re.findall(r"^    mmrl (\w+)", README, re.MULTILINE))
    assert {"eval", "score", "report", "tasks"} <= commands
    for command in commands:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0, command


def test_example_task_in_the_readme_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmrl.conformance import check_task

    code = re.search(r"```python\n# parity.py\n(.*?)```", README, re.DOTALL)
    assert code is not None
    (tmp_path / "parity.py").write_text(code.group(1), encoding="utf-8")
    (tmp_path / "numbers.txt").write_text("".join(f"{n}\n" for n in range(12)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    result = check_task(f"{tmp_path / 'parity.py'}:Parity", str(tmp_path / "numbers.txt"), out=str(tmp_path / "out"))
    assert result.ok, [finding for finding in result.findings if not finding.ok]
