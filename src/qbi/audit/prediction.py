"""What the Gram law expects of an attack on the very features that reach the layer."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qbi.attacks import PAIRS, QBI, Attack, TrapWeights
from qbi.attacks.in_gram_space import AuxiliaryGroup, pairs_firing, trap_weights_firing
from qbi.carrier import flat
from qbi.errors import BadValue
from qbi.gram import gram, law, predict
from qbi.metrics import leakage
from qbi.randomness import generator

LAYERS = 40
"""Layers drawn for attacks whose rows are not independent of one another."""


def predict_leakage(attack: Attack, features: Float[Tensor, "b m"], neurons: int, seed: int) -> dict[str, float]:
    """Expected A, P, R of fresh layers of this attack on these features."""
    draws = generator(seed, "predict", device=features.device)
    matrix = gram(features)
    if isinstance(attack, QBI):
        found = predict(law(matrix), attack.bias(features.shape[1]), [neurons], draws)
        return {"active": found.active, "precision": found.precision, "recall": found.recall[0]}
    patterns = [_firing(attack, features, matrix, neurons, draws) for _ in range(LAYERS)]
    each = [leakage(fired) for fired in patterns]
    return {
        "active": sum(e.active for e in each) / LAYERS,
        "precision": sum(e.precision for e in each) / LAYERS,
        "recall": sum(e.recall for e in each) / LAYERS,
    }


def _firing(
    attack: Attack, features: Tensor, matrix: Tensor, neurons: int, draws: torch.Generator
) -> Bool[Tensor, "n b"]:
    if isinstance(attack, TrapWeights):
        sums = features.double().sum(1)
        return trap_weights_firing(matrix, sums, features.shape[1], attack.scale, neurons, draws)
    if isinstance(attack, PAIRS):
        groups = []
        for start in range(0, neurons, attack.batch_size):
            x = flat(attack.auxiliary[start : min(start + attack.batch_size, neurons)]).to(features)
            groups.append(AuxiliaryGroup(auxiliary=gram(x), cross=gram(features, x)))
        budget = attack.budget_factor * attack.batch_size * neurons
        bias = QBI(attack.batch_size, exact=attack.exact).bias(features.shape[1])
        return pairs_firing(matrix, groups, bias, budget=budget, patience=attack.patience, generator=draws)
    raise BadValue(f"prediction: the law of {attack.name} is not known.")
