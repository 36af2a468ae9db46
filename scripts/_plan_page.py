"""The page that scripts/plan_scale.py writes: its tables and its words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["page"]

_INTRO = """\
Written by `python -m scripts.plan_scale` (do not edit). Arithmetic for planning, on nodes of 8 H100 SXM: shapes of public models,
public figures of the hardware, and assumptions marked as such. It says which stage bounds a recipe and by how much, not how fast a
run will be. `scripts/launch_torchrun.sh` and `scripts/slurm_train.sbatch` start such runs."""

_READING = """\
More GPUs at the same batch help little where decoding bounds: every new token reads all weights, however few rows share them.
Every row is a run that mmrl accepts: its configuration is checked as a run checks it before the row is written."""

_FORMULAS = """\
Legend: g GPUs; b prompts per GPU and step; G group size; P prompt tokens; C mean completion tokens, C_max the longest; N numbers in
the language model's matrices, H in its output layer, V in the vision tower; d decisions per episode (1 elsewhere); m micro-batches.

- Shared prefix: a group is P + G C tokens in one packed sequence, not G (P + C). Episodes share nothing: d G (P + 56), the answer
  of a decision being 8 steps x 7 numbers in one parallel forward.
- Forward of a group, FLOPs: F = d (2 N tokens + 2 H G C + 4 layers width pairs), pairs = P^2/2 + G C (P + C/2) (causal, the prompt
  once; G times for episodes).
- Update: F x (1 forward + 1 recomputed by gradient checkpointing + 2 backward; 1 with LoRA, which needs no gradients of weights) /
  (peak x update_share). On-policy steps take old log-probs from the same forward; a KL term adds one forward of the reference.
- Prefill: b (2 N P + attention) / (peak x prefill_share). Tower: 2 V x 4 patches per token, once per pass that needs it.
- Decode, engine.rollout vllm: C_max x (2 bytes (N + H) + rows x keys and values of P + C/2 tokens) / (HBM x decode_share); rows =
  b G, all at once: a batch that waits for its longest answer.
  The own engine reads its bf16 copy of FSDP2's shards, 2 bytes (N + H), for as many rows (slots) as rollout.batch_tokens holds; a
  completion that waits takes the slot of one that ended: C_max + (b G - slots) C / slots tokens one after the other, the row
  "own engine".
- Simulators: b G d x seconds per chunk / env.workers, one core each.
- Gradients, bytes sent per GPU: DDP 2 (g-1)/g x 4 bytes x trained, once; FSDP2 m (g-1)/g x 4 bytes x trained (reduce-scatter after
  each micro-batch). Gathers of FSDP2: (m x passes x 2 bytes + 4 bytes) (g-1)/g x trained; passes = forward + backward + reference;
  forwards gather bf16 (mmrl/distributed/engines/fsdp.py), the 4 bytes are what vLLM gets of the fp32 shards.
- ZeRO-3 moves what FSDP2 moves, in fp32. ZeRO-2 reduces after every micro-batch, too: gradients 2 m (g-1)/g x 4 bytes x trained
  (DeepSpeed all-reduces its buckets), and the weights once per step, (g-1)/g x 4 bytes x trained.
- Seconds of a collective: bytes / (min(NVLink, node x NIC) x network): all links of a node work at once. Not overlapped with the
  update here; FSDP2 overlaps a part of it (an upper bound there), mmrl's ddp none: it all-reduces once, after all micro-batches.
- Weights for rollouts: in the same process (colocated) nothing crosses the network beyond the gathers.
  Media: uint8 pixels that a GPU's prompts or decisions bring in (cache files, or frames from simulators).
- Memory: mmrl/diagnostics/memory.py, what `mmrl` prints before a run starts, at the recipe's own batch; vLLM in the same process
holds
  engine.vllm.memory of a GPU while it rolls out (embodied: the policy itself infers).
- Step: rollout, update and network one after the other (schedule serial, colocated). Embodied: max(simulators, all of the GPU's
  work) (schedule pipelined)."""

_LIMITS = """\
- The figures marked assumption decide the result: half the share is twice the time. They are replaced, model by model, by
  assets/results/bench_gpu.json where that file has a section "plan".
- Tensor and pipeline parallelism: mmrl has none for training. A model whose bf16 copy for sampling does not fit one GPU cannot be
  trained. Sequence parallelism (engine.sequence_parallel) is not used here: these prompts fit one GPU.
- Rollouts on GPUs of their own while others train: `engine.generator.kind: process` with `schedule.kind: async` does that
  (mmrl/training/generator.py); no row here counts on it.
- Stragglers, failed nodes, storage, the time of checkpoints, evaluation, rewards that call a model, prompts without signal
  (`attempts`), padding of short micro-batches: not counted; each makes it slower.
- Batches that grow with the GPUs change the algorithm: 64 times the prompts per step is not 64 times the learning. Nothing is known
  from us about that; the tables at the recipe's own batch say what more GPUs do without changing it.
