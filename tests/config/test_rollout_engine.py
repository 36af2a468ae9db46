"""What engine.rollout auto takes, asked in interpreters that have this or that vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from mmrl.config import load_config, rollout_engine, with_choice
from mmrl.errors import ConfigError
from mmrl.robotics.config import EmbodiedConfig
from tests.kits.engine_kit import ENVIRONMENT, REPO, tiny_folder

_ASK = """
import sys
from mmrl.config import load_config, rollout_engine
found = rollout_engine(load_config(None, sys.argv[2:]), sys.argv[1])
print(found.name, found.why, sep="|")
"""


def asked(site: Path, kind: str, *overrides: str) -> str:
    """`own|why` or `vllm|why`, of an interpreter that finds the packages of `site` before all others."""
    path = f"{site}:{ENVIRONMENT.get('PYTHONPATH', REPO)}"
    done = subprocess.run(
        [sys.executable, "-c", _ASK, kind, f"model.path={tiny_folder()}", *overrides],
        cwd=REPO,
        env={**ENVIRONMENT, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def installed(folder: Path, version: str, code: str = "") -> Path:
    """A folder with a distribution `vllm`, whose module runs `code`."""
    about = folder / f"vllm-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text(code)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "code", "kind", "overrides", "expected"),
    [
        ("0.32.1", "", "cuda", (), "vllm|vLLM 0.32.1 is installed and there is a GPU"),
        ("0.32.1", "", "cpu", (), "own|the run is not on a GPU"),
        ("0.33.0", "", "cuda", (), "own|vLLM 0.33.0 is installed, 0.32 was tried"),
        (
            "0.32.1",
            "raise OSError('undefined symbol')",
            "cuda",
            (),
            "own|vLLM 0.32.1 cannot be imported (OSError: undefined symbol)",
        ),
        ("0.32.1", "", "cuda", ("rollout.top_p=0.9",), "own|rollout.top_p 0.9 and top_k 0"),
        ("0.32.1", "", "cuda", ("rollout.temperature=2.5",), "own|vLLM samples at temperatures"),
        (
            "0.32.1",
            "",
            "cuda",
            ("engine.workers=ray", "engine.ray.rollout_actors=2"),
            "own|engine.ray.gpus_per_rollout_actor must be between",
        ),
    ],
)
def test_auto_takes_vllm_where_it_can_do_the_run(
    version: str, code: str, kind: str, overrides: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    found = asked(installed(tmp_path, version, code), kind, *overrides)
    assert found.startswith(expected), found


def test_auto_keeps_what_it_cannot_use_and_a_choice_stands(tmp_path: Path) -> None:
    here = rollout_engine(load_config(None, [f"model.path={tiny_folder()}"]), "cuda")
    assert here.name == "own", f"vLLM for the CPU, or none: {here.why}"
    other = rollout_engine(load_config(None, [f"model.path={tmp_path}"]), "cuda")
    assert other.name == "own" and "cannot be read before it is loaded" in other.why
    for chosen in ("own", "vllm"):
        config = load_config(None, [f"engine.rollout={chosen}"])
        assert rollout_engine(config, "cpu").name == rollout_engine(config, "cuda").name == chosen
        assert with_choice(config, here) is config
    served = load_config(None, ["engine.vllm.mode=server", "engine.vllm.url=http://there:1"])
    assert rollout_engine(served, "cpu").name == "vllm", "who names a server wants its answers"
    assert with_choice(served, rollout_engine(served, "cpu")).engine.rollout == "vllm"
    with pytest.raises(ConfigError, match="expected one place for vLLM, found two"):
        load_config(
            None,
            [
                "engine.vllm.mode=server",
                "engine.vllm.url=http://there:1",
                "engine.workers=ray",
                "engine.ray.rollout_actors=1",
            ],
        )


def test_auto_leaves_models_that_vllm_would_not_sample_for_as_they_are(tmp_path: Path) -> None:
    """Those whose settings it does not heed, and mixtures, which it lays out anew for each kind of GPU."""
    config = {"model_type": "llava_onevision", "vision_aspect_ratio": "anyres_max_4"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    path = [f"model.path={tmp_path}"]
    found = rollout_engine(load_config(None, path), "cuda")
    assert (
        found.name == "own"
        and f"anyres_max_9 for granted, {tmp_path} has anyres_max_4" in found.why
    )
    for known in (
        "llava_onevision",
        "internvl",
    ):  # the ratio of released checkpoints is the usual one
        (tmp_path / "config.json").write_text(json.dumps({"model_type": known}), encoding="utf-8")
        assert "installed" in rollout_engine(load_config(None, path), "cuda").why
    for mixture in ("qwen3_vl_moe", "glm4v_moe"):
        found = rollout_engine(load_config(None, path), "cuda", mixture)
        assert found.name == "own" and "a mixture's experts" in found.why
        chosen = load_config(None, [*path, "engine.rollout=vllm"])
        assert rollout_engine(chosen, "cuda", mixture).name == "vllm"


def test_a_policy_that_acts_has_no_engine_to_choose() -> None:
    config = EmbodiedConfig()
    choice = rollout_engine(config, "cuda")
    assert choice.name == "own" and "its own forward pass" in choice.why
    assert with_choice(config, choice) is config
    old = EmbodiedConfig.model_validate({"engine": {"rollout": "own"}})
    assert old.engine.rollout == "own", "the config.yaml of a run that was made before"


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_auto_knows_what_sleep_mode_is_refused_under(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def why(*overrides: str) -> str:
        config = load_config(None, [f"model.path={tiny_folder()}", *overrides])
        return rollout_engine(config, "cuda").why

    monkeypatch.setenv(variable, "max_split_size_mb:64,expandable_segments:True")
    assert "sleep mode (engine.vllm.sleep)" in why()
    assert "sleep mode" not in why("engine.vllm.sleep=false")
    monkeypatch.setenv(variable, "expandable_segments:False")
    assert "sleep mode" not in why()


def test_auto_decides_for_the_device_of_a_generator_process() -> None:
    def why(device: str, kind: Literal["cuda", "cpu"]) -> str:
        given = ["engine.generator.kind=process", f"engine.generator.device={device}"]
        config = load_config(None, [f"model.path={tiny_folder()}", *given])
        return rollout_engine(config, kind).why

    assert why("cpu", "cuda") == "the run is not on a GPU"
    assert "not on a GPU" not in why("cuda:1", "cpu")
    assert "not on a GPU" not in why("null", "cuda")


@pytest.mark.parametrize("graphs", ["true", "false"])
def test_cuda_graphs_are_the_own_engines(graphs: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.cuda_graphs .* of mmrl's own"):
        load_config(None, ["engine.rollout=vllm", f"engine.cuda_graphs={graphs}"])
    chosen = rollout_engine(
        load_config(None, [f"model.path={tiny_folder()}", f"engine.cuda_graphs={graphs}"]), "cuda"
    )
    assert (chosen.name, chosen.why) == ("own", "engine.cuda_graphs is of mmrl's own engine")
