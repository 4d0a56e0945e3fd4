r"""
Posterior collapse: input dropout and KL annealing for an autoregressive decoder
================================================================================

**What you will learn:** why a decoder that reads the previous pixels ignores its code, what annealing the KL divergence
and dropping the decoder's inputs do about it, and what either costs in log likelihood.

An autoregressive decoder can model the data without a code. In a text model, Bowman et al. :cite:p:`bowman2016` met a
KL divergence near zero, and gave two remedies: a weight of the divergence that rises from zero to one, and dropout on
the words that the decoder reads. Here both are judged on two bits, where everything can be summed, and on handwritten
digits :cite:p:`alpaydin1998`: strips of two rows of eight pixels, black where the grey is at least one half, read pixel
by pixel.
"""

# sphinx_gallery_thumbnail_number = -1
import math

import pyro
import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.held_out import active_units, importance_sampling
from bayeskit.inference.objectives import ELBO, Linear
from bayeskit.models.vae import VAE, DiagonalNormal, likelihoods, load_digits, mlp

# %%
# The model
# ---------
# Pixel :math:`i` is a bit given a code :math:`z \sim N(0, I)` and the pixels before it. In training, an input is
# dropped with chance :math:`r`, and the decoder sees that it is missing. With the set :math:`S` of inputs that are left
# and the weight :math:`\beta` of the divergence, training raises
#
# .. math::
#
#    L = \mathrm{E}_S \mathrm{E}_q \sum_i \log p(x_i \mid z, x_{j < i, \, j \in S})
#    - \beta \, \mathrm{KL}\big(q(z \mid x) \,\|\, p(z)\big).
#
# The decoder is a masked network: hidden unit :math:`h` reads pixels up to its own place and tells later ones only.


class MaskedDecoder(torch.nn.Module):
    def __init__(self, num_pixels: int, num_codes: int, hidden: int, rate: float):
        super().__init__()
        places, last_seen = torch.arange(num_pixels), torch.arange(hidden) % (num_pixels - 1)
        self.register_buffer("reads", (places <= last_seen[:, None]).float())
        self.register_buffer("tells", (last_seen < places[:, None]).float())
        self.inputs, self.outputs = torch.nn.Linear(num_pixels, hidden), torch.nn.Linear(hidden, num_pixels)
        self.code, self.rate = torch.nn.Linear(num_codes, hidden + num_pixels), rate

    def forward(self, z, x):
        signs = 2 * x - 1
        if self.rate:
            signs = signs * (torch.rand_like(signs) >= self.rate)  # zero: not known
        to_hidden, to_pixels = self.code(z).split([len(self.reads), len(self.tells)], -1)
        features = torch.nn.functional.linear(signs, self.reads * self.inputs.weight, self.inputs.bias) + to_hidden
        weight = self.tells * self.outputs.weight
        return torch.nn.functional.linear(features.tanh(), weight, self.outputs.bias) + to_pixels


class PixelVAE(VAE):
    def model(self, x, num_data=None):
        with self.data_plate(x, num_data):
            self.observe(x, self.decoder(pyro.sample("z", self.prior()), x))


def new_vae(rate: float, num_pixels: int = 16, num_codes: int = 2) -> PixelVAE:
    with global_stream(torch.Generator().manual_seed(0)):
        encoder = torch.nn.Sequential(mlp([num_pixels, 100]), torch.nn.Tanh(), DiagonalNormal(100, num_codes))
        decoder = MaskedDecoder(num_pixels, num_codes, 128, rate)
        return PixelVAE(encoder, decoder, num_codes, likelihoods.Bernoulli(), (num_pixels,))


digits = load_digits()
train, test = ((images >= 0.5).float().reshape(-1, 16) for images in (digits.train, digits.test))

# %%
# Before the data
# ---------------
# Draws of an untrained decoder, one pixel after another, are noise. Below them are strips of digits.

with global_stream(torch.Generator().manual_seed(1)), torch.no_grad():
    untrained, codes, noise = new_vae(0.0), torch.randn(7, 2), torch.zeros(7, 16)
    for pixel in range(16):
        noise[:, pixel] = untrained.decoder(codes, noise)[:, pixel].sigmoid().bernoulli()
