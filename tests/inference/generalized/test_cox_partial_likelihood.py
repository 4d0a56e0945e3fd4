"""Cox's partial likelihood: its definition, two other implementations, ties, weights, batches, and data it refuses."""

import dataclasses
import itertools
import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from torch.func import grad, jacrev, vmap

from bayeskit.errors import CoherenceError, DataError, SettingsError, ShapeError
from bayeskit.inference.generalized import GibbsPosterior
from bayeskit.inference.generalized.losses._cox import CoxPartialLikelihood
from bayeskit.inference.generalized.losses._prediction import linear

TIES = ["efron", "breslow"]
BETA = torch.tensor([0.5, -1.0], dtype=torch.float64)

# Ten patients with two covariates: three events and a censoring at time 2, three events at time 4.
COVARIATES = torch.tensor(
    [[0.5, 1], [-1, 0], [1.5, 0], [0, 1], [2, 1], [-0.5, 0], [1, 1], [-1.5, 0], [0.25, 1], [0.75, 0]],
    dtype=torch.float64,
)
TIME = torch.tensor([4.0, 6, 2, 2, 2, 5, 4, 8, 7, 4], dtype=torch.float64)
EVENT = torch.tensor([1, 1, 1, 1, 0, 1, 1, 0, 0, 1])
TEN = (COVARIATES, TIME, EVENT)

# Computed by statsmodels 0.15.0 (PHReg, loglike at zero and at BETA, then params and llf); Efron's rule again by
# lifelines 0.30.3 (CoxPHFitter), with the same digits.
REFERENCE = {
    "breslow": (-12.927807282942032, -12.04144676916475, [0.93596046, -0.76428093], -11.466927575720607),
    "efron": (-12.331823850835734, -11.253181221532975, [1.11564359, -0.90935005], -10.372501116958732),
}


