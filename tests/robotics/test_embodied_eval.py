"""Named suites of simulated tasks: the file, what a protocol decides, who may play them, and a real evaluation's numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from typer.testing import CliRunner

from mmrl.cli.embodied import acts
from mmrl.cli.evaluation import eval_command, suites_command
from mmrl.cli.main import app
from mmrl.errors import ConfigError
from mmrl.evaluation.places import evaluation_place
from mmrl.evaluation.progress import PARTIAL
from mmrl.evaluation.suite_book import load_suites
from mmrl.evaluation.suite_table import markdown
from mmrl.robotics.config import EmbodiedConfig, load_embodied
from mmrl.robotics.contract import initial_states
from mmrl.robotics.protocols import PROTOCOLS, protocol_of
from mmrl.robotics.rollout import Driver
from mmrl.robotics.suite_runs import base_settings, play_suites
from mmrl.robotics.suite_table import percent, suite_row
from mmrl.robotics.suites import (
    EnvironmentSuite,
    ProtocolPolicy,
    Setting,
    configure,
)
from tests.kits.robot_kit import config_of, make_model, make_vla, observations

REPO = Path(__file__).resolve().parents[2]
TINY = [
    "env.image_size=32",
    "env.horizon=8",
    "env.slots=4",
    "env.workers=1",
    "env.options={tolerance: 0.5}",
    "model.system=''",
    "model.device=cpu",
    "threads=1",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved policy with a vla.json, untrained."""
    folder = tmp_path_factory.mktemp("vla")
    make_vla(make_model(folder / "backbone"), trainable=False).save(folder / "policy")
    return folder / "policy"


@pytest.fixture
def text_model(tmp_path: Path) -> str:
    """A folder without vla.json: a checkpoint that answers in text, as far as the choice of suites looks."""
    (tmp_path / "vlm").mkdir()
    return str(tmp_path / "vlm")


def book_file(folder: Path, text: str) -> Path:
    path = folder / "robots.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def base_of(checkpoint: Path, *overrides: str) -> EmbodiedConfig:
    return load_embodied(None, [f"model.path={checkpoint}", *overrides])


# the file


def test_shipped_suites_name_what_they_stand_for() -> None:
    book = load_suites(REPO / "configs" / "robot_suites.yaml")
    assert {
        "libero_spatial",
        "libero_object",
        "libero_goal",
        "libero_10",
        "libero_90",
        "maniskill_push",
        "maniskill_pick",
        "maniskill_stack",
        "maniskill_pull",
        "tiny_push",
        "tiny_reach",
        "tiny_pick",
        "robosuite_lift",
    } <= set(book.suites)
    assert [
        len(book.suites[f"libero_{n}"].tasks) for n in ("spatial", "object", "goal", "10", "90")
    ] == [10, 10, 10, 10, 90]
    assert book.suites["libero_90"].tasks[-1] == "libero_90/89"
    assert (
        book.suites["libero_goal"].libero == "libero_goal" and book.suites["tiny_push"].libero == ""
    )
    # the horizon of a LIBERO suite is that of the usual protocol
    for name, suite in book.suites.items():
        if suite.libero:
            assert suite.horizon == protocol_of("openvla_oft").steps(name)
    assert list(book.select("tiny,tiny_push")) == ["tiny_push", "tiny_reach", "tiny_pick"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "suites: {a: {env: tiny, tasks: [push], horizon: 9, horizn: 3}}",
            "suite 'a': unknown key 'horizn'. Did you mean 'horizon'?",
        ),
        ("suites: {a: {env: tiny, tasks: [push]}}", "suite 'a': horizon: Field required"),
        ("suites: {a: {env: tiny, tasks: [], horizon: 3}}", "suite 'a': tasks"),
        (
            "suites: {a: {env: tiny, tasks: [push], horizon: 3, protocol: openvla}}",
            "expected protocol as one of openvla_oft, openpi, lerobot, simplevla_rl, rlinf, found 'openvla'",
        ),
        (
            "suites: {a: {env: tiny, tasks: [push], horizon: 3}}\ngroups: {g: [b]}",
            "group 'g': unknown suite 'b'.",
        ),
        ("suites: []", "expected a mapping 'suites'"),
        ("a: [", "expected YAML"),
    ],
)
def test_a_broken_file_is_explained(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_suites(book_file(tmp_path, text))
    assert said in str(error.value) and "robots.yaml" in str(error.value)


def test_a_file_that_is_not_there_and_names_that_are_unknown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a suites file, found '.*none\.yaml'"):
        load_suites(tmp_path / "none.yaml")
    with pytest.raises(
        ConfigError,
        match=r"unknown suite 'tiny_psh'. Did you mean 'tiny_push'\? .*robot_suites.yaml: answered in text: .*"
        "played in simulators: .*groups: ",
    ):
        load_suites().select("tiny_psh")


# who may play what


def test_a_folder_that_is_not_there_is_not_called_a_text_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"found no folder '.*step_9'; make one with mmrl sft"):
        acts(load_suites().select("tiny_push"), str(tmp_path / "step_9"))


