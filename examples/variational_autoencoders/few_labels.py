r"""
Semi-supervised learning with a VAE: a classifier from thirty labelled digits
=============================================================================

**What you will learn:** how a variational autoencoder learns a classifier from a few labels and many images without,
what the sum over unknown labels has to do with it, and when images without labels do not help.

In the model of :cite:t:`kingma2014semi` an image has a label and a style. Images without a label still say which images
look alike, and if images of one class do, the labels of a few are labels of many. The data are digits of eight by eight
pixels :cite:p:`alpaydin1998`.
"""

# sphinx_gallery_thumbnail_number = -1
import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.objectives import ELBO
from bayeskit.models.vae import plot_images, semi_supervised_vae

# %%
# The model
# ---------
# With a label :math:`y` of ten classes and a style :math:`z` of four numbers,
#
# .. math::
#
#    y \sim \mathrm{Uniform}, \quad z \sim N(0, I), \quad x_p \mid y, z \sim \mathrm{Bernoulli}(f_p(y, z)), \qquad
#    q(y, z \mid x) = q(y \mid x) \, q(z \mid x, y).
#
# The guide's :math:`q(y \mid x)` is the classifier. With :math:`L(x, y)` the evidence lower bound of an image and a
# label, an image without label has the bound
#
# .. math:: U(x) = \sum_y q(y \mid x) \, \{ L(x, y) - \log q(y \mid x) \},
#
# and the objective is :math:`\sum L(x_i, y_i) + \sum U(x_j) + \alpha \sum \log q(y_i \mid x_i)`. The last term trains
# the classifier on the labels as well.

num_labelled, weight = 30, 10.0
pixels, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(pixels))
x = torch.as_tensor(pixels[order] > 7.5, dtype=torch.float32)
y = torch.as_tensor(labels[order])
test_x, test_y, x, y = x[1297:], y[1297:], x[:1297], y[:1297]
chosen = torch.cat([torch.nonzero(y == digit)[:3, 0] for digit in range(10)])  # three of each digit
others = torch.as_tensor(np.setdiff1d(np.arange(len(x)), chosen.numpy()))


def new(**options):
    with global_stream(torch.Generator().manual_seed(0)):
        return semi_supervised_vae(64, 10, (64,), 4, **options)


# %%
# Before the data
# ---------------
# The thirty images whose labels will be known, a row for each of three, and images of the untrained model.

before = Figure(figsize=(6, 2.6), layout="constrained")
axes = before.subplots()
untrained = new().generate(10, seed=0, y=torch.arange(10))
plot_images(torch.cat([x[chosen].reshape(10, 3, 64).movedim(0, 1), untrained[None]]), axes)
axes.set_yticks([14, 34], ["labelled", "untrained"])

# %%
# An exact twin
# -------------
# A guide marks the unknown label to be enumerated, and the objective then sums over it. By hand: the joint density of
# image, label and a draw of the style for each of the ten labels made known, less the guide's density of the style,
# weighted by the classifier. Styles are drawn anew, so that the two agree within their Monte Carlo errors.

tiny = new().double()
some = x[:20].double()
num_passes = 100 if is_small() else 1000
with global_stream(torch.Generator().manual_seed(0)), torch.no_grad():
    summed = torch.tensor([-ELBO().loss(tiny.model, tiny.guide, some) for _ in range(num_passes)])
    by_hand = torch.zeros(num_passes, dtype=torch.float64)
    for digit in range(10):
        q, known = tiny.classify(some)[:, digit], torch.full((20,), digit)
        beside = torch.nn.functional.one_hot(known, 10).double()
        normal = tiny.encoder(torch.cat([some, beside], -1))
        z = normal.sample((num_passes,))
        logits = tiny.decoder(torch.cat([z, beside.expand(num_passes, 20, 10)], -1))
        log_joint = torch.distributions.Bernoulli(logits=logits).log_prob(some).sum(-1) - np.log(10)
        log_joint = log_joint + torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1)
        by_hand += (q * (log_joint - normal.log_prob(z) - q.log())).sum(-1)
difference = float(summed.mean() - by_hand.mean())
error = float((summed.var() + by_hand.var()).div(num_passes).sqrt())
print(f"bound of twenty images {summed.mean():.3f}, by hand {by_hand.mean():.3f}", end=", ")
print(f"difference {difference:.3f} +- {error:.3f}")
assert abs(difference) < 4.5 * error

