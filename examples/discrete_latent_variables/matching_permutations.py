r"""
Posterior over permutations: matching ten digits, exactly and by relaxations
============================================================================

**What you will learn:** how the exact posterior of a matching says which pairs are certain, what it gains over deciding
on each image alone, and how relaxed permutations approximate it where no exact answer can be had.

Ten images of handwritten digits :cite:p:`alpaydin1998` show 0 to 9, each once, in unknown order. All that is known of
an image are two numbers, its linear discriminants :cite:p:`fisher1936`. Which image shows which digit?
"""

# sphinx_gallery_thumbnail_number = -1
import itertools
import math

import torch
from matplotlib.figure import Figure
from scipy.special import logsumexp
from scipy.stats import norm
from sklearn.datasets import load_digits
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from bayeskit.distributed import global_stream
from bayeskit.errors import SettingsError
from bayeskit.gallery import is_small
from bayeskit.inference.objectives import ELBO
from bayeskit.models.discrete.permutations import (
    GumbelSinkhornRelaxation,
    NoisyMatching,
    RoundingRelaxation,
    permutation_matrix,
)

# %%
# The model
# ---------
# Any permutation :math:`\pi` is equally probable, and image :math:`i` shows digit :math:`\pi_i`:
#
# .. math:: y_i \mid \pi \sim N(c_{\pi_i}, I), \qquad i = 0, \dots, 9.
#
# Discriminants are scaled such that images of one digit have about unit variance; the first six hundred images give the
# centres :math:`c`, the others make up sets of ten. There are 3,628,800 permutations, but a dynamic programme over
# the 1,024 sets of digits sums over all of them. Twenty rows are still possible.

pixels, labels = load_digits(return_X_y=True)
discriminants = LinearDiscriminantAnalysis(n_components=2).fit(pixels[:600], labels[:600])
y = torch.as_tensor(discriminants.transform(pixels), dtype=torch.float64)
labels = torch.as_tensor(labels)
centres = torch.stack([y[:600][labels[:600] == digit].mean(0) for digit in range(10)])
num_sets = int(labels[600:].bincount().min())
sets = torch.stack([y[600:][labels[600:] == digit][:num_sets] for digit in range(10)], 1)
truth = torch.rand(num_sets, 10, generator=torch.Generator().manual_seed(0)).argsort(-1)
sets = sets.gather(1, truth.unsqueeze(-1).expand_as(sets))
matching = NoisyMatching(centres.expand_as(sets), sets, scale=1.0)

# %%
# Before the data
# ---------------
# Centres of the ten digits, a hundred images from the model (dots), and the images of the first set (numbers). Some
# digits stand apart, others lie on top of each other.

generator = torch.Generator().manual_seed(1)
simulated = centres.repeat(10, 1) + torch.randn(100, 2, generator=generator, dtype=torch.float64)
prior_predictive = Figure(figsize=(7, 4.5), layout="constrained")
axes = prior_predictive.subplots()
axes.plot(*simulated.T, ".", color="0.7", label="from the model")
axes.plot(*centres.T, "x", color="C3", markersize=9, label="centres")
for digit in range(10):
    axes.annotate(str(digit), centres[digit].tolist(), (5, 5), textcoords="offset points", color="C3")
    number, place = str(int(truth[0, digit])), sets[0, digit].tolist()
    axes.annotate(number, place, color="C0", weight="bold", ha="center", va="center")
axes.set(xlabel="first discriminant", ylabel="second discriminant")
axes.legend(frameon=False)

# %%
# An exact twin
# -------------
# Five images of five digits have 120 permutations, which can be listed.

five = NoisyMatching(centres[:5], sets[0][truth[0] < 5], scale=1.0)
density = norm(five.centres.numpy()[None], 1.0).logpdf(five.observations.numpy()[:, None]).sum(-1)
listed = list(itertools.permutations(range(5)))
log_joint = [sum(density[i, j] for i, j in enumerate(permutation)) - math.log(120) for permutation in listed]
log_evidence = logsumexp(log_joint)
matrices = torch.stack([torch.eye(5, dtype=torch.float64)[list(permutation)] for permutation in listed])
pairs = (torch.tensor(log_joint) - log_evidence).exp() @ matrices.flatten(1)
difference = float((pairs - five.posterior().marginals.flatten()).abs().max())
print(f"log evidence {log_evidence:.9f}, by the programme {float(five.log_evidence()):.9f}")
print(f"probabilities of pairs differ by {difference:.0e} at most")
assert abs(log_evidence - float(five.log_evidence())) < 1e-9 and difference < 1e-9

# %%
# The fit
# -------
# The posterior of every set at once, exactly. Permutations can be drawn from it independently, and must be right as
# often as the exact probabilities of the true pairs say.

posterior = matching.posterior()
of_true_pairs = posterior.marginals.gather(-1, truth.unsqueeze(-1)).squeeze(-1).mean(-1)
num_draws = 200 if is_small() else 5000
with global_stream(torch.Generator().manual_seed(2)):
    drawn = posterior.sample((num_draws,))
