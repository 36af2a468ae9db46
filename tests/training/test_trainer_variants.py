"""Every variant of advantages and sampling through the real trainer: it runs, logs what it does, and resumes bit for bit."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mmrl.config import load_config
from mmrl.errors import ConfigError, DataError, RewardError
from mmrl.training.trainer import Trainer
from tests.kits.engine_kit import (
    REPO,
    config_file,
    merge,
    picture,
    read_jsonl,
    small_run,
    weights_of,
)

pytestmark = pytest.mark.slow  # each trains; kept out of `make check`, part of `make test`
MEDLEY = f"{REPO / 'tests' / 'kits' / 'medley_task.py'}:Medley"


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Sixteen rows of two tasks and two sources in one file, every other without a picture, with difficulties."""
    rows = [
        {
            "id": f"m{i}",
            "task": ("share", "binary")[i % 2],
            "source": ("plain", "odd")[i % 4 == 3],
            "question": f"Question {i}?",
            "images": [picture((56, 56), i)] if i % 3 == 0 else [],
            "params": {"difficulty": i / 16},
        }
        for i in range(16)
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def make(tmp_path: Path, file: str, name: str = "run", **sections: Any) -> Any:
    tree = small_run(tmp_path / "runs", file, name=name)
    tree["data"] = {"train": [{"task": MEDLEY, "path": file}]}
    merge(
        tree,
        {
            "rollout": {"group_size": 4},
            "train": {"steps": 4, "prompts_per_step": 3, "keep_last": 9, "token_budget": 600},
        },
    )
    return load_config(config_file(tmp_path / f"{name}.yaml", merge(tree, sections)))


def train(config: Any, **options: Any) -> tuple[Trainer, list[dict[str, Any]]]:
    events: list[Any] = []
    trainer = Trainer(
        config, on_event=lambda kind, payload: events.append((kind, payload)), **options
    )
    trainer.fit()
    trainer.events = events  # type: ignore[attr-defined]
    return trainer, read_jsonl(trainer.folder.path / "metrics.jsonl")


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "speed/", "memory/"))}
        for row in rows
    ]


VARIANTS: dict[str, dict[str, Any]] = {
    "ema": {"algorithm": {"advantage_scale": "ema", "ema": {"decay": 0.5}}},
    "ema by source": {
        "algorithm": {
            "advantage_scale": "ema_within",
            "ema": {"by": "source"},
            "difficulty": "softmax",
        }
    },
    "gdpo": {"algorithm": {"reward_aggregation": "gdpo", "difficulty": "univg_exp"}},
    "batch": {
        "algorithm": {
            "advantage_scale": "batch",
            "difficulty": "univg_power",
            "difficulty_power": 2.0,
        }
    },
    "entropy": {"algorithm": {"entropy": {"target": 99.0, "delta": 0.01}, "epochs": 2}},
    "rloo": {
        "algorithm": {"advantage": "rloo", "advantage_scale": "none", "difficulty": "univg_log"}
    },
    "opo": {"algorithm": {"advantage": "opo", "advantage_scale": "none"}},
    "pass_k": {"algorithm": {"advantage": "pass_k"}},
    "curriculum": {
        "data": {
            "balance": "tasks",
            "curriculum": [
                {"until": 0.5, "difficulty": [0, 0.5]},
                {"until": 0.75, "weights": {"odd": 5}},
            ],
        }
    },
    "balance": {"data": {"balance": "sources"}},
    "selection": {
        "data": {
            "selection": {"kind": "variance", "threshold": 0.02, "rest": 1, "replay_share": 1.0}
        }
    },
    "selection by std": {"data": {"selection": {"kind": "std", "threshold": 0.15, "rest": 1}}},
    "ppo": {
        "algorithm": {
            "advantage": "gae",
            "epochs": 2,
            "minibatches": 3,
            "critic": {"warmup": 1, "bootstrap": "standard"},
        }
    },
    "ppo by turns": {
        "algorithm": {"advantage": "gae", "critic": {"level": "turn", "detach": True}},
        "rollout": {"group_size": 1},
    },
    "in group": {"reward": {"workers": 1}, "train": {"log_reflection": True}},
}


