"""FSDP2, ZeRO-2 and ZeRO-3 in real processes (gloo on 127.0.0.1) make the run of one process, offloaded or not, also resumed.

All runs of two processes are made in one launch, which ends with a resumed run from the command line.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import load_config
from mmrl.distributed.engines import build_train_engine
from mmrl.distributed.world import World
from mmrl.policy.tiny import TinySpec, build_tiny
from mmrl.training.optim import build_optimizer
from mmrl.training.trainer import Trainer
from tests.distributed.engines.deepspeed_worker import (
    ALONE,
    BF16,
    KINDS,
    exercise,
    items_of,
    policy_of,
)
from tests.distributed.engines.mixed_kit import mixed_run, text_only_shares
from tests.distributed.test_distributed import compare, work
from tests.kits.engine_kit import config_file, tiny_folder
from tests.kits.process_worker import cut

pytestmark = pytest.mark.slow
ENGINES = {"fsdp2": ["engine.train=fsdp2"], **KINDS}
# the other kinds: runs of one process that they continue, and the engine alone
FULL = ("fsdp2", "zero2", "zero3_offload_all")
LORA = ("fsdp2", "zero2", "zero3_sharded")
APART = "engine.generator.kind=process"
TRAIN = "tests.kits.process_worker:train"


def apart(a: dict[Any, torch.Tensor], b: dict[Any, torch.Tensor]) -> float:
    """Distance between two sets of tensors of the same shapes. AdamW divides by a gradient's size: see test_distributed."""
    assert a.keys() == b.keys() and all(a[key].shape == b[key].shape for key in a)
    return float(torch.stack([(a[key] - b[key]).norm() for key in a]).norm())


@dataclass
class Found:
    """Runs of one process, whose folders stand beside those of two; what `exercise` found in one process, in two of each kind."""

    full: Trainer
    lora: Trainer
    one: dict[str, dict[str, Any]]  # by precision
    two: dict[str, list[dict[str, Any]]]
    fsdp: dict[str, Any]
    held: list[dict[str, Any]]  # by process
    int8: list[dict[str, Any]]  # by process
    files: dict[str, list[dict[str, Any]]]  # by engine and process
    said: str


