"""Searches in which subsets of a partition have their own branch lengths, or rates in groups, against exact values."""

import math

import numpy as np
import pytest
import scipy.special
import torch
from pyro.distributions import Dirichlet, LogNormal

from bayeskit.errors import CheckpointError, SettingsError
from bayeskit.models.phylogenetics import (
    HKY85,
    JC69,
    K80,
    GammaDirichlet,
    GammaRates,
    Partition,
    PartitionedTreeModel,
    primates,
)
from bayeskit.models.phylogenetics.workflows import TopologyInference, infer_topologies, topology_evidence
from bayeskit.models.phylogenetics.workflows import _topology_inference as module
from tests.models.phylogenetics.test_tree_chains import exact_log_masses, keys
from tests.models.phylogenetics.workflows.test_characters import BASES, CHARACTERS, by_quadrature, mixed
from tests.models.phylogenetics.workflows.test_topology_inference import runs_until_killed_and_to_the_end

#: Subsets of the bases that speak for one topology and for none.
SUBSETS = BASES.partitioned({"slow": [0, 1, 2], "fast": [3, 4]})
SHORT = {"num_warmup": 10, "num_samples": 20, "num_temperatures": 4, "dtype": torch.float64, "progress": False}


def check_masses(found, topologies, masses, limit, error=0.0):
    """Compare the evidence and the shares of topologies with log masses of the topologies, `(topologies,)`."""
    exact = float(masses.logsumexp(0)) - math.log(len(masses))
    assert found.evidence.trusted
    assert abs(found.log_evidence - exact) - error < limit(4) * found.evidence.standard_error < 0.2
    names = [np.array(keys(sample.topologies))[sample.index] for sample in found.samples]
    series = torch.tensor(np.array([[run == key for run in names] for key in keys(topologies)])).double()
    z = (series.mean((1, 2)) - masses.softmax(0)) / module.mean_error(series)
    assert float(z.abs().max()) < limit(4), (z, masses.softmax(0))


@pytest.mark.compiler
@pytest.mark.calibration
@pytest.mark.parametrize("path", ["reference", "prior"])
def test_evidence_and_topologies_are_products_over_sets_of_lengths(path, limit):
    """Given the topology, subsets with their own lengths are independent, and their evidences multiply."""
    (topologies, slow), (_, fast) = map(exact_log_masses, SUBSETS.values())
    levels = {"reference": 5, "prior": 12}[path]
    settings = {"num_warmup": 150, "num_samples": 2000, "num_temperatures": levels, "progress": False, "path": path}
    found = infer_topologies(Partition(SUBSETS), separate_branch_lengths=True, **settings)
    check_masses(found, topologies, slow + fast, limit)
    # Shared lengths would be noticed.
    shared = float(exact_log_masses(BASES)[1].logsumexp(0)) - math.log(3)
    assert abs(found.log_evidence - shared) > limit() * found.evidence.standard_error


@pytest.mark.compiler
@pytest.mark.calibration
def test_characters_with_two_and_three_states_share_their_lengths_beside_those_of_bases(limit):
    characters = Partition.of_characters(CHARACTERS.select_sites([1, 3, 5]), coding="variable")
    both = mixed()
    data = Partition(both.subsets, both.substitution, both.site_rates, linked=characters.linked)
    assert data.length_groups == (("bases",), ("states_2", "states_3"))
    topologies, masses = by_quadrature(Partition({"bases": BASES}, JC69(), GammaRates(0.7)), None, 9)
    fine, coarse = (by_quadrature(characters, None, number)[1] for number in (9, 8))
    settings = {"num_warmup": 150, "num_samples": 2000, "num_temperatures": 5, "progress": False}
    found = infer_topologies(data, separate_branch_lengths=True, **settings)
    check_masses(found, topologies, masses + fine, limit, float((fine - coarse).abs().max()))


