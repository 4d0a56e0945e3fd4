import math

import pytest
import torch
from scipy.special import digamma, polygamma
from scipy.stats import gamma, kstest

import bayeskit as bk
from bayeskit._compiler import compilation
from bayeskit._core.statistics import effective_sample_size
from bayeskit.errors import SettingsError
from bayeskit.inference.samplers import _nuts as compiled_doubling
from bayeskit.inference.samplers import _nuts as doubling
from bayeskit.inference.samplers import _nuts as nuts
from bayeskit.inference.samplers._adaptation import Adaptation
from bayeskit.inference.samplers._chains import Chains, RunSettings
from bayeskit.inference.samplers._driver import Control, drive
from bayeskit.inference.samplers._metric import Metric
from bayeskit.inference.samplers._nuts import NUTS, CompiledGrowth

DENSE = Metric.dense(torch.tensor([[0.4, 0.3], [0.3, 0.5]], dtype=torch.float64))


def generator(seed=5):
    return torch.Generator().manual_seed(seed)


def z_score(x, truth):
    """Standardised error of the mean of ``(chains, draws)``."""
    return abs(float((x.mean() - truth) / (x.std() / effective_sample_size(x).sqrt())))


# -- invariance, and what breaks it -------------------------------------------------------------


def invariance(target, step_size, metric=None):
    """Take three steps from 20,000 exact draws; return p-values of both coordinates' exact distributions."""
    kernel = NUTS(step_size=step_size, metric=metric, max_depth=6)
    state, noise = kernel.init(target, target.sample_prior(20_000, seed=3)), generator()
    for _ in range(3):
        state, _ = kernel.step(target, state, generator=noise)
    x, y = state.position.unbind(-1)
    return kstest(gamma.cdf(x.exp(), 3), "uniform").pvalue, kstest((y - 0.8 * x) / 0.5, "norm").pvalue


@pytest.mark.calibration
@pytest.mark.parametrize(("step_size", "metric"), [(0.25, None), (0.6, None), (0.9, DENSE)])
def test_steps_leave_the_target_invariant(skewed, step_size, metric):
    assert min(invariance(skewed, step_size, metric)) > 1e-5


def without_weight_of_the_half(monkeypatch):
    """Move to the new half whatever it weighs."""
    join = doubling.join_half
    monkeypatch.setattr(
        doubling,
        "join_half",
        lambda tree, half, *rest: join(tree, half._replace(log_weight=half.log_weight + 50), *rest),
    )


def without_weight_of_the_leaves(monkeypatch):
    """Draw leaves of a half uniformly."""
    add = doubling.add_leaf

    def uniform(metric, limit, half, evaluation, exponential):
        half, remembered = add(metric, limit, half, evaluation, exponential * (-half_error(half, evaluation)).exp())
        return half, remembered

    def half_error(half, evaluation):
        momentum = half.half_momentum + 0.5 * half.step.unsqueeze(-1) * evaluation.gradient
        return 0.5 * momentum.square().sum(-1) - evaluation.log_density - half.initial_energy

    monkeypatch.setattr(doubling, "add_leaf", uniform)


def with_a_wrong_sign_of_the_force(monkeypatch):
    """Flip the last half kick before a leaf is weighed."""
    add = doubling.add_leaf

    def wrong(metric, limit, half, evaluation, exponential):
        kick = half.step.unsqueeze(-1) * metric.to_momentum(evaluation.gradient)
        return add(metric, limit, half._replace(half_momentum=half.half_momentum - kick), evaluation, exponential)

    monkeypatch.setattr(doubling, "add_leaf", wrong)


def without_questions_to_subtrees(monkeypatch):
    """Grow on although a subtree has turned, so that a trajectory depends on where it began."""
    monkeypatch.setattr(doubling, "subtrees_turn", lambda first, middle, half: torch.zeros(1, 1, dtype=torch.bool))


@pytest.mark.calibration
@pytest.mark.parametrize(
    "mutation",
    [
        without_weight_of_the_half,
        without_weight_of_the_leaves,
        with_a_wrong_sign_of_the_force,
        without_questions_to_subtrees,
    ],
)
def test_the_invariance_test_notices_a_mutation(skewed, monkeypatch, mutation):
    mutation(monkeypatch)
    assert min(invariance(skewed, 0.6)) < 1e-5


# -- against the recursive algorithm ------------------------------------------------------------


def turns(total, begin, end):
    return bool(total @ begin <= 0) or bool(total @ end <= 0)


