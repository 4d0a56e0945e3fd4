"""Leave-one-out cross-validation against closed forms and ArviZ."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
import bayeskit._leave_one_out as leave_one_out_module
from bayeskit._core.randomness import new_generator
from bayeskit._draws import Draws
from bayeskit._leave_one_out import AffineMaps, LeftOut, WideMaps, leave_one_out
from bayeskit.errors import DrawsError, ModelError, ShapeError, UnknownNameError
from bayeskit.inference.evidence._predictive import conditional_predictive_ordinates
from bayeskit.models.phylogenetics import Alignment, Tree, TreeModel

CHAINS, COUNT = 4, 1000


def regression(x, y):
    beta = pyro.sample("beta", dist.Normal(torch.zeros_like(x[0]), 3.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ beta, 1.0), obs=y)


def posterior(x, y):
    """Return mean and covariance of the coefficients."""
    covariance = torch.linalg.inv(x.T @ x + torch.eye(x.shape[1], dtype=x.dtype) / 9)
    return covariance @ x.T @ y, covariance


def left_out(x, y, group=None):
    """Return the log predictive density of each group of data given the others."""
    group = torch.arange(len(y)) if group is None else group
    answer = []
    for i in range(int(group.max()) + 1):
        mean, covariance = posterior(x[group != i], y[group != i])
        z = x[group == i]
        law = dist.MultivariateNormal(z @ mean, z @ covariance @ z.T + torch.eye(len(z), dtype=x.dtype))
        answer.append(law.log_prob(y[group == i]))
    return torch.stack(answer)


def independent(target, mean, covariance, seed=0, count=COUNT):
    """Return independent draws of a normal posterior."""
    noise = torch.randn(CHAINS, count, len(mean), generator=new_generator(seed, stream="test"), dtype=mean.dtype)
    u = mean + noise @ torch.linalg.cholesky(covariance).T
    return Draws(u, *target.evaluate(u), torch.ones(CHAINS, dtype=u.dtype), target=target)


def problem(leverage=1.0, outlier=0.0, n=30, dim=4):
    """Return a linear regression whose first datum has leverage or lies apart, with draws."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    x[0] *= leverage
    y = x @ torch.linspace(-1, 1, dim, dtype=x.dtype) + torch.randn(n, generator=generator, dtype=x.dtype)
    y[0] += outlier
    return x, y, independent(bk.Target.from_pyro(regression, x, y), *posterior(x, y))


@pytest.fixture(scope="module")
def plain():
    return problem()


def z_of(score, answer):
    return (score.pointwise - answer) / score.pointwise_error


def test_every_datum_against_the_closed_form(plain, limit):
    x, y, draws = plain
    score, answer = draws.loo(), left_out(x, y)
    assert score.trusted
    assert float(z_of(score, answer).abs().max()) < limit(len(y))
    assert abs(score.elpd - float(answer.sum())) < limit() * score.monte_carlo_error
    assert score.elpd == pytest.approx(float(score.pointwise.sum()))
    assert score.standard_error == pytest.approx(math.sqrt(len(y)) * float(score.pointwise.std()))
    assert 2 < score.p_loo < 8


@pytest.mark.parametrize("kind", [{"outlier": 15.0}, {"leverage": 6.0, "outlier": 15.0}])
def test_moment_matching_reaches_the_closed_form_where_weights_fail(kind, limit):
    x, y, draws = problem(**kind)
    answer, before, after = left_out(x, y), draws.loo(moment_matching=False), draws.loo()
    assert not before.trusted and "y[0]" in before.warnings[0] and bool(before.pareto_k[0] > 0.7)
    assert after.trusted and bool(after.matched[0])
    assert torch.equal(after.pareto_k_before, before.pareto_k)
    assert abs(float(z_of(after, answer)[0])) < limit()
    assert abs(after.elpd - float(answer.sum())) < limit() * after.monte_carlo_error
    assert abs(float(before.pointwise[0] - answer[0])) > 5 * abs(float(after.pointwise[0] - answer[0]))


def scores_of_one_datum(num_replicates=40):
    """Return the score of a datum of leverage in each of many runs of independent draws."""
    x, y, draws = problem(leverage=4.0, outlier=2.0)
    answer, law = left_out(x, y), posterior(x, y)
    runs = [independent(draws.target, *law, seed=seed, count=250).loo() for seed in range(num_replicates)]
    return [float(z_of(run, answer)[0]) for run in runs]


@pytest.mark.calibration
def test_errors_of_an_influential_datum_are_right(calibrated):
    assert calibrated(scores_of_one_datum())


def test_widening_without_its_jacobian_is_noticed(monkeypatch, calibrated):
    monkeypatch.setattr(WideMaps, "log_determinant", property(lambda wide: wide.maps.log_determinant))
    assert not calibrated(scores_of_one_datum())


def score_of_leverage():
    """Return the score of a datum without which the posterior is much wider in one direction."""
    x, y, draws = problem(leverage=80.0)
    return float(z_of(draws.loo(), left_out(x, y))[0])


