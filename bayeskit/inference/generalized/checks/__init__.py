"""Whether there is a posterior, whether updates cohere, and what no weight can put right."""