before = Figure(figsize=(8, 1.6), layout="constrained")
for axes, strip in zip(before.subplots(2, 7).flat, torch.cat([noise, test[:7]]), strict=True):
    axes.imshow(strip.reshape(2, 8), cmap="gray_r", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[])

# %%
# An exact twin
# -------------
# Two bits, the second equal to the first with chance :math:`a`, a code of one bit, and a table for every probability:
# the two bits, codes and droppings can be summed over. With the best tables for a guide, the bound is
#
# .. math:: L = -H(x) - r \, I(x_1; x_2 \mid z) + (1 - \beta) \, I(x; z),
#
# if both codes are equally frequent. Without dropout and with :math:`\beta = 1` each such guide gives the same bound:
# that a code is used gains nothing and costs nothing. A weight below one asks for all information, :math:`\log 2`
# nats. Dropout asks for a code that explains why the bits agree, and gains :math:`r \, I(x_1; x_2)`. For
# :math:`a = 0.9` such codes have between 0.605 and 0.693 nats.

bits = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def entropy(p: float) -> float:
    return -(p * math.log(p) + (1 - p) * math.log(1 - p))


def best_tables(agree: float, rate: float, weight: float):
    """Return weighted bound, divergence, and ordinary bound with all inputs, after ascent of the weighted bound."""
    chance = torch.where(bits[:, 0] == bits[:, 1], agree / 2, (1 - agree) / 2).double()
    noise = torch.Generator().manual_seed(0)
    tables = [0.5 * torch.randn(size, dtype=torch.float64, generator=noise) for size in ((4,), (2,), (2, 2), (2,))]
    adam = torch.optim.Adam([table.requires_grad_() for table in tables], 0.1)
    for _ in range(600):
        guide, first, seen, alone = tables
        q = torch.stack([-guide, guide], 1).softmax(1)
        log_p = [torch.nn.functional.logsigmoid((2 * bits[:, [i]] - 1) * t) for i, t in ((0, first), (1, alone))]
        log_seen = torch.nn.functional.logsigmoid((2 * bits[:, 1:] - 1) * seen[bits[:, 0].long()])
        divergence = chance @ (q * (2 * q).log()).sum(1)
        expected = [chance @ (q * (log_p[0] + second)).sum(1) for second in (log_seen, log_p[1])]
        bound = (1 - rate) * expected[0] + rate * expected[1] - weight * divergence
        adam.zero_grad()
        (-bound).backward()
        adam.step()
    return bound.item(), divergence.item(), (expected[0] - divergence).item()


most, least = math.log(2), math.log(2) + entropy(0.9) - 2 * entropy(0.5 - 0.2**0.5)
for agree, rate, weight in ((0.9, 0.0, 1.0), (0.9, 0.0, 0.5), (0.9, 0.5, 1.0)):
    bound, divergence, full = best_tables(agree, rate, weight)
    gain = bound + (1 + rate) * most + (1 - rate) * entropy(agree)
    print(f"dropout {rate}, weight {weight}: gain {gain:.4f}, divergence {divergence:.3f}, with all inputs {full:.4f}")
    assert abs(gain - rate * (most - entropy(agree)) - (1 - weight) * most) < 3e-3
    assert abs(full + most + entropy(agree)) < 3e-3
    assert weight == 1 - rate == 1 or least - 0.01 < divergence < most + 0.01

# %%
# Without dropout there is a tie, and where training ends hangs on its start. Dropout decides for the code. Tables for
# inputs that are seen and for inputs that are dropped share nothing, and then dropout costs nothing: with all inputs
# the bound is minus the entropy of the data.

# %%
# The fit
# -------
# Now networks, which do share. After training, all have all inputs. Their use of the code is shown by the KL
# divergence, by the coordinates whose mean varies, and by what the log likelihood of a strip loses if the decoder is
# given the code of another strip. Errors are over images, each of four strips.

settings = {"no remedy": (0.0, False), "annealing": (0.0, True), "dropout 0.5": (0.5, False), "both": (0.5, True)}
settings["dropout 1"] = 1.0, False
steps, num_draws, found = (20, 20, {}) if is_small() else (800, 200, {})


def with_error(value: torch.Tensor) -> tuple[float, float]:
    of_images = value.double().reshape(-1, 4).mean(1)
    return float(of_images.mean()), float(of_images.std() / len(of_images) ** 0.5)


