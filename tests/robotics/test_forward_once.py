"""robosuite's physics steps with one pass over positions and velocities: the same numbers as MuJoCo's own forward and step."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.robotics import robosuite as bridge
from mmrl.robotics.contract import EnvSpec, InitialState, Simulator, initial_states, make_simulator
from mmrl.robotics.forward_once import ForwardOnce

if importlib.util.find_spec("robosuite") is None:
    pytest.skip(f"needs robosuite: {bridge.ArmSimulator.install}", allow_module_level=True)

_UNWRITTEN = re.compile(r"(M|LD|efc_.*)_(rownnz|rowadr|colind|rowsuper)|i(LD|M|efc|acc|frc).*")
"""Memory of MuJoCo's arena for sparse matrices and islands, which holds anything where matrices are dense."""


def _everything(data: Any) -> dict[str, bytes]:
    """All arrays of an MjData."""
    names = (n for n in dir(data) if not n.startswith("_") and not _UNWRITTEN.fullmatch(n))
    arrays = ((n, getattr(data, n)) for n in names)
    found = {n: np.array(a).tobytes() for n, a in arrays if isinstance(a, np.ndarray)}
    for name in ("geom", "dist", "pos", "frame", "friction", "solref", "solimp", "efc_address"):
        found[f"contact.{name}"] = np.array(getattr(data.contact, name)).tobytes()
    return {**found, "time": np.float64(data.time).tobytes(), "ncon": bytes([data.ncon])}


def _simulator(suite: str, task: str, horizon: int) -> tuple[Simulator, InitialState]:
    if suite == "robosuite":
        options, state = {"gl": "none"}, initial_states("train", 1)[0]
    else:
        from mmrl.robotics.libero import libero_states

        options, state = {"gl": "none", "assets": "stand-in"}, libero_states(task, "train")[0]
    return make_simulator(EnvSpec(suite, task, horizon, 64, options=options)), state


def _sim(simulator: Simulator) -> Any:
    return simulator.env.sim  # type: ignore[attr-defined]


def _actions(count: int) -> np.ndarray:
    """Down onto the table with a hand that opens and closes, so that there are contacts; (count, 7)."""
    actions = np.clip(np.random.default_rng(0).normal(0, 0.6, (count, 7)), -1, 1)
    actions[: 2 * count // 3, 2] = -np.abs(actions[: 2 * count // 3, 2])
    return actions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "task"),
    [
        ("robosuite", "Lift"),
        ("robosuite", "Door"),
        ("robosuite", "NutAssemblySquare"),
        ("libero", "libero_goal/5"),
        ("libero", "libero_10/0"),
    ],
)
def test_an_episode_is_the_one_of_mujocos_own_steps_in_every_array(suite: str, task: str) -> None:
    """From the reset on, which places fixtures and settles objects, with robosuite's own MjSim on the other side."""
    (ours_alone, state), (theirs_alone, _) = (_simulator(suite, task, 60) for _ in range(2))
    simulators, touched = [ours_alone, theirs_alone], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmrl.robotics.kept_scene.ForwardOnce", lambda sim: None)
        simulators[1].reset(state)
    simulators[0].reset(state)
    ours, theirs = map(_sim, simulators)
    assert "step" in vars(ours) and not {"step", "forward"} & set(vars(theirs))
    for action in _actions(60):
        for simulator in simulators:
            simulator.step(action)
        a, b = _everything(ours.data._data), _everything(theirs.data._data)
        assert not [name for name in b if a[name] != b[name]]
        touched = max(touched, theirs.data._data.ncon)
    assert touched, "nothing was touched"
    for simulator in simulators:
        simulator.close()


