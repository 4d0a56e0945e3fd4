"""Estimators that claim no bias, against enumeration; bad input; what a guide of Pyro makes of them is tested there."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.inference import gradients
from bayeskit.inference.gradients import _score_function as binary
from bayeskit.inference.gradients import _without_replacement as ratios
from bayeskit.inference.gradients._score_function import importance_weighted_estimate
from bayeskit.inference.gradients._space import Factorised, space_of

REPLICATES = 20_000
DTYPE = torch.float64


def bits(*logits):
    return dist.Bernoulli(logits=torch.tensor(logits, dtype=DTYPE, requires_grad=True)).to_event(1)


def category(*logits):
    return dist.Categorical(logits=torch.tensor(logits, dtype=DTYPE, requires_grad=True))


def squared(z):
    """A function of bits that no sum over bits makes."""
    weights = torch.arange(1.0, z.shape[-1] + 1, dtype=DTYPE)
    return ((z * weights).sum(-1) - 2.5).square()


def steps(z):
    return torch.tensor([3.0, -1.0, 0.5, 7.0, 2.0, -4.0, 1.0, 0.0, 5.0, 2.5], dtype=DTYPE)[z]


PROBLEMS = {
    "three bits": (bits(0.0, 0.0, 0.0), squared),
    "three extreme bits": (bits(4.0, -5.0, 0.5), squared),
    "ten categories": (category(*[0.0] * 10), steps),
    "ten extreme categories": (category(6.0, 0.0, -1.0, 5.0, -8.0, 0.0, 1.0, 2.0, -3.0, -12.0), steps),
}
ESTIMATORS = [
    gradients.ScoreFunction(),
    gradients.ScoreFunction(3, baseline=gradients.MovingAverage(0.5)),
    gradients.LeaveOneOut(4),
    gradients.UnorderedSet(1),
    gradients.UnorderedSet(3),
    gradients.UnorderedSet(3, baseline=True),
    gradients.RaoBlackwell(3),
    gradients.RaoBlackwell(1, 2),
    gradients.ImportanceWithoutReplacement(3),
    gradients.VIMCO(2),
]
BINARY = [gradients.ARM(), gradients.DisARM(), gradients.DisARM(2)]


def z_scores(estimator, distribution, f, seed=0, replicates=REPLICATES):
    found = gradients.compare_estimators(
        distribution, f, [estimator], num_replicates=replicates, seed=seed, progress=False
    )
    return next(iter(found.results.values())).z.nan_to_num(0.0)  # where nothing was drawn, there is nothing to see


@pytest.mark.calibration
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_estimators_have_no_bias(estimator, problem, limit):
    distribution, f = PROBLEMS[problem]
    z = z_scores(estimator, distribution, f)
    assert float(z.abs().max()) < limit(z.numel())


@pytest.mark.calibration
@pytest.mark.parametrize("problem", PROBLEMS)
def test_larger_sets_whose_ratios_are_integrals_have_no_bias(problem, limit):
    distribution, f = PROBLEMS[problem]
    z = z_scores(gradients.UnorderedSet(5), distribution, f, replicates=4000)
    assert float(z.abs().max()) < limit(z.numel())


@pytest.mark.parametrize("problem", ["three bits", "three extreme bits"])
@pytest.mark.parametrize("estimator", BINARY, ids=repr)
def test_estimators_for_bits_have_no_bias(estimator, problem, limit):
    distribution, f = PROBLEMS[problem]
    z = z_scores(estimator, distribution, f)
    assert float(z.abs().max()) < limit(z.numel())


def test_a_control_variate_has_no_bias_and_less_variance(limit):
    distribution, f = PROBLEMS["three bits"]

    def linear(z):
        return z.sum(-1) * 4

    estimator = gradients.ControlVariate(linear, lambda q: 4 * q.base_dist.probs.sum(-1))
    table = gradients.compare_estimators(
        distribution, f, [estimator, gradients.ScoreFunction()], num_replicates=REPLICATES
    )
    with_variate, without = table.results.values()
    assert float(with_variate.z.abs().max()) < limit(3)
    assert with_variate.variance < without.variance


def test_a_normalised_importance_weight_is_seen_to_be_biased(limit):
    estimator = gradients.ImportanceWithoutReplacement(3, normalised=True)
    assert not estimator.unbiased and gradients.ImportanceWithoutReplacement(3).unbiased
    assert float(z_scores(estimator, *PROBLEMS["three bits"]).abs().max()) > 3 * limit(3)


def test_a_dropped_sign_is_seen(monkeypatch, limit):
    original = binary.DisARM.slope
    monkeypatch.setattr(binary.DisARM, "slope", lambda *arguments: -original(*arguments))
    assert float(z_scores(gradients.DisARM(), *PROBLEMS["three bits"]).abs().max()) > limit(3)


def test_a_draw_from_outside_that_forgets_the_rest_is_seen(monkeypatch, limit):
    original = Factorised.log_rest
    monkeypatch.setattr(Factorised, "log_rest", lambda *arguments: original(*arguments) - 0.5)
    assert float(z_scores(gradients.RaoBlackwell(3), *PROBLEMS["three bits"]).abs().max()) > limit(3)


def test_a_multi_sample_gradient_of_another_sign_is_seen(monkeypatch, limit):
    monkeypatch.setattr(
        "bayeskit.inference.gradients._score_function.importance_weighted_estimate",
        lambda values, score: importance_weighted_estimate(values, -score),
    )
    assert float(z_scores(gradients.VIMCO(2), *PROBLEMS["three bits"]).abs().max()) > limit(3)


@pytest.mark.parametrize("estimator", [*ESTIMATORS, *BINARY], ids=repr)
def test_values_estimate_the_expectation(estimator, limit):
    distribution, f = PROBLEMS["three bits"]
    copied = space_of(distribution).copies((REPLICATES,))
    found = estimator.surrogate(copied, f, torch.Generator().manual_seed(1)).detach()
    difference = found.mean() - estimator.expectation(distribution, f).detach()
    assert float((difference / found.std() * REPLICATES**0.5).abs()) < limit(1)


def test_gradients_of_the_function_itself_are_unbiased(limit):
    scale = torch.ones(REPLICATES, dtype=DTYPE, requires_grad=True)
    distribution, f = PROBLEMS["three extreme bits"]
    copied = space_of(distribution).copies((REPLICATES,))
    exact = gradients.Enumeration().surrogate(distribution, f).detach()
    for estimator in (gradients.UnorderedSet(3), gradients.RaoBlackwell(2), gradients.DisARM()):
        value = estimator.surrogate(copied, lambda z: scale * f(z), torch.Generator().manual_seed(2))
        (found,) = torch.autograd.grad(value.sum(), scale)
        assert float(((found.mean() - exact) / found.std() * REPLICATES**0.5).abs()) < limit(3)


def test_batches_are_independent_problems():
    logits = torch.tensor([[0.0, 1.0, 2.0], [2.0, 0.0, -1.0]], dtype=DTYPE)
    f = torch.tensor([[1.0, 2.0, 3.0], [0.0, 5.0, 1.0]], dtype=DTYPE)
    together = gradients.Enumeration().estimate(logits, f)
    alone = torch.stack([gradients.Enumeration().estimate(x, y) for x, y in zip(logits, f, strict=True)])
    torch.testing.assert_close(together, alone, rtol=1e-14, atol=1e-15)


def test_seeds_decide_and_globals_stay():
    distribution, f = PROBLEMS["ten categories"]
    estimator = gradients.UnorderedSet(4)
    first, again, other = (estimator.estimate(distribution, f, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("kind", [dist.Categorical, dist.OneHotCategorical])
def test_forms_of_a_distribution_agree(kind):
    logits = torch.tensor([0.2, -0.4, 1.0], dtype=DTYPE, requires_grad=True)
    table = gradients.Table(torch.tensor([1.0, -2.0, 0.5], dtype=DTYPE))
    exact = gradients.Enumeration().estimate(logits, table)
    found = gradients.Enumeration().estimate(kind(logits=logits), table)
    torch.testing.assert_close(found, exact, rtol=1e-14, atol=1e-15)


@pytest.mark.calibration
def test_autoregressive_sequences_are_enumerated_and_drawn(limit):
    start = torch.tensor([0.2, -0.3], dtype=DTYPE, requires_grad=True)
    step = torch.tensor([[1.0, -1.0], [0.3, 0.9]], dtype=DTYPE, requires_grad=True)

    def logits(codes):
        if not codes.shape[-1]:
            return start.expand(*codes.shape[:-1], 2)
        return step[codes[..., -1]]

    def f(z):
        return (z * torch.tensor([1, 2, 4])).sum(-1).to(DTYPE).square()

    chain = gradients.Autoregressive(logits, num_variables=3, num_categories=2, batch_shape=(REPLICATES,))
    one = gradients.Autoregressive(logits, num_variables=3, num_categories=2)
    torch.testing.assert_close(one.log_prob(one.enumerate_support()).exp().sum(), torch.tensor(1.0, dtype=DTYPE))
    exact = torch.autograd.grad(gradients.Enumeration().surrogate(one, f), [start, step])
    for estimator in (gradients.LeaveOneOut(3), gradients.UnorderedSet(3), gradients.RaoBlackwell(2)):
        value = estimator.surrogate(chain, f, torch.Generator().manual_seed(3))
        blocks = torch.stack(
            [
                torch.cat([g.flatten() for g in torch.autograd.grad(part.mean(), [start, step], retain_graph=True)])
                for part in value.split(REPLICATES // 100)
            ]
        )
        wanted = torch.cat([g.flatten() for g in exact])
        z = (blocks.mean(0) - wanted) / (blocks.std(0) / 10)
        assert float(z.abs().max()) < 1.3 * limit(18)  # a hundred blocks know their spread to seven per cent
    with pytest.raises(SettingsError, match="surrogate"):
        gradients.LeaveOneOut(3).estimate(one, f)


def test_best_k_makes_the_bound_smallest():
    probabilities = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05], dtype=DTYPE)
    for count in range(1, 8):
        bounds = [(1 - probabilities[:k].sum()) / (count - k) for k in range(min(count, 6))]
        assert int(gradients.best_k(probabilities, count)) == int(torch.stack(bounds).argmin())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gradients.UnorderedSet(9).estimate(torch.zeros(3), torch.zeros(3)), SettingsError, "support of 3"),
        (lambda: gradients.RaoBlackwell(4).estimate(torch.zeros(3), torch.zeros(3)), SettingsError, "support of 3"),
        (lambda: gradients.UnorderedSet(0), SettingsError, "k"),
        (lambda: gradients.LeaveOneOut(1), SettingsError, "num_samples"),
        (lambda: space_of(torch.tensor([0.0, -torch.inf])), DataError, r"logit at \(1,\)"),
        (lambda: space_of(dist.Categorical(probs=torch.tensor([1.0, 0.0]))), DataError, "probability zero"),
        (lambda: space_of(dist.Poisson(1.0)), SettingsError, "Poisson"),
        (lambda: space_of(torch.tensor(1.0)), ShapeError, "no categories"),
        (lambda: gradients.DisARM().estimate(torch.zeros(3), torch.zeros(3)), SettingsError, "draws bits"),
        (lambda: space_of(bits(*[0.0] * 40)).enumerate(), SettingsError, "1e12"),
        (lambda: gradients.Enumeration(4).estimate(torch.zeros(5), torch.zeros(5)), SettingsError, "5 points"),
        (
            lambda: gradients.ScoreFunction().estimate(torch.zeros(3), lambda z: torch.zeros(7)),
            ShapeError,
            "one number",
        ),
        (lambda: gradients.ScoreFunction().estimate(dist.Bernoulli(0.5), squared), SettingsError, "requires_grad_"),
        (lambda: gradients.compare_estimators(torch.zeros(3), torch.zeros(3), []), SettingsError, "no estimators"),
        (lambda: gradients.gumbel_top_k(torch.zeros(3), 4), SettingsError, "at most 3"),
        (lambda: gradients.MovingAverage(1.0), SettingsError, "decay"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: space_of(dist.OneHotCategorical(probs=torch.tensor([0.0, 0.5, 0.5]))),
            DataError,
            "probability zero",
        ),
        (
            lambda: gradients.Autoregressive(lambda codes: torch.tensor([0.0, -torch.inf]), 2, 2).sample(),
            DataError,
            "logit of variable 0",
        ),
        (lambda: gradients.Enumeration().estimate(bits(0.0), torch.zeros(2)), SettingsError, "give a function"),
        (lambda: gradients.Enumeration().estimate(torch.zeros(3), torch.zeros(4)), ShapeError, "3 categories"),
        (lambda: gradients.gumbel_top_k(torch.tensor([0.0, -torch.inf]), 1), DataError, "finite"),
        (lambda: gradients.compare_estimators(torch.zeros(1), torch.zeros(1)), SettingsError, "one point only"),
    ],
)
def test_impossible_categories_and_misread_values_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_probabilities_that_torch_has_cached_are_no_reason_to_refuse():
    bit = dist.Bernoulli(logits=torch.tensor(40.0, dtype=DTYPE, requires_grad=True))
    bit.sample()
    assert bit.probs == 1 and space_of(bit).size == 2


def test_index_tensors_are_those_of_no_default_device():
    ratios._choices.cache_clear(), ratios._orders.cache_clear()
    log_p, rest = torch.tensor([0.5, 0.3]).log(), torch.tensor(0.2).log()
    with torch.device("meta"):
        ratios._choices(2, 1), ratios._orders(2, 1), ratios._orders(2, 0)
    torch.testing.assert_close(
        ratios.log_leave_one_out_ratios(log_p, rest).exp(), torch.tensor([1.1667, 1.3889]), rtol=1e-4, atol=0
    )
