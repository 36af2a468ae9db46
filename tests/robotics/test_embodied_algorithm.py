"""Every advantage, scale, weight and loss of the algorithm section on episodes: their numbers by hand, and that a run trains.

Legend: G members of a group.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from mmrl.distributed.engines import build_train_engine
from mmrl.distributed.world import World
from mmrl.errors import ConfigError
from mmrl.robotics.config import EmbodiedConfig
from mmrl.robotics.contract import EnvSpec, initial_states
from mmrl.robotics.learning import most_tokens, return_settings, robot_learner, scored, teaches
from mmrl.robotics.rollout import GroupRequest
from mmrl.robotics.vla import VLAPolicy
from mmrl.training.learner import Learner
from mmrl.training.optim import build_optimizer
from mmrl.training.trainer import Trainer
from mmrl.types import Rollout, RolloutGroup, StopReason, Turn
from tests.kits.robot_kit import config_of, make_model, make_vla, observations, saved_vla

# of tests.kits.robot_kit.BASE; its horizon is 12 control steps, three decisions
CHUNK, REPEAT, DIM = 2, 2, 2
PLAYED = [
    [(4, 1), (9, 1), (12, 0), (12, 0)],
    [(12, 0), (2, 1), (12, 0), (12, 0)],
    [(7, 1), (5, 1), (3, 1), (12, 0)],
]
"""Control steps and success of the episodes of three groups."""


@pytest.fixture(scope="module")
def vla(tmp_path_factory: pytest.TempPathFactory) -> VLAPolicy:
    return make_vla(make_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_vla(tmp_path_factory.mktemp("policy"))


def settings(*overrides: str) -> EmbodiedConfig:
    return config_of(Path("unread"), *overrides)


def group(
    vla: VLAPolicy, config: EmbodiedConfig, place: int, episodes: Sequence[tuple[int, int]]
) -> RolloutGroup:
    """Closed and scored as mmrl.robotics.source does; the last one of it crashed as well."""
    seen, rollouts = observations(4), []
    for member, (steps, won) in enumerate(episodes):
        turns = []
        for start in range(0, steps, CHUNK * REPEAT):
            choice = vla.act([seen[(member + start) % 4]], [(place, member, start)])[0]
            valid = tuple(start + c < steps for c in range(CHUNK * REPEAT))
            turns.append(
                Turn(
                    choice.tokens,
                    "",
                    choice.logprobs,
                    StopReason.EOS,
                    0,
                    choice.prompt,
                    (),
                    (0.25,) * len(valid),
                    valid,
                )
            )
        turns[-1] = dataclasses.replace(turns[-1], terminated=bool(won), truncated=not won)
        rollouts.append(
            Rollout(tuple(turns), info={"success_once": float(won), "success_at_end": float(won)})
        )
    rollouts.append(dataclasses.replace(rollouts[0], error="worker died"))
    done = tuple(scored(r, return_settings(config)) for r in rollouts)
    request = GroupRequest(
        (1, place, 0), EnvSpec("tiny", "reach", 12), initial_states("train", 1)[0], len(done)
    )
    return RolloutGroup(request.sample, done, key=(1, place, 0))


def learner_of(vla: VLAPolicy, config: EmbodiedConfig) -> Learner:
    world = World(vla.device)
    engine = build_train_engine(config, world, vla, build_optimizer(vla.trainable(), config.optim))
    return robot_learner(config, vla, engine, world)


def advantages(vla: VLAPolicy, *overrides: str) -> list[list[float]]:
    """What the run's own learner would push the episodes of PLAYED by; checks that all decisions of one share it, and that the
    crashed one is left out."""
    config = settings(*overrides)
    groups = [group(vla, config, place, episodes) for place, episodes in enumerate(PLAYED)]
    targets = learner_of(vla, config).advantages.targets(groups)
    found = []
    for g in groups:
        *finished, crashed = targets[g.key]
        assert crashed is None
        for rollout, target in zip(g.rollouts, finished, strict=False):
            assert target is not None and len(target.advantages) == len(rollout.turns)
            assert len({tuple(a) for a in target.advantages}) == 1
        found.append([t.advantages[0][0] for t in finished if t is not None])
    return found


def successes() -> list[list[float]]:
    return [[float(won) for _, won in episodes] for episodes in PLAYED]


def grpo(rewards_G: Sequence[float]) -> list[float]:
    mean, std = statistics.mean(rewards_G), statistics.stdev(rewards_G)
    return [(r - mean) / (std + 1e-6) for r in rewards_G]


def whitened(values: Sequence[Sequence[float]]) -> list[list[float]]:
    flat = [v for part in values for v in part]
    mean, std = statistics.mean(flat), statistics.stdev(flat)
    return [[(v - mean) / (std + 1e-6) for v in part] for part in values]


def rloo(rewards_G: Sequence[float]) -> list[float]:
    """Each against the mean of the others (Ahmadian et al. 2024)."""
    return [
        r - statistics.mean([x for j, x in enumerate(rewards_G) if j != i])
        for i, r in enumerate(rewards_G)
    ]


def tokens(steps: int) -> int:
    return math.ceil(steps / (CHUNK * REPEAT)) * CHUNK * DIM


def opo(number: int) -> list[float]:
    """Against the mean weighted by length (Hao et al. 2025)."""
    lengths, rewards = [tokens(n) for n, _ in PLAYED[number]], successes()[number]
    middle = sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)
    return [r - middle for r in rewards]


def over_rewards(offsets: Sequence[Sequence[float]]) -> list[list[float]]:
    std = statistics.stdev([r for part in successes() for r in part])
    return [[x / (std + 1e-4) for x in part] for part in offsets]


def close(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> bool:
    assert any(x for part in expected for x in part), "nothing would be compared"
    return all(
        a == pytest.approx(b, rel=1e-5, abs=1e-6) for a, b in zip(found, expected, strict=True)
    )


NONE = "algorithm.advantage_scale=none"


@pytest.mark.slow
def test_baselines_and_scales_are_their_formulas(vla: VLAPolicy) -> None:
    centred = [[r - statistics.mean(part) for r in part] for part in successes()]
    assert close(advantages(vla), [grpo(part) for part in successes()])
    assert close(advantages(vla, NONE), centred)
    assert close(
        advantages(vla, "algorithm.advantage=rloo", NONE), [rloo(part) for part in successes()]
    )
    assert close(
        advantages(vla, "algorithm.advantage=rloo", "algorithm.advantage_scale=batch"),
        whitened([rloo(part) for part in successes()]),
    )
    assert close(advantages(vla, "algorithm.advantage=opo", NONE), [opo(n) for n in range(3)])
    assert close(advantages(vla, "algorithm.advantage_scale=batch"), whitened(centred))
    assert close(advantages(vla, "algorithm.advantage_scale=batch_rewards"), over_rewards(centred))


def test_pass_at_k_pushes_the_one_that_alone_succeeded(vla: VLAPolicy) -> None:
    """r_max - r_second over the group's own std: groups with two successes teach nothing of it."""
    found = advantages(vla, "algorithm.advantage=pass_k")
    assert close(
        found, [[0.0] * 4, [0.0, 1 / (statistics.stdev([0, 1, 0, 0]) + 1e-6), 0.0, 0.0], [0.0] * 4]
    )


