"""Minibatch variational inference on several devices: one process each, gradients averaged by PyTorch.

Start the processes with ``torchrun --nproc-per-node N script.py``; without ``torchrun``, the script is one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import pyro
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bayeskit._core.inputs import warn_user
from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import SettingsError, SlowModelWarning, WorkerError

__all__ = ["Ranks", "global_stream", "process_group"]


@dataclass(frozen=True)
class Ranks:
    """Rank of a process in a group of processes that train together.

    Attributes
    ----------
    rank : int
        From 0 to ``world_size - 1``.
    world_size : int
        Number of processes.
    device : torch.device
        Device of its computations.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.distributed import Ranks
    >>> shares = [Ranks(rank, 2).minibatches(6, 4, seed=0) for rank in (0, 1)]
    >>> [len(batch) for batch in shares[0]]
    [2]
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise SettingsError(f"rank must lie in [0, world_size), not {self.rank} of {self.world_size}")

    def minibatches(self, num_data: int, batch_size: int, *, seed: int, epoch: int = 0) -> Iterator[Tensor]:
        """Yield this process's share of each minibatch of one epoch: indices of shape ``(batch_size / world_size,)``.

        All processes shuffle alike and take disjoint shares, so that together they see the minibatches that one
        process alone would see. Items that do not fill a last minibatch are left out of this epoch.

        Parameters
        ----------
        num_data : int
        batch_size : int
            Total size over all processes; a multiple of ``world_size``.
        seed, epoch : int

        Raises
        ------
        SettingsError
            If ``batch_size`` is no multiple of ``world_size`` or above ``num_data``.
        """
        if batch_size < 1 or batch_size % self.world_size or batch_size > num_data:
            raise SettingsError(
                f"batch_size must be a multiple of the {self.world_size} processes and at most the {num_data} items, "
                f"not {batch_size}"
            )
        order = torch.randperm(num_data, generator=new_generator(seed, stream=f"minibatches {epoch}"))
        return self._shares(order, batch_size)

    def _shares(self, order: Tensor, batch_size: int) -> Iterator[Tensor]:
        for start in range(0, len(order) - batch_size + 1, batch_size):
            yield order[start + self.rank : start + batch_size : self.world_size].to(self.device)

    def generator(self, seed: int, *, shared: bool) -> torch.Generator:
        """Return the generator of this process's draws from the guide, to be used in ``with global_stream(generator)``.

        Parameters
        ----------
        seed : int
        shared : bool
            True if latent variables are global: all processes then make the same draws as one process would. False
            if they are local to the data, so that each process needs draws of its own.
        """
        stream = "guide" if shared else f"guide of rank {self.rank} of {self.world_size}"
        return new_generator(seed, stream=stream)

    def wrap(self, objective: torch.nn.Module) -> torch.nn.Module:
        """Return ``objective`` wrapped so that its gradients are averaged over the processes.

        All processes receive the parameters and buffers of rank 0.

        Parameters
        ----------
        objective : Module
            Module whose forward pass returns the loss of a minibatch, such as
            ``pyro.infer.Trace_ELBO()(model, guide)``. Its plates have to scale a minibatch up to the whole data, so
            that the mean over processes estimates the same loss.

        Raises
        ------
        SettingsError
            If ``objective`` has no parameters yet; a guide creates its parameters in its first call.
        """
        if not any(p.requires_grad for p in objective.parameters()):
            raise SettingsError(
                "the objective has no parameters to train yet; call it once on a minibatch, so that the guide makes "
                "them, and set pyro.settings.set(module_local_params=True), as process_group() does"
            )
        if self.world_size == 1:
            return objective
        devices = None if self.device.type == "cpu" else [self.device]
        return DistributedDataParallel(objective, device_ids=devices)

    def same_everywhere(self, module: torch.nn.Module) -> bool:
        """Tell whether all processes have bitwise equal parameters; every process has to call it."""
        if self.world_size == 1:
            return True
        same = torch.ones((), dtype=torch.int32, device=self.device)
        for parameter in module.parameters():
            bits = parameter.detach().reshape(-1).view(torch.uint8)
            first = bits.clone()
            dist.broadcast(first, src=0)
            same *= (first == bits).all()
        dist.all_reduce(same, dist.ReduceOp.MIN)
        return bool(same)


@contextmanager
def process_group(backend: str | None = None, timeout: float = 300.0) -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` started, or run as a single process without it.

    Inside, Pyro's modules store their parameters locally instead of in the global store, as data-parallel training
    needs; the setting is restored afterwards.

    Parameters
    ----------
    backend : str, optional
        By default "nccl" if each process of this machine has a CUDA device of its own, else "gloo", on the CPU.
    timeout : float, default 300
        Seconds to wait for the other processes.

    Yields
    ------
    Ranks

    Raises
    ------
    WorkerError
        If the other processes do not join in time.

    Warns
    -----
    SlowModelWarning
        If this machine has CUDA devices, but fewer devices than processes.

    Examples
    --------
    >>> from bayeskit.distributed import process_group
    >>> with process_group() as ranks:
    ...     ranks.world_size
    1
    """
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    cards, here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda = cards >= here and backend != "gloo"
    if 0 < cards < here and backend != "gloo":
        warn_user(
            f"{here} processes share {cards} CUDA device{'s' if cards > 1 else ''}, so all of them compute on the CPU; "
            f"start at most {cards} on each machine, or pass backend='gloo'",
            SlowModelWarning,
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    with pyro.settings.context(module_local_params=True):
        if world_size == 1:
            yield Ranks(device=device)
            return
        try:
            dist.init_process_group(backend or ("nccl" if cuda else "gloo"), timeout=timedelta(seconds=timeout))
        except (dist.DistError, ValueError, RuntimeError) as error:
            raise WorkerError(
                f"rank {rank} could not join the {world_size} processes: {error}; start the script by "
                "torchrun --nproc-per-node N, which sets the addresses of the processes"
            ) from error
        try:
            yield Ranks(rank, world_size, device)
        finally:
            dist.destroy_process_group()
