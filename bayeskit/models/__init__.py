"""Model families, each a Pyro model with its data and, where one exists, its exact twin."""
