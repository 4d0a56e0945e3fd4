"""The error of a user's own function is shown with its file and line, from every public call."""

import inspect
import linecache
from types import SimpleNamespace

import numpy
import pandas
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

import bayeskit as bk
from bayeskit.errors import LossError, ModelError
from bayeskit.inference.objectives import ELBO
from bayeskit.workflows._learned_likelihoods import learn_likelihood

Y = torch.linspace(-1.0, 1.0, 7, dtype=torch.float64)


def sum_of_squares(x):
    return x.square().sum(-1)


def shape(x):
    return torch.ones(7, 3, dtype=x.dtype) @ torch.ones(4, dtype=x.dtype)  # mistake


def nothing(x):
    return x + SimpleNamespace(width=None).width  # mistake


def typo(x):
    return x.sqare()  # mistake


def unknown_name(x):
    return x + offset  # mistake  # noqa: F821


def missing_key(x):
    return x + {"width": 1.0}["height"]  # mistake


def missing_import(x):
    import no_such_package  # mistake

    return no_such_package.f(x)


def index(x):
    return x + [1.0, 2.0][5]  # mistake


def division(x):
    return x + 1 / (len("ab") - 2)  # mistake


def device(x):
    return x + torch.ones(1, device="cuda:9")  # mistake


def own_error(x):
    raise RuntimeError("the pump is not calibrated")  # mistake


def not_a_number(x):
    return dist.Normal(x.sum() * torch.nan, 1.0).log_prob(x.sum())  # mistake


def assertion(x):
    assert x.dim() == 17, "seventeen dimensions"  # mistake


def columns(x):
    return torch.cat([x, torch.ones(2, 2, 2, 2, dtype=x.dtype)])  # mistake


def view(x):
    return x.reshape(5, 3)  # mistake


def precision(x):
    return torch.ones(3, x.shape[-1], dtype=torch.int64) @ x.flatten()[: x.shape[-1]]  # mistake


def negative_scale(x):
    return dist.Normal(0.0, -torch.ones(3), validate_args=True)  # mistake


def probabilities(x):
    return dist.Categorical(probs=torch.tensor([-1.0, 2.0]), validate_args=True)  # mistake


def unpacking(x):
    first, _second = (1, 2, 3)  # mistake
    return first


def text(x):
    return "mean" + 5  # mistake


def keyword(x):
    return torch.ones(3, dtyp=torch.float64)  # mistake


def no_function(x):
    return len("abc")(x)  # mistake


def file(x):
    return open("/no/such/file")  # mistake


def number(x):
    return float("many")  # mistake


def recursion(x):
    return recursion(x)  # mistake


def square(x):
    return torch.linalg.cholesky(torch.ones(2, 3))  # mistake


def einsum(x):
    return torch.einsum("ij,jk->ik", torch.ones(2, 3), torch.ones(4, 5))  # mistake


def position(x):
    return x[..., 99]  # mistake


def column(x):
    return pandas.DataFrame({"x": [1.0]})["height"]  # mistake


def array(x):
    return numpy.ones(3) + numpy.ones(4)  # mistake


def own_kind(x):
    class PumpError(Exception):
        pass

    raise PumpError("the pump is not calibrated")  # mistake


MISTAKES = [
    shape,
    nothing,
    typo,
    unknown_name,
    missing_key,
    missing_import,
    index,
    division,
    device,
    own_error,
    not_a_number,
    assertion,
    columns,
    view,
    precision,
    negative_scale,
    probabilities,
    unpacking,
    text,
    keyword,
    no_function,
    file,
    number,
    recursion,
    square,
    einsum,
    position,
    column,
    array,
    own_kind,
]


def model_with(mistake):
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        mistake(y)
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    return model


def discrete_with(mistake):
    def model(y):
        fair = pyro.sample("fair", dist.Bernoulli(torch.tensor(0.5, dtype=y.dtype)))
        mistake(y)
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(fair, 1.0), obs=y)

    return model


def good(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def guide_with(mistake):
    def guide(y):
        pyro.sample("mean", dist.Normal(pyro.param("m", torch.tensor(0.0)), 1.0))
        mistake(y)

    return guide


class Network(torch.nn.Module):
    def __init__(self, mistake):
        super().__init__()
        self.mistake, self.location = mistake, torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, y):
        mean = pyro.sample("mean", dist.Normal(self.location, 1.0))
        self.mistake(y)
        return mean


def right_hand_side(mistake):
    def slope(t, y, params):
        mistake(y)
        return -y

    return slope


def prior(y=None):
    return pyro.sample("mean", dist.Normal(0.0, 1.0))


