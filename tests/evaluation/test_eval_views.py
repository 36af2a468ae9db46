"""eval.views: each sample that a view changes is asked again, and the paired gap is that of its rows."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from mmrl.config import load_config
from mmrl.errors import ConfigError
from mmrl.evaluation.evaluate import evaluate
from mmrl.evaluation.result import Evaluation, flat_metrics, write_evaluation
from mmrl.evaluation.settings import EvalSettings
from mmrl.evaluation.stats import paired_gain
from mmrl.evaluation.views import view_gaps
from mmrl.policy.policy import Policy
from mmrl.rollout import PrefillOnceEngine, SamplingSettings
from mmrl.rollout.views import VIEWS
from mmrl.workers.scorer import Scorer
from tests.kits.clip_kit import broken_clip, cached_policy, clip_sample, loaded, make_clip
from tests.kits.engine_kit import picture, read_jsonl


@functools.lru_cache
def shared_policy() -> Policy:
    """One for all tests; made when the first asks for it, not when the file is read."""
    return cached_policy(None)


def run(
    folder: Path, views: tuple[str, ...], *, greedy: bool = True, samples: int = 2, seed: int = 0
) -> Evaluation:
    """Two clips, a picture, text alone, a clip of one frame, and a clip that cannot be read."""
    source = loaded(
        clip_sample(0, make_clip(folder, "a")),
        clip_sample(1, make_clip(folder, "b")),
        clip_sample(2, images=[picture((112, 84))]),
        clip_sample(3),
        clip_sample(4, make_clip(folder, "one", 1)),
        clip_sample(5, broken_clip(folder)),
    )
    with Scorer([], [source.task], workers=0) as scorer:
        return evaluate(
            shared_policy(),
            PrefillOnceEngine(shared_policy()),
            scorer,
            [source],
            EvalSettings(
                SamplingSettings(max_new_tokens=8), samples, seed, greedy=greedy, views=views
            ),
        )


def test_a_view_is_asked_of_the_samples_it_changes_and_compared_with_their_plain_answers(
    tmp_path: Path,
) -> None:
    plain, found = run(tmp_path, ()), run(tmp_path, VIEWS)
    assert (
        found.predictions == plain.predictions
        and "views" not in plain.results
        and not plain.view_answers
    )
    assert {k: v for k, v in found.results.items() if k not in ("views", "protocol")} == {
        k: v for k, v in plain.results.items() if k != "protocol"
    }, "the plain numbers do not know of the views"
    assert found.results["protocol"]["views"] == list(VIEWS)
    seen = {"c0", "c1", "c2", "c4"}
    greedy = {
        r["id"]: r["score"]["metrics"].get("share", 0.0)
        for r in found.predictions
        if r["mode"] == "greedy"
    }
    expected = {"shuffle": {"c0", "c1"}, "mirror": seen, "mask": seen, "question_only": seen}
    flat = flat_metrics(found)
    for view, samples in expected.items():
        answers = {
            r["id"]: r["score"]["metrics"]["share"]
            for r in found.view_answers
            if r["mode"] == f"view/{view}"
        }
        before = {name: greedy[name] for name in samples}
        row = found.results["views"][view]
        assert set(answers) == samples and (row["n"], row["mode"]) == (len(samples), "greedy")
        assert row["changed"]["mean"] == pytest.approx(sum(answers.values()) / len(samples))
        assert row["plain"]["mean"] == pytest.approx(sum(before.values()) / len(samples))
        gap = paired_gain({k: [v] for k, v in answers.items()}, {k: [v] for k, v in before.items()})
        assert (
            gap is not None
            and row["gap"] == pytest.approx(vars(gap))
            and row["gap"]["low"] <= row["gap"]["mean"]
        )
        assert [flat[f"eval/view/{view}/{name}"] for name in ("changed", "plain", "gap")] == [
            row[name]["mean"] for name in ("changed", "plain", "gap")
        ]
    texts = {
        view: [
            r["text"]
            for r in found.view_answers
            if r["mode"] == f"view/{view}" and r["id"] in ("c0", "c1")
        ]
        for view in VIEWS
    }
    assert len({str(t) for t in texts.values()}) >= 3, "the policy reacts to what it is shown"


def test_views_repeat_with_the_seed_and_are_sampled_where_greedy_is_off(tmp_path: Path) -> None:
    first, again, other = (
        run(tmp_path, ("shuffle",), greedy=False, samples=3, seed=s) for s in (1, 1, 2)
    )
    assert first.view_answers == again.view_answers and first.results == again.results
    assert [r["text"] for r in first.view_answers] != [r["text"] for r in other.view_answers]
    row = first.results["views"]["shuffle"]
    assert (row["n"], row["mode"], row["gap"]["n"], len(first.view_answers)) == (
        2,
        "sampled",
        2,
        2 * 3,
    )
    mean = (
        sum(r["score"]["metrics"]["share"] for r in first.predictions if r["id"] in ("c0", "c1"))
        / 6
    )
    assert row["plain"]["mean"] == pytest.approx(mean)


def test_answers_in_views_are_written_beside_the_predictions(tmp_path: Path) -> None:
    found = run(tmp_path, ("mask",), samples=0)
    write_evaluation(found, tmp_path / "out")
    rows = read_jsonl(tmp_path / "out" / "views.jsonl")
    assert [(r["id"], r["mode"]) for r in rows] == [(f"c{n}", "view/mask") for n in (0, 1, 2, 4)]
    assert {r["mode"] for r in read_jsonl(tmp_path / "out" / "predictions.jsonl")} == {"greedy"}
    assert json.loads((tmp_path / "out" / "results.json").read_text())["views"]["mask"]["n"] == 4
    write_evaluation(run(tmp_path, (), samples=0), tmp_path / "plain")
    assert not (tmp_path / "plain" / "views.jsonl").exists()


def row(number: int, mode: str, share: float) -> dict[str, object]:
    return {
        "source": "s",
        "id": str(number),
        "mode": mode,
        "headline": "share",
        "score": {"metrics": {"share": share}},
    }


def test_a_gap_is_over_the_samples_of_its_view_and_a_view_without_samples_has_none() -> None:
    plain = [row(n, "greedy", 0.5 + n / 100) for n in range(20)] + [
        row(n, "sampled", 0.0) for n in range(20)
    ]
    changed = [row(n, "view/mask", 0.2 + n / 100) for n in range(5, 20)]
    found = view_gaps(plain, changed, ["mask", "shuffle"], 0)
    gap = found["mask"]["gap"]
    assert found["mask"]["n"] == 15 and gap["mean"] == pytest.approx(0.3)
    assert 0 < gap["low"] < 0.3 < gap["high"] < 0.5, "fifteen alike do not make it certain"
    assert found["mask"]["plain"]["mean"] == pytest.approx(0.5 + sum(range(5, 20)) / 1500), (
        "over the same samples"
    )
    assert found["shuffle"] == {"n": 0}


def test_an_unknown_view_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"eval\.views\.0.*'shuffle', 'mirror', 'mask' or 'question_only'.*found 'sufle'",
    ):
        load_config(None, ["eval.views=[sufle]"])
