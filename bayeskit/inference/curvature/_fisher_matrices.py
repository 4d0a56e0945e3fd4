"""Fisher information, generalized Gauss-Newton matrix and empirical Fisher of a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from bayeskit._core.flat_networks import PRODUCT_ROWS, FlatNetwork, flat_copy, row_blocks
from bayeskit._core.randomness import new_generator
from bayeskit.inference.curvature._likelihoods import OutputLikelihood, check_likelihood
from bayeskit.inference.curvature._matrices import Curvature, OutputCurvature
from bayeskit.inference.curvature._module_data import check_network_data


def fisher(module: nn.Module, likelihood: OutputLikelihood, x: Tensor, *, mean: bool = False) -> Curvature:
    r"""Return the Fisher information of a network's parameters, at their current values.

    .. math:: F = \sum_i \mathrm{E}_{y \sim p(y \mid f_\theta(x_i))}
       \nabla_\theta \log p(y \mid f_\theta(x_i))\, \nabla_\theta \log p(y \mid f_\theta(x_i))^\top
       = \sum_i J_i^\top F_i J_i.

    The expectation is over data from the model; observed data are not used.

    Parameters
    ----------
    module : torch.nn.Module
        Maps ``(n, ...)`` to outputs ``(n, k)`` or ``(n,)``. Parameters that do not require gradients are constants.
    likelihood : OutputLikelihood
        Distribution of the data given outputs.
    x : Tensor
        Inputs, ``(n, ...)``.
    mean : bool, default False
        Whether to divide the sum over observations by ``n``.

    Returns
    -------
    Curvature

    Raises
    ------
    ModelError
        If no parameter requires gradients, or outputs are random.
    DataError, ShapeError
        If inputs or outputs are not finite or have the wrong shape.

    References
    ----------
    Amari, S. (1998). Natural gradient works efficiently in learning. Neural Computation 10, 251-276.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.curvature import GaussianOutputs, fisher
    >>> line = torch.nn.Linear(2, 1, bias=False)
    >>> fisher(line, GaussianOutputs(), torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])).matrix()
    tensor([[3., 3.],
            [3., 5.]])
    """
    return fisher_of(flat_copy(module), check_likelihood(likelihood), x, mean)


def gauss_newton(
    module: nn.Module, likelihood: OutputLikelihood, x: Tensor, y: Tensor, *, mean: bool = False
) -> Curvature:
    r"""Return the generalized Gauss-Newton matrix of the negative log likelihood, at the current parameters.

    .. math:: G = \sum_i J_i^\top \Big[-\nabla_f^2 \log p(y_i \mid f)\Big]_{f = f_\theta(x_i)} J_i

    It is the Hessian without the terms with second derivatives of the network. It equals the Hessian if outputs are
    linear in the parameters, and the Fisher information if outputs are natural parameters.

    Parameters
    ----------
    module, likelihood, x, mean
        As in :func:`fisher`.
    y : Tensor
        Data, ``(n, k)``, or ``(n,)`` for one output or class labels.

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
    >>> from bayeskit.inference.curvature import Poisson, gauss_newton
    >>> rate = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(rate.weight)
    >>> gauss_newton(rate, Poisson(), torch.tensor([[1.0], [2.0]]), torch.tensor([0, 3])).matrix()
    tensor([[5.]])
    """
    return gauss_newton_of(flat_copy(module), check_likelihood(likelihood), x, y, mean)


def empirical_fisher(
    module: nn.Module, likelihood: OutputLikelihood, x: Tensor, y: Tensor, *, mean: bool = False, seed: int = 0
) -> Curvature:
    r"""Return the empirical Fisher: the sum of outer products of per-observation gradients at the observed data.

    .. math:: E = \sum_i \nabla_\theta \log p(y_i \mid f_\theta(x_i))\,
       \nabla_\theta \log p(y_i \mid f_\theta(x_i))^\top

    Its expectation is the Fisher information only if the data come from the model at these parameters. Otherwise
    observations are weighted by squared residuals, which are unrelated to curvature. The result is tested for this: see
    ``trusted`` and ``warnings``.

    Parameters
    ----------
    module, likelihood, x, y, mean
        As in :func:`gauss_newton`.
    seed : int, default 0
        Seed of the test.

    Returns
    -------
    Curvature
        Its ``diagnostics`` are ``ratio`` (empirical Fisher over Fisher information, mean over random directions),
        ``noise`` (standard deviation of the ratio under the model), ``z`` (largest deviation of the ratio from one, in
        standard deviations), and ``gradient`` (squared gradient over its expectation under the model).

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
    >>> from bayeskit.inference.curvature import GaussianOutputs, empirical_fisher
    >>> line = torch.nn.Linear(2, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(line.weight)
    >>> x, y = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]), torch.tensor([0.0, 2.0, 1.0])
    >>> found = empirical_fisher(line, GaussianOutputs(), x, y)
    >>> found.matrix(), found.trusted
    (tensor([[5., 6.],
            [6., 8.]]), False)
    """
    likelihood, network = check_likelihood(likelihood), flat_copy(module)
    found = empirical_fisher_of(network, likelihood, x, y, mean)
    outputs = network.outputs(found.x)
    problems, diagnostics = _empirical_problems(
        network, likelihood, found.x, outputs, likelihood.targets(outputs, y), seed
    )
    return replace(found, warnings=problems, diagnostics=diagnostics)


def fisher_of(network: FlatNetwork, likelihood: OutputLikelihood, x: Tensor, mean: bool = False) -> Curvature:
    """Return the Fisher information of a flat network."""
    x, outputs = check_network_data(network, x)

    def factor(rows: slice) -> OutputCurvature:
        return OutputCurvature(likelihood.fisher_root(outputs[rows]))

    return _curvature("Fisher information", network, x, factor, outputs.shape[1], outputs.shape[1], mean)


def gauss_newton_of(
    network: FlatNetwork, likelihood: OutputLikelihood, x: Tensor, y: Tensor, mean: bool = False
) -> Curvature:
    """Return the generalized Gauss-Newton matrix of a flat network."""
    x, outputs = check_network_data(network, x)
    targets = likelihood.targets(outputs, y)

    def factor(rows: slice) -> OutputCurvature:
        if likelihood.natural:
            return OutputCurvature(likelihood.fisher_root(outputs[rows]))
        values, vectors = torch.linalg.eigh(likelihood.hessian(outputs[rows], targets[rows]))
        return OutputCurvature(vectors * values.abs().sqrt().unsqueeze(1), values.sign())

    return _curvature("generalized Gauss-Newton matrix", network, x, factor, outputs.shape[1], outputs.shape[1], mean)


def empirical_fisher_of(
    network: FlatNetwork, likelihood: OutputLikelihood, x: Tensor, y: Tensor, mean: bool = False
) -> Curvature:
    """Return the empirical Fisher of a flat network, without the test."""
    x, outputs = check_network_data(network, x)
    targets = likelihood.targets(outputs, y)

    def factor(rows: slice) -> OutputCurvature:
        return OutputCurvature(likelihood.score(outputs[rows], targets[rows]).unsqueeze(2))

    return _curvature("empirical Fisher", network, x, factor, outputs.shape[1], 1, mean)


def _curvature(
    name: str,
    network: FlatNetwork,
    x: Tensor,
    factor: Callable[[slice], OutputCurvature],
    num_outputs: int,
    rank: int,
    mean: bool,
) -> Curvature:
    """Return the sum over data of a curvature in the outputs, or their mean."""
    scale = 1 / len(x) if mean else 1.0
    return Curvature(name=name, network=network, x=x, factor=factor, num_outputs=num_outputs, rank=rank, scale=scale)


def log_likelihood_gradient(network: FlatNetwork, likelihood: OutputLikelihood, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the log likelihood of all data, ``(p,)``."""
    x, outputs = check_network_data(network, x)
    score = likelihood.score(outputs, likelihood.targets(outputs, y))
    result = torch.zeros_like(network.vector)
    for rows in row_blocks(len(x), PRODUCT_ROWS):
        result = result + network.pull(x[rows], score[rows])
    return result


