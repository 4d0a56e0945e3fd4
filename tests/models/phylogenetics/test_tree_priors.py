"""Yule, birth-death and coalescent densities: their integrals, draws and forms in other variables."""

import itertools
import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch

from bayeskit.errors import SettingsError
from bayeskit.models.phylogenetics import (
    BirthDeathTree,
    ConstantCoalescent,
    DatedTopology,
    YuleTree,
    all_topologies,
)
from bayeskit.models.phylogenetics._tree_priors import CoalescentHeights, log_topology_probability

PARAMETERS = {
    "birth_rate": 1.3,
    "net_diversification": 0.8,
    "relative_extinction": 0.6,
    "population_size": 0.7,
}
VALUES = {name: torch.tensor(value, dtype=torch.float64) for name, value in PARAMETERS.items()}
ROOT = dist.LogNormal(torch.tensor(0.2), torch.tensor(0.3))
PRIORS = {
    "Yule": YuleTree(),
    "Yule, half of the species": YuleTree(sampling_fraction=0.5),
    "birth-death": BirthDeathTree(),
    "birth-death, a fifth of the species": BirthDeathTree(sampling_fraction=0.2),
    "birth-death, root": BirthDeathTree(sampling_fraction=0.2, root_height=ROOT),
    "coalescent": ConstantCoalescent(),
}
TIPS = {"A": 0.0, "B": 0.4, "C": 0.9, "D": 0.25}


def every_topology(taxa, **settings):
    return [DatedTopology.of(one, **settings) for one in all_topologies(taxa, rooted=True)]


def rankings(dated):
    """Return the orders of the internal nodes in which children come before parents."""
    n = dated.num_taxa
    orders = itertools.permutations(range(n - 1))
    below = [[child - n for child in pair if child >= n] for pair in dated.children.tolist()]
    return [
        order
        for order in orders
        if all(order.index(child) < order.index(node) for node in range(n - 1) for child in below[node])
    ]


@pytest.mark.calibration
@pytest.mark.parametrize("name", PRIORS)
@pytest.mark.parametrize("taxa", ["ABC", "ABCD"])
def test_densities_over_all_histories_integrate_to_one(name, taxa):
    # Within a ranking the density is smooth in the times between nodes, here on (0, 1) by w / (1 + w).
    nodes, weights = np.polynomial.legendre.leggauss(40)
    x, weights = torch.as_tensor(0.5 * (nodes + 1)), torch.as_tensor(0.5 * weights)
    dim = len(taxa) - 1
    waits = torch.stack(torch.meshgrid(*[x / (1 - x)] * dim, indexing="ij"), -1)
    measure = torch.stack(torch.meshgrid(*[weights / (1 - x) ** 2] * dim, indexing="ij"), -1).prod(-1)
    total, histories = 0.0, 0
    for dated in every_topology(taxa):
        integral = 0.0
        for order in rankings(dated):
            heights = torch.empty_like(waits)
            heights[..., list(order)] = waits.cumsum(-1)
            integral += float((PRIORS[name].heights(dated, VALUES).log_prob(heights).exp() * measure).sum())
            histories += 1
        assert integral == pytest.approx(1.0, abs=2e-5)  # the error of quadrature
        total += math.exp(log_topology_probability(dated)) * integral
    assert histories == {"ABC": 3, "ABCD": 18}[taxa]
    assert total == pytest.approx(1.0, abs=2e-5)


def quadrature_of_three(dated, function):
    """Integrate over heights of three dated tips, by Gauss-Legendre rules between the dates."""
    nodes, weights = np.polynomial.legendre.leggauss(30)
    low, old = dated.lower_bounds.tolist()
    further = np.array([0.0, 0.6, 1.6, 3.1, 6.1, 11.1, 19.1, 31.1])

    def rule(edges):
        widths = np.diff(edges)[:, None]
        x, w = edges[:-1, None] + widths * 0.5 * (nodes + 1), widths * 0.5 * weights
        return torch.as_tensor(x.ravel()), torch.as_tensor(w.ravel())

    # The lower node, then the root above both the node and the oldest tip.
    lower, w = rule(np.unique([low, *(height for height in TIPS.values() if low < height < old), *(old + further)]))
    above, v = rule(further)
    root = lower.clamp(min=old)[:, None] + above
    heights = torch.stack(torch.broadcast_tensors(lower[:, None], root), -1)
    return float((function(heights) * w[:, None] * v).sum())


