"""What a comparison makes of its methods: one run of each part, refusals, scores, files."""

import math
import pickle
import warnings
from dataclasses import replace

import pandas as pd
import pytest
import torch
import xarray as xr

import bayeskit as bk
from bayeskit import exact
from bayeskit.errors import DataError, SettingsError, UnknownNameError
from bayeskit.inference import evidence
from bayeskit.inference.evidence import Budget, Evidence, EvidenceComparison
from bayeskit.inference.evidence._comparison import COLUMNS, own_seconds
from bayeskit.inference.evidence._conditionals import ConjugateBlock
from bayeskit.inference.evidence._shared_runs import SharedRuns

BUDGET = Budget(4, 100, 100, num_temperatures=12, ladder_chains=4, ladder_warmup=60, ladder_samples=60)


@pytest.mark.calibration
def test_each_part_is_made_once(monkeypatch):
    from bayeskit.inference.evidence import _shared_runs as shared_runs

    made = []
    for name, maker in list(shared_runs.MAKERS.items()):
        monkeypatch.setitem(
            shared_runs.MAKERS, name, lambda m, name=name, maker=maker: (made.append(name), maker(m))[1]
        )
    target = exact.get("three_taxon_tree").target()
    methods = [
        "harmonic_mean",
        "bridge_sampling",
        "path_sampling",
        "stepping_stone",
        "gamma_laplus",
        "lognormal_laplus",
    ]
    table = evidence.compare(target, methods, budget=BUDGET, progress=False)
    assert sorted(made) == ["ladder", "positive mode", "posterior"]
    assert set(table.part_seconds) == set(made)
    assert table.draws.num_chains == 4 and len(table.ladder.beta) == 13


def test_seconds_hold_what_a_method_alone_would_have_cost():
    table = evidence.compare(
        exact.get("beta_binomial").target(), ["bridge_sampling", "stepping_stone"], budget=BUDGET, progress=False
    )
    assert table["bridge_sampling"].seconds >= table.part_seconds["posterior"]
    assert table["stepping_stone"].seconds >= table.part_seconds["ladder"]


def test_seconds_of_given_draws_count_once():
    target = exact.get("beta_binomial").target()
    draws = replace(bk.sample(target, 4, 60, 100, progress=False), seconds=1000.0)
    table = evidence.compare(target, ["bridge_sampling"], draws=draws, progress=False)
    assert 1000 < table["bridge_sampling"].seconds < 2000
    assert own_seconds(table) < 1000


def test_what_does_not_apply_is_refused_with_its_reason():
    target = exact.get("linreg10").target()
    table = evidence.compare(target, ["gamma_laplus", "bridge_sampling"], budget=BUDGET, progress=False)
    assert list(table.results) == ["bridge_sampling"] and "site 'b' is not a positive" in table.refused["gamma_laplus"]
    assert table.verdict.refused == table.refused
    row = table.to_pandas().set_index("method").loc["gamma_laplus"]
    assert math.isnan(row["log_evidence"]) and not row["trusted"] and row["warnings"].startswith("does not apply")
    with pytest.raises(UnknownNameError, match="does not apply"):
        table["gamma_laplus"]


def test_without_draws_from_the_prior_a_ladder_is_refused():
    constant = 0.5 * math.log(2 * math.pi)
    target = bk.Target.from_functions(
        lambda u: (-0.5 * u.square() - constant).sum(-1), lambda u: (-0.5 * (u - 1).square() - constant).sum(-1), 2
    )
    table = evidence.compare(target, ["naive_monte_carlo", "stepping_stone", "bridge_sampling"], budget=BUDGET)
    assert set(table.refused) == {"naive_monte_carlo", "stepping_stone"} and table.ladder is None
    assert all("sample_prior" in reason for reason in table.refused.values())


def test_a_part_that_fails_says_so_again():
    target = bk.Target.from_functions(
        lambda u: -0.5 * u.square().sum(-1),
        lambda u: torch.nan * u.sum(-1),
        1,
        lambda n, g: torch.randn(n, 1, generator=g),
    )
    runs = SharedRuns(target, BUDGET)
    for _ in range(2):
        with pytest.raises(DataError, match="NaN"):
            runs.part("posterior")
    with pytest.raises(SettingsError, match="no shared part"):
        runs.part("dessert")


