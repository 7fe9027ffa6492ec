"""What a defence costs: the accuracy of a small network trained with it on every step."""

import torch
from torch import Tensor

from qbi.carrier import flat
from qbi.data.images import normalised
from qbi.defences import protected_step
from qbi.defences.registry import DEFENCES
from qbi.errors import BadValue
from qbi.lab.compare.judging import LAYER, Setting, network
from qbi.lab.training import accuracy, optimiser_for, train
from qbi.randomness import derive_seed, generator
from qbi.records import ImageData


def accuracy_after_training(
    data: ImageData, defence: str, batch_size: int, setting: Setting, training: int = 0
) -> float:
    """Held-out accuracy of a small network trained with the defence on every step; one of several trainings."""
    order = torch.randperm(len(data), generator=generator(setting.seed, "training", training))
    held_out, rest = order[: len(data) // 5], order[len(data) // 5 :]
    x, y = flat(normalised(data, rest)), data.labels[rest]
    classes = max(10, len(data.classes))
    model = network(x.shape[1], setting.neurons, classes, derive_seed(setting.seed, "trained", training))
    optimiser = optimiser_for(model, setting.optimiser, setting.learning_rate)
    draws, batches = generator(setting.seed, "masks", training), generator(setting.seed, "order", training)
    parameters = dict(model.named_parameters())

    def step(chosen: Tensor) -> None:
        made = protected_step(DEFENCES[defence], model, x[chosen], y[chosen], draws, layers=[LAYER])
        for name, gradient in made.update.gradients.items():
            parameters[name].grad = gradient
        optimiser.step()

    try:
        for _ in train(step, torch.arange(len(x)), batch_size, setting.epochs, batches):
            pass
    except BadValue:
        return 1 / classes  # the training diverged: what is left guesses
    return accuracy(model, flat(normalised(data, held_out)), data.labels[held_out])
