r"""
Causal inference in Pyro: conditioning against intervention (Simpson's paradox)
===============================================================================

**What you will learn:** how a Pyro model answers three questions that look alike, about what is seen, what would be
done and what would have been, by a sum over what was not seen; and which of them data can answer.

Doctors give a strong treatment to the mild cases. Of those who got it more recover, and yet it is the worse treatment
for mild and for severe cases alike: Simpson's reversal :cite:p:`pearl2009`. An intervention, ``pyro.do``, cuts the way
by which the severity chose the treatment, and the sign changes.
"""

# sphinx_gallery_thumbnail_number = -1
import math

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit import exact
from bayeskit.gallery import is_small

# %%
# The model
# ---------
# Severity :math:`z`, treatment :math:`a` and recovery :math:`y` follow from noise :math:`u` that nobody sees:
#
# .. math::
#
#    z \sim \mathrm{Bernoulli}(0.5), \quad a = [u_a < P(a = 1 \mid z)], \quad y = [u_y < P(y = 1 \mid a, z)],
#
# with uniform :math:`u_a` and :math:`u_y`; severe cases have :math:`z = 1`. The probabilities are whole tenths, so that
# noise in steps of a tenth gives the same, and all that is unseen can be summed out.

treated = torch.tensor([9, 1])  # tenths, by severity
recovers = torch.tensor([[8, 4], [6, 2]])  # tenths, by treatment and severity
half, uniform = torch.tensor(0.5, dtype=torch.float64), torch.full((10,), 0.1, dtype=torch.float64)


def patient(two_fates=False):
    z = pyro.sample("z", dist.Bernoulli(half)).long()
    u_a, u_y = pyro.sample("u_a", dist.Categorical(uniform)), pyro.sample("u_y", dist.Categorical(uniform))
    a = pyro.sample("a", dist.Delta((u_a < treated[z]).double())).long()
    if two_fates:  # for the last section: with the treatment and without, recovery has noise of its own
        u_y = torch.where(a == 1, u_y, pyro.sample("u_untreated", dist.Categorical(uniform)))
    return pyro.sample("y", dist.Delta((u_y < recovers[a, z]).double()))


def given(model, **values):
    """Sum over all that is not observed: the posterior, whose evidence is the probability of what is."""
    observed = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    return exact.enumerate_latents(pyro.condition(model, observed))


def probability(model, **values):
    return math.exp(given(model, **values).log_evidence)


def treating(a, model=patient):
    return pyro.do(model, {"a": torch.tensor(a, dtype=torch.float64)})


# %%
# Before the data
# ---------------
# What the model says of a patient of whom nothing is known, and of one whose treatment is known: the strong treatment
# is given to the mild cases.

for name in ("z", "a", "y"):
    print(f"P({name} = 1) = {probability(patient, **{name: 1.0}):.3f}")
severe = [float(given(patient, a=a).expectation(lambda sites: sites["z"].double())) for a in (0.0, 1.0)]
print(f"severe: {severe[0]:.2f} of those without the treatment, {severe[1]:.2f} of those with it")
assert abs(severe[0] - 0.9) < 1e-9 and abs(severe[1] - 0.1) < 1e-9

# %%
# An exact twin
# -------------
# By hand: those *seen* to recover have the severity that comes with their treatment, :math:`P(z \mid a)`. If the
# treatment is *done*, severity is what it is, :math:`P(z)`, as if the arrow from :math:`z` to :math:`a` were cut.
#
# .. math::
#
#    P(y \mid a) = \sum_z P(z \mid a) P(y \mid a, z), \qquad P(y \mid \mathrm{do}(a)) = \sum_z P(z) P(y \mid a, z).

by_hand = {"seen": (0.1 * 0.8 + 0.9 * 0.4, 0.9 * 0.6 + 0.1 * 0.2), "done": (0.5 * 1.2, 0.5 * 0.8)}
found = {
    "seen": [probability(patient, a=a, y=1.0) / probability(patient, a=a) for a in (0.0, 1.0)],
    "done": [probability(treating(a), y=1.0) for a in (0.0, 1.0)],
}
for way, (without, treatment) in found.items():
    print(f"{way}: {without:.2f} recover without, {treatment:.2f} with the treatment: {treatment - without:+.2f}")
    assert abs(without - by_hand[way][0]) < 1e-9 and abs(treatment - by_hand[way][1]) < 1e-9

# %%
# The fit
# -------
# In life the probabilities come from records, here of patients made by the model. In half of them nobody wrote the
# severity down; that site is summed out at every step of the sampler. With complete records the posterior is a product
# of beta distributions, whose mean effect is exact.

number = 600 if is_small() else 2000
generator = torch.Generator().manual_seed(3)
chance = torch.rand(3, number, generator=generator, dtype=torch.float64)
z = (chance[0] < 0.5).long()
a = (10 * chance[1] < treated[z]).long()
y = (10 * chance[2] < recovers[a, z]).long()


