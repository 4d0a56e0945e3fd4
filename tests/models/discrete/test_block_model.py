"""The stochastic block model against urns, lists of all assignments, and integrals over its parameters."""

import itertools
import math
import warnings

import pytest
import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit.errors import AccuracyWarning, DataError, SettingsError, ShapeError
from bayeskit.models.discrete.block_model import (
    StochasticBlockModel,
    annealed_evidence,
    co_assignment,
    karate_club,
    plot_adjacency,
    plot_co_assignment,
)

SETTINGS = {"concentration": 0.7, "within_prior": (2.0, 1.5), "between_prior": (1.0, 3.0)}


def random_graph(nodes, seed=0, share=0.5):
    generator = torch.Generator().manual_seed(seed)
    above = (torch.rand(nodes, nodes, generator=generator, dtype=torch.float64) < share).double().triu(1)
    return above + above.T


def small_model(nodes=5, blocks=2, seed=0):
    return StochasticBlockModel(random_graph(nodes, seed), blocks, **SETTINGS)


def urn_log_joint(model, assignment):
    """Draw nodes, then edges, one after the other, from the predictive distributions of what came before."""
    total, sizes = 0.0, [0] * model.num_blocks
    for node, block in enumerate(assignment):
        total += math.log((model.concentration + sizes[block]) / (model.concentration * model.num_blocks + node))
        sizes[block] += 1
    seen = {}
    for first, second in itertools.combinations(range(model.num_nodes), 2):
        blocks = tuple(sorted((assignment[first], assignment[second])))
        prior = model.within_prior if blocks[0] == blocks[1] else model.between_prior
        edges, gaps = seen.setdefault(blocks, list(prior))
        edge = int(model.adjacency[first, second])
        total += math.log((edges if edge else gaps) / (edges + gaps))
        seen[blocks][1 - edge] += 1
    return total


def largest_z(draws, posterior, weight=1.0):
    """Return the largest |z| of the frequencies of assignments expected at least ten times, and their number."""
    blocks = int(posterior.assignments.max()) + 1
    place = blocks ** torch.arange(draws.shape[1])
    probabilities = posterior.probabilities * weight
    often = probabilities * len(draws) >= 10
    exact = probabilities[often]
    share = torch.bincount((draws * place).sum(-1), minlength=len(often))[often] / len(draws)
    return float(((share - exact) / (exact * (1 - exact) / len(draws)).sqrt()).abs().max()), int(often.sum())


# --- Closed forms


@pytest.mark.parametrize(("nodes", "blocks"), [(5, 2), (4, 3), (6, 1)])
def test_joint_is_that_of_urns(nodes, blocks):
    model = small_model(nodes, blocks)
    posterior = model.enumerate()
    slow = [urn_log_joint(model, assignment) for assignment in posterior.assignments.tolist()]
    slow = torch.tensor(slow, dtype=torch.float64)
    torch.testing.assert_close(model.log_joint(posterior.assignments), slow, rtol=0, atol=1e-12)
    torch.testing.assert_close(posterior.log_evidence, slow.logsumexp(0), rtol=0, atol=1e-12)
    torch.testing.assert_close(posterior.probabilities, slow.softmax(0), rtol=0, atol=1e-12)


def test_mutation_counting_edges_within_blocks_twice_is_noticed(monkeypatch):
    from bayeskit.models.discrete import block_model as counts

    model = small_model()
    assignment = torch.tensor([0, 1, 1, 0, 0])
    assert abs(float(model.log_joint(assignment)) - urn_log_joint(model, assignment.tolist())) < 1e-12
    monkeypatch.setattr(counts.BlockCounts, "edges", property(lambda self: 0.5 * self.ends))
    assert abs(float(model.log_joint(assignment)) - urn_log_joint(model, assignment.tolist())) > 0.1


