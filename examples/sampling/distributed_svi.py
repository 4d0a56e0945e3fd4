r"""
Distributed variational inference in Pyro: SVI in several processes by torchrun
===============================================================================

**What you will learn:** how one script trains a guide on minibatches either alone or, started by ``torchrun``, in
several processes that share each minibatch, average their gradients, and end with bit for bit the same parameters.

Start it by ``torchrun --nproc-per-node 2 distributed_svi.py``, or by ``python distributed_svi.py`` as it was for this
page. The data are simulated from a linear regression with known noise.
"""

import math

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, init_to_mean
from pyro.nn import PyroModule
from torch.distributions import kl_divergence

from bayeskit.distributed import Ranks, global_stream, process_group
from bayeskit.gallery import is_small

# %%
# A model of a minibatch
# ----------------------
# The plate has all rows, and scales the likelihood of those that are given up to all of them. The mean over processes
# then estimates the same bound.

NUM_ROWS, NUM_COLUMNS, BATCH_SIZE = 1024, 3, 128


class Regression(PyroModule):
    def forward(self, x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor) -> None:
        weights = pyro.sample("weights", dist.Normal(x.new_zeros(NUM_COLUMNS), 2.0).to_event(1))
        with pyro.plate("rows", NUM_ROWS, subsample=rows):
            pyro.sample("y", dist.Normal(x[rows] @ weights, 1.0), obs=y[rows])


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_ROWS, NUM_COLUMNS, generator=generator, dtype=torch.float64)
    noise = torch.randn(NUM_ROWS, generator=generator, dtype=torch.float64)
    return x, x @ torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64) + noise


# %%
# Training
# --------
# ``ranks`` knows how many processes there are and which one this is. Alone, all of its calls do nothing special: the
# same code serves both. ``wrap`` averages gradients; ``minibatches`` gives each process its share; ``generator`` makes
# all draw the same weights, as these are global.


def train(ranks: Ranks, num_epochs: int, batch_size: int = BATCH_SIZE, seed: int = 1) -> torch.nn.Module:
    """Return the trained guide."""
    x, y = (column.to(ranks.device) for column in data())
    model = Regression()
    guide = AutoMultivariateNormal(model, init_loc_fn=init_to_mean, init_scale=0.1)
    objective = Trace_ELBO()(model, guide)
    generator = ranks.generator(seed, shared=True)
    with global_stream(generator):
        objective(x, y, torch.arange(batch_size, device=ranks.device))  # the guide makes its parameters
    parallel = ranks.wrap(objective)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.02 ** (1 / num_epochs))
    for epoch in range(num_epochs):
        for rows in ranks.minibatches(NUM_ROWS, batch_size, seed=seed, epoch=epoch):
            optimizer.zero_grad()
            with global_stream(generator):
                loss = parallel(x, y, rows)
            loss.backward()
            optimizer.step()
        schedule.step()
    return guide


# %%
# The guard lets other scripts import ``train``. Under ``torchrun`` every process runs what follows, and only rank 0
# goes on after the training.

if __name__ == "__main__":
    with process_group() as ranks:
        guide = train(ranks, num_epochs=40 if is_small() else 500)
        early = train(ranks, num_epochs=1)
        assert ranks.same_everywhere(guide)
        first, num_processes = ranks.rank == 0, ranks.world_size

# %%
# An exact twin
# -------------
# The posterior of this regression is normal, and the guide can be just that. Its mean and covariance have a closed
# form, and so has the evidence: :math:`y` is normal with covariance :math:`I + 4 X X^\top`. Whatever the guide learnt,
# importance sampling from it must give this evidence within its error, and the better the guide, the smaller the error.
# The lower bound must lie below it.

