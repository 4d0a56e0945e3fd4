"""Layers with random weights in place of those of a torch module, and what cannot be replaced."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import pyro
from torch import Tensor, nn
from torch.nn import functional

from bayeskit.errors import DataError, ModelError
from bayeskit.models.sparse_networks._priors import WeightPrior
from bayeskit.models.sparse_networks._weights import weight_posterior

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONVOLVE = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}

# What to take in place of layers without a sparse posterior. The first class that fits counts.
_REMEDIES: tuple[tuple[tuple[type, ...], str], ...] = (
    (
        (nn.modules.batchnorm._BatchNorm,),
        "its outputs depend on the other rows of a minibatch, so that there is no likelihood of a row; train without "
        "it, or fold its statistics into the layer before by torch.nn.utils.fusion.fuse_conv_bn_eval",
    ),
    (
        (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.instancenorm._InstanceNorm),
        "its gain undoes any shrinkage of the layer before; set elementwise_affine=False (affine=False)",
    ),
    (
        (nn.RNNBase, nn.RNNCellBase),
        "its weights act at every step, so that outputs have no independent draws; take Conv1d along time, or name the "
        "layer in deterministic",
    ),
    (
        (nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
        "its weights act at every position within products of two outputs; name it in deterministic, and make the "
        "layers after it sparse",
    ),
    ((nn.Embedding, nn.EmbeddingBag), "take Linear on one_hot vectors, or name the layer in deterministic"),
    (
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        "take Upsample and a convolution, or name the layer in deterministic",
    ),
    ((nn.Bilinear,), "take Linear on the products of the two inputs, or name the layer in deterministic"),
    ((nn.PReLU,), "take LeakyReLU, or name the layer in deterministic"),
    (
        (nn.modules.dropout._DropoutNd,),
        "it is a second noise beside the posterior; take Identity",
    ),
    (
        (nn.modules.lazy.LazyModuleMixin,),
        "it has no shape yet; call the module once on data",
    ),
)


class StochasticLayer(nn.Module):
    """Linear or convolutional layer with a posterior of its weight; the bias is a plain parameter.

    Within :func:`given_values` outputs are drawn, once for each call of the network; elsewhere they are those of the
    posterior mean.
    """

    def __init__(self, layer: Any, name: str, prior: WeightPrior, scale: float, groups: bool) -> None:
        super().__init__()
        self.name, self.num_spatial = name, layer.weight.dim() - 2
        self.weights = weight_posterior(layer.weight, scale, prior, groups)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())
        self.recipe = recipe_of(layer)
        self._values: Mapping[str, Tensor] | None = None
        self._mode = "mean"

    def sample(self, which: str, marks: Any = None) -> dict[str, Tensor]:
        """Sample the sites of the ``"prior"`` or ``"posterior"`` as a Pyro program."""
        place = ("prior", "posterior").index(which)
        return {
            site: pyro.sample(f"{self.name}.{site}", pair[place], infer=copy.copy(marks))
            for site, pair in self.weights.sites().items()
        }

    def linear(self, weight: Tensor, x: Tensor) -> Tensor:
        """Return the outputs of a weight without bias."""
        if not self.num_spatial:
            return functional.linear(x, weight)
        options = {k: self.recipe[1][k] for k in ("stride", "padding", "dilation", "groups")}
        return _CONVOLVE[self.num_spatial](x, weight, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs: ``(n, ..., in)`` to ``(n, ..., out)``, or ``(n, in, *space)`` to ``(n, out, *space)``."""
        if self._mode == "used":
            raise ModelError(
                f"layer {self.name!r} acts twice in one pass of the network, with the same weights; give each place a "
                "layer of its own"
            )
        if self._mode == "local":
            outputs = self.weights.outputs(self.linear, x, -1 - self.num_spatial)
        else:
            weight = self.weights.moments()[0] if self._values is None else self.weights.weight(self._values)
            outputs = self.linear(weight, x)
        if self._mode != "mean":
            self._mode = "used"
        return outputs if self.bias is None else outputs + self.bias.reshape(-1, *(1,) * self.num_spatial)


#: Class of a torch layer, and what it is made with other than its sizes.
Recipe = tuple[type[nn.Module], Mapping[str, Any]]


def recipe_of(layer: nn.Module) -> Recipe:
    """Return how a linear or convolutional layer is made."""
    names = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    return type(layer), {} if isinstance(layer, nn.Linear) else {name: getattr(layer, name) for name in names}


