"""Imports what a tokenizer, a picture's and a clip's processor are looked for in: a hundred modules.
See tests/kits/prepared_kit.py."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoProcessor

AutoProcessor.from_pretrained(Path(__file__).resolve().parents[2] / "assets" / "tiny_vlm")
