import functools
import os

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from training_models import Autoencoder, columns, trained

from bayeskit.errors import CompilationWarning
from bayeskit.inference.objectives import ELBO, IWAE
from bayeskit.inference.training import fit
from bayeskit.inference.training._modules_inside import networks


def model(x):
    mean = pyro.sample("mean", dist.Normal(x.new_zeros(()), 2.0))
    with pyro.plate("data", 24, subsample_size=len(x)):
        pyro.sample("x", dist.Normal(mean, 1.0), obs=x)


def guide(x):
    loc = pyro.param("loc", x.new_zeros(()))
    scale = pyro.param("scale", x.new_ones(()), constraint=dist.constraints.positive)
    pyro.sample("mean", dist.Normal(loc, scale))


@pytest.mark.calibration
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


@pytest.mark.long
@pytest.mark.compiler
def test_compiled_networks_give_the_same_losses_and_failures_are_said(monkeypatch):
    x = columns()
    plain = trained(x)[1]
    vae, result = trained(x, compile=True)
    assert float((plain.losses - result.losses).abs().max()) < 1e-12
    assert "forward" not in vars(vae.encoder)

    def refused(module, options):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("bayeskit.inference.training._forward_passes._compiled", refused)
    vae = Autoencoder()
    with pytest.warns(CompilationWarning, match="could not be compiled .no compiler here.; training continues without"):
        fit(vae.model, vae.guide, ELBO(), x, num_steps=2, compile=[vae.encoder], progress=False)
    with pytest.warns(CompilationWarning, match="no networks to compile"):
        fit(model, guide, ELBO(), x[:, 0], num_steps=1, compile=True, progress=False)


def test_networks_are_compiled_in_a_folder_of_this_user_and_a_refusal_is_said(monkeypatch, tmp_path):
    seen = []

    def recorded(module, options):
        forward = module.forward

        def run(*args):
            seen.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
            return forward(*args)

        return run

    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "open"))
    monkeypatch.setattr("bayeskit.inference.training._forward_passes._compiled", recorded)
    vae = Autoencoder()
    with pytest.warns(CompilationWarning, match="is not loaded from .*open, which .* kept in .*torch. Remedy"):
        fit(vae.model, vae.guide, ELBO(), columns(), num_steps=2, compile=[vae.encoder], progress=False)
    assert len(seen) == 3 and set(seen) == {str(tmp_path / "bayeskit" / "torch")}  # the first run and two steps
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "open")