def test_probabilities_of_all_graphs_and_assignments_sum_to_one():
    pairs = list(itertools.combinations(range(4), 2))
    total, assignments = 0.0, small_model(4).enumerate().assignments
    assert abs(float(small_model(4).log_prior(assignments).exp().sum()) - 1) < 1e-12
    for edges in itertools.product([0.0, 1.0], repeat=len(pairs)):
        adjacency = torch.zeros(4, 4, dtype=torch.float64)
        for (first, second), edge in zip(pairs, edges, strict=True):
            adjacency[first, second] = adjacency[second, first] = edge
        total += StochasticBlockModel(adjacency, 2, **SETTINGS).log_joint(assignments).exp().sum()
    assert abs(float(total) - 1) < 1e-12


def test_joint_is_batched_and_does_not_know_names():
    model = small_model(7, 3)
    assignments = torch.randint(3, (4, 5, 7), generator=torch.Generator().manual_seed(0))
    joint = model.log_joint(assignments)
    assert joint.shape == (4, 5)
    assert float((model.log_prior(assignments) + model.log_likelihood(assignments) - joint).abs().max()) < 1e-12
    order = torch.tensor([3, 0, 6, 2, 1, 5, 4])
    shuffled = StochasticBlockModel(model.adjacency[order][:, order], 3, **SETTINGS)
    torch.testing.assert_close(shuffled.log_joint(assignments[..., order]), joint, rtol=0, atol=1e-12)
    torch.testing.assert_close(model.log_joint((assignments + 1) % 3), joint, rtol=0, atol=1e-12)


def test_single_precision_keeps_small_differences_of_large_terms():
    adjacency, assignments = random_graph(1000, share=0.1), torch.arange(1000).remainder(3).expand(2, -1)
    double, single = (StochasticBlockModel(graph, 3) for graph in (adjacency, adjacency.float()))

    def gains(model):
        members = torch.nn.functional.one_hot(assignments, 3).to(model.adjacency)
        neighbours = (members * model.adjacency[0].unsqueeze(-1)).sum(-2)
        return model._log_likelihood_gains(
            model._counts(assignments).changed(members[:, 0], neighbours, -1), neighbours
        )

    assert float((gains(double) - gains(single)).abs().max()) < 1e-9
    exact = double.log_joint(assignments)
    assert single.log_joint(assignments).dtype == torch.float32
    resolution = float(exact.abs().max()) * torch.finfo(torch.float32).eps
    assert float((single.log_joint(assignments) - exact).abs().max()) < resolution


@pytest.mark.parametrize("concentration", [1e-8, 0.7, 1e10, 1e15])
def test_the_prior_sums_to_one_whatever_its_concentration(concentration):
    model = StochasticBlockModel(random_graph(5), 2, concentration)
    assert abs(float(model.log_prior(model.enumerate().assignments).exp().sum()) - 1) < 1e-12


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_assignments_may_be_integers_of_any_width(dtype):
    model, assignments = small_model(), torch.tensor([[0, 1, 1, 0, 0]])
    assert torch.equal(model.log_joint(assignments.to(dtype)), model.log_joint(assignments))
    swept = [
        model.gibbs_sweep(start, generator=torch.Generator().manual_seed(0))
        for start in (assignments, assignments.to(dtype))
    ]
    assert torch.equal(*swept)


def test_parameters_given_an_assignment():
    model = small_model(6, 2)
    assignment = torch.tensor([0, 1, 1, 0, 1, 1])
    found = model.parameters_given(assignment)
    torch.testing.assert_close(
        found.proportions.concentration, torch.tensor([2.7, 4.7], dtype=torch.float64), rtol=0, atol=1e-12
    )
    between = model.adjacency[assignment == 0][:, assignment == 1]
    within = model.adjacency[assignment == 1][:, assignment == 1].sum() / 2
    alpha, beta = found.edges.concentration1, found.edges.concentration0
    assert torch.equal(alpha, alpha.T) and torch.equal(beta, beta.T)
    assert float(alpha[0, 1]) == 1 + float(between.sum()) and float(beta[0, 1]) == 3 + float((1 - between).sum())
    assert float(alpha[1, 1]) == 2 + float(within) and float(beta[1, 1]) == 1.5 + 6 - float(within)


