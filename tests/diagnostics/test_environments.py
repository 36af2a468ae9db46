"""`mmrl env check`: every way to break the contract is found by the check that names it, and by no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import mmrl
from mmrl.diagnostics.environments import check_environment
from mmrl.errors import ConfigError, RegistryError
from mmrl.registry import task_from_spec
from tests.kits import faulty_environment
from tests.kits.engine_kit import REPO

pytestmark = pytest.mark.slow
SPEC = f"{faulty_environment.__file__}:Light"
FAULTS = {
    "": set(),
    "chance": {"same seed, same episode", "siblings do not meet", "another process, other order"},
    "hash": {"another process, other order"},
    "shared": {"siblings do not meet"},
    "thread": {"closes cleanly"},
    "pictures": {"episodes begin"},
    "junk": {"bad turns are answered"},
    "slow": {"turns are answered"},
    "unpaid": {"turns are answered", "bad turns are answered"},
    "mark": {"marks"},
    "range": {"rewards"},
    "headline": {"rewards"},
    "worse": {"the scripted player is better"},
}


def failed(found: Any) -> set[str]:
    return {finding.check for finding in found.findings if not finding.ok}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_by_its_own_check(fault: str, tmp_path: Path) -> None:
    found = check_environment(
        SPEC, params={"fault": fault} if fault else {}, out=tmp_path, episodes=2, timeout_s=0.5
    )
    assert failed(found) == FAULTS[fault], [f for f in found.findings if not f.ok]
    assert json.loads((tmp_path / "environment.json").read_text())["ok"] is (fault == "")
    if not fault:
        assert found.players["scripted"]["correct"] == 1 and found.players["random"]["correct"] == 0
        assert found.players["junk"]["truncated"] > 0 and found.speed["steps_per_s"] > 0
        drawn = [Path(p) for p in found.pictures]
        assert len(drawn) == 4, "two samples, a scripted and a random player"
        with Image.open(drawn[0]) as strip:
            pixels = strip.convert("RGB").getcolors(1 << 20) or []
        assert (230, 30, 90) in {colour for _, colour in pixels}, "the mark of the crop"


def test_an_environment_is_a_task_by_each_of_three_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"id": "a", "question": "which\u2028one", "images": ["p.png"], "seed": 5}\n',
        encoding="utf-8",
    )
    site = tmp_path / "site"
    info = site / "lamps-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lamps\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[mmrl.tasks]\nlight = tests.kits.faulty_environment:Light\n"
    )
    monkeypatch.syspath_prepend(str(site))
    template = mmrl.Template("", mmrl.CoordFrame.ABS_ORIG)
    for spec in (SPEC, "lamps/light"):
        task = task_from_spec(spec, {"fault": "range"})
        (sample,) = task.load(str(tmp_path / "rows.jsonl"))
        assert sample.question == "which\u2028one" and sample.params == {"seed": 5}
        assert sample.images == (str(tmp_path / "p.png"),)
        environment: Any = task.environment(template)
        assert environment.fault == "range" and task.headline == "correct"
        assert environment.reset(sample, 1).images[0].shape == (56, 56, 3)
    shipped = task_from_spec("browser").environment(template)
    assert shipped is not None and shipped.max_turns == 10, "the third: a name that is built in"


@pytest.mark.parametrize(
    "spec, params, says",
    [
        (SPEC, {"falt": "x"}, r"unexpected keyword argument 'falt'.*Did you mean 'fault'\?"),
        (SPEC.replace(":Light", ":Unfinished"), {}, "without step"),
        ("grounding", {}, "rollouts end after one answer; check it with `mmrl tasks check"),
    ],
)
def test_what_cannot_be_played_is_refused(
    spec: str, params: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        check_environment(spec, params=params, out=tmp_path)


def test_a_wrong_name_says_which_environments_the_file_has(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=r"Did you mean 'Light'\? Tasks in it: Light"):
        check_environment(SPEC.replace(":Light", ":Lihgt"), out=tmp_path)


def test_the_example_passes(tmp_path: Path) -> None:
    rows = [{"id": str(i), "quarter": i, "answer": "red"} for i in range(2)]
    (tmp_path / "zoom.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    spec = f"{REPO / 'examples' / 'zoom.py'}:Zoom"
    assert failed(check_environment(spec, tmp_path / "zoom.jsonl", out=tmp_path)) == set()
