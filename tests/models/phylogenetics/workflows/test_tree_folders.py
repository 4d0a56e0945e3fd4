import math
import warnings

import numpy as np
import pandas as pd
import pytest
import torch

from bayeskit.errors import AccuracyWarning, CheckpointError, SamplingWarning, SettingsError, TreeError
from bayeskit.models.phylogenetics import HKY85, Alignment, SubsplitBayesianNetwork, TreeSample, all_topologies
from bayeskit.models.phylogenetics.workflows import VariationalPosterior, compare_topologies
from bayeskit.models.phylogenetics.workflows import _topology_comparison as topology_comparison
from bayeskit.models.phylogenetics.workflows._tree_folders import (
    compare_topologies_in_folder,
    fit_network_in_folder,
    variational_inference_in_folder,
)

SEQUENCES = {"A": "AACCAGT", "B": "AACCGGT", "C": "AGCTAGA", "D": "AGCTACA"}
TREES = all_topologies("ABCD")


@pytest.fixture
def fasta(tmp_path):
    path = tmp_path / "data.fasta"
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in SEQUENCES.items()))
    return path


def trprobs(path, topologies, weights):
    TreeSample.from_topologies(topologies, weights).to_file(path)
    return path


def test_comparison_of_a_list_is_that_of_its_trees(fasta, tmp_path):
    trees = tmp_path / "trees.nwk"
    trees.write_text("".join(f"{tree.to_newick(0)}\n" for tree in TREES))
    found = compare_topologies_in_folder(fasta, [trees], tmp_path, num_draws=1000, seed=3, progress=False)
    direct = compare_topologies(Alignment.from_sequences(SEQUENCES), TREES, num_draws=1000, seed=3, progress=False)
    torch.testing.assert_close(found.comparison.log_evidence, direct.log_evidence)
    assert found.total is None and found.num_topologies == 3 and not (tmp_path / "evidence.csv").exists()
    np.testing.assert_allclose(found.shares, 1 / 3)
    table = pd.read_csv(tmp_path / "topologies.csv").set_index("newick")
    back = TreeSample.from_file(tmp_path / "topologies.trprobs")
    for place, weight in enumerate(back.weights):
        row = table.loc[back.topologies.to_newick(place)]
        assert weight == pytest.approx(row["posterior_probability"], abs=1e-6)
    assert (tmp_path / "bayes_factors.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("name", ["tree_{}", "gen.{}"])
def test_hypotheses_in_nexus_are_no_chain(fasta, tmp_path, name):
    hypotheses = [TREES.to_newick(place) for place in (0, 1, 2, 1)]
    lines = "".join(f"tree {name.format(place)} = {tree}\n" for place, tree in enumerate(hypotheses))
    trees = tmp_path / "trees.nex"
    trees.write_text(f"#NEXUS\nbegin trees;\n{lines}end;\n")
    settings = {"num_draws": 100, "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        found = compare_topologies_in_folder(fasta, [trees], tmp_path, **settings)
        chain = compare_topologies_in_folder(fasta, [trees], tmp_path, burn_in=0.25, **settings)
    assert (found.num_topologies, found.num_trees, found.num_burn_in) == (3, 4, 0)
    np.testing.assert_allclose(found.shares, [0.5, 0.25, 0.25])
    assert (chain.num_topologies, chain.num_trees, chain.num_burn_in) == (2, 3, 1)


def test_several_runs_give_the_mass_of_what_was_compared(fasta, tmp_path):
    runs = [trprobs(tmp_path / f"{name}.trprobs", TREES, w) for name, w in (("1", [6, 3, 1]), ("2", [5, 4, 1]))]
    found = compare_topologies_in_folder(fasta, runs, tmp_path, most=2, num_draws=1000, progress=False)
    assert len(found.comparison.topologies) == 2 and found.num_topologies == 3
    np.testing.assert_allclose(found.shares, [0.55, 0.35])
    total = found.comparison.total_log_evidence
    assert found.total.log_evidence == pytest.approx(total.value - math.log(0.9), abs=1e-9)
    assert found.total.standard_error == pytest.approx(total.standard_error, abs=1e-9)  # both have the mass 0.9
    row = pd.read_csv(tmp_path / "evidence.csv").iloc[0]
    assert row["method"] == "sum_over_topologies" and row["log_evidence"] == pytest.approx(found.total.log_evidence)


def test_a_killed_comparison_goes_on_with_the_next_topology(fasta, tmp_path, monkeypatch):
    trees = tmp_path / "trees.nwk"
    trees.write_text("".join(f"{tree.to_newick(0)}\n" for tree in TREES))
    settings = {"num_draws": 100, "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        whole = compare_topologies_in_folder(fasta, [trees], tmp_path, **settings)
    assert not (tmp_path / "checkpoint.topologies").exists()
    done, estimate = [], topology_comparison._estimate

    def killed(weights, modes, place, number):
        if done == [0]:
            raise KeyboardInterrupt
        done.append(place)
        return estimate(weights, modes, place, number)

    monkeypatch.setattr(topology_comparison, "_estimate", killed)
    with pytest.raises(KeyboardInterrupt):
        compare_topologies_in_folder(fasta, [trees], tmp_path, **settings)
    done[:] = [None]
    with pytest.raises(CheckpointError, match="another task"):
        compare_topologies_in_folder(fasta, [trees], tmp_path, **settings, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        again = compare_topologies_in_folder(fasta, [trees], tmp_path, **settings)
    assert done == [None, 1, 2]
    assert again.comparison.log_evidence.tolist() == whole.comparison.log_evidence.tolist()
    assert again.comparison.standard_error.tolist() == whole.comparison.standard_error.tolist()
    assert not (tmp_path / "checkpoint.topologies").exists()


def test_one_topology_has_nothing_to_be_compared_with(fasta, tmp_path):
    trees = tmp_path / "trees.nwk"
    trees.write_text("((A,B),C,D); (A,B,(C,D));")
    with pytest.raises(TreeError, match=r"trees\.nwk: there is one topology only"):
        compare_topologies_in_folder(fasta, [trees], tmp_path, progress=False)


def test_a_malformed_tree_is_named_by_file_and_line(fasta, tmp_path):
    trees = tmp_path / "trees.nwk"
    trees.write_text("((A,B),C,D);\n((A,C),B,E);\n")
    with pytest.raises(TreeError, match=r"trees\.nwk.*2"):
        compare_topologies_in_folder(fasta, [trees], tmp_path, progress=False)


def test_a_network_says_how_far_it_is_from_its_sample(tmp_path):
    rng = np.random.default_rng(0)
    six = all_topologies("ABCDEF")[rng.permutation(105)]
    weights = rng.exponential(size=90)
    trees = trprobs(tmp_path / "sample.trprobs", six[:90], weights)
    # The maximum of likelihood has the sample's frequencies: a network of six taxa has more parameters than trees.
    found = fit_network_in_folder([trees], tmp_path, method="simple_average", progress=False)
    network = SubsplitBayesianNetwork.load(tmp_path / "network.safetensors")
    log_prob = network.log_prob(six)
    share = torch.from_numpy(weights / weights.sum())
    divergence = float((share * (share.log() - log_prob[:90])).sum())
    measures = pd.read_csv(tmp_path / "measures.csv").set_index("measure")["value"]
    # The file of the sample has its weights to a few digits.
    assert measures["divergence from the sample"] == pytest.approx(divergence, abs=1e-4) and divergence > 1e-3
    unseen = float(log_prob[90:].exp().sum())
    assert measures["probability of topologies that the sample lacks"] == pytest.approx(unseen, abs=1e-7) and unseen > 0
    exact = {six.to_newick(place): float(value.exp()) for place, value in enumerate(log_prob)}
    listed = pd.read_csv(tmp_path / "trees.csv").set_index("newick")
    assert 0.99 < sum(listed["probability"]) <= 1 + 1e-6  # the draws find the others
    for text, row in listed.iterrows():
        assert row["probability"] == pytest.approx(exact[text], abs=1e-7)
    assert list(found.trees["probability"]) == sorted(found.trees["probability"], reverse=True)
    assert sum(listed["in_sample"]) == pytest.approx(1.0) and (tmp_path / "splits.csv").exists()


def test_a_network_beside_a_reference(tmp_path):
    trees = trprobs(tmp_path / "sample.trprobs", TREES[[0, 1]], [3, 1])
    longer = trprobs(tmp_path / "longer.trprobs", TREES, [6, 3, 1])
    with pytest.warns(AccuracyWarning, match="infinite"):
        found = fit_network_in_folder([trees], tmp_path, reference=[longer], progress=False)
    measures = {name: value for name, (value, _) in found.measures.items()}
    assert measures["divergence from the reference"] == math.inf
    floor = float(np.finfo(float).eps)
    exact = 0.6 * math.log(0.6 / 0.75) + 0.3 * math.log(0.3 / 0.25) + 0.1 * math.log(0.1 / floor)
    # Four taxa: the network is free to have the sample's frequencies.
    for name in (
        "divergence from the reference, with probabilities of at least 2.2e-16",
        "the same of the sample's frequencies",
    ):
        assert measures[name] == pytest.approx(exact, abs=1e-3)
    row = found.trees.set_index("newick").loc[TREES.to_newick(2)]
    assert (row["probability"], row["in_sample"]) == (0, 0) and row["in_reference"] == pytest.approx(0.1)


@pytest.mark.calibration
def test_variational_inference_of_files(fasta, tmp_path):
    trees = trprobs(tmp_path / "sample.trprobs", TREES, [1, 1, 1])
    settings = {"trees": [trees], "substitution": "HKY85", "num_steps": 200, "num_draws": 500, "progress": False}
    with pytest.warns(SamplingWarning, match="not trusted") as said:
        posterior, z, sample = variational_inference_in_folder(fasta, tmp_path, **settings)
    assert len(said) == 1
    row = pd.read_csv(tmp_path / "evidence.csv").iloc[0]
    assert row["log_evidence"] == pytest.approx(z.log_evidence) and row["standard_error"] > 0
    back = VariationalPosterior.load(tmp_path / "posterior.safetensors")
    assert isinstance(back.target.likelihood.substitution, HKY85)
    assert back.log_evidence(500).log_evidence == z.log_evidence
    parameters = pd.read_csv(tmp_path / "parameters.csv")
    assert list(parameters["parameter"]) == ["kappa", *(f"base_frequencies[{place}]" for place in range(4))]
    weights = TreeSample.from_file(tmp_path / "trees.trprobs").weights
    np.testing.assert_allclose(weights, np.sort(sample.weights)[::-1], atol=1e-6)
    assert {"consensus.nwk", "consensus.svg"} <= {file.name for file in tmp_path.iterdir()}
    assert not list(tmp_path.glob("checkpoint*"))


def test_a_training_that_its_time_budget_ended_goes_on(fasta, tmp_path):
    trees = trprobs(tmp_path / "sample.trprobs", TREES, [1, 1, 1])
    settings = {"trees": [trees], "time_budget": 0.05, "num_draws": 100, "progress": False}
    steps = []
    for _ in range(2):
        with pytest.warns(SamplingWarning) as said:
            posterior, *_ = variational_inference_in_folder(fasta, tmp_path, **settings)
        assert "time budget" in str(said[0].message)
        assert posterior.ending == "time budget" and (tmp_path / "checkpoint.training").exists()
        steps.append(posterior.num_steps)
    assert steps[1] > steps[0]


def test_constraints_and_subsets_of_a_mrbayes_block(tmp_path):
    path = tmp_path / "a.nex"
    data = "matrix\n" + "\n".join(f"{name} {sequence}" for name, sequence in SEQUENCES.items()) + "\n;end;"
    parts = "charset one = 1-3; charset other = 4-7; partition parts = 2: one, other; set partition=parts;"
    block = f"begin mrbayes; {parts} constraint two = A B; prset topologypr=constraints(two); end;"
    path.write_text(f"#NEXUS begin data; dimensions ntax=4 nchar=7; format datatype=dna; {data} {block}")
    one, every = (trprobs(tmp_path / name, TREES[rows], [1] * len(rows)) for name, rows in PLACES.items())
    with pytest.warns(SamplingWarning, match="not trusted"):
        posterior, *_ = variational_inference_in_folder(path, tmp_path, trees=[one], num_steps=2, progress=False)
    assert list(posterior.target.data.subsets) == ["one", "other"]
    assert abs(posterior.target.log_topologies) < 1e-12
    with pytest.raises(SettingsError, match="that on A, B excludes a tree"):
        variational_inference_in_folder(path, tmp_path, trees=[every], progress=False)
    with pytest.raises(SettingsError, match="that on A, B excludes a tree"):
        compare_topologies_in_folder(path, [every], tmp_path, progress=False)


PLACE = [TREES.to_newick(place) for place in range(3)].index("(A,B,(C,D));")
PLACES = {"one.trprobs": [PLACE], "every.trprobs": [0, 1, 2]}