def test_the_running_std_of_a_task_is_that_of_all_its_rewards(vla: VLAPolicy) -> None:
    """EMA-GRPO in its first step: sqrt(E[r^2] - E[r]^2) over all episodes of the task."""
    everything = [r for part in successes() for r in part]
    std = math.sqrt(statistics.mean([r * r for r in everything]) - statistics.mean(everything) ** 2)
    found = advantages(vla, "algorithm.advantage_scale=ema")
    for part, rewards in zip(found, successes(), strict=True):
        assert part == pytest.approx(
            [(r - statistics.mean(rewards)) / std for r in rewards], rel=1e-4
        )


def test_gdpo_normalises_each_kind_of_reward_by_itself(vla: VLAPolicy) -> None:
    """Success and brevity with weights: each is normalised in its group, then the sum over the step."""
    brevity = [[won * (1 - steps / 12) for steps, won in episodes] for episodes in PLAYED]
    sums = [
        [a + 0.5 * b for a, b in zip(grpo(s), grpo(q), strict=True)]
        for s, q in zip(successes(), brevity, strict=True)
    ]
    parts = "rl.reward={success: 1.0, brevity: 0.5}"
    assert close(advantages(vla, parts, "algorithm.reward_aggregation=gdpo"), whitened(sums))
    plain = [
        [s + 0.5 * b for s, b in zip(*both, strict=True)]
        for both in zip(successes(), brevity, strict=True)
    ]
    assert close(advantages(vla, parts), [grpo(part) for part in plain])


