"""Hidden Markov models against the enumeration of all paths, Pyro's own, and conjugate integrals."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import DataError, SettingsError, ShapeError, UnknownNameError
from bayeskit.inference.evidence import naive_monte_carlo
from bayeskit.models.discrete.sequences import (
    CategoricalEmission,
    GaussianEmission,
    HiddenMarkov,
    HiddenMarkovModel,
    LogSum,
    OrderedNormal,
    categorical_log_evidence,
)
from bayeskit.models.discrete.sequences import (
    _hidden_markov as hidden_markov,
)

LENGTHS = torch.tensor([5, 3, 1, 4])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gaussian(duration=5, lengths=None, states=3, parallel=True):
    emission = dist.Normal(normal(states, seed=3), normal(states, seed=4).exp())
    return HiddenMarkov(normal(states), normal(states, states, seed=1), emission, duration, lengths, parallel=parallel)


def categorical(duration=5, lengths=None, states=3, categories=2):
    emission = dist.Categorical(logits=normal(states, categories, seed=3))
    return HiddenMarkov(normal(states), normal(states, states, seed=1), emission, duration, lengths)


def largest_error(make, x):
    """Compare every answer with the enumeration of all paths of sequences of five, three, one and four steps."""
    hmm, errors = make(x.shape[1], LENGTHS), []
    answers = hmm.log_prob(x), hmm.state_probabilities(x), hmm.state_entropy(x)
    best = hmm.most_probable_states(x)
    for row, n in enumerate(LENGTHS.tolist()):
        alone = make(n, None)
        states, log_joint = alone.enumerate_states(x[row, :n])
        share = log_joint.softmax(0)
        one_hot = torch.nn.functional.one_hot(states, hmm.num_states).double()
        errors += [
            answers[0][row] - log_joint.logsumexp(0),
            alone.log_prob(x[row, :n]) - log_joint.logsumexp(0),
            answers[1][row, :n] - (share[:, None, None] * one_hot).sum(0),
            answers[1][row, n:],
            answers[2][row] + torch.special.xlogy(share, share).sum(),
            (best[row, :n] - states[log_joint.argmax()]).double(),
            (best[row, n:] + 1).double(),
        ]
    return max(float(error.abs().max()) for error in errors if error.numel())


def test_every_answer_is_that_of_enumeration():
    x = normal(4, 5, seed=7)
    assert largest_error(gaussian, x) < 1e-12
    assert largest_error(lambda *a: gaussian(*a, parallel=False), x) < 1e-12
    assert largest_error(categorical, (x > 0).long()) < 1e-12


class Tropical(LogSum):
    """Take the best path for the sum over all."""

    def sum(self, elements, dim):
        return elements.amax(dim)


def test_mutation_enumeration_notices_a_broken_sum_and_rows_for_columns(monkeypatch):
    def transposed(*a):
        hmm = gaussian(*a)
        hmm.transition_logits = hmm.transition_logits.mT if a[1] is not None else hmm.transition_logits
        return hmm

    assert largest_error(transposed, normal(4, 5, seed=7)) > 1e-2
    monkeypatch.setattr(hidden_markov, "LogSum", Tropical)
    assert largest_error(gaussian, normal(4, 5, seed=7)) > 1e-2


def test_enumeration_itself_is_a_product_of_probabilities():
    hmm, x = categorical(3, states=2), torch.tensor([0, 1, 1])
    first, moves = hmm.initial_logits.exp(), hmm.transition_logits.exp()
    seen = hmm.emission.probs
    states, log_joint = hmm.enumerate_states(x)
    for path, found in zip(itertools.product(range(2), repeat=3), log_joint.exp().tolist(), strict=True):
        exact = first[path[0]] * seen[path[0], 0] * moves[path[0], path[1]] * seen[path[1], 1]
        exact = exact * moves[path[1], path[2]] * seen[path[2], 1]
        assert abs(found - float(exact)) < 1e-15
    assert states.tolist() == [list(path) for path in itertools.product(range(2), repeat=3)]


@pytest.mark.parametrize("parallel", [True, False])
def test_density_is_that_of_pyros_own_distribution(parallel):
    hmm, x = gaussian(50, parallel=parallel), normal(6, 50, seed=8)
    reference = dist.DiscreteHMM(hmm.initial_logits, hmm.transition_logits, hmm.emission, duration=50)
    # Pyro's chain makes a transition before the first observation.
    hmm.initial_logits = (hmm.initial_logits.exp() @ hmm.transition_logits.exp()).log()
    torch.testing.assert_close(hmm.log_prob(x), reference.log_prob(x), rtol=0, atol=1e-10)


def test_smoothing_is_the_gradient_of_the_log_density():
    hmm, x = gaussian(6), normal(2, 6, seed=9)
    emitted = hmm.emission.log_prob(x.unsqueeze(-1)).requires_grad_()
    hmm._emitted = lambda value: emitted
    gradient = torch.autograd.grad(hmm.log_prob(x).sum(), emitted)[0]
    torch.testing.assert_close(gradient, hmm.state_probabilities(x), rtol=0, atol=1e-12)


def test_gradients_are_finite_where_states_are_forbidden_and_sequences_padded():
    start = torch.tensor([0.0, -math.inf], dtype=torch.float64, requires_grad=True)
    moves = torch.tensor([[0.0, 0.0], [-math.inf, 0.0]], dtype=torch.float64, requires_grad=True)
    emission = dist.Normal(torch.tensor([0.0, 1.0], dtype=torch.float64), 1.0)
    hmm = HiddenMarkov(start, moves, emission, 5, LENGTHS)
    x = normal(4, 5, seed=2)
    gradient = torch.autograd.grad(hmm.log_prob(x).sum() + hmm.state_entropy(x).sum(), (start, moves))
    assert all(bool(g.isfinite().all()) for g in gradient)
    assert bool((hmm.sample_states(x, 50, seed=0)[..., 1:].diff(dim=-1)[:, 0] >= 0).all())


@pytest.mark.parametrize("padding", [math.inf, math.nan, 1e200])
def test_padding_is_not_read_nor_are_gradients(padding):
    y = torch.tensor([[1.0, 0.5, padding, padding], [0.3, 0.2, 0.4, 0.6]], dtype=torch.float64)

    def answers(y):
        location, scale = normal(2, seed=3).requires_grad_(), normal(2, seed=4).exp().requires_grad_()
        emission = dist.Normal(location, scale)
        hmm = HiddenMarkov(normal(2), normal(2, 2, seed=1), emission, 4, torch.tensor([2, 4]))
        total = hmm.log_prob(y)
        gradient = torch.autograd.grad(total.sum() + hmm.state_entropy(y).sum(), (location, scale))
        return total, hmm.state_probabilities(y), hmm.most_probable_states(y), *gradient

    for found, right in zip(answers(y), answers(y.nan_to_num(0.0, 0.0).clamp_max(1.0)), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-13)


def long_chains():
    # Densities as small as those of a long sequence.
    stay, emitted = torch.tensor([[3.0, 0.0], [0.0, 3.0]]), normal(400, 2, seed=2).float() - 16
    for dtype in (torch.float32, torch.float64):
        hmm = HiddenMarkov(torch.zeros(2, dtype=dtype), stay.to(dtype), dist.Normal(torch.zeros(2), 1.0), 400)
        hmm._emitted = lambda value, dtype=dtype: emitted.to(dtype)
        yield hmm, torch.zeros(400, dtype=dtype)


def error_of_long_smoothing():
    single, double = (hmm.state_probabilities(x) for hmm, x in long_chains())
    return float((single - double).abs().max())


def test_long_sequences_in_single_precision(monkeypatch):
    single, double = (float(hmm.state_entropy(x)) for hmm, x in long_chains())
    assert abs(single - double) < 5e-3  # ten units of the last place of the log density, some -6000
    assert error_of_long_smoothing() < 1e-5
    monkeypatch.setattr("bayeskit.models.discrete.sequences._chains._rescaled", lambda sums: sums)
    assert error_of_long_smoothing() > 1e-4


def test_a_state_beyond_the_end_is_not_read_and_no_other_may_be_out_of_range():
    hmm, x = gaussian(5, LENGTHS), normal(4, 5, seed=7)
    states = torch.where(torch.arange(5) < LENGTHS[:, None], 1, -1)
    torch.testing.assert_close(hmm.log_joint(states, x), hmm.log_joint(torch.ones_like(states), x), rtol=0, atol=0)
    for wrong in (-1, 3):
        states[1, 2] = wrong
        with pytest.raises(DataError, match=rf"states\[1, 2\] is {wrong}"):
            hmm.log_joint(states, x)


def test_draws_of_states_have_the_right_frequencies(limit):
    hmm, number = gaussian(4, torch.tensor([4, 3]), states=2), 20_000
    x = normal(2, 4, seed=5)
    draws = hmm.sample_states(x, number, seed=0)
    assert draws.shape == (number, 2, 4) and bool((draws[:, 1, 3] == -1).all())
    for row, n in enumerate((4, 3)):
        states, log_joint = gaussian(n, states=2).enumerate_states(x[row, :n])
        exact = log_joint.softmax(0)
        found = (draws[:, row, None, :n] == states).all(-1).double().mean(0)
        z = (found - exact) / (exact * (1 - exact) / number).sqrt()
        assert float(z.abs().max()) < limit(2 * len(exact))


def test_draws_of_sequences_have_the_right_frequencies(limit):
    hmm, number = categorical(3, states=2), 40_000
    with global_stream(new_generator(0)):
        states, x = hmm.sample_with_states((number,))
    every = torch.tensor(list(itertools.product(range(2), repeat=3)))
    exact = hmm.log_prob(every).exp()
    assert abs(float(exact.sum()) - 1) < 1e-13
    for drawn, probabilities in ((x, exact), (states, torch.stack([path_probability(hmm, p) for p in every]))):
        found = (drawn[:, None] == every).all(-1).double().mean(0)
        z = (found - probabilities) / (probabilities * (1 - probabilities) / number).sqrt()
        assert float(z.abs().max()) < limit(16)


def path_probability(hmm, path):
    log_moves = sum(hmm.transition_logits[a, b] for a, b in itertools.pairwise(path.tolist()))
    return (hmm.initial_logits[path[0]] + log_moves).exp()


def test_expanding_and_event_shapes():
    hmm = gaussian(4).expand((7, 2))
    with global_stream(new_generator(0)):
        assert hmm.sample((3,)).shape == (3, 7, 2, 4)
    assert hmm.log_prob(normal(4)).shape == (7, 2)
    vector = dist.Normal(normal(3, 2), 1.0).to_event(1)
    wide = HiddenMarkov(normal(5, 3), normal(3, 3, seed=1), vector, 4)
    with global_stream(new_generator(0)):
        states, x = wide.sample_with_states((6,))
    assert (states.shape, x.shape, wide.log_prob(x).shape) == ((6, 5, 4), (6, 5, 4, 2), (6, 5))


def test_sorted_normal_numbers_integrate_to_one_and_are_drawn_sorted():
    prior = OrderedNormal(torch.tensor(0.5).double(), torch.tensor(2.0).double(), 2)
    grid = torch.linspace(-20, 20, 1201, dtype=torch.float64)
    pairs = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), -1)
    density = torch.distributions.Normal(prior.location, prior.scale).log_prob(pairs).sum(-1).exp() * 2
    upper = pairs[pairs[..., 0] < pairs[..., 1]]
    torch.testing.assert_close(prior.log_prob(upper).exp(), density[pairs[..., 0] < pairs[..., 1]], rtol=0, atol=1e-14)
    # The diagonal belongs to neither half: what it holds is cut in two.
    inside = (float(prior.log_prob(upper).exp().sum()) + float(density.diagonal().sum()) / 2) * float(
        grid[1] - grid[0]
    ) ** 2
    assert abs(inside - 1) < 1e-10
    with global_stream(new_generator(0)):
        assert bool((prior.sample((100,)).diff(dim=-1) > 0).all())


def enumerated_by_pyro(x):
    """Return the same model with its states as sites that the target sums out itself."""
    initial = pyro.sample("initial", dist.Dirichlet(x.new_ones(2)))
    transition = pyro.sample("transition", dist.Dirichlet(x.new_ones(2, 2)).to_event(1))
    mean = pyro.sample("mean", OrderedNormal(x.new_zeros(()), x.new_ones(()), 2))
    scale = pyro.sample("log_scale", dist.Normal(x.new_zeros(2), 1.0).to_event(1)).exp()
    probabilities = initial
    for step in range(len(x)):
        state = pyro.sample(f"state_{step}", dist.Categorical(probabilities), infer={"enumerate": "parallel"})
        pyro.sample(f"x_{step}", dist.Normal(mean[state], scale[state]), obs=x[step])
        probabilities = transition[state]


def test_the_model_is_the_one_whose_states_the_target_enumerates():
    x = normal(4, seed=6)
    ours = bk.Target.from_pyro(HiddenMarkovModel(2, GaussianEmission()), x)
    reference = bk.Target.from_pyro(enumerated_by_pyro, x)
    u = ours.sample_prior(6, seed=0)
    torch.testing.assert_close(ours.log_prior(u), reference.log_prior(u), rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.log_likelihood(u), reference.log_likelihood(u), rtol=0, atol=1e-12)
    gradients = ours.value_and_grad(u)[1], reference.value_and_grad(u)[1]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-11)


@pytest.mark.calibration
def test_sorting_leaves_the_evidence_as_it_is(limit):
    found = []
    for order in ("mean", "scale", "none"):
        target = bk.Target.from_pyro(HiddenMarkovModel(2, GaussianEmission(order=order)), normal(4, seed=6))
        found.append(naive_monte_carlo(target, 20_000, seed=0))
    for one, other in itertools.combinations(found, 2):
        error = math.hypot(one.standard_error, other.standard_error)
        assert abs(one.log_evidence - other.log_evidence) < limit(3) * error


def test_the_distribution_at_given_parameters_is_that_of_the_model():
    model, x, lengths = HiddenMarkovModel(2, GaussianEmission()), normal(3, 5, seed=1), torch.tensor([5, 2, 3])
    target = bk.Target.from_pyro(model, x, lengths)
    u = target.sample_prior(1, seed=0)[0]
    hmm = model.distribution(target.constrain(u), x, lengths)
    found = target.pointwise_log_likelihood(u)["observations"]
    torch.testing.assert_close(hmm.log_prob(x), found, rtol=0, atol=1e-12)
    assert hmm.most_probable_states(x).shape == (3, 5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "lack site 'initial'; there are: none"),
        ({"mean": None}, "lack site 'mean'"),
        ({"mean": None, "means": torch.zeros(2).double()}, "lack site 'mean'; .* means"),
        ({"means": torch.zeros(2).double()}, "no site 'means'; its sites are: initial, transition, mean, log_scale"),
    ],
)
def test_a_distribution_draws_no_parameter(given, message):
    model, x = HiddenMarkovModel(2, GaussianEmission()), normal(4)
    target = bk.Target.from_pyro(model, x)
    full = target.constrain(target.sample_prior(1, seed=0)[0])
    parameters = {name: value for name, value in (full | given).items() if value is not None} if given else {}
    with pytest.raises(UnknownNameError, match=message):
        model.distribution(parameters, x)


def test_an_emission_may_have_plates_and_deterministic_sites():
    def emission(num_states, like):
        with pyro.plate("states", num_states):
            mean = pyro.sample("mean", dist.Normal(like.new_zeros(()), 1.0))
        return dist.Normal(pyro.deterministic("twice", 2 * mean), 1.0)

    model, x = HiddenMarkovModel(2, emission), normal(4)
    target = bk.Target.from_pyro(model, x)
    u = target.sample_prior(1, seed=0)[0]
    for deterministic in (False, True):
        hmm = model.distribution(target.constrain(u, deterministic=deterministic), x)
        torch.testing.assert_close(hmm.log_prob(x).squeeze(), target.log_likelihood(u), rtol=0, atol=1e-12)


@pytest.mark.calibration
def test_evidence_of_categories_is_the_exact_one(limit):
    x = torch.tensor([[0, 0, 1, 2], [2, 2, 0, 1]])
    model = HiddenMarkovModel(2, CategoricalEmission(3, 0.7), transition_concentration=0.8, stay=1.5)
    estimate = naive_monte_carlo(bk.Target.from_pyro(model, x), 20_000, seed=0)
    exact = categorical_log_evidence(model, x)
    assert abs(estimate.log_evidence - exact) < limit() * estimate.standard_error
    # A mutation of the prior is noticed.
    other = categorical_log_evidence(HiddenMarkovModel(2, CategoricalEmission(3, 0.7), stay=10.0), x)
    assert abs(exact - other) > 3 * limit() * estimate.standard_error


def test_exact_evidence_of_all_sequences_sums_to_one():
    model = HiddenMarkovModel(2, CategoricalEmission(2, 0.7), initial_concentration=2.0, stay=0.5)
    every = itertools.product(range(2), repeat=4)
    assert abs(sum(math.exp(categorical_log_evidence(model, torch.tensor(x))) for x in every) - 1) < 1e-13


EMISSION = dist.Normal(torch.zeros(2), 1.0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: HiddenMarkov(torch.zeros(2), torch.zeros(3, 3), EMISSION, 4), ShapeError, "transition_logits"),
        (lambda: HiddenMarkov(torch.zeros(3), torch.zeros(3, 3), EMISSION, 4), ShapeError, "emission"),
        (lambda: HiddenMarkov(torch.zeros(2), torch.zeros(2, 2), EMISSION, 0), SettingsError, "duration"),
        (
            lambda: HiddenMarkov(torch.zeros(2), torch.zeros(2, 2), EMISSION, 4, torch.tensor([5])),
            DataError,
            "from 1 to 4",
        ),
        (
            lambda: HiddenMarkov(torch.full((2,), -1.0), torch.zeros(2, 2), EMISSION, 30).enumerate_states(
                torch.zeros(30)
            ),
            SettingsError,
            r"2\*\*30 = 1073741824",
        ),
        (
            lambda: HiddenMarkov(
                torch.tensor([0.0, -math.inf]),
                torch.tensor([[0.0, -math.inf], [0.0, 0.0]]),
                dist.Categorical(logits=torch.tensor([[0.0, -math.inf], [0.0, 0.0]])),
                2,
                validate_args=False,
            ).state_probabilities(torch.tensor([0, 1])),
            DataError,
            "log density -inf",
        ),
        (lambda: gaussian().sample_states(normal(5), 0, seed=0), SettingsError, "num_samples"),
        (lambda: gaussian().log_prob(normal(1)), ShapeError, r"value has shape \(1,\); give \(\*batch, 5\)"),
        (lambda: gaussian(5, LENGTHS).log_prob(normal(3, 5)), ShapeError, r"value \(3,\), distribution \(4,\)"),
        (lambda: gaussian().log_joint(torch.zeros(1).long(), normal(5)), ShapeError, "states has shape"),
        (lambda: gaussian().log_joint(torch.zeros(5), normal(5)), DataError, "give integers from 0 to 2"),
        (lambda: gaussian(5, torch.tensor(2.9)), DataError, "float32; give integers"),
        (
            lambda: HiddenMarkov(torch.zeros(3, 2), torch.zeros(2, 2), EMISSION, 4, torch.tensor([1, 2])),
            ShapeError,
            r"initial_logits \(3,\).* lengths \(2,\)",
        ),
        (lambda: HiddenMarkov(torch.zeros(3, 2), torch.zeros(4, 2, 2), EMISSION, 4), ShapeError, "batches do not fit"),
        (
            lambda: HiddenMarkov(torch.full((2,), -math.inf), torch.zeros(2, 2), EMISSION, 4),
            SettingsError,
            r"initial_logits is \[-inf, -inf\]",
        ),
        (
            lambda: HiddenMarkov(torch.zeros(2), torch.tensor([[0.0, 0.0], [-math.inf, -math.inf]]), EMISSION, 4),
            SettingsError,
            r"transition_logits\[1\] is \[-inf, -inf\]",
        ),
        (lambda: HiddenMarkovModel(2, GaussianEmission())(torch.zeros(0, 3)), ShapeError, "observations has shape"),
        (lambda: HiddenMarkovModel(1, GaussianEmission()), SettingsError, "num_states"),
        (lambda: HiddenMarkovModel(2, GaussianEmission(), stay=-1.0), SettingsError, "stay"),
        (lambda: GaussianEmission(scale=0.0), SettingsError, "scale"),
        (lambda: GaussianEmission(order="variance"), SettingsError, "order"),
        (lambda: CategoricalEmission(1), SettingsError, "num_categories"),
        (
            lambda: categorical_log_evidence(HiddenMarkovModel(2, GaussianEmission()), torch.zeros(3).long()),
            SettingsError,
            "CategoricalEmission",
        ),
        (
            lambda: categorical_log_evidence(HiddenMarkovModel(2, CategoricalEmission(2)), torch.zeros(40).long()),
            SettingsError,
            "2.*40",
        ),
        (
            lambda: categorical_log_evidence(HiddenMarkovModel(2, CategoricalEmission(2)), torch.tensor([0, 2])),
            DataError,
            "categories",
        ),
        (
            lambda: categorical_log_evidence(HiddenMarkovModel(2, CategoricalEmission(2)), torch.tensor([0.0, 0.5])),
            DataError,
            "whole numbers from 0 to 1",
        ),
        (
            lambda: categorical_log_evidence(HiddenMarkovModel(2, CategoricalEmission(2)), torch.tensor([0, math.nan])),
            DataError,
            "whole numbers from 0 to 1",
        ),
    ],
)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()
