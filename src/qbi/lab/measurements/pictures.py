"""What honest-but-curious servers see of batches: features are read by worker processes while decoders are learned."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

import torch
from torch import Tensor

from qbi.data.open import open_images
from qbi.lab.kept import Kept
from qbi.lab.measurements import in_clone
from qbi.lab.pictures import ClientBatch, Request, SentNetwork, decoder_of, judge, prepared
from qbi.lab.tiles import save_tiles
from qbi.lab.workers import Workers

STAGES: dict[str, Any] = {"steps": 1200, "width": 64, "stages": 4}
"""Of decoders on a GPU: less than a minute each. On a processor they are linear."""
WIDE = 12_000
"""Images that the decoder of a layer of 4,096 features is learned from on a processor, in a minute or two."""
FEWEST, DRAWS = 128, range(10, 13)
"""Images that a row rests on at least; draws of the quickstart's weights: some keep more of an image than others. None of these was looked at
before the decoder was settled."""
SIZES, LOCAL_STEPS, BITS = (1, 4, 8, 16, 32, 64), (5, 20), (72.0, 18.0, 8.0)


@dataclass(frozen=True)
class NetworkSetting:
    """A network to look at; at every kind of batch, or at batches of 16 alone."""

    network: str
    training: str
    seed: int = DRAWS[0]
    whole: bool = False

    @property
    def key(self) -> str:
        """A name for files, and for `--only`."""
        return f"{self.network} {self.training} {self.seed}"

    def kinds(self) -> Iterator[list[ClientBatch]]:
        """Batches of each kind; those of 16 first."""
        for size in (16, *(size for size in SIZES if size != 16 and self.whole)):
            yield [ClientBatch(size, n) for n in range(FEWEST // size)]
        if self.whole:
            for steps in LOCAL_STEPS:
                yield from ([ClientBatch(s, n, steps) for n in range(max(1, FEWEST // (s * steps)))] for s in (4, 16))
            yield from ([ClientBatch(16, n, 1, bits) for n in range(2)] for bits in BITS)


SETTINGS = (
    *(NetworkSetting("quickstart", "as initialised", seed, seed == DRAWS[0]) for seed in DRAWS),
    *(NetworkSetting("quickstart", "rate 0.001", seed, seed == DRAWS[0]) for seed in DRAWS),
    NetworkSetting("FedAvg's CNN", "as initialised", whole=True),
    NetworkSetting("FedAvg's CNN", "two epochs"),
    *(NetworkSetting("quickstart", training) for training in ("rate 0.01", "rate 0.1", "two epochs")),
)
SHOWN = {NetworkSetting("quickstart", "as initialised", whole=True).key: "quickstart-batch.png"}
"""Whose first batch is written as a picture, beside what was seen of it."""


def pictures(data: str, only: str = "") -> dict[str, Any]:
    """Batches of honest clients, network by network; decoders in closed form, and with stages where there is a GPU.

    Args:
        data: CIFAR-10, as `qbi data` names it.
        only: part of the names of settings; the others are taken from what was kept.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = open_images(data, size=32, count=60_000, seed=0)
    kept = Kept("pictures", device)
    left = [s for s in SETTINGS if only in s.key and kept.get(s.key) is None]
    sent = {s: prepared(s.network, images.pixels, images.labels, training=s.training, seed=s.seed, device=device) for s in left}  # fmt: skip
    tasks = [(s, batch) for s in left for kind in s.kinds() for batch in kind]
    requests = {task: sent[task[0]].request(task[1]) for task in tasks}
    with ThreadPoolExecutor(1) as beside:
        jobs = max(2, (os.cpu_count() or 1) - 1)  # processes of their own: this one learns meanwhile
        reading = beside.submit(lambda: dict(Workers(jobs).map(_read, tasks, requests)))
        for s in left:
            rows = _rows(s, sent[s], device, lambda s=s: {b: v for (own, b), v in reading.result().items() if own == s})
            kept.put(s.key, rows)
    machine = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    where = f"{images.name}, {len(images):,} images, 2,000 held out; {machine}, {date.today()}"
    return {"provenance": where, "rows": [row for s in SETTINGS for row in kept.get(s.key) or []]}


def _read(
    task: tuple[NetworkSetting, ClientBatch], requests: dict[tuple[NetworkSetting, ClientBatch], Request]
) -> Tensor:
    return requests[task].read()


def _rows(setting: NetworkSetting, sent: SentNetwork, device: str, reading: Any) -> list[dict[str, Any]]:
    """The linear decoder at 16, and every kind of batch with the better one."""
    wide = sent.name != "quickstart" and device == "cpu"
    decoders = [decoder_of(sent, most=WIDE if wide else None)]
    if device == "cuda":
        decoders.append(decoder_of(sent, **STAGES))
    read, rows = reading(), []
    for number, kind in enumerate(setting.kinds()):
        for decoder in decoders if number == 0 else decoders[-1:]:
            row, batch, made = judge(sent, decoder, {one: read[one] for one in kind})
            rows.append(asdict(row) | {"accuracy": sent.accuracy})
            print(rows[-1], flush=True)
        if number == 0 and setting.key in SHOWN:
            pairs = torch.stack([sent.pixels(batch), sent.pixels(made)])
            tiles = pairs.unflatten(1, (2, 8)).transpose(0, 1).flatten(0, 1).unflatten(2, batch.shape[1:])
            save_tiles(in_clone("docs/figures") / SHOWN[setting.key], tiles, scale=3)
    return rows
