"""Demonstrations in whole steps: where they come from, what they change, and that nothing else counts them.

Run: pytest tests/training/test_offline_run.py
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from mmrl.algorithms.group_rewards import contrast_bonuses
from mmrl.cli.run import train_command
from mmrl.config import DataSource, load_config
from mmrl.data.demonstrations import Demonstrations, check_demonstrations, demonstrations
from mmrl.data.pass_rates import read_pass_rates
from mmrl.data.sources import LoadedSource, load_sources
from mmrl.errors import ConfigError, DataError
from mmrl.training.group_advantages import accuracy_level
from mmrl.training.trainer import Trainer
from mmrl.types import RewardContext, Rollout, Sample, Score, StopReason
from tests.kits.album_task import Album
from tests.kits.engine_kit import config_file, policy, read_jsonl, small_run, weights_of
from tests.kits.fast_kit import first_fast

TOLD = f"{Path(__file__).resolve()}:Told"
TEXT = "left of it"


class Told(Album):
    """1 for the very words of the answer, else 0: a random policy never earns it. `dense` pays the album's shares instead."""

    name: ClassVar[str] = "told"

    def load(self, path: str) -> Iterable[Sample]:
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        return [
            Sample(
                r["id"],
                self.name,
                Path(path).stem,
                "Where is it?",
                r.get("answer", TEXT),
                params=r.get("params", {}),
            )
            for r in rows
        ]

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        if self.params.get("dense"):
            return super().score(sample, text, ctx)
        value = float(text == sample.answer)
        return Score.combine(
            {"accuracy": value}, {"accuracy": 1.0}, parsed=True, metrics={"iou": value}
        )

    def gold(self, sample: Sample, ctx: RewardContext) -> str:
        if sample.answer == "no gold":
            raise LookupError("nobody knows")
        return str(sample.answer)


class Together(Told):
    """A reward that looks at the whole group."""

    name: ClassVar[str] = "together"
    in_group: ClassVar[bool] = True


def rows_file(folder: Path, params: Iterable[dict[str, Any]], **extra: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "told.jsonl"
    path.write_text(
        "".join(
            json.dumps({"id": f"t{i}", "params": p, **extra}) + "\n" for i, p in enumerate(params)
        )
    )
    return str(path)


def run_file(
    folder: Path,
    offline: dict[str, Any],
    params: Iterable[dict[str, Any]] = ({"offline": [{"text": TEXT}]},) * 3,
    dense: bool = False,
    answer: str = TEXT,
    **sections: Any,
) -> str:
    """The configuration of a run with demonstrations."""
    tree = small_run(
        folder / "runs",
        rows_file(folder, params, answer=answer),
        **{
            "rollout": {"group_size": 4, "max_new_tokens": 8},
            "train": {"steps": 1, "prompts_per_step": 3},
            **sections,
        },
    )
    tree["data"]["train"][0].update(task=TOLD, params={"dense": True} if dense else {})
    tree["algorithm"] = {"offline": offline, **tree.get("algorithm", {})}
    return config_file(folder / "c.yaml", tree)


def trainer(folder: Path, *arguments: Any, resume: bool = False, **options: Any) -> Trainer:
    """That run; see `run_file`."""
    return Trainer(load_config(run_file(folder, *arguments, **options)), resume=resume)


def metrics(made: Trainer) -> list[dict[str, Any]]:
    return read_jsonl(made.folder.path / "metrics.jsonl")


def parameters(made: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for _, p in made.policy.trainable()]


LONG: dict[str, Any] = {
    "train": {"steps": 8, "prompts_per_step": 3, "save_every": 0},
    "optim": {"lr": 0.003},
}


def test_without_a_right_rollout_nothing_is_learned(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain", {}, train={"steps": 2, "prompts_per_step": 3})
    before = parameters(plain)
    plain.fit()
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(plain), strict=True)), (
        "no signal, no update"
    )
    assert {row["train/reward/mean"] for row in metrics(plain)} == {0.0}
    assert not any(name.startswith("train/offline") for row in metrics(plain) for name in row)


