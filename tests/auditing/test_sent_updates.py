"""Each batch is answered once for every model that is sent, and never with another model's answer."""

import pytest
import torch
from torch import nn

from qbi.auditing import Client, Samples
from qbi.auditing import sent_updates as sent
from qbi.federation.client import default_loss
from qbi.federation.exposed import exposed_step
from qbi.models import image_cnn

X, Y = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 4


@pytest.fixture
def client(monkeypatch):
    """A client, its model, and the steps that were really taken."""
    steps = []
    monkeypatch.setattr(sent, "exposed_step", lambda *a, **k: steps.append(a) or exposed_step(*a, **k))
    model = image_cnn((3, 8, 8), 30, 4)
    samples = Samples("numbers", (X,), Y)
    return sent.SentUpdates(samples, Client(batch_size=6), default_loss, 0, "cpu", nn.Identity()), model, steps


def test_a_batch_is_answered_once(client):
    updates, model, steps = client
    first = updates.of(model, "fc1", 0)
    with torch.no_grad():
        model.get_submodule("fc1").weight.copy_(
            model.get_submodule("fc1").weight.clone()
        )  # written, and still the same
    assert updates.of(model, "fc1", 0) is first
    assert len(steps) == 1


def test_another_model_or_batch_is_not_taken_for_the_one_that_was_kept(client):
    updates, model, steps = client
    changes = (lambda: 0, lambda: nn.init.normal_(model.get_parameter("conv1.weight")) is None, lambda: 1)
    for change in changes:
        number = int(change())
        _, inputs, targets = updates.batch(number)
        found = updates.of(model, "fc1", number).step.update
        whole = exposed_step(model, inputs, targets, layers=["fc1"], loss=default_loss, seed=number).update
        assert torch.equal(found.gradients["fc1.weight"], whole.gradients["fc1.weight"])
    assert len(steps) == len(changes)
