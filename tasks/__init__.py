"""Tasks: one file per kind of question. Each reads the public data format, builds the prompt, scores and sums up.

    tasks.grounding   one phrase, one box (referring expressions)
    tasks.scenes      generated grounding scenes, no download
    tasks.readers     public data formats -> samples
"""