for name, (rate, annealed) in settings.items():
    vae, adam = new_vae(rate), lambda parameters: torch.optim.Adam(parameters, lr=1e-2)
    options = {"num_steps": steps, "batch_size": 200, "optimizer": adam, "progress": False}
    bk.fit(vae.model, vae.guide, ELBO(kl_weight=Linear(steps // 2) if annealed else 1.0), train, seed=0, **options)
    vae.decoder.rate = 0.0
    held_out = importance_sampling(vae.model, vae.guide, test, num_draws=num_draws, seed=1, progress=False)
    with global_stream(torch.Generator().manual_seed(2)), torch.no_grad():
        q = vae.encoder(test)
        divergence = torch.distributions.kl_divergence(q, vae.prior())
        z = q.sample((20,))
        own, others = (vae.likelihood(vae.decoder(c, test), 1).log_prob(test).mean(0) for c in (z, z.roll(4, 1)))
    found[name] = held_out.log_likelihood, divergence, own - divergence, own - others
    print(f"{name}: {active_units(vae.guide, test).count} of 2 codes active")
    for what, value in zip(
        ("log likelihood", "divergence", "bound", "lost with another code"), found[name], strict=True
    ):
        print("    {:22s} {:7.3f} +- {:.3f} nats".format(what, *with_error(value)))
    assert held_out.mean > float((own - divergence).mean()) - 4.5 * held_out.standard_error - 0.01

for name in ("annealing", "dropout 0.5", "both"):
    more, error = with_error(found[name][1] - found["no remedy"][1])
    print(f"divergence, {name} above no remedy: {more:.3f} +- {error:.3f}")
    assert is_small() or more > 4.5 * error

# %%
# What it says
# ------------
# Without a remedy most of the code is ignored. Annealing makes it used and costs almost nothing on new images, as the
# tie of the twin lets one hope. Dropout makes it used as well, but here it costs log likelihood, because one network
# has to predict from any set of inputs; both together cost no less. A decoder that reads no pixels loses most. The
# number of coordinates whose mean varies does not tell the five apart: a coordinate may vary and still be hardly heard.

for name in list(settings)[1:]:
    less, error = with_error(found["no remedy"][0] - found[name][0])
    print(f"log likelihood, no remedy above {name}: {less:.3f} +- {error:.3f} nats a strip")
assert is_small() or less > 4.5 * error

figure = Figure(figsize=(7, 4), layout="constrained")
axes = figure.subplots()
for name, (likelihood, divergence, bound, _) in found.items():
    x, x_error = with_error(divergence)
    for value, marker, color in ((likelihood, "o", "C0"), (bound, "s", "C1")):
        y, y_error = with_error(value - found["no remedy"][0])
        axes.errorbar(x, y, y_error, x_error, fmt=marker, color=color)
    axes.annotate(name, (x, y), (6, -12), textcoords="offset points")
axes.legend(axes.containers[:2], ["log likelihood", "bound"], frameon=False)
axes.set(xlabel="KL divergence (nats a strip)", ylabel="held-out nats above no remedy")

# %%
# A failure on purpose
# --------------------
# Dropout makes a code worth what inputs tell of later bits. If the bits are independent they tell nothing, and dropout
# at any rate gains nothing.

bound, divergence, _ = best_tables(0.5, 0.5, 1.0)
print(f"independent bits, dropout 0.5: a code gains {bound + 2 * most:.4f} nats, divergence {divergence:.3f}")
assert abs(bound + 2 * most) < 3e-3

# %%
# Try it on yours
# ---------------
# Replace ``train`` and ``test`` by your bits, in the order in which they should be read, and the sizes of the networks.
#
# .. code-block:: python
#
#    vae = new_vae(rate=0.5, num_pixels=train.shape[1], num_codes=5)
#    bk.fit(vae.model, vae.guide, ELBO(kl_weight=Linear(1000)), train, num_epochs=50, batch_size=100)
#    vae.decoder.rate = 0.0
#    print(importance_sampling(vae.model, vae.guide, test, num_draws=500))
#
# Look at what is lost with another code, and at the log likelihood beside a run without remedy. If log likelihood is
# all that you want, a code that is ignored is no defect.
#
# Where to go next: :doc:`beta_vae_infomax` has the weight of the divergence in full, :doc:`variational_autoencoder`
# measures what a guide costs that is not the posterior, :doc:`geco` asks for a quality of the reconstruction.
