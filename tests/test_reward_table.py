"""The reward table holds, is complete and is the committed one; and the peers' formulas in it are right by other means.

A changed reward that is meant: python -m scripts.reward_table, and read the difference of assets/results/reward_table.md.
"""
from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from mmrl.registry import BUILT_IN, resolve_task
from scripts import _peer_rules as peer
from scripts import reward_table
from scripts._reward_table_kit import DEFECTS, Case, score


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return reward_table.all_cases()


def test_it_holds_and_is_the_committed_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reward_table.main(["--out", str(tmp_path)]) == 0, capsys.readouterr().err
    for name in ("reward_table.json", "reward_table.md"):
        committed = (reward_table.RESULTS / name).read_text(encoding="utf-8")
        assert (tmp_path / name).read_text(encoding="utf-8") == committed, "run python -m scripts.reward_table"
    table = json.loads((tmp_path / "reward_table.json").read_text(encoding="utf-8"))
    assert table["rows"] == len(table["table"]) == sum(table["verdicts"].values()) and all(row["holds"] for row in table["table"])


def test_it_is_complete(cases: list[Case]) -> None:
    assert len(cases) >= 250
    presets = {f"{task}:{name}" for task in BUILT_IN for name in getattr(resolve_task(task), "presets", {})}
    assert len(presets) > 30 and presets <= {case.preset for case in cases}
    named = " ".join([*(case.reward for case in cases), *reward_table.NO_PEER])
    assert [task for task in BUILT_IN if task not in named] == []
    families = {family: [c for c in cases if c.family == family] for family in {case.family for case in cases}}
    assert len(families) >= 12 and min(map(len, families.values())) >= 5
    shown = {case.verdict.removeprefix("defect ") for case in cases}
    assert {"1", "2", "3", "4", "5", "6", "7", "14", "15", "16", "17", "19"} <= set(DEFECTS) <= shown
    assert all(case.why for case in cases if case.verdict != "equal")


def test_a_wrong_value_is_noticed(cases: list[Case]) -> None:
    good = next(c for c in cases if c.verdict == "equal")
    defect = next(c for c in cases if c.verdict == "defect 16")
    assert good.holds and defect.holds
    assert not dataclasses.replace(good, ours=good.ours + 1e-5).holds
    assert not dataclasses.replace(good, expected=None).holds
    assert not dataclasses.replace(defect, ours=defect.ours + 1e-5).holds
    assert not dataclasses.replace(defect, expected=defect.rule).holds, "no defect where the peer's value is ours"
    assert not dataclasses.replace(defect, rule=None).holds
    lines = reward_table.problems([dataclasses.replace(good, ours=2.0), good, good])
    assert any("ours 2" in line for line in lines) and any("given 3 times" in line for line in lines)
    assert any(line.startswith("preset without a row") for line in lines)
    assert any(line.startswith("defect without a row") for line in lines)


def test_a_broken_reward_ends_with_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("rewards.dynamic_iou.box_iou", lambda a, b: 0.5)
    assert reward_table.main(["--out", str(tmp_path)]) == 1
    assert "WRONG  grounding | grounding:vlm_r1 [accuracy] | equal boxes" in capsys.readouterr().err


