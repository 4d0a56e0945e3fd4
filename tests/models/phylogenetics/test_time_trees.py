"""The model of a time tree: numbers against a version in numpy, evidence against quadrature, and what is refused."""

import math
import pickle

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import DataError, SettingsError, ShapeError, TreeError
from bayeskit.inference import evidence
from bayeskit.models.phylogenetics import (
    HKY85,
    Alignment,
    BirthDeathTree,
    ConstantCoalescent,
    GammaRates,
    StrictClock,
    TimeTreeModel,
    Tree,
    TreeModel,
    UncorrelatedLogNormalClock,
    YuleTree,
)
from bayeskit.models.phylogenetics._node_heights import RatioTransform
from bayeskit.models.phylogenetics._tree_priors import CoalescentHeights

NEWICK = "((A,B),(C,(D,E)));"
SEQUENCES = {"E": "ACGTACCTTA", "B": "ACGAACGTTC", "C": "AC-AAGGTTA", "A": "ACGTACGATC", "D": "TCGTACCTTA"}
ALIGNMENT = Alignment.from_sequences(SEQUENCES)
TIPS = {"A": 0.0, "B": 0.4, "C": 0.9, "D": 0.25, "E": 0.1}

# The same in numpy, written for one point. Complex numbers are taken everywhere, so that a step of 1e-30 along the
# imaginary axis gives derivatives without cancellation.


class Reference:
    def __init__(self, model, sequences):
        self.dated, self.sequences = model.dated, sequences
        self.taxa, self.n = model.dated.topology.taxa, model.dated.num_taxa
        self.children = model.dated.topology.children[0].tolist()
        self.tips = model.dated.tip_heights.tolist()

    def heights_and_log_jacobian(self, x):
        """Go down from the root by ratios."""
        bounds, heights, log_jacobian = list(self.tips), [None] * (2 * self.n - 1), 0.0
        for one, other in self.children:
            bounds.append(max(bounds[one], bounds[other]))
        heights[: self.n] = self.tips
        heights[-1] = bounds[-1] + np.exp(x[-1])
        log_jacobian += x[-1]
        for node in range(2 * self.n - 2, self.n - 1, -1):
            for child in self.children[node - self.n]:
                if child >= self.n:
                    ratio = 1 / (1 + np.exp(-x[child - self.n]))
                    span = heights[node] - bounds[child]
                    heights[child] = bounds[child] + ratio * span
                    log_jacobian += np.log(span * ratio * (1 - ratio))
        return heights, log_jacobian

    def log_likelihood(self, heights, rates):
        """Prune each site of the rooted tree under the model of Jukes and Cantor."""
        total = 0.0
        for site in range(len(next(iter(self.sequences.values())))):
            partials = []
            for taxon in self.taxa:
                base = self.sequences[taxon][site]
                partials.append(np.array([float(base in (letter, "-")) for letter in "ACGT"], dtype=complex))
            for node, below in enumerate(self.children, start=self.n):
                product = np.ones(4, dtype=complex)
                for child in below:
                    decay = np.exp(-4 / 3 * rates[child] * (heights[node] - heights[child]))
                    matrix = 0.25 * (1 - decay) * np.ones((4, 4)) + decay * np.eye(4)
                    product = product * (matrix @ partials[child])
                partials.append(product)
            total += np.log(partials[-1].sum() / 4)
        return total

    def coalescent(self, heights, size):
        """Return the log density over topologies and heights (Rodrigo and Felsenstein 1999), event by event."""
        events = sorted(
            [(time, 1) for time in self.tips] + [(h, -1) for h in heights[self.n :]], key=lambda e: e[0].real
        )
        total, lineages, now = 0.0, 0, 0.0
        for time, change in events:
            total = total - lineages * (lineages - 1) / 2 * (time - now) / size
            total = total - np.log(size) if change == -1 else total
            lineages, now = lineages + change, time
        return total

    def birth_death(self, heights, net, extinction, fraction):
        """Return the log density given the topology as Gernhard (2008) has it, with the rates of Stadler (2009)."""
        birth = net / (1 - extinction)
        death = extinction * birth
        birth, death = fraction * birth, death - birth * (1 - fraction)
        inner, rankings = heights[self.n :], math.factorial(self.n - 1)
        for node in range(self.n - 1):
            rankings /= self.internal_below(node)
        total = math.lgamma(self.n + 1) - math.log(rankings) + (self.n - 1) * np.log(birth)
        for height in inner:
            e = np.exp(-net * height)
            total = total + 2 * np.log(net) - net * height - 2 * np.log(birth - death * e)
        e = np.exp(-net * inner[-1])
        return total + np.log(net) - net * inner[-1] - np.log(birth - death * e)

    def internal_below(self, node):
        return 1 + sum(self.internal_below(child - self.n) for child in self.children[node] if child >= self.n)

    def tree_length(self, heights):
        return sum(heights[node] - heights[child] for node, b in enumerate(self.children, start=self.n) for child in b)


