"""The memory estimate against what is there: bytes of weights, gradients and moments exactly, activations within stated factors."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mmrl.cli.main import app
from mmrl.cli.memory import memory_command
from mmrl.cli.run import run_config
from mmrl.config import LoraSettings, ModelConfig, OptimConfig, RunConfig
from mmrl.diagnostics._family_memory import kept_bytes, language_apart, tower_apart
from mmrl.diagnostics.memory import (
    MemoryEstimate,
    announce_memory,
    estimate,
    micro_batch,
    parameter_bytes,
    prompt_tokens_of,
)
from mmrl.diagnostics.memory_activations import (
    Micro,
    Precision,
    cache_bytes,
    logits_bytes,
    update_bytes,
)
from mmrl.diagnostics.memory_run import PlannedRun
from mmrl.diagnostics.shapes import config_of, meta_model, shape_config
from mmrl.errors import ConfigError
from mmrl.policy import attention_flash, attention_flex
from mmrl.policy.attention import ATTENTIONS, set_attention
from mmrl.policy.encode import Prompt
from mmrl.policy.families.glm import Glm4V
from mmrl.policy.families.shapes import Layer, Tower
from mmrl.policy.loading import load_policy
from mmrl.policy.pack import PackItem, pack
from mmrl.policy.policy import Policy
from mmrl.policy.tiny import TinySpec, build_tiny
from mmrl.rollout import PrefillOnceEngine, Request, SamplingSettings
from mmrl.training.optim import build_optimizer
from tests.kits.engine_kit import REPO, config_file, small_run
from tests.kits.fast_kit import first_fast

GIB = 2**30
SIZES = {"P": 300, "C": 64, "G": 4, "M": 3}
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "frozen": {"dtype": "bf16", "freeze": ["vision", "projector"]},
    "lora": {"dtype": "bf16", "lora": LoraSettings(r=4)},
    "lora fp32": {"lora": LoraSettings(r=4, vision=True)},
}
EXPERTS = {"lora": LoraSettings(r=4, experts=True), "frame": "rel1"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model per architecture, wide enough that activations outweigh the rest."""

    @functools.cache
    def made(arch: str) -> str:
        folder = str(tmp_path_factory.mktemp(arch))
        build_tiny(TinySpec(arch=arch, hidden=256, layers=3), folder)
        return folder

    return made


def run_of(path: str, options: dict[str, Any], **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {
                "path": path,
                "device": "cpu",
                **ModelConfig(**options).model_dump(include=set(options)),
            },
            **sections,
        }
    )


def held(parameters: Any) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


# ---- what is held throughout


@pytest.mark.check_takes(3)
@pytest.mark.parametrize(
    ("arch", "variant"),
    [
        *(("qwen2_5_vl", variant) for variant in VARIANTS),
        ("qwen2_vl", "frozen"),
        ("qwen3_vl", "lora"),
        ("kimi_k25", "experts"),
    ],
)
def test_parts_equal_the_bytes_of_a_loaded_run(arch: str, variant: str, folders: Any) -> None:
    """Weights, gradients, both moments and the reference, bit by bit those of a policy that has taken an optimizer step."""
    options = EXPERTS if variant == "experts" else VARIANTS[variant]
    run = run_of(folders(arch), options, algorithm={"kl": {"coef": 0.1}})
    p = load_policy(run.model, run.data, needs_reference=True)
    optimizer = build_optimizer(p.trainable(), run.optim)
    for _, parameter in p.trainable():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    found = estimate(run, kind="cpu")
    moments = held(
        v for state in optimizer.state.values() for name, v in state.items() if name != "step"
    )
    assert found.parts["weights"] == held(p.model.parameters())
    gradients = held(q.grad for _, q in p.trainable())
    assert {found.phases[n]["gradients"] for n in ("update", "optimizer step")} == {gradients}
    assert found.parts["optimizer"] == moments
    reference = 0 if p.reference_model is None else held(p.reference_model.parameters())
    assert found.parts.get("reference", 0) == reference and (reference > 0) == (not p.has_adapter)


