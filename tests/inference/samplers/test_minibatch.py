import copy
import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import chisquare

import bayeskit as bk
from bayeskit.errors import DataError, ModelError, SettingsError, ShapeError, SlowModelWarning, UnsupportedSiteError
from bayeskit.inference.samplers import _minibatch as _minibatch_density
from bayeskit.inference.samplers._minibatch import Epochs, IndependentRows, MinibatchTarget

NUM_DATA, BATCH_SIZE = 24, 4
_generator = torch.Generator().manual_seed(3)
X = torch.randn(NUM_DATA, 2, generator=_generator, dtype=torch.float64)
Y = X @ torch.tensor([1.0, -0.5], dtype=torch.float64) + torch.randn(
    NUM_DATA, generator=_generator, dtype=torch.float64
)
GROUP = torch.arange(NUM_DATA) % 3
PILOT = torch.tensor([0.3, 0.1], dtype=torch.float64)


def hierarchical(x, y, batch_size=None):
    """Group effects in a full plate, positive and simplex parameters, observations in and out of the plate."""
    weight = pyro.sample("weight", dist.Dirichlet(x.new_ones(3)))
    noise = pyro.sample("noise", dist.HalfNormal(x.new_ones(())))
    spread = pyro.sample("spread", dist.Gamma(x.new_tensor(2.0), 1.0))
    with pyro.plate("groups", 3):
        effect = pyro.sample("effect", dist.Normal(0.0, spread))
    pyro.deterministic("total", effect.sum())
    pyro.sample("pilot", dist.Normal(effect[:2], 1.0).to_event(1), obs=PILOT)
    with pyro.plate("data", len(y), subsample_size=batch_size) as rows:
        mean = effect[GROUP[rows]] + x[rows] @ weight[:2]
        pyro.deterministic("mean", mean)
        pyro.sample("y", dist.Normal(mean, noise), obs=y[rows])


def mixture(y, batch_size=None):
    """Assignments summed out inside the plate."""
    share = pyro.sample("share", dist.Beta(y.new_tensor(2.0), 2.0))
    place = pyro.sample("place", dist.Normal(y.new_zeros(2), 2.0).to_event(1))
    with pyro.plate("data", len(y), subsample_size=batch_size) as rows:
        which = pyro.sample("which", dist.Bernoulli(share), infer={"enumerate": "parallel"}).long()
        pyro.sample("y", dist.Normal(place[which], 1.0), obs=y[rows])


def with_subsample_statement(x, y):
    """The other way to write minibatches in Pyro."""
    slope = pyro.sample("slope", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(y), subsample_size=BATCH_SIZE):
        inputs, outputs = pyro.subsample(x, event_dim=1), pyro.subsample(y, event_dim=0)
        pyro.sample("y", dist.Normal(inputs @ slope, 1.0), obs=outputs)


