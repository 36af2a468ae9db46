"""Load a model of any known family through transformers: parts to freeze, LoRA, precision, attention."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch

from mmrl.errors import ConfigError, did_you_mean
from mmrl.operations.versions import OLDEST_TRANSFORMERS, TRANSFORMERS
from mmrl.policy.adapter import add_adapter
from mmrl.policy.attention import (
    check_attention,
    choose_attention,
    say_attention,
    set_attention,
)
from mmrl.policy.batch_invariance import make_batch_invariant
from mmrl.policy.encode import Encoder, picture_options
from mmrl.policy.families import (
    PARTS,
    ModelFamily,
    family_named,
    family_of,
    family_of_processor,
    part_config,
)
from mmrl.policy.finite import check_loaded
from mmrl.policy.fused_layers import fuse_layers
from mmrl.policy.in_file import in_file, leave_in_file, recast, stored_type
from mmrl.policy.manifest import check_loadable
from mmrl.policy.policy import CRITIC_FOLDER, Policy
from mmrl.policy.quantized import quantize_language
from mmrl.policy.routing import take_routing
from mmrl.policy.storage import Stored, narrowed, product_weights
from mmrl.policy.tool_messages import call_spelling
from mmrl.policy.value_head import ValueHead
from mmrl.task import Template
from mmrl.workers import prefetch

if TYPE_CHECKING:
    from mmrl.config import DataConfig, ModelConfig

__all__ = [
    "Hold",
    "add_value_head",
    "assemble_policy",
    "build_encoder",
    "build_visuals",
    "device_and_precision",
    "family_at",
    "freeze_parts",
    "freeze_untrained",
    "load_policy",
    "load_processor",
    "name_accelerator",
    "storage_types",
    "store_frozen",
    "template_for",
]

Hold = Literal["host", "file"]
"""Where weights wait for a training engine that shares them out over devices, none of which could hold them whole: in host memory,
or in the file that they are read from (mmrl.policy.in_file)."""


def template_for(model_type: str, config: ModelConfig) -> Template:
    """The template named in the config, or that of the model's family; frame, system text and answer format may be overridden.

    Raises ConfigError for a family without a known frame where model.frame is not set: frames are never guessed.
    """
    family = (
        family_of(SimpleNamespace(model_type=model_type))
        if config.template is None
        else family_named(config.template, "model.template")
    )
    frame = config.frame or family.frame
    if frame is None:
        told = [
            f"; {kind} answers of {answer.of or 'its checkpoints'} are in {answer.frame.value}"
            for kind, answer in family.answers.items()
            if answer.frame is not None
        ]
        raise ConfigError(
            f"expected model.frame for a model of family {family.name}, found none: no source says which frame its checkpoints "
            "were trained to emit; set model.frame (rel1000, rel1, abs_orig or abs_resized) to what the prompts should ask for"
            + "".join(told)
        )
    return Template(family.name, frame, family.system if config.system is None else config.system)


def freeze_parts(model: Any, parts: list[str]) -> dict[str, int]:
    """Freeze the named parts (vision, projector, language, audio); returns trainable parameters per part.

    The family says which is which; of Qwen-VL the projector is the patch merger, with Qwen3-VL's deepstack mergers.
    """
    for part in parts:
        if part not in PARTS:
            raise ConfigError(
                f"expected model.freeze entries of {', '.join(PARTS)}, found '{part}'."
                f"{did_you_mean(part, PARTS)}"
            )
    family = family_of(model.config)
    where = family.parts
    if "audio" in parts and "audio" not in where.names:
        raise ConfigError(
            f"expected model.freeze entries of {', '.join(where.names)} for a model of family {family.name}, found 'audio': it "
            "does not hear; remove the entry"
        )
    trainable = dict.fromkeys(where.names, 0)
    for name, parameter in model.named_parameters():
        part = where.part_of(name)
        parameter.requires_grad_(part not in parts)
        trainable[part] += parameter.numel() if part not in parts else 0
    if not any(trainable.values()):
        raise ConfigError(
            "expected something to train, found every part in model.freeze; remove one of them"
        )
    return trainable


def freeze_untrained(model: Any, config: ModelConfig) -> None:
    """Freeze what model.freeze names, and the towers that an adapter leaves as they are."""
    freeze_parts(model, config.freeze)
    if config.lora is None:
        return
    family = family_of(model.config)
    for encoders in family.parts.encoders(family.body(model)):
        adapted = config.lora.vision and "vision" not in config.freeze
        if encoders.sense != "vision" or not adapted:
            for parameter in encoders.parameters:
                parameter.requires_grad_(False)


def store_frozen(model: Any, dtype: torch.dtype) -> int:
    """Store the frozen matrix-product and convolution weights of `model` in `dtype`; returns how many numbers that are.

    Autocast casts these weights in every call, and remembers the result only for weights that get gradients: a frozen
    fp32 weight would be read, cast and written again in each of them. Stored in autocast's own type they give the same
    numbers, bit for bit. What autocast leaves alone (norms, embeddings, the output layer, whose logits are fp32) stays
    as it is, so that a reference or an evaluated model equals the policy it is a copy of.
    """
    stored = 0
    for parameter in product_weights(model):
        if not parameter.requires_grad:
            recast(parameter, dtype)
            stored += parameter.numel()
    return stored


def fuses_layers(config: ModelConfig, device: torch.device, autocast: torch.dtype | None) -> bool:
    """What model.fused_layers means on this device. What is compiled needs Triton, as flex attention does."""
    if config.fused_layers is not None:
        return config.fused_layers
    on_gpu = device.type == "cuda" and autocast is not None
    return on_gpu and importlib.util.find_spec("triton") is not None


def storage_types(config: ModelConfig) -> tuple[torch.dtype, torch.dtype]:
    """(type weights are loaded in, autocast's type) of model.dtype bf16.

    Master weights stay fp32: at a learning rate of 1e-6 most AdamW updates vanish in bf16. LoRA trains fp32 adapters on a frozen
    base, which may then be bf16.
    """
    return torch.bfloat16 if config.lora else torch.float32, torch.bfloat16


def name_accelerator() -> None:
    """Tell DeepSpeed, before anything imports it (as saving a model does where it is installed), that a CPU is what there is."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def device_and_precision(
    config: ModelConfig, device: torch.device | None
) -> tuple[torch.device, torch.dtype, torch.dtype | None]:
    """(device, type weights are loaded in, autocast's type or None). Raises ConfigError for bf16 on a GPU without it."""
    device = device or torch.device(
        config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    )
    name_accelerator()
    # torch counts GPUs that only emulate bf16 in software as supporting it unless told otherwise
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    choice = config.dtype if config.dtype != "auto" else ("bf16" if bf16 else "fp32")
    if choice == "bf16" and device.type == "cuda" and not bf16:
        raise ConfigError(
            "model.dtype bf16 needs a GPU with bf16 (compute capability 8.0 or later); set it to fp32"
        )
    if choice == "fp32":
        if device.type == "cuda":
            # torch lets convolutions, a tower's first layer, round to 10 bits: features of an H100 differed by 3e-4; some images
            # switch that on for matrix products, too
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        return device, torch.float32, None
    return device, *storage_types(config)


