"""An estimator says the same, whoever asks for it: by itself, in a comparison, and whatever else was selected."""

import math
import warnings
from dataclasses import replace
from inspect import signature

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import ConstantsWarning, SettingsError
from bayeskit.inference import evidence
from bayeskit.inference.evidence import METHODS, Budget, ConjugateBlock, Evidence, Part
from bayeskit.inference.evidence._judging._diagnostics import Diagnostics
from bayeskit.inference.evidence._shared_runs import SharedRuns
from bayeskit.inference.samplers import sample_nested, sample_smc

F64 = torch.float64
COUNTS = torch.tensor([[2.0, 1.0, 0.0, 3.0, 2.0, 1.0], [5.0, 7.0, 4.0, 6.0, 9.0, 5.0]], dtype=F64)
BUDGET = Budget(
    4,
    100,
    100,
    num_temperatures=8,
    ladder_chains=4,
    ladder_warmup=60,
    ladder_samples=60,
    num_reference_temperatures=4,
    num_particles=16,
    num_replicates=8,
    num_live=40,
)
SEED = 3


def counts():
    few = pyro.sample("few", dist.Gamma(torch.tensor(2.0, dtype=F64), 1.0))
    many = pyro.sample("many", dist.Gamma(torch.tensor(3.0, dtype=F64), 0.5))
    with pyro.plate("data", COUNTS.shape[1]):
        pyro.sample("y", dist.Poisson(few), obs=COUNTS[0])
        pyro.sample("z", dist.Poisson(many), obs=COUNTS[1])


BLOCKS = (
    ConjugateBlock("few", lambda others: _gamma(others["many"], 2.0 + COUNTS[0].sum(), 7.0)),
    ConjugateBlock("many", lambda others: _gamma(others["few"], 3.0 + COUNTS[1].sum(), 6.5)),
)


def _gamma(like, concentration, rate):
    return torch.distributions.Gamma(concentration.expand(like.shape), torch.full_like(like, rate))


ARGUMENTS = {
    Part.MODE: "mode",
    Part.POSITIVE_MODE: "mode",
    Part.MEAN_FIELD: "mean_field",
    Part.POSTERIOR: "draws",
    Part.FLOW: "flow",
    Part.LADDER: "ladder",
}


def _with_its_parts(function, target, m):
    """How a user would call a method that works on parts alone."""
    parts = {ARGUMENTS[part]: m.part(part) for part in METHODS[function.__name__].needs & set(ARGUMENTS)}
    return function(target, **parts, **({"seed": SEED} if "seed" in signature(function).parameters else {}))


LADDER = {"num_chains": 4, "num_warmup": 60, "num_samples": 60}
POPULATIONS = {"num_particles": 32, "num_replicates": 16}
#: How a user would call those that make runs of their own, with the same settings.
DIRECT = {
    "generalised_stepping_stone": lambda function, target, m: function(
        target, m.draws, num_temperatures=4, seed=SEED, **LADDER
    ),
    "thermodynamic_integration": lambda function, target, m: function(target, ladder=m.ladder, seed=SEED, **LADDER),
    "smc": lambda function, target, m: function(
        target, sample_smc(target, 16, 8, seed=SEED, progress=False), seed=SEED
    ),
    "adaptive_smc": lambda function, target, m: function(target, seed=SEED, **POPULATIONS),
    "nested_sampling": lambda function, target, m: function(target, sample_nested(target, 40, seed=SEED), seed=SEED),
    "prequential": lambda function, target, m: function(target, seed=SEED, **POPULATIONS),
    "chib": lambda function, target, m: function(target, BLOCKS, seed=SEED, progress=False),
}


def _compared(names):
    target = bk.Target.from_pyro(counts)
    return evidence.compare(target, names, seed=SEED, budget=BUDGET, blocks=BLOCKS, progress=False)


def _row(table, name):
    return table.results[name] if name in table.results else table.scores[name]


def _numbers(z):
    """All but the time and the evaluations of the judgement, which knows what others found; every NaN is the same."""
    facts = vars(replace(z, seconds=0.0)) | {"num_evaluations": None}
    if "diagnostics" in facts:  # the largest missed share is that over all modes that are known
        facts["diagnostics"] = {name: x for name, x in facts["diagnostics"].items() if name != "missed_share"}
    return str({name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in facts.items()})


@pytest.fixture(scope="module")
def together():
    return _compared("all")


@pytest.fixture(scope="module")
def runs():
    return SharedRuns(bk.Target.from_pyro(counts), BUDGET, seed=SEED)