def with_peers(config: Any, name: str) -> Any:
    if name == "in group":
        config.data.train[0].params = {"peers": True}
    return config


@pytest.mark.parametrize("name", VARIANTS)
def test_killed_and_resumed_every_variant_equals_the_uninterrupted_run(
    name: str, tmp_path: Path, data: str
) -> None:
    whole, rows = train(with_peers(make(tmp_path, data, "whole", **VARIANTS[name]), name))
    assert len(rows) == 4 and sum(r["train/groups/kept"] for r in rows) > 0
    start = dict(weights_of(Path(whole.config.model.path)))
    final = dict(weights_of(whole.checkpoints.path(4)))
    assert any(not (final[n] == start[n]).all() for n in final), "it trains"
    run = tmp_path / "runs" / "cut"
    shutil.copytree(whole.folder.path, run, symlinks=True)
    for step in (3, 4):
        shutil.rmtree(run / "checkpoints" / f"step_{step:06d}")
    resumed, again = train(
        with_peers(make(tmp_path, data, "cut", **VARIANTS[name]), name), resume=True
    )
    assert resumed.start_step == 2 and comparable(again) == comparable(rows)
    assert all((value == final[n]).all() for n, value in weights_of(resumed.checkpoints.path(4)))
    states = [
        json.loads((t.checkpoints.path(4) / "trainer" / "state.json").read_text())
        for t in (whole, resumed)
    ]
    assert (
        states[0]["schedule"] == states[1]["schedule"]
        and states[0]["credit"] == states[1]["credit"]
    )
    assert states[0]["entropy"] == states[1]["entropy"]
    EXTRA[name](rows, states[0], whole)


def check_ema(rows: list[dict[str, Any]], state: dict[str, Any], trainer: Trainer) -> None:
    last = {k: v for k, v in rows[-1].items() if k.startswith("train/ema/")}
    names = {"share", "binary"} if trainer.config.algorithm.ema.by == "task" else {"plain", "odd"}
    found = {k.split("/")[2] for k in last} - {"fallbacks"}
    kept, (std, mean) = (
        state["credit"]["ema"],
        ({n: last[f"train/ema/{n}/{k}"] for n in found} for k in ("std", "mean")),
    )
    assert found and found <= names and kept["mean"] == mean
    if "std" in kept:  # ema_within
        assert kept["std"] == std
    else:
        assert {n: (kept["square"][n] - mean[n] ** 2) ** 0.5 for n in found} == pytest.approx(std)


def check_entropy(rows: list[dict[str, Any]], state: dict[str, Any], trainer: Trainer) -> None:
    assert [r["train/entropy_coef"] for r in rows] == pytest.approx([0.02, 0.04, 0.06, 0.08]), (
        "two optimizer steps each"
    )
    assert (
        state["entropy"] == trainer.learner.loss.entropy.state_dict()
        and state["entropy"]["last"] > 0
    )


def check_curriculum(rows: list[dict[str, Any]], state: dict[str, Any], trainer: Trainer) -> None:
    assert [r["train/curriculum/stage"] for r in rows] == [0, 0, 1, 2] and state["schedule"][
        "stream"
    ]["stage"] == 2
    early = read_jsonl(trainer.folder.path / "rollouts" / "step_000001.jsonl")
    assert early and all(r["sample"]["params"]["difficulty"] <= 0.5 for r in early)


def check_selection(rows: list[dict[str, Any]], state: dict[str, Any], trainer: Trainer) -> None:
    memory = state["schedule"]["selection"]["memory"]
    assert rows[-1]["train/selection/memory"] == len(memory) > 0
    assert sum(r["train/groups/weak"] for r in rows) > 0, "some groups spread, but too little"
    assert all(
        r["train/groups/asked"] == r["train/groups/kept"] + r["train/groups/no_signal"]
        for r in rows
    )
    if trainer.config.data.selection.replay_share == 1.0:
        assert sum(r["train/selection/replayed"] for r in rows) > 0