# %%
# The fit
# -------
# The classifier on thirty labels alone, and with 1,267 further images. Both see the same labels; the share of test
# images that are named rightly is compared image by image.

num_steps = 60 if is_small() else 1500


def trained(x, y, chosen, others, use_others):
    vae, generator, scale = new(classification_weight=weight), torch.Generator().manual_seed(0), len(others) / 100
    adam = torch.optim.Adam(vae.parameters(), lr=3e-3)
    with global_stream(torch.Generator().manual_seed(1)):
        for _ in range(num_steps):
            adam.zero_grad()
            loss = ELBO().differentiable_loss(vae.model, vae.guide, x[chosen], y[chosen])
            if use_others:
                batch = others[torch.randint(len(others), (100,), generator=generator)]
                loss = loss + scale * ELBO().differentiable_loss(vae.model, vae.guide, x[batch])
            (loss / len(x)).backward()
            adam.step()
    return vae


networks = {name: trained(x, y, chosen, others, use) for name, use in (("labels alone", False), ("and images", True))}
right = {name: (vae.classify(test_x).argmax(-1) == test_y).double() for name, vae in networks.items()}
for name, each in right.items():
    print(
        f"{name:12s} {each.mean():.3f} +- {each.std() / len(each) ** 0.5:.3f} of {len(each)} test images named rightly"
    )
gain = right["and images"] - right["labels alone"]
print(f"gain by images without labels {gain.mean():.3f} +- {gain.std() / len(gain) ** 0.5:.3f}")
assert is_small() or gain.mean() > 0

# %%
# A failure on purpose: labels that the images do not show
# --------------------------------------------------------
# The same images, and thirty labels dealt out at random. Images without labels group by what they look like, the labels
# by nothing, and the classifier carries wrong names to all the others.

shuffled = y.clone()
shuffled[chosen] = y[chosen][torch.randperm(num_labelled, generator=torch.Generator().manual_seed(3))]
misled = trained(x, shuffled, chosen, others, True).classify(test_x)
wrong = (misled.argmax(-1) == test_y).double()
loss = right["and images"] - wrong
error = loss.std() / len(loss) ** 0.5
print(f"labels at random: {wrong.mean():.3f} named rightly, {loss.mean():.3f} +- {error:.3f} fewer", end=", ")
print(f"at a mean probability of {misled.max(-1).values.mean():.2f} for the digit named")
assert is_small() or loss.mean() > 4.5 * error

# %%
# What it says
# ------------
# Images without labels help as far as what makes images alike is what the labels are about. Nothing in the training
# says whether it is: keep labels aside, as here, and compare with the classifier that sees no further images.

figure = Figure(figsize=(9, 3.4), layout="constrained")
left, middle = figure.subplots(1, 2, width_ratios=[1, 1.6])
names = [*right, "labels at random"]
shares = [each.mean() for each in (*right.values(), wrong)]
left.bar(names, shares, yerr=[2 * each.std() / len(each) ** 0.5 for each in (*right.values(), wrong)])
left.set(ylabel="share of test images named rightly", ylim=(0, 1))
left.tick_params(axis="x", labelsize="small")
styles = torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(2)).expand(3, 10, 4)
made = networks["and images"].decode(styles, torch.arange(10).expand(3, 10))
plot_images(made, middle)
middle.set(title="ten labels (across) in three styles (down)")

# %%
# Try it on yours
# ---------------
# Replace ``x`` by rows of zeros and ones, or give another likelihood, and ``chosen`` by the rows whose label you know;
# unknown labels are not coded as a number, the rows are passed without ``y``. Look at the share that is named rightly
# with and without the other rows, on labels kept aside.
#
# .. code-block:: python
#
#    vae = semi_supervised_vae(x.shape[1], num_classes, hidden=(200,), latent_dim=10, classification_weight=10.0)
#    loss = ELBO().differentiable_loss(vae.model, vae.guide, x_labelled, y_labelled)
#    loss = loss + ELBO().differentiable_loss(vae.model, vae.guide, x_unlabelled)
#
# Where to go next: :doc:`discrete_codes_of_digits` has classes that nobody named,
# :doc:`/gallery/evidence/galaxy_mixture` enumerates labels in a mixture.
