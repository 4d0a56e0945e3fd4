"""Threads and forked or spawned processes compute what one thread alone computes, and end."""

import functools
import multiprocessing
import threading
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit._core.process_state import process_state, recorded_warnings
from bayeskit._core.randomness import global_stream, new_generator, validation_kept
from bayeskit.errors import LossError, ModelError
from bayeskit.exact import beta_binomial
from bayeskit.inference.objectives import ELBO, IWAE, SUMO, VCD
from bayeskit.inference.training import fit

SECONDS = 60  # after which a thread counts as deadlocked
pytestmark = pytest.mark.filterwarnings(
    "ignore::bayeskit.errors.SamplingWarning",  # of runs this short
    "ignore:.*multi-threaded.*fork:DeprecationWarning",
)


def together(works):
    """Run functions in threads that start together; return their results or errors, and fail on a deadlock."""
    barrier, found = threading.Barrier(len(works)), [None] * len(works)

    def work(place):
        barrier.wait(SECONDS)
        try:
            found[place] = works[place]()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a thread never ended"
    return found


def data(dtype=torch.float32):
    return torch.linspace(-1.0, 2.0, 12, dtype=dtype)


def mean_of(y):
    mean = pyro.sample("mean", dist.Normal(0.1, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def scale_of(y):
    # Of the same names as above, but of another support; the constants take the dtype of the data.
    scale = pyro.sample("mean", dist.LogNormal(torch.tensor(0.1), 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.StudentT(4.0, torch.tensor(0.3), scale), obs=y)


def one_by_one(y):
    mean = pyro.sample("mean", dist.Normal(0.1, 1.0))
    if float(mean.detach()) > 100.0:  # cannot be batched
        mean = mean * 0
    pyro.sample("y", dist.Normal(mean, torch.tensor(0.7)).expand([len(y)]).to_event(1), obs=y)


def guide(y):
    place = pyro.param("place", torch.tensor(0.0))
    width = pyro.param("width", torch.tensor(0.5), constraint=dist.constraints.positive)
    pyro.sample("mean", dist.Normal(place, width))


def sampled(model, dtype, seed, **settings):
    settings = {"num_chains": 2, "num_warmup": 20, "num_samples": 10, "progress": False} | settings
    return bk.sample(model, data(dtype), seed=seed, **settings).unconstrained


def evidence(seed):
    target = bk.Target.from_pyro(mean_of, data(torch.float64))
    draws = bk.sample(target, num_warmup=20, num_samples=50, seed=seed, progress=False)
    return torch.tensor(bk.evidence.bridge_sampling(target, draws, seed=seed).log_evidence, dtype=torch.float64)


def weights(seed):
    target = bk.Target.from_pyro(scale_of, data())
    return torch.tensor(
        bk.evidence.naive_monte_carlo(target, num_draws=200, seed=seed).log_evidence, dtype=torch.float64
    )


def trained(objective, seed):
    result = fit(mean_of, guide, objective, data(), num_steps=8, batch_size=4, seed=seed, progress=False)
    return torch.cat([result.losses, *(x.reshape(1).double() for x in result.parameters.values())])


def tasks():
    """Eight tasks: other models, dtypes, seeds and uses; those who train have parameters of the same names."""
    return [
        functools.partial(sampled, mean_of, torch.float64, 0),
        functools.partial(sampled, scale_of, torch.float32, 1),
        functools.partial(sampled, one_by_one, torch.float64, 2, num_chains=1, num_samples=2),
        functools.partial(evidence, 3),
        functools.partial(weights, 4),
        functools.partial(trained, ELBO(), 5),
        functools.partial(trained, IWAE(num_particles=5), 6),
        functools.partial(trained, SUMO(), 7),
    ]


@pytest.mark.calibration
@pytest.mark.filterwarnings("ignore::bayeskit.errors.SlowModelWarning", "ignore::bayeskit.errors.AccuracyWarning")
@pytest.mark.filterwarnings("ignore::bayeskit.errors.BayeskitWarning")
def test_24_runs_in_8_threads_equal_those_alone():
    alone = [task() for task in tasks()]
    again = tasks()
    # Each thread has three tasks, and each task meets others.
    rounds = together([lambda j=j: [again[(j * (k + 1) + k) % 8]() for k in range(3)] for j in range(8)])
    for j, found in enumerate(rounds):
        assert not isinstance(found, Exception), found
        for k, one in enumerate(found):
            assert torch.equal(one, alone[(j * (k + 1) + k) % 8]), (j, k)
    assert not pyro.get_param_store().keys()


def forked(kind):
    """Return what a child process, and this process, sample from a model."""
    case = beta_binomial()
    settings = {"num_chains": 2, "num_warmup": 20, "num_samples": 10, "progress": False}
    here = bk.sample(case.model, *case.args, **settings).unconstrained
    with multiprocessing.get_context(kind).Pool(1) as pool:
        work = pool.apply_async(_in_child, (case.model, case.args, settings))
        there = torch.tensor(work.get(SECONDS), dtype=here.dtype)
    return here, there


def _in_child(model, args, settings):
    return bk.sample(model, *args, **settings).unconstrained.tolist()


def test_a_forked_process_samples_the_same():
    try:
        here, there = forked("fork")
    except ModelError as error:
        assert torch.backends.cuda.is_built() and "forked process" in str(error)
    else:
        assert torch.equal(here, there)


@pytest.mark.calibration
def test_a_spawned_process_samples_the_same():
    here, there = forked("spawn")
    assert torch.equal(here, there)


def test_threads_sample_the_same():
    case = beta_binomial()
    work = functools.partial(_in_child, case.model, case.args, {"num_warmup": 20, "num_samples": 10, "progress": False})
    assert together([work, work]) == [work(), work()]


def test_a_fork_waits_until_no_thread_changes_torch():
    begun, go_on = threading.Event(), threading.Event()

    def change():
        with process_state(), validation_kept():
            torch.distributions.Distribution.set_default_validate_args(False)
            begun.set()
            go_on.wait(0.3)

    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    assert begun.wait(SECONDS)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(_validates).get(SECONDS)
    thread.join(SECONDS)


def _validates():
    with process_state():
        return torch.distributions.Distribution._validate_args


def test_torch_is_as_it_was_when_changes_of_threads_overlap():
    before = torch.get_rng_state()

    def change(seed):
        generator = new_generator(seed)
        for _ in range(20):
            with global_stream(generator), validation_kept():
                torch.distributions.Distribution.set_default_validate_args(False)
                torch.rand(3)
        return torch.rand((), generator=generator)

    found = together([functools.partial(change, seed) for seed in range(8)])
    assert [float(x) for x in found] == [float(change(seed)) for seed in range(8)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.distributions.Distribution._validate_args


def test_each_thread_records_its_own_warnings():
    filters, shown = list(warnings.filters), warnings.showwarning
    barrier = threading.Barrier(4)

    def work(number):
        with recorded_warnings() as caught:
            barrier.wait(SECONDS)
            warnings.warn(f"of {number}", UserWarning, stacklevel=1)
            barrier.wait(SECONDS)
        return [str(warning.message) for warning in caught]

    assert together([functools.partial(work, number) for number in range(4)]) == [[f"of {n}"] for n in range(4)]
    assert (warnings.filters, warnings.showwarning) == (filters, shown)
    with pytest.raises(UserWarning, match="not recorded"), recorded_warnings():
        raise together([lambda: warnings.warn("not recorded", UserWarning, stacklevel=1)])[0]


def test_a_step_of_pyro_svi_beside_a_model_in_another_thread_is_refused():
    held, go_on = threading.Event(), threading.Event()

    def run_a_model():
        with process_state():
            held.set()
            assert go_on.wait(SECONDS)

    thread = threading.Thread(target=run_a_model, daemon=True)
    thread.start()
    assert held.wait(SECONDS)
    steps = pyro.infer.SVI(mean_of, guide, pyro.optim.Adam({"lr": 0.1}), loss=ELBO())
    threading.Timer(0.1, go_on.set).start()
    with pyro.get_param_store().scope(), torch.random.fork_rng(), pytest.raises(ModelError, match="SVI.step ran while"):
        steps.step(data())
    thread.join(SECONDS)
    with pyro.get_param_store().scope(), torch.random.fork_rng():
        assert isinstance(steps.step(data()), float)


def test_a_handler_that_another_thread_has_put_in_between_is_refused():
    stranger = pyro.poutine.trace()

    def disturbed(y):
        mean_of(y)
        stranger.__enter__()

    with torch.random.fork_rng(), pyro.get_param_store().scope(), pytest.raises(ModelError, match="SVI.step ran while"):
        ELBO().loss(disturbed, guide, data())


@pytest.mark.parametrize("objective", [ELBO(), IWAE(num_particles=3), SUMO(), VCD()])
@pytest.mark.parametrize("place", ["factor", "prior", "guide"])
def test_a_loss_that_is_not_finite_is_a_loss_error(objective, place):
    nan = torch.tensor(torch.nan)

    def model(y):
        mean = pyro.sample("mean", dist.Normal(nan if place == "prior" else torch.tensor(0.0), 1.0))
        pyro.factor("term", mean + (nan if place == "factor" else 0.0))

    def of_nan(y):
        start = pyro.param("place", nan.clone() if place == "guide" else torch.tensor(0.0))
        pyro.sample("mean", dist.Normal(start, 1.0))

    with pytest.raises(LossError):
        fit(model, of_nan, objective, data(), num_steps=1, progress=False)
    with pyro.get_param_store().scope(), torch.random.fork_rng(), pytest.raises(LossError):
        objective.loss_and_grads(model, of_nan, data())