def one_by_one(x, y):
    """A plate that is looped over, which no batch of chains can follow."""
    slope = pyro.sample("slope", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
    for i in pyro.plate("data", len(y), subsample_size=BATCH_SIZE):
        pyro.sample(f"y_{i}", dist.Normal(x[i] @ slope, 1.0), obs=y[i])


def network():
    torch_state = torch.get_rng_state()
    module = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    torch.set_rng_state(torch_state)
    return module


def row_log_likelihood(output, y):
    return dist.Normal(output.squeeze(-1), 0.7).log_prob(y)


def make(name):
    if name == "hierarchical":
        return MinibatchTarget.from_pyro(hierarchical, X, Y, batch_size=BATCH_SIZE, plate="data")
    if name == "mixture":
        return MinibatchTarget.from_pyro(mixture, Y, batch_size=BATCH_SIZE)
    if name == "module":
        return MinibatchTarget.from_module(network(), row_log_likelihood, (X, Y), batch_size=BATCH_SIZE)
    return MinibatchTarget.from_functions(
        lambda u: -0.5 * u.square().sum(),
        lambda u, rows: -0.5 * (Y[rows] - X[rows] @ u).square(),
        2,
        NUM_DATA,
        batch_size=BATCH_SIZE,
    )


def exact(name):
    """Return the posterior of all rows, made without minibatches where that is possible."""
    if name == "hierarchical":
        return bk.Target.from_pyro(hierarchical, X, Y)
    if name == "mixture":
        return bk.Target.from_pyro(mixture, Y)
    if name == "module":
        module, names = network(), [n for n, _ in network().named_parameters()]

        def log_likelihood(u):
            pieces = u.split([p.numel() for p in module.parameters()])
            values = {n: v.reshape(p.shape) for n, v, p in zip(names, pieces, module.parameters(), strict=True)}
            return row_log_likelihood(torch.func.functional_call(module, values, (X,)), Y).sum()

        dim = sum(p.numel() for p in module.parameters())
        return bk.Target.from_functions(
            lambda u: (-0.5 * u.square() - 0.5 * math.log(2 * math.pi)).sum(-1), torch.func.vmap(log_likelihood), dim
        )
    return bk.Target.from_functions(
        lambda u: -0.5 * u.square().sum(-1), lambda u: -0.5 * (Y - u @ X.mT).square().sum(-1), 2
    )


NAMES = ["hierarchical", "mixture", "module", "functions"]


def epoch_error(target, full, num_chains=3):
    """Mean estimate over one epoch minus the exact value, relative to the size of the exact one."""
    generator = torch.Generator().manual_seed(1)
    u = torch.randn(num_chains, target.dim, generator=generator, dtype=target.dtype)
    state, estimates = target.start_rows(num_chains, generator), []
    for _ in range(NUM_DATA // BATCH_SIZE):
        state, rows = target.next_rows(state, generator)
        estimates.append(target.estimate(u, rows))
    leaf = u.clone().requires_grad_()
    value = full.log_density(leaf)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    value, mean_value = value.detach(), torch.stack([e.log_density for e in estimates]).mean(0)
    mean_gradient = torch.stack([e.gradient for e in estimates]).mean(0)
    return max(
        float(((mean_value - value) / value).abs().max()),
        float((mean_gradient - gradient).abs().max() / gradient.abs().max()),
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_mean_over_an_epoch_is_exact(name):
    assert epoch_error(make(name), exact(name)) < 1e-12


class _WithoutScale:
    """The mutation: the likelihood of the rows is taken for that of all data."""

    def __init__(self, density):
        self._density = density

    def __getattr__(self, name):
        return getattr(self._density, name)

    def joint(self, u, rows):
        log_prior, log_likelihood = self._density.joint(u, rows)
        return log_prior, log_likelihood * len(rows) / NUM_DATA


@pytest.mark.parametrize("name", NAMES)
def test_the_epoch_test_notices_a_forgotten_scale(name):
    broken = MinibatchTarget(_WithoutScale(make(name)._density), row_order=Epochs(), compile=False)
    assert epoch_error(broken, exact(name)) > 0.1


def test_a_copy_has_rows_of_its_own():
    target = make("hierarchical")
    twin = copy.deepcopy(target)
    rows, others = torch.arange(BATCH_SIZE), torch.arange(BATCH_SIZE) + 7
    u = target.sample_prior(3, seed=0)
    assert torch.equal(twin.on_rows(rows).log_likelihood(u), target.on_rows(rows).log_likelihood(u))
    assert not torch.equal(twin.on_rows(others).log_likelihood(u), target.on_rows(rows).log_likelihood(u))


def test_summing_out_scaled_probabilities_would_be_noticed():
    """The mutation: each row's probability is raised to N / B before the assignments are summed out."""
    target = make("mixture")

    class Empty(set):
        def add(self, item):
            pass

    target._density.of._rows.enumerated = Empty()
    assert epoch_error(target, exact("mixture")) > 1e-3


def test_every_set_of_rows_counts_alike():
    target = MinibatchTarget.from_functions(
        lambda u: -0.5 * u.square().sum(), lambda u, rows: -((Y[rows] - u).abs() ** 1.5), 1, 6, batch_size=2
    )
    u = torch.full((1, 1), 0.2, dtype=torch.float64)
    pairs = [target.gradient(u, torch.tensor(p)) for p in itertools.combinations(range(6), 2)]
    _, gradient = target.full_target().value_and_grad(u)
    assert abs(float(torch.stack(pairs).mean() - gradient)) < 1e-12


@pytest.mark.calibration
def test_compiled_and_traced_gradients_agree():
    u = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.randint(NUM_DATA, (3, BATCH_SIZE), generator=torch.Generator().manual_seed(0))
    target, other = (MinibatchTarget.from_pyro(with_subsample_statement, X, Y, compile=c) for c in (True, False))
    for a, b in zip(target.estimate(u, rows), other.estimate(u, rows), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_same_model_written_in_other_ways():
    u = torch.tensor([[0.3, -0.2], [1.0, 0.5]], dtype=torch.float64)
    rows = torch.tensor([[0, 5, 7, 9], [3, 2, 20, 1]])
    statement = MinibatchTarget.from_pyro(with_subsample_statement, X, Y)
    with pytest.warns(SlowModelWarning, match="loop over chains"):
        looped = MinibatchTarget.from_pyro(one_by_one, X, Y)
    expected = make("functions").gradient(u, rows)
    torch.testing.assert_close(statement.gradient(u, rows), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(looped.gradient(u, rows), expected, rtol=1e-12, atol=1e-12)
    assert statement.batch_size == BATCH_SIZE and statement.num_data == NUM_DATA
    with pytest.raises(ModelError, match="fixes subsample_size=4"):
        statement.full_target()


def test_pyro_itself_gives_the_same_estimate():
    target = MinibatchTarget.from_pyro(with_subsample_statement, X, Y)
    u, rows = torch.tensor([[0.3, -0.2]], dtype=torch.float64), torch.tensor([1, 8, 3, 20])
    conditioned = pyro.poutine.condition(with_subsample_statement, data={"slope": u[0], "data": rows})
    expected = pyro.poutine.trace(conditioned).get_trace(X, Y).log_prob_sum()
    assert float(target.estimate(u, rows).log_density) == pytest.approx(float(expected), abs=1e-12)


def test_moving_between_spaces_as_a_target_does():
    target, full = make("hierarchical"), exact("hierarchical")
    u = full.sample_prior(5, seed=0)
    assert target.names == full.names
    values, expected = target.constrain(u, deterministic=True), full.constrain(u, deterministic=True)
    assert set(expected) - set(values) == {"mean"}  # one value a row, which no minibatch has
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name])
    torch.testing.assert_close(target.unconstrain({s.name: values[s.name] for s in target.sites}), u)
    assert target.sample_prior(7, seed=1).shape == (7, target.dim)
    assert target.full_target().log_density(u).tolist() == pytest.approx(full.log_density(u).tolist(), abs=1e-9)
    with pytest.raises(ModelError, match="each observation"):
        target.pointwise_log_likelihood(u)


def test_a_module_is_copied_and_keeps_what_is_frozen():
    module = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)).double()
    module[0].bias.requires_grad_(False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    scale = {"0.weight": 2.0, "2.weight": torch.tensor([[1.0, 2.0, 3.0, 4.0]]), "2.bias": 0.5}
    data = torch.utils.data.TensorDataset(X, Y)
    target = MinibatchTarget.from_module(module, row_log_likelihood, data, batch_size=BATCH_SIZE, prior_scale=scale)
    assert [s.name for s in target.sites] == ["0.weight", "2.weight", "2.bias"] and target.dim == 13
    u = target.sample_prior(2, seed=0)
    rows = torch.arange(BATCH_SIZE)
    assert torch.equal(target.gradient(u, rows), target.gradient(u, rows))  # no dropout
    assert module.training and all(torch.equal(before[n], v) for n, v in module.state_dict().items())
    values = target.constrain(u)
    prior = sum(dist.Normal(0.0, torch.as_tensor(scale[n])).log_prob(v).flatten(1).sum(-1) for n, v in values.items())
    torch.testing.assert_close(target.estimate(u, rows).log_prior, prior)

    class Pairs(torch.utils.data.Dataset):
        def __len__(self):
            return NUM_DATA

        def __getitem__(self, i):
            return X[i], Y[i]

    again = MinibatchTarget.from_module(module, row_log_likelihood, Pairs(), batch_size=BATCH_SIZE, prior_scale=scale)
    assert torch.equal(again.gradient(u, rows), target.gradient(u, rows))
    assert again.fingerprint() == target.fingerprint()
    other = MinibatchTarget.from_module(module, row_log_likelihood, (X, -Y), batch_size=4, prior_scale=scale)
    assert other.fingerprint() != target.fingerprint()


def test_float32_stays_float32():
    module = network().float()
    target = MinibatchTarget.from_module(module, row_log_likelihood, (X.float(), Y.float()), batch_size=BATCH_SIZE)
    assert target.gradient(target.sample_prior(2), torch.arange(BATCH_SIZE)).dtype == torch.float32


def test_an_epoch_visits_every_row_once():
    order, generator = Epochs(), torch.Generator().manual_seed(0)
    state, visits, first = order.init(3, 10, generator=generator), [], None
    for _ in range(9):
        state, rows = order.next(state, 10, 3, generator=generator)
        first = rows if first is None else first
        visits.append(rows)
    for epoch in range(3):
        rows = torch.cat(visits[3 * epoch : 3 * epoch + 3], 1)
        assert all(len(set(chain)) == 9 for chain in rows.tolist())  # the tenth row waits for the next epoch
    assert len({tuple(chain) for chain in first.tolist()}) == 3


@pytest.mark.parametrize("order", [Epochs(), IndependentRows()])
def test_rows_are_drawn_uniformly(order):
    generator, n = torch.Generator().manual_seed(0), 20_000
    state = order.init(n, 10, generator=generator)
    counts = torch.zeros(10)
    for _ in range(4):  # three to an epoch, so the last one begins a new epoch
        state, rows = order.next(state, 10, 3, generator=generator)
    counts = torch.bincount(rows[:, 1], minlength=10)
    assert chisquare(counts.numpy()).pvalue > 1e-5


@pytest.mark.parametrize("order", [Epochs(), IndependentRows()])
def test_the_variance_of_the_gradient_is_that_of_survey_sampling(order, limit):
    target = MinibatchTarget.from_functions(
        lambda u: -0.5 * u.square().sum(),
        lambda u, rows: -0.5 * (Y[rows] - u).square(),
        1,
        NUM_DATA,
        batch_size=BATCH_SIZE,
        row_order=order,
    )
    with_replacement = NUM_DATA**2 / BATCH_SIZE * float(Y.var(correction=0))
    without = with_replacement * (NUM_DATA - BATCH_SIZE) / (NUM_DATA - 1)
    expected = without if isinstance(order, Epochs) else with_replacement
    measured = target.gradient_variance(torch.zeros(2000, 1, dtype=torch.float64), 10)  # 2000 independent estimates
    z = float((measured.mean() - expected) / (measured.std() / math.sqrt(len(measured))))
    assert abs(z) < limit()
    swapped = with_replacement if isinstance(order, Epochs) else without
    assert abs(float((measured.mean() - swapped) / (measured.std() / math.sqrt(len(measured))))) > limit()


def _no_plate(y):
    pyro.sample("y", dist.Normal(pyro.sample("m", dist.Normal(0.0, 1.0)), 1.0).expand([len(y)]).to_event(1), obs=y)


def _full_plate(y):
    mean = pyro.sample("m", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def _local(y):
    with pyro.plate("data", len(y), subsample_size=4) as rows:
        own = pyro.sample("own", dist.Normal(y.new_zeros(()), 1.0))
        pyro.sample("y", dist.Normal(own, 1.0), obs=y[rows])


def _two(y):
    mean = pyro.sample("m", dist.Normal(0.0, 1.0))
    for name in ("first", "second"):
        with pyro.plate(name, len(y), subsample_size=4) as rows:
            pyro.sample(f"{name} y", dist.Normal(mean, 1.0), obs=y[rows])


def _own_rows(y):
    mean = pyro.sample("m", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y), subsample=torch.arange(4)) as rows:
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])


