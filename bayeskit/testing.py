"""Contracts for pytest: tests that a third party's algorithms and models have to pass, as ours do.

Derive a class whose name begins with ``Test`` and say what is tested; pytest then runs every test of the contract.
Tolerances follow from Monte Carlo errors at a failure rate of 1e-5 a test.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pyro
import torch
from pyro import distributions as dist
from scipy.stats import norm
from torch import Tensor, nn

from bayeskit import exact
from bayeskit._core.statistics import effective_sample_size
from bayeskit._logdensity.target import Target
from bayeskit.errors import SamplingWarning, SettingsError
from bayeskit.inference import evidence
from bayeskit.inference.evidence import METHODS, Budget, Evidence, PredictiveScore
from bayeskit.inference.generalized.losses import Loss
from bayeskit.inference.gradients import GradientEstimator
from bayeskit.inference.gradients._space import space_of
from bayeskit.inference.objectives import Objective
from bayeskit.models.phylogenetics._substitution import SubstitutionModel
from bayeskit.models.wide_networks import InfiniteWidth, infinite_width

__all__ = [
    "EstimatorContract",
    "GradientEstimatorContract",
    "KernelContract",
    "LossContract",
    "ObjectiveContract",
    "SubstitutionModelContract",
    "WideNetworkContract",
]

_FAILURE_RATE = 1e-5


def _limit(comparisons: int = 1) -> float:
    """Return the largest acceptable abs(z) among some comparisons."""
    return float(norm.isf(_FAILURE_RATE / (2 * comparisons)))


def _globals() -> tuple[list[int], torch.dtype, int, bool]:
    """Return the random stream, the default dtype, the number of threads and whether gradients are on."""
    stream = torch.get_rng_state().tolist()
    return stream, torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()


def _improper() -> Target:
    return Target.from_functions(lambda u: 0.0 * u[..., 0], lambda u: -0.5 * u.square().sum(-1), 2)


class EstimatorContract:
    """What an evidence estimator promises, whoever calls it.

    Attributes
    ----------
    method : str
        Its name in the registry, where :func:`~bayeskit.inference.evidence.estimator` puts it.
    cases : tuple of str
        Exact cases that it applies to.
    budget : Budget
        Of the runs that it works on.

    Examples
    --------
    >>> from bayeskit.testing import EstimatorContract
    >>> class TestBridge(EstimatorContract):
    ...     method = "bridge_sampling"
    >>> TestBridge().test_it_is_right_or_says_that_it_is_not()
    """

    method: ClassVar[str]
    cases: ClassVar[tuple[str, ...]] = ("beta_binomial", "linreg10")
    budget: ClassVar[Budget] = Budget(
        8,
        100,
        200,
        num_temperatures=20,
        ladder_chains=8,
        ladder_warmup=100,
        ladder_samples=200,
        num_reference_temperatures=5,
        num_particles=32,
        num_replicates=16,
        num_live=100,
    )

    def estimate(self, target: Target, *, seed: int = 0) -> Evidence | PredictiveScore:
        """Return what a comparison of this method alone gives."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SamplingWarning)
            table = evidence.compare(target, [self.method], seed=seed, budget=self.budget, progress=False)
        assert self.method not in table.refused, table.refused.get(self.method)
        return table.results[self.method] if self.method in table.results else table.scores[self.method]

    def test_it_is_registered_under_the_name_of_its_result(self) -> None:
        """The table, the command line and the exam find it."""
        assert self.estimate(exact.get(self.cases[0]).target()).method == self.method == METHODS[self.method].name

    def test_it_is_right_or_says_that_it_is_not(self) -> None:
        """A trusted number lies within its error of the exact answer; a consistent method trusts one of them."""
        if METHODS[self.method].kind == "score":
            return
        trusted = []
        for name in self.cases:
            case = exact.get(name)
            z = self.estimate(case.target(), seed=1)
            assert isinstance(z, Evidence)
            trusted.append(z.trusted)
            gap = abs(z.log_evidence - case.log_evidence)
            assert not z.trusted or gap <= _limit(len(self.cases)) * z.standard_error + 1e-9, f"{name}: {z}"
        assert any(trusted) or METHODS[self.method].kind != "consistent", f"{self.method} trusts itself on no case"

    def test_it_says_what_it_cost_and_has_an_error(self) -> None:
        """Evaluations and seconds are positive, the standard error is a number where the estimate is one."""
        z = self.estimate(exact.get(self.cases[0]).target())
        assert z.num_evaluations > 0 and z.seconds > 0
        assert z.standard_error >= 0 or not z.trusted

    def test_a_seed_fixes_the_number(self) -> None:
        """The same seed gives the same bits, whatever torch's global stream is."""
        target, found = exact.get(self.cases[0]).target(), []
        for state in (1, 2):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(state)
                z = self.estimate(target, seed=5)
            found.append(z.log_evidence if isinstance(z, Evidence) else z.predictive_score)
        assert found[0] == found[1] or all(map(math.isnan, found))

    def test_it_changes_no_global_of_torch(self) -> None:
        """Neither the random stream, the default dtype, nor the number of threads."""
        target = exact.get(self.cases[0]).target()
        before = _globals()
        self.estimate(target)
        assert _globals() == before

    def test_an_improper_prior_is_refused(self) -> None:
        """There is no marginal likelihood; a predictive score does without one."""
        if METHODS[self.method].kind == "score":
            return
        try:
            evidence.compare(_improper(), [self.method], budget=self.budget, progress=False)
        except SettingsError:
            return
        raise AssertionError(f"{self.method} gave an evidence under an improper prior")


