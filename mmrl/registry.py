"""Names of tasks. Three forms, tried in this order and all named in the error when none fits:

    path/to/file.py:Name     a class in a file
    package/name             entry-point group "mmrl.tasks" of an installed package, loaded on demand
    name                     built in, or registered with @register in this process
    python:name              a class or a function that a script handed to mmrl.Trainer (`offer`)

The class is a Task, or an Environment, which gets a task of JSON rows around it (mmrl/data/environment_rows.py).

`task_from_spec` makes a task from such a name and its parameters; worker processes rebuild tasks the same way. What the running
script itself defines they cannot import: it is carried to them by value (`carried`, `adopt`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import pickle
import sys
import warnings
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from mmrl.data.environment_rows import task_around
from mmrl.environment import Environment
from mmrl.errors import ConfigError, RegistryError, did_you_mean
from mmrl.task import Task

__all__ = [
    "BUILT_IN",
    "EPISODES",
    "GROUP",
    "OFFERED",
    "WRAPPERS",
    "adopt",
    "carried",
    "check_code",
    "current_target",
    "no_new_code",
    "offer",
    "register",
    "resolve_task",
    "task_from_spec",
    "task_names",
    "using",
]

GROUP = "mmrl.tasks"
BUILT_IN: dict[str, str] = {  # imported only when asked for
    "grounding": "mmrl.tasks.grounding:Grounding",
    "detection": "mmrl.tasks.detection:Detection",
    "counting": "mmrl.tasks.counting:Counting",
    "ocr": "mmrl.tasks.ocr:OCR",
    "choice": "mmrl.tasks.choice:Choice",
    "boolean": "mmrl.tasks.boolean:Boolean",
    "numeric": "mmrl.tasks.numeric:Numeric",
    "math": "mmrl.tasks.math_expression:Math",
    "open_text": "mmrl.tasks.open_text:OpenText",
    "chart": "mmrl.tasks.chart:Chart",
    "classification": "mmrl.tasks.classification:Classification",
    "jigsaw": "mmrl.tasks.jigsaw:Jigsaw",
    "maze": "mmrl.tasks.maze:Maze",
    "spatial": "mmrl.tasks.spatial:Spatial",
    "scene_graph": "mmrl.tasks.scene_graph:SceneGraph",
    "gui_grounding": "mmrl.tasks.gui_grounding:GuiGrounding",
    "gui_action": "mmrl.tasks.gui_action:GuiAction",
    "temporal_grounding": "mmrl.tasks.temporal_grounding:TemporalGrounding",
    "grounded_qa": "mmrl.tasks.grounded_qa:GroundedQA",
    "st_grounding": "mmrl.tasks.st_grounding:SpatioTemporalGrounding",
    "tracking": "mmrl.tasks.tracking:Tracking",
    "mixed": "mmrl.tasks.mixed:Mixed",
}
# around another task, which their parameters name: none of them can be made without parameters
WRAPPERS: dict[str, str] = {
    "judged": "mmrl.tasks.judged:Judged",
    "process": "mmrl.tasks.process:Process",
}
# played in an environment, whose rewards are the reward
EPISODES: dict[str, str] = {
    "browser": "mmrl.tasks.browser.task:Browser",
    "browsergym": "mmrl.tasks.browsergym_worlds:BrowserGymEnvironment",
    "gymnasium": "mmrl.tasks.gymnasium_worlds:GymnasiumEnvironment",
    "openenv": "mmrl.tasks.openenv_worlds:OpenEnvEnvironment",
    "rewind": "mmrl.tasks.rewind:Rewind",
    "verifiers": "mmrl.tasks.verifiers_worlds:Verifiers",
    "zoom": "mmrl.tasks.zoom:Zoom",
}
_SHIPPED = ChainMap(BUILT_IN, WRAPPERS, EPISODES)

OFFERED = "python:"
"""How names of objects begin that a script handed over."""
_registered: dict[str, type[Task]] = {}
_used: Counter[str] = Counter()
TaskClass = TypeVar("TaskClass", bound=type[Task])


# where the settings at hand were found, the innermost last; empty: the user's own
_without_new_code: list[str] = []


@contextlib.contextmanager
def no_new_code(where: str, *, trust_code: bool = False) -> Iterator[None]:
    """Within it a name `file.py:Name` resolves only if that file was loaded before, because the user named it.

    `where` is the file the names were found in, for the error. With `trust_code` nothing is refused. It holds for all threads of
    the process; reward workers rebuild only tasks that were made here before.
    """
    if trust_code:
        yield
        return
    _without_new_code.append(where)
    try:
        yield
    finally:
        _without_new_code.remove(where)


def check_code(name: str) -> None:
    """Raise RegistryError for code that would be loaded because found settings name it."""
    if _without_new_code:
        raise RegistryError(
            f"{_without_new_code[-1]}: expected the name of a built-in task or of an installed package "
            f"(package/name), found '{name}', which is code to run; name that task yourself on the command line, "
            "or say --trust-code when the file is yours"
        )


def register(name: str) -> Callable[[TaskClass], TaskClass]:
    """Class decorator: give a Task its name and make it known to this process. Raises RegistryError on duplicates."""

    def decorate(cls: TaskClass) -> TaskClass:
        if not (isinstance(cls, type) and issubclass(cls, Task)):
            raise RegistryError(f"expected @register on a subclass of mmrl.Task, found {cls!r}")
        if name in _SHIPPED and _SHIPPED[name] != f"{_module_of(cls)}:{cls.__qualname__}":
            raise RegistryError(
                f"task name '{name}' is built in ({_SHIPPED[name]}); choose another"
            )
        known = _registered.get(name)
        if known is not None and _origin(known) != _origin(cls):
            raise RegistryError(
                f"task name '{name}' is taken by {known.__module__}.{known.__qualname__}; rename one"
            )
        cls.name = name
        _registered[name] = cls
        return cls

    return decorate


def offer(cls: type[Task], name: str) -> str:
    """Make a class known to this process and its workers, and return the name it has in a configuration: 'python:name'.

    Another class of the same name replaces it (in a notebook a cell is run again), unless a run is using it (`using`): then this
    one gets a number.
    """
    spec, number = OFFERED + name, 2
    while spec in _used and _registered[spec] is not cls:
        spec, number = f"{OFFERED}{name}-{number}", number + 1
    cls.name = cls.name or name
    _registered[spec] = cls
    return spec


@contextlib.contextmanager
def using(spec: str, cls: type[Task]) -> Iterator[None]:
    """`spec` is `cls` meanwhile, whatever has been offered under its name since. Raises ConfigError where a run uses another."""
    if spec in _used and _registered[spec] is not cls:
        raise ConfigError(
            f"expected no run with another reward of the name '{spec}' at the same time, found one; give one of the "
            "two functions another name"
        )
    _registered[spec] = cls
    _used[spec] += 1
    try:
        yield
    finally:
        _used[spec] -= 1
        if not _used[spec]:
            del _used[spec]


def carried(wanted: Iterable[str] = ()) -> bytes:
    """The tasks of this process that another one cannot import, for `adopt` there: those of the names `wanted` that were offered,
    and what the script itself registers. Raises ConfigError for a wanted one that cannot be sent."""
    import cloudpickle

    own: dict[str, bytes] = {}
    for name, cls in _registered.items():
        offered = name in wanted and name.startswith(OFFERED)
        if not offered and cls.__module__ != "__main__":
            continue
        try:
            own[name] = cloudpickle.dumps(cls)
        except Exception as error:  # whatever the object's own pickling raises
            if name in wanted:
                raise ConfigError(
                    f"'{name}' cannot be sent to a reward worker: {error}; make locks, files, connections and models "
                    "inside the function (once, on first use), or set reward.workers: 0"
                ) from error
    return pickle.dumps(own) if own else b""


def adopt(tasks: bytes) -> None:
    """Know the tasks that another process of this run carried here."""
    if tasks:
        import cloudpickle

        _registered.update(
            {name: cloudpickle.loads(content) for name, content in pickle.loads(tasks).items()}
        )


def _module_of(cls: type[Task]) -> str:
    """Name of the class's module, also when that module is run with `python -m`."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if cls.__module__ == "__main__" and spec is not None else cls.__module__


