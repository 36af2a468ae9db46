"""Which closed groups are trained on (algorithm.filter): judged by their task, as peers judge them, and never by length."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmrl.algorithms import (
    DynamicSampler,
    SamplerSettings,
    VarianceSelection,
    Verdict,
)
from mmrl.algorithms.group_rewards import check_filter_key, group_outcome, training_rewards
from mmrl.config import RunConfig, SelectionConfig, load_config
from mmrl.errors import ConfigError
from mmrl.registry import task_from_spec
from mmrl.rollout.prompt_rollouter import PromptRollouter
from mmrl.training.identity import check_identity
from mmrl.training.trainer import Trainer
from mmrl.types import Rollout, RolloutGroup, Sample, Score, StopReason, Turn
from tests.kits.engine_kit import REPO, config_file, merge, read_jsonl, small_run
from tests.kits.medley_task import Medley

SOFT = ("algorithm.overlong=soft", "rollout.max_new_tokens=10", "algorithm.overlong_buffer=4")
WEIGHTS = {"accuracy": 0.9, "style": 0.1}


def group(
    parts: list[dict[str, float]],
    lengths: list[int] | None = None,
    weights: dict[str, float] | None = None,
    task: str = "t",
) -> RolloutGroup:
    turns = [Turn((1,) * n, "x", (0.0,) * n, StopReason.EOS) for n in lengths or [3] * len(parts)]
    scores = [Score.combine(p, weights or {k: WEIGHTS[k] for k in p}, parsed=True) for p in parts]
    return RolloutGroup(
        Sample("s", task, "src", "?", None),
        tuple(Rollout((c,), s) for c, s in zip(turns, scores, strict=True)),
    )


def settings(*overrides: str) -> RunConfig:
    return load_config(None, list(overrides))


def signal(g: RolloutGroup, *overrides: str, task: Medley | None = None) -> bool:
    return group_outcome(g, settings(*overrides), task or Medley()).signal


def test_it_chooses_the_groups_that_verl_and_easyr1_choose() -> None:
    """Their own lines, executed elsewhere on these groups. Ours asks for both: values that differ (verl), mean between bounds
    (EasyR1, which alone also keeps equal answers that are half right)."""
    told = json.loads((Path(__file__).parent / "peer_filters.json").read_text(encoding="utf-8"))
    groups = [
        group(
            [{"accuracy": a, "format": f} for a, f in zip(g["accuracy"], g["format"], strict=True)],
            weights=told["weights"],
        )
        for g in told["groups"]
    ]
    compared = 0
    for key in ("accuracy", "reward"):
        verl = set(told["kept"][f"verl filter_groups.metric={key}"])
        assert {i for i, g in enumerate(groups) if signal(g, f"algorithm.filter.key={key}")} == verl
        for low, high in (("0.01", "0.99"), ("0.0", "1.0"), ("0.2", "0.8")):
            easy = set(told["kept"][f"EasyR1 filter_key={key} low={low} high={high}"])
            found = {
                i
                for i, g in enumerate(groups)
                if signal(g, f"algorithm.filter={{key: {key}, low: {low}, high: {high}}}")
            }
            assert found == verl & easy
            compared += len(verl - easy) > 0
    assert compared, "some bounds decide"


def test_both_bounds_are_exclusive() -> None:
    half = group([{"accuracy": 0.0}, {"accuracy": 1.0}])
    for bound in ("low", "high"):
        for value, kept in ((0.5, False), (0.499, bound == "low"), (0.501, bound == "high")):
            assert signal(half, f"algorithm.filter.{bound}={value}") == kept, (bound, value)


def test_a_part_without_weight_teaches_nothing() -> None:
    observed = group(
        [{"accuracy": 1.0, "style": s} for s in (0.0, 1.0)], weights={"accuracy": 1.0, "style": 0.0}
    )
    for reward_aggregation in ("plain", "gdpo"):
        for key in ("accuracy", "style", "reward"):
            assert not signal(
                observed,
                f"algorithm.reward_aggregation={reward_aggregation}",
                f"algorithm.filter.key={key}",
            )


@pytest.mark.parametrize("reward_aggregation", ["plain", "gdpo"])
def test_a_length_penalty_makes_no_signal(reward_aggregation: str) -> None:
    wrong = group([{"accuracy": 0.0, "style": 0.0}] * 4, lengths=[3, 3, 3, 9])
    overrides = (*SOFT, f"algorithm.reward_aggregation={reward_aggregation}")
    assert training_rewards(wrong, settings(*overrides)) == [0, 0, 0, -0.75], (
        "the penalty is in what is trained on"
    )
    for key in ("accuracy", "style", "reward"):
        assert not signal(wrong, *overrides, f"algorithm.filter.key={key}")
    outcome = group_outcome(wrong, settings(*overrides), Medley())
    assert outcome.rewards == outcome.judged == [0.0] * 4, (
        "selection and counts see the task's rewards too"
    )
    mixed = group(
        [{"accuracy": a, "style": 0.0} for a in (0.0, 0.0, 1.0, 1.0)], lengths=[3, 3, 3, 9]
    )
    assert signal(mixed, *overrides), "groups with signal are kept, and penalised"


def test_equally_right_answers_of_another_form_have_signal_under_key_reward_only() -> None:
    form = group([{"accuracy": 1.0, "style": s} for s in (0.0, 1.0)])
    assert (
        not signal(form)
        and signal(form, "algorithm.filter.key=reward")
        and signal(form, "algorithm.filter.key=style")
    )
    assert not signal(form, "algorithm.reward_aggregation=gdpo")
    assert signal(form, "algorithm.reward_aggregation=gdpo", "algorithm.filter.key=reward")
    outcome = group_outcome(form, settings(), Medley())
    assert (outcome.judged, outcome.top) == ([1.0, 1.0], 1.0), "counted as solved"


def test_a_task_without_an_accuracy_part_is_judged_by_its_whole_reward() -> None:
    plain = group([{"style": 1.0}, {"style": 0.0}])
    assert signal(plain) and group_outcome(plain, settings(), Medley(bonus=0.5)).top == 1.5
    graded = group([{"accuracy": a} for a in (0.61, 0.64)])
    assert signal(graded), "any spread of a graded accuracy is signal"


def test_the_upper_end_is_that_of_the_part() -> None:
    g = group([{"accuracy": 1.25, "style": 0.0}] * 2)
    assert group_outcome(g, settings(), Medley(bonus=0.25)).top == 1.25
    for spec, params, top in (
        ("grounding", {"preset": "vlm_r1"}, 1.0),
        ("detection", {"preset": "perception_r1"}, 3.0),
    ):
        task = task_from_spec(spec, params)
        assert (
            group_outcome(group([{"accuracy": 1.0}] * 2, task=spec), settings(), task).top == top
        ), task.value_range


def test_a_key_that_no_task_has_is_refused_before_and_while_running() -> None:
    wrong = settings("algorithm.filter.key=acuracy")
    with pytest.raises(
        ConfigError,
        match=r"filter.key: expected .*\(accuracy, style\), found 'acuracy'. Did you mean 'accuracy'",
    ):
        check_filter_key(wrong, [Medley()])
    with pytest.raises(ConfigError, match="found 'acuracy'"):
        group_outcome(group([{"accuracy": 1.0}] * 2), wrong, Medley())
    check_filter_key(settings(), [Medley()])
    check_filter_key(settings("algorithm.filter.key=style"), [Medley()])
    failed = RolloutGroup(
        Sample("s", "t", "src", "?", None), (Rollout((), Score.failure("no_answer")),) * 2
    )
    assert not group_outcome(failed, settings("algorithm.filter.key=style"), Medley()).signal, (
        "no parts at all: failures"
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["algorithm.filter.low=0.5", "algorithm.filter.high=0.5"],
            r"filter.low \(0.5\) must lie below filter.high \(0.5\)",
        ),
        (
            ["algorithm.filter.low=0.1", "algorithm.dynamic_sampling=false"],
            "low and high choose groups: they need .*dynamic_sampling",
        ),
    ],
)
def test_bounds_that_mean_nothing_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(*overrides)


def test_a_checkpoint_from_before_was_judged_by_the_whole_reward() -> None:
    new = {"algorithm.filter.key": "accuracy", "algorithm.filter.low": None, "seed": 1}
    with pytest.raises(ConfigError, match=r"filter\.key was 'reward', now 'accuracy'"):
        check_identity({"seed": 1}, new)
    check_identity({"seed": 1}, {**new, "algorithm.filter.key": "reward"})
    scaled = {**new, "algorithm.filter.key": "reward", "algorithm.advantage_scale": "ema"}
    with pytest.raises(ConfigError, match="advantage_scale was 'ema_within', now 'ema'"):
        check_identity({"seed": 1, "algorithm.advantage_scale": "ema"}, scaled)
    check_identity(
        {"seed": 1, "algorithm.advantage_scale": "ema"},
        {**scaled, "algorithm.advantage_scale": "ema_within"},
    )
    check_identity(scaled, scaled)
    check_identity(
        {"seed": 1, "algorithm.difficulty": "dgrpo"},
        {
            "seed": 1,
            "algorithm.difficulty": "softmax",
            "algorithm.entropy.coef": 0.0,
            "algorithm.entropy.target": None,
        },
    )
    with pytest.raises(ConfigError, match=r"entropy\.coef was 0.0, now 0.1"):
        check_identity({"seed": 1}, {"seed": 1, "algorithm.entropy.coef": 0.1})
    check_identity({"seed": 1, "env.suite": "tiny"}, {**new, "env.suite": "tiny"})


def judged(
    g: RolloutGroup, task: Any, selection: VarianceSelection | None = None
) -> tuple[Verdict, dict[str, int]]:
    """What the rollouter makes of a group, and what it counts."""
    rollouter = object.__new__(PromptRollouter)  # its judging needs no model
    rollouter.sampler, rollouter.selection = (
        DynamicSampler(SamplerSettings(quota=1, max_attempts=1)),
        selection,
    )
    rollouter.sampler.begin_step(1)
    (ticket,) = rollouter.sampler.request(lambda: ("src", "s"))
    outcome = group_outcome(replace(g, key=ticket.key), settings(), task)
    return rollouter._judge(outcome, ticket), dict(rollouter.sampler.end_step().counts)


def test_the_schedule_judges_and_counts_by_the_key() -> None:
    wide = task_from_spec("grounding", {"preset": "vlm_r1"})  # accuracy + format, together up to 2
    parts = [{"accuracy": 1.0, "format": f} for f in (0.0, 1.0)]
    solved = group(parts, weights={"accuracy": 1.0, "format": 1.0}, task="grounding")
    verdict, counts = judged(solved, wide)
    assert verdict is Verdict.NO_SIGNAL and counts["all_one"] == 1 and counts["weak"] == 0
    hopeless = group(
        [{**p, "accuracy": 0.0} for p in parts],
        weights={"accuracy": 1.0, "format": 1.0},
        task="grounding",
    )
    assert judged(hopeless, wide)[1]["all_zero"] == 1, "its form differs, and counts no more"
    selection = VarianceSelection(SelectionConfig(kind="std", threshold=0.0))
    assert judged(solved, wide, selection)[0] is Verdict.NO_SIGNAL, (
        "a selection chooses among groups with signal"
    )
    mixed = group(
        [{"accuracy": a, "format": 1.0} for a in (0.0, 1.0)],
        weights={"accuracy": 1.0, "format": 1.0},
        task="grounding",
    )
    assert judged(mixed, wide, selection)[0] is judged(mixed, wide)[0] is Verdict.KEPT


def trained(
    folder: Path, **algorithm: Any
) -> tuple[list[RolloutGroup], list[dict[str, Any]], RunConfig]:
    """Four steps on questions that are answered right or wrong; every group that was trained on."""
    rows = [
        {"id": f"m{i}", "task": "binary", "source": "src", "question": f"Question {i}?"}
        for i in range(12)
    ]
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8"
    )
    tree = small_run(
        folder,
        str(folder / "rows.jsonl"),
        train={"steps": 4, "prompts_per_step": 6, "save_every": 0},
        rollout={"group_size": 3, "max_new_tokens": 6},
    )
    tree["data"] = {
        "train": [
            {
                "task": f"{REPO / 'tests' / 'kits' / 'medley_task.py'}:Medley",
                "path": str(folder / "rows.jsonl"),
            }
        ]
    }
    found: list[RolloutGroup] = []

    class Watched(Trainer):
        def _train_step(self, step: int) -> dict[str, Any]:
            row = super()._train_step(step)
            found.extend(self.rollouts._tally.trained)
            return row

    trainer = Watched(
        load_config(config_file(folder / "c.yaml", merge(tree, {"algorithm": algorithm})))
    )
    trainer.fit()
    return found, read_jsonl(trainer.folder.path / "metrics.jsonl"), trainer.config


@pytest.mark.slow
@pytest.mark.parametrize("reward_aggregation", ["plain", "gdpo"])
def test_no_group_of_equal_task_rewards_is_trained_on_under_a_soft_length_penalty(
    tmp_path: Path, reward_aggregation: str
) -> None:
    soft = {
        "overlong": "soft",
        "overlong_buffer": 6,
        "overlong_weight": 0.5,
        "reward_aggregation": reward_aggregation,
    }
    groups, rows, config = trained(tmp_path / "soft", **soft)
    assert len(groups) >= 4 and sum(r["train/groups/no_signal"] for r in rows) > 0
    accuracy = [[t.score.parts["accuracy"] for t in g.rollouts if t.score] for g in groups]
    assert all(max(a) > min(a) for a in accuracy), (
        "equal accuracy was trained on: on length, or on form"
    )
    assert any(
        len({t.num_tokens for t in g.rollouts}) > 1
        and training_rewards(g, config) != list(g.rewards_G)
        for g in groups
    ), "the penalty acts on the groups that are kept"
