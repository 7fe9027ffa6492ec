"""What a defence costs: the accuracy of a small network trained with it on every step."""

import torch

from qbi.carrier import flat
from qbi.data.images import normalised
from qbi.defences import protected_step
from qbi.defences.registry import DEFENCES
from qbi.errors import BadValue
from qbi.lab.compare.judging import LAYER, Setting, network
from qbi.randomness import derive_seed, generator
from qbi.records import ImageData


def accuracy_after_training(
    data: ImageData, defence: str, batch_size: int, setting: Setting, training: int = 0
) -> float:
    """Held-out accuracy of a small network trained with the defence on every step; one of several trainings."""
    order = torch.randperm(len(data), generator=generator(setting.seed, "training", training))
    held_out, train = order[: len(data) // 5], order[len(data) // 5 :]
    x, y = flat(normalised(data, train)), data.labels[train]
    classes = max(10, len(data.classes))
    model = network(x.shape[1], setting.neurons, classes, derive_seed(setting.seed, "trained", training))
    optimiser: torch.optim.Optimizer
    if setting.optimiser == "adam":
        optimiser = torch.optim.Adam(model.parameters(), lr=setting.learning_rate)
    else:
        optimiser = torch.optim.SGD(model.parameters(), lr=setting.learning_rate, momentum=0.9)
    draws, batches = generator(setting.seed, "masks", training), generator(setting.seed, "order", training)
    parameters = dict(model.named_parameters())
    for _ in range(setting.epochs):
        for chosen in torch.randperm(len(x), generator=batches).split(batch_size):
            try:
                step = protected_step(DEFENCES[defence], model, x[chosen], y[chosen], draws, layers=[LAYER])
            except BadValue:
                return 1 / classes  # the training diverged: what is left guesses
            for name, gradient in step.update.gradients.items():
                parameters[name].grad = gradient
            optimiser.step()
    with torch.no_grad():
        return float((model(flat(normalised(data, held_out))).argmax(1) == data.labels[held_out]).double().mean())
