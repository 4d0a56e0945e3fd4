"""Whether credible regions cover: posteriors of many data sets in one batch."""
