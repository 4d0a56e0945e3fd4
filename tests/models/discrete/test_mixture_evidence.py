import math
from dataclasses import replace

import pytest
import torch

import bayeskit as bk
from bayeskit._draws import Draws
from bayeskit.errors import DataError, DrawsError, SettingsError, UnknownNameError
from bayeskit.inference.evidence import Evidence, bridge_sampling
from bayeskit.models.discrete.mixtures import _evidence as module
from bayeskit.models.discrete.mixtures._conjugate import exact_log_evidence, sample_exact_posterior
from bayeskit.models.discrete.mixtures._evidence import (
    TemperingBudget,
    compare_num_components,
    mixture_evidence,
    symmetrised_bridge,
)
from bayeskit.models.discrete.mixtures._gaussian_mixture import (
    GaussianMixture,
    MixturePrior,
    UnknownSizeMixture,
    galaxy_velocities,
)
from bayeskit.models.discrete.mixtures._labels import Labels

Y = torch.tensor([-3.1, -2.9, -2.4, -2.6, 0.1, 0.3, 0.2, 2.6, 3.0, 3.5], dtype=torch.float64)
TINY = TemperingBudget(num_particles=48, num_replicates=10, ess_threshold=0.7)
PRIOR = MixturePrior.conjugate(0.0, 0.05, 3.0, 0.3, 2.0)


@pytest.fixture(scope="module")
def mixture():
    return GaussianMixture(Y, 3, PRIOR)


@pytest.fixture(scope="module")
def labels(mixture):
    return Labels(bk.Target.from_pyro(mixture, compile=False), mixture.exchangeable)


@pytest.fixture(scope="module")
def draws(mixture, labels):
    """Independent draws from the posterior itself, as four chains."""
    target = labels.target
    values = sample_exact_posterior(mixture, 2400, seed=5)
    logs = {"mean": values["mean"], "share": values["share"].log(), "precision": values["precision"].log()}
    u = torch.cat([logs[site.name] for site in target.sites], -1).reshape(4, 600, -1)
    prior, likelihood = target.evaluate(u)
    return Draws(u, prior, likelihood, torch.ones(4, dtype=u.dtype), target=target)


@pytest.fixture(scope="module")
def one_mode(draws, labels):
    """The same draws as a sampler that never switches labels would have made them: means in ascending order."""
    u = labels.permute(draws.unconstrained, draws.values()["mean"].argsort(-1))
    return replace(draws, unconstrained=u)


@pytest.mark.calibration
def test_symmetrised_bridge_against_exact(mixture, labels, draws, limit):
    z = symmetrised_bridge(draws, labels, seed=1)
    assert z.trusted, z.warnings
    assert z.standard_error < 0.03
    assert abs(z.log_evidence - exact_log_evidence(mixture)) < limit() * z.standard_error


@pytest.mark.calibration
def test_one_mode_is_as_good_as_all(mixture, labels, one_mode, limit):
    z = symmetrised_bridge(one_mode, labels, seed=1)
    assert z.trusted, z.warnings
    assert abs(z.log_evidence - exact_log_evidence(mixture)) < limit() * z.standard_error


@pytest.mark.calibration
def test_what_goes_wrong_without(mixture, labels, one_mode, limit, monkeypatch):
    """In one mode a plain bridge misses log K!, and nothing in its diagnostics says so."""
    truth, lost = exact_log_evidence(mixture), labels.log_num_permutations
    assert lost == pytest.approx(math.log(6), abs=1e-12)
    plain = bridge_sampling(labels.target, one_mode, seed=1)
    assert abs(plain.log_evidence - truth + lost) < limit(2) * plain.standard_error
    # The mutation: the same proposal, not averaged over labellings.
    monkeypatch.setattr(module.SymmetricProposal, "log_prob", lambda self, u: self._log_prob(u))
    z = symmetrised_bridge(one_mode, labels, seed=1)
    assert abs(z.log_evidence - truth + lost) < limit(2) * z.standard_error < lost


