"""Chib's method: exact where it must be, within its error elsewhere, and deaf to conditionals of another model."""

import math
import sys

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import gamma

import bayeskit as bk
from bayeskit.errors import ModelError, SettingsError, ShapeError
from bayeskit.inference.evidence._chibs_method import chib, chib_refusal
from bayeskit.inference.evidence._conditionals import ConjugateBlock

F64 = torch.float64
SMALL = {"num_warmup": 20, "num_samples": 100}
MODULE = sys.modules["bayeskit.inference.evidence._chibs_method"]
Normal, Gamma, MultivariateNormal = (getattr(torch.distributions, n) for n in ("Normal", "Gamma", "MultivariateNormal"))


def radiata_blocks(case, dtype=F64):
    x, y, mean_0, precision_0, shape, rate = case.converted_args(dtype)
    design = torch.stack([torch.ones_like(x), x - x.mean()], 1)
    precision = torch.diag(precision_0) + design.mT @ design
    mean = torch.linalg.solve(precision, precision_0 * mean_0 + design.mT @ y)

    def line(others):
        return MultivariateNormal(mean, precision_matrix=others["tau"][:, None, None] * precision)

    def tau(others):
        b = torch.stack([others["alpha"], others["beta"]], -1)
        misfit = (y - b @ design.mT).square().sum(-1) + (precision_0 * (b - mean_0).square()).sum(-1)
        return Gamma(shape + 0.5 * len(y) + 1, rate + 0.5 * misfit)

    return [ConjugateBlock(("alpha", "beta"), line), ConjugateBlock("tau", tau)]


def semi_conjugate(x, y):
    """``y ~ N(a + b x, 1 / tau)`` with independent priors, in three blocks."""
    a = pyro.sample("a", dist.Normal(torch.zeros((), dtype=F64), 2.0))
    b = pyro.sample("b", dist.Normal(torch.zeros((), dtype=F64), 1.0))
    tau = pyro.sample("tau", dist.Gamma(torch.tensor(2.0, dtype=F64), 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a + b * x, tau.rsqrt()), obs=y)


def _coefficient(column, other, other_name, name, prior_sd, y):
    def conditional(others):
        tau, rest = others["tau"], y - others[other_name].unsqueeze(-1) * other
        precision = tau * column.square().sum() + prior_sd**-2
        return Normal(tau * (rest * column).sum(-1) / precision, precision.rsqrt())

    return ConjugateBlock(name, conditional)


@pytest.fixture(scope="module")
def regression():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, generator=generator, dtype=F64)
    y = 1 + 0.7 * x + 0.5 * torch.randn(12, generator=generator, dtype=F64)
    one = torch.ones_like(x)

    def tau(others):
        misfit = (y - others["a"].unsqueeze(-1) - others["b"].unsqueeze(-1) * x).square().sum(-1)
        return Gamma(2.0 + 0.5 * len(y), 1.0 + 0.5 * misfit)

    blocks = [
        _coefficient(one, x, "b", "a", 2.0, y),
        _coefficient(x, one, "a", "b", 1.0, y),
        ConjugateBlock("tau", tau),
    ]
    design = torch.stack([one, x], 1)
    prior = design @ torch.diag(torch.tensor([4.0, 1.0], dtype=F64)) @ design.mT

    def density(t):
        normal = MultivariateNormal(torch.zeros_like(y), prior + torch.eye(12, dtype=F64) / t)
        return math.exp(float(normal.log_prob(y))) * gamma.pdf(t, 2.0)

    exact = math.log(quad(density, 0, 40, epsabs=0, epsrel=1e-10, limit=200)[0])
    return bk.Target.from_pyro(semi_conjugate, x, y), blocks, exact


@pytest.mark.calibration
@pytest.mark.parametrize("name", ["radiata_pine_m1", "radiata_pine_m2"])
@pytest.mark.parametrize("turned", [False, True])
def test_it_agrees_with_the_exact_answer(name, turned, limit):
    case = bk.exact.get(name)
    blocks = radiata_blocks(case)
    z = chib(case.target(), blocks[::-1] if turned else blocks, seed=1, num_samples=300)
    assert abs(z.log_evidence - case.log_evidence) < limit() * z.standard_error, str(z)
    assert z.trusted and 0 < z.standard_error < 0.01


def test_one_block_is_exact():
    case = bk.exact.get("linreg10")
    posterior = MultivariateNormal(case.posterior_mean["b"], case.posterior_covariance["b"])
    z = chib(case.target(), [ConjugateBlock("b", lambda others: posterior)], **SMALL)
    assert z.log_evidence == pytest.approx(case.log_evidence, abs=1e-9)
    assert z.standard_error < 1e-12 and z.trusted


