"""Gradient matching: what it sees of one image and of two, and what must see nothing."""

import math

import pytest
import torch
from torch import nn

from qbi.auditing.outcomes import beats_a_guess
from qbi.data.images import normalised
from qbi.data.photos import synthetic_photos
from qbi.errors import BadValue, CannotRead
from qbi.extraction.labels import batch_labels
from qbi.federation import client_step
from qbi.lab.matching import one_batch, settings
from qbi.lab.networks import LeNetZhu
from qbi.matching import Effort, GradientDistance, match_images, seconds_needed
from qbi.metrics import RECOGNISABLE, Guess, match
from qbi.private.defence import PrivateStep
from qbi.private.goal import Budget
from qbi.randomness import generator

SIDE = 16
PHOTOS = synthetic_photos(120, SIDE, seed=2)
MEAN, STD = (torch.tensor(v).view(1, 3, 1, 1) for v in (PHOTOS.mean, PHOTOS.std))
LOW, HIGH = -MEAN / STD, (1 - MEAN) / STD
X, Y = normalised(PHOTOS, slice(None)), PHOTOS.labels
SHORT = Effort(steps=250)
HARD = (1, 2)
"""Images that no guess from the others comes near."""


def smooth(seed=0):
    """A small network without corners, whose first linear layer stands behind convolutions."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 12, 5, 2, 2), nn.Tanh(), nn.Conv2d(12, 12, 5, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(192, 10))  # fmt: skip


def found(model, gradients, labels, effort=SHORT, seed=0):
    sought = GradientDistance(model, gradients, labels)
    return match_images(sought, (3, SIDE, SIDE), low=LOW, high=HIGH, effort=effort, seed=seed)


def seen(images, chosen):
    """What of a batch is recognisable, where that is more than the best guess from all other photos."""
    truth, made = ((part * STD + MEAN).flatten(1) for part in (X[chosen], images))
    others = [i for i in range(len(X)) if i not in chosen]
    recoveries = match(made, truth)
    guess = Guess.of(truth, recoveries, (X[others] * STD + MEAN).flatten(1), 1.0)
    assert guess.share[RECOGNISABLE] == 0
    share = float(recoveries[RECOGNISABLE].recovered.double().mean())
    assert beats_a_guess(guess.share, guess.beyond, RECOGNISABLE) == (share > 0)
    return share


@pytest.mark.parametrize("index", HARD)
def test_one_image_is_seen(index):
    model = smooth()
    gradients = client_step(model, X[[index]], Y[[index]]).gradients
    labels, certain = batch_labels(gradients["5.bias"], 1)
    assert certain
    assert labels.tolist() == [int(Y[index])]
    made = found(model, gradients, labels)
    assert seen(made.images, [index]) == 1
    assert made.distance < 0.01
    assert (made.images >= LOW - 1e-5).all()
    assert (made.images <= HIGH + 1e-5).all()


def test_two_images_are_told_apart():
    model = smooth()
    chosen = list(HARD)
    gradients = client_step(model, X[chosen], Y[chosen]).gradients
    assert seen(found(model, gradients, Y[chosen].sort().values).images, chosen) == 1


def of_another(model):
    return client_step(model, X[[50]], Y[[HARD[0]]]).gradients


def shuffled(model):
    own = client_step(model, X[[HARD[0]]], Y[[HARD[0]]]).gradients
    draws = torch.Generator().manual_seed(0)
    return {n: g.flatten()[torch.randperm(g.numel(), generator=draws)].view_as(g) for n, g in own.items()}


def private(bits):
    def step(model):
        chosen = [HARD[0]]
        return PrivateStep(Budget.for_goal(bits=bits)).update(model, X[chosen], Y[chosen], generator(0, "noise")).gradients  # fmt: skip

    return step


@pytest.mark.parametrize(
    "gradients",
    [of_another, shuffled, private(72.0), private(18.0), private(8.0)],
    ids=["another image", "shuffled", "72 bits", "18 bits", "8 bits"],
)
def test_what_tells_nothing_of_an_image_shows_nothing_of_it(gradients):
    model = smooth()
    made = found(model, gradients(model), Y[[HARD[0]]])
    assert seen(made.images, [HARD[0]]) == 0


class Blind(nn.Module):
    """A model whose answer does not depend on what it is shown."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 10)

    def forward(self, x):
        return self.head(0 * x.flatten(1)[:, :4] + 1)


def test_a_blind_model_gives_nothing_away():
    model = Blind()
    gradients = client_step(model, X[[HARD[0]]], Y[[HARD[0]]]).gradients
    made = found(model, gradients, Y[[HARD[0]]])
    assert made.distance < 1e-5
    assert seen(made.images, [HARD[0]]) == 0