def log_normal(log_value, deviation=2.0):
    """Return the log density of the logarithm, which is normal with mean zero."""
    return -0.5 * (log_value / deviation) ** 2 - math.log(deviation) - 0.5 * math.log(2 * math.pi)


def strict_and_dated():
    model = TimeTreeModel(ALIGNMENT, NEWICK, tip_heights=TIPS)
    reference = Reference(model, SEQUENCES)

    def log_density(u):  # population size, heights, clock rate
        size, rate = np.exp(u[0]), np.exp(u[5])
        heights, log_jacobian = reference.heights_and_log_jacobian(u[1:5])
        length = reference.tree_length(heights)
        prior = log_normal(u[0]) + reference.coalescent(heights, size) + log_jacobian
        prior += 0.5 * np.log(length / (math.pi * rate)) - rate * length + u[5]
        return prior + reference.log_likelihood(heights, [rate] * 8)

    return model, log_density


def relaxed_and_undated():
    clock, prior = UncorrelatedLogNormalClock(), BirthDeathTree(sampling_fraction=0.3)
    model = TimeTreeModel(ALIGNMENT, NEWICK, clock=clock, tree_prior=prior)
    reference = Reference(model, SEQUENCES)

    def log_density(u):  # net diversification, relative extinction, heights, deviation of rates, scores
        net, extinction, deviation = np.exp(u[0]), 1 / (1 + np.exp(-u[1])), np.exp(u[6])
        heights, log_jacobian = reference.heights_and_log_jacobian(u[2:6])
        rates = np.exp(deviation * u[7:] - deviation**2 / 2)
        prior = log_normal(u[0]) + np.log(extinction * (1 - extinction)) + log_jacobian
        prior += reference.birth_death(heights, net, extinction, 0.3)
        prior += math.log(3) - 3 * deviation + u[6] - 0.5 * (u[7:] ** 2).sum() - 4 * math.log(2 * math.pi)
        return prior + reference.log_likelihood(heights, rates)

    return model, log_density


def strict_and_yule():
    model = TimeTreeModel(ALIGNMENT, NEWICK)
    reference = Reference(model, SEQUENCES)

    def log_density(u):
        heights, log_jacobian = reference.heights_and_log_jacobian(u[1:])
        prior = log_normal(u[0]) + reference.birth_death(heights, np.exp(u[0]), 0.0, 1.0) + log_jacobian
        return prior + reference.log_likelihood(heights, [1.0] * 8)

    return model, log_density


CASES = {
    "strict, dated": strict_and_dated,
    "relaxed, birth-death": relaxed_and_undated,
    "strict, Yule": strict_and_yule,
}


