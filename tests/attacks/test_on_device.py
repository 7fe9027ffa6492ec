"""Decoding on an accelerator reads what a processor reads."""

import pytest
import torch

from qbi.attacks import Attack, Cascade, Passive, Reading, mount, on_device
from qbi.data.images import normalised
from qbi.data.photos import synthetic_photos
from qbi.extraction import unmixing
from qbi.federation import client_step
from qbi.metrics import EXACT, match
from qbi.models import two_layer
from qbi.randomness import generator

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("attack", [Cascade(24), Passive()], ids=["cascade", "unmixing"])
def test_both_devices_read_and_prove_the_same(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "LARGE", 0)
    monkeypatch.setattr(unmixing, "LARGE", 0)
    photos = synthetic_photos(24, 16, seed=0)
    x, y = normalised(photos, slice(None)), torch.arange(24) % 10
    model = torch.nn.Sequential(torch.nn.Flatten(), *two_layer(768, 200, 10, seed=0))
    sent = mount(model, attack, x[:2], generator(0, "rows"), layer="1")
    update = client_step(sent.model, x, y)
    proven = []
    for device in ("cpu", "cuda"):
        sent.model.to(device)
        moved = type(update)({n: g.to(device) for n, g in update.gradients.items()}, {}, update.batch_size, 0.0)
        found = sent.read(moved, Reading(largest=float(x.abs().max())))
        assert match(found.samples.cpu(), x.flatten(1))[EXACT].recall == 1
        proven.append(int(found.certified.sum()))
    assert proven[0] > 12
    assert abs(proven[0] - proven[1]) <= 1
