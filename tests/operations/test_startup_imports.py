"""What a process imports before it works: a worker its own room, transformers no more than it must, both with the same result."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zlib
from typing import Any

import pytest

import mmrl
from mmrl.operations.transformers_start import one_of_each, when_called
from tests.kits.engine_kit import REPO

HEAVY = {"torch", "transformers", "scipy", "pandas", "torchvision", "accelerate"}


@pytest.mark.parametrize(
    ("module", "more"),
    [
        ("mmrl", {"numpy", "pydantic", "PIL", "mmrl.registry"}),
        # a simulator's process and a verifier's, of which a run starts many
        ("mmrl.robotics.worker", {"pydantic", "PIL"}),
        ("mmrl.rewards.verifier_pool", {"numpy", "pydantic", "PIL", "mmrl.registry"}),
        ("mmrl.workers.scoring", {"numpy", "pydantic"}),
        ("mmrl.workers.prefetch", {"numpy", "pydantic"}),
        ("mmrl.tasks.browser.chromium", {"numpy", "pydantic"}),
        ("mmrl.cli.main", set()),
        ("mmrl.viewer.server", set()),
    ],
)
def test_what_a_process_does_not_import(module: str, more: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({HEAVY | more!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert not done.stdout.split()


def test_every_public_name_is_found_where_it_lives() -> None:
    for name in mmrl.__all__:
        assert getattr(mmrl, name) is not None and name in dir(mmrl)
    assert {name for names in mmrl._HOMES.values() for name in names} | {"__version__"} == set(
        mmrl.__all__
    )
    with pytest.raises(AttributeError, match="no attribute 'Sampel'"):
        _ = mmrl.Sampel  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match="is called mmrl.Turn now"):
        assert mmrl.Completion is mmrl.Turn


def test_of_a_list_of_files_one_of_each_kind_is_left() -> None:
    kept = [
        "a/__init__.py,sha256=x,1",
        "a/b.so,,",
        "one.py,,",
        "two.py,,",
        '"a,b/c.py",,',
        "../../bin/run,,",
        "a-1.0.dist-info/RECORD,,",
        ".hidden/x.py,,",
    ]
    more = ["a/c.py,sha256=y,2", "a/deep/d.py,,", "a/deep/b.so,,"]
    assert one_of_each("\n".join([*kept[:2], *more, *kept[2:]])) == "\n".join(kept)


@pytest.mark.slow
def test_transformers_reads_less_and_finds_the_same() -> None:
    """Against Python's own function and transformers' own module, executed once more without ours. In a process of its own: what is
    installed, and who imports transformers first, is other tests' subject."""
    code = """
import mmrl
import transformers.utils.import_utils as ours
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from mmrl.operations.transformers_start import ImportUtils, packages_distributions

assert isinstance(ours.__spec__.loader, ImportUtils), "mmrl came too late"
usual = metadata.packages_distributions()
assert packages_distributions() == usual and len(usual) > 100
assert list(packages_distributions()) == list(usual)
assert usual == ours.PACKAGE_DISTRIBUTION_MAPPING

metadata.packages_distributions = lambda: usual
spec = spec_from_file_location("transformers.utils.plain_import_utils", ours.__file__)
theirs = module_from_spec(spec)
spec.loader.exec_module(theirs)
models = Path(ours.__file__).parents[1] / "models"
found = theirs.create_import_structure_from_path(models)
again = ours.create_import_structure_from_path(str(models / "__init__.py"))
assert again == found and list(again) == list(found) and len(found) > 1
assert again is ours.create_import_structure_from_path(models)
for text in ("x = 1", "__all__ = ['a']", "__all__ = ['a']\\n__all__ = [\\n  'b',\\n  'c',\\n]\\nx"):
    assert ours.fetch__all__(text) == theirs.fetch__all__(text)
print("the same")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.endswith("the same\n"), done.stderr


@pytest.mark.slow
def test_a_configuration_is_written_out_for_readers_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers' own message with its own text where it is shown; elsewhere nothing is put together."""
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.utils import logging

    level, written, plain = logging.get_verbosity(), [], PreTrainedConfig.to_json_string

    def noted(self: PreTrainedConfig, *arguments: bool) -> str:
        written.append(type(self).__name__)
        return plain(self, *arguments)

    told: list[Any] = []
    monkeypatch.setattr(PreTrainedConfig, "to_json_string", noted)
    logger = logging.get_logger("transformers.configuration_utils")
    monkeypatch.setattr(logger, "handle", told.append)
    try:
        logging.set_verbosity_warning()
        config = AutoConfig.from_pretrained(REPO / "assets" / "tiny_vlm")
        assert not written and repr(config) == f"{written[0]} {plain(config)}"
        logging.set_verbosity_info()
        assert repr(AutoConfig.from_pretrained(REPO / "assets" / "tiny_vlm")) == repr(config)
    finally:
        logging.set_verbosity(level)
    said = [r.getMessage() for r in told if r.getMessage().startswith("Model config")]
    assert len(said) == 1 and said[0].startswith(f"Model config {type(config).__name__} {{\n")
    assert '"vocab_size": ' in said[0]


def test_a_function_is_imported_when_it_is_called() -> None:
    source = (
        "import math\nif math.pi:\n    from zlib import crc32, adler32\nfrom os import path as p\n"
    )
    names: dict[str, Any] = {}
    exec(compile(when_called(source, "zlib"), "x", "exec"), names)
    assert names["crc32"](b"a") == zlib.crc32(b"a") and names["adler32"](b"a", 7) == zlib.adler32(
        b"a", 7
    )
    assert names["crc32"] is not zlib.crc32 and names["p"] is os.path
    for text, module in ((source, "math"), ("from . import zlib", "zlib"), (source, "os")):
        assert ast.dump(when_called(text, module)) == ast.dump(ast.parse(text))


@pytest.mark.slow
def test_libraries_for_one_function_are_imported_with_its_call() -> None:
    code = """
import sys, mmrl, transformers
from transformers import AutoModelForImageTextToText
AutoModelForImageTextToText.from_pretrained("assets/tiny_vlm")
print(sorted({"scipy", "torchao"} & set(sys.modules)))
from transformers.loss import loss_for_object_detection, loss_rt_detr
modules = loss_for_object_detection, loss_rt_detr, sys.modules["transformers.quantizers.quantizer_torchao"]
print(*[type(m.__spec__.loader).__name__ for m in modules])
rows, columns = loss_for_object_detection.linear_sum_assignment([[4, 1], [2, 8]])
print(rows.tolist(), columns.tolist())
print("scipy.optimize" in sys.modules, "torchao" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    before, loaders, assigned, after = done.stdout.splitlines()
    assert before == "[]" and loaders == " ".join(["ImportedWhenCalled"] * 3)
    assert assigned == "[0, 1] [1, 0]" and after == "True False"