def test_co_assignment_sums_over_assignments():
    posterior = small_model().enumerate()
    together = posterior.co_assignment()
    same = posterior.assignments[:, 1] == posterior.assignments[:, 3]
    assert abs(float(together[1, 3]) - float(posterior.probabilities[same].sum())) < 1e-12
    torch.testing.assert_close(together.diagonal(), torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-12)


# --- The Pyro model


def test_the_pyro_model_sums_assignments_out():
    model = small_model(5, 2)
    target = bk.Target.from_pyro(model)
    position = target.sample_prior(4, seed=0)
    values = target.constrain(position)
    assignments = model.enumerate().assignments
    proportions, edges = values["proportions"], values["edge_probabilities"]
    table = edges[:, torch.tensor([[0, 1], [1, 2]])]
    log_terms = proportions.log()[:, assignments].sum(-1)
    for first, second in itertools.combinations(range(5), 2):
        p = table[:, assignments[:, first], assignments[:, second]]
        log_terms = log_terms + (p if model.adjacency[first, second] else 1 - p).log()
    torch.testing.assert_close(target.log_likelihood(position), log_terms.logsumexp(-1), rtol=0, atol=1e-11)


def test_evidence_is_the_mean_likelihood_under_the_prior(limit):
    model = small_model(4, 2)
    target = bk.Target.from_pyro(model)
    likelihood = target.log_likelihood(target.sample_prior(20_000, seed=1)).exp()
    exact = model.enumerate().log_evidence.exp()
    z = (likelihood.mean() - exact) / (likelihood.std() / math.sqrt(len(likelihood)))
    assert abs(float(z)) < limit()


# --- Sweeps and annealing


def exact_draws(model, count=20_000):
    posterior = model.enumerate()
    drawn = torch.multinomial(
        posterior.probabilities, count, replacement=True, generator=torch.Generator().manual_seed(2)
    )
    return posterior, posterior.assignments[drawn]


@pytest.mark.parametrize(("nodes", "blocks"), [(6, 2), (4, 3)])
def test_sweeps_keep_the_posterior(nodes, blocks, limit):
    model = small_model(nodes, blocks)
    posterior, draws = exact_draws(model)
    draws = model.gibbs_sweep(draws, generator=torch.Generator().manual_seed(1))
    z, comparisons = largest_z(draws, posterior)
    assert comparisons > 20 and z < limit(comparisons)


def test_sweeps_keep_a_tempered_posterior(limit):
    model, power = small_model(5, 2), 0.3
    posterior, _ = exact_draws(model)
    tempered = (model.log_prior(posterior.assignments) + power * model.log_likelihood(posterior.assignments)).softmax(0)
    generator = torch.Generator().manual_seed(3)
    draws = posterior.assignments[torch.multinomial(tempered, 20_000, replacement=True, generator=generator)]
    draws = model.gibbs_sweep(draws, generator=generator, power=torch.full((20_000,), power))
    z, comparisons = largest_z(draws, posterior._replace(probabilities=tempered))
    assert z < limit(comparisons)


class WithoutSizes(StochasticBlockModel):
    """Forget that a larger block draws more nodes, by sweeps that know only the graph."""

    def _log_likelihood_gains(self, counts, neighbours):
        return super()._log_likelihood_gains(counts, neighbours) - (counts.sizes + self.concentration).log()


def test_mutation_sweeps_that_forget_sizes_are_noticed(limit):
    model = small_model(6, 2)
    posterior, draws = exact_draws(model)
    broken = WithoutSizes(model.adjacency, 2, **SETTINGS)
    z, comparisons = largest_z(broken.gibbs_sweep(draws, generator=torch.Generator().manual_seed(1)), posterior)
    assert z > 2 * limit(comparisons)


