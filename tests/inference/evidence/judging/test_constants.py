"""Dropped constants: what the check finds, what it says it cannot, and what it must not cry wolf about."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch.distributions import constraints

import bayeskit as bk
from bayeskit import exact
from bayeskit.errors import SettingsError
from bayeskit.inference._proposals import IndependentStudentT
from bayeskit.inference.evidence._judging._constants import (
    ConstantsReport,
    bridge,
    check_constants,
    importance,
    student_fit,
)
from bayeskit.inference.generalized import GibbsPosterior, losses
from bayeskit.models.discrete._genotypes import GenotypeModel
from bayeskit.models.discrete.sequences import Strings
from bayeskit.models.discrete.sequences._text import SegmentedText
from bayeskit.models.phylogenetics import Alignment, Tree, TreeModel

F64 = torch.float64


def nothing(u):
    return torch.zeros_like(u[..., 0])


def normal(sd=1.0):
    return lambda u: (-0.5 * (u / sd).square() - math.log(sd) - 0.5 * math.log(2 * math.pi)).sum(-1)


def normal_draws(dim, sd=1.0):
    return lambda n, g: sd * torch.randn(n, dim, generator=g, dtype=F64)


def cauchy(u):
    return (-torch.log1p(u.square()) - math.log(math.pi)).sum(-1)


def cauchy_draws(dim):
    return lambda n, g: torch.tan(math.pi * (torch.rand(n, dim, generator=g, dtype=F64) - 0.5))


def functions(log_prior, dim, draws=None, **settings):
    return bk.Target.from_functions(log_prior, nothing, dim, draws, **settings)


def z_of(report, truth=0.0):
    return (report.log_prior_integral - truth) / report.standard_error


# ---------------------------------------------------------------------------------------------------------
# The prior's integral


@pytest.mark.calibration
@pytest.mark.parametrize("name", exact.CASES)
def test_priors_of_the_exact_cases_integrate_to_one(name, limit):
    report = check_constants(exact.get(name).target(), thorough=True)
    assert report.fine, str(report)
    assert abs(z_of(report)) < limit(len(exact.CASES))
    quick = check_constants(exact.get(name).target())
    assert quick.fine and quick.log_prior_integral == 0 and quick.num_evaluations == 1


@pytest.mark.calibration
@pytest.mark.parametrize("constant", [0.0, 1.0, -1.84, 0.2, 40.0])
@pytest.mark.parametrize("drawing", [True, False])
@pytest.mark.parametrize("dim", [1, 10])
def test_a_constant_moves_the_integral_by_exactly_that(dim, drawing, constant, limit):
    target = functions(lambda u: normal(3.0)(u) + constant, dim, normal_draws(dim, 3.0) if drawing else None)
    report = check_constants(target)
    assert abs(z_of(report, constant)) < limit(20)
    assert report.fine == (constant == 0.0)
    if constant == -1.84:
        assert "integrates to 0.1" in report.warnings[0] and "; add +1.8" in report.warnings[0]


def test_the_dropped_normal_constant_is_named(limit):
    report = check_constants(functions(lambda u: -0.5 * u.square().sum(-1), 2, normal_draws(2)))
    assert abs(z_of(report, math.log(2 * math.pi))) < limit()
    assert "a constant is missing; add -1.8" in report.warnings[0] and "log_prior" in report.warnings[0]


@pytest.mark.calibration
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dim", [1, 3, 10])
def test_heavy_tails_give_no_false_alarm(dim, seed):
    for draws in (cauchy_draws(dim), None):
        report = check_constants(functions(cauchy, dim, draws), seed=seed)
        assert report.fine, str(report)
        # A constant is still found where tails allow to know.
        wrong = check_constants(functions(lambda u: cauchy(u) + 1, dim, draws), seed=seed)
        assert not wrong.fine or "could not be checked" in wrong.notes[-1]
        assert draws is None or not wrong.fine


def two_normals(first, second, apart=0.0):
    """Two normal distributions with equal shares, and draws."""

    def log_prior(u):
        return torch.logaddexp(normal(first)(u - apart), normal(second)(u + apart)) - math.log(2)

    def draws(n, g):
        which = torch.rand(n, 1, generator=g, dtype=F64) < 0.5
        centre, sd = torch.where(which, apart, -apart), torch.where(which, first, second)
        return centre + sd * torch.randn(n, 2, generator=g, dtype=F64)

    return log_prior, draws


def funnel(u):
    scale = u[..., :1]
    return normal(3.0)(scale) + normal()(u[..., 1:] * (-scale / 2).exp()) - scale[..., 0]


def funnel_draws(n, g):
    scale = 3 * torch.randn(n, 1, generator=g, dtype=F64)
    return torch.cat([scale, (scale / 2).exp() * torch.randn(n, 2, generator=g, dtype=F64)], 1)


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("log_prior", "draws"),
    [two_normals(0.3, 0.3, 1.5), two_normals(1e-3, 1.0), two_normals(1.0, 1.0, 6.0), (funnel, funnel_draws)],
    ids=["two peaks", "spike and slab", "far peaks", "funnel"],
)
def test_priors_of_other_shapes_give_no_false_alarm(log_prior, draws, limit):
    dim = 3 if log_prior is funnel else 2
    for sampler in (draws, None):
        for seed in range(2):
            report = check_constants(functions(log_prior, dim, sampler), seed=seed)
            assert report.fine, str(report)
            unknown = math.isnan(report.log_prior_integral)
            assert unknown == ("could not be checked" in report.notes[-1])
            assert unknown or abs(report.log_prior_integral) < limit(4) * report.standard_error
    # With draws a constant is found whatever the shape.
    assert not check_constants(functions(lambda u: log_prior(u) + 1, dim, draws)).fine


def test_what_cannot_be_known_is_a_note():
    """A funnel in twenty dimensions without draws: no Student-t has its shape."""

    def funnel(u):
        scale = u[..., :1]
        return normal(3.0)(scale) + (normal()(u[..., 1:] * (-2 * scale).exp()) - 2 * 19 * scale[..., 0])

    report = check_constants(functions(funnel, 20))
    assert report.fine and math.isnan(report.log_prior_integral)
    assert "could not be checked" in report.notes[-1]


def test_the_error_is_right(calibrated):
    target = functions(normal(), 3, normal_draws(3))
    assert calibrated(z_of(check_constants(target, num_draws=500, seed=s)) for s in range(100))


def test_bridge_and_importance_agree_with_a_known_ratio(limit):
    generator = torch.Generator().manual_seed(0)
    draws = 2 * torch.randn(4000, 4, generator=generator, dtype=F64) + 1
    reference = student_fit(draws[:2000], torch.full((4,), 5.0, dtype=F64))
    points = reference.sample(2000, generator)

    def ratios(x):
        return normal(2.0)(x - 1) + 7.0 - reference.log_prob(x)

    for found in (bridge(ratios(draws[2000:]), ratios(points)), importance(ratios(points))):
        assert found.reliable and 0 < found.standard_error < 0.05
        assert abs(found.log_value - 7.0) < limit(2) * found.standard_error


def test_the_reference_is_normalised():
    reference = IndependentStudentT(
        torch.tensor([0.5], dtype=F64), torch.tensor([[2.0]], dtype=F64), torch.tensor([5.0], dtype=F64)
    )
    x = torch.linspace(-2000, 2000, 400_001, dtype=F64).unsqueeze(-1)
    assert float(reference.log_prob(x).exp().sum() * 0.01) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_draws_from_elsewhere_are_noticed(seed, limit):
    for draws in (normal_draws(2, 1.3), lambda n, g: normal_draws(2)(n, g) + 0.3):
        report = check_constants(functions(normal(), 2, draws), seed=seed)
        assert any("do not follow log_prior" in text for text in report.warnings)
        assert not any("constant is missing" in text for text in report.warnings)
        assert abs(report.log_prior_integral) < limit(2) * report.standard_error


class WrongDraws(dist.LKJCholesky):
    """Somebody's correlation matrices, drawn as torch 2.13 does: row ``i`` has ``Beta(i - 1 / 2, ...)``."""

    def sample(self, sample_shape=()):
        row = torch.arange(self.dim, dtype=F64)
        shape, later = (*sample_shape, self.dim), self.concentration + (self.dim - 1 - row) / 2
        squared = dist.Beta((row - 0.5).clamp(min=0.5), later).sample(sample_shape) * (row > 0)
        normal = torch.randn(*shape, self.dim, dtype=F64).tril(-1)
        direction = normal / normal.norm(dim=-1, keepdim=True).clamp(min=1e-300)
        return squared.sqrt().unsqueeze(-1) * direction + torch.diag_embed((1 - squared).sqrt())


