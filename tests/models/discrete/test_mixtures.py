import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure
from scipy import stats
from scipy.special import logsumexp

import bayeskit as bk
from bayeskit._draws import Draws
from bayeskit.errors import DataError, ModelError, SettingsError, ShapeError, UnknownNameError
from bayeskit.exact._enumeration import enumerate_latents
from bayeskit.inference.evidence import naive_monte_carlo
from bayeskit.models.discrete.mixtures._conjugate import (
    exact_log_evidence,
    log_joint_of_assignments,
    sample_exact_posterior,
)
from bayeskit.models.discrete.mixtures._gaussian_mixture import (
    GaussianMixture,
    MixturePrior,
    OrderedSample,
    UnknownSizeMixture,
    galaxy_velocities,
)
from bayeskit.models.discrete.mixtures._labels import Labels, aligned, relabel
from bayeskit.models.discrete.mixtures._plots import plot_num_components, plot_predictive, predictive_density

F64 = torch.float64
SMALL = torch.tensor([-1.2, -0.7, 0.4, 1.9, 2.2], dtype=F64)
TABLE = torch.tensor([[-1.0, 0.3], [-0.6, -0.4], [1.5, 2.2], [2.1, 1.4], [1.8, 2.9]], dtype=F64)
CONJUGATE = MixturePrior.conjugate(0.3, 0.2, 2.5, 0.7, 1.5)


def vectors(target, count=6):
    generator = torch.Generator().manual_seed(1)
    return 0.8 * torch.randn(count, target.dim, generator=generator, dtype=F64)


def test_the_galaxies():
    y = galaxy_velocities()
    assert y.shape == (82,) and y.dtype == F64
    assert bool((y.diff() > 0).all())
    # The survey's 78th value, not the misprint 26.690.
    assert (float(y[77]), float(y[73]), float(y[0]), float(y[-1])) == (26.960, 24.366, 9.172, 34.279)
    assert float(y.sum()) == pytest.approx(1708.180, abs=1e-9)


def log_prior_by_scipy(values, y, count):
    """Richardson and Green's prior with the Jacobian of the logarithms."""
    low, high = float(y.min()), float(y.max())
    width = high - low
    rate = float(values["rate"])
    total = stats.gamma.logpdf(rate, 0.2, scale=width**2 / 10) + math.log(rate)
    for k in range(count):
        share, mean, precision = (float(values[name][k]) for name in ("share", "mean", "precision"))
        total += stats.gamma.logpdf(share, 1.0) + math.log(share)
        total += stats.norm.logpdf(mean, (low + high) / 2, width)
        total += stats.gamma.logpdf(precision, 2.0, scale=1 / rate) + math.log(precision)
    return total


def test_prior_and_likelihood_against_scipy():
    y = galaxy_velocities()
    target = bk.Target.from_pyro(GaussianMixture(y, 3))
    u = vectors(target)
    values = target.constrain(u)
    for i in range(len(u)):
        one = {name: value[i] for name, value in values.items()}
        weight = one["share"] / one["share"].sum()
        each = [
            math.log(weight[k])
            + stats.norm.logpdf(y.numpy(), float(one["mean"][k]), float(one["precision"][k]) ** -0.5)
            for k in range(3)
        ]
        assert float(target.log_prior(u[i])) == pytest.approx(log_prior_by_scipy(one, y, 3), rel=1e-10)
        assert float(target.log_likelihood(u[i])) == pytest.approx(float(logsumexp(each, 0).sum()), rel=1e-10)


@pytest.mark.parametrize(
    ("covariance", "equal"), [("diagonal", False), ("diagonal", True), ("full", False), ("full", True)]
)
def test_several_dimensions_against_scipy(covariance, equal):
    mixture = GaussianMixture(TABLE, 2, covariance=covariance, equal_scales=equal)
    target = bk.Target.from_pyro(mixture)
    u = vectors(target)
    values = target.constrain(u)
    for i in range(len(u)):
        one = {name: value[i] for name, value in values.items()}
        weight, each = one["share"] / one["share"].sum(), []
        for k in range(2):
            sd = one["precision"].rsqrt() if equal else one["precision"][k].rsqrt()
            tril = torch.diag(sd) @ (one["correlation"][k] if covariance == "full" else torch.eye(2, dtype=F64))
            normal = stats.multivariate_normal(one["mean"][k].numpy(), (tril @ tril.T).numpy())
            each.append(math.log(weight[k]) + normal.logpdf(TABLE.numpy()))
        assert float(target.log_likelihood(u[i])) == pytest.approx(float(logsumexp(each, 0).sum()), rel=1e-9)
    at_data = mixture.log_density(values, TABLE)
    assert torch.allclose(at_data.sum(-1), target.log_likelihood(u), rtol=1e-12)
    p = mixture.responsibilities(values)
    assert p.shape == (6, 5, 2) and torch.allclose(p.sum(-1), torch.ones(6, 5, dtype=F64))
    Labels(target, mixture.exchangeable)


