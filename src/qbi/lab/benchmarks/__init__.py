"""The project's own benchmark: each fast path beside the method it replaces, in the same run, as a ratio."""

from qbi.lab.benchmarks.aggp import bench_aggp, bench_step
from qbi.lab.benchmarks.evaluation import bench_evaluation
from qbi.lab.benchmarks.joint import attacks_for, bench_whole
from qbi.lab.benchmarks.pairs import bench_pairs
from qbi.lab.benchmarks.timing import Comparison, Shape

__all__ = [
    "Comparison",
    "Shape",
    "attacks_for",
    "bench_aggp",
    "bench_evaluation",
    "bench_pairs",
    "bench_step",
    "bench_whole",
]
