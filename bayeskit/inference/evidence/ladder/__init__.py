"""Estimators on draws at every temperature between prior and posterior."""