# Tests whether the empirical Fisher is close to the Fisher information for the observed data.

_NUM_DIRECTIONS = 8
_NUM_REPLICATES = 200
_LARGEST_RATIO = 1.25
_LARGEST_Z = 5.0
_LARGEST_NOISE = 0.3
_LARGEST_GRADIENT = 12.0  # a squared standard normal variable exceeds it with probability 1 / 2,000


def _empirical_problems(
    network: FlatNetwork, likelihood: OutputLikelihood, x: Tensor, outputs: Tensor, targets: Tensor, seed: int
) -> tuple[tuple[str, ...], dict[str, float]]:
    """Return problems with remedies, and diagnostics, of empirical against expected Fisher along random directions."""
    generator = new_generator(seed, stream="empirical Fisher")
    tangents = torch.randn(
        _NUM_DIRECTIONS,
        network.num_parameters,
        generator=generator,
        dtype=network.vector.dtype,
        device=generator.device,
    ).to(network.vector)
    along = _pushed(network, x, tangents)
    root = torch.einsum("nkr,nkm->nrm", likelihood.fisher_root(outputs), along)
    expected = root.square().sum((0, 1))
    score = likelihood.score(outputs, targets)
    ratio = _quadratic(score, along) / expected
    drawn = torch.stack(
        [
            _quadratic(likelihood.score(outputs, likelihood.sample(outputs, generator)), along) / expected
            for _ in range(_NUM_REPLICATES)
        ]
    )
    noise = drawn.std(0)
    # The mean square of random Gaussian projections is the trace.
    projected = torch.einsum("nk,nkm->m", score, along)
    diagnostics = {
        "ratio": float(ratio.mean()),
        "z": float(((ratio - 1) / noise)[((ratio - 1) / noise).abs().argmax()]),
        "noise": float(noise.mean()),
        "gradient": float(projected.square().sum() / expected.sum()),
    }
    return tuple(_problems(ratio, noise, diagnostics)), diagnostics


