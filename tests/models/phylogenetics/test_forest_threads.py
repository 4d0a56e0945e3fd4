"""One likelihood of many topologies in several threads, after interruptions, and copied."""

import copy
import itertools
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from bayeskit.models.phylogenetics import HKY85, Alignment, ForestLikelihood, Topologies, all_topologies
from bayeskit.models.phylogenetics._pruning import _evaluation as forest_evaluation
from bayeskit.models.phylogenetics._pruning import _plan as forest_plan
from bayeskit.models.phylogenetics._pruning._plan import SubPatterns, make_plan

BOTH = [pytest.param(True, id="compiled", marks=pytest.mark.compiler), pytest.param(False, id="tensors")]
TAXA = "ABCDEFG"
PARTNER_SECONDS = 0.2


@pytest.fixture(params=BOTH)
def compiled(request) -> bool:
    return request.param


@pytest.fixture
def alignment() -> Alignment:
    picks = torch.randint(4, (len(TAXA), 60), generator=torch.Generator().manual_seed(0)).tolist()
    return Alignment.from_sequences(
        {taxon: "".join("ACGT"[base] for base in row) for taxon, row in zip(TAXA, picks, strict=True)}
    )


def problems(count: int, size: int) -> list[tuple[Topologies, torch.Tensor]]:
    """Topologies and branch lengths, the taxa in one of two orders."""
    generator = torch.Generator().manual_seed(1)
    every = (all_topologies(TAXA), all_topologies(TAXA[::-1]))
    found = []
    for number in range(count):
        picked = torch.randperm(len(every[0]), generator=generator)[:size].tolist()
        lengths = 0.01 + torch.rand(size, every[0].num_edges, generator=generator, dtype=torch.float64)
        found.append((every[number % 2][picked], lengths))
    return found


def interleaved(forest: ForestLikelihood, given: list, monkeypatch) -> list[torch.Tensor | Exception]:
    """Evaluate two problems in two threads, each of which waits for the other's plan if there can be one."""
    together = threading.Barrier(2)

    def plan_and_wait(topologies, patterns):
        plan = make_plan(topologies, patterns)
        try:
            together.wait(PARTNER_SECONDS)
        except threading.BrokenBarrierError:
            pass
        return plan

    def evaluate(topologies, lengths):
        try:
            return forest.log_likelihood(topologies, lengths)
        except IndexError as error:  # a row of another plan
            return error

    monkeypatch.setattr(forest_evaluation, "make_plan", plan_and_wait)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(evaluate, *zip(*given, strict=True)))


@pytest.mark.parametrize("locked", [True, False])
def test_a_plan_is_used_before_another_thread_makes_one(locked, alignment, monkeypatch):
    given = problems(3, 6)[::2]  # the same order of taxa
    expected = [ForestLikelihood(alignment, compile=False).log_likelihood(*one) for one in given]
    # There is room for a single topology at a time.
    forest = ForestLikelihood(alignment, compile=False, cache_bytes=0)
    forest.log_likelihood(*given[0])
    if not locked:
        forest._patterns[0].lock = nullcontext()
    found = interleaved(forest, given, monkeypatch)
    right = [
        isinstance(one, torch.Tensor) and torch.allclose(one, other, rtol=1e-13, atol=0)
        for one, other in zip(found, expected, strict=True)
    ]
    assert all(right) == locked


@pytest.mark.calibration
@pytest.mark.parametrize("cache_bytes", [0, 2**20])
def test_threads_get_what_one_thread_gets(cache_bytes, alignment, compiled):
    given = problems(32, 6)
    expected = [ForestLikelihood(alignment, compile=compiled).log_likelihood(*one) for one in given]
    forest = ForestLikelihood(alignment, compile=compiled, cache_bytes=cache_bytes)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(forest.log_likelihood, *zip(*given, strict=True)))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=0)


@pytest.mark.parametrize("cache_bytes", [0, 2**20])
@pytest.mark.parametrize("place", ["join_rows", "_store"])
def test_an_interruption_leaves_no_wrong_rows_behind(place, cache_bytes, alignment, compiled, monkeypatch):
    ((topologies, lengths),) = problems(1, 5)
    expected = ForestLikelihood(alignment, HKY85(2.0, [0.25] * 4), compile=compiled).log_likelihood(topologies, lengths)
    forest = ForestLikelihood(alignment, HKY85(2.0, [0.25] * 4), compile=compiled, cache_bytes=cache_bytes)
    forest.log_likelihood(topologies[:1], lengths[:1])
    holder = forest_plan if place == "join_rows" else SubPatterns
    original = getattr(holder, place)
    for allowed in (2, 0, 1):
        calls = itertools.count()

        def interrupted(*args, allowed=allowed, calls=calls):
            if next(calls) == allowed:
                raise KeyboardInterrupt
            return original(*args)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(holder, place, interrupted)
            forest.log_likelihood(topologies, lengths)
    for _ in range(2):
        torch.testing.assert_close(forest.log_likelihood(topologies, lengths), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))])
def test_copies_have_a_lock_of_their_own(duplicate, alignment):
    ((topologies, lengths),) = problems(1, 5)
    forest = ForestLikelihood(alignment)
    expected = forest.log_likelihood(topologies, lengths)
    with forest._patterns[0].lock:
        assert torch.equal(duplicate(forest).log_likelihood(topologies, lengths), expected)
        patterns = duplicate(forest._patterns[0])
        assert patterns.lock is not forest._patterns[0].lock and not patterns.lock.locked()
        slots = make_plan(topologies, patterns).slots
    assert (slots == make_plan(topologies, forest._patterns[0]).slots).all()
