"""YAML that people write: a key given twice is an error there, where YAML's own reader takes the last one without a word.

python -c "from mmrl.config.yaml_text import read_yaml; print(read_yaml('optim: {lr: 1e-4}'))"
"""

from __future__ import annotations

from typing import Any

import yaml

__all__ = ["read_yaml"]


class _Once(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            # what `<<` brings is there to be written over
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in lines:
                raise yaml.composer.ComposerError(
                    None,
                    None,
                    f"expected every key once, found {key.value!r} again, first in line {lines[key.value]}; put "
                    "both together",
                    key.start_mark,
                )
            lines[key.value] = key.start_mark.line + 1
        return node


def read_yaml(text: str) -> Any:
    """What a YAML text says. Raises yaml.YAMLError, which names the line, also of a key that its mapping has already."""
    return yaml.load(text, _Once)  # a SafeLoader
