"""Comparison of topologies, subsplit Bayesian networks and variational inference of files, written to a folder."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from bayeskit.errors import SamplingWarning, TreeError
from bayeskit.extend import (
    Evidence,
    EvidenceComparison,
    new_figure,
    obey,
    remove_checkpoints,
    whole_number,
    write_atomically,
    write_csv,
)
from bayeskit.models.phylogenetics import SampleFrequencies, SubsplitBayesianNetwork, Topologies, TreeSample
from bayeskit.models.phylogenetics._distributions._topology_distribution import Estimate
from bayeskit.models.phylogenetics.workflows._topology_comparison import (
    TopologyComparison,
    compare_topologies,
    sum_over_topologies,
)
from bayeskit.models.phylogenetics.workflows._topology_folder import model_of_file, write_consensus, write_figure
from bayeskit.models.phylogenetics.workflows._variational import (
    LearningRates,
    VariationalPosterior,
    variational_inference,
)

if TYPE_CHECKING:
    import pandas as pd

_Path = str | Path
#: Draws of a network among which its most probable topologies are sought.
_CANDIDATES = 4096


class ComparedFiles(NamedTuple):
    """Topologies of files, compared.

    Attributes
    ----------
    comparison : TopologyComparison
    shares : ndarray
        Share of each compared topology in the trees of the files, shape `(topologies,)`.
    num_topologies : int
        Number of distinct topologies in the files.
    num_trees, num_burn_in : int
        Number of trees that were read from the files, and of those left out as burn-in.
    total : Evidence or None
        Evidence over all topologies, those that were not compared included; None for one file.
    """

    comparison: TopologyComparison
    shares: np.ndarray
    num_topologies: int
    num_trees: int
    num_burn_in: int
    total: Evidence | None


def compare_topologies_in_folder(
    alignment: _Path,
    trees: Sequence[_Path],
    folder: _Path,
    *,
    substitution: str | None = None,
    burn_in: float = 0,
    most: int = 100,
    seed: int = 0,
    progress: bool = True,
    **settings: Any,
) -> ComparedFiles:
    r"""Run `compare_topologies` on an alignment and files of trees, and write what it finds.

    Files: `topologies.csv` (evidence and posterior probability of each topology), `topologies.trprobs` (the topologies
    weighted by their posterior probability), `bayes_factors.svg` and, for several files, `evidence.csv` (the evidence
    over all topologies). If it was killed, a call with the same arguments resumes with the topologies that were not
    done, by the folder `checkpoint.topologies`, which is deleted once the results are written.

    Parameters
    ----------
    alignment : path
        A FASTA, NEXUS or PHYLIP file.
    trees : sequence of path
        Newick or NEXUS: lists of trees, or samples of independent runs, one file for each run.
    folder : path
        Existing folder.
    substitution : str, optional
        Such as "GTR+G4"; by default what a MrBayes block of the alignment's file asks for, and without a block JC69.
    burn_in : float, default 0
        Trees of each file to leave out at the start, as in `TreeSample.from_file`; none by default, since a list of
        hypotheses is no chain.
    most : int, default 100
        The most frequent topologies, at most so many, are compared.
    seed : int, default 0
    progress : bool, default True
    **settings
        Further settings of `compare_topologies`.

    Returns
    -------
    ComparedFiles

    Raises
    ------
    AlignmentError, TreeError
        If a file is missing or malformed, the taxa differ, or the files hold one topology only.
    SettingsError
        If a setting lies outside its domain, or the constraints of a MrBayes block exclude a tree of the files.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "data.fasta").write_text(">A\nAACCAGT\n>B\nAACCGGT\n>C\nAGCTAGA\n>D\nAGCTACA\n")
    >>> _ = (folder / "trees.nwk").write_text("((A,B),C,D); ((A,C),B,D);")
    >>> found = compare_topologies_in_folder(
    ...     folder / "data.fasta", [folder / "trees.nwk"], folder, num_draws=2000, progress=False
    ... )
    >>> found.comparison.comparison.best
    'tree 1'
    """
    folder, most = Path(folder), whole_number("most", most, 2)
    data, model = model_of_file(alignment, substitution)
    runs = [TreeSample.from_file(path, burn_in, rooted=False, taxa=data.taxa, progress=progress) for path in trees]
    sample = TreeSample.pooled(runs)
    if len(sample.topologies) < 2:
        raise TreeError(
            f"{', '.join(str(path) for path in trees)}: there is one topology only, and nothing to compare it with. "
            "Remedy: give several trees, or use 'bayeskit evidence --alignment FILE --tree FILE'."
        )
    chosen = sample.top(most)
    checkpoint = folder / "checkpoint.topologies"
    found = compare_topologies(
        data, sample.topologies[chosen], seed=seed, progress=progress, checkpoint=checkpoint, **model, **settings
    )
    found.to_csv(folder / "topologies.csv")
    found.to_sample().to_file(folder / "topologies.trprobs")
    figure = new_figure(1.1 + 0.27 * len(chosen))
    found.plot(figure.subplots())
    write_figure(folder / "bayes_factors.svg", figure)
    total = None if len(runs) == 1 else sum_over_topologies(found, runs)
    if total is not None:
        EvidenceComparison({total.method: total}, None, None).to_csv(folder / "evidence.csv")
    shutil.rmtree(checkpoint)
    read = len(sample.topologies), sample.num_samples, sample.num_burn_in
    return ComparedFiles(found, sample.weights[chosen], *read, total)


class FittedNetwork(NamedTuple):
    """A subsplit Bayesian network of files of trees, and what it says.

    Attributes
    ----------
    network : SubsplitBayesianNetwork
    sample : TreeSample
        What it was fitted to.
    reference : TreeSample or None
        What it was compared with.
    trees : DataFrame
        Probable topologies in descending order of `probability`, with their shares `in_sample` and, with a reference,
        `in_reference`.
    measures : dict of str to Estimate
        Entropy, probability of topologies that the sample lacks, and divergences in nats, with their errors (zero if
        exact).
    """

    network: SubsplitBayesianNetwork
    sample: TreeSample
    reference: TreeSample | None
    trees: pd.DataFrame
    measures: dict[str, Estimate]


def fit_network_in_folder(
    trees: Sequence[_Path],
    folder: _Path,
    *,
    reference: Sequence[_Path] = (),
    method: str = "em",
    alpha: float = 0.0,
    burn_in: float | None = None,
    seed: int = 0,
    progress: bool = True,
) -> FittedNetwork:
    """Fit a subsplit Bayesian network to files of trees, and write it with what it says.

    Files: `network.safetensors`, which `SubsplitBayesianNetwork.load` reads; `trees.csv` (probable topologies, with the
    network's estimate of their probability and their shares in the files), `splits.csv` (probabilities of splits) and
    `measures.csv` (entropy and divergences).

    Parameters
    ----------
    trees : sequence of path
        Newick or NEXUS; several files are pooled with equal weights.
    folder : path
        Existing folder.
    reference : sequence of path, optional
        Trees to compare with, such as longer runs.
    method : {"em", "simple_average"}, default "em"
    alpha : float, default 0.0
        As in `SubsplitBayesianNetwork.fit`.
    burn_in : float, optional
        As in `TreeSample.from_file`.
    seed : int, default 0
        Of the draws among which the most probable topologies are sought.
    progress : bool, default True

    Returns
    -------
    FittedNetwork

    Raises
    ------
    TreeError
        If a file is missing or malformed, or the taxa differ.
    SettingsError
        If a setting lies outside its domain.

    Warns
    -----
    AccuracyWarning
        If EM has not converged, or the divergence from the reference is infinite.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "trees.nwk").write_text("((A,B),C,D); ((A,B),C,D); ((A,B),C,D); ((A,C),B,D);")
    >>> found = fit_network_in_folder([folder / "trees.nwk"], folder, progress=False)
    >>> found.trees.probability.round(3).tolist()
    [0.75, 0.25]
    """
    folder = Path(folder)
    sample = TreeSample.from_files(trees, burn_in, progress=progress)
    longer = None
    if reference:
        longer = TreeSample.from_files(reference, burn_in, sample.rooted, taxa=sample.taxa, progress=progress)
    network = SubsplitBayesianNetwork.fit(sample, method, alpha=alpha)  # type: ignore[arg-type]  # checked there
    network.save(folder / "network.safetensors")
    with torch.no_grad():
        seen = float(network.log_prob(sample.topologies).exp().sum())
    measures = {
        "entropy": network.entropy(),
        "probability of topologies that the sample lacks": Estimate(max(0.0, 1 - seen), 0.0),
        "divergence from the sample": Estimate(network.kl_from(sample), 0.0),
    }
    if longer is not None:
        floor = float(np.finfo(float).eps)  # as in the published comparisons, for topologies outside of the support
        frequencies = SampleFrequencies.fit(sample)
        measures |= {
            "divergence from the reference": Estimate(network.kl_from(longer), 0.0),
            "divergence from the reference, with probabilities of at least 2.2e-16": Estimate(
                network.kl_from(longer, floor), 0.0
            ),
            "the same of the sample's frequencies": Estimate(frequencies.kl_from(longer, floor), 0.0),
        }
    table = _probable(network, sample, longer, seed)
    write_csv(folder / "trees.csv", table)
    write_csv(folder / "splits.csv", network.split_probabilities().to_pandas())
    rows = "".join(f'"{name}",{value:.10g},{error:.4g}\n' for name, (value, error) in measures.items())
    write_atomically(folder / "measures.csv", f"measure,value,standard_error\n{rows}".encode())
    return FittedNetwork(network, sample, longer, table, measures)


def _probable(
    network: SubsplitBayesianNetwork, sample: TreeSample, reference: TreeSample | None, seed: int
) -> pd.DataFrame:
    """Return the topologies of the samples and of draws by their probability in the network."""
    import pandas as pd

    samples = {"in_sample": sample} | ({} if reference is None else {"in_reference": reference})
    drawn = network.sample(_CANDIDATES, seed=seed)
    parts = [*(one.topologies.with_taxa(network.taxa)[0] for one in samples.values()), drawn]
    children = np.concatenate([part.children for part in parts])
    candidates, place = Topologies(network.taxa, children, network.rooted).distinct()
    with torch.no_grad():
        columns = {"probability": network.log_prob(candidates).exp().numpy()}
    begin = 0
    for (name, one), part in zip(samples.items(), parts, strict=False):
        columns[name] = np.bincount(place[begin : begin + len(part)], one.weights, minlength=len(candidates))
        begin += len(part)
    columns["newick"] = np.array([candidates.to_newick(number) for number in range(len(candidates))], dtype=object)
    return pd.DataFrame(columns).sort_values("probability", ascending=False, kind="stable", ignore_index=True)


def variational_inference_in_folder(
    alignment: _Path,
    folder: _Path,
    *,
    trees: Sequence[_Path] = (),
    substitution: str | None = None,
    burn_in: float | None = None,
    num_steps: int = 20_000,
    learning_rates: LearningRates | None = None,
    num_draws: int = 10_000,
    seed: int = 0,
    on_support: Callable[[TreeSample], None] | None = None,
    progress: bool = True,
    **settings: Any,
) -> tuple[VariationalPosterior, Evidence, TreeSample]:
    r"""Run `variational_inference` on a file, and write what it finds.

    Files: `posterior.safetensors`, which `VariationalPosterior.load` reads; `trees.trprobs` (topologies with their
    probabilities), `consensus.nwk` and `consensus.svg` (majority rule), `evidence.csv` and, if there are any,
    `parameters.csv`. If it was killed, or a time budget ended it, a call with the same arguments resumes the training
    from `checkpoint.training`, which is deleted once the results of a finished training are written.

    Parameters
    ----------
    alignment : path
        A FASTA, NEXUS or PHYLIP file.
    folder : path
        Existing folder.
    trees : sequence of path, optional
        Newick or NEXUS files, whose topologies and their recombinations are the support; by default it is searched for.
    substitution : str, optional
        Such as "GTR+G4"; by default what a MrBayes block of the alignment's file asks for, and without a block JC69.
    burn_in : float, optional
        As in `TreeSample.from_file`.
    num_steps : int, default 20,000
    learning_rates : LearningRates, optional
        Step sizes; by default 0.01, which falls to 0.0006 over the steps: ten times those of `variational_inference`,
        for a tenth of its steps.
    num_draws : int, default 10,000
        Draws for the evidence, the trees and the parameters.
    seed : int, default 0
    on_support : callable, optional
        Called with the trees of the files before the training.
    progress : bool, default True
    **settings
        Further settings of `variational_inference`.

    Returns
    -------
    posterior : VariationalPosterior
    evidence : Evidence
    sample : TreeSample
        Draws with importance weights.

    Raises
    ------
    AlignmentError, TreeError
        If a file is missing or malformed, or the taxa differ.
    SettingsError
        If a setting lies outside its domain, or the constraints of a MrBayes block exclude a tree of the files.
    KeyboardInterrupt
        On Ctrl-C, once a checkpoint is written.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "data.fasta").write_text(">A\nAACCAGT\n>B\nAACCGGT\n>C\nAGCTAGA\n>D\nAGCTACA\n")
    >>> _ = (folder / "trees.nwk").write_text("((A,B),C,D); ((A,C),B,D); ((A,D),B,C);")
    >>> _, evidence, sample = variational_inference_in_folder(
    ...     folder / "data.fasta", folder, trees=[folder / "trees.nwk"], num_steps=300, num_draws=4000, progress=False
    ... )
    >>> len(sample.topologies)
    3
    """
    folder = Path(folder)
    data, model = model_of_file(alignment, substitution)
    support = None
    if trees:
        support = TreeSample.from_files(trees, burn_in, False, taxa=data.taxa, progress=progress)
        if on_support is not None:
            on_support(support)
    num_steps = whole_number("num_steps", num_steps, 1)
    posterior = variational_inference(
        data,
        support,
        num_steps=num_steps,
        learning_rates=learning_rates or LearningRates(0.01, 0.01, every=max(1, num_steps // 10)),
        seed=seed,
        checkpoint=folder / "checkpoint.training",
        progress=progress,
        **model,
        **settings,
    )
    obey(posterior.ending)
    posterior.save(folder / "posterior.safetensors")
    evidence = posterior.log_evidence(num_draws, seed=seed)
    EvidenceComparison({evidence.method: evidence}, None, None).to_csv(folder / "evidence.csv")
    sample = posterior.sample(num_draws, seed=seed, weighted=True)
    sample.to_file(folder / "trees.trprobs")
    write_consensus(sample, folder)
    if posterior.target.priors:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SamplingWarning)  # said once, by the trees
            parameters = posterior.sample_parameters(num_draws, seed=seed, weighted=True)
        write_csv(folder / "parameters.csv", _summary(parameters))
    if posterior.ending != "time budget":
        remove_checkpoints(folder, "training*")
    return posterior, evidence, sample


def _summary(parameters: dict[str, torch.Tensor]) -> pd.DataFrame:
    """Return mean, standard deviation and quantiles of draws, each `(draws, *event_shape)`."""
    import pandas as pd

    rows = []
    for name, values in parameters.items():
        flat = values.reshape(len(values), -1)
        names = [name] if values.dim() == 1 else [f"{name}[{place}]" for place in range(flat.shape[-1])]
        low, high = np.quantile(flat.numpy(), [0.05, 0.95], axis=0)
        rows += list(zip(names, flat.mean(0).tolist(), flat.std(0).tolist(), low, high, strict=True))
    return pd.DataFrame(rows, columns=["parameter", "mean", "sd", "5 %", "95 %"])