@pytest.mark.parametrize(
    ("offline", "gain"),
    first_fast(
        [
            ({"per_group": 1, "gamma": 0.01}, 1.5),
            ({"per_group": 1, "behaviour": "given", "gamma": None}, 3.0),
        ]
    ),
)
def test_with_demonstrations_the_same_run_learns(
    tmp_path: Path, offline: dict[str, Any], gain: float
) -> None:
    size = len(policy().processor.tokenizer(TEXT, add_special_tokens=False)["input_ids"]) + 1
    mixed = trainer(
        tmp_path, offline, [{"offline": [{"text": TEXT, "logprobs": [-6.0] * size}]}] * 3, **LONG
    )
    mixed.fit()
    rows = metrics(mixed)
    logprobs = [row["train/offline/logp"] for row in rows]
    assert logprobs[-1] > logprobs[0] + gain and all(
        b > a for a, b in itertools.pairwise(logprobs)
    ), logprobs
    assert (max(row["train/offline/capped"] for row in rows) > 0) == ("behaviour" in offline)
    assert {row["train/offline/reward"] for row in rows} == {1.0}
    assert rows[0]["train/reward/mean"] == 0.0 and rows[0]["train/groups/kept"] == 3


@pytest.mark.slow
def test_demonstrations_count_in_advantages_and_in_no_other_metric(tmp_path: Path) -> None:
    made = trainer(tmp_path, {"per_group": 1}, algorithm={"entropy": {"target": 99.0}})
    made.fit()
    (row,) = metrics(made)
    assert made.learner.loss.entropy.state_dict()["last"] == pytest.approx(row["train/entropy"]), (
        "of the policy's own tokens"
    )
    for group in made.rollouts.rollouter.tally.groups:
        assert [t.offline for t in group.rollouts] == [False] * 3 + [True]
        told = group.rollouts[-1]
        assert (
            told.turns[0].text == TEXT
            and told.turns[0].stop is StopReason.EOS
            and set(told.turns[0].logprobs) == {0.0}
        )
        assert (
            told.turns[0].token_ids[-1] == made.policy.eos_ids[0]
            and told.score is not None
            and told.score.value == 1.0
        )
        advantages = made.learner.advantages.assign([group])[group.key]
        assert (
            advantages[-1] > 0
            and len({round(a, 6) for a in advantages[:3]}) == 1
            and advantages[0] < 0
        )
        assert accuracy_level(group, "iou") == 0.0, (
            "how hard a prompt is, the policy's own answers tell"
        )
    assert (
        row["train/reward/mean"] == row["train/iou"] == 0.0 and row["train/offline/reward"] == 1.0
    )
    assert (
        row["train/offline/share"] == row["train/told/offline/share"] == 0.25
        and row["train/offline/skipped"] == 0
    )
    assert row["train/zero_variance_share"] == 1.0 and row["train/groups/kept"] == 3
    assert row["train/logprob_gap/mean"] < 1e-4, (
        "log-probs of behaviour 1 are no sampler-trainer gap"
    )
    assert (
        row["train/ratio"] == pytest.approx(1.0, abs=1e-4)
        and row["train/clip/low"] == row["train/clip/high"] == 0
    )
    logged = read_jsonl(made.folder.path / "rollouts" / "step_000001.jsonl")
    assert [r.get("offline", False) for r in logged] == [False, False, False, True] * 2
    filtered = DataSource(
        task=TOLD,
        path="x",
        pass_rate={
            "file": str(made.folder.path / "rollouts" / "step_000001.jsonl"),
            "metric": "reward",
            "mode": "all",
        },
    ).pass_rate
    assert filtered is not None and set(read_pass_rates(filtered).values()) == {0.0}, (
        "a pass rate is the policy's"
    )


def test_a_wrong_demonstration_is_pushed_down(tmp_path: Path) -> None:
    made = trainer(tmp_path, {"per_group": 1}, [{"offline": [{"text": "zzz"}]}] * 3, dense=True)
    made.fit()
    (row,) = metrics(made)
    assert row["train/offline/reward"] == 0.0 < row["train/reward/mean"]
    for group in made.rollouts.rollouter.tally.groups:
        assert made.learner.advantages.assign([group])[group.key][-1] < 0


