"""The likelihood of an alignment on a tree, and its gradient, in two passes.

The upward pass is Felsenstein's pruning algorithm over the rows of a schedule. Each partial
likelihood is divided by its largest entry, so that neither many taxa nor short branches underflow;
the logarithms of these scalers are added up, either all at once with the number of sites that use
each row, or along the tree where the likelihood of each root row is wanted. The downward pass
carries the adjoints of all messages back. It treats the scalers as constants, which is exact: a
scaler divides the likelihood and multiplies it again, so its derivative cancels.

References
----------
J. Felsenstein (1981), Evolutionary trees from DNA sequences: a maximum likelihood approach,
Journal of Molecular Evolution 17, 368-376.

X. Ji, Z. Zhang, A. Holbrook, A. Nishimura, G. Baele, A. Rambaut, P. Lemey and M. A. Suchard (2020),
Gradients do grow on trees, Molecular Biology and Evolution 37, 3047-3060.

K. Kobert, A. Stamatakis and T. Flouri (2017), Efficient detection of repeating sites to accelerate
phylogenetic likelihood calculations, Systematic Biology 66, 205-217.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit.models.phylogenetics.pruning.schedule import Level, Schedule
from bayeskit.models.phylogenetics.pruning.transport import States, Transport


class Plan(NamedTuple):
    """A schedule, and what edges do along it.

    Attributes
    ----------
    schedule : Schedule
        The order of computing.
    transport : Transport
        What edges do to partial likelihoods.
    scaler_rows : tuple of tuple of Tensor
        For each level with inner rows and then for the root: which rows of the level below are the
        factors of each row, one tensor `(rows,)` for each factor. The number after the last row
        stands for tips, which have no scaler.
    """

    schedule: Schedule
    transport: Transport
    scaler_rows: tuple[tuple[Tensor, ...], ...]


def make_plan(schedule: Schedule, transport: Transport) -> Plan:
    """Join a schedule and a transport."""

    def rows(factors: Sequence[tuple[Tensor, ...]], below: Level) -> tuple[Tensor, ...]:
        inner = [lines[0] - below.num_tip_lines for lines in factors]
        return tuple(torch.where(line < 0, below.num_rows, line % max(below.num_rows, 1)) for line in inner)

    levels = schedule.levels
    factors = [(level.left, level.right) for level in levels[1:]] + [schedule.root_factors]
    return Plan(schedule, transport, tuple(rows(pair, below) for pair, below in zip(factors, levels, strict=True)))


class _Upward(NamedTuple):
    """What the upward pass leaves behind; every tensor has the batch as its last dimension.

    Attributes
    ----------
    coefficients : Tensor
        The transport's table, `(coefficients, batch)`.
    tip_messages : Tensor
        Messages of all tips, `(tip_lines, batch)`.
    tables : list of Tensor
        Messages of each level, `(lines, batch)`.
    scalers : list of Tensor
        Largest entry of each product, `(rows, batch)`, for all levels but the deepest, which has
        only tips.
    sites : Tensor
        Scaled likelihood of each root row, `(root_rows, batch)`.
    """

    coefficients: Tensor
    tip_messages: Tensor
    tables: list[Tensor]
    scalers: list[Tensor]
    sites: Tensor


def _products(table: Tensor, left: Sequence[Tensor], right: Sequence[Tensor]) -> States:
    return [table[one] * table[other] for one, other in zip(left, right, strict=True)]


def _safe(values: Tensor) -> Tensor:
    """Replace zeros by ones: an impossible row stays impossible, without dividing by zero.

    Numbers so small that their inverse would overflow become the smallest whose inverse does not.
    """
    return torch.where(values > 0, values.clamp(min=torch.finfo(values.dtype).tiny), torch.ones_like(values))


def _upward(inputs: Tensor, frequencies: Tensor, plan: Plan) -> _Upward:
    """Run the upward pass for inputs `(batch, edges, *shape)` and frequencies `(4, batch)`."""
    schedule, transport = plan.schedule, plan.transport
    coefficients = transport.table(inputs)
    tip_messages = transport.tip_messages(coefficients)
    tables: list[Tensor] = []
    scalers: list[Tensor] = []
    for level in schedule.levels:
        parts = [tip_messages[level.tips]] if level.num_tip_lines else []
        if level.num_rows:
            products = _products(tables[-1], level.left, level.right)
            largest = torch.maximum(torch.maximum(products[0], products[1]), torch.maximum(products[2], products[3]))
            # It divides the likelihood and multiplies it again: a constant to any derivative.
            scaler = _safe(largest.detach())
            inverse = 1.0 / scaler
            parts += transport.send(coefficients, [product * inverse for product in products], level)
            scalers.append(scaler)
        tables.append(torch.cat(parts))
    one, other, third = schedule.root_factors
    pairs = _products(tables[-1], one, other)
    terms = [
        frequency * pair * tables[-1][line] for frequency, pair, line in zip(frequencies, pairs, third, strict=True)
    ]
    return _Upward(coefficients, tip_messages, tables, scalers, (terms[0] + terms[1]) + (terms[2] + terms[3]))


def _weighted_sum(upward: _Upward, plan: Plan) -> Tensor:
    """Return the log-likelihood of all sites together, shape `(1, batch)`."""
    logs = torch.cat([*upward.scalers, upward.sites]).log()
    # Thousands of terms are added up; in single precision their sum would lose two more digits.
    return (plan.schedule.weights[:, None] * logs).sum(0, keepdim=True, dtype=torch.float64).to(logs.dtype)


def _root_logs(upward: _Upward, plan: Plan) -> Tensor:
    """Return the log-likelihood of each root row, shape `(root_rows, batch)`, float64."""
    # As many terms are added up as there are taxa; in single precision their sum would lose two more digits.
    none = torch.zeros_like(upward.sites[:1], dtype=torch.float64)
    below = none
    for values, factors in zip([*upward.scalers, upward.sites], plan.scaler_rows, strict=True):
        # No logarithm of zero is taken, whose derivative would be infinite.
        impossible = values == 0
        logs = torch.where(impossible, -torch.inf, torch.where(impossible, 1.0, values).log().double())
        for rows in factors:
            logs = logs + below[rows]
        below = torch.cat([logs, none])
    return below[:-1]


def _downward(
    inputs: Tensor, frequencies: Tensor, upward: _Upward, cotangent: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Return the gradients by inputs and frequencies of the sum of root rows times cotangents `(root_rows, batch)`."""
    schedule, transport = plan.schedule, plan.transport
    coefficients = upward.coefficients
    batch = coefficients.shape[1]
    cotangent = cotangent.to(coefficients.dtype)
    share = torch.where(upward.sites > 0, cotangent / _safe(upward.sites), torch.zeros_like(cotangent))
    table = upward.tables[-1]
    factors = [[table[line] for line in factor] for factor in schedule.root_factors]
    by_frequency = [share * one * other * third for one, other, third in zip(*factors, strict=True)]
    adjoints = [
        share * frequencies[state] * factors[one][state] * factors[other][state]
        for one, other in ((1, 2), (0, 2), (0, 1))
        for state in range(4)
    ]
    gathered = _scatter(torch.cat(adjoints), schedule.root_targets, table.shape[0])
    inner_terms: list[States] = []
    tip_adjoints: list[Tensor] = []
    for number in reversed(range(len(schedule.levels))):
        level, table = schedule.levels[number], upward.tables[number]
        if level.num_tip_lines:
            tip_adjoints.insert(0, gathered[: level.num_tip_lines])
        if not level.num_rows:
            continue
        below, scaler = upward.tables[number - 1], upward.scalers[number - 1]
        own = list(gathered[level.num_tip_lines :].reshape(4, level.num_rows, batch))
        messages = list(table[level.num_tip_lines :].reshape(4, level.num_rows, batch))
        products = _products(below, level.left, level.right) if transport.uses_partials else []
        partials = [product / scaler for product in products]
        inner_terms.insert(0, transport.inner_terms(own, messages, partials))
        inverse = 1.0 / scaler
        pulled = torch.cat([adjoint * inverse for adjoint in transport.pull_back(coefficients, own, level)])
        gathered = _scatter(pulled[level.parents] * below[level.siblings], level.targets, below.shape[0])
    terms = [transport.tip_terms(torch.cat(tip_adjoints), upward.tip_messages)]
    terms += [term for group in inner_terms for term in group]
    num_slots = inputs.shape[1:].numel()
    sums = _scatter(torch.cat(terms), transport.slots, num_slots)
    return transport.gradient(sums, inputs), torch.stack([term.sum(0) for term in by_frequency])