@pytest.mark.compiler
@pytest.mark.calibration
def test_a_linked_parameter_beside_separate_lengths_is_integrated_out(limit):
    prior = LogNormal(torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64))
    partition = Partition(SUBSETS, K80(prior), linked=["kappa"])
    nodes, weights = scipy.special.roots_hermitenorm(7)
    rows = []
    for node, weight in zip(nodes, weights / weights.sum(), strict=True):
        model = K80(math.exp(1 + 0.5 * node))
        topologies, slow = by_quadrature(SUBSETS["slow"], model, 7)
        rows.append(slow + by_quadrature(SUBSETS["fast"], model, 7)[1] + math.log(weight))
    logs = torch.stack(rows)
    settings = {"num_warmup": 150, "num_samples": 1500, "num_temperatures": 5, "progress": False}
    found = infer_topologies(partition, separate_branch_lengths=True, **settings)
    assert found.moves["gradient"][0] > 100 and found.moves["gradient"][1] > 0.4
    check_masses(found, topologies, logs.logsumexp(0), limit, 1e-3)
    drawn = found.parameters["kappa"].log()
    exact = logs.logsumexp(1).softmax(0) @ torch.as_tensor(1 + 0.5 * nodes)
    assert abs(float((drawn.mean() - exact) / module.mean_error(drawn))) < limit()


@pytest.fixture(scope="module")
def found():
    subsets = primates()[0].partitioned({"coding": range(457), "others": range(457, 800), "last": range(800, 898)})
    linked = {"kappa": [("coding", "others", "last")], "branch_lengths": [("coding", "last")]}
    partition = Partition(
        subsets, HKY85(base_frequencies=[0.3, 0.3, 0.1, 0.3]), {"coding": GammaRates()}, linked=linked
    )
    prior = GammaDirichlet.for_tree(primates()[1])
    return infer_topologies(partition, separate_branch_lengths=True, branch_length_prior=prior, **SHORT)


def test_densities_are_those_of_the_partitioned_tree_model(found):
    edges, sites = 2 * 12 - 3, torch.tensor([457 + 98, 343], dtype=torch.float64)
    assert found.branch_lengths.shape == (2, 20, 2, edges)
    values = found.branch_lengths.flatten(2).unique()
    assert len(values) > 1000  # they are not the same by mistake
    for run, sample in enumerate(found.samples):
        mean = torch.einsum("dse,s->de", found.branch_lengths[run], sites / sites.sum())
        assert torch.allclose(sample.branch_lengths, mean, rtol=1e-12, atol=0)
        own = found.sample_of("last")
        assert torch.equal(own.branch_lengths, found.branch_lengths[:, :, 0].flatten(0, 1))
        assert torch.equal(own.branch_lengths, found.sample_of("coding").branch_lengths)
        for draw in (0, 19):
            values = {name: drawn[run, draw] for name, drawn in found.parameters.items()}
            lengths = found.branch_lengths[run, draw]
            trees = [sample.topologies.tree(sample.index[draw], one) for one in lengths]
            model = PartitionedTreeModel(
                found.alignment, trees[0], found.branch_length_prior, separate_branch_lengths=True
            )
            there = torch.stack([tree.branch_lengths for tree in trees])
            expected = model.log_likelihood(there, **values)
            assert abs(float(found.log_likelihood[-1, run, draw] - expected)) < 1e-8
            # Lengths that are shared by mistake, or those of the other set, are noticed.
            for wrong in (there[[0, 0]], there.flip(0)):
                assert abs(float(model.log_likelihood(wrong, **values) - expected)) > 1e-3
            log_prior = found.branch_length_prior.log_prob(lengths).sum()
            log_prior += sum(prior.log_prob(values[name]) for name, prior in model.priors.items())
            jacobian = values["kappa"].log() + values["shape_coding"].log()
            assert abs(float(found.log_prior[run, draw] - log_prior - jacobian)) < 1e-4


def test_the_lengths_of_all_sets_are_in_the_summaries(found):
    lengths = found.to_datasets()["posterior"]["tree_lengths"].to_numpy()
    assert lengths.shape == (2, 20, 2)
    assert np.allclose(lengths, found.branch_lengths.sum(-1))
    assert "tree_lengths" in found.r_hat and found.settings["separate_branch_lengths"] is True


