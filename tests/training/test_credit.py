"""From groups to advantages: what is compared, in which scale, the same however the groups are spread over processes."""

from __future__ import annotations

import inspect
import json
import math
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mmrl import _torchvision_cpu
from mmrl.algorithms.group_rewards import GroupOutcome, group_outcome, training_parts
from mmrl.config import RunConfig, load_config
from mmrl.errors import ConfigError, RewardError
from mmrl.training.advice import remarks
from mmrl.training.group_advantages import GroupAdvantages, accuracy_level, part_weights
from mmrl.types import Rollout, RolloutGroup, Sample, Score, StopReason, Turn
from tests.kits.medley_task import Medley

FAILURE = "reward_error: broken"


class Process:
    """One of several processes that exchange what they gather, run one after another: every rank hands in its items, then
    every rank gets all of them. Only World.gather is used by GroupAdvantages."""

    def __init__(self, everything: list[Any]) -> None:
        self.everything = everything

    def gather(self, items: list[Any]) -> list[Any]:
        self.everything += items
        return self.everything


def score(
    parts: dict[str, float], weights: dict[str, float] | None = None, **options: Any
) -> Score:
    return Score.combine(parts, weights or {"accuracy": 0.9, "style": 0.1}, parsed=True, **options)


def group(
    place: int, scores: list[Score], task: str = "t", lengths: list[int] | None = None
) -> RolloutGroup:
    lengths = lengths or [3] * len(scores)
    turns = [Turn((1,) * n, "x", (0.0,) * n, StopReason.EOS) for n in lengths]
    trajectories = tuple(Rollout((c,), s) for c, s in zip(turns, scores, strict=True))
    return RolloutGroup(
        Sample(f"s{place}", task, "src", "?", None), trajectories, key=(1, place, 0)
    )


def random_groups(count: int = 5, size: int = 4) -> list[RolloutGroup]:
    rng = np.random.default_rng(0)
    return [
        group(
            i,
            [score({"accuracy": a, "style": b}) for a, b in rng.random((size, 2))],
            task=f"t{i % 2}",
            lengths=rng.integers(1, 9, size).tolist(),
        )
        for i in range(count)
    ]


def settings(*overrides: str) -> RunConfig:
    return load_config(None, list(overrides))


def advantages(groups: list[RolloutGroup], *overrides: str) -> dict[Any, tuple[float, ...]]:
    return GroupAdvantages(settings(*overrides), Process([])).assign(groups)  # type: ignore[arg-type]


VARIANTS = [
    (),
    ("algorithm.advantage_scale=none",),
    ("algorithm.advantage_scale=batch",),
    ("algorithm.advantage_scale=ema",),
    ("algorithm.advantage_scale=batch_rewards",),
    ("algorithm.advantage_scale=ema_within",),
    ("algorithm.advantage=rloo", "algorithm.advantage_scale=none"),
    ("algorithm.advantage=pass_k",),
    ("algorithm.advantage=opo", "algorithm.advantage_scale=batch"),
    ("algorithm.reward_aggregation=gdpo",),
    ("algorithm.difficulty=univg_exp",),
    ("algorithm.difficulty=softmax",),
    ("algorithm.reward_aggregation=gdpo", "algorithm.difficulty=univg_log"),
]


@pytest.mark.parametrize(
    "overrides", VARIANTS, ids=lambda v: " ".join(v).replace("algorithm.", "") or "default"
)
def test_two_processes_compute_what_one_does(overrides: tuple[str, ...]) -> None:
    groups = random_groups()
    whole = advantages(groups, *overrides)
    config = settings(*overrides)
    everything: list[Any] = []
    first, second = (GroupAdvantages(config, Process(everything)) for _ in range(2))  # type: ignore[arg-type]
    if not first.needs_whole_step:
        assert {**first.assign(groups[::2]), **second.assign(groups[1::2])} == whole
        return
    everything += [second._view(g) for g in groups[1::2]]
    assert first.assign(groups[::2]) == {g.key: whole[g.key] for g in groups[::2]}


def test_by_default_they_are_grpos() -> None:
    for g, found in zip(random_groups(), advantages(random_groups()).values(), strict=True):
        r = np.array(g.rewards_G)
        assert found == pytest.approx(((r - r.mean()) / (r.std(ddof=1) + 1e-6)).tolist(), rel=1e-5)


