"""Fitted approximations of tree posteriors in files: the same draws afterwards, and files that are refused."""

import json
import os

import pyro.distributions as dist
import pytest
import torch

from bayeskit._core.folders import Schema
from bayeskit._core.storage import loaded_tensors, save_tensors
from bayeskit.errors import CheckpointError, OutputError, SettingsError
from bayeskit.models.phylogenetics import (
    GTR,
    HKY85,
    JC69,
    K80,
    TN93,
    Alignment,
    GammaDirichlet,
    GammaRates,
    InvariantSites,
    SampleFrequencies,
    SubsplitBayesianNetwork,
    all_topologies,
)
from bayeskit.models.phylogenetics.workflows import (
    FlowLengths,
    LogNormalLengths,
    VariationalPosterior,
    variational_inference,
)

FREQUENCIES = [0.4, 0.3, 0.2, 0.1]
FIVE = Alignment.from_sequences({"A": "CCTCATCG", "B": "CCTCATCT", "C": "CCAGTGAT", "D": "GCAGTGCC", "E": "CTCGR-CA"})
TEN = torch.tensor(10.0, dtype=torch.float64)
MODELS = {
    "defaults": {},
    "flow, HKY85, Gamma rates": {
        "lengths": FlowLengths(hidden=4),
        "substitution": HKY85(2.0, FREQUENCIES),
        "site_rates": GammaRates(0.5, 3, median=True),
        "branch_length_prior": dist.LogNormal(-2.0 * TEN / TEN, TEN / TEN),
    },
    "GTR, both rates, a prior of all": {
        "lengths": LogNormalLengths(with_pairs=False),
        "substitution": GTR([0.3, 2.0, 1.1, 0.7, 3.0, 1.0], FREQUENCIES),
        "site_rates": InvariantSites(0.2, GammaRates(0.5)),
        "branch_length_prior": GammaDirichlet(torch.ones(7, dtype=torch.float64)),
    },
    "K80, invariant, one prior each": {
        "substitution": K80(3.0),
        "site_rates": InvariantSites(0.2),
        "branch_length_prior": dist.Gamma(torch.linspace(1, 2, 7).double(), TEN).to_event(1),
    },
    "GTR, Gamma and invariant rates, all free": {
        "substitution": GTR(base_frequencies=dist.Dirichlet(torch.full((4,), 3.0))),
        "site_rates": InvariantSites(dist.Beta(TEN / 5, TEN), GammaRates()),
    },
    "TN93": {"substitution": TN93(2.0, 5.0, FREQUENCIES)},
    "a prior of torch": {"branch_length_prior": torch.distributions.Exponential(TEN)},
}


def fitted(**settings) -> VariationalPosterior:
    support = SubsplitBayesianNetwork.fit(SampleFrequencies.from_topologies(all_topologies(FIVE.taxa)[::2]))
    return variational_inference(FIVE, support, num_steps=3, progress=False, **settings)


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_what_is_loaded_draws_the_same_bit_for_bit(settings, tmp_path):
    posterior, path = fitted(**settings), tmp_path / "posterior.safetensors"
    posterior.save(path)
    # The first file is not needed once it was read.
    loaded = VariationalPosterior.load(path)
    loaded.save(path)
    loaded = VariationalPosterior.load(path)
    one, other = (found.weighted_trees(40, seed=3) for found in (posterior, loaded))
    assert (one.topologies.children == other.topologies.children).all() and one.topologies.taxa == other.topologies.taxa
    assert all(torch.equal(first, second) for first, second in zip(one[1:-1], other[1:-1], strict=True))
    assert one.parameters.keys() == other.parameters.keys()
    assert all(torch.equal(one.parameters[name], other.parameters[name]) for name in one.parameters)
    assert torch.equal(loaded.bounds, posterior.bounds) and loaded.settings == posterior.settings
    assert (loaded.ending, loaded.seconds) == (posterior.ending, posterior.seconds)
    assert loaded.log_evidence(50).log_evidence == posterior.log_evidence(50).log_evidence
    if posterior.target.likelihood.site_rates is not None:
        # The mutation: a file that forgets the rates.
        loaded.target.likelihood.site_rates = None
        assert not torch.equal(loaded.weighted_trees(40, seed=3).log_weight, one.log_weight)


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "posterior"
    fitted().save(path)
    whole, schema = path.read_bytes(), Schema("a variational posterior of trees", 4)
    with loaded_tensors(path, schema) as (tensors, facts):
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="truncated"):
        VariationalPosterior.load(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        VariationalPosterior.load(tmp_path / "none")
    SampleFrequencies.from_topologies(all_topologies("ABCD")).save(path)
    with pytest.raises(CheckpointError, match="holds a distribution over topologies, not a variational posterior"):
        VariationalPosterior.load(path)
    sizes = {name: tensor.numel() for name, tensor in tensors.items()}
    parameters = max(sizes, key=lambda name: (tensors[name].dtype == torch.float64, sizes[name]))
    text = json.dumps(facts)
    damaged = [({**tensors, parameters: tensors[parameters][:-1]}, text)]
    damaged += [({name: one for name, one in tensors.items() if name != parameters}, text)]
    for old, new in (("JC69", "Path"), ("finished", "well"), ("Exponential", "Delta"), ('"alignment"', '"data"')):
        assert old in text
        damaged.append((tensors, text.replace(old, new)))
    damaged.append((tensors, text.replace(text[text.index('"data"') :], '"data": 3}')))
    for some, changed in damaged:
        save_tensors(path, some, json.loads(changed), schema)
        with pytest.raises(CheckpointError, match="do not fit together"):
            VariationalPosterior.load(path)


class OwnModel(JC69):
    """A user's model, of which a file knows nothing."""


def test_what_cannot_be_saved_says_so(tmp_path):
    path = tmp_path / "posterior"
    with pytest.raises(SettingsError, match=r"OwnModel.*Remedy"):
        fitted(substitution=OwnModel()).save(path)
    with pytest.raises(SettingsError, match="Chi2 cannot be saved. Remedy: use one of Exponential, Gamma"):
        fitted(branch_length_prior=dist.Chi2(TEN)).save(path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(OutputError, match="cannot write"):
        fitted().save(tmp_path / "no folder" / "posterior")
