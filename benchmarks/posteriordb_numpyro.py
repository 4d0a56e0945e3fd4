"""The posteriors of `posteriordb.py` for NumPyro's NUTS and for nutpie on the same potential; one run a process.

It imports nothing of bayeskit. Models are written from the Stan programs in Stan's own parameters: constrained
supports, and flat priors that are `ImproperUniform`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

CHAINS, WARMUP, SAMPLES = 4, 500, 1000
STEPS_A_YEAR = 20

jax.config.update("jax_enable_x64", True)


def flat(name, support=constraints.real, size=None):
    return numpyro.sample(name, dist.ImproperUniform(support, (), () if size is None else (size,)))


def positive(name, size=None):
    return flat(name, constraints.positive, size)


def regression(x, y, cauchy=None):
    beta = flat("beta", size=x.shape[1])
    sigma = positive("sigma") if cauchy is None else numpyro.sample("sigma", dist.HalfCauchy(cauchy))
    numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def design(*columns):
    return np.stack([np.ones(len(columns[0])), *columns], 1)


def standard(x, times=1.0):
    return (x - x.mean()) / (times * x.std(ddof=1))


def earnings(name, d):
    h, m = d["height"], d["male"]
    x = {
        "height": lambda: (h,),
        "interaction": lambda: (h, m, h * m),
        "interaction_z": lambda: (standard(h), m, standard(h) * m),
        "logheight_male": lambda: (np.log(h), m),
    }[name.removeprefix("earnings-logearn_")]()
    return regression, (design(*x), np.log(d["earn"]))


def scores(name, d):
    s, q = d["mom_hs"], d["mom_iq"]
    kind = name.split("kidscore_")[1]
    if kind == "interaction_c":
        s, q = s - s.mean(), q - q.mean()
    if kind == "interaction_z":
        s, q = standard(s, 2.0), standard(q, 2.0)
    x = (s,) if kind == "momhs" else (s, q) if kind == "momhsiq" else (s, q, s * q)
    return regression, (design(*x), d["kid_score"], *([2.5] if name.startswith("kidiq-") else []))


def mesquite(name, d):
    a, b, c, t, r, g = (d[k] for k in ("diam1", "diam2", "canopy_height", "total_height", "density", "group"))
    log = np.log
    if name == "mesquite-mesquite":
        return regression, (design(a, b, c, t, r, g), d["weight"])
    x = {
        "logmesquite": (log(a), log(b), log(c), log(t), log(r), g),
        "logmesquite_logvas": (log(a * b * c), log(a * b), log(a / b), log(t), log(r), g),
        "logmesquite_logvash": (log(a * b * c), log(a * b), log(a / b), log(t), g),
        "logmesquite_logvolume": (log(a * b * c),),
    }[name.removeprefix("mesquite-")]
    return regression, (design(*x), log(d["weight"]))


def election(_, d):
    ages = [np.where(d["age_discrete"] == k, 1.0, 0.0) for k in (2, 3, 4)]
    x = design(d["real_ideo"], d["race_adj"], *ages, d["educ1"], d["gender"], d["income"])
    return regression, (x, d["partyid7"])


def autoregression(y, order):
    alpha = numpyro.sample("alpha", dist.Normal(0, 10))
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([order]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    mean = alpha + sum(beta[k] * y[order - 1 - k : len(y) - 1 - k] for k in range(order))
    numpyro.sample("y", dist.Normal(mean, sigma), obs=y[order:])


def diamonds(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    intercept = numpyro.sample("Intercept", dist.StudentT(3, 8, 10))
    sigma = positive("sigma")
    numpyro.factor("sigma_prior", dist.StudentT(3, 0, 10).log_prob(sigma))
    numpyro.sample("y", dist.Normal(intercept + x @ b, sigma), obs=y)


def blr(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([x.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(10))
    numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def kilpisjarvi(x, y, alpha_mean, alpha_sd, beta_mean, beta_sd):
    alpha = numpyro.sample("alpha", dist.Normal(alpha_mean, alpha_sd))
    beta = numpyro.sample("beta", dist.Normal(beta_mean, beta_sd))
    numpyro.sample("y", dist.Normal(alpha + beta * x, positive("sigma")), obs=y)


def centered(y, sigma):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    theta = numpyro.sample("theta", dist.Normal(mu, tau).expand([len(y)]).to_event(1))
    numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def noncentered(y, sigma):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    z = numpyro.sample("theta_trans", dist.Normal(0, 1).expand([len(y)]).to_event(1))
    theta = numpyro.deterministic("theta", z * tau + mu)
    numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def garch(y, first):
    mu, alpha0 = flat("mu"), positive("alpha0")
    alpha1 = numpyro.sample("alpha1", dist.Uniform(0, 1))
    beta1 = numpyro.sample("beta1", dist.Uniform(0, 1 - alpha1))
    numpyro.factor("flat", jnp.log1p(-alpha1))

    def step(s, before):
        s = jnp.sqrt(alpha0 + alpha1 * (before - mu) ** 2 + beta1 * s**2)
        return s, s

    _, later = jax.lax.scan(step, first + 0 * mu, y[:-1])
    numpyro.sample("y", dist.Normal(mu, jnp.append(first, later)), obs=y)


def kernel(x, alpha, rho):
    return alpha**2 * jnp.exp(-((x[:, None] - x[None, :]) ** 2) / (2 * rho**2))


def gp_counts(x, k):
    rho = numpyro.sample("rho", dist.Gamma(25, 4))
    alpha = numpyro.sample("alpha", dist.HalfNormal(2))
    z = numpyro.sample("f_tilde", dist.Normal(0, 1).expand([len(x)]).to_event(1))
    f = numpyro.deterministic("f", jnp.linalg.cholesky(kernel(x, alpha, rho) + 1e-10 * jnp.eye(len(x))) @ z)
    numpyro.sample("k", dist.Poisson(jnp.exp(f)), obs=k)


def gp_regression(x, y):
    rho = numpyro.sample("rho", dist.Gamma(25, 4))
    alpha = numpyro.sample("alpha", dist.HalfNormal(2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    factor = jnp.linalg.cholesky(kernel(x, alpha, rho) + sigma * jnp.eye(len(x)))
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(len(x)), scale_tril=factor), obs=y)


def mixture(y):
    mu = flat("mu", constraints.ordered_vector, 2)
    numpyro.factor("mu_prior", dist.Normal(0, 2).log_prob(mu).sum())
    sigma = numpyro.sample("sigma", dist.HalfNormal(2).expand([2]).to_event(1))
    theta = numpyro.sample("theta", dist.Beta(5, 5))
    parts = dist.Normal(mu, sigma).log_prob(y[:, None]) + jnp.log(jnp.stack([theta, 1 - theta]))
    numpyro.factor("y", jax.nn.logsumexp(parts, -1).sum())


def forward(theta, emissions):
    def step(gamma, emission):
        return jax.nn.logsumexp(gamma[:, None] + jnp.log(theta), 0) + emission, None

    return jax.nn.logsumexp(jax.lax.scan(step, emissions[0], emissions[1:])[0])


def ordered_positive(name, means):
    value = flat(name, constraints.positive_ordered_vector, 2)
    numpyro.factor(f"{name}_prior", dist.Normal(jnp.array(means), 1).log_prob(value).sum())
    return value


def hmm(y):
    theta = [numpyro.sample(name, dist.Dirichlet(jnp.ones(2))) for name in ("theta1", "theta2")]
    mu = ordered_positive("mu", [3.0, 10.0])
    numpyro.factor("y", forward(jnp.stack(theta), dist.Normal(mu, 1).log_prob(y[:, None])))


def basketball(u, v, alpha):
    theta = [numpyro.sample(name, dist.Dirichlet(a)) for name, a in zip(("theta1", "theta2"), alpha, strict=True)]
    phi, rate = ordered_positive("phi", [0.0, 3.0]), ordered_positive("lambda", [0.0, 3.0])
    emissions = jnp.log(phi) - phi * u[:, None] + jnp.log(rate) - rate * v[:, None]
    numpyro.factor("uv", forward(jnp.stack(theta), emissions))


def populations(times, first, y):
    theta = positive("theta", 4)
    means, sds = jnp.array([1, 0.05, 1, 0.05]), jnp.array([0.5, 0.05, 0.5, 0.05])
    numpyro.factor("theta_prior", dist.Normal(means, sds).log_prob(theta).sum())
    start = numpyro.sample("z_init", dist.LogNormal(jnp.log(10.0), 1).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.LogNormal(-1, 1).expand([2]).to_event(1))

    def slope(z):
        return jnp.stack([(theta[0] - theta[1] * z[1]) * z[0], (-theta[2] + theta[3] * z[0]) * z[1]])

    def step(z, h):
        k1 = slope(z)
        k2 = slope(z + h / 2 * k1)
        k3 = slope(z + h / 2 * k2)
        z = z + h / 6 * (k1 + 2 * k2 + 2 * k3 + slope(z + h * k3))
        return z, z

    widths = np.repeat(np.diff(times, prepend=0.0), STEPS_A_YEAR) / STEPS_A_YEAR
    z = jax.lax.scan(step, start, widths)[1][STEPS_A_YEAR - 1 :: STEPS_A_YEAR]
    numpyro.sample("y_init", dist.LogNormal(jnp.log(start), sigma), obs=first)
    numpyro.sample("y", dist.LogNormal(jnp.log(z), sigma), obs=y)


KILPISJARVI = ("x", "y", "pmualpha", "psalpha", "pmubeta", "psbeta")
OTHERS = {
    "arK-arK": (autoregression, lambda d: (d["y"], int(d["K"]))),
    "bball_drive_event_0-hmm_drive_0": (basketball, lambda d: (d["u"], d["v"], d["alpha"])),
    "diamonds-diamonds": (diamonds, lambda d: (d["X"][:, 1:] - d["X"][:, 1:].mean(0), d["Y"])),
    "eight_schools-eight_schools_centered": (centered, lambda d: (d["y"], d["sigma"])),
    "eight_schools-eight_schools_noncentered": (noncentered, lambda d: (d["y"], d["sigma"])),
    "garch-garch11": (garch, lambda d: (d["y"], d["sigma1"])),
    "gp_pois_regr-gp_pois_regr": (gp_counts, lambda d: (d["x"], d["k"])),
    "gp_pois_regr-gp_regr": (gp_regression, lambda d: (d["x"], d["y"])),
    "hmm_example-hmm_example": (hmm, lambda d: (d["y"],)),
    "hudson_lynx_hare-lotka_volterra": (populations, lambda d: (d["ts"], d["y_init"], d["y"])),
    "kilpisjarvi_mod-kilpisjarvi": (kilpisjarvi, lambda d: tuple(d[k] for k in KILPISJARVI)),
    "low_dim_gauss_mix-low_dim_gauss_mix": (mixture, lambda d: (d["y"],)),
    "sblrc-blr": (blr, lambda d: (d["X"], d["y"])),
}
FAMILIES = {"earnings": earnings, "kidiq": scores, "mesquite": mesquite, "nes": election}


def model_and_arguments(name, data):
    """Return the model of a posterior and its arguments, from the data of the Stan program."""
    arrays = {key: np.asarray(value, dtype=float) for key, value in data.items()}
    if name in OTHERS:
        model, arguments = OTHERS[name]
        return model, arguments(arrays)
    return next(make for start, make in FAMILIES.items() if name.startswith(start))(name, arrays)


def processor_seconds():
    return sum(os.times()[:4])


def with_numpyro(model, arguments, seed):
    kernel = numpyro.infer.NUTS(model)
    mcmc = numpyro.infer.MCMC(
        kernel,
        num_warmup=WARMUP,
        num_samples=SAMPLES,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    begin = processor_seconds()
    mcmc.run(jax.random.PRNGKey(seed), *arguments, extra_fields=("num_steps", "diverging"))
    draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    seconds, extra = processor_seconds() - begin, mcmc.get_extra_fields()
    steps = float(extra["num_steps"].mean())
    found = {
        "building": 0.0,
        "compiling": 0.0,
        "sampling": seconds,
        "steps": steps,
        "gradients": float(extra["num_steps"].sum()),
        "divergences": float(extra["diverging"].sum()),
        "warnings": "",
    }
    return draws, found


def with_nutpie(model, arguments, seed):
    import nutpie
    from nutpie.compiled_pyfunc import from_pyfunc

    begin = processor_seconds()
    info = numpyro.infer.util.initialize_model(
        jax.random.PRNGKey(seed), model, model_args=arguments, dynamic_args=False
    )
    start, unravel = jax.flatten_util.ravel_pytree(info.param_info.z)
    value_and_grad = jax.jit(jax.value_and_grad(lambda u: -info.potential_fn(unravel(u))))
    building = processor_seconds() - begin
    jax.block_until_ready(value_and_grad(start))
    compiling = processor_seconds() - begin - building

    def make_logp():
        def logp(u):
            value, gradient = value_and_grad(u)
            return float(value), np.asarray(gradient, dtype=np.float64)

        return logp

    def make_expand(seed1, seed2, chain):
        return lambda u: {"u": np.asarray(u)}

    generators = np.random.default_rng(seed)

    def make_initial(seed):
        return np.random.default_rng(seed).uniform(-2.0, 2.0, len(start))

    compiled = from_pyfunc(
        len(start), make_logp, make_expand, [np.dtype("float64")], [(len(start),)], ["u"],
        make_initial_point_fn=make_initial,
    )  # fmt: skip
    trace = nutpie.sample(
        compiled, draws=SAMPLES, tune=WARMUP, chains=CHAINS, cores=1, seed=int(generators.integers(2**31)),
        progress_bar=False,
    )  # fmt: skip
    u = jnp.asarray(np.asarray(trace.posterior["u"]))
    draws = jax.vmap(jax.vmap(lambda one: info.postprocess_fn(unravel(one))))(u)
    draws = jax.block_until_ready(draws)
    sampling = processor_seconds() - begin - building - compiling
    stats = trace.sample_stats
    found = {
        "building": building,
        "compiling": compiling,
        "sampling": sampling,
        "steps": float(np.asarray(stats["n_steps"]).mean()),
        "gradients": float(np.asarray(stats["n_steps"]).sum()),
        "divergences": float(np.asarray(stats["diverging"]).sum()),
        "warnings": "",
    }
    return draws, found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--draw", required=True, help="name of the posterior")
    parser.add_argument("--sampler", choices=("NumPyro", "nutpie"), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", type=Path, required=True, help="where draws go")
    options = parser.parse_args()
    if options.sampler == "nutpie":
        import nutpie  # noqa: F401  (imports are not counted)
    data = json.loads((options.data / f"{options.draw}.json").read_text())["data"]
    model, arguments = model_and_arguments(options.draw, data)
    run = with_numpyro if options.sampler == "NumPyro" else with_nutpie
    draws, found = run(model, arguments, options.seed)
    np.savez(options.file, **{name: np.asarray(value) for name, value in draws.items()})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
