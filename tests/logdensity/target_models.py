"""The models on which a Target is compared with Pyro."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import config_enumerate
from pyro.nn import PyroModule, PyroSample
from target_checks import normal
from torch import Tensor

PARALLEL = {"enumerate": "parallel"}


@dataclass
class Case:
    """A model with its arguments; ``discrete`` gives the values and the shape of each summed-out site."""

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    discrete: dict[str, tuple[Tensor, torch.Size]] = field(default_factory=dict)


def plate(x: Tensor, y: Tensor) -> None:
    weights = pyro.sample("weights", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    sd = pyro.sample("sd", dist.HalfCauchy(1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ weights, sd), obs=y)


def nested_plates(y: Tensor) -> None:
    sd = pyro.sample("sd", dist.Gamma(2.0, 1.5))
    with pyro.plate("columns", y.shape[1], dim=-1):
        effect = pyro.sample("effect", dist.Normal(0.0, sd))
        with pyro.plate("rows", y.shape[0], dim=-2):
            cell = pyro.sample("cell", dist.StudentT(5.0, effect, 0.3))
            pyro.sample("y", dist.Normal(cell, 0.5), obs=y)


def factors(y: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    pyro.factor("penalty", -((a - 1.0) ** 4))
    with pyro.plate("data", len(y)):
        b = pyro.sample("b", dist.Exponential(1.3))
        pyro.factor("each", -b * y.abs() + a)


def deterministic(y: Tensor) -> None:
    raw = pyro.sample("raw", dist.Normal(0.0, 1.0))
    mean = pyro.deterministic("mean", raw**3)
    pyro.sample("y", dist.Normal(mean, 1.0).expand([len(y)]).to_event(1), obs=y)


def several_observed(y: Tensor, counts: Tensor) -> None:
    rate = pyro.sample("rate", dist.LogNormal(0.2, 0.8))
    p = pyro.sample("p", dist.Beta(2.0, 3.5))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Gamma(rate, 1.0), obs=y.abs())
    pyro.sample("counts", dist.Poisson(rate).expand([len(counts)]).to_event(1), obs=counts)
    pyro.sample("heads", dist.Binomial(10, p), obs=torch.tensor(7.0))


def masked(y: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)), poutine.mask(mask=y > 0):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def scaled(y: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    sd = pyro.sample("sd", dist.InverseGamma(3.0, 1.0))
    with poutine.scale(scale=0.3):
        pyro.sample("y", dist.Normal(mean, sd).expand([len(y)]).to_event(1), obs=y)


class Regression(PyroModule):
    """Priors as attributes of a module, with an ordinary parameter and a nested module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        self.noise = PyroSample(lambda self: dist.LogNormal(self.weight.sum(), 0.5))
        self.offset = torch.nn.Parameter(torch.tensor(0.4, dtype=torch.float64))
        self.inner = PyroModule[torch.nn.Linear](2, 1, dtype=torch.float64)
        self.inner.bias = PyroSample(dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        self.inner.weight.data = torch.tensor([[0.5, -0.3]], dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> None:
        mean = self.inner(x).squeeze(-1) + x @ self.weight + self.offset
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, self.noise), obs=y)


def keywords(y: Tensor, *rest: Tensor, scale: float = 1.0, shift: Tensor | None = None) -> None:
    mean = pyro.sample("mean", dist.Logistic(0.0, scale))
    for i, values in enumerate(rest):
        pyro.sample(f"rest{i}", dist.Normal(mean, 1.0).expand([len(values)]).to_event(1), obs=values)
    pyro.sample("y", dist.Normal(mean + shift, 1.0).expand([len(y)]).to_event(1), obs=y)


def autoregression(y: Tensor) -> None:
    slope = pyro.sample("slope", dist.Uniform(-1.0, 1.0))
    sd = pyro.sample("sd", dist.HalfNormal(1.0))
    state = torch.zeros(())
    for t in range(len(y)):
        state = pyro.sample(f"state{t}", dist.Normal(slope * state, sd))
        pyro.sample(f"y{t}", dist.Normal(state, 0.4), obs=y[t])


def hierarchical(y: Tensor, group: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 3.0))
    correlation = pyro.sample("correlation", dist.LKJCholesky(2, 1.5))
    scales = pyro.sample("scales", dist.Weibull(torch.ones(2), 1.5).to_event(1))
    with pyro.plate("groups", 3):
        effects = pyro.sample(
            "effects", dist.MultivariateNormal(mean.expand(2), scale_tril=scales.unsqueeze(-1) * correlation)
        )
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(effects[group].sum(-1), 1.0), obs=y)


