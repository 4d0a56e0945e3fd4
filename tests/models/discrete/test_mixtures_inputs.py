"""What users hand to a mixture: data of any library, draws, priors, labels; and what is refused."""

import itertools
import math

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure
from scipy import stats
from scipy.special import logsumexp

import bayeskit as bk
from bayeskit._draws import Draws
from bayeskit.errors import DataError, InitializationError, ModelError, SettingsError, ShapeError
from bayeskit.models.discrete.mixtures._conjugate import log_joint_of_assignments
from bayeskit.models.discrete.mixtures._gaussian_mixture import (
    GaussianMixture,
    MixturePrior,
    OrderedSample,
    UnknownSizeMixture,
)
from bayeskit.models.discrete.mixtures._labels import Labels, relabel
from bayeskit.models.discrete.mixtures._plots import (
    plot_num_components,
    plot_predictive,
    plot_responsibilities,
    predictive_density,
)
from bayeskit.models.discrete.permutations import nearest_permutation

F64 = torch.float64
Y = torch.tensor([-1.2, -0.7, 0.4, 1.9, 2.2], dtype=F64)
CONJUGATE = MixturePrior.conjugate(0.3, 0.2, 2.5, 0.7, 1.5)


@pytest.fixture(scope="module")
def mixture():
    return GaussianMixture(Y, 2, CONJUGATE)


@pytest.fixture(scope="module")
def target(mixture):
    return bk.Target.from_pyro(mixture, compile=False)


@pytest.fixture(scope="module")
def draws(target):
    """Three chains of prior draws, which are draws of something."""
    u = target.sample_prior(12, seed=1).reshape(3, 4, -1)
    return Draws(u, *target.evaluate(u), torch.ones(3, dtype=F64), target=target)


@pytest.mark.parametrize(("dtype", "share"), [(F64, 1e-30), (F64, 1e-200), (torch.float32, 1e-9)])
def test_weights_far_below_rounding(dtype, share):
    """A component of hardly any weight may still be the only one to explain an observation."""
    y = torch.tensor([0.0, 0.1, -0.2, 30.0], dtype=dtype)
    mixture = GaussianMixture(y, 2, MixturePrior.independent(0.0, 20.0, 2.0, 1.0))
    target = bk.Target.from_pyro(mixture, compile=False)
    values = {"share": [1.0, share], "mean": [0.0, 30.0], "precision": [1.0, 1.0]}
    values = {name: torch.tensor(value, dtype=dtype) for name, value in values.items()}
    u = target.unconstrain(values)
    each = [math.log(w) + stats.norm.logpdf(y.double(), m) for w, m in ((1.0, 0.0), (share, 30.0))]
    exact = logsumexp(each, 0).sum()
    rounding = 1e-12 if dtype == F64 else 1e-6
    assert float(target.log_likelihood(u)) == pytest.approx(exact, rel=rounding)
    assert float(mixture.log_density(values, y).sum()) == pytest.approx(exact, rel=rounding)
    # The derivative by the logarithm of a share is the sum of its responsibilities less n times its weight.
    gradient = target.value_and_grad(u)[1] - torch.autograd.functional.jacobian(target.log_prior, u)
    place = next(site.start for site in target.sites if site.name == "share")
    p = np.exp(each - logsumexp(each, 0)).sum(1)
    assert gradient[place + 1].item() == pytest.approx(p[1] - 4 * share, rel=1e-5)


def test_data_of_any_library(mixture):
    for y in (Y.numpy(), Y.tolist(), pd.Series(Y.numpy())):
        other = GaussianMixture(y, 2, CONJUGATE)
        assert other.y.dtype == F64 and torch.equal(other.y, Y)
    assert GaussianMixture(np.array([1, 2, 5]), 2).y.dtype == torch.get_default_dtype()
    assert MixturePrior.richardson_green([1, 2, 5]).location.tolist() == [3.0]
    two = MixturePrior.independent(np.array([1.0, 2.0]), 3.0, 2, pd.Series([1, 2]))
    assert two.rate.tolist() == [1.0, 2.0] and two.spread.tolist() == [3.0, 3.0]
    z = np.array([0, 0, 1, 1, 1])
    expected = log_joint_of_assignments(mixture, torch.from_numpy(z))
    assert torch.equal(log_joint_of_assignments(mixture, z), expected)
    assert torch.equal(log_joint_of_assignments(mixture, z.tolist()), expected)


def test_draws_as_they_are(mixture, draws):
    values = draws.values()
    assert torch.equal(mixture.responsibilities(draws), mixture.responsibilities(values))
    x = np.linspace(-4, 4, 7)
    assert torch.equal(mixture.log_density(draws, x), mixture.log_density(values, torch.from_numpy(x)))
    for one, other in zip(
        predictive_density(mixture, draws, x), predictive_density(mixture, values, torch.from_numpy(x)), strict=True
    ):
        assert torch.equal(one, other)
    assert plot_predictive(mixture, draws, Figure().subplots(), num_points=20).lines
    axes = plot_responsibilities(mixture, draws, Figure().subplots())
    heights = torch.tensor([[bar.get_height() for bar in bars] for bars in axes.containers], dtype=F64)
    assert torch.allclose(heights.T, mixture.responsibilities(values).mean((0, 1)))
    columns = GaussianMixture(torch.stack([Y, Y.flip(0)], -1), 3)
    one = bk.Target.from_pyro(columns, compile=False)
    assert len(plot_responsibilities(columns, one.constrain(one.sample_prior(2)), Figure().subplots()).patches) == 15
    model = UnknownSizeMixture(mixture, [0.5, 0.5])
    assert torch.equal(model.size_probabilities(draws), model.size_probabilities(values))


