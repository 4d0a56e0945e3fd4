"""Sub-patterns of sets of taxa against brute force, the hanging of topologies, and tables that run full."""

import itertools

import numpy as np
import pytest

from bayeskit.models.phylogenetics import Tree
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._pruning._plan import (
    CODE_BASE,
    Renamings,
    Rows,
    SubPatterns,
    hang,
    join_rows,
    make_plan,
    tip_rows,
)
from bayeskit.models.phylogenetics._topologies import Topologies

RENAMINGS = list(itertools.permutations(range(4)))


def rename(mask: int, image: tuple[int, ...]) -> int:
    return sum(1 << image[base] for base in range(4) if mask >> base & 1)


def masks_for(num_taxa: int, num_patterns: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    # Mostly single bases, some ambiguity codes and gaps, and few enough patterns for many to be alike.
    return generator.choice([1, 2, 4, 8, 1, 2, 4, 5, 10, 7, 15], size=(num_taxa, num_patterns)).astype(np.uint8)


def random_topologies(num_taxa: int, count: int, seed: int = 0) -> Topologies:
    generator = np.random.default_rng(seed)
    trees = []
    for _ in range(count):
        parts = [f"t{number}" for number in range(num_taxa)]
        while len(parts) > 3:
            one, other = generator.choice(len(parts), 2, replace=False)
            joined = f"({parts[one]},{parts[other]})"
            parts = [part for place, part in enumerate(parts) if place not in (one, other)] + [joined]
        trees.append(Tree.from_newick(f"({','.join(parts)});"))
    return Topologies.from_trees(trees, [f"t{number}" for number in range(num_taxa)])


def sub_patterns(num_taxa: int, num_patterns: int, interchangeable: bool = True, num_bytes: int = 2**20) -> SubPatterns:
    taxa = [f"t{number}" for number in range(num_taxa)]
    return SubPatterns(
        taxa, masks_for(num_taxa, num_patterns), np.arange(1.0, num_patterns + 1), interchangeable, num_bytes
    )


def check_rows(columns: list[tuple[int, ...]], codes: np.ndarray, representatives: np.ndarray, images: list) -> None:
    """Rows must be the classes of columns under the renamings, and each code must make its column."""
    canonical = [min(tuple(rename(mask, image) for mask in column) for image in images) for column in columns]
    rows, renamings = np.divmod(codes, CODE_BASE)
    assert len(set(zip(rows.tolist(), canonical, strict=True))) == len(set(canonical)) == len(representatives)
    for column, row, renaming in zip(columns, rows.tolist(), renamings.tolist(), strict=True):
        shown = columns[representatives[row]]
        assert tuple(rename(mask, images[renaming]) for mask in shown) == column
    assert (rows[representatives] == np.arange(len(representatives))).all()


@pytest.mark.parametrize("interchangeable", [True, False])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3]])
def test_rows_are_the_classes_of_equal_sub_patterns(order, interchangeable):
    masks = masks_for(4, 150)
    group = Renamings.of(interchangeable)
    images = RENAMINGS if interchangeable else RENAMINGS[:1]
    rows = tip_rows(masks[order[0]], group)
    taxa = order[:1]
    for taxon in order[1:]:
        taxa = [*taxa, taxon]
        rows = join_rows(rows, tip_rows(masks[taxon], group), group)
        columns = [tuple(column) for column in masks[taxa].T.tolist()]
        check_rows(columns, rows.codes, rows.representatives, images)
        for representative, stabilizer in zip(rows.representatives, rows.stabilizers, strict=True):
            column = columns[representative]
            kept = [tuple(rename(mask, image) for mask in column) == column for image in images]
            assert sum(1 << number for number, same in enumerate(kept) if same) == group.stabilizers[stabilizer]


def test_two_joined_parts_share_one_renaming():
    # AC|CA and AC|AC: either part alone is alike, but no renaming serves both.
    masks = np.array([[1, 1], [2, 2], [2, 1], [1, 2]], dtype=np.uint8)
    group = Renamings.of(True)
    tips = [tip_rows(row, group) for row in masks]
    left, right = join_rows(tips[0], tips[1], group), join_rows(tips[2], tips[3], group)
    assert len(left.representatives) == len(right.representatives) == 1
    assert len(join_rows(left, right, group).representatives) == 2


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_rows_of_long_alignments_stay_apart(dtype):
    # The product of both counts, times the base of codes, leaves 32 bits: there, rows met by chance.
    count, group = 60_000, Renamings.of(False)
    one = Rows((np.arange(count) * CODE_BASE).astype(dtype), np.arange(count), np.zeros(count, dtype=np.int64))
    order = np.random.default_rng(0).permutation(count)
    other = Rows((order * CODE_BASE).astype(dtype), order.argsort(), np.zeros(count, dtype=np.int64))
    assert len(join_rows(one, other, group).representatives) == count


