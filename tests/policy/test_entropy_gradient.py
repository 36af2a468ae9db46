"""The gradient of the entropy: against finite differences, against transformers alone, and through whole optimizer steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import load_config
from mmrl.policy.output_layer import TokenScores
from mmrl.policy.pack import PackItem, pack
from mmrl.policy.policy import Policy
from mmrl.training.trainer import Trainer
from tests.diagnostics.test_memory import allocated_peak
from tests.kits.engine_kit import (
    Album,
    config_file,
    fresh_policy,
    picture,
    plain_logits,
    read_jsonl,
    sample_with,
    small_run,
    tiny_folder,
)

TASK = Album()
TEXTS = ((5, 6, 7), (8, 9, 10, 11, 12), (200,), (3, 4))


def logits(seed: int = 0) -> torch.Tensor:
    """Five rows of seven logits, float64: a flat one, a sharp one, one with impossible tokens, one that underflows."""
    g = torch.Generator().manual_seed(seed)
    rows = (
        torch.randn(5, 7, generator=g, dtype=torch.float64)
        * torch.tensor([0.0, 1.0, 8.0, 1.0, 1.0])[:, None]
    )
    rows[3, [0, 4]] = float("-inf")
    rows[4, 2] = -1e4
    return rows


def entropy(logits_nV: torch.Tensor) -> torch.Tensor:
    return TokenScores.apply(logits_nV, torch.zeros(len(logits_nV), dtype=torch.long), True)[1]


def test_value_and_gradient_are_those_of_torchs_own_distribution() -> None:
    ours, theirs = logits().requires_grad_(), logits().requires_grad_()
    weight_n = torch.tensor([1.0, -2.0, 0.5, 3.0, 1.5], dtype=torch.float64)
    found = entropy(ours)
    # Categorical's own gradient is nan at -inf
    possible = theirs.masked_fill(theirs.isneginf(), -1e4)
    expected = torch.distributions.Categorical(logits=possible, validate_args=False).entropy()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (found * weight_n).sum().backward()
    (expected * weight_n).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    assert (
        ours.grad is not None
        and (ours.grad[3, [0, 4]] == 0).all()
        and torch.isfinite(ours.grad).all()
    )


def test_gradient_is_that_of_finite_differences() -> None:
    rows = logits(1)[[0, 1, 2, 4]].requires_grad_()
    assert torch.autograd.gradcheck(entropy, (rows,), eps=1e-6, atol=1e-6)


def plain_entropies(
    p: Policy, model: Any, sample: Any, texts: Any, temperature: float
) -> torch.Tensor:
    """Entropies by transformers alone, one completion at a time, the whole vocabulary at once."""
    rows = []
    for _, logits in plain_logits(p, model, TASK, sample, texts):
        row = (logits / temperature).index_fill(-1, p.banned, -1e4)
        rows.append(torch.distributions.Categorical(logits=row).entropy())
    return torch.cat(rows)


@pytest.mark.parametrize("chunk", [1 << 26, 1000], ids=["at once", "in chunks, computed again"])
def test_the_shared_prefix_gives_transformers_entropies_and_their_gradient(chunk: int) -> None:
    from transformers import AutoModelForImageTextToText

    p = fresh_policy()
    p._logits_chunk = chunk
    model = AutoModelForImageTextToText.from_pretrained(
        tiny_folder("qwen2_5_vl"), attn_implementation="eager", dtype=torch.float32
    ).eval()
    samples = [sample_with([picture((56, 56), i)] * (i % 2), number=i) for i in range(2)]
    batch = pack([PackItem(p.encoder(s, TASK), TEXTS) for s in samples])
    found = p.logp(batch, 0.7, entropy_gradient=True)
    expected = torch.cat([plain_entropies(p, model, s, TEXTS, 0.7) for s in samples])
    torch.testing.assert_close(found.entropy_N.detach(), expected.detach(), atol=1e-4, rtol=1e-5)
    weight_N = torch.sin(torch.arange(len(expected)) * 1.7 + 0.3)
    (found.entropy_N * weight_N).sum().backward()
    (expected * weight_N).sum().backward()
    theirs = {n: q.grad for n, q in model.named_parameters() if q.grad is not None}
    ours = {n: q.grad for n, q in p.model.named_parameters() if q.grad is not None}
    assert ours.keys() == theirs.keys() and ours
    difference = torch.stack([(ours[n] - theirs[n]).double().norm() for n in ours]).norm()
    assert difference < 2e-5 * torch.stack([theirs[n].double().norm() for n in theirs]).norm()


def test_without_being_asked_entropies_have_no_gradient_and_the_same_bits() -> None:
    p = fresh_policy()
    batch = pack([PackItem(p.encoder(sample_with([]), TASK), TEXTS)])
    plain, asked = p.logp(batch), p.logp(batch, entropy_gradient=True)
    assert not plain.entropy_N.requires_grad and asked.entropy_N.requires_grad
    assert torch.equal(plain.entropy_N, asked.entropy_N) and torch.equal(plain.logp_N, asked.logp_N)
    with torch.no_grad():
        assert not p.logp(batch, entropy_gradient=True).entropy_N.requires_grad


def test_the_gradient_needs_no_more_memory() -> None:
    """At most four copies of the logits, within the five that mmrl.diagnostics.memory counts, with a bonus as without."""
    p, (n, vocabulary) = fresh_policy(), (4000, 448)
    hidden_nH, target_n = torch.randn(n, 64, requires_grad=True), torch.randint(0, 200, (n,))

    def update(entropy_gradient: bool) -> None:
        logp_n, entropy_n = p._logp_of(hidden_nH, target_n, 0.7, entropy_gradient)
        (logp_n.sum() + (0.1 * entropy_n.sum() if entropy_gradient else 0.0)).backward()

    update(False)  # gradients of weights are there from now on
    copies = [
        allocated_peak(lambda: update(asked)) / (4 * n * vocabulary)  # noqa: B023
        for asked in (False, True)
    ]
    assert copies[1] < copies[0] + 0.1 and copies[1] < 4, copies


def trained(
    folder: Path, name: str, **sections: Any
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Weights after two steps on text, and the rows of metrics."""
    data = folder / "rows.jsonl"
    data.write_text(
        "".join(
            json.dumps({"id": f"t{i}", "images": [], "question": f"Spell {i}."}) + "\n"
            for i in range(6)
        )
    )
    tree = small_run(folder / "runs", str(data), name=name, **sections)
    trainer = Trainer(load_config(config_file(folder / f"{name}.yaml", tree)))
    trainer.fit()
    return (
        {n: q.detach().clone() for n, q in trainer.policy.model.named_parameters()},
        read_jsonl(trainer.folder.path / "metrics.jsonl"),
    )


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss_aggregation": "token_mean"},
        {"loss_aggregation": "sequence_mean", "importance_sampling_level": "sequence"},
        {"loss_aggregation": "dr_grpo"},
        {"advantage": "gae"},
    ],
    ids=["token_mean", "sequence_mean and level", "dr_grpo", "value head"],
)
def test_a_step_does_not_depend_on_its_micro_batches(
    tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    """Every split of the same groups gives the same step, and the bonus is in it; a budget of 30 splits groups, too."""

    def run(
        name: str, budget: int, coef: float
    ) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
        return trained(
            tmp_path,
            name,
            algorithm={
                **algorithm,
                "entropy": {"coef": coef},
                "dynamic_sampling": False,
            },
            train={"steps": 1, "token_budget": budget},
            optim={"lr": 1.0, "eps": 1.0},
        )  # linear far below eps

    small, rows = run("small", 30, 0.1)
    whole, again = run("whole", 4000, 0.1)
    without, _ = run("without", 4000, 0.0)
    moved = max(float((whole[n] - without[n]).abs().max()) for n in whole)
    apart = max(float((whole[n] - small[n]).abs().max()) for n in whole)
    assert moved > 0 and apart < 1e-3 * moved, (moved, apart)
    assert rows[0]["train/tokens/packed"] > again[0]["train/tokens/packed"], "prompts were repeated"
    assert rows[0]["train/entropy_coef"] == again[0]["train/entropy_coef"] == 0.1


@pytest.mark.slow
def test_a_bonus_that_does_not_act_changes_nothing_and_one_that_acts_raises_entropy(
    tmp_path: Path,
) -> None:
    plain, rows = trained(tmp_path, "plain", train={"steps": 2})
    assert "train/entropy_coef" not in rows[0]
    above, gated = trained(
        tmp_path, "above", train={"steps": 2}, algorithm={"entropy": {"coef": 0.5, "target": 1e-6}}
    )
    assert same(plain, above) and [r["train/entropy_coef"] for r in gated] == [0, 0], (
        "entropy above the target: to the last bit"
    )
    raised, after = trained(
        tmp_path,
        "raised",
        train={"steps": 2},
        algorithm={"entropy": {"coef": 0.5, "target": 99, "delta": 0.25}},
    )
    assert [r["train/entropy_coef"] for r in after] == [0.75, 1.0]
    assert after[0]["train/entropy"] == rows[0]["train/entropy"], (
        "the first step knows no entropy yet"
    )
    assert not same(plain, raised)
    strong, up = trained(
        tmp_path, "strong", train={"steps": 2}, algorithm={"entropy": {"coef": 5.0}}
    )
    assert up[1]["train/entropy"] > rows[1]["train/entropy"] and not same(plain, strong)
