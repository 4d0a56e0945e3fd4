"""Discrete autoencoders: exact bounds against loops over codes, and training to the exact optimum."""

import itertools
import math

import pytest
import torch
from torch import nn

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.exact._enumeration import enumerate_latents
from bayeskit.inference.gradients import DisARM, Enumeration, LeaveOneOut, UnorderedSet
from bayeskit.inference.gradients._estimator import WeightedPoints
from bayeskit.inference.held_out import importance_sampling
from bayeskit.inference.objectives import ELBO
from bayeskit.models.vae._discrete import BinaryVAE, CategoricalVAE, binary_vae, categorical_vae
from bayeskit.models.vae.likelihoods import Bernoulli

#: Their pixels go in pairs, so that two bits tell them apart.
PAIRED = torch.tensor([[0.0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.float64)
PATTERNS = torch.tensor([[b >> 2 & 1, b >> 1 & 1, b & 1, (b >> 2 ^ b >> 1 ^ b) & 1] for b in range(8)]).double()


class WrongSign(LeaveOneOut):
    """Leave-one-out, with the score's sign turned."""

    def points(self, space, generator=None):
        values, weights, _ = super().points(space, generator)
        return WeightedPoints(values, 2 * weights.detach() - weights)


def made(function, seed=0, scale=0.6, **settings):
    with global_stream(new_generator(seed, stream="weights")):
        vae = function(**settings)
        for parameter in vae.parameters():
            nn.init.normal_(parameter, std=scale)
    return vae.double()


def train(vae, x, optimizer, *, steps, seed=0):
    """Follow the objective's gradient by ever smaller steps; return the exact bound of each datum."""
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    objective = ELBO()
    with global_stream(new_generator(seed, stream="training")):
        for _ in range(steps):
            optimizer.zero_grad()
            objective.differentiable_loss(vae.model, vae.guide, x).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        return vae.evidence_lower_bound(x)


# --- Exact values


@pytest.mark.parametrize(
    "vae",
    [
        made(binary_vae, data_dim=4, hidden=(5,), num_bits=3),
        made(categorical_vae, data_dim=4, hidden=(5,), num_variables=2, num_categories=3),
    ],
    ids=["bits", "categories"],
)
def test_evidence_and_bound_are_those_of_a_loop_over_codes(vae):
    values = [torch.tensor([b], dtype=torch.float64) for b in (0.0, 1.0)]
    if isinstance(vae, CategoricalVAE):
        values = list(torch.eye(vae.code_shape[1], dtype=torch.float64))
    with torch.no_grad():
        evidence, bound = vae.log_evidence(PATTERNS), vae.evidence_lower_bound(PATTERNS)
        for row, x in enumerate(PATTERNS[:3]):
            logits = vae.encoder(x).reshape(vae.code_shape)
            joint, guide = [], []
            for parts in itertools.product(values, repeat=vae.code_shape[0]):
                code = torch.cat(parts) if isinstance(vae, BinaryVAE) else torch.stack(parts)
                chance = vae.decoder(code).sigmoid()
                likelihood = torch.where(x > 0.5, chance, 1 - chance).prod()
                joint.append(likelihood.log() - vae.code_shape[0] * math.log(len(values)))
                if isinstance(vae, BinaryVAE):
                    each = torch.where(code > 0.5, logits.sigmoid(), 1 - logits.sigmoid())
                else:
                    each = (logits.softmax(-1) * code).sum(-1)
                guide.append(each.prod())
            joint, guide = torch.stack(joint), torch.stack(guide)
            assert abs(float(guide.sum()) - 1) < 1e-12
            assert abs(float(evidence[row] - joint.logsumexp(0))) < 1e-12
            assert abs(float(bound[row] - (guide * (joint - guide.log())).sum())) < 1e-12
    assert bool((bound < evidence).all())


@pytest.mark.parametrize("function", [binary_vae, categorical_vae])
def test_model_is_what_the_oracle_enumerates(function):
    settings = {"num_bits": 3} if function is binary_vae else {"num_variables": 2, "num_categories": 2}
    vae = made(function, data_dim=4, hidden=(5,), **settings)
    with torch.no_grad():
        posterior = enumerate_latents(vae.model, PATTERNS[:2])
        exact = float(vae.log_evidence(PATTERNS[:2]).sum())
        assert abs(posterior.log_evidence - exact) < 1e-10
        # A prior that is off by one code's weight would be seen.
        assert abs(posterior.log_evidence - exact - 2 * math.log(8 / 7)) > 1e-3


@pytest.mark.parametrize("function", [binary_vae, categorical_vae])
def test_objective_by_enumeration_is_the_exact_bound(function):
    settings = {"num_bits": 3} if function is binary_vae else {"num_variables": 2, "num_categories": 3}
    vae = made(function, data_dim=4, hidden=(5,), gradient=Enumeration(), **settings)
    loss = ELBO().differentiable_loss(vae.model, vae.guide, PATTERNS)
    bound = vae.evidence_lower_bound(PATTERNS).sum()
    assert abs(float((loss + bound).detach())) < 1e-10
    found, exact = (torch.autograd.grad(y, list(vae.parameters())) for y in (loss, bound))
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, -b, rtol=0, atol=1e-10)


def test_importance_sampling_agrees_with_enumeration(limit):
    vae = made(binary_vae, data_dim=4, hidden=(5,), num_bits=3)
    result = importance_sampling(vae.model, vae.guide, PATTERNS, num_draws=4000, seed=0, progress=False)
    with torch.no_grad():
        error = result.log_likelihood - vae.log_evidence(PATTERNS)
    assert bool((error.abs() < limit(8) * result.pointwise_standard_error).all())


# --- Training


class Table(nn.Module):
    """An encoder with logits of its own for each pattern, and no amortisation."""

    def __init__(self, num_codes):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(16, num_codes, dtype=torch.float64))

    def forward(self, x):
        return self.logits[(x * torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=x.dtype)).sum(-1).long()]


