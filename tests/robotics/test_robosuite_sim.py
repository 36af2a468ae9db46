"""robosuite's own tasks as simulators: real mujoco, software rendering.

MUJOCO_GL=osmesa pytest tests/robotics/test_robosuite_sim.py
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mmrl.errors import ConfigError, MissingExtraError
from mmrl.robotics import kept_scene
from mmrl.robotics import robosuite as bridge
from mmrl.robotics.contract import EnvSpec, Simulator, initial_states, make_simulator

if importlib.util.find_spec("robosuite") is None:
    pytest.skip(f"needs robosuite: {bridge.ArmSimulator.install}", allow_module_level=True)

# of five: one block, one assembly, one fixture; stacking and picking cans add nothing to what a reset restores
TASKS = ("Lift", "NutAssemblySquare", "Door")


def _spec(task: str, **changes: Any) -> EnvSpec:
    return EnvSpec(
        "robosuite",
        task,
        **{"horizon": 100, "image_size": 64, "options": {"gl": "osmesa"}, **changes},
    )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (_spec("Lft"), "Did you mean 'Lift'?"),
        (_spec("Lift", cameras=("bas",)), "Did you mean 'base'?"),
        (_spec("Lift", options={"gll": 1}), "Did you mean 'gl'?"),
    ],
)
def test_what_does_not_exist(spec: EnvSpec, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_simulator(spec)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("version", "warned"),
    [("3.3.7", False), ("3.4.0", True), ("4.0.0", True), ("3.10.1", True), ("2.3.7", False)],
)
def test_mujoco_from_3_4_on_is_warned_about(version: str, warned: bool) -> None:
    assert (bridge.mujoco_warning(version) is not None) == warned


def test_axis_angle_against_scipy() -> None:
    """Equal rotations; with w >= 0 also equal vectors (LIBERO's formula keeps the sign of w, scipy's takes the short way)."""
    from scipy.spatial.transform import Rotation

    quaternions = Rotation.random(50, random_state=0).as_quat()
    for quaternion in [*quaternions, np.array([0, 0, 0, 1.0]), np.array([1.0, 0, 0, 0])]:
        found = Rotation.from_rotvec(bridge.axis_angle(quaternion))
        assert (found * Rotation.from_quat(quaternion).inv()).magnitude() < 1e-6
        if quaternion[3] >= 0:
            assert np.allclose(
                bridge.axis_angle(quaternion), Rotation.from_quat(quaternion).as_rotvec(), atol=1e-6
            )


def test_a_missing_gl_library_names_package_and_alternative(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        bridge, "_GL_LIBRARIES", {"osmesa": ("libnone.so",), "egl": ("libnone.so",)}
    )
    monkeypatch.setitem(
        sys.modules, "robosuite.utils.binding_utils", SimpleNamespace(_MUJOCO_GL="osmesa")
    )
    with pytest.raises(
        MissingExtraError, match=r"apt-get install libosmesa6\) or choose the other: MUJOCO_GL=egl"
    ):
        bridge.choose_gl("osmesa")


def test_the_environment_variable_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    # as in a process that renders nothing yet
    monkeypatch.delitem(sys.modules, "robosuite.utils.binding_utils", raising=False)
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    with pytest.raises(
        ConfigError, match=r"expected auto, osmesa or egl \(option gl or MUJOCO_GL\), found 'glfw'"
    ):
        bridge.choose_gl("auto")


@pytest.mark.slow  # fresh processes
@pytest.mark.parametrize(
    ("backend", "first"), [("osmesa", ""), ("egl", ""), ("osmesa", "import mujoco")]
)
def test_a_simulator_made_before_the_policy_does_not_crash_it(backend: str, first: str) -> None:
    """Mesa brings an LLVM whose symbols libtriton binds to when it is loaded later: without care, SIGSEGV in torch._dynamo."""
    script = f"""
{first}
from mmrl.robotics.contract import EnvSpec, initial_states, make_simulator
sim = make_simulator(EnvSpec('robosuite', 'Lift', horizon=10, image_size=64, options={{'gl': {backend!r}}}))
sim.reset(initial_states('train', 1)[0])
picture = sim.observe().images['base']
assert picture.std() > 1, picture
# an NVIDIA driver's EGL brings none
assert {backend!r} == 'egl' or any('libLLVM' in line for line in open('/proc/self/maps'))
import torch._dynamo
print('alive')
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "MUJOCO_GL": backend},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr[-2000:]


def test_another_robosuite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "robosuite", SimpleNamespace(__version__="1.5.2"))
    with pytest.raises(MissingExtraError, match=r"expected robosuite 1\.4 .* found 1\.5\.2"):
        bridge.import_robosuite("pip install X")