def test_public_shapes_have_the_published_numbers_of_parameters() -> None:
    """As the hub displays them on each model's page."""
    published = {
        "Qwen2.5-VL-3B-Instruct": 3_754_622_976,
        "Qwen2.5-VL-7B-Instruct": 8_292_166_656,
        "Qwen3-VL-4B-Instruct": 4_437_815_808,
        "Qwen3-VL-8B-Instruct": 8_767_123_696,
    }
    assert {
        name: meta_model(shape_config(name)).num_parameters() for name in published
    } == published
    with pytest.raises(ConfigError, match="Did you mean 'Qwen3-VL-4B-Instruct'"):
        shape_config("Qwen3-VL-4B-Instrct")


# ---- what is held for a while


class _Kept(torch.autograd.Function):
    """Keeps what a fused attention kernel keeps, queries, keys, values and outputs, and computes the rest again."""

    @staticmethod
    def forward(ctx: Any, function: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.function, out = function, function(*tensors)
        ctx.save_for_backward(*tensors, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors[:-1]]
        with torch.enable_grad():
            out = ctx.function(*inputs)
        return None, *torch.autograd.grad(out, inputs, gradient)


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU flash and flex attention are stand-ins that keep their scores and masks; here they keep what the kernels do."""
    from tests.policy.test_attention import looped_varlen

    flex = attention_flex.flex

    def kept_flex(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        def kernel(*qkv: torch.Tensor) -> torch.Tensor:
            return flex(*qkv, *rest).transpose(1, 2).contiguous()

        return _Kept.apply(
            kernel, query.contiguous(), key.contiguous(), value.contiguous()
        ).transpose(1, 2)

    monkeypatch.setattr(
        attention_flash,
        "varlen_attention",
        lambda q, k, v, *rest, **options: _Kept.apply(
            lambda *qkv: looped_varlen(*qkv, *rest, **options), q, k, v
        ),
    )
    monkeypatch.setattr("mmrl.policy.attention.flex", kept_flex)


def groups_of(p: Policy) -> Any:
    """A packed batch of equal groups without pictures, and its description."""
    P, C, G, M = SIZES.values()
    prompt = Prompt(
        torch.arange(P) % 200, torch.zeros(P, dtype=torch.long), torch.arange(P).expand(3, P), P
    )
    return pack([PackItem(prompt, tuple((7,) * C for _ in range(G)))] * M), Micro(M, P, C, G)


def activations(
    p: Policy, run: RunConfig, micro: Micro, attn: str, *, checkpointing: bool
) -> tuple[float, float]:
    text = p.base.config.text_config
    shapes = parameter_bytes(run, p.base.config, "cpu")
    precision = Precision(
        4 if p.autocast_dtype is None else 2, p.base.get_input_embeddings().weight.itemsize
    )
    return update_bytes(
        text,
        p.family.layers(text),
        precision,
        micro,
        attn,
        trained=shapes.trained_language,
        adapted=shapes.adapted,
        checkpointing=checkpointing,
    )


@pytest.mark.check_takes(1)
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    ("arch", "variant", "attn"),
    [
        ("qwen2_vl", "lora", "flash_attention_2"),
        *first_fast([("qwen3_vl", name, "sdpa") for name in ("fp32", "frozen", "lora")]),
        *first_fast(
            [
                *(("qwen2_5_vl", "frozen", attn) for attn in ATTENTIONS),
                ("qwen3_vl", "lora", "flex"),
                ("qwen3_vl", "fp32", "eager"),
            ]
        ),
    ],
)
def test_kept_activations_are_within_a_tenth(
    arch: str, variant: str, attn: str, folders: Any
) -> None:
    run = run_of(folders(arch), {**VARIANTS[variant], "gradient_checkpointing": False})
    p = load_policy(run.model)
    set_attention(p.base, attn)
    batch, micro = groups_of(p)
    assert (micro.tokens, micro.completion_tokens) == (batch.num_tokens, len(batch.target_N))
    estimated, _ = activations(p, run, micro, attn, checkpointing=False)
    assert estimated == pytest.approx(kept_bytes(p, lambda: p.hidden(batch)), rel=0.1)


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("arch", first_fast(["qwen3_vl_moe", "kimi_k25"]))
def test_adapters_on_experts_keep_what_is_estimated(arch: str, dtype: str, folders: Any) -> None:
    """Beside what an adapter of the other layers keeps."""
    kept, estimated = [], []
    for experts in (False, True):
        lora = LoraSettings(r=4, experts=experts)
        options = {"lora": lora, "dtype": dtype, "frame": "rel1", "gradient_checkpointing": False}
        run = run_of(folders(arch), options)
        p = load_policy(run.model)
        set_attention(p.base, "sdpa")
        batch, micro = groups_of(p)
        kept.append(kept_bytes(p, functools.partial(p.hidden, batch)))
        estimated.append(activations(p, run, micro, "sdpa", checkpointing=False)[0])
    assert estimated[1] - estimated[0] == pytest.approx(kept[1] - kept[0], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["bf16", "lora"])
@pytest.mark.parametrize(
    "arch",
    [
        "internvl",
        "gemma3",
        "smolvlm",
        "llava_onevision",
        "aya_vision",
        "glm4v",
        "glm4v_moe",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl_moe",
        "kimi_k25",
    ],
)
def test_other_families_keep_what_their_records_say(arch: str, variant: str, folders: Any) -> None:
    """What `mmrl families check` holds in fp32, under autocast and with an adapter, too."""
    options = {**VARIANTS[variant], "gradient_checkpointing": False, "frame": "rel1"}
    run = run_of(folders(arch), options)
    p = load_policy(run.model)
    set_attention(p.base, "sdpa")
    batch, micro = groups_of(p)
    estimated, _ = activations(p, run, micro, "sdpa", checkpointing=False)
    assert estimated == pytest.approx(kept_bytes(p, lambda: p.hidden(batch)), rel=0.1)


def test_a_record_that_says_too_little_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GLM-4.1V with two norms in a layer in place of four, and a tower without a gate."""
    build_tiny(TinySpec(arch="glm4v"), str(tmp_path))
    p = load_policy(run_of(str(tmp_path), {}).model)
    assert abs(language_apart(p)) < 0.1 and abs(tower_apart(p)) < 0.1
    monkeypatch.setattr(Glm4V, "layer", Layer(joint=True))
    with pytest.raises(AssertionError, match="activations of the language model: expected"):
        language_apart(p)
    monkeypatch.setattr(Glm4V, "tower", Tower(attention=6, products=1))
    with pytest.raises(AssertionError, match="activations of the vision tower: expected"):
        tower_apart(p)


def test_recorded_phases_are_within_a_tenth() -> None:
    """As docs/results.md says of scripts/bench_memory.py."""
    record = json.loads((REPO / "assets" / "results" / "bench_memory.json").read_text())
    for row in record["rows"]:
        for phase, measured in row["measured_mib"].items():
            assert row["estimated_mib"][phase] == pytest.approx(measured, rel=0.1), row["case"]


def allocated_peak(function: Any) -> int:
    """Largest sum of live CPU tensor memory that `function` allocated, by torch's profiler."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        function()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("variant", ["lora", "frozen"])
def test_peak_of_an_update_is_within_a_third(
    variant: str, checkpointing: bool, folders: Any
) -> None:
    run = run_of(
        folders("qwen2_5_vl"), {**VARIANTS[variant], "gradient_checkpointing": checkpointing}
    )
    p = load_policy(run.model)
    batch, micro = groups_of(p)
    p._logits_chunk = 64 * 448  # logits in several pieces
    kept, passing = activations(p, run, micro, "sdpa", checkpointing=checkpointing)
    shapes, text = parameter_bytes(run, p.base.config, "cpu"), p.base.config.text_config
    logits = logits_bytes(
        text,
        micro.completion_tokens,
        p._logits_chunk,
        head_bytes=shapes.head[0],
        head_trained=shapes.head[1],
    )
    measured = allocated_peak(lambda: p.logp(batch).logp_N.sum().backward())
    assert measured == pytest.approx(kept + max(passing, logits) + shapes.gradients, rel=0.33)


@pytest.mark.parametrize("variant", ["fp32", "frozen", "lora"])
@pytest.mark.parametrize("arch", ["qwen2_5_vl", "kimi_k25"])
def test_kv_cache_is_exact(
    arch: str, variant: str, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kimi's holds latents."""
    from mmrl.rollout import slots

    made: list[Any] = []
    init = slots.SlotCache.__init__
    monkeypatch.setattr(
        slots.SlotCache,
        "__init__",
        lambda self, *options: (init(self, *options), made.append(self))[0],
    )
    p = load_policy(run_of(folders(arch), VARIANTS[variant]).model)
    prompt = groups_of(p)[0].ids[0, :50]
    request = Request(
        Prompt(prompt, torch.zeros(50, dtype=torch.long), torch.arange(50).expand(3, 50), 50),
        4,
        (1,),
    )
    p.eos_ids = (-1,)  # no row ends early
    PrefillOnceEngine(p).generate([request], SamplingSettings(max_new_tokens=6))
    measured = sum(held([layer.key_buffer, layer.value_buffer]) for layer in made[0].layers)
    precision = Precision(4 if p.autocast_dtype is None else 2, 2 if variant == "lora" else 4)
    text = p.base.config.text_config
    assert measured == cache_bytes(text, precision, 4 * 56) * text.num_hidden_layers / (
        text.num_hidden_layers + 1
    )


# ---- sharing out, and what is said


def full(train: str = "auto", **engine: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "Qwen/Qwen2.5-VL-7B-Instruct", "freeze": ["vision", "projector"]},
            "data": {"max_pixels": 1003520},
            "engine": {"train": train, **engine},
        }
    )


