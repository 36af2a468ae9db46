"""What the phases of a run need of a device beside what is held throughout. Part of mmrl.diagnostics.memory."""

from __future__ import annotations

from mmrl.diagnostics.memory_activations import (
    cache_bytes,
    choice_bytes,
    expanded_bytes,
    logits_bytes,
    rollout_work_bytes,
    update_bytes,
    vision_update_bytes,
)
from mmrl.diagnostics.memory_held import Held
from mmrl.diagnostics.memory_run import TEXT_TOKENS, PlannedRun, samples_apart
from mmrl.diagnostics.memory_sharded import Passing, fsdp2_update
from mmrl.diagnostics.memory_wake import sleeps, wake_parts
from mmrl.policy.families import family_of

__all__ = ["activations_of", "phases_of"]

_GIB = 2**30
_CHUNK = 1 << 26  # logits at a time (Policy)
_DEEPSPEED_PIECE = 4.0 * (1 << 26)  # that ZeRO-3 gathers at least, of whole weights


def phases_of(run: PlannedRun, held: Held) -> dict[str, dict[str, float]]:
    """The parts of each phase."""
    p, config = run.parameters, run.config
    phases: dict[str, dict[str, float]] = {
        "start-up": _start_up(run),
        "rollout": _rollout(run, held),
        "update": _update(run, held),
        "optimizer step": {"gradients": held.gradients, "optimizer step": held.step},
        # on a CPU as they were, and once more while they are merged and written (measured); of a GPU's they lie in host memory
        "checkpoint": {"merged weights": 2.0 * p.merged if run.kind == "cpu" else 0.0},
    }
    if sleeps(config, run.kind):
        share = phases["rollout"]["vLLM"]
        phases["wake"] = wake_parts(config, p, run.precision.half, share, sharded=run.sharded)
        phases["probe"] = {**phases["rollout"], **_probe(run, held)}
    if run.sharded:
        gathered = _gathered_whole(run)
        if "rollout copy" in held.parts and not samples_apart(config):
            phases["gather"] = gathered
        # one after the other
        moments = _gathered_moments(run)
        larger = max(gathered, moments, key=lambda parts: sum(parts.values()))
        phases["checkpoint"] |= larger
    return {
        title: {name: size for name, size in phase.items() if size}
        for title, phase in phases.items()
    }


def _start_up(run: PlannedRun) -> dict[str, float]:
    """Beside its weights while they are read."""
    if run.sharded:
        return _sharing_out(run)
    if run.kind == "cpu" and run.file_bytes != run.precision.full:
        # a file read as another type is mapped meanwhile; one of the same type stays so, with what was cast since
        return {"weights' file": float(run.file_bytes * run.parameters.numbers)}
    return {}


def _sharing_out(run: PlannedRun) -> dict[str, float]:
    """What a process holds beside its share of the weights until they have been shared out (held_back of engines/build.py)."""
    p, n = run.parameters, run.processes
    if run.engine == "fsdp2":
        if run.kind == "cuda":
            return {"being shared out": max(p.largest, p.root) / n}
        # the pages that it read: of a tower in which nothing is trained all, of the rest its own rows
        whole = p.vision if p.tower else 0
        read = whole + (p.numbers - whole) / n
        if p.reference:
            read += p.vision + (p.numbers - p.vision) / n
        return {"weights' file": run.file_bytes * read}
    if run.kind == "cuda":  # tensor by tensor
        return {"being shared out": 2.0 * max(p.block, p.root)}
    # of the main process, given back with the last shard. Then DeepSpeed, which has its master copy and room for gradients, gathers
    # every trained tensor once to find its hooks' place (measured)
    loading = {"weights' file": float(run.file_bytes * p.numbers)}
    made = {
        "master copy and gradients": 2.0 * p.gradients / n,
        "gathered tensor": 2.0 * p.largest,
    }
    return max(loading, made, key=lambda parts: sum(parts.values()))


def _rollout(run: PlannedRun, held: Held) -> dict[str, float]:
    """Keys and values, and what prefilling and sampling take, of as many rollouts at once as rollout.batch_tokens allows."""
    config, text, precision = run.config, run.text, run.precision
    if config.engine.rollout == "vllm":
        return {"vLLM": _vllm(run)}
    shape = config.rollout_shape
    length = run.prompt + shape.tokens
    slots = (shape.at_once or run.prompts_each) * shape.answers * length
    if shape.cached:
        slots = max(length, min(config.rollout.batch_tokens, slots))
    # stored in the type of the forward; adapters are not (mmrl.policy.storage)
    copied = "rollout copy" in held.parts or config.engine.generator.kind == "process"
    # a CPU multiplies the logits in fp32, FSDP2's copy holds the layer in 16 bits
    wide = copied and run.engine == "fsdp2" and run.kind == "cpu" and run.precision.half == 2
    cast = run.autocast is not None and not (copied and config.model.lora is None)
    return {
        "KV cache": (cache_bytes(text, precision, slots) + expanded_bytes(text, precision, slots))
        * shape.cached,
        "prefill and sampling": rollout_work_bytes(
            text,
            precision,
            rows=slots / length,
            prompt=run.prompt,
            group_size=shape.answers,
            classes=shape.classes if not shape.cached else None,
        ),
        # autocast keeps them from token to token
        "weights cast": run.parameters.products / 2 if cast else 0.0,
        "output layer": 4.0 * run.parameters.head_numbers
        if wide and run.parameters.head[1]
        else 0.0,
        # of one layer at a time
        "adapted experts": 0.0
        if config.rollout.merge_adapter
        else float(max(run.parameters.experts, default=0)),
    }


