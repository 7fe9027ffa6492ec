"""Crafted models are seen before any data are touched; trained benign ones are left in peace."""

import pickle
import struct

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from qbi.attacks import PAIRS, QBI, Imprint, TrapWeights, mount
from qbi.carrier import flat
from qbi.data.images import normalised
from qbi.data.photos import synthetic_photos
from qbi.detection import inspect_parameters, layer_dsnr, row_dsnr
from qbi.detection.parameters import model_suspicion
from qbi.federation import client_step
from qbi.federation.exposed import exposed_step
from qbi.lab.calibrate import Judged, crafted_models, evasions, roc
from qbi.models import image_cnn
from qbi.randomness import generator


@pytest.fixture(scope="module")
def photos():
    return synthetic_photos(400, 16, seed=2)


ATTACKS = {
    "qbi at 20": lambda aux: QBI(20),
    "qbi at 200": lambda aux: QBI(200),
    "pairs": lambda aux: PAIRS(20, aux),
    "trap weights": lambda aux: TrapWeights(0.97),
    "imprint": lambda aux: Imprint(),
}


@pytest.mark.parametrize("gain", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("make", ATTACKS.values(), ids=ATTACKS.keys())
def test_every_attack_is_seen_at_every_scale(photos, make, gain):
    torch.manual_seed(0)
    x = normalised(photos, slice(None))
    mounted = mount(image_cnn(photos.shape, 60), make(flat(x)), x[:2], generator(0), gain=gain)
    signs = inspect_parameters(mounted.model.state_dict())
    assert {"conv1", "conv2", "conv3", "fc1"} <= {sign.layer for sign in signs}
    assert max(len(sign.rows) for sign in signs if sign.layer == "fc1") == 60


@pytest.mark.parametrize("make", ATTACKS.values(), ids=ATTACKS.keys())
def test_a_part_of_the_rows_is_enough(photos, make):
    torch.manual_seed(0)
    x = flat(normalised(photos, slice(None)))
    layer = nn.Linear(x.shape[1], 100)
    rows = make(x).rows(10, x.shape[1], generator(0))
    with torch.no_grad():
        layer.weight[20:30], layer.bias[20:30] = rows.weight * 0.02, rows.bias * 0.02
    signs = inspect_parameters({f"fc.{n}": p for n, p in layer.state_dict().items()})
    assert set().union(*(sign.rows for sign in signs)) == set(range(20, 30))


def trained(seed, photos, epochs):
    torch.manual_seed(seed)
    kinds = [
        nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.ReLU(), nn.Linear(64, 3)),
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(4),
            nn.Flatten(),
            nn.Linear(128, 32),
            nn.ReLU(),
            nn.Linear(32, 3),
        ),
        nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(1568, 40),
            nn.ReLU(),
            nn.Linear(40, 3),
        ),
    ]
    model = kinds[seed % 3]
    optimiser = torch.optim.Adam(model.parameters(), lr=[1e-3, 1e-2][seed % 2])
    x, y = normalised(photos, slice(None)), photos.labels
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(32):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimiser.step()
    return model


@pytest.mark.parametrize("epochs", [0, 1, 8])
@pytest.mark.parametrize("seed", range(6))
def test_benign_models_show_no_sign(photos, seed, epochs):
    assert inspect_parameters(trained(seed, photos, epochs).state_dict()) == []


