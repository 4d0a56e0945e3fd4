"""Models with discrete latent variables."""
