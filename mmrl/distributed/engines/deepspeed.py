"""DeepSpeed ZeRO-2 and ZeRO-3 through accelerate, with offloading to host memory.

    torchrun --nproc_per_node 8 -m mmrl.cli.main train run.yaml engine.train=deepspeed_zero3 engine.deepspeed.offload=optimizer

ZeRO-2 spreads gradients and AdamW's moments over the processes, ZeRO-3 parameters too. mmrl drives DeepSpeed's engine itself: its
losses are sums, whose gradient is divided once by the denominator of all processes; DeepSpeed averages over processes and clips in
its step. That step divides gradients by the loss scale, which is 1 in backward and denominator / processes in the step: scaled
losses would be rounded otherwise than those of one process where activations are bf16.

Under ZeRO-3 weights are read when they are shared out: the main process reads the model's files (mmrl.policy.in_file) one parameter
at a time and sends it, each process keeps its share, so that none holds the whole model in host memory. A reference is whole.

Weights stay fp32 (frozen ones as they were loaded) and neither DeepSpeed's bf16 nor its fp16 is used: policy.autocast surrounds the
forward. DeepSpeed switches off an autocast that surrounds its engine; ours begins inside of the root module.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mmrl.config import RunConfig
from mmrl.distributed.engines.base import Trained, TrainEngine, head_parameters
from mmrl.distributed.engines.deepspeed_state import canonical_state, forget_steps, restore_state
from mmrl.distributed.engines.root import Root
from mmrl.distributed.world import World
from mmrl.errors import ConfigError, MissingExtraError, NonFiniteError, install_command
from mmrl.policy.finite import non_finite, refuse_loaded
from mmrl.policy.in_file import in_file
from mmrl.policy.loading import name_accelerator
from mmrl.training.optim import learning_rate, set_learning_rate

__all__ = ["DeepSpeedEngine", "deepspeed_settings", "plugin"]

_GATHERED = 1 << 26  # numbers that `parameters` gathers at a time
_ACCUMULATION = 2  # more than one micro-batch per step: buffers that add up. `backward` says which one is the last
_BUCKET = 1 << 27  # numbers reduced at a time: half a GiB of gradients


def plugin(config: RunConfig) -> dict[str, Any]:
    """What accelerate.Accelerator is to be made with, before anything imports deepspeed (see World).

    Raises MissingExtraError without deepspeed; ConfigError without a launcher, or where a CPU is asked for in a way DeepSpeed or
    accelerate do not heed.
    """
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys():
        raise ConfigError(
            f"expected engine.train {config.engine.train} to be started by a launcher, found none; start it with "
            "torchrun --nproc_per_node GPUS -m mmrl.cli.main train ... (1 is a number of GPUs too)"
        )
    if os.environ.get("ACCELERATE_USE_CPU", "false").lower() in (
        "1",
        "true",
        "yes",
        "on",
        "y",
        "t",
    ):
        raise ConfigError(
            f"expected engine.train {config.engine.train} to be started by torchrun, found accelerate launch --cpu "
            "(ACCELERATE_USE_CPU), under which accelerate leaves DeepSpeed out; start with torchrun"
        )
    gpus = torch.cuda.is_available()
    if gpus and config.model.device is not None and torch.device(config.model.device).type == "cpu":
        raise ConfigError(
            f"expected model.device cuda or null with engine.train {config.engine.train} on a machine with GPUs, "
            "found cpu: DeepSpeed takes them; hide them with CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    _import(gpus)
    from accelerate.utils import DeepSpeedPlugin

    class Plugin(DeepSpeedPlugin):
        """The plugin without its notice to transformers, which would shard every model as it is loaded."""

        def set_deepspeed_weakref(self) -> None:
            pass

    options = {
        "deepspeed_plugin": Plugin(hf_ds_config=deepspeed_settings(config), zero3_init_flag=False),
        "cpu": False,  # accelerate leaves DeepSpeed out on what it is told to be a CPU
        "mixed_precision": "no",  # or a launcher's choice would round the weights
        "gradient_accumulation_steps": _ACCUMULATION,
    }
    return options if gpus else {**options, "backend": "gloo"}


def _import(gpus: bool) -> Any:
    name_accelerator()
    try:
        import deepspeed
    except ImportError as error:
        raise MissingExtraError(
            "engine.train deepspeed_zero2 and deepspeed_zero3 need the deepspeed package: "
            f"{install_command('deepspeed')} ({error})"
        ) from error
    warnings.filterwarnings(
        "ignore", message="`torch.distributed.*is deprecated", category=FutureWarning
    )  # DeepSpeed's own calls
    if not gpus:
        # An op for reductions in shared memory: 26 s of g++ at the first start, and a start that is killed meanwhile leaves a
        # lock for which every later one waits forever. gloo does these reductions.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def deepspeed_settings(config: RunConfig) -> dict[str, Any]:
    """DeepSpeed's own configuration for a run."""
    options = config.engine.deepspeed
    zero: dict[str, Any] = {
        "stage": 3 if config.engine.train == "deepspeed_zero3" else 2,
        "overlap_comm": False,
    }
    if options.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if options.offload == "all":
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if zero["stage"] == 3:
        zero |= {
            "stage3_param_persistence_threshold": options.persist_below,
            "stage3_max_live_parameters": options.max_live,
            "stage3_max_reuse_distance": options.max_live,
            "stage3_gather_16bit_weights_on_model_save": False,
        }
    return {
        "train_micro_batch_size_per_gpu": 1,  # of no consequence: it only counts samples
        "gradient_accumulation_steps": _ACCUMULATION,
        "gradient_clipping": config.optim.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # the optimizer is torch's AdamW
        "zero_optimization": zero,
    }