def _origin(cls: type[Task]) -> tuple[str, str]:
    """Source file and qualified name: one file may be loaded twice, by path and by import, and is still one task."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return str(Path(file).resolve()) if file else cls.__module__, cls.__qualname__


def task_names() -> dict[str, str]:
    """Every name that resolves -> where it comes from."""
    names = {name: f"built in ({target})" for name, target in _SHIPPED.items()}
    names.update(
        {n: f"registered ({c.__module__})" for n, c in _registered.items() if n not in names}
    )
    names.update({_entry_name(e): f"installed ({e.value})" for e in entry_points(group=GROUP)})
    return dict(sorted(names.items()))


def _entry_name(entry: EntryPoint) -> str:
    package = entry.dist.name if entry.dist is not None else entry.module.partition(".")[0]
    return f"{package}/{entry.name}"


_OWN = ("tasks", "rewards", "robotics", "video")
"""Packages of mmrl that lie at the top of the repository and are imported as mmrl.NAME."""


def current_target(target: str) -> str:
    """'module:Class' under today's name: settings of a run that was saved before mmrl became one namespace say `robotics.arm:X`
    for `mmrl.robotics.arm:X`. Warns of an old name; one of a package `robotics` of the user's own stays."""
    package, dot, _ = target.partition(".")
    if not dot or package not in _OWN or _is_foreign(package):
        return target
    warnings.warn(
        f"'{target}' is called 'mmrl.{target}' now; write that in the configuration",
        DeprecationWarning,
        stacklevel=3,
    )
    return f"mmrl.{target}"