def test_stabilizers_are_the_fifteen_groups_of_partitions():
    group = Renamings.of(True)
    assert len(group.stabilizers) == 15
    sizes = sorted(bin(stabilizer).count("1") for stabilizer in group.stabilizers.tolist())
    assert sizes == [1, *[2] * 6, *[4] * 3, *[6] * 4, 24]
    singles = 1 << np.arange(24)
    assert (group.smallest(singles) == np.arange(24)).all()
    assert (group.smallest(singles | singles[-1]) == np.arange(24)).all()


@pytest.mark.parametrize("num_taxa", [3, 4, 5, 8, 27, 66])
def test_hung_topologies_list_what_is_below_first_and_hang_from_the_middle(num_taxa):
    topologies = random_topologies(num_taxa, 6)
    hanging = hang(topologies)
    splits = clades.below(topologies.children, num_taxa)[:, : topologies.num_edges]
    everything = clades.everything(num_taxa)
    for tree in range(6):
        known = {taxon: clades.single(num_taxa)[taxon] for taxon in range(num_taxa)}
        for edge, pair, taxa in zip(hanging.order[tree], hanging.factors[tree], hanging.sets[tree], strict=True):
            one, other = (known[below] for below in pair.tolist())
            assert not (one & other).any() and ((one | other) == taxa).all()
            assert (taxa == splits[tree, edge]).all() or (taxa == everything & ~splits[tree, edge]).all()
            known[int(edge)] = taxa
        sides = [known[edge] for edge in hanging.roots[tree].tolist()]
        assert sum(clades.size(side) for side in sides) == num_taxa
        assert (np.bitwise_or.reduce(sides) == everything).all()
        assert max(clades.size(side) for side in sides) <= max(1, num_taxa / 2)


@pytest.mark.parametrize("interchangeable", [True, False])
def test_found_slots_hold_the_rows_of_their_sets(interchangeable):
    patterns, topologies = sub_patterns(9, 40, interchangeable), random_topologies(9, 12)
    images = RENAMINGS if interchangeable else RENAMINGS[:1]
    for _ in range(2):
        plan = make_plan(topologies, patterns)
        for tree, position in itertools.product(range(12), range(6)):
            slot = plan.slots[tree, plan.hanging.order[tree, position]]
            taxa = clades.members(plan.hanging.sets[tree, position])
            columns = [tuple(column) for column in patterns.masks[taxa].T.tolist()]
            count = patterns.counts[slot]
            check_rows(columns, patterns.codes[slot], patterns.representatives[slot, :count], images)
            rows = patterns.codes[slot] // CODE_BASE
            assert (patterns.weights[slot, :count] == np.bincount(rows, np.arange(1.0, 41.0))).all()
        # Known sets are found again.
        assert patterns._next == 10 + len(np.unique(plan.hanging.sets.reshape(-1, 1), axis=0))


def test_full_tables_forget_what_was_used_longest_ago():
    patterns = sub_patterns(8, 30, num_bytes=0)
    assert patterns.capacity == 9 + 8 and patterns.num_topologies == 1
    topologies = random_topologies(8, 25)
    for tree in [*range(25), *range(24, -1, -1)]:
        slots, hanging = make_plan(topologies[tree], patterns)[2:0:-1]
        assert len(np.unique(slots)) == topologies.num_edges
        for edge, taxa in zip(hanging.order[0], hanging.sets[0], strict=True):
            slot = slots[0, edge]
            columns = [tuple(column) for column in patterns.masks[clades.members(taxa)].T.tolist()]
            shown = patterns.representatives[slot, : patterns.counts[slot]]
            check_rows(columns, patterns.codes[slot], shown, RENAMINGS)
    assert len(patterns._slot_of) == 8 and patterns._next == 17


@pytest.mark.parametrize("interchangeable", [True, False])
def test_rows_do_not_depend_on_the_parts_that_were_joined(interchangeable):
    # Sums over rows, such as gradients, are then the same to the last bit, whatever topologies came before.
    group = Renamings.of(interchangeable)
    one, other, last = (tip_rows(row, group) for row in masks_for(3, 300))
    expected = join_rows(join_rows(one, other, group), last, group)
    for found in (
        join_rows(join_rows(one, last, group), other, group),
        join_rows(last, join_rows(other, one, group), group),
    ):
        assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))
