"""A stranger's checkpoint, log or model folder: none of its settings runs code, opens folders, asks hosts or takes the machine."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from mmrl.cli.main import app
from mmrl.config import DataSource, RunConfig, load_config
from mmrl.config.trust import checkpoint_settings, no_new_code, params_found
from mmrl.errors import ConfigError, MMRLError, RegistryError
from mmrl.evaluation.rescore import rescore
from mmrl.evaluation.settings import taught_params
from mmrl.policy.tiny import TinySpec, build_tiny
from mmrl.registry import BUILT_IN, task_from_spec
from mmrl.robotics.suite_runs import base_settings
from mmrl.tasks.readers import READERS, reader_of
from mmrl.tasks.scenes import make_scenes

REPO = Path(__file__).resolve().parents[2]
EVIL = """
import os, pathlib
pathlib.Path({mark!r}).write_text(str(os.getuid()))
from mmrl.tasks.counting import Counting
class T(Counting):
    pass
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign") / "model"
    build_tiny(TinySpec(), folder)
    return folder


@pytest.fixture()
def evil(tmp_path: Path) -> tuple[Path, Path]:
    """(a Python file that leaves a mark when it is run, the mark)."""
    file, mark = tmp_path / "evil.py", tmp_path / "PWNED"
    file.write_text(EVIL.format(mark=str(mark)), encoding="utf-8")
    return file, mark


@pytest.fixture()
def data(tmp_path: Path) -> Path:
    """One question for the task counting, in a file of the task mixed."""
    make_scenes(tmp_path / "scenes", count=1, seed=0)
    row = {
        "id": "1",
        "task": "counting",
        "image": next((tmp_path / "scenes").rglob("*.png")).name,
        "question": "red circles",
        "answer": 1,
    }
    path = next((tmp_path / "scenes").rglob("*.png")).parent / "data.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return path


@pytest.fixture()
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def checkpoint(folder: Path, model: Path, settings: Any) -> Path:
    shutil.copytree(model, folder)
    (folder / "trainer").mkdir()
    text = settings if isinstance(settings, str) else yaml.safe_dump(settings)
    (folder / "trainer" / "config.yaml").write_text(text, encoding="utf-8")
    return folder


def mixed(name: str) -> dict[str, Any]:
    return {
        "data": {"eval": [{"task": "mixed", "path": "x", "params": {"tasks": {name: {}}}}]},
        "rollout": {"max_new_tokens": 2},
    }


@pytest.mark.parametrize("form", ["absolute", "relative", "parent", "home", "shared"])
def test_eval_runs_no_code_that_a_checkpoint_names(
    form: str,
    model: Path,
    evil: tuple[Path, Path],
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, mark = evil
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below" if form == "parent" else tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    name = {
        "absolute": str(file),
        "relative": "evil.py",
        "parent": "../evil.py",
        "home": "~/evil.py",
        "shared": str(file),
    }[form]
    settings = mixed(f"{name}:T")
    if form == "shared":  # a mixed task in a mixed task
        settings["data"]["eval"][0]["params"] = {
            "shared": {"tasks": {f"{name}:T": {}}},
            "tasks": {"mixed": {}},
        }
    folder = checkpoint(tmp_path / "ck", model, settings)
    result = CliRunner().invoke(
        app,
        [
            "eval",
            str(folder),
            "--task",
            "mixed",
            "--data",
            str(data),
            "--out",
            str(tmp_path / "out"),
        ],
    )
    assert not mark.exists(), "the stranger's code ran"
    assert isinstance(result.exception, MMRLError)
    if form != "shared":
        assert all(
            word in str(result.exception) for word in ("built-in task", "evil.py:T", "--trust-code")
        )


def test_trust_code_lets_it_run(
    model: Path, evil: tuple[Path, Path], data: Path, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "ck", model, mixed(f"{evil[0]}:T"))
    result = CliRunner().invoke(
        app,
        [
            "eval",
            str(folder),
            "--task",
            "mixed",
            "--data",
            str(data),
            "--out",
            str(tmp_path / "out"),
            "--trust-code",
        ],
    )
    assert result.exit_code == 0, result.output
    assert evil[1].exists()