def test_the_coalescent_of_dated_tips_integrates_to_one():
    # Both parts separately: the density given that siblings are joined, and that of the coalescent over topologies.
    total = 0.0
    for dated in every_topology("ABC", tip_heights={taxon: TIPS[taxon] for taxon in "ABC"}):
        heights = ConstantCoalescent().heights(dated, VALUES)
        inside = quadrature_of_three(dated, lambda h, of=heights: of.log_prob(h).exp())
        assert inside == pytest.approx(1.0, abs=1e-9)
        total += quadrature_of_three(dated, lambda h, of=heights: (of.log_prob(h) + of.log_topology(h)).exp())
    assert total == pytest.approx(1.0, abs=1e-9)


def test_mutation_a_wrong_number_of_pairs_is_noticed(monkeypatch):
    true = CoalescentHeights._coalescences

    def wrong(self, value):
        found = true(self, value)
        return found._replace(pairs=found.pairs + 1.0)

    monkeypatch.setattr(CoalescentHeights, "_coalescences", wrong)
    with pytest.raises(AssertionError):
        test_the_coalescent_of_dated_tips_integrates_to_one()
    with pytest.raises(AssertionError):
        test_densities_over_all_histories_integrate_to_one("coalescent", "ABC")


def test_the_two_parts_of_the_coalescent_add_up():
    dated = DatedTopology.of("((A,B),(C,D));", tip_heights=TIPS)
    size = VALUES["population_size"]
    coalescent = CoalescentHeights(dated, size)
    for heights in ([0.5, 1.0, 2.0], [1.2, 0.95, 2.0], [0.41, 3.0, 3.5]):
        tips, size_ = list(TIPS.values()), PARAMETERS["population_size"]
        events, lineages, now, expected = sorted([*tips, *heights]), 0, 0.0, 0.0
        for time in events:
            expected -= lineages * (lineages - 1) / 2 * (time - now) / size_
            if time in heights:
                lineages, expected = lineages - 1, expected - math.log(size_)
            else:
                lineages += 1
            now = time
        ours = torch.tensor([heights[i] for i in node_order(dated, ("A|B", "C|D", "A|B|C|D"))], dtype=torch.float64)
        found = coalescent.log_prob(ours) + coalescent.log_topology(ours)
        assert float(found) == pytest.approx(expected, abs=1e-12)


def node_order(dated, names):
    return [names.index(name) for name in dated.node_names]


def test_yule_and_birth_death_without_deaths_agree():
    dated, generator = DatedTopology.of("((A,B),(C,D));"), torch.Generator().manual_seed(0)
    x = torch.rand(10, 3, generator=generator, dtype=torch.float64).sort(-1)[0]
    rate = torch.tensor(1.3, dtype=torch.float64)
    few = {"net_diversification": rate, "relative_extinction": torch.tensor(1e-15, dtype=torch.float64)}
    for fraction in (1.0, 0.3):
        one = YuleTree(sampling_fraction=fraction).heights(dated, {"birth_rate": rate})
        other = BirthDeathTree(sampling_fraction=fraction).heights(dated, few)
        torch.testing.assert_close(one.log_prob(x), other.log_prob(x), rtol=1e-12, atol=1e-12)


DRAWN = {name: ("(((A,B),(C,D)),(E,F));", {}) for name in PRIORS} | {
    "dated coalescent": ("((A,B),(C,D));", {"tip_heights": TIPS})
}


@pytest.mark.parametrize("name", DRAWN)
def test_draws_follow_the_density(name, limit):
    # Averages over draws of p'/p are one for every density p', here that of other parameters, which has thinner tails.
    text, settings = DRAWN[name]
    dated, prior = DatedTopology.of(text, **settings), PRIORS.get(name, ConstantCoalescent())
    count, factor = 20_000, {"population_size": 0.8}
    with torch.random.fork_rng():
        torch.random.manual_seed(5)
        draws = prior.heights(dated, VALUES).sample((count,))
    assert prior.heights(dated, VALUES).support.check(draws).all()
    for changed in VALUES:
        if changed not in prior.parameters:
            continue
        values = VALUES | {changed: VALUES[changed] * factor.get(changed, 1.2)}
        logs = prior.heights(dated, values).log_prob(draws) - prior.heights(dated, VALUES).log_prob(draws)
        ratio = logs.exp()
        assert abs(float((ratio.mean() - 1) / (ratio.std() / count**0.5))) < limit(10)