def sample(n=25, seed=0, last=6):
    """Return data with many ties, their times rounded, and covariates of two columns."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 2))
    time = np.ceil(rng.exponential(np.exp(-x @ [0.5, -1.0])) * 3).clip(max=last)
    event = ((rng.uniform(size=n) < 0.7) & (time < last)).astype(int)
    return torch.as_tensor(x), torch.as_tensor(time), torch.as_tensor(event)


def definition(scores, time, event, ties):
    """Return the loss from its definition, one event after the other."""
    loss = 0.0
    for t in sorted({t for t, e in zip(time, event, strict=True) if e}):
        risk = math.fsum(math.exp(s) for s, u in zip(scores, time, strict=True) if u >= t)
        fails = [s for s, u, e in zip(scores, time, event, strict=True) if u == t and e]
        tied = math.fsum(math.exp(s) for s in fails) if ties == "efron" else 0.0
        loss += sum(math.log(risk - tied * rank / len(fails)) - s for rank, s in enumerate(fails))
    return loss


def check_definition(loss, data):
    scores = (data[0] @ BETA).tolist()
    exact = definition(scores, data[1].tolist(), data[2].tolist(), loss.ties)
    return abs(float(loss.total(BETA, data)) - exact) < 1e-11


def test_three_data_by_hand():
    """Events at 1 and 3, one of three and then the last: with scores 0, 1, 2 the first contributes 1 - log(sum)."""
    covariates = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    data = (covariates, torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64), torch.tensor([1, 1, 0]))
    for ties in TIES:
        found = CoxPartialLikelihood(ties).total(torch.ones(1, dtype=torch.float64), data)
        assert abs(found - (math.log(1 + math.e + math.e**2) - 1)) < 1e-14


def test_two_tied_events_by_hand():
    """Scores 0 and log 2 fail together: Efron sees 3 and then half of it, Breslow 3 twice."""
    data = (torch.tensor([[0.0], [1.0]], dtype=torch.float64), torch.ones(2, dtype=torch.float64), torch.ones(2))
    beta = torch.full((1,), math.log(2), dtype=torch.float64)
    assert abs(CoxPartialLikelihood("efron").total(beta, data) - math.log(3 * 1.5 / 2)) < 1e-14
    assert abs(CoxPartialLikelihood("breslow").total(beta, data) - math.log(3 * 3 / 2)) < 1e-14


@pytest.mark.parametrize("n", [1, 2, 10, 400])
def test_all_tied_by_hand(n):
    """Equal hazards that fail together: one of n, one of n - 1, ... under Efron's rule, of n each under Breslow's."""
    data = (torch.zeros(n, 1, dtype=torch.float64), torch.ones(n, dtype=torch.float64), torch.ones(n))
    beta = torch.ones(1, dtype=torch.float64)
    assert CoxPartialLikelihood("efron").total(beta, data) == pytest.approx(math.lgamma(n + 1), abs=1e-14, rel=1e-13)
    assert CoxPartialLikelihood("breslow").total(beta, data) == pytest.approx(n * math.log(n), abs=1e-14, rel=1e-13)


@pytest.mark.parametrize("ties", TIES)
def test_two_other_implementations(ties):
    at_zero, at_beta, coefficients, largest = REFERENCE[ties]
    loss = CoxPartialLikelihood(ties)
    assert abs(loss.total(torch.zeros(2, dtype=torch.float64), TEN) + at_zero) < 1e-12
    assert abs(loss.total(BETA, TEN) + at_beta) < 1e-12
    found = torch.zeros(2, dtype=torch.float64)
    for _ in range(10):
        found = found - torch.linalg.solve(jacrev(grad(loss.total))(found, TEN), grad(loss.total)(found, TEN))
    assert np.abs(found.numpy() - coefficients).max() < 1e-8
    assert abs(loss.total(found, TEN) + largest) < 1e-11


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("seed", range(4))
def test_the_definition(ties, seed):
    assert check_definition(CoxPartialLikelihood(ties), sample(seed=seed))


@dataclasses.dataclass(frozen=True)
class LeavesAtOnce(CoxPartialLikelihood):
    """Who is censored when another fails is not at risk any more."""

    def total(self, parameter, data, weights=None):
        covariates, time, event = data
        return super().total(parameter, (covariates, time + 0.5 * event, event), weights)


@dataclasses.dataclass(frozen=True)
class EntersLate(CoxPartialLikelihood):
    """Time runs backwards."""

    def total(self, parameter, data, weights=None):
        covariates, time, event = data
        return super().total(parameter, (covariates, -time, event), weights)


@pytest.mark.parametrize("mutant", [LeavesAtOnce, EntersLate])
@pytest.mark.parametrize("ties", TIES)
def test_wrong_risk_sets_are_noticed(mutant, ties):
    assert not check_definition(mutant(ties), sample())


def test_other_ties_are_noticed():
    class Renamed(CoxPartialLikelihood):
        def total(self, parameter, data, weights=None):
            return CoxPartialLikelihood("breslow").total(parameter, data, weights)

    assert not check_definition(Renamed("efron"), sample())


def test_efron_lies_near_the_mean_over_orders():
    """The mean of the likelihood over the orders in which three tied data may have failed, for scores near one."""
    scores = [0.1, 0.0, -0.05, 0.02, -0.1, 0.0]
    time, event = [1.0, 1.0, 1.0, 2.0, 2.0, 2.0], [1, 1, 1, 0, 0, 0]
    orders = itertools.permutations([0.7, 0.8, 0.9])
    likelihoods = [math.exp(-definition(scores, [*o, *time[3:]], event, "efron")) for o in orders]
    exact = -math.log(sum(likelihoods) / 6)
    data = (
        torch.tensor(scores, dtype=torch.float64)[:, None],
        torch.tensor(time, dtype=torch.float64),
        torch.tensor(event),
    )
    off = {t: abs(CoxPartialLikelihood(t).total(torch.ones(1, dtype=torch.float64), data) - exact) for t in TIES}
    assert off["efron"] < 1e-3 and off["breslow"] > 0.1


@pytest.mark.parametrize("ties", TIES)
def test_whole_weights_equal_repeated_data(ties):
    data, loss = sample(), CoxPartialLikelihood(ties)
    counts = torch.as_tensor(np.random.default_rng(3).poisson(1.8, len(data[1])))
    assert int((counts == 0).sum()) > 2 and int((counts > 2).sum()) > 2
    repeated = tuple(x.repeat_interleave(counts, 0) for x in data)
    assert abs(loss.total(BETA, data, counts) - loss.total(BETA, repeated)) < 1e-11
    assert abs(loss.total(BETA, data, torch.ones(25, dtype=torch.float64)) - loss.total(BETA, data)) < 1e-12


def weighted_by_hand(scores, time, event, weights, ties):
    """Return the loss with any weights; Efron's product over ranks by Gamma functions as they stand."""
    loss = 0.0
    rows = list(zip(scores, time, event, weights, strict=True))
    for t in sorted({t for _, t, e, _ in rows if e}):
        risk = math.fsum(w * math.exp(s) for s, u, _, w in rows if u >= t)
        fails = [(s, w) for s, u, e, w in rows if u == t and e]
        m, tied = math.fsum(w for _, w in fails), math.fsum(w * math.exp(s) for s, w in fails)
        if ties == "efron":
            top = m * risk / tied
            loss += m * math.log(tied / m) + math.lgamma(top + 1) - math.lgamma(top - m + 1)
        else:
            loss += m * math.log(risk)
        loss -= math.fsum(w * s for s, w in fails)
    return loss


