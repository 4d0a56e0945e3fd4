"""Contracts: tests that an estimator, a kernel or a substitution model of anybody's has to pass, for pytest.

Derive a class whose name begins with ``Test`` and say what is tested; pytest then runs every test of the contract.
Tolerances follow from Monte Carlo errors at a failure rate of 1e-5 a test.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from scipy.stats import norm
from torch import Tensor

from bayeskit import exact
from bayeskit.core.statistics import effective_sample_size
from bayeskit.errors import SamplingWarning, SettingsError
from bayeskit.inference import evidence
from bayeskit.inference.evidence import METHODS, Budget, Evidence, PredictiveScore
from bayeskit.logdensity.target import Target
from bayeskit.models.phylogenetics.substitution import SubstitutionModel

__all__ = ["EstimatorContract", "KernelContract", "SubstitutionModelContract"]

_FAILURE_RATE = 1e-5


def _limit(comparisons: int = 1) -> float:
    """Return the largest acceptable abs(z) among some comparisons."""
    return float(norm.isf(_FAILURE_RATE / (2 * comparisons)))


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

    def estimate(self, target: Target, seed: int = 0) -> Evidence | PredictiveScore:
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
        before = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
        self.estimate(target)
        after = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
        assert torch.equal(before[0], after[0]) and before[1:] == after[1:]

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
    """What a model of nucleotide substitution promises: a reversible Markov process of unit mean rate.

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
        """Return model, lengths ``(n,)``, matrices ``(n, 4, 4)``, rates ``(4, 4)`` and frequencies ``(4,)``."""
        model, t = type(self).model(), torch.tensor(self.lengths, dtype=torch.float64)
        return model, t, model.transition_matrices(t), model.rate_matrix(t), model.frequencies(t)

    def test_rows_are_probabilities(self) -> None:
        """No branch is too short or too long."""
        _, t, matrices, _, _ = self._facts()
        assert matrices.shape == (*t.shape, 4, 4) and bool((matrices >= 0).all())
        torch.testing.assert_close(matrices.sum(-1), torch.ones_like(matrices[..., 0]), rtol=0, atol=1e-12)
        torch.testing.assert_close(matrices[0], torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-12)

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
            assert found.shape == (2, 3, 5, 4, 4) and found.dtype == dtype
