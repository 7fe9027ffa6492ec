"""From features to pictures: the whole way in small, and what must see nothing."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from qbi.auditing import Client, audit
from qbi.data.photos import synthetic_photos
from qbi.errors import CannotRead
from qbi.lab.pictures import ClientBatch, decoder_of, judge, prepared
from qbi.metrics import FAITHFUL, RECOGNISABLE, match
from qbi.pictures import Prefix, cache, decoder_for, fit_pictures, learn_decoder
from qbi.pictures.prefix import features_of

SIDE = 8


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 12, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(192, 60), nn.ReLU(), nn.Linear(60, 3))  # fmt: skip


@pytest.fixture(scope="module")
def images():
    """Smooth ones: what a few steps of a small decoder can learn."""
    rough = torch.rand(420, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    return nn.functional.interpolate(rough, SIDE, mode="bilinear")


@pytest.fixture(scope="module", params=[0, 2], ids=["linear", "stages"])
def learned(request, images):
    prefix = Prefix(small(), "3")
    return prefix, learn_decoder(prefix, images[:380], steps=100, width=16, stages=request.param)


LOW, HIGH = torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1)


def share(pictures, truth):
    return float(((pictures - truth).square().flatten(1).mean(1) <= RECOGNISABLE.largest_error(1.0)).double().mean())


def test_features_become_pictures(learned, images):
    prefix, decoder = learned
    held = images[380:]
    made = fit_pictures(prefix, features_of(prefix, held), decoder, low=LOW, high=HIGH)
    assert share(made, held) > 0.8
    assert made.min() >= 0
    assert made.max() <= 1


def test_the_fit_brings_pictures_and_their_features_nearer(learned, images):
    prefix, decoder = learned
    if len(decoder.stages):
        pytest.skip("stages may leave nothing to fit: images set apart decide it")
    held = images[380:]
    features = features_of(prefix, held)
    with torch.no_grad():
        start = decoder(features, prefix).clamp(LOW, HIGH)
    made = fit_pictures(prefix, features, decoder, low=LOW, high=HIGH)
    assert (prefix(made) - features).square().mean() < (prefix(start) - features).square().mean() / 4
    assert (made - held).square().mean() < (start - held).square().mean() / 2
    assert torch.equal(fit_pictures(prefix, features, decoder, low=LOW, high=HIGH, steps=0), start)
    few = fit_pictures(prefix, features, decoder, low=LOW, high=HIGH, directions=0)
    assert torch.equal(few, start)


def test_zeros_that_were_read_with_rounding_are_zeros(learned, images):
    """An update gives features to some sixty decibels: what the client's rectifier silenced arrives as a small number of either sign."""
    prefix, decoder = learned
    features = features_of(prefix, images[380:])
    read = features + 1e-4 * decoder.spread.mean() * torch.randn(
        features.shape, generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        assert (decoder(read, prefix) - decoder(features, prefix)).abs().max() < 0.01


def test_pictures_do_not_depend_on_the_others(learned, images):
    prefix, decoder = learned
    features = features_of(prefix, images[380:384])
    together = fit_pictures(prefix, features, decoder, low=LOW, high=HIGH)
    alone = fit_pictures(prefix, features[2:3], decoder, low=LOW, high=HIGH)
    torch.testing.assert_close(together[2:3], alone, rtol=0, atol=1e-4)


def test_what_tells_nothing_shows_nothing(learned, images):
    """The mean feature, another sample's features, a decoder for other layers."""
    prefix, decoder = learned
    held = images[380:]
    features = features_of(prefix, held)
    with torch.no_grad():
        mean = decoder(decoder.centre[None], prefix).expand_as(held)
        shuffled = decoder(features.roll(1, 0), prefix)
        elsewhere = Prefix(small(7), "3")
        other = decoder(features_of(elsewhere, held), elsewhere)
    seen = share(decoder(features, prefix).detach(), held)
    assert share(mean, held) < 0.2 < seen
    assert share(shuffled, held) < 0.2
    assert share(other, held) < 0.2


def test_a_decoder_is_kept_by_its_layers_images_and_settings(images, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = {"steps": 3, "width": 8, "stages": 1, "seed": 0}
    first = decoder_for(Prefix(small(), "3"), images[:200], **settings)
    kept = list(cache.folder().iterdir())
    assert len(kept) == 1
    again = decoder_for(Prefix(small(), "3"), images[:200], **settings)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True))
    decoder_for(Prefix(small(3), "3"), images[:200], **settings)
    assert len(list(cache.folder().iterdir())) == 2
    kept[0].write_bytes(b"not a decoder")
    decoder_for(Prefix(small(), "3"), images[:200], **settings)
    assert kept[0].stat().st_size > 100


