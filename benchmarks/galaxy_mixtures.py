"""Mixtures of normal distributions for 82 galaxies: what label switching does to evidence, and how many there are.

First the models of Chib (1995), whose published evidences Neal (1999) found wrong: a plain bridge from chains in one
of the K! equal modes, the symmetrised bridge from the same chains, log K!, and a reference that shares no code with
either. Then 1 to 6 components under the prior of Richardson and Green (1997) by tempering, by the symmetrised bridge
and by the reference; how many errors they are apart; and the posterior of the number of components by each.

The reference needs neither Pyro nor gradients nor permutations: quadrature for one component, and for two of equal
variance; importance sampling from a product of hand-made proposals, without any chain, for two and three; beyond that
Nobile's identity, by which log Z(K) - log Z(K - 1) follows from how often a Gibbs sampler leaves a component empty.

    python benchmarks/galaxy_mixtures.py --jobs 2 --checkpoint DIR
    python benchmarks/galaxy_mixtures.py --quick
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
import warnings
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.distributions import Dirichlet, Gamma, Normal, StudentT

import bayeskit as bk
from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import SamplingWarning
from bayeskit.inference.evidence import bridge_sampling
from bayeskit.models.discrete.mixtures._evidence import mixture_evidence, symmetrised_bridge
from bayeskit.models.discrete.mixtures._gaussian_mixture import GaussianMixture, MixturePrior, galaxy_velocities
from bayeskit.models.discrete.mixtures._labels import Labels
from bayeskit.parallel import map_tasks

# Posterior of 1 to 6 components in Richardson and Green (1997), of 1 to 30 that are equally probable beforehand, with a
# random rate of the precisions: the prior used here. Reversible jumps made it, and three digits are all that is known.
PUBLISHED_SHARES = (0.000, 0.000, 0.061, 0.128, 0.182, 0.199)
# By number of components and whether variances are equal: Chib (1995), and where known the corrections of Neal (1999).
CHIB = {(2, True): -240.464, (3, True): -228.620, (3, False): -224.138}
NEAL = {(2, True): -239.764, (3, True): -226.803}
CHIB_MODELS = ((2, True), (3, True), (2, False), (3, False), (4, False))
SIZES, CHUNK = range(1, 7), 5000
MEAN_STEP, SCALE_STEP = 0.3, 0.1
# Where the proposals put a component: probability, mean and its scale, log precision and its scale, galaxies. The two
# small groups, whose precision is that of the prior; then the large one, all but the first, a background, anywhere.
SMALL = {
    "chib": [[0.20, 9.8, 1.0, -1.35, 0.6, 7], [0.15, 31.5, 2.2, -2.0, 0.8, 3]],
    "richardson_green": [[0.20, 9.75, 0.5, 0.5, 0.8, 7], [0.15, 33.0, 0.9, -0.1, 0.8, 3]],
}
OTHERS = [
    [0.30, 21.4, 0.5, -1.5, 0.35, 70],
    [0.10, 22.0, 0.6, -2.3, 0.4, 75],
    [0.10, 19.5, 2.0, -3.9, 0.6, 21],
    [0.15, 21.0, 10.0, -1.5, 2.0, 3],
]
EQUAL_LOG_PRECISION = (torch.tensor(-1.9, dtype=torch.float64), torch.tensor(0.4, dtype=torch.float64))


class Task(NamedTuple):
    """One estimate to make, all of one number of components."""

    kind: str  # chains, tempering or reference
    prior: str  # chib or richardson_green
    components: int
    equal: bool
    quick: bool
    seed: int


class Budget(NamedTuple):
    """What a kind of estimate may spend."""

    chains: int
    warmup: int
    draws: int
    particles: int
    replicates: int
    threshold: float
    proposals: int
    gibbs_chains: int
    sweeps: int


FULL = Budget(4, 300, 1000, 64, 16, 0.8, 1_000_000, 400, 2500)
QUICK = Budget(4, 150, 250, 32, 12, 0.6, 50_000, 100, 300)


def prior_of(name: str, y: Tensor) -> MixturePrior:
    if name == "richardson_green":
        return MixturePrior.richardson_green(y)
    return MixturePrior.independent(location=20.0, spread=10.0, shape=3.0, rate=20.0)


def estimate(task: Task) -> dict[str, list[float]]:
    """Return log evidence, standard error, whether trusted, and seconds, by method."""
    y = galaxy_velocities()
    budget, begin = QUICK if task.quick else FULL, time.process_time()
    if task.kind == "reference":
        results = {name: [*found, 1.0] for name, found in reference(y, task, budget).items()}
    else:
        mixture = GaussianMixture(y, task.components, prior_of(task.prior, y), equal_scales=task.equal)
        results = (from_chains if task.kind == "chains" else by_tempering)(mixture, budget, task.seed)
    seconds = time.process_time() - begin
    return {name: [*found, seconds] for name, found in results.items()}


def from_chains(mixture: GaussianMixture, budget: Budget, seed: int) -> dict[str, list[float]]:
    """Return a plain and a symmetrised bridge from chains that all start in one mode."""
    target = bk.Target.from_pyro(mixture)
    start = target.sample_prior(2000, seed=seed + 1)
    start = start[target.log_density(start).argmax()]
    with warnings.catch_warnings():
        # Labels that switch in some chains and not in others are the point here; the table says whom to trust.
        warnings.simplefilter("ignore", SamplingWarning)
        draws = bk.sample(target, budget.chains, budget.warmup, budget.draws, seed=seed, initial=start, progress=False)
    plain = bridge_sampling(target, draws, seed=seed)
    right = symmetrised_bridge(draws, Labels(target, mixture.exchangeable), seed=seed)
    return {
        "plain": [plain.log_evidence, plain.standard_error, float(plain.trusted)],
        "symmetrised": [right.log_evidence, right.standard_error, float(right.trusted)],
    }


def by_tempering(mixture: GaussianMixture, budget: Budget, seed: int) -> dict[str, list[float]]:
    """Return tempering, and the bridge from its particles: plain for one component, which has no labels."""
    z = mixture_evidence(
        bk.Target.from_pyro(mixture),
        mixture.exchangeable,
        num_particles=budget.particles,
        num_replicates=budget.replicates,
        ess_threshold=budget.threshold,
        seed=seed,
        progress=False,
    )
    bridge = "symmetrised_bridge" if mixture.exchangeable else "bridge_sampling"
    return {
        name: [z.diagnostics[f"{method}.log_evidence"], z.diagnostics[f"{method}.standard_error"], float(z.trusted)]
        for name, method in (("tempering", "smc"), ("bridge", bridge))
    }


def reference(y: Tensor, task: Task, budget: Budget) -> dict[str, list[float]]:
    """Return the log evidence, or with more than three components its difference to that of one fewer."""
    prior = Numbers.of(task.prior, y)
    if task.components == 1:
        return {"quadrature": [one_component(y, prior), 0.0]}
    if task.components == 2 and task.equal:
        return {"quadrature": [two_of_equal_variance(y, prior), 0.0]}
    generator = new_generator(task.seed, stream=f"reference {task.prior} {task.components}")
    with global_stream(generator):
        if task.components <= 3:
            return {"importance sampling": importance_sampling(y, prior, task, budget.proposals)}
        return {"difference": nobile_difference(y, prior, task.components, budget)}


class Numbers(NamedTuple):
    """The numbers of a prior, written down anew; those of the random rate where ``rate`` is None."""

    location: float
    spread: float
    shape: float
    rate: float | None
    rate_shape: float = 0.0
    rate_rate: float = 0.0

    @classmethod
    def of(cls, name: str, y: Tensor) -> Numbers:
        """Return the prior of Chib, or that of Richardson and Green for these data."""
        if name == "chib":
            return cls(20.0, 10.0, 3.0, 20.0)
        low, high = float(y.min()), float(y.max())
        width = high - low
        return cls((low + high) / 2, width, 2.0, None, 0.2, 10 / width**2)


def log_prior_of_precisions(precision: Tensor, prior: Numbers) -> Tensor:
    """Return the log density of the precisions, ``(*batch, K) -> (*batch)``, with a random rate integrated out."""
    count, c0 = precision.shape[-1], prior.shape
    constant = (c0 - 1) * precision.log().sum(-1) - count * math.lgamma(c0)
    if prior.rate is not None:
        return constant + count * c0 * math.log(prior.rate) - prior.rate * precision.sum(-1)
    g0, inverse_scale = prior.rate_shape, prior.rate_rate
    normaliser = g0 * math.log(inverse_scale) - math.lgamma(g0) + math.lgamma(g0 + count * c0)
    return constant + normaliser - (g0 + count * c0) * (inverse_scale + precision.sum(-1)).log()


def log_likelihood(y: Tensor, weight: Tensor, mean: Tensor, precision: Tensor) -> Tensor:
    """Return the log likelihood, ``(n, K) -> (n)``."""
    exponent = -0.5 * precision.unsqueeze(-1) * (y - mean.unsqueeze(-1)).square()
    scale = weight * (precision / (2 * math.pi)).sqrt()
    return (scale.unsqueeze(-1) * exponent.exp()).sum(-2).log().sum(-1)


def one_component(y: Tensor, prior: Numbers) -> float:
    """Integrate over the log precision by the trapezoidal rule; the mean integrates out."""
    log_precision = torch.linspace(-12, 6, 20_001, dtype=y.dtype)
    precision, n = log_precision.exp(), len(y)
    variance, location = prior.spread**2, prior.location
    ratio = 1 + n * variance * precision
    inside = (y - y.mean()).square().sum() + n * (y.mean() - location) ** 2 / ratio
    log_joint = 0.5 * n * (precision / (2 * math.pi)).log() - 0.5 * ratio.log() - 0.5 * precision * inside
    log_joint = log_joint + log_prior_of_precisions(precision.unsqueeze(-1), prior) + log_precision
    return float(log_joint.logsumexp(0) + (log_precision[1] - log_precision[0]).log())


def two_of_equal_variance(y: Tensor, prior: Numbers) -> float:
    """Integrate over both means, the common log precision and the weight; each pair of means once."""
    mean = torch.arange(-10.0, 50.0, MEAN_STEP, dtype=y.dtype)
    log_precision = torch.arange(-5.0, 0.5, SCALE_STEP, dtype=y.dtype)
    node, node_weight = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(48))
    share = (node + 1) / 2
    i, j = torch.triu_indices(len(mean), len(mean), 1)
    log_mean = Normal(prior.location, prior.spread).log_prob(mean)
    total = []
    for one in log_precision:
        density = Normal(mean.unsqueeze(-1), (-0.5 * one).exp()).log_prob(y).exp()  # (means, n)
        # Not everywhere, for a pair far from all galaxies has a likelihood of zero.
        alive = torch.maximum(density[i], density[j]).log().sum(-1) > -400
        a, b = i[alive], j[alive]
        log_l = torch.stack([((w * density[a] + (1 - w) * density[b]).log().sum(-1)) for w in share], -1)
        pair = (log_l + (node_weight / 2).log()).logsumexp(-1) + log_mean[a] + log_mean[b]
        total.append(pair.logsumexp(0) + log_prior_of_precisions(one.exp().unsqueeze(-1), prior) + one)
    return float(torch.stack(total).logsumexp(0)) + math.log(2 * MEAN_STEP**2 * SCALE_STEP)


def importance_sampling(y: Tensor, prior: Numbers, task: Task, num_draws: int) -> list[float]:
    """Average prior times likelihood over proposal; every component proposes its place on its own."""
    log_weights = [proposal_log_weights(y, prior, task, min(CHUNK, num_draws)) for _ in range(0, num_draws, CHUNK)]
    log_weight = torch.cat(log_weights)
    relative = (log_weight - log_weight.max()).exp()
    error = float(relative.std() / relative.mean()) / math.sqrt(len(relative))
    return [float(log_weight.max() + relative.mean().log()), error]


def proposal_log_weights(y: Tensor, prior: Numbers, task: Task, n: int) -> Tensor:
    """Draw parameters and return their log importance weights, ``(n,)``.

    Given places, means are normal, log precisions Student and weights Dirichlet; the places are summed out.
    """
    count = task.components
    places = y.new_tensor(SMALL[task.prior] + OTHERS)
    probability, centre, spread, log_scale, width, size = places.T
    combinations = torch.tensor(list(itertools.product(range(len(places)), repeat=task.components)))  # (places^K, K)
    log_chance = probability.log()[combinations].sum(-1)
    concentration = 1 + size[combinations] / 2
    drawn = torch.multinomial(log_chance.exp(), n, replacement=True)
    place = combinations[drawn]
    weight = Dirichlet(concentration[drawn]).sample().clamp(min=1e-300)
    mean = centre[place] + spread[place] * torch.randn(n, count, dtype=y.dtype)
    each = Normal(centre, spread).log_prob(mean.unsqueeze(-1))  # (n, K, places)
    if task.equal:
        student = StudentT(4.0, *EQUAL_LOG_PRECISION)
        log_precision = student.sample((n, 1))
        log_chance = log_chance + student.log_prob(log_precision)
    else:
        student = StudentT(4.0, log_scale, width)
        log_precision = student.sample((n, count)).gather(-1, place.unsqueeze(-1)).squeeze(-1)
        each = each + student.log_prob(log_precision.unsqueeze(-1))
    normaliser = concentration.sum(-1).lgamma() - concentration.lgamma().sum(-1)
    shares = weight.log() @ (concentration - 1).T + normaliser
    chosen = sum(each[:, k, combinations[:, k]] for k in range(count))
    log_proposal = (log_chance + chosen + shares).logsumexp(-1)
    precision = log_precision.exp()
    log_prior = Normal(prior.location, prior.spread).log_prob(mean).sum(-1) + math.lgamma(count)
    log_prior = log_prior + log_prior_of_precisions(precision, prior) + log_precision.sum(-1)
    return log_likelihood(y, weight, mean, precision.expand(n, count)) + log_prior - log_proposal


def nobile_difference(y: Tensor, prior: Numbers, count: int, budget: Budget) -> list[float]:
    """Estimate log Z(K) - log Z(K - 1) from Gibbs chains that run side by side.

    With uniform weights, P(component empty | y) Z(K) = Z(K - 1) (K - 1) / (K - 1 + n): Nobile (2004). Given the
    parameters, a component is empty with the product of the probabilities that no galaxy is of it.
    """
    chains, burn_in, n = budget.gibbs_chains, budget.sweeps // 5, len(y)
    mean = y[torch.randint(n, (chains, count))]
    precision = torch.full_like(mean, 0.25)
    weight = torch.full_like(mean, 1 / count)
    b0, precision0 = prior.location, prior.spread**-2
    empty = torch.zeros(chains, dtype=y.dtype)
    for sweep in range(budget.sweeps):
        log_joint = (weight * precision.sqrt()).log().unsqueeze(1) - 0.5 * precision.unsqueeze(1) * (
            y.unsqueeze(-1) - mean.unsqueeze(1)
        ).square()
        p = log_joint.softmax(-1)  # (chains, n, K)
        if sweep >= burn_in:
            empty += (-p).log1p().sum(1).exp().mean(-1) / (budget.sweeps - burn_in)
        z = (p.cumsum(-1)[..., :-1] < torch.rand(chains, n, 1, dtype=y.dtype)).sum(-1)
        one_hot = torch.nn.functional.one_hot(z, count).to(y.dtype)
        number, total = one_hot.sum(1), (one_hot * y.unsqueeze(-1)).sum(1)
        weight = Dirichlet(1 + number).sample().clamp(min=1e-300)
        posterior = precision0 + number * precision
        mean = (precision0 * b0 + precision * total) / posterior + torch.randn_like(mean) / posterior.sqrt()
        squares = (one_hot * (y.unsqueeze(-1) - mean.unsqueeze(1)).square()).sum(1)
        precision = Gamma(prior.shape + number / 2, rate_given(precision, prior) + squares / 2).sample()
    share = empty.mean()
    error = float(empty.std() / share) / math.sqrt(chains)
    return [math.log((count - 1) / (count - 1 + n)) - float(share.log()), error]


def rate_given(precision: Tensor, prior: Numbers) -> Tensor:
    """Draw the rate of the precisions given them, ``(chains, 1)``, or return the known one."""
    if prior.rate is not None:
        return torch.full_like(precision[:, :1], prior.rate)
    shape = torch.full_like(precision[:, :1], prior.rate_shape + precision.shape[1] * prior.shape)
    return Gamma(shape, prior.rate_rate + precision.sum(-1, keepdim=True)).sample()


class Found(NamedTuple):
    """What all tasks found."""

    results: dict[Task, dict[str, list[float]]]

    def get(self, kind: str, prior: str, count: int, equal: bool = False) -> dict[str, list[float]]:
        """Return what a task found, by method."""
        return next(r for t, r in self.results.items() if t[:4] == (kind, prior, count, equal))

    def reference(self, prior: str, count: int, equal: bool = False) -> tuple[float, float, str]:
        """Return a reference, its error and its method, adding up differences beyond three components."""
        ((method, (value, error, *_)),) = self.get("reference", prior, count, equal).items()
        if method != "difference":
            return value, error, method
        before, error_before, method = self.reference(prior, count - 1)
        return before + value, math.hypot(error_before, error), f"{method.removesuffix(', Nobile')}, Nobile"


def tasks_of(quick: bool, seed: int) -> list[Task]:
    """Return all tasks, the longest first."""
    sizes = SIZES[:4] if quick else SIZES
    models = CHIB_MODELS[:4] if quick else CHIB_MODELS
    wanted = [("tempering", "richardson_green", count, False) for count in reversed(sizes)]
    wanted += [("chains", "chib", count, equal) for count, equal in reversed(models)]
    wanted += [("reference", "chib", count, equal) for count, equal in models]
    wanted += [("reference", "richardson_green", count, False) for count in sizes]
    return [Task(*one, quick, seed) for one in wanted]


def table_of_chib(found: Found) -> pd.DataFrame:
    """Return one row a model: what one mode gives, what all modes give, and what is right."""
    rows = []
    for count, equal in (t[2:4] for t in found.results if t[:2] == ("reference", "chib")):
        methods = found.get("chains", "chib", count, equal)
        (plain, plain_error, plain_trusted, _), (right, error, trusted, _) = methods.values()
        truth, truth_error, method = found.reference("chib", count, equal)
        rows.append(
            {
                "K": count,
                "variances": "equal" if equal else "own",
                "plain": plain,
                "plain_error": plain_error,
                "plain_trusted": bool(plain_trusted),
                "symmetrised": right,
                "error": error,
                "trusted": bool(trusted),
                "shift": right - plain,
                "log_K!": math.lgamma(count + 1),
                "reference": truth,
                "reference_error": truth_error,
                "by": method,
                "z": (right - truth) / math.hypot(error, truth_error),
                "Chib_1995": CHIB.get((count, equal), math.nan),
                "Neal_1999": NEAL.get((count, equal), math.nan),
            }
        )
    return pd.DataFrame(rows)


def table_of_sizes(found: Found) -> pd.DataFrame:
    """Return one row a number of components: three estimates, and how far they are apart."""
    rows = []
    for count in sorted(t.components for t in found.results if t.kind == "tempering"):
        methods = found.get("tempering", "richardson_green", count)
        tempering, bridge = (x[:2] for x in methods.values())
        *truth, method = found.reference("richardson_green", count)
        pairs = {"z_tb": (tempering, bridge), "z_tr": (tempering, truth), "z_br": (bridge, truth)}
        rows.append(
            {
                "K": count,
                "tempering": tempering[0],
                "t_error": tempering[1],
                "bridge": bridge[0],
                "b_error": bridge[1],
                "trusted": bool(methods["tempering"][2]),
                "reference": truth[0],
                "r_error": truth[1],
                "by": method,
                **{name: (a[0] - b[0]) / math.hypot(a[1], b[1]) for name, (a, b) in pairs.items()},
                "seconds": methods["tempering"][3],
            }
        )
    return pd.DataFrame(rows)


def posterior(log_evidence: np.ndarray, covariance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the probability of each number, all equally probable beforehand, and its error to first order."""
    p = np.exp(log_evidence - log_evidence.max())
    p /= p.sum()
    jacobian = np.diag(p) - np.outer(p, p)
    return p, np.sqrt(np.diag(jacobian @ covariance @ jacobian))


