"""Minibatched targets: unbiased estimates of a log density and its gradient from a few rows of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bayeskit._engine import Compile
from bayeskit._evaluation import Evaluation
from bayeskit._pyro.subsampling import SubsampledDensity
from bayeskit._torch import new_generator
from bayeskit.errors import ModelError, SettingsError, ShapeError
from bayeskit.inference.samplers.stochastic_gradient._density import (
    FunctionDensity,
    MinibatchDensity,
    ModuleDensity,
    OnRows,
)
from bayeskit.inference.samplers.stochastic_gradient._engine import Estimator, MinibatchEngine
from bayeskit.inference.samplers.stochastic_gradient.rows import Epochs, RowOrder, RowState
from bayeskit.target import PriorSampler, Target


class MinibatchTarget:
    """A posterior whose log density and gradient are estimated, without bias, from minibatches.

    From ``B`` of ``N`` rows the log likelihood is estimated by ``N / B`` times that of the
    rows; the log prior is exact. The rows are an explicit input, so value and gradient are
    traced once and compiled, all chains in one batch. Each chain has its own rows: shared
    ones would be gathered faster, but would make the chains' errors alike, and then neither
    R-hat nor standard errors could be believed.

    Make one with :meth:`from_pyro`, :meth:`from_module` or :meth:`from_functions`.

    Attributes
    ----------
    dim : int
        Dimension ``d`` of the unconstrained vector.
    sites : tuple of Site
        The continuous latent sites, or the module's parameters, with their slices of the vector.
    num_data, batch_size : int
        ``N`` and ``B``.
    dtype, device
        Those of the model's data.
    row_order : Epochs or IndependentRows
        How rows are drawn.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.samplers import MinibatchTarget
    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", len(y), subsample_size=2) as rows:
    ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])
    >>> y = torch.tensor([1.0, 2.0, 4.0, 5.0], dtype=torch.float64)
    >>> target = MinibatchTarget.from_pyro(model, y)
    >>> target.gradient(torch.zeros(2, 1, dtype=torch.float64), torch.tensor([[0, 1], [2, 3]])).flatten()
    tensor([ 6., 18.], dtype=torch.float64)
    """

    def __init__(self, density: MinibatchDensity, *, row_order: RowOrder, compile: Compile) -> None:
        if compile not in (True, False, "auto"):
            raise SettingsError(f"compile must be True, False or 'auto', not {compile!r}")
        self._density = density
        self.row_order, self.compile = row_order, compile
        self.sites, self.dim, self.dtype, self.device = density.sites, density.dim, density.dtype, density.device
        self.num_data, self.batch_size = density.num_data, density.batch_size
        self._engine = MinibatchEngine(density)
        self._on_first_rows = self.on_rows(torch.arange(self.batch_size))

    # -- making one -------------------------------------------------------------------------

    @classmethod
    def from_pyro(
        cls,
        model: Callable[..., Any],
        *args: Any,
        batch_size: int | None = None,
        plate: str | None = None,
        row_order: RowOrder | None = None,
        compile: Compile = "auto",
        seed: int = 0,
        **kwargs: Any,
    ) -> MinibatchTarget:
        """Read a Pyro model that indexes its data by the rows of a plate.

        Parameters
        ----------
        model : callable
            A Pyro model with ``with pyro.plate(name, N, subsample_size=B) as rows``.
        *args, **kwargs
            What the model is called with.
        batch_size : int, optional
            Needed where the plate has ``subsample_size=None``; else the model's own.
        plate : str, optional
            Which plate, where several come into question.
        row_order : Epochs or IndependentRows, optional
            By default :class:`Epochs`.
        compile : bool or "auto", default "auto"
            Compile gradients always, never, or where the planned work repays it.
        seed : int, default 0
            For the runs that read the model's structure.

        Returns
        -------
        MinibatchTarget

        Raises
        ------
        ModelError
            If no plate subsamples, several do, or the model ignores the rows.
        UnsupportedSiteError
            If a latent site stands inside the plate, or an enumerated one outside of it.
        SettingsError
            If ``batch_size`` is larger than the plate or not the model's.
        DataError
            If the data hold NaN.
        """
        density = SubsampledDensity(model, args, kwargs, plate, batch_size, new_generator(seed))
        return cls(density, row_order=row_order or Epochs(), compile=compile)

    @classmethod
    def from_module(
        cls,
        module: torch.nn.Module,
        log_likelihood: Callable[..., Tensor],
        data: Sequence[Tensor] | Dataset[Any],
        *,
        batch_size: int,
        prior_scale: float | Mapping[str, float | Tensor] = 1.0,
        row_order: RowOrder | None = None,
        compile: Compile = "auto",
    ) -> MinibatchTarget:
        """Put independent normal priors on the parameters of a torch module.

        Parameters
        ----------
        module : torch.nn.Module
            A copy in evaluation mode is used, so dropout is off and nothing is changed.
            Parameters with ``requires_grad=False`` stay constant.
        log_likelihood : callable
            ``(module(inputs), *others) -> (B,)``, one value a row.
        data : tensors or torch Dataset
            ``inputs, *others``, each with ``N`` rows. A dataset is read into memory.
        batch_size : int
        prior_scale : float or mapping of parameter names, default 1
            Standard deviations of the priors, which have mean zero.
        row_order, compile
            As in :meth:`from_pyro`.

        Returns
        -------
        MinibatchTarget

        Raises
        ------
        ModelError
            If the module has no parameter to sample, or ``log_likelihood`` returns another shape.
        DataError
            If the tensors differ in length or hold NaN.
        SettingsError
            If ``batch_size`` is larger than the data, or a prior scale is missing or not positive.

        Examples
        --------
        >>> import torch
        >>> from bayeskit.inference.samplers import MinibatchTarget
        >>> x = torch.linspace(-1, 1, 100, dtype=torch.float64)[:, None]
        >>> y = 2 * x[:, 0]
        >>> def log_likelihood(output, y):
        ...     return torch.distributions.Normal(output[:, 0], 0.1).log_prob(y)
        >>> line = torch.nn.Linear(1, 1, dtype=torch.float64)
        >>> target = MinibatchTarget.from_module(line, log_likelihood, (x, y), batch_size=10)
        >>> target.constrain(torch.zeros(3, 2, dtype=torch.float64))["weight"].shape
        torch.Size([3, 1, 1])
        """
        density = ModuleDensity(module, log_likelihood, data, batch_size, prior_scale)
        return cls(density, row_order=row_order or Epochs(), compile=compile)

    @classmethod
    def from_functions(
        cls,
        log_prior: Callable[[Tensor], Tensor],
        log_likelihood: Callable[[Tensor, Tensor], Tensor],
        dim: int,
        num_data: int,
        *,
        batch_size: int,
        sample_prior: PriorSampler | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        row_order: RowOrder | None = None,
        compile: Compile = "auto",
    ) -> MinibatchTarget:
        """Make a target of two functions of one unconstrained vector.

        Parameters
        ----------
        log_prior : callable
            ``(dim,) -> ()``.
        log_likelihood : callable
            ``(dim,), (B,) -> (B,)``: the vector and the rows, one value a row.
        dim, num_data, batch_size : int
        sample_prior : callable, optional
            ``(n, generator) -> (n, dim)``; starting points come from there.
        dtype, device
            Of the vectors.
        row_order, compile
            As in :meth:`from_pyro`.

        Returns
        -------
        MinibatchTarget

        Raises
        ------
        SettingsError
            If a number is out of range.
        ModelError
            If a function returns another shape.

        Examples
        --------
        >>> import torch
        >>> from bayeskit.inference.samplers import MinibatchTarget
        >>> y = torch.arange(10.0, dtype=torch.float64)
        >>> target = MinibatchTarget.from_functions(
        ...     lambda u: -0.5 * u.square().sum(), lambda u, rows: -0.5 * (y[rows] - u).square(), 1, 10, batch_size=5)
        >>> target.gradient(torch.zeros(1, 1, dtype=torch.float64), torch.arange(5)).item()
        20.0
        """
        density = FunctionDensity(
            log_prior, log_likelihood, dim, num_data, batch_size, sample_prior, dtype, torch.device(device)
        )
        return cls(density, row_order=row_order or Epochs(), compile=compile)

    # -- estimating -------------------------------------------------------------------------

    def estimate(self, u: Tensor, rows: Tensor) -> Evaluation:
        """Estimate log density and gradient.

        Parameters
        ----------
        u : Tensor
            Shape ``(n, d)``.
        rows : Tensor
            Integers from 0 to ``N - 1``, shape ``(n, B)``, or ``(B,)`` for the same rows in every chain.

        Returns
        -------
        Evaluation
            ``log_prior`` exact; ``log_likelihood``, ``log_density`` and ``gradient`` unbiased estimates.

        Raises
        ------
        ShapeError
            If a shape is another one.
        SettingsError
            If a row does not exist.
        """
        if u.dim() != 2 or u.shape[1] != self.dim:
            raise ShapeError(f"u must have shape (n, {self.dim}), not {tuple(u.shape)}")
        if rows.shape not in ((self.batch_size,), (len(u), self.batch_size)):
            raise ShapeError(
                f"rows must have shape ({self.batch_size},) or ({len(u)}, {self.batch_size}), not {tuple(rows.shape)}"
            )
        if bool(((rows < 0) | (rows >= self.num_data)).any()):
            raise SettingsError(f"rows must lie between 0 and {self.num_data - 1}")
        rows = rows.to(self.device, torch.int64).expand(len(u), -1)
        return self.estimator(len(u))(u.to(self.device, self.dtype), rows)

    def gradient(self, u: Tensor, rows: Tensor) -> Tensor:
        """Return an unbiased estimate of the gradient of the log posterior, ``(n, d)``; see :meth:`estimate`."""
        return self.estimate(u, rows).gradient

    def gradient_variance(self, u: Tensor, num_batches: int = 100, seed: int = 0) -> Tensor:
        """Measure the variance of the estimated gradient over minibatches.

        Parameters
        ----------
        u : Tensor
            Shape ``(n, d)``.
        num_batches : int, default 100
        seed : int, default 0

        Returns
        -------
        Tensor
            Shape ``(n, d)``. Its mean over ``n`` serves as ``gradient_noise`` of the kernels.
        """
        if num_batches < 2:
            raise SettingsError(f"num_batches must be at least 2, not {num_batches}")
        generator = new_generator(seed, self.device, "gradient variance")
        estimates = []
        for _ in range(num_batches):
            # A new pass each time: within one, minibatches repel each other.
            _, rows = self.next_rows(self.start_rows(len(u), generator), generator)
            estimates.append(self.estimate(u, rows).gradient)
        return torch.stack(estimates).var(0)

    def estimator(self, num_vectors: int, num_calls: int = 1) -> Estimator:
        """Return the function that kernels call in their inner loop.

        Parameters
        ----------
        num_vectors : int
            Number of chains ``n`` of every call.
        num_calls : int, default 1
            How often it is planned to be called, which decides under ``compile="auto"``.

        Returns
        -------
        callable
            ``(u (n, d), rows (n, B)) -> Evaluation``.
        """
        return self._engine.estimator(num_vectors, num_calls, self.compile)

    # -- drawing rows -----------------------------------------------------------------------

    def start_rows(self, num_chains: int, generator: torch.Generator) -> RowState:
        """Begin the passes of ``num_chains`` chains over the data."""
        return self.row_order.init(num_chains, self.num_data, generator=generator)

    def next_rows(self, state: RowState, generator: torch.Generator) -> tuple[RowState, Tensor]:
        """Return the new state and each chain's next rows, ``(n, B)``."""
        return self.row_order.next(state, self.num_data, self.batch_size, generator=generator)

    # -- moving between spaces, and to the full data ----------------------------------------

    def constrain(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return the sites' values, ``(*batch, d) -> {site: (*batch, *shape)}``.

        Parameters
        ----------
        u : Tensor
            Unconstrained vectors, shape ``(*batch, d)``.
        deterministic : bool, default False
            Include ``pyro.deterministic`` sites, but for those inside the subsampled plate.
        """
        return self._on_first_rows.constrain(u, deterministic)

    def unconstrain(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the unconstrained vectors of site values, ``{site: (*batch, *shape)} -> (*batch, d)``."""
        return self._on_first_rows.unconstrain(values)

    def sample_prior(self, num_draws: int, seed: int | torch.Generator = 0) -> Tensor:
        """Draw from the prior, in unconstrained space, shape ``(num_draws, d)``."""
        return self._on_first_rows.sample_prior(num_draws, seed)

    @property
    def names(self) -> tuple[str, ...]:
        """A readable name for each unconstrained coordinate."""
        return self._on_first_rows.names

    def fingerprint(self) -> str:
        """Return a digest of sites, data, and the estimate from the first rows at two fixed points."""
        return self._on_first_rows.fingerprint()

    def pointwise_log_likelihood(self, u: Tensor) -> dict[str, Tensor]:
        """Refuse: a minibatch does not see each observation.

        Raises
        ------
        ModelError
            Always.
        """
        return self._on_first_rows.pointwise_log_likelihood(u)

    def on_rows(self, rows: Tensor) -> Target:
        """Return the target whose likelihood is the estimate from ``rows``, shape ``(B,)``, once and for all."""
        density = self._density
        on_rows = OnRows(density, rows.to(self.device))
        # One that is improper says so itself.
        sample_prior = density.sample_prior if density.can_sample_prior or on_rows.improper_sites else None
        target = Target(on_rows, batched=False, sample_prior=sample_prior, compile=self.compile)
        target._loops = self._engine.loops
        return target

    def full_target(self) -> Target:
        """Return the exact posterior, from all rows.

        Raises
        ------
        ModelError
            If the Pyro model itself fixes the number of rows.
        """
        if self._density.fixed:
            raise ModelError(
                f"the model's plate fixes subsample_size={self.batch_size}; make that an argument of the model, "
                "pass None for it, and give batch_size here"
            )
        return self.on_rows(torch.arange(self.num_data))

    def __repr__(self) -> str:
        return f"MinibatchTarget(dim={self.dim}, num_data={self.num_data}, batch_size={self.batch_size})"
