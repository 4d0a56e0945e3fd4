r"""A ladder from the prior to the posterior.

What you will learn: how one tempered run serves several estimators, and what the thermodynamic integral
looks like.

The power posterior at inverse temperature :math:`\beta` is proportional to prior times likelihood to the
power :math:`\beta`. Path sampling integrates the mean log likelihood over :math:`\beta` from 0, the prior, to
1, the posterior, by the trapezoidal rule, which its modified form corrects; stepping stone multiplies ratios of
neighbouring normalising constants. All use the same draws. The problem is a linear regression whose evidence is known
exactly.
"""

import os

import bayeskit as bk
from bayeskit.inference import evidence
from bayeskit.inference.samplers import sample_ladder

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))


def main() -> None:
    case = bk.exact.get("linreg10")
    target = case.target()
    size = {"num_warmup": 80, "num_samples": 100} if SMALL else {"num_warmup": 200, "num_samples": 500}
    ladder = sample_ladder(target, num_temperatures=40, num_chains=16, seed=0, **size)

    print("  beta   mean log likelihood")
    for beta, values in list(zip(ladder.beta, ladder.log_likelihood, strict=True))[::8]:
        print(f"{float(beta):6.4f} {float(values.mean()):12.2f}")

    print(f"exact: {case.log_evidence:.4f}")
    plain = evidence.path_sampling(target, ladder)
    print(f"the trapezoidal rule alone misses about {plain.diagnostics['trapezoid_gap']:.3f}: {plain}")
    for estimate in (evidence.modified_path_sampling(target, ladder), evidence.stepping_stone(target, ladder)):
        z = (estimate.log_evidence - case.log_evidence) / estimate.standard_error
        print(f"{estimate}, {z:+.2f} standard errors from the exact value")
        assert abs(z) < 5


if __name__ == "__main__":
    main()
