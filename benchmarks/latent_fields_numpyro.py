"""The models of `latent_fields.py` by NumPyro's NUTS: one task in JSON on standard input, one line out."""

from __future__ import annotations

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS

jax.config.update("jax_enable_x64", True)


def gaussian_process(x, y, centred):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    length = numpyro.sample("length", dist.LogNormal(-1.5, 0.5))
    mean = numpyro.sample("mean", dist.Normal(1.0, 1.0))
    gram = scale**2 * jnp.exp(-0.5 * ((x[:, None] - x) / length) ** 2)
    root = jnp.linalg.cholesky(gram + 1e-6 * jnp.eye(len(x)))
    if centred:
        field = numpyro.sample("field", dist.MultivariateNormal(jnp.zeros(len(x)), scale_tril=root))
    else:
        field = root @ numpyro.sample("white", dist.Normal(jnp.zeros(len(x)), 1.0).to_event(1))
    numpyro.sample("y", dist.Poisson(jnp.exp(mean + field)), obs=y)


def effects(mean, between, count, centred):
    if centred:
        return numpyro.sample("effect", dist.Normal(mean * jnp.ones(count), between).to_event(1))
    return mean + between * numpyro.sample("white", dist.Normal(jnp.zeros(count), 1.0).to_event(1))


def radon(county, floor, y, centred):
    mean = numpyro.sample("mean", dist.Normal(0.0, 5.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 5.0))
    between = numpyro.sample("between", dist.HalfNormal(1.0))
    within = numpyro.sample("within", dist.HalfNormal(1.0))
    effect = effects(mean, between, int(county.max()) + 1, centred)
    numpyro.sample("y", dist.Normal(effect[county] + slope * floor, within), obs=y)


def logistic(group, x, y, centred):
    mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 2.0))
    between = numpyro.sample("between", dist.HalfNormal(1.0))
    effect = effects(mean, between, int(group.max()) + 1, centred)
    numpyro.sample("y", dist.Bernoulli(logits=effect[group] + slope * x), obs=y)


def main() -> None:
    task = json.load(sys.stdin)
    model, data = globals()[task["model"]], [np.array(x) for x in task["data"]]
    sampler = MCMC(
        NUTS(model),
        num_warmup=task["warmup"],
        num_samples=task["samples"],
        num_chains=task["chains"],
        chain_method="vectorized" if task.get("vectorized") else "sequential",
        progress_bar=False,
    )
    found = []
    for seed in (task["seeds"][0], *task["seeds"]):  # the first compiles
        begin = time.process_time()
        sampler.run(jax.random.PRNGKey(seed), *data, task["centred"])
        draws = {k: np.asarray(v) for k, v in sampler.get_samples(group_by_chain=True).items()}
        seconds = time.process_time() - begin
        sizes = [effective_sample_size(v) for k, v in draws.items() if k not in ("field", "white", "effect")]
        found.append((float(min(sizes)), seconds))
    print(json.dumps(found[1:]))


if __name__ == "__main__":
    main()
