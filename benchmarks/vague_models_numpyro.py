"""NumPyro's NUTS at its defaults on the models of `vague_models.py`: one task in JSON a line, one line out.

It needs NumPyro and imports nothing of bayeskit. A task holds the description of a model and a seed; the answer the
draws of the quantities that are judged and what NumPyro's summary says. The first run of a model compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import summary
from numpyro.infer import MCMC, NUTS
from peer_process import serve

jax.config.update("jax_enable_x64", True)


def numpyro_model(description: dict[str, Any]) -> Callable[..., None]:
    """Return the model of a description, a function of its data."""
    form, scale, prior = description["form"], description["scale_prior"], description["coefficient_prior"]

    def run(design, y, extra=None):
        sd = {
            name: numpyro.sample(site, getattr(dist, scale["family"])(*scale["numbers"])) ** scale["power"]
            for name, site in description["scales"].items()
        }
        zeros = jnp.zeros(design.shape[1])
        if prior["family"] == "ImproperUniform":
            of_coefficients = dist.ImproperUniform(dist.constraints.real_vector, (), zeros.shape)
        elif prior["family"] == "masked":
            of_coefficients = dist.Normal(zeros, 1.0).mask(False).to_event(1)
        else:
            units = {"none": sd.get("tau"), "scaled": prior["sd"] * sd.get("sigma", 1.0)}
            of_coefficients = dist.Normal(zeros, units.get(prior["family"], prior["sd"])).to_event(1)
        b = numpyro.sample("b", of_coefficients)
        centre = design @ b
        if form == "hierarchy":
            with numpyro.plate("groups", len(y)):
                centre = numpyro.sample("effect", dist.Normal(centre, sd["tau"]))
        elif form == "effects":
            with numpyro.plate("groups", int(extra.max()) + 1):
                centre = numpyro.sample("effect", dist.Normal(b[0], sd["tau"]))[extra]
        elif form == "local_level":
            with numpyro.plate("years", len(y) - 1):
                step = numpyro.sample("step", dist.Normal(0.0, sd["tau"]))
            centre = centre + jnp.concatenate([jnp.zeros(1), jnp.cumsum(step)])
        with numpyro.plate("rows", len(y)):
            if form == "logistic":
                likelihood = dist.Bernoulli(logits=centre)
            elif form == "poisson":
                likelihood = dist.Poisson(jnp.exp(centre))
            elif form == "student":
                likelihood = dist.StudentT(description["degrees"], centre, sd["sigma"])
            else:
                likelihood = dist.Normal(centre, sd.get("sigma", extra))
            numpyro.sample("y", likelihood, obs=y)

    return run


samplers: dict[str, tuple[MCMC, list[np.ndarray]]] = {}  # the last model's, whose code is compiled


def quantity(name: str, draws: dict[str, np.ndarray], description: dict[str, Any]) -> np.ndarray:
    """Return the draws ``(chains, draws)`` of a coefficient or of the logarithm of a scale."""
    if name.startswith("b["):
        return draws["b"][..., int(name[2:-1])]
    site = description["scales"][name.removeprefix("log ")]
    return description["scale_prior"]["power"] * np.log(draws[site])


def answer(task: dict[str, Any]) -> dict[str, Any]:
    """Sample one model with one seed."""
    description, key = task["model"], repr(task["model"])
    if key not in samplers:
        samplers.clear()
        jax.clear_caches()  # compiled programs of a hundred models are more mappings than Linux allows a process
        sampler = MCMC(
            NUTS(numpyro_model(description)), num_warmup=1000, num_samples=1000, num_chains=4,
            chain_method="sequential", progress_bar=False,
        )  # fmt: skip
        samplers[key] = sampler, [np.asarray(value) for value in description["data"].values()]
    sampler, data = samplers[key]
    sampler.run(jax.random.PRNGKey(task["seed"]), *data, extra_fields=("diverging",))
    draws = {name: np.asarray(value) for name, value in sampler.get_samples(group_by_chain=True).items()}
    found = list(summary(draws).values())
    return {
        "draws": [quantity(name, draws, description).tolist() for name in description["quantities"]],
        "r_hat": max(float(np.max(site["r_hat"])) for site in found),
        "n_eff": min(float(np.min(site["n_eff"])) for site in found),
        "divergences": int(sampler.get_extra_fields()["diverging"].sum()),
    }


if __name__ == "__main__":
    serve(f"NumPyro {numpyro.__version__}", answer)