def _scatter(values: Tensor, targets: Tensor, size: int) -> Tensor:
    """Add lines of `values` up into `size` lines; in a fixed order on a CPU."""
    out = values.new_zeros((size, values.shape[1]))
    return out.scatter_add(0, targets[:, None].expand_as(values), values)


class _LogLikelihood(torch.autograd.Function):
    """Log-likelihoods of inputs `(*batch, edges, *shape)` and frequencies `(*batch, 4)`.

    The first output has shape `(root_rows, *batch)`, or `(1, *batch)` where `summed` asks for all sites
    together. The others are what the downward pass needs, with the batch as the last dimensions, too.
    """

    @staticmethod
    def forward(inputs: Tensor, frequencies: Tensor, plan: Plan, summed: bool) -> tuple[Tensor, ...]:
        batch = frequencies.shape[:-1]
        upward = _upward(*_flatten(inputs, frequencies, batch), plan)
        value = _weighted_sum(upward, plan) if summed else _root_logs(upward, plan)
        saved = [upward.coefficients, upward.tip_messages, *upward.tables, *upward.scalers, upward.sites]
        return tuple(tensor.reshape(tensor.shape[0], *batch) for tensor in (value, *saved))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        values, frequencies, ctx.plan, ctx.summed = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(values, frequencies, *output[1:])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        inputs, frequencies, *saved = ctx.saved_tensors
        return (*_Gradient.apply(inputs, frequencies, ctx.plan, ctx.summed, cotangent, *saved), None, None)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], inputs: Tensor, frequencies: Tensor, plan: Plan, summed: bool
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        inputs = _to_front(inputs, in_dims[0], info.batch_size)
        frequencies = _to_front(frequencies, in_dims[1], info.batch_size)
        out = _LogLikelihood.apply(inputs, frequencies, plan, summed)
        # All outputs carry the batch dimensions behind their lines.
        return out, tuple(1 for _ in out)