def test_searches_with_separate_lengths_are_pooled(found):
    data, prior = found.alignment, found.branch_length_prior
    settings = {"branch_length_prior": prior, **SHORT, "seed": 1}
    other = infer_topologies(data, separate_branch_lengths=True, **settings)
    pooled = TopologyInference.pooled([found, other])
    assert torch.equal(pooled.branch_lengths, torch.cat([found.branch_lengths, other.branch_lengths]))
    assert torch.equal(pooled.sample_of("others").branch_lengths, pooled.branch_lengths[:, :, 1].flatten(0, 1))
    shared = infer_topologies(data, **settings)
    with pytest.raises(SettingsError, match="differ in separate_branch_lengths"):
        TopologyInference.pooled([found, shared])


def test_one_set_of_lengths_gives_the_same_bits():
    subsets = primates()[0].partitioned({"coding": range(457), "others": range(457, 898)})
    partition = Partition(subsets, K80(), linked=["kappa", "branch_lengths"])
    one, other = (infer_topologies(partition, separate_branch_lengths=apart, **SHORT) for apart in (False, True))
    assert one.branch_lengths is None and other.branch_lengths.shape == (2, 20, 1, 21)
    for name in ("log_likelihood", "log_ratio", "log_prior"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert torch.equal(one.samples[0].branch_lengths, other.branch_lengths[0, :, 0])


def test_a_search_with_separate_lengths_goes_on_bit_for_bit(tmp_path):
    partition = Partition(SUBSETS, K80())
    whole, found = runs_until_killed_and_to_the_end(partition, tmp_path, separate_branch_lengths=True)
    assert torch.equal(whole.branch_lengths, found.branch_lengths)
    assert torch.equal(whole.log_ratio, found.log_ratio)
    with pytest.raises(CheckpointError):
        infer_topologies(partition, checkpoint=tmp_path / "search", num_warmup=20, num_samples=20, progress=False)


def test_groups_of_subsets_have_one_rate():
    characters = Partition.of_characters(CHARACTERS.select_sites([1, 3, 5]), coding="variable")
    both = mixed()
    prior = Dirichlet(torch.tensor([2.0, 3.0], dtype=torch.float64))
    data = Partition(both.subsets, both.substitution, both.site_rates, linked=characters.linked, relative_rates=prior)
    found = infer_topologies(data, **SHORT)
    shares, rates = found.parameters["rate_shares"], found.parameters["relative_rates"]
    assert shares.shape == (2, 20, 2)
    expected = torch.stack([shares[..., 0] * 8 / 5, shares[..., 1] * 8 / 3, shares[..., 1] * 8 / 3], -1)
    assert torch.allclose(rates, expected, rtol=1e-12, atol=0)
    sample = found.samples[0]
    tree = sample.topologies.tree(sample.index[-1], sample.branch_lengths[-1])
    fixed = Partition(both.subsets, both.substitution, both.site_rates, relative_rates=rates[0, -1].tolist())
    log_likelihood = PartitionedTreeModel(fixed, tree).log_likelihood(tree.branch_lengths)
    assert abs(float(found.log_likelihood[-1, 0, -1] - log_likelihood)) < 1e-10


def test_what_is_refused(found):
    with pytest.raises(SettingsError, match=r"Alignment has no subsets.*Remedy: give Partition"):
        infer_topologies(BASES, separate_branch_lengths=True, **SHORT)
    with pytest.raises(SettingsError, match="relative_rates are not supported beside.*Remedy"):
        infer_topologies(Partition(SUBSETS, relative_rates=[1.0, 2.0]), separate_branch_lengths=True, **SHORT)
    with pytest.raises(SettingsError, match="no subset 'first'.*choose from coding, others, last"):
        found.sample_of("first")
    with pytest.raises(SettingsError, match="same branch lengths.*separate_branch_lengths=True"):
        infer_topologies(Partition(SUBSETS), **SHORT).sample_of("slow")
    with pytest.raises(SettingsError, match="own branch lengths.*Remedy: use its log_evidence"):
        topology_evidence(found)