def parts_of(config: RunConfig, processes: int) -> dict[str, float]:
    return estimate(config, processes=processes).parts


def test_engines_share_out_what_they_share_out() -> None:
    one, ddp = parts_of(full(), 1), parts_of(full(), 8)
    assert one == ddp, "every process of ddp holds everything"
    zero2, zero3, fsdp = (
        parts_of(full(name), 8) for name in ("deepspeed_zero2", "deepspeed_zero3", "fsdp2")
    )
    assert (
        zero2["weights"] == one["weights"] and zero2["optimizer"] == one["optimizer"] * 1.5 / 8
    ), "moments and master copy"
    # several micro-batches: those of the first are there while the next is differentiated
    many = {"train": full().train.model_copy(update={"prompts_per_step": 256})}
    shared, whole = (
        estimate(full(name).model_copy(update=many), processes=8).phases["update"]["gradients"]
        for name in ("fsdp2", "ddp")
    )
    assert shared == whole / 8 and fsdp["optimizer"] == one["optimizer"] / 8
    # FSDP2 gathers all of its fp32 weights in bf16, ZeRO-3 leaves that to autocast, which casts products alone
    split = 2 * fsdp["rollout copy"]
    tower = one["weights"] - split
    assert fsdp["weights"] == zero3["weights"] == tower + split / 8, (
        "a frozen tower stays whole, and is shared"
    )
    text = config_of("Qwen/Qwen2.5-VL-7B-Instruct").text_config
    tables = 2 * text.vocab_size * text.hidden_size  # embeddings and output layer
    norms = (2 * text.num_hidden_layers + 1) * text.hidden_size
    assert zero3["rollout copy"] == split / 2 + 2 * (tables + norms)
    offloaded = estimate(full("deepspeed_zero3", deepspeed={"offload": "all"}), processes=8)
    assert (
        offloaded.host > 0
        and "optimizer" not in offloaded.parts
        and offloaded.parts["weights"] == tower
    )