def test_points_to_start_from(mixture, target):
    start = mixture.start(3, seed=5)
    assert start.shape == (3, target.dim) and len(start.unique(dim=0)) == 3
    assert torch.equal(start, mixture.start(3, seed=5))
    # The best of 200 each lies above this quantile of single draws, but for one set of three in 1e5.
    level = (1e-5 / 3) ** (1 / 200)
    single = target.log_density(target.sample_prior(5000, seed=9))
    assert bool((target.log_density(start) > single.quantile(level)).all())
    far = GaussianMixture([0.0, 1e200], 2, MixturePrior.independent(0.0, 1.0, 2.0, 1.0))
    with pytest.raises(InitializationError, match="scales may be far from those of the data"):
        far.start()


def test_what_they_call_themselves(mixture, target):
    assert repr(mixture) == "GaussianMixture(y of shape (5,), num_components=2)"
    full = GaussianMixture(torch.stack([Y, Y.flip(0)], -1), 3, covariance="full", equal_scales=True)
    assert repr(full) == "GaussianMixture(y of shape (5, 2), num_components=3, covariance='full', equal_scales=True)"
    assert repr(UnknownSizeMixture(mixture)) == f"UnknownSizeMixture({mixture!r})"
    assert (
        repr(Labels(target, mixture.exchangeable)) == "Labels(num_components=2, sites=('share', 'mean', 'precision'))"
    )


def test_assignment_against_all_permutations():
    cost = torch.rand(40, 5, 5, generator=torch.Generator().manual_seed(3), dtype=F64)
    permutations = torch.tensor(list(itertools.permutations(range(5))))
    each = cost[:, torch.arange(5), permutations].sum(-1)
    assert torch.equal(nearest_permutation(-cost), permutations[each.argmin(-1)])


NORMAL = dist.Normal(torch.tensor(0.0), 1.0)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: OrderedSample(NORMAL, 2).log_prob(torch.tensor([1.0, 0.5])), ValueError, "OrderedVector"),
        (lambda: OrderedSample(NORMAL, 2).log_prob(torch.tensor([0.0, 1.0, 2.0])), ShapeError, "last dimension is 2"),
        (lambda: OrderedSample(NORMAL, 0), SettingsError, "num_draws must be at least 1"),
        (lambda: OrderedSample(NORMAL.expand([3]), 2), ShapeError, r"batch \(3,\).*one of a single number"),
        (lambda: MixturePrior.independent(math.nan, 1.0, 2.0, 1.0), SettingsError, "location must hold a finite"),
        (lambda: MixturePrior.conjugate(math.inf, 1.0, 2.0, 1.0), SettingsError, "location must hold a finite"),
        (lambda: MixturePrior.independent([], 1.0, 2.0, 1.0), SettingsError, "location must hold a finite"),
        (lambda: MixturePrior.independent([0, 1], [1, 2, 3], 2.0, 1.0), ShapeError, "location 2, spread 3, rate 1"),
        (lambda: MixturePrior.independent("wide", 1.0, 2.0, 1.0), DataError, "location is of type str"),
        (lambda: MixturePrior.conjugate(0.0, 1.0, "two", 1.0), SettingsError, "shape must be a number"),
        (lambda: MixturePrior.richardson_green([0.0, math.nan]), DataError, "1 values that are NaN or infinite"),
        (lambda: MixturePrior.richardson_green([0.0, math.inf]), DataError, "1 values that are NaN or infinite"),
        (lambda: MixturePrior.richardson_green(torch.ones(0)), DataError, "holds no observations"),
        (lambda: GaussianMixture(["a", "b"], 2), DataError, "not numbers"),
        (lambda: GaussianMixture(Y + 1j, 2), DataError, "complex"),
        (lambda: GaussianMixture(Y, 2).log_density({}, 1.0), ShapeError, r"x has shape \(\); give \(m\)"),
        (lambda: plot_num_components({}), SettingsError, "no numbers of components to plot"),
        (
            lambda: log_joint_of_assignments(GaussianMixture(Y, 2, CONJUGATE), torch.zeros(5)),
            DataError,
            "integers from 0 to 1, not torch.float32",
        ),
        (
            lambda: log_joint_of_assignments(GaussianMixture(Y, 2, CONJUGATE), torch.zeros(5) > 0),
            DataError,
            "integers from 0 to 1, not torch.bool",
        ),
    ],
)
def test_refused(make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_labels_and_responsibilities_that_are_refused(mixture, target, draws):
    with pytest.raises(ModelError, match="priors of share, and name all sites"):
        Labels(target, "share")
    labels = Labels(target, mixture.exchangeable)
    p = mixture.responsibilities(draws)
    for bad in (p * math.nan, 2 * p, -p, p.round(decimals=1) + 0.1):
        with pytest.raises(DataError, match="add up to one"):
            relabel(draws, labels, bad)
    with pytest.raises(ShapeError, match="responsibilities have shape"):
        relabel(draws, labels, p[:, :, :0])
    assert relabel(draws, labels, p.numpy()).num_draws == 4
