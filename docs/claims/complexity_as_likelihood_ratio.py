"""A density model's -log p less the length of the compressed file is a log likelihood ratio.

Title: Input complexity as a likelihood ratio
Subject: Likelihoods of images and outliers
Made in: abstract of {cite:t}`serra2020`
Verdict: holds if the compressor's lengths are those of a probability that sums to one
Number: with the code of Krichevsky and Trofimov, some hundred bits with thirty ones score -3.65, and with none 47.31
Page: variational_autoencoders/density_is_not_detection
"""

import math

from scipy.special import betaln, comb


def code_length(ones, n=100):
    """Return the bits of the code, whose probabilities are those of a coin under Jeffreys' prior."""
    return -(betaln(ones + 0.5, n - ones + 0.5) - betaln(0.5, 0.5)) / math.log(2)


def score(ones, n=100, theta=0.3):
    """Return -log2 p less the code length: the log Bayes factor of Jeffreys' prior against theta."""
    return -(ones * math.log2(theta) + (n - ones) * math.log2(1 - theta)) - code_length(ones, n)


found = score(30), score(0)
assert abs(sum(comb(100, k) * 2 ** -code_length(k) for k in range(101)) - 1) < 1e-9
assert found[0] < 0 < found[1]
