"""Ratios of actions and chunks, entropy and value loss against loops over nested lists; split invariance; hand cases.

Run: pytest tests/algorithms/test_ppo.py
"""
from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from mmrl.algorithms import (
    CorrectionSettings,
    ObjectiveSettings,
    PPOSettings,
    ValueStats,
    actor_loss,
    critic_warming_up,
    denominator,
    policy_loss,
    unit_ids,
    value_loss,
)
from mmrl.errors import ConfigError

DECISIONS, ACTIONS, DIMS = (3, 1, 4), 2, 3  # decisions of three trajectories, actions per chunk, tokens per action
AGGREGATES = ("token_mean", "sequence_mean", "dr_grpo")
LEVELS = ("token", "action", "chunk")


def _batch(seed: int = 0) -> dict[str, Tensor]:
    """Tokens of eight decisions; the last chunk of the first trajectory ends after one action, the second is left out."""
    g = torch.Generator().manual_seed(seed)
    decisions = sum(DECISIONS)
    n = decisions * ACTIONS * DIMS
    decision = torch.arange(n) // (ACTIONS * DIMS)
    action = torch.arange(n) % (ACTIONS * DIMS) // DIMS
    sequence = torch.repeat_interleave(torch.arange(len(DECISIONS)), torch.tensor(DECISIONS))[decision]
    mask = ~((decision == 2) & (action == 1)) & (sequence != 1)
    old = -torch.rand(n, generator=g, dtype=torch.float64)
    out = {"decision": decision, "action": action, "sequence": sequence, "mask": mask, "old": old,
           "logp": old + 0.3 * torch.randn(n, generator=g, dtype=torch.float64),
           "behaviour": old + 0.3 * torch.randn(n, generator=g, dtype=torch.float64),
           "advantage": torch.randn(decisions, generator=g, dtype=torch.float64)[decision],
           "entropy": torch.rand(n, generator=g, dtype=torch.float64)}
    for name in ("logp", "old", "behaviour", "entropy"):
        out[name][~mask] = float("nan")  # whatever padding holds must not matter
    out["logp"].requires_grad_()
    out["entropy"].requires_grad_()
    return out


def _run(s: ObjectiveSettings, level: str, t: dict[str, Tensor], **more):
    units = unit_ids(level, t["decision"], t["action"])
    return actor_loss(s, units, t["logp"], t["old"], t["advantage"], t["sequence"], t["mask"], entropy_N=t["entropy"],
                      behaviour_logp_N=t["behaviour"], **more)


def _naive(s: ObjectiveSettings, level: str, t: dict[str, Tensor], coef: float, correction: CorrectionSettings | None) -> Tensor:
    """Mean loss from nested loops in torch scalars, so that its gradient can be compared as well."""
    trajectories = []
    for sequence in range(len(DECISIONS)):
        units: dict[tuple[int, ...], list[int]] = {}
        for n in range(len(t["mask"])):
            if t["sequence"][n] == sequence and t["mask"][n]:
                d, a = t["decision"][n].item(), t["action"][n].item()
                units.setdefault({"token": (n,), "action": (d, a), "chunk": (d,)}[level], []).append(n)
        losses = []
        for rows in units.values():
            rho = torch.exp(sum(t["logp"][n] for n in rows) - sum(t["old"][n] for n in rows))
            adv = t["advantage"][rows[0]]
            clipped = min(max(rho, torch.tensor(1 - s.clip_low)), torch.tensor(1 + s.clip_high))
            loss = -min(rho * adv, clipped * adv)
            if s.dual_clip is not None and adv < 0:
                loss = min(loss, -s.dual_clip * adv)
            if correction is not None:
                w = math.exp(sum(t["old"][n].item() - t["behaviour"][n].item() for n in rows))
                loss = loss * (min(w, correction.threshold) if correction.mode == "truncate" else w * (w <= correction.threshold))
            losses.append(loss - coef * sum(t["entropy"][n] for n in rows))
        if losses:
            trajectories.append(losses)
    if s.aggregate == "sequence_mean":
        return sum(sum(x) / len(x) for x in trajectories) / len(trajectories)
    count = sum(map(len, trajectories)) if s.aggregate == "token_mean" else len(trajectories) * s.max_completion_length
    return sum(itertools.chain.from_iterable(trajectories)) / count


