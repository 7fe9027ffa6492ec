import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qbi import theory
from qbi.attacks.random_rows import predict
from qbi.errors import BadValue
from qbi.gram import condition, fire_probability, gram, law, lift
from qbi.randomness import generator


def samples(count, features, seed=0):
    return torch.randn(count, features, generator=generator(seed, "samples"))


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 50))
@settings(max_examples=40, deadline=None)
def test_streaming_gives_the_whole_product(count, features, chunk):
    x, y = samples(count, features), samples(count + 1, features, 1)
    torch.testing.assert_close(gram(x, chunk=chunk), x.double() @ x.double().T)
    torch.testing.assert_close(gram(x, y, chunk=chunk), x.double() @ y.double().T)


@given(st.integers(1, 12), st.integers(1, 12), st.booleans())
@settings(max_examples=60, deadline=None)
def test_factor_and_inverse_belong_to_the_matrix(count, features, repeat):
    x = samples(count, features)
    if repeat:
        x = torch.cat([x, x[:1]])
    matrix = gram(x)
    known = law(matrix)
    torch.testing.assert_close(known.factor @ known.factor.T, matrix, atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(known.solve(matrix) @ matrix, matrix, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(known.solve(matrix.clone()), torch.linalg.pinv(matrix) @ matrix, atol=1e-5, rtol=1e-5)


def test_singular_data_keep_their_law():
    x = samples(6, 3)
    x = torch.cat([x, x[:2]])
    z = law(gram(x)).sample(5000, generator(1))
    assert law(gram(x)).factor.shape[1] == 3
    torch.testing.assert_close(z[:, :2], z[:, 6:], atol=1e-4, rtol=1e-4)


def test_draws_have_the_covariance_of_real_rows():
    x = samples(5, 30)
    z = law(gram(x)).sample(200_000, generator(1)).double()
    torch.testing.assert_close(z.T @ z / len(z), gram(x), atol=0.6, rtol=0.02)


def test_lifted_rows_give_exactly_what_they_were_lifted_from(cifar):
    from qbi.data.images import normalised

    x = normalised(cifar, slice(0, 50)).flatten(1)
    known = law(gram(x))
    z = known.sample(20, generator(2))
    rows = lift(x, z, known, generator(3), chunk=1000)
    torch.testing.assert_close(rows @ x.T, z, atol=2e-3, rtol=1e-4)


def test_lifted_rows_are_standard_normal_when_their_activations_are():
    x = samples(10, 60)
    known = law(gram(x))
    rows = lift(x, known.sample(20_000, generator(4)), known, generator(5)).double()
    covariance = rows.T @ rows / len(rows)
    torch.testing.assert_close(covariance, torch.eye(60, dtype=torch.float64), atol=0.05, rtol=0)
    assert rows.mean().abs() < 0.005


def test_lifting_works_on_singular_data():
    x = samples(4, 20)
    x = torch.cat([x, x[:1]])
    known = law(gram(x))
    z = known.sample(7, generator(6))
    torch.testing.assert_close(lift(x, z, known, generator(7)) @ x.T, z, atol=1e-3, rtol=1e-3)


def test_conditional_law_is_that_of_the_joint_one():
    known_x, new_x = samples(6, 15), samples(4, 15, 1) + 0.5 * samples(4, 15, 0)
    known = law(gram(known_x))
    z = known.sample(100_000, generator(8))
    new = condition(gram(new_x), gram(new_x, known_x), known).sample(z, generator(9))
    joint = torch.cat([z, new], 1).double()
    everything = torch.cat([known_x, new_x])
    torch.testing.assert_close(joint.T @ joint / len(joint), gram(everything), atol=0.6, rtol=0.03)


def test_a_sample_already_known_has_no_freedom_left():
    x = samples(6, 15)
    known = law(gram(x))
    z = known.sample(10, generator(10))
    again = condition(gram(x[:2]), gram(x[:2], x), known).sample(z, generator(11))
    torch.testing.assert_close(again, z[:, :2], atol=1e-3, rtol=1e-3)


def test_prediction_meets_the_closed_forms_on_normal_data():
    batch_size, features = 50, 4000
    x = samples(batch_size, features)
    # All samples at norm √M: what the closed forms assume in the limit.
    x *= features**0.5 / x.norm(dim=1, keepdim=True)
    found = predict(law(gram(x)), theory.optimal_bias(batch_size, features), [200, 1000], generator(12), draws=100_000)
    assert found[0].active == found[1].active == pytest.approx(theory.expected_active(batch_size), abs=0.01)
    assert found[0].precision == found[1].precision == pytest.approx(theory.expected_precision(batch_size), abs=0.01)
    assert found[0].recall == pytest.approx(theory.expected_recall(200, batch_size), abs=0.02)
    assert found[1].recall == pytest.approx(theory.expected_recall(1000, batch_size), abs=0.01)


def test_prediction_is_unbiased_with_few_draws():
    """As many draws as neurons: the estimate is then the plain count, whose mean must be the true R."""
    x = samples(20, 300)
    known, bias = law(gram(x)), theory.optimal_bias(20, 300)
    precise = predict(known, bias, [100], generator(13), draws=200_000)[0].recall
    few = torch.tensor([predict(known, bias, [100], generator(14, i), draws=100)[0].recall for i in range(600)])
    assert abs(few.mean() - precise) < 4 * few.std() / 600**0.5


def test_fire_probability_is_exact_for_any_data(cifar):
    from qbi.data.images import normalised

    x = normalised(cifar, slice(0, 8)).flatten(1)
    bias = theory.optimal_bias(8, x.shape[1])
    expected = fire_probability(x.double().norm(dim=1), bias)
    fired = torch.randn(20_000, x.shape[1], generator=generator(15)) @ x.T > -bias
    error = (expected * (1 - expected) / 20_000).sqrt()
    assert ((fired.double().mean(0) - expected).abs() < 4 * error).all()


def test_bad_input_is_refused():
    with pytest.raises(BadValue, match="non-finite"):
        law(torch.full((2, 2), float("nan"), dtype=torch.float64))
    with pytest.raises(BadValue, match="fewer than"):
        predict(law(gram(samples(3, 5))), -1.0, [100], generator(0), draws=10)
