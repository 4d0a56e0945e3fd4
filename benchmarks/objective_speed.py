"""One training step of a variational autoencoder 784-200-50, batch 100, beside Pyro's objectives and torch by hand.

Prints medians of interleaved rounds, validation off, one thread; then how time and memory grow with the number of
particles, with and without chunks.

    python benchmarks/objective_speed.py [--particles 64] [--rounds 15] [--growth 1 8 64 512]
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceMeanField_ELBO
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from bayeskit.inference.objectives import ELBO, IWAE

BATCH = 100
Step = Callable[[Tensor], float]


class Autoencoder(nn.Module):
    """One hidden layer of 200 tanh units on either side of 50 latent coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 200), nn.Tanh())
        self.location, self.log_scale = nn.Linear(200, 50), nn.Linear(200, 50)
        self.decoder = nn.Sequential(nn.Linear(50, 200), nn.Tanh(), nn.Linear(200, 784))

    def model(self, x: Tensor) -> None:
        """Draw a standard normal code and Bernoulli pixels."""
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(50), x.new_ones(50)).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)

    def guide(self, x: Tensor) -> None:
        """Diagonal normal code."""
        pyro.module("encoder", self.encoder)
        pyro.module("location", self.location)
        pyro.module("log_scale", self.log_scale)
        with pyro.plate("data", len(x)):
            hidden = self.encoder(x)
            scale = self.log_scale(hidden).exp()
            pyro.sample("z", dist.Normal(self.location(hidden), scale).to_event(1))


def images(count: int = 1000) -> Tensor:
    """Binary noise with about the density of ink of handwritten digits; values do not change the work."""
    return torch.bernoulli(torch.full((count, 784), 0.13), generator=torch.Generator().manual_seed(0))


