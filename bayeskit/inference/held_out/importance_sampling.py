"""Held-out log likelihood by importance sampling from the guide."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bayeskit._progress import progress_bar
from bayeskit._statistics import pareto_shape
from bayeskit._torch import global_stream, new_generator
from bayeskit.inference.held_out.minibatches import Minibatches, already_validated, positive, run
from bayeskit.inference.held_out.result import HeldOut, tail_problems

ROWS = 4000  # particles times data of a run: enough to hide what Pyro costs, few enough for the caches


def importance_sampling(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 5000,
    chunk_size: int | None = None,
    batch_size: int | None = None,
    data_plate: str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> HeldOut:
    r"""Estimate the log likelihood of each datum by importance sampling from the guide.

    With independent draws :math:`z_s` of the guide, the estimate is the log of the mean of the weights
    :math:`p(x, z_s) / q(z_s \mid x)`. The mean is unbiased; its log is too low by half its squared standard error,
    up to terms of higher order, if the weights have a variance. Errors are those of the delta method.

    Parameters
    ----------
    model, guide : callable
        As for an objective. The latent variables of each datum and its observation stand in one plate.
    *args
        What both are called with: the data.
    num_samples : int, default 5000
        Draws for each datum.
    chunk_size : int, optional
        Draws for each datum that are made at once. Memory grows with ``chunk_size`` times ``batch_size``; by default
        that is 4,000.
    batch_size : int, optional
        Data taken at once: tensors whose leading dimension is the data are sliced. By default 100 where a tensor is
        the only argument, and all data elsewhere.
    data_plate : str, optional
        Name of the plate whose items are the data; by default the only one that holds all sites.
    seed : int, default 0
    progress : bool, default True

    Returns
    -------
    HeldOut
        Not trusted if more than 5 % of the data have a Pareto k above 0.7.

    Raises
    ------
    SettingsError
        If there is nothing to draw.
    GuideError
        If guide and model do not fit together, or the guide enumerates a site.
    ModelError
        If there is no plate of data.

    References
    ----------
    Burda, Y., Grosse, R., Salakhutdinov, R. (2016). Importance weighted autoencoders. ICLR.

    Vehtari, A., Simpson, D., Gelman, A., Yao, Y., Gabry, J. (2024). Pareto smoothed importance sampling. Journal of
    Machine Learning Research 25(72).

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.held_out import importance_sampling
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(0.4 * x, 0.8))
    >>> x = torch.tensor([1.0, -0.5])
    >>> result = importance_sampling(model, guide, x, num_samples=2000)
    >>> error = result.log_likelihood - dist.Normal(0.0, 2**0.5).log_prob(x)
    >>> result.trusted, bool((error.abs() < 4 * result.pointwise_standard_error).all())
    (True, True)
    """
    positive(num_samples=num_samples, chunk_size=chunk_size, batch_size=batch_size)
    begin = time.monotonic()
    cpu = new_generator(seed, stream="held-out importance sampling")
    with global_stream(cpu):
        data = Minibatches.of(model, guide, args, batch_size, data_plate)
    chunk = min(chunk_size or max(1, ROWS // data.batch_size), num_samples)
    found: list[_Weights] = []
    with progress_bar("importance sampling", data.num_items * num_samples, progress) as bar:
        with already_validated(), global_stream(cpu):
            for rows, batch in data:
                weights = _Weights(num_samples)
                for start in range(0, num_samples, chunk):
                    count = min(chunk, num_samples - start)
                    weights.add(run(model, guide, batch, count, data.nesting, data_plate).log_weight)
                    bar.update(rows.start * num_samples + (rows.stop - rows.start) * (start + count))
                found.append(weights)
    log_likelihood = torch.cat([w.log_mean() for w in found])
    # What the weights' own format cannot resolve is an error, too.
    resolution = torch.finfo(data.particles.log_weight.dtype).eps * log_likelihood.abs()
    error = torch.hypot(torch.cat([w.error() for w in found]), resolution)
    pareto_k = torch.cat([w.pareto_k() for w in found])
    problems = tail_problems(pareto_k, "use annealed importance sampling, a closer guide, or more samples")
    if lost := sum(w.num_nan for w in found):
        problems.append(
            f"{100 * lost / (num_samples * data.num_items):.2g} % of the weights are NaN and were counted as zero: "
            "mend the model or the guide"
        )
    seconds = time.monotonic() - begin
    return HeldOut("importance_sampling", log_likelihood, error, num_samples, pareto_k, tuple(problems), seconds)


class _Weights:
    """Sums of weights of a minibatch, and the largest of them, gathered chunk by chunk."""

    def __init__(self, num_samples: int) -> None:
        self._count = num_samples
        # One more than the tail that the Pareto fit takes.
        self._num_kept = min(num_samples, math.ceil(3 * math.sqrt(num_samples)) + 1)
        self._first = self._second = self._smallest = self._largest = torch.empty(0)
        self._waiting: list[Tensor] = []
        self.num_nan = 0

    def add(self, log_weight: Tensor) -> None:
        """Take in log weights ``(k, items)``."""
        log_weight = log_weight.to(torch.float64)
        missing = log_weight.isnan()
        if bool(missing.any()):
            self.num_nan += int(missing.sum())
            log_weight = torch.where(missing, -torch.inf, log_weight)
        first, second, smallest = log_weight.logsumexp(0), (2 * log_weight).logsumexp(0), log_weight.amin(0)
        if self._first.numel():
            first, second = first.logaddexp(self._first), second.logaddexp(self._second)
            smallest = smallest.minimum(self._smallest)
        self._first, self._second, self._smallest = first, second, smallest
        self._waiting.append(log_weight)
        if sum(map(len, self._waiting)) >= self._num_kept:
            self._gather()

    def _gather(self) -> None:
        """Keep the largest weights only."""
        if self._waiting:
            candidates = torch.cat([*([self._largest] if self._largest.numel() else []), *self._waiting])
            self._largest = candidates.topk(min(self._num_kept, len(candidates)), dim=0, sorted=False).values
            self._waiting = []

    def log_mean(self) -> Tensor:
        """Return the log of the mean weight, ``(items,)``."""
        return self._first - math.log(self._count)

    def error(self) -> Tensor:
        """Return the standard error of :meth:`log_mean` by the delta method; of one draw it is not known."""
        if self._count == 1:
            return torch.full_like(self._first, torch.nan)
        spread = self._count * (self._second - 2 * self._first).exp() - 1
        return (spread.clamp_min(0) / (self._count - 1)).sqrt()

    def pareto_k(self) -> Tensor:
        """Return the shape of the tail of each datum's weights, ``(items,)``."""
        self._gather()
        rest = self._count - len(self._largest)
        # Of weights outside the tail the fit asks for their number only.
        columns = zip(self._largest.T.cpu(), self._smallest.cpu(), strict=True)
        shapes = [pareto_shape(torch.cat([least.expand(rest), largest])) for largest, least in columns]
        return torch.tensor(shapes, dtype=torch.float64, device=self._first.device)