def check_transformers() -> None:
    """Raises ConfigError for a transformers whose models are not shown the features of a frozen tower."""
    found = version("transformers")
    if tuple(map(int, found.split(".")[:2])) < OLDEST_TRANSFORMERS:
        needed = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise ConfigError(
            f"expected transformers {needed} or later, found {found}, whose models drop the features of a vision tower and would "
            f"answer without having seen the picture; pip install '{TRANSFORMERS}'"
        )


def check_takes_features(model: Any) -> None:
    """Raises ConfigError where the model's own forward has no argument of the name that a frozen tower's features come under: among
    any other keywords they would be dropped."""
    family = family_of(model.config)
    if type(family).forward is not ModelFamily.forward:
        return  # puts them in their places itself
    names = inspect.signature(family.body(model).forward).parameters
    if "mm_encoder_outputs" not in names:
        raise ConfigError(
            f"expected a forward of {type(model).__name__} that takes a tower's features (mm_encoder_outputs), found none in "
            f"transformers {version('transformers')}; pip install '{TRANSFORMERS}'"
        )


def _load_model(
    path: str, config: ModelConfig, dtype: torch.dtype, hold: Hold | None = None
) -> tuple[Any, torch.dtype | None]:
    """The model in `dtype`; with `hold` "file" in the type of its file, which is returned, too, where it has one."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    check_transformers()
    stored = stored_type(path) if hold == "file" else None
    whole = AutoConfig.from_pretrained(path, trust_remote_code=False)
    part = part_config(whole)
    model = AutoModelForImageTextToText.from_pretrained(
        path,
        # of a checkpoint that holds more, transformers leaves the rest unread
        **({} if part is whole else {"config": part}),
        dtype=stored or dtype,
        attn_implementation="sdpa",
        trust_remote_code=False,
        use_safetensors=True,
    )
    check_takes_features(model)
    set_attention(model, config.attn)
    take_routing(model)
    return model, stored


def _frozen_tower(model: Any) -> set[int]:
    """The ids of the parameters of towers (the vision tower with its projector) in which nothing is trained."""
    family = family_of(model.config)
    return {id(p) for e in family.parts.frozen_encoders(family.body(model)) for p in e.parameters}


def _model_type(path: str) -> str:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False).model_type
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"expected model.path to be a folder or hub name of a vision-language model, found '{path}': "
            f"{error}"
        ) from error


def family_at(path: str) -> ModelFamily:
    """The family of the model at `path` (a folder or hub name), by its configuration alone. Raises ConfigError."""
    return family_of(SimpleNamespace(model_type=_model_type(path)))


def load_processor(path: str) -> Any:
    """The processor of the model at `path` (a folder or hub name) of a known family. Raises ConfigError, and MissingExtraError
    where a package that it imports is not installed."""
    from transformers import AutoProcessor

    family_at(path).check_packages()
    return AutoProcessor.from_pretrained(path, trust_remote_code=False)


def build_visuals(processor: Any, data: DataConfig, **options: Any) -> Any:
    """The visual cache (mmrl.video.visuals.VisualCache, which takes `options`) of a run, in memory and in data.cache.dir."""
    from mmrl.video import sampling, store, visuals

    video, cache = data.video.model_dump(), data.cache
    bounds = {
        name: video.pop(name) for name in ("min_pixels", "max_pixels", "total_pixels", "decoder")
    }
    settings = visuals.VideoSettings(sampling=sampling.FrameSampling(**video), **bounds)
    limit = None if cache.limit_gib is None else int(cache.limit_gib * 2**30)
    family = family_of_processor(processor)
    return visuals.VisualCache(
        processor,
        image_options=picture_options(processor, data.min_pixels, data.max_pixels),
        settings=settings,
        reader=family.reader(processor),
        no_clips=family.refused.get("video", ""),
        clips=family.clips(processor),
        ears=family.ears(processor),
        no_audio=family.no_audio,
        max_seconds=data.audio.max_seconds,
        store=store.TensorStore(cache.dir, limit_bytes=limit, verify=cache.verify)
        if cache.dir
        else None,
        memory_bytes=int(data.prompt_cache_gib * 2**30),
        keep_features=cache.features,
        **options,
    )


def build_encoder(
    processor: Any,
    base: Any,
    template: Template,
    data: DataConfig | None = None,
    max_prompt_tokens: int = 16384,
) -> Encoder:
    """The encoder of a run, with its visual cache. `base`: the base model, perhaps without weights, see Encoder."""
    from mmrl.config import DataConfig

    data = data or DataConfig()
    return Encoder(
        processor,
        family_of(base.config),
        base,
        template,
        build_visuals(processor, data),
        max_prompt_tokens=max_prompt_tokens,
        max_pixels=data.max_pixels,
        min_pixels=data.min_pixels,
        cache_bytes=int(data.prompt_cache_gib * 2**30),
    )


def load_policy(
    config: ModelConfig,
    data: DataConfig | None = None,
    *,
    needs_reference: bool = False,
    trainable: bool = True,
    device: torch.device | None = None,
    weights: Path | None = None,
    prepare: Callable[[Any, Any], Sequence[int]] | None = None,
    hold: Mapping[str, Hold] | None = None,
    stored: Stored = "masters",
) -> Policy:
    """Load model and processor from a folder or hub name and make a Policy.

    With `needs_reference` and no LoRA a frozen copy of the weights at config.path is kept for the KL term. `weights` is
    a checkpoint folder to continue from: full weights, or the adapter/ folder of a LoRA run. `prepare(model, processor)` may
    add tokens to a model just read and returns their ids; what it changes must not wait in its file. `hold` names what waits for a
    training engine that shares it out, "model" and "reference", and where; a frozen tower and buffers are on the device at once.
    `stored`: how the weights of a policy that samples, and is neither trained nor saved, are stored (mmrl.policy.storage),
    from before they are on the device.

    Raises ConfigError for an unknown architecture, path, part or template, CheckpointError for a checkpoint of mmrl that is not as
    it was saved, and for weights that are not finite.
    """
    # `weights` are those of a checkpoint that was compared when it was chosen
    check_loadable(config.path)
    if data is not None and data.workers:
        prefetch.warm_up()
    model_type = _model_type(config.path)
    template = template_for(model_type, config)
    family = family_of(SimpleNamespace(model_type=model_type))
    device, dtype, autocast = device_and_precision(config, device)
    attn = choose_attention(config.attn, device, autocast, family)
    if stored == "masters":  # a process that only samples has a trainer, which says it
        say_attention(config.attn, device, autocast, family)
    check_attention(attn, device, autocast, family)
    config = config.model_copy(update={"attn": attn})
    lora = config.lora is not None and trainable
    hold = dict(hold or {})
    source = str(weights) if weights is not None and not lora else config.path
    model, in_file_type = _load_model(source, config, dtype, hold.get("model"))
    # a tokenizer goes with its weights: the tokens that `prepare` added before are in the checkpoint's
    processor = load_processor(source)
    new_tokens = prepare(model, processor) if prepare is not None else []
    reference = None
    if trainable:
        # an adapter would freeze towers later: what waits for a training engine must know now
        freeze_untrained(model, config)
    else:
        model.requires_grad_(False)
    if in_file_type is not None:
        leave_in_file(model, dtype, source, _frozen_tower(model))
    if trainable and needs_reference and not lora:
        reference, in_file_type = _load_model(config.path, config, dtype, hold.get("reference"))
        reference.requires_grad_(False).eval()
        if prepare is not None:
            prepare(reference, processor)
        if in_file_type is not None:
            leave_in_file(reference, dtype, config.path, _frozen_tower(reference))
    return assemble_policy(
        model,
        processor,
        template,
        config,
        data,
        device=device,
        autocast=autocast,
        reference=reference,
        trainable=trainable,
        weights=weights,
        new_tokens=new_tokens,
        hold=hold,
        stored=stored,
    )


def _placed(model: Any, device: torch.device, *, hold: bool) -> Any:
    """`model` on `device`; with `hold` only what an engine that shares out weights does not take: a frozen tower, and buffers."""
    if not hold:
        return model.to(device)
    family = family_of(model.config)
    body = family.body(model)
    for name in family.parts.loose:  # in no module that is shared out
        if in_file(parameter := getattr(body, name)) is None:
            moved = parameter.detach().to(device)
            setattr(body, name, torch.nn.Parameter(moved, parameter.requires_grad))
    for encoders in family.parts.frozen_encoders(body):
        for module in encoders.modules.values():
            # copied also on a CPU: a tensor of a mapped file keeps the whole file, which the rest is to give back
            module._apply(lambda tensor: tensor.to(device, copy=True))
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    return model


def assemble_policy(
    model: Any,
    processor: Any,
    template: Template,
    config: ModelConfig,
    data: DataConfig | None = None,
    *,
    device: torch.device,
    autocast: torch.dtype | None,
    reference: Any | None = None,
    trainable: bool = True,
    weights: Path | None = None,
    new_tokens: Sequence[int] = (),
    hold: Mapping[str, Hold] | None = None,
    stored: Stored = "masters",
) -> Policy:
    """A Policy of a model with its parts frozen already: storage types, device, adapter (continued from `weights`), gradient
    checkpointing, encoder. `hold`, `stored`: see load_policy."""
    lora = config.lora is not None and trainable
    for one in (model, reference):
        # a LoRA run's base is loaded in bf16 altogether
        if one is not None and autocast is not None and not lora:
            store_frozen(one, autocast)
    for parameter in [] if lora else narrowed(model, autocast, stored):
        assert autocast is not None, "else there are none"
        recast(parameter, autocast)
    if lora and config.lora is not None and config.lora.quantize is not None:
        quantize_language(model, device)
    hold = hold or {}
    model = _placed(model, device, hold="model" in hold)
    if reference is not None:
        reference = _placed(reference, device, hold="reference" in hold)
    model = add_adapter(model, config, weights, new_tokens) if lora else model
    for one in (model, reference):
        if one is not None:
            make_batch_invariant(one, device)
            if fuses_layers(config, device, autocast):
                fuse_layers(one)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if (
        config.gradient_checkpointing
        if config.gradient_checkpointing is not None
        else device.type == "cuda"
    ):
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if getattr(base, "_require_grads_hook", None) is not None:
            # transformers makes the embeddings' outputs require gradients, which only reentrant checkpointing needs; the
            # vision tower's patches count among them, so that a frozen tower would be differentiated for nothing
            base.disable_input_require_grads()
    model.eval()
    # those that wait are looked at as they are read
    here = ((name, p) for name, p in model.named_parameters() if in_file(p) is None)
    check_loaded(here, weights or config.path)
    body = family_of(base.config).body(base)
    template = replace(template, calls=call_spelling(getattr(processor, "chat_template", None)))
    encoder = build_encoder(processor, body, template, data, config.max_prompt_tokens)
    return Policy(
        model, processor, template, encoder, device=device, autocast=autocast, reference=reference
    )


def add_value_head(
    policy: Policy, *, hidden: int, tokens: bool, seed: int, folders: Sequence[str | Path] = ()
) -> None:
    """Give `policy` a critic with so many units in its hidden layer: a value of each of the `tokens`, else of each turn. It goes on
    with the head of the first of the saved policies in `folders` that has one. Raises CheckpointError for a head of another shape,
    or with weights that are not finite."""
    width = policy.family.hidden_width(policy.base.config)
    head = ValueHead(width, hidden, 1, seed).to(policy.device)
    make_batch_invariant(head, policy.device)
    found = next((folder for folder in folders if head.load(Path(folder) / CRITIC_FOLDER)), None)
    policy.value_head, policy.values_tokens = head, tokens
    if found is not None:
        check_loaded(head.named_parameters(), Path(found) / CRITIC_FOLDER)