def _too_many(y):
    mean = pyro.sample("m", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y), subsample_size=len(y) + 1) as rows:
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])


def _discrete_outside(y):
    which = pyro.sample("which", dist.Bernoulli(y.new_tensor(0.5)), infer={"enumerate": "parallel"})
    mean = pyro.sample("m", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y), subsample_size=4) as rows:
        pyro.sample("y", dist.Normal(mean + which, 1.0), obs=y[rows])


@pytest.mark.parametrize(
    ("model", "settings", "error", "match"),
    [
        (_no_plate, {}, ModelError, "no plate to take minibatches from"),
        (_full_plate, {}, ModelError, "no plate of the model subsamples"),
        (_full_plate, {"batch_size": 4}, ModelError, "index every observation with rows"),
        (_full_plate, {"batch_size": 4, "plate": "rows"}, ModelError, "no plate 'rows'; it has 'data'"),
        (_local, {}, UnsupportedSiteError, "latent site 'own' is inside"),
        (_two, {}, ModelError, "only one may"),
        (_own_rows, {}, ModelError, "its own subsample"),
        (_too_many, {}, ModelError, "take at most 24"),
        (_discrete_outside, {}, UnsupportedSiteError, "'which' are outside"),
        (mixture, {"batch_size": 25}, SettingsError, "between 1 and the 24 rows"),
        (mixture, {"batch_size": 0}, SettingsError, "between 1 and the 24 rows"),
        (3, {}, ModelError, "a Pyro model is a callable"),
    ],
)
def test_models_without_honest_minibatches_are_refused(model, settings, error, match):
    with pytest.raises(error, match=match):
        MinibatchTarget.from_pyro(model, Y, **settings)


