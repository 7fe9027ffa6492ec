"""What an honest-but-curious server sees of a batch: features by unmixing, pictures by a decoder, on networks as people train them."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qbi import client_step, mount
from qbi.attacks import Reading
from qbi.attacks.passive import Passive
from qbi.carrier import flat
from qbi.errors import CannotRead
from qbi.federation.local import LocalTraining, local_update
from qbi.lab.networks import FedAvgNet, Quickstart
from qbi.lab.training import optimiser_for, plain_step, train
from qbi.metrics import CLEAR, FAITHFUL, RECOGNISABLE, match
from qbi.pictures import Decoder, Prefix, fit_pictures, learn_decoder
from qbi.pictures.fitting import FEW_DIRECTIONS, FEW_STEPS
from qbi.pictures.prefix import features_of
from qbi.private.defence import PrivateStep
from qbi.private.goal import Budget
from qbi.randomness import derive_seed, generator

NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "quickstart": (Quickstart, "fc1"),
    "FedAvg's CNN": (FedAvgNet, "fc1"),
}
"""A network, and the layer that is read."""


@dataclass(frozen=True)
class PictureRow:
    """What was seen of batches of one size."""

    network: str
    training: str
    batch_size: int
    local_steps: int
    batches: int
    bits: float | None
    """Of the private step; none: the plain gradient."""
    features: float
    """Share of samples whose features were read at 60 dB."""
    clear: float
    recognisable: float
    """Shares of samples of which a picture was made, at 30 and 19 dB in the input."""
    psnr: float
    """Mean over samples whose features were read; of the decoder with the fit."""
    decoder_alone: float
    guess: float
    """Recognisable with nothing read: what the decoder makes of the mean feature."""
    nearest: float
    """Recognisable by the public image whose features are nearest."""
    shuffled: float
    """Recognisable where each picture is compared with another sample's."""
    decoder: str = "closed form"
    """Or learned: with a network for what that leaves."""


def train_plainly(model: nn.Module, x: Tensor, y: Tensor, seed: int, epochs: int = 2) -> None:
    """Two epochs of SGD, so that the weights are those of a network in use."""
    draws = torch.Generator().manual_seed(derive_seed(seed, "training") % 2**31)
    step = plain_step(model, optimiser_for(model, "sgd", 0.01), x, y)
    for _ in train(step, torch.arange(len(x), device=x.device), 32, epochs, draws):
        pass


def train_federated(model: nn.Module, x: Tensor, y: Tensor, seed: int, clients: int = 10, rounds: int = 3) -> None:
    """Ten clients with a tenth of the images each, three rounds of one epoch, averaged, as in Flower's quickstart; but at a tenth of the
    rate that its settings name, at which this network hardly learns and its features die."""
    order = torch.randperm(len(x), generator=generator(seed, "clients")).to(x.device)
    for number in range(rounds):
        states = []
        for client, own in enumerate(order.tensor_split(clients)):
            local = copy.deepcopy(model)
            train_plainly(local, x[own], y[own], derive_seed(seed, "round", number, client), epochs=1)
            states.append(local.state_dict())
        model.load_state_dict({n: torch.stack([s[n] for s in states]).mean(0) for n in states[0]})


