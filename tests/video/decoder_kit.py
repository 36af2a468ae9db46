"""What video tests share: a decoder that cannot be imported here is skipped (torchcodec is not installed everywhere)."""

from __future__ import annotations

import pytest

from mmrl.errors import MissingExtraError
from mmrl.video.probing import import_library

__all__ = ["needs"]

_MODULES = {"pyav": "av", "opencv": "cv2", "torchcodec": "torchcodec.decoders", "decord": "decord"}


def needs(decoder: str) -> str:
    """`decoder`; the calling test is skipped where its library cannot be imported."""
    try:
        import_library(_MODULES[decoder])
    except MissingExtraError as err:
        pytest.skip(str(err))
    return decoder