class HeadFirst(nn.Module):
    """Its layers are listed in another order than they are run in."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4 * 36, 5)
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.head(self.conv(x).flatten(1))


def test_a_decoder_is_not_taken_for_other_weights_wherever_they_are_listed(images):
    torch.manual_seed(0)
    model = HeadFirst()
    before = Prefix(model, "head").fingerprint(images[:2])
    assert Prefix(model, "head").fingerprint(images[:2]) == before
    assert Prefix(model, "head", lambda v: 2 * v).fingerprint(images[:2]) != before
    with torch.no_grad():
        model.conv.weight += 0.1
    assert Prefix(model, "head").fingerprint(images[:2]) != before


def test_batch_norms_and_positions_are_refused():
    mixing = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))
    with pytest.raises(CannotRead, match="batch norm"):
        Prefix(mixing, "3")
    positions = nn.Sequential(nn.Flatten(2), nn.Linear(SIDE * SIDE, 4), nn.Flatten(), nn.Linear(12, 2))
    with pytest.raises(CannotRead, match="positions"):
        Prefix(positions, "1")(torch.rand(2, 3, SIDE, SIDE))


def test_an_audit_shows_pictures_of_an_honest_batch(images, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    photos = replace(synthetic_photos(300, SIDE, seed=2), pixels=(images[:300] * 255).byte())
    asked = {"client": Client(6), "attacks": ["passive"], "batches": 1, "defences": False}
    result = audit(small(), photos, decode=None, **asked)
    assert result.decoded.layer == "3"
    assert result.decoded.features == 1
    assert result.decoded.recovered[RECOGNISABLE] > result.decoded.guessed[RECOGNISABLE]
    assert "a decoder makes recognisable pictures" in result.verdict
    assert result.document()["decoded"]["learned_on"] >= 150
    assert audit(small(), photos, **asked).decoded is None


@pytest.mark.long
def test_the_measurement_in_small(images):
    labels = torch.arange(420) % 3
    pixels = (torch.nn.functional.interpolate(images, 32) * 255).byte()
    sent = prepared("quickstart", pixels, labels, training="rate 0.01", held=40)
    batches = [ClientBatch(4, number) for number in range(2)]
    read = {batch: sent.request(batch).read() for batch in batches}
    row, held, made = judge(sent, decoder_of(sent, steps=5, width=8, stages=1), read)
    assert row.features == 1
    assert row.images == 8
    assert row.decoder == "stages"
    assert held.shape == made.shape == (4, 3, 32, 32)
    assert row.shuffled <= 0.5
    nothing = {batch: candidates[:0] for batch, candidates in read.items()}
    assert judge(sent, decoder_of(sent), nothing)[0].features == 0


def test_a_local_step_reads_what_a_private_one_does_not(images):
    pixels = (torch.nn.functional.interpolate(images, 32) * 255).byte()
    sent = prepared("quickstart", pixels, torch.arange(420) % 3, training="as initialised", held=40)
    truth = features_of(sent.prefix, sent.held[sent.images(ClientBatch(4))])
    for batch, some in ((ClientBatch(4), True), (ClientBatch(2, 0, 2), True), (ClientBatch(4, bits=8.0), False)):
        read = sent.request(batch).read()
        assert bool(match(read, truth)[FAITHFUL].recovered.any()) is some
