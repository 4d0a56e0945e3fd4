"""Run a Pyro model with given values at its discrete latent sites, and record the log probability."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyro
import torch
from pyro.distributions import Delta
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from bayeskit._pyro.batching import batchable_distributions
from bayeskit._pyro.inspection import culprit, dtype_and_device, globals_kept
from bayeskit._pyro.reader import is_deterministic
from bayeskit._pyro.unclamped import unclamped
from bayeskit._torch import defaults, global_stream, new_generator
from bayeskit._tracing import UNTRACEABLE
from bayeskit.errors import ModelError, UnsupportedSiteError

UNIT_MASS = {torch.float64: 1e-10}
ROUNDED_MASS = 1e-4


class Choices(NamedTuple):
    """What a discrete site can be: each of its elements takes one of ``K`` values."""

    name: str
    values: Tensor  # (K, *event)
    elements: torch.Size
    possible: Tensor  # (K, *elements), bool: whether the value has positive prior probability there

    @property
    def num_assignments(self) -> int:
        """Number of values of the whole site, the impossible ones included."""
        return len(self.values) ** self.elements.numel()


Supply = Callable[[str, Any], Tensor]


class Replay(Messenger):
    """Supply the values of the latent sites and add up what the sites say.

    A mask of a latent site is ignored, for its masked elements reach no likelihood and integrate to one.
    """

    def __init__(self, supply: Supply, *, eager: bool) -> None:
        super().__init__()
        self.supply, self.eager = supply, eager
        self.values: dict[str, Tensor] = {}
        self.names: set[str] = set()
        self.log_prior = torch.zeros((), dtype=torch.float64)
        self.log_likelihood = torch.zeros((), dtype=torch.float64)
        self.last: str | None = None

    def _pyro_sample(self, msg: Any) -> None:
        self.last = name = msg["name"]
        fn = msg["fn"]
        if isinstance(fn, _Subsample):
            if fn.subsample_size is not None and fn.subsample_size < fn.size:
                raise ModelError(f"plate {name!r} subsamples its data, so the evidence is random; give it all the data")
        elif not msg["is_observed"] and not msg["done"]:
            scale = msg["scale"]
            if not (isinstance(scale, (int, float)) and scale == 1) and bool((torch.as_tensor(scale) != 1).any()):
                raise ModelError(
                    f"the latent site {name!r} is scaled by poutine.scale, so its prior does not add up to one; "
                    "scale the observed sites only"
                )
            fixed = isinstance(base_of(fn), Delta)
            msg["value"], msg["done"] = fn.sample() if fixed else self.supply(name, fn), True

    def _pyro_post_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if isinstance(fn, _Subsample) or is_deterministic(msg):
            return
        if name in self.names:
            raise ModelError(f"two sites are named {name!r}; give each its own name")
        self.names.add(name)
        if msg["is_observed"] or isinstance(base_of(fn), Delta):
            log_prob = unclamped(fn).log_prob(msg["value"])
            log_prob = scale_and_mask(log_prob, msg["scale"], msg["mask"]).sum().to(torch.float64)
            self._refuse_undefined(name, log_prob)
            self.log_likelihood = self.log_likelihood.to(log_prob.device) + log_prob
        else:
            self.values[name] = msg["value"]
            log_prob = unclamped(base_of(fn).expand(elements_of(fn))).log_prob(msg["value"])
            self.log_prior = self.log_prior.to(log_prob.device) + log_prob.sum().to(torch.float64)

    def _refuse_undefined(self, name: str, log_prob: Tensor) -> None:
        if self.eager and (bool(log_prob.isnan()) or float(log_prob) == math.inf):
            given = ", ".join(f"{site} = {value.tolist()}" for site, value in self.values.items())
            raise ModelError(
                f"the log probability of site {name!r} is {float(log_prob)} at {given or 'its only value'}; "
                "look at its parameters and data there"
            )


def base_of(fn: Any) -> Any:
    """Return the distribution of one element, without what repeats, masks or groups it."""
    while "base_dist" in vars(fn) and not hasattr(fn, "transforms"):
        fn = fn.base_dist
    return fn


def elements_of(fn: Any) -> torch.Size:
    """Return the shape of a site's value without that of one element."""
    whole = fn.batch_shape + fn.event_shape
    return whole[: len(whole) - len(base_of(fn).event_shape)]