def gap_of_the_best_guide(gradient):
    """Train a guide that has the exact posterior among its distributions; return what its bound lacks."""
    vae = made(categorical_vae, scale=0.4, data_dim=4, hidden=(5,), num_variables=1, num_categories=4)
    vae = CategoricalVAE(Table(4), vae.decoder, 1, 4, Bernoulli(), (4,), gradient)
    many = PATTERNS.repeat(200, 1)  # steps of less noise
    bound = train(vae, many, torch.optim.SGD([vae.encoder.logits], lr=2.0 / 200), steps=60)[:8]
    with torch.no_grad():
        return float((vae.log_evidence(PATTERNS) - bound).max())


@pytest.mark.parametrize("gradient", [LeaveOneOut(4), UnorderedSet(3, baseline=True)], ids=["leave one out", "set"])
def test_a_guide_that_can_be_exact_becomes_so(gradient):
    assert -1e-12 < gap_of_the_best_guide(gradient) < 1e-3


def test_a_wrong_sign_does_not_get_there():
    assert gap_of_the_best_guide(WrongSign(num_samples=4)) > 0.1


def bound_of_the_toy(gradient):
    vae = made(binary_vae, data_dim=4, hidden=(8,), num_bits=3, gradient=gradient)
    return float(train(vae, PAIRED.repeat(8, 1), torch.optim.Adam(vae.parameters(), lr=0.06), steps=250).mean())


@pytest.mark.calibration
@pytest.mark.parametrize("gradient", [DisARM(num_pairs=2), UnorderedSet(k=4)], ids=["DisARM", "set"])
def test_toy_reaches_the_entropy_of_its_data(gradient):
    """Four patterns, equally often: no model's bound beats -log 4, and its bits suffice for it.

    A model that does not tell two of them apart lacks at least log(2) / 2, because two fair pixels go as one, and cost
    log(4) where the code they share costs log(2) less. Training that is not over lacks a fourth of that at most.
    """
    assert -math.log(4) - math.log(2) / 4 < bound_of_the_toy(gradient) < -math.log(4)