@pytest.mark.slow
def test_a_text_model_cannot_play_and_a_policy_cannot_answer(
    checkpoint: Path, text_model: str
) -> None:
    book = load_suites()
    with pytest.raises(
        ConfigError,
        match=r"suite 'tiny_push' is played by a policy that acts: expected a VLA checkpoint \(a "
        r"folder with vla.json\), found '.*vlm', which answers in text; make one with mmrl sft",
    ):
        acts(book.select("refcoco_val,tiny_push"), text_model)
    with pytest.raises(
        ConfigError,
        match=r"suite 'refcoco_val' asks questions that are answered in text, .* acts \(it has "
        r"a vla.json\)",
    ):
        acts(book.select("tiny_push,refcoco_val"), str(checkpoint))
    with pytest.raises(
        ConfigError, match=r"unknown suite 'libero_objct'\. Did you mean 'libero_object'\?"
    ):
        suites_command(str(checkpoint), "libero_objct", None, Path("x"), None, None, [], 0, None)
    with pytest.raises(
        ConfigError,
        match="expected --suite with suites of simulated tasks, found --task and --data",
    ):
        eval_command(str(checkpoint), "grounding", [Path("x.jsonl")], None, None, [], 0, None)
    with pytest.raises(
        ConfigError,
        match="expected --protocol with suites of simulated tasks only, found --protocol openpi",
    ):
        suites_command(
            text_model, "refcoco_val", None, Path("data"), None, None, [], 0, None, "openpi"
        )
    assert not acts(book.select("refcoco_val"), text_model)
    playing = book.select("tiny, tiny_push ,")
    assert acts(playing, str(checkpoint)) and list(playing) == list(book.groups["tiny"])


def test_suites_of_a_file_of_ones_own(checkpoint: Path, tmp_path: Path) -> None:
    file = book_file(tmp_path, "suites: {mine: {env: tiny, tasks: [push], horizon: 9}}")
    assert acts(load_suites(file).select("mine"), str(checkpoint))
    listed = CliRunner().invoke(app, ["eval", "--list-suites", "--suites", str(file)])
    assert listed.exit_code == 0 and "mine" in listed.stdout and "refcoco_val" not in listed.stdout


# settings


def test_the_suite_decides_the_task_and_the_checkpoint_how_it_sees(checkpoint: Path) -> None:
    suite = EnvironmentSuite(
        env="tiny", tasks=["push"], horizon=33, image_size=99, options={"tolerance": 0.3}, states=7
    )
    trained = base_of(
        checkpoint,
        "env.suite=tiny",
        "env.horizon=5",
        "env.tasks=[reach]",
        "env.image_size=48",
        "env.slots=3",
        "env.options={stop_at_success: false}",
    )
    env = configure(trained, suite).config.env
    assert (env.tasks, env.horizon, env.image_size, env.slots) == (["push"], 33, 48, 3)
    assert env.options == {"tolerance": 0.3, "stop_at_success": False}
    elsewhere = base_of(
        checkpoint,
        "env.suite=maniskill",
        "env.image_size=48",
        "env.slots=3",
        "env.options={dims: 4}",
    )
    setting = configure(elsewhere, suite)
    assert (
        setting.config.env.image_size,
        setting.config.env.slots,
        setting.config.env.options,
    ) == (99, 3, {"tolerance": 0.3})
    assert (setting.mode, setting.protocol, setting.config.eval_states) == ("greedy", None, 7)