def correlated(prior):
    def model():
        factor = pyro.sample("factor", prior(4, torch.ones((), dtype=F64)))
        pyro.sample("y", dist.Normal(factor[1, 0], 1.0), obs=torch.tensor(0.3, dtype=F64))

    return bk.Target.from_pyro(model)


def test_correlation_matrices_are_drawn_from_their_density():
    report = check_constants(correlated(dist.LKJCholesky), thorough=True)
    assert report.fine and abs(report.log_prior_integral) < 6 * report.standard_error
    assert check_constants(correlated(dist.LKJCholesky)).num_evaluations == 1


def test_a_sampler_that_is_wrong_is_noticed():
    report = check_constants(correlated(WrongDraws))
    assert abs(report.log_prior_integral) < 6 * report.standard_error
    assert "do not follow its density" in report.warnings[0]


def test_single_precision(limit):
    target = functions(lambda u: normal()(u) + 1, 2, lambda n, g: torch.randn(n, 2, generator=g), dtype=torch.float32)
    assert abs(z_of(check_constants(target), 1.0)) < limit()


# ---------------------------------------------------------------------------------------------------------
# Improper priors


def improper_walk(u):
    return -0.5 * (u[..., 1:] - u[..., :-1]).square().sum(-1)


@pytest.mark.parametrize(
    ("log_prior", "dim"),
    [
        (lambda u: 0 * u.sum(-1), 1),
        (lambda u: 0 * u.sum(-1), 10),
        (lambda u: u.sum(-1), 1),
        (lambda u: -0.5 * u[..., 0].square(), 2),
        (lambda u: -torch.log1p(u.abs()).sum(-1), 1),
        (improper_walk, 5),
    ],
    ids=["flat", "flat in ten", "flat on the half-line", "flat along one", "reciprocal tail", "random walk"],
)
@pytest.mark.parametrize("drawing", [True, False])
def test_an_improper_prior_is_found(log_prior, dim, drawing):
    report = check_constants(functions(log_prior, dim, normal_draws(dim) if drawing else None))
    assert any("improper" in text for text in report.warnings), str(report)
    if log_prior is not improper_walk:
        assert "u[" in report.warnings[0]


