"""The README's numbers equal the result files, and the commands and files it names exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from mmrl.types import Sample, StopReason, Turn
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


def test_rows_in_the_readme_can_be_read(tmp_path: Path) -> None:
    from mmrl.tasks.frame_clips import draw_square_clip
    from mmrl.tasks.mixed import Mixed

    rows = [json.loads(line) for line in re.findall(r"^    (\{.*\})$", README, re.MULTILINE)]
    assert {row.get("task") for row in rows} == {None, "choice", "temporal_grounding", "tracking"}
    clip = draw_square_clip(tmp_path / "k.mp4", "red", (1, 3), 4.0)
    Image.new("RGB", (200, 200)).save(tmp_path / "kitchen.jpg")
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"task": "grounding", **row}) + "\n" for row in rows), encoding="utf-8"
    )
    samples = list(Mixed().load(str(tmp_path / "rows.jsonl")))
    assert [s.videos for s in samples if s.videos] == [(clip.folder,)] * 3 and len(samples) == len(
        rows
    ) == 4


def test_recipes_in_the_readme_exist_and_their_options_are_known() -> None:
    commands = re.findall(
        r"^    (?:bash (scripts/train_\w+\.sh)|mmrl train (configs/\w+\.yaml)) (.*)$",
        README,
        re.MULTILINE,
    )
    assert len(commands) >= 9
    for script, recipe, arguments in commands:
        assert (ROOT / (script or recipe)).is_file(), script or recipe
        used = set(re.findall(r"--\w+", arguments.partition("#")[0]))
        known = {
            "--model",
            "--data",
            "--eval",
            "--images",
            "--videos",
            "--tasks",
            "--suite",
            "--demos",
            "--assets",
        }
        assert used <= known and (bool(used) == bool(script))


def test_lines_for_ppo_set_all_that_their_recipes_need() -> None:
    from mmrl.cli.run import run_config
    from mmrl.config.shipped import recipe_file

    lines = re.findall(
        r"^    .*algorithm\.advantage=gae.*$", README.replace("\\\n", " "), re.MULTILINE
    )
    assert len(lines) == 2
    for line in lines:
        named = re.search(r"(?:mmrl train |scripts/train_)(\w+)", line)
        assert named is not None
        settings = re.findall(r"[a-z][\w.]+=\S+", line.partition(" # ")[0])
        config = run_config(recipe_file(named[1]), settings)
        assert config.algorithm.advantage == "gae", line


def test_the_environment_in_the_readme_looks_and_pays(tmp_path: Path) -> None:
    code = re.search(r"```python\n# look.py\n(.*?)```", README, re.DOTALL)
    assert code is not None
    look: dict[str, Any] = {}
    exec(code.group(1), look)
    Image.new("RGB", (56, 28), "red").save(tmp_path / "cup.png")
    sample = Sample("1", "look", "s", "Which colour?", "red", images=(str(tmp_path / "cup.png"),))

    def play(*texts: str) -> list[Any]:
        world = look["Look"]()
        world.reset(sample, 0)
        return [world.step(Turn((1,), text, (0.0,), StopReason.EOS)) for text in texts]

    first, last = play("left", "red")
    assert first.observation.images[0].shape == (28, 28, 3) and not first.ended
    assert (last.reward, last.terminated, play("red")[0].reward) == (1.0, True, 0.0)


def test_the_legend_of_the_robots_methods_says_which_has_another_reward() -> None:
    from scripts.bench_robot_learning import VARIANTS

    legend = BLOCKS["robot_algorithms"]()
    for name, overrides in VARIANTS.items():
        for reward in (o.partition("=")[2] for o in overrides if o.startswith("rl.reward=")):
            assert f"for {name} {reward}" in " ".join(legend.split())


@pytest.mark.parametrize("name", ["cache", "video", "tgrpo", "torture"])
def test_a_missing_result_is_said(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.update_readme.ROOT", tmp_path)
    assert re.match(
        r"No number has been recorded yet; `python -m scripts\.\w+( --record)?` measures\.$",
        BLOCKS[name](),
    )


def test_example_task_in_the_readme_keeps_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmrl.diagnostics.conformance import check_task

    code = re.search(r"```python\n# parity.py\n(.*?)```", README, re.DOTALL)
    assert code is not None
    (tmp_path / "parity.py").write_text(code.group(1), encoding="utf-8")
    (tmp_path / "numbers.txt").write_text("".join(f"{n}\n" for n in range(12)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    result = check_task(
        f"{tmp_path / 'parity.py'}:Parity", str(tmp_path / "numbers.txt"), out=str(tmp_path / "out")
    )
    assert result.ok, [finding for finding in result.findings if not finding.ok]
