"""What the README and the pages in docs/ tell people to type is what the program takes: commands, options, keys, their values, and
combinations of engine and schedule."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import click
import pytest
import typer
import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from mmrl.cli.main import app
from mmrl.cli.run import run_config
from mmrl.config import RunConfig
from mmrl.distributed.engines import train_engine_name
from mmrl.errors import ConfigError
from mmrl.robotics.config import EmbodiedConfig
from tests.docs.pages_kit import REPO, TEXT, commands

_START = re.compile(r"(?:torchrun (?P<options>.*?) -m mmrl\.cli\.main|mmrl) (?P<rest>.+)")


def lines() -> Iterator[tuple[str, str]]:
    """(page, command line) of every line of a block that starts the program."""
    yield from ((page, line) for page, line in commands() if _START.match(line))


def inline() -> Iterator[tuple[str, str]]:
    """(page, code) of everything in backticks within a paragraph, line breaks as blanks."""
    for page, text in TEXT.items():
        plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        # other programs' keys: tests/config/test_peer_keys.py
        plain = re.sub(r"<!-- results:peer_.*?<!-- end -->", "", plain, flags=re.DOTALL)
        for code in re.findall(r"`([^`]+)`", plain):
            yield page, " ".join(code.split())


@cache
def every_command() -> Any:
    return typer.main.get_command(app)


def command_of(arguments: list[str]) -> tuple[click.Command, list[str]]:
    """The command that they name, and the rest."""
    command: Any = every_command()
    rest = list(arguments)
    while hasattr(command, "commands"):
        assert rest and rest[0] in command.commands, f"mmrl has no command {rest[:1]}"
        command = command.commands[rest.pop(0)]
    return command, rest


def known_options(command: click.Command) -> set[str]:
    return {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}


LINES = sorted(set(lines()))
WRITTEN = ("docs/config.md", "docs/coming-from.md")
"""Pages whose tables are written from the settings themselves."""


@pytest.mark.parametrize(("page", "line"), LINES, ids=[line[:60] for _, line in LINES])
def test_a_documented_command_line_is_parsed_and_its_configuration_accepted(
    page: str, line: str
) -> None:
    found = _START.match(line)
    assert found is not None
    words = [word for word in shlex.split(found["rest"]) if word != "..."]
    if words[0].startswith("--"):
        assert words[0] in known_options(every_command())
        return
    command, rest = command_of(words)
    # an unknown option, or a missing argument, raises
    context = command.make_context(command.name, list(rest))
    config, overrides = context.params.get("config"), list(context.params.get("overrides") or [])
    if not isinstance(config, Path):
        return
    assert (REPO / config).is_file(), f"{page}: {config}"
    settings = run_config(REPO / config, overrides, context.params.get("preset"))
    processes = re.search(r"--nproc_per_node[ =](\d+)", found["options"] or "")
    if command.name in ("train", "sft"):
        asked = settings.supervised() if command.name == "sft" else settings
        train_engine_name(asked, int(processes[1]) if processes else 1)


def test_commands_and_options_in_sentences_exist() -> None:
    seen = 0
    for page, code in inline():
        if not code.startswith("mmrl ") or "|" in code:
            continue
        words = [w.split("=")[0] for w in shlex.split(code)[1:]]
        command, rest = command_of(
            [w for w in words if not re.fullmatch(r"[A-Z_.]+", w)] if words[0] != "cache" else words
        )
        unknown = [w for w in rest if w.startswith("--") and w not in known_options(command)]
        assert not unknown, f"{page}: `{code}`: {unknown}"
        seen += 1
    assert seen > 12


# ---- keys


def field_of(path: str) -> Any:
    """The annotation of a dotted key in the schema of a run, embodied or not; None where there is no such key."""
    for schema in (RunConfig, EmbodiedConfig):
        found: Any = schema
        for part in path.split("."):
            models = [
                m
                for m in (found, *_inside(found))
                if isinstance(m, type) and issubclass(m, BaseModel)
            ]
            if part.isdigit() and _inside(found):  # an entry of a list
                continue
            owner = next((m for m in models if part in m.model_fields), None)
            if owner is None:
                found = (
                    dict
                    if any("dict" in str(a) for a in (found, *_inside(found)))
                    and found is not schema
                    else None
                )
                break
            found = owner.model_fields[part].annotation
        if found is not None:
            return found
    return None


def _inside(annotation: Any) -> list[Any]:
    """Everything that an annotation such as list[X] | None is made of."""
    parts = list(get_args(annotation))
    return [*parts, *(deep for part in parts for deep in _inside(part))]


SECTIONS = {*RunConfig.model_fields, *EmbodiedConfig.model_fields}
_KEY = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)+)(?:: (.+)|=(\S+).*)?")


def keys() -> Iterator[tuple[str, str, str | None]]:
    """(page, dotted key, value as it is written or None); what ends in a file's suffix is a file."""
    for page, code in inline():
        found = _KEY.fullmatch(code.strip('"'))
        if (
            found
            and found[1].split(".")[0] in SECTIONS
            and not re.search(r"\.(py|sh|md|ya?ml|jsonl?|txt|parquet|html)$", found[1])
        ):
            yield page, found[1], found[2] or found[3]