def test_improper_sites_are_refused_by_name():
    def model():
        a = pyro.sample("a", dist.ImproperUniform(constraints.real, (), ()))
        pyro.sample("y", dist.Normal(a, 1.0), obs=torch.tensor(0.3))

    assert any("improper along a" in text for text in check_constants(bk.Target.from_pyro(model)).warnings)


def test_a_loss_posterior_under_a_flat_prior_is_improper():
    flat = dist.ImproperUniform(constraints.real, (), ())
    target = GibbsPosterior(flat, losses.HalfSquared(), torch.tensor([0.3, 1.1], dtype=F64))
    assert any("improper" in text for text in check_constants(target).warnings)


def test_a_masked_out_prior_is_improper():
    def model():
        with poutine.mask(mask=False):
            a = pyro.sample("a", dist.Normal(torch.zeros((), dtype=F64), 1.0))
        pyro.sample("y", dist.Normal(a, 1.0), obs=torch.tensor(0.3, dtype=F64))

    assert any("improper" in text for text in check_constants(bk.Target.from_pyro(model)).warnings)


# ---------------------------------------------------------------------------------------------------------
# The sites of a Pyro model


class Unnormalised(dist.Normal):
    """Somebody's normal distribution, its constant forgotten."""

    def log_prob(self, value):
        return -0.5 * ((value - self.loc) / self.scale).square()