def test_the_command_says_which_layer_and_exits_with_one(photos, tmp_path, qbi_here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    x = normalised(photos, slice(0, 2))
    model = image_cnn(photos.shape, 40)
    save_file(model.state_dict(), tmp_path / "benign.safetensors")
    torch.save(mount(model, QBI(20), x, generator(0)).model.state_dict(), tmp_path / "crafted.pt")
    assert qbi_here("inspect", "benign.safetensors")[0] == 0
    code, said = qbi_here("inspect", "crafted.pt")
    assert code == 1
    assert "fc1: negative bias in 40 of 40 rows" in said.replace("\n", " ")
    assert '"detector": "identity kernels"' in qbi_here("inspect", "crafted.pt", "--json")[1]


def test_a_nested_checkpoint_is_looked_into(photos, tmp_path, qbi_here):
    torch.manual_seed(0)
    crafted = mount(
        image_cnn(photos.shape, 40), QBI(20), normalised(photos, slice(0, 2)), generator(0)
    ).model.state_dict()
    torch.save({"epoch": 1, "model": {"net": crafted}}, tmp_path / "nested.pt")
    assert qbi_here("inspect", tmp_path / "nested.pt")[0] == 1
    torch.save({"epoch": 1}, tmp_path / "empty.pt")
    code, said = qbi_here("inspect", tmp_path / "empty.pt")
    assert code == 2
    assert "nothing to inspect" in said


class Exploit:
    def __reduce__(self):
        return print, ("executed",)


def test_hostile_checkpoints_are_refused(tmp_path, qbi_here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pickled.pt").write_bytes(pickle.dumps({"w": Exploit()}))
    torch.save({"w": torch.zeros(2), "x": Exploit()}, tmp_path / "exploit.pt")
    (tmp_path / "huge.safetensors").write_bytes(struct.pack("<Q", 2 * 2**30) + b"{}")
    (tmp_path / "text.pt").write_text("hello")
    torch.save({"fc.weight": torch.full((4, 4), torch.nan)}, tmp_path / "nan.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    for name in ("pickled.pt", "exploit.pt", "huge.safetensors", "text.pt", "nan.pt", "list.pt", "missing.pt"):
        code, said = qbi_here("inspect", name)
        assert code == 2, name
        assert name in said
        assert "executed" not in said


def test_part_of_the_rows_with_zeros_between_is_still_seen(photos):
    """Where channels carry the sample in pairs, crafted rows are padded with zeros."""
    base = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    for judged in crafted_models(photos, base, "wide CNN", 0):
        assert judged.strength > 1, judged


def test_the_strength_says_what_is_reported(photos):
    torch.manual_seed(0)
    model = image_cnn(photos.shape, 60)
    for sent in (model, mount(model, QBI(20), normalised(photos, slice(0, 2)), generator(0)).model):
        state = sent.state_dict()
        assert (Judged("", "", model_suspicion(state)).strength > 1) == bool(inspect_parameters(state))


def test_narrow_layers_are_not_taken_for_crafted():
    for seed in range(20):
        torch.manual_seed(seed)
        assert inspect_parameters(nn.Sequential(nn.Linear(3, 60), nn.ReLU(), nn.Linear(60, 4)).state_dict()) == []
        assert inspect_parameters(nn.Sequential(nn.Linear(16, 200), nn.ReLU()).state_dict()) == []


def test_roc_goes_from_nothing_to_everything():
    points = roc([0.1, 0.2, 0.3, 0.9], [0.5, 0.8, 1.5])
    assert points[0] == (0.0, 0.0)
    assert points[-1] == (1.0, 1.0)
    assert (0.0, 1 / 3) in points
    assert (0.25, 1.0) in points
    assert points == sorted(points)


def test_dsnr_is_that_of_single_samples():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5))
    x, y = torch.randn(9, 30), torch.arange(9) % 5
    exposure = exposed_step(model, x, y, layers=["0"]).exposures[0]
    each = torch.stack(
        [client_step(model, x[i : i + 1], y[i : i + 1]).gradients["0.weight"].double() for i in range(9)]
    )

    def expected(norms):
        return max(float(n / (norms.square().sum() - n.square()).clamp_min(0).sqrt()) for n in norms)

    assert layer_dsnr(exposure) == pytest.approx(expected(each.flatten(1).norm(dim=1)), rel=1e-4)
    alone = (each.norm(dim=2) > 0).sum(0)
    for row, found in enumerate(row_dsnr(exposure).tolist()):
        if alone[row] == 0:
            assert found == 0
        elif alone[row] == 1:
            assert found == float("inf")
        else:
            assert found == pytest.approx(expected(each[:, row].norm(dim=1)), rel=1e-3)


def test_dsnr_tells_a_crafted_step_from_a_benign_one(photos):
    torch.manual_seed(0)
    x, y = flat(normalised(photos, slice(0, 40))), photos.labels[:40]
    model = nn.Sequential(nn.Linear(768, 100), nn.ReLU(), nn.Linear(100, 10))
    crafted = mount(model, QBI(40), x[:2], generator(0)).model
    benign, leaking = (exposed_step(m, x, y, layers=["0"]).exposures[0] for m in (model, crafted))
    assert row_dsnr(leaking).isinf().any()
    assert not row_dsnr(benign).isinf().any()


def test_a_server_that_knows_the_detectors_passes_them_and_reads():
    """The miss, kept in sight: a normalisation layer's γ times 0.3 and rows divided by 0.3 halve b/‖w‖, and the batch is read all the same."""
    from torch.nn import functional as F

    from qbi.extraction import read_rows
    from qbi.metrics import FAITHFUL, match

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(768), nn.Linear(768, 200), nn.ReLU(), nn.Linear(200, 4))
    with torch.no_grad():
        model[1].weight.fill_(0.3)
        model[2].weight.normal_().div_(0.3)
        model[2].bias.fill_(-1.645 * 768**0.5)
        for part in (model[2].weight, model[2].bias):
            part.div_(768**0.5)
    assert inspect_parameters(model.state_dict()) == []
    x = torch.randn(20, 3, 16, 16)
    F.cross_entropy(model(x), torch.arange(20) % 4).backward()
    arrived = model[1](x.flatten(1)).detach()
    read = read_rows(model[2].weight.grad, model[2].bias.grad).samples
    assert match(read, arrived, data_range=1.2)[FAITHFUL].recall > 0.6


@pytest.mark.parametrize("scale", [1e-30, 1e-19, 1.0, 1e19, 1e30])
def test_rows_of_any_size_are_judged_alike(scale):
    """Squares of 1e19 leave float32; a row's size must not hide it all the same."""
    draws = generator(0, "sizes")
    weight, bias = torch.randn(40, 64, generator=draws), torch.full((40,), -20.0)
    found = inspect_parameters({"fc.weight": weight * scale, "fc.bias": bias * scale})
    assert [(s.detector, len(s.rows)) for s in found] == [("negative bias", 40)]


def test_servers_that_know_the_detectors(cifar):
    """What is documented as a miss is one: below every bound, and most of a batch is read."""
    found = {a.name: a for a in evasions(cifar, 0)}
    assert found["QBI as it is"].judged.strength > 1
    missed = found["what arrives scaled by 0.3, rows divided by 0.3"]
    assert missed.judged.strength < 1
    assert missed.recall == found["QBI as it is"].recall > 0.6
    moved = found["the threshold moved into what arrives"]
    assert moved.judged.strength < 1
    assert moved.recall > 0.4
