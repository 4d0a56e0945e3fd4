"""The Gamma-Dirichlet prior: density by quadrature and closed forms, draws by moments."""

import math
import pickle

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import SettingsError
from bayeskit.models.phylogenetics import Alignment, Tree, TreeModel
from bayeskit.models.phylogenetics._branch_length_priors import GammaDirichlet

TREE = Tree.from_newick("((A,B),C,D);")


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def density(lengths: list[float], concentration: list[float], shape: float, rate: float) -> float:
    """The formula of Rannala, Zhu and Yang, with plain numbers."""
    total, edges = sum(lengths), len(lengths)
    value = shape * math.log(rate) - math.lgamma(shape) - rate * total
    value += math.lgamma(sum(concentration)) + (shape - sum(concentration)) * math.log(total)
    for length, alpha in zip(lengths, concentration, strict=True):
        value += (alpha - 1) * math.log(length) - math.lgamma(alpha)
    assert edges == len(concentration)
    return value


def integral(prior: GammaDirichlet, weight=lambda lengths: 1.0) -> float:
    """Integrate the density times a weight over three lengths, in the lengths themselves, by Gauss-Laguerre."""
    nodes, weights = np.polynomial.laguerre.laggauss(60)
    scale = 1.0 / prior.length_rate.item()
    points = torch.cartesian_prod(*[tensor(nodes * scale)] * 3)
    logs = torch.cartesian_prod(*[tensor(np.log(weights) + nodes + math.log(scale))] * 3).sum(-1)
    return ((prior.log_prob(points) + logs).exp() * weight(points)).sum().item()


def test_density_is_the_published_formula():
    lengths, concentration = [0.1, 0.05, 0.3, 0.02, 0.2], [1.0, 1.0, 1.0, 1.0, 0.5]
    prior = GammaDirichlet(tensor(concentration), length_shape=2.0, length_rate=3.0)
    expected = density(lengths, concentration, 2.0, 3.0)
    assert prior.log_prob(tensor(lengths)).item() == pytest.approx(expected, rel=1e-13)


def test_a_sum_of_gammas_is_a_special_case():
    # Where the shape is the sum of the concentrations, the lengths are independent.
    concentration = tensor([0.7, 1.5, 2.0])
    prior = GammaDirichlet(concentration, concentration.sum(), 4.0)
    lengths = tensor([[0.1, 0.2, 0.3], [1.0, 0.01, 0.5]])
    expected = torch.distributions.Gamma(concentration, tensor(4.0)).log_prob(lengths).sum(-1)
    torch.testing.assert_close(prior.log_prob(lengths), expected, rtol=1e-13, atol=0)


def test_whole_concentrations_leave_shape_and_rate_as_they_are():
    """In whole numbers they would be cut off."""
    prior = GammaDirichlet(torch.tensor([1, 2, 1]), 2.5, 1.5)
    assert float(prior.length_shape) == 2.5 and float(prior.length_rate) == 1.5
    expected = GammaDirichlet(torch.tensor([1.0, 2.0, 1.0]), 2.5, 1.5)
    lengths = torch.tensor([0.1, 0.2, 0.3])
    assert torch.equal(prior.log_prob(lengths), expected.log_prob(lengths))


def test_density_of_three_lengths_integrates_to_one():
    # With these parameters the integrand is a polynomial times an exponential function.
    prior = GammaDirichlet(tensor([1.0, 2.0, 1.0]), length_shape=6.0, length_rate=2.0)
    assert integral(prior) == pytest.approx(1.0, abs=1e-11)
    mean = tensor([integral(prior, lambda lengths, i=i: lengths[:, i]) for i in range(3)])
    torch.testing.assert_close(mean, prior.mean, rtol=1e-11, atol=0)
    square = tensor([integral(prior, lambda lengths, i=i: lengths[:, i] ** 2) for i in range(3)])
    torch.testing.assert_close(square - mean**2, prior.variance, rtol=1e-10, atol=0)


def test_mutation_a_missing_jacobian_is_caught(monkeypatch):
    prior = GammaDirichlet(tensor([1.0, 2.0, 1.0]), length_shape=6.0, length_rate=2.0)
    original = GammaDirichlet.log_prob
    monkeypatch.setattr(GammaDirichlet, "log_prob", lambda self, value: original(self, value) + 2 * value.sum(-1).log())
    assert abs(integral(prior) - 1.0) > 1e-3