@pytest.mark.calibration
def test_the_files_hold_the_table(tmp_path):
    target = exact.get("beta_binomial").target()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bk.errors.SamplingWarning)
        table = evidence.compare(target, ["gamma_laplus", "bridge_sampling"], budget=BUDGET, progress=False)
    table.to_csv(tmp_path / "evidence.csv")
    assert tuple(pd.read_csv(tmp_path / "evidence.csv").columns) == COLUMNS
    table.to_netcdf(tmp_path / "evidence.nc")
    with xr.open_datatree(tmp_path / "evidence.nc", engine="h5netcdf") as tree:
        assert float(tree["evidence"]["log_evidence"].sel(estimator="bridge_sampling")) == pytest.approx(
            table["bridge_sampling"].log_evidence
        )
        assert tree["evidence"].attrs["verdict"] == str(table.verdict)
        assert tree["posterior"].sizes["draw"] == 100
    page = table.to_html(tmp_path / "evidence.html", reference=-2.3979)
    assert (tmp_path / "evidence.html").read_text(encoding="utf-8") == page
    for piece in ("bridge_<wbr>sampling", "1 method does not apply", "data:image/svg", "Reference value"):
        assert piece in page
    assert "bridge_sampling" in table._repr_html_() and "evidence" in table.to_datasets()


def test_a_comparison_travels_between_processes():
    """With its draws, its ladder and their target, whose graphs stay behind and are made again."""
    target = exact.get("beta_binomial").target()
    table = evidence.compare(target, ["bridge_sampling", "stepping_stone"], budget=BUDGET, progress=False)
    u = table.draws.unconstrained[0]
    before = target.value_and_grad(u)
    with pytest.raises((TypeError, AttributeError), match=r"[Cc]an('|no)t pickle"):
        pickle.dumps(target._engine._evaluators)
    copy = pickle.loads(pickle.dumps(table))
    pd.testing.assert_frame_equal(copy.to_pandas(), table.to_pandas())
    assert str(copy.verdict) == str(table.verdict) and torch.equal(copy.ladder.beta, table.ladder.beta)
    after = copy.draws.target.value_and_grad(u)
    assert copy.draws.target.fingerprint() == target.fingerprint()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_comparison_of_nothing_has_no_verdict():
    empty = EvidenceComparison({}, None, None)
    assert empty.verdict.best is None and len(empty.to_pandas()) == 0
    one = EvidenceComparison({"a": Evidence("a", -1.0, 0.1, 10)}, None, None)
    assert one.verdict.log_evidence == -1.0 and "1 of 1 methods trusted" in str(one.verdict)


def test_the_error_of_the_reference_counts_in_the_report():
    table = EvidenceComparison({"a": Evidence("a", -1.0, 0.03, 10)}, None, None)
    assert "Reference value: -1.1000. The estimate is +3.33 standard errors" in table.to_html(reference=-1.1)
    page = table.to_html(reference=-1.1, reference_error=0.04)
    assert "Reference value: -1.100 ± 0.040. The estimate is +2.00 standard errors" in page
    for wrong in (-1.0, math.nan, None, "little"):
        with pytest.raises(SettingsError, match="reference_error"):
            table.to_html(reference=-1.1, reference_error=wrong)


def test_a_notebook_shows_verdict_scores_refusals_and_notes():
    doubt = Evidence("b", -7.0, 0.1, 10, ("weights dominate",))
    score = evidence.PredictiveScore("pointwise_predictive_density", -3.0, 0.1, 10)
    table = EvidenceComparison(
        {"a": Evidence("a", -1.0, 0.03, 10), "b": doubt},
        None,
        None,
        scores={score.method: score},
        refused={"chib": "no blocks"},
        notes=("constants may be missing",),
    )
    shown = table._repr_html_()
    wanted = (
        "1 of 2 methods trusted",
        "weights dominate",
        "pointwise_<wbr>predictive_<wbr>density",
        "no blocks",
        "constants may",
    )
    assert not [piece for piece in wanted if piece not in shown] and "<svg" not in shown and "<h2>" not in shown


def test_blocks_that_are_none_are_refused_and_a_single_one_is_taken():
    target = exact.get("beta_binomial").target()
    for wrong in (3, ["p"], {"p": None}):
        with pytest.raises(SettingsError, match="blocks must be ConjugateBlocks"):
            evidence.compare(target, ["chib"], blocks=wrong, budget=BUDGET, progress=False)
    three, nine = torch.tensor([3.0, 9.0], dtype=torch.float64)  # of two successes in ten trials
    block = ConjugateBlock("p", lambda others: torch.distributions.Beta(three, nine))
    single, listed = (
        evidence.compare(target, ["chib"], blocks=given, budget=BUDGET, progress=False) for given in (block, [block])
    )
    assert single["chib"].log_evidence == listed["chib"].log_evidence == pytest.approx(-math.log(11), abs=1e-10)
