"""Time kernels of infinite width with neural-tangents; driven by `wide_kernels.py`, one line of JSON in, one out.

Input lines hold what to compute: the network ("dense" or "conv"), the number of hidden layers and of inputs, and the
precision, which is fixed by the first line. The first call of a task compiles and is timed apart. It needs
neural-tangents and imports nothing of bayeskit.
"""

import json
import os
import resource
import sys
import time

if "--one-thread" in sys.argv:  # has to be set before jax starts
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import numpy as np
from jax import numpy as jnp
from neural_tangents import stax

KERNELS = ("nngp", "ntk")
VARIANCES = {"W_std": 2.0**0.5, "b_std": 0.1}


def dense(num_hidden):
    """Return the kernel function of a network of dense layers."""
    layers = [layer for _ in range(num_hidden) for layer in (stax.Dense(1, **VARIANCES), stax.Relu())]
    return stax.serial(*layers, stax.Dense(1, **VARIANCES))[2]


def conv(num_hidden):
    """Return the kernel function of a network of convolutions that ends in an average over all pixels."""
    layers = [
        layer for _ in range(num_hidden) for layer in (stax.Conv(1, (3, 3), padding="SAME", **VARIANCES), stax.Relu())
    ]
    return stax.serial(*layers, stax.GlobalAvgPool(), stax.Dense(1, **VARIANCES))[2]


def inputs(task):
    """Return the same numbers as the other side's."""
    shape = (task["count"], 784) if task["network"] == "dense" else (task["count"], 8, 8, 1)
    numbers = np.random.default_rng(0).standard_normal(shape)
    return jnp.asarray(numbers, dtype=jnp.float64 if task["bits"] == 64 else jnp.float32)


def main():
    known = {}
    for line in sys.stdin:
        task = json.loads(line)
        jax.config.update("jax_enable_x64", task["bits"] == 64)
        key, compiling = json.dumps(task, sort_keys=True), 0.0
        if key not in known:
            known.clear()
            function = {"dense": dense, "conv": conv}[task["network"]](task["depth"])
            known[key] = jax.jit(lambda x, function=function: function(x, None, KERNELS)), inputs(task)
            begin = time.perf_counter()
            jax.block_until_ready(known[key][0](known[key][1]))
            compiling = time.perf_counter() - begin
        compiled, x = known[key]
        begin, cpu = time.perf_counter(), time.process_time()
        found = jax.block_until_ready(compiled(x))
        answer = {
            "compiling": compiling,
            "wall": time.perf_counter() - begin,
            "cpu": time.process_time() - cpu,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "nngp": float(found.nngp[0, 1]),
            "ntk": float(found.ntk[0, 1]),
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