def records(z, a, y):
    share = pyro.sample("share", dist.Beta(1.0, 1.0))
    choice = pyro.sample("choice", dist.Beta(1.0, 1.0).expand([2]).to_event(1))
    recovery = pyro.sample("recovery", dist.Beta(1.0, 1.0).expand([2, 2]).to_event(2))
    for kind, rows in (("written", slice(len(z))), ("forgotten", slice(len(z), None))):
        if len(a[rows]):
            with pyro.plate(kind, len(a[rows])):
                seen = z.double() if kind == "written" else None
                severity = pyro.sample(f"z_{kind}", dist.Bernoulli(share), obs=seen, infer={"enumerate": "parallel"})
                chosen = choice[0] + severity * (choice[1] - choice[0])
                pyro.sample(f"a_{kind}", dist.Bernoulli(chosen), obs=a[rows].double())
                mild, bad = recovery[a[rows], 0], recovery[a[rows], 1]
                pyro.sample(f"y_{kind}", dist.Bernoulli(mild + severity * (bad - mild)), obs=y[rows].double())


def effects(draws):
    """Return the differences between the treatment and none, as seen and as done, of each draw."""
    values = draws.values()
    share, choice, recovery = values["share"][..., None, None], values["choice"], values["recovery"]
    severity = torch.cat([1 - share, share], -1)  # (chains, draws, 1, z)
    given_z = torch.stack([1 - choice, choice], -2)  # (chains, draws, a, z)
    seen = (severity * given_z * recovery).sum(-1) / (severity * given_z).sum(-1)
    done = (severity * recovery).sum(-1)
    return {way: each[..., 1] - each[..., 0] for way, each in (("seen", seen), ("done", done))}


size = (16, 100, 100) if is_small() else (16, 200, 400)
means = {}
for recorded in (number, number // 2):
    target = bk.Target.from_pyro(records, z[:recorded], a, y)
    draws = bk.sample(target, *size, seed=0, progress=False)
    effect = effects(draws)
    for way, each in effect.items():
        mean, error = float(each.mean()), float(each.mean(1).std()) / len(each) ** 0.5
        means[recorded, way] = mean, error, float(each.std())
        print(f"severity of {recorded} of {number} known, {way}: {mean:+.4f} +- {error:.4f} (sd {each.std():.3f})")
cells = torch.bincount(4 * a + 2 * z + y, minlength=8).view(2, 2, 2) + 1.0  # treatment, severity, recovery
weights = torch.tensor([number - z.sum() + 1.0, z.sum() + 1.0]) / (number + 2)
truth = float(((cells[..., 1] / cells.sum(-1)) @ weights).diff())
mean, error, _ = means[number, "done"]
print(f"the mean effect of the treatment is exactly {truth:+.4f}")
assert abs(mean - truth) < 7 * error  # an error from sixteen chains has fifteen degrees of freedom
for recorded in (number, number // 2):
    for way, value in (("seen", 0.12), ("done", -0.2)):
        mean, _, sd = means[recorded, way]
        assert abs(mean - value) < 4 * sd

# %%
# What it says
# ------------
# What is seen speaks for the treatment, what would be done against it. A third question is about one patient, who had
# the treatment and did not recover: *would he have, without it?* What is known of his noise is kept, his treatment
# changed, and the model run again.


def would_have_recovered(model):
    posterior = given(model, a=1.0, y=0.0)
    with_its_noise = pyro.condition(model, dict(posterior.assignments))
    return float(posterior.probabilities @ treating(0.0, with_its_noise)())


def two_fates():
    return patient(two_fates=True)


by_hand = {patient: (9 / 2 + 2 / 4) / 11, two_fates: (9 * 0.8 + 2 * 0.4) / 11}
for model, expected in by_hand.items():
    same = [probability(model, a=1.0, y=1.0), probability(treating(1.0, model), y=1.0)]
    answer = would_have_recovered(model)
    print(f"seen {same[0]:.3f}, done {same[1]:.3f}, would have recovered {answer:.4f} ({model.__name__})")
    assert abs(same[0] - 0.28) < 1e-9 and abs(same[1] - 0.4) < 1e-9 and abs(answer - expected) < 1e-9

# %%
# The second model differs in what cannot be seen: recovery with and without the treatment have noise of their own. It
# gives the same probabilities to everything seen and to everything done, and another answer. No data tell the two
# apart; a counterfactual is as good as the mechanism that is assumed.

figure = Figure(figsize=(7, 3.4), layout="constrained")
axes = figure.subplots()
for (way, each), value, style in zip(effect.items(), (0.12, -0.2), ("-", "--"), strict=True):
    axes.hist(each.flatten(), bins=50, density=True, histtype="step", linestyle=style, linewidth=2, label=way)
    axes.axvline(value, color="0.5", linewidth=1)
axes.set(xlabel="difference that the treatment makes to the probability of recovery", ylabel="posterior density")
axes.legend(frameon=False)

# %%
# Try it on yours
# ---------------
# Write your model with all that is unseen as sites; sum discrete ones out, or mark them for the sampler.
#
# .. code-block:: python
#
#    seen = exact.enumerate_latents(pyro.condition(patient, {"a": torch.tensor(1.0, dtype=torch.float64)}))
#    done = exact.enumerate_latents(pyro.do(patient, {"a": torch.tensor(1.0, dtype=torch.float64)}))
#    print(seen.log_evidence, done.log_evidence)
#
# Look at whether the effect changes with what you assume of the unseen: give the common cause another strength, and run
# again. If a cause of both treatment and outcome was not recorded at all, no sample size helps; an experiment does.
#
# Where to go next: :doc:`/gallery/evidence/invariant_causes` finds causes where environments differ; ChiRho, on Pyro,
# has interventions and twin worlds for larger models, and DoWhy derives from a graph which questions data can answer.
