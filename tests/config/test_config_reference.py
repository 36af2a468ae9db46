"""Every key of a configuration says what it is: in the code, on the command line and on the page."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from mmrl.cli.main import app
from mmrl.config import RunConfig, load_config, parse_overrides
from mmrl.config.reference import Key, explain, places
from mmrl.errors import ConfigError
from mmrl.robotics.config import EmbodiedConfig
from scripts import config_reference

MODELS = [RunConfig, EmbodiedConfig]


def every_key(model: Any) -> list[Key]:
    return [key for place in places(model) for key in place.values()]


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted names and values of a dumped configuration; what hangs below a mapping without fixed keys is one value."""
    if (
        not isinstance(tree, dict)
        or not tree
        or prefix.endswith((".options.", ".environment.", ".params."))
    ):
        return {prefix[:-1]: tree}
    return {
        name: value
        for key, inner in tree.items()
        for name, value in leaves(inner, f"{prefix}{key}.").items()
    }


@pytest.mark.parametrize("model", MODELS)
def test_every_key_has_a_description(model: Any) -> None:
    assert not [
        key.name
        for key in every_key(model)
        if len(key.description) < 10 or not key.description.endswith((".", "..."))
    ]
    assert not [place.name for place in places(model) if len(place.about) < 10]


@pytest.mark.parametrize("model", MODELS)
def test_the_defaults_are_those_of_a_run_that_sets_nothing(model: Any) -> None:
    """The second party: the configuration itself, dumped as `mmrl config` prints it."""
    said = {
        key.name: parse_overrides([f"x={key.default}"])["x"]
        for key in every_key(model)
        if key.default is not None and "[]" not in key.name
    }
    real = leaves(model().model_dump(mode="json"))
    left_out = {"model.lora", "data.train", "data.eval", "data.curriculum"}
    assert real.keys() - said.keys() == left_out, "every value has a key"
    assert {name: said[name] for name in real.keys() - left_out} == {
        name: real[name] for name in real.keys() - left_out
    }


def test_bounds_are_the_ones_that_are_checked() -> None:
    """A value just outside is refused."""
    checked = 0
    for key in every_key(RunConfig):
        if (
            "[]" in key.name
            or not key.bounds.startswith((">= ", "> "))
            or key.name.startswith("model.lora")
        ):
            continue
        sign, number = key.bounds.split(" and ")[0].replace(",", "").split()
        outside = float(number) - (1 if sign == ">=" else 0)
        with pytest.raises(ConfigError, match=key.name.replace(".", r"\.")):
            load_config(None, [f"{key.name}={outside:g}"])
        checked += 1
    assert checked > 60


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("algorithm.clip_high", ["algorithm.clip_high", "number, >= 0; default: 0.28", "DAPO"]),
        ("data.train.0.weight", ["data.train[].weight", "> 0", "default: 1.0"]),
        ("data.train[].task", ["must be given"]),
        (
            "algorithm.kl",
            ["KL penalty", "algorithm.kl.coef", "algorithm.kl.estimator", "one of k2, k3"],
        ),
        ("model", ["model.path", "model.lora: a section"]),
        ("model.lora", ["Left out by default (null)", "default: [q_proj"]),
        ("data.selection", ["`selection: variance` for short"]),
    ],
)
def test_explain_says_what_a_key_is(name: str, expected: list[str]) -> None:
    done = CliRunner().invoke(app, ["config", "--explain", name])
    assert done.exit_code == 0, done.output
    assert not [text for text in expected if text not in done.output], done.output


def test_explain_knows_the_keys_of_robots_and_their_defaults() -> None:
    assert "default: 16" in CliRunner().invoke(app, ["config", "--explain", "env.slots"]).output
    assert "default: 0.0005" in explain(EmbodiedConfig, "demos.optim.lr"), (
        "cloning has a rate of its own"
    )
    of_robots = (
        CliRunner()
        .invoke(app, ["config", "configs/robot_tiny.yaml", "--explain", "schedule.timeline"])
        .output
    )
    assert "default: 20" in of_robots
    assert "default: 0;" not in of_robots and "default: 0\n" in explain(
        RunConfig, "schedule.timeline"
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("clip_high", "algorithm.clip_high"),
        ("algoritm.kl", "algorithm.kl"),
        ("clip", "algorithm.clip_low"),
        ("nothing.like.it", "sections: alarms, algorithm"),
    ],
)
def test_an_unknown_key_gets_a_hint(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint.replace(".", r"\.")):
        explain(RunConfig, name)


def test_the_schema_describes_every_key() -> None:
    schema = json.loads(CliRunner().invoke(app, ["config", "--schema"]).output)
    assert (
        "clip-higher"
        in schema["$defs"]["AlgorithmConfig"]["properties"]["clip_high"]["description"]
    )
    robots = json.loads(
        CliRunner().invoke(app, ["config", "configs/robot_tiny.yaml", "--schema"]).output
    )
    assert "env" in robots["properties"] and "env" not in schema["properties"]


def test_the_page_is_the_code() -> None:
    assert config_reference.main(["--check"]) == 0, "python -m scripts.config_reference"
    text = config_reference.PAGE.read_text(encoding="utf-8")
    missing = [
        key.name for model in MODELS for key in every_key(model) if f"`{key.name}`" not in text
    ]
    assert not missing


def test_without_a_file_nothing_can_be_resolved() -> None:
    done = CliRunner().invoke(app, ["config"])
    assert isinstance(done.exception, ConfigError) and "--explain KEY" in str(done.exception)