CALLS = {
    "sample": lambda f: bk.sample(model_with(f), Y, progress=False),
    "from_pyro": lambda f: bk.Target.from_pyro(model_with(f), Y),
    "prior_predictive": lambda f: bk.prior_predictive(model_with(f), Y),
    "fit, model": lambda f: bk.fit(model_with(f), AutoNormal(good), ELBO(), Y, num_steps=2, progress=False),
    "fit, guide": lambda f: bk.fit(good, guide_with(f), ELBO(), Y, num_steps=2, progress=False),
    "fit, module": lambda f: bk.fit(good, Network(f), ELBO(), Y, num_steps=2, progress=False),
    "amortize": lambda f: bk.amortize(model_with(f), (Y,), sizes=(1, 7), num_steps=2, progress=False),
    "from_functions": lambda f: bk.Target.from_functions(lambda u: sum_of_squares(u) + 0 * f(u), sum_of_squares, 2),
    "from_log_density": lambda f: bk.Target.from_log_density(lambda u: (f(torch.as_tensor(u)), -u), 2),
    "solve": lambda f: bk.ode.solve(right_hand_side(f), Y[:2], torch.linspace(0.0, 1.0, 3, dtype=torch.float64)),
    "scan": lambda f: bk.scan(lambda state, x: (f(Y), state), Y[0], Y),
    "sbc": lambda f: bk.sbc(model_with(f), args=(Y,), num_replicates=20, progress=False),
    "compare_models": lambda f: bk.compare_models({"a": lambda: f(Y), "b": lambda: f(Y)}, progress=False),
    "information": lambda f: bk.information(model_with(f), Y, of="mean", about="y"),
    "enumerate_latents": lambda f: bk.exact.enumerate_latents(discrete_with(f), Y),
    "learn_likelihood": lambda f: learn_likelihood(lambda theta: f(theta), prior, num_simulations=200, progress=False),
}


def line_of(mistake):
    """Return the number and the text of the line with the mistake."""
    lines, first = inspect.getsourcelines(mistake)
    place = next(i for i, line in enumerate(lines) if "# mistake" in line)
    return first + place, linecache.getline(__file__, first + place).strip()


@pytest.mark.calibration
@pytest.mark.parametrize("call", CALLS)
def test_a_mistake_in_a_function_of_the_user_is_named_with_its_line(call):
    assert len(MISTAKES) == 30
    wrong = []
    for mistake in MISTAKES:
        with pytest.raises((ModelError, LossError)) as caught:
            CALLS[call](mistake)
        number, text = line_of(mistake)
        said, original = str(caught.value), caught.value.__cause__
        place = f"test_whose_mistake.py, line {number}, in {mistake.__name__} ({text}"
        words = str(original).partition("Trace Shapes:")[0].strip()
        told = isinstance(caught.value, LossError) or (type(original).__name__ in said and words in said)
        if place not in said or not told or "(argument" in said:
            wrong.append((mistake.__name__, said))
    assert wrong == []


def _last_line(function):
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if "# mistake" in line)


def _list_then_typo(x):
    mean = pyro.sample("b", dist.Normal(0.0, 1.0)) * x
    mean = mean.sqare()  # mistake
    pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=Y)


def _typo_beside_gaps(x):
    mean = pyro.sample("m", dist.Normal(0.0, 1.0)).sqare()  # mistake
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.NanMaskedNormal(mean, 1.0), obs=x)


def _bare_assertion(x):
    pyro.sample("m", dist.Normal(0.0, 1.0))
    assert x.dim() == 17  # mistake


_runs = []


def _second_run(x):
    _runs.append(x)
    if len(_runs) > 2:
        raise RuntimeError("no connection")  # mistake
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(pyro.sample("m", dist.Normal(0.0, 1.0)), 1.0), obs=x)


def _other_package(x):
    pandas.Series(x.tolist()).rename_axis(3, axis=7)  # mistake


def _array_beside(x):
    mean = pyro.sample("m", dist.Normal(0.0, 1.0)) * numpy.arange(7.0)
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=x)


def _whole_mask(x):
    with pyro.plate("rows", len(x)), pyro.poutine.mask(mask=torch.ones(7, dtype=torch.uint8)):
        pyro.sample("y", dist.Normal(pyro.sample("m", dist.Normal(0.0, 1.0)), 1.0), obs=x)


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        (_list_then_typo, Y.tolist(), "AttributeError: 'Tensor' object has no attribute 'sqare'\n"),
        (
            _typo_beside_gaps,
            numpy.where(Y > 0, numpy.nan, Y),
            "AttributeError: 'Tensor' object has no attribute 'sqare'\n",
        ),
        (_bare_assertion, Y, ": AssertionError"),
        (_second_run, Y, "the model runs once, but .* RuntimeError: no connection"),
        (_other_package, Y, "ValueError: No axis named 7"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_the_line_is_that_of_the_mistake_and_not_of_a_form_of_data(model, data, said):
    with pytest.raises(ModelError, match=said) as caught:
        bk.Target.from_pyro(model, data)
    assert f"line {_last_line(model)}, in {model.__name__} (" in str(caught.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("model", "data", "remedy"),
    [
        (_array_beside, Y, "Remedy: NumPy cannot compute with sampled values; make its arrays tensors"),
        (_whole_mask, Y, r"Remedy: a mask is a tensor of booleans, as of mask.bool\(\)"),
        (lambda x: torch.from_numpy(x), Y.numpy(), "Remedy: arrays, columns and data frames reach a model as tensors"),
        (lambda x: x.to_numpy(), pandas.Series(Y.numpy()), "Remedy: arrays, columns and data frames reach a model"),
        (lambda x: Y[x], list("abcdefg"), r"Note that argument 'x' is an array of texts, such as 'a', not numbers"),
    ],
    ids=["array", "mask", "from_numpy", "to_numpy", "texts"],
)
def test_words_of_other_libraries_have_a_remedy(model, data, remedy):
    with pytest.raises(ModelError, match=remedy):
        bk.Target.from_pyro(model, data)