def test_a_task_that_the_user_named_still_has_the_parameters_it_was_trained_with(
    model: Path, evil: tuple[Path, Path], data: Path, tmp_path: Path
) -> None:
    spec = f"{evil[0]}:T"
    source = {"task": spec, "path": "x", "params": {"prompt": "Count: {question}"}}
    folder = checkpoint(
        tmp_path / "ck", model, {"data": {"eval": [source]}, "rollout": {"max_new_tokens": 2}}
    )
    result = CliRunner().invoke(
        app,
        ["eval", str(folder), "--task", spec, "--data", str(data), "--out", str(tmp_path / "out")],
    )
    assert result.exit_code == 0 and evil[1].exists(), (result.output, result.exception)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["protocol"]["data"][0]["params"] == {"prompt": "Count: {question}"}


@pytest.mark.slow
def test_eval_opens_no_folder_and_takes_no_machine(
    model: Path, data: Path, tmp_path: Path, threads: None
) -> None:
    """The checkpoint names the user's own cache and a tiny limit: it would be emptied."""
    from mmrl.video.store import TensorStore

    cache, theirs = tmp_path / "cache", tmp_path / "theirs"
    store = TensorStore(cache)
    store.put("a" * 32, {"x": torch.zeros(1 << 16)})
    before = sorted(p for p in cache.rglob("*") if p.is_file())
    settings = {
        "threads": 10**6,
        "dir": str(theirs),
        "name": "../../x",
        "engine": {"rollout": "vllm", "vllm": {"mode": "server", "url": "http://evil/"}},
        "data": {
            "cache": {"dir": str(cache), "limit_gib": 1e-9},
            "workers": 64,
            "prompt_cache_gib": 1e9,
            "eval": [
                {
                    "task": "counting",
                    "path": "/etc/passwd",
                    "pass_rate": {"file": "/etc/passwd"},
                    "params": {"reader": {"image_root": "/etc", "media_dir": str(theirs)}},
                }
            ],
        },
        "reward": {"workers": 10**6},
        "rollout": {"max_new_tokens": 2},
    }
    folder = checkpoint(tmp_path / "ck", model, settings)
    found = checkpoint_settings(RunConfig, str(folder), [])
    assert (
        found.data.cache.dir is None
        and found.data.workers == 0
        and found.data.prompt_cache_gib <= 4
    )
    assert found.data.eval == [
        DataSource(task="counting", path="(not read)", params={"reader": {}})
    ]
    assert (found.dir, found.name, found.engine) == ("runs", "run", RunConfig().engine)
    assert found.threads == found.reward.workers == os.cpu_count()
    result = CliRunner().invoke(
        app,
        [
            "eval",
            str(folder),
            "--task",
            "counting",
            "--data",
            str(data),
            "--out",
            str(tmp_path / "out"),
        ],
    )
    assert result.exit_code == 0, (result.output, result.exception)
    said = result.output.replace("\n", " ")
    assert all(
        word in said
        for word in ("without", "data.cache.dir", "image_root", "media_dir", "--trust-code")
    )
    assert not theirs.exists() and sorted(p for p in cache.rglob("*") if p.is_file()) == before
    typed = checkpoint_settings(RunConfig, str(folder), [f"data.cache.dir={cache}"])
    assert typed.data.cache.dir == str(cache), "what is typed is the user's"


def test_a_robot_checkpoint_names_no_class_no_file_and_no_thousand_processes(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "ck"
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "config.yaml").write_text(
        yaml.safe_dump(
            {
                "env": {
                    "suite": "evil:Sim",
                    "workers": 10**6,
                    "slots": 10**6,
                    "image_size": 10**6,
                    "options": {
                        "assets": "/home/user/secret",
                        "gl": "osmesa",
                        "robot": "http://evil/x",
                    },
                },
                "action": {"statistics": "/etc/passwd"},
                "demos": {"path": "/etc"},
                "data": {"cache": {"dir": "/tmp/x"}},
            }
        )
    )
    base = base_settings(str(folder), None, [])
    assert (
        base.env.options == {"gl": "osmesa"}
        and base.action.statistics is None
        and base.demos.path is None
    )
    assert (
        base.env.workers <= max(2, os.cpu_count() or 1)
        and base.env.slots <= 256
        and base.env.image_size <= 2048
    )
    assert base.data.cache.dir is None
    assert base_settings(str(folder), None, [], trust_code=True).action.statistics == "/etc/passwd"


