"""What every section of a configuration is. Part of mmrl.config."""

from __future__ import annotations

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