@pytest.mark.check_takes(2)
@pytest.mark.parametrize(
    ("options", "own", "replaced"),
    [
        ({"replace": True}, 3, 0),
        ({"replace": False}, 4, 0),
        ({"replace": True, "only_when_failing": True}, 3, 1),
        ({"replace": False, "only_when_failing": True}, 4, 0),
    ],
)
def test_places_of_demonstrations(
    tmp_path: Path, options: dict[str, Any], own: int, replaced: int
) -> None:
    made = trainer(tmp_path, {"per_group": 1, **options})
    made.fit()
    for group in made.rollouts.rollouter.tally.groups:
        assert [t.offline for t in group.rollouts] == [False] * own + [True] and len(
            group.replaced
        ) == replaced
    (row,) = metrics(made)
    assert (
        row["train/offline/share"] == pytest.approx(1 / (own + replaced + 1))
        and row["train/offline/logp"] is not None
    )


def test_only_when_failing_leaves_solved_groups_alone(tmp_path: Path) -> None:
    made = trainer(
        tmp_path,
        {"per_group": 1, "only_when_failing": True},
        dense=True,
        algorithm={"dynamic_sampling": False},
        train={"steps": 2, "prompts_per_step": 6},
    )
    seen = []
    for step in (1, 2):
        with_scorer(made)
        seen += list(made.rollouts.rollouter.groups(step))
    assert len(seen) == 12
    for group in seen:
        own = [t for t in (*group.rollouts, *group.replaced) if not t.offline]
        assert len(own) == 4
        assert any(t.offline for t in group.rollouts) == (
            not any(t.score and t.score.value > 0.5 for t in own)
        )
    assert {any(t.offline for t in g.rollouts) for g in seen} == {True, False}, (
        "the example must show both"
    )


def with_scorer(made: Trainer) -> None:
    """The rollouter of a trainer, without its loop."""
    from mmrl.rollout.prompt_rollouter import PromptRollouter
    from mmrl.workers.scorer import Scorer

    rollouts = made.rollouts
    if not hasattr(rollouts, "rollouter"):
        scorer = Scorer([], [s.task for s in rollouts.train_sources], workers=0)
        rollouts.rollouter = PromptRollouter(
            made.config, made.policy, rollouts.engine, scorer, rollouts.train_sources, made.world
        )


@pytest.mark.slow
def test_gold_answers_need_no_data_and_end_with_until(tmp_path: Path) -> None:
    made = trainer(
        tmp_path,
        {"per_group": 1, "gold": True, "until": 0.5},
        [{}, {}, {"offline": [{"text": "mine"}]}],
        train={"steps": 4, "prompts_per_step": 3},
    )
    made.fit()
    assert ["train/offline/share" in row for row in metrics(made)] == [True, True, False, False]
    with_scorer(made)
    texts = {g.sample.id: g.rollouts[-1].turns[0].text for g in made.rollouts.rollouter.groups(1)}
    assert {texts.get("t0", TEXT), texts.get("t1", TEXT)} == {TEXT} and texts.get(
        "t2", "mine"
    ) == "mine"


def test_what_cannot_be_used_is_recorded_and_never_cut(tmp_path: Path) -> None:
    params = [
        {"offline": [{"text": "far too long to fit " * 9}]},
        {"offline": [{"text": "a<|im_end|>b"}, {"text": TEXT}]},
        {"offline": [{"text": "<|image_pad|>"}]},
    ]
    made = trainer(tmp_path, {"per_group": 2}, params, algorithm={"dynamic_sampling": False})
    made.fit()
    reasons = {f["id"]: f["reason"] for f in read_jsonl(made.folder.path / "failures.jsonl")}
    assert "expected at most rollout.max_new_tokens = 8 tokens, found" in reasons["t0"]
    assert all("found end-of-turn or media tokens in it" in reasons[i] for i in ("t1", "t2"))
    (row,) = metrics(made)
    assert row["train/offline/skipped"] == 3 and row["train/offline/share"] == pytest.approx(1 / 12)
    assert {g.sample.id: len(g.rollouts) for g in made.rollouts.rollouter.tally.groups} == {
        "t0": 4,
        "t1": 4,
        "t2": 4,
    }
    failing = trainer(tmp_path / "b", {"per_group": 1, "gold": True}, [{}] * 3, answer="no gold")
    failing.fit()
    told = {f["reason"] for f in read_jsonl(failing.folder.path / "failures.jsonl")}
    assert told == {"demonstration: the task's gold answer failed: LookupError: nobody knows"}


