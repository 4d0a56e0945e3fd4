"""The mutual information of an algorithm's output and its data says by how much it overfits.

Title: Mutual information bounds on generalisation
Subject: Information and generalisation
Made in: readings of {cite:t}`xu2017`, who prove a bound from above for losses such as this, between zero and one
Verdict: holds if a bound from above is enough
Number: the more frequent side of 11 coins errs on new coins more often by 0.123 than on its own, where 0.693 nats give
    the bound 0.1775; if the output tells 5 of the coins as well, by 0.123, where 3.981 nats give 0.425
"""

import itertools
import math

import torch

n = 11
coins = torch.tensor(list(itertools.product((0.0, 1.0), repeat=n)), dtype=torch.float64)  # all data, equally likely
majority = (coins.mean(1) > 0.5).double()


def information(told, noise):
    """Return I(output; data) of the majority, flipped with the chance ``noise``, and the first coins as they are."""
    chance = torch.stack([majority, 1 - majority], 1) * (1 - 2 * noise) + noise  # of either side, given the data
    table = torch.zeros(2**told, 2, dtype=torch.float64)
    code = (coins[:, :told] * 2.0 ** torch.arange(told)).sum(1).long()
    table.index_add_(0, code, chance / len(coins))
    return float((torch.xlogy(chance, chance).sum() / len(coins)) - torch.xlogy(table, table).sum())


def gap(noise):
    """Return the mean error rate on new coins less that on the data; coins told are not used to predict."""
    own = (coins == majority[:, None]).double().mean(1)
    return float(0.5 - ((1 - noise) * (1 - own) + noise * own).mean())


rows = {(told, noise): (gap(noise), information(told, noise)) for told in (0, 2, 5) for noise in (0.0, 0.1, 0.4)}
bounds = {key: math.sqrt(nats / (2 * n)) for key, (_, nats) in rows.items()}  # errors are 1/2-sub-Gaussian
plain, telling = (0, 0.0), (5, 0.0)
found = n, rows[plain][0], rows[plain][1], bounds[plain], 5, rows[telling][0], rows[telling][1], bounds[telling]
assert all(0 < rows[key][0] < bounds[key] for key in rows)
assert rows[telling][1] > 4 * rows[plain][1] and bounds[telling] > 3 * rows[telling][0]
