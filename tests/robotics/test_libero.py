"""LIBERO as a simulator, on stand-in meshes. Real mujoco, robosuite and LIBERO; software rendering.

    MUJOCO_GL=osmesa pytest tests/robotics/test_libero.py

Everything that needs GL runs in the tests' own process with osmesa: one backend per process.
"""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.errors import CacheError, ConfigError, DataError, MissingExtraError
from mmrl.robotics import libero_assets
from mmrl.robotics.contract import (
    ActionError,
    EnvSpec,
    InitialState,
    Simulator,
    initial_states,
    make_simulator,
    run_chunk,
)
from mmrl.robotics.libero_manifest import judge, manifest, needs_of
from mmrl.robotics.libero_standins import stand_in_files
from mmrl.robotics.solids import bodies_below

if importlib.util.find_spec("libero") is None or importlib.util.find_spec("robosuite") is None:
    pytest.skip("needs LIBERO: see mmrl.robotics.libero_assets.INSTALL", allow_module_level=True)

from mmrl.robotics.libero import (
    EVAL_ROWS,
    TRAIN_ROWS,
    describe_rows,
    libero_states,
    libero_tasks,
    resolve_task,
)

OBJECT_TASKS = 10
OPEN = np.array([0.0] * 6 + [-1.0])


@pytest.fixture(autouse=True)
def _settings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path_factory.getbasetemp() / "mmrl-cache"))
    monkeypatch.delenv("MMRL_LIBERO_ASSETS", raising=False)


def _spec(task: str, **changes: Any) -> EnvSpec:
    options = {"assets": "stand-in", "gl": "osmesa", **changes.pop("options", {})}
    settings = {
        "horizon": 280,
        "image_size": 64,
        "cameras": ("base", "wrist"),
        "options": options,
        **changes,
    }
    return EnvSpec("libero", task, **settings)


@pytest.fixture(scope="module")
def milk() -> Iterator[Simulator]:
    """libero_object's milk task, shared: every test starts it afresh."""
    simulator = make_simulator(_spec("libero_object/pick_up_the_milk_and_place_it_in_the_basket"))
    yield simulator
    simulator.close()


def _picture_bytes(simulator: Simulator) -> list[bytes]:
    seen = simulator.observe()
    return [
        *(seen.images[name].tobytes() for name in simulator.spec.cameras),
        seen.proprio.tobytes(),
    ]


def _play(simulator: Simulator, state: InitialState, actions: np.ndarray) -> list[bytes]:
    simulator.reset(state)
    seen = _picture_bytes(simulator)
    for action in actions:
        simulator.step(action)
        seen += _picture_bytes(simulator)
    return seen


def _random_actions(steps: int) -> np.ndarray:
    return np.random.default_rng(3).uniform(-1, 1, (steps, 7))