@pytest.mark.parametrize("ties", TIES)
def test_any_weights(ties):
    data = sample()
    weights = torch.as_tensor(np.random.default_rng(4).exponential(size=25))
    exact = weighted_by_hand((data[0] @ BETA).tolist(), data[1].tolist(), data[2].tolist(), weights.tolist(), ties)
    assert abs(CoxPartialLikelihood(ties).total(BETA, data, weights) - exact) < 1e-11


@pytest.mark.parametrize("ties", TIES)
def test_batches_equal_loops(ties):
    """Over parameters, weights and data sets, each alone and all together; gradients, too."""
    loss, rng = CoxPartialLikelihood(ties), np.random.default_rng(5)
    betas = torch.as_tensor(rng.standard_normal((3, 2)))
    weights = torch.as_tensor(rng.exponential(size=(3, 25)))
    weights[0, :4] = 0.0
    sets = tuple(torch.stack(x) for x in zip(*(sample(seed=s) for s in range(3)), strict=True))
    for batched in itertools.product([True, False], repeat=3):
        if not any(batched):
            continue
        given = [x if b else _first(x) for x, b in zip((betas, sets, weights), batched, strict=True)]
        dims = tuple(0 if b else None for b in batched)
        rows = [[_row(x, r) if b else x for x, b in zip(given, batched, strict=True)] for r in range(3)]
        for function in (loss.total, grad(loss.total)):
            found = vmap(function, dims)(*given)
            assert (found - torch.stack([function(*row) for row in rows])).abs().max() < 1e-11


def _row(x, r):
    return tuple(c[r] for c in x) if isinstance(x, tuple) else x[r]


def _first(x):
    return _row(x, 0)


@pytest.mark.parametrize("ties", TIES)
def test_what_does_not_matter(ties):
    """The order of data, the scale of time, a shift of all scores, and data of weight zero."""
    loss, data = CoxPartialLikelihood(ties), sample()
    value = loss.total(BETA, data)
    order = torch.randperm(25, generator=torch.Generator().manual_seed(0))
    assert abs(loss.total(BETA, tuple(x[order] for x in data)) - value) < 1e-11
    x, time, event = data
    assert abs(loss.total(BETA, (x, time.exp(), event)) - value) < 1e-11
    assert abs(loss.total(BETA, (x + 3.0, time.to(torch.int64), event.bool())) - value) < 1e-11
    weights = torch.ones(25, dtype=torch.float64)
    weights[::3] = 0.0
    kept = weights > 0
    assert abs(loss.total(BETA, data, weights) - loss.total(BETA, tuple(c[kept] for c in data))) < 1e-11


def differences(function, at, size=1e-5):
    steps = torch.eye(len(at), dtype=at.dtype) * size
    return torch.stack([(function(at + s) - function(at - s)) / (2 * size) for s in steps], -1)


@pytest.mark.parametrize("ties", TIES)
def test_derivatives_are_those_of_finite_differences(ties):
    loss, data = CoxPartialLikelihood(ties), sample()
    weights = torch.as_tensor(np.random.default_rng(6).exponential(size=25))
    slope = grad(loss.total)

    def of_weights(w):
        return loss.total(BETA, data, w)

    # Third derivatives are below 1e3, and central differences err by their 1e-10.
    assert (slope(BETA, data, weights) - differences(lambda b: loss.total(b, data, weights), BETA)).abs().max() < 1e-7
    curvature = jacrev(slope)(BETA, data, weights)
    assert (curvature - differences(lambda b: slope(b, data, weights), BETA)).abs().max() < 1e-7
    assert bool((torch.linalg.eigvalsh(curvature) > 0).all())
    assert (grad(of_weights)(weights + 0.1) - differences(of_weights, weights + 0.1)).abs().max() < 1e-7


def test_a_weight_of_zero_has_the_right_derivative():
    """Censored, it is at risk: each event before adds its share of the risk set."""
    data = (torch.zeros(4, 1, dtype=torch.float64), torch.arange(1.0, 5.0).double(), torch.tensor([1, 0, 1, 0]))
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    for ties in TIES:
        found = grad(lambda w, t=ties: CoxPartialLikelihood(t).total(torch.zeros(1).double(), data, w))(weights)
        assert abs(found[3] - (1 / 3 + 1 / 1)) < 1e-12 and found.isfinite().all()


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_far_apart(ties, dtype):
    """Nothing overflows: of scores a thousand apart one has all the hazard, and the loss is a sum of differences."""
    x, _, event = sample()
    rank = x[:, 0].argsort().argsort()
    time = x[:, 1].argsort().argsort()  # no ties
    data, loss = (rank[:, None].to(dtype), time.to(dtype), event), CoxPartialLikelihood(ties)
    beta = torch.tensor([1000.0], dtype=dtype)
    exact = sum(int(rank[time >= t].max() - r) for r, t, e in zip(rank, time, event, strict=True) if e)
    assert exact > 50 and loss.total(beta, data) == 1000 * exact
    # Hazards are exponentials of numbers up to 24,000, good to as many units of rounding; there is no curvature.
    rounding = 24_000 * torch.finfo(dtype).eps
    assert abs(grad(loss.total)(beta, data) - exact) < rounding * exact
    assert abs(jacrev(grad(loss.total))(beta, data)) < rounding * 24**2 * int(event.sum())
    # Who fails first has the highest score: along this direction the loss falls to zero, and to nothing below it.
    ordered = (-time[:, None].to(dtype), time.to(dtype), event)
    assert abs(loss.total(beta, ordered)) < 1e-12 and loss.total(beta / 1000, ordered) > 0.1