class KernelContract:
    """What a Markov kernel over batches of chains promises: it keeps its target, and knows no other chain.

    Attributes
    ----------
    kernel : callable
        Makes the kernel, with settings that suit a standard normal distribution of three dimensions.
    num_steps : int
        After which a draw of the next test may be looked at.

    Examples
    --------
    >>> from bayeskit.inference.samplers import HMC
    >>> from bayeskit.testing import KernelContract
    >>> class TestMine(KernelContract):
    ...     kernel = staticmethod(lambda: HMC(step_size=0.5))
    >>> TestMine().test_chains_do_not_see_each_other()
    """

    kernel: ClassVar[Callable[[], Any]]
    num_steps: ClassVar[int] = 20
    num_chains: ClassVar[int] = 2000

    @staticmethod
    def target() -> Target:
        """Return a skewed posterior: a standard normal prior, and a likelihood that leans on one side."""
        normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0)
        return Target.from_functions(
            lambda u: normal.log_prob(u).sum(-1),
            lambda u: math.log(2) * u.shape[-1] + torch.special.log_ndtr(3 * u).sum(-1),  # a skew normal
            3,
            lambda n, generator: torch.randn(n, 3, generator=generator, dtype=torch.float64),
        )

    def _run(self, position: Tensor, num_steps: int, seed: int = 0) -> Any:
        kernel, target = type(self).kernel(), self.target()
        generator = torch.Generator().manual_seed(seed)
        state = kernel.init(target, position)
        for _ in range(num_steps):
            state, _ = kernel.step(target, state, generator=generator)
        return state

    def _exact_draws(self) -> Tensor:
        """Return draws of a skew normal distribution of shape 3 (Azzalini 1985), ``(num_chains, 3)``."""
        generator = torch.Generator().manual_seed(7)
        first, second = torch.randn(2, self.num_chains, 3, generator=generator, dtype=torch.float64)
        return (3 * first.abs() + second) / math.sqrt(10)

    def test_it_keeps_its_target(self) -> None:
        """Chains that start in the target are in it after some steps: mean and mean square, chains independent."""
        position = self._run(self._exact_draws(), self.num_steps).position
        slope = 3 / math.sqrt(10)
        expected = {1: slope * math.sqrt(2 / math.pi), 2: 1.0}
        for power, value in expected.items():
            moment = position**power
            z = (moment.mean(0) - value) / (moment.std(0) / math.sqrt(len(moment)))
            assert float(z.abs().max()) < _limit(6), f"the mean of x**{power} is {float(z.abs().max()):.1f} errors off"

    def test_it_moves(self) -> None:
        """The effective sample size of one chain in a hundred steps is more than two."""
        kernel, target = type(self).kernel(), self.target()
        generator = torch.Generator().manual_seed(3)
        state, kept = kernel.init(target, self._exact_draws()[:8]), []
        for _ in range(100):
            state, _ = kernel.step(target, state, generator=generator)
            kept.append(state.position[:, 0])
        assert float(effective_sample_size(torch.stack(kept, 1))) > 16

    def test_chains_do_not_see_each_other(self) -> None:
        """A chain moves alike whatever the chains beside it are, if they use as many random numbers."""
        start = self._exact_draws()[:4]
        other = torch.cat([start[:1], start[1:].flip(0)])
        one, two = (self._run(position, 1).position[0] for position in (start, other))
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)

    def test_a_generator_fixes_the_draws(self) -> None:
        """The same generator gives the same bits, another one others."""
        start = self._exact_draws()[:4]
        one, same, other = (self._run(start, 3, seed).position for seed in (0, 0, 1))
        assert torch.equal(one, same) and not torch.equal(one, other)