def test_the_command_line_goes_over_both(checkpoint: Path) -> None:
    suite = EnvironmentSuite(env="tiny", tasks=["push"], horizon=33)
    given = ["env.horizon=4", "env.image_size=40", "env.options.tolerance=0.2", "eval_states=3"]
    config = configure(base_of(checkpoint, *given), suite, overrides=given).config
    assert (config.env.horizon, config.env.image_size, config.env.options, config.eval_states) == (
        4,
        40,
        {"tolerance": 0.2},
        3,
    )


def test_a_protocol_decides_sampling_everywhere_and_the_rest_only_in_libero(
    checkpoint: Path,
) -> None:
    suite = EnvironmentSuite(env="tiny", tasks=["push"], horizon=33, states=7)
    rlinf = configure(base_of(checkpoint, "rollout.temperature=1.0"), suite, protocol="rlinf")
    assert (
        rlinf.mode,
        rlinf.config.rollout.temperature,
        rlinf.config.eval.samples,
        rlinf.whole,
    ) == ("sampled", 1.6, 1, False)
    assert (rlinf.config.env.horizon, rlinf.config.eval_states) == (33, 7) and not rlinf.deviations
    greedy = configure(base_of(checkpoint, "seed=3"), suite, protocol="openvla_oft", samples=2)
    assert (greedy.mode, greedy.config.eval.samples, greedy.config.seed) == ("greedy", 2, 7)
    with pytest.raises(
        ConfigError,
        match=r"expected protocol as one of .* found 'openpie'. Did you mean 'openpi'\?",
    ):
        configure(base_of(checkpoint), suite, protocol="openpie")


@pytest.mark.parametrize("name", list(PROTOCOLS))
def test_libero_under_a_protocol(checkpoint: Path, name: str) -> None:
    pytest.importorskip("robosuite")
    try:
        setting = configure(
            base_of(checkpoint), load_suites().suites["libero_spatial"], protocol=name
        )
    except Exception as error:
        if "MissingExtra" not in type(error).__name__:
            raise
        pytest.skip(f"LIBERO is not here: {error}")
    rules, env = protocol_of(name), setting.config.env
    assert (env.horizon, env.image_size) == (
        rules.steps("libero_spatial"),
        rules.image_size,
    ) and setting.whole
    assert env.options["wait_steps"] == rules.wait_steps
    assert [s.row for s in setting.states["libero_spatial/0"]] == list(range(50))
    assert any("executed 2 times" in d for d in setting.deviations)
    fewer = ["env.horizon=50", "eval_states=5"]
    other = configure(
        base_of(checkpoint, *fewer),
        load_suites().suites["libero_spatial"],
        protocol=name,
        overrides=fewer,
    )
    assert {f"env.horizon 50 instead of {env.horizon}", "5 trials instead of 50"} <= set(
        other.deviations
    )
    # where meshes lie and who draws them is no deviation
    placed = ["env.options={assets: /elsewhere, gl: egl, wait_steps: 3}"]
    found = configure(
        base_of(checkpoint, *placed),
        load_suites().suites["libero_spatial"],
        protocol=name,
        overrides=placed,
    )
    assert found.config.env.options["assets"] == "/elsewhere"
    assert set(found.deviations) - set(setting.deviations) == {
        f"env.options.wait_steps 3 instead of {rules.wait_steps}"
    }


# the policy as a protocol wants it