def gaussian_process(x: Tensor, y: Tensor) -> None:
    length = pyro.sample("length", dist.InverseGamma(3.0, 2.0))
    amplitude = pyro.sample("amplitude", dist.HalfNormal(1.0))
    distance = (x.unsqueeze(0) - x.unsqueeze(1)) / length
    kernel = amplitude**2 * torch.exp(-0.5 * distance**2) + 0.1 * torch.eye(len(x))
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), kernel), obs=y)


def parameters(y: Tensor) -> None:
    sd = pyro.param("sd", lambda: torch.tensor(2.0), constraint=dist.constraints.positive)
    mean = pyro.sample("mean", dist.Normal(0.0, sd))
    pyro.sample("y", dist.Normal(mean, sd).expand([len(y)]).to_event(1), obs=y)


def dependent_bounds(y: Tensor) -> None:
    low = pyro.sample("low", dist.Normal(0.0, 1.0))
    width = pyro.sample("width", dist.Exponential(1.0))
    inside = pyro.sample("inside", dist.Uniform(low, low + width).expand([2]).to_event(1))
    above = pyro.sample("above", dist.Pareto(width, 2.0))
    pyro.sample("y", dist.Normal(inside.sum() + above, 1.0), obs=y)


def sequential_plate(y: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    for i in pyro.plate("data", len(y)):
        pyro.sample(f"y{i}", dist.Normal(mean, 1.0 + i), obs=y[i])


def angles(y: Tensor) -> None:
    angle = pyro.sample("angle", dist.VonMises(2.5, 1.2).expand([2]).to_event(1))
    pyro.sample("y", dist.Normal(angle.cos().sum(), 1.0), obs=y)


def simplices(concentration: Tensor, y: Tensor) -> None:
    with pyro.plate("rows", 4):
        p = pyro.sample("p", dist.Dirichlet(concentration))
        pyro.sample("y", dist.Categorical(p), obs=y)


Y = normal(5, seed=3)
X = normal(5, 2, seed=4)
CONTINUOUS = {
    "plate": Case(plate, (X, Y)),
    "nested_plates": Case(nested_plates, (normal(2, 3, seed=5),)),
    "factors": Case(factors, (Y,)),
    "deterministic": Case(deterministic, (Y,)),
    "several_observed": Case(several_observed, (Y, torch.tensor([1.0, 4.0, 2.0], dtype=torch.float64))),
    "masked": Case(masked, (Y,)),
    "scaled": Case(scaled, (Y,)),
    "module": Case(Regression(), (X, Y)),
    "keywords": Case(keywords, (Y, Y[:2], Y[2:]), {"scale": 1.7, "shift": Y[0]}),
    "partial": Case(partial(keywords, scale=0.6), (Y,), {"shift": Y[1]}),
    "autoregression": Case(autoregression, (Y[:4],)),
    "hierarchical": Case(hierarchical, (Y, torch.tensor([0, 0, 1, 2, 2]))),
    "gaussian_process": Case(gaussian_process, (X[:, 0], Y)),
    "parameters": Case(parameters, (Y,)),
    "dependent_bounds": Case(dependent_bounds, (Y[0],)),
    "sequential_plate": Case(sequential_plate, (Y[:3],)),
    "angles": Case(angles, (Y[0],)),
    "simplices": Case(simplices, (torch.tensor([0.8, 1.5, 2.0], dtype=torch.float64), torch.tensor([0, 2, 1, 1]))),
}


# -- summed-out sites -------------------------------------------------------------------------------------


def mixture(y: Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    means = pyro.sample("means", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(weights), infer=PARALLEL)
        pyro.deterministic("mean", means[z])
        pyro.sample("y", dist.Normal(means[z], 0.7), obs=y)


@config_enumerate
def decorated(y: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Bernoulli(p))
        pyro.sample("y", dist.Normal(mean * z, 0.7), obs=y)


def global_switch(y: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    z = pyro.sample("z", dist.Bernoulli(p), infer=PARALLEL)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(torch.where(z > 0, mean, -2.0 * mean), 0.7), obs=y)


def hidden_markov(y: Tensor, use_markov: bool) -> None:
    with pyro.plate("states", 2):
        rows = pyro.sample("rows", dist.Dirichlet(torch.tensor([1.5, 2.5])))
        means = pyro.sample("means", dist.Normal(0.0, 1.0))
    z: Any = 0
    steps = range(len(y))
    for t in pyro.markov(steps) if use_markov else steps:
        z = pyro.sample(f"z{t}", dist.Categorical(rows[z]), infer=PARALLEL)
        pyro.sample(f"y{t}", dist.Normal(means[z], 0.7), obs=y[t])


def groups_and_items(y: Tensor) -> None:
    means = pyro.sample("means", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    with pyro.plate("groups", y.shape[1], dim=-1):
        g = pyro.sample("g", dist.Bernoulli(0.3), infer=PARALLEL).long()
        with pyro.plate("items", y.shape[0], dim=-2):
            k = pyro.sample("k", dist.Categorical(weights[g]), infer=PARALLEL)
            pyro.sample("y", dist.Normal(means[g, k], 0.8), obs=y)


def two_parents(y: Tensor) -> None:
    table = pyro.sample("table", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
    with pyro.plate("data", len(y)):
        a = pyro.sample("a", dist.Categorical(torch.tensor([0.3, 0.7])), infer=PARALLEL)
        b = pyro.sample("b", dist.Categorical(torch.tensor([0.2, 0.5, 0.3])), infer=PARALLEL)
        pyro.sample("y", dist.Normal(table[a, b], 0.7), obs=y)


def discrete_parent(y: Tensor) -> None:
    z = pyro.sample("z", dist.Categorical(torch.tensor([0.2, 0.5, 0.3])), infer=PARALLEL)
    mean = pyro.sample("mean", dist.Normal(2.0 * z, 1.0))
    with pyro.plate("data", len(y)):
        w = pyro.sample("w", dist.Bernoulli(0.4), infer=PARALLEL)
        local = pyro.sample("local", dist.Normal(mean + w, 0.5 + w))
        pyro.sample("y", dist.Normal(local, 0.7), obs=y)


def mixed_likelihood(y: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    pyro.sample("before", dist.Normal(mean, 1.0), obs=y[0])
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Bernoulli(0.4), infer=PARALLEL)
        pyro.sample("y", dist.Normal(mean + z, 0.7), obs=y)
        pyro.sample("x", dist.Normal(mean - z, 0.9), obs=y + 0.1)
        pyro.factor("tilt", 0.3 * z * mean)


def discrete_chain_in_plate(y: Tensor) -> None:
    rows = pyro.sample("rows", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    means = pyro.sample("means", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("series", y.shape[0]):
        z: Any = 0
        for t in pyro.markov(range(y.shape[1])):
            z = pyro.sample(f"z{t}", dist.Categorical(rows[z]), infer=PARALLEL)
            pyro.sample(f"y{t}", dist.Normal(means[z], 0.7), obs=y[:, t])


ONE = torch.Size([])
COIN = torch.tensor([0.0, 1.0], dtype=torch.float64)
TWO, THREE = torch.arange(2), torch.arange(3)
CHAIN = {f"z{t}": (TWO, ONE) for t in range(4)}
ENUMERATED = {
    "mixture": Case(mixture, (Y[:3],), discrete={"z": (THREE, torch.Size([3]))}),
    "decorated": Case(decorated, (Y[:3],), discrete={"z": (COIN, torch.Size([3]))}),
    "global_switch": Case(global_switch, (Y,), discrete={"z": (COIN, ONE)}),
    "hidden_markov": Case(hidden_markov, (Y[:4], True), discrete=CHAIN),
    "hidden_markov_unrolled": Case(hidden_markov, (Y[:4], False), discrete=CHAIN),
    "groups_and_items": Case(
        groups_and_items,
        (normal(2, 2, seed=6),),
        discrete={"g": (COIN, torch.Size([2])), "k": (TWO, torch.Size([2, 2]))},
    ),
    "two_parents": Case(two_parents, (Y[:2],), discrete={"a": (TWO, torch.Size([2])), "b": (THREE, torch.Size([2]))}),
    "discrete_parent": Case(discrete_parent, (Y[:3],), discrete={"z": (THREE, ONE), "w": (COIN, torch.Size([3]))}),
    "mixed_likelihood": Case(mixed_likelihood, (Y[:3],), discrete={"z": (COIN, torch.Size([3]))}),
    "discrete_chain_in_plate": Case(
        discrete_chain_in_plate,
        (normal(2, 3, seed=7),),
        discrete={f"z{t}": (TWO, torch.Size([2])) for t in range(3)},
    ),
}
ALL = {**CONTINUOUS, **ENUMERATED}