class _Gradient(torch.autograd.Function):
    """The downward pass as a function of its own, so that `vmap` of a gradient stays batched natively."""

    @staticmethod
    def forward(
        inputs: Tensor, frequencies: Tensor, plan: Plan, summed: bool, *behind: Tensor
    ) -> tuple[Tensor, Tensor]:
        batch = frequencies.shape[:-1]
        flat, flat_frequencies = _flatten(inputs, frequencies, batch)
        merged = [tensor.reshape(tensor.shape[0], batch.numel()) for tensor in behind]
        cotangent, coefficients, tip_messages, *middle, sites = merged
        depth = len(plan.schedule.levels)
        upward = _Upward(coefficients, tip_messages, middle[:depth], middle[depth:], sites)
        by_row = plan.schedule.root_weights[:, None] * cotangent if summed else cotangent
        by_input, by_frequency = _downward(flat, flat_frequencies, upward, by_row, plan)
        return by_input.reshape(inputs.shape), by_frequency.T.reshape(frequencies.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:  # type: ignore[override]
        raise NotImplementedError(
            "The tree likelihood has first derivatives only. Remedy: use finite differences of its gradient."
        )

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        inputs: Tensor,
        frequencies: Tensor,
        plan: Plan,
        summed: bool,
        *behind: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        inputs = _to_front(inputs, in_dims[0], info.batch_size)
        frequencies = _to_front(frequencies, in_dims[1], info.batch_size)
        moved = [
            _to_front(tensor, dim, info.batch_size).movedim(0, 1)
            for tensor, dim in zip(behind, in_dims[4:], strict=True)
        ]
        return _Gradient.apply(inputs, frequencies, plan, summed, *moved), (0, 0)


def _flatten(inputs: Tensor, frequencies: Tensor, batch: torch.Size) -> tuple[Tensor, Tensor]:
    """Merge the batch dimensions, and put them last in the frequencies."""
    size = batch.numel()
    return inputs.reshape(size, *inputs.shape[len(batch) :]), frequencies.reshape(size, 4).T


def _to_front(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def log_likelihood(inputs: Tensor, frequencies: Tensor, plan: Plan) -> Tensor:
    """Compute the log-likelihood of an alignment, differentiable once by both arguments.

    It may be mapped with `torch.func.vmap`, differentiated with `torch.func.grad`, in either order,
    traced with `make_fx` and compiled with `torch.compile`.

    Parameters
    ----------
    inputs : Tensor
        What the plan's transport takes, shape `(*batch, edges)` or `(*batch, edges, 4, 4)`.
    frequencies : Tensor
        Frequencies of the bases at the root, shape `(*batch, 4)`.
    plan : Plan
        Schedule and transport.

    Returns
    -------
    Tensor
        Log-likelihoods in nats, shape `(*batch)`.
    """
    return _LogLikelihood.apply(inputs, frequencies, plan, True)[0][0]


def root_log_likelihoods(inputs: Tensor, frequencies: Tensor, plan: Plan) -> Tensor:
    """Compute the log-likelihood of each root row, differentiable once by both arguments.

    It may be mapped, differentiated, traced and compiled like `log_likelihood`.

    Parameters
    ----------
    inputs : Tensor
        What the plan's transport takes, shape `(*batch, edges)` or `(*batch, edges, 4, 4)`.
    frequencies : Tensor
        Frequencies of the bases at the root, shape `(*batch, 4)`.
    plan : Plan
        Schedule and transport.

    Returns
    -------
    Tensor
        Log-likelihoods in nats, shape `(root_rows, *batch)`, float64; `plan.schedule.root_weights` counts
        the sites of each.
    """
    return _LogLikelihood.apply(inputs, frequencies, plan, False)[0]


def pattern_log_likelihoods(inputs: Tensor, frequencies: Tensor, plan: Plan) -> Tensor:
    """Compute the log-likelihood of each site pattern by plain, differentiable tensor operations.

    Parameters
    ----------
    inputs : Tensor
        What the plan's transport takes, shape `(*batch, edges)` or `(*batch, edges, 4, 4)`.
    frequencies : Tensor
        Frequencies of the bases at the root, shape `(*batch, 4)`.
    plan : Plan
        Schedule and transport.

    Returns
    -------
    Tensor
        Log-likelihoods in nats, shape `(*batch, patterns)`.
    """
    batch = frequencies.shape[:-1]
    rows = _root_logs(_upward(*_flatten(inputs, frequencies, batch), plan), plan)
    patterns = rows[plan.schedule.root_of_pattern]
    return patterns.T.reshape(*batch, patterns.shape[0]).to(frequencies.dtype)
