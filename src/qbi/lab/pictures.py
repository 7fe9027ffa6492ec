"""What an honest-but-curious server sees of a batch: features by unmixing, pictures by a decoder, on networks as people train them."""

import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from qbi import client_step, mount
from qbi.attacks import Reading
from qbi.attacks.passive import Passive
from qbi.carrier import flat
from qbi.errors import CannotRead
from qbi.federation.local import LocalTraining, local_update
from qbi.lab.honest import NETWORKS, TRAININGS
from qbi.lab.training import accuracy
from qbi.metrics import CLEAR, FAITHFUL, RECOGNISABLE, match
from qbi.pictures import Decoder, Prefix, fit_pictures, learn_decoder
from qbi.pictures.fitting import FEW_DIRECTIONS, FEW_STEPS
from qbi.pictures.prefix import features_of
from qbi.private.defence import PrivateStep
from qbi.private.goal import Budget
from qbi.randomness import derive_seed, generator


@dataclass(frozen=True)
class ClientBatch:
    """What one honest client trains on, and how; several local steps have a part of the images each."""

    batch_size: int
    number: int = 0
    """Which one; others have other images."""
    local_steps: int = 1
    bits: float | None = None
    """Of the private step; none: the plain gradient."""


@dataclass(frozen=True)
class SentNetwork:
    """A network as a server sends it, and images that nobody learns from."""

    name: str
    training: str
    seed: int
    model: nn.Module
    layer: str
    public: Tensor
    held: Tensor
    labels: Tensor
    mean: Tensor
    std: Tensor

    @property
    def prefix(self) -> Prefix:
        """The layers before the layer that is read."""
        return Prefix(self.model, self.layer)

    @property
    def accuracy(self) -> float:
        """Of the network, on held-out images."""
        return accuracy(self.model, self.held, self.labels)

    def images(self, batch: ClientBatch) -> Tensor:
        """Where the client's images stand among those held out."""
        order = torch.randperm(len(self.held), generator=generator(self.seed, "seen", batch.number))
        return order[: batch.batch_size * batch.local_steps].to(self.held.device)

    @cached_property
    def on_cpu(self) -> nn.Module:
        """One copy, however many readers are sent it."""
        return copy.deepcopy(self.model).cpu()

    def request(self, batch: ClientBatch) -> "Request":
        """All that a reader's process needs."""
        chosen = self.images(batch)
        return Request(self.on_cpu, self.layer, self.held[chosen].cpu(), self.labels[chosen].cpu(), batch, self.seed)

    def pixels(self, images: Tensor) -> Tensor:
        """In [0, 1], one row for each."""
        return flat((images * self.std + self.mean).clamp(0, 1)).cpu()


@dataclass(frozen=True)
class Request:
    """One batch of one client. Small systems: a processor solves them faster than a GPU launches them."""

    model: nn.Module
    layer: str
    x: Tensor
    y: Tensor
    batch: ClientBatch
    seed: int

    def read(self) -> Tensor:
        """Candidates for the features of the client's images, from the update that it sends."""
        seed, steps = self.seed + self.batch.number, self.batch.local_steps
        mounted = mount(self.model, Passive(), self.x[:2], generator(seed, "rows"), layer=self.layer)
        if self.batch.bits is not None:
            step = PrivateStep(Budget.for_goal(bits=self.batch.bits))
            update = step.update(self.model, self.x, self.y, generator(seed, "noise"))
        elif steps == 1:
            update = client_step(self.model, self.x, self.y)
        else:
            parts = zip(self.x.split(self.batch.batch_size), self.y.split(self.batch.batch_size), strict=True)
            batches = [((part,), own) for part, own in parts]
            update = local_update(self.model, batches, LocalTraining("sgd", 0.01), seed=seed)
        try:
            return mounted.read_at_layer(update, Reading(seed=seed)).samples
        except CannotRead:
            return self.x.new_zeros(0, mounted.target.in_features)


@dataclass(frozen=True)
class PictureRow:
    """What was seen of batches of one kind; shares of all their images."""

    network: str
    training: str
    seed: int
    decoder: str
    """`closed form`, or `stages`."""
    batch_size: int
    local_steps: int
    bits: float | None
    images: int
    features: float
    """Whose features were read at 60 dB."""
    clear: float
    recognisable: float
    """Of which a picture was made, at 30 and 19 dB in the input."""
    psnr: float | None
    """Mean over those whose features were read."""
    guess: float
    """Recognisable with nothing read: what the decoder makes of the mean feature."""
    nearest: float
    """Recognisable by the public image whose features are nearest to the true ones."""
    shuffled: float
    """Recognisable where each picture is compared with another sample's."""