def test_gdpo_sums_normalised_parts_and_whitens_over_the_step() -> None:
    groups = random_groups()
    sums = []
    for g in groups:
        total = 0.0
        for name, weight in (("accuracy", 0.9), ("style", 0.1)):
            x = np.array([t.score.parts[name] for t in g.rollouts])  # type: ignore[union-attr]
            total = total + weight * (x - x.mean()) / (x.std(ddof=1) + 1e-6)
        sums.append(total)
    flat = np.concatenate(sums)
    naive = (flat - flat.mean()) / (flat.std(ddof=1) + 1e-6)
    found = np.concatenate(list(advantages(groups, "algorithm.reward_aggregation=gdpo").values()))
    assert found == pytest.approx(naive, rel=1e-4)


def test_batch_scale_is_what_verl_computes_for_reinforce_plus_plus_baseline() -> None:
    told = json.loads((Path(__file__).parent / "peer_batch_scale.json").read_text(encoding="utf-8"))
    weights = {"accuracy": 1.0}
    groups = [
        group(i, [score({"accuracy": r}, weights) for r in g]) for i, g in enumerate(told["groups"])
    ]
    found = advantages(groups, "algorithm.advantage_scale=batch")
    for g, expected in zip(groups, told["reinforce_plus_plus_baseline"], strict=True):
        assert found[g.key] == pytest.approx(expected, abs=2e-5)


@pytest.mark.slow
def test_batch_rewards_scale_is_trls_batch() -> None:
    """TRL's own lines, on the same rewards."""
    _torchvision_cpu.install()  # TRL imports torchvision, which beside a CPU torch needs help
    trl = pytest.importorskip("trl.trainer.grpo_trainer")
    source = inspect.getsource(trl.GRPOTrainer._generate_and_score_completions)
    lines = source[source.index("mean_grouped_rewards = torch.nanmean(") :]
    lines = lines[: lines.index("is_std_zero = ")]
    groups = random_groups()
    names = {
        "torch": torch,
        "nanstd": trl.nanstd,
        "self": SimpleNamespace(scale_rewards="batch"),
        "num_generations": 4,
        "rewards": torch.tensor([g.rewards_G for g in groups], dtype=torch.float64).flatten(),
    }
    exec(textwrap.dedent(" " * 12 + lines), names)
    found = np.concatenate(
        list(advantages(groups, "algorithm.advantage_scale=batch_rewards").values())
    )
    assert found == pytest.approx(names["advantages"].numpy(), rel=1e-6)
    easy, hard = (
        [score({"accuracy": a, "style": 0.0}) for a in accuracy]
        for accuracy in ((0.95, 1.0), (0.0, 0.05))
    )
    spread = {
        scale: max(
            advantages([group(0, easy), group(1, hard)], f"algorithm.advantage_scale={scale}")[
                1, 0, 0
            ]
        )
        for scale in ("batch", "batch_rewards")
    }
    assert spread["batch"] > 10 * spread["batch_rewards"], "whose std it is makes the difference"


def test_batch_scale_divides_by_the_std_of_what_the_baseline_leaves() -> None:
    groups = random_groups()
    flat = np.concatenate([np.array(g.rewards_G) - np.mean(g.rewards_G) for g in groups])
    found = np.concatenate(list(advantages(groups, "algorithm.advantage_scale=batch").values()))
    assert found == pytest.approx((flat - flat.mean()) / flat.std(ddof=1), rel=1e-4)


def test_pass_k_pays_the_best_in_the_groups_std() -> None:
    g = group(0, [score({"accuracy": a, "style": 0.0}) for a in (0.2, 0.8, 0.5)])
    std = np.std([0.18, 0.72, 0.45], ddof=1)
    assert advantages([g], "algorithm.advantage=pass_k")[g.key] == (
        0.0,
        pytest.approx((0.72 - 0.45) / (std + 1e-6)),
        0.0,
    )


def test_completions_whose_reward_failed_are_no_part_of_it() -> None:
    scores = [score({"accuracy": a, "style": 0.0}) for a in (0.0, 1.0)]
    whole = group(0, [scores[0], Score.failure(FAILURE, ("accuracy", "style")), scores[1]])
    for overrides in VARIANTS:
        found = advantages([whole], *overrides)[whole.key]
        alone = advantages([group(0, scores)], *overrides)[whole.key]
        assert found == (alone[0], 0.0, alone[1]), overrides


def test_difficulty_multiplies_a_groups_advantages_by_its_own_mean_accuracy() -> None:
    hard = group(0, [score({"accuracy": a, "style": 1.0}) for a in (0.0, 0.2)])
    easy = group(1, [score({"accuracy": a, "style": 1.0}) for a in (0.8, 1.0)])
    plain, weighted = (
        advantages([hard, easy]),
        advantages([hard, easy], "algorithm.difficulty=univg_exp"),
    )
    for g, m in ((hard, 0.1), (easy, 0.9)):
        assert weighted[g.key] == pytest.approx([math.exp(1 - m) * a for a in plain[g.key]])
    assert advantages([easy], "algorithm.difficulty=univg_exp")[easy.key] == weighted[easy.key], (
        "whatever else is in the step"
    )


