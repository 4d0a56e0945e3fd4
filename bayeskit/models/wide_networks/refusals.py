"""What has no limit, and what to write instead."""

from __future__ import annotations

from typing import Any

from torch import nn

from bayeskit.errors import ModelError

ATTENTION = (
    *(nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)
SOFTMAX = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin)
EMPIRICAL = "take empirical_ntk of the module as it is"


class Refusal(ModelError):
    """A part of a network that has no limit here.

    Attributes
    ----------
    place, reason : str
        Where it is, and why or what to write instead.
    """

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place, self.reason = place, reason


class Refusals:
    """All that has been refused in a network, to be told at once."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}

    def add(self, error: ModelError) -> None:
        """Note one; those with the same reason are told together."""
        if isinstance(error, Refusal):
            self._places.setdefault(error.reason, []).append(error.place)
        else:
            self._places.setdefault(str(error), [])

    def check(self) -> None:
        """Raise an error if there is any."""
        found = [f"{', '.join(places)}: {reason}" if places else reason for reason, places in self._places.items()]
        if len(found) == 1:
            raise ModelError(found[0])
        if found:
            raise ModelError("these parts of the network have no limit here:\n" + "\n".join(f"- {x}" for x in found))


def check_plain(place: str, module: nn.Module) -> None:
    """Refuse modules that do not do what their class says."""
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        raise Refusal(place, "its number of inputs is not known yet; run the module once on data")
    if nn.utils.parametrize.is_parametrized(module):
        raise Refusal(
            place,
            "its weights are functions of others, such as spectral_norm or weight_norm, so that they do not have the "
            "law of random weights; take the layer without parametrization",
        )
    if module._forward_hooks or module._forward_pre_hooks:
        raise Refusal(place, "hooks change what it does, which cannot be read; write it without hooks")


def reason_against(module: nn.Module) -> str:
    """Return why a module has no limit, and what to take instead."""
    kind = type(module).__name__
    if "MaxPool" in kind:
        return "the maximum of correlated normal numbers has no closed limit; use AvgPool"
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return _against_batch_normalization(module)
    if "InstanceNorm" in kind:
        return (
            "it normalizes each channel by itself, after which channels are not normal; "
            f"use {_replacements(getattr(module, 'num_features', 'C'), 1 if '1d' in kind else 2)}"
        )
    if isinstance(module, nn.GroupNorm):
        return f"only one group, of all channels, has a limit here; use nn.GroupNorm(1, {module.num_channels})"
    if isinstance(module, nn.PReLU):
        return "its slope is trained; use LeakyReLU"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return f"a recurrent network shares its weights over time, which has no limit here; {EMPIRICAL}"
    if isinstance(module, ATTENTION):
        return f"attention multiplies features by one another, which has no limit here; {EMPIRICAL}"
    if isinstance(module, SOFTMAX):
        return SOFTMAX_REASON
    return (
        "it has no limit of infinite width here; the nearest are Linear, Conv1d, Conv2d, AvgPool, LayerNorm and "
        f"Flatten; for an elementwise function use Elementwise(function), which goes by quadrature; for anything else "
        f"{EMPIRICAL}"
    )


SOFTMAX_REASON = (
    "a softmax divides by a sum over channels, which has no limit here; leave one at the network's end to the "
    f"likelihood, as ClassificationModel does; elsewhere {EMPIRICAL}"
)


def _against_batch_normalization(module: nn.Module) -> str:
    channels = getattr(module, "num_features", "C")
    axes = {"BatchNorm1d": 0, "BatchNorm3d": 3}.get(type(module).__name__, 2)
    if module.training:
        reason = "it couples the inputs of a batch, so that there is no kernel between two of them"
    else:
        reason = "in eval mode it scales channels by statistics of past data, which have no law at initialization"
    return f"{reason}; use {_replacements(channels, axes)}"


def _replacements(channels: Any, num_axes: int) -> str:
    if not num_axes:
        return f"nn.LayerNorm({channels})"
    sizes = {1: "length", 2: "height, width", 3: "depth, height, width"}[num_axes]
    return f"nn.LayerNorm([{channels}, {sizes}]) or nn.GroupNorm(1, {channels})"


def reason_against_function(target: Any) -> str:
    """Return why a function has no limit, and what to take instead."""
    called = called_as(target)
    if "softmax" in called:
        return SOFTMAX_REASON
    if "scaled_dot_product" in called:
        return f"attention multiplies features by one another, which has no limit here; {EMPIRICAL}"
    if "max_pool" in called:
        return "the maximum of correlated normal numbers has no closed limit; use an average"
    if called in ("detach", "detach_"):
        return "it keeps gradients from the layers before; freeze them with requires_grad_(False)"
    if called in ("sum", "amax", "amin", "max", "min"):
        return f"of functions over a grid only the mean has a limit here; {EMPIRICAL}"
    if called in ("clamp", "clip", "maximum", "minimum", "where", "threshold", "hardshrink", "softshrink"):
        return "write it as Elementwise(function), which goes by quadrature"
    return (
        "it has no limit of infinite width here; for an elementwise function use Elementwise(function), which goes by "
        f"quadrature; for anything else {EMPIRICAL}"
    )


def called_as(target: Any) -> str:
    """Return the name of a function or method."""
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))
