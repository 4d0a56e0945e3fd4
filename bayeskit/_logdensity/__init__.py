"""Models as batched, compiled, temperable log densities over an unconstrained vector."""
