r"""Three estimates of a held-out likelihood.

What you will learn: how to tell how good a trained latent-variable model is, and how to check the answer.

A linear variational autoencoder draws a code :math:`z \sim N(0, I)` and data :math:`x \mid z \sim N(W z + \mu,
\sigma^2 I)`. It is trained by the evidence lower bound; of a test set we then want :math:`\log p(x)` itself. Importance
sampling draws codes from the guide, annealed importance sampling moves such draws to the posterior, and bridge
sampling runs chains on the posterior of each datum. Here the answer is known exactly, so that all can be held to it.
"""

import functools
import os

import torch

from bayeskit.inference.evidence import Budget
from bayeskit.inference.held_out import (
    active_units,
    annealed_importance_sampling,
    by_evidence,
    importance_sampling,
    mutual_information,
)
from bayeskit.inference.objectives import ELBO
from bayeskit.inference.training import fit
from bayeskit.models.vae import LinearVAE

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    loadings = torch.randn(3, 10, generator=generator, dtype=torch.float64)
    codes = torch.randn(1020, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(1020, 10, generator=generator, dtype=torch.float64)
    x = codes @ loadings + noise
    train, test = x[:1000], x[1000:]

    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = LinearVAE(data_dim=10, latent_dim=4).double()
    adam = functools.partial(torch.optim.Adam, lr=0.02)
    fit(vae.model, vae.guide, ELBO(), train, num_epochs=30 if SMALL else 100, batch_size=100, optimizer=adam, seed=0)

    exact = vae.log_likelihood(test).detach()
    bound = vae.lower_bound(test).detach()
    print(f"exact mean log likelihood of {len(test)} test data: {float(exact.mean()):.4f}")
    print(f"evidence lower bound:                         {float(bound.mean()):.4f}")

    budget = Budget(num_chains=16, num_warmup=150, num_samples=100) if SMALL else Budget()
    few = test[:2] if SMALL else test
    temperatures = 30 if SMALL else 200
    found = [
        (importance_sampling(vae.model, vae.guide, test, num_samples=2000), exact),
        (annealed_importance_sampling(vae.model, vae.guide, test, num_temperatures=temperatures), exact),
        (by_evidence(vae.model, vae.guide, few, method="bridge_sampling", budget=budget), exact[: len(few)]),
    ]
    for estimate, truth in found:
        z = (estimate.mean - float(truth.mean())) / estimate.standard_error
        print(f"{estimate}, {z:+.2f} standard errors from the exact value")
        assert abs(z) < 5

    units = active_units(vae.guide, train)
    print(f"{units.count} of 4 coordinates of the code are active")
    print(f"mutual information of datum and code: {mutual_information(vae.model, vae.guide, train, num_samples=2)}")


if __name__ == "__main__":
    main()
