"""The policy: a vision-language model with its processor, template and adapters, and log-probs of packed batches.

    policy = load_policy(ModelSettings(path="Qwen/Qwen2.5-VL-3B-Instruct", freeze=["vision"]))
    result = policy.logp(pack(items))

Legend: N completion tokens, D completions (turns), M values of them (see `Evaluated`), T packed tokens, V vocabulary, H hidden
width.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from mmrl.errors import ConfigError
from mmrl.policy.encode import Encoder, Prompt
from mmrl.policy.families import family_of
from mmrl.policy.families.contract import sense_of
from mmrl.policy.in_file import in_file, replica_of
from mmrl.policy.output_layer import OutputLayer, TokenScores
from mmrl.policy.pack import Batch, PrefixLayout, idle_item, pack, pack_padded, pack_turns
from mmrl.policy.quantized import NF4Linear, whole_weight
from mmrl.policy.released import released_form
from mmrl.policy.routing import (
    ExpertShape,
    NotedExperts,
    ReplayedExperts,
    Rerouted,
    TurnExperts,
    experts_of_turns,
    replayed,
)
from mmrl.policy.sequence_parallel import Rows, SequenceGroup, slice_media
from mmrl.policy.storage import Stored, narrowed
from mmrl.policy.value_head import ValueHead
from mmrl.policy.vision import (
    FrozenTower,
    Towers,
    encoded_rows,
    feature_rows,
    joint_media_inputs,
    media_inputs,
)
from mmrl.task import Template
from mmrl.types import Turn

__all__ = [
    "CRITIC_FOLDER",
    "Evaluated",
    "PredictedValues",
    "LogpResult",
    "Policy",
]

CRITIC_FOLDER = "critic"
"""Of a saved policy with a value head: beside the model's files, of which vLLM would read every *.safetensors as the model's."""
# a 4-D mask is passed through: the layout does the masking
_DUMMY_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)


@dataclass
class LogpResult:
    """logp_N of the target tokens (differentiable), entropy_N of the distributions (nats, with gradient where it was asked
    for) and the critic's values_M, all fp32."""

    logp_N: torch.Tensor
    entropy_N: torch.Tensor
    values_M: torch.Tensor


@dataclass(frozen=True)
class Evaluated:
    """Turns under a policy: logp_N and entropy_N (nats) of all their tokens one after the other, fp32 and differentiable, and the
    critic's values_M, turn after turn as well: one of each turn, or one of each of its action steps, or one of each of its tokens
    (0 without a critic). `num_tokens`: those that the language model processed. Of a mixture of experts, where they were asked for,
    the `experts` of each turn; and how its routers differ from the experts that they were given (`rerouted`)."""

    logp_N: torch.Tensor
    entropy_N: torch.Tensor
    values_M: torch.Tensor
    num_tokens: int = 0
    experts: Sequence[TurnExperts] = ()
    rerouted: Rerouted = field(default_factory=Rerouted)


@dataclass(frozen=True)
class PredictedValues:
    """What a critic says of turns, without gradient: values_M as in `Evaluated`, and after_D, what each is worth when it has been
    written. `num_tokens`: those that the language model processed."""

    values_M: torch.Tensor
    after_D: torch.Tensor
    num_tokens: int = 0