class Recursive:
    """The tree of one chain by the textbook's recursion; a subtree is (first p, last p, sum of p, valid)."""

    def __init__(self, target, step_size, position, momentum):
        self.target, self.step_size = target, step_size
        gradient = target.value_and_grad(position.unsqueeze(0))[1][0]
        self.ends = {+1: (position, momentum, gradient), -1: (position, momentum, gradient)}
        self.num_steps = 0

    def leaf(self, direction):
        q, p, g = self.ends[direction]
        step = direction * self.step_size
        half = p + 0.5 * step * g
        q = q + step * half
        g = self.target.value_and_grad(q.unsqueeze(0))[1][0]
        p = half + 0.5 * step * g
        self.ends[direction] = (q, p, g)
        self.num_steps += 1
        return p, p, p, True

    def subtree(self, direction, depth):
        if depth == 0:
            return self.leaf(direction)
        left = self.subtree(direction, depth - 1)
        if not left[3]:
            return left
        return self.together(left, self.subtree(direction, depth - 1))

    @staticmethod
    def together(a, b):
        total = a[2] + b[2]
        turned = turns(total, a[0], b[1]) or turns(a[2] + b[0], a[0], b[0]) or turns(a[1] + b[2], a[1], b[1])
        return a[0], b[1], total, b[3] and not turned

    def grow(self, directions):
        p = self.ends[1][1]
        tree = p, p, p, True  # from left to right
        for depth, direction in enumerate(directions):
            new = self.subtree(direction, depth)
            if not new[3]:
                return depth + 1
            flipped = (new[1], new[0], *new[2:])
            tree = self.together(tree, new) if direction > 0 else self.together(flipped, tree)
            if not tree[3]:
                return depth + 1
        return len(directions)


def test_trees_are_those_of_the_recursive_algorithm(skewed):
    num_chains, step_size = 120, 0.15
    start = skewed.sample_prior(num_chains, seed=1)
    kernel = NUTS(step_size=step_size, max_depth=6)
    _, info = kernel.step(skewed, kernel.init(skewed, start), generator=generator(2))
    same = generator(2)
    momentum = torch.randn(start.shape, generator=same, dtype=start.dtype)
    forward = torch.rand(13, num_chains, generator=same, dtype=start.dtype)[:6] < 0.5
    sizes = set()
    for chain in range(num_chains):
        tree = Recursive(skewed, step_size, start[chain], momentum[chain])
        depth = tree.grow([1 if f else -1 for f in forward[:, chain]])
        assert (depth, tree.num_steps) == (int(info.tree_depth[chain]), int(info.num_steps[chain]))
        sizes.add(tree.num_steps)
    # Five in six end between halves, so that chance leaves out one of the ways in one of 10^9 runs.
    between = sizes & {2**depth - 1 for depth in range(7)}
    assert between and sizes - between


def test_a_tree_has_fewer_leaves_than_its_depth_allows(skewed):
    start = skewed.sample_prior(500, seed=1)
    kernel = NUTS(step_size=0.1, max_depth=5)
    _, info = kernel.step(skewed, kernel.init(skewed, start), generator=generator())
    assert bool((info.num_steps <= 2**info.tree_depth - 1).all())
    assert bool((info.num_steps > 2 ** (info.tree_depth - 1) - 1).all())
    tiny = kernel.with_settings(step_size=1e-4)
    _, info = tiny.step(skewed, tiny.init(skewed, start), generator=generator())
    assert bool((info.num_steps == 31).all()) and bool((info.tree_depth == 5).all())
    assert float(info.acceptance_rate.min()) > 0.999  # an error of third order in the step


# -- moments ------------------------------------------------------------------------------------


@pytest.mark.calibration
def test_moments_of_a_skewed_correlated_target(skewed, limit):
    draws = bk.sample(skewed, 32, 100, 300, seed=2, kernel=NUTS(), progress=False)
    assert draws.sample_stats["tree_depth"].shape == (32, 300)
    x, y = draws.unconstrained.unbind(-1)
    mean, variance = float(digamma(3)), float(polygamma(1, 3))
    truths = {
        "mean x": (x, mean),
        "mean y": (y, 0.8 * mean),
        "variance x": ((x - mean).square(), variance),
        "variance y": ((y - 0.8 * mean).square(), 0.64 * variance + 0.25),
        "covariance": ((x - mean) * (y - 0.8 * mean), 0.8 * variance),
        "skewness": (((x - mean) / math.sqrt(variance)) ** 3, float(polygamma(2, 3)) / variance**1.5),
    }
    scores = {name: z_score(*pair) for name, pair in truths.items()}
    assert max(scores.values()) < limit(len(scores)), scores


