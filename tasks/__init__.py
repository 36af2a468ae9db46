"""Tasks: one file per kind of question. Each builds the prompt, parses and scores the answer and sums up its benchmark.

mmrl.tasks.base        what tasks with one answer in an envelope share
mmrl.tasks.grounding   one phrase, one box; detection, counting, ocr, choice ... beside it (`mmrl tasks list`)
mmrl.tasks.mixed       rows of several tasks in one file
mmrl.tasks.readers     public data formats -> samples
mmrl.tasks.metrics     official numbers and submission files
mmrl.tasks.scenes      generated pictures; playground: questions of many tasks about them; pages: rendered GUI pages
"""

if __name__ != "mmrl.tasks":  # the repository's root is on sys.path
    raise ImportError(
        f"expected `import mmrl.tasks`, found an import as `{__name__}`: it would make a second copy of every module in it. "
        "Write mmrl.tasks; for a package `tasks` of your own, take mmrl's repository off PYTHONPATH or put yours before it"
    )
