"""Networks with a sparse posterior of their weights: model, guide, predictions, pruning and precision."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

import pyro
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from bayeskit.errors import ModelError, SettingsError, ShapeError
from bayeskit.extend import global_stream, new_generator, real_number, whole_number
from bayeskit.models.sparse_networks._compression import compress
from bayeskit.models.sparse_networks._layers import StochasticLayer, given_values, plain, with_stochastic_layers
from bayeskit.models.sparse_networks._priors import PriorName, SpikeAndSlabPrior, WeightPrior, as_prior

#: Marks the guide's sites, so that the model knows whose draws it is given.
_OWNER = "sparse_network"


class LayerPrecision(NamedTuple):
    """Fixed-point format of the weights that are kept in a layer.

    Attributes
    ----------
    bits : int
        Bits of a weight, sign included; 0 if none is kept.
    step : float
        Distance of two neighbouring numbers.
    """

    bits: int
    step: float


class SparseNetwork(nn.Module):
    """Network with a posterior of its weights, which :func:`sparsify` makes.

    :meth:`model` and :meth:`guide` are trained by ``bk.fit`` with ``ELBO()``. Called as a module, it returns outputs at
    the posterior mean. Biases and deterministic layers are parameters without a prior.

    Attributes
    ----------
    network : Module
        Copy of the module, with stochastic layers.
    likelihood : callable
    num_data : int
    prior : LogUniformPrior, HorseshoePrior or SpikeAndSlabPrior
    """

    def __init__(
        self,
        network: nn.Module,
        layers: list[StochasticLayer],
        likelihood: Callable[[Tensor], Any],
        num_data: int,
        prior: WeightPrior,
        draws: Literal["outputs", "weights"],
    ) -> None:
        super().__init__()
        self.network, self.likelihood, self.num_data, self.prior = network, likelihood, num_data, prior
        self._names, self._is_local = tuple(layer.name for layer in layers), draws == "outputs"

    @property
    def layers(self) -> tuple[StochasticLayer, ...]:
        """Stochastic layers, in the order of the module."""
        found = {part.name: part for part in self.network.modules() if isinstance(part, StochasticLayer)}
        return tuple(found[name] for name in self._names)

    # -- as a Pyro program ------------------------------------------------------------------

    def model(self, x: Tensor, y: Tensor) -> None:
        """Draw weights from the prior, and observe ``y`` as site ``"y"`` given the outputs at ``x``.

        ``x``: rows, ``(n, ...)``; ``y``: what the likelihood has for them, ``(n, ...)``. A minibatch is scaled to
        ``num_data`` rows. Raises ``ShapeError`` or ``SettingsError`` if the numbers of rows or the likelihood do not
        match; ``ModelError`` if a layer acts twice.
        """
        size = len(x)
        if len(y) != size:
            raise ShapeError(f"x has {size} rows and y {len(y)}; give one y for each row")
        if size > self.num_data:
            raise SettingsError(f"x has {size} rows, more than num_data = {self.num_data}; give sparsify all of them")
        with _FromGuide(self) as source:
            values = {layer.name: layer.sample("prior") for layer in self.layers}
        self._check_shapes(values)
        with given_values(self.layers, None if source.is_guide and self._is_local else values):
            outputs = self.network(x)
        distribution = self.likelihood(outputs)
        if tuple(distribution.batch_shape) != (size,):
            raise ShapeError(
                f"the likelihood of {size} rows has batch shape {tuple(distribution.batch_shape)} at outputs "
                f"{tuple(outputs.shape)}; it must be ({size},): take .to_event, or a column such as outputs[:, 0]"
            )
        rows = None if size == self.num_data else torch.arange(size, device=x.device)
        with pyro.plate("data", self.num_data, subsample=rows, dim=-1):
            pyro.sample("y", distribution, obs=y)

    def guide(self, x: Tensor, y: Tensor) -> None:
        """Draw weights from the posterior; same arguments as :meth:`model`."""
        for layer in self.layers:
            layer.sample("posterior", {_OWNER: id(self)})

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs at the posterior mean of all weights: ``(n, ...)`` to ``(n, ...)``."""
        outputs: Tensor = self.network(x)
        return outputs

    def _check_shapes(self, values: Mapping[str, Mapping[str, Tensor]]) -> None:
        for layer in self.layers:
            for site, (prior, _) in layer.weights.sites().items():
                if values[layer.name][site].shape != prior.event_shape:
                    raise ModelError(
                        f"site '{layer.name}.{site}' has a batch of draws, and a network runs with one at a time; set "
                        "vectorize_particles=False in the objective"
                    )

    # -- predictions ------------------------------------------------------------------------

    def sample_outputs(self, x: Tensor, num_draws: int = 100, *, seed: int | torch.Generator = 0) -> Tensor:
        """Return outputs for draws of all weights from the posterior: ``(n, ...)`` to ``(num_draws, n, ...)``."""
        outputs, layers = [], self.layers
        with torch.no_grad(), global_stream(new_generator(seed, stream="outputs of a sparse network")):
            for _ in range(whole_number("num_draws", num_draws, 1)):
                sites = {y.name: {k: pair[1].sample() for k, pair in y.weights.sites().items()} for y in layers}
                with given_values(layers, sites):
                    outputs.append(self.network(x))
        return torch.stack(outputs)

    # -- what is kept -----------------------------------------------------------------------

    @torch.no_grad()
    def kept(self, fraction: float | None = None) -> dict[str, Tensor]:
        """Return which weights are kept, for each layer by name a boolean tensor in the shape of its weight.

        ``fraction``: share of all weights to keep, in ``(0, 1]``: those with the largest ratio of squared mean and
        variance or, under a spike-and-slab prior, probability. By default the threshold of the prior decides. Raises
        ``SettingsError`` if ``fraction`` is outside its domain.
        """
        if fraction is None:
            return {layer.name: layer.weights.is_kept() for layer in self.layers}
        fraction = real_number("fraction", fraction, "(0, 1]")
        importance = {layer.name: layer.weights.importance() for layer in self.layers}
        joint = torch.cat([value.flatten() for value in importance.values()])
        number = max(1, round(fraction * len(joint)))
        least = joint.sort(descending=True).values[number - 1]
        return {name: value >= least for name, value in importance.items()}

    @torch.no_grad()
    def precision(self, share: float = 0.1, *, fraction: float | None = None) -> dict[str, LayerPrecision]:
        r"""Return the fixed-point format of each layer that the posterior variances allow.

        Rounding to a step :math:`\Delta` adds an error of variance :math:`\Delta^2 / 12`. The step is chosen so that
        this is the ``share`` of the posterior variance on average over the weights kept, :math:`\Delta^2 / 12 =
        s / \overline{\sigma^{-2}}`: at an optimum, where curvature and variance are reciprocal, rounding costs
        :math:`s / 2` nats a weight. ``fraction``: as in :meth:`kept`. Raises ``SettingsError`` if ``share`` is not
        positive.
        """
        share = real_number("share", share, "(0, inf)")
        result, kept = {}, self.kept(fraction)
        for layer in self.layers:
            mean, variance = (m[kept[layer.name]] for m in layer.weights.moments())
            if not len(mean):
                result[layer.name] = LayerPrecision(0, math.inf)
                continue
            step = math.sqrt(12 * share / float(variance.double().reciprocal().mean()))
            levels = 2 * round(float(mean.abs().max()) / step) + 1
            result[layer.name] = LayerPrecision(max(1, math.ceil(math.log2(levels))), step)
        return result

    def pruned(self, fraction: float | None = None, *, rounding: float | None = None) -> nn.Module:
        """Return a plain module of the same architecture, with posterior means of the weights kept and zeros.

        ``fraction``: as in :meth:`kept`. ``rounding``: share of the posterior variance that rounding may add, as in
        :meth:`precision`; by default weights are not rounded.
        """
        weights = self._weights(fraction, rounding)
        made = {layer.name: plain(layer.recipe, weights[layer.name], layer.bias) for layer in self.layers}
        return _replaced(self.network, made)

    def compressed(self, fraction: float | None = None, *, rounding: float | None = None) -> nn.Sequential:
        """Return a smaller plain module with the outputs of :meth:`pruned`, without the units that have no effect.

        A unit is left out if all weights that read it are zero or, between linear layers, if all weights that make it
        are zero, so that it is constant and goes into the next bias. Inputs of a first linear layer that no weight
        reads are skipped by :class:`SelectedFeatures`. Raises ``ModelError`` unless the module is a layer or a
        ``Sequential``, which says what follows what.
        """
        return compress(self.pruned(fraction, rounding=rounding))

    @torch.no_grad()
    def _weights(self, fraction: float | None, rounding: float | None) -> dict[str, Tensor]:
        kept = self.kept(fraction)
        formats = {} if rounding is None else self.precision(rounding, fraction=fraction)
        result = {}
        for layer in self.layers:
            weight = layer.weights.moments()[0]
            if rounding is not None and formats[layer.name].bits:
                step = formats[layer.name].step
                weight = (weight / step).round() * step
            result[layer.name] = torch.where(kept[layer.name], weight, 0.0)
        return result


