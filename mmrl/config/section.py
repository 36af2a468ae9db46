"""What every section of a configuration is. Part of mmrl.config."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

__all__ = ["HomePath", "Section", "Seed"]

# a folder or file; no shell has seen a ~ of a YAML file
HomePath = Annotated[str, AfterValidator(os.path.expanduser)]
# more is too much for numpy.random.seed, which vLLM and simulators call
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]


class Section(BaseModel):
    """A section of the configuration: unknown keys are errors.

    The text below a key is its description: `mmrl config --explain KEY` and docs/config.md show it.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_default=True,
        protected_namespaces=(),
        validate_assignment=True,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Python's True is the integer 1, and so it would be taken for a number."""
        kinds = set(_kinds(cls.model_fields[str(info.field_name)].annotation))
        if kinds & {int, float} and not kinds & {bool, Any}:
            if _has_truth_value(value):
                raise PydanticCustomError(
                    "number_type", "expected a number, found true or false; give a number"
                )
            if float not in kinds and isinstance(value, float) and value.is_integer():
                return int(value)  # pydantic's words for 1e20 are of texts
        return value

    def follow(self, keys: Mapping[str, Any], *, applies: bool) -> None:
        """Give each of `keys` that is not set the value there if it `applies`, else the default of the class. Set is only what the
        user set (model_fields_set): a default that follows from another key must not outlive it."""
        for key, value in keys.items():
            if key not in self.model_fields_set:
                self.__dict__[key] = value if applies else type(self).model_fields[key].default

    def given(self) -> dict[str, Any]:
        """What was set, as a nested mapping of its own; also what was set in a section that was left at its default as a whole."""
        tree = {}
        for key in type(self).model_fields:
            value = _plain(getattr(self, key))
            if key in self.model_fields_set or (isinstance(getattr(self, key), Section) and value):
                tree[key] = value
        return tree


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.given()
    return [_plain(v) for v in value] if isinstance(value, list) else copy.deepcopy(value)


def _kinds(annotation: Any) -> Iterator[Any]:
    """The classes that a type is made of: list[int | None] -> int, None."""
    inner = get_args(annotation)
    if not inner and (isinstance(annotation, type) or annotation is Any):
        yield annotation
    for one in inner:
        yield from _kinds(one)


def _has_truth_value(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_truth_value, value))
    if isinstance(value, dict):
        return any(map(_has_truth_value, value.values()))
    return isinstance(value, bool)
