"""R at other batch sizes and widths, predicted for the user's data from its Gram matrix."""

import torch

from qbi.attacks import InGramSpace, Knowledge
from qbi.auditing.campaign import Attempt, Campaign
from qbi.auditing.outcomes import Curve
from qbi.gram import gram
from qbi.randomness import generator

BATCH_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
NEURONS = (20, 50, 100, 200, 500, 1000, 2000)


def forecast(campaign: Campaign, attempt: Attempt) -> Curve | None:
    """R of an attack on this data, by its law; none where positions are seen alone, or where there is no law.

    Attacks that tune their rows with auxiliary data would have to be tuned for every entry; they have no curve.
    """
    mounted, attack = attempt.mounted, type(attempt.mounted.attack)
    target = attempt.finding.target
    knowledge = Knowledge(campaign.client.batch_size, target.neurons, mounted.carrier.features)
    if mounted.carrier.tokens > 1 or not attack.has_law or attack.auxiliary_needed(knowledge):
        return None
    count = min(len(campaign.samples), 64 if campaign.heavy and not mounted.carrier.exact else max(BATCH_SIZES))
    chosen = torch.randperm(len(campaign.samples), generator=generator(campaign.seed, "curve"))[:count]
    seen = campaign.arrivals(mounted, campaign.samples, chosen).float()[:count]
    products, sums = gram(seen), seen.double().sum(1)
    sizes = sorted({b for b in (*BATCH_SIZES, campaign.client.batch_size) if b <= count})
    neurons = sorted({*NEURONS, target.neurons})
    rows = []
    for size in sizes:
        prepared = attack.prepare(Knowledge(size, target.neurons, knowledge.features, settings=campaign.settings))
        batch = InGramSpace(products[:size, :size], knowledge.features, sums[:size])
        draws = generator(campaign.seed, "curve", size, device=campaign.device)
        rows.append(tuple(found.recall for found in prepared.expected(batch, neurons, draws)))
    return Curve(attempt.outcome.attack, tuple(sizes), tuple(neurons), tuple(rows))
