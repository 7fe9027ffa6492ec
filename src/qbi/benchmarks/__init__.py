"""The project's own benchmark: each fast path beside the method it replaces, in the same run, as a ratio."""

from qbi.benchmarks.aggp import bench_aggp, bench_step
from qbi.benchmarks.evaluation import bench_evaluation
from qbi.benchmarks.pairs import bench_pairs
from qbi.benchmarks.timing import Comparison, Shape
from qbi.benchmarks.whole import attacks_for, bench_whole

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
