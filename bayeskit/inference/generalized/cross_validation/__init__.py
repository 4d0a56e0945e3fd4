"""The marginal likelihood as a sum of cross-validation scores."""