class SubstitutionModelContract:
    """What a substitution model promises: a reversible Markov process of unit mean rate.

    Attributes
    ----------
    model : callable
        Makes the model with its parameters fixed.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics import HKY85
    >>> from bayeskit.testing import SubstitutionModelContract
    >>> class TestMine(SubstitutionModelContract):
    ...     model = staticmethod(lambda: HKY85(2.0, [0.1, 0.2, 0.3, 0.4]))
    >>> TestMine().test_it_is_a_process()
    """

    model: ClassVar[Callable[[], SubstitutionModel]]
    lengths: ClassVar[tuple[float, ...]] = (0.0, 1e-9, 0.01, 0.3, 2.0, 500.0)

    def _facts(self) -> tuple[SubstitutionModel, Tensor, Tensor, Tensor, Tensor]:
        """Return model, lengths ``(n,)``, matrices ``(n, s, s)``, rates ``(s, s)``, frequencies ``(s,)``."""
        model, t = type(self).model(), torch.tensor(self.lengths, dtype=torch.float64)
        return model, t, model.transition_matrices(t), model.rate_matrix(t), model.frequencies(t)

    def test_rows_are_probabilities(self) -> None:
        """No branch is too short or too long."""
        model, t, matrices, _, _ = self._facts()
        assert matrices.shape == (*t.shape, model.num_states, model.num_states) and bool((matrices >= 0).all())
        torch.testing.assert_close(matrices.sum(-1), torch.ones_like(matrices[..., 0]), rtol=0, atol=1e-12)
        torch.testing.assert_close(matrices[0], torch.eye(model.num_states, dtype=torch.float64), rtol=0, atol=1e-12)

    def test_it_is_a_process(self) -> None:
        """Transition matrices are the exponential of the rate matrix, and two branches in a row are one."""
        model, t, matrices, rates, _ = self._facts()
        torch.testing.assert_close(matrices, torch.linalg.matrix_exp(t[:, None, None] * rates), rtol=1e-9, atol=1e-11)
        both = model.transition_matrices(t[2:3] + t[3:4])
        torch.testing.assert_close(matrices[2:3] @ matrices[3:4], both, rtol=1e-10, atol=1e-12)

    def test_it_is_reversible_at_one_substitution_a_unit_of_time(self) -> None:
        """Detailed balance, stationary frequencies, mean rate one."""
        _, _, matrices, rates, frequencies = self._facts()
        flow = frequencies.unsqueeze(-1) * rates
        torch.testing.assert_close(flow, flow.mT, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(frequencies.sum(), torch.tensor(1.0, dtype=torch.float64), rtol=0, atol=1e-12)
        torch.testing.assert_close(frequencies @ matrices[3], frequencies, rtol=1e-12, atol=1e-14)
        mean_rate = -(frequencies * rates.diagonal()).sum()
        torch.testing.assert_close(mean_rate, torch.ones_like(mean_rate), rtol=1e-12, atol=0)

    def test_gradients_by_branch_lengths_are_right(self) -> None:
        """The derivative of the matrix is the rate matrix times it."""
        model, _, matrices, rates, _ = self._facts()
        inner = torch.tensor(self.lengths[2:5], dtype=torch.float64)
        slope = torch.func.jacrev(lambda t: model.transition_matrices(t).sum(0))(inner).movedim(-1, 0)
        torch.testing.assert_close(slope, rates @ matrices[2:5], rtol=1e-8, atol=1e-10)

    def test_lengths_may_have_any_batch_shape_and_precision(self) -> None:
        """Shapes in front are kept, and so is the precision."""
        model, _, _, _, _ = self._facts()
        for dtype in (torch.float32, torch.float64):
            found = model.transition_matrices(torch.full((2, 3, 5), 0.1, dtype=dtype))
            assert found.shape == (2, 3, 5, model.num_states, model.num_states) and found.dtype == dtype


class GradientEstimatorContract:
    """What an estimator of the gradient of an expectation over a discrete variable promises.

    Attributes
    ----------
    estimator : callable
        Makes the gradient estimator.
    distribution : callable
        Makes the distribution from logits ``(*batch, 5)``; the logits themselves, of a Categorical, by default.
    num_replicates : int
        Estimates of the test of the mean.

    Examples
    --------
    >>> from bayeskit.inference import gradients
    >>> from bayeskit.testing import GradientEstimatorContract
    >>> class TestMine(GradientEstimatorContract):
    ...     estimator = staticmethod(lambda: gradients.LeaveOneOut(num_samples=4))
    >>> TestMine().test_its_mean_is_the_gradient()
    """

    estimator: ClassVar[Callable[[], GradientEstimator]]
    distribution: ClassVar[Callable[[Tensor], Any]] = staticmethod(lambda logits: logits)
    num_replicates: ClassVar[int] = 4000
    logits: ClassVar[Tensor] = torch.tensor([0.3, -1.2, 0.8, 0.0, -0.5], dtype=torch.float64)

    @staticmethod
    def function(z: Tensor) -> Tensor:
        """Return values at indices ``(points, *batch)``, or at bits and one-hot vectors ``(points, *batch, 5)``."""
        values = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0], dtype=torch.float64)
        if not z.is_floating_point():
            return values[z]
        score = (z * values).sum(-1)
        return score + 0.3 * score.square()

    def _estimates(self, num_replicates: int, seed: int = 0) -> Tensor:
        """Return independent estimates, ``(num_replicates, 5)``."""
        logits = self.logits.expand(num_replicates, -1).clone().requires_grad_()
        return type(self).estimator().estimate(type(self).distribution(logits), self.function, seed=seed)

    def test_its_mean_is_the_gradient(self) -> None:
        """The mean of many estimates is the gradient of the enumerated expectation, if it says that it is unbiased."""
        estimator = type(self).estimator()
        if not estimator.unbiased:
            return
        logits = self.logits.clone().requires_grad_()
        expectation = estimator.expectation(type(self).distribution(logits), self.function)
        (exact_gradient,) = torch.autograd.grad(expectation, logits)
        found = self._estimates(self.num_replicates)
        z = (found.mean(0) - exact_gradient) / (found.std(0) / math.sqrt(len(found))).clamp(min=1e-12)
        assert float(z.abs().max()) < _limit(len(z)), f"the mean is {float(z.abs().max()):.1f} standard errors off"

    def test_rows_of_a_batch_are_independent(self) -> None:
        """Neighbouring rows with equal logits are uncorrelated."""
        found = self._estimates(2000)
        if not bool((found.std(0) > 1e-9).all()):
            return  # an exact gradient
        first, second = ((half - half.mean(0)) / half.std(0) for half in (found[0::2], found[1::2]))
        z = (first * second).mean(0) * math.sqrt(len(first))
        # Products of heavy-tailed estimates vary more than those of normal ones.
        spread = (first * second).std(0).clamp(min=1.0)
        assert float((z / spread).abs().max()) < _limit(len(z))

    def test_it_evaluates_the_function_as_often_as_it_says(self) -> None:
        """The number of points is that of ``num_evaluations``."""
        counted: list[int] = []

        def function(z: Tensor) -> Tensor:
            counted.append(len(z))
            return self.function(z)

        estimator = type(self).estimator()
        distribution = type(self).distribution(self.logits.clone().requires_grad_())
        estimator.estimate(distribution, function)
        assert sum(counted) == estimator.num_evaluations(space_of(distribution))

    def test_a_seed_fixes_the_estimate(self) -> None:
        """The same seed gives the same bits, and no global of torch is changed."""
        before = _globals()
        one, same = (self._estimates(3, seed=5) for _ in range(2))
        assert torch.equal(one, same) and _globals() == before


