"""A small autoencoder, its data and a short training, shared by the tests of training."""

import pyro
import pyro.distributions as dist
import torch
from torch import nn

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.inference.objectives import ELBO
from bayeskit.inference.training import fit


def columns(count=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, generator=generator, dtype=torch.float64) + 1.0


class Autoencoder(nn.Module):
    """A small VAE, as methods of one module."""

    def __init__(self, size=None, seed=1):
        super().__init__()
        with global_stream(new_generator(seed)):
            self.encoder = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double()
            self.decoder = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.size = size

    def plate(self, x):
        if self.size is None:
            return pyro.plate("data", len(x))
        return pyro.plate("data", self.size, subsample=torch.arange(len(x)))

    def model(self, x):
        pyro.module("decoder", self.decoder)
        with self.plate(x):
            z = pyro.sample("z", dist.Normal(x.new_zeros(1), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(self.decoder(z), 1.0).to_event(1), obs=x)

    def guide(self, x):
        pyro.module("encoder", self.encoder)
        with self.plate(x):
            loc, log_scale = self.encoder(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


def trained(x, **settings):
    vae = Autoencoder(settings.pop("size", None))
    defaults = {"num_epochs": 3, "batch_size": 8, "progress": False}
    return vae, fit(vae.model, vae.guide, settings.pop("objective", ELBO()), x, **(defaults | settings))
