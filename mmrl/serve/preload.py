"""What every process that reads requests needs, imported once by multiprocessing's fork server: from then on one starts in moments.

The fork server runs no thread and no code of a request; see mmrl/serve/pool.py.
"""

from __future__ import annotations

from mmrl.policy.families import BUILT_IN
from mmrl.workers.fork_server import import_for_all

import_for_all(
    (
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
    )
)
