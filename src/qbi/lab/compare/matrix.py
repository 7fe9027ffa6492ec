"""Every attack against every defence, in one process or in several: the result does not depend on their number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qbi.lab.compare.judging import Judgement, Setting, judge
from qbi.lab.compare.training import accuracy_after_training
from qbi.lab.workers import Workers
from qbi.records import ImageData


@dataclass(frozen=True)
class MatrixEntry:
    """One entry of the matrix: an attack against a defence, or (without an attack) one training."""

    defence: str
    batch_size: int
    attack: str | None = None
    training: int = 0


def run_matrix(
    data: ImageData,
    attacks: Sequence[str],
    defences: Sequence[str],
    batch_sizes: Sequence[int],
    setting: Setting,
    *,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Judgement], dict[tuple[str, int], list[float]]]:
    """Every attack against every defence at every batch size, and each defence's accuracies where epochs are asked for.

    The result does not depend on the number of jobs.
    """
    pairs = [(batch_size, defence) for batch_size in batch_sizes for defence in defences]
    tasks = [MatrixEntry(d, b, attack) for b, d in pairs for attack in attacks]
    if setting.epochs:
        tasks += [MatrixEntry(d, b, training=t) for b, d in pairs for t in range(setting.trainings)]
    done: dict[MatrixEntry, Judgement | float] = {}
    for task, result in Workers(jobs).map(_compute, tasks, data, setting):
        done[task] = result
        if progress is not None:
            progress(len(done), len(tasks))
    outcomes = [result for task in tasks if isinstance(result := done[task], Judgement)]
    accuracy: dict[tuple[str, int], list[float]] = {}
    for task in tasks:
        if isinstance(result := done[task], float):
            accuracy.setdefault((task.defence, task.batch_size), []).append(result)
    return outcomes, accuracy


def _compute(task: MatrixEntry, data: ImageData, setting: Setting) -> Judgement | float:
    if task.attack is None:
        return accuracy_after_training(data, task.defence, task.batch_size, setting, task.training)
    return judge(data, task.attack, task.defence, task.batch_size, setting)
