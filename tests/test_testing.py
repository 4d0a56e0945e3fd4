"""The contracts that are shipped: what is ours passes them, and what is wrong does not."""

from dataclasses import replace

import pytest
import torch

from bayeskit.inference.evidence import METHODS, Evidence, Part, estimator
from bayeskit.inference.samplers import HMC, NUTS
from bayeskit.models.phylogenetics import GTR, HKY85, JC69
from bayeskit.models.phylogenetics.substitution import K80
from bayeskit.testing import EstimatorContract, KernelContract, SubstitutionModelContract


class TestBridgeSampling(EstimatorContract):
    method = "bridge_sampling"


class TestSteppingStone(EstimatorContract):
    method = "stepping_stone"


class TestLaplaceImportanceSampling(EstimatorContract):
    method = "laplace_importance_sampling"


class TestSequentialMonteCarlo(EstimatorContract):
    method = "adaptive_smc"


class TestPredictiveScore(EstimatorContract):
    method = "conditional_predictive_ordinates"


class TestHMC(KernelContract):
    kernel = staticmethod(lambda: HMC(step_size=0.5))


class TestNUTS(KernelContract):
    kernel = staticmethod(lambda: NUTS(step_size=0.5))
    num_steps = 5


class TestJC69(SubstitutionModelContract):
    model = staticmethod(JC69)


class TestK80(SubstitutionModelContract):
    model = staticmethod(lambda: K80(3.0))


class TestHKY85(SubstitutionModelContract):
    model = staticmethod(lambda: HKY85(2.0, [0.1, 0.2, 0.3, 0.4]))


class TestGTR(SubstitutionModelContract):
    model = staticmethod(lambda: GTR([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.1, 0.2, 0.3, 0.4]))


@pytest.fixture
def wrong_estimator():
    @estimator(Part.POSTERIOR)
    def largest_likelihood(target, draws, *, seed=0):
        value = float(draws.log_likelihood.max()) + torch.rand(()).item()
        return Evidence("largest_likelihood", value, 0.01, 1)

    yield largest_likelihood
    del METHODS["largest_likelihood"]


def test_mutation_a_wrong_estimator_fails(wrong_estimator):
    contract = type("Wrong", (EstimatorContract,), {"method": "largest_likelihood"})()
    contract.test_it_is_registered_under_the_name_of_its_result()
    with pytest.raises(AssertionError, match="beta_binomial"):
        contract.test_it_is_right_or_says_that_it_is_not()
    with pytest.raises(AssertionError):
        contract.test_a_seed_fixes_the_number()


def test_mutation_an_estimator_that_never_trusts_itself_fails(monkeypatch):
    contract = type("Timid", (EstimatorContract,), {"method": "bridge_sampling"})()
    estimate = contract.estimate
    monkeypatch.setattr(
        contract, "estimate", lambda *given, **named: replace(estimate(*given, **named), warnings=("no",))
    )
    with pytest.raises(AssertionError, match="trusts itself on no case"):
        contract.test_it_is_right_or_says_that_it_is_not()


class Drifting:
    """A kernel that takes every proposal."""

    def init(self, target, position):
        return HMC(step_size=0.5).init(target, position)

    def step(self, target, state, *, generator):
        noise = torch.randn(state.position.shape, generator=generator, dtype=state.position.dtype)
        return state._replace(position=state.position + 0.1 * noise + state.position.mean(0)), None


def test_mutation_a_wrong_kernel_fails():
    contract = type("Wrong", (KernelContract,), {"kernel": staticmethod(Drifting)})()
    with pytest.raises(AssertionError, match="errors off"):
        contract.test_it_keeps_its_target()
    contract.test_a_generator_fixes_the_draws()


class Faster(HKY85):
    """A model of rate two."""

    def rate_matrix(self, like):
        return 2 * super().rate_matrix(like)


def test_mutation_a_wrong_substitution_model_fails():
    model = staticmethod(lambda: Faster(2.0, [0.1, 0.2, 0.3, 0.4]))
    contract = type("Wrong", (SubstitutionModelContract,), {"model": model})()
    contract.test_rows_are_probabilities()
    with pytest.raises(AssertionError):
        contract.test_it_is_a_process()
    with pytest.raises(AssertionError):
        contract.test_it_is_reversible_at_one_substitution_a_unit_of_time()
