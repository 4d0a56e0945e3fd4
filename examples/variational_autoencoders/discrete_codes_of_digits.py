r"""
Discrete variational autoencoders: gradient estimators for bits, and half of a digit from the other
===================================================================================================

**What you will learn:** how to train networks with a discrete code by several gradient estimators, how to judge them by
an exact sum over codes, and why not to compare losses of training where one is relaxed.

The lower half of a digit does not follow from its upper half: the same arch may belong to a nine or a seven. A
prediction that takes pixels as independent given the upper half blurs the two. A code that is drawn first, and that
all pixels see, keeps them apart :cite:p:`sohn2015`. Bits cannot be reparameterised, so that the guide's gradient needs
an estimator: the score function, with or without a baseline from other draws :cite:p:`kool2019`, pairs of opposite
draws :cite:p:`dong2020`, draws without replacement :cite:p:`kool2020`, the bound of several draws (VIMCO,
:cite:alp:`mnih2016`), or a relaxation to numbers between zero and one :cite:p:`jang2017`. The digits are those of
scikit-learn :cite:p:`alpaydin1998`, black where the grey is at least one half.
"""

# sphinx_gallery_thumbnail_number = -1
import functools
import itertools

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.special import expit, logsumexp
from scipy.stats import bernoulli

import bayeskit as bk
from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.gradients import DisARM, GumbelSoftmax, LeaveOneOut, ScoreFunction, UnorderedSet
from bayeskit.inference.objectives import ELBO, IWAE
from bayeskit.models.vae import binary_vae, load_digits, mlp, plot_images

# %%
# The model
# ---------
# The upper half :math:`u` gives the chances of six bits, and bits and upper half give those of the pixels below,
#
# .. math::
#
#    z_b \mid u \sim \mathrm{Bernoulli}\big(\pi_b(u)\big), \qquad
#    x_p \mid z, u \sim \mathrm{Bernoulli}\big(f_p(z, u)\big), \qquad
#    q(z \mid x, u) = \prod_b \mathrm{Bernoulli}\big(z_b; g_b(x, u)\big).
#
# A sum over the 64 codes gives :math:`\log p(x \mid u)` of any half exactly, and the evidence lower bound without
# draws, whatever estimator trained the networks. Without an upper half, and with fair bits, this is the autoencoder of
# whole images that ``binary_vae`` makes.


class HalfImage(torch.nn.Module):
    def __init__(self, num_above: int = 32, num_below: int = 32, num_bits: int = 6, hidden: int = 64):
        super().__init__()
        self.gradient = None
        self.prior = mlp([num_above, hidden, num_bits])
        self.decoder = mlp([num_bits + num_above, hidden, num_below])
        self.encoder = mlp([num_above + num_below, hidden, num_bits])
        codes = list(itertools.product([0.0, 1.0], repeat=num_bits))
        self.register_buffer("codes", torch.tensor(codes).unsqueeze(1))

    def pixels(self, z, above):
        above = above.expand(*torch.broadcast_shapes(z.shape[:-1], above.shape[:-1]), -1)
        return bits(self.decoder(torch.cat([z.expand(*above.shape[:-1], -1), above], -1)))

    def model(self, above, below):
        with pyro.plate("data", len(above)):
            z = pyro.sample("z", bits(self.prior(above)))
            pyro.sample("x", self.pixels(z, above), obs=below)

    def guide(self, above, below):
        infer = {} if self.gradient is None else {"gradient": self.gradient}
        with pyro.plate("data", len(above)):
            pyro.sample("z", bits(self.encoder(torch.cat([above, below], -1))), infer=infer)

    def exact(self, above, below):
        """Return log likelihood and evidence lower bound of each lower half, by a sum over all codes."""
        with torch.no_grad():
            log_joint = bits(self.prior(above)).log_prob(self.codes) + self.pixels(self.codes, above).log_prob(below)
            log_guide = bits(self.encoder(torch.cat([above, below], -1))).log_prob(self.codes)
        return log_joint.logsumexp(0).double(), (log_guide.exp() * (log_joint - log_guide)).sum(0).double()


