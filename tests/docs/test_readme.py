"""The numbers of the README and docs/ equal the result files, links lead somewhere, and their programs run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmrl import registry
from mmrl.types import Sample, StopReason, Turn
from scripts.update_readme import BLOCKS, ROOT, rendered
from tests.docs.pages_kit import TEXT, Block, blocks

README = TEXT["README.md"]
ALL = "\n".join(TEXT.values())


def test_numbers_come_from_result_files() -> None:
    placed = [name for text in TEXT.values() for name in _block_names(text)]
    assert set(placed) == set(BLOCKS)
    # the demo and the comparison with TRL stand on two pages
    assert {name for name in placed if placed.count(name) > 1} == {"demo", "trl", "install"}
    for page, text in TEXT.items():
        assert rendered(text) == text, f"{page}: run python -m scripts.update_readme"
    assert rendered(README.replace("mIoU", "m-IoU")) == README, "the check above can fail"


def _block_names(text: str) -> list[str]:
    return re.findall(r"<!-- results:(\w+) -->", text)


def test_the_readme_is_the_first_minute() -> None:
    assert len(README.encode()) <= 10_000 and "docs/quickstart.md" in README
    pages = {page for page in TEXT if page.startswith("docs/")}
    linked = set(re.findall(r"\]\((docs/[\w/-]+\.md)\)", README))
    assert linked <= pages and len(linked) > 15


@pytest.mark.parametrize("page", sorted(TEXT))
def test_links_and_anchors_lead_somewhere(page: str) -> None:
    plain = re.sub(r"^```.*?^```|`[^`\n]+`", "", TEXT[page], flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(#[^)\s]*)?\)", plain):
        path = ((ROOT / page).parent / target).resolve() if target else ROOT / page
        assert path.exists(), (page, target)
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor[1:] in {_slug(heading) for heading in headings}, (page, target, anchor)


def _slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and mkdocs make it for headings of letters, digits and blanks."""
    return re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")


def test_rows_in_the_readme_can_be_read(tmp_path: Path) -> None:
    from mmrl.tasks.frame_clips import draw_square_clip
    from mmrl.tasks.mixed import Mixed

    rows = [
        json.loads(line) for line in dict.fromkeys(re.findall(r"^    (\{.*\})$", ALL, re.MULTILINE))
    ]
    tasks = {None, "choice", "temporal_grounding", "tracking", "open_text"}
    assert {row.get("task") for row in rows} == tasks
    clip = draw_square_clip(tmp_path / "k.mp4", "red", (1, 3), 4.0)
    Image.new("RGB", (200, 200)).save(tmp_path / "kitchen.jpg")
    sound = tmp_path / "sounds" / "8.flac"
    sound.parent.mkdir()
    sound.touch()
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"task": "grounding", **row}) + "\n" for row in rows), encoding="utf-8"
    )
    samples = list(Mixed().load(str(tmp_path / "rows.jsonl")))
    assert [s.videos for s in samples if s.videos] == [(clip.folder,)] * 3
    assert [s.audios for s in samples if s.audios] == [(str(sound),)]
    assert len(samples) == len(rows) == 5


def test_recipes_in_the_readme_exist_and_their_options_are_known() -> None:
    commands = re.findall(
        r"^    (?:bash (scripts/train_\w+\.sh)|mmrl train (configs/\w+\.yaml)) (.*)$",
        ALL,
        re.MULTILINE,
    )
    assert len(commands) >= 15
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
        r"^    .*algorithm\.advantage=gae.*$", ALL.replace("\\\n", " "), re.MULTILINE
    )
    assert len(lines) == 2
    for line in lines:
        named = re.search(r"(?:mmrl train |scripts/train_)(\w+)", line)
        assert named is not None
        settings = re.findall(r"[a-z][\w.]+=\S+", line.partition(" # ")[0])
        config = run_config(recipe_file(named[1]), settings)
        assert config.algorithm.advantage == "gae", line


def test_the_environment_in_the_readme_looks_and_pays(tmp_path: Path) -> None:
    code = re.search(r"```python\n# look.py\n(.*?)```", ALL, re.DOTALL)
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


PARITY = [
    block
    for page in TEXT
    for block in blocks(page)
    if block.language == "python" and block.text.startswith("# parity.py")
]


@pytest.mark.parametrize("block", PARITY, ids=lambda block: block.page)
def test_the_example_task_keeps_the_contract(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmrl.diagnostics.conformance import check_task

    (tmp_path / "parity.py").write_text(block.text, encoding="utf-8")
    (tmp_path / "numbers.txt").write_text("".join(f"{n}\n" for n in range(12)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    # two pages have a task of this name; a process knows one
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    registry._registered.pop("parity", None)
    result = check_task(
        f"{tmp_path / 'parity.py'}:Parity", str(tmp_path / "numbers.txt"), out=str(tmp_path / "out")
    )
    assert result.ok, [finding for finding in result.findings if not finding.ok]
    assert len(PARITY) == 2