class TestNamesAndRows:
    def test_tasks_by_number_by_name_and_by_short_suite(self) -> None:
        names = libero_tasks("object")
        assert (
            len(names) == OBJECT_TASKS == len(set(names)) and len(libero_tasks("libero_90")) == 90
        )
        assert (
            resolve_task("libero_object/3")
            == resolve_task("object/3")
            == resolve_task(f"libero_object/{names[3]}")
        )

    def test_every_task_has_a_definition_and_states(self) -> None:
        for suite in ("spatial", "object", "goal", "10", "90"):
            for name in libero_tasks(suite):
                assert (
                    libero_assets.libero_folder()
                    / "bddl_files"
                    / f"libero_{suite}"
                    / f"{name}.bddl"
                ).is_file()
                assert len(libero_assets.init_states(f"libero_{suite}", name)) == 50

    @pytest.mark.parametrize(
        ("task", "words"),
        [
            ("libero_object/99", "expected a task number 0 to 9 of libero_object, found 99"),
            ("libero_objekt/1", "Did you mean 'libero_object'?"),
            (
                "object/pick_up_the_milk_and_place_it_in_the_baskett",
                "Did you mean 'pick_up_the_milk_and_place_it_in_the_basket'?",
            ),
            ("libero_object", "expected a task suite/number or suite/name"),
            ("libero_object/", "expected a task of libero_object"),
            ("libero_object/-1", "expected a task of libero_object"),
            ("libero_object/²", "expected a task of libero_object"),
        ],
    )
    def test_unknown_tasks(self, task: str, words: str) -> None:
        with pytest.raises(ConfigError) as caught:
            make_simulator(_spec(task))
        assert words in str(caught.value)

    def test_training_and_evaluation_rows_are_disjoint_and_cover_the_file(self) -> None:
        train, held = (libero_states("object/0", split) for split in ("train", "eval"))
        assert {s.row for s in train} == set(TRAIN_ROWS) and {s.row for s in held} == set(EVAL_ROWS)
        assert not {s.row for s in train} & {s.row for s in held} and len(train) + len(held) == 50
        assert describe_rows(held) == "rows 40-49, held out"

    def test_all_rows_are_marked(self) -> None:
        states = libero_states("object/0", "eval", rows="all")
        assert [s.row for s in states] == list(range(50))
        assert describe_rows(states) == "rows 0-49, 40 of 50 are training rows"
        with pytest.raises(ConfigError, match="no state would be left for evaluation"):
            libero_states("object/0", "train", rows="all")

    def test_counts_wrap_and_wrong_rows_are_refused(self) -> None:
        assert [s.row for s in libero_states("object/0", "eval", count=12)] == [
            *range(40, 50),
            40,
            41,
        ]
        assert [s.row for s in libero_states("object/0", "eval", rows=[3, 1])] == [3, 1]
        for rows in ([50], [-1], []):
            with pytest.raises(ConfigError, match="expected rows 0 to 49"):
                libero_states("object/0", "eval", rows=rows)
        with pytest.raises(ConfigError, match="Did you mean 'held-out'"):
            libero_states("object/0", "eval", rows="heldout")

    def test_states_without_a_row_take_their_splits_rows(self) -> None:
        for split, rows in (("train", TRAIN_ROWS), ("eval", EVAL_ROWS)):
            text = describe_rows(initial_states(split, 200))  # type: ignore[arg-type]
            assert text.startswith(f"rows {rows[0]}-{rows[-1]},")