def test_a_datum_of_great_leverage_is_right(limit):
    assert abs(score_of_leverage()) < limit()


def test_mutation_a_posterior_without_the_datum_that_is_no_wider(monkeypatch, limit):
    monkeypatch.setattr(leave_one_out_module, "_LEAST_PRECISION", 1.0)
    monkeypatch.setattr(leave_one_out_module, "_ROUNDS", 0)
    assert abs(score_of_leverage()) > 2 * limit()


def score_of_a_group():
    """Return the score of two data together, without which the posterior is wider in two directions."""
    x, y, draws = problem()
    x, group = x.clone(), torch.arange(len(y)).clamp(min=1) - 1
    x[:2] *= 8.0
    draws = independent(bk.Target.from_pyro(regression, x, y), *posterior(x, y))
    score = draws.loo(by=group)
    return float(z_of(score, left_out(x, y, group))[0]), score


def test_a_group_that_determines_several_directions_is_right(limit):
    z, score = score_of_a_group()
    assert bool(score.matched[0]) and score.trusted and abs(z) < limit()


def test_maps_without_their_jacobian_are_noticed(monkeypatch, limit):
    monkeypatch.setattr(AffineMaps, "log_determinant", property(lambda maps: torch.zeros_like(maps.shift[:, 0])))
    assert abs(score_of_a_group()[0]) > 2 * limit()


@pytest.mark.parametrize("full", [True, False])
def test_maps_have_their_inverse_and_determinant(full):
    z, shift = torch.randn(2, 5, 3, generator=new_generator(0, stream="maps"), dtype=torch.float64)
    linear = torch.eye(3, dtype=z.dtype) * torch.tensor([0.5, 2.0, 3.0], dtype=z.dtype)
    linear[2, 0] = 0.7 if full else 0.0
    linear = linear.expand(5, 3, 3)
    maps = AffineMaps(linear if full else linear.diagonal(dim1=1, dim2=2), shift)
    for i, there in enumerate(maps.forth(z)):
        torch.testing.assert_close(there, shift[i] + z @ linear[i].T)
        torch.testing.assert_close(maps.back(there)[i], z)
    torch.testing.assert_close(maps.log_determinant, torch.linalg.slogdet(linear).logabsdet)
    direction, factor, offset = torch.randn_like(shift), torch.linspace(0.5, 3, 5, dtype=z.dtype), shift[:, 0]
    wide = WideMaps(maps, direction, 1 / (3 * direction), factor, offset)
    for i, there in enumerate(wide.forth(z)):
        torch.testing.assert_close(wide.back(there)[i], z)
    whole = torch.func.vmap(torch.func.jacrev(lambda one: wide.forth(one.unsqueeze(0))[:, 0]))(z)  # (draws, m, d, d)
    torch.testing.assert_close(wide.log_determinant.expand(5, 5), torch.linalg.slogdet(whole).logabsdet)


def test_few_draws_for_many_dimensions_move_without_covariances(limit):
    """Seventy means with a datum each: leaving it out gives the prior back."""

    def means(y):
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(pyro.sample("mean", dist.Normal(0.0, 1.0)), 1.0), obs=y)

    y = torch.linspace(-1.0, 1.0, 70, dtype=torch.float64)
    y[3] = 4.0
    target = bk.Target.from_pyro(means, y)
    draws = independent(target, y / 2, 0.5 * torch.eye(70, dtype=y.dtype), count=174)
    score = draws.loo()
    assert bool(score.matched[3]) and bool(score.pareto_k[3] < score.pareto_k_before[3])
    assert abs(float(z_of(score, dist.Normal(0.0, math.sqrt(2)).log_prob(y))[3])) < limit()


def test_groups_by_plate_and_by_number(limit):
    def pairs(y, z):
        beta = pyro.sample("beta", dist.Normal(torch.zeros(1, dtype=y.dtype), 3.0).to_event(1))
        with pyro.plate("place", len(y)):
            with pyro.plate("time", y.shape[1], dim=-2):
                pyro.sample("y", dist.Normal(beta[0], 1.0), obs=y.T)
            pyro.sample("z", dist.Normal(beta[0], 1.0), obs=z)

    generator = torch.Generator().manual_seed(4)
    y = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    z = torch.randn(6, generator=generator, dtype=torch.float64)
    together, place = torch.cat([y.T.reshape(-1), z]), torch.arange(6).repeat(3)
    ones = torch.ones(18, 1, dtype=y.dtype)
    target = bk.Target.from_pyro(pairs, y, z)
    draws = independent(target, *posterior(ones, together))
    by_plate, by_number = draws.loo(by="place"), draws.loo(by=place)
    assert float(z_of(by_plate, left_out(ones, together, place)).abs().max()) < limit(6)
    torch.testing.assert_close(by_plate.pointwise, by_number.pointwise)
    assert by_plate.sites == {"place": {"place": 6}} and by_number.sites == {"group": {"group": 6}}
    table = draws.loo().to_pandas()
    assert table.columns.tolist()[:3] == ["site", "time", "place"] and len(table) == 18
    assert table["time"].isna().tolist() == [False] * 12 + [True] * 6
    with pytest.raises(ModelError, match="site 'z' is outside of plate 'time'"):
        draws.loo(by="time")
    with pytest.raises(UnknownNameError, match="'plce'.*did you mean 'place'"):
        draws.loo(by="plce")
    with pytest.raises(ShapeError, match="18 labels"):
        draws.loo(by=[0, 1])