@pytest.mark.parametrize(("level", "aggregate", "mode"), list(itertools.product(LEVELS, AGGREGATES, (None, "truncate", "mask"))))
def test_value_and_gradient_equal_the_nested_loops(level, aggregate, mode) -> None:
    s = ObjectiveSettings(aggregate=aggregate, max_completion_length=20)
    correction = None if mode is None else CorrectionSettings(mode=mode, threshold=1.2)
    for seed in range(2):
        t = _batch(seed)
        out = _run(s, level, t, entropy_coef=0.1, correction=correction)
        mean = out.loss / out.denominator
        expected = _naive(s, level, t, 0.1, correction)
        assert mean.item() == pytest.approx(expected.item(), rel=1e-6)
        found = torch.autograd.grad(mean, [t["logp"], t["entropy"]])
        wanted = torch.autograd.grad(expected, [t["logp"], t["entropy"]])
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)
            assert a[~t["mask"]].eq(0).all()
        assert out.stats.num_tokens == {"token": 39, "action": 13, "chunk": 7}[level] and out.stats.num_sequences == 2
        assert out.entropy == pytest.approx(t["entropy"][t["mask"]].sum().item())
        assert (out.masked > 0) == (mode == "mask")


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_units_of_one_token_are_policy_loss_bit_for_bit(aggregate, dtype) -> None:
    s = ObjectiveSettings(aggregate=aggregate, max_completion_length=20, kl_coef=0.1)
    t = {n: x.detach().to(dtype) if x.is_floating_point() else x for n, x in _batch().items()}
    grads, outs = [], []
    for fine in (True, False):
        logp = t["logp"].clone().requires_grad_()
        if fine:
            units = unit_ids("token", t["decision"], t["action"])
            out = actor_loss(s, units, logp, t["old"], t["advantage"], t["sequence"], t["mask"], ref_logp_N=t["behaviour"],
                             weight_N=t["advantage"].abs(), label_N=t["sequence"], num_labels=3)
        else:
            out = policy_loss(s, logp, t["old"], t["advantage"], t["sequence"], t["mask"], ref_logp_N=t["behaviour"],
                              weight_N=t["advantage"].abs(), label_N=t["sequence"], num_labels=3)
        out.loss.backward()
        grads.append(logp.grad)
        outs.append(out)
    assert torch.equal(outs[0].loss, outs[1].loss) and torch.equal(*grads)
    assert outs[0].stats == outs[1].stats and outs[0].by_label == outs[1].by_label
    assert outs[0].denominator == outs[1].denominator == denominator(s, t["sequence"], t["mask"])


@pytest.mark.parametrize(("level", "aggregate"), list(itertools.product(LEVELS, AGGREGATES)))
def test_cutting_a_batch_between_trajectories_changes_nothing(level, aggregate) -> None:
    s, t = ObjectiveSettings(aggregate=aggregate, max_completion_length=20), _batch()
    whole = _run(s, level, t, entropy_coef=0.1)
    parts = []
    for sequences in ([0], [1, 2]):
        chosen = torch.isin(t["sequence"], torch.tensor(sequences))
        parts.append(_run(s, level, {n: x[chosen] for n, x in t.items()}, entropy_coef=0.1))
    assert sum(p.loss for p in parts).item() == pytest.approx(whole.loss.item(), rel=1e-12)
    assert sum(p.denominator for p in parts) == whole.denominator
    assert (parts[0].stats + parts[1].stats).to_list() == pytest.approx(whole.stats.to_list(), rel=1e-9)