@pytest.mark.calibration
def test_moments_of_an_ill_conditioned_gaussian(limit):
    """Standard deviations from 1 to 20, an identity metric, and long trees that find the longest axis."""
    scale = torch.logspace(0, math.log10(20), 20, dtype=torch.float64)
    target = bk.Target.from_functions(
        lambda u: -0.5 * (u / scale).square().sum(-1) - scale.log().sum() - 10 * math.log(2 * math.pi),
        lambda u: 0 * u[..., 0],
        20,
    )
    kernel, noise = NUTS(step_size=0.7), generator(3)
    state = kernel.init(target, torch.randn(100, 20, generator=noise, dtype=torch.float64))  # far too narrow
    kept = []
    for iteration in range(40):
        state, info = kernel.step(target, state, generator=noise)
        if iteration >= 15:
            kept.append(state.position / scale)
    assert int(info.tree_depth.max()) >= 5
    z = torch.stack(kept, 1)
    # Chains are independent, so their means tell the error.
    scores = []
    for statistic, truth in ((z, 0.0), (z.square(), 1.0), (z[..., :-1] * z[..., 1:], 0.0)):
        per_chain = statistic.mean(1)
        scores.append((per_chain.mean(0) - truth).abs() / (per_chain.std(0) / math.sqrt(100)))
    scores = torch.cat(scores)
    assert float(scores.max()) < limit(len(scores)), scores


def test_each_chain_has_its_own_temperature(normal_normal, limit):
    levels = torch.tensor([0.0, 0.1, 0.5, 1.0], dtype=torch.float64)
    kernel, noise = (
        NUTS(step_size=1 / (1 + levels).sqrt().repeat_interleave(500), beta=levels.repeat_interleave(500)),
        generator(),
    )
    state = kernel.init(normal_normal, torch.zeros(2000, 2, dtype=torch.float64))
    for _ in range(12):
        state, _ = kernel.step(normal_normal, state, generator=noise)
    x = state.position.reshape(4, 1000)
    mean, variance = levels / (1 + levels), 1 / (1 + levels)
    z = (x - mean.unsqueeze(-1)) / variance.sqrt().unsqueeze(-1)
    scores = torch.cat([z.mean(1).abs() * math.sqrt(1000), (z.square().mean(1) - 1).abs() / math.sqrt(2 / 1000)])
    assert float(scores.max()) < limit(len(scores)), scores


# -- chains do not meet -------------------------------------------------------------------------


def test_a_chain_does_not_notice_its_neighbours():
    """Neighbours that stand at NaN, or far out, change no bit of a chain's move."""

    def log_prior(u):
        return torch.where(u[..., 0] < -90, torch.nan, -0.5 * u.square().sum(-1))

    target = bk.Target.from_functions(log_prior, lambda u: 0 * u[..., 0], 2)
    start = torch.randn(8, 2, generator=generator(), dtype=torch.float64)
    other = start.clone()
    other[3], other[5] = -100.0, 20.0
    kernel = NUTS(step_size=0.2)
    first, first_info = kernel.step(target, kernel.init(target, start), generator=generator(1))
    second, second_info = kernel.step(target, kernel.init(target, other), generator=generator(1))
    rest = [0, 1, 2, 4, 6, 7]
    for a, b in zip((*first[:5], *first_info), (*second[:5], *second_info), strict=True):
        assert torch.equal(a[rest], b[rest])
    assert torch.equal(second.position[3], other[3])
    assert second_info.diverging.nonzero().flatten().tolist() == [3]
    assert int(second_info.num_steps[3]) == 1 and float(second_info.acceptance_rate[3]) == 0


def test_looking_rarely_changes_nothing(skewed, monkeypatch):
    """Where a look at the chains waits for the device, dead chains go on for some leaves."""
    kernel = NUTS(step_size=0.1, max_depth=6)
    state = kernel.init(skewed, skewed.sample_prior(3, seed=1))
    results = []
    for period in (1, 8):
        monkeypatch.setitem(nuts.LEAVES_PER_LOOK, "cpu", period)
        now, noise = state, generator()
        for _ in range(5):
            now, info = kernel.step(skewed, now, generator=noise)
        results.append((*now, *info))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_infinite_density_is_no_place_to_stay():
    target = bk.Target.from_functions(
        lambda u: -0.5 * u.square().sum(-1), lambda u: torch.where(u[..., 0] > 1, torch.inf, 0.0 * u[..., 0]), 2
    )
    kernel, noise, seen = NUTS(step_size=0.8), generator(), 0
    state = kernel.init(target, torch.zeros(500, 2, dtype=torch.float64))
    for _ in range(5):
        state, info = kernel.step(target, state, generator=noise)
        seen += int(info.diverging.sum())
    assert seen > 0 and bool(state.log_density.isfinite().all()) and bool((state.position[:, 0] <= 1).all())