def test_the_accuracy_of_a_group_is_the_part_else_the_headline_else_the_value() -> None:
    with_part = group(
        0,
        [score({"accuracy": 0.4, "style": 0.0}), Score.failure("no_answer", ("accuracy", "style"))],
    )
    assert accuracy_level(with_part, "correct") == 0.2, (
        "a text that could not be parsed counts as 0"
    )
    other = {"iou": 1.0}
    headline = group(
        0, [score({"iou": v}, other, metrics={"correct": c}) for v, c in ((0.6, 1.0), (0.2, 0.0))]
    )
    assert accuracy_level(headline, "correct") == 0.5 and accuracy_level(
        headline, "reward"
    ) == pytest.approx(0.4)
    assert accuracy_level(group(0, [Score.failure(FAILURE)]), "correct") == 0.0


def test_gdpo_refuses_missing_parts_and_weights_that_differ() -> None:
    lacking = group(0, [score({"accuracy": 1.0, "style": 1.0}), Score.failure("no_answer")])
    with pytest.raises(RewardError, match="part 'accuracy' on every completion"):
        advantages([lacking], "algorithm.reward_aggregation=gdpo")
    zero = group(
        0,
        [score({"accuracy": 1.0, "style": 1.0}), Score.failure("no_answer", ("accuracy", "style"))],
    )
    assert advantages([zero], "algorithm.reward_aggregation=gdpo")[zero.key][0] > 0, (
        "a plain failure has its parts, without weights"
    )
    with pytest.raises(RewardError, match="the same part weights for all completions of sample s9"):
        part_weights([{"a": 1.0}, {"a": 0.0}, {"a": 0.5}], "s9")


def test_gdpo_sees_signal_where_the_sum_has_none() -> None:
    even = {"accuracy": 0.5, "style": 0.5}
    opposed = group(
        0,
        [
            score({"accuracy": 1.0, "style": 0.0}, even),
            score({"accuracy": 0.0, "style": 1.0}, even),
        ],
    )
    assert group_outcome(opposed, settings(), Medley()) == GroupOutcome(
        opposed.key, [0.5, 0.5], judged=[1.0, 0.0], signal=False
    )
    assert (
        group_outcome(opposed, settings("algorithm.reward_aggregation=gdpo"), Medley()).signal
        is True
    )
    assert group_outcome(opposed, settings(), Medley(bonus=0.5)).high == 1.5


class Members(Medley):
    """A task of members with ranges of their own, as mmrl.tasks.mixed is."""

    def __init__(self) -> None:
        super().__init__(bonus=2.0)

    def member(self, name: str) -> Medley:
        return Medley(bonus={"t": 0.0, "wide": 0.5}[name])


def test_the_range_of_a_mixed_task_is_that_of_the_samples_own_task() -> None:
    for name, high in (("t", 1.0), ("wide", 1.5)):
        g = group(0, [score({"accuracy": 1.0, "style": 1.0})] * 2, task=name)
        assert group_outcome(g, settings(), Members()).high == high


def test_the_shuffle_control_and_the_overlong_penalty_reach_the_parts() -> None:
    g = group(
        0,
        [score({"accuracy": a, "style": 0.0}) for a in (0.0, 0.25, 0.5, 0.75)],
        lengths=[1, 2, 7, 10],
    )
    soft = (
        "algorithm.overlong=soft",
        "rollout.max_new_tokens=10",
        "algorithm.overlong_buffer=4",
        "algorithm.overlong_weight=0.5",
    )
    parts, weights = training_parts(g, settings(*soft))
    assert [p["overlong"] for p in parts] == [0, 0, -0.25, -1] and all(
        w["overlong"] == 0.5 for w in weights
    )
    shuffled, _ = training_parts(g, settings("reward.shuffle=true"))
    assert sorted(p["accuracy"] for p in shuffled) == [0.0, 0.25, 0.5, 0.75]
    assert shuffled == training_parts(g, settings("reward.shuffle=true"))[0]