def test_the_same_seed_gives_the_same_images_and_the_nearest_start_is_kept():
    model = smooth()
    gradients = client_step(model, X[[1]], Y[[1]]).gradients
    effort = Effort(steps=20, restarts=3)
    first, again, other = (found(model, gradients, Y[[1]], effort, seed) for seed in (0, 0, 1))
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)
    assert first.distance == min(first.distances)
    assert len(set(first.distances)) == 3


def test_a_model_is_left_as_it_was_and_run_as_a_client_runs_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 14 * 14, 10)).eval()  # fmt: skip
    before = {n: v.clone() for n, v in model.state_dict().items()}
    state = torch.get_rng_state()
    gradients = client_step(model, X[:2], Y[:2], seed=5).gradients
    found(model, gradients, Y[:2], Effort(steps=2))
    assert not model.training
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    # The very batch, with the very dropout, has the very gradient: only in train mode, with the statistics of the batch.
    sought = GradientDistance(model, gradients, Y[:2], seed=5)
    with sought.running():
        assert float(sought(X[:2]).detach()) < 1e-5
        assert float(sought(X[2:4]).detach()) > 1e-3


def test_attention_has_second_derivatives():
    torch.manual_seed(0)

    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch, self.layer, self.head = nn.Conv2d(3, 8, 4, 4), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 10)  # fmt: skip

        def forward(self, x):
            return self.head(self.layer(self.patch(x).flatten(2).mT).mean(1))

    model = Attending()
    gradients = client_step(model, X[[1]], Y[[1]]).gradients
    start, later = (found(model, gradients, Y[[1]], Effort(steps=s)).distance for s in (1, 40))
    assert later < start


def test_labels_that_are_called_certain_are_the_labels():
    certain = estimated = right = 0
    for seed in range(300):
        draws = torch.Generator().manual_seed(seed)
        size = 1 + seed % 8
        outputs = (3 * torch.randn(size, 10, generator=draws)).requires_grad_()
        truth = torch.randint(10, (size,), generator=draws)
        (slope,) = torch.autograd.grad(nn.functional.cross_entropy(outputs, truth), outputs)
        labels, sure = batch_labels(slope.sum(0), size)
        assert len(labels) == size
        # Whatever else is wrong: a class with a negative gradient is in the batch.
        assert set((slope.sum(0) < 0).nonzero()[:, 0].tolist()) <= set(labels.tolist())
        if sure:
            certain += 1
            assert labels.tolist() == truth.sort().values.tolist()
        else:
            estimated += 1
            right += int(torch.equal(labels, truth.sort().values))
    assert certain > 50
    assert 0 < right < estimated


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"steps": 0}, "0 steps"),
        ({"restarts": 0}, "0 restarts"),
        ({"rate": math.nan}, "rate nan"),
        ({"smooth": -1.0}, "smoothness -1.0"),
    ],
)
def test_an_effort_that_is_none_is_refused(setting, says):
    with pytest.raises(BadValue, match=says):
        Effort(**setting)


def test_gradients_of_another_model_and_of_nothing_are_refused():
    model = smooth()
    own = client_step(model, X[[1]], Y[[1]]).gradients
    with pytest.raises(BadValue, match="name no parameter"):
        GradientDistance(model, {"elsewhere": torch.ones(3)}, Y[[1]])
    with pytest.raises(BadValue, match=r"5\.bias has shape \(10,\)"):
        GradientDistance(model, own | {"5.bias": torch.ones(3)}, Y[[1]])
    with pytest.raises(CannotRead, match="NaN"):
        GradientDistance(model, own | {"5.bias": torch.full((10,), torch.nan)}, Y[[1]])
    with pytest.raises(CannotRead, match="zero everywhere"):
        GradientDistance(model, {n: 0 * g for n, g in own.items()}, Y[[1]])


def test_the_time_is_for_all_steps_from_all_starts():
    model = smooth()
    sought = GradientDistance(model, client_step(model, X[[1]], Y[[1]]).gradients, Y[[1]])
    asked = {"low": LOW, "high": HIGH}
    short = seconds_needed(sought, (3, SIDE, SIDE), effort=Effort(10), **asked)
    long = seconds_needed(sought, (3, SIDE, SIDE), effort=Effort(1000, 10), **asked)
    assert long > 50 * short > 0


def test_the_measurement_in_small():
    task = next(s for s in settings() if s.network == "LeNet (Zhu)" and s.batch_size == 1 and s.bits is None)
    big = torch.nn.functional.interpolate(PHOTOS.pixels, 32)
    row = one_batch(task, big, Y, effort=Effort(steps=5))
    assert row["recognisable"] == 0
    assert row["psnr"] > 0
    assert row["seconds"] > 0
    weights = torch.cat([p.detach().flatten() for p in LeNetZhu().parameters()])
    assert weights.abs().max() <= 0.5
    assert abs(float(weights.mean())) < 0.02
