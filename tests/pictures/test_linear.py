"""The linear decoder: against the textbook, at both shapes, and for images too large for it."""

import torch
from torch import nn

from qbi.pictures import Prefix
from qbi.pictures.decoder import Decoder
from qbi.pictures.linear import STRENGTHS, columns, columns_of, principal, shrinking, solve


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_weights_are_those_of_ridge_regression_whatever_the_parts():
    given, wanted, apart = draw(60, 7), draw(60, 5, seed=1), draw(40, 7, seed=2)
    target = apart @ draw(7, 5, seed=3)
    found = solve(zip(given.split(17), wanted.split(17), strict=True), apart, target)
    ways = [torch.linalg.inv(given.T @ given + s * 60 * torch.eye(7).double()) @ given.T @ wanted for s in STRENGTHS]
    errors = [(apart @ w - target).square().mean() for w in ways]
    torch.testing.assert_close(found.weights, ways[int(torch.stack(errors).argmin())])


def test_what_is_linear_is_decoded_to_rounding():
    given, law = draw(300, 12), draw(12, 9, seed=1)
    found = solve([(given[:200], given[:200] @ law)], given[200:], given[200:] @ law)
    assert (given @ found.weights - given @ law).abs().max() < 1e-2


def test_directions_have_the_errors_own_spread_at_both_shapes():
    tall, wide = draw(400, 6), draw(6, 400)
    torch.testing.assert_close(principal(tall).T @ principal(tall), tall.T @ tall / 400)
    assert principal(wide).shape == (3, 400)  # half as many as rows
    sizes = principal(wide).norm(dim=1)
    torch.testing.assert_close(sizes, torch.linalg.svdvals(wide)[:3] / 6**0.5)
    assert principal(tall, most=2).shape == (2, 6)


def test_live_features_have_columns_where_they_are_few():
    features = torch.tensor([[0.0, 2.0, -1.0]])
    half = torch.full((3,), 0.5)
    assert columns(features + 1e-4, torch.zeros(3), half)[0, 3:6].tolist() == [0, 1, 0]
    assert columns(features, torch.zeros(3), half).tolist() == [[0, 4, -2, 0, 1, 0, 1]]
    assert columns_of(3) == 7
    assert columns_of(4096) == 4097


def test_large_images_are_decoded_small_and_brought_back():
    assert shrinking(400, (3, 32, 32)) == 1
    times = shrinking(2048, (3, 224, 224))
    assert times > 1
    decoder = Decoder(2048, (3, 224, 224), directions=2)
    assert decoder.weights.numel() <= 50_000_000
    layers = Prefix(nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), "1")  # a linear decoder does not ask them
    assert decoder(torch.zeros(1, 2048), layers).shape == (1, 3, 224, 224)
    assert decoder.errors(torch.ones(1, 2)).shape == (1, 3, 224, 224)