@pytest.mark.long
@pytest.mark.parametrize(("count", "brute_force", "published"), [(2, -239.76, -240.464), (3, -226.81, -228.620)])
def test_the_galaxies_of_chib(count, brute_force, published, limit):
    """Equal variances: importance sampling without chains (-226.808 +- .007), and what Chib (1995) got of one mode."""
    prior = MixturePrior.independent(20.0, 10.0, 3.0, 20.0)
    mixture = GaussianMixture(galaxy_velocities(), count, prior, equal_scales=True)
    target = bk.Target.from_pyro(mixture, compile=False)
    start = target.sample_prior(2000, seed=1)
    start = start[target.log_density(start).argmax()]
    draws = bk.sample(target, 4, 200, 500, initial=start, progress=False)
    z = symmetrised_bridge(draws, Labels(target, mixture.exchangeable), num_parts=1)
    assert z.diagnostics["labellings"] == 1
    assert z.standard_error < 0.05
    assert abs(z.log_evidence - brute_force) < limit(4) * math.hypot(z.standard_error, 0.01)
    plain = bridge_sampling(target, draws)
    assert abs(plain.log_evidence - published) < limit(4) * math.hypot(plain.standard_error, 0.01)


@pytest.mark.calibration
def test_modes_that_are_not_labels_are_noticed(labels, one_mode):
    """Chains that stay in different modes, which no permutation joins, make the estimate untrusted."""
    u = one_mode.unconstrained.clone()
    u[:2, :, labels.coordinates[0]] += 2.0
    prior, likelihood = labels.target.evaluate(u)
    apart = replace(one_mode, unconstrained=u, log_prior=prior, log_likelihood=likelihood)
    z = symmetrised_bridge(apart, labels)
    assert not z.trusted
    assert any("chains disagree" in warning for warning in z.warnings)


@pytest.mark.calibration
def test_tempering_and_bridge_agree(limit):
    few = GaussianMixture(Y[::3], 2, PRIOR)
    target = bk.Target.from_pyro(few, compile=False)
    z = mixture_evidence(target, few.exchangeable, **vars(TINY), progress=False)
    for name in ("smc", "symmetrised_bridge"):
        error = z.diagnostics[f"{name}.standard_error"]
        assert error < 0.3
        assert abs(z.diagnostics[f"{name}.log_evidence"] - exact_log_evidence(few)) < limit(2) * error
    assert z.seconds > 0


def test_contradictions_are_reported():
    tempered = Evidence("smc", -20.0, 0.05, 100)
    agreeing, lower = (Evidence("symmetrised_bridge", value, 0.02, 120) for value in (-20.03, -20.7))
    good = module._reconciled([tempered, agreeing])
    assert good.trusted and good.method == "symmetrised_bridge" and good.num_evaluations == 120
    bad = module._reconciled([tempered, lower])
    assert not bad.trusted
    assert "smc and symmetrised_bridge differ by 0.70 nats" in bad.warnings[0]
    doubtful = Evidence("symmetrised_bridge", -20.03, 0.001, 120, ("chains disagree",))
    assert module._reconciled([tempered, doubtful]).method == "smc"
    # Where neither is trusted, remedies are those of the run that feeds both.
    neither = module._reconciled([replace(tempered, warnings=("replicates disagree",)), doubtful])
    assert neither.method == "smc" and neither.warnings == ("replicates disagree",)


def test_number_of_components(monkeypatch):
    """From exact evidences as the estimates: what is asked of whom, and what is made of the answers."""
    asked = []

    def exactly(target, exchangeable, **settings):
        count = 1 if not exchangeable else 2
        asked.append((count, settings))
        return Evidence("exact", exact_log_evidence(GaussianMixture(Y, count, PRIOR)), 1e-6, 1)

    monkeypatch.setattr(module, "mixture_evidence", exactly)
    comparison = compare_num_components(
        Y, [1, 2], PRIOR, prior_probabilities={1: 3.0, 2: 1.0}, budget=TINY, seed=4, progress=False
    )
    one, two = (exact_log_evidence(GaussianMixture(Y, k, PRIOR)) for k in (1, 2))
    assert comparison.prior_probabilities == {"1": 0.75, "2": 0.25}
    p = comparison.posterior_probabilities
    assert p["2"][0] == pytest.approx(1 / (1 + 3 * math.exp(one - two)), abs=1e-12)
    assert [count for count, _ in asked] == [1, 2]
    seeds = {settings.pop("seed") for _, settings in asked}
    assert len(seeds) == 2  # errors of Bayes factors take the estimates for independent
    assert all(settings == vars(TINY) | {"progress": False} for _, settings in asked)