class TestFiles:
    def test_recorded_states_equal_torchs_reading(self) -> None:
        """The restricted reader against torch.load of the same file."""
        torch = pytest.importorskip("torch")
        name = libero_tasks("object")[0]
        path = (
            libero_assets.libero_folder() / "init_files" / "libero_object" / f"{name}.pruned_init"
        )
        assert np.array_equal(
            libero_assets.init_states("libero_object", name), torch.load(path, weights_only=False)
        )

    def test_a_crafted_init_file_runs_nothing(self, tmp_path: Path) -> None:
        class Attack:
            def __reduce__(self) -> tuple:
                return os.system, (f"touch {tmp_path / 'ran'}",)

        with pytest.raises(DataError, match=r"asks for \w+\.system; do not load this file"):
            libero_assets._read_init_file(_archive(pickle.dumps(Attack())), tmp_path / "x")
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("data", [b"", b"PK\x03\x04 not a zip", None])
    def test_broken_init_files_say_so(self, data: bytes | None, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="expected an init-state file of LIBERO"):
            libero_assets._read_init_file(
                _archive(b"\x80\x04") if data is None else data, tmp_path / "x"
            )

    @pytest.mark.parametrize("states", [np.zeros(3), np.zeros((0, 4)), np.full((2, 2), np.nan)])
    def test_states_that_are_none(self, states: np.ndarray, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="expected finite states"):
            libero_assets._read_init_file(_archive(pickle.dumps(states)), tmp_path / "x")

    @pytest.mark.slow
    def test_stand_ins_appear_once_whoever_writes_them(self, tmp_path: Path) -> None:
        """Four processes at once: one folder, complete, nothing left over."""
        command = [sys.executable, "-m", "mmrl.robotics.libero_assets", "stand-ins"]
        writers = [
            subprocess.Popen(
                command,
                env={**os.environ, "MMRL_CACHE": str(tmp_path)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(4)
        ]
        folders = {writer.communicate()[0].strip() for writer in writers}
        assert len(folders) == 1 and all(writer.returncode == 0 for writer in writers)
        folder = Path(folders.pop())
        assert {path.name for path in folder.parent.iterdir()} == {folder.name}
        assert {
            str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
        } == set(stand_in_files())

    def test_a_cache_that_cannot_be_written_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "file"))
        with pytest.raises(CacheError, match="point MMRL_CACHE at a folder that can be written"):
            libero_assets.find_assets("stand-in")

    def test_a_users_configuration_is_left_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("LIBERO_CONFIG_PATH", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / ".libero").mkdir()
        (tmp_path / ".libero" / "config.yaml").write_text("mine: 1\n")
        libero_assets.write_config()
        assert (
            "LIBERO_CONFIG_PATH" not in os.environ
            and (tmp_path / ".libero" / "config.yaml").read_text() == "mine: 1\n"
        )

    def test_without_one_ours_is_written_elsewhere(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import yaml

        monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "none"))
        monkeypatch.setenv("HOME", str(tmp_path))
        libero_assets.write_config()
        assert not (tmp_path / ".libero").exists()
        config = yaml.safe_load(
            (Path(os.environ["LIBERO_CONFIG_PATH"]) / "config.yaml").read_text()
        )
        assert Path(config["bddl_files"]) == libero_assets.libero_folder() / "bddl_files"

    def test_official_assets_are_asked_for_by_command(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        with pytest.raises(
            MissingExtraError, match=r"python -m mmrl\.robotics\.libero_assets download FOLDER"
        ):
            libero_assets.find_assets("official")
        with pytest.raises(
            ConfigError,
            match=r"expected a folder with LIBERO's assets .* without articulated_objects",
        ):
            libero_assets.find_assets(tmp_path)
        monkeypatch.setenv("MMRL_LIBERO_ASSETS", str(tmp_path / "gone"))
        with pytest.raises(ConfigError, match="MMRL_LIBERO_ASSETS"):
            libero_assets.find_assets("auto")

    def test_a_folder_of_official_assets_is_taken(self, tmp_path: Path) -> None:
        for name in libero_assets.OFFICIAL_FOLDERS:
            (tmp_path / name).mkdir()
        assert libero_assets.find_assets(tmp_path) == libero_assets.Assets(
            tmp_path.resolve(), "official"
        )

    def test_hashes_are_gits(self, tmp_path: Path) -> None:
        """The manifest's hashes are names of git blobs: git itself says so of a file of any content."""
        file = tmp_path / "mesh.msh"
        file.write_bytes(bytes(range(256)) * 9)
        said = subprocess.run(
            ["git", "hash-object", "--no-filters", str(file)],
            capture_output=True,
            text=True,
            check=True,
        )
        known = {"mesh.msh": said.stdout.strip()}
        assert judge(tmp_path, known, known).kind == "official"
        file.write_bytes(bytes(range(256)) * 8 + bytes(255) + b"x")
        assert judge(tmp_path, known, known).kind == "modified (1 of 1 files)"
        assert judge(tmp_path, ["gone", "mesh.msh"], known).missing == ("gone",)

    def test_what_tasks_need_is_in_the_manifest(self) -> None:
        folder, known = libero_assets.libero_folder() / "bddl_files", manifest()
        needs = {path: needs_of(path.read_text()) for path in folder.rglob("*.bddl")}
        assert len(known) == 585 and len(needs) == 130
        for path, files in needs.items():
            assert set(files) <= set(known) and len(files) > 15, path
            if "moka_pot" in path.name:
                assert "turbosquid_objects/moka_pot/moka_pot.xml" in files

    def test_changed_and_missing_files_are_named_before_anything_is_built(
        self, tmp_path: Path
    ) -> None:
        """Stand-ins in the place of official files: XML files that are not LIBERO's, and no meshes."""
        shutil.copytree(libero_assets.find_assets("stand-in").folder, tmp_path / "assets")
        (tmp_path / "assets" / "turbosquid_objects").mkdir(exist_ok=True)
        simulator = make_simulator(
            _spec("libero_object/7", options={"assets": str(tmp_path / "assets")})
        )
        with pytest.raises(
            MissingExtraError, match=r"expected the \d+ asset files .* missing: .* more"
        ):
            simulator.reset(InitialState("eval", 0, 0, 0))
        for name in needs_of(simulator.bddl_file.read_text()):  # type: ignore[attr-defined]
            path = tmp_path / "assets" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        made = make_simulator(simulator.spec)
        assert re.fullmatch(r"modified \((\d+) of \1 files\)", made.versions()["assets"])

    @pytest.mark.slow
    def test_a_download_without_a_network_says_what_to_do(self, tmp_path: Path) -> None:
        code = "import sys; from mmrl.robotics.libero_assets import download_assets; download_assets(sys.argv[1])"
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "copy the folder from a machine that has one, or use stand-ins" in done.stderr


def _archive(pickled: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    return stream.getvalue()


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"cameras": ("base", "wirst")}, "Did you mean 'wrist'?"),
            ({"options": {"wait_step": 3}}, "Did you mean 'wait_steps'?"),
            ({"options": {"wait_steps": -1}}, "options.wait_steps as greater than or equal to 0"),
            ({"options": {"wait_steps": 2.5}}, "options.wait_steps as a whole number, found 2.5"),
            ({"options": {"settle_gripper": 2}}, "settle_gripper as -1 (open)"),
        ],
    )
    def test_settings(self, changes: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError) as caught:
            make_simulator(_spec("libero_object/0", **changes))
        assert words in str(caught.value)

    def test_a_row_too_many(self) -> None:
        with pytest.raises(ConfigError, match="expected a row 0 to 49"):
            make_simulator(_spec("libero_object/0")).reset(InitialState("eval", 0, 0, 50))

    def test_render_backends(self) -> None:
        with pytest.raises(
            ConfigError, match=r"expected auto, osmesa or egl .* Did you mean 'osmesa'"
        ):
            make_simulator(_spec("libero_object/0", options={"gl": "osmsea"})).reset(
                InitialState("eval", 0, 0, 0)
            )