class DeepSpeedEngine(TrainEngine):
    """Trains `policy` with the AdamW of build_optimizer; under ZeRO-3 its weights are in place in `run` only.

    Heads have parameter groups of their own, which may take a step without the model.
    """

    lockstep = True

    def __init__(
        self, config: RunConfig, world: World, policy: Trained, optimizer: torch.optim.Optimizer
    ) -> None:
        self._deepspeed = _import(policy.device.type == "cuda")
        self.config, self.world, self.policy = config, world, policy
        self.sharded = config.engine.train == "deepspeed_zero3"
        # before they hold flat partitions
        self._groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
        self._trained: list[torch.nn.Parameter] = [
            p for group in optimizer.param_groups for p in group["params"]
        ]
        self._named = list(policy.named_parameters())
        self._heads, self._group_of, self._number_of = _split(optimizer, head_parameters(policy))
        accelerator = world.accelerator
        zero = accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]
        zero["reduce_bucket_size"] = min(_BUCKET, sum(p.numel() for p in self._trained))
        self._model = policy.model  # policy.model is another one while the reference runs
        root = _root(policy) if self.sharded else Root(policy.model, policy.heads)
        policy.lockstep = True
        log = logging.getLogger("DeepSpeed")
        level = log.level
        log.setLevel(logging.ERROR)  # or it warns of torch's AdamW
        try:
            if self.sharded:  # before prepare, which puts what is whole on the device first
                self._share_out(root)
            self._engine, _ = accelerator.prepare(root, optimizer)
        finally:
            log.setLevel(level)
        self._empty = False  # nothing in the loss of any process
        self._open = False  # gradients wait for their step

    def _share_out(self, root: Root) -> None:
        """Shard the weights, those that wait in their file as they are read; all processes end where one is not finite."""
        waiting = _Waiting(root, self.policy, read=self.world.is_main)
        self._deepspeed.zero.Init(
            module=waiting, config_dict_or_path=deepspeed_settings(self.config)
        )
        waiting.read_rest()
        found = sorted(set(self.world.gather(waiting.damaged)))
        if found:
            refuse_loaded([name for name, _ in found], found[0][1])

    def begin(self, denominator: float | None = None) -> None:
        assert not self._open, "gradients wait for their step: DeepSpeed cannot forget them"
        self._empty = denominator == 0
        self._engine.optimizer.override_loss_scale(1.0)

    def run(self, forward: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        if self.policy.model is not self._model:  # the frozen copy for the KL term is whole
            return forward()
        return self._engine(forward)

    def backward(self, loss: torch.Tensor, *, last: bool = False) -> None:
        if self._empty:
            return
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss, scale_wrt_gas=False)
        self._open = True

    def step(
        self,
        denominator: float,
        update: int,
        total_updates: int,
        failure: Callable[[float], str],
        *,
        heads_only: bool = False,
    ) -> tuple[float, float]:
        rate = learning_rate(self.config.optim, update, total_updates)
        set_learning_rate(self._engine.optimizer, rate)
        if denominator <= 0:
            return 0.0, rate
        assert self._open and self._engine.is_gradient_accumulation_boundary(), (
            "the last backward must be called with last=True"
        )
        self._engine.optimizer.override_loss_scale(denominator / self.world.size)
        resting = (
            [n for n in range(len(self._engine.optimizer.param_groups)) if n not in self._heads]
            if heads_only
            else []
        )
        # its gradients are zeros: nothing moves, and what counts the steps goes back
        for number in resting:
            self._engine.optimizer.param_groups[number]["lr"] = 0.0
        self._engine.step()
        if resting:
            forget_steps(self._engine.optimizer, resting)
            set_learning_rate(self._engine.optimizer, rate)
        self._open = False
        norm = float(self._engine.get_global_grad_norm())
        # DeepSpeed left the weights as they were and says inf, or -1 in older releases
        if not 0 <= norm < float("inf"):
            raise NonFiniteError(failure(norm if norm > 0 else float("nan")))
        return norm, rate

    def parameters(self, *, trainable: bool) -> Iterator[tuple[str, torch.Tensor]]:
        named = [(n, p) for n, p in self._named if p.requires_grad or not trainable]
        if not self.sharded:
            yield from ((name, p.detach()) for name, p in named)
            return
        for chunk in _chunks(named):
            with self._deepspeed.zero.GatheredParameters([p for _, p in chunk]):
                yield from ((name, p.detach()) for name, p in chunk)

    def optimizer_state(self, mine: Callable[[int], bool] | None = None) -> dict[str, Any] | None:
        main = self.world.is_main
        with self.collective_section():
            state = canonical_state(
                self._engine.optimizer, self._trained, self._group_of, mine or (lambda _: main)
            )
        if mine is None and not main:
            return None
        now = self._engine.optimizer.param_groups
        groups = [
            {**group, "lr": now[number]["lr"]}
            for group, number in zip(self._groups, self._number_of, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        restore_state(self._engine.optimizer, self._trained, self._group_of, state["state"])


class _Waiting(torch.nn.Module):
    """The parameters of `root`, each of which gets its numbers when it is asked for: deepspeed.zero.Init asks for one, sends those
    of the first process to the others, keeps this process's share, and asks for the next. With `read` False they are memory to
    receive in. `damaged`: (name, file) of what was read and is not finite."""

    def __init__(self, root: Root, policy: Trained, *, read: bool) -> None:
        super().__init__()
        self.damaged: list[tuple[str, str]] = []
        self._named = dict(policy.model.named_parameters())
        self._device, self._reads = policy.device, read
        self._root: tuple[Root, ...] = (root,)  # no module of this one

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        names = {id(p): name for name, p in self._named.items()}
        for parameter in (p for root in self._root for p in root.parameters()):
            if in_file(parameter) is not None:
                self._fill(names[id(parameter)], parameter, read_it=self._reads)
            yield parameter

    def read_rest(self) -> None:
        """Parameters of no part that is shared out, which every process reads for itself. The last that is asked of this module,
        which DeepSpeed keeps: what it names goes."""
        for name, parameter in self._named.items():
            if in_file(parameter) is not None:
                self._fill(name, parameter, read_it=True)
        self._named.clear()
        self._root = ()

    def _fill(self, name: str, parameter: torch.nn.Parameter, *, read_it: bool) -> None:
        found = in_file(parameter)
        assert found is not None
        whole = torch.empty(found.tensor.shape, dtype=parameter.dtype, device=self._device)
        if read_it:
            whole.copy_(found.tensor)
            self.damaged += [(name, found.source) for _ in non_finite([(name, whole)])]
        parameter.data = whole
        del parameter.in_file  # type: ignore[attr-defined]


def _split(
    optimizer: torch.optim.Optimizer, heads: Sequence[torch.nn.Parameter]
) -> tuple[set[int], list[int], list[int]]:
    """Give `heads` parameter groups of their own, in place: DeepSpeed keeps one flat tensor and one counter of steps for a group.

    Returns the numbers of those groups, the group of each parameter in the order before, and a group made of each one before.
    """
    ours = {id(p) for p in heads}
    groups: list[dict[str, Any]] = []
    of_heads, numbers, place = set(), [], {}
    for group in optimizer.param_groups:
        numbers.append(len(groups))
        for among in (False, True):
            if chosen := [p for p in group["params"] if (id(p) in ours) == among]:
                place.update({id(p): len(groups) for p in chosen})
                of_heads |= {len(groups)} if among else set()
                groups.append({**group, "params": chosen})
    order = [place[id(p)] for group in optimizer.param_groups for p in group["params"]]
    optimizer.param_groups[:] = groups
    return of_heads, order, numbers


def _root(policy: Trained) -> Root:
    """The root for ZeRO-3. The output layer's parameters are its own: gathered for as long as it runs, forward and backward.

    As a child the output layer would be gathered by hooks at every call, one per chunk of logits, and processes whose numbers of
    chunks differ would wait for each other.
    """
    root = Root(policy.model, policy.heads)
    head = root.lm_head
    del root.lm_head
    for name, parameter in head.named_parameters():
        root.register_parameter(f"lm_head_{name.replace('.', '_')}", parameter)
    return root


def _chunks(
    named: Sequence[tuple[str, torch.nn.Parameter]],
) -> Iterator[list[tuple[str, torch.nn.Parameter]]]:
    """Consecutive parameters that are gathered together."""
    chunk: list[tuple[str, torch.nn.Parameter]] = []
    size = 0
    for name, parameter in named:
        numel = getattr(parameter, "ds_numel", parameter.numel())
        if chunk and size + numel > _GATHERED:
            yield chunk
            chunk, size = [], 0
        chunk.append((name, parameter))
        size += numel
    if chunk:
        yield chunk
