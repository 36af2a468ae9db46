"""Held-out numbers: how a policy does, on whose data, by whose scorer, and how sure that is.

result      rows of answers and of episodes, metrics with intervals, results.json and predictions.jsonl, best checkpoints
evaluate    greedy and sampled answers of a model
settings    how they are asked
suite_book  named suites of both kinds: questions (suites, data_rows) and simulated tasks (mmrl.robotics.suites)
suite_table one table over evaluated suites, suites.json and suites.md
official    the official scorers and their submission files
views       the same questions without order, sides, pixels or media
rescore     `mmrl score`: logged completions judged again
stats       bootstrap intervals, comparisons
tables      which rows a metric is averaged over, per source and task
"""