def compare_with_numpy(case):
    model, log_density = CASES[case]()
    target = bk.Target.from_pyro(model)
    points = torch.randn(4, target.dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values, gradients = target.value_and_grad(points)
    for u, value, gradient in zip(points.numpy(), values.tolist(), gradients.numpy(), strict=True):
        steps = u + 1e-30j * np.eye(len(u))
        assert value == pytest.approx(log_density(u.astype(complex)).real, rel=1e-10)
        np.testing.assert_allclose(gradient, [log_density(step).imag * 1e30 for step in steps], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_density_and_gradient_against_numpy(case):
    compare_with_numpy(case)


def test_mutations_are_noticed(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(RatioTransform, "log_abs_det_jacobian", lambda self, x, y: x[..., -1])
        with pytest.raises(AssertionError):
            compare_with_numpy("strict, dated")
    with monkeypatch.context() as patch:
        patch.setattr(TimeTreeModel, "_lengths", lambda self, h, v: (self.branch_lengths(h, **v))[..., self._edges])
        with pytest.raises(AssertionError):
            compare_with_numpy("strict, Yule")
    true = CoalescentHeights._coalescences

    def wrong(self, value):
        found = true(self, value)
        return found._replace(pairs=2.0 * found.pairs)

    with monkeypatch.context() as patch:
        patch.setattr(CoalescentHeights, "_coalescences", wrong)
        with pytest.raises(AssertionError):
            compare_with_numpy("strict, dated")


def test_prior_likelihood_and_jacobian_are_parts_of_the_target():
    model = TimeTreeModel(ALIGNMENT, NEWICK, tree_prior=YuleTree(2.0))
    target, transform = bk.Target.from_pyro(model), RatioTransform(model.dated)
    u = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    heights = transform(u)
    torch.testing.assert_close(target.constrain(u)["node_heights"], heights)
    torch.testing.assert_close(target.log_likelihood(u), model.log_likelihood(heights))
    prior = model.tree_prior.heights(model.dated, {"birth_rate": torch.tensor(2.0, dtype=torch.float64)})
    torch.testing.assert_close(
        target.log_prior(u), prior.log_prob(heights) + transform.log_abs_det_jacobian(u, heights)
    )
    torch.testing.assert_close(target.unconstrain({"node_heights": heights[0]}), u[0])


def test_likelihood_is_that_of_the_unrooted_tree():
    # The lengths of the two edges at the root add up, and any root of the same unrooted tree gives the same number.
    model = TimeTreeModel(
        ALIGNMENT, NEWICK, HKY85(), tip_heights=TIPS, site_rates=GammaRates(), clock=UncorrelatedLogNormalClock(0.3)
    )
    heights = torch.tensor([[0.7, 0.9, 1.1, 1.6], [0.5, 0.6, 1.0, 2.0]], dtype=torch.float64)
    of_sites = {
        "kappa": torch.tensor(3.0, dtype=torch.float64),
        "base_frequencies": torch.tensor([0.3, 0.2, 0.1, 0.4], dtype=torch.float64),
        "shape": torch.tensor(0.7, dtype=torch.float64),
    }
    scores = torch.linspace(-1, 1, 8, dtype=torch.float64)
    of_clock = {"rate_deviation": torch.tensor(0.4, dtype=torch.float64), "rate_scores": scores}
    found = model.log_likelihood(heights, **of_sites, **of_clock)
    lengths = dict(zip(model.dated.edge_names, model.branch_lengths(heights, **of_clock).T, strict=True))
    other = TreeModel(ALIGNMENT, Tree.from_newick("((A,B),C,(D,E));"), HKY85(), site_rates=GammaRates())
    lengths["A|B"] = lengths["A|B"] + lengths["C|D|E"]
    expected = other.log_likelihood(torch.stack([lengths[name] for name in other.tree.edge_names], -1), **of_sites)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_the_order_of_taxa_and_children_does_not_matter():
    one = TimeTreeModel(ALIGNMENT, NEWICK, tip_heights=TIPS, tree_prior=ConstantCoalescent(0.5))
    other = TimeTreeModel(ALIGNMENT, "(((E,D),C),(B,A));", tip_heights=TIPS, tree_prior=ConstantCoalescent(0.5))
    names = ["|".join(sorted(name.split(" ")[0].split("|"))) for name in other.dated.node_names[:-1]]
    order = [*(names.index(name) for name in one.dated.node_names[:-1]), 3]
    u = torch.randn(5, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    v = torch.empty_like(u)
    v[:, order], v[:, 4] = u[:, :4], u[:, 4]
    densities = [bk.Target.from_pyro(model).log_density(x) for model, x in ((one, u), (other, v))]
    torch.testing.assert_close(*densities, rtol=1e-12, atol=1e-12)


THREE = {"A": "ACGTACGTAA", "B": "ACGAACGTAA", "C": "AC-AACTTAC"}
THREE_TIPS = {"A": 0.0, "B": 0.3, "C": 0.5}


def log_evidence_by_quadrature():
    """Integrate over two heights and the rate, an exponential variable with mean 0.1, by Gauss-Legendre rules."""
    nodes, weights = np.polynomial.legendre.leggauss(10)

    def rule(edges):
        widths = np.diff(edges)[:, None]
        return (edges[:-1, None] + widths * 0.5 * (nodes + 1)).ravel(), (widths * 0.5 * weights).ravel()

    lower, w = rule(np.array([0.3, 0.5, 1.0, 2.0, 4.0, 8.0]))
    above, v = rule(np.array([0.0, 1.0, 3.0, 8.0, 20.0]))
    rate, r = rule(np.array([0.0, 0.1, 0.4, 1.0, 2.5]))
    lower, above = lower[:, None, None], above[:, None]
    root = np.maximum(lower, 0.5) + above
    # A population of size one: A and B from 0.3 on, each with C from 0.5 on, and then their ancestor with C.
    prior = np.exp(-(lower - 0.3) - 2 * np.maximum(lower - 0.5, 0) - above) * w[:, None, None] * v[:, None]
    model = TimeTreeModel(Alignment.from_sequences(THREE), "((A,B),C);", tip_heights=THREE_TIPS)
    heights = np.stack(np.broadcast_arrays(lower, root, rate)[:2], -1)
    rates = torch.as_tensor(rate).expand(heights.shape[:-1])
    likelihood = model.log_likelihood(torch.as_tensor(heights), clock_rate=rates).exp().numpy()
    return math.log((prior * likelihood * r * 10 * np.exp(-10 * rate)).sum()), math.log(prior.sum())


@pytest.mark.long
def test_evidence_of_three_dated_tips_by_quadrature(limit):
    log_evidence, log_topology = log_evidence_by_quadrature()
    model = TimeTreeModel(
        Alignment.from_sequences(THREE),
        "((A,B),C);",
        tip_heights=THREE_TIPS,
        clock=StrictClock(dist.Exponential(torch.tensor(10.0, dtype=torch.float64))),
        tree_prior=ConstantCoalescent(1.0),
    )
    target = bk.Target.from_pyro(model)
    draws = bk.sample(target, num_chains=16, num_warmup=100, num_samples=100, seed=0, progress=False)
    bridge = evidence.bridge_sampling(target, draws, seed=0)
    plain = evidence.naive_monte_carlo(target, num_draws=5_000, seed=0)
    for found in (bridge, plain):
        assert found.standard_error < 0.05
        assert abs(found.log_evidence - log_evidence) < limit(3) * found.standard_error
    topology, error = model.topology_probability(num_draws=20_000)
    assert abs(topology - log_topology) < limit(3) * error < 0.05


@pytest.mark.calibration
@pytest.mark.parametrize("tips", [None, TIPS], ids=["one date", "dated"])
def test_hmc_without_data_samples_the_prior(tips, limit):
    gaps = Alignment.from_sequences({taxon: "-" for taxon in TIPS})
    model = TimeTreeModel(gaps, NEWICK, tip_heights=tips, tree_prior=ConstantCoalescent(0.8), clock=StrictClock(0.1))
    target = bk.Target.from_pyro(model)
    draws = bk.sample(target, num_chains=32, num_warmup=150, num_samples=150, seed=1, progress=False)
    logs = torch.as_tensor(np.asarray(draws["node_heights"])).double().log().reshape(32, 150, 4)
    coalescent = CoalescentHeights(model.dated, torch.tensor(0.8, dtype=torch.float64))
    with torch.random.fork_rng():
        torch.random.manual_seed(2)
        simulated = coalescent.sample((20_000,))
    weights = torch.ones(len(simulated), dtype=torch.float64)
    if tips is not None:
        weights = coalescent.log_topology(simulated).exp()
    weights = weights / weights.mean()
    for power in (1, 2):
        chains = (logs**power).mean(1)
        expected = (weights[:, None] * simulated.log() ** power).mean(0)
        error = (weights[:, None] * (simulated.log() ** power - expected)).std(0) / len(simulated) ** 0.5
        z = (chains.mean(0) - expected) / torch.hypot(error, chains.std(0) / 32**0.5)
        assert z.abs().max() < limit(16, dof=31)


@pytest.mark.parametrize("settings", [{}, {"tree_prior": BirthDeathTree()}, {"tree_prior": ConstantCoalescent()}])
def test_the_prior_is_drawn_in_one_batch(settings, monkeypatch):
    """Drawn one by one, checks of a target took longer than its sampling."""
    target = bk.Target.from_pyro(TimeTreeModel(ALIGNMENT, NEWICK, **settings))
    calls = []
    original = TimeTreeModel._log_likelihood
    monkeypatch.setattr(TimeTreeModel, "_log_likelihood", lambda *given: calls.append(1) or original(*given))
    assert target.sample_prior(500).isfinite().all() and len(calls) < 10


def test_evidence_with_tips_of_one_date_is_given_the_topology():
    gaps = Alignment.from_sequences({taxon: "-" for taxon in "ABCD"})
    for prior in (YuleTree(), ConstantCoalescent()):
        model = TimeTreeModel(gaps, "((A,B),(C,D));", tree_prior=prior)
        target = bk.Target.from_pyro(model)
        assert target.log_likelihood(target.sample_prior(5, seed=0)).abs().max() < 1e-12
        assert model.topology_probability() == (pytest.approx(math.log(1 / 9)), 0.0)


def test_sites_and_names():
    model = TimeTreeModel(ALIGNMENT, NEWICK, tip_heights=TIPS, clock=UncorrelatedLogNormalClock())
    with pyro.validation_enabled(True):
        trace = pyro.poutine.trace(model).get_trace()
    trace.compute_log_prob()
    names = [name for name, site in trace.nodes.items() if site["type"] == "sample"]
    assert names == [
        "population_size", "node_heights", "topology", "clock_rate", "rate_deviation", "rate_scores", "alignment",
    ]  # fmt: skip
    assert model.element_names["node_heights"] == ("A|B", "D|E", "C|D|E", "A|B|...|E (5 taxa)")
    assert model.element_names["rate_scores"] == (*model.dated.topology.taxa, "A|B", "D|E", "C|D|E")
    assert repr(model).startswith("TimeTreeModel(5 taxa, dated tips, UncorrelatedLogNormalClock, ConstantCoalescent;")
    undated = TimeTreeModel(ALIGNMENT, NEWICK)
    assert sorted(undated.priors) == ["birth_rate"] and float(undated.branch_rates()[0]) == 1.0
    calibration = dist.LogNormal(torch.tensor(4.0), torch.tensor(0.1))
    assert "clock_rate" in repr(TimeTreeModel(ALIGNMENT, NEWICK, tree_prior=YuleTree(root_height=calibration)))


@pytest.mark.calibration
def test_draws_have_names_and_dates():
    model = TimeTreeModel(ALIGNMENT, NEWICK, dates={taxon: 2010 - height for taxon, height in TIPS.items()})
    target = bk.Target.from_pyro(model)
    draws = bk.sample(target, num_chains=4, num_warmup=20, num_samples=20, seed=0, progress=False)
    heights = torch.as_tensor(np.asarray(draws["node_heights"]))
    assert heights.shape == (4, 20, 4) and (model.calendar_dates(heights) < 2010).all()
    assert target.element_names()["node_heights"] == model.dated.node_names


def test_pointwise_terms_add_up():
    model = TimeTreeModel(ALIGNMENT, NEWICK, tip_heights=TIPS)
    target = bk.Target.from_pyro(model)
    u = torch.randn(3, target.dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    terms = model.factor_terms(target.constrain(u))
    total = sum((logs * counts).sum(-1) for logs, counts in terms.values())
    torch.testing.assert_close(total, target.log_likelihood(u))


def test_pickling_and_single_precision():
    model = TimeTreeModel(ALIGNMENT, NEWICK, tip_heights=TIPS, dtype=torch.float32)
    heights = torch.tensor([0.7, 0.9, 1.1, 1.6], dtype=torch.float64)
    rate = torch.tensor(0.2)
    found = pickle.loads(pickle.dumps(model)).log_likelihood(heights, clock_rate=rate)
    double = TimeTreeModel(ALIGNMENT, NEWICK, tip_heights=TIPS).log_likelihood(heights, clock_rate=rate)
    assert found.dtype == torch.float32 and float(found) == pytest.approx(float(double), rel=1e-5)
    assert bk.Target.from_pyro(model).sample_prior(3, seed=0).isfinite().all()


def test_impossible_heights_have_no_likelihood():
    model = TimeTreeModel(ALIGNMENT, NEWICK)
    assert model.log_likelihood(torch.tensor([2.0, 0.9, 1.1, 1.6], dtype=torch.float64)).isnan()


WRONG = {
    "unrooted": (lambda: TimeTreeModel(ALIGNMENT, Tree.from_newick("((A,B),C,(D,E));")), TreeError, "unrooted"),
    "other taxa": (lambda: TimeTreeModel(ALIGNMENT, "((A,B),(C,(D,X)));"), TreeError, "only in the alignment: 'E'"),
    "a path": (lambda: TimeTreeModel("a.nex", NEWICK), SettingsError, "alignment: str.*from_file"),
    "a class": (lambda: TimeTreeModel(ALIGNMENT, NEWICK, clock=StrictClock), SettingsError, "the class StrictClock"),
    "a number": (lambda: TimeTreeModel(ALIGNMENT, NEWICK, clock=0.01), SettingsError, r"clock: float.*StrictClock\(\)"),
    "a name": (lambda: TimeTreeModel(ALIGNMENT, NEWICK, tree_prior="yule"), SettingsError, r"tree_prior: str.*Yule"),
    "a substitution name": (lambda: TimeTreeModel(ALIGNMENT, NEWICK, "HKY"), SettingsError, "substitution: str"),
    "a dtype": (lambda: TimeTreeModel(ALIGNMENT, NEWICK, dtype=torch.int32), SettingsError, "floating-point"),
    "dated Yule": (
        lambda: TimeTreeModel(ALIGNMENT, NEWICK, tip_heights=TIPS, tree_prior=YuleTree()),
        SettingsError,
        "YuleTree needs tips of one date.*ConstantCoalescent",
    ),
    "a missing date": (lambda: TimeTreeModel(ALIGNMENT, NEWICK, dates={"A": 1.0}), DataError, "none for 'B', 'C'"),
    "few draws": (lambda: TimeTreeModel(ALIGNMENT, NEWICK).topology_probability(1), SettingsError, "num_draws"),
    "few heights": (
        lambda: TimeTreeModel(ALIGNMENT, NEWICK).log_likelihood(torch.ones(3)),
        ShapeError,
        r"\(\*batch, 4",
    ),
    "a list": (lambda: TimeTreeModel(ALIGNMENT, NEWICK).log_likelihood([1.0] * 4), ShapeError, "list does not fit"),
    "no rate": (
        lambda: TimeTreeModel(ALIGNMENT, NEWICK, tip_heights=TIPS).log_likelihood(torch.ones(4)),
        SettingsError,
        "missing for clock_rate",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(case):
    call, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        call()
