"""Noisy matching: relaxations against exact posteriors of 6 centres, and against each other with 50.

Centres are standard normal in the plane; observations have noise and come in unknown order. Every relaxation takes the
same number of steps of Adam with the same number of draws a step. Rounding and Gumbel-Sinkhorn choose among as many
settings each, by the distance on problems that are not those of the table. With 50 centres long chains of swaps say
what the posterior is; they are checked against exact marginals of 12 centres, and against longer ones of 50.

- distance: sum of squared differences of marginal probabilities from those of the posterior, per observation, without
  the part that is due to their being counted in draws; with 6 centres also the distance of Bhattacharyya between the
  distributions over all 720 permutations;
- Brier: the same from the truth; the posterior has the least on average;
- right: proportion of observations matched right in the matching of greatest total marginal probability.

Two rows are not trained: the nearest permutation to the log weights with normal noise, and to theirs times the root of
two with Gumbel noise, both of which match the variance by which an exchange of two rows is decided.

    python benchmarks/permutation_matching.py --problems 10 --steps 400 [--centres 6] [--noise 0.1] [--stick-breaking]

Stick-breaking has one setting, and with 50 centres takes most of the time.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pyro
import torch
from pyro.infer import TraceMeanField_ELBO
from torch import Tensor

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.models.discrete.permutations import (
    GumbelSinkhorn,
    GumbelSinkhornRelaxation,
    NoisyMatching,
    Relaxation,
    RoundedPermutation,
    RoundingRelaxation,
    StickBreakingRelaxation,
    nearest_permutation,
    permutation_matrix,
)

TUNING_SEED, SEED, DRAWS, CHAIN_STEPS = 1000, 0, 200, 4000


class Setting(NamedTuple):
    """A relaxation, what it is trained with, and what it is tuned over."""

    make: Callable[..., Relaxation]
    learning_rate: float
    tuned: dict[str, float]

    @property
    def name(self) -> str:
        """What is tuned, with its values."""
        return ", ".join(f"{name} {value:g}" for name, value in self.tuned.items())


def gumbel_sinkhorn(temperature: float, prior: float, rate: float) -> Setting:
    make = functools.partial(GumbelSinkhornRelaxation, temperature=temperature, prior_temperature=prior)
    return Setting(make, rate, {"temperature": temperature, "prior": prior, "rate": rate})


def rounding(prior: float, greatest: float, rate: float) -> Setting:
    make = functools.partial(RoundingRelaxation, prior_scale=prior, scales=(0.001, greatest))
    return Setting(make, rate, {"prior": prior, "scale": greatest, "rate": rate})


def stick_breaking(temperature: float, rate: float) -> Setting:
    return Setting(functools.partial(StickBreakingRelaxation, temperature=temperature), rate, {})


SETTINGS: dict[int, dict[str, list[Setting]]] = {
    6: {
        "Gumbel-Sinkhorn": [
            gumbel_sinkhorn(0.5, 0.5, 0.1),
            gumbel_sinkhorn(1.0, 0.5, 0.1),
            gumbel_sinkhorn(1.0, 0.2, 0.1),
            gumbel_sinkhorn(2.0, 0.4, 0.1),
            gumbel_sinkhorn(4.0, 0.4, 0.03),
            gumbel_sinkhorn(4.0, 0.1, 0.1),
            gumbel_sinkhorn(8.0, 0.4, 0.05),
            gumbel_sinkhorn(8.0, 0.2, 0.2),
        ],
        "rounding": [
            rounding(0.3, 0.36, 0.1),
            rounding(0.5, 0.36, 0.1),
            rounding(0.7, 0.25, 0.1),
            rounding(0.7, 0.36, 0.05),
            rounding(0.7, 0.36, 0.1),
            rounding(0.7, 0.5, 0.2),
            rounding(1.0, 0.36, 0.1),
            rounding(1.4, 0.36, 0.1),
        ],
    },
    50: {
        "Gumbel-Sinkhorn": [
            gumbel_sinkhorn(4.0, 0.4, 0.1),
            gumbel_sinkhorn(8.0, 0.4, 0.05),
            gumbel_sinkhorn(8.0, 0.2, 0.06),
            gumbel_sinkhorn(8.0, 0.1, 0.06),
            gumbel_sinkhorn(16.0, 0.2, 0.05),
            gumbel_sinkhorn(16.0, 0.2, 0.1),
            gumbel_sinkhorn(16.0, 0.1, 0.1),
            gumbel_sinkhorn(32.0, 0.2, 0.2),
        ],
        "rounding": [
            rounding(0.5, 0.25, 0.1),
            rounding(0.7, 0.18, 0.1),
            rounding(0.7, 0.25, 0.05),
            rounding(0.7, 0.25, 0.1),
            rounding(0.7, 0.25, 0.2),
            rounding(0.7, 0.35, 0.1),
            rounding(1.0, 0.25, 0.1),
            rounding(1.4, 0.25, 0.1),
        ],
    },
}
STICK_BREAKING = {"stick-breaking": stick_breaking(0.6, 0.1)}


def train(matching: NoisyMatching, setting: Setting, steps: int) -> Relaxation:
    """Fit a relaxation to all problems of a batch at once."""
    pyro.clear_param_store()
    relaxation = setting.make(tuple(matching.centres.shape[:-1]), dtype=torch.float64)
    optimizer = torch.optim.Adam(relaxation.parameters(), setting.learning_rate)
    bound = TraceMeanField_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=0)
    with global_stream(new_generator(SEED, stream="training")):
        for _ in range(steps):
            loss = bound.differentiable_loss(matching.relaxed_model, relaxation, relaxation)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return relaxation


def chain_marginals(matching: NoisyMatching, steps: int, chains: int = 50, seed: int = SEED) -> Tensor:
    """Return marginal probabilities from chains that give a row a column it likes, and its own to who had that."""
    log_weights, size = matching.log_weights, matching.size
    liking = (0.5 * log_weights).softmax(-1).expand(chains, *log_weights.shape)
    everywhere = log_weights.expand(chains, *log_weights.shape)
    state = nearest_permutation(log_weights).expand(chains, *log_weights.shape[:-1])
    total, kept = torch.zeros_like(log_weights), 0

    def at(table: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return table.flatten(-2).gather(-1, row * size + column)

    with global_stream(new_generator(seed, stream="chains")):
        for step in range(steps):
            row = torch.randint(size, (*state.shape[:-1], 1))
            wish = liking.gather(-2, row.unsqueeze(-1).expand(*row.shape, size)).squeeze(-2)
            to = torch.multinomial(wish.flatten(0, -2), 1).reshape(row.shape)
            other, own = (state == to).to(torch.int64).argmax(-1, keepdim=True), state.gather(-1, row)
            gain = at(everywhere, row, to) + at(everywhere, other, own)
            loss = at(everywhere, row, own) + at(everywhere, other, to)
            back = at(liking, row, own) + at(liking, other, to)
            forth = at(liking, row, to) + at(liking, other, own)
            accept = torch.rand_like(gain).log() < gain - loss + back.log() - forth.log()
            state = torch.where(accept, state.scatter(-1, row, to).scatter(-1, other, own), state)
            if step >= steps // 4 and step % 10 == 0:
                total, kept = total + permutation_matrix(state, total.dtype).sum(0), kept + chains
    return total / kept


class Scores(NamedTuple):
    """One value a problem, each ``(problems,)``."""

    distance: Tensor
    brier: Tensor
    right: Tensor


def score(marginals: Tensor, truth: Tensor, posterior: Tensor, num_draws: float = math.inf) -> Scores:
    """Score marginal probabilities, ``(problems, n, n)``, that were counted in draws."""
    size = truth.shape[-1]
    target = permutation_matrix(truth, marginals.dtype)
    by_chance = (marginals * (1 - marginals)).sum((-1, -2)) / (num_draws - 1)
    return Scores(
        ((marginals - posterior).square().sum((-1, -2)) - by_chance) / size,
        ((marginals - target).square().sum((-1, -2)) - by_chance) / size,
        (nearest_permutation(marginals) == truth).double().mean(-1),
    )


def score_draws(draws: Tensor, truth: Tensor, posterior: Tensor) -> Scores:
    return score(permutation_matrix(draws, torch.float64).mean(0), truth, posterior, len(draws))


def untrained(matching: NoisyMatching, num_draws: int) -> dict[str, Tensor]:
    """Draw permutations nearest to log weights with noise."""
    log_weights = matching.log_weights
    with global_stream(new_generator(SEED, stream="untrained")):
        return {
            "rounding, untrained": RoundedPermutation.near_gibbs(log_weights).sample_permutations((num_draws,)),
            "G.-Sinkhorn, untrained": GumbelSinkhorn(math.sqrt(2) * log_weights).sample_permutations((num_draws,)),
        }


def with_error(values: Tensor) -> str:
    return f"{float(values.mean()):7.4f} ±{float(values.std()) / math.sqrt(len(values)):6.4f}"


def show(name: str, columns: Sequence[Tensor], seconds: float = math.nan) -> None:
    taken = "" if math.isnan(seconds) else f"{seconds:8.1f} s"
    print(f"{name:<52}" + "  ".join(with_error(values) for values in columns) + taken, flush=True)


def bhattacharyya(draws: Tensor, log_prob: Tensor, listed: Tensor) -> Tensor:
    """Return the distance of drawn frequencies from probabilities, a problem each."""
    code = listed.shape[-1] ** torch.arange(listed.shape[-1])
    place = torch.searchsorted((listed * code).sum(-1).sort().values, (draws * code).sum(-1))
    order = (listed * code).sum(-1).argsort()
    frequency = torch.nn.functional.one_hot(place, len(listed)).double().mean(0)
    return -(frequency * log_prob.T[:, order].exp()).sqrt().sum(-1).log()


def six_centres(problems: int, steps: int, scale: float, tuning_problems: int) -> None:
    """Print distances from the exact posterior, over all permutations."""
    tuning, _ = NoisyMatching.simulate(6, scale, seed=TUNING_SEED, batch_shape=(tuning_problems,))
    chosen = tuned(tuning, tuning.posterior().marginals, steps) | STICK_BREAKING
    matching, truth = NoisyMatching.simulate(6, scale, seed=SEED, batch_shape=(problems,))
    posterior = matching.posterior()
    listed = posterior.enumerate_support(expand=False).squeeze(1)
    log_prob, marginals = posterior.log_prob(listed.unsqueeze(1)), posterior.marginals
    print(f"\n6 centres, noise {scale:g}, {problems} problems: Bhattacharyya, distance, Brier, right")

    def report(name: str, draws: Tensor, seconds: float = math.nan) -> None:
        show(name, [bhattacharyya(draws, log_prob, listed), *score_draws(draws, truth, marginals)], seconds)

    with global_stream(new_generator(SEED)):
        report("exact, as many draws", posterior.sample((5000,)))
    for name, draws in untrained(matching, 5000).items():
        report(name, draws)
    for name, setting in chosen.items():
        start = time.perf_counter()
        report(name, train(matching, setting, steps).sample_permutations(5000, seed=SEED), time.perf_counter() - start)


def tuned(matching: NoisyMatching, posterior: Tensor, steps: int) -> dict[str, Setting]:
    """Return for each relaxation the setting of least distance on problems of their own."""
    grids = SETTINGS[matching.size]
    return {name: best_setting(name, grid, matching, posterior, steps) for name, grid in grids.items()}


def best_setting(name: str, grid: list[Setting], matching: NoisyMatching, posterior: Tensor, steps: int) -> Setting:
    found = []
    for setting in grid:
        draws = train(matching, setting, steps).sample_permutations(DRAWS, seed=SEED)
        found.append(float(score_draws(draws, draws[0], posterior).distance.mean()))
        print(f"    tuning {name}: {setting.name}: distance {found[-1]:.4f}", flush=True)
    best = grid[min(range(len(found)), key=found.__getitem__)]
    for what, value in best.tuned.items():
        values = [setting.tuned[what] for setting in grid]
        if value in (min(values), max(values)):
            print(f"    WARNING: the best {what} of {name}, {value:g}, is at an edge of its grid", flush=True)
    return best


def fifty_centres(problems: int, steps: int, scale: float, tuning_problems: int, with_sticks: bool) -> None:
    """Print scores of relaxations, and by how much rounding is better than Gumbel-Sinkhorn."""
    tuning, _ = NoisyMatching.simulate(50, scale, seed=TUNING_SEED, batch_shape=(tuning_problems,))
    chosen = tuned(tuning, chain_marginals(tuning, CHAIN_STEPS), steps)
    matching, truth = NoisyMatching.simulate(50, scale, seed=SEED, batch_shape=(problems,))
    posterior = chain_marginals(matching, CHAIN_STEPS)
    print(f"\n50 centres, noise {scale:g}, {problems} problems: distance, Brier, right")
    show("posterior, by chains", score(posterior, truth, posterior))
    most_probable = permutation_matrix(matching.posterior().mode, torch.float64)
    show("most probable matching", score(most_probable, truth, posterior))
    found: dict[str, Scores] = {}
    for name, setting in (chosen | (STICK_BREAKING if with_sticks else {})).items():
        start = time.perf_counter()
        draws = train(matching, setting, steps).sample_permutations(DRAWS, seed=SEED)
        found[name] = score_draws(draws, truth, posterior)
        show(name, found[name], time.perf_counter() - start)
    for name, draws in untrained(matching, DRAWS).items():
        found[name] = score_draws(draws, truth, posterior)
        show(name, found[name])
    for one, other in (
        ("rounding", "Gumbel-Sinkhorn"),
        ("rounding, untrained", "Gumbel-Sinkhorn"),
        ("rounding, untrained", "G.-Sinkhorn, untrained"),
    ):
        pairs = zip(found[one], found[other], strict=True)
        show(f"{one} less {other}", [first - second for first, second in pairs])


def check_chains(with_fifty: bool) -> None:
    """Print how far chains are from exact marginals, as many steps a row, and from longer chains."""
    matching, truth = NoisyMatching.simulate(12, 0.4, seed=SEED, batch_shape=(4,))
    short = chain_marginals(matching, CHAIN_STEPS * 12 // 50)
    show("chains of 12, from exact", score(short, truth, matching.posterior().marginals)[:1])
    if with_fifty:
        matching, truth = NoisyMatching.simulate(50, 0.2, seed=SEED, batch_shape=(2,))
        longer = chain_marginals(matching, 4 * CHAIN_STEPS, seed=SEED + 1)
        show("chains of 50, from longer", score(chain_marginals(matching, CHAIN_STEPS), truth, longer)[:1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=10)
    parser.add_argument("--tuning-problems", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--centres", type=int, choices=(6, 50), nargs="+", default=(6, 50))
    parser.add_argument(
        "--noise", type=float, nargs="+", help="by default 0.25 and 0.5, or 0.1 and 0.2 with 50 centres"
    )
    parser.add_argument("--stick-breaking", action="store_true", help="with 50 centres too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    check_chains(50 in options.centres)
    if 6 in options.centres:
        for scale in options.noise or (0.25, 0.5):
            six_centres(options.problems, options.steps, scale, 2 * options.tuning_problems)
    if 50 in options.centres:
        for scale in options.noise or (0.1, 0.2):
            fifty_centres(options.problems, options.steps, scale, options.tuning_problems, options.stick_breaking)


if __name__ == "__main__":
    main()