def test_ema_is_kept_per_task_or_source_and_logged() -> None:
    groups = random_groups()
    for by, names in (("task", {"t0", "t1"}), ("source", {"src"})):
        estimator = GroupAdvantages(
            settings("algorithm.advantage_scale=ema", f"algorithm.ema.by={by}"), Process([])
        )  # type: ignore[arg-type]
        estimator.assign(groups)
        assert {k.split("/")[2] for k in estimator.metrics()} == names | {"fallbacks"}
    assert estimator.metrics()["train/ema/src/std"] == pytest.approx(
        np.std([g.rewards_G for g in groups])
    ), "of all rewards"
    within = GroupAdvantages(
        settings("algorithm.advantage_scale=ema_within", "algorithm.ema.by=source"), Process([])
    )  # type: ignore[arg-type]
    within.assign(groups)
    stds = [np.std(g.rewards_G, ddof=1) for g in groups]
    assert within.metrics()["train/ema/src/std"] == pytest.approx(np.mean(stds)), (
        "of each group, averaged"
    )
    other = GroupAdvantages(estimator.config, Process([]))  # type: ignore[arg-type]
    other.load_state_dict(estimator.state_dict())
    assert other.state_dict() == estimator.state_dict()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["algorithm.advantage=rloo"],
            "advantage rloo is defined with algorithm.advantage_scale none or batch, found std",
        ),
        (
            ["algorithm.advantage=pass_k", "algorithm.advantage_scale=ema"],
            "pass_k is defined with .* std, found ema",
        ),
        (
            ["algorithm.reward_aggregation=gdpo", "algorithm.advantage_scale=none"],
            "gdpo normalises by itself",
        ),
        (["algorithm.advantage=grop"], "'grpo', 'rloo', 'opo', 'pass_k' or 'gae'"),
        (["algorithm.ema.decay=1"], "less than 1"),
        (["algorithm.ema.beta=1"], "unknown key 'algorithm.ema.beta'"),
        (["algorithm.difficulty=hard"], "'univg_exp'"),
        (
            ["data.selection=variance", "algorithm.dynamic_sampling=false"],
            "needs algorithm.dynamic_sampling true",
        ),
        (["data.selection=varianc"], "'none', 'variance' or 'std'"),
        (
            ["data.selection={kind: variance, threshold: 2}"],
            r"relative: expected \[0, 1\]\), found 2",
        ),
        (["data.selection.kappa=1"], "Known here: kind, threshold"),
        (["algorithm.kl.estimator=k1"], "is 0 in expectation, so that only noise is added; use k3"),
        (["algorithm.difficulty=dgrpo"], "is called softmax now: it is a formula of mmrl's own"),
        (
            ["algorithm.advantage=rloo", "algorithm.advantage_scale=batch_rewards"],
            "rloo is defined with .* none or batch, found",
        ),
    ],
)
def test_combinations_that_mean_nothing_are_refused_on_load(
    overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(*overrides)


def test_selection_may_be_written_short() -> None:
    assert (
        settings("data.selection=std").data.selection.kind == "std"
        and settings().data.selection.kind == "none"
    )


def test_gspo_brings_its_own_clip_range_and_aggregation() -> None:
    """Its paper's section 5.1 (3e-4, 4e-4), verl's examples/gspo_trainer (clip_ratio_low, _high, seq-mean-token-mean)."""
    a = settings("algorithm.importance_sampling_level=sequence").algorithm
    assert (a.clip_low, a.clip_high, a.loss_aggregation) == (
        3e-4,
        4e-4,
        "sequence_mean",
    ) and not remarks(settings("seed=1"))
    assert not remarks(settings("algorithm.importance_sampling_level=sequence"))
    other = settings(
        "algorithm.importance_sampling_level=sequence",
        "algorithm.clip_low=0.2",
        "algorithm.loss_aggregation=token_mean",
    )
    assert (other.algorithm.clip_low, other.algorithm.clip_high) == (0.2, 4e-4), (
        "what is said stays"
    )
    clip, weight = remarks(other)
    assert (
        "clip_low 0.2" in clip
        and "nothing will be clipped" in clip
        and "loss_aggregation token_mean" in weight
    )
    assert settings("algorithm.importance_sampling_level=token").algorithm.clip_low == 0.2
    again = RunConfig.model_validate(
        settings("algorithm.importance_sampling_level=sequence").model_dump()
    )
    assert again.algorithm == a, "a resolved file says the same"


def test_the_clip_range_of_tokens_never_binds_for_sequences() -> None:
    """Why: ratios of tokens and of sequences under the same update, 64 sequences of 200 tokens whose log-probs moved by 0.2."""
    noise = 0.2 * np.random.default_rng(0).standard_normal((64, 200))
    assert (np.abs(np.exp(noise) - 1) > 0.2).mean() > 0.2
    ratios = np.abs(np.exp(noise.mean(1)) - 1)
    assert not (ratios > 0.2).any() and (ratios > 4e-4).mean() > 0.5