def judge(sent: SentNetwork, decoder: Decoder, read: dict[ClientBatch, Tensor]) -> tuple[PictureRow, Tensor, Tensor]:
    """Batches of one kind, with what was read of each; also the first one's images and what was seen of them."""
    prefix, near = sent.prefix, RECOGNISABLE.largest_error(1.0)
    low, high = ((v - sent.mean) / sent.std for v in (torch.zeros_like(sent.mean), torch.ones_like(sent.mean)))
    known = features_of(prefix, sent.public[:8192]) / decoder.spread
    with torch.no_grad():
        mean = decoder(decoder.centre[None], prefix).float()
    hits, truths, seen_all, guesses = [], [], [], []
    first: tuple[Tensor, Tensor] | None = None
    for batch, candidates in read.items():
        x = sent.held[sent.images(batch)]
        true, found = features_of(prefix, x), candidates.to(x)
        hit = match((found / decoder.spread).cpu(), (true / decoder.spread).cpu())[FAITHFUL]
        # What was read, not what is true; what was not read stays grey.
        made, seen = torch.zeros_like(x), hit.recovered.to(x.device)
        if bool(seen.any()):
            given = found[hit.candidate[hit.recovered].to(x.device)]
            made[seen] = fit_pictures(prefix, given, decoder, low=low, high=high, **_effort(decoder))
        truth, pictures = sent.pixels(x), sent.pixels(made)
        closest = sent.public[torch.cdist(true / decoder.spread, known).argmin(1)]
        hits.append(hit.recovered)
        truths.append(truth)
        seen_all.append(pictures)
        guesses.append(sent.pixels(closest))
        first = first or (x, made)
    assert first is not None
    hit_all, truth, pictures = torch.cat(hits), torch.cat(truths), torch.cat(seen_all)

    def errors(other: Tensor) -> Tensor:
        return (truth - other).square().mean(1)

    def share(other: Tensor, limit: float = near) -> float:
        return float((errors(other) <= limit).double().mean())

    error, kind = errors(pictures), next(iter(read))
    return (
        PictureRow(
            sent.name,
            sent.training,
            sent.seed,
            "stages" if len(decoder.stages) else "closed form",
            kind.batch_size,
            kind.local_steps,
            kind.bits,
            len(error),
            features=float(hit_all.double().mean()),
            clear=share(pictures, CLEAR.largest_error(1.0)),
            recognisable=share(pictures),
            psnr=float(-10 * error[hit_all].clamp_min(1e-12).log10().mean()) if bool(hit_all.any()) else None,
            guess=share(sent.pixels(mean).expand_as(truth)),
            nearest=share(torch.cat(guesses)),
            shuffled=share(pictures.roll(1, 0)),
        ),
        *first,
    )


def _effort(decoder: Decoder) -> dict[str, int]:
    """A shorter fit behind wide networks, where each direction takes a pass that is forty times as long."""
    wide = decoder.centre.numel() > 1024
    return {"steps": FEW_STEPS, "directions": FEW_DIRECTIONS} if wide else {}


def prepared(
    name: str, pixels: Tensor, labels: Tensor, *, training: str, held: int = 2000, seed: int = 0, device: str = "cpu"
) -> SentNetwork:
    """A network, trained or not, on all images but the held-out ones. Pixels are bytes."""
    make, layer = NETWORKS[name]
    order = torch.randperm(len(pixels), generator=generator(seed, "held out"))
    shown = pixels.to(device).float() / 255
    public, kept = order[held:].to(device), order[:held].to(device)
    mean, std = (getattr(shown[public], what)((0, 2, 3)).view(1, 3, 1, 1) for what in ("mean", "std"))
    shown, known = (shown - mean) / std, labels.to(device)
    torch.manual_seed(derive_seed(seed, "weights", name) % 2**31)
    model = make().to(device)
    TRAININGS[training](model, shown[public], known[public], seed)
    return SentNetwork(name, training, seed, model, layer, shown[public], shown[kept], known[kept], mean, std)


def decoder_of(
    sent: SentNetwork, *, most: int | None = None, steps: int = 0, width: int = 0, stages: int = 0
) -> Decoder:
    """A decoder for its features, learned on public images, `most` of them where it is given."""
    return learn_decoder(sent.prefix, sent.public[:most], steps=steps, width=width, stages=stages, seed=sent.seed)
