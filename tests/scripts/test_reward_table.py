"""Presets give what their papers' own code gave for the same completions, and every difference is named.

assets/fixtures/peers holds the peers' values, recorded by scripts/record_peers.py from their repositories. A changed reward that is
meant: python -m scripts.reward_table, and read the difference of assets/results/reward_table.md.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import reward_table
from scripts._parity import Value
from scripts._peer_code import REPOSITORIES, load
from scripts._peer_verdicts import DEFECT, verdict
from scripts.reward_table import Block

PUBLISHED = ("has that number",)
"""What a verdict says where a setting of the preset gives the published value."""


@pytest.fixture(scope="module")
def found() -> list[Block]:
    # these ask a verifier process
    return [block for block in reward_table.blocks() if not block.fixture.name.startswith("math")]


@pytest.mark.slow
def test_every_difference_is_named_and_nearly_all_are_equal(found: list[Block]) -> None:
    wrong = [
        line for line in reward_table.problems(found) if "preset without a row: math:" not in line
    ]
    assert wrong == []
    numbers = reward_table.totals(found)
    assert numbers["completions"] >= 1400 and numbers["presets"] >= 36
    assert numbers["equal_share"] >= 0.96


def test_each_preset_has_completions_enough_and_a_right_one_is_paid_in_full(
    found: list[Block],
) -> None:
    for block in found:
        assert len(block.values) >= 30 and block.counts["equal"] >= 0.5 * len(block.values), (
            block.fixture.name
        )
        right = next(
            v for v in block.values if v.what in ("the right answer", "both right", "in the middle")
        )
        assert right.equal and right.ours[1] > 0, block.fixture.name
        repository, commit = REPOSITORIES[
            next(n for n, (r, _) in REPOSITORIES.items() if r == block.fixture.head["repository"])
        ]
        assert (block.fixture.head["repository"], block.fixture.head["commit"]) == (
            repository,
            commit,
        )


def test_published_settings_give_the_published_number(found: list[Block]) -> None:
    switched = [
        v
        for block in found
        for v in block.values
        if not v.equal
        and any(
            words in (verdict(block.fixture.name, v.what) or ("", ""))[1] for words in PUBLISHED
        )
    ]
    given = [v for v in switched if v.switch_gives_it]
    assert len(given) >= 35 and len(given) >= 0.75 * len(switched)
    for block in found:
        if block.fixture.head["published"]:
            assert sum(v.switch_gives_it for v in block.values) >= 0.6 * len(block.values), (
                block.fixture.name
            )


@pytest.mark.slow
def test_math_presets_too() -> None:
    blocks = reward_table.blocks("math")
    assert (
        len(blocks) == 3
        and [line for line in reward_table.problems(blocks) if "verdict" in line] == []
    )


@pytest.mark.slow
def test_the_committed_table_is_this_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reward_table.main(["--out", str(tmp_path)]) == 0, capsys.readouterr().err
    for name in ("reward_table.json", "reward_table.md"):
        committed = (reward_table.RESULTS / name).read_text(encoding="utf-8")
        assert (tmp_path / name).read_text(encoding="utf-8") == committed, (
            "run python -m scripts.reward_table"
        )
    table = json.loads((tmp_path / "reward_table.json").read_text(encoding="utf-8"))
    assert table["equal_share"] >= 0.95 and not any(
        "unnamed" in row["counts"] for row in table["table"]
    )


def test_a_wrong_value_is_noticed(found: list[Block]) -> None:
    block = next(b for b in found if b.fixture.name == "grounding:vlm_r1")
    good = block.values[0]
    bad = Value(good.what, good.text, good.peer, (good.ours[0], good.ours[1] + 1e-5), None, None)
    assert (
        good.equal
        and not bad.equal
        and not Value(good.what, good.text, None, good.ours, None, None).equal
    )
    assert any(
        "has no verdict" in line for line in reward_table.problems([block._replace(values=(bad,))])
    )
    assert (verdict("detection:vlm_r1", "two answers, right then wrong") or ("",))[0] == DEFECT
    assert verdict("grounding:vlm_r1", "the right answer") is None


def test_the_loader_runs_what_a_file_says_and_no_more(tmp_path: Path) -> None:
    file = tmp_path / "peer.py"
    file.write_text(
        "import trainer_that_is_not_there\nfrom re import search\nX = missing()\nY = 2\n\nclass T:\n    @staticmethod\n"
        "    def reward(text):\n        return Y if search('a', text) else 0\n\nif __name__ == '__main__':\n"
        "    raise SystemExit\n"
    )
    assert load(file, ("reward",))["reward"]("cat") == 2
    with pytest.raises(KeyError, match="is the commit right"):
        load(file, ("punish",))