if __name__ == "__main__" and first:
    x, y = data()
    precision = x.mT @ x + torch.eye(NUM_COLUMNS, dtype=torch.float64) / 2.0**2
    mean, sd = torch.linalg.solve(precision, x.mT @ y), precision.inverse().diagonal().sqrt()
    covariance = torch.eye(NUM_ROWS, dtype=torch.float64) + 4 * x @ x.mT
    exact = float(dist.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y))

    fitted = guide.get_posterior()
    loc, scale = fitted.loc.detach().cpu(), fitted.scale_tril.detach().cpu()
    num_draws = 2000 if is_small() else 10_000
    noise = torch.randn(num_draws, NUM_COLUMNS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights = loc + noise @ scale.mT
    log_joint = dist.Normal(0.0, 2.0).log_prob(weights).sum(-1) + dist.Normal(weights @ x.mT, 1.0).log_prob(y).sum(-1)
    log_ratio = log_joint - dist.MultivariateNormal(loc, scale_tril=scale).log_prob(weights)
    ratio = (log_ratio - log_ratio.max()).exp()
    estimate = float(log_ratio.logsumexp(0)) - math.log(num_draws)
    error = float(ratio.std() / ratio.mean()) / num_draws**0.5
    bound, bound_error = float(log_ratio.mean()), float(log_ratio.std()) / num_draws**0.5
    print(f"{num_processes} process(es); log evidence: exactly {exact:.5f}, estimated {estimate:.5f} +- {error:.5f}")
    print(f"lower bound that was trained: {bound:.5f} +- {bound_error:.5f}")
    assert abs(estimate - exact) < 4.5 * error
    assert bound - 4.5 * bound_error < exact

# %%
# What it found
# -------------
# Where a dashed density differs from the exact one, the guide has still to learn; the evidence above is right even so,
# for its weights make up for that.

if __name__ == "__main__" and first:
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for column in range(NUM_COLUMNS):
        middle, width = float(mean[column]), float(sd[column])
        grid = torch.linspace(middle - 4 * width, middle + 4 * width, 200, dtype=torch.float64)
        axes.plot(
            grid, dist.Normal(middle, width).log_prob(grid).exp(), color=f"C{column}", label=f"weight {column + 1}"
        )
        width = float((scale @ scale.mT)[column, column]) ** 0.5
        axes.plot(
            grid, dist.Normal(loc[column], width).log_prob(grid).exp(), color="black", linestyle="--", linewidth=1
        )
        print(f"weight {column + 1}: mean {float(loc[column]):.4f}, exactly {middle:.4f}")
    axes.set(xlabel="weight", ylabel="density", ylim=(0, 16), title="exact posterior, and the guide (dashed)")
    axes.legend(frameon=False, ncols=3)

# %%
# A failure on purpose
# --------------------
# Training that ends too early returns a guide like any other, and a noisy loss does not tell. The bound lies below the
# evidence by the divergence of the guide from the posterior, which two normal distributions have in closed form: after
# one epoch it is tens of nats or more. Without a closed form, the standard error of the importance sampling above shows
# it.

if __name__ == "__main__" and first:
    posterior = dist.MultivariateNormal(mean, precision_matrix=precision)
    gaps = {}
    for name, each in (("one epoch", early), ("all epochs", guide)):
        found = each.get_posterior()
        learned = dist.MultivariateNormal(found.loc.detach().cpu(), scale_tril=found.scale_tril.detach().cpu())
        gaps[name] = float(kl_divergence(learned, posterior))
        print(f"after {name}: the bound is {gaps[name]:.3f} nats below the evidence")
    assert gaps["one epoch"] > 10 * gaps["all epochs"] and gaps["one epoch"] > 1

# %%
# Try it on yours
# ---------------
# Replace ``Regression`` by a model whose plate takes ``subsample=rows``, and ``data`` by your own; the rest of
# ``train`` stays. Start it with one process, then with several: the parameters have to be the same, and
# ``ranks.same_everywhere`` says whether they are. :func:`bayeskit.fit` has this loop ready made.
#
# .. code-block:: python
#
#    with process_group() as ranks:
#        guide = train(ranks, num_epochs=40)
#        print(ranks.rank, ranks.world_size, ranks.same_everywhere(guide))
#
# Several processes pay where a minibatch keeps each of them busy for some milliseconds. Where an exact posterior is
# wanted, and all rows fit into memory, sample instead.
#
# Where to go next: :doc:`stochastic_gradient` samples from minibatches, :doc:`long_runs` runs chains in
# processes.