def test_difficulty_weighs_groups_by_their_success(vla: VLAPolicy) -> None:
    weights = [math.exp(1 - statistics.mean(part)) for part in successes()]  # UniVG-R1
    assert len(set(weights)) == 3
    # what is paid does not change how hard a state is
    for setting in ("rl.reward=success", "rl.reward_coef=5"):
        found = advantages(vla, "algorithm.difficulty=univg_exp", setting)
        assert close(
            found,
            [[w * a for a in grpo(part)] for w, part in zip(weights, successes(), strict=True)],
        )


def test_the_shuffled_control_deals_the_same_rewards_anew_among_those_who_finished(
    vla: VLAPolicy,
) -> None:
    found = advantages(vla, "reward.shuffle=true", NONE)
    for place, (part, rewards) in enumerate(zip(found, successes(), strict=True)):
        order = np.random.default_rng((0, 17, 1, place, 0)).permutation(4)
        assert part == pytest.approx(
            [rewards[i] - statistics.mean(rewards) for i in order], abs=1e-6
        )
    assert any(
        part != [r - statistics.mean(rewards) for r in rewards]
        for part, rewards in zip(found, successes(), strict=True)
    )


def test_each_decision_may_answer_for_what_followed_it(vla: VLAPolicy) -> None:
    """algorithm.turns: every control step of these episodes is paid 0.25, four of them are a decision."""
    config = settings(
        "algorithm.turns={advantage: turn, gamma: 0.5}",
        "rl.reward=shaped",
        NONE,
        "rl.reward_coef=2",
    )
    played = group(vla, config, 0, PLAYED[0])
    *finished, crashed = learner_of(vla, config).advantages.targets([played])[played.key]
    assert crashed is None
    # 4, 9, 12 and 12 steps: 1, 3, 3 and 3 decisions, the last of the second has one step
    third = [0.5, 2.0, 2.0]
    second = [2.0 + 0.5 * x for x in third]
    first = [2.0, *(2.0 + 0.5 * x for x in second)]
    expected = [first, second, third]
    for index, returns in enumerate(expected):
        mean = statistics.mean(returns)
        found = [t.advantages[index][0] for t in finished if t and len(t.advantages) > index]
        assert found == pytest.approx([r - mean for r in returns], abs=1e-6)


def test_decisions_of_high_entropy_alone_train(
    vla: VLAPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a group's ten decisions, by the entropy of the tokens that were executed."""
    config = settings("algorithm.turns.keep_entropy=0.5")
    played = group(vla, config, 0, PLAYED[0])
    learner = learner_of(vla, config)
    taken = []
    monkeypatch.setattr(learner.steps, "take", lambda samples, *_, **__: taken.extend(samples))
    result = learner.run([played], 1)
    entropies = {}
    for sample in taken:
        for number, turn in enumerate(sample.turns):
            out = vla.evaluate([turn.prompt], [turn.tokens])
            executed = out.entropy_N.detach().numpy()[turn.mask_N]
            entropies[sample.place[1], number] = float(executed.mean())
    highest = sorted(entropies, key=lambda place: -entropies[place])[:5]
    kept = [(s.place[1], n) for s in taken for n, t in enumerate(s.turns) if t.in_loss]
    assert len(entropies) == 10 and sorted(kept) == sorted(highest)
    assert result.selected.metrics["train/turns/kept"] == 0.5
    assert result.selected.metrics["train/turns/entropy_threshold"] == pytest.approx(
        entropies[highest[-1]], rel=1e-5
    )


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ((), [True, True, True]),
        (("rl.reward=brevity",), [True, True, True]),
        (("algorithm.filter={key: success, low: 0.3, high: 0.7}",), [True, False, False]),
        (("algorithm.filter={key: reward, high: 0.7}",), [True, True, False]),
        (("rl.reward=shaped", "algorithm.filter.key=success"), [True, True, True]),
    ],
)
def test_the_filter_chooses_groups_by_its_key(
    vla: VLAPolicy, overrides: tuple[str, ...], kept: list[bool]
) -> None:
    config = settings(*overrides)
    assert [
        teaches(config, group(vla, config, n, episodes)) for n, episodes in enumerate(PLAYED)
    ] == kept


