"""What can be known before weights are loaded is said before, and a start that failed blocks no other."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from mmrl.config import EvalConfig, load_config
from mmrl.data.sources import load_sources
from mmrl.errors import ConfigError, MissingExtraError, install_command
from mmrl.robotics.source import env_specs
from mmrl.robotics.vector import check_playing
from mmrl.training.preflight import best_metric, check_model_folder, measured_by
from mmrl.training.trainer import Trainer
from tests.kits.engine_kit import (
    ALBUM,
    REPO,
    album_data,
    config_file,
    picture,
    read_jsonl,
    small_run,
    tiny_folder,
)
from tests.kits.robot_kit import config_of, saved_vla


@pytest.fixture
def data(tmp_path: Path) -> tuple[str, str]:
    rows = [[picture((56, 56), i)] * (i % 2) for i in range(4)]
    return album_data(tmp_path / "data", rows), album_data(tmp_path / "data", rows[:2], "held")


def settings(
    tmp_path: Path, files: tuple[str, str], *, default: bool = True, **sections: Any
) -> Any:
    sections["train"] = {"steps": 1, "prompts_per_step": 2, **sections.get("train", {})}
    tree = small_run(tmp_path / "runs", *files, **sections)
    if default:
        del tree["eval"]["best_metric"]
    return load_config(config_file(tmp_path / "run.yaml", tree))


def refused(
    config: Any, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer refuses before any weight is read, and leaves no run behind."""
    monkeypatch.setattr(
        "transformers.AutoModelForImageTextToText.from_pretrained",
        lambda *a, **k: pytest.fail("read weights"),
    )
    with pytest.raises(error, match=message):
        Trainer(config)
    monkeypatch.undo()
    assert not (Path(config.dir) / config.name).exists()


