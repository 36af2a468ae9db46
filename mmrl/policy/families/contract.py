"""What mmrl must know of a family of models, in one record: everything else in mmrl is the same for all of them.

    family = family_of(model.config)                 # by model_type, see mmrl.policy.families
    family.parts.part_of("model.visual.merger.ln_q.weight")          # "projector"

A record says how the family is prompted, what its processor makes of a picture, how the picture's placeholder is expanded, where
its tokens stand, which modules are its vision tower, projector and language model, and what its forward takes. `mmrl families
check` (mmrl.diagnostics.families) holds a record against transformers' own processor and forward.

Importing this module costs neither torch nor transformers.

Legend: P prompt tokens, R rows, T tokens of a row, n patches (or tiles), D values of one, H hidden width.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from mmrl.coords import CoordFrame
from mmrl.errors import need_package
from mmrl.policy.families.native import NativeAnswer
from mmrl.policy.families.shapes import Layer, Mixer, Tower

if TYPE_CHECKING:
    import torch

    from mmrl.policy.tiny import TinySpec
    from mmrl.video.audio import AudioReader
    from mmrl.video.clips import ClipReader
    from mmrl.video.pictures import PictureReader
    from mmrl.video.references import Features, Visual

__all__ = [
    "GIVEN_FEATURES",
    "PARTS",
    "Encoders",
    "ForVLLM",
    "ModelFamily",
    "Parts",
    "release_of_transformers",
    "sense_of",
]

T = TypeVar("T")

PARTS = ("vision", "projector", "language", "audio")
"""What model.freeze names; the last where a family hears."""


@dataclass(frozen=True)
class Parts:
    """Where the parts of a model are, as names below its body (`ModelFamily.body`, mostly `model.model` of transformers' class for
    generation).

    `vision` holds all that only pictures run through, the tower first and the projector with it; a parameter of it belongs to the
    projector when its name contains one of `projector`. `tower_blocks` are the tower's repeated blocks and `layers` those of the
    language model: what a sharded engine gathers one after the other. `hearing` holds all that only sounds run through, with
    `hearing_blocks` repeated; () where the family does not hear.
    """

    vision: tuple[str, ...] = ("visual",)
    projector: tuple[str, ...] = ("merger",)
    tower_blocks: str = "visual.blocks"
    language: str = "language_model"
    layers: str = "language_model.layers"
    loose: tuple[str, ...] = ()
    """Parameters of the base model itself that belong to the projector."""
    hearing: tuple[str, ...] = ()
    hearing_blocks: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Those of PARTS that there are."""
        return PARTS if self.hearing else PARTS[:-1]

    def part_of(self, parameter: str) -> str:
        """ "vision", "projector", "language" or "audio", by the name of a parameter."""
        if parameter.rsplit(".", 1)[-1] in self.loose:
            return "projector"
        if any(f".{name}." in f".{parameter}." for name in self.hearing):
            return "audio"
        if not any(f".{name}." in f".{parameter}." for name in self.vision):
            return "language"
        return "projector" if any(name in parameter for name in self.projector) else "vision"

    def vision_modules(self, base: Any) -> dict[str, Any]:
        """Name -> module of all that only pictures run through, the tower first."""
        return {name: attrgetter(name)(base) for name in self.vision}

    def vision_parameters(self, base: Any) -> list[Any]:
        """Parameters of the tower and the projector."""
        modules = [p for m in self.vision_modules(base).values() for p in m.parameters()]
        return [*modules, *(getattr(base, name) for name in self.loose)]

    def blocks(self, base: Any) -> list[Any]:
        """The tower's repeated blocks."""
        return list(attrgetter(self.tower_blocks)(base))

    def encoders(self, base: Any) -> list[Encoders]:
        """The vision tower with its projector, then, where there is one, the audio tower."""
        found = [
            Encoders(
                "vision",
                self.vision_modules(base),
                self.vision_parameters(base),
                self.blocks(base),
            )
        ]
        if self.hearing:
            modules = {name: attrgetter(name)(base) for name in self.hearing}
            parameters = [p for m in modules.values() for p in m.parameters()]
            blocks = list(attrgetter(self.hearing_blocks)(base))
            found.append(Encoders("audio", modules, parameters, blocks))
        return found

    def frozen_encoders(self, base: Any) -> list[Encoders]:
        """Those of which nothing is trained: their features are computed once."""
        return [e for e in self.encoders(base) if not any(p.requires_grad for p in e.parameters)]

    def decoder(self, base: Any) -> Any:
        """The language model without its output layer."""
        return attrgetter(self.language)(base)

    def decoder_layers(self, base: Any) -> list[Any]:
        """The language model's layers."""
        return list(attrgetter(self.layers)(base))