@pytest.mark.slow
@pytest.mark.render("libOSMesa.so.8")
class TestEpisodes:
    @pytest.mark.parametrize("task", TASKS)
    def test_a_state_starts_the_same_way_every_time(self, task: str) -> None:
        simulator = make_simulator(_spec(task, cameras=("base", "wrist")))
        first, second = initial_states("train", 2)
        seen = []
        for state in (first, second, first):
            simulator.reset(state)
            for _ in range(2):
                simulator.step(np.full(7, 0.2))
            observation = simulator.observe()
            seen.append(
                [
                    *(picture.tobytes() for picture in observation.images.values()),
                    observation.proprio.tobytes(),
                ]
            )
        versions = simulator.versions()
        simulator.close()
        assert seen[0] == seen[2] != seen[1]
        assert (
            versions["render"] == "osmesa"
            and versions["robosuite"].startswith("1.4")
            and versions["renderer"]
        )
        assert observation.images["base"].std() > 10 and observation.proprio.shape == (
            simulator.proprio_dim,
        )

    def test_pictures_equal_those_of_an_environment_that_renders_every_step(self) -> None:
        import robosuite

        state = initial_states("eval", 1)[0]
        actions = np.random.default_rng(0).uniform(-1, 1, (5, 7))
        simulator = make_simulator(_spec("Lift"))
        simulator.reset(state)
        for action in actions:
            simulator.step(action)
        ours = simulator.observe()
        simulator.close()
        controller = robosuite.load_controller_config(default_controller="OSC_POSE")
        own = robosuite.make(
            "Lift",
            robots="Panda",
            controller_configs=controller,
            has_renderer=False,
            control_freq=20,
            camera_names="agentview",
            camera_heights=64,
            camera_widths=64,
        )
        np.random.seed(state.seed)
        own.reset()
        for action in actions:
            seen, *_ = own.step(action)
        own.close()
        assert np.array_equal(ours.images["base"], seen["agentview_image"][::-1])
        assert np.array_equal(ours.proprio[:3], seen["robot0_eef_pos"].astype(np.float32))

    def test_the_expert_lifts(self) -> None:
        simulator = make_simulator(_spec("Lift"))
        simulator.reset(initial_states("train", 1)[0])
        expert = simulator.expert(np.random.default_rng(0), noise=0.1)
        for _ in range(simulator.spec.horizon):
            result = simulator.step(expert()[0])
            if result.terminated:
                break
        simulator.close()
        assert result.success and result.reward > 0

    def test_no_expert_for_the_others(self) -> None:
        with pytest.raises(
            ConfigError, match="expected a task with a scripted expert, found robosuite/Door"
        ):
            make_simulator(_spec("Door")).expert(np.random.default_rng(0))


def _own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on simulators reset as robosuite does by itself."""
    nothing = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(bridge, "KeptScene", lambda env: nothing)


@pytest.mark.slow
@pytest.mark.render("libOSMesa.so.8")
class TestKeptScenes:
    @pytest.mark.parametrize("task", ["Door", "Lift"])
    def test_episodes_equal_those_of_scenes_built_anew(
        self, task: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also after an episode that wrote into its model. Lift's cube changes its size, so nothing of it may be kept."""
        ours = make_simulator(_spec(task, cameras=("base", "wrist")))
        states = initial_states("train", 3)
        ours.reset(states[0])
        _spoil(ours)
        _own_way(monkeypatch)
        theirs = make_simulator(_spec(task, cameras=("base", "wrist")))
        theirs.reset(states[0])
        for state in (*states, states[0]):
            seen = []
            for simulator in (ours, theirs):
                simulator.reset(state)
                pictures = []
                for action in np.random.default_rng(3).uniform(-1, 1, (4, 7)):
                    simulator.step(action)
                    pictures += [p.tobytes() for p in simulator.observe().images.values()]
                sim = simulator.env.sim  # type: ignore[attr-defined]
                seen.append((pictures, sim.get_state().flatten().tobytes(), _bytes_of(sim.model)))
            assert seen[0] == seen[1]
            _spoil(ours)
        ours.close()
        theirs.close()

    def test_a_scene_is_compiled_once_for_all_environments_of_a_process(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import mujoco
        from robosuite.utils import binding_utils

        made: list[str] = []
        compiling = mujoco.MjModel.from_xml_string
        monkeypatch.setattr(
            kept_scene, "compile_xml", lambda xml: made.append("model") or compiling(xml)
        )
        draw = binding_utils.MjRenderContext._set_mujoco_context_and_buffers
        monkeypatch.setattr(
            binding_utils.MjRenderContext,
            "_set_mujoco_context_and_buffers",
            lambda self: made.append("context") or draw(self),
        )
        simulators = [make_simulator(_spec("Door")) for _ in range(2)]
        for simulator in simulators:
            for state in initial_states("train", 3):
                simulator.reset(state)
        # robosuite draws once itself, when it makes an environment
        assert sorted(made) == ["context"] * 4 + ["model"]
        for simulator in simulators:
            simulator.close()
        assert not kept_scene._MODELS

    def test_nothing_is_left_when_it_is_closed(self) -> None:
        simulator = make_simulator(_spec("Door"))
        for state in initial_states("train", 2):
            simulator.reset(state)
        context = simulator.env.sim._render_context_offscreen  # type: ignore[attr-defined]
        left = [weakref.ref(context), weakref.ref(context.con)]
        del context
        simulator.close()
        assert [ref() for ref in left] == [None, None]
        simulator.reset(initial_states("train", 1)[0])
        assert simulator.observe().images["base"].std() > 10
        simulator.close()


def _spoil(simulator: Simulator) -> None:
    model = simulator.env.sim.model  # type: ignore[attr-defined]
    model.geom_rgba[:], model.body_pos[:] = 0.5, model.body_pos + 0.1


def _bytes_of(model: Any) -> list[bytes]:
    """What robosuite and a test write into a model."""
    return [
        np.array(getattr(model, name)).tobytes()
        for name in ("body_pos", "body_quat", "geom_rgba", "site_rgba", "qpos0")
    ]
