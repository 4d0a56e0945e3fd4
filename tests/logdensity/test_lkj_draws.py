"""Correlation matrices are drawn from the density that they are scored with."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from scipy.stats import beta as beta_law
from scipy.stats import kstest

import bayeskit as bk
from bayeskit._core.randomness import global_stream, new_generator
from bayeskit._logdensity.pyro_distributions import MendedDraws, draw_values, mended
from bayeskit.errors import ConstantsWarning
from bayeskit.inference.evidence import bridge_sampling, naive_monte_carlo

F64 = torch.float64
FAILURE_RATE = 1e-5
DIMENSIONS, CONCENTRATIONS = (2, 3, 5), (0.5, 1.0, 4.0)
COMPARISONS = len(CONCENTRATIONS) * sum(d * (d - 1) // 2 for d in DIMENSIONS)


def eta(value, dtype=F64):
    return torch.tensor(value, dtype=dtype)


def drawn(fn, num_draws, seed=0):
    with global_stream(new_generator(seed)):
        return draw_values(fn, (num_draws,))


def correlations(factor):
    """Return every pair's correlation, ``(*, pairs)``."""
    matrix = (factor @ factor.mT).to(F64)
    rows, columns = torch.tril_indices(matrix.shape[-1], matrix.shape[-1], offset=-1)
    return matrix[..., rows, columns]


def smallest_p_value(pairs, dim, concentration):
    """Compare each column with the closed form: ``2 Beta(b, b) - 1`` of ``b = eta + (d - 2) / 2``."""
    b = concentration + (dim - 2) / 2
    return min(float(kstest(r, lambda x: beta_law.cdf((x + 1) / 2, b, b)).pvalue) for r in pairs.mT.numpy())


def agree(pairs, dim, concentration, comparisons=COMPARISONS):
    return smallest_p_value(pairs, dim, concentration) > FAILURE_RATE / comparisons


# ---------------------------------------------------------------------------------------------------------
# The law


@pytest.mark.parametrize("concentration", CONCENTRATIONS)
@pytest.mark.parametrize("dim", DIMENSIONS)
def test_each_correlation_has_its_marginal(dim, concentration):
    factor = drawn(dist.LKJCholesky(dim, eta(concentration)), 20_000)
    assert agree(correlations(factor), dim, concentration)


class WrongDraws(dist.LKJCholesky):
    """Drawn as torch 2.13 does: row ``i`` has ``Beta(i - 1 / 2, ...)`` for ``Beta(i / 2, ...)``."""

    def sample(self, sample_shape=()):
        row = torch.arange(self.dim, dtype=F64)
        later = self.concentration.unsqueeze(-1) + (self.dim - 1 - row) / 2
        squared = dist.Beta((row - 0.5).clamp(min=0.5), later).sample(sample_shape) * (row > 0)
        normal = torch.randn(*squared.shape, self.dim, dtype=F64).tril(-1)
        direction = normal / normal.norm(dim=-1, keepdim=True).clamp(min=1e-300)
        return squared.sqrt().unsqueeze(-1) * direction + torch.diag_embed((1 - squared).sqrt())


def test_the_marginals_tell_a_wrong_law():
    pairs = correlations(drawn(WrongDraws(3, eta(1.0)), 20_000))
    assert agree(pairs[:, :1], 3, 1.0)
    assert not agree(pairs[:, 1:2], 3, 1.0) and not agree(pairs[:, 2:], 3, 1.0)


@pytest.mark.parametrize("concentration", CONCENTRATIONS)
@pytest.mark.parametrize("dim", DIMENSIONS)
def test_the_determinant_has_its_moments(dim, concentration, limit):
    """The squared diagonal has independent ``Beta(eta + (d - 1 - i) / 2, i / 2)``: their logs add up."""
    diagonal = drawn(dist.LKJCholesky(dim, eta(concentration)), 20_000, seed=1).diagonal(dim1=-2, dim2=-1)
    log_determinant = 2 * diagonal.log().sum(-1)
    row = torch.arange(1, dim, dtype=F64)
    first, whole = concentration + (dim - 1 - row) / 2, torch.full_like(row, concentration + (dim - 1) / 2)
    mean = float((first.digamma() - whole.digamma()).sum())
    variance = float((torch.polygamma(1, first) - torch.polygamma(1, whole)).sum())
    assert abs(float(log_determinant.mean()) - mean) < limit(18) * math.sqrt(variance / 20_000)
    squares = (log_determinant - mean).square()
    assert abs(float(squares.mean()) - variance) < limit(18) * float(squares.std()) / math.sqrt(20_000)