@dataclass(frozen=True)
class Encoders:
    """What media of one sense run through before the language model: `sense` is "vision" or "audio"."""

    sense: str
    modules: Mapping[str, Any]
    parameters: Sequence[Any]
    blocks: Sequence[Any]


def release_of_transformers() -> tuple[int, int]:
    """Major and minor number of the one that is installed, which is not imported."""
    major, minor = version("transformers").split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class ForVLLM:
    """An argument of vLLM's model for one picture or clip: those of a batch are concatenated ("rows"), stacked where they are of
    one shape ("each"), or stacked and left on the host ("host")."""

    tensor: torch.Tensor
    join: Literal["rows", "each", "host"]


GIVEN_FEATURES = "mmrl_features"
"""Name of the argument that holds features (m, H) to be used as they are, see ModelFamily.vllm_features."""


def sense_of(kind: str) -> str:
    """The sense of media of a kind: "audio" for sounds, "vision" for pictures and clips."""
    return "audio" if kind == "audio" else "vision"


class ModelFamily(abc.ABC):
    """One family. Records are stateless: what they are asked for depends on the arguments alone.

    `name` is also that of its prompt template; `model_types` are values of model_type in config.json, `processors` class names of
    its processors. `frame` is the coordinate frame of boxes that released checkpoints were trained to emit, None where no source
    says so (model.frame must then be set); `source` is that source. Prompts ask for `frame` in all tasks. `answers` says of each
    kind of answer how checkpoints spell it, in which frame: keys are mmrl.policy.families.native.KINDS, none where a package's own
    family does not say. `system` is the template's system text. `vllm` is the class that vLLM answers with, "" where mmrl's prompts
    cannot be handed to it. `refused` says what the family cannot do here, and why: keys are "video", "audio", "pictures", "vllm",
    "lora" or names of checks.
    """

    name: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]
    processors: ClassVar[tuple[str, ...]]
    frame: ClassVar[CoordFrame | None]
    source: ClassVar[str] = ""
    answers: ClassVar[Mapping[str, NativeAnswer]] = MappingProxyType({})
    system: ClassVar[str] = ""
    parts: ClassVar[Parts] = Parts()
    vllm: ClassVar[str] = ""
    vllm_text: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """What vLLM reads from the text model's configuration where transformers knows one way alone, and has no such setting."""
    vllm_lacks: ClassVar[tuple[str, ...]] = ()
    """Weights, by a part of their names, that no forward reads: vLLM has no place for them."""
    vllm_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Beginnings of weights' names -> those that vLLM knows, where transformers has left those of released checkpoints."""
    vllm_wants: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Settings (`text_config.model_type`) of a model's configuration that vLLM takes for granted: others are refused."""
    released_transposed: ClassVar[tuple[str, ...]] = ()
    """Ends of names of weights (E, out, in) that released checkpoints hold as (E, in, out). transformers reads both and writes its
    own order, which vLLM refuses (mmrl.policy.released)."""
    tower_kernels: ClassVar[Mapping[str, str]]
    """model.attn -> what transformers calls the tower's attention; settings that are not here are refused."""
    pictures_see_themselves: ClassVar[bool] = False
    """Whether a picture's tokens see the whole picture, not only what precedes them."""
    clips_are_pictures: ClassVar[bool] = False
    """Whether the model takes the features of clips as those of pictures, by the pictures' token."""
    most_pictures: ClassVar[int | None] = None
    """Of one prompt, where there is a limit; `refused["pictures"]` says why."""
    reserved: ClassVar[tuple[str, ...]] = ()
    """Texts of tokens by which positions are laid out: no text of a prompt may contain one."""
    texts: ClassVar[tuple[str, ...]] = ()
    """model_type of the text models of released checkpoints, where there are several: the first is that of the tiny model,
    NAME:TEXT is with another one (families.family_and_text)."""
    router: ClassVar[str] = ""
    """Where a decoder layer that is a mixture of experts has its router, which answers (logits, weights, experts); "" for families
    without experts (mmrl.policy.routing)."""
    experts: ClassVar[tuple[str, ...]] = ()
    """Where such a layer has its experts' weights, as names below it: parameters (E, out, in). model.lora.experts adapts them."""
    never_adapted: ClassVar[tuple[str, ...]] = ()
    """Names of layers that no adapter reaches: peft takes them for the experts and the router, as adapters made with transformers 4
    do."""
    joint_layers: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    """Names of linear layers that are several of other families in one -> those: an adapter of all of them reaches it."""
    packages: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """What its processor imports beside mmrl's own requirements -> the extra of mmrl that brings it."""
    refused: ClassVar[Mapping[str, str]] = MappingProxyType({})
    layer: ClassVar[Layer] = Layer()
    """What all decoder layers have, to an estimate of memory; their widths come from the configuration, see `layers`."""
    tower: ClassVar[Tower] = Tower()
    """What all blocks of the vision tower have; sizes come from the configuration, see `tower_of`."""

    # the model

    def part_config(self, config: Any) -> Any:
        """The configuration of what is trained, where a checkpoint's own is that of more."""
        return config

    def body(self, model: Any) -> Any:
        """What the parts lie below: of transformers' class for generation all but the output layer."""
        return model.model

    def forward(self, body: Any, **inputs: Any) -> Any:
        """The body's forward: an output with last_hidden_state (R, T, H)."""
        return body(**inputs)

    def mixes_experts(self, settings: Mapping[str, Any]) -> bool:
        """Whether a model is a mixture of experts, by its config.json."""
        return bool(self.router)

    def hidden_width(self, config: Any) -> int:
        """H of `forward`, by the model's configuration: of what the output layer reads behind the last norm. There is a critic's
        value head, too, beside the model and no part of it (mmrl.policy.value_head): for answers, and for robots whose actions are
        tokens. Robot policies with networks of their own have no family, and place their heads themselves."""
        return int(config.get_text_config().hidden_size)

    def gate_weights(
        self, router: Any, logits_TE: torch.Tensor, experts_Tk: torch.Tensor
    ) -> torch.Tensor:
        """What each of `experts_Tk` weighs (T, k) where `router` gave these logits: the formula of transformers' router, to the
        last bit, for experts that need not be the largest."""
        raise NotImplementedError(f"family {self.name} has no experts")

    # what an estimate of memory asks

    def mixer(self, text: Any, number: int) -> Mixer:
        """How the `number`-th decoder layer mixes tokens; `text` is the language model's configuration."""
        return self.layer.mixer

    def mlp(self, text: Any, number: int) -> tuple[int, int, int, int]:
        """(width of the MLP that every token goes through, experts per token, width of one, of how many) of a decoder layer."""
        return text.intermediate_size, 0, 0, 0

    def layers(self, text: Any) -> tuple[Layer, ...]:
        """The decoder layers, first to last."""
        found = []
        for number in range(text.num_hidden_layers):
            width, experts, each, of_experts = self.mlp(text, number)
            found.append(
                replace(
                    self.layer,
                    mixer=self.mixer(text, number),
                    mlp=width,
                    experts=experts,
                    expert_width=each,
                    of_experts=of_experts,
                )
            )
        return tuple(found)

    def tower_of(self, config: Any) -> Tower:
        """The vision tower, by the model's configuration."""
        vision = config.vision_config
        depth = vision.depth if hasattr(vision, "depth") else vision.num_hidden_layers
        return replace(
            self.tower,
            hidden=vision.hidden_size,
            inner=vision.intermediate_size,
            depth=depth,
            tokens=float(self.patches(config)[1] ** 2),
        )

    # prompts

    def chat_options(self) -> dict[str, Any]:
        """Arguments of the processor's apply_chat_template beside messages and tools."""
        return {}

    def check_packages(self) -> None:
        """Raises MissingExtraError where one of `packages` is not installed."""
        for module, extra in self.packages.items():
            need_package(module, f"the processor of family {self.name}", extra)

    @abc.abstractmethod
    def reader(self, processor: Any) -> PictureReader:
        """How the processor's pictures are read, see mmrl.video.pictures."""

    def clips(self, processor: Any) -> ClipReader | None:
        """How the processor's clips are read, see mmrl.video.clips; None: as Qwen-VL's."""
        return None

    def ears(self, processor: Any) -> AudioReader | None:
        """How the processor's sounds are read, see mmrl.video.audio; None: the family does not hear."""
        return None

    @property
    def no_audio(self) -> str:
        """Why sounds are refused; "" where they are not."""
        if self.parts.hearing:
            return ""
        return self.refused.get(
            "audio",
            f"a model of family {self.name} does not hear; use one that does (qwen2_5_omni), or leave the audio files out",
        )

    @abc.abstractmethod
    def image_options(
        self, processor: Any, low: int | None, high: int | None
    ) -> tuple[dict[str, Any], tuple[int, int]]:
        """Options of an image processor's call that hold a picture's area between `low` and `high` pixels (None: the model's own
        bound), and both bounds."""

    @abc.abstractmethod
    def placeholders(self, processor: Any) -> dict[str, str]:
        """Text of a placeholder in a chat -> "image", "video" or "audio"."""

    @abc.abstractmethod
    def expand(self, processor: Any, visual: Visual) -> str:
        """What the processor writes in the place of the visual's placeholder."""

    def numbered(self, processor: Any, kind: str, number: int, text: str) -> str:
        """`text`, what `expand` gave, for the `number`-th visual of its kind in a prompt, from 0 on."""
        return text

    @abc.abstractmethod
    def kinds(self, processor: Any, ids_1P: torch.Tensor) -> torch.Tensor:
        """(1, P): 1 where a feature of a picture goes, 2 where one of a clip goes, 3 where one of a sound goes, 0 elsewhere."""

    @abc.abstractmethod
    def banned(self, processor: Any) -> tuple[int, ...]:
        """Ids, ascending, that no answer may contain: the model would take them for pictures, or their frames."""

    @abc.abstractmethod
    def positions(
        self,
        processor: Any,
        base: Any,
        ids_1P: torch.Tensor,
        kinds_1P: torch.Tensor,
        visuals: Sequence[Visual],
    ) -> torch.Tensor:
        """Rotary positions (3, P): temporal, height, width; equal rows where the family knows one alone."""

    # the forward

    def grouped(self, visuals: Sequence[T], kinds: Sequence[str]) -> dict[str, list[T]]:
        """`visuals`, or what was made of them, by the kind that the model takes them for; `kinds` are their own."""
        taken = ["image" if self.clips_are_pictures else kind for kind in kinds]
        return {
            name: [v for v, kind in zip(visuals, taken, strict=True) if kind == name]
            for name in ("image", "video", "audio")
        }

    @abc.abstractmethod
    def text_inputs(
        self, positions_3RT: torch.Tensor, kinds_RT: torch.Tensor | None
    ) -> dict[str, Any]:
        """Arguments of the base model's forward beside ids, mask and media; `kinds_RT` is None while decoding."""

    def step_mask(self, base: Any, seen_R11K: torch.Tensor, ago_RK: torch.Tensor) -> Any:
        """attention_mask of the base model's forward for one new token per row: `seen_R11K` is True where it may look, `ago_RK`
        counts how many tokens ago each place was written."""
        return seen_R11K

    @abc.abstractmethod
    def pixel_inputs(
        self, kind: str, pixels: Sequence[torch.Tensor], visuals: Sequence[Visual]
    ) -> dict[str, Any] | None:
        """Arguments of the base model's forward for visuals of one kind; None: it is given features."""

    @abc.abstractmethod
    def features(
        self, base: Any, kind: str, pixels_nD: torch.Tensor, grids: Sequence[tuple[int, int, int]]
    ) -> list[Features]:
        """What tower and projector make of visuals of one kind, their pixels one after the other; of sounds what the audio tower
        makes of their frames."""

    @abc.abstractmethod
    def encoded(self, base: Any, features: Sequence[Features]) -> Any:
        """Features of the visuals of one kind, in the form that the forward takes as `mm_encoder_outputs[kind]`."""

    def vllm_input(
        self, config: Any, kind: str, pixels_nD: torch.Tensor, grid: tuple[int, int, int]
    ) -> tuple[str, dict[str, ForVLLM]]:
        """What vLLM takes a picture or clip for (a modality of its own), and the arguments of its model for it; `config` is the
        model's configuration. Asked of families with `vllm` alone."""
        raise NotImplementedError(self.refused.get("vllm", f"{self.name} is not sampled by vLLM"))

    def vllm_features(
        self, kind: str, features_mH: torch.Tensor, grid: tuple[int, int, int]
    ) -> tuple[str, dict[str, ForVLLM]]:
        """As `vllm_input`, of what a frozen tower and its projector made of it, deepstack features behind the others. The default
        goes past vLLM's own model (VLLMBackend), for families whose model takes features of one length alone."""
        return "image", {GIVEN_FEATURES: ForVLLM(features_mH, "each")}

    @abc.abstractmethod
    def idle(self, base: Any) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Shape (n, D) of the smallest pixels there are, and their grid."""

    def idle_sound(self, base: Any) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """As `idle`, of the shortest sound there is."""
        raise NotImplementedError(self.no_audio)

    @abc.abstractmethod
    def patches(self, config: Any) -> tuple[int, int]:
        """(side of the tower's patch in pixels, such patches on each side of one token), by the model's configuration."""

    @abc.abstractmethod
    def tiny(self, spec: TinySpec) -> tuple[Any, Any]:
        """(configuration, processor) of a tiny model, made of the family's own classes without a network."""