@pytest.mark.calibration
def test_three_blocks_agree_with_quadrature_in_any_order(regression, limit):
    target, blocks, exact = regression
    for order in ((0, 1, 2), (2, 0, 1)):
        z = chib(target, [blocks[i] for i in order], seed=2, num_samples=400)
        assert abs(z.log_evidence - exact) < limit() * z.standard_error and z.trusted, str(z)


def test_any_point_gives_the_same(regression, limit):
    target, blocks, exact = regression
    z = chib(target, blocks, at={"a": 0.9, "b": 0.5, "tau": 3.0}, seed=3, num_samples=400)
    assert abs(z.log_evidence - exact) < limit() * z.standard_error, str(z)


def _scores(regression, num_runs):
    target, blocks, exact = regression
    runs = [chib(target, blocks, seed=seed, num_chains=4, **SMALL) for seed in range(num_runs)]
    return torch.tensor([(z.log_evidence - exact) / z.standard_error for z in runs])


@pytest.mark.long
def test_errors_are_right(regression, calibrated):
    scores = _scores(regression, 24)
    assert calibrated(scores, off=0.2), scores


def test_a_forgotten_jacobian_is_noticed(regression, monkeypatch, limit):
    """The mutation: the prior over the unconstrained vector taken for one over the values."""
    target, blocks, exact = regression
    monkeypatch.setattr(MODULE, "log_volume", lambda target, u: u.new_zeros(len(u)))
    z = chib(target, blocks, seed=2, **SMALL)
    assert abs(z.log_evidence - exact) > limit() * z.standard_error


def test_reduced_runs_that_hold_nothing_are_noticed(regression, monkeypatch, limit):
    """The mutation: all ordinates from the first run, as if the blocks were independent."""
    target, blocks, exact = regression
    gibbs = MODULE._gibbs
    monkeypatch.setattr(MODULE, "_gibbs", lambda known, state, held, *rest: gibbs(known, state, (), *rest))
    monkeypatch.setattr(MODULE, "_of_blocks", lambda *arguments: {})
    z = chib(target, blocks, at={"a": 1.6, "b": 1.2, "tau": 2.0}, seed=2, num_samples=300)
    assert abs(z.log_evidence - exact) > limit() * z.standard_error


def dice(y):
    chances = pyro.sample("chances", dist.Dirichlet(torch.ones(3, dtype=F64)))
    pyro.sample("y", dist.Multinomial(total_count=int(y.sum()), probs=chances), obs=y)


def test_a_simplex_has_one_coordinate_less():
    counts = torch.tensor([3.0, 1.0, 6.0], dtype=F64)
    target = bk.Target.from_pyro(dice, counts)
    z = chib(target, [ConjugateBlock("chances", lambda others: torch.distributions.Dirichlet(1 + counts))], **SMALL)
    assert z.log_evidence == pytest.approx(-math.log(math.comb(12, 2)), abs=1e-9)


@pytest.mark.calibration
def test_single_precision(limit):
    case = bk.exact.get("radiata_pine_m1")
    z = chib(case.target(torch.float32), radiata_blocks(case, torch.float32), **SMALL)
    rounding = len(case.args[0]) * torch.finfo(torch.float32).eps * abs(case.log_evidence)
    assert abs(z.log_evidence - case.log_evidence) < limit() * z.standard_error + rounding


def mixture(y):
    mean = pyro.sample("mean", dist.Normal(torch.zeros(2, dtype=F64), 10.0).to_event(1))
    jump = pyro.sample("jump", dist.Normal(mean.sum(), 0.01))
    pyro.sample("y", dist.Normal(jump, 1.0), obs=y)


def test_chains_that_hardly_move_are_reported():
    """Two coordinates of which the Gibbs sampler can only change one against the other, in tiny steps."""
    y = torch.tensor(3.0, dtype=F64)

    def mean(others):
        precision = torch.eye(2, dtype=F64) / 100 + torch.ones(2, 2, dtype=F64) / 0.01**2
        moment = others["jump"].unsqueeze(-1) * torch.ones(2, dtype=F64) / 0.01**2
        return MultivariateNormal(torch.linalg.solve(precision, moment.mT).mT, precision_matrix=precision)

    def jump(others):
        precision = 1 / 0.01**2 + 1
        return Normal((others["mean"].sum(-1) / 0.01**2 + y) / precision, precision**-0.5)

    blocks = [ConjugateBlock("mean", mean), ConjugateBlock("jump", jump)]
    z = chib(bk.Target.from_pyro(mixture, y), blocks, **SMALL)
    assert not z.trusted and any("chains disagree" in warning for warning in z.warnings)


SPIKE, HELD = 0.01, 100.0


def of_scale(scale):
    return dist.Normal(torch.zeros(5, dtype=F64), scale).to_event(1)


