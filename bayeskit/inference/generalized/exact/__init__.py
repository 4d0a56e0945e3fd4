"""Posteriors of losses in closed form or by enumeration."""
