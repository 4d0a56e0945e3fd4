"""Predictive scores against closed forms, quadrature and leave-one-out evidence."""

import math
import sys

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit import exact
from bayeskit._draws import Draws
from bayeskit._logdensity.observations import Observations
from bayeskit.errors import DrawsError, ModelError
from bayeskit.inference.evidence._predictive import (
    conditional_predictive_ordinates,
    pointwise_predictive_density,
    scores_refusal,
)
from bayeskit.inference.evidence._result import PredictiveScore
from bayeskit.inference.generalized import GibbsPosterior, losses
from bayeskit.models.phylogenetics import HKY85, Alignment, Tree, TreeModel

SCORES = (conditional_predictive_ordinates, pointwise_predictive_density)


def regression(prior_sd=2.0, noise_sd=2.0):
    """Linear regression whose weights have light enough tails, with draws and both scores in closed form."""
    generator = np.random.default_rng(0)
    x = torch.from_numpy(generator.standard_normal((40, 3)))
    y = x @ torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64) + noise_sd * torch.from_numpy(
        generator.standard_normal(40)
    )
    case = exact.linear_regression(x, y, noise_sd=noise_sd, prior_sd=prior_sd)
    target = case.target()
    mean, covariance = case.posterior_mean["b"], case.posterior_covariance["b"]
    precision = torch.linalg.inv(covariance)

    def predictive(row, less):
        p = precision - less * torch.outer(x[row], x[row]) / noise_sd**2
        m = torch.linalg.solve(p, precision @ mean - less * x[row] * y[row] / noise_sd**2)
        variance = x[row] @ torch.linalg.solve(p, x[row]) + noise_sd**2
        return float(dist.Normal(x[row] @ m, variance.sqrt()).log_prob(y[row]))

    known = [sum(predictive(row, less) for row in range(40)) for less in (1.0, 0.0)]
    factor = torch.linalg.cholesky(covariance)

    def draw(seed, rho=0.0, num_draws=500):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(num_draws, 4, 3, generator=generator, dtype=torch.float64)
        for i in range(1, num_draws):
            noise[i] = rho * noise[i - 1] + math.sqrt(1 - rho**2) * noise[i]
        u = (mean + noise @ factor.T).movedim(0, 1).contiguous()
        return Draws(u, *target.evaluate(u), torch.ones(4, dtype=torch.float64), target=target)

    return case, target, known, draw


@pytest.fixture(scope="module")
def linear():
    return regression()


@pytest.mark.calibration
@pytest.mark.parametrize(("rho", "size"), [(0.0, 200), (0.6, 600)])
def test_error_bars_are_right(rho, size, linear, calibrated):
    _, target, known, draw = linear
    samples = [draw(seed, rho, size) for seed in range(40)]
    for estimate, answer in zip(SCORES, known, strict=True):
        results = [estimate(target, draws) for draws in samples]
        scores = np.array([(s.predictive_score - answer) / s.standard_error for s in results])
        assert np.mean([s.trusted for s in results]) > 0.9
        assert calibrated(scores, off=0.1) and not calibrated(2.5 * scores, off=0.1), scores


def test_errors_of_observations_are_not_added_as_if_independent(linear):
    """All terms rest on the same draws; their errors are correlated, here mostly with one sign."""
    _, target, _, draw = linear
    draws = draw(0)
    each = target.pointwise_log_likelihood(draws.unconstrained.flatten(0, 1))["y"].exp()
    independent = float((each.var(0) / each.mean(0).square() / len(each)).sum().sqrt())
    assert abs(pointwise_predictive_density(target, draws).standard_error / independent - 1) > 0.1


def test_leave_one_out_by_smoothed_importance_sampling_agrees(linear, limit):
    from bayeskit.inference.held_out import cross_validation_evidence

    _, target, _, draw = linear
    draws = draw(1, num_draws=1000)
    other = cross_validation_evidence(target, draws, p=1, held_out="all")
    score = conditional_predictive_ordinates(target, draws)
    # The same draws, so that they may differ by smoothing alone.
    assert abs(score.predictive_score / 40 - float(other.score[0])) < score.standard_error / 40