@pytest.mark.parametrize("dim", [3, 5])
def test_draws_integrate_a_ratio_of_densities_to_one(dim, limit):
    """Of another concentration, by ``log_prob`` itself; so draws and density belong together."""
    wide, narrow = dist.LKJCholesky(dim, eta(1.3)), dist.LKJCholesky(dim, eta(2.0))
    factor = drawn(wide, 20_000, seed=2)
    ratio = (narrow.log_prob(factor) - wide.log_prob(factor)).exp()
    assert abs(float(ratio.mean()) - 1) < limit(2) * float(ratio.std()) / math.sqrt(20_000)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("concentration", [1e-3, 0.5, 1.0, 1e4])
def test_draws_are_factors_of_their_dtype(concentration, dtype):
    law = dist.LKJCholesky(5, eta(concentration, dtype))
    factor = drawn(law, 1000)
    assert factor.dtype == dtype and not factor.requires_grad
    assert bool(law.support.check(factor).all())


def test_single_precision_has_the_same_law():
    assert agree(correlations(drawn(dist.LKJCholesky(3, eta(2.0, torch.float32)), 20_000)), 3, 2.0)


# ---------------------------------------------------------------------------------------------------------
# Wherever it is wrapped


MIXED = eta([0.7, 3.0])

WRAPPED = {
    "torch's own": torch.distributions.LKJCholesky(3, MIXED),
    "expanded": dist.LKJCholesky(3, MIXED[0]).expand([2]),
    "expanded by Pyro": dist.torch_distribution.ExpandedDistribution(dist.LKJCholesky(3, MIXED[0]), [2]),
    "independent": dist.LKJCholesky(3, MIXED).to_event(1),
    "masked": dist.LKJCholesky(3, MIXED).mask(torch.tensor([True, False])),
    "masked and independent": dist.LKJCholesky(3, MIXED).mask(torch.tensor([True, False])).to_event(1),
    "transformed": dist.TransformedDistribution(
        dist.LKJCholesky(3, MIXED), [dist.transforms.CorrMatrixCholeskyTransform().inv]
    ),
    "matrices": dist.LKJ(3, MIXED),
    "matrices, expanded by Pyro": dist.torch_distribution.ExpandedDistribution(dist.LKJ(3, MIXED[0]), [2]),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_distributions_are_drawn_from_their_density(name):
    law = WRAPPED[name]
    before = dict(vars(law))
    value = drawn(law, 10_000)
    assert vars(law).keys() == before.keys() and all(vars(law)[k] is v for k, v in before.items())
    assert value.shape == (10_000, *law.batch_shape, *law.event_shape)
    value = torch.linalg.cholesky(value) if "matrices" in name or name == "transformed" else value
    for i in range(2):
        concentration = float(MIXED[0] if "expanded" in name else MIXED[i])
        assert agree(correlations(value[:, i]), 3, concentration, 6 * len(WRAPPED))


def test_other_distributions_are_left_alone():
    for law in (
        dist.Normal(torch.zeros(3), 1.0).to_event(1),
        WrongDraws(3, eta(1.0)),
        dist.Wishart(eta(4.0), torch.eye(2)),
    ):
        assert mended(law) is law
    with global_stream(new_generator(3)):
        mine = draw_values(dist.Normal(0.0, 1.0), (4,))
    with global_stream(new_generator(3)):
        assert mine.equal(dist.Normal(0.0, 1.0).sample((4,)))


def test_nothing_of_torch_is_changed():
    law = dist.LKJCholesky(3, eta(1.0))
    sampler, betas = torch.distributions.LKJCholesky.sample, law._beta.concentration1.clone()
    drawn(law, 5)
    assert torch.distributions.LKJCholesky.sample is sampler and type(law) is dist.LKJCholesky
    assert law._beta.concentration1.equal(betas)


def test_the_stream_decides():
    law = dist.LKJCholesky(4, MIXED)
    assert drawn(law, 7, seed=5).equal(drawn(law, 7, seed=5))
    assert not drawn(law, 7, seed=5).equal(drawn(law, 7, seed=6))


def test_draws_are_batched():
    concentration = torch.tensor([0.7, 3.0], dtype=F64).repeat_interleave(10_000)
    # Validation is off, as where models are batched: up to torch 2.6 it branches on values of the Beta inside.
    with global_stream(new_generator(0)), pyro.validation_enabled(False):
        one = torch.func.vmap(lambda c: draw_values(dist.LKJCholesky(3, c)), randomness="different")
        factor = one(concentration)
    for rows, c in zip(factor.split(10_000), (0.7, 3.0), strict=True):
        assert agree(correlations(rows), 3, c, 6)


# ---------------------------------------------------------------------------------------------------------
# In models


@pytest.mark.calibration
def test_priors_and_data_of_a_model():
    def model():
        concentration = pyro.sample("concentration", dist.Uniform(eta(0.7), eta(0.7001)))
        pyro.sample("hung", dist.LKJCholesky(3, concentration))
        with pyro.plate("two", 2):
            pyro.sample("factor", dist.LKJCholesky(3, eta(1.0)))
        pyro.sample("seen", dist.LKJCholesky(3, eta(2.0)), obs=torch.eye(3, dtype=F64))

    target = bk.Target.from_pyro(model)
    values = target.constrain(target.sample_prior(10_000, seed=4))
    assert agree(correlations(values["hung"]), 3, 0.7, 9)
    assert agree(correlations(values["factor"][:, 0]), 3, 1.0, 9)
    assert agree(correlations(values["factor"][:, 1]), 3, 1.0, 9)
    assert target.sample_prior(50, seed=4).equal(target.sample_prior(50, seed=4))

    generator = new_generator(5)
    runs = [target.density.simulate(generator) for _ in range(1000)]
    assert agree(correlations(torch.stack([run.observed["seen"] for run in runs])), 3, 2.0, 9)
    assert agree(correlations(torch.stack([run.latent["factor"] for run in runs])[:, 1]), 3, 1.0, 9)


def test_runs_of_pyro_draw_the_same_law():
    """What trains guides has Pyro run models; observed sites are kept, and those that a handler frees are drawn."""

    def model():
        with pyro.plate("many", 10_000):
            pyro.sample("factor", dist.LKJCholesky(3, eta(1.0)))
            pyro.sample("seen", dist.LKJCholesky(3, eta(1.0)), obs=torch.eye(3, dtype=F64).expand(10_000, 3, 3))

    with global_stream(new_generator(6)), MendedDraws():
        kept = poutine.trace(model).get_trace().nodes
        freed = poutine.trace(poutine.uncondition(model)).get_trace().nodes
    assert kept["seen"]["value"].equal(torch.eye(3, dtype=F64).expand(10_000, 3, 3))
    for value in (kept["factor"]["value"], freed["seen"]["value"]):
        assert agree(correlations(value), 3, 1.0, 6)


def gaussian(y, prior=dist.LKJCholesky):
    factor = pyro.sample("factor", prior(3, eta(1.0)))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(3, dtype=F64), scale_tril=factor), obs=y)


