"""Two real processes (gloo on 127.0.0.1) make the supervised steps of one, whatever the engine, also of a VLA policy.

tests/training/sft_worker.py is what they run, all runs in one launch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import RunConfig, load_config
from mmrl.data.sources import PromptStream, load_sources
from mmrl.distributed.world import World
from tests.distributed.test_distributed import CLOSE, launch
from tests.kits.clip_kit import VIDEO, clip
from tests.kits.engine_kit import (
    config_file,
    fresh_policy,
    picture,
    small_run,
    tiny_folder,
    weights_of,
)
from tests.kits.robot_kit import config_of, make_model
from tests.training.sft_worker import fine_tune

PLACES = 10  # samples of a step: those of odd places are of process 1
MEDIA: tuple[dict[str, Any], ...] = (
    {},
    {"images": [(112, 84)]},
    {"videos": 8},
    {"images": [(56, 56), (84, 112)], "videos": 6},
    {},
)
ENGINES = ("ddp", "fsdp2")


def mixed(folder: Path, broken: tuple[int, ...], **sections: Any) -> str:
    """A configuration over ten questions with pictures, clips, both or neither; those that the first step draws at the places
    `broken` have a picture that is not there."""
    folder.mkdir()
    tree = small_run(
        folder,
        str(folder / "rows.jsonl"),
        train={"steps": 2, "prompts_per_step": PLACES, "token_budget": 80},
        optim={"lr": 0.001},
        data={"video": VIDEO.model_dump(), "on_error": "record"},
        schedule={"kind": "pipelined"},
        **sections,
    )
    rows = [
        {"id": f"m{i}", "question": f"What is {i}?", "images": [], "videos": []}
        for i in range(PLACES)
    ]
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    stream = PromptStream(load_sources(RunConfig.model_validate(tree).data.train), tree["seed"])
    for place in range(PLACES):
        sample, media = stream.draw()[0], MEDIA[place % len(MEDIA)]
        row = next(r for r in rows if r["id"] == sample.id)
        row["images"] = [picture(size, place) for size in media.get("images", ())]
        row["videos"] = [clip(folder, media["videos"], seed=place)] if "videos" in media else []
        if place in broken:
            row["images"] = [str(folder / f"gone-{place}.png")]
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    return config_file(folder / "c.yaml", tree)


@dataclass
class Found:
    """The folder of the runs' models; what one process found, and two of each engine; what these printed."""

    folder: Path
    one: dict[str, dict[str, Any]]
    two: dict[str, list[dict[str, Any]]]
    said: str


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("sft")
    lora = {"path": tiny_folder("qwen3_vl"), "lora": {"r": 4, "alpha": 8}, "freeze": ["vision"]}
    robot = config_of(
        make_model(folder / "backbone"),
        f"dir={folder}",
        "name=robot",
        "demos.episodes=3",
        "env.workers=1",
        "demos.steps=2",
        "demos.batch=5",
        "train.token_budget=40",
        "env.options={discs: 1}",
        "vla.value_head=true",
    )
    configs = {
        "mixed": mixed(folder / "mixed", (1, 3)),
        "refused": mixed(folder / "refused", (1, 3, 5)),
        "robot": config_file(
            folder / "robot.yaml", robot.model_dump(mode="json", exclude_unset=True)
        ),
        "lora": mixed(folder / "lora", (1, 4), model=lora),
    }

    def job(kind: str, engine: str) -> dict[str, Any]:
        steps = ["train.steps=1"] if kind == "lora" else []
        return {
            "config": configs[kind],
            "overrides": [f"engine.train={engine}", *steps],
            "out": str(folder / f"{kind}-{engine}"),
        }

    plan = [job(kind, engine) for kind in ("mixed", "robot") for engine in ENGINES]
    plan[2:2] = [job("refused", "ddp")]
    for kind, saves in (("mixed", "train.save_every=1"), ("robot", "demos.save_every=1")):
        for engine in ENGINES:
            cut = job(kind, engine)
            changed = {"overrides": [*cut["overrides"], saves], "out": f"{cut['out']}-cut"}
            plan.append({**cut, **changed, "ends": 2})
    (folder / "plan.json").write_text(json.dumps([*plan, job("lora", "fsdp2")]), encoding="utf-8")
    said = launch("torchrun", str(folder / "plan.json"), program=("tests.training.sft_worker",))
    two = {
        Path(p["out"]).name: [
            json.loads(Path(f"{p['out']}.{rank}.json").read_text()) for rank in (0, 1)
        ]
        for p in plan
    }
    return Found(folder, {kind: fine_tune(**job(kind, "single")) for kind in configs}, two, said)