def check_critic(rows: list[dict[str, Any]], state: dict[str, Any], trainer: Trainer) -> None:
    """Its head is beside the model's files, and its second half of a run is that of the uninterrupted one: `rows` were compared."""
    names = {
        f"train/critic/{n}" for n in ("loss", "clipped", "explained_variance", "return", "value")
    }
    assert (
        all(names <= row.keys() for row in rows)
        and rows[-1]["train/critic/value"] != rows[0]["train/critic/value"] == 0
    )
    assert all(row["train/groups/kept"] == row["train/groups/asked"] == 3 for row in rows), (
        "every group teaches"
    )
    assert {p.name for p in (trainer.checkpoints.path(4) / "critic").iterdir()} == {
        "value_head.safetensors"
    }


def check_peers(rows: list[dict[str, Any]], state: dict[str, Any], trainer: Trainer) -> None:
    logged = read_jsonl(trainer.folder.path / "rollouts" / "step_000001.jsonl")[:4]
    ranks = sorted(r["score"]["parts"]["accuracy"] for r in logged)
    assert ranks[-1] == 1.0 and all(rank * 4 == int(rank * 4) for rank in ranks), (
        "ranks in a group of four"
    )
    assert "train/reflection/share" in rows[0]


def check_nothing_more(rows: list[dict[str, Any]], state: dict[str, Any], trainer: Trainer) -> None:
    """What all variants share was checked already."""


EXTRA = {name: check_nothing_more for name in VARIANTS} | {
    "ema": check_ema,
    "ema by source": check_ema,
    "entropy": check_entropy,
    "curriculum": check_curriculum,
    "selection": check_selection,
    "selection by std": check_selection,
    "in group": check_peers,
    "ppo": check_critic,
    "ppo by turns": check_critic,
}


def test_variants_differ_from_plain_grpo_and_from_each_other(tmp_path: Path, data: str) -> None:
    """From the same first rollouts: what is trained differs, so no variant is silently another."""
    norms = {
        name: train(make(tmp_path, data, name, **{**VARIANTS[name], "train": {"steps": 1}}))[1][0][
            "train/grad_norm"
        ]
        for name in ("ema", "gdpo", "batch", "rloo", "opo", "pass_k")
    }
    norms["grpo"] = train(make(tmp_path, data, "grpo", train={"steps": 1}))[1][0]["train/grad_norm"]
    values = sorted(norms.values())
    assert all(b - a > 1e-5 for a, b in pairwise(values)), norms


