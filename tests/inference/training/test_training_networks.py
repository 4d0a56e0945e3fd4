import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from torch import nn

from bayeskit._torch import global_stream, new_generator
from bayeskit.errors import CompilationWarning
from bayeskit.inference.objectives import ELBO, IWAE
from bayeskit.inference.training import fit
from bayeskit.inference.training.networks import networks


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


def model(x):
    mean = pyro.sample("mean", dist.Normal(x.new_zeros(()), 2.0))
    with pyro.plate("data", 24, subsample_size=len(x)):
        pyro.sample("x", dist.Normal(mean, 1.0), obs=x)


def guide(x):
    loc = pyro.param("loc", x.new_zeros(()))
    scale = pyro.param("scale", x.new_ones(()), constraint=dist.constraints.positive)
    pyro.sample("mean", dist.Normal(loc, scale))


def test_mixed_precision_trains_with_full_log_densities():
    x = columns(400).float()
    dtypes = set()

    class Single(Autoencoder):
        def __init__(self):
            super().__init__()
            self.float()

        def model(self, x):
            with self.plate(x):
                z = pyro.sample("z", dist.Normal(x.new_zeros(1), 1.0).to_event(1))
                mean = self.decoder(z)
                dtypes.update((z.dtype, mean.dtype, dist.Normal(mean, 1.0).log_prob(x).dtype))
                pyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)

    losses = {}
    for precision in ("float32", "bfloat16"):
        vae = Single()
        adam = functools.partial(torch.optim.Adam, lr=0.01)
        result = fit(vae.model, vae.guide, IWAE(5), x, num_epochs=30, batch_size=100, precision=precision,
                     optimizer=adam, progress=False)  # fmt: skip
        losses[precision] = result.losses
        assert "forward" not in vars(vae.encoder) and vae.encoder[0].weight.dtype == torch.float32
    assert dtypes == {torch.float32}
    off = (losses["float32"] - losses["bfloat16"]).abs()
    assert 0 < float(off.max()) < 2**-8 * float(losses["float32"].max())  # one rounding of bfloat16 of the whole loss
    assert float(losses["bfloat16"][-10:].mean()) < float(losses["bfloat16"][0]) - 0.05


def test_networks_are_found_where_they_are():
    vae = Autoencoder()
    assert networks(vae.model, vae.guide) == [vae.encoder, vae.decoder]

    class Nested(PyroModule):
        def __init__(self):
            super().__init__()
            self.inner = PyroModule()
            self.inner.net = vae.encoder

        def forward(self, x):
            return x

    def around(x):
        return vae.decoder, vae

    assert networks(Nested()) == [vae.encoder]
    assert networks(around) == [vae]
    assert networks(AutoNormal(model)) == []


def test_compiled_networks_give_the_same_losses_and_failures_are_said(monkeypatch):
    x = columns()
    plain = trained(x)[1]
    vae, result = trained(x, compile=True)
    assert float((plain.losses - result.losses).abs().max()) < 1e-12
    assert "forward" not in vars(vae.encoder)

    def refused(module):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("bayeskit.inference.training.loop.compiled", refused)
    vae = Autoencoder()
    with pytest.warns(CompilationWarning, match="could not be compiled .no compiler here.; training goes on without"):
        fit(vae.model, vae.guide, ELBO(), x, num_steps=2, compile=[vae.encoder], progress=False)
    with pytest.warns(CompilationWarning, match="found no networks"):
        fit(model, guide, ELBO(), x[:, 0], num_steps=1, compile=True, progress=False)
