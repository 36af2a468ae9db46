"""Task names: three forms, one error that names them all, and never 'not found' for an import that failed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl import Task, register
from mmrl.errors import ConfigError, RegistryError
from mmrl.registry import BUILT_IN, resolve_task, task_from_spec, task_names
from mmrl.tasks.grounding import Grounding

PLUGIN = Path(__file__).parents[1] / "plugin_package" / "shape_counting.py"


def write_task(folder: Path, name: str, body: str = "", head: str = "") -> Path:
    """A Python file with a task class `name` derived from the plug-in's."""
    source = PLUGIN.read_text(encoding="utf-8").replace('@register("count_circles")\n', head)
    path = folder / f"{name.lower()}.py"
    path.write_text(
        source.replace("class CountCircles(Task)", f"class {name}(Task)") + body, encoding="utf-8"
    )
    return path


def installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, distribution: str, entries: list[tuple[str, str]]
) -> None:
    """What pip leaves behind for entry points: a dist-info folder on sys.path."""
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n", encoding="utf-8"
    )
    lines = "".join(f"{name} = {value}\n" for name, value in entries)
    (info / "entry_points.txt").write_text(f"[mmrl.tasks]\n{lines}", encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))


def test_built_in_names_resolve() -> None:
    assert resolve_task("grounding") is Grounding
    assert all(issubclass(resolve_task(name), Task) for name in BUILT_IN)
    assert isinstance(task_from_spec("grounding", {"mode": "dynamic"}), Grounding)


def test_a_class_in_a_file_resolves_to_the_same_class_every_time(tmp_path: Path) -> None:
    path = write_task(tmp_path, "Parity")
    found = resolve_task(f"{path}:Parity")
    assert issubclass(found, Task) and found.name == "parity"
    assert resolve_task(f"{path}:Parity") is found
    assert task_from_spec(f"{path}:Parity", {"question": "odd?"}).params == {"question": "odd?"}


def test_an_installed_package_offers_its_tasks_and_imports_them_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(tmp_path, "Lazy")
    installed(tmp_path, monkeypatch, "lazy-package", [("counting", "lazy:Lazy")])
    assert task_names()["lazy-package/counting"] == "installed (lazy:Lazy)"
    assert "lazy" not in sys.modules
    assert resolve_task("lazy-package/counting").name == "counting"


def test_unknown_names_list_what_exists_the_forms_and_what_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, "my-package", [("counting", "lazy:Lazy")])
    with pytest.raises(
        RegistryError, match=r"unknown task 'groundin'\. Did you mean 'grounding'\?"
    ) as error:
        resolve_task("groundin")
    assert all(
        form in str(error.value)
        for form in ("path/to/file.py:Name", "package/name", "built-in name")
    )
    with pytest.raises(RegistryError, match=r"Did you mean 'my-package/counting'\?"):
        resolve_task("my-package/countin")
    with pytest.raises(RegistryError, match=r"For a file write 'some/task\.py:ClassName'"):
        resolve_task("some/task.py")


def test_a_file_that_is_missing_or_lacks_the_class_says_so(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="found nothing at"):
        resolve_task(f"{tmp_path}/none.py:Parity")
    path = write_task(tmp_path, "Parity2")
    with pytest.raises(
        RegistryError, match=r"defines no 'Parity3'\. Did you mean 'Parity2'\? Tasks in it: Parity2"
    ):
        resolve_task(f"{path}:Parity3")
    empty = tmp_path / "empty.py"
    empty.write_text("Number = 3\n", encoding="utf-8")
    with pytest.raises(RegistryError, match="Tasks in it: none"):
        resolve_task(f"{empty}:Anything")
    with pytest.raises(
        RegistryError, match=r"expected a subclass of mmrl\.Task or mmrl\.Environment, found 3"
    ):
        resolve_task(f"{empty}:Number")


def test_a_failing_import_shows_its_own_error_and_can_be_fixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "needy.py"
    path.write_text("import package_nobody_has\n", encoding="utf-8")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="package_nobody_has"):
            resolve_task(f"{path}:Needy")
    installed(tmp_path, monkeypatch, "needy-package", [("needy", "needy:Needy")])
    with pytest.raises(ModuleNotFoundError, match="package_nobody_has"):
        resolve_task("needy-package/needy")
    write_task(tmp_path, "Needy")
    assert resolve_task(f"{path}:Needy").name == "needy"


def test_duplicate_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write_task(tmp_path, "First", head='@register("the_same")\n')
    second = write_task(tmp_path, "Second", head='@register("the_same")\n')
    assert resolve_task(f"{first}:First") is resolve_task("the_same")
    with pytest.raises(RegistryError, match=r"'the_same' is taken by .*First; rename one"):
        resolve_task(f"{second}:Second")
    installed(tmp_path, monkeypatch, "twice", [("task", "first:First"), ("task", "second:Second")])
    with pytest.raises(RegistryError, match="offered more than once"):
        resolve_task("twice/task")


def test_a_file_loaded_by_path_and_by_import_is_one_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_task(tmp_path, "Both", head='@register("both_ways")\n')
    assert resolve_task(f"{path}:Both").name == "both_ways"
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.import_module("both").Both.name == "both_ways"


def test_a_built_in_name_cannot_be_taken() -> None:
    with pytest.raises(
        RegistryError, match=r"'grounding' is built in \(mmrl\.tasks\.grounding:Grounding\)"
    ):

        @register("grounding")
        class Mine(Grounding):
            pass

    assert resolve_task("grounding") is Grounding


def test_only_tasks_can_be_registered() -> None:
    with pytest.raises(RegistryError, match="subclass"):
        register("thing")(int)  # type: ignore[type-var]


def test_parameters_a_task_refuses_are_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'mode'\?"):
        task_from_spec("grounding", {"moode": "iou"})
    with pytest.raises(
        ConfigError, match=r"'qestion'.* Did you mean 'question'\? It takes: question"
    ):
        task_from_spec(f"{PLUGIN}:CountCircles", {"qestion": "How many?"})


def test_a_class_that_lacks_methods_is_told_which(tmp_path: Path) -> None:
    path = write_task(tmp_path, "Half")
    path.write_text(
        path.read_text().replace("def gold(", "def golden(").replace("def wrong(", "def wrongly(")
    )
    with pytest.raises(
        ConfigError,
        match=r"half.py:Half': expected every method of a task, found Half without gold, wrong; write",
    ):
        task_from_spec(f"{path}:Half")


@pytest.mark.check_takes(2)
@pytest.mark.parametrize(
    "module", [f"mmrl.tasks.{name}" for name in ("maze", "jigsaw", "playground", "pages", "scenes")]
)
def test_generators_run_as_modules(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr[-1000:]