def test_draws_of_the_prior(limit):
    model = small_model(5, 2)
    posterior = model.enumerate()
    prior = posterior._replace(probabilities=model.log_prior(posterior.assignments).exp())
    draws = model.sample_prior(20_000, generator=torch.Generator().manual_seed(0))
    z, comparisons = largest_z(draws, prior)
    assert z < limit(comparisons)


@pytest.mark.parametrize(("nodes", "blocks"), [(7, 2), (6, 3)])
def test_annealed_evidence_is_exact_on_small_graphs(nodes, blocks, limit):
    model = small_model(nodes, blocks, seed=3)
    posterior = model.enumerate()
    found = annealed_evidence(model, num_chains=4000, num_steps=10, seed=1)
    ratio = (found.log_weights - posterior.log_evidence).exp()  # unbiased for one, whatever the number of steps
    assert abs(float((ratio.mean() - 1) / (ratio.std() / math.sqrt(len(ratio))))) < limit()
    assert found.log_evidence == pytest.approx(float(found.log_weights.logsumexp(0)) - math.log(4000))
    assert found.standard_error < 0.05 and found.effective_sample_size > 1000
    first, second = torch.triu_indices(nodes, nodes, 1)
    exact, together = (x.co_assignment()[first, second] for x in (posterior, found))
    z = (together - exact) / (exact * (1 - exact) / found.effective_sample_size).sqrt()
    assert float(z.abs().max()) < limit(len(z))


def test_mutation_annealing_with_broken_sweeps_is_noticed(limit):
    model = small_model(7, 2, seed=3)
    broken = WithoutSizes(model.adjacency, 2, **SETTINGS)
    found = annealed_evidence(broken, num_chains=4000, num_steps=10, seed=1)
    error = float((found.log_weights - model.enumerate().log_evidence).exp().mean()) - 1
    assert abs(error) > 2 * limit() * found.standard_error


def test_one_block_has_no_error_and_too_few_steps_are_noticed():
    club = karate_club().adjacency
    exact = math.lgamma(79) + math.lgamma(484) - math.lgamma(563)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = annealed_evidence(StochasticBlockModel(club, 1), num_chains=100, num_steps=1)
        annealed_evidence(StochasticBlockModel(club, 1), num_chains=20, num_steps=1)
    assert abs(found.log_evidence - exact) < 1e-9 and found.standard_error < 1e-9
    with pytest.warns(AccuracyWarning, match="raise num_steps above 2"):
        annealed_evidence(StochasticBlockModel(club, 4), num_chains=100, num_steps=2)


# --- The karate club


def test_facts_of_the_karate_club():
    club = karate_club()
    degrees = club.adjacency.sum(-1).int().tolist()
    assert club.adjacency.dtype == torch.float64 and torch.equal(club.adjacency, club.adjacency.T)
    assert sum(degrees) == 2 * 78 and (degrees[0], degrees[32], degrees[33]) == (16, 12, 17)
    assert sorted(degrees) == [1] + [2] * 11 + [3] * 6 + [4] * 6 + [5] * 3 + [6] * 2 + [9, 10, 12, 16, 17]
    triangles = float((club.adjacency @ club.adjacency @ club.adjacency).diagonal().sum()) / 6
    assert triangles == 45
    assert bool(club.with_instructor[0]) and not bool(club.with_instructor[33])


# --- Plots and bad input


