r"""
Posterior over permutations: matching ten digits, exactly and by relaxations
============================================================================

**What you will learn:** how the exact posterior of a matching says which pairs are certain, what it gains over deciding
on each image alone, how near three relaxations of permutations come to it, and why their bounds must not be compared.

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
    SequentialPermutation,
    StickBreakingRelaxation,
    all_permutations,
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
# How hard a problem is shows in the probability of the true pairs when images are drawn from the model: one tenth for
# images that tell nothing.

simulated, true_pairs = NoisyMatching.simulate(10, 0.6, seed=1, batch_shape=(20,))
of_true = simulated.posterior().marginals.gather(-1, true_pairs.unsqueeze(-1)).mean((1, 2))
print(f"simulated sets: probability of a true pair {of_true.mean():.3f} +- {of_true.std() / 20**0.5:.3f}")

# %%
# An exact twin
# -------------
# Five images of five digits have 120 permutations, which can be listed. Stick-breaking :cite:p:`linderman2018` at
# temperature zero has probabilities in closed form, which sum to one and which its draws must show.

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

sticks = SequentialPermutation(torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4))
probabilities = sticks.log_prob(all_permutations(5)).exp()
with global_stream(torch.Generator().manual_seed(0)):
    drawn = permutation_matrix(sticks.sample((4000,)), torch.float64)
expected = torch.einsum("k,kij->ij", probabilities, permutation_matrix(all_permutations(5), torch.float64))
z = (drawn.mean(0) - expected) / (expected * (1 - expected) / len(drawn)).sqrt()
print(f"stick-breaking: sum of probabilities {probabilities.sum():.9f}; draws off by {z.abs().max():.1f} errors")
assert abs(probabilities.sum() - 1) < 1e-9 and z.abs().max() < 4.5

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
# Beyond twenty rows there are relaxations: matrices near permutations, with a density that can be trained. Rounding
# draws normal matrices near the doubly stochastic ones, stick-breaking builds such a matrix entry by entry
# :cite:p:`linderman2018`, and Sinkhorn's algorithm turns Gumbel noise into one :cite:p:`mena2018`. For a few sets they
# can be judged, by the total variation of an image's probabilities. Rounding comes nearer than stick-breaking.

num_judged, num_steps = 6, 100 if is_small() else 600
makers = {
    "rounding": RoundingRelaxation,
    "stick-breaking": StickBreakingRelaxation,
    "Gumbel-Sinkhorn": lambda shape, dtype: GumbelSinkhornRelaxation(shape, 1.0, 0.5, dtype=dtype),
}


def trained(name, matching):
    """Return the probabilities of pairs by a relaxation trained for each set, and its bound a set at the end."""
    relaxation, objective, bounds = makers[name](matching.observations.shape[:2], dtype=torch.float64), ELBO(4), []
    optimizer = torch.optim.Adam(relaxation.parameters(), lr=0.05)
    with global_stream(torch.Generator().manual_seed(0)):
        for _ in range(num_steps):
            optimizer.zero_grad()
            loss = objective.differentiable_loss(matching.relaxed_model, relaxation, relaxation)
            loss.backward()
            optimizer.step()
            bounds.append(-loss.item() / num_judged)
    drawn = permutation_matrix(relaxation.sample_permutations(500, seed=0), torch.float64)
    return drawn.mean(0), sum(bounds[-20:]) / 20


judged = NoisyMatching(centres.expand(num_judged, -1, -1), sets[:num_judged], scale=1.0)
exact = judged.posterior().marginals
found, distance = {"exact": exact[0]}, {}
for name in makers:
    pairs, _ = trained(name, judged)
    found[name], distance[name] = pairs[0], 0.5 * (pairs - exact).abs().sum(-1).mean(-1)
    print(f"{name}: total variation {distance[name].mean():.3f} +- {distance[name].std() / num_judged**0.5:.3f} a row")
    assert distance[name].mean() < 0.5 * (exact - 0.1).abs().sum(-1).mean()
nearer = distance["stick-breaking"] - distance["rounding"]
assert nearer.mean() > 4.5 * nearer.std() / num_judged**0.5

# %%
# What it says
# ------------
# That each digit occurs once is worth something: where two images could show the same digit, one of them has to give
# way. The true digit gains probability; whether more of the images are named rightly, these sets hardly tell.

alone, together = matching.log_weights.softmax(-1), posterior.marginals
for what, score in (
    ("log probability of the true digit", lambda p: p.gather(-1, truth.unsqueeze(-1)).log().mean((-1, -2))),
    ("share of images named rightly", lambda p: (p.argmax(-1) == truth).double().mean(-1)),
):
    gain = score(together) - score(alone)
    error = gain.std() / num_sets**0.5
    print(f"{what}: {score(alone).mean():.3f} alone, {score(together).mean():.3f} in a matching")
    print(f"    a gain of {gain.mean():.3f} +- {error:.3f}, over {num_sets} sets")
    assert what[0] == "s" or gain.mean() > 4.5 * error

figure = Figure(figsize=(9, 3.4), layout="constrained")
for place, (name, probabilities) in enumerate(found.items(), 1):
    axes = figure.add_subplot(1, len(found), place)
    image = axes.imshow(probabilities[truth[0].argsort()].numpy(), vmin=0, vmax=1)
    axes.set(xticks=range(10), yticks=range(10), xlabel="digit", title=name)
figure.axes[0].set_ylabel("image that shows")
figure.colorbar(image, ax=figure.axes, label="probability", shrink=0.8)

# %%
# A failure on purpose
# --------------------
# Each relaxation has its own prior over matrices, and its bound is one of the evidence of that model. Where there is
# much noise, the bound of stick-breaking is far higher than that of rounding. So relaxations cannot be chosen by their
# bounds. And exact sums end: their terms, one for each set of digits, double with each image. At 24 images the sum is
# refused, with what to take instead; the most probable matching alone is to be had at any size.

noisy = NoisyMatching.simulate(6, 1.2, seed=1, batch_shape=(num_judged,))[0]
by_bound = trained("stick-breaking", noisy)[1] - trained("rounding", noisy)[1]
print(f"much noise: the bound of stick-breaking is higher by {by_bound:.1f} nats")
assert by_bound > 1
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