def by_rejection(y, num_points=3_000_000):
    """Return log evidence and error under the uniform law of correlation matrices: those in the cube that are ones."""
    cube = 2 * torch.rand(num_points, 3, generator=torch.Generator().manual_seed(0), dtype=F64) - 1
    determinant = 1 + 2 * cube.prod(-1) - cube.square().sum(-1)
    (a, b, c), determinant = cube[determinant > 0].unbind(-1), determinant[determinant > 0]
    s = y.mT @ y
    squares = (1 - c * c) * s[0, 0] + (1 - b * b) * s[1, 1] + (1 - a * a) * s[2, 2]
    products = (b * c - a) * s[0, 1] + (a * c - b) * s[0, 2] + (a * b - c) * s[1, 2]
    constant = 1.5 * len(y) * math.log(2 * math.pi)
    log_weight = -(squares + 2 * products) / (2 * determinant) - len(y) / 2 * determinant.log() - constant
    weight = (log_weight - log_weight.max()).exp()
    error = float(weight.std() / weight.mean()) / math.sqrt(len(weight))
    return float(weight.mean().log() + log_weight.max()), error


@pytest.mark.calibration
def test_draws_density_and_rejection_give_one_evidence(limit):
    """A correlation of variables two and three: the draws of torch 2.13 have too many of those."""
    y = torch.randn(8, 3, generator=torch.Generator().manual_seed(7), dtype=F64)
    y[:, 2] = 0.4 * y[:, 2] - y[:, 1]
    target, wrong = (bk.Target.from_pyro(gaussian, y, law, compile=False) for law in (dist.LKJCholesky, WrongDraws))
    draws = bk.sample(target, 32, 80, 40, seed=8, progress=False)
    found = {
        "draws": naive_monte_carlo(target, num_draws=50_000, seed=0),
        "density": bridge_sampling(target, draws, seed=10),
    }
    with pytest.warns(ConstantsWarning, match="do not follow its density"):
        found["wrong draws"] = naive_monte_carlo(wrong, num_draws=50_000, seed=0)
    truth, error = by_rejection(y)
    z = {k: (e.log_evidence - truth) / math.hypot(e.standard_error, error) for k, e in found.items()}
    assert max(error, *(e.standard_error for e in found.values())) < 0.05
    assert abs(z["draws"]) < limit(2) and abs(z["density"]) < limit(2)
    assert abs(z["wrong draws"]) > limit(2)