class UnnormalisedCounts(dist.Poisson):
    def log_prob(self, value):
        return super().log_prob(value) + 0.5


class UnnormalisedBits(dist.Bernoulli):
    def log_prob(self, value):
        return super().log_prob(value) - 0.25


class HomeMade(dist.Normal):
    """Right, but nobody can know that from its name."""


class Wide(dist.MultivariateNormal):
    """Of two variables, which are beyond the sum."""


def conjugate(likelihood, y, prior=dist.Normal):
    def model():
        a = pyro.sample("a", prior(torch.zeros((), dtype=F64), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", likelihood(a), obs=y)

    return bk.Target.from_pyro(model)


Y = torch.tensor([0.3, 1.7, -0.4], dtype=F64)
COUNTS = torch.tensor([0.0, 1.0, 1.0], dtype=F64)


def test_a_model_of_known_distributions_is_quiet():
    report = check_constants(conjugate(lambda a: dist.Normal(a, 1.0), Y))
    assert report.fine and report.notes == () and str(report) == "no constant is missing"


@pytest.mark.parametrize(
    ("likelihood", "y", "amount"),
    [
        (lambda a: Unnormalised(a, 2.0), Y, -0.5 * math.log(8 * math.pi)),
        (lambda a: Unnormalised(a, 1e-3), Y, -0.5 * math.log(2e-6 * math.pi)),
        (lambda a: UnnormalisedCounts(a.exp()), COUNTS, -0.5),
        (lambda a: UnnormalisedBits(logits=a), COUNTS, 0.25),
        (lambda a: Unnormalised(a.unsqueeze(-1), 2.0).expand([3, 1]).to_event(1), Y.unsqueeze(-1), None),
    ],
    ids=["normal", "narrow normal", "counts", "bits", "vector"],
)
def test_an_unnormalised_distribution_of_data_is_found(likelihood, y, amount):
    report = check_constants(conjugate(likelihood, y))
    if amount is None:
        assert "not normalised" in str(report) or "could not be checked" in str(report)
    elif "1e-3" in str(amount) or abs(amount) > 4:
        assert not report.fine or "could not be checked" in report.notes[0]
    else:
        assert f"add {amount:+.3f} to its log_prob" in report.warnings[0] and "'y'" in report.warnings[0]


def test_a_right_distribution_of_ones_own_is_quiet():
    report = check_constants(conjugate(lambda a: HomeMade(a, 1.0), Y))
    assert report.fine and report.notes == ()


def test_what_cannot_be_summed_is_noted():
    def model():
        a = pyro.sample("a", dist.Normal(torch.zeros(2, dtype=F64), 1.0).to_event(1))
        pyro.sample("y", Wide(a, torch.eye(2, dtype=F64)), obs=Y[:2])

    report = check_constants(bk.Target.from_pyro(model))
    assert report.fine and report.notes == ("the normalisation of Wide of the observed site 'y' could not be checked",)


def test_an_unnormalised_prior_is_found_by_name():
    report = check_constants(conjugate(lambda a: dist.Normal(a, 1.0), Y, prior=Unnormalised))
    assert any("'a' is not normalised" in text and "add -0.919" in text for text in report.warnings)
    assert any("the prior integrates to 2.5" in text and "'a' (Unnormalised)" in text for text in report.warnings)


def test_factors_scales_and_masks_are_notes():
    mask = torch.tensor([True, False, True])

    def model():
        a = pyro.sample("a", dist.Normal(torch.zeros((), dtype=F64), 1.0))
        pyro.factor("first", -a.square())
        pyro.factor("second", -a.square())
        with poutine.scale(scale=0.5):
            pyro.sample("y", dist.Normal(a, 1.0), obs=Y[0])
        with pyro.plate("data", 3), poutine.mask(mask=mask):
            pyro.sample("z", dist.Normal(a, 1.0), obs=Y)
        with pyro.plate("more", 3):
            pyro.sample("w", dist.Normal(a, 1.0).mask(mask), obs=Y)

    report = check_constants(bk.Target.from_pyro(model))
    assert report.fine and len(report.notes) == 4
    factors, scaled, masked, inner = report.notes
    assert "factors 'first', 'second'" in factors
    assert "'y' is scaled by 0.5" in scaled
    assert "33.3 % of the observed site 'z' is masked" in masked and "'w'" in inner


def test_factors_that_a_model_vouches_for_are_no_notes():
    def model():
        a = pyro.sample("a", dist.Normal(torch.zeros((), dtype=F64), 1.0))
        pyro.factor("whole", dist.Normal(a, 1.0).log_prob(Y).sum())
        pyro.factor("who", -a.square())

    class Vouching:
        normalised_factors = "whole"  # one name, of which "who" is a part

        def method(self):
            model()

    assert "factors 'whole', 'who'" in check_constants(bk.Target.from_pyro(model)).notes[0]
    model.normalised_factors = {"whole"}
    for vouching in (model, Vouching().method):
        report = check_constants(bk.Target.from_pyro(vouching))
        assert len(report.notes) == 1 and "the factor 'who'" in report.notes[0]


def test_our_own_factors_hold_their_constants():
    """They are compared with sums over all data or latent values elsewhere."""
    alignment = Alignment.from_sequences({"A": "ACGT", "B": "ACGA", "C": "AC-A"})
    text = SegmentedText(Strings(["ab", "ba"], ["a", "b", "ab"]), torch.ones((), dtype=F64))
    genotypes = GenotypeModel(torch.tensor([[0.0, 1.0], [1.0, 1.0]], dtype=F64))
    models = (TreeModel(alignment, Tree.from_newick("(A,B,C);")), text, genotypes)
    for model in models:
        assert check_constants(bk.Target.from_pyro(model)) == ConstantsReport(0.0, 0.0, (), (), 1)


def test_a_likelihood_of_functions_is_noted_and_never_judged():
    """A constant in the likelihood moves nothing here: it cannot be seen, and the note says so."""
    reports = [
        check_constants(bk.Target.from_functions(normal(), lambda u, c=c: c - u.square().sum(-1), 2, normal_draws(2)))
        for c in (0.0, 50.0)
    ]
    assert reports[0] == reports[1] and reports[0].fine
    assert "a missing constant cannot be detected" in reports[0].notes[0]


def test_enumerated_models_are_read():
    def model():
        a = pyro.sample("a", dist.Normal(torch.zeros((), dtype=F64), 1.0))
        with pyro.plate("data", 3):
            k = pyro.sample("k", dist.Bernoulli(torch.tensor(0.3, dtype=F64)), infer={"enumerate": "parallel"})
            pyro.sample("y", HomeMade(a + k, 1.0), obs=Y)

    report = check_constants(bk.Target.from_pyro(model), thorough=True)
    assert report.fine and report.notes == ()


@pytest.mark.parametrize("num_draws", [10, 0, -600, 1000.5, math.nan, "9", None])
def test_unusable_numbers_of_draws_are_refused(num_draws):
    with pytest.raises(SettingsError, match="num_draws"):
        check_constants(functions(normal(), 1), num_draws=num_draws)


@pytest.mark.parametrize("drawing", [True, False])
def test_evaluations_are_counted(drawing):
    counted = 0

    def log_prior(u):
        nonlocal counted
        counted += u[..., 0].numel()
        return normal()(u)

    draws = normal_draws(2) if drawing else None
    report = check_constants(functions(log_prior, 2, draws, compile=False))
    assert abs(report.num_evaluations - counted) <= 0.02 * counted


def test_the_seed_decides_and_nothing_global_moves():
    target, state = functions(normal(), 2, normal_draws(2)), torch.random.get_rng_state()
    first, same, other = (check_constants(target, seed=s) for s in (0, 0, 1))
    assert first == same != other
    assert torch.random.get_rng_state().equal(state)
