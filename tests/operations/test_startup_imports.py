"""What a process imports before it works: a worker its own room, transformers no more than it must, both with the same result."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import mmrl
from mmrl.operations import transformers_start
from mmrl.operations.transformers_start import one_of_each, packages_distributions
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
def test_transformers_reads_less_and_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against Python's own function and transformers' own module, executed once more without ours."""
    import transformers.utils.import_utils as ours

    assert isinstance(ours.__spec__.loader, transformers_start.ImportUtils), "mmrl came too late"
    usual = metadata.packages_distributions()
    assert dict(packages_distributions()) == usual and len(usual) > 100
    assert list(packages_distributions()) == list(usual)
    assert usual == ours.PACKAGE_DISTRIBUTION_MAPPING

    monkeypatch.setattr(metadata, "packages_distributions", lambda: usual)
    spec = spec_from_file_location("transformers.utils.plain_import_utils", ours.__file__)
    assert spec is not None and spec.loader is not None
    theirs = module_from_spec(spec)
    spec.loader.exec_module(theirs)
    models = Path(ours.__file__).parents[1] / "models"
    found = theirs.create_import_structure_from_path(models)
    again = ours.create_import_structure_from_path(str(models / "__init__.py"))
    assert again == found and list(again) == list(found)
    assert again is ours.create_import_structure_from_path(models)
    for text in ("x = 1", "__all__ = ['a']", "__all__ = ['a']\n__all__ = [\n  'b',\n  'c',\n]\nx"):
        assert ours.fetch__all__(text) == theirs.fetch__all__(text)


@pytest.mark.slow
def test_a_configuration_is_written_out_for_readers_only(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers' own message with its own text where it is shown; elsewhere nothing is put together."""
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.utils import logging

    level, written, plain = logging.get_verbosity(), [], PreTrainedConfig.to_json_string

    def noted(self: PreTrainedConfig, *arguments: bool) -> str:
        written.append(type(self).__name__)
        return plain(self, *arguments)

    monkeypatch.setattr(PreTrainedConfig, "to_json_string", noted)
    try:
        logging.set_verbosity_warning()
        config = AutoConfig.from_pretrained(REPO / "assets" / "tiny_vlm")
        assert not written and repr(config) == f"{written[0]} {plain(config)}"
        logging.set_verbosity_info()
        assert repr(AutoConfig.from_pretrained(REPO / "assets" / "tiny_vlm")) == repr(config)
    finally:
        logging.set_verbosity(level)
    assert f"Model config {config!r}" in capfd.readouterr().err
