"""Most of the variance of images' likelihood is explained by their complexity.

Title: Input complexity and the variance of image likelihoods
Subject: Likelihoods of images and outliers
Made in: readings of {cite:t}`serra2020`, whose correlation is over images of several data sets together
Verdict: fails
Number: among handwritten digits compressed size explains the share 0.144 +- 0.021 of the variance of a density's -log p
Page: variational_autoencoders/density_is_not_detection
"""

import zlib

import torch
from torch.distributions import LowRankMultivariateNormal

from bayeskit.models.vae import load_mnist5000

mnist = load_mnist5000()
x, test = mnist.train.double(), mnist.test.double()
values, vectors = torch.linalg.eigh(torch.cov(x.mT, correction=0))  # probabilistic principal components, 60 of them
noise = values[:-60].mean()
model = LowRankMultivariateNormal(x.mean(0), vectors[:, -60:] * (values[-60:] - noise).sqrt(), noise.expand(784))
size = torch.tensor([len(zlib.compress((255 * image).byte().numpy().tobytes(), 9)) for image in test]).double()
n = len(test)
share = float(torch.corrcoef(torch.stack([-model.log_prob(test), size]))[0, 1] ** 2)
found = ((share, 2 * (share / n) ** 0.5 * (1 - share)),)
assert share < 0.3