def test_another_predictor():
    def network(parameter, covariates):
        return torch.tanh(covariates @ parameter["inner"]) @ parameter["outer"]

    x, time, event = sample()
    generator = torch.Generator().manual_seed(0)
    parameter = {
        "inner": torch.randn(2, 3, dtype=torch.float64, generator=generator),
        "outer": torch.randn(3, dtype=torch.float64, generator=generator),
    }
    found = CoxPartialLikelihood(predict=network).total(parameter, (x, time, event))
    scores = network(parameter, x)[:, None]
    assert abs(found - CoxPartialLikelihood().total(torch.ones(1, dtype=torch.float64), (scores, time, event))) < 1e-12
    with pytest.raises(ShapeError, match=r"\(25, 1\)"):
        CoxPartialLikelihood(predict=lambda b, x: x[:, :1]).total(BETA, (x, time, event))


@pytest.mark.parametrize("ties", TIES)
def test_traced_as_a_target(ties):
    data, loss = sample(), CoxPartialLikelihood(ties)
    prior = dist.Normal(torch.zeros(2, dtype=torch.float64), 3.0)
    posterior = GibbsPosterior(prior, loss, data, weight=0.7, compile=False)
    u = torch.stack([BETA, -BETA, 0 * BETA])
    value, slope = posterior.value_and_grad(u)
    for row, v, g in zip(u, value, slope, strict=True):
        by_hand = (-row.square() / 18 - math.log(3 * math.sqrt(2 * math.pi))).sum() - 0.7 * loss.total(row, data)
        assert abs(v - by_hand) < 1e-10
        assert (g + row / 9 + 0.7 * grad(loss.total)(row, data)).abs().max() < 1e-10
    # Risk sets couple the data: a new part cannot be added to the loss of the old.
    with pytest.raises(CoherenceError, match="CoxPartialLikelihood"):
        posterior.update(data)


def test_data_without_a_partial_likelihood_are_refused():
    loss, (x, time, event) = CoxPartialLikelihood(), TEN
    prior = dist.Normal(torch.zeros(2, dtype=torch.float64), 3.0)
    with pytest.raises(DataError, match=r"all 10 data are censored, from datum 0 at time 4 on"):
        GibbsPosterior(prior, loss, (x, time, 0 * event), compile=False)
    with pytest.raises(DataError, match=r"time must be zero or more, but that of datum 3 is -2 \(2 such"):
        loss.check((x, torch.where((time == 2) & (x[:, 1] > 0), -time, time), event))
    with pytest.raises(DataError, match=r"event must be 1.*that of datum 0 is 2"):
        loss.check((x, time, 2 * event))
    with pytest.raises(DataError, match="datum 5 is 0.5"):
        loss.check((x, time, torch.where(time == 5, 0.5, event.double())))
    with pytest.raises(ShapeError, match="covariates, time, event"):
        loss.check((x, time))
    with pytest.raises(ShapeError, match="one tensor"):
        loss.total(BETA, x)
    with pytest.raises(ShapeError, match=r"event \(n,\)"):
        loss.check((x, time[:, None], event))
    with pytest.raises(ShapeError, match=r"covariates \(n, k\)"):
        loss.check((x[:, 0], time, event))
    with pytest.raises(ShapeError, match=r"weights must be \(10,\)"):
        loss.total(BETA, TEN, torch.ones(10, 1))
    with pytest.raises(SettingsError, match="'exact'"):
        CoxPartialLikelihood("exact")
    loss.check((x, 0 * time, event.bool()))


def test_it_is_not_bounded_and_no_sum():
    loss = CoxPartialLikelihood()
    assert not loss.bounded and loss.predict is linear and not hasattr(loss, "pointwise")
    far = loss.total(torch.tensor([1e6, 0.0], dtype=torch.float64), TEN)
    assert far > 1e6 and loss.total(torch.tensor([-1e6, 0.0], dtype=torch.float64), TEN) > 1e6