def test_single_precision():
    double, single = (bk.Target.from_pyro(GaussianMixture(y, 2)) for y in (SMALL, SMALL.float()))
    u = vectors(double)
    assert single.dtype == torch.float32
    assert torch.allclose(single.log_density(u.float()).double(), double.log_density(u), rtol=1e-4)


def test_likelihood_against_listed_assignments():
    mixture = GaussianMixture(SMALL, 3)
    target = bk.Target.from_pyro(mixture)
    u = vectors(target, 1)[0]
    values = target.constrain(u)
    fixed = pyro.condition(mixture, values)
    posterior = enumerate_latents(fixed)
    assert len(posterior) == 3**5
    parts = {
        "rate": stats.gamma(0.2, scale=3.4**2 / 10),
        "share": stats.gamma(1.0),
        "precision": stats.gamma(2.0, scale=1 / float(values["rate"])),
        "mean": stats.norm(0.5, 3.4),
    }
    prior_of_values = sum(part.logpdf(values[name].numpy()).sum() for name, part in parts.items())
    assert posterior.log_evidence - float(prior_of_values) == pytest.approx(float(target.log_likelihood(u)), abs=1e-10)
    assert torch.allclose(posterior.marginal("assignment").probabilities, mixture.responsibilities(values), atol=1e-12)


def student_chain(y, prior):
    """One component: the product of the Student predictive densities."""
    m, n0, a, b = float(prior.location), prior.relative_precision, prior.shape, float(prior.rate)
    total = 0.0
    for x in y.tolist():
        total += stats.t.logpdf(x, 2 * a, m, math.sqrt(b * (n0 + 1) / (a * n0)))
        b += 0.5 * n0 * (x - m) ** 2 / (n0 + 1)
        m, n0, a = (n0 * m + x) / (n0 + 1), n0 + 1, a + 0.5
    return total


def test_exact_evidence_against_independent_ways():
    one = GaussianMixture(SMALL, 1, CONJUGATE)
    assert exact_log_evidence(one) == pytest.approx(student_chain(SMALL, CONJUGATE), abs=1e-11)
    # Two components by hand: every subset is a component of its own.
    e0, n = CONJUGATE.concentration, len(SMALL)
    total = 0.0
    for inside in itertools.product([False, True], repeat=n):
        mask = torch.tensor(inside)
        sizes = [int((~mask).sum()), int(mask.sum())]
        log_p = (
            math.lgamma(2 * e0) - math.lgamma(2 * e0 + n) + sum(math.lgamma(e0 + s) - math.lgamma(e0) for s in sizes)
        )
        total += math.exp(log_p + student_chain(SMALL[mask], CONJUGATE) + student_chain(SMALL[~mask], CONJUGATE))
    two = GaussianMixture(SMALL, 2, CONJUGATE)
    assert exact_log_evidence(two) == pytest.approx(math.log(total), abs=1e-11)

    def urn():
        z = torch.stack([pyro.sample(f"z_{i}", dist.Categorical(torch.ones(2))) for i in range(n)])
        pyro.factor("joint", log_joint_of_assignments(two, z) + n * math.log(2))

    assert enumerate_latents(urn).log_evidence == pytest.approx(math.log(total), abs=1e-11)
    three = GaussianMixture(SMALL, 3, CONJUGATE)
    turned = GaussianMixture(SMALL.flip(0), 3, CONJUGATE)
    assert exact_log_evidence(three) == pytest.approx(exact_log_evidence(turned), abs=1e-11)
    columns = GaussianMixture(TABLE, 1, MixturePrior.conjugate([0.3, 0.0], 0.2, 2.5, [0.7, 0.5]))
    by_column = [
        student_chain(TABLE[:, i], MixturePrior.conjugate(m, 0.2, 2.5, r)) for i, m, r in ((0, 0.3, 0.7), (1, 0.0, 0.5))
    ]
    assert exact_log_evidence(columns) == pytest.approx(sum(by_column), abs=1e-11)