right = (drawn == truth).double().mean(-1)
error = (right.var(0) / num_draws).mean().div(num_sets).sqrt()
print(f"true pairs: probability {of_true_pairs.mean():.5f}, share of draws {right.mean():.5f} +- {error:.5f}")
assert abs(float(right.mean() - of_true_pairs.mean())) < 4.5 * float(error)

# %%
# Beyond twenty rows there are relaxations: matrices near permutations, with a density that can be trained, by rounding
# :cite:p:`linderman2018` or by Sinkhorn's algorithm with Gumbel noise :cite:p:`mena2018`. For the first set they can be
# judged. Both find the likely pairs, and rounding comes nearer to their probabilities.

first = NoisyMatching(centres, sets[0], scale=1.0)
exact = first.posterior().marginals
found, distances, num_steps = {"exact": exact}, [], 200 if is_small() else 1000
for relaxation in (
    RoundingRelaxation((10,), dtype=torch.float64),
    GumbelSinkhornRelaxation((10,), temperature=1.0, prior_temperature=0.5, dtype=torch.float64),
):
    optimizer, objective = torch.optim.Adam(relaxation.parameters(), lr=0.05), ELBO(num_particles=4)
    bounds = torch.zeros(num_steps)
    with global_stream(torch.Generator().manual_seed(0)):
        for step in range(num_steps):
            optimizer.zero_grad()
            loss = objective.differentiable_loss(first.relaxed_model, relaxation, relaxation)
            loss.backward()
            optimizer.step()
            bounds[step] = -loss.detach()
    name = type(relaxation).__name__
    found[name] = permutation_matrix(relaxation.sample_permutations(2000, seed=0), torch.float64).mean(0)
    quarters = bounds.reshape(4, -1)
    change, error = quarters[3].mean() - quarters[2].mean(), (quarters.var(1) / quarters.shape[1])[2:].sum().sqrt()
    distance = 0.5 * (found[name] - exact).abs().sum(-1).mean()
    print(f"{name}: total variation {distance:.3f} a row; the bound still changed by {change:.2f} +- {error:.2f}")
    uniform = 0.5 * (exact - 0.1).abs().sum(-1).mean()
    distances.append(float(distance))
    assert distance < uniform and (is_small() or abs(change) < 4.5 * error)
assert is_small() or distances[0] < distances[1]

# %%
# What it says
# ------------
# That each digit occurs once is worth something: where two images could show the same digit, one of them has to give
# way. The true digit gains probability; whether more of the images are named rightly, these sets hardly tell.

alone, together = matching.log_weights.softmax(-1), posterior.marginals
z_of_gains = []
for what, score in (
    ("log probability of the true digit", lambda p: p.gather(-1, truth.unsqueeze(-1)).log().mean((-1, -2))),
    ("share of images named rightly", lambda p: (p.argmax(-1) == truth).double().mean(-1)),
):
    gain = score(together) - score(alone)
    error = gain.std() / num_sets**0.5
    print(f"{what}: {score(alone).mean():.3f} alone, {score(together).mean():.3f} in a matching")
    print(f"    a gain of {gain.mean():.3f} +- {error:.3f}, over {num_sets} sets")
    z_of_gains.append(float(gain.mean() / error))
assert z_of_gains[0] > 4.5

figure = Figure(figsize=(9, 3.4), layout="constrained")
for place, (name, probabilities) in enumerate(found.items(), 1):
    axes = figure.add_subplot(1, len(found), place)
    image = axes.imshow(probabilities[truth[0].argsort()].numpy(), vmin=0, vmax=1)
    axes.set(xticks=range(10), yticks=range(10), xlabel="digit", title=name.removesuffix("Relaxation"))
figure.axes[0].set_ylabel("image that shows")
figure.colorbar(image, ax=figure.axes, label="probability", shrink=0.8)

# %%
# A failure on purpose
# --------------------
# The sum has a term for each set of digits, and their number doubles with each image. At 24 images it is refused, with
# what to take instead; the most probable matching alone is to be had at any size.

many = NoisyMatching(centres.repeat(3, 1)[:24], sets[:3].flatten(0, 1)[:24], scale=1.0)
try:
    many.log_evidence()
except SettingsError as refusal:
    print(f"refused: {refusal}")
else:
    raise AssertionError("sixteen million sets were summed")

# %%
# Try it on yours
# ---------------
# Replace the centres and the observations, one row for each thing to be matched, in units of the noise.
#
# .. code-block:: python
#
#    matching = NoisyMatching(centres, sets[0], scale=1.0)
#    posterior = matching.posterior()
#    print(posterior.marginals.max(-1), matching.log_evidence())
#
# Look at the largest probability of each row: rows near one are matched, others have rivals, which the columns name.
# Beyond twenty rows train a relaxation, and hold it against an exact posterior of some of the rows.
#
# Where to go next: :doc:`gradients_of_choices` judges relaxations of single bits, :doc:`templates_in_noise` finds
# digits in images.