def _is_foreign(package: str) -> bool:
    """Whether `package` at the top level is somebody else's: there, and not our folder beside mmrl/."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return package in sys.modules
    if spec is None:
        return False
    places = spec.submodule_search_locations or ([spec.origin] if spec.origin else [])
    return all(Path(place).resolve() != _folder_of(package) for place in places)


def _folder_of(package: str) -> Path:
    """Where our package really lies: in a clone mmrl/PACKAGE is a link to the folder at the top."""
    return (Path(__file__).absolute().parent / package).resolve()


def _own_module(path: Path) -> str | None:
    """The name under which a resolved file is imported where it is one of mmrl's own: 'mmrl.tasks.grounding'."""
    for package in _OWN:
        if path.is_relative_to(folder := _folder_of(package)):
            return ".".join(("mmrl", package, *path.relative_to(folder).with_suffix("").parts))
    return None


def _as_task(found: Any, spec: str) -> type[Task]:
    if isinstance(found, type) and issubclass(found, Environment):
        found = task_around(found)
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise RegistryError(
            f"'{spec}': expected a subclass of mmrl.Task or mmrl.Environment, found {found!r}"
        )
    if not found.name:
        found.name = spec.rpartition(":")[2].rpartition("/")[2].lower()
    return found


def _from_file(spec: str) -> type[Task]:
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise RegistryError(f"'{spec}': expected a Python file, found nothing at {path}")
    module_name = (
        f"mmrl_user_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    )
    own = _own_module(path)  # never a second copy of a module of ours
    module = sys.modules.get(module_name) if own is None else importlib.import_module(own)
    if module is None:
        check_code(spec)
        loader_spec = importlib.util.spec_from_file_location(module_name, path)
        assert loader_spec is not None and loader_spec.loader is not None
        module = importlib.util.module_from_spec(loader_spec)
        # before execution, so that dataclasses and pickling find their module
        sys.modules[module_name] = module
        try:
            loader_spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    found = getattr(module, name, None)
    if found is None:
        public = [
            n
            for n, v in vars(module).items()
            if isinstance(v, type)
            and issubclass(v, (Task, Environment))
            and v not in (Task, Environment)
        ]
        raise RegistryError(
            f"'{spec}': {path.name} defines no '{name}'.{did_you_mean(name, public)} "
            f"Tasks in it: {', '.join(public) or 'none'}"
        )
    return _as_task(found, spec)


def _from_entry_point(spec: str) -> type[Task]:
    matches = [e for e in entry_points(group=GROUP) if _entry_name(e) == spec]
    if not matches:
        known = [_entry_name(e) for e in entry_points(group=GROUP)]
        raise RegistryError(
            f"no installed package offers '{spec}' in entry-point group '{GROUP}'."
            f"{did_you_mean(spec, known)} Installed: {', '.join(known) or 'none'}"
        )
    if len({e.value for e in matches}) > 1:
        raise RegistryError(
            f"'{spec}' is offered more than once: {', '.join(e.value for e in matches)}; uninstall one"
        )
    return _as_task(matches[0].load(), spec)


def resolve_task(spec: str) -> type[Task]:
    """The Task class a name stands for. A failing import shows its own error, never 'not found'."""
    if spec.startswith(OFFERED) and spec not in _registered:
        raise RegistryError(
            f"'{spec}' is a Python object of the script that started its run, and this process has no such object; "
            "continue that run by its script, with mmrl.Trainer(..., resume=True)"
        )
    if ".py:" in spec:
        return _from_file(spec)
    if "/" in spec and not spec.endswith(".py") and not spec.startswith(OFFERED):
        return _from_entry_point(spec)
    if spec in _registered:
        return _registered[spec]
    if (target := _SHIPPED.get(spec)) is not None:
        module, _, name = target.partition(":")
        return _as_task(getattr(importlib.import_module(module), name), spec)
    hint = f" For a file write '{spec}:ClassName'." if spec.endswith(".py") else ""
    raise RegistryError(
        f"unknown task '{spec}'.{did_you_mean(spec, task_names())}{hint} Known: {', '.join(task_names())}. "
        f"Forms: path/to/file.py:Name, package/name (entry points '{GROUP}'), or a built-in name"
    )


def task_from_spec(spec: str, params: dict[str, Any] | None = None) -> Task:
    """An instance of the task `spec` with `params`. Raises ConfigError for parameters it does not take, and for a class that lacks
    some of a task's methods."""
    cls, settings = resolve_task(spec), params or {}
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise ConfigError(
            f"task '{spec}': expected every method of a task, found {cls.__qualname__} without {', '.join(missing)}; "
            "write them (see mmrl.Task for what each returns)"
        )
    try:
        inspect.signature(cls).bind(**settings)
    except TypeError as error:
        known = list(inspect.signature(cls).parameters)
        close = "".join(did_you_mean(name, known) for name in settings if name not in known)
        raise ConfigError(
            f"task '{spec}': {error}, found params {sorted(settings)}.{close} "
            f"It takes: {', '.join(known) or 'none'}"
        ) from error
    return cls(**settings)
