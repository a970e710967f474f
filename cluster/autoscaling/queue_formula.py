"""How many workers a queue needs: the M/M/c queue, by Erlang's C formula.

With Poisson arrivals and exponential service at `workers` equal servers, a request waits longer than t with probability

    P(W > t) = C(c, a) * exp(-(c - a) * t / s),    C(c, a) = B / (1 - (a / c) * (1 - B)),    B = B(c, a)

where a is the offered load in servers, s the mean service time, and B Erlang's loss formula, by its recursion
B(0) = 1, B(k) = a B(k-1) / (k + a B(k-1)). (L. Kleinrock, *Queueing Systems* I, 1975, section 3.8; W. Whitt's staffing
by it: N. Gans, G. Koole, A. Mandelbaum, *Telephone Call Centers*, M&SOM 5(2), 2003, section 4.) Prompts are no Poisson
stream and share chunks, so this is a floor to plan by; what is really waited for is measured beside it.
"""

from __future__ import annotations

import math

HALVINGS = 40
"""Halvings of an interval within which a load is looked for."""


def waiting_share(workers: int, offered: float, service_s: float, limit_s: float) -> float:
    """The share of requests that wait longer than `limit_s`, where `offered` workers' time is asked for in a second and
    a request takes one `service_s` seconds; 1 where the queue only grows."""
    if offered <= 0:
        return 0.0
    if offered >= workers:
        return 1.0
    loss = 1.0
    for count in range(1, workers + 1):
        loss = offered * loss / (count + offered * loss)
    waits = loss / (1 - (offered / workers) * (1 - loss))
    return waits * math.exp(-(workers - offered) * limit_s / service_s)


def workers_needed(offered: float, service_s: float, limit_s: float, share: float) -> float:
    """Workers with which at most `share` of the requests wait longer than `limit_s`.

    A fraction: between the greatest loads that two neighbouring numbers of workers bear, in proportion.
    """
    if offered <= 0:
        return 0.0
    workers = math.floor(offered) + 1
    while waiting_share(workers, offered, service_s, limit_s) > share:
        workers += 1
    less, more = (_bearable(count, service_s, limit_s, share) for count in (workers - 1, workers))
    return workers - 1 + min(1.0, max(0.0, (offered - less) / (more - less)))


def _bearable(workers: int, service_s: float, limit_s: float, share: float) -> float:
    """The greatest load, in workers, at which at most `share` wait longer than `limit_s`."""
    low, high = 0.0, float(workers)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if waiting_share(workers, middle, service_s, limit_s) > share:
            high = middle
        else:
            low = middle
    return low