@pytest.mark.calibration
def test_toy_whose_encoder_goes_astray_does_not():
    assert bound_of_the_toy(WrongSign(num_samples=4)) < -math.log(4) - 0.2


# --- Use and bad input


@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
def test_codes_and_data_have_any_batch(leading):
    vae = made(categorical_vae, data_dim=4, hidden=(5,), num_variables=3, num_categories=2)
    x = torch.zeros(*leading, 4, dtype=torch.float64)
    code = vae.encode(x)
    assert code.shape == (*leading, 3, 2)
    assert bool((code.sum(-1) == 1).all())
    assert vae.decode(code).shape == vae.reconstruct(x).shape == (*leading, 4)


def test_drawing_is_reproducible():
    vae = made(binary_vae, data_dim=4, hidden=(5,), num_bits=3)
    assert torch.equal(vae.generate(20, seed=1), vae.generate(20, seed=1))
    assert not torch.equal(vae.generate(20, seed=1), vae.generate(20, seed=2))


def test_thirty_variables_are_one_point_of_a_large_space():
    vae = made(categorical_vae, data_dim=4, hidden=(5,), gradient=UnorderedSet(k=4))
    with global_stream(new_generator(0)):
        ELBO().differentiable_loss(vae.model, vae.guide, PATTERNS).backward()
    assert all(bool(p.grad.isfinite().all()) for p in vae.parameters())
    with pytest.raises(SettingsError, match=str(10**30)):
        vae.log_evidence(PATTERNS)


def test_bad_input():
    with pytest.raises(SettingsError, match="num_categories"):
        categorical_vae(num_categories=1)
    with pytest.raises(SettingsError, match="at least 1"):
        binary_vae(num_bits=0)
    with pytest.raises(SettingsError, match="hidden is empty"):
        binary_vae(hidden=())
    vae = binary_vae(data_dim=4, hidden=(5,), num_bits=3)
    with pytest.raises(ShapeError, match="codes have shape"):
        vae.decode(torch.zeros(5, 2))
    with pytest.raises(ShapeError, match="4"):
        vae.log_evidence(torch.zeros(5, 3))


# --- Input


def test_data_come_from_any_library():
    vae = made(binary_vae, data_dim=4, hidden=(5,), num_bits=2)
    with torch.no_grad():
        code, evidence = vae.encode(PATTERNS), vae.log_evidence(PATTERNS)
        for x in (PATTERNS.numpy(), PATTERNS.tolist(), PATTERNS.bool(), PATTERNS.numpy().astype("float32")):
            assert torch.equal(vae.encode(x), code)
            assert torch.equal(vae.log_evidence(x), evidence)
            assert torch.equal(vae.evidence_lower_bound(x), vae.evidence_lower_bound(PATTERNS))
        assert torch.equal(vae.decode(code.numpy()), vae.decode(code))
        assert ELBO().loss(vae.model, vae.guide, PATTERNS.numpy()) > 0
        with pytest.raises(DataError, match=r"x\.to"):
            vae.encode(PATTERNS.float())


@pytest.mark.parametrize("function", [binary_vae, categorical_vae])
def test_settings_are_refused_at_once(function):
    for wrong in ("UnorderedSet", UnorderedSet, 4):
        with pytest.raises(SettingsError, match="no gradient estimator"):
            function(data_dim=4, hidden=(5,), gradient=wrong)
    with pytest.raises(SettingsError, match=r"hidden is 50.*\(50,\)"):
        function(data_dim=4, hidden=50)


def test_category_counts_that_are_no_numbers_are_refused():
    with pytest.raises(SettingsError, match="num_categories"):
        categorical_vae(data_dim=4, hidden=(5,), num_categories=2.5)