def bits(logits):
    return dist.Independent(dist.Bernoulli(logits=logits, validate_args=False), 1, validate_args=False)


def new_network(make=HalfImage, **sizes):
    with global_stream(torch.Generator().manual_seed(0)):
        return make(**sizes)


digits = load_digits()
train, test = ((images >= 0.5).float().split(32, -1) for images in (digits.train, digits.test))

# %%
# Before the data
# ---------------
# An untrained network makes nothing but noise: it gives a lower half no more chance than a fair coin for each pixel.

print(f"before training {new_network().exact(*test)[0].mean():.2f} nats a half, by coins {-32 * np.log(2):.2f}")

# %%
# An exact twin
# -------------
# Three pixels, by two bits: four codes, eight images, whose chances sum to one; once as whole images, and once as the
# lower halves below two other pixels. The sums agree with scipy's, and the bounds from draws agree with them within
# their errors.

half = new_network(num_above=2, num_below=3, num_bits=2, hidden=5).double()
whole = new_network(binary_vae, data_dim=3, hidden=(5,), num_bits=2).double()
below = torch.tensor(list(itertools.product([0.0, 1.0], repeat=3)), dtype=torch.float64)
above, codes = torch.tensor([[0.0, 1.0]], dtype=torch.float64).expand(8, 2), half.codes[:, 0]
z, images = codes.numpy(), below.numpy()


def by_scipy(prior, pixels, guide):
    """Return log evidence and bound of each image from logits: of bits, of pixels by code, of bits by image."""
    prior, black, guide = (expit(logits.numpy()) for logits in (prior, pixels, guide))
    log_joint = bernoulli.logpmf(z, prior).sum(-1)[:, None] + bernoulli.logpmf(images, black[:, None]).sum(-1)
    log_guide = bernoulli.logpmf(z[:, None], guide).sum(-1)
    return logsumexp(log_joint, axis=0), (np.exp(log_guide) * (log_joint - log_guide)).sum(0)


half.gradient, whole.gradient = UnorderedSet(2), LeaveOneOut(10)
with torch.no_grad():
    decoded, encoded = half.decoder(torch.cat([codes, above[:4]], -1)), half.encoder(torch.cat([above, below], -1))
    by_hand = [by_scipy(half.prior(above[:1]), decoded, encoded)]
    by_hand += [by_scipy(torch.zeros(2), whole.decoder(codes), whole.encoder(below))]
    sums = [half.exact(above, below), (whole.log_evidence(below), whole.evidence_lower_bound(below))]
cases = zip((half, whole), ((above, below), (below,)), sums, by_hand, strict=True)
for network, args, (likelihood, bound), hand in cases:
    assert np.abs(np.subtract((likelihood.numpy(), bound.numpy()), hand)).max() < 1e-9
    assert abs(float(likelihood.exp().sum()) - 1) < 1e-9
    with global_stream(torch.Generator().manual_seed(2)):
        draws = np.array([-ELBO().loss(network.model, network.guide, *args) for _ in range(200)])
    error = draws.std(ddof=1) / len(draws) ** 0.5
    assert abs(draws.mean() - float(bound.sum())) < 4.5 * error

# %%
# The fit
# -------
# The same start and four evaluations of the decoder an image for each estimator. The importance-weighted bound of four
# codes has the gradient of VIMCO where codes are discrete.

estimators = {
    "score function": (ELBO(), ScoreFunction(4)),
    "DisARM": (ELBO(), DisARM(2)),
    "leave one out": (ELBO(), LeaveOneOut(4)),
    "without replacement": (ELBO(), UnorderedSet(4)),
    "VIMCO": (IWAE(4), None),
    "relaxed (Concrete)": (ELBO(), GumbelSoftmax(0.5, num_samples=4)),
}
networks, found = {}, {}
for name, (objective, estimator) in estimators.items():
    network = networks[name] = new_network()
    network.gradient = estimator
    adam = functools.partial(torch.optim.Adam, lr=5e-3)
    options = {"num_steps": 20 if is_small() else 500, "batch_size": 100, "optimizer": adam, "progress": False}
    bk.fit(network.model, network.guide, objective, train, seed=0, **options)
    value, bound = found[name] = network.exact(*test)
    error = value.std() / len(value) ** 0.5
    print(f"{name:20s} log likelihood {value.mean():7.3f} +- {error:.3f} bound {bound.mean():.3f}")
    assert bool((bound <= value + 1e-4).all())

