"""The sections `engine` and `operations`: which engines roll out, train and hold the workers. Part of mmrl.config.

    engine:
      rollout: vllm              # extra: vllm; auto takes it on a GPU where it is installed
      train: fsdp2               # torchrun --nproc_per_node 8 -m mmrl.cli.main train run.yaml
      workers: ray               # extra: ray

The defaults need none of them. A checkpoint of any engine resumes under any other, and with another number of processes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, model_validator

from mmrl.config.section import Section

__all__ = [
    "DeepSpeedConfig",
    "EngineConfig",
    "GeneratorConfig",
    "OperationsConfig",
    "RayConfig",
    "VLLMConfig",
]


class _Section(Section, BaseModel):
    """The sections of this file (BaseModel is named so that linters know what their defaults are)."""


class VLLMConfig(_Section):
    """Rollouts by vLLM (engine.rollout vllm)."""

    mode: Literal["colocated", "server"] = "colocated"
    """Where vLLM runs: in the training process (or in the actors of ray.rollout_actors), or as a server of its own, started by
    `mmrl rollout-server`."""
    url: str | list[str] | None = None
    """Address of the server, for example http://10.0.0.2:8100, or a list of several, each of which answers a share of the
    prompts (one that goes away is done without until it is back); their key, if they have one, is read from MMRL_API_KEY."""
    start_s: float = Field(300.0, gt=0)
    """Seconds a server has to answer when the run starts."""
    timeout_s: float = Field(1800.0, gt=0)
    """Seconds for each answer of a server: the samples of a step, or one piece of the weights."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that one server's engine is spread over, for a model that one cannot hold (mode server; `mmrl rollout-server` starts a
    process for each). Above 1 compare_weights must be false."""
    transfer: Literal["auto", "nccl", "gloo", "shared_memory", "http"] = "auto"
    """How weights reach a server. auto: nccl where both sides compute on GPUs of their own (not to an https address: it is not
    encrypted), shared_memory on one host, else http, in the bodies of requests. gloo and nccl: a process group of the main process
    and the server, which reaches it at any port. Another value than auto is that way or an error."""
    memory: float = Field(0.45, gt=0, lt=1)
    """Share of the GPU's memory that vLLM may hold (colocated or in a Ray actor; `mmrl rollout-server` has --memory). `mmrl serve`
    takes vLLM's own unless it is set."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """On a CPU: GiB for keys and values. `mmrl serve` takes vLLM's own unless it is set."""
    max_model_len: int | None = Field(None, ge=16)
    """Longest prompt plus completion in tokens; null: model.max_prompt_tokens + rollout.max_new_tokens (at
    least 17), within what the model takes."""
    sleep: bool = True
    """Colocated on a GPU: weights and KV cache leave its memory while training runs (vLLM's sleep mode, level 2); every sync then
    sends all weights. Not under PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."""
    probe_prompts: int = Field(2, ge=1)
    """Prompts whose log-probs are compared with the trainer's after every weight sync."""
    tolerance: float | None = Field(None, gt=0)
    """Largest mean |vLLM - trainer| log-prob per token of the probe; beyond it the run stops. null: 0.05 in bf16; in fp32 30
    times that of the first sync (at least 1e-5, at most 1e-3)."""
    compare_weights: bool = True
    """After every sync vLLM must hold the same elements in every block, to the last bit. false: only the probe compares, for a
    vLLM build that keeps weights in another form and says so at the first sync."""
    correction: Literal["none", "truncate", "mask"] = "truncate"
    """Importance weights for the rounding gap between sampler and trainer: a token's loss is multiplied by trainer / sampler
    probability, at most `threshold` (truncate), or by 0 beyond it (mask); see mmrl/algorithms/staleness.py."""
    threshold: float = Field(2.0, gt=1)
    """Bound of the importance weights of `correction`."""

    @property
    def urls(self) -> list[str]:
        """The addresses as a list."""
        return [self.url] if isinstance(self.url, str) else list(self.url or ())

    def _check_parallel(self) -> None:
        """Raises ValueError for what an engine over several GPUs cannot be."""
        if self.mode != "server":
            raise ValueError(
                f"engine.vllm.tensor_parallel {self.tensor_parallel} needs engine.vllm.mode: server, found {self.mode}: the "
                "training processes answer different numbers of turns, and an engine that is spread over them would wait for each "
                "other; start `mmrl rollout-server`, or set tensor_parallel: 1"
            )
        if self.compare_weights:
            raise ValueError(
                f"engine.vllm.tensor_parallel {self.tensor_parallel} needs engine.vllm.compare_weights: false: each GPU holds a "
                "part of every matrix, and some parts twice; the probe still compares log-probs after every sync"
            )

    @model_validator(mode="after")
    def _placed(self) -> VLLMConfig:
        if twice := sorted({url for url in self.urls if self.urls.count(url) > 1}):
            raise ValueError(
                f"engine.vllm.url: expected each server once, found {', '.join(twice)} several times"
            )
        if self.tensor_parallel > 1:
            self._check_parallel()
        if self.mode != "server" and self.transfer != "auto":
            raise ValueError(
                f"engine.vllm.transfer {self.transfer} is of weights that go to a server: set engine.vllm.mode: server and url, or "
                "remove it; within the process tensors are handed over"
            )
        if (self.mode == "server") != bool(self.urls):
            needs = "needs" if self.mode == "server" else "has no"
            raise ValueError(
                f"engine.vllm.mode {self.mode} {needs} engine.vllm.url, found {self.url!r}; set mode: server and url: "
                "http://host:port, or neither"
            )
        return self


class DeepSpeedConfig(_Section):
    """DeepSpeed (engine.train deepspeed_zero2 and deepspeed_zero3)."""

    offload: Literal["none", "optimizer", "all"] = "none"
    """What lives in host memory: nothing, the optimizer's state, or parameters, too (zero3 only)."""
    persist_below: int = Field(100_000, ge=0)
    """zero3: parameters with fewer elements stay whole on every process once they were gathered."""
    max_live: int = Field(1_000_000_000, ge=0)
    """zero3: most elements of gathered parameters held at a time; they are kept for their next use."""


class RayConfig(_Section):
    """Ray (engine.workers ray): where simulators, reward workers and rollout engines run (mmrl/distributed/cluster/)."""

    address: str | None = None
    """host:port, or auto, of a cluster that this machine is a node of; null: a cluster of this machine alone."""
    cpus: int | None = Field(None, ge=1)
    """Cores that a cluster of this machine alone offers; null: all."""
    placement: Literal["collocated", "disaggregated", "hybrid"] = "collocated"
    """collocated: on the trainer's node; disaggregated: on other nodes; hybrid: rewards on the trainer's node, the rest wherever
    there is room."""
    cpus_per_worker: float = Field(1.0, gt=0)
    """Cores of a simulator or reward worker."""
    gpus_per_worker: float = Field(0.0, ge=0)
    """GPUs of a simulator worker that renders or steps on one."""
    rollout_actors: int = Field(0, ge=0)
    """Copies of the policy that generate, each for a share of the prompts, per training process; 0: the training process
    generates. With one actor results equal the trainer's own bit for bit on a CPU; with several, to rounding (other batches).
    With engine.rollout vllm each holds a vLLM engine; on a GPU of its own set engine.vllm.memory to about 0.9."""
    cpus_per_rollout_actor: float = Field(1.0, gt=0)
    """Cores of a rollout actor."""
    gpus_per_rollout_actor: float = Field(0.0, ge=0)
    """GPUs of a rollout actor."""
    environment: dict[str, str] = {}
    """Environment variables for all actors and their processes, added to those of their nodes (MUJOCO_GL and the like)."""
    restarts: int = Field(20, ge=0)
    """Lost reward and rollout actors that are started anew before the run gives up; simulators: env.respawns."""
    start_s: float = Field(120.0, gt=0)
    """Seconds for the cluster to grant the placement."""


class GeneratorConfig(_Section):
    """Where rollouts are made (mmrl/training/generator.py)."""

    kind: Literal["inline", "process"] = "inline"
    """inline: the training process generates, taking turns with training; process: a process of this machine with a copy of the
    weights rolls out, scores and evaluates while the training processes train (TRL's and verl's separate rollout workers). With
    schedule.kind async neither waits for the other, and several training processes are one trainer to it."""
    device: str | None = None
    """process: its device, for example cuda:1; null: that of the main training process, which it shares."""
    start_s: float = Field(600.0, gt=0)
    """process: seconds to start and load the model."""
    timeout_s: float = Field(1800.0, gt=0)
    """process: seconds without a sign of life while it has work (a wave of answers, a batch of decisions, an evaluation) until it
    is taken for hung and replaced."""
    restarts: int = Field(20, ge=0)
    """process: how often it is started anew, when it was killed or hung, before the run gives up. What it had finished is kept."""

    @model_validator(mode="after")
    def _used(self) -> GeneratorConfig:
        if self.kind == "inline" and self.device is not None:
            raise ValueError(
                f"engine.generator.device {self.device} is of a generator process, found kind inline, which has the "
                "training process's device; set engine.generator.kind: process, or remove it"
            )
        return self


class EngineConfig(_Section):
    """Which engines a run uses; the defaults need nothing beyond torch and transformers."""

    rollout: Literal["auto", "own", "vllm"] = "auto"
    """Who generates: mmrl's own engine (one prefill per prompt), or vLLM. auto: vLLM where engine.vllm.mode is server, and on a
    GPU where the extra vllm is installed and can do the run (its model, rollout.top_p 1 and top_k 0); else own. What was taken
    is said at the start and written to RUN/config.yaml."""
    train: Literal["auto", "single", "ddp", "deepspeed_zero2", "deepspeed_zero3", "fsdp2"] = "auto"
    """How training is spread over processes. auto: single in one process, ddp in several."""
    sequence_parallel: int = Field(1, ge=1)
    """Processes that compute a packed row together, each a slice of its tokens (Ulysses; verl: ulysses_sequence_parallel_size), for
    prompts too long for one GPU: activations per process shrink by this factor. It divides the number of processes and the model's
    query heads, and its key heads or the other way round; with any engine.train, schedule.kind serial and train.forward shared.
    train.token_budget counts the whole row."""
    cuda_graphs: bool | None = None
    """Whether mmrl's own rollout engine records a step as a CUDA graph, whose kernels start at once; null: on a GPU. A model whose
    step cannot be recorded goes on without, with a warning."""
    workers: Literal["local", "ray"] = "local"
    """Where worker processes run: on this machine, or on a Ray cluster."""
    generator: GeneratorConfig = GeneratorConfig()
    vllm: VLLMConfig = VLLMConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _consistent(self) -> EngineConfig:
        if self.deepspeed.offload == "all" and self.train == "deepspeed_zero2":
            raise ValueError(
                "engine.deepspeed.offload all moves parameters, which deepspeed_zero2 keeps whole on every GPU; use "
                "deepspeed_zero3, or offload: optimizer"
            )
        if self.ray.rollout_actors and self.workers != "ray":
            raise ValueError(
                f"engine.ray.rollout_actors {self.ray.rollout_actors} needs engine.workers: ray, found "
                f"{self.workers}; set it, or rollout_actors: 0"
            )
        if self.cuda_graphs is not None and self.rollout == "vllm":
            raise ValueError(
                f"engine.cuda_graphs {str(self.cuda_graphs).lower()} is of mmrl's own rollout engine, found engine.rollout: vllm, "
                "which records graphs by itself; leave engine.cuda_graphs out, or set rollout: own"
            )
        served = self.rollout == "auto" and self.vllm.mode == "server"
        if self.ray.rollout_actors and (self.rollout == "vllm" or served):
            self._vllm_actors()
        return self

    def _vllm_actors(self) -> None:
        """Raises ValueError for what rollout actors that hold vLLM cannot be."""
        actors, gpus = self.ray.rollout_actors, self.ray.gpus_per_rollout_actor
        if self.vllm.mode == "server":
            raise ValueError(
                f"expected one place for vLLM, found two: engine.vllm.mode server ({self.vllm.url}) and "
                f"engine.ray.rollout_actors {actors}; leave out engine.vllm.mode and url, or set rollout_actors: 0"
            )
        if gpus > 1:
            raise ValueError(
                f"engine.ray.gpus_per_rollout_actor: expected at most 1 with engine.rollout: vllm, found {gpus:g}: "
                "each actor holds one engine on one GPU; set it to 1, and rollout_actors to the number of GPUs"
            )
        if 0 < gpus < self.vllm.memory:
            raise ValueError(
                f"engine.vllm.memory: expected at most engine.ray.gpus_per_rollout_actor = {gpus:g}, found "
                f"{self.vllm.memory:g}: together the actors of a GPU would take more than it has; lower it"
            )


class OperationsConfig(_Section):
    """How a run lives with what runs it (mmrl/operations): signals and monitoring."""

    grace_s: float = Field(100.0, gt=0)
    """Seconds after SIGTERM or SIGUSR1 for the step at hand and its checkpoint; a longer step is given up. Keep it below what
    the scheduler waits before it kills: Slurm --signal, Kubernetes terminationGracePeriodSeconds, torchrun's
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT (30 s, unless scripts/launch_torchrun.sh sets it)."""
    metrics_port: int | None = Field(None, ge=0, le=65535)
    """Port of a Prometheus endpoint of the main process; null: none; 0: a free port."""
    metrics_host: str = "127.0.0.1"
    """Address it listens on; 0.0.0.0: also for other machines."""