def test_exact_draws_against_listed_assignments(limit):
    """Means of the draws against sums over all assignments; labels are exchangeable, so look at symmetric functions."""
    two = GaussianMixture(SMALL, 2, CONJUGATE)
    count = 20_000
    draws = sample_exact_posterior(two, count, seed=4)
    z = torch.cartesian_prod(*[torch.arange(2)] * len(SMALL))
    p = log_joint_of_assignments(two, z).softmax(0)
    together = (draws["assignment"][:, 0] == draws["assignment"][:, 1]).double()
    expected = float(p @ (z[:, 0] == z[:, 1]).double())
    assert abs(float(together.mean()) - expected) < limit(3) * math.sqrt(expected * (1 - expected) / count)
    # The predictive density at a point, from the draws and by adding the point to the data.
    x = torch.tensor([1.0], dtype=F64)
    density = two.log_density(draws, x).exp().squeeze(-1)
    more = GaussianMixture(torch.cat([SMALL, x]), 2, CONJUGATE)
    exact = math.exp(exact_log_evidence(more) - exact_log_evidence(two))
    assert abs(float(density.mean()) - exact) < limit(3) * float(density.std()) / math.sqrt(count)
    total = draws["share"].sum(-1)
    assert abs(float(total.mean()) - 3.0) < limit(3) * math.sqrt(3.0 / count)


def test_ordered_draws_have_a_density():
    normal = dist.Normal(torch.tensor(0.5, dtype=F64), 1.3)
    ordered = OrderedSample(normal, 3)
    grid = torch.linspace(-7, 8, 61, dtype=F64)
    points = torch.cartesian_prod(grid, grid, grid)
    below = (points[:, 0] < points[:, 1]) & (points[:, 1] < points[:, 2])
    # Off the diagonals the cells of the six orders are the same, and the cells on them vanish with the step.
    inside = float(ordered.log_prob(points[below]).exp().sum()) * 0.25**3
    off = (points[:, 0] != points[:, 1]) & (points[:, 1] != points[:, 2]) & (points[:, 0] != points[:, 2])
    cube = float(normal.log_prob(points[off]).sum(-1).exp().sum()) * 0.25**3
    assert inside == pytest.approx(cube, rel=1e-12)
    assert ordered.sample((4,)).shape == (4, 3)


@pytest.mark.calibration
def test_ordering_leaves_the_evidence_as_it_is(limit):
    prior = MixturePrior.independent(0.5, 1.5, 2.0, 1.0)
    free, ordered = (bk.Target.from_pyro(GaussianMixture(SMALL, 3, prior, ordered=flag)) for flag in (False, True))
    a, b = (naive_monte_carlo(target, num_draws=40_000, seed=s) for s, target in enumerate((free, ordered)))
    error = math.hypot(a.standard_error, b.standard_error)
    assert error < 0.05
    assert abs(a.log_evidence - b.log_evidence) < limit() * error
    # Without K! in the density of ordered means it would be log 6 too low.
    assert abs(a.log_evidence - (b.log_evidence - math.log(6))) > 5 * error


def test_permutations_leave_the_density_as_it_is():
    mixture = GaussianMixture(SMALL, 3)
    target = bk.Target.from_pyro(mixture)
    labels = Labels(target, mixture.exchangeable)
    u = vectors(target)
    everything = labels.permute(u.unsqueeze(1), labels.permutations())
    assert everything.shape == (6, 6, target.dim)
    log_density = target.log_density(everything)
    assert torch.allclose(log_density, log_density[:, :1].expand(6, 6), rtol=1e-12)
    assert len(torch.unique(everything[0], dim=0)) == 6
    permutation = torch.tensor([2, 0, 1])
    moved = target.constrain(labels.permute(u, permutation))
    assert torch.allclose(moved["mean"], target.constrain(u)["mean"][:, permutation])
    back = labels.permute(labels.permute(u, permutation), permutation.argsort())
    assert torch.equal(back, u)


