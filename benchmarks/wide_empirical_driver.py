"""Compute one empirical neural tangent kernel with one library; a program that `wide_empirical.py` runs.

Usage: python benchmarks/wide_empirical_driver.py LIBRARY OUTPUTS INPUTS CLASSES BITS REPEATS

The network is 784-512-512-CLASSES with ReLU; all libraries get the same weights and inputs. Prints one line of JSON.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Layers = list[tuple[np.ndarray, np.ndarray]]


def make(num_inputs: int, num_classes: int, bits: int) -> tuple[Layers, np.ndarray]:
    """Return weights ``(entering, leaving)`` and biases of each layer, and inputs."""
    generator, dtype = np.random.default_rng(0), np.float64 if bits == 64 else np.float32
    sizes = (784, 512, 512, num_classes)
    layers = [
        (
            (generator.standard_normal((a, b)) * (2 / a) ** 0.5).astype(dtype),
            (0.1 * generator.standard_normal(b)).astype(dtype),
        )
        for a, b in zip(sizes, sizes[1:], strict=False)
    ]
    return layers, generator.standard_normal((num_inputs, 784)).astype(dtype)


def torch_network(layers: Layers) -> Any:
    import torch

    modules: list[Any] = []
    for weight, bias in layers:
        dense = torch.nn.Linear(*weight.shape, dtype=torch.from_numpy(weight).dtype)
        with torch.no_grad():
            dense.weight.copy_(torch.from_numpy(weight).T)
            dense.bias.copy_(torch.from_numpy(bias))
        modules += [dense, torch.nn.ReLU()]
    return torch.nn.Sequential(*modules[:-1])


def bayeskit(layers: Layers, x: np.ndarray, outputs: Any) -> Callable[[], Any]:
    import torch

    from bayeskit.models.wide_networks._empirical_kernels import empirical_ntk

    network, data = torch_network(layers), torch.from_numpy(x)
    return lambda: empirical_ntk(network, data, outputs=outputs)


def neural_tangents(layers: Layers, x: np.ndarray, outputs: str) -> Callable[[], Any]:
    import jax

    jax.config.update("jax_enable_x64", x.dtype == np.float64)
    import neural_tangents as nt

    def network(parameters: Any, data: Any) -> Any:
        for weight, bias in parameters[:-1]:
            data = jax.nn.relu(data @ weight + bias)
        return data @ parameters[-1][0] + parameters[-1][1]

    axes = {"full": {"trace_axes": ()}, "trace": {"trace_axes": (-1,)}}
    kernel = nt.empirical_ntk_fn(
        network,
        vmap_axes=0,
        implementation=nt.NtkImplementation.STRUCTURED_DERIVATIVES,
        **axes.get(outputs, {"trace_axes": (), "diagonal_axes": (-1,)}),
    )
    compiled, data, parameters = (
        jax.jit(kernel),
        jax.numpy.asarray(x),
        jax.tree_util.tree_map(jax.numpy.asarray, layers),
    )
    return lambda: jax.block_until_ready(compiled(data, None, parameters))


def nngeometry(layers: Layers, x: np.ndarray, outputs: str) -> Callable[[], Any]:
    """Return all outputs, the only kernel that nngeometry has."""
    import torch
    from nngeometry.gram import GramMatrix
    from nngeometry.object import FMatDense
    from torch.utils.data import DataLoader, TensorDataset

    network, data = torch_network(layers), torch.from_numpy(x)
    loader = DataLoader(TensorDataset(data, torch.zeros(len(x))), batch_size=len(x))

    def call() -> Any:
        gram = GramMatrix(
            model=network, loader=loader, function=lambda *batch: network(batch[0]), representation=FMatDense
        )
        return gram.to_torch().detach().permute(1, 3, 0, 2)

    return call


def checks(result: np.ndarray) -> list[float]:
    """Return two numbers by which results of two libraries are compared."""
    result = result.astype(np.float64)
    return [float(np.sqrt((result**2).sum())), float(result[0, -1].sum())]


def main() -> None:
    library, outputs = sys.argv[1:3]
    num_inputs, num_classes, bits, repeats = map(int, sys.argv[3:])
    layers, x = make(num_inputs, num_classes, bits)
    libraries = {"bayeskit": bayeskit, "neural-tangents": neural_tangents, "nngeometry": nngeometry}
    call = libraries[library](layers, x, outputs)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    result = np.asarray(call())
    first = time.perf_counter() - start
    wall, process = [], []
    for _ in range(repeats):
        a, b = time.perf_counter(), time.process_time()
        call()
        wall.append(time.perf_counter() - a)
        process.append(time.process_time() - b)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        json.dumps(
            {
                "first": first,
                "wall": statistics.median(wall),
                "process": statistics.median(process),
                "megabytes": (after - before) / 1024,
                "checks": checks(result),
            }
        )
    )


if __name__ == "__main__":
    main()