def test_too_few_particles_for_a_bridge(limit):
    """The tempered estimate, which has cost the most, is not thrown away."""
    dim, one = 6, torch.tensor(1.0, dtype=torch.float64)
    normal, wider = torch.distributions.Normal(0 * one, one), torch.distributions.Normal(0 * one, 2**0.5)
    target = bk.Target.from_functions(
        lambda u: normal.log_prob(u).sum(-1),
        lambda u: normal.log_prob(u - 1).sum(-1),
        dim=dim,
        sample_prior=lambda n, generator: torch.randn(n, dim, generator=generator, dtype=torch.float64),
    )
    z = mixture_evidence(target, num_particles=8, num_replicates=3, ess_threshold=0.5, progress=False)
    assert z.method == "smc" and not z.trusted
    assert any("does not check this estimate (1 chains of 16 draws are too few" in text for text in z.warnings)
    assert abs(z.log_evidence - dim * float(wider.log_prob(one))) < limit() * z.standard_error
    with pytest.raises(SettingsError, match="num_particles must be at least 8"):
        mixture_evidence(target, num_particles=7)


def test_what_to_do_about_doubts(monkeypatch):
    doubtful = Evidence("smc", -20.0, 0.5, 100, ("replicates disagree: use more num_particles",))
    monkeypatch.setattr(module, "mixture_evidence", lambda *_, **__: doubtful)
    comparison = compare_num_components(Y.numpy(), [1, 2], progress=False)
    assert "TemperingBudget(num_particles=64, num_replicates=32, ess_threshold=0.9)" in comparison.warnings[0]
    assert comparison["1"].warnings[0] == doubtful.warnings[0]
    assert TINY.larger() == TemperingBudget(64, 20, 0.85)


@pytest.mark.calibration
def test_one_run_on_an_unknown_number(limit):
    few = Y[::3]
    exact = [exact_log_evidence(GaussianMixture(few, k, PRIOR)) for k in (1, 2)]
    model = UnknownSizeMixture(GaussianMixture(few, 2, PRIOR), torch.tensor([0.75, 0.25]))
    target = bk.Target.from_pyro(model, compile=False)
    z = mixture_evidence(target, **vars(TINY), progress=False)
    total = math.log(0.75 * math.exp(exact[0]) + 0.25 * math.exp(exact[1]))
    for name in ("smc", "bridge_sampling"):
        error = z.diagnostics[f"{name}.standard_error"]
        assert error < 0.3
        assert abs(z.diagnostics[f"{name}.log_evidence"] - total) < limit(2) * error


@pytest.mark.calibration
def test_bad_input(labels, draws):
    with pytest.raises(SettingsError, match="each once, such as range.1, 4., not .2, 2."):
        compare_num_components(Y, [2, 2])
    with pytest.raises(SettingsError, match="each of .1, 2. a nonnegative number"):
        compare_num_components(Y, [1, 2], prior_probabilities={1: 1.0})
    with pytest.raises(SettingsError, match="each of .1, 2. a nonnegative number, not .0.5, 0.5"):
        compare_num_components(Y, [1, 2], prior_probabilities=[0.5, 0.5])
    for weight in (math.inf, math.nan, -1.0):
        with pytest.raises(SettingsError, match="finite and nonnegative, one above zero"):
            compare_num_components(Y, [1, 2], prior_probabilities={1: weight, 2: 1.0})
    with pytest.raises(SettingsError, match="such as range.1, 4., not .3."):
        compare_num_components(Y, 3)
    for budget in ({"num_particles": 64}, (32, 8)):
        with pytest.raises(SettingsError, match="budget must be a TemperingBudget such as"):
            compare_num_components(Y, [1, 2], budget=budget)
    for y in ([1.0, math.nan], [1.0, math.inf], []):
        with pytest.raises(DataError, match="NaN or infinite|no observations"):
            compare_num_components(y, [1, 2])
    with pytest.raises(UnknownNameError, match="no site 'weights'"):
        mixture_evidence(labels.target, ("weights",))
    short = replace(
        draws,
        **{name: getattr(draws, name)[:, :10] for name in ("unconstrained", "log_prior", "log_likelihood")},
        sample_stats={},
    )
    with pytest.raises(DrawsError, match="chains of 10 draws are too few"):
        symmetrised_bridge(short, labels)
    with pytest.raises(SettingsError, match="num_parts must be at least 1"):
        symmetrised_bridge(draws, labels, num_parts=0)
