"""How losses of data become one."""

import pyro.distributions as dist
import pytest
import torch

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.inference.generalized import DeepSets, GibbsPosterior, Max, Mean, Sum, losses
from bayeskit.inference.generalized._checks import residual_mismatch
from bayeskit.inference.generalized._minimizer import information_matrices, minimize
from bayeskit.inference.generalized._posterior import as_pooling

X = torch.tensor([1.0, 2.0, 10.0], dtype=torch.float64)
U = torch.linspace(-3, 6, 9, dtype=torch.float64)[:, None]
EACH = (X - U).abs()


def posterior(pooling, data=X):
    return GibbsPosterior(dist.Normal(0.0, 5.0), losses.Absolute(), data, 0.8, pooling, compile=False)


POOLED = {
    "sum": EACH.sum(-1),
    "mean": EACH.mean(-1),
    "max": EACH.amax(-1),
    DeepSets(torch.square, torch.sqrt): EACH.norm(dim=-1),
    DeepSets(lambda e: torch.stack([e, torch.ones_like(e)], -1), lambda s: s[0] / s[1]): EACH.mean(-1),
}


@pytest.mark.parametrize("pooling", POOLED)
def test_the_pooled_loss_and_its_order(pooling):
    found = posterior(pooling).total_loss(U)
    torch.testing.assert_close(found, POOLED[pooling], rtol=0, atol=1e-12)
    shuffled = posterior(pooling, X[[2, 0, 1]]).total_loss(U)
    torch.testing.assert_close(shuffled, found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pooling", POOLED)
def test_gradients_go_through(pooling):
    u = torch.tensor([[1.3], [4.1]], dtype=torch.float64)
    step, target = 1e-6, posterior(pooling)
    slope = (target.log_density(u + step) - target.log_density(u - step)) / (2 * step)
    torch.testing.assert_close(target.value_and_grad(u)[1][:, 0], slope, rtol=0, atol=1e-7)


def test_only_the_sum_calls_itself_coherent():
    assert Sum().coherent and not any(p.coherent for p in (Mean(), Max(), DeepSets(torch.square, torch.sqrt)))


def test_names_and_objects():
    assert [type(as_pooling(p, losses.Absolute())) for p in ("sum", "mean", "max", Max())] == [Sum, Mean, Max, Max]
    for wrong in ("median", Max, None, 3):
        with pytest.raises(SettingsError, match="pooling must be"):
            as_pooling(wrong, losses.Absolute())


def test_pooling_that_returns_no_scalar():
    with pytest.raises(ShapeError, match=r"DeepSets returns \(2,\)"):
        posterior(DeepSets(lambda e: torch.stack([e, e], -1), lambda s: s))
    with pytest.raises(DataError, match="DeepSets makes nan"):
        posterior(DeepSets(torch.square, lambda s: (-s).log()))


def test_what_is_computed_for_sums_refuses_other_poolings():
    """The minimiser of a mean is that of the sum; nothing else is known of what the pooling makes of losses."""
    torch.testing.assert_close(minimize(posterior("mean")).position, minimize(posterior("sum")).position)
    for call in (minimize, information_matrices, residual_mismatch):
        with pytest.raises(SettingsError, match="Max"):
            call(posterior("max"))
    for call in (information_matrices, residual_mismatch):
        with pytest.raises(SettingsError, match="for losses that add up, not ones pooled by Mean"):
            call(posterior("mean"))
