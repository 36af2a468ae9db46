"""Pictures that cost far more to decode than they weigh. See scripts/torture_trust.py."""

from __future__ import annotations

import io

from scripts._serve_kit import ask
from scripts._torture_trust_serve import TEXT, data_url, stalling

__all__ = ["ATTACKS", "progressive_jpeg"]


def progressive_jpeg(side: int, more: int) -> bytes:
    """A grey progressive JPEG whose last scan, which changes no pixel, stands there `more` times again: each is a pass over them
    all, for a few bytes."""
    from PIL import Image

    stream = io.BytesIO()
    Image.new("L", (side, side), 100).save(stream, "JPEG", progressive=True)
    data = stream.getvalue()
    last, end = data.rindex(b"\xff\xda"), len(data) - 2
    if data[end:] != b"\xff\xd9":
        raise RuntimeError("expected a JPEG that ends with its end marker, found another file")
    return data[:end] + data[last:end] * more + data[end:]


ATTACKS = [
    stalling(
        "serve_progressive_picture",
        "a progressive JPEG of 7000 x 7000 in 10,000 scans, each a pass over the picture",
        lambda: ask(
            [
                {
                    "type": "image_url",
                    "image_url": {"url": data_url("image/jpeg", progressive_jpeg(7000, 10_000))},
                },
                TEXT,
            ]
        ),
    ),
]
