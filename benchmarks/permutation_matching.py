"""Noisy matching: relaxations against exact posteriors of 6 centres, and against each other with 50.

Centres are standard normal in the plane; observations have noise and come in unknown order. Every relaxation takes the
same number of steps of Adam with the same number of draws a step. Rounding and Gumbel-Sinkhorn choose among six
settings each by the Brier score on problems that are not those of the table. With 50 centres long chains of swaps,
checked against exact marginals of 12, say what the posterior itself would score.

- right: proportion of observations matched right, in draws and in the matching of greatest total marginal probability;
- Brier: sum of squared errors of the marginal probabilities, per observation; the posterior has the least on average;
- distance: the same between the marginals and those of the posterior, or, with 6 centres, that of Bhattacharyya
  between the distributions over all 720 permutations.

Stick-breaking has one setting, and with 50 centres takes most of the time.

    python benchmarks/permutation_matching.py --problems 10 --steps 400 [--centres 6]
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

from bayeskit._torch import global_stream, new_generator
from bayeskit.models.discrete.permutations import (
    GumbelSinkhornRelaxation,
    NoisyMatching,
    Relaxation,
    RoundingRelaxation,
    StickBreakingRelaxation,
    nearest_permutation,
    permutation_matrix,
)

TUNING_SEED, SEED, DRAWS = 1000, 0, 200


class Setting(NamedTuple):
    """A relaxation, what it is trained with, and how it is called in the table."""

    name: str
    make: Callable[..., Relaxation]
    linear: bool
    learning_rate: float


def gumbel_sinkhorn(temperature: float, prior: float, linear: bool, rate: float) -> Setting:
    make = functools.partial(GumbelSinkhornRelaxation, temperature=temperature, prior_temperature=prior)
    return Setting(f"tau {temperature:g}, prior {prior:g}, linear {linear}, rate {rate:g}", make, linear, rate)


def rounding(temperature: float, prior: float, greatest: float | None, linear: bool) -> Setting:
    scales = None if greatest is None else (0.001, greatest)
    make = functools.partial(RoundingRelaxation, temperature=temperature, prior_scale=prior, scales=scales)
    return Setting(f"tau {temperature:g}, prior {prior:g}, scale {greatest}, linear {linear}", make, linear, 0.1)


def stick_breaking(temperature: float, linear: bool, rate: float) -> Setting:
    make = functools.partial(StickBreakingRelaxation, temperature=temperature)
    return Setting(f"tau {temperature:g}, linear {linear}, rate {rate:g}", make, linear, rate)


SETTINGS: dict[str, list[Setting]] = {
    "Gumbel-Sinkhorn": [
        gumbel_sinkhorn(1.0, 0.5, True, 0.1),
        gumbel_sinkhorn(1.0, 0.1, False, 0.1),
        gumbel_sinkhorn(4.0, 0.4, True, 0.1),
        gumbel_sinkhorn(4.0, 0.2, True, 0.05),
        gumbel_sinkhorn(4.0, 0.4, True, 0.03),
        gumbel_sinkhorn(8.0, 0.4, True, 0.05),
    ],
    "rounding": [
        rounding(0.5, 0.5, 0.5, False),
        rounding(1.0, 0.2, 0.5, True),
        rounding(1.0, 0.5, 0.5, True),
        rounding(1.0, 0.5, None, True),
        rounding(1.0, 0.7, None, True),
        rounding(1.0, 1.0, None, True),
    ],
}
ONE_SETTING = {"stick-breaking": stick_breaking(0.6, True, 0.1)}


def train(matching: NoisyMatching, setting: Setting, steps: int) -> Relaxation:
    """Fit a relaxation to all problems of a batch at once."""
    pyro.clear_param_store()
    relaxation = setting.make(tuple(matching.centres.shape[:-1]), dtype=torch.float64)
    optimizer = torch.optim.Adam(relaxation.parameters(), setting.learning_rate)
    bound = TraceMeanField_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=0)
    model = functools.partial(matching.relaxed_model, linear=setting.linear)
    with global_stream(new_generator(SEED, stream="training")):
        for _ in range(steps):
            loss = bound.differentiable_loss(model, relaxation, relaxation)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return relaxation


def chain_marginals(matching: NoisyMatching, steps: int, chains: int = 50) -> Tensor:
    """Return marginal probabilities from chains that give a row a column it likes, and its own to who had that."""
    log_weights, size = matching.log_weights, matching.size
    liking = (0.5 * log_weights).softmax(-1).expand(chains, *log_weights.shape)
    everywhere = log_weights.expand(chains, *log_weights.shape)
    state = nearest_permutation(log_weights).expand(chains, *log_weights.shape[:-1])
    total, kept = torch.zeros_like(log_weights), 0

    def at(table: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return table.flatten(-2).gather(-1, row * size + column)

    with global_stream(new_generator(SEED, stream="chains")):
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

    right_in_draws: Tensor
    right_at_best: Tensor
    brier: Tensor
    distance: Tensor


def score(marginals: Tensor, truth: Tensor, posterior: Tensor) -> Scores:
    """Score marginal probabilities, ``(problems, n, n)``."""
    size = truth.shape[-1]
    target = permutation_matrix(truth, marginals.dtype)
    return Scores(
        (marginals * target).sum((-1, -2)) / size,
        (nearest_permutation(marginals) == truth).double().mean(-1),
        (marginals - target).square().sum((-1, -2)) / size,
        (marginals - posterior).square().sum((-1, -2)) / size,
    )


def drawn_marginals(relaxation: Relaxation) -> Tensor:
    """Return marginal probabilities of the permutations of a relaxation."""
    return permutation_matrix(relaxation.sample_permutations(DRAWS, seed=SEED), torch.float64).mean(0)


def with_error(values: Tensor) -> str:
    return f"{float(values.mean()):7.4f} ±{float(values.std()) / math.sqrt(len(values)):6.4f}"


def show(name: str, columns: Sequence[Tensor], seconds: float = math.nan) -> None:
    taken = "" if math.isnan(seconds) else f"{seconds:8.1f} s"
    print(f"{name:<26}" + "  ".join(with_error(values) for values in columns) + taken, flush=True)


def bhattacharyya(draws: Tensor, log_prob: Tensor, listed: Tensor) -> Tensor:
    """Return the distance of drawn frequencies from probabilities, a problem each."""
    code = listed.shape[-1] ** torch.arange(listed.shape[-1])
    place = torch.searchsorted((listed * code).sum(-1).sort().values, (draws * code).sum(-1))
    order = (listed * code).sum(-1).argsort()
    frequency = torch.nn.functional.one_hot(place, len(listed)).double().mean(0)
    return -(frequency * log_prob.T[:, order].exp()).sqrt().sum(-1).log()


def six_centres(problems: int, steps: int, scale: float, tuning_problems: int) -> None:
    """Print distances from the exact posterior, over all permutations."""
    chosen = tuned(6, steps, scale, tuning_problems) | ONE_SETTING
    matching, truth = NoisyMatching.simulate(6, scale, SEED, batch_shape=(problems,))
    posterior = matching.posterior()
    listed = posterior.enumerate_support(expand=False).squeeze(1)
    log_prob = posterior.log_prob(listed.unsqueeze(1))
    print(f"\n6 centres, noise {scale:g}, {problems} problems: Bhattacharyya, right in draws, Brier, distance")
    with global_stream(new_generator(SEED)):
        exact = posterior.sample((5000,))
    show("exact, as many draws", [bhattacharyya(exact, log_prob, listed), *kept(posterior.marginals, truth, posterior)])
    for name, setting in chosen.items():
        start = time.perf_counter()
        draws = train(matching, setting, steps).sample_permutations(5000, seed=SEED)
        marginals = permutation_matrix(draws, torch.float64).mean(0)
        columns = [bhattacharyya(draws, log_prob, listed), *kept(marginals, truth, posterior)]
        show(name, columns, time.perf_counter() - start)


def kept(marginals: Tensor, truth: Tensor, posterior: object) -> list[Tensor]:
    scores = score(marginals, truth, posterior.marginals)
    return [scores.right_in_draws, scores.brier, scores.distance]


def tuned(size: int, steps: int, scale: float, problems: int) -> dict[str, Setting]:
    """Return for each relaxation the setting of least Brier score on problems of their own."""
    matching, truth = NoisyMatching.simulate(size, scale, TUNING_SEED, batch_shape=(problems,))
    return {name: best_setting(name, matching, truth, steps) for name in SETTINGS}


def best_setting(name: str, matching: NoisyMatching, truth: Tensor, steps: int) -> Setting:
    found = []
    for setting in SETTINGS[name]:
        marginals = drawn_marginals(train(matching, setting, steps))
        found.append(float(score(marginals, truth, marginals).brier.mean()))
        print(f"    tuning {name}: {setting.name}: Brier {found[-1]:.4f}", flush=True)
    return SETTINGS[name][min(range(len(found)), key=found.__getitem__)]


def fifty_centres(problems: int, steps: int, scale: float, tuning_problems: int) -> None:
    """Print scores of relaxations, and by how much rounding is better than Gumbel-Sinkhorn."""
    chosen = tuned(50, steps, scale, tuning_problems) | ONE_SETTING
    matching, truth = NoisyMatching.simulate(50, scale, SEED, batch_shape=(problems,))
    posterior = chain_marginals(matching, 4000)
    print(f"\n50 centres, noise {scale:g}, {problems} problems: right in draws, right at best, Brier, distance")
    show("posterior, by chains", score(posterior, truth, posterior))
    most_probable = permutation_matrix(matching.posterior().mode, torch.float64)
    show("most probable matching", score(most_probable, truth, posterior))
    found: dict[str, Scores] = {}
    for name, setting in chosen.items():
        start = time.perf_counter()
        found[name] = score(drawn_marginals(train(matching, setting, steps)), truth, posterior)
        show(name, found[name], time.perf_counter() - start)
        if name == "rounding":
            pairs = zip(found["rounding"], found["Gumbel-Sinkhorn"], strict=True)
            show("rounding less G.-Sinkhorn", [one - other for one, other in pairs])


def check_chains() -> None:
    matching, _ = NoisyMatching.simulate(12, 0.4, SEED, batch_shape=(4,))
    gap = (chain_marginals(matching, 8000) - matching.posterior().marginals).abs().max()
    print(f"chains against exact marginals of 12 centres: largest difference {float(gap):.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=10)
    parser.add_argument("--tuning-problems", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--centres", type=int, choices=(6, 50), nargs="+", default=(6, 50))
    options = parser.parse_args()
    torch.set_num_threads(1)
    check_chains()
    if 6 in options.centres:
        for scale in (0.25, 0.5):
            six_centres(options.problems, options.steps, scale, 2 * options.tuning_problems)
    if 50 in options.centres:
        for scale in (0.1, 0.2):
            fifty_centres(options.problems, options.steps, scale, options.tuning_problems)


if __name__ == "__main__":
    main()
