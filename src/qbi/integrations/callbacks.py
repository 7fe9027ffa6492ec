"""An audit before training begins, in Hugging Face's `Trainer` and in Lightning.

Trainer(..., callbacks=[trainer_audit(fail_above=0.1)])
lightning.Trainer(..., callbacks=[lightning_audit(fail_above=0.1)])

Both audit a copy of the model on samples of the training data, and hand the result to `done`. With `fail_above`, training does not
begin where more is read, or where part of the model was not tested. Samples come from a loader of their own: the order in which
training sees them does not change. In distributed training, the first process audits. `private_trainer` and `private_lightning` take
these callbacks too, and make the steps private.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from qbi.auditing import AuditResult, Client, audit
from qbi.errors import DataError, MissingExtra
from qbi.integrations.judging import AuditFailed, check_share, objection

logger = logging.getLogger("qbi")

Done = Callable[[AuditResult], None]

BATCHES = 8
"""Batches of the training data that are taken: some are attacked, the rest is what a server may know of the domain."""


def trainer_audit(
    *, fail_above: float | None = None, allow_untested: bool = False, done: Done | None = None, **options: Any
) -> Any:
    """A `TrainerCallback` for transformers; `options` are those of `qbi.audit`."""
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise MissingExtra("transformers", "models") from None
    judge = _judge(fail_above, allow_untested, done, options)

    class AuditBeforeTraining(TrainerCallback):  # type: ignore[misc]
        """Audits when training begins."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
            """Called by the trainer before the first step."""
            if state.is_world_process_zero:
                judge(given["model"], given["train_dataloader"])

    return AuditBeforeTraining()


def lightning_audit(
    *, fail_above: float | None = None, allow_untested: bool = False, done: Done | None = None, **options: Any
) -> Any:
    """A `Callback` for Lightning; `options` are those of `qbi.audit`, such as `loss`."""
    try:
        from lightning.pytorch import Callback
    except ImportError:
        raise MissingExtra("lightning", "lightning") from None
    judge = _judge(fail_above, allow_untested, done, options)

    class AuditBeforeFitting(Callback):  # type: ignore[misc]
        """Audits when fitting begins."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Called by the trainer before the first step."""
            if trainer.is_global_zero:
                judge(getattr(pl_module, "held_model", pl_module), trainer.train_dataloader)

    return AuditBeforeFitting()


def _judge(
    fail_above: float | None, allow_untested: bool, done: Done | None, options: Mapping[str, Any]
) -> Callable[[torch.nn.Module, Any], None]:
    if fail_above is not None:
        check_share("fail_above", fail_above)

    def judge(model: torch.nn.Module, loader: Any) -> None:
        # A loader draws a seed when it starts, and models may drop out: training begins where it would have without the audit.
        with torch.random.fork_rng():
            data, size = _samples(loader)
            result = audit(_on_cpu(model), data, **{"client": Client(batch_size=max(2, size)), **options})
        logger.warning("qbi: %s", result.verdict)
        if done is not None:
            done(result)
        problem = "" if fail_above is None else objection(result, fail_above, allow_untested=allow_untested)
        if problem:
            raise AuditFailed(problem)

    return judge


def _on_cpu(model: torch.nn.Module) -> torch.nn.Module:
    """The model as it is where it lies on the CPU in float32, a copy there else."""
    if all(p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters()):
        return model
    from copy import deepcopy

    return deepcopy(model).cpu().float()


def _samples(loader: Any) -> tuple[Any, int]:
    """Samples of the data behind a loader, put together as it does, and how many make a batch."""
    dataset, size = getattr(loader, "dataset", None), getattr(loader, "batch_size", None)
    if dataset is None or isinstance(dataset, IterableDataset):
        raise DataError(
            "callback: the training data cannot be looked at without being used up; audit them with qbi.audit before training."
        )
    size = size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or 2
    many = min(len(dataset), BATCHES * max(2, size))
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[:many].tolist()
    # One batch of all: padded together, they have one shape.
    own = DataLoader(dataset, batch_size=many, sampler=order, collate_fn=loader.collate_fn)
    found = next(iter(own))
    return dict(found) if isinstance(found, Mapping) else tuple(found) if isinstance(found, list) else found, size
