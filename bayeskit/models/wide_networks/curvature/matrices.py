"""Fisher information, generalized Gauss-Newton and empirical Fisher of a network."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from bayeskit.models.wide_networks.curvature.flat_network import FlatNetwork, check_data, flat_network
from bayeskit.models.wide_networks.curvature.likelihoods import Likelihood, checked_likelihood
from bayeskit.models.wide_networks.curvature.operator import Curvature, OutputCurvature
from bayeskit.models.wide_networks.curvature.probe import empirical_problems


def fisher(module: nn.Module, likelihood: Likelihood, x: Tensor, *, mean: bool = False) -> Curvature:
    r"""Fisher information of a network's parameters, at the module's present ones.

    .. math:: F = \sum_i \mathrm{E}_{y \sim p(y \mid f_\theta(x_i))}
       \nabla_\theta \log p(y \mid f_\theta(x_i))\, \nabla_\theta \log p(y \mid f_\theta(x_i))^\top
       = \sum_i J_i^\top F_i J_i.

    The expectation is over the model's own data: observed ones do not enter.

    Parameters
    ----------
    module : torch.nn.Module
        Maps ``(n, ...)`` to outputs ``(n, k)`` or ``(n,)``. Parameters without gradients are constants.
    likelihood : Likelihood
        Law of the data given outputs.
    x : Tensor
        Inputs, ``(n, ...)``.
    mean : bool, default False
        Whether to divide the sum over data by ``n``.

    Returns
    -------
    Curvature

    Raises
    ------
    ModelError
        If the module has nothing to learn, or random outputs.
    DataError, ShapeError
        If inputs or outputs are not finite or of the wrong shape.

    References
    ----------
    Amari, S. (1998). Natural gradient works efficiently in learning. Neural Computation 10, 251-276.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.curvature import Gaussian, fisher
    >>> line = torch.nn.Linear(2, 1, bias=False)
    >>> fisher(line, Gaussian(), torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])).matrix()
    tensor([[3., 3.],
            [3., 5.]])
    """
    return fisher_of(flat_network(module), checked_likelihood(likelihood), x, mean)


def gauss_newton(module: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor, *, mean: bool = False) -> Curvature:
    r"""Generalized Gauss-Newton matrix of minus the log likelihood, at the module's present parameters.

    .. math:: G = \sum_i J_i^\top \Big[-\nabla_f^2 \log p(y_i \mid f)\Big]_{f = f_\theta(x_i)} J_i

    It is the Hessian less the curvature of the network itself; the whole Hessian where outputs are linear in
    parameters, and the Fisher information where outputs are natural parameters.

    Parameters
    ----------
    module, likelihood, x, mean
        As in :func:`fisher`.
    y : Tensor
        Data: ``(n, k)``, or ``(n,)`` for one output and for classes.

    Returns
    -------
    Curvature

    Raises
    ------
    ModelError, DataError, ShapeError
        As in :func:`fisher`, and if data do not fit the likelihood.

    References
    ----------
    Schraudolph, N. N. (2002). Fast curvature matrix-vector products for second-order gradient descent. Neural
    Computation 14, 1723-1738.

    Martens, J. (2020). New insights and perspectives on the natural gradient method. Journal of Machine Learning
    Research 21 (146), 1-76.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.curvature import Poisson, gauss_newton
    >>> rate = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(rate.weight)
    >>> gauss_newton(rate, Poisson(), torch.tensor([[1.0], [2.0]]), torch.tensor([0, 3])).matrix()
    tensor([[5.]])
    """
    return gauss_newton_of(flat_network(module), checked_likelihood(likelihood), x, y, mean)


def empirical_fisher(
    module: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor, *, mean: bool = False, seed: int = 0
) -> Curvature:
    r"""Sum of outer products of the gradients of single observed data, called the empirical Fisher.

    .. math:: E = \sum_i \nabla_\theta \log p(y_i \mid f_\theta(x_i))\,
       \nabla_\theta \log p(y_i \mid f_\theta(x_i))^\top

    This is no Fisher information: it has its expectation only if the data come from the model at these parameters.
    Elsewhere it weighs each datum by its squared residual, which says nothing about curvature. Whether the data look
    like the model is tested, and the result says so: see ``trusted`` and ``warnings``.

    Parameters
    ----------
    module, likelihood, x, y, mean
        As in :func:`gauss_newton`.
    seed : int, default 0
        Of the test.

    Returns
    -------
    Curvature
        With ``diagnostics``: ``ratio`` of the empirical to the Fisher information along random directions, the
        deviation ``z`` of that ratio from one in standard deviations under the model, ``noise`` (these standard
        deviations), and ``gradient``, the squared gradient over its expectation under the model.

    Raises
    ------
    ModelError, DataError, ShapeError
        As in :func:`gauss_newton`.

    References
    ----------
    Kunstner, F., Balles, L., Hennig, P. (2019). Limitations of the empirical Fisher approximation for natural gradient
    descent. Advances in Neural Information Processing Systems 32.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.curvature import Gaussian, empirical_fisher
    >>> line = torch.nn.Linear(2, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(line.weight)
    >>> x, y = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]), torch.tensor([0.0, 2.0, 1.0])
    >>> found = empirical_fisher(line, Gaussian(), x, y)
    >>> found.matrix(), found.trusted
    (tensor([[5., 6.],
            [6., 8.]]), False)
    """
    likelihood, network = checked_likelihood(likelihood), flat_network(module)
    found = empirical_fisher_of(network, likelihood, x, y, mean)
    outputs = network.outputs(found.x)
    problems, diagnostics = empirical_problems(
        network, likelihood, found.x, outputs, likelihood.targets(outputs, y), seed
    )
    return replace(found, warnings=problems, diagnostics=diagnostics)


def fisher_of(network: FlatNetwork, likelihood: Likelihood, x: Tensor, mean: bool = False) -> Curvature:
    """Return the Fisher information of a linearised network."""
    x, outputs = check_data(network, x)

    def factor(rows: slice) -> OutputCurvature:
        return OutputCurvature(likelihood.fisher_root(outputs[rows]), None)

    return Curvature(
        "Fisher information", network, x, factor, outputs.shape[1], outputs.shape[1], 1 / len(x) if mean else 1.0
    )


def gauss_newton_of(
    network: FlatNetwork, likelihood: Likelihood, x: Tensor, y: Tensor, mean: bool = False
) -> Curvature:
    """Return the generalized Gauss-Newton matrix of a linearised network."""
    x, outputs = check_data(network, x)
    targets = likelihood.targets(outputs, y)

    def factor(rows: slice) -> OutputCurvature:
        if likelihood.natural:
            return OutputCurvature(likelihood.fisher_root(outputs[rows]), None)
        values, vectors = torch.linalg.eigh(likelihood.hessian(outputs[rows], targets[rows]))
        return OutputCurvature(vectors * values.abs().sqrt().unsqueeze(1), values.sign())

    name = "generalized Gauss-Newton matrix"
    return Curvature(name, network, x, factor, outputs.shape[1], outputs.shape[1], 1 / len(x) if mean else 1.0)


def empirical_fisher_of(
    network: FlatNetwork, likelihood: Likelihood, x: Tensor, y: Tensor, mean: bool = False
) -> Curvature:
    """Return the empirical Fisher of a linearised network, untested."""
    x, outputs = check_data(network, x)
    targets = likelihood.targets(outputs, y)

    def factor(rows: slice) -> OutputCurvature:
        return OutputCurvature(likelihood.score(outputs[rows], targets[rows]).unsqueeze(2), None)

    return Curvature("empirical Fisher", network, x, factor, outputs.shape[1], 1, 1 / len(x) if mean else 1.0)