def test_check_writes_nothing_and_wants_the_files(cases: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(reward_table, "all_cases", lambda: cases)
    assert reward_table.main(["--check"]) == 0
    assert reward_table.main(["--check", "--out", str(tmp_path)]) == 1
    assert "out of date" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_changed_preset_does_not_count_as_the_preset() -> None:
    assert score("ocr", "a", "a", preset="video_r1").preset == "ocr:video_r1"
    assert score("ocr", "a", "a", preset="video_r1", max_chars=10).preset == ""


def _scene(rng: np.random.Generator, count: int) -> list[tuple[str, tuple[float, ...]]]:
    corner, side = rng.integers(0, 30, (count, 2)), rng.integers(20, 60, (count, 2))
    return [(str(rng.choice(["a", "b"])), (float(x), float(y), float(x + w), float(y + h)))
            for (x, y), (w, h) in zip(corner, side, strict=True)]


def test_peer_ap_is_cocoeval(capsys: pytest.CaptureFixture[str]) -> None:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    rng = np.random.default_rng(0)
    for _ in range(20):
        predicted, true = _scene(rng, int(rng.integers(1, 5))), _scene(rng, int(rng.integers(1, 4)))
        names = sorted({label for label, _ in true})
        predicted = [item for item in predicted if item[0] in names]
        if not predicted:
            continue
        rows = [[{"image_id": 1, "category_id": names.index(label) + 1, "bbox": [b[0], b[1], b[2] - b[0], b[3] - b[1]],
                  "score": 1.0, "area": (b[2] - b[0]) * (b[3] - b[1]), "iscrowd": 0, "id": i + 1}
                 for i, (label, b) in enumerate(side)]
                for side in (predicted, true)]
        truth = COCO()
        truth.dataset = {"images": [{"id": 1}], "annotations": rows[1],
                         "categories": [{"id": i + 1, "name": name} for i, name in enumerate(names)]}
        truth.createIndex()
        scorer = COCOeval(truth, truth.loadRes(rows[0]), "bbox")
        scorer.evaluate()
        scorer.accumulate()
        scorer.summarize()
        assert peer.coco_ap(predicted, true) == pytest.approx(scorer.stats[0], abs=1e-9)
        assert peer.coco_ap(predicted, true, [0.5]) == pytest.approx(scorer.stats[1], abs=1e-9)
    capsys.readouterr()


def test_peer_texts_are_the_libraries() -> None:
    import jiwer
    from rapidfuzz.distance import Indel, Levenshtein
    from rouge_score.rouge_scorer import RougeScorer

    scorer, rng = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False), np.random.default_rng(1)
    for _ in range(40):
        a, b = (" ".join(rng.choice(["red", "cat", "on", "mat"], int(rng.integers(1, 7)))) for _ in range(2))
        assert peer.rouge_mean(a, b) == pytest.approx(sum(s.fmeasure for s in scorer.score(b, a).values()) / 3)
        assert peer.one_minus_wer(a, b) == pytest.approx(max(0.0, 1 - jiwer.wer(b, a)))
        assert peer.page_ocr(a, b) == pytest.approx(Levenshtein.normalized_distance(a, b))
        assert peer.levenshtein_ratio(a, b) == pytest.approx(Indel.normalized_similarity(a, b))
    stemmed = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True).score("dogs", "dog")
    assert sum(s.fmeasure for s in stemmed.values()) / 3 == pytest.approx(2 / 3), "the row about stemming"


def test_peer_matching_is_the_best_one() -> None:
    from scipy.optimize import linear_sum_assignment

    rng = np.random.default_rng(2)
    for _ in range(50):
        values = rng.random((int(rng.integers(1, 5)), int(rng.integers(1, 5)))) * (rng.random() < 0.7)
        pairs = peer.most_similar_pairs(lambda i, j, v=values: float(v[i, j]), *values.shape)  # type: ignore[misc]
        assert sum(values[p] for p in pairs) == pytest.approx(values[linear_sum_assignment(values, maximize=True)].sum())
        assert len({i for i, _ in pairs}) == len(pairs) == len({j for _, j in pairs})


def test_documented_values_of_peers() -> None:
    """Numbers that the sources state themselves."""
    assert [peer.mra(*pair) for pair in ((1, 2), (3, 4), (3, 2), (0, 5))] == [0.1, 0.6, 0.1, 0.0]
    assert [peer.dynamic_threshold(s) for s in (0.1, 0.1001, 0.25, 0.26, 1)] == [0.85, 0.95, 0.95, 0.99, 0.99]
    exact, missed = ("cat", (0, 0, 100, 100)), ("dog", (200, 0, 236, 100))
    assert peer.iou(missed[1], (200, 0, 300, 100)) == pytest.approx(0.36)
    assert peer.triune_overwritten([exact, missed], [exact, ("dog", (200, 0, 300, 100))], 0.5) == 1.0
    assert [peer.perception_r1_format(text) for text in ("<garbage", "object_ref_start", "x")] == [1, 1, 0]
    assert peer.vlm_r1_yes_no("yesterday", "yes") == peer.vlm_r1_yes_no("I do not know", "no") == 1
    assert peer.perception_r1_detection([exact], [exact]) == 3.0
    assert peer.overlong(18432, 20480, 4096) == -0.5 and peer.cosine(0, 1024, 1.0, 0.5) == 1.0
    assert peer.vlm_r1_iou((0, 0, 10, 10), (9, 0, 19, 10)) == 0 and peer.vlm_r1_iou((1, 1, 1, 1), (2, 2, 2, 2)) is None
