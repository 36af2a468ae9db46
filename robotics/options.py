"""`EnvSpec.options` of a suite, read and checked before anything is built.

    class Options(SimulatorOptions):
        reward: Literal["sparse", "dense"] = "sparse"
        stop_at_success: bool = True

    options = Options.read(spec)      # ConfigError: tiny/push: expected options.reward as 'sparse' or 'dense', found 'dens'. ...

Types are strict: neither the text "false" nor 1 is a truth value. A list, as YAML has it, may stand for a tuple.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from mmrl.errors import ConfigError, did_you_mean
from mmrl.robotics.contract import EnvSpec

__all__ = ["Place", "Seconds", "SimulatorOptions"]

Place = Annotated[
    tuple[float, float, float], Field(strict=False, description="three finite numbers")
]
"""x, y, z in metres."""
Seconds = Annotated[float, Field(ge=0)]

_WORDS = {  # what pydantic calls otherwise than someone who writes YAML
    "bool_type": "true or false",
    "dict_type": "names and values",
    "float_type": "a number",
    "int_type": "a whole number",
    "mapping_type": "names and values",
    "string_type": "text",
    "string_pattern_mismatch": "text that is not blank",
}


class SimulatorOptions(BaseModel):
    """Options of a suite; a subclass declares them with their defaults. A field's description says what is expected of a value
    that is more than a number or a name."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @classmethod
    def read(cls, spec: EnvSpec) -> Self:
        """The options of `spec`. Raises ConfigError that names each option or value there is not."""
        try:
            return cls.model_validate(dict(spec.options))
        except ValidationError as error:
            told = dict.fromkeys(cls._told(item, spec) for item in error.errors())
            where = f"{spec.suite}/{spec.task}"
            raise ConfigError("\n".join(f"{where}: {words}" for words in told)) from error

    @classmethod
    def _told(cls, item: Any, spec: EnvSpec) -> str:
        names, found = [str(part) for part in item["loc"]], item["input"]
        known = cls.model_fields
        if names[0] not in known:  # nor is what is no text the name of one
            return f"expected options {', '.join(known)}, found {item['loc'][0]!r}.{did_you_mean(names[0], known)}"
        if item["type"] == "value_error":  # a rule of the suite's own, in whole sentences
            return str(item["ctx"]["error"])
        annotations = list(_annotations(known[names[0]]))
        words = next(filter(None, (getattr(a, "description", None) for a in annotations)), None)
        if words:
            names, found = names[:1], spec.options[names[0]]
        else:
            words = _WORDS.get(item["type"]) or item["msg"].removeprefix("Input should be ")
        words += " or null" if type(None) in annotations else ""
        hint = ""
        if isinstance(found, str):
            choices = [c for a in annotations for c in get_args(a) if isinstance(c, str)]
            hint = did_you_mean(found, choices)
        return f"expected options.{'.'.join(names)} as {words}, found {found!r}.{hint}"


def _annotations(field: FieldInfo) -> Iterator[Any]:
    """The field, its type, the members of a union, and what they are annotated with."""
    yield field
    for one in (field.annotation, *get_args(field.annotation)):
        yield one
        yield from getattr(one, "__metadata__", ())