def test_vllm_leaves_the_full_replica_in_the_main_process_host_memory() -> None:
    own, sampled = (
        estimate(full("fsdp2", rollout=engine), processes=8, available=80 * GIB)
        for engine in ("own", "vllm")
    )
    copy = own.parts["rollout copy"]
    assert {**sampled.parts, "rollout copy": copy} == own.parts
    # what is sampled from is bf16, and cannot be saved: that takes the same copy
    for found in (sampled, own):
        assert found.host == found.saved == 2 * copy
        assert "GiB of host memory in the main process" in found.line()
    sharded = full("fsdp2", rollout="own")
    sharded.train.checkpoint = "sharded"
    fp32 = full("fsdp2", rollout="own")
    fp32.model.dtype = "fp32"
    for config, size in ((sharded, copy), (fp32, 2 * copy)):
        found = estimate(config, processes=8, available=80 * GIB)
        assert found.parts["rollout copy"] == pytest.approx(size, rel=0.05) and found.host == 0
        assert "host memory" not in found.line()


def test_a_generator_process_has_what_samples_and_the_trainer_no_longer() -> None:
    apart = {"generator": {"kind": "process"}}
    inline, own = (estimate(full("fsdp2", **e), processes=8) for e in ({"rollout": "own"}, apart))
    assert "rollout" not in own.phases and "rollout copy" not in own.parts and not own.overlap
    assert own.saved == 2 * inline.parts["rollout copy"] and not inline.generator
    tower = own.parts["weights"] - own.saved / 8
    assert own.generator["weights"] == pytest.approx(own.saved / 2 + tower)
    assert own.generator["KV cache"] == inline.phases["rollout"]["KV cache"]
    size = sum(own.generator.values())
    assert own.together == own.total + size and "generator process about" in own.line()
    assert own.warning(own.total + size / 2) is not None
    elsewhere = full("fsdp2", generator={"kind": "process", "device": "cuda:7"})
    assert estimate(elsewhere, processes=8).together == max(own.total, size)


