from dataclasses import replace

import pytest

from bayeskit.errors import SamplingWarning, SettingsError
from bayeskit.models.phylogenetics import TreeSample, majority_rule_consensus
from bayeskit.models.phylogenetics.workflows import _topology_folder as topology_folder
from bayeskit.models.phylogenetics.workflows._topology_folder import infer_topologies_in_folder

NUMBERS = {"num_warmup": 20, "num_samples": 40, "num_temperatures": 4, "progress": False}


@pytest.fixture
def fasta(tmp_path):
    path = tmp_path / "data.fasta"
    path.write_text(">A\nAACCAGT\n>B\nAACCGGT\n>C\nAGCTAGA\n>D\nAGCTACA\n")
    return path


def test_files_are_those_of_the_search(fasta, tmp_path):
    search, found = infer_topologies_in_folder(fasta, tmp_path, evidence=False, facts={"command": "typed"}, **NUMBERS)
    assert found is None and not list(tmp_path.glob("checkpoint*"))
    assert (tmp_path / "consensus.nwk").read_text() == majority_rule_consensus(search.sample).to_newick() + "\n"
    runs = [TreeSample.from_file(tmp_path / f"run{run}.trees") for run in (1, 2)]
    assert [run.num_samples for run in runs] == [40, 40]
    assert "typed" in (tmp_path / "report.html").read_text() and "data.fasta" in (tmp_path / "report.html").read_text()


def test_ctrl_c_ends_before_anything_is_written(fasta, tmp_path, monkeypatch):
    run = topology_folder.infer_topologies
    monkeypatch.setattr(
        topology_folder, "infer_topologies", lambda *a, **k: replace(run(*a, **k), ending="interrupted")
    )
    with pytest.raises(KeyboardInterrupt):
        infer_topologies_in_folder(fasta, tmp_path, evidence=False, **NUMBERS)
    assert {path.name for path in tmp_path.iterdir()} == {"data.fasta", "checkpoint.search"}
    monkeypatch.undo()
    search, _ = infer_topologies_in_folder(fasta, tmp_path, evidence=False, **NUMBERS)
    assert search.ending == "finished" and (tmp_path / "report.html").exists()


@pytest.mark.calibration
def test_a_search_that_its_time_budget_ended_goes_on(fasta, tmp_path):
    numbers = NUMBERS | {"num_warmup": 10, "num_samples": 100_000, "time_budget": 0.5}
    drawn = []
    for _ in range(2):
        with pytest.warns(SamplingWarning, match="time budget"):
            search, _ = infer_topologies_in_folder(fasta, tmp_path, evidence=False, **numbers)
        assert search.ending == "time budget" and (tmp_path / "checkpoint.search").exists()
        drawn.append(search.sample.num_samples)
    assert drawn[1] > drawn[0]


def test_one_run_has_no_evidence_in_three_ways(fasta, tmp_path):
    with pytest.raises(SettingsError, match="two runs"):
        infer_topologies_in_folder(fasta, tmp_path, num_runs=1, **NUMBERS)
    assert {path.name for path in tmp_path.iterdir()} == {"data.fasta"}


@pytest.mark.calibration
def test_three_ways_for_the_subsets_of_a_mrbayes_block(tmp_path):
    path = tmp_path / "data.nex"
    data = "matrix\nA AACCAGT\nB AACCGGT\nC AGCTAGA\nD AGCTACA\n;end;"
    parts = "charset one = 1-3; charset two = 4-7; partition both = 2: one, two; set partition = both; "
    priors = "topologypr=constraints(few) brlenspr=unconstrained:exponential(10) statefreqpr=fixed(equal)"
    start = f"#NEXUS begin data; dimensions ntax=4 nchar=7; format datatype=dna; {data} begin mrbayes; {parts}"
    path.write_text(f"{start}constraint few = A B; prset {priors}; end;")
    search, found = infer_topologies_in_folder(path, tmp_path, num_steps=100, **NUMBERS)
    assert search.constraints == (("A", "B"),) and list(search.alignment.subsets) == ["one", "two"]
    assert len(found.table.results) == 3
    assert len((tmp_path / "evidence.csv").read_text().splitlines()) == 4