def test_text_only_rows_encode_roll_out_train_and_resume(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(
        "".join(
            json.dumps({"id": f"t{i}", "question": f"Spell {i}.", "params": {}}) + "\n"
            for i in range(6)
        )
    )
    options = {
        "data": {"eval": [{"task": MEDLEY, "path": str(path)}]},
        "algorithm": {"kl": {"coef": 0.05}},
    }
    whole, rows = train(make(tmp_path, str(path), "text", **options))
    assert rows[-1]["train/kl"] > 0 and rows[-1]["train/logprob_gap/max"] < 1e-4
    assert rows[-1]["train/text/kl"] == pytest.approx(rows[-1]["train/kl"]), (
        "one source: its KL is the run's"
    )
    for step in (3, 4):
        shutil.rmtree(whole.checkpoints.path(step))
    _, again = train(make(tmp_path, str(path), "text", **options), resume=True)
    assert comparable(again) == comparable(rows)


def test_per_source_numbers_make_up_the_whole(tmp_path: Path, data: str) -> None:
    _, rows = train(make(tmp_path, data, "run", algorithm={"kl": {"coef": 0.01}}))
    sources = [s for s in ("plain", "odd") if f"train/{s}/entropy" in rows[-1]]
    for row in rows:
        for name in ("kl", "clip/high", "entropy", "logprob_gap/mean"):
            parts = [
                row[f"train/{s}/{name}"]
                for s in sources
                if row.get(f"train/{s}/{name}") is not None
            ]
            assert min(parts) - 1e-9 <= row[f"train/{name}"] <= max(parts) + 1e-9, name
        for name in (
            "asked",
            "kept",
            "no_signal",
            "failed",
            "all_zero",
            "all_one",
            "weak",
            "carried",
            "abandoned",
        ):
            assert row[f"train/groups/{name}"] == sum(
                row.get(f"train/{s}/groups/{name}", 0) for s in ("plain", "odd")
            )
    assert "train/share_share" in rows[0] or "train/binary_share" in rows[0]


def test_rewards_above_one_are_solved_only_at_their_upper_end(tmp_path: Path, data: str) -> None:
    for solved, value, at_the_end in ((1.0, 1.25, 3), (0.8, 1.0, 0)):
        config = make(tmp_path, data, f"run{solved}", train={"steps": 1})
        config.data.train[0].params = {"bonus": 0.25, "solved": solved}
        config.algorithm.max_rounds = 1
        _, rows = train(config)
        assert (
            rows[0]["train/reward/mean"] == pytest.approx(value)
            and rows[0]["train/groups/no_signal"] == 3
        )
        assert rows[0]["train/groups/all_one"] == at_the_end
        assert rows[0]["train/groups/waiting"] == 3 - at_the_end, (
            "1.0 of 1.25: there is more to earn"
        )


def test_what_was_left_out_is_reported_at_the_start_and_in_the_folder(
    tmp_path: Path, data: str
) -> None:
    base, _ = train(make(tmp_path, data, "base", train={"steps": 1, "log_rollouts": 9}))
    log = base.folder.path / "rollouts" / "step_000001.jsonl"
    known = {r["sample"]["id"] for r in read_jsonl(log)}
    config = make(tmp_path, data, "filtered", train={"steps": 1})
    config.data.train[0].pass_rate = {
        "file": str(log),
        "metric": "reward",
        "min": 0,
        "max": 1,
        "missing": "drop",
    }
    trainer, _ = train(config)
    [start] = [payload for kind, payload in trainer.events if kind == "start"]  # type: ignore[attr-defined]
    [told] = json.loads((trainer.folder.path / "skipped.json").read_text())
    assert start["skipped"] == told["skipped"] == {"pass_rate_missing": 16 - len(known)} and told[
        "kept"
    ] == len(known)
    config.data.train[0].pass_rate = {"file": str(log), "metric": "reward", "min": 0, "max": 1}
    with pytest.raises(DataError, match="found none of"):
        Trainer(config, overwrite=True)


def test_wrong_curricula_and_missing_parts_stop_the_run_at_once(tmp_path: Path, data: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.curriculum\.0 leaves no sample"):
        Trainer(
            make(tmp_path, data, "run", data={"curriculum": [{"until": 1, "difficulty": [5, 6]}]})
        )
    other = make(
        tmp_path,
        data,
        "changed",
        data={"curriculum": [{"until": 0.5, "difficulty": [0, 0.5]}]},
        train={"steps": 2},
    )
    train(other)
    other.data.curriculum = []
    with pytest.raises(ConfigError, match=r"cannot resume.*data\.curriculum"):
        train(other, resume=True)


def test_gdpo_on_a_task_without_its_parts_says_so(tmp_path: Path, data: str) -> None:
    source = tmp_path / "partless.py"
    source.write_text(
        "from tests.kits.medley_task import Medley\nfrom mmrl import Score\n\n\nclass Partless(Medley):\n"
        "    def score(self, sample, text, ctx):\n        score = super().score(sample, text, ctx)\n"
        "        return score if len(text) % 2 else Score.failure('even')\n",
        encoding="utf-8",
    )
    config = make(tmp_path, data, "run", algorithm={"reward_aggregation": "gdpo"})
    config.data.train[0].task = f"{source}:Partless"
    with pytest.raises(RewardError, match="reward_aggregation gdpo expected reward part"):
        train(config)
