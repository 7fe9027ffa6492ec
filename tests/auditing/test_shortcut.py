"""A step that starts at the attacked layer gives what the whole step gives, or is not taken."""

import pytest
import torch
from torch import nn

from qbi.auditing.shortcut import Shortcuts
from qbi.federation.client import default_loss
from qbi.federation.exposed import exposed_step
from qbi.models import Residual, image_cnn

X, Y = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4


def convolutions(*more):
    return [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), *more, nn.Flatten()]


class Around(nn.Module):
    """A way around the attacked layer."""

    def __init__(self):
        super().__init__()
        self.before, self.layer, self.head = nn.Linear(192, 20), nn.Linear(20, 20), nn.Linear(20, 4)

    def forward(self, x):
        h = self.before(x.flatten(1)).relu()
        return self.head(h + self.layer(h).relu())


MODELS = {
    "the paper's CNN": (lambda: image_cnn((3, 8, 8), 30, 4), "fc1", True),
    "BatchNorm, changed in place": (
        lambda: nn.Sequential(*convolutions(), nn.Linear(512, 20), nn.ReLU(), nn.Linear(20, 4)), "4", True
    ),
    "a block before": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 1), Residual(nn.Conv2d(4, 4, 3, padding=1)), nn.Flatten(), nn.Linear(256, 20), nn.ReLU(), nn.Linear(20, 4)
        ), "3", True
    ),
    "dropout behind": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 30), nn.ReLU(), nn.Linear(30, 20), nn.Dropout(), nn.Linear(20, 4)), "3", True
    ),
    "dropout before and behind": (
        lambda: nn.Sequential(*convolutions(nn.Dropout()), nn.Linear(512, 20), nn.Dropout(), nn.Linear(20, 4)), "5", False
    ),
    "a way around": (Around, "layer", False),
    "called twice": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 20), layer := nn.Linear(20, 20), nn.ReLU(), layer, nn.Linear(20, 4)), "2", False
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_short_way_gives_what_the_whole_step_gives(name):
    make, layer, short = MODELS[name]
    torch.manual_seed(0)
    model, shortcuts = make(), Shortcuts()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    for _ in range(2):  # kept, then used again
        found = shortcuts.step(model, layer, (X,), Y, loss=default_loss, seed=3)
    whole = exposed_step(model, (X,), Y, layers=[layer], loss=default_loss, seed=3)
    missing = set(whole.update.gradients) - set(found.update.gradients)
    assert bool(missing) == short
    assert f"{layer}.weight" in found.update.gradients
    for parameter, gradient in found.update.gradients.items():
        assert torch.equal(gradient, whole.update.gradients[parameter])
    for buffer, value in whole.update.buffers.items():
        assert torch.equal(found.update.buffers[buffer], value)
    assert torch.equal(found.exposures[0].inputs, whole.exposures[0].inputs)
    assert found.update.loss == whole.update.loss
    assert all(torch.equal(value, before[n]) for n, value in model.state_dict().items())


def test_another_prefix_or_batch_is_not_taken_for_the_one_that_was_kept():
    model, shortcuts = image_cnn((3, 8, 8), 30, 4), Shortcuts()
    for change in (lambda: None, lambda: nn.init.normal_(model.get_parameter("conv1.weight")), lambda: X.roll(1, 0)):
        x = X if (changed := change()) is None or changed.shape != X.shape else changed
        found = shortcuts.step(model, "fc1", (x,), Y, loss=default_loss, seed=0)
        whole = exposed_step(model, (x,), Y, layers=["fc1"], loss=default_loss, seed=0)
        assert torch.equal(found.update.gradients["fc1.weight"], whole.update.gradients["fc1.weight"])


def test_a_later_layer_starts_where_an_earlier_one_was_reached():
    """Also with what a normalisation before the earlier one learned of the batch."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *convolutions(), nn.Linear(512, 20), nn.ReLU(), nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 4)
    )
    shortcuts, runs = Shortcuts(), []
    model[0].register_forward_hook(lambda _m, given, out: runs.append(out.stride()))
    for layer in ("4", "6"):
        found = shortcuts.step(model, layer, (X,), Y, loss=default_loss, seed=0)
        count = len([r for r in runs if any(r)])
        whole = exposed_step(model, (X,), Y, layers=[layer], loss=default_loss, seed=0)
        runs.clear()
        assert torch.equal(found.update.gradients[f"{layer}.weight"], whole.update.gradients[f"{layer}.weight"])
        assert all(torch.equal(found.update.buffers[n], b) for n, b in whole.update.buffers.items())
        assert count == (2 if layer == "4" else 0)  # to see what runs before, on two samples; and once on the batch


def test_a_model_for_batches_of_one_size_is_stepped_whole():
    class OfSix(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.layer, self.head = nn.Linear(192, 20), nn.Linear(20, 20), nn.Linear(20, 4)

        def forward(self, x):
            return self.head(self.layer(self.before(x.reshape(6, 192)).relu()).relu())

    found = Shortcuts().step(OfSix(), "layer", (X,), Y, loss=default_loss, seed=0)
    assert "before.weight" in found.update.gradients
