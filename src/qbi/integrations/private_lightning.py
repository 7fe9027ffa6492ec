"""The private step inside Lightning's `Trainer`.

fitting = private_lightning(net, (x, y), loss=F.cross_entropy, batch_size=32, bits=72, ledger="clinic.ledger")
lightning.Trainer(max_epochs=3).fit(fitting)
fitting.private.state_dict()        # what may leave; checkpoints hold it too

Batches are drawn by `private.batches`, each step is `private.step` under manual optimisation, and what checkpoints hold is
`private.state_dict()`. Nothing of a step is logged. What cannot be honoured is refused before training begins.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.errors import BadValue, MissingExtra
from qbi.integrations.private_batches import DrawnBatches
from qbi.private import Private
from qbi.private.drawing import Sampling
from qbi.private.reporting import StepReport
from qbi.private.samples import Loss

MakeOptimiser = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def private_lightning(
    model: nn.Module,
    dataset: Any,
    *,
    batch_size: int,
    loss: Loss = F.cross_entropy,
    optimiser: MakeOptimiser | None = None,
    sampling: Sampling = "passes",
    workers: int = 0,
    seen: Callable[[StepReport], None] | None = None,
    **options: Any,
) -> Any:
    """A `LightningModule` to fit: it trains `model` by private steps; `private` is its `qbi.Private`.

    Args:
        model: what is trained, a `LightningModule` or a plain one; its `forward` is used, its `training_step` is not.
        dataset: as for `Private.batches`: pairs of inputs and targets.
        batch_size: samples in a batch.
        loss: of one sample, as for `Private`.
        optimiser: from weights to an optimiser; the model's own `configure_optimizers` if left out.
        seen: called with each step's report (its loss, how much was clipped), for the owner's own log and not for others.
        options: those of `qbi.Private` (`bits`, `epsilon`, `ledger`, …).
    """
    try:
        from lightning.pytorch import LightningModule
    except ImportError:
        raise MissingExtra("lightning", "lightning") from None
    if optimiser is None and not hasattr(model, "configure_optimizers"):
        raise BadValue(
            "private lightning: the model configures no optimiser; give optimiser=, a function of the weights."
        )
    made: Any = type("PrivateFitting", (PrivateManual, LightningModule), {})()
    made.hold(model, loss, optimiser, options)
    made.seen = seen
    made.batches = DrawnBatches(lambda: made.private, dataset, batch_size, sampling=sampling, workers=workers)
    return made


class PrivateManual:
    """A mixin in front of `LightningModule`; made by `private_lightning`.

    The model is held beside the module, not in it: Lightning gives its trainer to modules inside, and what the model holds is copied for every
    sample.
    """

    automatic_optimization: bool
    batches: DrawnBatches
    device: torch.device
    trainer: Any
    seen: Callable[[StepReport], None] | None

    def hold(self, model: nn.Module, loss: Loss, optimiser: MakeOptimiser | None, options: dict[str, Any]) -> None:
        """Keep what training begins with."""
        self.automatic_optimization = False
        self._held = (model, loss, optimiser, options)
        self._private: Private | None = None

    @property
    def held_model(self) -> nn.Module:
        """What is trained, and what an audit looks at."""
        return self._held[0]

    @property
    def private(self) -> Private:
        """The private training, from the beginning of `fit` on."""
        if self._private is None:
            raise BadValue("private lightning: training has not begun; call trainer.fit first.")
        return self._private

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The model is on its device now, and its weights are taken to be public as they are."""
        problem = _refused(self.trainer)
        if problem:
            raise BadValue(f"private lightning: {problem}.")
        model, loss, make, options = self._held
        model.to(self.device).train()
        if self._private is None:
            self._private = Private(model, loss, **options)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimiser: Any = model.configure_optimizers() if make is None else make(trained)  # type: ignore[operator]
        if not isinstance(optimiser, torch.optim.Optimizer):
            raise BadValue(
                f"private lightning: the optimiser came as a {type(optimiser).__name__}; give one optimiser alone, without schedulers."
            )
        return optimiser

    def train_dataloader(self) -> DrawnBatches:
        """Passes that are drawn and counted."""
        return self.batches

    def on_train_start(self) -> None:
        """Refuses batches that somebody else drew."""
        if self.trainer.train_dataloader is not self.batches:
            raise BadValue(
                "private lightning: batches are drawn by private.batches; call trainer.fit without a loader."
            )

    def training_step(self, batch: Any, number: int) -> None:  # noqa: ARG002
        """One private step. The optimiser is Lightning's, which counts steps and runs the one inside."""
        given: Any = self
        inputs, targets = batch
        self._held[0].train()
        report = self.private.step(given.optimizers(), inputs, targets)
        if self.seen is not None:
            self.seen(report)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:
        """What may leave, under the model's own names: what a checkpoint holds."""
        return {} if self._private is None else self._private.state_dict()

    def load_state_dict(self, *_: Any, **__: Any) -> None:
        """Refused: a checkpoint's optimiser holds what this training did not release."""
        raise BadValue(
            "private lightning: a checkpoint is not resumed; load its weights into the model, and let a ledger count on."
        )


def _refused(trainer: Any) -> str:
    """What of the trainer's settings cannot be honoured, with what to do; accumulation and clipping Lightning refuses itself here."""
    if trainer.world_size != 1:
        return "several processes would each release a sum of their own; train with devices=1"
    if str(trainer.precision) != "32-true":
        return f"the precision is {trainer.precision}, and norms are bounded in float32 only; use precision='32-true'"
    return ""