def test_a_group_that_all_solved_teaches_only_what_differs_in_it(vla: VLAPolicy) -> None:
    solved = [(4, 1), (9, 1)]
    for overrides, expected in (
        ((), False),
        (("rl.reward={success: 1.0, brevity: 0.2}",), True),
        (("rl.reward={success: 1.0, brevity: 0.2}", "algorithm.filter.key=success"), False),
        (("rl.reward={success: 1.0, brevity: 0.2}", "algorithm.filter.key=brevity"), True),
    ):
        config = settings(*overrides)
        assert teaches(config, group(vla, config, 0, solved)) is expected
    config = settings()
    assert teaches(config, group(vla, config, 0, solved[:1])) is None, (
        "one finished: nothing to compare it with"
    )


def test_a_sequence_of_gspo_is_a_decision(vla: VLAPolicy) -> None:
    """The ratio of a decision is the geometric mean over its executed tokens, clipped as one: by plain loops over decisions."""
    config = settings(
        "algorithm.importance_sampling_level=sequence",
        "algorithm.clip_low=0.02",
        "algorithm.clip_high=0.03",
        NONE,
    )
    groups = [group(vla, config, n, episodes) for n, episodes in enumerate(PLAYED)]
    moved = torch.Generator().manual_seed(3)

    def older(turn: Turn) -> Turn:
        return dataclasses.replace(
            turn,
            logprobs=tuple(
                p + 0.1 * float(torch.randn((), generator=moved)) for p in turn.logprobs
            ),
        )

    groups = [
        dataclasses.replace(
            g,
            rollouts=tuple(
                dataclasses.replace(r, turns=tuple(map(older, r.turns))) for r in g.rollouts
            ),
        )
        for g in groups
    ]
    learner = learner_of(vla, config)
    learner.begin(1)
    for g in groups:
        learner._collected.append(g)
    samples = learner._prepare(groups, learner._result)
    loss = sum(
        float(learner.loss.of(list(s.turns), learner._result, True, False).detach())
        for s in samples
    )
    expected, clipped = 0.0, 0
    for g, advantages_G in zip(
        groups, [[r - statistics.mean(p) for r in p] for p in successes()], strict=True
    ):
        for rollout, a in zip(g.rollouts, advantages_G, strict=False):
            count = sum(int(vla.token_mask(t).sum()) for t in rollout.turns)
            for turn in rollout.turns:
                mask = vla.token_mask(turn)
                now = vla.evaluate([turn.prompt], [turn.token_ids]).logp_N.detach().numpy()
                ratio = math.exp(float(np.mean((now - np.array(turn.logprobs))[mask])))
                pull = min(ratio * a, min(max(ratio, 0.98), 1.03) * a)
                pull = max(pull, 3.0 * a) if a < 0 else pull
                clipped += pull != ratio * a
                expected -= pull * int(mask.sum()) / count
    assert loss == pytest.approx(expected, rel=1e-4) and clipped > 0
    assert config.algorithm.loss_aggregation == "sequence_mean"


def test_dr_grpo_divides_by_the_longest_episode_there_can_be(vla: VLAPolicy) -> None:
    config = settings("algorithm.loss_aggregation=dr_grpo", NONE)
    assert most_tokens(config, vla) == 3 * CHUNK * DIM
    learner, g = learner_of(vla, config), group(vla, config, 0, PLAYED[0])
    samples = learner._prepare([g], learner._result)
    assert [s.denominator for s in samples] == [12.0] * 4 and {
        t.scale for s in samples for t in s.turns
    } == {1.0}


