"""Overrides of `mmrl eval` on simulated tasks: what they change is named with the result, what they cannot change is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from mmrl.cli.evaluation import suites_command
from mmrl.errors import ConfigError, MissingExtraError
from mmrl.evaluation.suite_book import load_suites
from mmrl.robotics.config import EmbodiedConfig, load_embodied
from mmrl.robotics.protocols import Protocol
from mmrl.robotics.suite_runs import base_settings
from mmrl.robotics.suite_table import suite_row
from mmrl.robotics.suites import EnvironmentSuite, configure
from tests.kits.robot_kit import make_model, make_vla

TINY = [
    "env.image_size=32",
    "env.horizon=8",
    "env.slots=4",
    "env.workers=1",
    "model.device=cpu",
    "threads=1",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved policy with a vla.json, untrained."""
    folder = tmp_path_factory.mktemp("vla")
    make_vla(make_model(folder / "backbone"), trainable=False).save(folder / "policy")
    return folder / "policy"


def base_of(checkpoint: Path, *overrides: str) -> EmbodiedConfig:
    return load_embodied(None, [f"model.path={checkpoint}", *overrides])


OVER_RLINF = {
    "max_steps": ("env.horizon=50", "env.horizon 50 instead of 512"),
    "trials": ("eval_states=5", "5 trials instead of 50"),
    "wait_steps": ("env.options.wait_steps=3", "env.options.wait_steps 3 instead of 15"),
    "wait_gripper": (
        "env.options.settle_gripper=1.0",
        "env.options.settle_gripper 1.0 instead of 0.0",
    ),
    "seed": ("seed=5", "seed 5 instead of 0"),
    "env_seed": ("env.options.env_seed=9", "env.options.env_seed 9 instead of 0"),
    "env_draws": (
        "env.options.env_draws=in-turn",
        "env.options.env_draws in-turn instead of constant",
    ),
    "image_size": ("env.image_size=128", "env.image_size 128 instead of 256"),
    "temperature": ("rollout.temperature=0.3", "rollout.temperature 0.3 instead of 1.6"),
    "chunk": ("action.chunk=3", None),
    "replan": ("action.chunk=3", None),
    "gripper": ("action.gripper=raw", None),
}
"""By field of Protocol: an override that changes it, and the deviation it is listed as (None: refused, it is the policy's)."""
# no override reaches these
FIXED = {"name", "source", "rotate", "image", "training_states", "success"}


def test_every_field_of_a_protocol_is_listed_or_out_of_reach() -> None:
    assert {f.name for f in fields(Protocol)} == FIXED | set(OVER_RLINF)


@pytest.mark.parametrize("field", list(OVER_RLINF))
def test_no_override_of_a_protocol_is_called_comparable(checkpoint: Path, field: str) -> None:
    pytest.importorskip("robosuite")
    override, said = OVER_RLINF[field]
    suite, base = load_suites().suites["libero_spatial"], base_of(checkpoint, override)
    try:
        plain = configure(base_of(checkpoint), suite, protocol="rlinf")
    except MissingExtraError as error:
        pytest.skip(f"LIBERO is not here: {error}")
    if said is None:
        with pytest.raises(ConfigError, match="expected the policy's own action settings"):
            configure(base, suite, protocol="rlinf", overrides=[override])
        return
    setting = configure(base, suite, protocol="rlinf", overrides=[override])
    assert set(setting.deviations) - set(plain.deviations) == {said}
    estimate = {"mean": 0.5, "low": 0.4, "high": 0.6, "n": setting.config.eval_states}
    results = {
        "protocol": {
            "name": "rlinf",
            "states": "",
            "assets": "official",
            "render": "",
            "simulator": {},
        },
        "per_task": {},
        "sampled": {"success_once": estimate, "success_at_end": estimate},
        "failed_attempts": [],
        "failures": {},
    }
    # the tiny policy executes every action twice, which is a deviation of its own
    clean = replace(plain, deviations=())
    assert suite_row("x", suite, clean, results, None).official
    assert not suite_row("x", suite, replace(setting, deviations=(said,)), results, None).official


