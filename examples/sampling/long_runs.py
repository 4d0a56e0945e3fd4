r"""
Long MCMC runs in Pyro: convergence, checkpoints, time budgets, and chains in parallel processes
================================================================================================

**What you will learn:** how a run ends by convergence or by a time budget, how it goes on from its checkpoint to the
last bit, what the No-U-Turn sampler costs, and why draws do not depend on the number of processes.

The model is the hierarchy of eight schools :cite:p:`rubin1981`, non-centred: effects of coaching are normal around a
common mean :math:`\mu` with a standard deviation :math:`\tau`, which has a half-Cauchy prior :cite:p:`gelman2006`.
"""

import math
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.integrate import quad
from scipy.stats import multivariate_normal

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.inference.samplers import NUTS, Convergence

case = bk.exact.get("eight_schools")
target = case.target()

# %%
# Good enough
# -----------
# Many chains in one batch. Every hundred draws the run looks whether R-hat and effective sample size will do, and ends
# if they do, long before the number of draws that it was allowed.

enough = Convergence(r_hat=1.01, effective_draws=1000 if is_small() else 20_000)
settings = {
    "num_chains": 32,
    "num_warmup": 150,
    "seed": 1,
    "target_acceptance": 0.9,
    "metric": "diagonal",
    "progress": False,
}
draws = bk.sample(target, num_samples=5000, stop=enough, **settings)
print(f"{draws.settings['ending']} after {draws.num_draws} of 5000 draws a chain")
assert draws.settings["ending"] == "converged" and draws.num_draws < 5000

# %%
# An exact twin
# -------------
# Given :math:`\tau` everything else is normal, so that the evidence and the posterior mean of :math:`\tau` are
# integrals in one dimension. SciPy takes them over :math:`\varphi = \arctan(\tau / 5)`, in which the prior is uniform.

effects, errors = (value.numpy() for value in case.args[:2])


def likelihood(tau: float) -> float:
    return float(multivariate_normal(np.zeros(8), np.diag(errors**2 + tau**2) + 25.0).pdf(effects))


def integral(function) -> float:
    return quad(lambda phi: 2 / math.pi * function(5 * math.tan(phi)), 0, math.pi / 2, epsabs=0, epsrel=1e-11)[0]


evidence = integral(likelihood)
mean_tau = integral(lambda tau: tau * likelihood(tau)) / evidence
print(f"log evidence {math.log(evidence):.9f}, stated {case.log_evidence:.9f}; mean of tau {mean_tau:.9f}")
assert abs(math.log(evidence) - case.log_evidence) < 1e-9
assert abs(mean_tau - float(case.posterior_mean["tau"])) < 1e-9


def mean_and_error(x: torch.Tensor) -> tuple[float, float]:
    """Return the mean of ``(chains, draws)`` and its error, by the spread of the chains."""
    return float(x.mean()), float(x.mean(1).std() / len(x) ** 0.5)


mean, error = mean_and_error(draws.values()["tau"])
print(f"mean of tau by the run: {mean:.3f} +- {error:.3f}")
assert abs(mean - mean_tau) < 4.5 * error

# %%
# Interrupted
# -----------
# A time budget ends a run with what it has, and says so. The same call with the same checkpoint goes on, until a call
# finds nothing left to do. Ctrl-C does the same as the budget, and so does a power cut, but for the seconds since the
# last checkpoint.

settings["num_samples"] = 100 if is_small() else 1000
whole = bk.sample(target, **settings)
third = whole.seconds / 3
said, parts = [], 0
with tempfile.TemporaryDirectory() as folder:
    ending = None
    while ending != "finished":
        parts += 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                part = bk.sample(target, **settings, checkpoint=Path(folder) / "state", time_budget=third)
                ending = part.settings["ending"]
            except bk.errors.BudgetError as ended:  # within the warm-up
                said.append(str(ended))
        said += [str(warning.message) for warning in caught]
for message in dict.fromkeys((said[0], said[-1])):
    print(message)
print(f"in {parts} parts the same draws: {torch.equal(part.unconstrained, whole.unconstrained)}")
assert parts > 1 and torch.equal(part.unconstrained, whole.unconstrained)