def test_what_an_episode_has_no_use_for_is_refused_with_the_reason(vla: VLAPolicy) -> None:
    for setting, words in (
        ("algorithm.contrast.kind=mirror", "no changed view of a simulator"),
        ("algorithm.offline={per_group: 1}", "cloned beforehand"),
        ("algorithm.overlong=mask", r"cut off at env\.horizon"),
        ("algorithm.overlong_buffer=5", r"cut off at env\.horizon"),
        ("algorithm.overlong_weight=0.5", r"cut off at env\.horizon"),
        ("model.system=Act.", r"vla\.prompt"),
        ("model.frame=rel1", "no coordinates"),
        ("reward.workers=0", r"env\.workers"),
        ("reward.timeout_s=3", r"env\.step_s"),
        ("reward.max_failure_share=0.5", r"env\.respawns"),
        ("train.log_reflection=true", "no text"),
        ("algorithm.carry_share=0.1", "follow from its number alone"),
        ("engine.rollout=vllm", "its own forward pass"),
        ("rollout.top_p=0.9", "drawn from all of their bins"),
        ("rollout.max_new_tokens=9", r"action\.chunk action steps"),
        ("data.selection.kind=variance", "episodes come from env"),
        ("train.forward=padded", "none is shared"),
    ):
        name = setting.split("=")[0].removesuffix(".kind")
        with pytest.raises(
            ConfigError, match=rf"{name} means nothing to an embodied run: .*{words}"
        ):
            settings(setting)
    for setting, words in (
        ("rl.reward={success: 0}", "weight above 0"),
        ("rl.reward={}", "at least one kind"),
        ("algorithm.filter.key=sucess", r"expected accuracy or reward .*Did you mean 'success'"),
        ("algorithm.filter.key=brevity", r"a kind of rl\.reward \(success\)"),
    ):
        with pytest.raises(ConfigError, match=words):
            settings(setting)
    with pytest.raises(ConfigError, match="brevity needs episodes that end with their success"):
        settings("rl.reward=brevity", "env.options={stop_at_success: false}")


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [
        ("algorithm.advantage=rloo", "algorithm.advantage_scale=batch"),
        ("algorithm.advantage=opo", NONE),
        ("algorithm.advantage=pass_k",),
        ("algorithm.advantage_scale=batch_rewards", "algorithm.difficulty=softmax"),
        ("algorithm.reward_aggregation=gdpo", "rl.reward={success: 1.0, brevity: 0.3}"),
        ("algorithm.importance_sampling_level=sequence", "algorithm.epochs=2"),
        ("algorithm.loss_aggregation=dr_grpo", NONE),
        ("algorithm.entropy={target: 1.5, coef: 0.01}", "reward.shuffle=true"),
    ],
)
def test_each_trains(policy: Path, tmp_path: Path, extra: tuple[str, ...]) -> None:
    row = Trainer(
        config_of(policy, f"dir={tmp_path}", "name=run", "rollout.group_size=6", *extra)
    ).fit()
    assert row["train/groups/trained"] > 0 and any(
        r["train/grad_norm"] > 0 for r in rows(tmp_path / "run")
    )


@pytest.mark.slow
def test_the_running_std_and_the_entropy_coefficient_are_resumed(
    policy: Path, tmp_path: Path
) -> None:
    """Cut after two of three steps and resumed, the weights are those of the whole run, bit for bit."""
    extra = (
        "schedule.kind=serial",
        "train.steps=3",
        "rollout.group_size=6",
        "algorithm.advantage_scale=ema",
        "algorithm.entropy={target: 3.0, coef: 0.01}",
    )

    def fit(name: str, **options: object) -> None:
        Trainer(config_of(policy, f"dir={tmp_path}", f"name={name}", *extra), **options).fit()  # type: ignore[arg-type]

    def cut(kind: str, payload: object) -> None:
        if kind == "checkpoint" and payload["step"] == 2:  # type: ignore[index]
            raise KeyboardInterrupt

    fit("whole")
    with pytest.raises(KeyboardInterrupt):
        fit("cut", on_event=cut)
    fit("cut", resume=True)
    whole, again = (rows(tmp_path / name) for name in ("whole", "cut"))
    for key in ("train/ema/reach/std", "train/entropy_coef", "train/grad_norm"):
        assert key in whole[2] and whole[2][key] == again[2][key], key
    digests = [
        (tmp_path / n / "checkpoints" / "step_000003" / "model.safetensors").read_bytes()
        for n in ("whole", "cut")
    ]
    assert digests[0] == digests[1]