def plain(recipe: Recipe, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Return a torch layer with a given weight ``(out, in, *kernel)`` and bias."""
    kind, options = recipe
    sizes = (weight.shape[1] * options.get("groups", 1), weight.shape[0])
    place = {"device": weight.device, "dtype": weight.dtype}
    layer: nn.Module = nn.utils.skip_init(kind, *sizes, bias=bias is not None, **place, **options)
    state = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    layer.load_state_dict({name: value.detach() for name, value in state.items()})
    return layer


@contextmanager
def given_values(
    layers: Collection[StochasticLayer], values: Mapping[str, Mapping[str, Tensor]] | None
) -> Iterator[None]:
    """Let each layer act once, with the given ``values`` of its sites or, if None, with outputs drawn from moments."""
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.__dict__.update, _values=None, _mode="mean")
            layer._values = None if values is None else values[layer.name]
            layer._mode = "local" if values is None else "given"
        yield


# Replacing the layers of a module.


def with_stochastic_layers(
    module: nn.Module, prior: WeightPrior, scale: float, groups: bool, deterministic: Collection[str]
) -> tuple[nn.Module, list[StochasticLayer]]:
    """Return a copy of a module with stochastic layers, and these; ModelError for what cannot be replaced."""
    names = dict(module.named_modules())
    if missing := sorted(set(deterministic) - set(names)):
        raise ModelError(
            f"deterministic has {missing[0]!r}, which is no part of the module; its parts: {_listed(names)}"
        )
    result = copy.deepcopy(module)
    found: list[StochasticLayer] = []
    seen: dict[int, str] = {}
    for name, part in list(result.named_modules(remove_duplicate=False)):
        if any(name == kept or name.startswith(f"{kept}.") for kept in deterministic):
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                raise _refusal(name, part)
            continue
        if type(part) in (nn.Linear, *CONVOLUTIONS):
            if id(part.weight) in seen:
                raise ModelError(
                    f"layer {name!r} has the weights of the layer {seen[id(part.weight)]!r} again; give each place a "
                    "layer and weights of its own"
                )
            seen[id(part.weight)] = name
            _check_layer(name, part, groups)
            layer = StochasticLayer(part, name or "layer", prior, scale, groups)
            layer.train(part.training)
            found.append(layer)
            if not name:
                result = layer
            else:
                above, _, own = name.rpartition(".")
                setattr(result.get_submodule(above), own, layer)
        elif (own := next((p for p, _ in part.named_parameters(recurse=False)), None)) is not None or _is_refused(part):
            raise _refusal(name, part, own)
    if not found:
        raise ModelError(
            f"{type(module).__name__} has no linear or convolutional layer to make sparse; give a module with Linear, "
            "Conv1d, Conv2d or Conv3d"
        )
    return result, found


def _listed(names: Collection[str]) -> str:
    return ", ".join(repr(name) for name in list(names)[1:9])


def _is_refused(part: nn.Module) -> bool:
    """Tell whether a module without parameters of its own is refused all the same."""
    noisy = isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0
    return noisy or isinstance(part, (nn.modules.batchnorm._BatchNorm, nn.modules.lazy.LazyModuleMixin))


def _refusal(name: str, part: nn.Module, parameter: str | None = None) -> ModelError:
    kind = type(part).__name__
    for classes, remedy in _REMEDIES:
        if isinstance(part, classes):
            return ModelError(f"layer {name!r} ({kind}) cannot be made stochastic: {remedy}")
    held = f"has a parameter {parameter!r} of its own" if parameter else "is of an unknown kind"
    return ModelError(
        f"part {name!r} ({kind}) cannot be made stochastic: it {held}, and only Linear, Conv1d, Conv2d and Conv3d "
        f"themselves are replaced; write it with such layers, or set deterministic=[{name!r}] to leave it as it is"
    )


def _check_layer(name: str, layer: Any, groups: bool) -> None:
    if not layer.weight.is_floating_point() or not bool(layer.weight.isfinite().all()):
        raise DataError(f"the weight of layer {name!r} is not finite; initialise the module again")
    if isinstance(layer, nn.Linear):
        return
    if layer.padding_mode != "zeros":
        raise ModelError(
            f"layer {name!r} has padding_mode {layer.padding_mode!r}; put a layer such as ReflectionPad2d before a "
            "convolution with padding 0"
        )
    if groups and layer.groups != 1:
        raise ModelError(
            f"layer {name!r} is a convolution of {layer.groups} groups of channels, each with inputs of its own; set "
            "groups=False, or take a convolution with groups=1"
        )
