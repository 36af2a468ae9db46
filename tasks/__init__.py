"""Tasks: one file per kind of question. Each builds the prompt, parses and scores the answer and sums up its benchmark.

    tasks.base        what tasks with one answer in an envelope share
    tasks.grounding   one phrase, one box; detection, counting, ocr, choice ... beside it (`mmrl tasks list`)
    tasks.mixed       rows of several tasks in one file
    tasks.readers     public data formats -> samples
    tasks.metrics     official numbers and submission files
    tasks.scenes      generated pictures; playground: questions of many tasks about them; pages: rendered GUI pages
"""
