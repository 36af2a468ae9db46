"""What the checks of `mmrl families check` are made on, and what several of them use. Part of mmrl.diagnostics.families."""

from __future__ import annotations

import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmrl.config import ModelConfig
from mmrl.coords import CoordFrame
from mmrl.policy.encode import Prompt
from mmrl.policy.families import ModelFamily
from mmrl.policy.loading import load_policy
from mmrl.policy.policy import Policy

__all__ = ["GRADIENT", "LOGP", "QUESTION", "Subject", "naive", "near", "sounds"]

LOGP = GRADIENT = 1e-5
_SIZES = ((112, 84), (320, 180), (37, 90))
QUESTION = "Where is the red circle?"


@dataclass(frozen=True)
class Subject:
    """A family's model on disk, and a folder for what the checks write."""

    family: ModelFamily
    path: str
    folder: Path

    def policy(self, **options: Any) -> Policy:
        """A newly loaded policy on the CPU; `options` are fields of ModelConfig."""
        frame = None if self.family.frame is not None else CoordFrame.REL1
        return load_policy(ModelConfig(path=self.path, device="cpu", frame=frame, **options))

    @cached_property
    def plain(self) -> Policy:
        """A policy that the checks leave as it is."""
        return self.policy()

    @cached_property
    def pictures(self) -> list[Image.Image]:
        """Pictures of smooth noise: every patch differs."""
        coarse = np.random.default_rng(0).integers(0, 256, (len(_SIZES), 6, 6, 3), dtype=np.uint8)
        return [
            Image.fromarray(c).resize(size, Image.Resampling.BICUBIC)
            for c, size in zip(coarse, _SIZES, strict=True)
        ]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many pictures the checks' prompts have."""
        most = self.family.most_pictures
        return tuple(n for n in (0, 1, 3) if most is None or n <= most)

    def messages(self, count: int, question: str = QUESTION) -> list[dict[str, Any]]:
        """A question about `count` pictures."""
        items = [{"type": "image"}] * count
        return [{"role": "user", "content": [*items, {"type": "text", "text": question}]}]

    def frames(self, policy: Policy, chosen: Sequence[int]) -> list[Any]:
        """The pictures of these numbers as visuals of the policy's cache."""
        return [policy.encoder.visuals.frame(np.array(self.pictures[i])) for i in chosen]

    def prompt(self, policy: Policy, count: int) -> Prompt:
        """The question about the first `count` pictures."""
        return policy.encoder.prompt_of(
            self.messages(count), self.frames(policy, range(count)), "check"
        )

    def words(self, policy: Policy, text: str) -> tuple[int, ...]:
        """Tokens of a text."""
        return tuple(policy.processor.tokenizer(text, add_special_tokens=False)["input_ids"])

    def answers(self, policy: Policy) -> list[tuple[int, ...]]:
        """A group of completions of several lengths."""
        texts = ("yes", "the red circle left of the blue square", "[0, 1, 2, 3]")
        return [self.words(policy, text) for text in texts]

    def step(self, policy: Policy) -> None:
        """One step that makes an answer less likely, on all that the policy trains."""
        policy.evaluate([self.prompt(policy, 1)], [self.answers(policy)[1]]).logp_N.sum().backward()
        self.descend(policy, 1e-3)

    @torch.no_grad()
    def descend(self, policy: Policy, rate: float) -> None:
        """Take `rate` times its gradient off each weight that has one."""
        for _, p in policy.trainable():
            if p.grad is not None:
                p.sub_(p.grad, alpha=rate)

    def processed(self, policy: Policy, count: int) -> dict[str, Any]:
        """What the processor itself makes of the question about the first `count` pictures."""
        (message,) = self.messages(count)
        shown = [{"type": "image", "image": picture} for picture in self.pictures[:count]]
        message["content"] = [*shown, message["content"][-1]]
        return dict(
            policy.processor.apply_chat_template(
                [message],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                **policy.family.chat_options(),
            )
        )


def naive(
    policy: Policy, media: Mapping[str, Any], ids: Sequence[int], kinds: torch.Tensor, last: int
) -> torch.Tensor:
    """Log-probs of the last `last` tokens by transformers' own forward of one row, with positions and masks of its making."""
    inputs = {"input_ids": torch.tensor([list(ids)])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    known = ["input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"]
    taken = policy.family.text_inputs(torch.zeros(3, 1, 1), kinds[None])
    for name in set(known[2:]) & set(taken):
        inputs[name] = torch.nn.functional.pad(kinds, (0, len(ids) - len(kinds)))[None]
    inputs |= {k: v for k, v in media.items() if k not in known}
    logits = policy.base(**inputs).logits[0, -last - 1 : -1].float()
    logits = logits.index_fill(-1, policy.banned, float("-inf"))
    targets = torch.tensor(list(ids[-last:]))
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def near(found: torch.Tensor, wanted: torch.Tensor, what: str, most: float = LOGP) -> float:
    apart = float((found - wanted).detach().abs().max())
    assert apart <= most, f"{what}: expected at most {most:g} apart, found {apart:.2g}"
    return apart


def sounds(s: Subject, policy: Policy) -> tuple[list[Any], list[np.ndarray]]:
    """Two sounds of different files, lengths, rates and channels as visuals, and their samples."""
    from mmrl.video.audio import read_audio

    cache, rng = policy.encoder.visuals, np.random.default_rng(2)
    seen, heard = [], []
    for name, rate, channels, seconds in (("a.wav", 16000, 1, 0.81), ("b.wav", 22050, 2, 1.3)):
        times = np.arange(int(seconds * rate)) / rate
        tones = np.sin(2 * np.pi * np.outer(rng.uniform(200, 3000, channels), times**1.5))
        values = 0.4 * tones + 0.02 * rng.standard_normal(tones.shape)
        path = s.folder / name
        with wave.open(str(path), "wb") as file:
            file.setnchannels(channels)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes((values.T * 32767).astype("<i2").tobytes())
        seen.append(cache.audio(str(path)))
        most = cache.most_seconds
        heard.append(read_audio(path, rate=cache.hears.rate, max_seconds=most))
    return seen, heard