def fresh() -> Autoencoder:
    """Return the same start for everybody."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Autoencoder()


def by_svi(objective: object) -> Step:
    """Return a step of Pyro's SVI with Pyro's Adam."""
    net = fresh()
    return SVI(net.model, net.guide, pyro.optim.Adam({"lr": 1e-3}), objective).step  # type: ignore[no-any-return]


def by_torch(loss: Callable[[Autoencoder, Tensor], Tensor], fused: bool) -> Step:
    """Return a step with torch's Adam."""
    net = fresh()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, fused=fused)

    def step(x: Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        value = loss(net, x)
        value.backward()
        optimizer.step()
        return float(value.detach())

    return step


def ours(objective: ELBO | IWAE, fused: bool = True) -> Step:
    """Return a step on our objective as bk.fit takes it."""
    return by_torch(lambda net, x: objective.differentiable_loss(net.model, net.guide, x), fused)


def by_hand(num_particles: int, fused: bool = True) -> Step:
    """Return a step on the importance-weighted bound without any library."""

    def loss(net: Autoencoder, x: Tensor) -> Tensor:
        hidden = net.encoder(x)
        location, log_scale = net.location(hidden), net.log_scale(hidden)
        noise = torch.randn(num_particles, *location.shape)
        z = location + log_scale.exp() * noise
        log_prior = -0.5 * (z.square() + math.log(2 * math.pi)).sum(-1)
        log_guide = -0.5 * (noise.square() + math.log(2 * math.pi)).sum(-1) - log_scale.sum(-1)
        logits = net.decoder(z)
        log_pixels = -binary_cross_entropy_with_logits(logits, x.expand_as(logits), reduction="none").sum(-1)
        log_weight = log_prior + log_pixels - log_guide
        return -(log_weight.logsumexp(0) - math.log(num_particles)).sum()

    return by_torch(loss, fused)


def contestants(count: int) -> dict[str, tuple[int, Callable[[], Step]]]:
    """Return the particles of every contestant, and what makes its step."""
    many = {"num_particles": count, "vectorize_particles": True, "max_plate_nesting": 1}
    bound, single = IWAE(count, max_plate_nesting=1), ELBO(max_plate_nesting=1)
    return {
        "Pyro RenyiELBO(alpha=0), SVI": (count, lambda: by_svi(RenyiELBO(alpha=0.0, **many))),
        "torch by hand, many particles": (count, lambda: by_hand(count)),
        "IWAE, SVI": (count, lambda: by_svi(bound)),
        "IWAE, fused Adam": (count, lambda: ours(bound)),
        "Pyro Trace_ELBO, SVI": (1, lambda: by_svi(Trace_ELBO(max_plate_nesting=1))),
        "Pyro TraceMeanField_ELBO, SVI": (1, lambda: by_svi(TraceMeanField_ELBO(max_plate_nesting=1))),
        "torch by hand": (1, lambda: by_hand(1)),
        "ELBO, SVI": (1, lambda: by_svi(single)),
        "ELBO, torch's plain Adam": (1, lambda: ours(single, fused=False)),
        "ELBO, fused Adam": (1, lambda: ours(single)),
    }


def answer(step: Step, repeats: int) -> None:
    """Print milliseconds of CPU a step for every line that comes in."""
    data = images()
    step(data[:BATCH])
    for turn, _ in enumerate(sys.stdin):
        begin = time.process_time()
        for i in range(repeats):
            start = (repeats * turn + i) * BATCH % (len(data) - BATCH)
            step(data[start : start + BATCH])
        print((time.process_time() - begin) / repeats * 1e3, flush=True)


def medians(names: list[str], particles: int, rounds: int) -> dict[str, float]:
    """Return milliseconds a step, every contestant once in every round.

    Each has a process of its own: in one process they would meet the memory that the one before left behind, which
    moves the larger steps by a factor of two.
    """
    processes = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--particles", str(particles), "--contestant", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    }
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, process in processes.items():
            assert process.stdin is not None and process.stdout is not None
            print(file=process.stdin, flush=True)
            times[name].append(float(process.stdout.readline()))
    for process in processes.values():
        process.communicate()
    return {name: statistics.median(t) for name, t in times.items()}


def report(title: str, found: dict[str, float], pairs: list[tuple[str, str]]) -> None:
    """Print milliseconds and ratios."""
    print(f"\n{title}")
    for name, value in found.items():
        print(f"  {name:42s} {value:9.2f} ms")
    for peer, mine in pairs:
        print(f"  {mine} is {found[peer] / found[mine]:.2f}x as fast as {peer}")


def grow(num_particles: int, chunk: int | None) -> None:
    """Print milliseconds a step and the peak of memory of this process."""
    step, data = ours(IWAE(num_particles, max_plate_nesting=1, chunk_size=chunk)), images()
    step(data[:BATCH])
    begin = time.process_time()
    for i in range(3):
        step(data[i * BATCH : (i + 1) * BATCH])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{(time.process_time() - begin) / 3 * 1e3:.1f} {peak:.0f}")


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--particles", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--growth", type=int, nargs="*", default=[1, 8, 64, 512])
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    known = contestants(options.particles)
    if options.one:
        grow(options.one[0], options.one[1] or None)
        return
    if options.contestant:
        particles, make = known[options.contestant]
        answer(make(), 3 if particles > 1 else 10)
        return
    many = [name for name, (particles, _) in known.items() if particles > 1]
    found = medians(many, options.particles, options.rounds)
    pairs = [(peer, mine) for peer in many[:2] for mine in many[2:]]
    report(f"{options.particles} particles", found, pairs)
    single = [name for name, (particles, _) in known.items() if particles == 1]
    found = medians(single, options.particles, 4 * options.rounds)
    report("one particle", found, [(peer, mine) for peer in single[:3] for mine in single[3:]])
    print("\nparticles  chunk        ms   peak MiB")
    for particles in options.growth:
        for chunk in (0, 8):
            if chunk and particles <= chunk:
                continue
            command = [sys.executable, __file__, "--one", str(particles), str(chunk)]
            milliseconds, peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            print(f"{particles:9d}  {chunk or '-':>5}  {milliseconds:>8}  {peak:>9}")


if __name__ == "__main__":
    main()