def test_what_is_not_exchangeable_is_refused():
    mixture = GaussianMixture(SMALL, 3)
    target = bk.Target.from_pyro(mixture)
    with pytest.raises(ModelError, match="not exchangeable.*name all sites"):
        Labels(target, ("mean", "precision"))
    with pytest.raises(ModelError, match="not exchangeable"):
        Labels(bk.Target.from_pyro(UnknownSizeMixture(mixture)), mixture.exchangeable)
    with pytest.raises(ModelError, match="'rate' has shape"):
        Labels(target, ("mean", "rate"))
    with pytest.raises(UnknownNameError, match="no site 'weights'; its sites are: rate, share"):
        Labels(target, ("weights",))
    many = GaussianMixture(SMALL, 8)
    labels = Labels(bk.Target.from_pyro(many), many.exchangeable)
    assert not labels.listable
    with pytest.raises(SettingsError, match="8 components have 40320 permutations"):
        labels.permutations()


def switching_draws(count):
    """Draws about well-separated components, every one with labels of its own."""
    y = torch.cat(
        [torch.randn(6, generator=torch.Generator().manual_seed(k), dtype=F64) + 12.0 * k for k in range(count)]
    )
    mixture = GaussianMixture(y, count)
    target = bk.Target.from_pyro(mixture)
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(2, 30, 3, count, generator=generator, dtype=F64)
    values = {
        "share": (0.1 * noise[:, :, 0]).exp(),
        "mean": 12.0 * torch.arange(count) + 0.3 * noise[:, :, 1],
        "precision": (0.2 * noise[:, :, 2]).exp(),
        "rate": torch.ones(2, 30, dtype=F64),
    }
    u = target.unconstrain(values)
    labels = Labels(target, mixture.exchangeable)
    orders = torch.rand(2, 30, count, generator=generator).argsort(-1)
    switched = labels.permute(u, orders)
    prior, likelihood = target.evaluate(switched)
    draws = Draws(switched, prior, likelihood, torch.ones(2, dtype=F64), target=target)
    return mixture, labels, draws, u


@pytest.mark.parametrize("count", [3, 8])
def test_relabelling_undoes_switching(count):
    mixture, labels, draws, u = switching_draws(count)
    relabelled = relabel(draws, labels, mixture.responsibilities(draws.values()))
    means = relabelled.values()["mean"].flatten(0, 1)
    order = means[0].argsort()
    assert torch.allclose(labels.permute(relabelled.unconstrained, order), u)
    assert torch.allclose(labels.target.log_density(relabelled.unconstrained), draws.log_density, rtol=1e-10)
    assert relabelled.to_arviz()["posterior"]["mean"].shape == (2, 30, count)
    flat = draws.unconstrained.flatten(0, 1)
    together, chosen = aligned(flat, labels, flat[3])
    order = torch.as_tensor(labels.target.constrain(together[:1])["mean"][0].argsort())
    assert torch.allclose(labels.permute(together, order), u.flatten(0, 1))
    assert torch.equal(labels.permute(flat, chosen), together)
    with pytest.raises(ShapeError, match="responsibilities have shape"):
        relabel(draws, labels, mixture.responsibilities(draws.values())[0])


def test_unknown_size():
    mixture = GaussianMixture(SMALL, 3)
    chances = torch.tensor([0.5, 0.2, 0.3], dtype=F64)
    model = UnknownSizeMixture(mixture, chances)
    target = bk.Target.from_pyro(model)
    u = vectors(target)
    values = target.constrain(u)
    each = []
    for k in (1, 2, 3):
        share = values["share"][:, :k] / values["share"][:, :k].sum(-1, keepdim=True)
        normal = dist.Normal(values["mean"][:, None, :k], values["precision"][:, None, :k].rsqrt())
        density = (share.log().unsqueeze(1) + normal.log_prob(SMALL[:, None])).logsumexp(-1).sum(-1)
        each.append(density + chances[k - 1].log())
    joint = torch.stack(each, -1)
    assert torch.allclose(target.log_likelihood(u), joint.logsumexp(-1), rtol=1e-11)
    assert torch.allclose(model.size_probabilities(values), joint.softmax(-1), atol=1e-11)
    assert bool(target.value_and_grad(u)[1].isfinite().all())