# %%
# A failure on purpose
# --------------------
# The relaxed loss is no bound. Numbers between zero and one carry more than bits do, so that in training it promises
# more than the bits of the same networks keep, on the same images.

relaxed = networks["relaxed (Concrete)"]
with global_stream(torch.Generator().manual_seed(3)):
    losses = np.array([ELBO().loss(relaxed.model, relaxed.guide, *train) / len(train[0]) for _ in range(20)])
error, kept = losses.std(ddof=1) / len(losses) ** 0.5, float(relaxed.exact(*train)[1].mean())
assert is_small() or -losses.mean() > kept + 4.5 * error, (losses.mean(), kept)

# %%
# What it says
# ------------
# A baseline costs nothing and gains much. Without a code, a network of the same width takes pixels as independent given
# the upper half. On new images it is worse than a code that was trained well; and its prediction is a blur, where the
# code commits to one digit. The relaxed loss could not have told which estimator is best: it is off by more than they
# differ. The figure has upper halves as they are, and below them the true half, the prediction without a code, and
# those of three codes drawn.

with global_stream(torch.Generator().manual_seed(0)):
    plain = mlp([32, 64, 32])
    optimiser = torch.optim.Adam(plain.parameters(), 5e-3)
    for _ in range(20 if is_small() else 500):
        chosen = torch.randint(len(train[0]), (100,))
        optimiser.zero_grad()
        (-bits(plain(train[0][chosen])).log_prob(train[1][chosen]).mean()).backward()
        optimiser.step()
independent = bits(plain(test[0])).log_prob(test[1]).detach().double()
for name, other in (("independent pixels", independent), ("the score function", found["score function"][0])):
    gain = found["leave one out"][0] - other
    error = float(gain.std() / len(gain) ** 0.5)
    print(f"leave one out above {name}: {gain.mean():.3f} +- {error:.3f} nats a half")
    assert is_small() or gain.mean() > 4.5 * error

best, shown = networks["leave one out"], test[0][:12]
with global_stream(torch.Generator().manual_seed(4)), torch.no_grad():
    codes = bits(best.prior(shown)).sample((3,))
    below = torch.cat([test[1][None, :12], plain(shown).sigmoid()[None], best.pixels(codes, shown).mean])
figure = Figure(figsize=(8, 3.6), layout="constrained")
axes = figure.subplots()
plot_images(torch.cat([shown.expand(5, -1, -1), below], -1), axes)
axes.set_yticks([10 * row + 3.5 for row in range(5)], ["digits", "no code", "code 1", "code 2", "code 3"])

# %%
# Try it on yours
# ---------------
# Replace the halves by your inputs and outputs, and ``bits`` of the pixels by the distribution of your output; whole
# images go to ``binary_vae(64, (64,), num_bits=4, gradient=LeaveOneOut(4))``. Compare estimators by the likelihood of
# images that were not trained on, summed over codes, or by importance sampling where there are too many, and never by a
# relaxed loss. Continuous codes are easier to train, unless bits are what is wanted.
#
# .. code-block:: python
#
#    network = HalfImage(num_above=inputs.shape[1], num_below=outputs.shape[1], num_bits=8)
#    network.gradient = LeaveOneOut(4)
#    bk.fit(network.model, network.guide, ELBO(), (inputs, outputs), num_epochs=50, batch_size=100)
#    print(network.exact(new_inputs, new_outputs)[0].mean())
#
# Where to go next: :doc:`/gallery/discrete_latent_variables/gradients_of_choices` compares estimators on one gradient,
# :doc:`variational_autoencoder` has continuous codes.
