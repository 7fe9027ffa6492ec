"""The private step inside Hugging Face's `Trainer`.

trainer = private_trainer(model, args, train_dataset=data, bits=72, ledger="clinic.ledger")
trainer.train()
trainer.save_model("out")           # what may leave: trainer.private.state_dict()

Batches are drawn by `private.batches`, each step is `private.step`, and what is saved is `private.state_dict()`. The trainer logs no
training loss: it depends on data and is not released. What cannot be honoured is refused before training begins.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from qbi.errors import BadValue, MissingExtra
from qbi.integrations.private_batches import Collated, DrawnBatches
from qbi.private import Private
from qbi.private.drawing import Sampling
from qbi.private.reporting import StepReport

UNRELEASED = ("loss", "train_loss", "grad_norm")
"""What the trainer would log of a step, and the private step does not release."""

TRAINERS = ("model", "args", "data_collator", "train_dataset", "processing_class", "callbacks", "optimizers")
"""Arguments of the trainer that keep their meaning; evaluation during training has none here."""


def private_trainer(
    model: nn.Module,
    args: Any,
    *,
    base: type | None = None,
    sampling: Sampling = "passes",
    seen: Callable[[StepReport], None] | None = None,
    **options: Any,
) -> Any:
    """A `Trainer` whose steps are private; `private` is its `qbi.Private`.

    Args:
        model: returns its own loss where it is given labels, as those of transformers do.
        args: `TrainingArguments`; one process, float32, no accumulation.
        base: a subclass of `Trainer` of yours; its `compute_loss` and `training_step` must be the trainer's own.
        sampling: `passes` or `poisson`, as in `Private.batches`.
        seen: called with each step's report (its loss, how much was clipped), for the owner's own log and not for others.
        options: those of `Trainer` (`train_dataset`, `data_collator`, `processing_class`, `callbacks`, `optimizers`); all others are those of
            `qbi.Private` (`bits`, `epsilon`, `ledger`, …).
    """
    try:
        from transformers import Trainer
    except ImportError:
        raise MissingExtra("transformers", "models") from None
    mine = Trainer if base is None else base
    problem = next(_unfit(mine, Trainer), None) or next(_refused(args), None)
    if problem is not None:
        raise BadValue(f"private trainer: {problem}.")
    kept = {name: options.pop(name) for name in TRAINERS if name in options}
    made: Any = type("PrivateTrainer", (PrivateTraining, mine), {})(model=model, args=args, **kept)
    made.begin_privately(options, sampling, seen)
    return made


def _unfit(mine: type, trainer: type) -> Iterator[str]:
    if not issubclass(mine, trainer):
        yield f"{mine.__name__} is no subclass of transformers.Trainer"
    for name in ("compute_loss", "training_step", "get_train_dataloader", "_save"):
        if getattr(mine, name, None) is not getattr(trainer, name):
            yield f"{mine.__name__}.{name} is its own, and the private step would not run it; leave it out"


def _refused(args: Any) -> Iterator[str]:
    """What of the arguments cannot be honoured, each with what to do."""
    if args.gradient_accumulation_steps != 1:
        yield "gradients are accumulated over several batches, which one release cannot hold; raise per_device_train_batch_size instead"
    if args.fp16 or args.bf16:
        yield "mixed precision is on, and norms are bounded in float32 only; leave out fp16 and bf16"
    if args.world_size != 1 or args.n_gpu > 1:
        yield "several processes or GPUs would each release a sum of their own; train in one process on one device"
    for name in ("deepspeed", "fsdp", "torch_compile", "gradient_checkpointing", "auto_find_batch_size"):
        if getattr(args, name, None):
            yield f"{name} runs the model otherwise than the private step does; leave it out"
    if getattr(args, "dataloader_drop_last", False) or _value(args, "train_sampling_strategy", "random") != "random":
        yield "batches are drawn by private.batches; leave out dataloader_drop_last and train_sampling_strategy"
    if _value(args, "include_num_input_tokens_seen", "no") not in ("no", "False"):
        yield "counts of tokens tell how long samples are; leave out include_num_input_tokens_seen"
    if args.label_smoothing_factor or getattr(args, "neftune_noise_alpha", None):
        yield "label smoothing and NEFTune change the loss outside of the model; leave them out"
    if _value(args, "eval_strategy", "no") != "no" or getattr(args, "eval_on_start", False):
        yield "evaluation during training writes numbers of your data into checkpoints; call trainer.evaluate() afterwards"
    if args.load_best_model_at_end:
        yield "the best checkpoint would be chosen by data, and the choice is not released; leave out load_best_model_at_end"
    optimiser = _value(args, "optim", "")
    if "layerwise" in optimiser or "lomo" in optimiser:
        yield f"the optimiser {optimiser} steps inside the backward pass; choose one that steps after it, such as adamw_torch"


def _value(args: Any, name: str, default: str) -> str:
    """A setting in words, whether it came as an enumeration or not."""
    found = getattr(args, name, default)
    return str(getattr(found, "value", found))


class PrivateTraining:
    """A mixin in front of `Trainer`; made by `private_trainer`."""

    private: Private
    args: Any
    model: Any
    optimizer: Any
    train_dataset: Any
    data_collator: Any

    def begin_privately(
        self, options: dict[str, Any], sampling: Sampling, seen: Callable[[StepReport], None] | None
    ) -> None:
        """Take the weights as they are for public."""
        given: Any = self
        if given.compute_loss_func is not None or given.model_init is not None:
            raise BadValue(
                "private trainer: compute_loss_func and model_init are not run; give a model that returns its loss."
            )
        if self.train_dataset is None:
            raise BadValue("private trainer: there is nothing to train on; give train_dataset.")
        self.model.train()
        self.private, self._sampling, self._seen = Private(self.model, _own_loss, **options), sampling, seen

    def get_train_dataloader(self) -> Any:
        """Passes that are drawn and counted."""
        given: Any = self
        collate = given._get_collator_with_removed_columns(self.data_collator, description="Training")
        return DrawnBatches(
            lambda: self.private,
            Collated(self.train_dataset, collate),
            self.args.train_batch_size,
            sampling=self._sampling,
            workers=self.args.dataloader_num_workers,
        )

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:  # noqa: ARG002
        """One private step, the optimiser's included; what the trainer does to gradients afterwards finds none."""
        given: Any = self
        ready = dict(given._prepare_inputs(inputs))
        if "labels" not in ready:
            raise BadValue(
                "private trainer: the batches have no labels, so the model returns no loss; add a column labels."
            )
        self.model.train()
        # Accelerate wraps optimisers; the step is for the one inside.
        report = self.private.step(getattr(self.optimizer, "optimizer", self.optimizer), ready, ready["labels"])
        if self._seen is not None:
            self._seen(report)
        for parameter in self.model.parameters():
            parameter.grad = None
        return torch.zeros((), device=self.args.device)

    def train(self, resume_from_checkpoint: Any = None, **more: Any) -> Any:
        """As the trainer's own; the loss it returns is not a number, since none is released."""
        if resume_from_checkpoint:
            raise BadValue(
                "private trainer: a checkpoint's optimiser holds what this training did not release; load its weights into the model, make a new "
                "trainer, and let a ledger count on."
            )
        over: Any = super()
        done = over.train(**more)
        return done._replace(training_loss=float("nan"), metrics=_released(done.metrics))

    def log(self, logs: dict[str, float], *more: Any, **named: Any) -> None:
        """Without what is not released."""
        over: Any = super()
        over.log(_released(logs), *more, **named)

    def floating_point_ops(self, inputs: Any) -> int:  # noqa: ARG002
        """Not counted: it would say how many samples each batch has."""
        return 0

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:  # noqa: ARG002
        over: Any = super()
        over._save(output_dir, state_dict=self.private.state_dict())


def _released(logs: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in logs.items() if k not in UNRELEASED}


def _own_loss(output: Any, labels: Any) -> Tensor:  # noqa: ARG001
    """The loss that a model of transformers returns for one sample with its labels."""
    found = output["loss"] if isinstance(output, dict) else output[0]
    if not isinstance(found, Tensor):
        raise BadValue("private trainer: the model returns no loss for its labels; give a model that does.")
    return found
