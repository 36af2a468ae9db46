"""The launch scripts, run as a user would run them: every public data format, each architecture, wrong arguments.

One launch starts the training process itself; the others' trainings run in this process (tests/kits/launch_kit.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from assets.make_grounding_fixtures import make_all
from mmrl.cli.run import run_config
from mmrl.config import load_config
from mmrl.errors import ConfigError
from mmrl.robotics.config import load_embodied
from mmrl.robotics.sft import save_policy
from mmrl.video.store import TensorStore
from scripts.check_clone import check_clone
from tests.kits.engine_kit import ENVIRONMENT, REPO, read_jsonl, tiny_folder
from tests.kits.launch_kit import launch, shell
from tests.kits.robot_kit import make_model, make_vla

SMALL = [
    "train.steps=2",
    "train.prompts_per_step=2",
    "rollout.group_size=3",
    "rollout.max_new_tokens=6",
    "train.save_every=1",
    "eval.limit=1",
    "threads=1",
    "data.max_pixels=20000",
]
TRAIN = "mmrl.cli.main"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "arch"),
    [
        ("refer", "qwen2_5_vl"),
        ("vlm_r1_json", "qwen2_vl"),
        ("vlm_r1_jsonl", "qwen3_vl"),
        ("easyr1", "qwen2_5_vl"),
        ("own", "qwen2_vl"),
    ],
)
def test_launch_script_trains_on_public_formats(form: str, arch: str, tmp_path: Path) -> None:
    made = make_all(tmp_path / "data")
    data = next(path for name, path in made.items() if name == form)
    held_out = (
        ["--eval", data, "--split", "val", "--eval-split", "testA"] if form == "refer" else []
    )
    done = launch(
        "--model",
        tiny_folder(arch),
        "--data",
        data,
        "--name",
        "smoke",
        f"dir={tmp_path}",
        *SMALL,
        *held_out,
        "reward.workers=0",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = read_jsonl(tmp_path / "smoke" / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2]
    assert all(
        r["train/groups/asked"]
        == sum(r[f"train/groups/{k}"] for k in ("kept", "no_signal", "failed"))
        for r in rows
    )
    assert all(r["train/groups/failed"] == 0 for r in rows), (
        "every picture of the fixture must be found and read"
    )
    assert json.loads((tmp_path / "smoke" / "run.json").read_text())["status"] == "finished"
    assert (tmp_path / "smoke" / "checkpoints" / "step_000002" / "model.safetensors").exists()
    if held_out:
        sources = {
            r["source"]
            for r in read_jsonl(tmp_path / "smoke" / "eval" / "step_000002" / "predictions.jsonl")
        }
        assert sources == {"refcoco/testA"}, "held-out data comes from the split asked for"


@pytest.mark.slow
def test_launch_script_started_elsewhere_finds_model_data_and_pictures(tmp_path: Path) -> None:
    """Relative paths are those of the folder one starts from; VLM-R1's pictures usually lie beside no annotation file."""
    data = Path(make_all(tmp_path / "made")["vlm_r1_json"])
    away = tmp_path / "a folder's name"
    (away / "pictures").mkdir(parents=True)
    shutil.move(data.parent / "coco", away / "pictures" / "coco")
    shutil.copy(data, away / "rec.json")
    os.symlink(tiny_folder("qwen2_5_vl"), away / "model")
    common = [
        "--model",
        "model",
        "--data",
        "rec.json",
        "--name",
        "smoke",
        f"dir={tmp_path}",
        *SMALL,
        "train.steps=1",
    ]
    lost = launch(*common, cwd=away)
    assert lost.returncode == 2 and "data.train[].params.reader.image_root" in lost.stderr, (
        lost.stderr[-2000:]
    )
    done = launch(
        *common,
        "--eval",
        "./rec.json",
        "--images",
        "pictures",
        "--overwrite",
        cwd=away,
        really=TRAIN,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    config = load_config(tmp_path / "smoke" / "config.yaml")
    assert config.model.path == str(away / "model")
    for source in (*config.data.train, *config.data.eval):
        assert source.path == str(away / "rec.json") and source.params["reader"] == {
            "image_root": str(away / "pictures")
        }
    assert [s.params["mode"] for s in (*config.data.train, *config.data.eval)] == [
        "dynamic",
        "iou",
    ], "the recipe's stay"
    assert read_jsonl(tmp_path / "smoke" / "metrics.jsonl")[0]["train/groups/failed"] == 0


@pytest.mark.slow
def test_launch_script_chooses_among_the_splits_of_a_release(tmp_path: Path) -> None:
    release = Path(make_all(tmp_path / "made")["refer"])
    shutil.copy(release / "refs(unc).p", release / "refs(google).p")
    common = [
        "--model",
        tiny_folder("qwen2_5_vl"),
        "--data",
        "refcoco",
        "--split",
        "val",
        "--name",
        "smoke",
        f"dir={tmp_path}",
        *SMALL,
        "train.steps=1",
        "reward.workers=0",
    ]
    unclear = launch(*common, cwd=release.parent)
    assert unclear.returncode == 2 and "google" in unclear.stderr and "unc" in unclear.stderr, (
        unclear.stderr[-2000:]
    )
    done = launch(*common, "--split-by", "google", "--overwrite", cwd=release.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    [source] = load_config(tmp_path / "smoke" / "config.yaml").data.train
    assert source.path == str(release) and source.params["reader"] == {
        "split": "val",
        "split_by": "google",
    }


def test_launch_script_names_what_is_missing(tmp_path: Path) -> None:
    done = launch("--model", "somewhere")
    assert done.returncode == 2 and "--data" in done.stderr
    done = launch("--modle", "x")
    assert done.returncode == 2 and "--modle" in done.stderr
    done = launch("--model")
    assert done.returncode == 2 and "value after --model" in done.stderr
    done = launch("--images", str(tmp_path / "none"))
    assert done.returncode == 2 and "folder of pictures" in done.stderr
    done = launch("--videos", str(tmp_path / "none"), script="tracking")
    assert done.returncode == 2 and "folder of videos" in done.stderr
    done = launch("--help", cwd=tmp_path)
    assert (
        done.returncode == 0 and "--images DIR" in done.stdout and "dir=/elsewhere" in done.stdout
    )


def _make(kind: str, folder: Path) -> str:
    """A small data set of one kind, by the generators a user would use."""
    from mmrl.tasks.jigsaw import Jigsaw
    from mmrl.tasks.maze import Maze
    from mmrl.tasks.playground import KINDS, make_playground

    if kind in KINDS:
        return make_playground(folder, kind, 6, 1)
    if kind == "mixed":
        rows = []
        for task in KINDS:
            path = Path(make_playground(folder / task, task, 2, 1))
            rows += [
                {**json.loads(line), "image": str(path.parent / json.loads(line)["image"])}
                for line in path.read_text(encoding="utf-8").splitlines()
            ]
        target = folder / "mixed.jsonl"
        target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(target)
    made = (Jigsaw if kind == "jigsaw" else Maze)().example_data(str(folder))
    assert made is not None
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "kind", "extra"),
    [
        ("detection", "detection", []),
        ("counting", "counting", []),
        ("ocr", "ocr", []),
        ("puzzles", "jigsaw", []),
        ("puzzles", "maze", ["--task", "maze"]),
        ("mixed", "mixed", []),
        ("gui", "gui_grounding", ["--format", "own"]),
    ],
)
def test_every_launch_script_trains_and_evaluates_its_task(
    script: str, kind: str, extra: list[str], tmp_path: Path
) -> None:
    data = _make(kind, tmp_path / "data")
    done = launch(
        "--model",
        tiny_folder("qwen2_5_vl"),
        "--data",
        data,
        "--eval",
        data,
        "--name",
        "smoke",
        f"dir={tmp_path}",
        *SMALL,
        "train.prompts_per_step=3",
        "eval.limit=3",
        "reward.workers=0",
        *extra,
        script=script,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_jsonl(tmp_path / "smoke" / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2] and all(r["train/groups/failed"] == 0 for r in rows)
    seen = {
        r["sample"]["task"]
        for r in read_jsonl(tmp_path / "smoke" / "eval" / "step_000002" / "predictions.jsonl")
    }
    assert seen == ({kind} if kind != "mixed" else seen) and (kind != "mixed" or len(seen) >= 3)
    assert (tmp_path / "smoke" / "checkpoints" / "step_000002" / "model.safetensors").exists()


def documented(recipe: str) -> list[str]:
    """The commands in a recipe's comment that try it with generated data."""
    lines = (REPO / "configs" / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines()
    return (
        "\n".join(line[4:] for line in lines if line.startswith("#   "))
        .replace("\\\n", " ")
        .splitlines()
    )


def play(recipe: str, arch: str, folder: Path, *extra: str) -> None:
    """Run a recipe's documented commands in a shell, with another tiny model, everything written below `folder`."""
    commands = documented(recipe)
    assert [c for c in commands if "train" in c.split()[1]] == commands[-1:], (
        "data first, then the training"
    )
    commands[-1] += " " + " ".join(
        [f"name=smoke dir={folder} data.cache.dir={folder}/cache threads=1", *extra]
    )
    defined = (
        'set -e; python() { "$MMRL_PYTHON" "$@"; }; mmrl() { python -m mmrl.cli.main "$@"; }\n'
    )
    for command in commands:
        body = command.replace("runs/clips", str(folder / "clips")).replace(
            "assets/tiny_vlm", tiny_folder(arch)
        )
        done = shell("bash", "-c", defined + body)
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "arch", "task"),
    [
        ("video_qa", "qwen2_5_vl", "choice"),
        ("temporal_grounding", "qwen3_vl", "temporal_grounding"),
        ("tracking", "qwen2_vl", "tracking"),
        ("video_mixed", "qwen3_vl", "grounding choice math"),
    ],
)
def test_documented_commands_of_the_video_recipes_train_with_the_cache(
    recipe: str, arch: str, task: str, tmp_path: Path
) -> None:
    contrast = ["algorithm.contrast.skip=false"] if recipe in ("video_qa", "video_mixed") else []
    play(
        recipe,
        arch,
        tmp_path,
        "algorithm.dynamic_sampling=false",
        "train.log_rollouts=6",
        *contrast,
    )
    rows = read_jsonl(tmp_path / "smoke" / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2] and all(r["train/groups/failed"] == 0 for r in rows)
    assert all(r["time/update"] > 0 and r["train/logprob_gap/mean"] < 1e-3 for r in rows)
    rollouts = [
        r
        for s in (1, 2)
        for r in read_jsonl(tmp_path / "smoke" / "rollouts" / f"step_{s:06d}.jsonl")
    ]
    assert {r["sample"]["task"] for r in rollouts} == set(task.split())
    seen = {p for r in rollouts for p in (*r["sample"]["videos"], *r["sample"]["images"])}
    kinds = TensorStore.existing(tmp_path / "cache").stats().kinds
    assert (
        kinds["features"][0]
        == sum(n for kind, (n, _) in kinds.items() if kind != "features")
        >= len(seen)
        > 0
    )
    if recipe != "video_mixed":
        assert (
            set(kinds) == {"video", "features"}
            and load_config(tmp_path / "smoke" / "config.yaml").data.cache.features
        )
        evaluated = read_jsonl(tmp_path / "smoke" / "eval" / "step_000002" / "predictions.jsonl")
        assert len(evaluated) == 16 and {r["sample"]["task"] for r in evaluated} == {task}
    else:
        assert set(kinds) == {"video", "image", "features"}
    measured = {name for r in rows for name in r if name.endswith("contrast/rolled_out")}
    assert measured == (
        {"train/contrast/rolled_out", "train/clips-order/contrast/rolled_out"}
        if contrast
        else set()
    )
    assert all(r[name] == 1.0 for r in rows for name in measured if name in r), (
        "each clip's group, no picture's and no text's"
    )