def test_a_likelihood_of_zero_does_not_count_where_its_datum_is_left_out():
    def scale(y):
        top = pyro.sample("top", dist.Pareto(1.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Uniform(0.0, top), obs=y)

    data = LeftOut(bk.Target.from_pyro(scale, torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)))
    u = data.target.unconstrain({"top": torch.tensor([3.0, 6.0], dtype=torch.float64)}).unsqueeze(0)
    rest, one = data.without(u, torch.tensor([2]))
    torch.testing.assert_close(one, torch.tensor([[-math.inf, -math.log(6)]], dtype=torch.float64))
    expected = data.target.log_prior(u) - 2 * torch.tensor([[3.0, 6.0]], dtype=torch.float64).log()
    torch.testing.assert_close(rest, expected)


@pytest.mark.long
def test_patterns_of_an_alignment_count_as_often_as_they_occur():
    alignment = Alignment.from_sequences({"a": "ACGTACGTAA", "b": "ACGTACGAAA", "c": "ACTTACGTCA"})
    target = bk.Target.from_pyro(TreeModel(alignment, Tree.from_newick("(a,b,c);")))
    draws = bk.sample(target, num_warmup=200, num_samples=250, progress=False)
    score = draws.loo(moment_matching=False)
    other = conditional_predictive_ordinates(target, draws).predictive_score
    assert float(score.counts.sum()) == 10 and len(score.counts) < 10
    assert abs(score.elpd - other) < score.monte_carlo_error
    with pytest.raises(ModelError, match="ArviZ has no counts"):
        score.to_arviz()


@pytest.mark.filterwarnings("ignore")  # of ArviZ
def test_arviz_gets_the_same_numbers_and_compares(plain):
    import arviz

    x, y, draws = plain
    score = draws.loo(moment_matching=False)
    theirs = arviz.loo(draws.to_arviz(), pointwise=True, reff=1.0)
    torch.testing.assert_close(score.pointwise, torch.as_tensor(theirs.loo_i.values), rtol=1e-6, atol=1e-6)
    other = independent(bk.Target.from_pyro(regression, x[:, :2], y), *posterior(x[:, :2], y)).loo()
    table = arviz.compare({"whole": score.to_arviz(), "half": other.to_arviz()})
    assert table.index[0] == "whole" and float(table["elpd_loo"].iloc[0]) == pytest.approx(score.elpd)


def test_a_score_is_shown(plain):
    x, y, draws = plain
    score = draws.loo()
    assert str(score).startswith(f"leave-one-out of {len(y)} data: elpd {score.elpd:.2f} +- ")
    assert repr(score) == str(score)
    table = score.to_pandas()
    assert table["data"].tolist() == list(range(len(y))) and table["elpd"].sum() == pytest.approx(score.elpd)
    apart = problem(leverage=12.0)[2].loo()
    labels = [text.get_text() for text in apart.plot().get_legend().get_texts()]
    assert labels == ["before moment matching", "reliable"]


def test_draws_that_cannot_be_used_are_refused(plain):
    _, _, draws = plain
    target = draws.target
    u = draws.unconstrained
    with pytest.raises(DrawsError, match="tempered"):
        Draws(u, draws.log_prior, draws.log_likelihood, torch.full((CHAINS,), 0.5), target=target).loo()
    with pytest.raises(DrawsError, match="no target"):
        Draws(u, draws.log_prior, draws.log_likelihood, draws.beta).loo()
    with pytest.raises(DrawsError, match="5 draws are too short"):
        leave_one_out(target, u[:, :5])
    with pytest.raises(DrawsError, match="no chain has a finite density"):
        leave_one_out(target, u, log_density=torch.full_like(u[..., 0], torch.nan))
    with pytest.raises(ShapeError, match="diverging must have shape"):
        leave_one_out(target, u, diverging=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ModelError, match="made from functions"):
        functions = bk.Target.from_functions(lambda u: -u.square().sum(-1), lambda u: u.sum(-1), 2)
        leave_one_out(functions, torch.zeros(2, 20, 2, dtype=torch.float64))


def test_chains_apart_are_not_trusted(plain):
    _, _, draws = plain
    u = draws.unconstrained + torch.arange(4.0, dtype=torch.float64).reshape(-1, 1, 1)
    apart = Draws(u, *draws.target.evaluate(u), draws.beta, target=draws.target).loo()
    assert not apart.trusted and "chains disagree" in apart.warnings[0]
