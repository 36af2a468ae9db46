"""Configuration: every recipe parses, every wrong key is named with what was meant, overrides reach everywhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.cli.run import is_embodied, run_config
from mmrl.config import RunConfig, effective_threads, load_config, parse_overrides
from mmrl.config.trust import checkpoint_settings
from mmrl.errors import ConfigError
from mmrl.training.identity import check_identity, run_identity

CONFIGS = sorted(
    p
    for p in (Path(__file__).resolve().parents[2] / "configs").glob("*.yaml")
    if not p.name.endswith("suites.yaml")
)
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
    config = run_config(path, [])
    assert config.data.train or is_embodied(path), "a recipe trains on something"
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ") and any(
        word in first for word in ("mmrl ", "make ", "bash scripts/")
    ), first


def test_there_are_recipes() -> None:
    assert CONFIGS


def test_resolved_configurations_parse_to_themselves(small: Path) -> None:
    config = load_config(small, ["model.lora.r=4", "model.frame=rel1000"])
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.step", "steps"),
        ("optimm", "optim"),
        ("algorithm.kl.coeff", "coef"),
        ("model.lora.rank", "r"),
        ("data.train.0.pathh", "path"),
    ],
)
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
        load_config(
            small, ["train.steps=0", "optim.lr=fast", "rollout.group=4", "reward.workers=-1"]
        )
    message = str(error.value)
    assert "4 problem(s)" in message
    assert all(
        key in message for key in ("train.steps", "optim.lr", "rollout.group", "reward.workers")
    )
    assert "found 'fast'" in message and "small.yaml" in message


def test_overrides_reach_lists_and_nested_sections(small: Path) -> None:
    config = load_config(
        small, ["data.train.1.limit=9", "data.train.1.params.iou.threshold=0.7", "train.steps=3"]
    )
    assert [s.limit for s in config.data.train] == [None, 9]
    assert (
        config.data.train[1].params == {"iou": {"threshold": 0.7}}
        and config.data.train[1].weight == 2
    )
    assert config.data.train[0].path == "a.jsonl" and config.train.steps == 3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("-2E3", -2000.0),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ("true", True),
        ("0.5", 0.5),
        ("a=b", "a=b"),
        ("{a: 1}", {"a": 1}),
        ("", None),
        ("1e-4x", "1e-4x"),
        ("nan", "nan"),
        ("infinity", "infinity"),
        ("1.2.3", "1.2.3"),
        ("'1e-4'", "1e-4"),
        ("{}", {}),
        ("{a: {b: [1]}}", {"a": {"b": [1]}}),
    ],
)
def test_override_values_are_yaml_with_numbers_like_1e_4(text: str, value: object) -> None:
    assert parse_overrides([f"a.b={text}"]) == {"a": {"b": value}}


@pytest.mark.parametrize(
    "text",
    [
        "Answer #1 first",
        "# a heading",
        "5 # five",
        "{question}",
        "{question} Answer in {lang}.",
        "Choose: {a} or {b}",
        "a: b",
        "- a",
        "*a",
        "@a",
        "'tis so",
        '"A" #1',
        "2024-01-01",
        "0b_",
        "1\n# 2",
    ],
)
def test_the_text_of_an_override_is_taken_as_it_stands(text: str) -> None:
    assert parse_overrides([f"a.b= {text} "]) == {"a": {"b": text}}


@pytest.mark.parametrize("text", ["{a: 1", "[a] or [b]", "{a: 1, a: 2}", "[2024-13-45]"])
def test_a_broken_list_or_mapping_of_an_override_says_how_to_mend_it(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected a list .*, or text in quotes .*, found"):
        parse_overrides([f"a.b={text}"])


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


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.group_size=1"], "group of one"),
        (["algorithm.minibatches=99"], "prompts_per_step"),
        (["algorithm.overlong=soft"], "overlong_buffer"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    small: Path, overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(small, overrides)


def test_a_rule_of_a_whole_section_does_not_print_the_section(small: Path) -> None:
    from mmrl.robotics.config import load_embodied

    file = small.parent / "robot.yaml"
    file.write_text("env: {suite: tiny, options: {marker: 12345}}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_embodied(file, ["env.cameras=[wrist]"])
    message = str(error.value)
    assert "robot.yaml with the overrides: 1 problem(s)" in message, (
        "the file alone is not to blame"
    )
    assert (
        message.endswith("vla.cameras needs base, which env.cameras (wrist) does not render")
        and "12345" not in message
    )
    with pytest.raises(ConfigError, match=r"data\.train\.0\.task: Field required$"):
        load_config(None, ["data.train=[{path: a.jsonl}]"])
    file.write_text("env: {cameras: [wrist]}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"robot\.yaml: 1 problem"):
        load_embodied(file)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("eval.limit=0", "eval.limit"),
        ("data.min_pixels=0", "data.min_pixels"),
        ("data.max_pixels=-1", "data.max_pixels"),
        ("seed=-1", "seed"),
        ("data.train.0.limit=0", "data.train.0.limit"),
        ("threads=0", "threads"),
        ("model.lora.seed=-1", "model.lora.seed"),
    ],
)
def test_numbers_out_of_range_are_refused_on_load_by_name(
    small: Path, override: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{words}: .*greater than or equal"):
        load_config(small, [override])


def test_the_pixel_budget_must_leave_room(small: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.min_pixels \(9000\) cannot exceed data\.max_pixels \(8999\)"
    ):
        load_config(small, ["data.min_pixels=9000", "data.max_pixels=8999"])
    assert (
        load_config(small, ["data.min_pixels=9000", "data.max_pixels=9000"]).data.max_pixels == 9000
    )


@pytest.mark.parametrize("scale", ["std", "none"])
def test_a_group_of_one_is_refused_whatever_the_advantage(small: Path, scale: str) -> None:
    with pytest.raises(ConfigError, match=r"at least 2: a group of one .* never has signal"):
        load_config(small, ["rollout.group_size=1", f"algorithm.advantage_scale={scale}"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.clip_low=0", r"clip_low in \(0, 1\], found 0"),
        ("algorithm.clip_low=1.5", "clip_low"),
        ("algorithm.clip_high=0", "clip_high above 0"),
        ("algorithm.dual_clip=1.1", r"dual_clip above 1 \+ clip_high"),
    ],
)
def test_rules_of_the_loss_are_kept_on_load(small: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"small\.yaml(?s:.)*{words}"):
        load_config(small, [override])


def test_a_critic_is_of_advantage_gae(small: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"algorithm\.critic\.gamma, warmup: only advantage gae has a critic, found rloo",
    ):
        load_config(
            small,
            [
                "algorithm.advantage=rloo",
                "algorithm.advantage_scale=none",
                "algorithm.critic={gamma: 0.9, warmup: 1}",
            ],
        )
    assert load_config(small, ["algorithm.critic.level=turn"]).algorithm.critic.level == "turn", (
        "at its default it says nothing"
    )
    gae = "algorithm.advantage=gae"
    usual = load_config(small, [gae, "rollout.group_size=1"]).algorithm
    assert (usual.advantage_scale, usual.dynamic_sampling) == ("batch", False)
    assert (usual.critic.level, usual.critic.gamma, usual.critic.lr, usual.critic.bootstrap) == (
        "token",
        1.0,
        1e-3,
        "never",
    )
    kept = load_config(
        small, [gae, "algorithm.critic.lr=null", "algorithm.critic.gamma=0.9"]
    ).algorithm.critic
    assert (kept.level, kept.gamma, kept.lr) == ("token", 0.9, None), "what is given stays"
    whole = load_config(small, [gae, "algorithm.critic.level=turn"])
    assert RunConfig.model_validate(whole.model_dump(mode="json")) == whole, (
        "the file that a run writes names every key"
    )
    with pytest.raises(ConfigError, match="group_size must be at least 2"):
        load_config(small, ["rollout.group_size=1"])
    for override, words in (
        ("algorithm.critic.level=action", "level action is of robots"),
        (
            "algorithm.importance_sampling_level=sequence",
            "importance_sampling_level sequence gives an answer one ratio",
        ),
        ("algorithm.difficulty=softmax", "the critic knows what is hard"),
        ("algorithm.offline.per_group=1", "with advantage gae nothing does"),
        ("algorithm.filter.key=reward", r"filter\.key reward is what groups are chosen by"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_config(small, [gae, override])
    with pytest.raises(
        ConfigError, match=r"gae is defined with algorithm\.advantage_scale batch, found std"
    ):
        load_config(small, ["algorithm.advantage=gae", "algorithm.advantage_scale=std"])
    with pytest.raises(
        ConfigError, match="dynamic_sampling true replaces groups whose rewards are equal"
    ):
        load_config(small, ["algorithm.advantage=gae", "algorithm.dynamic_sampling=true"])


def test_threads_default_to_one_on_a_cpu_and_to_torchs_choice_on_a_gpu(small: Path) -> None:
    def threads(*overrides: str) -> int | None:
        return effective_threads(load_config(small, list(overrides)))

    assert load_config(small).threads is None
    assert threads("model.device=cpu") == 1 and threads("model.device=cuda:1") is None
    assert (
        threads("model.device=cpu", "threads=3") == threads("model.device=cuda", "threads=3") == 3
    )
    import torch

    assert threads() == (None if torch.cuda.is_available() else 1)


def test_reading_the_module_needs_no_torch() -> None:
    code = "import sys, mmrl.config; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=CONFIGS[0].parents[1], check=False
        ).returncode
        == 0
    )


OLD_NAMES = {
    "aggregate": ("loss_aggregation", "sequence_mean"),
    "aggregation": ("reward_aggregation", "gdpo"),
    "importance": ("importance_sampling_level", "sequence"),
}


@pytest.mark.parametrize("old", OLD_NAMES)
def test_an_old_name_is_read_in_files_overrides_and_programs(old: str, tmp_path: Path) -> None:
    new, value = OLD_NAMES[old]
    wanted = load_config(None, [f"algorithm.{new}={value}"])
    file = tmp_path / "old.yaml"
    file.write_text(f"algorithm: {{{old}: {value}}}\n", encoding="utf-8")
    message = rf"algorithm\.{old} {value} is algorithm\.{new} {value}"
    with pytest.warns(FutureWarning, match=message):
        assert load_config(file) == wanted
    with pytest.warns(FutureWarning, match=message):
        assert load_config(None, [f"algorithm.{old}={value}"]) == wanted
    with pytest.warns(FutureWarning, match=message):
        assert RunConfig.model_validate({"algorithm": {old: value}}) == wanted
    recorded = wanted.model_dump(mode="json")
    recorded["algorithm"][old] = recorded["algorithm"].pop(new)
    check_identity(run_identity(recorded), run_identity(wanted.model_dump(mode="json")))


def test_an_override_counts_by_whichever_name_and_two_names_in_one_place_may_not_differ(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.yaml"
    for in_file, over in (
        ("loss_aggregation", "aggregate"),
        ("aggregate", "loss_aggregation"),
        ("aggregate", "aggregate"),
    ):
        file.write_text(f"algorithm: {{{in_file}: dr_grpo}}\n", encoding="utf-8")
        with pytest.warns(FutureWarning):
            found = load_config(file, [f"algorithm.{over}=sequence_mean"])
        assert found.algorithm.loss_aggregation == "sequence_mean"
    with pytest.raises(
        ConfigError, match=r"overrides: algorithm\.aggregate dr_grpo is called .*keep one of them"
    ):
        load_config(None, ["algorithm.aggregate=dr_grpo", "algorithm.loss_aggregation=token_mean"])


def test_a_key_given_twice_is_an_error_and_anchors_are_not(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("optim: {lr: 1e-4}\nseed: 3\noptim: {schedule: cosine}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"(?s)found 'optim' again, first in line 1; .*line 3"):
        load_config(str(file), [])
    file.write_text(
        "data:\n  train:\n  - &a {task: grounding, path: a.jsonl}\n  - {<<: *a, path: b.jsonl}\n",
        encoding="utf-8",
    )
    found = load_config(str(file), []).data.train
    assert [(s.task, s.path) for s in found] == [("grounding", "a.jsonl"), ("grounding", "b.jsonl")]


@pytest.mark.parametrize(
    "override",
    [
        "optim.lr=.inf",
        "optim.betas=[0.9, 1.0]",
        "optim.eps=0",
        "rollout.temperature=.inf",
    ],
)
def test_numbers_that_no_run_can_have_are_refused_before_it(override: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(override.partition("=")[0])):
        load_config(None, [override])


SHARED = """
.sources: {one: &one {task: grounding, path: a.jsonl}}
x-optim: &optim {lr: 1e-4, schedule: cosine}
seed: 3
optim: *optim
"""


def test_names_with_a_dot_or_x_hold_shared_parts_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(SHARED + "data: {train: [*one, {<<: *one, path: b.jsonl}]}\n", encoding="utf-8")
    found = run_config(file, [])
    assert (found.seed, found.optim.lr) == (3, 1e-4)
    assert [source.path for source in found.data.train] == ["a.jsonl", "b.jsonl"]
    file.write_text(SHARED + "env: {}\ndemos: {optim: *optim}\n", encoding="utf-8")
    robot = run_config(file, [])
    assert is_embodied(file) and robot.optim == robot.demos.optim
    for text in ("xshared: {}", "optim: {.shared: 1}", "optim: {x-shared: 1}"):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="unknown key"):
            load_config(file)


def test_the_schema_for_editors_takes_shared_parts() -> None:
    schema = RunConfig.model_json_schema()
    assert schema["additionalProperties"] is False
    [shared] = schema["patternProperties"]
    found = [name for name in (".a", "x-a", "xa", "a.b") if re.search(shared, name)]
    assert found == [".a", "x-a"]


@pytest.mark.parametrize(
    "override",
    [
        "seed=true",
        "train.steps=yes",
        "optim.lr=false",
        "optim.betas=[true, 0.9]",
        "data.train.0.limit=true",
        "data.selection.threshold=true",
        "data.curriculum=[{until: 1, difficulty: [null, true]}]",
        "data.curriculum=[{until: 1, weights: {a: true}}]",
        "model.lora.r=true",
    ],
)
def test_a_truth_value_is_no_number(small: Path, override: str) -> None:
    key = re.escape(override.partition("=")[0])
    with pytest.raises(ConfigError, match=rf"{key}.*: expected a number, found true or false"):
        load_config(small, [override])


def test_robots_sections_know_a_truth_value_from_a_number_too() -> None:
    from mmrl.robotics.config import load_embodied

    for override in ("env.slots=true", "rl.reward={success: true}", "eval_states=true"):
        with pytest.raises(ConfigError, match="expected a number, found true or false"):
            load_embodied(None, [override])
    options = load_embodied(None, ["env.options={stop_at_success: false}"]).env.options
    assert options == {"stop_at_success": False}, "what an option is, its suite knows"


@pytest.mark.parametrize("key", ["seed", "model.lora.seed"])
def test_seeds_are_what_every_generator_takes(small: Path, key: str) -> None:
    for wrong, words in (
        ("1e20", "should be less than 4294967296"),
        (str(1 << 32), "should be less than 4294967296"),
        ("1.5", "should be a valid integer"),
    ):
        with pytest.raises(ConfigError, match=rf"{key}: Input {words}.*, found \d"):
            load_config(small, [f"{key}={wrong}"])
    import numpy as np

    for right in ("1e3", "'7'", str((1 << 32) - 1)):
        np.random.RandomState(load_config(small, [f"seed={right}"]).seed)


def test_paths_begin_at_the_home_folder(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmrl.robotics.config import load_embodied

    monkeypatch.setenv("HOME", "/home/me")
    found = load_config(
        small,
        [
            "dir=~/runs",
            "model.path=~/model",
            "data.train.0.path=~/a.jsonl",
            "data.train.0.pass_rate.file=~/p.jsonl",
            "data.train.0.params={prompt: '~ {question}', reader: {image_root: ~/pictures}}",
            "data.cache.dir=~/cache",
            "reward.verdicts=~/verdicts",
        ],
    )
    [source, other] = found.data.train
    assert source.pass_rate is not None
    assert [
        found.dir,
        found.model.path,
        source.path,
        source.pass_rate.file,
        source.params["reader"]["image_root"],
        found.data.cache.dir,
        found.reward.verdicts,
    ] == [
        f"/home/me/{name}"
        for name in ("runs", "model", "a.jsonl", "p.jsonl", "pictures", "cache", "verdicts")
    ]
    assert source.params["prompt"] == "~ {question}" and other.path == "b.jsonl"
    robot = load_embodied(None, ["demos.path=~/demos", "action.statistics=~/s.json"])
    assert (robot.demos.path, robot.action.statistics) == ("/home/me/demos", "/home/me/s.json")


@pytest.mark.parametrize(
    "name", ["''", ".", "..", "../x", "a/../..", "/tmp/x", "a/", "./a", "a//b"]
)
def test_a_run_lies_below_its_dir(name: str) -> None:
    found = rf"found '{re.escape(name.strip(chr(39)))}'$"
    with pytest.raises(ConfigError, match=rf"(?m)name: .*a folder below dir.*{found}"):
        load_config(None, [f"name={name}"])


@pytest.mark.parametrize("name", ["a", "study/first", "..a", ".a", "a b", "a.b"])
def test_names_of_runs_may_lie_in_folders(name: str) -> None:
    assert load_config(None, [f"name={name}"]).name == name


@pytest.mark.parametrize("name", ["7", "true", "a #b", "[x]", 'say "hi"', "naïve/ü", "~x"])
def test_a_checkpoint_may_have_any_name(name: str) -> None:
    assert checkpoint_settings(RunConfig, name, []).model.path == name