def test_greedy_only_needs_no_further_key(tmp_path: Path, data: tuple[str, str]) -> None:
    config = settings(tmp_path, data, eval={"samples": 0})
    Trainer(config).fit()
    run = tmp_path / "runs" / "run"
    assert json.loads((run / "run.json").read_text())["best_metric"] == "greedy/reward"
    assert (run / "checkpoints" / "best").exists() and read_jsonl(run / "metrics.jsonl")[0][
        "eval/selection"
    ] is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"best_metric": "sampled/iou", "samples": 0}, "samples none"),
        ({"best_metric": "iou"}, "greedy/NAME"),
        ({"best_metric": "best/iou"}, "greedy/NAME"),
        ({"best_metric": "sampled/"}, "greedy/NAME"),
    ],
)
def test_a_metric_that_no_evaluation_can_have_is_refused_with_the_configuration(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        EvalConfig(**changes)


def test_a_metric_that_the_task_does_not_measure_is_refused_before_weights_are_read(
    tmp_path: Path, data: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, data, default=False, eval={"best_metric": "sampled/iuo"})
    refused(
        config,
        ConfigError,
        r"sampled/iou.*found 'sampled/iuo'.*Did you mean 'sampled/iou'",
        monkeypatch,
    )


def test_without_held_out_data_the_metric_is_not_looked_at(
    tmp_path: Path, data: tuple[str, str]
) -> None:
    config = settings(
        tmp_path, (data[0], ""), default=False, eval={"best_metric": "greedy/acc@0.5", "samples": 0}
    )
    assert config.data.eval == [] and Trainer(config).best_metric == "greedy/acc@0.5"


def test_the_default_metric_is_the_headline_of_the_held_out_data(tmp_path: Path) -> None:
    from mmrl.config import DataSource
    from mmrl.tasks.mixed import Mixed
    from mmrl.tasks.playground import make_playground

    paths = {
        name: make_playground(tmp_path / name, name, 4, 1)
        for name in ("grounding", "counting", "ocr")
    }

    def chosen(names: list[str], **keys: Any) -> str:
        sources = load_sources([DataSource(task=n, path=paths[n]) for n in names])
        return best_metric(EvalConfig(**keys), measured_by(sources))

    assert chosen(["grounding"]) == "sampled/iou" and chosen(["ocr"], samples=0) == "greedy/ned"
    assert chosen(["grounding", "counting"]) == "sampled/macro"
    assert chosen(["counting"], best_metric="greedy/close") == "greedy/close"
    with pytest.raises(ConfigError, match="greedy/close"):
        chosen(["counting"], best_metric="greedy/ned")
    mixed = load_sources(
        [DataSource(task="mixed", path=str(Mixed().example_data(str(tmp_path / "mixed"))))]
    )
    assert best_metric(EvalConfig(), measured_by(mixed)) == "sampled/macro"


def test_metrics_of_a_task_that_declares_none_are_those_of_its_gold_answer(
    data: tuple[str, str],
) -> None:
    from mmrl.config import DataSource

    sources = load_sources([DataSource(task=ALBUM, path=data[1])])
    assert sources[0].task.metric_names == ()
    names = measured_by(sources).names
    assert names is not None and names == {"iou", "reward", "parse_rate", "macro"}


@pytest.mark.parametrize("key", ["wandb", "tensorboard"])
def test_a_tracker_that_cannot_be_imported_is_refused_with_the_real_error(
    key: str, tmp_path: Path, data: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"wandb": "wandb", "tensorboard": "torch.utils.tensorboard"}[key]
    broken = tmp_path / "site" / "wandb"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("import a_dependency_of_wandb\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, module, raising=False)
    if key == "tensorboard":
        # how Python marks a package that is not there
        monkeypatch.setitem(sys.modules, "tensorboard", None)
    missing = "a_dependency_of_wandb" if key == "wandb" else "tensorboard"
    config = settings(tmp_path, data, train={key: True})
    refused(
        config,
        MissingExtraError,
        rf"train\.{key}.*ModuleNotFoundError: .*{missing}.*\[{key}\]",
        monkeypatch,
    )


def test_a_model_folder_that_is_not_complete_is_named_before_the_data_are_read(
    tmp_path: Path, data: tuple[str, str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("qwen2_5_vl", window_vision=False), folder)
    check_model_folder(str(folder))
    [weights] = folder.glob("*.safetensors")
    index = {
        "metadata": {},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        },
    }
    weights.rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(ConfigError, match="found none in"):
        check_model_folder(str(folder))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = settings(
        tmp_path, (str(tmp_path / "no such data.jsonl"), data[1]), model={"path": str(folder)}
    )
    with pytest.raises(ConfigError, match=r"2 shards .*1 missing \(first: model-00002-of-00002"):
        Trainer(config)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json, found none"):
        check_model_folder(str(folder))


@pytest.mark.slow
def test_a_start_that_failed_needs_no_overwrite_and_leaves_nothing_in_the_next(
    tmp_path: Path, data: tuple[str, str]
) -> None:
    run = tmp_path / "runs" / "run"

    def stop(kind: str, payload: Any) -> None:
        if kind == "eval":
            raise OSError("the first evaluation is written, then something breaks")

    with pytest.raises(OSError, match="something breaks"):
        Trainer(settings(tmp_path, data, data={"on_error": "record"}), on_event=stop).fit()
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    (run / "rejected.jsonl").write_text("{}\n")
    (run / "alarms.jsonl").write_text('{"step": 0, "name": "of the first start"}\n')
    Trainer(settings(tmp_path, data)).fit()
    assert [r["step"] for r in read_jsonl(run / "metrics.jsonl")] == [1] and not (
        run / "rejected.jsonl"
    ).exists()
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    assert "first start" not in (run / "alarms.jsonl").read_text()
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match="already holds a run"):
        Trainer(settings(tmp_path, data))
    # another run in its folder, as name=run/second makes
    (run / "second").mkdir()
    (run / "second" / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"--overwrite to replace one run, found others .*second"):
        Trainer(settings(tmp_path, data), overwrite=True)
    (run / "second" / "run.json").unlink()
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_a_run_of_which_only_a_checkpoint_is_left_is_a_run(
    tmp_path: Path, data: tuple[str, str]
) -> None:
    checkpoint = tmp_path / "runs" / "run" / "checkpoints" / "step_000003"
    checkpoint.mkdir(parents=True)
    with pytest.raises(ConfigError, match="already holds a run"):
        Trainer(settings(tmp_path, data))


def test_the_estimate_of_memory_is_said_after_what_is_wrong(
    tmp_path: Path, data: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    from mmrl.cli.run import train_command

    tree = small_run(tmp_path / "runs", str(tmp_path / "missing.jsonl"))
    with pytest.raises(Exception, match="expected data at"):
        train_command(
            Path(config_file(tmp_path / "a.yaml", tree)),
            [],
            resume=False,
            overwrite=False,
            quiet=False,
        )
    assert "GiB" not in "".join(capfd.readouterr())
    assert not (tmp_path / "runs" / "run").exists()


@pytest.mark.parametrize(
    ("samples", "chosen"), [(2, "sampled/success_once"), (0, "greedy/success_once")]
)
def test_robots_are_judged_by_their_success(samples: int, chosen: str, tmp_path: Path) -> None:
    from mmrl.training.trainer import Trainer

    model = saved_vla(tmp_path)
    config = config_of(model, f"dir={tmp_path}", f"eval.samples={samples}", "eval.best_metric=null")
    assert Trainer(config).best_metric == chosen
    with pytest.raises(
        ConfigError,
        match=r"success_once.*found 'greedy/succes'.*Did you mean 'greedy/success_once'",
    ):
        Trainer(config_of(model, f"dir={tmp_path}", "eval.best_metric=greedy/succes"))


@pytest.mark.parametrize(
    ("suite", "task", "package"),
    [
        ("maniskill", "PushCube-v1", "mani_skill"),
        ("metaworld", "reach-v3", "metaworld"),
        ("robosuite", "Lift", "robosuite"),
        ("libero", "libero_object/0", "robosuite"),
    ],
)
def test_a_simulator_that_is_not_installed_is_named_before_the_policy_is_read(
    suite: str, task: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(
        tmp_path / "model",
        f"dir={tmp_path}",
        f"env.suite={suite}",
        f"env.tasks=[{task}]",
        "env.options={}",
    )
    with monkeypatch.context() as away:
        away.setitem(sys.modules, package, None)  # how Python marks a package that is not there
        refused(
            config,
            MissingExtraError,
            rf"expected the package {package} for suite {suite}, found none: .*pip install",
            monkeypatch,
        )
        [spec] = env_specs(config)
        check_playing([spec], 1, here=False)  # another machine's simulators
    check_playing([spec], 1)


def test_a_run_on_ray_asks_for_ray_first(
    tmp_path: Path, data: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, data, engine={"workers": "ray"})
    with monkeypatch.context() as away:
        away.setitem(sys.modules, "ray", None)
        refused(
            config,
            MissingExtraError,
            "expected the package ray for engine.workers ray, found none: .*engine.workers: local",
            monkeypatch,
        )


def test_no_message_names_the_distribution_of_somebody_else() -> None:
    """On PyPI `mmrl` is another project: no text of ours may say `pip install mmrl` or 'mmrl[extra]'."""
    pattern = re.compile(
        r"""(?:pip|uv)\s+(?:\w+\s+)?(?:install|add)\s+(?:-\S+\s+)*['"]?mmrl(?![\w./-])|['"]mmrl\[|"""
        r"""dependencies.*['"]mmrl['"]"""
    )
    for text in (
        "pip install 'mmrl[wandb]'",
        "pip install -U mmrl",
        "uv pip install mmrl",
        'dependencies = ["mmrl"]',
    ):
        assert pattern.search(text), text
    texts = [
        p
        for name in (
            "mmrl",
            "tasks",
            "rewards",
            "video",
            "robotics",
            "scripts",
            "configs",
            "docs",
            "tests/plugin_package",
        )
        for p in (REPO / name).rglob("*")
        if p.suffix in (".py", ".md", ".yaml", ".toml", ".sh", ".sbatch")
    ]
    texts += [REPO / "Makefile", REPO / "README.md", REPO / "CONTRIBUTING.md"]
    assert len(texts) > 300
    ours = re.compile(r"On PyPI the name `mmrl`")  # what says why
    found = [
        f"{p}:{number}: {line.strip()}"
        for p in texts
        for number, line in enumerate(p.read_text(encoding="utf-8").split("\n"), 1)
        if pattern.search(line) and not ours.search(line)
    ]
    assert found == [], "\n".join(found)
    assert re.fullmatch(r"pip install -e '/.*\[serve,vllm\]'", install_command("serve", "vllm"))