class TestOnMuJoCoItself:
    """On a model without robosuite: what forward and step skip, and when they must not."""

    XML = """
    <mujoco><option timestep="0.002"/><worldbody>
      <geom name="floor" type="plane" size="1 1 .1"/>
      <body name="shelf" pos="0 0 .2"><geom type="box" size=".3 .3 .01"/></body>
      <body name="ball" pos="0 0 .26"><freejoint/><geom size=".05"/></body>
      <body pos=".5 0 .5"><joint name="hinge" axis="0 1 0" damping=".1"/><geom size=".05" pos=".1 0 0"/></body>
    </worldbody><actuator><motor joint="hinge" gear="5"/></actuator></mujoco>"""

    @staticmethod
    def _pair(xml: str = XML) -> tuple[Any, Any]:
        """(a simulation with ForwardOnce, a plain one)."""
        from robosuite.utils.binding_utils import MjSim

        ours, theirs = MjSim.from_xml_string(xml), MjSim.from_xml_string(xml)
        ForwardOnce(ours)
        return ours, theirs

    @staticmethod
    def _calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
        import mujoco

        calls: list[str] = []
        for name in ("mj_forward", "mj_forwardSkip", "mj_Euler", "mj_step"):
            own = getattr(mujoco, name)
            monkeypatch.setattr(
                mujoco, name, lambda *a, n=name, own=own: calls.append(n) or own(*a)
            )
        return calls

    def test_three_passes_become_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, theirs = self._pair()
        calls = self._calls(monkeypatch)
        for number in range(40):
            for sim in (ours, theirs):
                sim.forward()
                sim.data.ctrl[0] = np.sin(number)
                sim.forward()
                sim.data.ctrl[0] = np.cos(number)  # new at the step, as robosuite's is
                before = len(calls)
                sim.step()
                assert calls[before:] == (
                    ["mj_forwardSkip", "mj_Euler"] if sim is ours else ["mj_step"]
                )
            assert _everything(ours.data._data) == _everything(theirs.data._data)
        calls.clear()
        for _ in range(3):
            ours.forward()
        assert calls == ["mj_forward"]
        assert theirs.data._data.ncon > 0

    @pytest.mark.parametrize("change", ["place", "turn", "qpos", "qvel", "push", "ctrl", "mocap"])
    def test_what_has_changed_is_computed(self, change: str) -> None:
        xml = self.XML.replace('name="shelf"', 'name="shelf" mocap="true"')
        ours, theirs = self._pair(xml if change == "mocap" else self.XML)
        for forward in (True, False):
            for sim in (ours, theirs):
                sim.forward()
                if change == "place":  # as robosuite and LIBERO do with fixtures
                    sim.model.body_pos[1] += [0.0, 0.0, 0.03]
                elif change == "turn":
                    sim.model.body_quat[1] += [0.0, 0.3, 0.0, 0.0]
                elif change == "push":
                    sim.data.xfrc_applied[2] += [1.0, 2.0, 3.0, 0.0, 0.0, 0.0]
                elif change == "mocap":
                    sim.data.mocap_pos[0] += [0.0, 0.0, 0.03]
                else:
                    getattr(sim.data, change)[-1] += 0.3
                if forward:
                    sim.forward()
            assert not forward or _everything(ours.data._data) == _everything(theirs.data._data)
            for sim in (ours, theirs):
                sim.step()
            assert _everything(ours.data._data) == _everything(theirs.data._data)

    @pytest.mark.parametrize("steps", [0, 3])
    @pytest.mark.parametrize("again", [True, False])
    @pytest.mark.parametrize(
        ("name", "value"),
        [("qpos", np.nan), ("qvel", np.nan), ("qvel", 1e11), ("qfrc_applied", 1e14)],
    )
    def test_what_has_become_no_number_is_reset_as_mujoco_does(
        self,
        name: str,
        value: float,
        again: bool,
        steps: int,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Also where nothing has moved before, so that the state after the reset is the one that was passed."""
        monkeypatch.chdir(tmp_path)  # MuJoCo writes its warnings there
        ours, theirs = self._pair()
        for sim in (ours, theirs):
            for _ in range(steps):
                sim.step()
            sim.forward()
            getattr(sim.data, name)[-1] = value
            if again:
                sim.forward()
            sim.step()
        assert np.isfinite(ours.data.qpos).all() and ours.data.time == theirs.data.time
        assert _everything(ours.data._data) == _everything(theirs.data._data)
        warned = [[w.number for w in sim.data._data.warning] for sim in (ours, theirs)]
        assert warned[0] == warned[1] and sum(warned[0]) > 0

    def test_nothing_is_known_after_a_reset(self) -> None:
        """As recorded states are played again: reset, the same state, forward."""
        ours, theirs = self._pair()
        for sim in (ours, theirs):
            sim.data.qpos[-1] = 0.3
            sim.forward()
            state = sim.get_state()
            sim.reset()
            sim.set_state(state)
            sim.forward()
            assert np.linalg.norm(sim.data.xpos[2]) > 0.1
            sim.step()
        assert _everything(ours.data._data) == _everything(theirs.data._data)

    def test_another_integrator_keeps_mujocos_step(self) -> None:
        xml = self.XML.replace("timestep", 'integrator="implicitfast" timestep')
        ours, theirs = self._pair(xml)
        assert "step" not in vars(ours)
        for _ in range(20):
            for sim in (ours, theirs):
                sim.forward()
                sim.step()
        assert _everything(ours.data._data) == _everything(theirs.data._data)