class _Pool:
    """Only what ProtocolPolicy reads of a pool: nothing has run yet."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}


def whole(config: EmbodiedConfig, protocol: str) -> Setting:
    return Setting(config, protocol_of(protocol), "greedy", {"reach": initial_states("eval", 2)})


def test_pictures_go_through_the_protocol_and_chunks_are_cut(checkpoint: Path) -> None:
    vla = make_vla(checkpoint, trainable=False)
    setting = whole(config_of(checkpoint), "openvla_oft")
    rules = replace(
        protocol_of("openvla_oft"),
        image=replace(protocol_of("openvla_oft").image, side=32),
        replan=1,
    )
    pool: Any = _Pool()
    policy = ProtocolPolicy(vla, pool, replace(setting, protocol=rules))
    seen = observations(3)
    by_hand = [
        replace(o, images={"base": rules.picture(o.images["base"], rotated=True)}) for o in seen
    ]
    keys = [(0, i) for i in range(3)]
    assert [c.prompt.fingerprint for c in policy.act(seen, keys)] == [
        c.prompt.fingerprint for c in vla.act(by_hand, keys)
    ]
    assert policy.act(seen, keys)[0].prompt.fingerprint != vla.act(seen, keys)[0].prompt.fingerprint
    choice = vla.act(seen, keys)[0]
    bins = np.reshape(choice.tokens, (vla.codec.chunk, vla.codec.dim))
    np.testing.assert_array_equal(vla.actions(choice), vla.codec.decode(bins))
    np.testing.assert_array_equal(
        policy.actions(choice), vla.codec.decode(bins)[: vla.codec.repeat]
    )
    assert policy.codec.chunk == vla.codec.chunk and policy.version == vla.version
    plain = ProtocolPolicy(vla, pool, Setting(config_of(checkpoint), None, "greedy"))
    np.testing.assert_array_equal(plain.actions(choice), vla.codec.decode(bins))
    assert [(c.tokens, c.logprobs, c.prompt.fingerprint) for c in plain.act(seen, keys)] == [
        (c.tokens, c.logprobs, c.prompt.fingerprint) for c in vla.act(seen, keys)
    ]


# a real evaluation


@pytest.fixture(scope="module")
def evaluated(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """`mmrl eval` on two suites: the output folder and what was printed."""
    out = tmp_path_factory.mktemp("eval")
    done = CliRunner().invoke(
        app,
        [
            "eval",
            str(checkpoint),
            *TINY,
            "--suite",
            "tiny_reach,tiny_push",
            "--limit",
            "8",
            "--samples",
            "2",
            "--out",
            str(out),
        ],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    return out, done.stdout


@pytest.mark.slow
def test_the_table_is_that_of_the_episodes(evaluated: tuple[Path, str]) -> None:
    out, printed = evaluated
    table = json.loads((out / "suites.json").read_text(encoding="utf-8"))
    assert [row["suite"] for row in table["suites"]] == ["tiny_reach", "tiny_push"]
    text = (out / "suites.md").read_text(encoding="utf-8")
    for row in table["suites"]:
        rows = [
            json.loads(line)
            for line in (out / row["suite"] / "predictions.jsonl")
            .read_text(encoding="utf-8")
            .splitlines()
        ]
        greedy = [r for r in rows if r["mode"] == "greedy"]
        assert (
            len(greedy) == row["n"] == 8
            and len(rows) == 24
            and row["limited"]
            and not row["official"]
        )
        for metric in ("success_once", "success_at_end"):
            assert row[metric]["mean"] == pytest.approx(
                np.mean([r["score"]["metrics"][metric] for r in greedy])
            )
            assert row[metric]["low"] <= row[metric]["mean"] <= row[metric]["high"]
        assert row["sampled"]["mean"] == pytest.approx(
            np.mean([r["score"]["metrics"]["success_once"] for r in rows if r["mode"] == "sampled"])
        )
        assert percent(row["success_once"]) in printed and percent(row["success_once"]) in text
        assert all(r["seed"] >= 1 << 30 for r in rows)  # held out: training draws from below
        results = json.loads((out / row["suite"] / "results.json").read_text(encoding="utf-8"))
        protocol = results["protocol"]
        assert (
            protocol["name"],
            protocol["render"],
            protocol["max_steps"],
            protocol["states_per_task"],
        ) == ("own", "numpy", 8, 8)
        assert (
            protocol["simulator"]["numpy"] == np.__version__
            and "held out: 8 of split eval" in protocol["states"]
        )
        assert row["stops"] and row["success_at_end"] == row["success_once"]
        assert protocol["success_at_end"].startswith("the same as success once")
    assert text.count("same: stops at success") == 2 and printed.count("same: stops") == 2
    for said in ("horizon 8 instead of 40", "image_size 32 instead of 64", "options.tolerance 0.5"):
        assert text.count(said) == 2 and " ".join(printed.split()).count(said) == 2, said
    assert "stand-in" not in text and "stand-in" not in printed


@pytest.mark.slow
def test_clips_show_both_outcomes_where_there_are_both(evaluated: tuple[Path, str]) -> None:
    import av

    for suite in ("tiny_reach", "tiny_push"):
        folder = evaluated[0] / suite
        rows = [
            json.loads(line)
            for line in (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        greedy = [r for r in rows if r["mode"] == "greedy"]
        for outcome in (0.0, 1.0):
            kind = [r for r in greedy if r["score"]["metrics"]["success_once"] == outcome]
            assert sum("video" in r for r in kind) >= min(2, len(kind))
        for row in greedy:
            if "video" in row:
                # the first picture, and one per control step
                with av.open(str(folder / "videos" / row["video"])) as clip:
                    assert (
                        sum(1 for _ in clip.decode(video=0)) == 1 + row["score"]["metrics"]["steps"]
                    )


@pytest.mark.slow
def test_clips_are_of_the_mode_that_is_measured(checkpoint: Path, tmp_path: Path) -> None:
    """rlinf samples: the first sample of a state is filmed, and outcomes that the first states do not show are."""
    base = base_of(checkpoint, *TINY, "eval.gallery=1")
    [row], _ = play_suites(
        str(checkpoint),
        load_suites().select("tiny_reach"),
        base,
        place=evaluation_place(str(checkpoint), "", tmp_path / "out"),
        protocol="rlinf",
        samples=2,
        limit=8,
        overrides=[*TINY, "eval.gallery=1"],
    )
    rows = [
        json.loads(line)
        for line in (tmp_path / "out" / "tiny_reach" / "predictions.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    ]
    sampled, greedy = ([r for r in rows if r["mode"] == mode] for mode in ("sampled", "greedy"))
    assert (
        row.mode == "sampled"
        and row.n == 8
        and len(sampled) == 16
        and not any("video" in r for r in greedy)
    )
    first = [r for number, r in enumerate(sampled) if number % 2 == 0]
    assert not any("video" in r for number, r in enumerate(sampled) if number % 2)
    for outcome in (0.0, 1.0):
        kind = [r for r in first if r["score"]["metrics"]["success_once"] == outcome]
        assert sum("video" in r for r in kind) >= min(2, len(kind))


@pytest.mark.slow
def test_one_that_is_cut_off_goes_on_with_the_same_episodes(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off in the second suite; the first one's episodes, clips and simulators are known, and nothing is played twice."""
    asked: list[int] = []  # by call: a suite's states, and then those that are filmed as well
    real = Driver.play

    def play(self: Driver, requests: Any) -> Any:
        asked.append(len(requests))
        for number, group in enumerate(real(self, requests)):
            if cut and len(asked) == 3 and number == 5:
                raise KeyboardInterrupt
            yield group

    def evaluate(folder: Path, resume: bool = False) -> list[Any]:
        settings = [*TINY, "eval.gallery=1"]
        return play_suites(
            str(checkpoint),
            load_suites().select("tiny_reach,tiny_push"),
            base_of(checkpoint, *settings),
            place=evaluation_place(str(checkpoint), "", folder, resume=resume),
            samples=1,
            limit=8,
            overrides=settings,
        )[0]

    monkeypatch.setattr(Driver, "play", play)
    cut = False
    whole = evaluate(tmp_path / "whole")
    filmed = asked[3]
    assert asked == [16, asked[1], 16, filmed]
    asked.clear()
    cut = True
    with pytest.raises(KeyboardInterrupt):
        evaluate(tmp_path / "cut")
    asked.clear()
    cut = False
    assert evaluate(tmp_path / "cut", resume=True) == whole
    assert asked == [0, 0, 16 - 5, filmed]
    for suite in ("tiny_reach", "tiny_push"):
        for file in ("predictions.jsonl", "results.json"):
            mine, theirs = (tmp_path / name / suite / file for name in ("cut", "whole"))
            assert mine.read_bytes() == theirs.read_bytes()
        clips = [
            sorted(p.name for p in (tmp_path / n / suite / "videos").iterdir())
            for n in ("cut", "whole")
        ]
        assert clips[0] == clips[1]


