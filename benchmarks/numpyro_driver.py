"""Run NumPyro's vectorised NUTS; driven by `sampler_speed.py`, one line of JSON in, one out.

Input lines hold model, data, chains, warm-up, samples and seed. The first run of a model and number of
chains compiles and is timed apart. It needs NumPyro and ArviZ and imports nothing of bayeskit.
"""

import json
import sys
import time

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

jax.config.update("jax_enable_x64", True)


def logistic_regression(x, y):
    b = numpyro.sample("b", dist.Normal(0.0, 10.0).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


def eight_schools(effects, errors):
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", len(effects)):
        eta = numpyro.sample("eta", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mu + tau * eta, errors), obs=effects)


def radiata_pine(x, y):
    tau = numpyro.sample("tau", dist.Gamma(3.0, 2 * 300.0**2))
    alpha = numpyro.sample("alpha", dist.Normal(3000.0, 1 / jnp.sqrt(0.06 * tau)))
    beta = numpyro.sample("beta", dist.Normal(185.0, 1 / jnp.sqrt(6.0 * tau)))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(alpha + beta * x, 1 / jnp.sqrt(tau)), obs=y)


MODELS = {"Pima": logistic_regression, "eight schools": eight_schools, "radiata pine": radiata_pine}


def main() -> None:
    samplers: dict = {}
    arrays: dict = {}
    for line in sys.stdin:
        task = json.loads(line)
        key = (task["model"], task["chains"])
        # The same arrays every time: other ones would be traced anew.
        data = arrays.setdefault(key, [np.asarray(column) for column in task["data"]])
        compiling = 0.0
        if key not in samplers:
            begin = time.perf_counter()
            samplers[key] = MCMC(
                NUTS(MODELS[task["model"]]),
                num_warmup=task["warmup"],
                num_samples=task["samples"],
                num_chains=task["chains"],
                chain_method="vectorized",
                progress_bar=False,
            )
            samplers[key].run(jax.random.PRNGKey(10_000), *data)
            jax.block_until_ready(samplers[key].get_samples())
            compiling = time.perf_counter() - begin
        begin = time.perf_counter()
        samplers[key].run(jax.random.PRNGKey(task["seed"]), *data)
        jax.block_until_ready(samplers[key].get_samples())
        seconds = time.perf_counter() - begin
        effective = az.ess(az.from_numpyro(samplers[key]))
        smallest = min(float(v.min()) for v in effective.data_vars.values())
        print(json.dumps({"effective": smallest, "seconds": seconds, "first": compiling}), flush=True)


if __name__ == "__main__":
    main()