BOMBS = {
    "aliases of aliases": "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
    "an alias of itself": "data: &d {train: [*d]}\n",
    "deep": "data: " + "[" * 5000 + "]" * 5000,
    "an integer of 10,000 digits": "seed: " + "9" * 10000,
    "a day that does not exist": "seed: 2024-99-99\n",
    "python": "seed: !!python/object/apply:os.system ['touch PWNED']\n",
    "bytes": "\0\0\0",
    "a list": "[1, 2]",
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow) if k == "deep" else k for k in BOMBS]
)
def test_a_hostile_configuration_is_an_error(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ck" / "trainer").mkdir(parents=True)
    (tmp_path / "ck" / "trainer" / "config.yaml").write_text(BOMBS[kind])
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        checkpoint_settings(RunConfig, "ck", [])
    assert not (tmp_path / "PWNED").exists()


def test_a_checkpoint_of_ppo_with_one_answer_per_prompt_can_be_evaluated(tmp_path: Path) -> None:
    trained = load_config(
        REPO / "configs" / "grounding.yaml",
        [
            "algorithm.advantage=gae",
            "algorithm.dynamic_sampling=false",
            "rollout.group_size=1",
            "rollout.max_new_tokens=9",
        ],
    )
    folder = tmp_path / "ck" / "trainer"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump(trained.model_dump(mode="json")), encoding="utf-8"
    )
    assert checkpoint_settings(RunConfig, str(folder.parent), []).rollout.max_new_tokens == 9


def test_a_large_configuration_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "config.yaml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="at most 4 MiB"):
        load_config(tmp_path / "config.yaml")


def _row(spec: str, params: Any, **changes: Any) -> dict[str, Any]:
    sample = {
        "id": "1",
        "task": "counting",
        "source": "s",
        "question": "red circles",
        "answer": 3,
        "images": ["1.png"],
        "videos": [],
        "params": {},
    }
    score = {
        "value": 1.0,
        "parsed": True,
        "reason": None,
        "parts": {},
        "weights": {},
        "metrics": {},
        "detail": {},
    }
    return {
        "task_spec": spec,
        "task_params": params,
        "sample": sample,
        "text": "<answer>3</answer>",
        "score": score,
        "mode": "greedy",
        "image_sizes": [{"orig_wh": [56, 56], "resized_wh": [56, 56]}],
        "frame": "abs_orig",
        "stop": "eos",
        "num_tokens": 3,
        "max_tokens": 9,
        **changes,
    }