@pytest.mark.slow
def test_embodied_runs_are_pipelined_in_several_processes() -> None:
    file = REPO / "configs" / "libero.yaml"
    config = run_config(file, [])
    assert config.schedule.kind == "pipelined"
    found = estimate(config, processes=8)
    assert found.engine == "ddp" and found.overlap and estimate(config).engine == "single"
    with pytest.raises(
        ConfigError, match=r"schedule\.kind serial with engine\.train fsdp2, found pipelined"
    ):
        estimate(run_config(file, ["engine.train=fsdp2"]), processes=8)
    whole = estimate(
        run_config(file, ["engine.train=fsdp2", "schedule.kind=serial", "model.lora=null"]),
        processes=8,
    )
    assert (
        not whole.overlap
        and whole.parts["rollout copy"] > whole.parts["weights"]
        and whole.phases["update"]["gathered weights"]
    )
    out = (
        CliRunner()
        .invoke(
            app,
            ["memory", str(file), "--processes", "8", "--gpu-gib", "80"],
            catch_exceptions=False,
        )
        .output
    )
    assert "GiB of 80.0 in each of 8 processes (ddp)" in out, out


@pytest.mark.slow
def test_settings_that_save_memory_do() -> None:
    base = full()
    plain = estimate(base)
    # nothing but what is there at a start: no moments, no gradients
    assert plain.during("start-up") == plain.parts["weights"] + plain.parts["libraries"]
    assert plain.during("update") > plain.during("checkpoint") > plain.during("start-up")
    small = estimate(base.model_copy(update={"optim": OptimConfig(states="int8")}))
    assert 0.25 < small.parts["optimizer"] / plain.parts["optimizer"] < 0.26

    def with_(section: str, **values: Any) -> MemoryEstimate:
        return estimate(
            base.model_copy(update={section: getattr(base, section).model_copy(update=values)})
        )

    assert (
        with_("model", gradient_checkpointing=False).total
        > plain.total
        > with_("model", lora=LoraSettings()).total
    )
    assert (
        with_("train", token_budget=4096).phases["update"]["activations"]
        < plain.phases["update"]["activations"]
    )
    assert (
        with_("rollout", batch_tokens=8192).phases["rollout"]["KV cache"]
        < plain.phases["rollout"]["KV cache"]
    )
    both = with_("schedule", kind="pipelined")
    assert both.total > plain.total, "phases that overlap add up"
    shared = estimate(full(rollout="vllm"), available=80 * GIB)
    assert shared.phases["rollout"] == {"vLLM": pytest.approx(0.45 * 80 * GIB)}
    elsewhere = estimate(
        full(rollout="vllm", workers="ray", ray={"rollout_actors": 2}), available=80 * GIB
    )
    assert elsewhere.during("rollout") < shared.during("rollout")
    assert elsewhere.phases["rollout"] == {}


