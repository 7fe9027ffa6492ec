"""Attacks against defences, on the same batches: what leaks, what it costs, pair by pair."""

from qbi.lab.compare.judging import Judgement, Setting, judge
from qbi.lab.compare.matrix import run_matrix
from qbi.lab.compare.training import accuracy_after_training

__all__ = ["Judgement", "Setting", "accuracy_after_training", "judge", "run_matrix"]
