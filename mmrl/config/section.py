"""What every section of a configuration is. Part of mmrl.config."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = ["Section"]


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
