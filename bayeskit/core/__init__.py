"""What everything stands on: statistics, storage, random streams, checks of input, progress, other packages."""