def test_linreg10_whose_tails_are_heavy_says_so_or_is_right(limit):
    case = exact.get("linreg10")
    target, (x, y, noise_sd, _) = case.target(), case.args
    factor = torch.linalg.cholesky(case.posterior_covariance["b"])
    precision = torch.linalg.inv(case.posterior_covariance["b"])
    known = 0.0
    for row in range(50):
        p = precision - torch.outer(x[row], x[row]) / noise_sd**2
        m = torch.linalg.solve(p, precision @ case.posterior_mean["b"] - x[row] * y[row] / noise_sd**2)
        variance = x[row] @ torch.linalg.solve(p, x[row]) + noise_sd**2
        known += float(dist.Normal(x[row] @ m, variance.sqrt()).log_prob(y[row]))
    for seed in range(8):
        noise = torch.randn(4, 1000, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        u = case.posterior_mean["b"] + noise @ factor.T
        draws = Draws(u, *target.evaluate(u), torch.ones(4, dtype=torch.float64), target=target)
        score = conditional_predictive_ordinates(target, draws)
        assert abs(score.predictive_score - known) < limit(8) * score.standard_error or not score.trusted


def wide_prior(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 3.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def replicates(y, num_draws, count):
    """Whether each score of exact draws was trusted, and how many errors it was off."""
    y = torch.tensor(y, dtype=torch.float64)
    target = bk.Target.from_pyro(wide_prior, y)
    precision = 1 / 9 + len(y)
    less, total = precision - 1, float(y.sum())
    known = sum(float(dist.Normal((total - v) / less, math.sqrt(1 + 1 / less)).log_prob(v)) for v in y)
    trusted, scores = [], []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(4, num_draws, 1, generator=generator, dtype=torch.float64)
        u = total / precision + noise / math.sqrt(precision)
        score = conditional_predictive_ordinates(
            target, Draws(u, *target.evaluate(u), torch.ones(4, dtype=torch.float64), target=target)
        )
        trusted.append(score.trusted)
        scores.append((score.predictive_score - known) / score.standard_error)
    return np.array(trusted), np.array(scores)


@pytest.mark.calibration
@pytest.mark.parametrize("y", [[1.0], [0.0, 1.0, 4.0]])
def test_weights_of_infinite_variance_are_not_trusted(y):
    """One datum: the weights' k is 0.9. Three: it is 0.6 as far as draws reach, and k-hat scatters about that."""
    trusted, scores = replicates(y, 250, 80)
    assert np.mean(np.abs(scores) > 3) > 0.01
    assert np.sum(trusted & (np.abs(scores) > 3)) <= 1


def test_weights_with_light_tails_mostly_are_trusted(calibrated):
    trusted, scores = replicates([0.0, 0.3, 1.0, 2.0, -1.0, 0.5, 1.2, -0.7, 0.2, 0.9], 250, 40)
    assert trusted.mean() > 0.7
    assert calibrated(scores, off=0.1)


SEQUENCES = exact.three_taxon_sequences()


@pytest.fixture(scope="module")
def tree():
    """The three-taxon case as an alignment, whose posterior is that of the exact case."""
    alignment = Alignment.from_sequences(SEQUENCES)
    model = TreeModel(alignment, Tree.from_newick("(taxon1,taxon2,taxon3);"))
    target = bk.Target.from_pyro(model)
    return model, target, bk.sample(target, 16, 150, 250, seed=0, progress=False)


@pytest.mark.long
def test_sites_of_an_alignment_count_as_often_as_they_occur(tree, limit):
    """Evidence with one site less and with one site more gives both scores exactly."""
    model, target, draws = tree
    assert scores_refusal(target) is None
    whole, known = exact.three_taxon_tree().log_evidence, [0.0, 0.0]
    classes = {}
    for column, bases in enumerate(zip(*SEQUENCES.values(), strict=True)):
        kind = tuple(bases.index(b) for b in bases)
        if kind not in classes:
            less = {k: s[:column] + s[column + 1 :] for k, s in SEQUENCES.items()}
            more = {k: s + s[column] for k, s in SEQUENCES.items()}
            classes[kind] = (
                whole - exact.three_taxon_tree(less).log_evidence,
                exact.three_taxon_tree(more).log_evidence - whole,
            )
        known = [a + b for a, b in zip(known, classes[kind], strict=True)]
    observations = Observations(target)
    assert len(observations.counts) == model.alignment.num_patterns < 72 and float(observations.counts.sum()) == 72
    for estimate, answer in zip(SCORES, known, strict=True):
        score = estimate(target, draws)
        assert score.trusted and abs(score.predictive_score - answer) < limit(2) * score.standard_error, str(score)
        assert score.standard_error < 0.1 and score.diagnostics["num_observations"] == 72


@pytest.mark.long
def test_patterns_are_not_powers(tree):
    """Counting a pattern's sites as one observation would give another score."""
    _, target, draws = tree
    observations = Observations(target)
    each = observations.log_likelihood(draws.unconstrained.flatten(0, 1))
    power = -float(torch.logsumexp(-each * observations.counts, 0).sub(math.log(len(each))).sum())
    score = conditional_predictive_ordinates(target, draws)
    assert abs(power - score.predictive_score) > 10 * score.standard_error


def test_parameters_of_substitution_models_reach_the_sites():
    alignment = Alignment.from_sequences(SEQUENCES)
    target = bk.Target.from_pyro(TreeModel(alignment, Tree.from_newick("(taxon1,taxon2,taxon3);"), HKY85()))
    u = target.sample_prior(5)
    observations = Observations(target)
    total = observations.log_likelihood(u) @ observations.counts
    torch.testing.assert_close(total, target.log_likelihood(u), rtol=1e-10, atol=1e-10)


def normal_model(y, extra=None):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    if extra == "factor":
        pyro.factor("penalty", -mean.square())
    if extra == "scale":
        with pyro.poutine.scale(scale=2.0):
            pyro.sample("z", dist.Normal(mean, 1.0), obs=y[0])
    if extra == "plated factor":
        with pyro.plate("more", len(y)):
            pyro.factor("z", dist.Normal(mean, 1.0).log_prob(y))


Y = torch.tensor([0.5, 1.5, -0.3, 2.0], dtype=torch.float64)


def only_a_factor(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    pyro.factor("all", dist.Normal(mean, 1.0).log_prob(y).sum())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: bk.Target.from_functions(
                lambda u: -u.square().sum(-1) - 0.5 * math.log(math.pi), lambda u: u.sum(-1), 1
            ),
            "made from functions",
        ),
        (lambda: bk.Target.from_pyro(only_a_factor, Y), "'all' is one term for all data"),
        (lambda: exact.get("three_taxon_tree").target(), "'likelihood' is one term"),
        (lambda: bk.Target.from_pyro(normal_model, Y, "factor"), "'penalty' is one term"),
        (lambda: bk.Target.from_pyro(normal_model, Y, "scale"), "'z' is scaled by poutine.scale"),
    ],
)
def test_what_has_no_observations_is_refused_with_a_reason(make, reason):
    target = make()
    assert reason in scores_refusal(target)
    u = torch.zeros(2, 10, target.dim, dtype=torch.float64)
    draws = Draws(u, *target.evaluate(u), torch.ones(2, dtype=torch.float64), target=target)
    for estimate in SCORES:
        with pytest.raises(ModelError, match=reason.replace("(", "\\(")):
            estimate(target, draws)