def apart(found: Found, kind: str, engine: str, start: Path) -> float:
    """Distance between the weights of one process and of the other run, in shares of the distance travelled. AdamW divides by a
    gradient's size: see test_distributed."""
    one, two = (dict(weights_of(found.folder / f"{kind}-{name}")) for name in ("single", engine))
    initial = dict(weights_of(start))
    assert one.keys() == two.keys()
    moved = torch.stack(
        [
            (one[n] - initial[n]).norm()
            for n in one
            if n in initial and one[n].shape == initial[n].shape
        ]
    ).norm()
    assert moved > 0
    return float(torch.stack([(one[n] - two[n]).norm() for n in one]).norm() / moved)


def same(found: Found, kind: str, engine: str) -> dict[str, Any]:
    """Assert that two processes tell what one told; what that was."""
    one, (main, other) = found.one[kind], found.two[f"{kind}-{engine}"]
    assert len(main["rows"]) == len(one["rows"]) > 0 and not other["rows"], (
        "the main process alone tells of steps"
    )
    for a, b in zip(one["rows"], main["rows"], strict=True):
        assert a == {
            k: pytest.approx(v, **CLOSE) if isinstance(v, float) else v for k, v in b.items()
        }
    assert main["last"] == other["last"], "metrics are of the whole step in both"
    return one


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes_equal_one(engine: str, found: Found) -> None:
    """Process 1 cannot read two of its five samples of the first step: 20 % of ten, which is allowed."""
    one = same(found, "mixed", engine)
    assert [row["failed"] for row in one["rows"]] == [2, 2]
    assert found.two[f"mixed-{engine}"][1]["last"]["failures"] == one["last"]["failures"]
    assert ["gone-1.png" in f["reason"] for f in one["last"]["failures"][:2]] == [True, False], (
        "in the order of the draws"
    )
    start = load_config(found.folder / "mixed" / "c.yaml").model.path
    assert apart(found, "mixed", engine, Path(start)) < 0.02


@pytest.mark.slow
def test_one_process_may_be_sharded(found: Found) -> None:
    out = found.folder / "lora-alone"
    alone = fine_tune(
        str(found.folder / "lora" / "c.yaml"), ["engine.train=fsdp2", "train.steps=1"], str(out)
    )
    World(torch.device("cpu")).close()
    found.two["lora-alone"] = [alone, {**alone, "rows": []}]
    same(found, "lora", "alone")
    assert apart(found, "lora", "alone", Path(tiny_folder("qwen3_vl"))) < 0.02


@pytest.mark.slow
def test_too_many_failures_of_one_process_end_both(found: Found) -> None:
    said = found.one["refused"]["error"]
    assert (
        "step 1: expected samples that can be read, found 3 of 10 that cannot" in said
        and "gone-1.png" in said
    )
    assert [process["error"] for process in found.two["refused-ddp"]] == [said, said]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_cloning_in_two_processes_equals_one(engine: str, found: Found) -> None:
    """The first run recorded the demonstrations, once. Five examples: three of process 0, two of process 1."""
    one = same(found, "robot", engine)
    assert all(row["tokens"] > 0 and 0 <= row["sure"] <= 1 for row in one["rows"])
    assert apart(found, "robot", engine, found.folder / "backbone") < 0.02
    files = {p.name for p in (found.folder / f"robot-{engine}").iterdir()}
    assert {"vla.json", "value_head.safetensors", "trainer"} <= files and (
        found.folder / "robot_demos"
    ).is_dir()


@pytest.mark.slow
def test_the_command_trains_adapters_in_two_processes(found: Found) -> None:
    """Each cannot read one of the samples of the first step; they are listed in the order of the draws."""
    assert apart(found, "lora", "fsdp2", Path(tiny_folder("qwen3_vl"))) < 0.02
    out = found.folder / "lora-fsdp2"
    assert (
        found.said.count(f"model: {out}") == 1
        and found.said.count("samples left out because they could not be read: 2") == 1
    )
    failures = [json.loads(line) for line in (out / "failures.jsonl").read_text().splitlines()]
    assert failures == found.one["lora"]["last"]["failures"] and (out / "adapter").is_dir()
    fresh_policy(path=str(out))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["mixed", "robot"])
def test_two_processes_go_on_where_they_were_interrupted(
    kind: str, engine: str, found: Found
) -> None:
    """The second step's work was lost with the run; the checkpoint of the first has weights and optimizer of both processes."""
    whole, cut = (found.two[f"{kind}-{engine}{way}"][0] for way in ("", "-cut"))
    assert cut["rows"] == [{**whole["rows"][1]}] and cut["last"] == whole["last"]
    one, two = (dict(weights_of(found.folder / f"{kind}-{engine}{way}")) for way in ("", "-cut"))
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
