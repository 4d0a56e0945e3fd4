"""The hinge: any model as a batched, compiled, temperable log density over an unconstrained vector."""