@pytest.mark.slow
def test_a_second_run_finds_every_clip_in_the_cache(tmp_path: Path) -> None:
    short = ["algorithm.dynamic_sampling=false", "eval.limit=2", "train.steps=1"]
    play("tracking", "qwen2_5_vl", tmp_path, *short)
    first = TensorStore.existing(tmp_path / "cache").stats()
    play("tracking", "qwen2_5_vl", tmp_path, *short, "--overwrite")
    second = TensorStore.existing(tmp_path / "cache").stats()
    assert (second.entries, second.totals["builds"]) == (
        first.entries,
        first.totals["builds"],
    ) and first.totals["builds"] > 0
    play(
        "tracking",
        "qwen2_5_vl",
        tmp_path,
        *short,
        "--overwrite",
        "model.freeze=[]",
        "data.video.max_pixels=1568",
    )
    third = TensorStore.existing(tmp_path / "cache").stats()
    assert third.kinds["features"] == second.kinds["features"], (
        "a tower that learns has no features to keep"
    )
    assert third.kinds["video"][0] > second.kinds["video"][0], "another budget, other pixels"


def test_every_launch_script_has_a_recipe_whose_first_line_runs_it() -> None:
    scripts = sorted((REPO / "scripts").glob("train_*.sh"))
    assert len(scripts) == 12
    for script in scripts:
        name = script.stem.removeprefix("train_")
        first = (REPO / "configs" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith(f"# bash scripts/{script.name} "), first
        run_config(REPO / "configs" / f"{name}.yaml", [])
        assert f"bash scripts/{script.name}" in launch("--help", script=name).stdout


@pytest.fixture(scope="module")
def cloned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with a policy in maniskill_sft/model, saved with the ManiSkill recipe's settings and these overrides."""
    folder = tmp_path_factory.mktemp("runs")
    backbone = make_model(folder / "backbone")
    settings = [
        "env.tasks=[PushCube-v1]",
        "env.horizon=40",
        f"demos.path='{folder}'",
        f"model.path='{backbone}'",
        f"dir={folder}",
    ]
    made = load_embodied(
        REPO / "configs" / "maniskill.yaml", [*settings, "name=maniskill", "model.lora=null"]
    )
    save_policy(make_vla(backbone, trainable=False), made, folder / "maniskill_sft" / "model")
    return folder, settings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("env.tasks=[PickCube-v1]", "expected env.tasks ['PickCube-v1'], found ['PushCube-v1']"),
        ("env.horizon=80", "expected env.horizon 80, found 40"),
        ("demos.path=/other", "expected demos.path '/other', found '/"),
        ("env.options={dims: 4}", "expected env.options {'dims': 4}, found {}"),
        ("model.path=x", "expected model.path 'x', found '/"),
        ("demos.steps=7", "expected demos.steps 7, found 5000"),
        ("vla.proprio=false", "expected vla.proprio False, found True"),
        ("action.chunk=4", "expected action.chunk 4, found 8"),
    ],
)
def test_a_policy_cloned_with_other_settings_is_named(
    cloned: tuple[Path, list[str]], changed: str, said: str
) -> None:
    folder, settings = cloned
    with pytest.raises(ConfigError) as error:
        check_clone(
            load_embodied(REPO / "configs" / "maniskill.yaml", [*settings, changed]),
            folder / "maniskill_sft" / "model",
        )
    message = str(error.value)
    assert said in message and message.count("expected ") == 1
    assert (
        f"remove {folder}/maniskill_sft/model to clone again" in message
        and "--model" in message
        and "--name" in message
    )