def test_joint_ratio_clips_where_single_tokens_would_not() -> None:
    """Six tokens that each moved by 5 %: 1.05^3 = 1.158 stays inside 1.2, 1.05^6 = 1.34 does not."""
    step = math.log(1.05)
    for level, clips in (("token", 0), ("action", 0), ("chunk", 1)):
        t = {"decision": torch.zeros(6).long(), "action": torch.arange(6) // 3}
        logp = torch.full((6,), step, requires_grad=True)
        out = actor_loss(ObjectiveSettings(clip_high=0.2), unit_ids(level, **{k + "_N": v for k, v in t.items()}), logp,
                         torch.zeros(6), torch.ones(6), torch.zeros(6).long(), torch.ones(6))
        out.loss.backward()
        assert out.stats.clip_high == clips and bool(logp.grad.abs().sum() == 0) == bool(clips)


def test_nothing_in_the_loss_and_wrong_inputs() -> None:
    t, s = _batch(), ObjectiveSettings()
    t["mask"] = torch.zeros_like(t["mask"])
    out = _run(s, "chunk", t, entropy_coef=0.1, correction=CorrectionSettings())
    assert out.loss.item() == 0 and out.denominator == 0
    t = _batch()
    t["advantage"] = torch.arange(len(t["mask"])).double()
    with pytest.raises(ConfigError, match="one advantage for all tokens of a unit"):
        _run(s, "chunk", t)
    _run(s, "token", t)
    with pytest.raises(ConfigError, match="expects behaviour log-probs"):
        actor_loss(s, t["decision"], t["logp"], t["old"], t["advantage"], t["sequence"], t["mask"], correction=CorrectionSettings())
    with pytest.raises(ConfigError, match=r"level token, action, chunk, found 'acton'.*action"):
        unit_ids("acton", t["decision"], t["action"])
    assert unit_ids("action", torch.zeros(0).long(), torch.zeros(0).long()).numel() == 0


@pytest.mark.parametrize(("kind", "clip"), list(itertools.product(("huber", "mse"), (0.2, None))))
def test_value_loss_equals_the_loop_and_its_split(kind, clip) -> None:
    g = torch.Generator().manual_seed(5)
    values, old, returns = (torch.randn(40, generator=g, dtype=torch.float64) * 9 for _ in range(3))
    old = torch.where(torch.rand(40, generator=g) > 0.5, old, values + 0.1)
    mask = torch.rand(40, generator=g) > 0.3
    values[~mask] = returns[~mask] = float("nan")
    values.requires_grad_()
    s = PPOSettings(value_loss=kind, value_clip=clip)

    def penalty(e: Tensor) -> Tensor:
        return 0.5 * e * e if kind == "mse" or abs(e) <= 10 else 10 * (abs(e) - 5)

    terms = []
    for v, o, r in zip(values[mask], old[mask], returns[mask], strict=True):
        limit = torch.tensor(clip or 0.0, dtype=torch.float64)
        near = v if clip is None else o + max(-limit, min(limit, v - o))
        terms.append(max(penalty(r - v), penalty(r - near)))
    out = value_loss(s, values, old, returns, mask)
    assert out.denominator == int(mask.sum()) == out.stats.count
    assert out.loss.item() == pytest.approx(sum(terms).item(), rel=1e-9)
    torch.testing.assert_close(torch.autograd.grad(out.loss, values)[0], torch.autograd.grad(sum(terms), values)[0])
    halves = [value_loss(s, values[i], old[i], returns[i], mask[i]) for i in (slice(0, 17), slice(17, 40))]
    total = halves[0].stats + halves[1].stats
    assert total.to_list() == pytest.approx(out.stats.to_list(), rel=1e-9)
    kept = (returns[mask], (returns - values)[mask].detach())
    assert total.explained_variance() == pytest.approx(1 - (kept[1].var() / kept[0].var()).item(), rel=1e-9)
    assert out.stats.clipped == (0 if clip is None else int(((values - old).abs() > clip)[mask].sum()))


def test_huber_and_clip_by_hand() -> None:
    one = torch.ones(1)
    for value, old, target, expected in ((0.0, 0.0, 4.0, 8.0), (0.0, 0.0, 14.0, 90.0), (1.0, 0.0, 1.0, 0.5 * 0.8**2),
                                         (0.0, 1.0, -1.0, 0.5 * 1.8**2)):
        v = torch.tensor([value], requires_grad=True)
        out = value_loss(PPOSettings(), v, torch.tensor([old]), torch.tensor([target]), one)
        assert out.loss.item() == pytest.approx(expected)
    out.loss.backward()
    assert v.grad.item() == 0  # already moved further than 0.2 towards the target: no more pull
    assert value_loss(PPOSettings(), v, one, one, one, weight_N=torch.tensor([3.0])).loss.item() == pytest.approx(1.5)
    half = value_loss(PPOSettings(), torch.zeros(1, dtype=torch.bfloat16), one, one * 4, one)
    assert half.loss.dtype == torch.float32


def test_explained_variance_of_perfect_constant_and_spreadless() -> None:
    x = torch.tensor([1.0, 2.0, 4.0])
    ones = torch.ones(3)
    assert value_loss(PPOSettings(), x, x, x, ones).stats.explained_variance() == pytest.approx(1)
    assert value_loss(PPOSettings(), ones, ones, x, ones).stats.explained_variance() == pytest.approx(0)
    assert value_loss(PPOSettings(), x, x, 0.1 * ones, ones).stats.explained_variance() is None
    assert ValueStats().explained_variance() is None
    assert value_loss(PPOSettings(), x, x, x, torch.zeros(3)).denominator == 0


def test_warm_up_counts_optimizer_steps() -> None:
    assert [critic_warming_up(PPOSettings(critic_warmup_steps=2), n) for n in range(4)] == [True, True, False, False]
    assert not critic_warming_up(PPOSettings(), 0)


@pytest.mark.parametrize(("wrong", "text"), [
    ({"level": "chunks"}, r"level to be one of token, action, chunk, found 'chunks'.*chunk"),
    ({"value_loss": "hubert"}, "value_loss to be one of huber, mse"), ({"value_clip": 0.0}, "value_clip above 0"),
    ({"huber_delta": -1.0}, "huber_delta above 0"), ({"entropy_coef": float("nan")}, "entropy_coef at least 0"),
    ({"critic_warmup_steps": -1}, "critic_warmup_steps at least 0")])
def test_settings_explain_themselves(wrong, text) -> None:
    with pytest.raises(ConfigError, match=text):
        PPOSettings(**wrong)