# %%
# Another kernel
# --------------
# NUTS ends each trajectory where it turns back. It is worth a try where scales vary from place to place. Here its draws
# cost more gradients than they are worth.

trees = bk.sample(target, **settings, kernel=NUTS())
for name, run in (("HMC", whole), ("NUTS", trees)):
    mean, error = mean_and_error(run.values()["tau"])
    print(f"{name:4s} mean of tau {mean:.3f} +- {error:.3f} after {run.num_gradients} gradients")
    assert abs(mean - mean_tau) < 4.5 * error

figure = Figure(figsize=(8, 3.5), layout="constrained")
axes = figure.subplots()
for name, run, style in (("HMC", whole, "-"), ("NUTS", trees, ":")):
    values = run.values()["tau"].flatten().numpy()
    bins = np.arange(0, 20.1, 0.5)
    axes.hist(values, bins=bins, density=True, histtype="step", linestyle=style, linewidth=1.5, label=name)
tau = np.linspace(0, 20, 200)
density = [likelihood(value) * 2 / (5 * math.pi * (1 + (value / 5) ** 2)) / evidence for value in tau]
axes.plot(tau, density, color="k", linestyle="--", label="exact")
axes.set(xlabel=r"$\tau$ (points of the test)", ylabel="posterior density", xlim=(0, 20))
axes.legend(frameon=False)

# %%
# Several processes
# -----------------
# Groups of chains warm up by themselves, on random numbers of their own. ``num_groups`` decides what is drawn,
# ``num_jobs`` where: here, one group after another, and in two processes, to the last bit the same. Who sets the number
# of groups to that of the cores gets other draws on another machine. A process needs seconds to start and to compile,
# so that this pays where a group works for minutes. With a Dask client, of this machine or of many
# (:doc:`/how_to/dask`), the same call goes to its workers; a worker that dies costs its group and nothing else. Models
# are compared in parallel by the same argument of :func:`bayeskit.compare_models`, with a folder for what is done.

short = settings | {"num_samples": 60}
here = bk.sample(target, **short, num_groups=4)
elsewhere = bk.sample(target, **short, num_groups=4, num_jobs=2)
regrouped = bk.sample(target, **short, num_groups=2)
print(f"two processes, the same draws: {torch.equal(here.unconstrained, elsewhere.unconstrained)}")
assert torch.equal(here.unconstrained, elsewhere.unconstrained)
assert not torch.equal(here.unconstrained, regrouped.unconstrained)

# %%
# A failure on purpose
# --------------------
# A checkpoint of another run is a trap: with another seed, other data or an edited model, what is in the file is not
# what the call asks for. It is refused, and the file stays as it was.

with tempfile.TemporaryDirectory() as folder:
    short = settings | {"num_samples": 20, "checkpoint": Path(folder) / "state"}
    bk.sample(target, **short)
    try:
        bk.sample(target, **short | {"seed": 2})
    except bk.errors.CheckpointError as refusal:
        print(f"refused: {str(refusal).partition(' was ')[2]}")
    else:
        raise AssertionError("the checkpoint of another seed was taken")

# %%
# Try it on yours
# ---------------
# Add a checkpoint and a rule for stopping to the call that you have; call it again, unchanged, to go on.
#
# .. code-block:: python
#
#    rule = Convergence(r_hat=1.01, effective_draws=1000)
#    draws = bk.sample(target, num_samples=5000, stop=rule, checkpoint="state", time_budget=60)
#    print(draws.settings["ending"], draws.summary()["r_hat"].max())
#
# Look at ``ending``: "converged" and "finished" are results, after a time budget the run is a part of one. Where chains
# disagree, more draws do not help: look for several modes first. Try ``kernel=NUTS()`` where scales vary from place to
# place, and compare effective draws by gradient.
#
# Where to go next: :doc:`distributed_svi` for training in several processes, :doc:`parallel_tempering` where there are
# several modes, :doc:`/gallery/evidence/eight_schools_by_every_estimator` for the evidence of this model.
