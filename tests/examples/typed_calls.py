"""These calls of the functions that users need most are read by type checkers and never run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import assert_type

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

import bayeskit as bk
from bayeskit.inference import evidence, gradients, held_out, objectives, samplers
from bayeskit.inference.evidence import Evidence, EvidenceComparison, PredictiveScore
from bayeskit.inference.generalized import GibbsPosterior
from bayeskit.inference.held_out import Information
from bayeskit.models import phylogenetics, wide_networks
from bayeskit.models.phylogenetics import workflows as tree_workflows
from bayeskit.models.wide_networks import gaussian_processes
from bayeskit.workflows import ModelComparison, invariant_subsets, learn_likelihood

Model = Callable[[Tensor, float], None]


def targets(model: Model, y: Tensor, log_prior: Callable[[Tensor], Tensor]) -> bk.Target:
    """Targets of a model, of functions, and of a density in NumPy."""
    target = assert_type(bk.Target.from_pyro(model, y, scale=1.0), bk.Target)
    named = target.labelled(coords={"data": ["a", "b"]}, dims={"y": ["data"]})
    dim: int = named.dim
    names: tuple[str, ...] = named.names
    u: Tensor = named.sample_prior(100, seed=1)
    assert_type(named.log_density(u, beta=0.5), Tensor)
    assert_type(named.evaluate(u), tuple[Tensor, Tensor])
    assert_type(named.constrain(u), dict[str, Tensor])
    assert_type(named.unconstrain({"mean": u[..., 0]}), Tensor)
    assert_type(named.value_and_grad(u), tuple[Tensor, Tensor])
    assert_type(named.pointwise_log_likelihood(u), dict[str, Tensor])
    drawn: dict[str, Tensor] = named.predictive(u, seed=2)

    def sample_prior(count: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, dim, generator=generator)

    of_functions = bk.Target.from_functions(log_prior, log_prior, dim=dim, sample_prior=sample_prior)
    assert_type(of_functions.log_likelihood(drawn[names[0]]), Tensor)

    def value_and_grad(x: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        return float(-0.5 * x @ x), -x

    return bk.Target.from_log_density(value_and_grad, dim, names=["a", "b"], batched=False)


def sampling(model: Model, y: Tensor, target: bk.Target) -> bk.Draws:
    """Draws of every sampler."""
    draws = assert_type(bk.sample(model, y, scale=1.0, num_chains=4, seed=1, progress=False), bk.Draws)
    assert_type(bk.sample(target, kernel=bk.HMC(num_steps=8), metric="dense", initial="prior"), bk.Draws)
    assert_type(bk.sample(draws, kernel=bk.NUTS(max_depth=8), num_jobs=2, checkpoint="run"), bk.Draws)
    ladder = samplers.sample_ladder(target, 20, num_chains=4, exchange=True)
    beta: Tensor = ladder.beta
    path = samplers.sample_smc(target, num_particles=64, seed=3)
    increments: Tensor = path.log_evidence_increments
    nested = samplers.sample_nested(target, 500, termination=0.01)
    found: float = nested.log_evidence
    assert_type(nested.resample(num_draws=1000), bk.Draws)
    print(found, beta.sum() + increments.sum())
    return ladder.posterior


def results_of_draws(draws: bk.Draws, target: bk.Target, path: Path) -> bk.Draws:
    """What draws are asked for."""
    rows: int = len(draws.summary(round_to=3, var_names=["mean"]))
    values = assert_type(draws.values(), dict[str, Tensor])
    mean: Tensor = draws["mean"] + values["mean"] + rows
    longer = assert_type(draws.extend(500, time_budget=60.0).thin(2), bk.Draws)
    expected = assert_type(longer.predictive(mean, seed=1), bk.Draws)
    drawn: Tensor = expected.posterior_predictive["y"] + expected.predictions["y"]
    figure = assert_type(longer.plot("pairs", ["mean"]), Figure)
    longer.save(path)
    loaded = bk.Draws.load(path, target=target)
    data: object = loaded.to_arviz(prior=loaded, coords={"data": ["a", "b"]}, dims={"y": ["data"]})
    for group, dataset in loaded.to_datasets().items():
        print(group, dataset.sizes, drawn.shape, figure.axes)
    same = bk.Draws.from_arviz(data, target)
    arrays: Mapping[str, NDArray[np.float64]] = {"mean": np.zeros((4, 100))}
    other = bk.Draws.from_arviz(arrays, target)
    joined = bk.Draws.join([same, other.select([0, 1]), other.infer_discrete()])
    acceptance: Tensor = joined.sample_stats["acceptance_rate"]
    seconds: float = joined.seconds + float(acceptance.mean())
    print(f"{joined.num_chains * joined.num_draws / seconds:.1f} draws a second of {joined.target.dim} numbers")
    return joined


def left_out(draws: bk.Draws, other: bk.Draws, groups: Sequence[str]) -> float:
    """Leave-one-out scores and their difference."""
    score = draws.loo(moment_matching=False)
    by_group = other.loo(by=groups)
    assert_type(score.difference(by_group, same_data=True), tuple[float, float])
    difference, error = score.difference(by_group)
    worst: Tensor = score.pareto_k.max()
    rows: int = len(score.to_pandas())
    data: object = score.to_arviz()
    assert_type(score.plot(), Axes)
    warnings: tuple[str, ...] = score.warnings
    print(score.trusted, rows, data, warnings, score.pointwise + worst, score.sites["y"])
    return score.elpd + score.standard_error + score.p_loo + difference + error


def predictions_before_data(model: Model, target: bk.Target) -> Tensor:
    """Draws of the prior, and data at these."""
    prior = assert_type(bk.prior_predictive(model, None, scale=1.0, num_draws=500, sites=["y"]), bk.Draws)
    return prior.posterior_predictive["y"] + bk.prior_predictive(target, seed=1)["mean"]


def training(model: Model, guide: Model, data: Tensor) -> bk.Fit:
    """A model and a guide trained by each objective."""
    chosen = [
        objectives.ELBO(num_particles=4, kl_weight=objectives.Linear(100)),
        objectives.IWAE(16),
        objectives.Renyi(0.5, num_particles=8),
        objectives.SUMO.of_cost(8.0),
        objectives.VCD(num_steps=4),
        objectives.TVO(8),
        objectives.STL(4),
        objectives.DReG(4),
    ]
    for objective in chosen:
        fitted = bk.fit(model, guide, objective, data, num_epochs=10, batch_size=32, seed=1, progress=False)
        drawn: dict[str, Tensor] = fitted.sample_posterior(100, data)
        assert_type(fitted.plot(), Axes)
        losses: Tensor = fitted.losses
        loss: float = objective.loss(model, guide, data, 1.0)
        arrays: object = fitted.to_arviz(drawn)
        print(losses[-1], loss, arrays, fitted.ending, fitted.parameters["scale"].shape)

    def adam(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01)

    fitted = bk.fit(model, guide, bk.objectives.SUMO(), (data, 1.0), optimizer=adam, validation=data, patience=5)
    marginal = held_out.importance_sampling(model, guide, data, num_draws=1000)
    print(marginal.total, marginal.standard_error, marginal.log_likelihood.mean())
    return fitted


def amortized(model: Model, args: Callable[[int], tuple[Tensor, float]], y: Tensor, path: Path) -> Evidence:
    """One network for all data of a model."""
    network = assert_type(bk.amortize(model, args, sizes=(1, 200), num_steps=1000), bk.AmortizedPosterior)
    network.save(path)
    loaded = bk.AmortizedPosterior.load(path, model)
    draws: bk.Draws = loaded.sample(y, 1.0, num_draws=500)
    corrected = loaded.correct(y, 1.0)
    assert_type(loaded.log_prob({"mean": draws["mean"]}, y, 1.0), Tensor)
    return corrected.evidence


def integrated_out(target: bk.Target) -> bk.Draws:
    """A target without a group of its sites, and draws of all."""
    marginal = bk.marginalize(target, ["effect"], correct=True)
    draws = bk.sample(marginal, num_samples=500)
    correction = marginal.correction(draws)
    print(marginal.curvature, marginal.problems, correction.log_ratio, correction.pareto_k)
    return marginal.with_latents(draws, seed=1)


def estimates(target: bk.Target, draws: bk.Draws) -> list[Evidence]:
    """Single estimators of the marginal likelihood."""
    ladder = samplers.sample_ladder(target)
    nested = samplers.sample_nested(target)
    path = samplers.sample_smc(target)
    scores: list[PredictiveScore] = [
        bk.evidence.conditional_predictive_ordinates(draws),
        evidence.pointwise_predictive_density(target, draws),
    ]
    found = [
        assert_type(bk.evidence.bridge_sampling(draws), Evidence),
        assert_type(bk.evidence.bridge_sampling(target, draws, num_proposals=2000, seed=1), Evidence),
        evidence.warp_bridge_sampling(draws),
        evidence.laplace(target, draws=draws),
        evidence.laplace_importance_sampling(target, 10000),
        evidence.naive_monte_carlo(target, num_draws=1000),
        evidence.harmonic_mean(target, draws),
        evidence.stepping_stone(target, ladder),
        evidence.thermodynamic_integration(target, ladder=ladder),
        evidence.generalised_stepping_stone(draws),
        evidence.smc(target, path),
        evidence.nested_sampling(target, nested),
        evidence.learned_harmonic_mean(draws),
        evidence.flow_importance_sampling(draws),
        evidence.evidence_lower_bound(target),
        evidence.variational_importance_sampling(target),
        evidence.chib(target, num_samples=500),
        evidence.prequential(target, site="y", order=2),
    ]
    best: float = max(one.log_evidence for one in found if one.trusted)
    errors: list[float] = [one.standard_error for one in found]
    diagnostics: dict[str, float] = found[0].diagnostics
    print(best, errors, diagnostics, found[0].warnings, scores[0].predictive_score)
    return found


def compared_estimates(target: bk.Target, draws: bk.Draws, path: Path) -> float:
    """All estimators of one marginal likelihood, and their calibration."""
    budget = evidence.Budget(num_samples=200, num_temperatures=20)
    table = assert_type(bk.evidence.compare(target, ["laplace", "smc"], budget=budget, draws=draws), EvidenceComparison)
    table.to_csv(path)
    page: str = table.to_html(path, reference=-7.9)
    axes: Axes = table.plot(reference=-7.9)
    rows: int = len(table.to_pandas())
    one: Evidence = table["laplace"]
    maximized = evidence.maximize(target, over=["scale"])
    assert_type(maximized.values["scale"], Tensor)
    study = evidence.calibrate("laplace", "linreg10", num_replicates=20)
    z: NDArray[np.float64] = study.z("laplace")
    print(page, axes, rows, z.std(), table.verdict, table.refused.get("chib"))
    return one.log_evidence + maximized.log_evidence


def compared_models(models: Mapping[str, bk.Target], path: Path) -> float:
    """Models of the same data."""
    compared = assert_type(bk.compare_models(models, "laplace", prior_probabilities={"one": 0.5}), ModelComparison)
    probability, error = compared.posterior_probabilities[compared.best]
    factor, factor_error = compared.log_bayes_factor("one", "other")
    compared.to_csv(path)
    axes: Axes = compared.plot()
    rows: int = len(compared.to_pandas())
    interval: tuple[float, float] = compared.posterior_intervals["one"]
    print(axes, rows, interval, compared.warnings, compared["one"].log_evidence)
    return probability + error + factor + factor_error


def studies(model: Model, y: Tensor, sampler: Callable[[bk.Target, int], bk.Draws]) -> float:
    """Simulation-based calibration, and the information in an experiment."""
    calibrated = assert_type(bk.sbc(model, sampler, args=(y, 1.0), num_replicates=50, num_jobs=2), bk.SBCResult)
    ranks: NDArray[np.int64] = calibrated.ranks["mean"]
    figure: Figure = calibrated.plot(["mean"])
    rows: int = len(calibrated.p_values) + len(calibrated.to_pandas())
    print(ranks.shape, figure, rows, calibrated.passed, calibrated.smallest_p_value, calibrated.warnings)
    known = assert_type(bk.information(model, y, 1.0, of=["mean"], about=["y"], num_outer=500), Information)
    assert_type(known.lower, float | None)
    return known.value + known.standard_error


def problems_with_answers(model: Model, y: Tensor) -> bk.Target:
    """Problems whose evidence is known, by name or by enumeration."""
    case = assert_type(bk.exact.get("linreg10"), bk.exact.ExactCase)
    exact: float = case.log_evidence
    posterior = bk.exact.enumerate_latents(model, y, 1.0)
    marginal = posterior.marginal("z")
    assert_type(marginal.probabilities, Tensor)
    print(exact, posterior.log_evidence, posterior.most_probable().values["z"], len(posterior.to_pandas()))
    return case.target(dtype=torch.float64)


def gradient_estimators(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """Gradients of expectations over discrete variables."""
    distribution = torch.distributions.Bernoulli(logits=logits)
    one = gradients.LeaveOneOut(num_samples=4)
    surrogate = assert_type(one.surrogate(distribution, f), Tensor)
    compared = gradients.compare_estimators(distribution, f, [one, gradients.REBAR(0.5), gradients.UnorderedSet(2)])
    rows: int = len(compared.to_pandas())
    print(rows, compared["REBAR"].variance, list(compared.results))
    return surrogate + gradients.Enumeration().expectation(distribution, f)


def own_likelihoods(prior: Model, loss: Callable[[Tensor, Tensor], Tensor], y: Tensor, path: Path) -> bk.Draws:
    """A loss in place of a likelihood, and a simulator without one."""
    posterior = GibbsPosterior(prior, loss, y, weight=0.5)
    weighted: bk.Target = posterior.with_weight(2.0)
    learnt = learn_likelihood(loss, prior, num_simulations=1000)
    learnt.save(path)
    assert_type(learnt.surprise(y), Tensor)
    subsets = invariant_subsets(y, y, [0, 1], names=["age"])
    print(learnt.trusted, subsets.best, subsets.column_probabilities, len(subsets.to_pandas()))
    return bk.sample(weighted)


def equations(times: Tensor, rates: tuple[Tensor, Tensor], states: Tensor) -> Tensor:
    """A differential equation, and a recurrence."""

    def slope(t: Tensor, y: Tensor, params: tuple[Tensor, Tensor]) -> Tensor:
        return params[0] * y - params[1] * t

    def step(level: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        new = 0.5 * level + value
        return new, new

    solution = assert_type(bk.ode.solve(slope, states, times, rates, method="rodas5", rtol=1e-8), Tensor)
    last: Tensor
    levels: Tensor
    last, levels = bk.scan(step, states[0], states)
    return solution + last + levels


def trees(path: Path) -> Tensor:
    """Topologies of an alignment, and the models of a tree."""
    alignment = phylogenetics.Alignment.from_file(path, data_type="DNA")
    same = phylogenetics.Alignment.from_sequences({"human": "ACGT", "chimpanzee": "ACGA", "gorilla": "ACCA"})
    tree = phylogenetics.Tree.from_newick("(human:0.1,chimpanzee:0.1,gorilla:0.2);")
    read = phylogenetics.Tree.from_file(path, index=0)
    substitution, site_rates = phylogenetics.parse_substitution("GTR+G4", alignment)
    model = phylogenetics.TreeModel(same, tree, phylogenetics.HKY85(), site_rates=phylogenetics.GammaRates(4))
    target = bk.Target.from_pyro(model)
    block = phylogenetics.MrBayesBlock.from_file(path)
    sites: Mapping[str, NDArray[np.int64]] = phylogenetics.read_partitions(path, alignment.num_sites)
    partition = phylogenetics.Partition(alignment.partitioned(sites), phylogenetics.GTR())
    search = tree_workflows.infer_topologies(alignment, substitution=substitution, site_rates=site_rates, num_runs=2)
    pooled = phylogenetics.TreeSample.from_files([path], burn_in=0.25)
    compared = tree_workflows.compare_topologies(alignment, search.sample.topologies[:3], num_draws=1000)
    frequencies: NDArray[np.float64] = phylogenetics.split_frequencies([pooled, search.sample]).frequencies
    average: float = phylogenetics.asdsf(search.samples).average
    consensus: str = phylogenetics.majority_rule_consensus(search.sample, 0.5).newick
    distance: int = phylogenetics.robinson_foulds(tree, read)
    axes: Axes = phylogenetics.plot_tree(tree)
    print(search.evidence.log_evidence, search.is_converged, search.r_hat["tree_length"], search.problems)
    print(target, block.constraints, partition.num_sites, frequencies.max(), average, consensus, distance, axes)
    print(alignment.taxa, pooled.weights.sum(), search.sample.credible_set(0.95).size, len(compared.to_pandas()))
    return compared.posterior_probabilities + compared.log_evidence


def networks(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Limits of a wide network."""
    kernel = wide_networks.infinite_width(module, weight_variance=2.0, bias_variance=0.1)
    nngp, ntk = kernel.both(x)
    posterior = gaussian_processes.nngp_posterior(kernel, x, y, 0.1)
    ensemble = gaussian_processes.ntk_ensemble(kernel, x, y, learning_rate=0.5)
    mean: Tensor = posterior.mean(x) + ensemble.after(100).mean(x)
    drawn: Tensor = posterior.sample(x, 10, seed=1)
    finite: Tensor = wide_networks.empirical_ntk(module, x, outputs="trace")
    return nngp + ntk + mean + drawn + finite + posterior.log_evidence + kernel.nngp(x)