@pytest.mark.slow
def test_several_suites_are_one_evaluation(checkpoint: Path, tmp_path: Path) -> None:
    """One that cannot run keeps the others for the next start; with other settings none of them begins."""
    out = tmp_path / "out"
    command = ["eval", str(checkpoint), "--suite", "tiny_push,maniskill_push", "--out", str(out)]
    command += ["--limit", "4", *TINY]
    failed = CliRunner().invoke(app, command)
    assert failed.exit_code == 1 and "tolerance" in failed.stdout
    assert "4 of 4 (tiny_push); the same command with --resume goes on there" in failed.stderr
    kept = (out / PARTIAL).read_bytes()
    written = (out / "suites.json").read_bytes()
    other = CliRunner().invoke(app, [*command, "--resume", "rollout.temperature=0.5"])
    assert "tiny_push.rollout.temperature was 1.0, now 0.5" in str(other.exception)
    assert (out / PARTIAL).read_bytes() == kept and (out / "suites.json").read_bytes() == written
    with mock.patch.object(Driver, "play", side_effect=lambda requests: iter(requests)) as play:
        again = CliRunner().invoke(app, [*command, "--resume"])
    assert again.exit_code == 1 and (out / "suites.json").read_bytes() == written
    assert [list(call.args[0]) for call in play.call_args_list if call.args[0]] == []