def run_of(folder: Path, **sections: Any) -> tuple[Trainer, str]:
    """A run of one process and its configuration."""
    config = config_file(folder / "c.yaml", mixed_run(folder, **sections))
    trainer = Trainer(load_config(config))
    trainer.fit()
    return trainer, config


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("sharded")
    full, whole = run_of(folder / "full")
    lora, adapters = run_of(
        folder / "lora",
        algorithm={"epochs": 2, "minibatches": 2},
        train={"steps": 2},
        data={"cache": {"dir": str(folder / "cache")}},
        model={
            "path": tiny_folder("qwen3_vl"),
            "lora": {"r": 4, "alpha": 8},
            "freeze": ["vision"],
            "gradient_checkpointing": True,
        },
    )
    path = config_file(folder / "alone.yaml", mixed_run(folder, optim={"max_grad_norm": 0.5}))
    one = {}
    for kind in ("fp32", "bf16"):
        config = load_config(path, BF16 if kind == "bf16" else [])
        policy = policy_of(config)
        engine = build_train_engine(
            config,
            World(torch.device("cpu")),
            policy,
            build_optimizer(policy.trainable(), config.optim),
        )
        one[kind] = exercise(engine, policy, items_of(policy))
    plan = [(config, kind) for config, kinds in ((whole, FULL), (adapters, LORA)) for kind in kinds]
    jobs: list[list[Any]] = [
        [TRAIN, config, [f"name={kind}", *ENGINES[kind]]] for config, kind in plan
    ]
    # accelerate tells whoever comes later of DeepSpeed, in variables
    jobs.sort(key=lambda job: "name=fsdp2" not in job[2])
    jobs.insert(2, ["tests.distributed.engines.fsdp_worker:drive", tiny_folder()])
    wide, processor = build_tiny(TinySpec(hidden=256, layers=10, vision_hidden=32, vision_heads=1))
    wide.save_pretrained(folder / "wide")
    processor.save_pretrained(folder / "wide")
    jobs.insert(3, ["tests.distributed.engines.fsdp_worker:held", str(folder / "wide")])
    # every kind of weight, each as wide: eight more layers of the same cost half of a process's time
    build_tiny(TinySpec(hidden=256, layers=2, vision_hidden=32, vision_heads=1))[0].save_pretrained(
        folder / "low"
    )
    processor.save_pretrained(folder / "low")
    jobs.insert(4, ["tests.distributed.engines.fsdp_worker:int8", str(folder / "low")])
    processor.save_pretrained(folder / "mixed")
    wide.model.visual.to(torch.bfloat16)
    wide.save_pretrained(folder / "mixed")
    processor.save_pretrained(folder / "half")
    wide.to(torch.bfloat16).save_pretrained(folder / "half")
    shutil.copytree(folder / "half", folder / "damaged")
    with torch.no_grad():  # in the rows of the second process
        wide.get_input_embeddings().weight[-1, -1] = float("nan")
    wide.save_pretrained(folder / "damaged")
    in_files = "tests.distributed.engines.files_worker:in_files"
    folders = [str(folder / name) for name in ("half", "mixed", "damaged")]
    jobs.insert(5, [in_files, "fsdp2", *folders])
    jobs += [
        [TRAIN, whole, ["name=one_zero2", *KINDS["zero2_offload"]], "run"],
        [TRAIN, whole, ["name=one_zero3", *KINDS["zero3_sharded"]], "run", 1],
        [TRAIN, whole, ["name=apart_zero3", *KINDS["zero3_sharded"], APART]],
        [
            "tests.kits.process_worker:copied",
            str(full.folder.path.with_name("zero2")),
            "zero2_zero3",
        ],
        ["tests.distributed.engines.deepspeed_worker:alone", path, str(folder)],
        [in_files, "deepspeed_zero3", *folders],
    ]
    ranks, said = work(
        folder, jobs, "train", whole, "name=zero2_zero3", "engine.train=deepspeed_zero3", "--resume"
    )
    two = {kind: [torch.load(folder / f"{kind}-{rank}.pt") for rank in range(2)] for kind in ALONE}
    held, int8 = ([rank[n] for rank in ranks] for n in (3, 4))
    files = {
        kind: [rank[n] for rank in ranks]
        for kind, n in (("fsdp2", 5), ("deepspeed_zero3", len(jobs) - 1))
    }
    return Found(full, lora, one, two, ranks[0][2], held, int8, files, said)


def test_full_training_equals_one_process(found: Found) -> None:
    """Tower and projector learn too; the KL term's reference is sharded as well; some steps give one process nothing but text."""
    assert text_only_shares(found.full.folder.path), "the data do not test what they should"
    for kind in FULL:
        compare(found.full, found.full.folder.path.with_name(kind))


def test_a_generator_process_samples_for_two_of_sharded_weights(found: Found) -> None:
    """Serial, so that it is the run without one."""
    compare(found.full, found.full.folder.path.with_name("apart_zero3"))


def test_a_run_of_one_process_is_continued(found: Found) -> None:
    for name in ("one_zero2", "one_zero3"):
        compare(found.full, found.full.folder.path.with_name(name))


@pytest.mark.parametrize("kind", FULL)
def test_one_process_continues_a_run(kind: str, found: Found) -> None:
    run = cut(found.full.folder.path.with_name(kind), f"{kind}_one", 1 if kind == "fsdp2" else 2)
    Trainer(
        load_config(str(run.parents[1] / "c.yaml"), [f"name={run.name}", "engine.train=single"]),
        resume=True,
    ).fit()
    compare(found.full, run)


def test_zero3_continues_a_run_of_zero2_from_the_command_line(found: Found) -> None:
    compare(found.full, found.full.folder.path.with_name("zero2_zero3"))
    assert "resumed after step 2" in found.said, found.said
    assert "untested optimizer" not in found.said and "mismatch" not in found.said, found.said


def test_lora_with_a_frozen_tower_and_cached_features(found: Found) -> None:
    """Adapters in two passes of two minibatches; the reference is the model without them."""
    for kind in LORA:
        run = found.lora.folder.path.with_name(kind)
        compare(found.lora, run)
        assert (run / "checkpoints" / "step_000002" / "adapter").is_dir()