def _vllm(run: PlannedRun) -> float:
    """Of vLLM in the training process: its share of a GPU; on a CPU its weights and KV cache."""
    v = run.config.engine.vllm
    if v.mode == "server" or run.config.engine.ray.rollout_actors:
        return 0.0
    if run.kind == "cuda" and run.available is not None:
        return v.memory * run.available
    return run.parameters.weights + v.kv_cache_gib * _GIB


def _update(run: PlannedRun, held: Held) -> dict[str, float]:
    """One micro-batch, forward and backward."""
    p, text = run.parameters, run.text
    kept, passing = activations_of(run)
    scored = run.micro.completion_tokens / run.config.engine.sequence_parallel
    half = run.kind == "cuda" and run.autocast is not None
    classes = run.config.rollout_shape.classes
    if run.engine == "fsdp2":
        # the output layer's gradient is fsdp2_update's
        passed = Passing(
            kept,
            passing,
            logits_bytes(text, scored, _CHUNK, head_bytes=4, head_trained=False)
            if classes is None
            else choice_bytes(text, scored, classes, head_trained=False, tied=p.tied),
            chunks=classes is None and scored * text.vocab_size > _CHUNK,
            again=run.micro_batches > 1,
        )
        return fsdp2_update(p, passed, run.processes, run.precision.half, half=half)
    if classes is None:
        logits = logits_bytes(
            text,
            scored,
            _CHUNK,
            head_bytes=p.head[0],
            head_trained=p.head[1],
            tied=p.tied,
            half=half,
        )
    else:
        logits = choice_bytes(text, scored, classes, head_trained=p.head[1], tied=p.tied)
    # of one block where it is computed again, else autograd keeps them all
    cast = min(p.block, p.products) if run.checkpointing else p.products
    return {
        "gradients": held.gradients,
        "gathered weights": held.gathered,
        # they do not pass at the same time
        "activations": kept + max(0.0, passing - logits),
        "logits": logits,
        "weights cast": 0.0 if run.autocast is None else cast / 2,
    }


def activations_of(run: PlannedRun) -> tuple[float, float]:
    """Of a process's part of a micro-batch: (kept from forward to backward, passing while one layer is differentiated)."""
    p, micro, family = run.parameters, run.micro, family_of(run.shape)
    kept, passing = update_bytes(
        run.text,
        family.layers(run.text),
        run.precision,
        micro,
        run.attention,
        trained=p.trained_language,
        adapted=p.adapted,
        checkpointing=run.checkpointing,
        fused=run.fused_layers,
    )
    # the gradient of the weights with B A added has their size
    passing += max(p.experts, default=0)
    if p.trained_vision:
        tower, (patch, _) = family.tower_of(run.shape), family.patches(run.shape)
        # in RGB; clips have as many frames in a row
        frames = getattr(run.shape.vision_config, "temporal_patch_size", 1)
        kept += vision_update_bytes(
            tower,
            run.precision,
            micro.groups * max(0, run.prompt - TEXT_TOKENS) * tower.tokens,
            3 * patch**2 * frames,
            pictures=micro.groups,
            checkpointing=run.checkpointing,
        )
    parallel = run.config.engine.sequence_parallel
    return kept / parallel, passing / parallel


def _probe(run: PlannedRun, held: Held) -> dict[str, float]:
    """What the trainer needs beside vLLM to score the probe's completions, one at a time."""
    p, precision = run.parameters, run.precision
    found = {
        "prefill": rollout_work_bytes(
            run.text, precision, rows=1.0, prompt=run.prompt, group_size=1
        )
    }
    if run.sharded:
        blocks = precision.half * (p.root_numbers + 2.0 * p.block_numbers)
        found["gathered weights"] = blocks if run.engine == "fsdp2" else held.gathered
    elif run.autocast is not None:
        found["weights cast"] = p.products / 2
    return found


def _gathered_whole(run: PlannedRun) -> dict[str, float]:
    """Of sharded weights while whole ones are made of them, tensor by tensor."""
    p = run.parameters
    if run.engine == "deepspeed_zero3":
        return {"gathered tensors": p.largest + max(_DEEPSPEED_PIECE, p.largest)}
    return {"gathered tensor": 2.0 * max(p.largest, p.root)}


def _gathered_moments(run: PlannedRun) -> dict[str, float]:
    """The main process's of a checkpoint; on a GPU it collects them in host memory."""
    if run.kind != "cpu":
        return {}
    found = {"whole optimizer": 2.0 * run.parameters.gradients}
    if run.engine == "deepspeed_zero3":  # beside one's shards on their way
        found["shards of moments"] = run.parameters.gradients / run.processes
    return found