class _FromGuide(Messenger):
    """Find out whether values of the sites within are draws of the network's own guide."""

    def __init__(self, network: SparseNetwork) -> None:
        super().__init__()
        self._owner, self.is_guide = id(network), False

    def _pyro_post_sample(self, message: Any) -> None:
        self.is_guide = message["infer"].get(_OWNER) == self._owner


def _replaced(network: nn.Module, made: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of a network with plain layers."""
    if isinstance(network, StochasticLayer):
        return made[network.name]
    result = copy.deepcopy(network)
    for name, part in list(result.named_modules()):
        if isinstance(part, StochasticLayer):
            above, _, own = name.rpartition(".")
            setattr(result.get_submodule(above), own, made[part.name])
    return result


def sparsify(
    module: nn.Module,
    likelihood: Callable[[Tensor], Any],
    *,
    num_data: int,
    prior: WeightPrior | PriorName = "log_uniform",
    groups: bool = False,
    draws: Literal["outputs", "weights"] = "outputs",
    deterministic: Collection[str] = (),
    initial_scale: float = 0.01,
) -> SparseNetwork:
    r"""Give the linear and convolutional layers of a module a sparse posterior of their weights.

    Training draws the outputs of a layer in place of its weights (local reparameterisation): given inputs :math:`x`
    they have mean :math:`\sum_j x_j \mathrm E w_{ij}` and variance :math:`\sum_j x_j^2 \mathrm{Var}\, w_{ij}`. Each row
    then has a draw of its own, and gradients have far less variance than with one draw for all rows.

    Parameters
    ----------
    module : Module
        Network, whose weights are the initial means; it is copied.
    likelihood : callable
        Function from outputs ``(n, ...)`` to a Pyro distribution of ``n`` rows, such as
        ``lambda outputs: dist.Categorical(logits=outputs)``. A module, such as one with a noise scale, is trained.
    num_data : int
        Number of rows of the full data.
    prior : str or settings, default "log_uniform"
        ``"log_uniform"``, ``"horseshoe"`` or ``"spike_and_slab"``, or :class:`LogUniformPrior`,
        :class:`HorseshoePrior` or :class:`SpikeAndSlabPrior` with other settings.
    groups : bool, default False
        Whether all weights of one input of a layer, a neuron or channel, are kept or removed together, which makes
        layers smaller.
    draws : str, default "outputs"
        ``"weights"`` makes one draw of the weights for all rows.
    deterministic : collection of str
        Names of parts of the module that stay as they are.
    initial_scale : float, default 0.01
        Initial standard deviation of weights, positive.

    Returns
    -------
    SparseNetwork

    Raises
    ------
    ModelError
        If the module has a layer that cannot be made stochastic, such as batch normalisation or a recurrent layer.
    DataError
        If a weight is not finite.
    UnknownNameError
        If there is no prior of that name.
    SettingsError
        If a setting is outside its domain, or a spike-and-slab prior is asked for draws of weights.

    Notes
    -----
    The distribution of outputs is that of the weights for normal weights of linear layers that see each row once; for
    spike-and-slab weights and for a horseshoe without groups it is the normal distribution with the same moments, which
    gives the exact bound if the layer is the last one and the noise normal. Where a weight acts at several places of a
    row, as in a convolution, their outputs are drawn independently. :meth:`SparseNetwork.sample_outputs` draws weights.

    The log-uniform prior is improper, and so is the posterior: there is no evidence, and the bound has a free constant.
    A single weight with estimate :math:`z` in units of its standard error is removed if :math:`|z| < 1`: of weights
    that are zero in truth, 31.7 % are kept.

    References
    ----------
    Kingma, D. P., Salimans, T., Welling, M. (2015). Variational dropout and the local reparameterization trick.
    NeurIPS. Molchanov, D., Ashukha, A., Vetrov, D. (2017). Variational dropout sparsifies deep neural networks. ICML.
    Louizos, C., Ullrich, K., Welling, M. (2017). Bayesian compression for deep learning. NeurIPS.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> import bayeskit as bk
    >>> from bayeskit.models.sparse_networks import sparsify
    >>> x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    >>> module = torch.nn.Linear(4, 1, bias=False)
    >>> _ = module.weight.data.fill_(1.0)
    >>> network = sparsify(module, lambda f: dist.Normal(f[:, 0], 1.0), num_data=200, initial_scale=0.1)
    >>> result = bk.fit(network.model, network.guide, bk.objectives.ELBO(), (x, 2 * x[:, 0]), num_steps=500,
    ...                 optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.03), progress=False)
    >>> network.kept()["layer"]
    tensor([[ True, False, False, False]])
    """
    if draws not in ("outputs", "weights"):
        raise SettingsError(f'draws must be "outputs" or "weights", not {draws!r}')
    settings = as_prior(prior)
    if draws == "weights" and isinstance(settings, SpikeAndSlabPrior):
        raise SettingsError(
            "draws of spike-and-slab weights have no gradient in their probabilities; leave draws at 'outputs'"
        )
    if not callable(likelihood):
        raise SettingsError(f"likelihood must be a function from outputs to a distribution, not {likelihood!r:.80}")
    if isinstance(deterministic, str):
        raise SettingsError(f"deterministic must be a collection of names, such as [{deterministic!r}]")
    scale = real_number("initial_scale", initial_scale, "(0, inf)")
    network, layers = with_stochastic_layers(module, settings, scale, groups, deterministic)
    return SparseNetwork(network, layers, likelihood, whole_number("num_data", num_data, 1), settings, draws)
