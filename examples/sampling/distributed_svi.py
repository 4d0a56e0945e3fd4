"""Variational inference on several devices.

What you will learn: how one script trains a guide on minibatches either alone or, started by
``torchrun --nproc-per-node 2 examples/distributed_svi.py``, in several processes that share each minibatch and
average their gradients, and end with bit for bit the same parameters.

The model is a Bayesian linear regression, whose exact posterior is known. Its guide has full covariance, so that
the optimum is that posterior.
"""

import os

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal
from pyro.nn import PyroModule

from bayeskit.distributed import Ranks, global_stream, process_group

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
NUM_ROWS, NUM_COLUMNS, BATCH_SIZE = 1024, 3, 128


class Regression(PyroModule):
    """Linear regression on a minibatch of the rows."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor) -> None:
        """Sample the weights and observe some rows, which the plate scales up to all of them."""
        weights = pyro.sample("weights", dist.Normal(x.new_zeros(NUM_COLUMNS), 2.0).to_event(1))
        with pyro.plate("rows", NUM_ROWS, subsample=rows):
            pyro.sample("y", dist.Normal(x[rows] @ weights, 1.0), obs=y[rows])


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_ROWS, NUM_COLUMNS, generator=generator, dtype=torch.float64)
    noise = torch.randn(NUM_ROWS, generator=generator, dtype=torch.float64)
    return x, x @ torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64) + noise


def train(ranks: Ranks, num_epochs: int, batch_size: int = BATCH_SIZE, seed: int = 1) -> torch.nn.Module:
    """Return the trained guide."""
    x, y = (column.to(ranks.device) for column in data())
    model = Regression()
    guide = AutoMultivariateNormal(model, init_scale=0.1)
    objective = Trace_ELBO()(model, guide)
    generator = ranks.generator(seed, shared=True)  # the weights are global, so all ranks draw the same ones
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


def main() -> None:
    torch.set_default_dtype(torch.float64)
    with process_group() as ranks:
        guide = train(ranks, num_epochs=30 if SMALL else 150)
        assert ranks.same_everywhere(guide)
        if ranks.rank > 0:
            return
        x, y = data()
        precision = x.mT @ x + torch.eye(NUM_COLUMNS) / 2.0**2
        mean, sd = torch.linalg.solve(precision, x.mT @ y), precision.inverse().diagonal().sqrt()
        found = guide.loc.detach().cpu()
        print(f"{ranks.world_size} process(es), posterior mean found {found.tolist()}, exact {mean.tolist()}")
        off = ((found - mean) / sd).abs().max()
        print(f"largest difference: {off:.2f} posterior standard deviations")
        assert off < 0.5


if __name__ == "__main__":
    main()
