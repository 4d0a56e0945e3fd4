"""Value and gradient of `ode_speed.py`'s first model by NumPyro and diffrax: one task in JSON a line, one line out."""

from __future__ import annotations

import time

import diffrax
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer.util import potential_energy
from peer_process import serve

jax.config.update("jax_enable_x64", True)
MAX_STEPS = 512  # of the 60 that are taken; more make diffrax slower


def predators(times, first, y, tolerance):
    scales, means = jnp.array([0.5, 0.05, 0.5, 0.05]), jnp.array([1.0, 0.05, 1.0, 0.05])
    prior = dist.HalfNormal(2 * means).to_event(1)
    theta = numpyro.sample("theta", prior)
    numpyro.factor("theta_prior", dist.Normal(means, scales).log_prob(theta).sum(-1) - prior.log_prob(theta))
    start = numpyro.sample("z_init", dist.LogNormal(jnp.log(10.0 * jnp.ones(2)), 1.0).to_event(1))
    sigma = numpyro.sample("sigma", dist.LogNormal(-jnp.ones(2), 1.0).to_event(1))

    def slope(t, z, theta):
        return jnp.stack([(theta[0] - theta[1] * z[1]) * z[0], (theta[3] * z[0] - theta[2]) * z[1]])

    z = diffrax.diffeqsolve(
        diffrax.ODETerm(slope),
        diffrax.Dopri5(),
        times[0],
        times[-1],
        None,
        start,
        theta,
        saveat=diffrax.SaveAt(ts=times[1:]),
        stepsize_controller=diffrax.PIDController(rtol=tolerance, atol=tolerance),
        max_steps=MAX_STEPS,
    ).ys
    numpyro.sample("y_init", dist.LogNormal(jnp.log(start), sigma).to_event(1), obs=first)
    numpyro.sample("y", dist.LogNormal(jnp.log(z), sigma).to_event(2), obs=y)


compiled = None


def answer(task):
    global compiled
    u, data = jnp.array(task["u"]), task["data"]
    begin = time.process_time()
    if compiled is None:
        args = jnp.array([0.0, *data["ts"]]), jnp.array(data["y_init"]), jnp.array(data["y"]), task["tolerance"]

        def log_density(u):
            return -potential_energy(predators, args, {}, {"theta": u[:4], "z_init": u[4:6], "sigma": u[6:]})

        compiled = jax.jit(jax.vmap(jax.value_and_grad(log_density)))
    for _ in range(task["calls"]):
        value, gradient = jax.block_until_ready(compiled(u))
    seconds = (time.process_time() - begin) / task["calls"]
    return {"per_call": seconds, "value": value.tolist(), "gradient": gradient.tolist()}


serve(f"diffrax {diffrax.__version__}", answer)