@pytest.mark.slow
def test_stand_in_assets_are_said_beside_every_number(
    evaluated: tuple[Path, str], checkpoint: Path
) -> None:
    results = json.loads((evaluated[0] / "tiny_push" / "results.json").read_text(encoding="utf-8"))
    suite = EnvironmentSuite(env="tiny", tasks=["push"], horizon=8, states=8, official=True)
    setting = replace(
        configure(base_of(checkpoint), suite),
        states={"push": initial_states("eval", 8)},
        protocol=protocol_of("openpi"),
    )
    real = suite_row("x", suite, setting, results, None)
    assert (
        real.official
        and not real.stand_in
        and "stand-in" not in markdown([real], {"x": suite}, "c")
    )
    row = suite_row(
        "x",
        suite,
        setting,
        {**results, "protocol": {**results["protocol"], "assets": "stand-in"}},
        None,
    )
    text = markdown([row], {"x": suite}, "c")
    assert row.stand_in and not row.official and row.as_dict()["stand_in"]
    assert "not a score of the benchmark" in text
    # success at end is no number where episodes stop at success
    for shown, numbers in ((row, 1), (replace(row, stops=False), 2)):
        line = next(
            part
            for part in markdown([shown], {"x": suite}, "c").splitlines()
            if part.startswith("| x ")
        )
        assert line.count("(stand-in assets)") == line.count(" % [") == numbers
    assert not suite_row(
        "x", suite, replace(setting, deviations=("env.horizon 8 instead of 220",)), results, None
    ).official
    assert not suite_row("x", suite, setting, results, 3).official


@pytest.mark.slow
def test_a_policy_for_another_robot_is_refused_before_it_acts(
    checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"tiny/pick: expected a policy with 3 action dimensions \(dx, dy, gripper\), found 2",
    ):
        suites_command(str(checkpoint), "tiny_pick", None, Path("data"), tmp_path, None, TINY, 0, 1)
    assert not (tmp_path / "suites.json").exists()


def test_settings_come_from_the_checkpoint_of_a_run(checkpoint: Path) -> None:
    trainer = checkpoint / "trainer"
    trainer.mkdir(exist_ok=True)
    (trainer / "config.yaml").write_text(
        "env: {suite: tiny, image_size: 56, horizon: 3}\naction: {bins: 33}\n", encoding="utf-8"
    )
    base = base_settings(str(checkpoint), None, [])
    assert base.env.image_size == 56 and base.model.path == str(checkpoint)
    config = configure(base, load_suites().suites["tiny_push"]).config
    assert (config.env.image_size, config.env.horizon) == (
        56,
        40,
    ) and "bins" not in config.action.model_fields_set
    (trainer / "config.yaml").unlink()