@pytest.mark.check_takes(1)
@pytest.mark.parametrize(
    "algorithm",
    [
        {
            "reward_aggregation": "gdpo",
            "contrast": {"kind": "mask", "skip": False},
            "overlong": "soft",
            "overlong_buffer": 4,
        },
        {"advantage_scale": "ema", "kl": {"coef": 0.1}, "epochs": 2, "minibatches": 2},
        {"advantage": "rloo", "advantage_scale": "batch"},
        {
            "advantage": "opo",
            "advantage_scale": "none",
            "loss_aggregation": "sequence_mean",
            "difficulty": "softmax",
        },
    ],
)
def test_it_works_with_the_other_options(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    made = trainer(
        tmp_path,
        {"per_group": 2},
        [{"offline": [{"text": TEXT}, {"text": "abc"}, {"text": "xyz"}]}] * 3,
        algorithm=algorithm,
    )
    before = parameters(made)
    made.fit()
    (row,) = metrics(made)
    assert (
        row["train/loss"] is not None
        and row["train/offline/share"] == 0.5
        and row["train/reward/mean"] == 0.0
    )
    assert any(not torch.equal(a, b) for a, b in zip(before, parameters(made), strict=True))


def test_contrast_pays_no_bonus_to_demonstrations(tmp_path: Path) -> None:
    made = trainer(
        tmp_path,
        {"per_group": 1},
        [{"offline": [{"text": "abc"}]}],
        dense=True,
        algorithm={"contrast": {"kind": "shuffle", "skip": False, "threshold": 0.0, "factor": 0.0}},
    )
    with_scorer(made)
    (group, *_) = made.rollouts.rollouter.groups(1)
    from dataclasses import replace

    seen = replace(group, view="shuffle", contrast=group.rollouts[:1])
    found = contrast_bonuses(seen, made.config)
    own = [t.score.value for t in group.rollouts if not t.offline and t.score]
    assert found == [*(0.3 if value > 0 else 0.0 for value in own), 0.0]


def test_packing_leaves_the_update_as_it_is(tmp_path: Path) -> None:
    weights = []
    for forward in ("shared", "padded"):
        made = trainer(
            tmp_path / forward,
            {"per_group": 1, "replace": False},
            dense=True,
            train={"steps": 1, "prompts_per_step": 3, "forward": forward, "token_budget": 4000},
        )
        made.fit()
        weights.append(made.learner)
    rows = [
        metrics_of["train/offline/logp"]
        for name in ("shared", "padded")
        for metrics_of in read_jsonl(tmp_path / name / "runs" / "run" / "metrics.jsonl")
    ]
    norms = [
        metrics_of["train/grad_norm"]
        for name in ("shared", "padded")
        for metrics_of in read_jsonl(tmp_path / name / "runs" / "run" / "metrics.jsonl")
    ]
    assert (
        rows[0] == pytest.approx(rows[1], abs=1e-5)
        and norms[0] == pytest.approx(norms[1], rel=1e-4)
        and norms[0] > 0
    )


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    params = [{"offline": [{"text": t} for t in (TEXT, "abc", "mno", "xyz")]}] * 3
    options: dict[str, Any] = {"train": {"steps": 3, "prompts_per_step": 3}, "dense": True}
    calm = trainer(tmp_path / "calm", {"per_group": 2}, params, **options)
    calm.fit()
    cut = trainer(tmp_path / "cut", {"per_group": 2}, params, **options)

    def interrupt(kind: str, payload: Any) -> None:
        if kind == "checkpoint" and payload["step"] == 2:
            raise KeyboardInterrupt

    cut.on_event = interrupt
    with pytest.raises(KeyboardInterrupt):
        cut.fit()
    again = trainer(tmp_path / "cut", {"per_group": 2}, params, resume=True, **options)
    again.fit()
    assert again.start_step == 2
    last = [
        {
            k: v
            for k, v in metrics(made)[-1].items()
            if not k.startswith(("time/", "speed/", "memory/"))
        }
        for made in (calm, again)
    ]
    assert last[0] == last[1] and last[0]["train/offline/share"] == 0.5
    assert all(torch.equal(a, b) for a, b in zip(parameters(calm), parameters(again), strict=True))
    for (name, a), (_, b) in zip(
        weights_of(calm.checkpoints.path(3)), weights_of(again.checkpoints.path(3)), strict=True
    ):
        assert torch.equal(a, b), name


def source_of(*samples: Sample, task: Any = None) -> list[LoadedSource]:
    return [LoadedSource(DataSource(task=TOLD, path="x.jsonl"), task or Told(), samples)]


def choose(
    offline: dict[str, Any], entries: list[dict[str, Any]], key: tuple[int, int, int] = (1, 0, 0)
) -> Any:
    config = load_config(
        None, [f"algorithm.offline={json.dumps(offline)}", "rollout.max_new_tokens=32"]
    )
    sample = Sample("s", "told", "told", "?", TEXT, params={"offline": entries})
    p = policy()
    return Demonstrations(config, p, source_of(sample)).choose(
        sample, Told(), key, RewardContext(1, 1, p.template.frame)
    )


def test_given_log_probs_are_the_behaviour() -> None:
    size = len(policy().processor.tokenizer(TEXT, add_special_tokens=False)["input_ids"]) + 1
    logprobs = [-0.25 * i for i in range(size)]
    entry = {"text": TEXT, "logprobs": logprobs}
    assert choose({"per_group": 1, "behaviour": "given"}, [entry])[0][0].logprobs == tuple(logprobs)
    assert choose({"per_group": 1, "behaviour": "one"}, [entry])[0][0].logprobs == (0.0,) * size
    assert (
        choose({"per_group": 1, "behaviour": "given"}, [{"text": TEXT}])[0][0].logprobs
        == (0.0,) * size
    )
    with pytest.raises(
        DataError,
        match=rf"x\.jsonl: sample 's': params\.offline\[1\]\.logprobs: expected {size} log-probs .* found "
        rf"{size - 1}; log-probs of another tokenizer do not fit",
    ):
        choose(
            {"per_group": 1, "behaviour": "given"},
            [{"text": TEXT}, {"text": TEXT, "logprobs": logprobs[1:]}],
        )


def test_the_choice_depends_on_the_key_alone_and_reaches_all() -> None:
    entries = [{"text": t} for t in "abcdef"]
    seen = [
        tuple(c.text for c in choose({"per_group": 2}, entries, (step, 0, 0))[0])
        for step in range(1, 25)
    ]
    assert seen == [
        tuple(c.text for c in choose({"per_group": 2}, entries, (step, 0, 0))[0])
        for step in range(1, 25)
    ]
    assert {len(set(pair)) for pair in seen} == {2} and {t for pair in seen for t in pair} == set(
        "abcdef"
    )


@pytest.mark.parametrize(
    ("offline", "message"),
    [
        ("text", r"params\.offline: expected a list of .* found 'text'"),
        ({"text": "a"}, "expected a list"),
        ([["a"]], r"params\.offline\[0\]: expected \{\"text\": \.\.\}, found \['a'\]"),
        (
            [{"text": "a"}, {"txt": "b"}],
            r"params\.offline\[1\]: expected the keys text, logprobs, found 'txt'\. Did you mean 'text'",
        ),
        ([{"text": "  "}], r"expected a whole completion as 'text', found '  '"),
        ([{"text": 7}], "found 7"),
        ([{}], "found None"),
        (
            [{"text": "a", "logprobs": []}],
            r"params\.offline\[0\]\.logprobs: expected a list with one log-prob per token",
        ),
        (
            [{"text": "a", "logprobs": [-1, 0.9]}],
            r"logprobs\[1\]: expected a finite natural log-probability .* found 0\.9; are these prob",
        ),
        ([{"text": "a", "logprobs": [float("nan")]}], "found nan"),
        ([{"text": "a", "logprobs": [True]}], "found True"),
        ([{"text": "a", "logprobs": ["-1"]}], "found '-1'"),
        ([{"text": "a", "logprobs": [-float("inf")]}], "found -inf"),
    ],
)
def test_broken_rows_name_file_line_and_fix(tmp_path: Path, offline: Any, message: str) -> None:
    file = rows_file(
        tmp_path,
        [{}, {"offline": offline}, {"offline": [{"text": "fine", "logprobs": [-1, 0, -0.5]}]}],
    )
    source = DataSource(task=TOLD, path=file)
    with pytest.raises(DataError, match=message) as caught:
        load_sources([source])
    assert str(caught.value).startswith(f"{file}: row 2: sample 't1': ")
    (loaded,) = load_sources([source], on_error="record")
    assert [s.id for s in loaded.samples] == ["t0", "t2"] and [r.row for r in loaded.rejected] == [
        2
    ]
    assert demonstrations(loaded.samples[1])[0].logprobs == (-1.0, 0.0, -0.5)


def test_the_old_name_of_logprobs_is_read_with_a_warning(tmp_path: Path) -> None:
    entry = {"text": "fine", "logps": [-1, 0, -0.5]}
    source = DataSource(task=TOLD, path=rows_file(tmp_path, [{"offline": [entry]}]))
    with pytest.warns(FutureWarning, match=r"params\.offline\[0\]\.logps is called logprobs now"):
        (loaded,) = load_sources([source])
        assert demonstrations(loaded.samples[0])[0].logprobs == (-1.0, 0.0, -0.5)


def test_files_without_lines_still_name_the_sample(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone: sample 'a': params\.offline: expected a list"):
        check_demonstrations(
            tmp_path / "gone", [Sample("a", "t", "t", "?", None, params={"offline": 3})]
        )


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {"offline": {"per_group": 1}, "advantage": "pass_k"},
            "advantage pass_k counts what the policy itself gets right",
        ),
        (
            {"offline": {"per_group": 1}, "importance_sampling_level": "sequence"},
            "it needs importance_sampling_level token",
        ),
        ({"offline": {"per_group": 8}}, r"per_group \(8\) with replace true leaves no rollouts"),
        ({"offline": {"gold": True}}, "gold true with per_group 0 adds nothing"),
        ({"offline": {"per_group": 1, "cap": 0.5}}, r"algorithm\.offline\.cap"),
        ({"offline": {"per_group": 1, "gamma": 0}}, r"algorithm\.offline\.gamma"),
        ({"offline": {"per_group": 1, "until": 0}}, r"algorithm\.offline\.until"),
        ({"offline": {"pergroup": 1}}, "Did you mean 'per_group'"),
    ],
)
def test_settings_that_cannot_be_meant(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [f"algorithm={json.dumps(algorithm)}"])