def _problems(ratio: Tensor, noise: Tensor, diagnostics: dict[str, float]) -> list[str]:
    remedy = "use fisher() or gauss_newton()"
    found = []
    unlike = (torch.maximum(ratio, 1 / ratio) > _LARGEST_RATIO) & (((ratio - 1) / noise).abs() > _LARGEST_Z)
    if bool(unlike.any()) or not bool(torch.isfinite(ratio).all()):
        worst = float(ratio[ratio.log().abs().argmax()])
        found.append(
            f"the residuals disagree with the model: along a random direction the empirical Fisher is {worst:.3g} "
            f"times the Fisher information; {remedy}"
        )
    if diagnostics["gradient"] > _LARGEST_GRADIENT:
        found.append(
            f"the parameters are not at an optimum: the squared gradient is {diagnostics['gradient']:.3g} times its "
            f"expectation under the model; {remedy}"
        )
    if diagnostics["noise"] > _LARGEST_NOISE:
        found.append(
            f"there are too few observations: even for data from the model, the empirical Fisher would have a relative "
            f"error of {100 * diagnostics['noise']:.0f} %; {remedy}"
        )
    return found


def _pushed(network: FlatNetwork, x: Tensor, tangents: Tensor) -> Tensor:
    """Return derivatives of outputs along each vector, ``(n, k, m)``."""
    blocks = row_blocks(len(x), PRODUCT_ROWS)
    return torch.cat([torch.stack([network.push(x[rows], v) for v in tangents], 2) for rows in blocks])


def _quadratic(score: Tensor, along: Tensor) -> Tensor:
    return torch.einsum("nk,nkm->nm", score, along).square().sum(0)