- Embodied runs are counted with engine.train ddp, and simulators at the speed of this project's CPU machine with software
  rendering and stand-in meshes (assets/results/bench_render.json): with real meshes they are slower, with GPU rendering faster."""


def _si(value: float) -> str:
    """1234567 -> 1.23 M."""
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _row(name: str, cells: list[str]) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"


def _assumptions(
    assumed: Mapping[str, tuple[float, str, str]],
    measured: Mapping[str, Mapping[str, float]],
    ways: Mapping[str, str],
) -> list[str]:
    lines = ["## Assumptions", "", "| name | value | what | source |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {_si(value) if value >= 1000 else f'{value:g}'} | {what} | {source} |"
        for name, (value, what, source) in assumed.items()
    ]
    lines += [
        f"| {key} | {value:g} | {model} | measured{f' ({ways[model]})' if key == 'update_share' and model in ways else ''}, "
        "assets/results/bench_gpu.json |"
        for model, row in measured.items()
        for key, value in row.items()
    ]
    if not measured:
        lines += [
            "",
            "No GPU figure has been measured yet: all below follows from this table and from shapes.",
        ]
    return [*lines, ""]


def _recipe(
    r: Any,
    weak: list[Any],
    strong: list[Any],
    trained: Callable[[Any], float],
    micro: Callable[[Any, float], int],
) -> list[str]:
    s, embodied = r.shape, r.embodied
    what = f"{r.decisions} decisions per episode" if embodied else f"{r.new} new tokens at most"
    lines = [
        f"## {r.title}",
        "",
        f"`{r.file}` with {s.name} ({_si(s.language)} + {_si(s.head)} output + {_si(s.vision)} vision),",
        f"engine.train {r.engine}, engine.rollout {r.config.engine.rollout}: groups of {r.group}, {what}, prompts of "
        f"{r.prompt:,} tokens ({r.visual:,} visual),",
        f"{_si(trained(r))} trained numbers, {micro(r, weak[0].prompts / weak[0].gpus)} micro-batch(es) per GPU and step. "
        "The batch grows with the GPUs:",
    ]
    lines += ["", *(f"- {note}" for note in r.notes)] if r.notes else []
    lines += ["", _row("per step", [f"{p.gpus} GPUs" for p in weak]), "|---|" + "---:|" * len(weak)]
    unit = "episodes" if embodied else "completions"
    lines.append(
        _row(f"prompts, {unit}", [f"{p.prompts:,.0f}, {p.prompts * r.group:,.0f}" for p in weak])
    )
    lines.append(_row("memory per GPU, GiB of 80", [f"{p.memory:.0f}" for p in weak]))
    lines += [
        _row(f"{name}, s", [_seconds(p.seconds[name]) for p in weak])
        for name in weak[0].seconds
        if weak[-1].seconds[name]
    ]
    if all(p.own for p in weak):
        lines.append(
            _row(
                "own engine instead: decode, s (slots)",
                [f"{_seconds(p.own[1])} ({p.own[0]})" for p in weak],
            )
        )
    lines.append(_row("**step, s**", [f"**{_seconds(p.step_s)}**" for p in weak]))
    lines.append(_row("generated tokens/s, all GPUs", [_si(p.generated) for p in weak]))
    lines.append(_row("trained tokens/s, all GPUs (as G (P + C))", [_si(p.trained) for p in weak]))
    names = {
        "gradients": "gradients sent per GPU",
        "gathers": "weights gathered per GPU",
        "media": "media in per GPU",
    }
    lines += [
        _row(f"{text}, GB", [f"{p.traffic[key] / 1e9:.3g}" for p in weak])
        for key, text in names.items()
        if weak[-1].traffic[key]
    ]
    lines.append(_row("what bounds", [p.bound for p in weak]))
    lines += [
        "",
        f"At the recipe's own batch of {r.config.train.prompts_per_step} prompts, the same algorithm on any number:",
        "",
        _row("per step", [f"{p.gpus} GPUs" for p in strong]),
        "|---|" + "---:|" * len(strong),
    ]
    own = r.config.train.prompts_per_step
    lines.append(
        _row("GPUs with a prompt to work on", [f"{min(p.gpus, own)} of {p.gpus}" for p in strong])
    )
    lines.append(_row("step, s", [_seconds(p.step_s) for p in strong]))
    lines.append(
        _row("faster than 8 GPUs", [f"{strong[0].step_s / p.step_s:.2f} x" for p in strong])
    )
    lines.append(_row("what bounds", [p.bound for p in strong]))
    return [*lines, ""]


def _summary(rows: Mapping[str, tuple[Any, list[Any], list[Any]]]) -> list[str]:
    lines = ["## In short", ""]
    for title, (_, weak, strong) in rows.items():
        last, own = weak[-1], strong[1]
        share = round(last.seconds["network"] / last.step_s, 2)
        lines += [
            f"- {title}: {last.bound} bounds at {last.gpus} GPUs; collectives take "
            f"{f'at most {_percent(share)}' if share else 'less than 1 %'} of a step.",
            f"  Its own batch on {own.gpus} GPUs is {strong[0].step_s / own.step_s:.1f} x as fast as on {strong[0].gpus}.",
        ]
    return [*lines, "", *_READING.splitlines(), ""]


def page(
    assumed: Mapping[str, tuple[float, str, str]],
    rows: Mapping[str, tuple[Any, list[Any], list[Any]]],
    measured: Mapping[str, Mapping[str, float]],
    trained: Callable[[Any], float],
    micro: Callable[[Any, float], int],
    ways: Mapping[str, str],
) -> str:
    """Markdown; `rows`: title -> (recipe, plans with a batch that grows, plans with the recipe's own); `ways`: what a
    model's update share was measured with."""
    lines = ["# Scaling: what 8, 64 and 512 GPUs would do", "", *_INTRO.splitlines(), ""]
    lines += _summary(rows)
    lines += _assumptions(assumed, measured, ways)
    lines += ["## Formulas", "", *_FORMULAS.splitlines(), ""]
    for r, weak, strong in rows.values():
        lines += _recipe(r, weak, strong, trained, micro)
    lines += ["## What is not in it", "", *_LIMITS.splitlines()]
    return "\n".join(lines) + "\n"
