"""The No-U-Turn sampler: the kernel, and the moves of trajectories that grow by doubling."""

from bayeskit.inference.samplers.nuts.kernel import NUTS, NUTSInfo

__all__ = ["NUTS", "NUTSInfo"]