@pytest.mark.slow
def test_score_runs_no_code_that_a_log_names(
    evil: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "rollouts.jsonl"
    for spec, params in (
        (f"{evil[0]}:T", {}),
        ("evil.py:T", {}),
        ("mixed", {"tasks": {f"{evil[0]}:T": {}}}),
    ):
        log.write_text(json.dumps(_row(spec, params)) + "\n", encoding="utf-8")
        with pytest.raises((RegistryError, ConfigError), match="--trust-code"):
            rescore(log)
        assert not evil[1].exists(), "the stranger's code ran"
    log.write_text(json.dumps(_row("evil.py:T", {})) + "\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["score", str(log), "--trust-code"])
    assert result.exit_code == 0 and evil[1].exists()
    assert rescore(log, "evil.py:T").rows[0].new.value == 1.0, "the user named it"


def test_code_that_is_loaded_is_not_loaded_again(evil: tuple[Path, Path]) -> None:
    with no_new_code("ck"), pytest.raises(RegistryError, match="--trust-code"):
        task_from_spec(f"{evil[0]}:T")
    task_from_spec(f"{evil[0]}:T")  # the user's own word
    with no_new_code("ck"):
        assert task_from_spec(f"{evil[0]}:T").name


def test_every_option_that_is_a_place_is_known_as_one() -> None:
    """Of the readers: those that open or write something where they are told to."""
    options = {
        p.name
        for name in READERS
        for p in inspect.signature(reader_of(name)).parameters.values()
        if str(p.annotation).startswith("str") and p.name not in ("path",)
    }
    places = {name for name in options if params_found({name: "x"}).left_out}
    assert places == {
        "image_root",
        "video_root",
        "audio_root",
        "media_dir",
        "subtitle_root",
        "durations",
    }
    words = {
        "frame",
        "on_error",
        "split",
        "split_by",
        "task",
        "encoding",
        "problem_key",
        "answer_key",
        "images_key",
        "videos_key",
        "dataset",
        "type_key",
        "ask",
        "language",
        "level",
        "subsplit",
        "part",
        "space",
        "source",
        "form",
    }
    assert options - places == words, (
        "a new option: is it a folder, a file or an address? Then its name says so: mmrl.config.trust"
    )


@pytest.mark.parametrize(
    "params",
    [{"shared": 3}, {"tasks": ["grounding"]}, {"tasks": {"grounding": "x"}}, {"shared": "{}"}],
)
def test_parameters_that_are_none_are_an_error_in_words(params: dict[str, Any]) -> None:
    """Of a checkpoint that was trained on several tasks; a traceback before."""
    config = RunConfig.model_validate(
        {"data": {"train": [{"task": "mixed", "path": "x", "params": params}]}}
    )
    with pytest.raises(
        ConfigError,
        match=r"expected parameters of task mixed in the checkpoint's settings, found .* --config",
    ):
        taught_params(config, "grounding")


@pytest.mark.parametrize(
    "value",
    [
        "/etc/passwd",
        "~/x",
        "~root/x",
        "http://x/y",
        "file:///etc",
        "a/../b",
        "../x",
        "C:\\x\\y",
        "\\\\h\\s",
    ],
)
def test_a_value_that_is_a_place_is_left_out_under_any_name(value: str) -> None:
    found = params_found({"prompt": value, "deep": [{"a": [value, "ok"]}]})
    assert found.kept == {"deep": [{"a": ["ok"]}]} and len(found.left_out) == 2


@pytest.mark.parametrize(
    "value",
    [
        "/no_think",
        "Answer yes/no. See http://x for more",
        "{question} ...",
        "a/b",
        "..",
        "qwen2_vl",
    ],
)
def test_words_stay(value: str) -> None:
    assert params_found({"prompt": value}).kept == {"prompt": value}


def test_long_and_deep_parameters_take_no_time_and_no_stack() -> None:
    nested: Any = "x"
    for _ in range(5000):
        nested = [nested]
    found = params_found({"a": nested, "b": "../" * 500_000 + " x", "c": {"d": 1}})
    assert found.kept["c"] == {"d": 1} and found.left_out


# What a model folder says to transformers: its `auto_map` is code, a pickle is code


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "from_pretrained"
        ):
            yield node


@pytest.mark.slow
def test_every_load_refuses_remote_code() -> None:
    """Left out, transformers asks on the terminal whether to run it."""
    calls = [
        (path.name, call)
        for folder in ("mmrl", "tasks", "video", "rewards")
        for path in (REPO / folder).rglob("*.py")
        for call in _calls(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert len(calls) > 8
    for name, call in calls:
        said = {k.arg: k.value for k in call.keywords}
        trust = said.get("trust_remote_code")
        assert isinstance(trust, ast.Constant) and trust.value is False, f"{name}:{call.lineno}"


@pytest.mark.parametrize(
    "file",
    ["config.json", "processor_config.json", "tokenizer_config.json", "preprocessor_config.json"],
)
def test_code_in_a_model_folder_does_not_run(file: str, model: Path, tmp_path: Path) -> None:
    from mmrl.policy.loading import load_policy

    folder, mark = tmp_path / "model", tmp_path / "PWNED"
    shutil.copytree(model, folder)
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w').write('x')\n")
    names = (
        "AutoConfig",
        "AutoModel",
        "AutoModelForImageTextToText",
        "AutoProcessor",
        "AutoImageProcessor",
        "AutoVideoProcessor",
    )
    settings = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(
        json.dumps(
            {
                **settings,
                "auto_map": {
                    **dict.fromkeys(names, "evil.X"),
                    "AutoTokenizer": ["evil.X", "evil.X"],
                },
            }
        )
    )
    with contextlib.suppress(MMRLError):  # refused is as good as ignored
        load_policy(load_config(None, [f"model.path={folder}"]).model, trainable=False)
    assert not mark.exists()


def test_pickled_weights_are_refused(model: Path, tmp_path: Path) -> None:
    from mmrl.policy.loading import load_policy

    folder, mark = tmp_path / "model", tmp_path / "PWNED"
    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {mark}",)

    torch.save({"x": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises((MMRLError, OSError), match="safetensors"):
        load_policy(load_config(None, [f"model.path={folder}"]).model, trainable=False)
    assert not mark.exists()


def test_built_in_tasks_need_no_trust() -> None:
    with no_new_code("ck"):
        for name in BUILT_IN:
            assert task_from_spec(name).name == name