def accepts(path: str, value: str) -> bool:
    try:
        TypeAdapter(field_of(path)).validate_python(yaml.safe_load(value))
    except ValidationError:
        return False
    return True


def test_every_key_that_is_named_is_in_the_schema_and_takes_the_value_beside_it() -> None:
    found = list(keys())
    unknown = sorted({f"{page}: {key}" for page, key, _ in found if field_of(key) is None})
    assert not unknown, unknown
    wrong = sorted(
        {
            f"{page}: {key}: {value}"
            for page, key, value in found
            if value is not None
            and not re.fullmatch(r"[A-Z][A-Z_.]*", value)
            and not accepts(key, value)
        }
    )
    assert not wrong, wrong
    assert len({key for _, key, _ in found}) > 25, "the pattern finds them"
    assert field_of("engine.trane") is None and field_of("data.train.0.path") is str
    assert not accepts("engine.train", "fsdp3") and not accepts("schedule.kind", "overlapped")


def test_tables_of_settings_name_values_that_are_accepted() -> None:
    """`| engine.train | auto (..), fsdp2 | .. |`: every bare word in backticks is one of its values."""
    rows = [
        row
        for page, text in TEXT.items()
        if page not in WRITTEN
        for row in re.findall(r"^\| `([a-z_]+\.[a-z_.]+)` \| (.*?) \|", text, re.MULTILINE)
    ]
    assert {"engine.train", "engine.rollout", "engine.workers", "model.attn"} <= {
        key for key, _ in rows
    }
    for key, cell in rows:
        values = [word for word in re.findall(r"`([a-z_0-9]+)`", cell)]
        assert values and all(accepts(key, value) for value in values), (key, values)


def test_what_pages_say_of_engines_and_schedules_is_what_validation_says(tmp_path: Path) -> None:
    """docs/scale.md: sharded engines train with schedule.kind serial; prompts in several processes, too."""
    text = " ".join(TEXT["docs/scale.md"].split())
    assert re.search(
        r"train all weights of a large policy, critic included, with `schedule\.kind: serial`", text
    )
    for train in ("deepspeed_zero2", "deepspeed_zero3", "fsdp2"):
        for kind, accepted in (("serial", True), ("pipelined", False), ("async", False)):
            config = run_config(
                REPO / "configs/maniskill.yaml", [f"engine.train={train}", f"schedule.kind={kind}"]
            )
            if accepted:
                assert train_engine_name(config, 8) == train
            else:
                with pytest.raises(ConfigError, match=r"expected schedule\.kind serial"):
                    train_engine_name(config, 8)