def test_sampling_otherwise_than_the_protocol_is_listed_in_every_simulator(
    checkpoint: Path,
) -> None:
    suite, given = (
        EnvironmentSuite(env="tiny", tasks=["push"], horizon=33),
        ["rollout.temperature=0.3", "seed=5"],
    )
    sampled = configure(base_of(checkpoint, *given), suite, protocol="rlinf", overrides=given)
    assert sampled.deviations == ("rollout.temperature 0.3 instead of 1.6", "seed 5 instead of 0")
    assert (sampled.config.rollout.temperature, sampled.config.seed) == (0.3, 5)
    greedy = configure(base_of(checkpoint, *given), suite, protocol="openvla_oft", overrides=given)
    assert greedy.deviations == ("seed 5 instead of 7",), (
        "nothing is sampled in the headline of a greedy protocol"
    )
    assert configure(base_of(checkpoint, *given), suite, overrides=given).deviations == ()


# what the command line may not say, and what is otherwise than the suite


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "env.suite=maniskill",
            r"expected the simulator of --suite \(tiny\), found the override env\.suite=maniskill: remove it, or",
        ),
        (
            "env.cameras=[wrist]",
            r"expected the cameras that .*policy sees through, \[base\], found .*env\.cameras=\['wrist'\]: remove",
        ),
        (
            "env.cameras=[base, wrist]",
            r"expected the cameras that .* found the override env\.cameras",
        ),
        ("env={suite: maniskill}", r"found the override env\.suite=maniskill"),
        (
            "action.chunk=3",
            r"expected the policy's own action settings, found the override action\.chunk=3: .* remove",
        ),
        (
            "vla.decode=autoregressive",
            r"expected the policy's own vla settings, found the override vla\.decode=autoregressive",
        ),
        ("vla={proprio: true}", r"found the override vla=\{proprio: true\}"),
    ],
)
def test_overrides_that_are_not_for_an_evaluation_are_refused(
    checkpoint: Path, tmp_path: Path, override: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        suites_command(
            str(checkpoint),
            "tiny_reach",
            None,
            Path("data"),
            tmp_path,
            None,
            [*TINY, override],
            0,
            1,
        )
    assert len(str(error.value)) < 450 and not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=said):
        configure(base_of(checkpoint), load_suites().suites["tiny_reach"], overrides=[override])


def test_an_override_that_says_the_same_is_no_mistake_and_changes_nothing(checkpoint: Path) -> None:
    chosen = load_suites().select("tiny_reach")
    same = ["env.suite=tiny", "env.cameras=[base]"]
    found = configure(
        base_settings(str(checkpoint), None, same, chosen), chosen["tiny_reach"], overrides=same
    )
    plain = configure(base_settings(str(checkpoint), None, [], chosen), chosen["tiny_reach"])
    assert found.config.env == plain.config.env


def test_the_checkpoints_own_simulator_decides_what_is_kept(
    checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "trained.yaml"
    file.write_text(
        "env: {suite: tiny, image_size: 48, options: {discs: 1, apart: [0.9, 1.1]}, slots: 3}\n",
        encoding="utf-8",
    )
    given, chosen = (
        ["env.image_size=40", "env.options.tolerance=0.2", "seed=9"],
        load_suites().select("tiny_reach"),
    )
    base = base_settings(str(checkpoint), file, given, chosen)
    assert (base.env.image_size, base.env.options, base.seed) == (
        48,
        {"discs": 1, "apart": [0.9, 1.1]},
        9,
    )
    setting = configure(base, chosen["tiny_reach"], overrides=given)
    env = setting.config.env
    assert (env.image_size, env.slots, env.options) == (
        40,
        3,
        {"discs": 1, "apart": [0.9, 1.1], "tolerance": 0.2},
    )
    assert setting.changes == (
        "image_size 40 instead of 64",
        "options.discs 1",
        "options.apart [0.9, 1.1]",
        "options.tolerance 0.2",
    )
    assert configure(base_of(checkpoint), chosen["tiny_reach"]).changes == ()
    with pytest.raises(
        ConfigError, match=r"trained\.yaml with the overrides: .*\n  unknown key 'env\.slot'"
    ):
        base_settings(str(checkpoint), file, ["env.slot=3"], chosen)