class LossContract:
    """What a loss promises: one number for one parameter and one data set, which torch can batch and differentiate.

    Attributes
    ----------
    loss : callable
        Makes the loss.
    data : callable
        Makes the data, a tensor or a tuple of tensors with five rows.
    parameters : callable
        Makes several parameters, ``(m, ...)``.
    data_sets_its_scale : bool
        True if a setting of the loss is found from the data, such as the bandwidth of a kernel, so that repeated data
        are not the same as weights.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.generalized import losses
    >>> from bayeskit.testing import LossContract
    >>> class TestMine(LossContract):
    ...     loss = staticmethod(lambda: losses.Absolute())
    ...     data = staticmethod(lambda: torch.tensor([-1.0, 0.0, 0.5, 1.0, 3.0], dtype=torch.float64))
    ...     parameters = staticmethod(lambda: torch.tensor([-0.3, 0.2, 1.4], dtype=torch.float64))
    >>> TestMine().test_weights_are_repeated_data()
    """

    loss: ClassVar[Callable[[], Loss]]
    data: ClassVar[Callable[[], Any]]
    parameters: ClassVar[Callable[[], Tensor]]
    data_sets_its_scale: ClassVar[bool] = False

    def _facts(self) -> tuple[Loss, tuple[Tensor, ...], Tensor]:
        data = type(self).data()
        return type(self).loss(), data if isinstance(data, tuple) else (data,), type(self).parameters()

    def _total(self, loss: Loss, parameter: Tensor, columns: tuple[Tensor, ...], weights: Tensor | None) -> Tensor:
        single = not isinstance(type(self).data(), tuple)
        return loss.total(parameter, columns[0] if single else columns, weights)

    def test_it_can_be_batched_and_differentiated(self) -> None:
        """``vmap`` over parameters, weights and data sets is the loop over them; gradients are finite."""
        loss, columns, parameters = self._facts()
        generator = torch.Generator().manual_seed(2)
        orders = torch.stack([torch.randperm(5, generator=generator) for _ in parameters])
        weights = 0.1 + torch.rand(len(parameters), 5, generator=generator, dtype=torch.float64)
        sets = tuple(column[orders] for column in columns)

        def total(parameter: Tensor, w: Tensor, *rows: Tensor) -> Tensor:
            return self._total(loss, parameter, rows, w)

        one_by_one = torch.stack([total(*given) for given in zip(parameters, weights, *sets, strict=True)])
        torch.testing.assert_close(torch.func.vmap(total)(parameters, weights, *sets), one_by_one, rtol=1e-9, atol=1e-9)
        gradients = torch.func.vmap(torch.func.grad(total))(parameters, weights, *sets)
        assert gradients.shape == parameters.shape and bool(gradients.isfinite().all())

    def test_the_gradient_is_the_derivative(self) -> None:
        """The gradient agrees with central differences in a random direction."""
        loss, columns, parameters = self._facts()
        generator = torch.Generator().manual_seed(4)
        for parameter in parameters:
            direction = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)

            def along(step: Tensor, at: Tensor = parameter, way: Tensor = direction) -> Tensor:
                return self._total(loss, at + step * way, columns, None)

            step = torch.tensor(1e-5, dtype=parameter.dtype)
            slope = torch.func.grad(along)(torch.zeros_like(step))
            difference = (along(step) - along(-step)) / (2 * step)
            torch.testing.assert_close(slope, difference, rtol=1e-5, atol=1e-6)

    def test_weights_are_repeated_data(self) -> None:
        """Whole-number weights are repeated rows, unit weights are none, and the total is linear in their scale."""
        loss, columns, parameters = self._facts()
        counts = torch.tensor([2, 1, 0, 3, 1])
        for parameter in parameters:
            weighted = self._total(loss, parameter, columns, counts.double())
            if not self.data_sets_its_scale:
                repeated = tuple(column.repeat_interleave(counts, 0) for column in columns)
                torch.testing.assert_close(weighted, self._total(loss, parameter, repeated, None), rtol=1e-9, atol=1e-9)
            doubled = self._total(loss, parameter, columns, 2 * counts.double())
            torch.testing.assert_close(doubled, 2 * weighted, rtol=1e-9, atol=1e-9)
            ones = self._total(loss, parameter, columns, torch.ones(5, dtype=torch.float64))
            torch.testing.assert_close(self._total(loss, parameter, columns, None), ones, rtol=1e-9, atol=1e-9)

    def test_the_order_of_the_data_does_not_matter(self) -> None:
        """The total of reordered data is the same."""
        loss, columns, parameters = self._facts()
        for parameter in parameters:
            turned = self._total(loss, parameter, tuple(column.flip(0) for column in columns), None)
            torch.testing.assert_close(turned, self._total(loss, parameter, columns, None), rtol=1e-9, atol=1e-9)