def spike_in_a_slab():
    """A hundred times the slab's mass lies in a spike that takes both blocks at once to enter."""
    pair = [pyro.sample(name, of_scale(1.0)) for name in ("a", "b")]
    ratio = sum(of_scale(SPIKE).log_prob(x) - of_scale(1.0).log_prob(x) for x in pair)
    pyro.factor("likelihood", torch.logaddexp(torch.zeros(()), math.log(HELD) + ratio))


def in_spike_or_slab(name, other):
    def conditional(others):
        x = others[other]
        ratio = math.log(HELD) + of_scale(SPIKE).log_prob(x) - of_scale(1.0).log_prob(x)
        sd = torch.tensor([1.0, SPIKE], dtype=F64)[:, None].expand(len(x), 2, 5)
        return torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(logits=torch.stack([0 * ratio, ratio], 1)),
            torch.distributions.Independent(Normal(0.0 * sd, sd), 1),
        )

    return ConjugateBlock(name, conditional)


@pytest.mark.calibration
def test_a_peak_that_no_chain_has_found_is_reported(limit):
    blocks = [in_spike_or_slab("a", "b"), in_spike_or_slab("b", "a")]
    off = torch.full((5,), 0.7, dtype=F64)
    z = chib(bk.Target.from_pyro(spike_in_a_slab), blocks, at={"a": off, "b": off}, seed=0)
    assert abs(z.log_evidence) < limit() * z.standard_error  # all chains are in the slab, and agree
    assert [warning.split(" with")[0] for warning in z.warnings] == ["a mode"], z.warnings


def test_conditionals_of_another_model_are_refused(regression):
    target, blocks, _ = regression
    wrong = ConjugateBlock("tau", lambda others: Gamma(8.0 + 0 * others["a"], 2.0))
    with pytest.raises(ModelError, match="'tau' is not that of this model"):
        chib(target, [*blocks[:2], wrong])
    forgetful = ConjugateBlock("tau", lambda others: Gamma(others["tau"], 2.0))
    with pytest.raises(ModelError, match="other sites"):
        chib(target, [*blocks[:2], forgetful])
    unbatched = ConjugateBlock("tau", lambda others: Gamma(torch.tensor(8.0, dtype=F64), 2.0))
    with pytest.raises(ShapeError, match="first"):
        chib(target, [*blocks[:2], unbatched])
    with pytest.raises(ModelError, match="distribution"):
        chib(target, [*blocks[:2], ConjugateBlock("tau", lambda others: 1.0)])


def test_bad_input_is_refused(regression):
    target, blocks, _ = regression
    with pytest.raises(SettingsError, match="in no block: tau"):
        chib(target, blocks[:2])
    with pytest.raises(SettingsError, match="in two blocks: a"):
        chib(target, [*blocks, blocks[0]])
    with pytest.raises(SettingsError, match="not in the model: c"):
        chib(target, [*blocks, ConjugateBlock("c", blocks[0].conditional)])
    with pytest.raises(SettingsError, match="no value for b, tau"):
        chib(target, blocks, at={"a": 0.0}, **SMALL)
    point = {"a": 0.0, "b": 0.0, "tau": 1.0}
    for at, match in (({"mu": 0.0}, "mu"), ({"a": "x"}, "numeric"), ({"b": None}, "numeric")):
        with pytest.raises(SettingsError, match=match):
            chib(target, blocks, at=point | at, **SMALL)
    with pytest.raises(SettingsError, match="mapping"):
        chib(target, blocks, at=[0.0, 0.0, 1.0], **SMALL)
    for wrong in (None, 3.0, ["a"]):
        with pytest.raises(SettingsError, match="ConjugateBlock"):
            chib(target, wrong)
    for bad in ({"num_chains": 1}, {"num_samples": 2}, {"num_warmup": -1}):
        with pytest.raises(SettingsError, match=next(iter(bad))):
            chib(target, blocks, **bad)
    with pytest.raises(SettingsError):
        ConjugateBlock((), blocks[0].conditional)
    with pytest.raises(SettingsError):
        ConjugateBlock("a", 3.0)
    assert (
        "blocks" in chib_refusal(target)
        and chib_refusal(target, blocks) is None
        and "tau" in chib_refusal(target, blocks[:2])
    )


@pytest.mark.calibration
@pytest.mark.parametrize("name", ["linreg10", "beta_binomial", "radiata_pine_m1", "radiata_pine_m2"])
def test_cases_that_know_their_full_conditionals(name, limit):
    case = bk.exact.get(name)
    z = chib(case.target(), **SMALL)
    assert abs(z.log_evidence - case.log_evidence) <= max(limit() * z.standard_error, 1e-9) and z.trusted, str(z)


def test_a_model_without_full_conditionals_says_what_to_pass():
    with pytest.raises(SettingsError, match="pass blocks="):
        chib(bk.exact.get("eight_schools").target())