def choices_of(name: str, fn: Any) -> Choices:
    """List the values of a discrete site.

    Raises
    ------
    UnsupportedSiteError
        If the site is continuous, or its values cannot be listed.
    ModelError
        If their probabilities do not add up to one.
    """
    base, elements = base_of(fn), elements_of(fn)
    values = listed(name, base)
    ones = (1,) * len(elements)
    spread = values.reshape(len(values), *ones, *base.event_shape).expand(len(values), *elements, *base.event_shape)
    log_prob = unclamped(base.expand(elements)).log_prob(spread)
    mass = log_prob.logsumexp(0)
    if not bool((mass.abs() <= UNIT_MASS.get(mass.dtype, ROUNDED_MASS)).all()):
        wrong = float(mass.reshape(-1)[int(mass.abs().nan_to_num(nan=math.inf).argmax())].exp())
        raise ModelError(
            f"the probabilities of site {name!r} add up to {wrong:.6g} instead of one; mend its parameters"
        )
    return Choices(name, values, elements, log_prob > -torch.inf)


def listed(name: str, base: Any) -> Tensor:
    """Return the values of one element of a discrete site, ``(K, *event)``."""
    if base.has_enumerate_support:
        try:
            return base.enumerate_support(expand=False).reshape(-1, *base.event_shape)
        except NotImplementedError as error:
            raise UnsupportedSiteError(
                f"the elements of site {name!r} take different values ({error}); replace its plate by a Python loop"
            ) from error
    if base.support.is_discrete:
        raise UnsupportedSiteError(
            f"site {name!r} is a {type(base).__name__}, whose values cannot be listed; truncate it to a Categorical, "
            "or sum it out by hand"
        )
    raise UnsupportedSiteError(
        f"site {name!r} is continuous ({type(base).__name__}), and only discrete sites can be listed; fix it with "
        f"pyro.condition(model, {{{name!r}: value}}), or estimate the evidence with Target.from_pyro and bayeskit."
        "inference.evidence"
    )


class ReplayedModel:
    """A model with its arguments, to be run with values for its latent sites; no global is left changed."""

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not callable(model):
            raise ModelError(f"a Pyro model is a callable that calls pyro.sample; got {type(model).__name__}")
        self._model, self._args, self._kwargs = model, args, kwargs
        self.device = dtype_and_device((model, args, kwargs))[1]

    def run(self, supply: Supply) -> Replay:
        """Run the model once, with errors that name the site.

        Raises
        ------
        ModelError
            If it fails, or a log probability is not a number.
        """
        replay = Replay(supply, eager=True)
        try:
            with self._globals(), replay:
                self._model(*self._args, **self._kwargs)
        except ModelError:
            raise
        except UNTRACEABLE as error:
            place = "before its first site" if replay.last is None else f"at or after site {replay.last!r}"
            raise ModelError(f"running the model failed {place}{culprit(error)}: {error}") from error
        return replay

    def run_batch(self, values: Mapping[str, Tensor], choices: Mapping[str, Choices]) -> tuple[Tensor, Tensor]:
        """Run the model once for a batch of assignments, by ``vmap``; return log prior and log likelihood, ``(B,)``.

        Raises one of ``UNTRACEABLE`` where the model cannot be batched, or the values of a site depend on others.
        """

        def one(assignment: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            def supply(name: str, fn: Any) -> Tensor:
                # Listing the values again fails where they depend on batched ones.
                if listed(name, base_of(fn)).shape != choices[name].values.shape:
                    raise RuntimeError(f"the values of site {name!r} change")
                return assignment[name]

            replay = Replay(supply, eager=False)
            with replay:
                self._model(*self._args, **self._kwargs)
            if replay.values.keys() != choices.keys():
                raise RuntimeError("the set of sites changes")
            return replay.log_prior, replay.log_likelihood

        with self._globals(), pyro.validation_enabled(False), batchable_distributions():
            return torch.func.vmap(one)(dict(values))

    @contextmanager
    def _globals(self) -> Iterator[None]:
        """Compute in double precision without gradients; leave parameters, validation and random state as they were."""
        with globals_kept(), torch.no_grad(), defaults(torch.float64, self.device), global_stream(new_generator(0)):
            yield