def test_divergences_are_counted():
    """A density that ends in a cliff."""
    target = bk.Target.from_functions(
        lambda u: torch.where(u[..., 0].abs() < 1, torch.zeros_like(u[..., 0]), -torch.inf), lambda u: 0 * u[..., 0], 1
    )
    kernel = NUTS(step_size=0.4, max_depth=3)
    state, info = kernel.step(
        target, kernel.init(target, torch.zeros(200, 1, dtype=torch.float64)), generator=generator()
    )
    assert 0 < int(info.diverging.sum()) < 200
    assert bool((state.position.abs() < 1).all())


# -- compiled, resumed, and bad input -----------------------------------------------------------


@pytest.mark.long
@pytest.mark.compiler
def test_compiled_moves_are_the_eager_ones(skewed):
    """Trees of up to 255 leaves, a factor with another memory layout, and draws that differ by rounding only."""
    factor = torch.linalg.cholesky(torch.tensor([[0.4, 0.3], [0.3, 0.5]], dtype=torch.float64))
    metric = Metric(factor.mT.contiguous().mT, is_dense=True)
    assert not metric.factor.is_contiguous()
    results = []
    for compile in (True, False):
        target = bk.Target.from_functions(skewed.density.log_prior, lambda u: -0.1 * u[..., 1], 2, compile=compile)
        kernel, noise = NUTS(step_size=0.02, metric=metric, beta=0.5), generator()
        state = kernel.init(target, skewed.sample_prior(8, seed=3))
        for _ in range(4):
            state, info = kernel.step(target, state, generator=noise)
        assert isinstance(kernel._growth(target, state.position), CompiledGrowth) == compile
        results.append((*state, *info))
    assert int(info.tree_depth.max()) >= 7
    # A tree of 2^8 leaves, each of some thirty roundings, four times over, at numbers of order ten.
    bound = 10 * 4 * 256 * 30 * torch.finfo(torch.float64).eps
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        assert float((a.double() - b.double()).abs().max()) < bound


def test_without_a_compiler_moves_are_eager(monkeypatch):
    monkeypatch.setattr(compilation, "has_compiler", lambda: False)
    form = (torch.Size([2]), False, 3, 2, torch.float64, torch.device("cpu"))
    assert compiled_doubling.compiled_moves.__wrapped__(*form, 5, 1000.0) is None


class Broken(Exception):
    pass


def test_an_interrupted_run_resumes_bit_for_bit(skewed, tmp_path, monkeypatch):
    def run(path=None):
        chains = Chains(skewed, Adaptation(NUTS(), 30), RunSettings(4, 30, 40, seed=1))
        return drive(chains, Control(path, checkpoint_seconds=0, progress=False), generator())

    whole = run()
    step, count = NUTS.step, 0

    def fragile(self, *args, **kwargs):
        nonlocal count
        count += 1
        if count == 50:
            raise Broken
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(NUTS, "step", fragile)
        with pytest.raises(Broken):
            run(tmp_path / "state")
    resumed = run(tmp_path / "state")
    assert resumed.num_iterations == whole.num_iterations == 70
    for name, rows in whole.records.as_dict().items():
        assert torch.equal(rows, resumed.records[name]), name


@pytest.mark.parametrize(
    "setting",
    [
        {"step_size": 0.0},
        {"step_size": math.nan},
        {"beta": 1.5},
        {"beta": -0.1},
        {"max_depth": 0},
        {"max_energy_error": 0.0},
    ],
)
def test_settings_outside_their_domain_are_refused(setting):
    with pytest.raises(SettingsError, match=next(iter(setting))):
        NUTS(**setting)


def test_float32_stays_float32():
    target = bk.Target.from_functions(
        lambda u: -0.5 * u.square().sum(-1), lambda u: 0 * u[..., 0], 2, dtype=torch.float32
    )
    kernel = NUTS(step_size=torch.tensor(0.5, dtype=torch.float64), metric=DENSE)
    state, info = kernel.step(target, kernel.init(target, torch.ones(3, 2)), generator=generator())
    assert all(x.dtype == torch.float32 for x in state[:5])
    assert info.acceptance_rate.dtype == info.energy.dtype == torch.float32
    assert info.num_steps.dtype == info.tree_depth.dtype == torch.int64 and info.diverging.dtype == torch.bool


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_chains_on_a_cuda_device(limit):
    target = bk.Target.from_functions(lambda u: -0.5 * u.square().sum(-1), lambda u: 0 * u[..., 0], 3, device="cuda")
    kernel, noise = NUTS(step_size=0.8), torch.Generator("cuda").manual_seed(0)
    state = kernel.init(target, torch.zeros(2000, 3, dtype=torch.float64, device="cuda"))
    for _ in range(12):
        state, _ = kernel.step(target, state, generator=noise)
    assert state.position.device.type == "cuda"
    scores = (state.position.square().mean(0) - 1).abs() / math.sqrt(2 / 2000)
    assert float(scores.max()) < limit(3)
