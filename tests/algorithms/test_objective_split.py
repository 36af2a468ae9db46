"""The update must not know how it was cut up: micro-batches, their order, packing, and ranks change nothing.

Run: pytest tests/algorithms/test_objective_split.py
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mmrl.algorithms import LossStats, ObjectiveSettings, denominator, gradient_scale, policy_loss

VOCAB, WIDTH = 11, 6
LENGTHS = (4, 9, 1, 6, 12, 3, 5, 2)
VARIANTS = [
    (importance, loss_aggregation)
    for importance in ("token", "sequence")
    for loss_aggregation in ("token_mean", "sequence_mean", "dr_grpo")
]


def _sequences(seed: int = 0) -> list[dict[str, Tensor]]:
    """Eight sequences; the third (length 1) is masked out wholly, others in part."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for number, length in enumerate(LENGTHS):
        out.append(
            {
                "token": torch.randint(VOCAB, (length + 1,), generator=g),
                "old": -torch.rand(length, generator=g, dtype=torch.float64) * 4,
                "ref": -torch.rand(length, generator=g, dtype=torch.float64) * 4,
                "advantage": torch.randn(1, generator=g, dtype=torch.float64).expand(length),
                "mask": (torch.rand(length, generator=g) > 0.2) & (number != 2),
            }
        )
    return out


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCAB)).to(dtype)


def _accumulate(
    model: nn.Module, s: ObjectiveSettings, batches: list[list[dict[str, Tensor]]]
) -> tuple[float, LossStats]:
    """Backward over `batches` of whole sequences; returns the summed denominator and stats."""
    dtype = next(model.parameters()).dtype
    total, stats = 0.0, LossStats()
    for batch in batches:
        inputs = torch.cat([q["token"][:-1] for q in batch])
        targets = torch.cat([q["token"][1:] for q in batch])
        logp_N = torch.log_softmax(model(inputs), -1).gather(1, targets[:, None]).squeeze(1)
        ids_N = torch.repeat_interleave(
            torch.arange(len(batch)), torch.tensor([len(q["old"]) for q in batch])
        )

        def join(name: str, batch=batch) -> Tensor:
            return torch.cat([q[name] for q in batch]).to(dtype)

        mask_N = torch.cat([q["mask"] for q in batch])
        out = policy_loss(
            s, logp_N, join("old"), join("advantage"), ids_N, mask_N, ref_logp_N=join("ref")
        )
        assert out.denominator == denominator(s, ids_N, mask_N)
        out.loss.backward()
        total, stats = total + out.denominator, stats + out.stats
    return total, stats


def _gradient(model: nn.Module, scale: float) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]) * scale


def _split(sequences: list, size: int) -> list[list]:
    return [sequences[i : i + size] for i in range(0, len(sequences), size)]


def _whole(s: ObjectiveSettings, dtype: torch.dtype) -> tuple[Tensor, float, LossStats]:
    model = _model(dtype)
    total, stats = _accumulate(model, s, [_sequences()])
    return _gradient(model, gradient_scale(total)), total, stats


def _settings(importance, loss_aggregation) -> ObjectiveSettings:
    return ObjectiveSettings(
        importance_sampling_level=importance,
        loss_aggregation=loss_aggregation,
        kl_coef=0.1,
        max_completion_length=20,
    )


@pytest.mark.check_takes(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("importance", "loss_aggregation"), VARIANTS)
def test_micro_batch_size_order_and_ranks_change_nothing(
    importance, loss_aggregation, dtype
) -> None:
    s = _settings(importance, loss_aggregation)
    expected, total, stats = _whole(s, dtype)
    assert (
        expected.abs().max() > 1e-2
        and stats.clip_low > 0
        and stats.clip_high > 0
        and stats.dual_clip > 0
    )
    tolerance = (
        {"atol": 1e-12, "rtol": 1e-10} if dtype == torch.float64 else {"atol": 2e-6, "rtol": 2e-5}
    )
    sequences = _sequences()
    shuffled = random.Random(0).sample(sequences, len(sequences))
    for order in (sequences, sequences[::-1], shuffled):
        for size in (1, 2, 4, 8):
            model = _model(dtype)
            split_total, split_stats = _accumulate(model, s, _split(order, size))
            assert split_total == total
            torch.testing.assert_close(
                _gradient(model, gradient_scale(split_total)), expected, **tolerance
            )
            assert split_stats.to_list() == pytest.approx(stats.to_list(), rel=1e-5)
        for border in (1, 3, 4):  # two ranks with unequal shares, micro-batches of 1 and 2
            ranks = [_model(dtype), copy.deepcopy(_model(dtype))]
            shares = [_split(order[:border], 1), _split(order[border:], 2)]
            totals = [
                _accumulate(model, s, share)[0] for model, share in zip(ranks, shares, strict=True)
            ]
            # what an all-reduce with op SUM gives
            summed = _gradient(ranks[0], 1.0) + _gradient(ranks[1], 1.0)
            torch.testing.assert_close(summed * gradient_scale(sum(totals)), expected, **tolerance)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(VARIANTS), st.permutations(range(len(LENGTHS))), st.data())