@pytest.mark.slow
def test_what_only_training_reads_makes_no_other_clone(
    cloned: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, settings = cloned
    extra = [
        "env.slots=3",
        "algorithm.advantage=gae",
        "algorithm.filter.low=null",
        "algorithm.filter.high=null",
        "algorithm.filter.key=accuracy",
        "vla.value_head=true",
        "seed=4",
        "name=other",
    ]
    check_clone(
        load_embodied(REPO / "configs" / "maniskill.yaml", [*settings, *extra]),
        folder / "maniskill_sft" / "model",
    )
    with pytest.raises(ConfigError, match=r"trainer/config\.yaml, found no such file: remove"):
        check_clone(load_embodied(REPO / "configs" / "maniskill.yaml", settings), tmp_path)


@pytest.mark.slow
def test_the_launch_uses_a_cloned_policy_only_for_what_it_was_cloned_for(
    cloned: tuple[Path, list[str]],
) -> None:
    folder, _ = cloned
    asked = [
        "--model",
        str(folder / "backbone"),
        "--horizon",
        "40",
        "--demos",
        str(folder),
        f"dir={folder}",
    ]
    other = launch(
        *asked, "--tasks", "PickCube-v1", script="maniskill", really="scripts.check_clone"
    )
    assert (
        other.returncode == 2
        and "expected env.tasks ['PickCube-v1'], found ['PushCube-v1']" in other.stderr
    ), other.stderr
    assert (
        "using the policy cloned before" not in other.stdout and not (folder / "maniskill").exists()
    )
    same = launch(
        *asked, "--tasks", "PushCube-v1", script="maniskill", really="scripts.check_clone"
    )
    assert "using the policy cloned before" in same.stdout
    assert "was made with bins 9" in same.stderr, (
        "training began with it (and refuses this one: its tokens are not the recipe's)"
    )


def test_demonstrations_beside_a_finished_policy_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vla.json").write_text("{}", encoding="utf-8")
    done = launch("--model", str(tmp_path), "--demos", str(tmp_path), script="libero")
    assert (
        done.returncode == 2
        and f"found --model {tmp_path}, a policy already (it has vla.json): drop --demos"
        in done.stderr
    )


@pytest.mark.parametrize(
    ("flag", "unfinished", "cloning", "training"),
    [
        ("", False, "", ""),
        ("", True, "--resume", ""),
        ("--resume", True, "--resume", "--auto-resume"),
        ("--resume", False, "", "--auto-resume"),
        ("--overwrite", True, "--overwrite", "--overwrite"),
    ],
)
def test_a_clone_that_was_interrupted_goes_on(
    flag: str, unfinished: bool, cloning: str, training: str, tmp_path: Path
) -> None:
    told = tmp_path / "python"
    told.write_text('#!/bin/sh\necho "$@"\n', encoding="utf-8")
    told.chmod(0o755)
    if unfinished:
        (tmp_path / "runs/libero_sft/model_checkpoints/step_000500").mkdir(parents=True)
    done = subprocess.run(
        [
            "bash",
            str(REPO / "scripts/train_libero.sh"),
            f"dir={tmp_path / 'runs'}",
            *([flag] if flag else []),
        ],
        env={**ENVIRONMENT, "MMRL_PYTHON": str(told)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    sft, train = (line.split() for line in done.stdout.splitlines() if line.startswith("-m "))
    assert (sft[2], train[2]) == ("sft", "train")
    for words, wanted in ((sft, cloning), (train, training)):
        assert [w for w in words[3:] if w in ("--resume", "--auto-resume", "--overwrite")] == (
            [wanted] if wanted else []
        )


@pytest.mark.parametrize("script", ["grounding", "maniskill"])
def test_a_training_that_fails_fails_its_script(script: str, tmp_path: Path) -> None:
    """One script of either launcher; the others call the same. Trainings that run in this process cannot tell."""
    failing, options = tmp_path / "python", ["--data", "d"] if script == "grounding" else []
    failing.write_text("#!/bin/sh\nexit 7\n", encoding="utf-8")
    failing.chmod(0o755)
    (tmp_path / "vla.json").write_text("{}", encoding="utf-8")  # a policy: nothing is cloned before
    command = [
        "bash",
        str(REPO / "scripts" / f"train_{script}.sh"),
        "--model",
        str(tmp_path),
        *options,
    ]
    done = subprocess.run(
        command,
        env={**ENVIRONMENT, "MMRL_PYTHON": str(failing)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 7, done.stderr


@pytest.mark.parametrize(
    ("count", "script"),
    [("two", "grounding"), ("0", "libero"), ("1.5", "grounding"), ("-1", "maniskill")],
)
def test_a_wrong_number_of_processes_is_named(count: str, script: str) -> None:
    data = ["--data", "d"] if script == "grounding" else []
    done = launch("--model", "m", *data, "--gpus", count, script=script)
    assert (
        done.returncode == 2 and f"number of processes after --gpus, found '{count}'" in done.stderr
    )
