"""Judges: models that grade what a policy writes, behind any OpenAI-compatible endpoint. See mmrl/judges/judge.py.

from mmrl.judges import Judge
"""

from mmrl.judges.judge import Comparison, Judge, Verdict, judge_from
from mmrl.judges.verdict import counted

__all__ = ["Comparison", "Judge", "Verdict", "counted", "judge_from"]