@pytest.mark.long
def test_every_method_is_here(together):
    assert set(together.results) | set(together.scores) == set(METHODS) and not together.refused
    assert set(DIRECT) == {name for name, method in METHODS.items() if method.has_own_run}


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_who_asks_makes_no_difference(name, together, runs):
    row = _row(together, name)
    assert _numbers(_row(_compared([name]), name)) == _numbers(row)
    direct = DIRECT.get(name, _with_its_parts)(getattr(evidence, name), runs.target, runs)
    assert _numbers(direct) == _numbers(row)
    assert direct.trusted == row.trusted and direct.seconds > 0


@pytest.mark.long
def test_seconds_are_those_of_the_estimate_and_of_the_draws_it_was_given(runs):
    draws, ladder = replace(runs.draws, seconds=1000.0), runs.ladder
    slow = replace(ladder, draws=replace(ladder.draws, seconds=2000.0))
    assert 1000 < evidence.bridge_sampling(runs.target, draws).seconds < 2000
    assert 2000 < evidence.path_sampling(runs.target, slow).seconds < 3000
    z = evidence.laplace(runs.target, draws=draws)
    assert 1000 < z.seconds < 2000


@pytest.mark.long
def test_draws_that_the_caller_gives_are_looked_at(runs):
    """As in a direct call; those that were made for other methods are not."""
    table = evidence.compare(runs.target, ["laplace"], seed=SEED, draws=runs.draws, progress=False)
    direct = evidence.laplace(runs.target, draws=runs.draws, seed=SEED)
    assert _numbers(table["laplace"]) == _numbers(direct)


def masked():
    pyro.sample("few", dist.Gamma(torch.tensor(2.0, dtype=F64), 1.0).mask(False))
    many = pyro.sample("many", dist.Gamma(torch.tensor(3.0, dtype=F64), 0.5))
    with pyro.plate("data", COUNTS.shape[1]):
        pyro.sample("z", dist.Poisson(many), obs=COUNTS[1])


SCORES = {name for name, method in METHODS.items() if method.kind == "score"}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(METHODS) - SCORES))
def test_improper_priors_are_refused_by_each(name, runs):
    """Before the runs of another target are looked at."""
    with pytest.raises(SettingsError, match="the site 'few' is improper, so no marginal likelihood exists"):
        target = bk.Target.from_pyro(masked)
        getattr(evidence, name)(target, *_runs(name, runs))


def _runs(name, runs):
    if "posterior" in METHODS[name].needs:
        return (runs.draws,)
    return (runs.ladder,) if name in ("path_sampling", "modified_path_sampling", "stepping_stone") else ()


def _function(log_prior, dim=2):
    return bk.Target.from_functions(log_prior, lambda u: -0.5 * (u - 1).square().sum(-1), dim)


def test_functions_that_are_flat_are_refused_as_a_comparison_refuses_them():
    flat = _function(lambda u: 0.0 * u[..., 0] - 0.5 * u[..., 1].square())
    with pytest.raises(SettingsError, match="improper") as compared:
        evidence.compare(flat, ["laplace"], progress=False)
    with pytest.raises(SettingsError) as direct:
        evidence.laplace(flat)
    assert str(direct.value) == str(compared.value)


def test_constants_are_warned_of_once_a_call_and_from_where_it_is():
    target = _function(lambda u: -0.5 * u.square().sum(-1))
    calls = (
        lambda: evidence.laplace(target),
        lambda: evidence.compare(target, ["laplace", "laplace_importance_sampling"], progress=False),
    )
    heard = []
    for call in calls:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        heard.append([(str(w.message), w.filename) for w in caught if w.category is ConstantsWarning])
    assert heard[0] == heard[1] and len(heard[0]) == 1
    assert "the prior integrates to 6." in heard[0][0][0] and heard[0][0][1] == __file__


def test_a_target_is_checked_once(monkeypatch):
    from bayeskit.inference.evidence._judging import _diagnostics as diagnostics

    asked = []
    check = diagnostics.check_constants
    monkeypatch.setattr(diagnostics, "check_constants", lambda *a, **k: asked.append(1) or check(*a, **k))
    target = bk.Target.from_pyro(counts)
    for _ in range(2):
        evidence.laplace(target)
        Diagnostics(target).check_target()
    assert len(asked) == 1


def test_what_is_no_target_is_refused():
    for function in (evidence.laplace, evidence.naive_monte_carlo, evidence.nested_sampling, evidence.compare):
        with pytest.raises(SettingsError, match="Target"):
            function(7)


@pytest.mark.long
def test_the_estimate_of_an_estimator_within_another_is_not_judged_again(runs):
    """The ladder from a reference is one of a target of its own, of whose prior nobody should be warned."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        z = evidence.generalised_stepping_stone(runs.target, runs.draws, num_temperatures=4, **LADDER)
    assert isinstance(z, Evidence) and math.isfinite(z.log_evidence)