def test_fsdp_in_bf16_holds_one_block_at_a_time(found: Found) -> None:
    """Autocast's cache would hold a bf16 copy of all layers at the end of a forward: nine blocks more than after the first."""
    for of in found.held:
        assert max(of["growth"].values()) < 2 * of["block"], of
        assert of["layers"] == 10 and of["types"] == ["torch.float32"], of
        # transformers' own bf16 model, whose output layer rounds logits to bf16
        assert max(of["apart"].values()) < 0.02, of


def test_moments_of_8_bits_in_shards_go_on_as_they_were(found: Found) -> None:
    """They are saved whole and in fp32, as every engine reads them."""
    for of in found.int8:
        assert of["same"] and of["goes on"] and of["moved"], of
        assert 0.25 < of["share"] < 0.3 and of["types"] == ["Tensor"], of


def test_fsdp_sums_gradients_and_fails_together(found: Found) -> None:
    of = found.fsdp
    assert 0.4 < of["share"] < 0.6 and of["whole"] and of["given back"] == [True, True]
    assert all(error < 1e-5 for error in of["sums"].values()), of["sums"]
    first, second, *others = of["norms"]
    assert others == [first, second] and first > 0
    assert of["main holds the state"] == [True, False] and of["steps"] == [2.0]
    assert (
        all(said.startswith("norm ") for said in of["non-finite"]) and len(of["non-finite"]) == 2
    ), of["non-finite"]


@pytest.mark.parametrize("kind", ALONE)
def test_the_engine_alone(kind: str, found: Found) -> None:
    """Processes whose logits come in different numbers of chunks; a pass without gradients before every micro-batch."""
    # where a difference of 1e-8 in a weight may move its bf16 copy by 1/256
    rounded = kind.endswith("bf16")
    one, ranks = found.one["bf16" if rounded else "fp32"], found.two[kind]
    assert ranks[0]["steps"][0][0] == pytest.approx(one["steps"][0][0], rel=1e-5)
    assert one["steps"][0][0] > 0.5, "clipping is not tested"
    for rank in ranks:
        assert rank["steps"] == [
            (pytest.approx(norm, rel=5e-3 if rounded else 1e-5), lr) for norm, lr in one["steps"]
        ]
        assert rank["trained"] == one["trained"] and rank["weights"].keys() == one["weights"].keys()
        assert apart(rank["weights"], one["weights"]) < (0.05 if rounded else 1e-3) * apart(
            one["before"], one["weights"]
        )
        assert rank["nothing"] == (0.0, one["nothing"][1]), "nothing in the loss: no step"
        assert rank["error"][0] == "the norm" and not 0 <= rank["error"][1][0] < float("inf")
        assert all(
            torch.equal(rank["after"][name], tensor) for name, tensor in rank["weights"].items()
        )
    main, other = ranks
    assert main["fresh"] == 0 and other["fresh"] is other["state"] is None
    mine, theirs = one["state"], main["state"]
    assert theirs["param_groups"] == mine["param_groups"]
    assert theirs["state"].keys() == mine["state"].keys()
    for number, entry in mine["state"].items():
        assert (
            entry.keys() == theirs["state"][number].keys()
            and theirs["state"][number]["step"] == entry["step"] == 2
        )
    for key in ("exp_avg", "exp_avg_sq"):
        a, b = (
            {number: entry[key] for number, entry in x["state"].items()} for x in (mine, theirs)
        )
        assert (
            apart(a, b)
            < (0.03 if rounded else 1e-3)
            * torch.stack([value.norm() for value in a.values()]).norm()
        )


@pytest.mark.parametrize("kind", ["fsdp2", "deepspeed_zero3"])
def test_weights_are_read_from_their_files_as_they_are_shared_out(kind: str, found: Found) -> None:
    """Of weights in bf16 files, with fp32 shards, a reference and a copy that samples: bit for bit what reading all gives."""
    for number, rank in enumerate(found.files[kind]):
        assert not rank["apart"], rank["apart"][:4]
        # a number of each parameter, and the file, which is given back
        assert all(held <= 4 for held in rank["held"].values()), rank["held"]
        assert all(mapped == [True, False] for mapped in rank["mapped"].values()), rank["mapped"]
        assert "expected finite weights" in rank["said"] and "embed_tokens" in rank["said"]
        if kind == "deepspeed_zero3":  # under FSDP2 no process has one whole
            assert len(rank["read"]) > 30 and {tuple(r) for r in rank["read"]} == {(number == 0, 0)}
