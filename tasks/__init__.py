"""Tasks: one file per kind of question. Each builds the prompt, parses and scores the answer and sums up its benchmark.

    mmrl.tasks.base        what tasks with one answer in an envelope share
    mmrl.tasks.grounding   one phrase, one box; detection, counting, ocr, choice ... beside it (`mmrl tasks list`)
    mmrl.tasks.mixed       rows of several tasks in one file
    mmrl.tasks.readers     public data formats -> samples
    mmrl.tasks.metrics     official numbers and submission files
    mmrl.tasks.scenes      generated pictures; playground: questions of many tasks about them; pages: rendered GUI pages
"""