def _stays(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> None:
    """As it was initialised."""


TRAININGS: dict[str, Callable[[nn.Module, Tensor, Tensor, int], None]] = {
    "as initialised": _stays,
    "three rounds": train_federated,
    "two epochs": train_plainly,
}
"""How a network came to its weights."""


@dataclass(frozen=True)
class Bench:
    """A network as it was sent, a decoder for it, and images that the decoder has not seen."""

    name: str
    training: str
    model: nn.Module
    layer: str
    decoder: Decoder
    public: Tensor
    held: Tensor
    labels: Tensor
    mean: Tensor
    std: Tensor

    @property
    def kind(self) -> str:
        """How the decoder was made."""
        return "closed form" if self.decoder.network is None else "learned"

    @property
    def effort(self) -> dict[str, int]:
        """A shorter fit behind wide networks, where each direction takes a pass that is forty times as long."""
        wide = self.decoder.centre.numel() > 1024
        return {"steps": FEW_STEPS, "directions": FEW_DIRECTIONS} if wide else {}

    def pixels(self, images: Tensor) -> Tensor:
        """In [0, 1], one row for each."""
        return flat((images * self.std + self.mean).clamp(0, 1)).cpu()

    def read(self, x: Tensor, y: Tensor, seed: int, local_steps: int = 1, bits: float | None = None) -> Tensor:
        """Candidates for the features of the client's images, from the update that it sends; several local steps have a part of them each."""
        # Small systems: a processor solves them faster than a GPU launches them.
        model, given = copy.deepcopy(self.model).cpu(), x.cpu()
        mounted = mount(model, Passive(), given[:2], generator(seed, "rows"), layer=self.layer)
        if bits is not None:
            step = PrivateStep(Budget.for_goal(bits=bits))
            update = step.update(model, given, y.cpu(), generator(seed, "noise"))
        elif local_steps == 1:
            update = client_step(model, given, y.cpu())
        else:
            size = len(given) // local_steps
            batches = [((part,), own) for part, own in zip(given.split(size), y.cpu().split(size), strict=True)]
            update = local_update(model, batches, LocalTraining("sgd", 0.01), seed=seed)
        try:
            return mounted.read_at_layer(update, Reading(seed=seed)).samples.to(x)
        except CannotRead:
            return x.new_zeros(0, self.decoder.centre.numel())

    def judge(
        self, batch_size: int, batches: int, *, seed: int = 0, local_steps: int = 1, bits: float | None = None
    ) -> tuple[PictureRow, Tensor, Tensor]:
        """Batches of held-out images; also the first one's images and what was seen of them."""
        prefix = Prefix(self.model, self.layer)
        low, high = ((v - self.mean) / self.std for v in (torch.zeros_like(self.mean), torch.ones_like(self.mean)))
        known = features_of(prefix, self.public[:8192])
        rows: list[dict[str, float]] = []
        first: tuple[Tensor, Tensor] | None = None
        for number in range(batches):
            order = torch.randperm(len(self.held), generator=generator(seed, "seen", number))
            order = order[: batch_size * local_steps]
            x, y = self.held[order.to(self.held.device)], self.labels[order.to(self.held.device)]
            true = features_of(prefix, x)
            read = self.read(x, y, seed + number, local_steps, bits)
            found = match((read / self.decoder.spread).cpu(), (true / self.decoder.spread).cpu())
            hit = found[FAITHFUL].recovered
            # What was read, not what is true; what was not read stays grey.
            given = read[found[FAITHFUL].candidate[hit].to(read.device)]
            made = torch.zeros_like(x)
            alone = torch.zeros_like(x)
            if bool(hit.any()):
                with torch.no_grad():
                    alone[hit.to(x.device)] = self.decoder(given).float()
                made[hit.to(x.device)] = fit_pictures(prefix, given, self.decoder, low=low, high=high, **self.effort)
            rows.append(self._judged(x, made, alone, hit, true, known))
            first = first or (x, made)
        assert first is not None
        means = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
        seen = PictureRow(self.name, self.training, batch_size, local_steps, batches, bits, **means, decoder=self.kind)
        return seen, first[0], first[1]

    def _judged(
        self, x: Tensor, made: Tensor, alone: Tensor, hit: Tensor, true: Tensor, known: Tensor
    ) -> dict[str, float]:
        truth, pictures = self.pixels(x), self.pixels(made)
        errors = (truth - pictures).square().mean(1)[hit]
        psnr = float(-10 * errors.clamp_min(1e-12).log10().mean()) if bool(hit.any()) else float("nan")
        near = RECOGNISABLE.largest_error(1.0)

        def share(images: Tensor, limit: float = near) -> float:
            return float(((truth - self.pixels(images)).square().mean(1) <= limit).double().mean())

        with torch.no_grad():
            mean = self.decoder(self.decoder.centre[None]).float().expand_as(x)
            apart = torch.cdist(true / self.decoder.spread, known / self.decoder.spread)
        closest = self.public[: len(known)][apart.argmin(1)]
        return {
            "features": float(hit.double().mean()),
            "clear": share(made, CLEAR.largest_error(1.0)),
            "recognisable": share(made),
            "psnr": psnr,
            "decoder_alone": share(alone),
            "guess": share(mean),
            "nearest": share(closest),
            "shuffled": share(made.roll(1, 0)) if len(made) > 1 else 0.0,
        }


def prepared(
    name: str,
    pixels: Tensor,
    labels: Tensor,
    *,
    training: str,
    seconds: float = 0.0,
    held: int = 2000,
    width: int = 0,
    seed: int = 0,
    device: str = "cpu",
    steps: int | None = None,
    most: int | None = None,
) -> Bench:
    """A network, trained or not, and a decoder learned on all images but the held-out ones. Pixels are bytes; width 0 stays with the
    linear decoder; `most` images are learned from, where it is given."""
    make, layer = NETWORKS[name]
    order = torch.randperm(len(pixels), generator=generator(seed, "held out"))
    shown = pixels.to(device).float() / 255
    mean, std = (getattr(shown, what)((0, 2, 3)).view(1, 3, 1, 1) for what in ("mean", "std"))
    shown, known = (shown - mean) / std, labels.to(device)
    torch.manual_seed(derive_seed(seed, "weights", name) % 2**31)
    model = make().to(device)
    public, kept = order[held:].to(device), order[:held].to(device)
    TRAININGS[training](model, shown[public], known[public], seed)
    public = public[:most]
    decoder = learn_decoder(Prefix(model, layer), shown[public], seconds=seconds, width=width, seed=seed, steps=steps)
    return Bench(name, training, model, layer, decoder, shown[public], shown[kept], known[kept], mean, std)


FEWEST = 16
"""Images that a row rests on at least."""


def rows_of(bench: Bench, sizes: Sequence[int], local_steps: Sequence[int] = ()) -> Iterator[dict[str, Any]]:
    """One row for each batch size, then for each number of local steps and for the private step at 16."""
    for size in sizes:
        yield asdict(bench.judge(size, -(-FEWEST // size))[0])
    for steps in local_steps:
        for size in (4, 16):
            yield asdict(bench.judge(size, -(-FEWEST // (size * steps)), local_steps=steps)[0])
    for bits in (72.0, 18.0, 8.0):
        yield asdict(bench.judge(16, 2, bits=bits)[0])
