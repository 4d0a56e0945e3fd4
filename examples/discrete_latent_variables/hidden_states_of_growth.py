r"""Calm and stormy quarters: hidden states of economic growth.

What you will learn: how to sample a hidden Markov model without sampling its states, how the evidence says how many
states there are, and how to look at the states afterwards.

Growth of the United States' gross domestic product in 202 quarters, in per cent, is normal given a hidden state,

.. math::
    z_t \mid z_{t-1} \sim \mathrm{Categorical}(A_{z_{t-1}}), \qquad y_t \mid z_t \sim N(\mu_{z_t}, \sigma_{z_t}^2).

The states are summed out, so what is left is continuous. They are sorted by their scales, for they could swap names.
"""

import os

import pyro
import pyro.distributions as dist
import torch
from statsmodels.datasets import macrodata

import bayeskit as bk
from bayeskit.inference import evidence
from bayeskit.models.discrete.sequences import GaussianEmission, HiddenMarkovModel, plot_states

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))


def one_state(y: torch.Tensor) -> None:
    """Draw all quarters from one normal distribution, with the priors that each hidden state has."""
    mean = pyro.sample("mean", dist.Normal(y.new_tensor(0.8), 1.0))
    log_scale = pyro.sample("log_scale", dist.Normal(y.new_tensor(0.8).log(), 0.5))
    with pyro.plate("quarters", len(y)):
        pyro.sample("y", dist.Normal(mean, log_scale.exp()), obs=y)


def main() -> None:
    table = macrodata.load_pandas().data
    y = 100 * torch.tensor(table["realgdp"].to_numpy()).log().diff()
    quarters = [f"{int(year)} Q{int(q)}" for year, q in zip(table["year"], table["quarter"], strict=True)][1:]

    emission = GaussianEmission(mean=0.8, mean_scale=1.0, scale=0.8, scale_spread=0.5, order="scale")
    two_states = HiddenMarkovModel(2, emission, stay=8.0)
    size = {"num_warmup": 60, "num_samples": 60} if SMALL else {"num_warmup": 300, "num_samples": 1000}
    estimates = {}
    for name, model in (("one state", one_state), ("two states", two_states)):
        target = bk.Target.from_pyro(model, y)
        draws = bk.sample(target, num_chains=4, seed=0, progress=False, **size)
        estimates[name] = evidence.bridge_sampling(target, draws, seed=0)
        print(f"{name}: {estimates[name]}")
    factor = estimates["two states"].log_evidence - estimates["one state"].log_evidence
    print(f"log Bayes factor for two states: {factor:.2f}")

    values = {name: value.flatten(0, 1) for name, value in draws.values().items()}
    for state in range(2):
        mean, scale = values["mean"][:, state], values["log_scale"][:, state].exp()
        stay = values["transition"][:, state, state]
        print(f"state {state}: mean {mean.mean():.2f}, scale {scale.mean():.2f} +- {scale.std():.2f}", end=", ")
        print(f"stays with probability {stay.mean():.3f}")

    # For each draw of the parameters, the states have exact probabilities; these are their averages.
    probabilities = two_states.state_probabilities(draws, y)
    typical = {name: value.mean(0) for name, value in values.items()}
    path = two_states.distribution(typical, y).most_probable_states(y)
    changes = [quarters[t + 1] for t in path.diff().nonzero().flatten().tolist()]
    print(f"most probable states change in {', '.join(changes)}")
    for year in (1970, 1982, 1990, 2000, 2009):
        print(f"probability of calm in {year} Q1: {float(probabilities[quarters.index(f'{year} Q1'), 0]):.2f}")
    figure = plot_states(
        probabilities, y, table["year"][1:] + table["quarter"][1:] / 4 - 0.25, name="growth (per cent)"
    )
    if not SMALL:
        figure.savefig("hidden_states_of_growth.png", dpi=100)
    assert factor > 3


if __name__ == "__main__":
    main()
