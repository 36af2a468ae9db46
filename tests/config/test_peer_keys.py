"""Keys of TRL, EasyR1, verl and LeRobot: the tables name what those programs have, each leads to a key of mmrl, and errors say it.

TRL is installed and asked itself; of the others the names were read from their own files (tests/peer_config_keys.json says which).
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import pytest
import yaml

from mmrl.config import RunConfig, load_config
from mmrl.config.peers import PEERS, peer_hint
from mmrl.config.reference import explain
from mmrl.errors import ConfigError
from tests.docs.test_documented_settings import accepts, field_of

RECORDED = json.loads((Path(__file__).parent / "peer_config_keys.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("peer", ["EasyR1", "verl", "LeRobot"])
def test_the_peers_own_files_have_these_keys(peer: str) -> None:
    assert set(PEERS[peer]) <= set(RECORDED[peer]["keys"])
    assert len(RECORDED[peer]["commit"]) == 40 and len(PEERS[peer]) > 15


@pytest.mark.slow  # imports TRL
def test_trl_has_these_names_and_each_of_its_own_settings_was_looked_at() -> None:
    trl = pytest.importorskip("trl")
    from transformers import TrainingArguments

    own = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    arguments = set(inspect.signature(trl.GRPOTrainer.__init__).parameters)
    assert set(PEERS["TRL"]) <= own | arguments
    of_grpo = own - {field.name for field in dataclasses.fields(TrainingArguments)}
    assert len(of_grpo) > 60 and len(of_grpo & set(PEERS["TRL"])) > 30
    for name in sorted(of_grpo & set(PEERS["TRL"])):
        with pytest.raises(ConfigError) as found:
            load_config(None, [f"{name}=1"])
        assert PEERS["TRL"][name].key in str(found.value), name


@pytest.mark.slow  # imports TRL
def test_defaults_that_the_page_compares() -> None:
    trl = pytest.importorskip("trl")
    theirs = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    ours = load_config()
    assert theirs["beta"] == ours.algorithm.kl.coef == 0
    assert theirs["learning_rate"] == ours.optim.lr == 1e-6
    assert theirs["num_generations"] == ours.rollout.group_size == 8
    assert (theirs["loss_type"], ours.algorithm.loss_aggregation) == ("dapo", "token_mean")
    assert theirs["epsilon"] == ours.algorithm.clip_low == 0.2
    assert (theirs["epsilon_high"], ours.algorithm.clip_high) == (None, 0.28)
    assert (theirs["max_completion_length"], ours.rollout.max_new_tokens) == (512, 64)


def test_every_key_that_they_lead_to_is_one() -> None:
    for peer, keys in PEERS.items():
        for theirs, ours in keys.items():
            assert field_of(ours.key) is not None, (peer, theirs, ours.key)


def test_values_in_backticks_are_accepted_by_the_key() -> None:
    """`grpo: \\`sequence_mean\\``: whatever the table offers as a value can be set."""
    seen = 0
    for peer, keys in PEERS.items():
        for theirs, ours in keys.items():
            for value in ours.values.split("`")[1::2]:
                if not value.startswith(("file.py", "prompt")):
                    assert accepts(ours.key, value), (peer, theirs, value)
                    seen += 1
    assert seen > 40 and not accepts("algorithm.loss_aggregation", "grpo")


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("num_generations=4", "TRL's num_generations is rollout.group_size here."),
        ("optim.learning_rate=1e-6", "TRL's learning_rate is optim.lr here."),
        ("algorithm.kl_coef=0.01", "EasyR1's algorithm.kl_coef is algorithm.kl.coef here."),
        (
            "report_to=wandb",
            "TRL's report_to is train.wandb here (true; also train.tensorboard, train.trackio).",
        ),
        (
            "rollout.max_completion_length=9",
            "TRL's max_completion_length is rollout.max_new_tokens",
        ),
        ("actor_rollout_ref.rollout.n=5", ""),
        ("worker.rollout.n=5", ""),
        ("algorithm.beta=0.1", "TRL's beta is algorithm.kl.coef here."),
        ("optim.lrr=1", "Did you mean 'lr'?"),
    ],
)
def test_an_unknown_key_is_translated(override: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as found:
        load_config(None, [override])
    assert wanted in str(found.value)


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("trian.steps=3", "unknown key 'trian'. Did you mean 'train'?"),
        ("modell.path=x", "unknown key 'modell'. Did you mean 'model'?"),
        ("data.vidoe.fps=2", "unknown key 'data.vidoe'. Did you mean 'video'?"),
        ("trainer.max_steps=3", "unknown key 'trainer'. EasyR1's trainer.max_steps is"),
        (
            "algorithm.kl_ctrl.kl_coef=0",
            "unknown key 'algorithm.kl_ctrl'. verl's algorithm.kl_ctrl",
        ),
        ("nobodys.num_generations=4", "unknown key 'nobodys'. TRL's num_generations is"),
    ],
)
def test_a_misspelt_section_is_told_before_what_its_keys_are_elsewhere(
    override: str, wanted: str
) -> None:
    with pytest.raises(ConfigError) as found:
        load_config(None, [override])
    assert wanted in str(found.value)


def test_a_whole_path_of_verl_and_words_that_are_nobodys() -> None:
    assert peer_hint("actor_rollout_ref.rollout.n") == (
        " verl's actor_rollout_ref.rollout.n is rollout.group_size here."
    )
    assert peer_hint("nobodys") == ""
    with pytest.raises(ConfigError, match=r"TRL's num_generations is rollout\.group_size here"):
        explain(RunConfig, "num_generations")


def test_a_value_of_the_table_can_be_loaded() -> None:
    loaded = load_config(None, ["algorithm.advantage_scale=batch_rewards", "model.freeze=[vision]"])
    assert yaml.safe_load("[vision]") == loaded.model.freeze


@pytest.mark.parametrize("peer", PEERS)
def test_every_key_of_the_tables_is_translated_as_an_override(peer: str) -> None:
    """Also below a section that mmrl does not have; keys that mmrl has itself mean what they mean here."""
    for theirs, ours in PEERS[peer].items():
        try:
            load_config("configs/grounding.yaml", [f"{theirs}=1"])
        except ConfigError as error:
            same_name = theirs.partition(".")[0] in RunConfig.model_fields
            assert ours.key in str(error) or same_name, (theirs, str(error))
