"""Twenty models as people write them: the right decision for each layer, and every exact claim proven by recovery."""

import copy

import pytest
import torch
from torch import nn

import zoo
from qbi.attacks import QBI, Mounted
from qbi.attacks.mounting import write
from qbi.auditing.survey import survey
from qbi.carrier import flat
from qbi.errors import BadValue, CannotMount
from qbi.exposure import isolated_samples, observe
from qbi.extraction import extract
from qbi.federation import client_step
from qbi.metrics import EXACT, match
from qbi.randomness import generator
from qbi.routing import carry_to, trace

DRAWS = torch.Generator().manual_seed(0)
BATCH = 12
IMAGES = (torch.randn(BATCH, 3, 16, 16, generator=DRAWS),)
TOKENS = (torch.randint(50, (BATCH, 12), generator=DRAWS),)
TABLE = (torch.randn(BATCH, 20, generator=DRAWS),)
BOTH = (IMAGES[0], torch.randn(BATCH, 5, generator=DRAWS))

ZOO = {
    "LeNet": (zoo.LeNet, IMAGES, {"f1": ("lossy", "c1"), "f2": ("lossy", "c1"), "f3": ("lossy", "c1")}),
    "AlexNet": (zoo.alexnet, IMAGES, {"8": ("lossy", "2"), "10": ("lossy", "2")}),
    "VGG with BatchNorm": (zoo.vgg, IMAGES, {"11": ("lossy", "6"), "13": ("lossy", "6")}),
    "VGG": (lambda: zoo.vgg(False), IMAGES, {"8": ("lossy", "4"), "10": ("lossy", "4")}),
    "ResNet with BatchNorm": (zoo.ResNet, IMAGES, {"hidden": ("exact", ""), "out": ("lossy", "hidden")}),
    "ResNet": (lambda: zoo.ResNet(norm=False), IMAGES, {"hidden": ("exact", ""), "out": ("lossy", "hidden")}),
    "ResNet, pooled": (
        lambda: zoo.ResNet(pooled=True),
        IMAGES,
        {"hidden": ("lossy", "pool"), "out": ("lossy", "pool")},
    ),
    "MLP": (zoo.mlp, IMAGES, {"1": ("exact", ""), "3": ("lossy", "1"), "5": ("lossy", "1")}),
    "MLP-Mixer": (
        zoo.Mixer,
        IMAGES,
        {
            "t1": ("lossy", "n1"),
            "t2": ("lossy", "n1"),
            "c1": ("lossy", "n2"),
            "c2": ("lossy", "n2"),
            "head": ("lossy", "mean"),
        },
    ),
    "ViT": (zoo.ViT, IMAGES, {"up": ("lossy", "n2"), "down": ("lossy", "n2"), "head": ("lossy", "getitem")}),
    "text CNN": (zoo.TextCNN, TOKENS, {"f1": ("lossy", "amax"), "f2": ("lossy", "amax")}),
    "embedding MLP": (zoo.EmbeddingMLP, TOKENS, {"f1": ("exact", ""), "f2": ("lossy", "f1")}),
    "tabular MLP": (zoo.tabular, TABLE, {"1": ("exact", ""), "4": ("lossy", "3"), "6": ("lossy", "3")}),
    "autoencoder": (
        zoo.Autoencoder,
        IMAGES,
        {
            "encoder.0": ("exact", ""),
            "encoder.2": ("lossy", "encoder.0"),
            "decoder.0": ("lossy", "encoder.0"),
            "decoder.2": ("lossy", "encoder.0"),
        },
    ),
    "LSTM": (zoo.LSTMHead, TOKENS, {"f1": ("lossy", "lstm"), "f2": ("lossy", "lstm")}),
    "two inputs": (zoo.TwoInputs, BOTH, {"table": ("exact", ""), "f1": ("exact", ""), "f2": ("lossy", "f1")}),
    "functional ReLU": (zoo.FunctionalReLU, IMAGES, {"f1": ("exact", ""), "f2": ("lossy", "f1")}),
    "custom function": (zoo.CustomFunction, IMAGES, {"f1": ("exact", ""), "f2": ("lossy", "f1")}),
    "tied": (
        zoo.Tied,
        IMAGES,
        {"first": ("exact", ""), "out": ("lossy", "shared")},
    ),
    "transformer layer": (zoo.Transformer, TOKENS, {"head": ("lossy", "encoder")}),
}


def made(name):
    torch.manual_seed(0)
    return ZOO[name][0]()


