"""ArviZ's table of posterior draws, without importing ArviZ, which takes three seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    import pandas as pd

_INTERVAL = 0.94
_COLUMNS = "mean sd hdi_3% hdi_97% mcse_mean mcse_sd ess_bulk ess_tail r_hat".split()
_DECIMALS = {name: 0 if name.startswith("ess") else 2 if name == "r_hat" else 3 for name in _COLUMNS}
_LEAST = 4  # draws of each chain, for the columns about errors


#: From the name of a site and its shape to the names of its elements.
ElementNames = Callable[[str, Sequence[int]], list[str]]


def summary_table(sites: Mapping[str, Tensor], names: ElementNames, round_to: int | str | None = None) -> pd.DataFrame:
    """Return the table of ``arviz.summary`` of sites ``(chains, draws, *shape)``, rounded as there.

    Effective sizes and R-hat are those of Vehtari et al. (2021).
    """
    import pandas as pd

    rows, labels = [], []
    for name, value in sites.items():
        labels += names(name, value.shape[2:])
        rows.append(_statistics(value.detach().cpu().double().reshape(*value.shape[:2], -1).movedim(-1, 0).numpy()))
    table = pd.DataFrame(np.concatenate(rows) if rows else np.empty((0, len(_COLUMNS))), labels, _COLUMNS)
    if round_to in ("none", "None"):
        return table
    return table.round(_DECIMALS if round_to is None else int(round_to))


def without_stillness(
    table: pd.DataFrame, sites: Mapping[str, Tensor], still: Tensor, names: ElementNames
) -> pd.DataFrame:
    """Return a summary in which numbers that stand still have no R-hat and the effective size zero.

    ``still (chains,)`` are the chains in which a coordinate never moved; other constants, such as the first entry of a
    Cholesky factor, stay as they are.
    """
    if not bool(still.any()):
        return table
    for name, value in sites.items():
        constant = (value == value[:, :1]).all(1)[still.to(value.device)].any(0)
        labels = names(name, value.shape[2:])
        rows = table.index.isin([labels[i] for i in constant.flatten().nonzero().flatten().tolist()])
        for column in table.columns:
            if column.startswith(("ess", "r_hat", "mcse")):
                table.loc[rows, column] = 0.0 if column.startswith("ess") else np.nan
    return table


def _statistics(x: np.ndarray) -> np.ndarray:
    """Return the columns for numbers ``(k, chains, draws)``."""
    flat = x.reshape(len(x), -1)
    mean = flat.mean(1)
    with np.errstate(all="ignore"):  # a constant has no R-hat
        found = [mean, flat.std(1, ddof=1), *_narrowest(flat)]
        if x.shape[-1] < _LEAST:
            return np.column_stack([*found, np.full((len(x), 5), np.nan)])
        squares = (x - mean[:, None, None]) ** 2
        variance = squares.mean((1, 2))
        fourth = (squares**2).mean((1, 2)) - variance**2
        normal = _normal(_split(x))
        low, high = np.quantile(flat, [0.05, 0.95], axis=1)[..., None, None]
        found += [
            found[1] / np.sqrt(_effective(_split(x))),
            np.sqrt(fourth / _effective(_split(squares)) / variance / 4),
            _effective(normal),
            np.minimum(_effective(_split(x <= low)), _effective(_split(x <= high))),
        ]
        folded = abs(x - np.median(flat, axis=1)[:, None, None])
        r_hat = np.maximum(_r_hat(normal), _r_hat(_normal(_split(folded))))
        table = np.column_stack([*found, r_hat if x.shape[1] > 1 else np.full(len(x), np.nan)])
    table[~np.isfinite(flat).all(1), 4:] = np.nan
    return table


def _narrowest(flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the narrowest interval with 94 % of the draws."""
    ordered = np.sort(flat, axis=1)
    held = int(_INTERVAL * flat.shape[1])
    begin = np.argmin(ordered[:, held:] - ordered[:, : flat.shape[1] - held], axis=1)
    rows = np.arange(len(flat))
    return ordered[rows, begin], ordered[rows, begin + held]


def _split(x: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    return np.concatenate([x[..., :half], x[..., -half:]], axis=-2).astype(float)


def _normal(x: np.ndarray) -> np.ndarray:
    """Replace numbers ``(k, chains, draws)`` by the normal quantiles of their ranks; ties share the mean rank."""
    ranks = np.empty_like(x)
    for row, numbers in zip(ranks, x, strict=True):
        _, place, count = np.unique(numbers, return_inverse=True, return_counts=True)
        row[...] = (np.cumsum(count) - (count - 1) / 2)[place].reshape(row.shape)
    share = (ranks - 0.375) / (ranks[0].size + 0.25)
    quantiles: np.ndarray = torch.special.ndtri(torch.from_numpy(share)).numpy()
    return quantiles


def _r_hat(x: np.ndarray) -> np.ndarray:
    n = x.shape[-1]
    found: np.ndarray = np.sqrt((x.mean(-1).var(-1, ddof=1) / x.var(-1, ddof=1).mean(-1) * n + n - 1) / n)
    return found


def _effective(x: np.ndarray) -> np.ndarray:
    """Return effective sizes of ``(k, chains, draws)`` by Geyer's initial monotone sequence."""
    n, total = x.shape[-1], x[0].size if len(x) else 0
    centred = torch.from_numpy(x - x.mean(-1, keepdims=True))
    spectrum = torch.fft.rfft(centred, n=2 * n).abs().square()
    covariance = torch.fft.irfft(spectrum, n=2 * n)[..., :n].mean(-2).numpy() / n
    within = covariance[:, 0] * n / (n - 1)
    variance = covariance[:, 0] + (x.mean(-1).var(-1, ddof=1) if x.shape[-2] > 1 else 0)
    correlation = 1 - (within[:, None] - covariance) / variance[:, None]
    correlation[:, 0] = 1
    pairs = correlation[:, : max(2, 2 * ((n - 1) // 2))].reshape(len(x), -1, 2)
    sums = pairs.sum(-1)
    positive = np.cumprod(sums > 0, axis=1)
    last = np.minimum(positive.sum(1), sums.shape[1] - 1)  # the first pair that is not positive
    before = np.arange(sums.shape[1]) < last[:, None]
    # Of that pair the first correlation counts if it is positive, once.
    after = np.maximum(pairs[np.arange(len(x)), last, 0], 0)
    time = -1 + 2 * np.where(before, np.minimum.accumulate(sums, axis=1), 0).sum(1) + after
    found = total / np.maximum(time, 1 / np.log10(total))
    constant = np.ptp(x, axis=(1, 2)) < np.finfo(float).resolution
    return np.where(constant, total, found)
