"""Parts about the form of a text rather than its answer: length, repetition. Off unless a task's weights name them."""
from __future__ import annotations

from rewards.router import PartFactory

__all__ = ["PARTS"]

PARTS: dict[str, PartFactory] = {}
"""Part name -> factory(**parameters) -> part(prediction, sample, ctx); prediction has .text, .answer and .correct."""