class Policy:
    """Model, processor and everything needed to sample from it and to differentiate its log-probs.

    `version` counts published weights. `temperature` divides logits in sampling and in log-probs alike, so that the
    behaviour and the training distribution are the same one.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        template: Template,
        encoder: Encoder,
        *,
        device: torch.device,
        autocast: torch.dtype | None = None,
        reference: Any | None = None,
        logits_chunk: int = 1 << 26,
    ) -> None:
        self.model, self.processor, self.template, self.encoder = (
            model,
            processor,
            template,
            encoder,
        )
        self.device, self.autocast_dtype = device, autocast
        self.version = 0
        self.lockstep = False  # forwards are collective (mmrl.distributed.engines): each runs a trained vision tower exactly once
        self.reference_model = reference
        self.shared_prefix = True  # see `evaluate`
        self.value_head: ValueHead | None = None  # a critic's (mmrl.policy.loading.add_value_head)
        # it values each token before it is written, not each turn before its first one
        self.values_tokens = False
        self._towers: dict[int, Towers] = {}
        # logits held at once; beyond it they are recomputed in backward
        self._logits_chunk = logits_chunk
        self._output_layer = OutputLayer()
        self.family = family_of(self.base.config)
        self.banned = torch.tensor(self.family.banned(processor), dtype=torch.long, device=device)
        eos = model.generation_config.eos_token_id
        self.eos_ids = tuple(
            [eos] if isinstance(eos, int) else eos or [processor.tokenizer.eos_token_id]
        )

    @property
    def base(self) -> Any:
        """The transformers model without the peft wrapper (adapters live inside its layers)."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def body(self) -> Any:
        """The model without its output layer, as its family tells (see ModelFamily)."""
        return self.family.body(self.base)

    @property
    def has_adapter(self) -> bool:
        """True when a LoRA adapter is being trained."""
        return hasattr(self.model, "disable_adapter")

    def publish(self) -> int:
        """Make the current weights the ones rollouts use; returns the new version."""
        self.version += 1
        return self.version

    @property
    def heads(self) -> Mapping[str, torch.nn.Module]:
        """What is trained beside the model: the critic's value head, where there is one (see
        mmrl.distributed.engines.base.Trained)."""
        return {} if self.value_head is None else {"value_head": self.value_head}

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """All parameters: the model's, then the value head's."""
        yield from self.model.named_parameters()
        for name, head in self.heads.items():
            yield from ((f"{name}.{n}", p) for n, p in head.named_parameters())

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Named parameters that receive gradients, in a fixed order."""
        return [(n, p) for n, p in self.named_parameters() if p.requires_grad]

    def autocast(self, *, keep: bool = True) -> contextlib.AbstractContextManager:
        """bf16 autocast where the model was loaded with it (a GPU that has bf16, or model.dtype: bf16), else nothing.

        With `keep` each trained weight's bf16 copy is kept until the context ends: half as much memory again as the weights, for
        forwards that follow each other, as in sampling. A forward that is differentiated uses each weight once.
        """
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype, cache_enabled=keep)

    @property
    def expert_shape(self) -> ExpertShape:
        """What is noted of each token of a mixture of experts. Raises ConfigError for a model without experts."""
        return ExpertShape.of(self.family, self.body)

    def hidden(
        self, batch: Batch, routing: NotedExperts | ReplayedExperts | None = None
    ) -> torch.Tensor:
        """Last hidden states (rows * T, H) of a packed or padded batch already on the device; where processes compute a packed row
        together, those of this one's slice. `routing`: what routers are told (mmrl.policy.routing)."""
        # transformers checkpoints activations only in training mode, and ignores KV caches there; no family's dropout is on
        self.model.train(torch.is_grad_enabled() and self.base.is_gradient_checkpointing)
        extra: dict[str, Any] = {}
        if batch.layout is not None:
            extra["prefix_layout"] = self._layout(batch, batch.layout)
        if routing is not None:
            extra["routing"] = routing
        mask = _DUMMY_MASK.to(self.device) if batch.layout is not None else batch.attention_mask
        idle, seen = None, (batch.ids, batch.positions_3, batch.kinds)
        if batch.sequence is not None:
            media, idle = self._slice_media(batch, batch.sequence)
            ids, positions, kinds = (batch.sequence.slice_of(x) for x in seen)
            seen = ids, positions, kinds
        elif self.lockstep and None in self.towers().values():
            media, idle = joint_media_inputs(
                self.body, self.encoder.visuals, batch.visuals, self.device, self.towers()
            )
        else:
            media = self.media(batch.visuals)
        out = self.family.forward(
            self.body,
            input_ids=seen[0],
            attention_mask=mask,
            use_cache=False,
            **self.family.text_inputs(seen[1], seen[2]),
            **media,
            **extra,
        )
        hidden = out.last_hidden_state.flatten(0, 1)
        return hidden if idle is None else hidden + idle.to(hidden.dtype)

    def _layout(self, batch: Batch, layout: PrefixLayout) -> PrefixLayout:
        """With the numbers of the pictures, where the family's see themselves."""
        if not self.family.pictures_see_themselves:
            return layout
        shown_T = batch.kinds[0] == 1
        begins_T = shown_T & ~torch.nn.functional.pad(shown_T, (1, 0))[:-1]
        return replace(layout, pictures_T=torch.where(shown_T, begins_T.cumsum(0), -1))

    def _slice_media(
        self, batch: Batch, group: SequenceGroup
    ) -> tuple[dict[str, Any], torch.Tensor | None]:
        model = self.body
        if self.family.clips_are_pictures:
            batch = replace(batch, kinds=batch.kinds.clamp(max=1))
        return slice_media(
            batch,
            lambda mine: feature_rows(
                model, self.encoder.visuals, mine, self.device, self.towers()
            ),
            lambda rows: encoded_rows(model, rows),
            group,
        )

    def media(self, visuals: Sequence[Any]) -> dict[str, Any]:
        """What the body's forward takes for these pictures, clips and sounds: pixels, or features when their tower is frozen."""
        return media_inputs(self.body, self.encoder.visuals, visuals, self.device, self.towers())

    def towers(self) -> Towers:
        """The vision tower (with its projector), and the audio tower of a model that hears, where nothing in them is trained; None
        for those that are. Remembered per model."""
        model = self.body
        if id(model) not in self._towers:
            frozen = {e.sense for e in self.family.parts.frozen_encoders(model)}
            self._towers[id(model)] = {
                e.sense: FrozenTower(model, self.autocast_dtype, e.sense)
                if e.sense in frozen
                else None
                for e in self.family.parts.encoders(model)
            }
        return self._towers[id(model)]

    def tower(self, kind: str = "image") -> FrozenTower | None:
        """The tower that reads media of this kind when nothing in it is trained, else None."""
        return self.towers()[sense_of(kind)]

    def pin(self, visuals: Sequence[Any]) -> None:
        """Keep what a step needs of `visuals` in the visual cache until its `unpin`. Raises MediaError, MismatchError."""
        for sense, tower in self.towers().items():
            self.encoder.visuals.pin([v for v in visuals if sense_of(v.kind) == sense], tower)

    def logits(self, hidden_nH: torch.Tensor) -> torch.Tensor:
        """fp32 logits (n, V) of hidden states, added up in fp32 whatever autocast is on and however the model is stored.

        A bf16 logit of size 16 to 32 is a multiple of 1/8: log-probs taken from it would be fp32 in name only. On a GPU under
        autocast the factors are bf16, as those of every other layer; elsewhere fp32.
        """
        head = self.base.lm_head
        with torch.autocast(self.device.type, enabled=False):
            # an adapter on the output layer: its own forward adds it
            if hasattr(head, "base_layer"):
                return head(hidden_nH.to(head.weight.dtype)).float()
            if self.autocast_dtype is None and head.weight.dtype == torch.float32:
                return head(hidden_nH)
            # what gathers a sharded weight may fill the same tensor with another one's numbers
            layer = OutputLayer() if self.lockstep else self._output_layer
            return layer(hidden_nH, head.weight, self.autocast_dtype)

    def adjust(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """fp32 logits of the sampled distribution: divided by the temperature, media tokens impossible. May write over `logits`."""
        logits = logits.float()
        if temperature != 1:
            logits = logits / temperature
        return logits.index_fill_(-1, self.banned, float("-inf")) if len(self.banned) else logits

    def _logp_of(
        self,
        hidden_nH: torch.Tensor,
        target_n: torch.Tensor,
        temperature: float,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, ...]:
        logits_nV = self.adjust(self.logits(hidden_nH), temperature)
        return TokenScores.apply(logits_nV, target_n, entropy_gradient)

    def logp(
        self,
        batch: Batch,
        temperature: float = 1.0,
        *,
        entropy_gradient: bool = False,
        detach_values: bool = False,
        routing: NotedExperts | ReplayedExperts | None = None,
    ) -> LogpResult:
        """Log-probs of batch.target_N; differentiable unless called under torch.no_grad(). With `entropy_gradient` so are
        the entropies. With `detach_values` the values' gradient ends at the value head. `routing`: see `hidden`."""
        batch = batch.to(self.device)
        rows, count = Rows(batch.sequence, batch.num_tokens), len(batch.target_N)
        with self.autocast(keep=False):
            hidden_NH = rows.at(self.hidden(batch, routing), batch.source_N)
            target_N = rows.share(batch.target_N)
            values_M = self._values(hidden_NH.detach() if detach_values else hidden_NH, batch, rows)
            size = max(1, self._logits_chunk // self.base.lm_head.weight.shape[0])
            if len(hidden_NH) <= size:
                logp_N, entropy_N = self._logp_of(
                    hidden_NH, target_N, temperature, entropy_gradient
                )
                return LogpResult(rows.known(logp_N, count), rows.known(entropy_N, count), values_M)
            pieces = [
                checkpoint(self._logp_of, h, t, temperature, entropy_gradient, use_reentrant=False)
                for h, t in zip(hidden_NH.split(size), target_N.split(size), strict=True)
            ]
        return LogpResult(
            rows.known(torch.cat([p[0] for p in pieces]), count),
            rows.known(torch.cat([p[1] for p in pieces]), count),
            values_M,
        )

    def _values(self, hidden_NH: torch.Tensor, batch: Batch, rows: Rows) -> torch.Tensor:
        """The critic's values (M,) from the hidden states that predict each token: what the policy knew before it wrote it."""
        if self.value_head is None:
            return hidden_NH.new_zeros(batch.num_sequences, dtype=torch.float32)
        if rows.group is not None:  # a share of the tokens: whose turns begin in it does not matter
            values_N = rows.known(self.value_head(hidden_NH).squeeze(-1), len(batch.source_N))
            return values_N if self.values_tokens else values_N.index_select(0, batch.starts_D)
        read_MH = hidden_NH if self.values_tokens else hidden_NH.index_select(0, batch.starts_D)
        return self.value_head(read_MH).squeeze(-1)

    @torch.no_grad()
    def predict_values(
        self,
        prompts: Sequence[Prompt],
        tokens: Sequence[tuple[int, ...]],
        sequence: SequenceGroup | None = None,
        experts: Sequence[TurnExperts | None] | None = None,
    ) -> PredictedValues:
        """What the critic says of turns, packed as `evaluate` packs them, without log-probs. There must be a value head."""
        assert self.value_head is not None, "a policy without a critic predicts no values"
        batch = self._batch(prompts, tokens, sequence).to(self.device)
        routing = self._replayed(batch, prompts, experts)
        rows, last_D = Rows(batch.sequence, batch.num_tokens), batch.place_N[batch.ends_D]
        with self.autocast(keep=False):
            hidden = self.hidden(batch, routing)
            values_M = self._values(rows.at(hidden, batch.source_N), batch, rows)
            after_D = rows.known(self.value_head(rows.at(hidden, last_D)).squeeze(-1), len(last_D))
        return PredictedValues(values_M, after_D, batch.num_tokens)

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        tokens: Sequence[tuple[int, ...]],
        temperature: float = 1.0,
        *,
        entropy_gradient: bool = False,
        detach_values: bool = False,
        sequence: SequenceGroup | None = None,
        experts: Sequence[TurnExperts | None] | None = None,
        note_experts: bool = False,
    ) -> Evaluated:
        """Log-probs, entropies and values of turns: `tokens` written after `prompts`. Turns that follow each other with one prompt
        (the same object) are packed behind one copy of it, a turn whose prompt extends the one before (`pack_turns`) behind that;
        with `shared_prefix` false each has a prompt of its own. `sequence`: the processes that compute these turns together, all of
        which call this with the same ones (mmrl.policy.sequence_parallel); each gets the whole result. `experts`: those that are to
        compute each turn (None: the routers choose); with `note_experts` those that did are in the result."""
        batch = self._batch(prompts, tokens, sequence)
        fixed = self._replayed(batch, prompts, experts)
        noted = NotedExperts(self.expert_shape) if note_experts else None
        assert fixed is None or noted is None, "experts are given or asked for"
        found = self.logp(
            batch,
            temperature,
            entropy_gradient=entropy_gradient,
            detach_values=detach_values,
            routing=fixed or noted,
        )
        return Evaluated(
            found.logp_N,
            found.entropy_N,
            found.values_M,
            batch.num_tokens,
            experts_of_turns(noted, batch, prompts) if noted else (),
            fixed.rerouted(batch.sequence) if fixed else Rerouted(),
        )

    def _replayed(
        self,
        batch: Batch,
        prompts: Sequence[Prompt],
        experts: Sequence[TurnExperts | None] | None,
    ) -> ReplayedExperts | None:
        if experts is None or not any(experts):
            return None
        return replayed(self.family, batch, prompts, experts, self.expert_shape, self.device)

    def _batch(
        self,
        prompts: Sequence[Prompt],
        tokens: Sequence[tuple[int, ...]],
        sequence: SequenceGroup | None = None,
    ) -> Batch:
        batch = (pack if self.shared_prefix else pack_padded)(pack_turns(prompts, tokens))
        return batch if sequence is None else batch.in_slices(sequence)

    def token_mask(self, turn: Turn) -> np.ndarray:
        """Which tokens of a turn had an effect, (N,) bool: all that were written."""
        return np.ones(len(turn.token_ids), bool)

    def idle_turn(self) -> tuple[Prompt, tuple[int, ...]]:
        """The smallest turn there is, for forwards that count for nothing (mmrl.distributed.engines.lockstep)."""
        item = idle_item(self.eos_ids[0])
        return item.prompt, item.completions[0]

    @contextlib.contextmanager
    def reference(self) -> Iterator[Policy]:
        """The reference policy: the adapter switched off for LoRA, else the frozen copy made at loading. It has no critic."""
        head, self.value_head = self.value_head, None
        try:
            with self._reference_model():
                yield self
        finally:
            self.value_head = head

    @contextlib.contextmanager
    def _reference_model(self) -> Iterator[None]:
        if self.has_adapter:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            with self.model.disable_adapter():
                # peft freezes what it switches off; a sharded model must not notice
                for parameter in trained:
                    parameter.requires_grad_(True)
                yield
        elif self.reference_model is not None:
            current, self.model = self.model, self.reference_model
            try:
                yield
            finally:
                self.model = current
        else:
            raise ConfigError(
                "expected a reference model for the KL term, found none; set algorithm.kl.coef > 0 before "
                "loading the policy, or train a LoRA adapter"
            )

    def copied_types(self, stored: Stored) -> dict[str, torch.dtype]:
        """Of the parameters that a copy holds in another type than these masters: by name, that type (mmrl.policy.storage)."""
        narrow = {id(p) for p in narrowed(self.model, self.autocast_dtype, stored)}
        dtype = self.autocast_dtype
        return {
            n: dtype for n, p in self.named_parameters() if id(p) in narrow and dtype is not None
        }

    def full_replica(
        self, device: torch.device | None = None, stored: Stored = "masters"
    ) -> Policy:
        """A policy of its own for sampling, evaluation and saving, where this one's weights are about to be sharded.

        It shares processor, template, encoder and frozen towers; every other tensor is its own, on `device` where one is
        given (what is only saved may stay in host memory). Parameters keep their requires_grad: a tower whose weights still
        change must not count as frozen there. What still waits in its file (mmrl.policy.in_file) is filled by the training
        engine's first `gather_into`. `stored`: see mmrl.policy.storage; what is saved or goes on to train holds "masters".
        """
        towers = self.towers()
        frozen = [m for t in towers.values() if t is not None for m in t.encoders.modules.values()]
        memo: dict[int, Any] = {id(module): module for module in frozen}
        there = {id(p) for module in frozen for p in module.parameters()}
        narrow = {id(p) for p in narrowed(self.model, self.autocast_dtype, stored)}
        # tensors are moved and cast one by one instead of being copied as and where they are
        memo |= {
            id(p): replica_of(p, device, self.autocast_dtype if id(p) in narrow else None)
            for p in self.model.parameters()
            if id(p) not in there
            and (device is not None or in_file(p) is not None or id(p) in narrow)
        }
        if device is not None:
            memo |= {id(b): b.to(device, copy=True) for b in self.model.buffers()}
        model = copy.deepcopy(self.model, memo)
        other = Policy(
            model,
            self.processor,
            self.template,
            self.encoder,
            device=self.device,
            autocast=self.autocast_dtype,
            logits_chunk=self._logits_chunk,
        )
        other._towers[id(other.body)] = towers
        other.version, other.values_tokens = self.version, self.values_tokens
        other.value_head = copy.deepcopy(self.value_head)
        if other.value_head is not None and device is not None:
            other.value_head.to(device)
        return other

    def adopt_replica(self, replica: Policy) -> None:
        """Go on with the model of `replica`, a full replica of this policy, in the place of the sharded one."""
        self.model, self.value_head, self._towers, self.lockstep = (
            replica.model,
            replica.value_head,
            replica._towers,
            False,
        )

    def save(self, folder: str | Path, *, merge_adapter: bool = True) -> None:
        """Write model and processor in Hugging Face format.

        A LoRA adapter is written under adapter/ and, with `merge_adapter`, merged into the main weights so that
        transformers and vLLM load the folder as it is. A value head is written under critic/, where neither looks.
        """
        folder = Path(folder)
        if self.value_head is not None:
            (folder / CRITIC_FOLDER).mkdir(parents=True, exist_ok=True)
            self.value_head.save(folder / CRITIC_FOLDER)
        if not self.has_adapter:
            self.model.save_pretrained(folder, **released_form(self.family, self.model))
            self._name_precision(folder / "config.json")
        else:
            # of new tokens their rows only
            self.model.save_pretrained(folder / "adapter", save_embedding_layers=False)
            if merge_adapter:
                save_merged(self.model, folder)
        self.processor.save_pretrained(folder)

    def save_settings(self, folder: Path) -> None:
        """What `save` writes beside the weights of a policy without adapter: the model's configuration, and the processor."""
        self.model.config.save_pretrained(folder)
        self.model.generation_config.save_pretrained(folder)
        self._name_precision(folder / "config.json")
        self.processor.save_pretrained(folder)

    def _name_precision(self, file: Path) -> None:
        """transformers names the first parameter's type, here perhaps that of a frozen part; loading would round by it."""
        config = json.loads(file.read_text(encoding="utf-8"))
        config["dtype"] = (
            "float32"
            if any(p.dtype == torch.float32 for p in self.model.parameters())
            else config["dtype"]
        )
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_merged(model: Any, folder: Path) -> None:
    """Save the base model with the adapter merged in; the live model stays as it is."""
    base = model.get_base_model()
    family, plain = family_of(base.config), _without_adapters(base)
    plain.save_pretrained(folder, **released_form(family, plain, _merged_state(base)))


def _without_adapters(base: Any) -> Any:
    """The model whose adapted layers are the layers themselves, sharing every tensor: transformers asks a model for the parameters
    that it saves by their own names, which PEFT's wrapper of a mixture's experts does not have."""
    memo: dict[int, Any] = {id(t): t for t in (*base.parameters(), *base.buffers())}
    memo |= {id(m): m.get_base_layer() for m in base.modules() if hasattr(m, "lora_A")}
    return copy.deepcopy(base, memo)


@torch.no_grad()
def _merged_state(base: Any) -> dict[str, torch.Tensor]:
    """The weights by the base model's own names. What an adapter changes is computed in host memory: a GPU that a LoRA run fits
    need not have room for the base twice."""
    adapters = (".lora_", "lora_magnitude", ".trainable_tokens_")
    state = {
        name.replace(".token_adapter", "").replace(".base_layer", ""): tensor
        for name, tensor in base.state_dict().items()
        if not any(part in name for part in adapters)
    }
    for name, module in base.named_modules():
        if isinstance(module, NF4Linear):
            state[f"{name.removesuffix('.base_layer')}.weight"] = whole_weight(module).cpu()
    for name, module in base.named_modules():
        if "default" in getattr(module, "lora_A", ()):
            # of experts each parameter has an adapter, one wrapped around the other
            key = f"{name.replace('.base_layer', '')}.{getattr(module, 'parameter_name', 'weight')}"
            whole, delta = state[key].cpu(), module.get_delta_weight("default").cpu()
            state[key] = (whole.float() + delta.float()).to(whole.dtype)
        elif "default" in getattr(module, "trainable_tokens_delta", ()):
            key = f"{name.removesuffix('.token_adapter')}.weight"
            state[key] = state[key].to("cpu", copy=True)
            rows = module.trainable_tokens_delta["default"]
            state[key][module.token_indices["default"]] = rows.to(state[key])
    if getattr(base.config, "tie_word_embeddings", False):
        # one table, written once
        table = next(key for key in state if key.endswith("embed_tokens.weight"))
        state["lm_head.weight"] = state[table]
    return state
