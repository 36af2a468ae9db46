"""What every process that reads requests needs, imported once by multiprocessing's fork server: from then on one starts in moments.

The fork server runs no thread and no code of a request; see mmrl/serve/pool.py.
"""

from __future__ import annotations

import gc
import importlib

from mmrl.operations.startup import loaded, loading
from mmrl.policy.families import BUILT_IN

loading()
for _name in (
    "mmrl.policy.loading",
    "mmrl.serve.preparing",
    "mmrl.video.visuals",
    "av",
    "torchvision",
    *(
        f"transformers.models.{kind}.{part}_{kind}"
        for family in BUILT_IN
        for kind in family.model_types
        for part in ("modeling", "processing")
    ),
):
    try:
        importlib.import_module(_name)
    except ImportError:  # without it a request that needs it is told so
        continue
# what is here stays, in every process that is forked from this one: to look through it would also copy its pages
gc.freeze()
loaded()