class ObjectiveContract:
    """What a bound on the log evidence, estimated from draws, promises on a model whose evidence is known.

    The model is normal: one latent mean for each observation, all with a standard normal prior.

    Attributes
    ----------
    objective : callable
        Makes the objective.
    num_replicates : int
        Losses of the tests of the mean.

    Examples
    --------
    >>> from bayeskit.inference.objectives import IWAE
    >>> from bayeskit.testing import ObjectiveContract
    >>> class TestMine(ObjectiveContract):
    ...     objective = staticmethod(lambda: IWAE(num_particles=8))
    >>> TestMine().test_it_is_exact_at_the_posterior()
    """

    objective: ClassVar[Callable[[], Objective]]
    num_replicates: ClassVar[int] = 200
    x: ClassVar[Tensor] = torch.tensor([0.5, -1.0, 2.0, 0.1], dtype=torch.float64)

    @staticmethod
    def _model(x: Tensor) -> None:
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(pyro.sample("z", dist.Normal(torch.zeros_like(x), 1.0)), 1.0), obs=x)

    def _guide(self, shift: float) -> Callable[[Tensor], None]:
        """Return the exact posterior, its means shifted by a parameter."""

        def guide(x: Tensor) -> None:
            away = pyro.param("shift", torch.tensor(shift, dtype=x.dtype))
            with pyro.plate("data", len(x)):
                pyro.sample("z", dist.Normal(x / 2 + away, math.sqrt(0.5)))

        return guide

    def _losses(self, shift: float, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return losses and gradients by the shift, ``(count,)`` each."""
        losses, gradients = [], []
        objective, guide = type(self).objective(), self._guide(shift)
        with torch.random.fork_rng(devices=[]), pyro.get_param_store().scope():
            torch.manual_seed(seed)
            for _ in range(count):
                pyro.clear_param_store()
                loss = objective.differentiable_loss(self._model, guide, self.x)
                parameter = dict(pyro.get_param_store().named_parameters())["shift"]
                (gradient,) = torch.autograd.grad(loss, parameter)
                losses.append(loss.detach())
                gradients.append(gradient)
        return torch.stack(losses), torch.stack(gradients)

    def _log_evidence(self) -> float:
        zero = torch.zeros_like(self.x)
        return float(torch.distributions.Normal(zero, zero + math.sqrt(2.0)).log_prob(self.x).sum())

    def test_it_is_exact_at_the_posterior(self) -> None:
        """With the exact posterior as guide the mean loss is minus the log evidence."""
        losses, _ = self._losses(0.0, self.num_replicates)
        # All weights are equal, but a loss with analytic terms has the error of the others.
        error = float(losses.std()) / math.sqrt(len(losses))
        assert abs(float(losses.mean()) + self._log_evidence()) < _limit() * error + 1e-9

    def test_it_is_a_lower_bound(self) -> None:
        """With another guide the mean loss is at least minus the log evidence, within its Monte Carlo error."""
        losses, _ = self._losses(0.7, self.num_replicates)
        error = float(losses.std()) / math.sqrt(len(losses))
        assert float(losses.mean()) > -self._log_evidence() - _limit() * error

    def test_its_gradient_leads_to_the_posterior(self) -> None:
        """The mean gradient points away from the posterior on both sides of it; its variance has to be finite."""
        for shift in (0.7, -0.7):
            _, gradients = self._losses(shift, self.num_replicates)
            z = float(gradients.mean()) / (float(gradients.std()) / math.sqrt(len(gradients)))
            assert z * math.copysign(1.0, shift) > _limit()

    def test_the_seed_of_torch_fixes_the_loss(self) -> None:
        """The same seed gives the same bits, another one others."""
        one, same, other = (self._losses(0.7, 3, seed)[0] for seed in (1, 1, 2))
        assert torch.equal(one, same) and not torch.equal(one, other)


class WideNetworkContract:
    """What the kernels of a network promise: they are covariances, and the limit of finite networks.

    Attributes
    ----------
    module : callable
        Makes the module, whose last layer is ``torch.nn.Linear``.
    x : callable
        Makes inputs in double precision, ``(n, ...)``, in which rows differ.
    width, num_networks : int
        Width and number of the finite networks.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.testing import WideNetworkContract
    >>> class TestMine(WideNetworkContract):
    ...     module = staticmethod(lambda: torch.nn.Sequential(
    ...         torch.nn.Linear(3, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    ...     x = staticmethod(lambda: torch.eye(3, dtype=torch.float64))
    >>> TestMine().test_kernels_are_covariances()
    """

    module: ClassVar[Callable[[], nn.Module]]
    x: ClassVar[Callable[[], Tensor]]
    width: ClassVar[int] = 512
    num_networks: ClassVar[int] = 400

    def _kernel(self) -> InfiniteWidth:
        return infinite_width(type(self).module(), weight_variance=1.5, bias_variance=0.1)

    def test_kernels_are_covariances(self) -> None:
        """Both kernels are symmetric and positive semi-definite; the tangent kernel is the larger one."""
        kernel, x = self._kernel(), type(self).x()
        nngp, ntk = kernel.nngp(x), kernel.ntk(x)
        for matrix in (nngp, ntk, ntk - nngp):
            torch.testing.assert_close(matrix, matrix.mT, rtol=1e-10, atol=1e-12)
            values = torch.linalg.eigvalsh(matrix)
            assert float(values[0]) > -1e-9 * float(values[-1].abs())

    def test_blocks_are_those_of_all_inputs(self) -> None:
        """The kernel between two sets, and its diagonal, are parts of the kernel of both."""
        kernel, x = self._kernel(), type(self).x()
        for name in ("nngp", "ntk"):
            whole = getattr(kernel, name)(x)
            torch.testing.assert_close(getattr(kernel, name)(x[:1], x[1:]), whole[:1, 1:], rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(getattr(kernel, f"{name}_diagonal")(x), whole.diagonal(), rtol=1e-10, atol=1e-12)

    def test_finite_networks_have_them_on_average(self) -> None:
        """Outputs of wide random networks have mean zero and the NNGP kernel as covariance."""
        kernel, x = self._kernel(), type(self).x()
        with torch.no_grad():
            networks = (kernel.network(self.width, seed=seed).to(x.dtype) for seed in range(self.num_networks))
            outputs = torch.stack([network(x)[:, 0] for network in networks])
        products = outputs.unsqueeze(-1) * outputs.unsqueeze(-2)
        error = products.std(0) / math.sqrt(self.num_networks)
        # Outputs of networks of finite width are nearly normal: their covariance is off by a term of order 1 / width.
        room = _limit(error.numel()) * error + 3 * kernel.nngp_diagonal(x).max() / self.width
        assert bool(((products.mean(0) - kernel.nngp(x)).abs() < room).all())