def test_runs_that_have_no_use_for_demonstrations_say_so() -> None:
    bare = Sample("s", "told", "told", "?", TEXT)
    with pytest.raises(
        ConfigError,
        match=r"expected demonstrations in params\.offline of the data\.train rows, found none",
    ):
        Demonstrations(
            load_config(None, ["algorithm.offline.per_group=1"]), policy(), source_of(bare)
        )
    gold = load_config(None, ["algorithm.offline={per_group: 1, gold: true}"])
    with pytest.raises(
        ConfigError, match="the reward of task 'told' looks at the policy's whole group"
    ):
        Demonstrations(gold, policy(), source_of(bare, task=Together()))
    assert not Demonstrations(load_config(None), policy(), source_of(bare)).active(1)


def test_own_trajectories_are_not_offline_by_default() -> None:
    assert not Rollout(()).offline


def test_the_command_reports_a_run_with_demonstrations(tmp_path: Path) -> None:
    page = (
        train_command(
            Path(run_file(tmp_path, {"per_group": 1, "gold": True}, [{}] * 3)),
            [],
            resume=False,
            overwrite=False,
            quiet=True,
        )
        / "report.html"
    )
    assert (
        read_jsonl(page.with_name("metrics.jsonl"))[-1]["train/offline/reward"] == 1.0
        and page.is_file()
    )
