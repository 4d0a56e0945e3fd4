"""The weight beta of an autoencoder's divergence does what no other setting does.

Title: Beta-VAE: beta and the variance of the decoder
Subject: Variational inference and discrete choices
Made in: readings of {cite:t}`higgins2017`; {cite:t}`rybkin2021` have the correspondence for normal decoders
Verdict: fails
Number: beta = 4 with decoder variance 0.1 and beta = 1 with variance 0.4 have gradients of ratio 4.000 in all
    parameters
Page: variational_autoencoders/beta_vae_infomax
"""

import torch

from bayeskit.extend import new_generator

x = torch.randn(50, 6, dtype=torch.float64, generator=new_generator(0))
shapes = (6, 2), (2, 6), (2,)
parameters = [0.3 * torch.randn(shape, dtype=torch.float64, generator=new_generator(1)) for shape in shapes]


def gradients(beta, variance):
    """Differentiate beta times the divergence plus the expected square over twice the variance, in closed form."""
    decoder, encoder, log_sd = (p.clone().requires_grad_() for p in parameters)
    mean, code_variance = x @ encoder.T, (2 * log_sd).exp()
    square = (x - mean @ decoder.T).square().sum() + len(x) * (decoder.square() * code_variance).sum()
    divergence = 0.5 * (mean.square() + code_variance - 2 * log_sd - 1).sum()
    return torch.autograd.grad(beta * divergence + square / (2 * variance), [decoder, encoder, log_sd])


ratios = torch.cat([(a / b).flatten() for a, b in zip(gradients(4.0, 0.1), gradients(1.0, 0.4), strict=True)])
found = 4, 0.1, 1, 0.4, float(ratios.mean())
assert float((ratios - 4).abs().max()) < 1e-9
