"""A network's first-order expansion in its parameters."""

from __future__ import annotations

import copy
from operator import attrgetter

from torch import Tensor, nn
from torch.func import functional_call

from bayeskit.errors import ModelError
from bayeskit.models.wide_networks.forward_mode import along


class Linearized(nn.Module):
    r"""The first-order expansion of a module in its parameters; made by :func:`linearize`.

    Outputs are :math:`f(x; \theta_0) + \partial_\theta f(x; \theta_0) (\theta - \theta_0)`.

    Attributes
    ----------
    network : torch.nn.Module
        A copy of the module. Its parameters are :math:`\theta`; they are trained.
    """

    network: nn.Module

    def __init__(self, module: nn.Module):
        super().__init__()
        self.network = copy.deepcopy(module)
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        if not self._names:
            raise ModelError("the module has no trainable parameter; call requires_grad_(True) on those that matter")
        for i, name in enumerate(self._names):
            self.register_buffer(f"start_{i}", module.get_parameter(name).detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs, of the shape of the module's."""
        start = {name: self.get_buffer(f"start_{i}") for i, name in enumerate(self._names)}
        step = {name: attrgetter(name)(self.network) - value for name, value in start.items()}

        def network(parameters: dict[str, Tensor]) -> Tensor:
            result: Tensor = functional_call(self.network, parameters, (x,))
            return result

        value, change = along(network, start, step)
        result: Tensor = value + change
        return result


def linearize(module: nn.Module) -> Linearized:
    r"""Return a module's first-order expansion in its parameters, at their present values.

    It is what a wide network does when it is trained: linear in its parameters, with a neural tangent kernel that does
    not change.

    Parameters
    ----------
    module : torch.nn.Module
        Copied, so that training one leaves the other as it is. Parameters that do not require gradients stay fixed.

    Returns
    -------
    Linearized
        A module with the same parameters, under ``network``.

    Raises
    ------
    ModelError
        If no parameter is trainable.

    References
    ----------
    .. [1] J. Lee, L. Xiao, S. Schoenholz, Y. Bahri, R. Novak, J. Sohl-Dickstein, J. Pennington. Wide neural networks of
       any depth evolve as linear models under gradient descent. NeurIPS 2019.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.empirical import linearize
    >>> network = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> x = torch.ones(2, 3)
    >>> torch.equal(linearize(network)(x), network(x))
    True
    """
    return Linearized(module)