def test_a_vllm_that_slept_wakes_beside_what_training_holds() -> None:
    """Weights first, beside moments that are resident or offloaded; keys and values when nothing of the sync is left."""
    resident, offloaded = (
        estimate(
            full("deepspeed_zero3", rollout="vllm", deepspeed={"offload": offload}),
            processes=8,
            available=80 * GIB,
        )
        for offload in ("none", "optimizer")
    )
    numbers = 8_292_166_656  # as published
    for found in (resident, offloaded):
        assert found.phases["wake"]["vLLM weights"] == 2 * numbers and not found.overlap
        assert "KV cache" not in found.phases["wake"] and "gradients" not in found.phases["wake"]
        assert found.phases["probe"]["vLLM"] == found.phases["rollout"]["vLLM"] == 0.45 * 80 * GIB
        assert list(found.phases).index("wake") < list(found.phases).index("probe")
    apart = resident.during("wake") - offloaded.during("wake")
    # DeepSpeed keeps its buffers of gradients: offloaded, but for what it reduces at a time
    buffers = [found.parts["gradient buffers"] for found in (resident, offloaded)]
    assert buffers[1] == 4 * (1 << 27) < buffers[0]
    assert apart == resident.parts["optimizer"] + buffers[0] - buffers[1] > 0
    whole, adapted = (
        estimate(full(rollout="vllm", **engine), available=80 * GIB)
        for engine in ({}, {"vllm": {"sleep": False}})
    )
    shared = estimate(full("fsdp2", rollout="vllm"), processes=8, available=80 * GIB)
    way = "weights on their way"
    # a gathered embedding in fp32 and its copy
    embedding = 152064 * 3584
    assert shared.phases["wake"][way] - whole.phases["wake"][way] == 2 * 4 * embedding
    assert "wake" not in adapted.phases, "awake all the time"


def test_prompts_and_micro_batches_follow_the_configuration() -> None:
    shape = config_of("Qwen/Qwen2.5-VL-3B-Instruct")
    assert prompt_tokens_of(full(), shape) == 1280 + 128
    clip = RunConfig.model_validate(
        {"data": {"max_pixels": 100352, "video": {"total_pixels": 3211264}}}
    )
    assert prompt_tokens_of(clip, shape) == 4096 + 128
    assert micro_batch(full(), 1408, 64).tokens == pytest.approx(16384)
    assert micro_batch(full(), 100_000, 64).groups == 1, "a group is never split"


@pytest.mark.parametrize("forward", ["shared", "padded"])
def test_a_micro_batch_holds_no_more_than_a_step(forward: str) -> None:
    """A budget of 16,384 tokens was taken for full, although the step had 6,016."""

    def rows(processes: int, **engine: Any) -> tuple[float, float]:
        config = RunConfig.model_validate(
            {
                "engine": engine,
                "train": {"prompts_per_step": 4, "forward": forward},
                "rollout": {"group_size": 4, "max_new_tokens": 24},
            }
        )
        found = PlannedRun(config, None, None, "ddp", processes, "cpu", 1408).micro  # type: ignore[arg-type]
        return found.groups * found.group_size, found.tokens

    tokens = {"shared": 1408 + 4 * 24, "padded": 4 * (1408 + 24)}[forward]
    assert rows(1) == (16, 4 * tokens)
    assert rows(2) == (8, 2 * tokens) and rows(3) == (8, 2 * tokens) and rows(8) == (4, tokens)
    if forward == "shared":
        assert rows(2, sequence_parallel=2) == (16, 4 * tokens), "of both processes"


