"""A vision-language-action policy: any Qwen-VL model that answers a picture and an instruction with a chunk of action tokens.

    vla = load_vla(config)                                   # an EmbodiedConfig: model, vla, action sections
    outputs = vla.act(observations, keys=[(0, 1, 2)], greedy=False)

Every action dimension of every step of the chunk is one token out of `bins` added to the vocabulary, as in RT-2 and OpenVLA
(arXiv 2406.09246). `decode: parallel` reads the whole chunk from query tokens in one forward pass (OpenVLA-OFT, arXiv
2502.19645: bidirectional attention inside the chunk); `autoregressive` writes token after token with mmrl's rollout engine.
Proprioception enters as bin tokens of the prompt (pi0.5, arXiv 2504.16054), a wrist camera as a second picture. Training and
rollout share one forward pass, `evaluate`.

Legend: D decisions, U different prompts, N tokens of a decision (chunk steps x action dimensions), H hidden width; third axis
of logits: bins, of values V: one per decision, or one per action step (algorithm.critic.level action).
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmrl.algorithms import token_mask
from mmrl.errors import ConfigError
from mmrl.policy.encode import Prompt
from mmrl.policy.pack import PackItem, idle_item, pack
from mmrl.policy.policy import Evaluated, Policy
from mmrl.policy.storage import Stored
from mmrl.policy.value_head import ValueHead
from mmrl.robotics.acting import ActingPolicy, ActionOutput, Cloned
from mmrl.robotics.actions import ActionCodec
from mmrl.robotics.config import VLAConfig
from mmrl.robotics.contract import Observation
from mmrl.robotics.observation_encoder import ObservationEncoder, action_token
from mmrl.rollout import PrefillOnceEngine, Request, SamplingSettings
from mmrl.rollout.sampling import choose, row_noise
from mmrl.types import Turn

__all__ = ["ActionOutput", "Evaluated", "VLAPolicy", "add_action_tokens"]


def _query_token(index: int) -> str:
    return f"<|action_query_{index:02d}|>"


def add_action_tokens(model: Any, processor: Any, bins: int, queries: int) -> list[int]:
    """Add bin and query tokens to tokenizer and model where they are missing; returns the ids of the new ones.

    Rows of the embedding beyond the tokenizer's vocabulary are used before it is enlarged (Qwen2.5-VL has 271 of them).
    """
    tokenizer = processor.tokenizer
    wanted = [action_token(i) for i in range(bins)] + [_query_token(i) for i in range(queries)]
    known = tokenizer.get_vocab()
    new = [t for t in wanted if t not in known]
    if not new:
        return []
    tokenizer.add_tokens(new, special_tokens=True)
    embedding = model.get_input_embeddings().weight
    if len(tokenizer) > embedding.shape[0]:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64, mean_resizing=False)
        embedding = model.get_input_embeddings().weight
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(t) for t in new], device=embedding.device)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(len(new), embedding.shape[1], generator=generator) * 0.02
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        for table in (embedding,) if head is embedding else (embedding, head):
            table[ids] = noise.to(table)
    return ids.tolist()


def _distinct(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[int]]:
    """The different ones among `prompts`, in order of their first appearance, and which of them each prompt is."""
    known: dict[str, tuple[int, Prompt]] = {}
    owner = [known.setdefault(p.fingerprint, (len(known), p))[0] for p in prompts]
    return [p for _, p in known.values()], owner


class VLAPolicy:
    """An ActingPolicy with a discrete head. `core` is the language model with everything mmrl does with it (adapters, freezing,
    saving); `prompt(observation)` encodes what it sees."""

    def __init__(
        self,
        core: Policy,
        codec: ActionCodec,
        settings: VLAConfig,
        value_head: ValueHead | None = None,
        *,
        batch_tokens: int = 65536,
    ) -> None:
        self.core, self.codec, self.settings, self.value_head = core, codec, settings, value_head
        self._batch_tokens = batch_tokens  # what decode: autoregressive holds in the KV cache
        self.tokens_per_decision = codec.tokens
        vocabulary = core.processor.tokenizer.get_vocab()
        wanted = [action_token(i) for i in range(codec.bins)]
        missing = [t for t in wanted if t not in vocabulary]
        if missing:
            raise ConfigError(
                f"expected {codec.bins} action tokens in the vocabulary, found {codec.bins - len(missing)}; this "
                "model was made with fewer bins: warm-start it with mmrl sft, or set action.bins to the model's"
            )
        self.action_ids = torch.tensor([vocabulary[t] for t in wanted], device=core.device)
        self.query_ids = tuple(
            vocabulary.get(_query_token(i), -1) for i in range(self.tokens_per_decision)
        )
        if settings.decode == "parallel" and -1 in self.query_ids:
            raise ConfigError(
                f"expected {self.tokens_per_decision} query tokens in the vocabulary for decode: parallel, found "
                f"{self.tokens_per_decision - self.query_ids.count(-1)}; warm-start the model with these settings"
            )
        rows = core.base.lm_head.weight.shape[0]
        others = torch.ones(rows, dtype=torch.bool, device=core.device).index_fill_(
            0, self.action_ids, False
        )
        core.banned = others.nonzero()[:, 0]  # nothing but action tokens is ever sampled
        self.prompt = ObservationEncoder(core, codec.bins, settings, self.action_ids)
        self._engine = PrefillOnceEngine(core)

    @property
    def version(self) -> int:
        """Number of the published weights."""
        return self.core.version

    @version.setter
    def version(self, number: int) -> None:
        self.core.version = number

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Named parameters that receive gradients: the model's and the value head's."""
        return [*self.core.trainable(), *self._of_heads()]

    # what a training engine asks for: mmrl.distributed.engines.base.Trained

    @property
    def model(self) -> Any:
        """See Trained."""
        return self.core.model

    @property
    def reference_model(self) -> Any:
        """See Trained."""
        return self.core.reference_model

    @property
    def heads(self) -> Mapping[str, torch.nn.Module]:
        """See Trained."""
        return {} if self.value_head is None else {"value_head": self.value_head}

    @property
    def device(self) -> torch.device:
        """See Trained."""
        return self.core.device

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """See Trained."""
        return self.core.autocast_dtype

    @property
    def lockstep(self) -> bool:
        """See Trained."""
        return self.core.lockstep

    @lockstep.setter
    def lockstep(self, collective: bool) -> None:
        self.core.lockstep = collective

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """See Trained."""
        yield from self.core.named_parameters()
        yield from self._of_heads()

    def _of_heads(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [
            (f"{name}.{n}", p)
            for name, head in self.heads.items()
            for n, p in head.named_parameters()
        ]

    def copied_types(self, stored: Stored) -> dict[str, torch.dtype]:
        """See Policy."""
        return self.core.copied_types(stored)

    def full_replica(
        self, device: torch.device | None = None, stored: Stored = "masters"
    ) -> VLAPolicy:
        """A policy of its own to act, be evaluated and be saved, where this one's weights are about to be sharded (see Policy)."""
        head = copy.deepcopy(self.value_head)
        return VLAPolicy(
            self.core.full_replica(device, stored),
            self.codec,
            self.settings,
            head if device is None or head is None else head.to(device),
            batch_tokens=self._batch_tokens,
        )

    def adopt_replica(self, replica: VLAPolicy) -> None:
        """Go on with the model of `replica`, a full replica of this policy, in the place of the sharded one."""
        self.core.adopt_replica(replica.core)
        self.value_head = replica.value_head

    def publish(self) -> int:
        """Name the current weights by the next version; returns it."""
        return self.core.publish()

    def token_mask(self, turn: Turn) -> np.ndarray:
        """Which action tokens of a decision were executed, at least in part, (N,) bool."""
        return np.array(token_mask(turn.valid, len(turn.token_ids), self.codec.dim))

    def idle_turn(self) -> tuple[Prompt, tuple[int, ...]]:
        """The smallest decision there is, without pictures: for forwards that count for nothing
        (mmrl.distributed.engines.lockstep)."""
        return idle_item(int(self.action_ids[0])).prompt, (0,) * self.tokens_per_decision

    # the one forward pass

    def _hidden(
        self, prompts: Sequence[Prompt], completions: Sequence[tuple[tuple[int, ...], ...]]
    ) -> tuple[torch.Tensor, ...]:
        """Hidden states that predict each token of each completion, (B, N, H), and of each prompt's last token, (U, H)."""
        parallel = self.settings.decode == "parallel"
        batch = pack(
            [PackItem(p, c) for p, c in zip(prompts, completions, strict=True)], causal=not parallel
        ).to(self.core.device)
        hidden = self.core.hidden(batch)
        count = self.tokens_per_decision
        where = (batch.place_N if parallel else batch.source_N).view(-1, count)
        first = torch.tensor([0, *(len(c) for c in completions[:-1])]).cumsum(0).to(where.device)
        # the first token of a completion is predicted by its prompt's last
        last_U = batch.source_N.view(-1, count)[first, 0]
        return hidden[where], hidden[last_U]

    def _logits(self, hidden: torch.Tensor, temperature: float) -> torch.Tensor:
        """fp32 logits over the bins."""
        head = self.core.base.lm_head
        if hasattr(head, "base_layer"):
            return (
                self.core.logits(hidden.flatten(0, -2))[:, self.action_ids].view(
                    *hidden.shape[:-1], -1
                )
                / temperature
            )
        with torch.autocast(self.core.device.type, enabled=False):
            return (
                torch.nn.functional.linear(hidden.float(), head.weight[self.action_ids].float())
                / temperature
            )

    def _values(self, hidden_UH: torch.Tensor) -> torch.Tensor:
        if self.value_head is None:
            return hidden_UH.new_zeros((len(hidden_UH), 1), dtype=torch.float32)
        return self.value_head(hidden_UH)

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        tokens_DN: Sequence[Sequence[int]],
        temperature: float = 1.0,
        *,
        entropy_gradient: bool = False,
        detach_values: bool = False,
    ) -> Evaluated:
        """Log-probs and entropies (nats) of chosen tokens, and values; decisions of equal prompts share one forward pass. With
        `detach_values` the values' gradient ends at the value head."""
        chosen, owner_D = _distinct(prompts)
        tokens = torch.tensor([list(t) for t in tokens_DN], device=self.core.device)
        parallel = self.settings.decode == "parallel"
        completions: list[tuple[tuple[int, ...], ...]]
        if parallel:
            completions = [(self.query_ids,)] * len(chosen)
            order = list(range(len(prompts)))
        else:  # completions of one prompt stand behind it together
            order = sorted(range(len(prompts)), key=lambda d: owner_D[d])
            ids = self.action_ids[tokens].tolist()
            completions = [
                tuple(tuple(ids[d]) for d in order if owner_D[d] == u) for u in range(len(chosen))
            ]
        owner = torch.tensor(owner_D, device=self.core.device)
        with self.core.autocast(keep=False):
            hidden, last_UH = self._hidden(chosen, completions)
            logits = self._logits(hidden, temperature)
            values_DV = self._values(last_UH.detach() if detach_values else last_UH)[owner]
        back = torch.tensor(np.argsort(order), device=self.core.device)
        logits_DNV = logits[owner] if parallel else logits[back]
        logps_DNV = logits_DNV.log_softmax(-1)
        logp_DN = logps_DNV.gather(-1, tokens[..., None])[..., 0]
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_DN = -(logps_DNV.exp() * logps_DNV).sum(-1)
        packed = sum(p.length + sum(map(len, c)) for p, c in zip(chosen, completions, strict=True))
        return Evaluated(logp_DN.flatten(), entropy_DN.flatten(), values_DV.flatten(), packed)

    def targets(self, actions_TA: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
        """See ActingPolicy: bins."""
        bins_KA, valid_K = self.codec.targets(actions_TA, start)
        return bins_KA.reshape(-1), np.repeat(valid_K, self.codec.dim)

    def clone(
        self, prompts: Sequence[Prompt], targets_DN: Sequence[Any], keys: Sequence[tuple[int, ...]]
    ) -> Cloned:
        """See ActingPolicy: the negative log-likelihood; nothing is drawn."""
        found = self.evaluate(prompts, targets_DN)
        return Cloned(-found.logp_N, found.logp_N.detach() > np.log(0.5), found.values_M)

    @torch.no_grad()
    def values(self, prompts: Sequence[Prompt]) -> list[float]:
        """The critic's value of each prompt (of its first action step); zeros without a critic."""
        if self.value_head is None or not prompts:
            return [0.0] * len(prompts)
        found = self.evaluate(prompts, [(0,) * self.tokens_per_decision] * len(prompts)).values_M
        return found.view(len(prompts), -1)[:, 0].tolist()

    # acting

    @torch.no_grad()
    def act(
        self,
        observations: Sequence[Observation],
        keys: Sequence[tuple[int, ...]],
        *,
        greedy: bool = False,
        temperature: float = 1.0,
    ) -> list[ActionOutput]:
        """One output per observation; `keys` seed the noise of each, so that it does not depend on what stands beside it."""
        if not observations:
            return []
        prompts = [self.prompt(o) for o in observations]
        if self.settings.decode == "autoregressive":
            return self._write(prompts, keys, greedy, temperature)
        chosen, owner = _distinct(prompts)
        with self.core.autocast():
            hidden, last_UH = self._hidden(chosen, [(self.query_ids,)] * len(chosen))
            logits_UNV = self._logits(hidden, temperature)
            values_UV = self._values(last_UH).tolist()
        logps_UNV = logits_UNV.log_softmax(-1)
        outputs = []
        for prompt, u, key in zip(prompts, owner, keys, strict=True):
            noise = (
                None
                if greedy
                else row_noise(key, 1, self.tokens_per_decision)[0].to(self.core.device)
            )
            token_N = choose(logits_UNV[u], noise)
            logp_N = logps_UNV[u].gather(-1, token_N[:, None])[:, 0]
            outputs.append(
                ActionOutput(
                    tuple(token_N.tolist()), tuple(logp_N.tolist()), tuple(values_UV[u]), prompt
                )
            )
        return outputs

    def _write(
        self,
        prompts: Sequence[Prompt],
        keys: Sequence[tuple[int, ...]],
        greedy: bool,
        temperature: float,
    ) -> list[ActionOutput]:
        settings = SamplingSettings(
            temperature=temperature,
            max_new_tokens=self.tokens_per_decision,
            batch_tokens=self._batch_tokens,
        )
        requests = [Request(p, 1, k, greedy) for p, k in zip(prompts, keys, strict=True)]
        written = [c[0] for c in self._engine.generate(requests, settings)]
        index = {int(v): i for i, v in enumerate(self.action_ids)}
        tokens = [tuple(index[t] for t in c.token_ids) for c in written]
        values = [[0.0]] * len(prompts)
        if self.value_head is not None:
            values = (
                self.evaluate(prompts, tokens, temperature).values_M.view(len(prompts), -1).tolist()
            )
        return [
            ActionOutput(t, c.logprobs, tuple(v), p)
            for t, c, v, p in zip(tokens, written, values, prompts, strict=True)
        ]

    def actions(self, output: ActionOutput) -> np.ndarray:
        """Control steps (chunk * repeat, A) of an output, for the simulator."""
        return self.codec.decode(
            np.asarray(output.tokens).reshape(self.codec.chunk, self.codec.dim)
        )

    # files

    def save(self, folder: str | Path) -> None:
        """Hugging Face files, vla.json (how to act) and value_head.safetensors where there is a head."""
        folder = Path(folder)
        self.core.save(folder)
        description = {
            "format": 1,
            "vla": self.settings.model_dump(mode="json"),
            "action": self.codec.to_dict(),
        }
        (folder / "vla.json").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
        if self.value_head is not None:
            self.value_head.save(folder)

    def load_value_head(self, folder: str | Path) -> bool:
        """Read the value head saved beside the model; False when there is none. Raises CheckpointError for another shape."""
        return self.value_head is not None and self.value_head.load(Path(folder))

    @contextlib.contextmanager
    def reference(self) -> Any:
        """The policy before training (adapter off, or the frozen copy), for the KL term; it has no critic."""
        head, self.value_head = self.value_head, None
        try:
            with self.core.reference():
                yield self
        finally:
            self.value_head = head


# for type checkers
_CHECKED: type[ActingPolicy] = VLAPolicy
