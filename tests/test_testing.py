"""The contracts that are shipped: what is ours passes them, and what is wrong does not."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bayeskit.inference import gradients
from bayeskit.inference.evidence import METHODS, Evidence, Part, estimator
from bayeskit.inference.generalized import losses
from bayeskit.inference.objectives import ELBO, IWAE, STL, DReG, Renyi
from bayeskit.inference.samplers import HMC, NUTS
from bayeskit.models.phylogenetics._model_names import SUBSTITUTION_MODELS
from bayeskit.models.phylogenetics._substitution import HKY85
from bayeskit.testing import (
    EstimatorContract,
    GradientEstimatorContract,
    KernelContract,
    LossContract,
    ObjectiveContract,
    SubstitutionModelContract,
    WideNetworkContract,
)


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


def contract_of(name):
    """The contract of a substitution model, with unequal values for all parameters."""

    def model():
        made = SUBSTITUTION_MODELS[name]()
        sizes = {given: prior.event_shape.numel() for given, prior in made.priors(torch.zeros(())).items()}
        values = {
            given: torch.arange(2.0, 2.0 + size, dtype=torch.float64) * (place + 1.0)
            for place, (given, size) in enumerate(sizes.items())
        }
        for given, value in values.items():
            if math.isfinite(upper := made.parameters[given].upper):
                values[given] = upper * value / (1 + value)
        return SUBSTITUTION_MODELS[name](
            **{given: value.item() if len(value) == 1 else value for given, value in values.items()}
        )

    return type(f"Test{name}", (SubstitutionModelContract,), {"model": staticmethod(model)})


globals().update({f"Test{name}": contract_of(name) for name in SUBSTITUTION_MODELS})


class TestLeaveOneOut(GradientEstimatorContract):
    estimator = staticmethod(lambda: gradients.LeaveOneOut(num_samples=4))


class TestUnorderedSet(GradientEstimatorContract):
    estimator = staticmethod(lambda: gradients.UnorderedSet(k=3))


class TestRaoBlackwell(GradientEstimatorContract):
    estimator = staticmethod(lambda: gradients.RaoBlackwell(k=2))


class TestBitsByARM(GradientEstimatorContract):
    estimator = staticmethod(lambda: gradients.ARM())
    distribution = staticmethod(lambda logits: torch.distributions.Independent(
        torch.distributions.Bernoulli(logits=logits), 1))  # fmt: skip


REAL = torch.tensor([-1.0, 0.0, 0.5, 1.0, 3.0], dtype=torch.float64)
SCALARS = torch.tensor([-0.31, 0.22, 1.43], dtype=torch.float64)


class TestAbsolute(LossContract):
    loss = staticmethod(losses.Absolute)
    data = staticmethod(lambda: REAL)
    parameters = staticmethod(lambda: SCALARS)


class TestPinball(TestAbsolute):
    loss = staticmethod(lambda: losses.Pinball(0.25))


class TestHalfSquared(TestAbsolute):
    loss = staticmethod(losses.HalfSquared)


class TestKernelStein(TestAbsolute):
    loss = staticmethod(lambda: losses.KernelSteinDiscrepancy(lambda mean, x: mean - x))
    data_sets_its_scale = False


class TestELBO(ObjectiveContract):
    objective = staticmethod(lambda: ELBO(num_particles=4))


class TestIWAE(ObjectiveContract):
    objective = staticmethod(lambda: IWAE(num_particles=4))


class TestSTL(ObjectiveContract):
    objective = staticmethod(lambda: STL(num_particles=4))


class TestDReG(ObjectiveContract):
    objective = staticmethod(lambda: DReG(num_particles=4))


class TestRenyi(ObjectiveContract):
    objective = staticmethod(lambda: Renyi(0.5, num_particles=4))


class TestDenseNetwork(WideNetworkContract):
    module = staticmethod(
        lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    )
    x = staticmethod(lambda: torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [-1.0, 2, 1]], dtype=torch.float64))


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


class Halved(gradients.LeaveOneOut):
    """Half of the gradient."""

    def surrogate(self, distribution, f, generator=None):
        return 0.5 * super().surrogate(distribution, f, generator)


def test_mutation_a_biased_gradient_estimator_fails():
    contract = type("Wrong", (GradientEstimatorContract,), {"estimator": staticmethod(lambda: Halved(num_samples=4))})()
    contract.test_a_seed_fixes_the_estimate()
    with pytest.raises(AssertionError, match="standard errors off"):
        contract.test_its_mean_is_the_gradient()


class Unweighted(losses.HalfSquared):
    """A loss that looks at the first datum twice, and not at weights."""

    def total(self, parameter, data, weights=None):
        return super().total(parameter, data) + (data[0] - parameter) ** 2


def test_mutation_a_wrong_loss_fails():
    contract = type("Wrong", (TestAbsolute,), {"loss": staticmethod(Unweighted)})()
    contract.test_the_gradient_is_the_derivative()
    for test in (contract.test_weights_are_repeated_data, contract.test_the_order_of_the_data_does_not_matter):
        with pytest.raises(AssertionError):
            test()


class TooLow(ELBO):
    """A loss that is no bound."""

    def differentiable_loss(self, *args, **kwargs):
        return super().differentiable_loss(*args, **kwargs) * 0.5


def test_mutation_a_wrong_objective_fails():
    contract = type("Wrong", (ObjectiveContract,), {"objective": staticmethod(lambda: TooLow(num_particles=4))})()
    contract.test_the_seed_of_torch_fixes_the_loss()
    for test in (contract.test_it_is_exact_at_the_posterior, contract.test_it_is_a_lower_bound):
        with pytest.raises(AssertionError):
            test()


class WrongKernel(TestDenseNetwork):
    """The kernel of another variance."""

    def _kernel(self):
        right = super()._kernel()
        wrong = right.with_variances(weight=2.2)
        return SimpleNamespace(nngp=wrong.nngp, nngp_diagonal=wrong.nngp_diagonal, network=right.network)


def test_mutation_a_wrong_wide_network_fails():
    with pytest.raises(AssertionError):
        WrongKernel().test_finite_networks_have_them_on_average()