def test_any_partition_gives_the_same_gradient(variant, order, data) -> None:
    s = _settings(*variant)
    expected, total, _ = _whole(s, torch.float64)
    borders = sorted(data.draw(st.sets(st.integers(1, len(LENGTHS) - 1))))
    sequences = _sequences()
    batches = [
        [sequences[i] for i in order[a:b]]
        for a, b in zip([0, *borders], [*borders, len(order)], strict=True)
    ]
    model = _model(torch.float64)
    split_total, _ = _accumulate(model, s, batches)
    assert split_total == total
    torch.testing.assert_close(
        _gradient(model, gradient_scale(split_total)), expected, atol=1e-12, rtol=1e-10
    )


@pytest.mark.parametrize(("importance", "loss_aggregation"), VARIANTS)
def test_tokens_of_packed_sequences_may_interleave(importance, loss_aggregation) -> None:
    """Packing decides where tokens lie; only sequence_id_N says to whom they belong, with any distinct numbers."""
    s = _settings(importance, loss_aggregation)
    sequences = _sequences()
    n = sum(LENGTHS)
    g = torch.Generator().manual_seed(9)
    fields = {
        name: torch.cat([q[name] for q in sequences])
        for name in ("old", "advantage", "mask", "ref")
    }
    logp = fields["old"] + 0.5 * torch.randn(n, generator=g, dtype=torch.float64)
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    gradients = []
    for order, names in ((torch.arange(n), ids), (torch.randperm(n, generator=g), 100 - 7 * ids)):
        leaf = logp.clone().requires_grad_()
        out = policy_loss(
            s,
            leaf[order],
            fields["old"][order],
            fields["advantage"][order],
            names[order],
            fields["mask"][order],
            ref_logp_N=fields["ref"][order],
        )
        out.loss.backward()
        gradients.append((leaf.grad, out.denominator))
    torch.testing.assert_close(gradients[0][0], gradients[1][0], atol=1e-13, rtol=1e-10)
    assert gradients[0][1] == gradients[1][1]


def test_a_wholly_masked_sequence_is_as_if_it_were_not_there() -> None:
    for importance, loss_aggregation in VARIANTS:
        s = _settings(importance, loss_aggregation)
        expected, total, _ = _whole(s, torch.float64)
        model = _model(torch.float64)
        without = [q for q in _sequences() if q["mask"].any()]
        assert len(without) == len(LENGTHS) - 1
        assert _accumulate(model, s, [without])[0] == total
        torch.testing.assert_close(
            _gradient(model, gradient_scale(total)), expected, atol=1e-12, rtol=1e-10
        )


def test_stats_add_and_survive_the_trip_through_a_list() -> None:
    a = LossStats(*range(1, 11))
    assert LossStats.from_list(a.to_list()) == a == a + LossStats()
    assert (a + a).to_list() == [2.0 * v for v in a.to_list()]
    assert (a + a).means() == a.means()


@pytest.mark.parametrize(("importance", "loss_aggregation"), VARIANTS)
def test_statistics_by_label_are_those_of_its_sequences_alone(importance, loss_aggregation) -> None:
    s = ObjectiveSettings(
        importance_sampling_level=importance,
        loss_aggregation=loss_aggregation,
        max_completion_length=16,
    )
    sequences, labels = _sequences(), [0, 2, 0, 2, 0, 0, 2, 2]
    g = torch.Generator().manual_seed(9)
    now = [
        q["old"] + 0.5 * torch.randn(len(q["old"]), generator=g, dtype=torch.float64)
        for q in sequences
    ]

    def run(chosen: list[int], **options):
        ids_N = torch.repeat_interleave(
            torch.tensor(chosen), torch.tensor([LENGTHS[i] for i in chosen])
        )
        parts = [
            torch.cat([sequences[i][name] for i in chosen])
            for name in ("old", "advantage", "mask", "ref")
        ]
        return policy_loss(
            s,
            torch.cat([now[i] for i in chosen]),
            parts[0],
            parts[1],
            ids_N,
            parts[2],
            ref_logp_N=parts[3],
            **options,
        )

    whole = list(range(8))
    label_N = torch.repeat_interleave(torch.tensor(labels), torch.tensor(LENGTHS))
    split, plain = run(whole, label_N=label_N, num_labels=3), run(whole)
    assert (
        torch.equal(split.loss, plain.loss) and split.stats == plain.stats and plain.by_label == ()
    )
    assert split.by_label[1] == LossStats()
    assert sum((x for x in split.by_label), LossStats()).to_list() == pytest.approx(
        split.stats.to_list()
    )
    for label in (0, 2):
        alone = run([i for i in whole if labels[i] == label])
        assert split.by_label[label].to_list() == pytest.approx(alone.stats.to_list())
