"""Trees: one with its branch lengths, and arrays of topologies with their clades."""
