"""What servers read through somebody's privacy filter, run by its own framework's code, on the user's model and images."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbi.attacks import Knowledge, Mounted, mount
from qbi.attacks.registry import select
from qbi.carrier import flat
from qbi.errors import QbiError
from qbi.integrations.stock import Filtered
from qbi.metrics import CLEAR, RECOGNISABLE, match
from qbi.randomness import generator
from qbi.records import Update

SERVERS = ("passive", "cascade", "qbi")
RATE = 0.1


def read_through(
    apply: Filtered, model: nn.Module, x: Tensor, y: Tensor, others: Tensor, *, seed: int = 0
) -> dict[str, Mapping[str, int] | str]:
    """For each server, how many of the images it reads at 30 and at 19 dB after one step of SGD; or why it could not stand there."""
    found: dict[str, Mapping[str, int] | str] = {}
    for server in SERVERS:
        try:
            sent = _mounted(server, model, x, others, seed)
            samples = sent.read(arriving(sent, apply, x, y)).samples
            matched = match(samples, flat(x), data_range=float(x.max() - x.min()))
            found[server] = {t.key: int(matched[t].recovered.sum()) for t in (CLEAR, RECOGNISABLE)}
        except QbiError as problem:
            found[server] = str(problem)
    return found


def _mounted(server: str, model: nn.Module, x: Tensor, others: Tensor, seed: int) -> Mounted:
    (attack,) = select([server], "claims")
    layer = next((n for n, m in model.named_modules() if isinstance(m, nn.Linear)), None)
    neurons = model.get_submodule(layer).out_features if layer is not None else 1
    knows = Knowledge(len(x), int(neurons), flat(x).shape[1], flat(others), seed=seed)  # type: ignore[arg-type]
    return mount(copy.deepcopy(model), attack.prepare(knows), x[:2], generator(seed, "claims", server), layer=layer)


def arriving(mounted: Mounted, apply: Filtered, x: Tensor, y: Tensor) -> Update:
    """One step on the batch, through the filter, as the gradient that a server makes of it."""
    sent = {n: v.detach().clone() for n, v in mounted.model.state_dict().items()}
    own = copy.deepcopy(mounted.model).train()
    F.cross_entropy(own(x), y).backward()
    torch.optim.SGD(own.parameters(), lr=RATE).step()
    back = apply(sent, {n: v.detach().clone() for n, v in own.state_dict().items()})
    return Update({n: (sent[n] - back[n]) / RATE for n in sent if sent[n].is_floating_point()}, {}, 0, float("nan"))
