"""The planning page is what its script writes, and the arithmetic behind it holds where it can be checked by hand."""

from __future__ import annotations

import dataclasses
import re

import pytest

from mmrl.errors import ConfigError
from scripts import plan_scale
from scripts.plan_scale import (
    ASSUMED,
    GPUS,
    REPO,
    accepted,
    link_s,
    micro_batches,
    own_decode,
    plan,
    recipes,
    render,
    shape_of,
    trained_parameters,
    vllm_rows,
)

pytestmark = pytest.mark.slow


def test_the_committed_page_is_what_the_script_writes() -> None:
    text = (REPO / "docs/scaling.md").read_text(encoding="utf-8")
    assert text == render(), "python -m scripts.plan_scale writes it anew"
    assert len(text.splitlines()) <= 200


@pytest.mark.parametrize(
    ("name", "numbers"), [("Qwen2.5-VL-3B-Instruct", 3.755e9), ("Qwen2.5-VL-7B-Instruct", 8.292e9)]
)
def test_shapes_add_up_to_the_published_numbers_of_parameters(name: str, numbers: float) -> None:
    """As the hub displays them; norms and biases, which the arithmetic leaves out, are far below one percent."""
    s = shape_of(name)
    assert s.language + s.stored + s.vision == pytest.approx(numbers, rel=0.01)


def test_a_step_worked_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grounding, 8 prompts on each of 8 GPUs: the packed update and the gathers of FSDP2, on assumptions alone."""
    monkeypatch.setattr(plan_scale, "measured_gpu", dict)
    r = recipes()[0]
    found = plan(r, 8, 8)
    tokens, answers = 1408 + 8 * 64, 8 * 64
    pairs = 1408**2 / 2 + answers * (1408 + 32)
    forward = 2 * r.shape.language * tokens + 2 * r.shape.head * answers + 4 * 36 * 2048 * pairs
    assert found.seconds["update"] == pytest.approx(8 * 4 * forward / (989e12 * 0.35))
    assert micro_batches(r, 8) == 1 and trained_parameters(r) == r.shape.language + r.shape.head
    assert found.traffic["gathers"] == pytest.approx(7 / 8 * (2 * 2 + 4) * trained_parameters(r))
    sent = found.traffic["gradients"] + found.traffic["gathers"]
    assert found.seconds["network"] == pytest.approx(sent / (450e9 * 0.7))
    assert found.step_s == pytest.approx(sum(found.seconds.values()))


def test_decoding_worked_out_by_hand() -> None:
    """vLLM: bf16 weights once per token, all rows at once; its share of an eighth of the GPUs has room for them."""
    r = recipes()[0]
    step = 2 * (r.shape.language + r.shape.head) + 2 * 2 * 36 * 2 * 128 * 64 * (1408 + 32)
    assert plan(r, 8, 8).seconds["decode"] == pytest.approx(128 * step / (3.35e12 * 0.6))
    # mmrl's own engine: its bf16 copy; 64 rows in fewer slots, which are taken again; the last row is the longest
    slots, own = own_decode(r, 8)
    assert slots == r.config.rollout.batch_tokens // (1408 + 128) < 64
    token = 2 * (r.shape.language + r.shape.head) + slots * 2 * 2 * 36 * 2 * 128 * (1408 + 32)
    tokens = 128 + (64 - slots) * 64 / slots
    assert own == pytest.approx(tokens * token / (3.35e12 * 0.6))
    for planned in recipes()[:2]:
        assert (
            vllm_rows(planned) > 8 * planned.config.train.prompts_per_step / GPUS[0] * planned.group
        )


def test_engines_send_what_their_formulas_say() -> None:
    r = recipes()[0]
    ddp, zero2, fsdp2 = (
        plan(
            dataclasses.replace(r, engine=name, overrides=(f"engine.train={name}",)), 8, 80
        ).traffic
        for name in ("ddp", "deepspeed_zero2", "fsdp2")
    )
    m, one = micro_batches(r, 80), 7 / 8 * 4 * trained_parameters(r)
    assert m > 1 and ddp["gradients"] == pytest.approx(2 * one) and ddp["gathers"] == 0
    assert zero2["gradients"] == pytest.approx(2 * m * one) and zero2["gathers"] == pytest.approx(
        one
    )
    assert fsdp2["gradients"] == pytest.approx(m * one) and fsdp2["gathers"] == pytest.approx(
        (2 * m / 2 + 1) * one
    )


def test_what_grows_and_what_stays() -> None:
    for r in recipes():
        small, large = (plan(r, g, 8) for g in (GPUS[0], GPUS[-1]))
        assert (
            large.seconds["update"] == small.seconds["update"]
            and large.prompts == 64 * small.prompts
        )
        assert large.memory <= small.memory and large.generated > 10 * small.generated
        assert small.step_s >= max(small.seconds.values())
    constants = {k: v[0] for k, v in ASSUMED.items()}
    assert link_s(constants, 64, 1e9) > link_s(constants, 8, 1e9)


def test_every_row_is_a_run_that_mmrl_accepts() -> None:
    """Of both tables: the batch that grows, and the recipe's own."""
    for r in recipes():
        own = r.config.train.prompts_per_step
        for gpus in GPUS:
            for prompts in (own * gpus // GPUS[0], own):
                config = accepted(r, gpus, prompts)
                assert (
                    config.train.prompts_per_step == prompts
                    and config.model.path == r.config.model.path
                )


def test_a_row_that_mmrl_refuses_is_not_planned() -> None:
    grounding, _, libero = recipes()
    asynchronous = dataclasses.replace(
        grounding, overrides=(*grounding.overrides, "schedule.kind=async", "schedule.staleness=1")
    )
    with pytest.raises(
        ConfigError, match=r"expected schedule\.kind serial in a run of 8 processes, found async"
    ):
        plan(asynchronous, 8, 8)
    with pytest.raises(
        ConfigError,
        match=r"expected schedule\.kind serial with engine\.train fsdp2, found pipelined",
    ):
        plan(
            dataclasses.replace(
                libero, overrides=(*libero.overrides, "engine.train=fsdp2"), engine="fsdp2"
            ),
            8,
            8,
        )
    with pytest.raises(ValueError, match=r"planned with engine\.train ddp"):
        plan(dataclasses.replace(grounding, engine="ddp"), 8, 8)
    text = (REPO / "docs/scaling.md").read_text(encoding="utf-8")
    assert "staleness" not in text and not re.search(r"\bapart\b", text)
