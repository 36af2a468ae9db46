"""Configuration: every recipe parses, every wrong key is named with what was meant, overrides reach everywhere."""
from __future__ import annotations

from pathlib import Path

import pytest

from mmrl.config import RunConfig, load_config, parse_overrides
from mmrl.errors import ConfigError

CONFIGS = sorted((Path(__file__).resolve().parents[1] / "configs").rglob("*.yaml"))
SMALL = """
data:
  train:
    - {task: grounding, path: a.jsonl}
    - {task: grounding, path: b.jsonl, weight: 2, params: {iou: {threshold: 0.5}}}
optim: {lr: 1e-4}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_recipe_parses_and_begins_with_its_command(path: Path) -> None:
    config = load_config(path)
    assert config.data.train, "a recipe trains on something"
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ") and any(word in first for word in ("mmrl ", "make ", "bash scripts/")), first


def test_there_are_recipes() -> None:
    assert CONFIGS


def test_resolved_configurations_parse_to_themselves(small: Path) -> None:
    config = load_config(small, ["model.lora.r=4", "model.frame=rel1000"])
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(("key", "meant"), [
    ("train.step", "steps"), ("optimm", "optim"), ("algorithm.kl.coeff", "coef"), ("model.lora.rank", "r"),
    ("data.train.0.pathh", "path"),
])
def test_unknown_keys_say_what_exists_and_what_was_meant(small: Path, key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(small, [f"{key}=5"])
    message = str(error.value)
    assert f"unknown key '{key}'" in message
    known = message.partition("Known here: ")[2].replace("\n", ", ").split(", ")
    assert meant in known
    assert meant == "r" or f"Did you mean '{meant}'?" in message


def test_every_problem_is_listed_at_once(small: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(small, ["train.steps=0", "optim.lr=fast", "rollout.group=4", "reward.workers=-1"])
    message = str(error.value)
    assert "4 problem(s)" in message
    assert all(key in message for key in ("train.steps", "optim.lr", "rollout.group", "reward.workers"))
    assert "found 'fast'" in message and "small.yaml" in message


def test_overrides_reach_lists_and_nested_sections(small: Path) -> None:
    config = load_config(small, ["data.train.1.limit=9", "data.train.1.params.iou.threshold=0.7", "train.steps=3"])
    assert [s.limit for s in config.data.train] == [None, 9]
    assert config.data.train[1].params == {"iou": {"threshold": 0.7}} and config.data.train[1].weight == 2
    assert config.data.train[0].path == "a.jsonl" and config.train.steps == 3


@pytest.mark.parametrize(("text", "value"), [
    ("1e-4", 1e-4), ("-2E3", -2000.0), ("null", None), ("[1, 2]", [1, 2]), ("true", True), ("0.5", 0.5), ("a=b", "a=b"),
    ("{a: 1}", {"a": 1}), ("", None), ("1e-4x", "1e-4x"), ("nan", "nan"), ("infinity", "infinity"), ("1.2.3", "1.2.3"),
])
def test_override_values_are_yaml_with_numbers_like_1e_4(text: str, value: object) -> None:
    assert parse_overrides([f"a.b={text}"]) == {"a": {"b": value}}


def test_numbers_like_1e_4_in_files_are_numbers_and_names_stay_names(small: Path) -> None:
    config = load_config(small, ["name=infinity"])
    assert config.optim.lr == 1e-4 and config.name == "infinity"


@pytest.mark.parametrize("override", ["train.steps", "=5", "train.steps=[", "data.train.7.limit=3"])
def test_malformed_overrides_are_refused(small: Path, override: str) -> None:
    with pytest.raises(ConfigError):
        load_config(small, [override])


def test_an_override_below_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="another override set to a value"):
        parse_overrides(["train=5", "train.steps=3"])


@pytest.mark.parametrize("content", [b"a: [", b"- 1\n- 2\n", b"\xff\xfe\x00bad"])
def test_files_that_are_no_mapping_in_yaml_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_config(path)
    with pytest.raises(ConfigError, match="expected a configuration file"):
        load_config(tmp_path / "missing.yaml")


@pytest.mark.parametrize(("overrides", "words"), [
    (["rollout.group_size=1"], "group of one"), (["algorithm.minibatches=99"], "prompts_per_step"),
    (["algorithm.overlong=soft"], "overlong_buffer"),
])
def test_settings_that_contradict_each_other_are_refused(small: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(small, overrides)
