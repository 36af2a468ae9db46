"""The checks of `mmrl families check`: what mmrl computes for a family, held against transformers' own processor, forward,
generation and files. Each returns what it found, and raises AssertionError where the two differ. Part of
mmrl.diagnostics.families."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mmrl.config import LoraSettings, ModelConfig, RunConfig
from mmrl.diagnostics._family_memory import language_apart, tower_apart
from mmrl.diagnostics._family_sharded import check_sharded
from mmrl.diagnostics._family_subject import (
    LOGP,
    Subject,
    cases,
    clip_prompt,
    gradients_near,
    greedy,
    group,
    near,
    pictures_of,
    prompts,
    sounds,
    turns_and_branch,
    weighed,
)
from mmrl.diagnostics._family_vllm import check_vllm
from mmrl.diagnostics._family_weights import check_freeze, check_lora, check_save, check_value
from mmrl.policy.policy import Policy
from mmrl.video.pictures import RowReader, SliceReader

__all__ = ["CHECKS"]


def _counted(s: Subject) -> str:
    return "text, 1 and 3 pictures" if len(s.counts) > 2 else "text and 1 picture"


def check_prompt(s: Subject) -> str:
    """Ids and pixels of text alone, one picture and three."""
    policy = s.plain
    for count in s.counts:
        prompt, wanted = s.prompt(policy, count), s.processed(policy, count)
        assert prompt.ids_P.tolist() == wanted["input_ids"][0].tolist(), (
            f"{count} pictures: other token ids than the processor's call"
        )
        if count:
            pixels = torch.cat([policy.encoder.visuals.pixels(v) for v in prompt.visuals])
            theirs, reader = wanted["pixel_values"], policy.encoder.visuals.reader
            # where pictures do not just follow each other
            if isinstance(reader, RowReader | SliceReader):
                theirs = reader.rows_of(wanted)
            theirs = theirs.reshape(pixels.shape)
            assert torch.equal(pixels, theirs), f"{count} pictures: other pixels"
    return f"{_counted(s)}: ids and pixels equal"


def check_logp(s: Subject) -> str:
    """A packed group against separate rows: text alone, one picture, three."""
    with torch.no_grad():
        apart = [
            near(*group(s, s.plain, s.prompt(s.plain, n), s.processed(s.plain, n)), f"{n} pictures")
            for n in s.counts
        ]
        seen = [
            s.plain.evaluate([p], [s.answers(s.plain)[1]]).logp_N
            for p in (
                s.plain.encoder.prompt_of(s.messages(1), s.frames(s.plain, [i]), "check")
                for i in (1, 2)
            )
        ]
    moved = float((seen[0] - seen[1]).abs().max())
    assert moved > 100 * LOGP, f"another picture moves no log-prob: {moved:.2g}"
    return f"{_counted(s)}: {max(apart):.1g} apart"


def check_gradient(s: Subject) -> str:
    """Gradients of all weights from what is packed against separate rows, in every case."""
    policy, apart = s.policy(), {}
    for what, (packed, alone) in cases(s, policy):
        apart[what] = _gradients(policy, packed, alone, what)
    return f"{', '.join(apart)}: {max(apart.values()):.1g} of the norm apart"


def _gradients(policy: Policy, packed: torch.Tensor, alone: torch.Tensor, what: str) -> float:
    """How far the gradients of packed log-probs are from those of separate rows, in parts of their norm."""
    found = []
    for logp in (packed, alone):
        policy.model.zero_grad()
        weighed(logp).backward()
        found.append({n: p.grad.clone() for n, p in policy.trainable() if p.grad is not None})
    ours, theirs = found
    assert ours.keys() == theirs.keys(), (
        f"{what}: other weights learn: {ours.keys() ^ theirs.keys()}"
    )
    return gradients_near(ours, theirs, what)


def check_clip(s: Subject) -> str:
    """A packed group behind a clip against separate rows."""
    prompt, media = clip_prompt(s, s.plain)
    with torch.no_grad():
        apart = near(*group(s, s.plain, prompt, media), "clip")
    (visual,) = prompt.visuals
    return f"grid {visual.grid_thw}: {apart:.1g} apart"


def check_audio(s: Subject) -> str:
    """Two sounds and a picture: ids, frames, positions, log-probs, greedy answers and cached features."""
    policy = s.plain
    seen, heard = sounds(s, policy)
    kinds = ("audio", "image", "audio")
    text = {"type": "text", "text": "Which tone is higher?"}
    messages = [{"role": "user", "content": [*({"type": kind} for kind in kinds), text]}]
    (picture,) = s.frames(policy, [0])
    prompt = policy.encoder.prompt_of(messages, [picture, *seen], "check")
    written = policy.processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, **policy.family.chat_options()
    )
    media = dict(
        policy.processor(text=[written], images=[s.pictures[0]], audio=heard, return_tensors="pt")
    )
    assert prompt.ids_P.tolist() == media["input_ids"][0].tolist(), "sounds: other token ids"
    ours = torch.cat([policy.encoder.visuals.pixels(v) for v in seen])
    mask_RT = media["feature_attention_mask"].bool()
    theirs = media["input_features"].transpose(1, 2)[mask_RT]
    assert torch.equal(ours, theirs), "sounds: other frames"
    with torch.no_grad():
        apart = near(*group(s, policy, prompt, media), "sounds")
        turned = policy.encoder.prompt_of(messages, [picture, *seen[::-1]], "check")
        moved = [policy.evaluate([p], [s.answers(policy)[1]]).logp_N for p in (prompt, turned)]
    far = float((moved[0] - moved[1]).abs().max())
    assert far > 100 * LOGP, f"another sound moves no log-prob: {far:.2g}"
    written_ids, theirs, _ = greedy(policy, prompt, media)
    assert written_ids == theirs, f"sounds: {written_ids}, not {theirs}"
    frozen = s.policy(freeze=["audio"])
    assert frozen.tower("audio") is not None, "the audio tower does not count as frozen"
    seen, _ = sounds(s, frozen)
    (picture,) = s.frames(frozen, [0])
    prompt = frozen.encoder.prompt_of(messages, [picture, *seen], "check")
    with torch.no_grad():
        cached = near(*group(s, frozen, prompt, media), "features of sounds")
        frozen.evaluate([prompt], [s.answers(frozen)[0]])
    encoded = frozen.encoder.visuals.stats.encoded
    assert encoded == 2, f"expected 2 sounds encoded once, found {encoded}"
    free = s.policy()
    seen, _ = sounds(s, free)
    prompt = free.encoder.prompt_of(messages, [*s.frames(free, [0]), *seen], "check")
    learned = _gradients(free, *group(s, free, prompt, media), "sounds")
    return (
        f"2 sounds and a picture: ids and frames equal, log-probs {apart:.1g} apart, gradients {learned:.1g}; generate's own "
        f"tokens; features {cached:.1g} apart, each sound encoded once"
    )


def check_turns(s: Subject) -> str:
    """Two turns packed behind each other, a picture in each, and another answer that branches from the second, against rows of
    transformers' forward."""
    with torch.no_grad():
        return f"a picture in each: {near(*turns_and_branch(s, s.plain), 'two turns and a branch'):.1g} apart"


