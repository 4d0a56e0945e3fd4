"""Posteriors over the parameters of unnormalised models by the exchange algorithm, where exact draws exist."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from bayeskit.errors import DataError, InitializationError, SettingsError, ShapeError
from bayeskit.extend import (
    effective_sample_size,
    effective_within_chains,
    global_stream,
    new_generator,
    progress_bar,
    r_hat,
    short_repr,
    validation_kept,
    whole_number,
)
from bayeskit.models.unnormalised._moves import Unnormalised, require_fixed_energy, require_vectors

ExactDraws = Callable[[Mapping[str, Tensor], int, torch.Generator], Tensor]
"""``(parameters, n, generator) -> (n, d)``: independent draws of the model with parameters by name."""

#: Number of states up to which exact draws come from a list, and parts of the random walk's adaptation.
_MAX_STATES, _TARGET_ACCEPTANCE, _MAX_R_HAT, _MIN_EFFECTIVE = 2**14, 0.3, 1.01, 100
_LOG_CONSTANT = "log_constant"


@dataclass(frozen=True)
class ExchangePosterior:
    """Posterior draws of the parameters of an unnormalised model.

    Attributes
    ----------
    draws : dict of Tensor
        By name of the parameter, ``(chains, draws, *shape)``.
    acceptance_rate : Tensor
        Of each chain, ``(chains,)``.
    r_hat, effective : dict of Tensor
        Split R-hat and effective number of draws of each entry, of the shape of the parameter.
    warnings : tuple of str
    num_model_draws : int
        Exact draws of the model that were made.
    seconds : float

    Examples
    --------
    See :func:`exchange_posterior`.

    >>> from bayeskit.models.unnormalised._exchange import ExchangePosterior
    >>> ExchangePosterior({}, torch.ones(4), {}, {}, (), 0).trusted
    True
    """

    draws: dict[str, Tensor]
    acceptance_rate: Tensor
    r_hat: dict[str, Tensor] = field(repr=False)
    effective: dict[str, Tensor] = field(repr=False)
    warnings: tuple[str, ...]
    num_model_draws: int
    seconds: float = 0.0

    __repr__ = short_repr

    @property
    def trusted(self) -> bool:
        """True if chains agree and have enough effective draws."""
        return not self.warnings


def exchange_posterior(
    model: nn.Module,
    x: Tensor,
    prior: Mapping[str, Distribution],
    *,
    exact_draws: ExactDraws | None = None,
    num_chains: int = 4,
    num_warmup: int = 1000,
    num_samples: int = 2000,
    seed: int = 0,
    progress: bool = True,
) -> ExchangePosterior:
    r"""Sample the posterior of an energy model's parameters, whose likelihood has an unknown constant.

    The posterior contains :math:`Z(\theta)^{-n}`, so Metropolis's ratio is unknown. The exchange algorithm draws a data
    set :math:`y` of the same size from the model at the proposed :math:`\theta'` and accepts with the ratio

    .. math:: \frac{p(\theta')\, f_{\theta'}(x)\, f_\theta(y)}{p(\theta)\, f_\theta(x)\, f_{\theta'}(y)},

    in which constants cancel. The posterior is exact if :math:`y` is an exact draw. A Markov chain in its place leaves
    an error that nothing shows, so it is refused.

    Proposals are a random walk, with a covariance learnt from all chains in the warm-up and fixed after it.

    Parameters
    ----------
    model : EnergyModel
        Its parameters are not changed.
    x : Tensor
        Data, ``(n, d)``.
    prior : mapping of str to Distribution
        Prior of every trained parameter but ``log_constant``, by its name in ``model.named_parameters()``, such as
        ``"energy.weight"``; a distribution of the parameter's shape, or one that broadcasts to it.
    exact_draws : callable, optional
        ``(parameters, n, generator) -> (n, d)``: independent draws of the model with the parameters of the mapping. By
        default they come from the list of all binary vectors, of at most 14 entries.
    num_chains : int, default 4
    num_warmup : int, default 1000
    num_samples : int, default 2000
        Draws of each chain.
    seed : int, default 0
    progress : bool, default True

    Returns
    -------
    ExchangePosterior

    Raises
    ------
    SettingsError
        If exact draws do not exist, a prior is missing or of a parameter that is not there, or a setting lies outside
        its domain.
    ShapeError
        If ``x`` or ``exact_draws`` do not have the model's shape.
    InitializationError
        If the density of the data is not finite at draws of the prior.

    References
    ----------
    Murray, I., Ghahramani, Z., MacKay, D. J. C. (2006). MCMC for doubly-intractable distributions. UAI.

    Moller, J., Pettitt, A. N., Reeves, R., Berthelsen, K. K. (2006). An efficient Markov chain Monte Carlo method for
    distributions with intractable normalising constants. Biometrika 93, 451-458.

    Examples
    --------
    The coupling of a ring of five bits, whose posterior is known from a grid:

    >>> import torch
    >>> from torch.distributions import Normal
        >>> from bayeskit.models.unnormalised import exchange_posterior
    >>> from bayeskit.models.unnormalised._models import EnergyModel
    >>> class Ring(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.coupling = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    ...     def forward(self, x):
    ...         return -self.coupling * ((2 * x - 1) * (2 * x.roll(1, -1) - 1)).sum(-1)
    >>> model = EnergyModel.of_bits(Ring(), 5)
    >>> x = (torch.arange(30).unsqueeze(-1) % torch.tensor([2, 2, 2, 3, 3]) == 0).double()
    >>> found = exchange_posterior(model, x, {"energy.coupling": Normal(0.0, 1.0)}, num_samples=500, progress=False)
    >>> found.draws["energy.coupling"].shape
    torch.Size([4, 500])
    """
    begin = time.monotonic()
    if not (isinstance(model, nn.Module) and isinstance(model, Unnormalised)):
        raise SettingsError(f"model must be an EnergyModel, not {type(model).__name__}")
    require_vectors("x", x, model)
    chains = whole_number("num_chains", num_chains, least=1)
    warmup, samples = (
        whole_number("num_warmup", num_warmup, least=10),
        whole_number("num_samples", num_samples, least=8),
    )
    parameters = _Parameters(model, prior)
    densities = _Densities(model, parameters)
    likelihood = (
        _Listed(model, densities, x) if exact_draws is None else _Given(model, densities, x, parameters, exact_draws)
    )
    require_fixed_energy(model)
    host = new_generator(seed, stream="exchange algorithm")
    generator = host if x.device.type == "cpu" else new_generator(seed, x.device, "moves of exchange algorithm")
    theta = parameters.draw(chains, host).to(x)
    log_prior = parameters.log_prior(theta)
    with torch.no_grad():
        at = likelihood.at(theta)
        of_data = likelihood.of_data(at)
    if not bool((of_data.isfinite() & log_prior.isfinite()).all()):
        raise InitializationError("the energy of the data is not finite at draws of the prior; narrow the prior")

    size = theta.shape[1]
    factor = torch.diag_embed(parameters.spread(host).to(x))
    log_scale = math.log(2.4 / math.sqrt(size))
    history, rates = [], []
    with progress_bar("exchange", warmup + samples, progress) as bar, torch.no_grad():
        for step in range(warmup + samples):
            noise = torch.randn(theta.shape, generator=generator, dtype=x.dtype, device=x.device)
            proposal = theta + math.exp(log_scale) * noise @ factor.mT
            new_prior = parameters.log_prior(proposal)
            inside = new_prior > -torch.inf
            proposal = torch.where(inside.unsqueeze(-1), proposal, theta)  # no draws outside the prior's support
            new_at = likelihood.at(proposal)
            y = likelihood.draw(new_at, generator)
            new_of_data = likelihood.of_data(new_at)
            log_ratio = new_prior + new_of_data + likelihood.of(at, y)
            log_ratio -= log_prior + of_data + likelihood.of(new_at, y)
            uniform = torch.rand(chains, generator=generator, dtype=x.dtype, device=x.device)
            accepted = inside & (uniform.log() < log_ratio)
            theta = torch.where(accepted.unsqueeze(-1), proposal, theta)
            log_prior = torch.where(accepted, new_prior, log_prior)
            of_data = torch.where(accepted, new_of_data, of_data)
            at = torch.where(accepted.unsqueeze(-1), new_at, at)
            history.append(theta)
            if step < warmup:
                rate = float(torch.where(inside, log_ratio.exp().nan_to_num(nan=0.0).clamp(max=1.0), 0.0).mean())
                log_scale += (rate - _TARGET_ACCEPTANCE) / math.sqrt(1 + 0.1 * step)
                if step + 1 in (warmup // 4, warmup // 2, 3 * warmup // 4):
                    factor = _factor_of(torch.stack(history[step // 2 :]).flatten(0, 1), factor)
                    log_scale = math.log(2.0 / math.sqrt(size))
            else:
                rates.append(accepted)
            bar.update(step + 1)
    flat = torch.stack(history[warmup:], 1)  # (chains, draws, p)
    by_entry = flat.movedim(-1, 0)
    ranks, effective = r_hat(by_entry), effective_sample_size(by_entry)
    problems = []
    # The difference of half chains depends on their effective number of draws.
    chance = 1 / effective_within_chains(by_entry)
    if not bool((ranks.square() <= (2 * _MAX_R_HAT - 1) ** 2 + chance).all()):
        problems.append(f"chains disagree (R-hat {float(ranks.max()):.3f}): give more warm-up and draws")
    if not bool((effective >= _MIN_EFFECTIVE).all()):
        problems.append(f"only {float(effective.min()):.0f} effective draws: give more draws")
    return ExchangePosterior(
        parameters.by_name(flat),
        torch.stack(rates, 1).to(x.dtype).mean(1),
        parameters.by_name(ranks),
        parameters.by_name(effective),
        tuple(problems),
        (warmup + samples) * chains * len(x),
        time.monotonic() - begin,
    )


def _factor_of(theta: Tensor, before: Tensor) -> Tensor:
    """Return the Cholesky factor of the covariance of draws ``(n, p)``, or the one before if it is singular."""
    covariance = torch.cov(theta.mT).reshape(theta.shape[1], theta.shape[1])
    factor, failed = torch.linalg.cholesky_ex(covariance)
    return before if bool(failed) or not bool(factor.isfinite().all()) else factor


class _Parameters:
    """Parameters of a model as vectors, with their prior."""

    def __init__(self, model: nn.Module, prior: Mapping[str, Distribution]) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad and name != _LOG_CONSTANT}
        if missing := [name for name in trained if name not in prior]:
            raise SettingsError(f"prior lacks {', '.join(missing)}; give a distribution for each trained parameter")
        if unknown := [name for name in prior if name not in trained]:
            raise SettingsError(f"the model has no trained parameter {unknown[0]!r}; it has {', '.join(trained)}")
        if not trained:
            raise SettingsError("the model has no parameters; give an energy that is a module")
        self._priors = {name: prior[name] for name in trained}
        self._shapes = {name: p.shape for name, p in trained.items()}
        self._sizes = [p.numel() for p in trained.values()]
        for name, one in self._priors.items():
            shape = torch.Size((*one.batch_shape, *one.event_shape))
            wanted = self._shapes[name]
            known = zip(reversed(shape), reversed(wanted), strict=False)
            if len(shape) > len(wanted) or not all(size in (1, other) for size, other in known):
                raise ShapeError(f"the prior of {name} has shape {tuple(shape)} and must fit {tuple(wanted)}")

        # A point of each prior's support, at which its density is asked for where a proposal lies outside.
        inside = self.draw(1, new_generator(0, stream="inside"))[0]
        self._inside = self.by_name(inside)

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Split vectors ``(*batch, p)`` into parameters ``(*batch, *shape)``."""
        parts = flat.split(self._sizes, -1)
        return {
            name: part.reshape(torch.Size((*flat.shape[:-1], *shape)))
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw ``(count, p)`` from the prior."""
        rows = []
        with global_stream(generator):
            for _ in range(count):
                row = []
                for name, one in self._priors.items():
                    shape = self._shapes[name]
                    missing = len(shape) - len(one.batch_shape) - len(one.event_shape)
                    drawn = one.expand(torch.Size((*shape[:missing], *one.batch_shape))).sample()
                    if drawn.shape != shape:
                        drawn = one.expand(shape[: len(shape) - len(one.event_shape)]).sample()
                    row.append(drawn.flatten())
                rows.append(torch.cat(row))
        return torch.stack(rows)

    def log_prior(self, theta: Tensor) -> Tensor:
        """Return the log density of vectors ``(c, p)``, minus infinity outside the support."""
        total = theta.new_zeros(len(theta))
        with validation_kept():
            for name, value in self.by_name(theta).items():
                one = self._priors[name]
                support: Any = one.support
                fits = support.check(value)
                if not bool(fits.all()):
                    wide = fits.reshape(*fits.shape, *(1,) * (value.dim() - fits.dim()))
                    value = torch.where(wide, value, self._inside[name].to(value))
                total += one.log_prob(value).reshape(len(theta), -1).sum(-1)
                total = torch.where(fits.reshape(len(theta), -1).all(-1), total, -torch.inf)
        return total

    def spread(self, generator: torch.Generator) -> Tensor:
        """Return the standard deviations of 50 draws of the prior, ``(p,)``, as the first step of the random walk."""
        spread = self.draw(50, generator).std(0)
        return torch.where(spread > 0, spread, 1.0)


class _Densities:
    """Log densities of a model, without constants, for the parameters of each chain."""

    def __init__(self, model: Any, parameters: _Parameters) -> None:
        self._model, self._parameters, self._is_batched = model, parameters, True

    def __call__(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return ``(c, n)`` for vectors ``(c, p)`` and rows ``(n, d)``, or ``(c, n, d)`` of each chain's own."""
        shared = x.dim() == 2
        with validation_kept():
            torch.distributions.Distribution.set_default_validate_args(False)
            if self._is_batched:
                try:
                    return torch.func.vmap(self._one, in_dims=(0, None if shared else 0))(theta, x)
                except RuntimeError:  # an energy that branches on values, for example
                    self._is_batched = False
            return torch.stack([self._one(one, x if shared else x[i]) for i, one in enumerate(theta)])

    def _one(self, theta: Tensor, x: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(self._model, self._parameters.by_name(theta), (x,))
        return found


class _Listed:
    """Exact draws from a list of all binary vectors. What is known of each chain's parameters is a row of a table."""

    def __init__(self, model: Any, densities: _Densities, x: Tensor) -> None:
        remedy = (
            "give exact_draws, such as a perfect sampler or a transfer matrix. Draws of a Markov chain instead would "
            "leave an error in the posterior that nothing shows"
        )
        if not model.is_binary:
            raise SettingsError(
                f"the exchange algorithm needs exact draws, and real vectors cannot be listed; {remedy}"
            )
        if 2**model.dim > _MAX_STATES:
            raise SettingsError(
                f"the exchange algorithm needs exact draws, and 2**{model.dim} states are too many to list at "
                f"each step (at most {_MAX_STATES}); {remedy}"
            )
        self._states, self._densities, self._count = model.enumerate_states(), densities, len(x)
        same = (x.unsqueeze(1) == self._states).all(-1) if len(x) * len(self._states) < 2**22 else None
        if same is None:
            same = torch.stack([(row == self._states).all(-1) for row in x])
        if not bool(same.any(1).all()):
            raise DataError("the model has binary vectors, and x has entries other than 0 and 1")
        self._data = same.to(torch.uint8).argmax(1)

    def at(self, theta: Tensor) -> Tensor:
        """Return the log densities of all states, ``(c, states)``."""
        return self._densities(theta, self._states)

    def of_data(self, at: Tensor) -> Tensor:
        """Return the summed log densities of the data, ``(c,)``."""
        return at[:, self._data].sum(-1)

    def draw(self, at: Tensor, generator: torch.Generator) -> Tensor:
        """Draw as many states as there are data, by their places in the list, ``(c, n)``."""
        return torch.multinomial(torch.softmax(at, -1), self._count, replacement=True, generator=generator)

    def of(self, at: Tensor, y: Tensor) -> Tensor:
        """Return the summed log densities of draws, ``(c,)``."""
        return at.gather(1, y).sum(-1)


class _Given:
    """Exact draws by a user's function. What is known of each chain's parameters are the parameters."""

    def __init__(
        self, model: Any, densities: _Densities, x: Tensor, parameters: _Parameters, exact_draws: ExactDraws
    ) -> None:
        self._dim, self._densities, self._x = model.dim, densities, x
        self._parameters, self._exact_draws = parameters, exact_draws

    def at(self, theta: Tensor) -> Tensor:
        """Return the vectors."""
        return theta

    def of_data(self, at: Tensor) -> Tensor:
        """Return the summed log densities of the data, ``(c,)``."""
        return self._densities(at, self._x).sum(-1)

    def draw(self, at: Tensor, generator: torch.Generator) -> Tensor:
        """Draw as many vectors as there are data, ``(c, n, d)``."""
        count = len(self._x)
        rows = [self._exact_draws(self._parameters.by_name(one), count, generator) for one in at]
        for row in rows:
            if row.shape != (count, self._dim) or not bool(row.isfinite().all()):
                raise ShapeError(
                    f"exact_draws returned shape {tuple(row.shape)}, or values that are not finite; it must return "
                    f"finite draws of shape ({count}, {self._dim})"
                )
        return torch.stack(rows).to(at)

    def of(self, at: Tensor, y: Tensor) -> Tensor:
        """Return the summed log densities of draws, ``(c,)``."""
        return self._densities(at, y).sum(-1)