def test_draws_have_the_moments(limit):
    prior = GammaDirichlet.for_tree(TREE, length_shape=3.0, length_rate=2.0, external=1.5, internal=0.5)
    size = 40_000
    with global_stream(new_generator(4)):
        draws = prior.sample((size,))
    assert draws.shape == (size, 5)
    total = draws.sum(-1)
    checks = [*(draws - prior.mean).T, *((draws - prior.mean) ** 2 - prior.variance).T]
    # The length has the Gamma distribution's moments and does not depend on the shares.
    shares = draws / total[:, None]
    checks += [total - 1.5, (total - 1.5) ** 2 - 0.75, *((total - 1.5)[:, None] * (shares - shares.mean(0))).T]
    for check in checks:
        z = check.mean() / (check.std() / math.sqrt(size))
        assert abs(z.item()) < limit(len(checks))


def test_draws_are_differentiable():
    rate = tensor(2.0).requires_grad_()
    with global_stream(new_generator(1)):
        draws = GammaDirichlet(tensor([1.0, 2.0, 1.0]), 3.0, rate).rsample((7,))
    # A length is proportional to 1 / rate.
    (slope,) = torch.autograd.grad(draws.sum(), rate)
    assert slope.item() == pytest.approx(-draws.sum().item() / 2.0, rel=1e-12)


def test_batches_and_expansion():
    prior = GammaDirichlet(tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]]), tensor([1.0, 2.0]), 3.0)
    assert prior.batch_shape == (2,) and prior.event_shape == (3,)
    wide = prior.expand([4, 2])
    lengths = tensor([0.1, 0.2, 0.3])
    assert wide.log_prob(lengths).shape == (4, 2)
    torch.testing.assert_close(wide.log_prob(lengths)[3], prior.log_prob(lengths))
    single = GammaDirichlet(tensor([1.0, 1.0, 1.0]), 2.0, 3.0)
    torch.testing.assert_close(prior.log_prob(lengths)[1], single.log_prob(lengths))
    copy = pickle.loads(pickle.dumps(prior))
    assert torch.equal(copy.log_prob(lengths), prior.log_prob(lengths))
    with pyro.validation_enabled(True), pytest.raises(ValueError):
        GammaDirichlet(tensor([1.0, 1.0])).log_prob(tensor([-1.0, 1.0]))


def test_for_tree_tells_internal_branches_from_external_ones():
    prior = GammaDirichlet.for_tree(TREE, external=2.0, internal=0.5)
    assert prior.concentration.tolist() == [2.0, 2.0, 2.0, 2.0, 0.5]
    assert prior.mean.sum().item() == pytest.approx(10.0)
    with pytest.raises(SettingsError, match="internal=0.*Remedy"):
        GammaDirichlet.for_tree(TREE, internal=0.0)


def test_in_a_target():
    alignment = Alignment.from_sequences({"A": "ACGT", "B": "ACGA", "C": "AC-A", "D": "ACCA"})
    prior = GammaDirichlet.for_tree(TREE, length_shape=2.0, length_rate=3.0)
    target = bk.Target.from_pyro(TreeModel(alignment, TREE, branch_length_prior=prior))
    u = torch.randn(4, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = prior.log_prob(u.exp()) + u.sum(-1)
    torch.testing.assert_close(target.log_prior(u), expected, rtol=1e-12, atol=0)
    assert (target.sample_prior(3, seed=1).exp() > 0).all()


def test_a_prior_of_plain_numbers_is_not_rounded_in_a_model():
    """A Gamma distribution of single precision gives steps of 1e-7."""
    alignment = Alignment.from_sequences({"A": "ACGT", "B": "ACGA", "C": "ATGA"})
    model = TreeModel(alignment, Tree.from_newick("(A,B,C);"), branch_length_prior=dist.Gamma(2.0, 20.0))
    target = bk.Target.from_pyro(model)
    lengths = torch.tensor([0.03, 0.1, 0.4], dtype=torch.float64)
    right = dist.Gamma(tensor(2.0), tensor(20.0)).log_prob(lengths).sum() + lengths.log().sum()
    assert abs(float(target.log_prior(lengths.log()) - right)) < 1e-12