def check_rollout(s: Subject) -> str:
    """Greedy answers of mmrl's engine against model.generate, and their log-probs against the trainer's."""
    policy, apart = s.plain, {}
    for what, prompt, media in prompts(s, policy):
        written, theirs, logprobs = greedy(policy, prompt, media)
        assert written == theirs, f"{what}: {written}, not {theirs}"
        with torch.no_grad():
            logp = policy.evaluate([prompt], [tuple(written)]).logp_N
        apart[what] = near(torch.tensor(logprobs), logp, f"{what}: rollout's log-probs")
    return f"generate's own tokens ({', '.join(apart)}); log-probs {max(apart.values()):.1g} apart"


def check_features(s: Subject) -> str:
    """Cached features of a frozen tower against the pixels' way, and encoded once."""
    policy, apart = s.policy(freeze=["vision", "projector"]), {}
    assert policy.tower() is not None, "the tower does not count as frozen"
    with torch.no_grad():
        for what, (found, wanted) in cases(s, policy):
            apart[what] = near(found, wanted, f"{what}: features")
            if what == pictures_of(count := s.counts[-1]):
                again = policy.evaluate([s.prompt(policy, count)], [s.answers(policy)[0]]).logp_N
                near(again, found[: len(again)], "features taken from the cache")
    # those of the turns are among the first `count`
    media, encoded = count + ("a clip" in apart), policy.encoder.visuals.stats.encoded
    assert encoded == media, f"expected {media} pictures and clips encoded once, found {encoded}"
    return (
        f"{', '.join(apart)}: {max(apart.values()):.1g} apart; each picture and clip encoded once"
    )


def check_memory(s: Subject) -> str:
    """The estimate's bytes of weights and gradients against those of the loaded model, its activations against what autograd keeps,
    and that the whole estimate can be made."""
    from mmrl.diagnostics.memory import estimate
    from mmrl.diagnostics.memory_parameters import parameter_bytes

    said = []
    for lora in (None, LoraSettings(r=4, experts=s.mixes_experts)):
        policy = s.policy(lora=lora)
        config = RunConfig(model=ModelConfig(path=s.path, device="cpu", lora=lora))
        found = parameter_bytes(config, policy.base.config, "cpu")
        held, learning = (
            sum(p.numel() * p.element_size() for p in {id(p): p for p in some}.values())
            for some in (policy.model.parameters(), (p for _, p in policy.trainable()))
        )
        assert (found.weights, found.gradients) == (held, learning), (
            f"estimated {found.weights:,} and {found.gradients:,} bytes, held {held:,} and {learning:,}"
        )
        assert estimate(config, kind="cpu").total > found.weights, "less than its weights"
        said.append(f"{held:,} bytes of weights and {learning:,} of gradients")
    language, tower = language_apart(s.plain), tower_apart(s.plain)
    said[0] += f"; activations {language:+.0%}, the tower's {tower:+.0%} apart"
    return f"{said[0]}; with an adapter {said[1]}"


CHECKS: dict[str, Callable[[Subject], str]] = {
    "prompt": check_prompt,
    "logp": check_logp,
    "gradient": check_gradient,
    "video": check_clip,
    "audio": check_audio,
    "turns": check_turns,
    "rollout": check_rollout,
    "features": check_features,
    "freeze": check_freeze,
    "lora": check_lora,
    "save": check_save,
    "value": check_value,
    "memory": check_memory,
    "sharded": check_sharded,
    "vllm": check_vllm,
}
"""Name -> check, in the order of the table; a name in `ModelFamily.refused` is not run and says why instead."""