def test_plots_sort_nodes_by_block():
    model = small_model(6)
    assignments = torch.tensor([1, 0, 1, 0, 0, 1])
    axes = plot_adjacency(model.adjacency, assignments, Figure().subplots())
    order = [int(label.get_text()) for label in axes.get_xticklabels()]
    assert assignments[order].tolist() == [0, 0, 0, 1, 1, 1]
    shown = torch.as_tensor(axes.images[0].get_array().data)
    assert torch.equal(shown, model.adjacency[order][:, order])
    together = model.enumerate().co_assignment()
    shown = plot_co_assignment(together, assignments, Figure().subplots()).images[0].get_array()
    assert float(shown.min()) > 0 and float(shown.max()) == pytest.approx(1.0)
    with pytest.raises(ShapeError, match="give \\(nodes, nodes\\)"):
        plot_adjacency(model.adjacency, assignments[:3], Figure().subplots())


GRAPH = random_graph(4)
MODEL = StochasticBlockModel(GRAPH, 2)


def sweep_at(power):
    return MODEL.gibbs_sweep(torch.zeros(2, 4).long(), generator=torch.Generator(), power=power)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: StochasticBlockModel(torch.zeros(3, 4), 2), ShapeError, "nodes, nodes"),
        (lambda: StochasticBlockModel(torch.full((3, 3), 2), 2), DataError, "entry 2 of adjacency at 0, 0 is neither"),
        (lambda: StochasticBlockModel(torch.full((3, 3), 0.5), 2), DataError, "neither 0 nor 1"),
        (lambda: StochasticBlockModel(torch.ones(3, 3).triu(1), 2), DataError, "mirror image"),
        (lambda: StochasticBlockModel(torch.eye(3), 2), DataError, "0, 0 joins a node to itself"),
        (lambda: StochasticBlockModel(GRAPH, 0), SettingsError, "num_blocks"),
        (lambda: StochasticBlockModel(GRAPH, 2, 0.0), SettingsError, "concentration"),
        (lambda: StochasticBlockModel(GRAPH, 2, within_prior=(1.0, -1.0)), SettingsError, "within_prior"),
        (lambda: StochasticBlockModel(GRAPH, 2, between_prior=1.0), SettingsError, "between_prior"),
        (lambda: MODEL.log_joint(torch.zeros(3, dtype=torch.int64)), ShapeError, "batch, 4"),
        (lambda: MODEL.log_joint(torch.zeros(4)), ShapeError, "integers"),
        (lambda: MODEL.log_joint(torch.full((4,), 2)), DataError, "blocks 0 to 1"),
        (lambda: MODEL.log_joint(torch.zeros(4, dtype=torch.bool)), ShapeError, "integers"),
        (lambda: MODEL.sample_prior(-1, generator=torch.Generator()), SettingsError, "num_samples"),
        (lambda: MODEL.sample_prior(2.5, generator=torch.Generator()), SettingsError, "num_samples"),
        (lambda: sweep_at(math.nan), SettingsError, "power must be finite"),
        (lambda: sweep_at(torch.tensor([1.0, math.inf])), SettingsError, "power must be finite"),
        (lambda: sweep_at(torch.ones(3)), ShapeError, "power has shape"),
        (lambda: MODEL.gibbs_sweep(torch.zeros(4).long(), generator=torch.Generator()), ShapeError, "chains, 4"),
        (lambda: MODEL.enumerate(limit=15), SettingsError, "in 16 ways"),
        (lambda: StochasticBlockModel(random_graph(34), 2).enumerate(), SettingsError, str(2**34)),
        (lambda: StochasticBlockModel(random_graph(13), 2)(), SettingsError, "8192"),
        (lambda: annealed_evidence(MODEL, num_chains=1), SettingsError, "num_chains"),
        (lambda: annealed_evidence(MODEL, num_steps=0), SettingsError, "num_steps"),
        (lambda: co_assignment(torch.zeros(3)), ShapeError, "draws, nodes"),
        (lambda: co_assignment(torch.zeros(3, 4), torch.zeros(3)), DataError, "not all zero"),
        (lambda: co_assignment(torch.zeros(3, 4), torch.tensor([1.0, -0.5, 1.0])), DataError, "not negative"),
    ],
)
def test_bad_input_is_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()