@pytest.mark.slow
@pytest.mark.render("libOSMesa.so.8")
class TestEpisodes:
    def test_all_object_tasks_reset_and_render(self) -> None:
        """Pictures show something, differ between tasks, and the marking says stand-in."""
        seen = set()
        for number in range(OBJECT_TASKS):
            simulator = make_simulator(_spec(f"libero_object/{number}"))
            try:
                simulator.reset(libero_states(simulator.spec.task, "eval", count=1)[0])
                observation = simulator.observe()
                assert simulator.versions()["assets"] == "stand-in"
            finally:
                simulator.close()
            for picture in observation.images.values():
                assert (
                    picture.shape == (64, 64, 3)
                    and picture.dtype == np.uint8
                    and picture.std() > 20
                )
            assert observation.proprio.shape == (8,) and observation.instruction.startswith(
                "pick up the "
            )
            seen.add((observation.instruction, observation.images["base"].tobytes()))
        assert len(seen) == OBJECT_TASKS

    @pytest.mark.parametrize("task", ["libero_goal/0", "libero_10/9"])
    def test_no_shape_of_ours_hides_what_stands_on_a_table(self, task: str) -> None:
        """Rays of mujoco from the base camera through what is drawn meet every object. LIBERO sizes tables when it builds them."""
        import mujoco

        simulator = make_simulator(_spec(task, options={"gl": "none"}))
        simulator.reset(libero_states(task, "eval", count=1)[0])
        env = simulator.env  # type: ignore[attr-defined]
        model, data = env.sim.model._model, env.sim.data._data
        eye, drawn = data.cam_xpos[model.camera("agentview").id], np.array([0, 1, 0, 0, 0, 0], "u1")
        hit = np.zeros(1, np.int32)
        for name in env.objects_dict:
            mine = bodies_below(model, env.obj_body_id[name])
            met = set()
            for g in (g for g in range(model.ngeom) if model.geom_bodyid[g] in mine):
                mujoco.mj_ray(model, data, eye, data.geom_xpos[g] - eye, drawn, 1, -1, hit)
                met.add(int(model.geom_bodyid[hit[0]]))
            assert met & mine, (name, [model.body(body).name for body in met])
        simulator.close()

    def test_recorded_states_stand_on_the_stand_ins_as_the_task_files_say(self) -> None:
        """LIBERO recorded its states on its own geometry: a bowl that hangs above a ramekin, in a drawer, on a stove. On shapes of
        another size it would miss or slide off; LIBERO's own predicates of the task file's beginning hold after settling."""
        for number in (3, 4, 5, 9):
            task = f"libero_spatial/{number}"
            simulator = make_simulator(_spec(task, options={"gl": "none"}))
            simulator.reset(libero_states(task, "eval", count=1)[0])
            env = simulator.env  # type: ignore[attr-defined]
            begin = [p for p in env.parsed_problem["initial_state"] if "main_table" not in p[-1]]
            assert len(begin) >= 2 and all(env._eval_predicate(p) for p in begin), (task, begin)
            with pytest.raises(ConfigError, match="to draw with, found gl 'none'"):
                simulator.observe()
            simulator.close()

    def test_fixtures_stand_where_an_environment_that_is_reset_in_turn_puts_them(self) -> None:
        """LIBERO's own environment, seeded once and reset per episode, against option env_draws asked out of order, twice. The task
        has an open drawer, whose sampler LIBERO adds again at every reset."""
        task = "libero_spatial/4"
        simulator = make_simulator(_spec(task, options={"gl": "none", "env_draws": "in-turn"}))
        states = libero_states(task, "eval", rows="all", count=3)
        seen: dict[int, list[np.ndarray]] = {0: [], 1: [], 2: []}
        for n in (2, 0, 1, 2, 0):
            simulator.reset(states[n])
            env = simulator.env  # type: ignore[attr-defined]
            fixture = env.obj_body_id["wooden_cabinet_1"]
            seen[n].append(np.array(env.sim.model.body_pos[fixture]))
        from libero.libero.envs import OffScreenRenderEnv

        own = OffScreenRenderEnv(
            bddl_file_name=str(simulator.bddl_file),  # type: ignore[attr-defined]
            camera_heights=16,
            camera_widths=16,
        )
        own.seed(0)
        places = []
        for n in range(3):
            own.reset()
            places.append(np.array(own.env.sim.model.body_pos[fixture]))
            assert all(np.array_equal(places[n], place) for place in seen[n]), n
        assert len({place.tobytes() for place in places}) == 3
        own.close()
        simulator.close()
        with pytest.raises(ConfigError, match="Did you mean 'in-turn'"):
            make_simulator(_spec(task, options={"env_draws": "inturn"}))

    def test_an_episode_repeats_bit_for_bit_whatever_ran_between(self, milk: Simulator) -> None:
        first, other = libero_states(milk.spec.task, "train", count=2)
        actions = _random_actions(4)
        before = _play(milk, first, actions)
        np.random.seed(99)
        different = _play(milk, other, _random_actions(2))
        assert _play(milk, first, actions) == before and different[0] != before[0]

    def test_numpys_global_generator_is_given_back(self, milk: Simulator) -> None:
        np.random.seed(5)
        expected = np.random.RandomState(5).rand(3)
        milk.reset(libero_states(milk.spec.task, "train", count=1)[0])
        assert np.array_equal(np.random.rand(3), expected)

    def test_skipping_pictures_changes_none(self, milk: Simulator) -> None:
        """The last picture and proprioception equal those of LIBERO's own environment that renders every step."""
        from libero.libero.envs import OffScreenRenderEnv

        state = libero_states(milk.spec.task, "eval", count=1)[0]
        actions = _random_actions(6)
        milk.reset(state)
        chunk = run_chunk(milk, actions)
        own = OffScreenRenderEnv(
            bddl_file_name=str(milk.bddl_file), camera_heights=64, camera_widths=64
        )  # type: ignore[attr-defined]
        own.seed(0)
        own.reset()
        own.set_init_state(libero_assets.init_states(*resolve_task(milk.spec.task))[state.row])
        for action in [OPEN] * 10 + list(actions):
            seen, *_ = own.step(action)
        proprio = chunk.observation.proprio
        for name, key in (("base", "agentview_image"), ("wrist", "robot0_eye_in_hand_image")):
            assert np.array_equal(chunk.observation.images[name], seen[key][::-1, ::-1])
        assert np.array_equal(proprio[:3], seen["robot0_eef_pos"].astype(np.float32))
        assert np.array_equal(proprio[6:], seen["robot0_gripper_qpos"].astype(np.float32))
        own.close()

    def test_two_environments_share_a_process(self, milk: Simulator) -> None:
        """Interleaved, each draws its own scene: one GL context must not leak into the other."""
        state = libero_states(milk.spec.task, "train", count=1)[0]
        alone = _play(milk, state, _random_actions(2))
        other = make_simulator(_spec("libero_object/0", image_size=32))
        milk.reset(state)
        seen = _picture_bytes(milk)
        for action in _random_actions(2):
            other.reset(libero_states("libero_object/0", "train", count=1)[0])
            other.observe()
            milk.step(action)
            seen += _picture_bytes(milk)
        other.close()
        assert seen == alone
        assert _picture_bytes(milk) == alone[-3:]

    def test_the_gripper_opens_at_minus_one(self, milk: Simulator) -> None:
        state = libero_states(milk.spec.task, "train", count=1)[0]
        widths = {}
        for value in (-1.0, 1.0):
            milk.reset(state)
            for _ in range(20):
                milk.step(np.array([0.0] * 6 + [value]))
            fingers = milk.observe().proprio[6:]
            widths[value] = float(fingers[0] - fingers[1])
        assert widths[milk.action_space.gripper_open] > 0.07 > 0.01 > widths[1.0]

    def test_the_horizon_truncates_and_bad_actions_are_refused(self) -> None:
        simulator = make_simulator(_spec("libero_object/1", horizon=3, options={"wait_steps": 0}))
        simulator.reset(libero_states("libero_object/1", "train", count=1)[0])
        for bad, words in ((np.zeros(6), "shape"), (np.array([np.nan] + [0.0] * 6), "dx")):
            with pytest.raises(ActionError, match=words):
                simulator.step(bad)
        chunk = run_chunk(simulator, np.zeros((5, 7)))
        simulator.close()
        simulator.close()
        assert (
            chunk.valid_C.tolist() == [True] * 3 + [False] * 2
            and chunk.truncated_C[2]
            and not chunk.terminated_C.any()
        )

    @pytest.mark.parametrize(
        ("task", "row", "noise"),
        [
            ("libero_object/2", 0, 0.1),  # a bottle over the basket's rim
            ("libero_spatial/4", 40, 0.0),  # a bowl by its rim, out of a drawer
            ("libero_goal/0", 45, 0.0),  # a handle is pulled; a bowl stands below the way to it
            ("libero_goal/5", 49, 0.0),  # a plate is drawn around a box
            ("libero_goal/7", 41, 0.1),  # a knob is twisted
            ("libero_10/3", 40, 0.0),  # into a drawer, which is pushed shut
        ],
    )
    def test_the_expert_reaches_the_goal(self, task: str, row: int, noise: float) -> None:
        """On LIBERO's collision geometry; with noise on what is executed and clean labels inside the bounds."""
        simulator = make_simulator(_spec(task, options={"gl": "none"}))
        simulator.reset(libero_states(task, "eval", rows=[row])[0])
        expert = simulator.expert(np.random.default_rng(0), noise=noise)
        for _ in range(simulator.spec.horizon):
            execute, label = expert()
            assert (
                np.abs(label).max() <= 1 and np.abs(execute).max() <= 1 and execute[6] == label[6]
            )
            result = simulator.step(execute)
            if result.terminated or result.truncated:
                break
        simulator.close()
        assert result.success and result.terminated and result.reward == 1.0

    def test_one_backend_per_process(self, milk: Simulator) -> None:
        milk.reset(libero_states(milk.spec.task, "train", count=1)[0])
        with pytest.raises(ConfigError, match="already renders with osmesa, found a wish for egl"):
            make_simulator(_spec("libero_object/0", options={"gl": "egl"})).reset(
                InitialState("train", 0, 0, 0)
            )