def test_other_batch_sizes_than_the_models_are_refused():
    with pytest.raises(SettingsError, match="subsample_size=4, but batch_size=5"):
        MinibatchTarget.from_pyro(with_subsample_statement, X, Y, batch_size=5)
    with pytest.raises(ModelError, match="name the plate of the minibatches by plate="):
        MinibatchTarget.from_pyro(hierarchical, X, Y, batch_size=4)


def test_missing_data_are_refused():
    bad = Y.clone()
    bad[-1] = torch.nan
    with pytest.raises(DataError, match="NaN"):
        MinibatchTarget.from_pyro(mixture, bad, BATCH_SIZE)
    with pytest.raises(DataError, match="tensor 1 of the data holds 1 NaN"):
        MinibatchTarget.from_module(network(), row_log_likelihood, (X, bad), batch_size=4)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"batch_size": 25}, SettingsError, "between 1 and the 24 rows"),
        ({"data": (X, Y[:5])}, DataError, "equal length"),
        ({"log_likelihood": lambda output, y: -(output - y).square()}, ModelError, "one value per row"),
        ({"prior_scale": -1.0}, SettingsError, "must be positive"),
        ({"prior_scale": {"weight": 1.0}}, SettingsError, "must name each parameter"),
        ({"module": torch.nn.Tanh()}, ModelError, "no parameter"),
    ],
)
def test_bad_modules_are_refused(change, error, match):
    settings = {"module": network(), "log_likelihood": row_log_likelihood, "data": (X, Y), "batch_size": 4}
    with pytest.raises(error, match=match):
        MinibatchTarget.from_module(**(settings | change))


def test_bad_shapes_are_refused():
    target, u = make("functions"), torch.zeros(3, 2, dtype=torch.float64)
    with pytest.raises(ShapeError, match="u must have shape"):
        target.gradient(u[0], torch.arange(4))
    with pytest.raises(ShapeError, match="rows must have shape"):
        target.gradient(u, torch.arange(5))
    with pytest.raises(SettingsError, match="between 0 and 23"):
        target.gradient(u, torch.arange(21, 25))
    with pytest.raises(ModelError, match="instead of"):
        MinibatchTarget.from_functions(lambda u: u, lambda u, rows: Y[rows], 1, NUM_DATA, batch_size=4)
    assert _minibatch_density.tensors_of(X)[0] is X