@pytest.mark.parametrize("weight", [1.0, 0.8])
def test_a_loss_that_is_no_log_density_is_refused(weight):
    target = GibbsPosterior(dist.Normal(0.0, 3.0), losses.Absolute(), Y, weight=weight)
    assert "not a density of the data" in scores_refusal(target)
    assert scores_refusal(bk.Target.from_pyro(target)) == scores_refusal(target)


def test_minus_a_log_density_is_a_loss_with_scores():
    loss = losses.NegativeLogLikelihood(lambda mean: dist.Normal(mean, 1.0))
    prior = dist.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    target, plain = GibbsPosterior(prior, loss, Y), bk.Target.from_pyro(normal_model, Y)
    assert "not a density of the data" in scores_refusal(target.with_weight(0.5))
    u = torch.randn(4, 50, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first, second = (
        conditional_predictive_ordinates(
            t, Draws(u, *t.evaluate(u), torch.ones(4, dtype=torch.float64), target=t)
        ).predictive_score
        for t in (target, plain)
    )
    assert first == pytest.approx(second, abs=1e-9)


@pytest.mark.parametrize("where", ["handler", "distribution", "summed out"])
def test_masked_observations_are_none(where):
    y, mask = torch.linspace(-1.0, 2.0, 20, dtype=torch.float64), torch.arange(20) < 5

    def model(y, mask):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            kind = 0.0
            if where == "summed out":
                kind = pyro.sample("kind", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
            law = dist.Normal(mean + kind, 1.0)
            if where == "distribution":
                pyro.sample("y", law.mask(mask), obs=y)
            else:
                with pyro.poutine.mask(mask=mask):
                    pyro.sample("y", law, obs=y)

    masked = bk.Target.from_pyro(model, y, mask)
    short = bk.Target.from_pyro(model, y[:5], torch.ones(5, dtype=torch.bool))
    u = torch.randn(4, 50, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 2
    for estimate in SCORES:
        first, second = (
            estimate(t, Draws(u, *t.evaluate(u), torch.ones(4, dtype=torch.float64), target=t)) for t in (masked, short)
        )
        assert first.diagnostics["num_observations"] == second.diagnostics["num_observations"] == 5
        assert first.predictive_score == pytest.approx(second.predictive_score, abs=1e-9)
        assert first.standard_error == pytest.approx(second.standard_error, rel=1e-6)


def test_a_factor_in_a_plate_is_one_term_each():
    target = bk.Target.from_pyro(normal_model, Y, "plated factor")
    assert scores_refusal(target) is None and len(Observations(target).counts) == 8


def test_terms_that_do_not_add_up_are_refused(linear, monkeypatch):
    _, target, _, draw = linear
    whole = target.log_likelihood
    monkeypatch.setattr(target, "log_likelihood", lambda u: whole(u) - 1)
    assert "do not add up" in scores_refusal(target)


def test_chunks_and_computing_twice_do_not_change_the_score(linear, monkeypatch):
    _, target, _, draw = linear
    draws = draw(2)
    for estimate in SCORES:
        first = estimate(target, draws)
        module = sys.modules["bayeskit.inference.evidence._predictive"]
        with monkeypatch.context() as patch:
            patch.setattr(module, "AT_A_TIME", 97 * 40)
            patch.setattr(module, "KEPT", 200 * 40)
            patch.setattr(module, "TAILS_AT_A_TIME", 3)
            second = estimate(target, draws)
        assert second.predictive_score == pytest.approx(first.predictive_score, abs=1e-9)
        assert second.standard_error == pytest.approx(first.standard_error, rel=1e-9)
        assert second.diagnostics["pareto_shape"] == pytest.approx(first.diagnostics["pareto_shape"], abs=1e-9)
        assert (first.num_evaluations, second.num_evaluations) == (2000, 4000)


def test_an_observation_that_some_draws_rule_out_is_said():
    def model(y):
        theta = pyro.sample("theta", dist.Uniform(0.0, 10.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Uniform(0.0, theta), obs=y)

    target = bk.Target.from_pyro(model, torch.tensor([5.0, 5.5], dtype=torch.float64))
    u = torch.linspace(-1.0, 1.0, 40, dtype=torch.float64).reshape(2, 20, 1)
    prior, likelihood = target.evaluate(u)
    # Finite at every draw, as recorded by a sampler of another likelihood.
    draws = Draws(u, prior, likelihood.clamp(min=-1e3), torch.ones(2, dtype=torch.float64), target=target)
    score = conditional_predictive_ordinates(target, draws)
    assert not score.trusted and any("likelihood zero" in x for x in score.warnings)
    assert score.predictive_score == -math.inf


def test_heavy_tails_are_counted(linear):
    """An outlier far from everything else: draws that do without it cannot be weighted from those that fit it."""
    y = torch.cat([torch.zeros(6, dtype=torch.float64), torch.tensor([12.0], dtype=torch.float64)])
    target = bk.Target.from_pyro(normal_model, y)
    sd, mean = math.sqrt(1 / 8), 12 / 8
    u = mean + sd * torch.randn(4, 1000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = Draws(u, *target.evaluate(u), torch.ones(4, dtype=torch.float64), target=target)
    score = conditional_predictive_ordinates(target, draws)
    assert not score.trusted and "Pareto k" in score.warnings[0]
    assert score.diagnostics["observations_above_pareto_limit"] >= 1


def test_single_precision(linear, limit):
    case, _, known, draw = linear
    target = bk.Target.from_pyro(case.model, *(x.to(torch.float32) for x in case.args))
    u = draw(0).unconstrained.to(torch.float32)
    draws = Draws(u, *target.evaluate(u), torch.ones(4), target=target)
    for estimate, answer in zip(SCORES, known, strict=True):
        score = estimate(target, draws)
        assert abs(score.predictive_score - answer) < limit(2) * score.standard_error


def test_draws_of_another_target_are_refused(linear):
    _, target, _, draw = linear
    other = bk.Target.from_pyro(normal_model, Y)
    with pytest.raises(DrawsError, match="dimension"):
        conditional_predictive_ordinates(other, draw(0))


def test_a_score_is_written_out():
    score = PredictiveScore("pointwise_predictive_density", -3.0, math.nan, 10, ("why",))
    assert not score.trusted and "NOT TRUSTED: why" in str(score) and "predictive score -3.0" in str(score)
