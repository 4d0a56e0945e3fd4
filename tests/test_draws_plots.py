"""Plots of draws, and what notebooks show."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import DrawsError, SettingsError, UnknownNameError


def model(y):
    scale = pyro.sample("scale", dist.HalfNormal(2.0))
    with pyro.plate("state", 3):
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(effect, scale), obs=y)


@pytest.fixture(scope="module")
def draws():
    y = torch.tensor([0.3, -0.5, 1.2], dtype=torch.float64)
    coords = {"state": ["IA", "<b>", "WI"]}
    return bk.sample(model, y, num_samples=120, num_warmup=200, progress=False, coords=coords)


@pytest.mark.parametrize(
    ("kind", "names", "labels"),
    [
        ("chains", None, ["scale", "effect[IA]", "effect[<b>]", "effect[WI]"]),
        ("chains", ["effect[WI]"], ["effect[WI]"]),
        ("ranks", ["scale", "effect"], ["scale", "effect[IA]", "effect[<b>]", "effect[WI]"]),
        ("prior", "effect", ["effect[IA]", "effect[<b>]", "effect[WI]"]),
        ("pairs", ["scale", "effect[IA]"], ["scale", "effect[IA]"]),
    ],
)
def test_quantities_are_named_and_complete(draws, kind, names, labels):
    figure = draws.plot(kind, names)
    shown = {text for ax in figure.axes for text in (ax.get_xlabel(), ax.get_title())}
    assert set(labels) <= shown and not {"effect[WI]", "scale"} - set(labels) & shown
    figure.canvas.draw()


def test_curves_are_those_of_the_draws(draws):
    paths = draws.plot("chains", ["scale"]).axes[1].collections[0].get_segments()
    torch.testing.assert_close(torch.tensor(paths[2][:, 1]), draws["scale"][2], rtol=1e-12, atol=0)
    points = draws.plot("pairs", ["scale", "effect[IA]"]).axes[2].lines[0]
    assert len(points.get_xdata()) == 480
    torch.testing.assert_close(torch.tensor(points.get_ydata()), draws["effect"][..., 0].flatten(), rtol=1e-12, atol=0)


def test_divergent_transitions_are_marked(draws):
    diverging = torch.zeros_like(draws.sample_stats["diverging"])
    diverging[1, [7, 40]] = True
    marked = bk.Draws(
        draws.unconstrained,
        draws.log_prior,
        draws.log_likelihood,
        draws.beta,
        draws.sample_stats | {"diverging": diverging},
        target=draws.target,
    )
    assert marked.plot("chains", ["scale"]).axes[1].lines[0].get_xdata().tolist() == [7, 40]
    points = marked.plot("pairs", ["scale", "effect[IA]"]).axes[2].lines[1]
    assert points.get_xdata().tolist() == draws["scale"][1, [7, 40]].tolist()


def test_the_fraction_of_energy_is_that_of_its_definition(draws):
    energy = draws.sample_stats["energy"]
    fraction = energy.diff(dim=1).square().mean(1) / energy.var(1, correction=0)
    title = draws.plot("energy").axes[0].get_title()
    assert title == f"E-BFMI from {fraction.min():.2f} to {fraction.max():.2f} by chain"


def test_what_cannot_be_plotted(draws, tmp_path):
    with pytest.raises(SettingsError, match="kind must be one of 'chains'"):
        draws.plot("trace")
    with pytest.raises(UnknownNameError, match="'efect'"):
        draws.plot("chains", ["efect"])
    with pytest.raises(SettingsError, match="pairs need two"):
        draws.plot("pairs", ["scale"])
    with pytest.raises(SettingsError, match="names is empty"):
        draws.plot("pairs", [])
    constant = bk.Draws(torch.full((2, 30, 2), 1e17), torch.zeros(2, 30), torch.zeros(2, 30), torch.ones(2))
    assert "only names" in constant.target._repr_html_() and not hasattr(constant.target, "sites")
    for kind in ("chains", "pairs"):
        constant.plot(kind).canvas.draw()
    assert bk.Draws.join([constant, constant]).num_chains == 4
    draws.save(tmp_path / "draws")
    loaded = bk.Draws.load(tmp_path / "draws")
    assert len(loaded.plot("chains", ["effect[IA]"]).axes) == 2
    with pytest.raises(DrawsError, match="target=target"):
        loaded.plot("prior")
    with pytest.raises(SettingsError, match="no energies"):
        bk.prior_predictive(draws.target, num_draws=50).plot("energy")


def test_notebooks_show_targets_and_scores(draws):
    shown = draws.target._repr_html_()
    assert "Target of 4 unconstrained coordinates" in shown and "effect" in shown and "state" in shown
    score = draws.loo()
    shown = score._repr_html_()
    assert f"elpd {score.elpd:.2f}" in shown and "Pareto" in shown
    assert ("1 warning" in shown or "warnings" in shown) is bool(score.warnings)