def test_the_line_adds_up_and_warns() -> None:
    found = estimate(full())
    line = found.line(80 * GIB)
    assert (
        line.startswith(f"needs about {found.total / GIB:.1f} GiB of 80.0 (weights ")
        and "the largest part: optimizer" in line
    )
    sizes = [
        float(x)
        for x in re.findall(r"[a-z] ([\d.]+)[,;]", line.partition("(")[2].partition(";")[0] + ",")
    ]
    assert sum(sizes) == pytest.approx(found.total / GIB, rel=0.02)
    assert found.warning(found.total + 1) is None and found.warning(None) is None
    warning = found.warning(80 * GIB)
    assert warning is not None and "model.lora" in warning


def test_a_run_says_what_it_needs_before_it_starts(folders: Any, tmp_path: Path) -> None:
    said: list[tuple[str, str]] = []
    announce_memory(
        run_of(folders("qwen2_5_vl"), {}), lambda text, style: said.append((text, style))
    )
    assert len(said) == 1 and said[0][0].startswith("needs about") and " of " in said[0][0]
    announce_memory(run_of(str(tmp_path), {}), lambda text, style: said.append((text, style)))
    assert (
        said[1][0].startswith("no memory estimate: expected model.path") and said[1][1] == "yellow"
    )


def test_a_run_that_does_not_fit_its_device_is_warned(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        "mmrl.diagnostics.memory.device_memory", lambda config: ("cpu", 10.0 * 2**20)
    )
    announce_memory(
        run_of(folders("qwen2_5_vl"), {}), lambda text, style: said.append(f"{style}:{text}")
    )
    assert said[1].startswith("yellow:memory: about") and "out of memory" in said[1]


@pytest.mark.slow
def test_the_command_needs_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = config_file(
        tmp_path / "run.yaml",
        small_run(
            tmp_path,
            str(tmp_path / "none.jsonl"),
            model={"path": "Qwen/Qwen2.5-VL-7B-Instruct", "device": None},
        ),
    )
    asked = ["memory", file, "model.freeze=[vision,projector]", "engine.train=deepspeed_zero3"]
    asked += ["--processes", "8", "--gpu-gib", "80"]
    out = CliRunner().invoke(app, asked, catch_exceptions=False).output
    assert re.search(
        r"needs about \d+\.\d GiB of 80\.0 in each of 8 processes \(deepspeed_zero3\)", out
    ), out
    preset = tmp_path / "mine.yaml"
    preset.write_text(
        "preset: {gpu_gib: 70, gpus: 4, models: [], recipes: []}\nengine: {train: fsdp2}\n"
    )
    asked = ["memory", file, "--preset", str(preset)]
    out = CliRunner().invoke(app, asked, catch_exceptions=False).output
    assert re.search(r"of 70\.0 in each of 4 processes \(fsdp2\)", out), out
    out = (
        CliRunner()
        .invoke(app, [*asked, "--processes", "2", "--gpu-gib", "30"], catch_exceptions=False)
        .output
    )
    assert re.search(r"of 30\.0 in each of 2 processes \(fsdp2\)", out), out
    memory_command(Path(file), ["model.lora={r: 8}"], processes=1, gpu_gib=16, prompt_tokens=None)
    assert "out of memory" in capsys.readouterr().out
    with pytest.raises(
        ConfigError,
        match=r"expected model.path to be a folder with a config.json, .* or one of Qwen2-VL-2B",
    ):
        memory_command(
            Path(file), [f"model.path={tmp_path}"], processes=1, gpu_gib=16, prompt_tokens=None
        )