def table_of_posteriors(sizes: pd.DataFrame) -> pd.DataFrame:
    """Return the posterior of the number of components by each method, and that of 1997 up to the same number."""
    count = len(sizes)
    table = {"K": sizes["K"].to_numpy()}
    for name, error in (("tempering", "t_error"), ("bridge", "b_error"), ("reference", "r_error")):
        variance = sizes[error].to_numpy() ** 2
        covariance = np.diag(variance)
        if name == "reference" and count > 3:
            # From four components on each builds on the one before, so that they share its error.
            k = np.arange(count).clip(min=2)
            covariance[2:, 2:] = variance[np.minimum.outer(k, k)][2:, 2:]
        table[name], table[f"{name}_error"] = posterior(sizes[name].to_numpy(), covariance)
    published = np.array(PUBLISHED_SHARES[:count])
    table["Richardson_Green_1997"] = published / published.sum()
    return pd.DataFrame(table)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--checkpoint", help="folder that keeps finished estimates")
    parser.add_argument("--quick", action="store_true", help="small budgets and at most four components")
    options = parser.parse_args()
    begin, tasks = time.monotonic(), tasks_of(options.quick, options.seed)
    results = map_tasks(estimate, tasks, num_jobs=options.jobs, checkpoint=options.checkpoint, description="evidence")
    found = Found(dict(zip(tasks, results, strict=True)))
    sizes = table_of_sizes(found)
    for title, table in (
        ("Models of Chib (1995): log evidence from one mode and from all", table_of_chib(found)),
        ("Prior of Richardson and Green (1997): log evidence", sizes),
        ("Posterior of the number of components, all equally probable beforehand", table_of_posteriors(sizes)),
    ):
        print(f"\n{title}\n{table.to_string(index=False, float_format='%.4f', na_rep='')}")
    spent = sum(next(iter(methods.values()))[3] for methods in results)
    print(f"\n{spent:.0f} s of processor time, {time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