def test_pictures():
    mixture = GaussianMixture(SMALL, 2, CONJUGATE)
    values = sample_exact_posterior(mixture, 300, seed=2)
    x = torch.linspace(-60, 60, 4001, dtype=F64)
    mean, low, high = predictive_density(mixture, values, x, level=0.8)
    assert bool((low <= high).all()) and bool((mean >= 0).all())
    assert float(torch.trapezoid(mean, x)) == pytest.approx(1, abs=0.01)
    axes = plot_predictive(mixture, values, Figure().subplots(), num_bins=5, num_points=50)
    assert len(axes.lines[0].get_xdata()) == 50
    bars = plot_num_components({2: (0.25, 0.1), 3: (0.75, 0.1)}, Figure().subplots())
    assert [bar.get_height() for bar in bars.patches] == [0.25, 0.75]
    with pytest.raises(SettingsError, match="no curve"):
        plot_predictive(GaussianMixture(TABLE, 2), {})
    with pytest.raises(ShapeError, match=r"x has shape \(5, 2\); give \(m\)"):
        mixture.log_density(values, TABLE)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: GaussianMixture(SMALL, 0), SettingsError, "num_components must be at least 1"),
        (lambda: GaussianMixture(SMALL[0], 2), ShapeError, r"shape \(n,\) or \(n, D\), not \(\)"),
        (lambda: GaussianMixture(SMALL[:0], 2), DataError, r"shape \(0,\)"),
        (lambda: GaussianMixture(SMALL / 0, 2), DataError, "5 values that are NaN or infinite"),
        (lambda: GaussianMixture(torch.ones(3), 2), DataError, "no range"),
        (lambda: GaussianMixture(TABLE, 2, CONJUGATE), ShapeError, "prior has dimension 1, the data 2"),
        (lambda: GaussianMixture(TABLE, 2, ordered=True), SettingsError, "no order"),
        (lambda: GaussianMixture(SMALL, 2, CONJUGATE, ordered=True), SettingsError, "ordered means go with a spread"),
        (lambda: GaussianMixture(SMALL, 2, covariance="tied"), SettingsError, "'diagonal' or 'full'"),
        (lambda: MixturePrior.independent(0.0, -1.0, 2.0, 1.0), SettingsError, "spread must be positive"),
        (lambda: MixturePrior.conjugate(0.0, 1.0, 2.0, math.inf), SettingsError, "rate must be positive and finite"),
        (lambda: exact_log_evidence(GaussianMixture(SMALL, 2)), SettingsError, "MixturePrior.conjugate"),
        (
            lambda: log_joint_of_assignments(GaussianMixture(SMALL, 2), torch.zeros(len(SMALL)).long()),
            SettingsError,
            "MixturePrior.conjugate",
        ),
        (
            lambda: log_joint_of_assignments(
                GaussianMixture(SMALL, 2, prior=CONJUGATE, equal_scales=True), torch.zeros(len(SMALL)).long()
            ),
            SettingsError,
            "unequal covariances",
        ),
        (
            lambda: log_joint_of_assignments(GaussianMixture(SMALL, 2, prior=CONJUGATE), torch.zeros(2).long()),
            ShapeError,
            "observations",
        ),
        (
            lambda: log_joint_of_assignments(GaussianMixture(SMALL, 2, prior=CONJUGATE), torch.full((len(SMALL),), 2)),
            DataError,
            "components",
        ),
        (
            lambda: exact_log_evidence(GaussianMixture(galaxy_velocities(), 2, CONJUGATE)),
            SettingsError,
            "82 observations in 2 components have 4835703278458516698824704 assignments",
        ),
        (lambda: UnknownSizeMixture(GaussianMixture(SMALL, 1)), SettingsError, "two or more components"),
        (lambda: UnknownSizeMixture(GaussianMixture(SMALL, 2), torch.ones(3)), ShapeError, "one for each of 2"),
        (
            lambda: UnknownSizeMixture(GaussianMixture(SMALL, 2), torch.tensor([-1.0, 2.0])),
            SettingsError,
            "nonnegative",
        ),
    ],
)
def test_bad_input(make, error, said):
    with pytest.raises(error, match=said):
        make()
