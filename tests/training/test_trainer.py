"""The training loop through its real entry points: files, counters, controls, alarms, and equality of equal recipes."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.algorithms.group_rewards import training_rewards
from mmrl.cli.main import main
from mmrl.config import load_config
from mmrl.errors import ConfigError, MMRLError, RewardError
from mmrl.training import runlog
from mmrl.training.trainer import Trainer
from mmrl.types import Rollout, RolloutGroup, Score, StopReason, Turn
from tests.kits.engine_kit import (
    ALBUM,
    album_data,
    cli,
    config_file,
    picture,
    read_jsonl,
    sample_with,
    small_run,
    weights_of,
)
from tests.kits.fast_kit import first_fast

SIZES = ((112, 84), (56, 56), (84, 112), (168, 56))


@pytest.fixture
def data(tmp_path: Path) -> tuple[str, str]:
    """Ten training and three held-out rows with 0 to 3 pictures each."""
    rows = [[picture(SIZES[(i + k) % 4], i) for k in range(i % 4)] for i in range(13)]
    return album_data(tmp_path / "data", rows[:10]), album_data(
        tmp_path / "data", rows[10:], "held"
    )


def train(
    tmp_path: Path,
    files: tuple[str, str],
    name: str = "run",
    *,
    resume: bool = False,
    overwrite: bool = False,
    events: list[Any] | None = None,
    held_out: bool = False,
    **sections: Any,
) -> tuple[Trainer, list[dict[str, Any]]]:
    """Run a small configuration in this process; returns the trainer and the rows of metrics.jsonl."""
    tree = small_run(
        tmp_path / "runs", files[0], files[1] if held_out else None, name=name, **sections
    )
    settings = load_config(config_file(tmp_path / f"{name}.yaml", tree))
    trainer = Trainer(
        settings,
        resume=resume,
        overwrite=overwrite,
        on_event=(lambda kind, payload: events.append((kind, payload)))
        if events is not None
        else None,
    )
    trainer.fit()
    return trainer, read_jsonl(trainer.folder.path / "metrics.jsonl")


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    """Metrics that do not depend on the clock or the machine."""
    return {k: v for k, v in row.items() if not k.startswith(("time/", "speed/", "memory/"))}


def final_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.policy.model.named_parameters()}


@pytest.mark.slow
def test_a_run_through_the_command_line_writes_everything(
    tmp_path: Path,
    data: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command(*arguments: str, status: int = 0) -> str:
        """The command in this process; what it wrote to standard error."""
        monkeypatch.setattr(sys, "argv", ["mmrl", *arguments])
        monkeypatch.setenv("MMRL_TRACEBACK", "")
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == status
        return capsys.readouterr().err

    tree = small_run(tmp_path / "runs", *data, reward={"workers": 1})
    config = config_file(tmp_path / "run.yaml", tree)
    out, err = cli("train", config, "optim.lr=1e-3")
    run = tmp_path / "runs" / "run"
    assert str(run / "report.html") in out and "held-out after step 2" in err
    for name in (
        "config.yaml",
        "run.json",
        "metrics.jsonl",
        "alarms.jsonl",
        "failures.jsonl",
        "gallery.json",
        "report.html",
        "rollouts/step_000001.jsonl",
        "rollouts/step_000002.jsonl",
        "eval/step_000000/results.json",
        "eval/step_000001/predictions.jsonl",
        "eval/step_000002/results.json",
        "checkpoints/step_000002/model.safetensors",
        "checkpoints/best/config.json",
    ):
        assert (run / name).is_file(), name
    info = json.loads((run / "run.json").read_text())
    assert (
        info["status"] == "finished"
        and info["total_steps"] == 2
        and info["versions"]["torch"] == torch.__version__
    )
    assert load_config(run / "config.yaml").optim.lr == 1e-3, (
        "the resolved configuration, ready to be run again"
    )
    rows = read_jsonl(run / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2] and all(
        r["train/logprob_gap/max"] < 1e-5 for r in rows
    )
    logged = read_jsonl(run / "rollouts" / "step_000001.jsonl")
    assert len(logged) == 2 * 3 and {r["stop"] for r in logged} <= {"eos", "length"}
    predictions = read_jsonl(run / "eval" / "step_000002" / "predictions.jsonl")
    assert len(predictions) == 3 * (1 + 2)
    followed = json.loads((run / "gallery.json").read_text())["prompts"]
    assert [(p["source"], p["id"]) for p in followed] == list(
        dict.fromkeys((p["source"], p["id"]) for p in predictions)
    )
    mean = np.mean([p["score"]["value"] for p in predictions if p["mode"] == "sampled"])
    assert rows[-1]["eval/sampled/reward"] == pytest.approx(mean)

    refused = command("train", config, status=2)
    assert "--resume" in refused and "--overwrite" in refused and "Traceback" not in refused
    assert read_jsonl(run / "metrics.jsonl") == rows, "a refused start touches nothing"
    command(
        "train",
        config,
        "optim.lr=1e-3",
        "train.steps=1",
        "reward.workers=0",
        "--overwrite",
        "--quiet",
    )
    assert [r["step"] for r in read_jsonl(run / "metrics.jsonl")] == [1] and not (
        run / "rollouts/step_000002.jsonl"
    ).exists()
    changed = command("train", config, "train.steps=7", "seed=77", "--resume", status=2)
    assert "seed was 3, now 77" in changed and "optim.lr was 0.001" in changed, (
        "every changed setting is named"
    )
    assert "train.steps" not in changed, "a run may become longer"


@pytest.mark.slow
def test_run_folder_is_refused_continued_or_replaced(tmp_path: Path, data: tuple[str, str]) -> None:
    first, rows = train(tmp_path, data)
    with pytest.raises(ConfigError, match=r"--resume.*--overwrite"):
        train(tmp_path, data)
    _, again = train(tmp_path, data, resume=True)
    assert again == rows, "a finished run has nothing left to do"
    run = first.folder.path
    assert {path.name for path in run.iterdir()} <= set(runlog._WRITTEN), "all of it is replaced"
    (run / "notes.txt").write_text("lr too high?")
    (run / "alarms.jsonl").write_text("of before\n")
    _, replaced = train(tmp_path, data, overwrite=True)
    assert (run / "notes.txt").read_text() == "lr too high?", "not the run's"
    assert "of before" not in (run / "alarms.jsonl").read_text()
    assert list(map(comparable, replaced)) == list(map(comparable, rows)), (
        "the same seed gives the same run"
    )
    with pytest.raises(ConfigError, match="found a run that was started or changed since"):
        first_made = Trainer(first.config, overwrite=True)
        Trainer(first.config, overwrite=True).fit()
        first_made.fit()
    assert list(map(comparable, read_jsonl(first.folder.path / "metrics.jsonl"))) == list(
        map(comparable, rows)
    ), "still there"
    other = comparable(train(tmp_path, data, "other", seed=4)[1][-1])
    assert other != comparable(rows[-1])
    assert json.loads((first.folder.path / "run.json").read_text())["status"] == "finished"


def group_with(
    rewards: list[float], key: tuple[int, int, int] = (1, 0, 0), length: int = 2
) -> RolloutGroup:
    turn = Turn((1,) * length, "x", (0.0,) * length, StopReason.EOS)
    trajectories = tuple(
        Rollout((turn,), Score.combine({"a": r}, {"a": 1.0}, parsed=True)) for r in rewards
    )
    return RolloutGroup(sample_with([]), trajectories, key=key)


def test_shuffle_control_permutes_within_the_group() -> None:
    plain = load_config(None, ["rollout.group_size=6"])
    control = load_config(None, ["rollout.group_size=6", "reward.shuffle=true"])
    rewards = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    orders = set()
    for place in range(40):
        group = group_with(rewards, (3, place, 0))
        assert training_rewards(group, plain) == rewards
        shuffled = training_rewards(group, control)
        assert sorted(shuffled) == rewards and shuffled == training_rewards(group, control), (
            "a fixed permutation"
        )
        orders.add(tuple(shuffled))
    assert len(orders) > 35, "every group has its own"
    assert (
        abs(np.corrcoef(np.tile(rewards, len(orders)), np.concatenate(list(orders)))[0, 1]) < 0.25
    )


def test_soft_overlong_penalty_enters_the_advantages() -> None:
    c = load_config(
        None,
        [
            "rollout.max_new_tokens=10",
            "algorithm.overlong=soft",
            "algorithm.overlong_buffer=4",
            "algorithm.overlong_weight=0.5",
        ],
    )
    assert training_rewards(group_with([1.0], length=6), c) == [1.0]
    assert training_rewards(group_with([1.0], length=8), c) == [pytest.approx(0.75)]
    assert training_rewards(group_with([1.0], length=10), c) == [pytest.approx(0.5)]


@pytest.mark.slow
def test_padded_forward_and_any_token_budget_give_the_same_run(
    tmp_path: Path, data: tuple[str, str]
) -> None:
    base, rows = train(tmp_path, data, "shared")
    start = {
        n: p.detach()
        for n, p in Trainer(base.config, overwrite=True).policy.model.named_parameters()
    }
    moved = torch.stack([(p - start[n]).norm() for n, p in final_weights(base).items()]).norm()
    packed = {"shared": rows[0]["train/tokens/packed"]}
    for name, section in (
        ("padded", {"forward": "padded"}),
        ("one", {"token_budget": 1}),
        ("all", {"token_budget": 10**6}),
    ):
        other, other_rows = train(tmp_path, data, name, train=section)
        for a, b in zip(rows, other_rows, strict=True):
            for key in (
                "train/reward/mean",
                "train/loss",
                "train/grad_norm",
                "train/entropy",
                "train/groups/kept",
            ):
                assert a[key] == pytest.approx(b[key], rel=2e-4, abs=1e-6), (name, key)
        apart = torch.stack(
            [(p - final_weights(base)[n]).norm() for n, p in final_weights(other).items()]
        ).norm()
        # AdamW's first steps are +-lr per weight whatever the gradient's size, so rounding shows where a gradient is ~0
        assert apart < 0.02 * moved, name
        packed[name] = other_rows[0]["train/tokens/packed"]
    assert packed["shared"] < packed["padded"], (
        "prompts are packed once per group, not once per completion"
    )
    assert packed["all"] == packed["shared"], "the budget repeats no prompt where groups fit"
    assert packed["one"] == packed["padded"], "one completion behind each copy of its prompt"


@pytest.mark.slow
def test_epochs_and_minibatches_count_and_change_the_ratio(
    tmp_path: Path, data: tuple[str, str]
) -> None:
    one, rows = train(tmp_path, data, "one", train={"prompts_per_step": 4})
    two, more = train(
        tmp_path,
        data,
        "two",
        algorithm={"epochs": 2, "minibatches": 2},
        train={"prompts_per_step": 4},
    )
    assert one.learner.updates == 2 and two.learner.updates == 2 * 2 * 2
    assert rows[0]["train/reward/mean"] == more[0]["train/reward/mean"], (
        "the first rollout is the same"
    )
    assert rows[0]["train/ratio"] == pytest.approx(1, abs=1e-5) and rows[0]["train/kl_step"] < 1e-9
    assert abs(more[0]["train/ratio"] - 1) > 1e-4 and more[0]["train/kl_step"] > 1e-6, (
        "later passes are off-policy"
    )
    assert more[0]["train/logprob_gap/max"] < 1e-5, "the gap is measured before the weights move"


@pytest.mark.slow
def test_learning_rate_follows_the_optimizer_steps(tmp_path: Path, data: tuple[str, str]) -> None:
    _, rows = train(
        tmp_path,
        data,
        optim={"lr": 0.004, "warmup_steps": 2, "schedule": "linear"},
        train={"steps": 4},
    )
    assert [r["train/lr"] for r in rows] == pytest.approx([0.002, 0.004, 0.004, 0.002])


@pytest.mark.parametrize("dynamic", first_fast([True, False]))
def test_groups_add_up(dynamic: bool, tmp_path: Path, data: tuple[str, str]) -> None:
    """Two thirds of the prompts come from sources whose reward is always 1 or always 0.5: no signal."""
    flat = album_data(tmp_path / "data", [[picture((56, 56), i)] for i in range(6)], "flat")
    dull = album_data(tmp_path / "data", [[picture((56, 56), i)] for i in range(6)], "dull")
    sources = [
        {"task": ALBUM, "path": data[0]},
        {"task": ALBUM, "path": flat, "params": {"value": 1.0}},
        {"task": ALBUM, "path": dull, "params": {"value": 0.5}},
    ]
    trainer, rows = train(
        tmp_path,
        data,
        data={"train": sources},
        algorithm={"dynamic_sampling": dynamic, "max_rounds": 3},
        train={"steps": 5, "prompts_per_step": 4},
    )
    totals: Counter[str] = Counter()
    for row in rows:
        n = {
            k.removeprefix("train/groups/"): v
            for k, v in row.items()
            if k.startswith("train/groups/")
        }
        assert n["asked"] == n["kept"] + n["no_signal"] + n["failed"]
        assert n["kept"] + n["unfilled"] == 4
        assert n["asked"] == 4 if not dynamic else 4 <= n["asked"] <= 12
        for name in ("asked", "kept", "no_signal", "failed"):
            assert n[name] == sum(
                row.get(f"train/{s}/groups/{name}", 0) for s in ("album", "flat", "dull")
            )
        assert row.get("train/flat/groups/kept", 0) == row.get("train/dull/groups/kept", 0) == 0
        assert row.get("train/flat/groups/no_signal", 0) <= n["all_one"] <= n["no_signal"]
        totals.update(n)
    assert totals["no_signal"] > 0 and totals["kept"] > 0
    assert totals["carried"] > 0 if dynamic else totals["carried"] == 0
    waiting = len(trainer.rollouts.rollouter.sampler.carry_over)
    assert rows[-1]["train/groups/waiting"] == waiting
    assert all(source != "flat" for source, _ in trainer.rollouts.rollouter.sampler.carry_over), (
        "nothing to learn: it does not wait"
    )


def test_steps_without_signal_leave_the_weights_alone(
    tmp_path: Path, data: tuple[str, str]
) -> None:
    trainer, rows = train(
        tmp_path, data, data={"train": [{"task": ALBUM, "path": data[0], "params": {"value": 0.5}}]}
    )
    fresh = Trainer(trainer.config, overwrite=True)
    assert all(
        torch.equal(p, dict(fresh.policy.model.named_parameters())[n])
        for n, p in final_weights(trainer).items()
    )
    assert [r["train/groups/kept"] for r in rows] == [0, 0] and rows[0]["train/loss"] is None
    assert rows[0]["train/reward/mean"] == 0.5, (
        "what was rolled out is reported although nothing was learnt"
    )


@pytest.mark.slow
def test_kl_holds_the_policy_near_the_reference(tmp_path: Path, data: tuple[str, str]) -> None:
    steps = {"train": {"steps": 4}, "optim": {"lr": 0.01}}
    free, _ = train(tmp_path, data, "free", **steps)
    held, rows = train(tmp_path, data, "held", algorithm={"kl": {"coef": 5.0}}, **steps)
    assert rows[0]["train/kl"] == pytest.approx(0, abs=1e-9), "at first they are the same policy"
    assert all(r["train/kl"] > 1e-6 for r in rows[1:]) and all(r["time/logprobs"] > 0 for r in rows)
    assert free.policy.reference_model is None
    assert held.policy.reference_model is not None
    start = Trainer(free.config, overwrite=True).policy
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            held.policy.reference_model.parameters(), start.model.parameters(), strict=True
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_lora_trains_only_its_adapter_and_resumes(
    kl: float, tmp_path: Path, data: tuple[str, str]
) -> None:
    options = {
        "model": {"lora": {"r": 4, "alpha": 8}},
        "algorithm": {"kl": {"coef": kl}},
        "train": {"steps": 4, "keep_last": 9},
        "optim": {"lr": 0.02},
    }
    whole, rows = train(tmp_path, data, "whole", **options)
    start = Trainer(whole.config.model_copy(update={"name": "start"})).policy
    before = dict(start.model.named_parameters())
    changed = {n for n, p in final_weights(whole).items() if not torch.equal(p, before[n])}
    assert changed and all("lora_" in n for n in changed)
    for step in (3, 4):
        shutil.rmtree(whole.checkpoints.path(step))
    resumed, again = train(tmp_path, data, "whole", resume=True, **options)
    assert resumed.start_step == 2 and list(map(comparable, again)) == list(map(comparable, rows))
    assert all(torch.equal(p, final_weights(whole)[n]) for n, p in final_weights(resumed).items())
    names = {n for n, _ in weights_of(whole.checkpoints.path(4))}
    assert names and not any("lora" in n for n in names), "merged weights beside the adapter"


def test_reward_that_always_raises_stops_the_run_and_says_so(
    tmp_path: Path, data: tuple[str, str]
) -> None:
    with pytest.raises(
        RewardError, match=r"9 of 9 rewards failed.*max_failure_share.*this reward is broken"
    ):
        train(
            tmp_path,
            data,
            data={"train": [{"task": ALBUM, "path": data[0], "params": {"raises": True}}]},
            algorithm={"max_rounds": 1},
        )
    assert json.loads((tmp_path / "runs/run/run.json").read_text())["status"] == "failed"


def test_alarms_are_raised_logged_and_can_stop(tmp_path: Path, data: tuple[str, str]) -> None:
    events: list[Any] = []
    zero = {"train": [{"task": ALBUM, "path": data[0], "params": {"value": 0.0}}]}
    options = {"data": zero, "alarms": {"zero_reward_steps": 2, "steps": 9}, "train": {"steps": 4}}
    trainer, _ = train(tmp_path, data, events=events, **options)
    logged = read_jsonl(trainer.folder.path / "alarms.jsonl")
    assert [(a["step"], a["name"]) for a in logged] == [(2, "reward_stuck")], "once, not every step"
    assert [p.name for kind, p in events if kind == "alarm"] == ["reward_stuck"]
    assert "model.frame" in logged[0]["message"]
    with pytest.raises(MMRLError, match="stopped at step 2 by alarm 'reward_stuck'"):
        train(
            tmp_path,
            data,
            "stopped",
            **{**options, "alarms": {"zero_reward_steps": 2, "stop": ["reward_stuck"]}},
        )
    stopped = tmp_path / "runs/stopped"
    assert (
        len(read_jsonl(stopped / "metrics.jsonl")) == 2
        and json.loads((stopped / "run.json").read_text())["status"] == "failed"
    )


@pytest.mark.slow
def test_entropy_and_gap_alarms(tmp_path: Path, data: tuple[str, str]) -> None:
    trainer, rows = train(tmp_path, data, alarms={"entropy_floor": 100.0, "logprob_gap": 1e-12})
    names = {a["name"] for a in read_jsonl(trainer.folder.path / "alarms.jsonl")}
    assert names == {"entropy_collapse", "logprob_gap"} and rows[0]["train/entropy"] < 100


@pytest.mark.slow
def test_best_checkpoint_survives_pruning(tmp_path: Path, data: tuple[str, str]) -> None:
    trainer, rows = train(
        tmp_path, data, held_out=True, train={"steps": 5, "keep_last": 1}, optim={"lr": 0.02}
    )
    scores = {r["step"]: r["eval/sampled/reward"] for r in rows}
    best = max(scores, key=lambda s: (scores[s], -s))
    link = trainer.checkpoints.folder / "best"
    assert link.resolve().name == f"step_{best:06d}"
    assert trainer.checkpoints.steps() == sorted({best, 5})
    assert sorted(p.name for p in (trainer.folder.path / "eval").iterdir()) == [
        f"step_{s:06d}" for s in range(6)
    ]
    assert trainer.saver.best == scores[best]


@pytest.mark.slow
def test_training_improves_the_reward(tmp_path: Path, data: tuple[str, str]) -> None:
    """Fifteen steps of plain GRPO raise a dense reward well above where it began; the shuffled control does not."""
    steps = {
        "train": {"steps": 15, "prompts_per_step": 6, "save_every": 0},
        "rollout": {"group_size": 8},
        "optim": {"lr": 0.004},
    }
    _, rows = train(tmp_path, data, "real", **steps)
    _, control = train(tmp_path, data, "control", reward={"shuffle": True}, **steps)
    begin, end = (
        float(np.mean([r["train/reward/mean"] for r in part])) for part in (rows[:3], rows[-3:])
    )
    idle = float(np.mean([r["train/reward/mean"] for r in control[-3:]]))
    assert end > begin + 0.15 and end > idle + 0.1, (begin, end, idle)