@pytest.mark.parametrize("name", ZOO)
def test_the_right_decision_for_each_layer(name):
    model = made(name)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    findings = survey(model, tuple(part[:4] for part in ZOO[name][1])).findings
    findings = [
        f for f in findings if f.model is None and f.target.activation != "inside a module"
    ]  # others are written as linear maps, see test_zoo.py
    assert {f.name for f in findings} == ZOO[name][2].keys()
    for finding in findings:
        reach, decider = ZOO[name][2][finding.name]
        assert finding.reach == reach, finding
        assert not decider or finding.decided_by == decider, finding
        assert finding.reason
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())


CARRIED = [
    (name, layer) for name, (_, _, layers) in ZOO.items() for layer, (reach, _) in layers.items() if reach == "exact"
]


@pytest.mark.parametrize(("name", "layer"), CARRIED, ids=[f"{n}: {layer}" for n, layer in CARRIED])
def test_every_exact_claim_is_confirmed_from_real_gradients(name, layer):
    inputs = ZOO[name][1]
    crafted = copy.deepcopy(made(name)).train()
    carrier = carry_to(crafted, layer, inputs)
    write(Mounted(crafted, layer, carrier, attack=QBI(BATCH)), generator(3))
    isolated = isolated_samples(observe(crafted, layer, inputs).fired)
    reconstructs = name == "autoencoder"
    targets = inputs[0] if reconstructs else torch.arange(BATCH) % 2
    loss = nn.functional.mse_loss if reconstructs else nn.functional.cross_entropy
    update = client_step(crafted, inputs, targets, loss=loss)
    found = extract(crafted, layer, carrier, update)
    source = inputs[carrier.source]
    if carrier.embedding is not None:
        source = crafted.get_submodule(carrier.embedding)(source).detach()
    recovery = match(found.samples, flat(source))[EXACT]
    # What a dead loss hides (no gradient for a sample) is not the prefix's fault; a wrong prefix recovers nothing.
    assert recovery.recovered.sum() >= min(3, int(isolated.sum()))
    assert isolated.sum() >= 3 or carrier.features < 10
    assert not (recovery.recovered & ~isolated).any() or carrier.features < 30


def test_the_tracer_says_how_it_went():
    hows = {
        name: trace(made(name), tuple(p[:4] for p in ZOO[name][1])).how
        for name in ("MLP", "embedding MLP", "custom function")
    }
    assert hows == {"MLP": "fx", "embedding MLP": "export", "custom function": "hooks"}


def test_what_hooks_cannot_see_is_a_gap():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(20, 30), nn.Linear(30, 4)

        def forward(self, x):
            if float(x.sum()) > 1e9:
                return x
            return self.second(torch.sin(self.first(x)))

    findings = survey(Odd(), (TABLE[0][:4],)).findings
    assert [f.reach for f in findings] == ["exact", "lossy"]
    assert "could not be followed" in findings[1].reason


def test_a_model_that_fails_is_the_users_to_mend():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(20, 3)

        def forward(self, x):
            raise RuntimeError("sorry")

    with pytest.raises(BadValue, match=r"forward pass fails .* sorry"):
        survey(Broken(), (TABLE[0][:4],))
    with pytest.raises(BadValue, match="Check that the data"):
        survey(zoo.mlp(), (TABLE[0][:4],))


def test_strict_carrying_refuses_a_loss_and_other_carrying_notes_it():
    model = made("VGG")
    with pytest.raises(CannotMount, match=r"4 .MaxPool2d. reduces"):
        carry_to(copy.deepcopy(model), "8", IMAGES)
    carrier = carry_to(copy.deepcopy(model), "8", IMAGES, strict=False)
    assert not carrier.exact
    assert carrier.shape == (3, 8, 8)


@pytest.mark.parametrize(
    ("activation", "slope"),
    [(nn.ReLU(), 0.0), (nn.LeakyReLU(0.1), 0.1), (nn.GELU(), -0.0788), (nn.SiLU(), -0.0832), (nn.Identity(), 1.0)],
    ids=["relu", "leaky", "gelu", "silu", "none"],
)
def test_what_an_activation_lets_through_is_measured(activation, slope):
    findings = survey(nn.Sequential(nn.Linear(20, 30), activation, nn.Tanh()), (TABLE[0][:4],)).findings
    found = findings[0].target.slope_below
    assert found == pytest.approx(slope if slope != 1.0 else found, abs=1e-3)
    assert findings[0].target.rectified == (slope == 0)
