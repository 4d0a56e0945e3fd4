"""What passes between host and device, on a simulated device or a CUDA one.

    python benchmarks/device_transfers.py                  # a step of each kernel, and each public example
    python benchmarks/device_transfers.py --only samplers  # examples whose name contains a word
    python benchmarks/device_transfers.py --whole          # examples in full, with those of evidence estimators

Prints looks at values (each waits for the device) and copies to the device, per step of kernels and per example, and
whether all numbers and tensors of an example are those of the host. On CUDA, where torch counts nothing and streams
differ, it prints chain steps a second instead.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from device_examples import SHORTER, differences, elsewhere, public, run_example
from simulated_device import NAME, simulated_device, transfers

import bayeskit as bk
from bayeskit._core import randomness as randomness
from bayeskit.inference.samplers import (
    HMC,
    NUTS,
    SGHMC,
    SGLD,
    MinibatchTarget,
    PreconditionedSGLD,
)
from bayeskit.inference.samplers import (
    _nuts as nuts,
)

STEPS = 20


def targets(device):
    """Return a normal posterior of three dimensions, whole and by minibatches."""
    y = torch.linspace(-1.0, 2.0, 60, dtype=torch.float64, device=device)
    whole = bk.Target.from_functions(
        lambda u: -0.5 * u.square().sum(-1), lambda u: -0.5 * (u - 1).square().sum(-1), 3, device=device
    )
    part = MinibatchTarget.from_functions(
        lambda u: -0.5 * u.square().sum(),
        lambda u, rows: -0.5 * (y[rows] - u[0]).square(),
        3,
        60,
        batch_size=20,
        device=device,
    )
    return whole, part


def steps(device, num_chains):
    """Yield name, counts and seconds of some steps of each kernel, after a first one."""
    whole, part = targets(device)
    kernels = [(HMC(0.5), whole), (NUTS(0.5), whole)]
    kernels += [(kernel(0.01), part) for kernel in (SGLD, PreconditionedSGLD, SGHMC)]
    for kernel, target in kernels:
        generator = torch.Generator(device).manual_seed(1)
        position = torch.zeros(num_chains, 3, dtype=torch.float64, device=device)
        noise = {"generator": generator} if target is part else {}
        state = kernel.init(target, position, **noise)
        state, _ = kernel.step(target, state, generator=generator)
        begin = time.perf_counter()
        if device.type == NAME:
            with transfers() as count:
                for _ in range(STEPS):
                    state, _ = kernel.step(target, state, generator=generator)
        else:
            count = None
            for _ in range(STEPS):
                state, _ = kernel.step(target, state, generator=generator)
        float(state.position.sum())
        yield type(kernel).__name__, count, time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word in the names of examples")
    parser.add_argument("--steps", action="store_true", help="kernels only")
    parser.add_argument(
        "--whole", action="store_true", help="examples in full, with those of the estimators: many minutes"
    )
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        for name, _, seconds in steps(torch.device("cuda"), 10_000):
            print(f"{name:25s} {10_000 * STEPS / seconds:12.0f} chain steps a second on CUDA")
    device = simulated_device()
    print(f"{'kernel':25s} looks/step copies/step operators/step")
    for name, count, _ in steps(device, 4):
        print(f"{name:25s} {count.reads / STEPS:10.2f} {count.writes / STEPS:11.2f} {count.operations / STEPS:14.1f}")
    if given.steps:
        return
    nuts.LEAVES_PER_LOOK[NAME] = 1  # dead chains draw no numbers, as on the host
    randomness._host_generator = lambda generator: generator  # whose stream is the host's
    print(f"{'example':90s}  looks copies operators  runs  equal to the host")
    for name in public():
        run_with_others = name.startswith("bayeskit.inference.evidence.") and not given.whole
        if name in elsewhere() or run_with_others or given.only not in name:
            continue
        shorter = None if given.whole else SHORTER.get(name.removeprefix("bayeskit."))
        with transfers() as count, torch.random.fork_rng(devices=[]):
            problems, found = run_example(name, device, shorter)
        with torch.random.fork_rng(devices=[]):
            _, expected = run_example(name, torch.device("cpu"), shorter)
        equal = "-" if problems else ("no" if differences(expected, found) else "yes")
        counts = f"{count.reads:6d} {count.writes:6d} {count.operations:9d}"
        print(f"{name:90s} {counts} {'no' if problems else 'yes':>5s}  {equal}", flush=True)


if __name__ == "__main__":
    main()