@pytest.mark.parametrize("name", PRIORS)
def test_ranked_histories_are_equally_likely(name, limit):
    dated, count = DatedTopology.of("(((A,B),(C,D)),(E,F));"), 20_000
    with torch.random.fork_rng():
        torch.random.manual_seed(6)
        draws = PRIORS[name].heights(dated, VALUES).sample((count,))
    orders = rankings(dated)
    found = {tuple(order): 0 for order in orders}
    for row in draws.argsort(-1).tolist():
        found[tuple(row)] += 1
    share = 1 / len(orders)
    error = (count * share * (1 - share)) ** 0.5
    assert len(orders) == 8 and max(abs(n - count * share) / error for n in found.values()) < limit(8)


def test_draws_of_dated_tips_against_the_plain_coalescent(limit):
    # Random pairs of lineages coalesce; among histories with our topology, heights are those of weighted draws.
    taxa, n = "ABC", 3
    dated = DatedTopology.of("((A,B),C);", tip_heights={taxon: TIPS[taxon] for taxon in taxa})
    rng, size, ours = np.random.default_rng(7), PARAMETERS["population_size"], []
    total = 20_000
    for _ in range(total):
        arrivals = sorted((TIPS[taxon], taxon) for taxon in taxa)
        now, lineages, nodes = 0.0, [], []
        while len(nodes) < n - 1:
            pairs = len(lineages) * (len(lineages) - 1) / 2
            then = now + rng.exponential(size / pairs) if pairs else math.inf
            if arrivals and arrivals[0][0] <= then:
                now, taxon = arrivals.pop(0)
                lineages.append(taxon)
                continue
            one, other = rng.choice(len(lineages), 2, replace=False)
            joined = "".join(sorted(lineages[one] + lineages[other]))
            lineages = [x for i, x in enumerate(lineages) if i not in (one, other)] + [joined]
            now = then
            nodes.append((joined, now))
        if nodes[0][0] == "AB":
            ours.append([height for _, height in nodes])
    plain = torch.tensor(ours, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.random.manual_seed(8)
        coalescent = CoalescentHeights(dated, VALUES["population_size"])
        draws = coalescent.sample((total,))
    weights = coalescent.log_topology(draws).exp()
    assert (weights <= 1).all()
    share = len(plain) / total
    z = (weights.mean() - share) / math.hypot(weights.std() / total**0.5, (share * (1 - share) / total) ** 0.5)
    assert abs(float(z)) < limit(3)
    mean = (weights[:, None] * draws).mean(0) / weights.mean()
    error = (weights[:, None] * (draws - mean)).std(0) / total**0.5 / weights.mean()
    z = (mean - plain.mean(0)) / torch.hypot(error, plain.std(0) / len(plain) ** 0.5)
    assert z.abs().max() < limit(3)


@pytest.mark.parametrize("name", PRIORS)
def test_batches_of_parameters(name):
    dated, prior = DatedTopology.of("((A,B),(C,D));"), PRIORS[name]
    batch = {key: torch.stack([value, 0.9 * value]) for key, value in VALUES.items()}
    heights = torch.tensor([0.3, 0.5, 0.9], dtype=torch.float64)
    found = prior.heights(dated, batch).log_prob(heights)
    each = [prior.heights(dated, {k: v[i] for k, v in batch.items()}).log_prob(heights) for i in range(2)]
    torch.testing.assert_close(found, torch.stack(each), rtol=1e-13, atol=1e-13)
    expanded = prior.heights(dated, VALUES).expand((2,))
    assert expanded.sample((3,)).shape == (3, 2, 3) and expanded.log_prob(heights).shape == (2,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: YuleTree(-1.0), "birth_rate: -1.0 does not lie above 0"),
        (lambda: BirthDeathTree(1.0, 1.0), "relative_extinction: 1.0 does not lie between 0 and 1"),
        (lambda: ConstantCoalescent(float("inf")), "population_size"),
        (lambda: YuleTree(sampling_fraction=0.0), "sampling_fraction: 0 is not a probability above 0"),
        (lambda: BirthDeathTree(sampling_fraction=1.5), "sampling_fraction: 1.5"),
        (lambda: YuleTree(sampling_fraction="half"), "sampling_fraction must be a number"),
        (lambda: YuleTree(root_height=60.0), "root_height: 60.0 is not a distribution"),
        (lambda: YuleTree(root_height=dist.Normal(60.0, 1.0)), "root_height: the prior .* allows -1"),
        (lambda: ConstantCoalescent(dist.Dirichlet(torch.ones(2))), "population_size: the prior has"),
        (lambda: YuleTree().check(DatedTopology.of("((A,B),C);", dates={"A": 1, "B": 2, "C": 4})), "differ by up to 3"),
    ],
)
def test_settings_are_checked(call, message):
    with pytest.raises(SettingsError, match=message):
        call()
