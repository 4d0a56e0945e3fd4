import math

import pytest
from scipy.integrate import quad
from scipy.stats import beta as beta_distribution
from scipy.stats import binom

from bayeskit.errors import DataError, SettingsError
from bayeskit.exact import beta_binomial


def test_evidence_under_the_uniform_prior_is_one_in_eleven() -> None:
    assert beta_binomial().log_evidence == pytest.approx(-math.log(11.0), rel=1e-14)
    assert beta_binomial().log_evidence == pytest.approx(-2.3978952728, abs=5e-11)


@pytest.mark.parametrize(
    ("successes", "trials", "alpha", "beta"), [(2, 10, 1.0, 1.0), (0, 5, 2.0, 3.0), (17, 17, 1.5, 4.0)]
)
def test_evidence_and_moments_agree_with_quadrature(successes, trials, alpha, beta) -> None:
    case = beta_binomial(successes, trials, alpha=alpha, beta=beta)

    def moment(power: int) -> float:
        def integrand(p: float) -> float:
            return p**power * binom.pmf(successes, trials, p) * beta_distribution.pdf(p, alpha, beta)

        return quad(integrand, 0.0, 1.0, epsabs=0.0, epsrel=1e-12)[0]

    evidence, mean = moment(0), moment(1) / moment(0)
    assert case.log_evidence == pytest.approx(math.log(evidence), abs=1e-11)
    assert case.posterior_mean["p"].item() == pytest.approx(mean, rel=1e-10)
    assert case.posterior_covariance["p"].item() == pytest.approx(moment(2) / evidence - mean**2, rel=1e-8)


def test_evidences_of_all_outcomes_sum_to_one() -> None:
    total = sum(math.exp(beta_binomial(k, 9, alpha=0.7, beta=2.5).log_evidence) for k in range(10))
    assert total == pytest.approx(1.0, rel=1e-13)


@pytest.mark.parametrize(("successes", "trials"), [(-1, 10), (11, 10), (0, 0), (2.5, 10)])
def test_impossible_counts_are_refused(successes, trials) -> None:
    with pytest.raises(DataError, match=f"successes is {successes}"):
        beta_binomial(successes, trials)


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_a_prior_parameter_must_be_positive(name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        beta_binomial(**{name: 0.0})
