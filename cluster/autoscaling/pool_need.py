"""How many workers each pool needs for the load that was measured.

*Prefill.* The offered load is what prompts ask of a worker's time: tokens a second that had to be computed, over the
tokens a second that a worker computes. The pool needs the most of: so many that they are busy for `prefill_use` of
their time; so many that `attainment` of the prompts wait less than `queue_target_s` (the M/M/c queue below); with a
queue that is longer than that, so many that it is gone by the next growth; and one more where first tokens are late
though prefill has work and decode had pages for all prompts.

*Decode.* Requests hold pages; the pool needs so many workers that these are `decode_use` of their pages. Pages that
are held for prompts which prefill has yet to compute are prefill's lack, not decode's, and are left out; requests
whose prompts are computed and that wait for pages count as much as those that have some. One worker more is needed
where requests were put off for want of pages, where prefill stands still because decode has no pages for its prompts,
and where tokens come late and workers run several requests.

*The queue.* With Poisson arrivals and exponential service at c equal servers, a request waits longer than t with
probability

    P(W > t) = C(c, a) * exp(-(c - a) * t / s),    C(c, a) = B / (1 - (a / c) * (1 - B)),    B = B(c, a)

(Erlang's C formula), where a is the offered load in servers, s the mean service time, and B Erlang's loss formula, by
its recursion B(0) = 1, B(k) = a B(k-1) / (k + a B(k-1)). (L. Kleinrock, *Queueing Systems* I, 1975, section 3.8;
staffing by it: N. Gans, G. Koole, A. Mandelbaum, *Telephone Call Centers*, M&SOM 5(2), 2003, section 4.) Prompts are no
Poisson stream and share chunks, so this is a floor to plan by; what is really waited for is measured beside it.

A need that asks for one more is counted from the workers that serve: it asks for nothing further while one is starting.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from twinpool.cluster.autoscaling.load_window import MeasuredLoad
from twinpool.contracts.config.autoscaling_config import AutoscalingConfig

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


SEVERAL = 2.0
"""Requests that a decode worker runs, from which fewer would be quicker."""


class PoolNeed(NamedTuple):
    """What one pool needs."""

    workers: float
    """Below 0 while that isn't known."""
    why: str
    load: float = 0.0
    """The pool's load whatever its size: tokens a second that are to be computed, or that are generated."""
    urgent: bool = False
    """Whether requests wait or come late: nobody leaves then, and the pool grows soon."""

    @property
    def known(self) -> bool:
        return self.workers >= 0


UNKNOWN = -1.0


def prefill_need(config: AutoscalingConfig, load: MeasuredLoad) -> PoolNeed:
    """What the prefill pool needs."""
    if not load.prefill:
        return PoolNeed(UNKNOWN, "no worker serves")
    if not load.rate:
        return PoolNeed(UNKNOWN, "no worker has told yet how fast it computes")
    offered = load.offered / load.rate
    found = [(offered / config.prefill_use, f"{load.offered:,.0f} tokens/s to compute, {load.rate:,.0f} a worker")]
    if load.requests > 0 and offered > 0:
        share, limit_s = 1 - config.attainment, config.queue_target_s
        need = workers_needed(offered, offered / load.requests, limit_s, share)
        found.append((need, f"{load.requests:.1f} prompts/s that shall wait less than {limit_s:g} s"))
    queued = load.queue_s > config.queue_target_s and not _stands_still(config, load)
    if queued:
        clearing = offered + load.backlog / (load.rate * config.grow_cooldown_s)
        found.append((clearing, f"{load.queue_s:.1f} s of prompts wait"))
    late = load.first.missed(config.attainment)
    works = load.busy >= config.prefill_use / 2 or queued
    if late and works and not load.lacked:
        found.append((load.prefill + 1.0, f"{load.first.late_share:.0%} of first tokens are late"))
    workers, why = max(found)
    return PoolNeed(workers, why, load.offered, late or (queued and workers > load.prefill))


def decode_need(config: AutoscalingConfig, load: MeasuredLoad, page_tokens: int) -> PoolNeed:
    """What the decode pool needs. `page_tokens`: tokens of a page."""
    if not load.decode or not load.pages:
        return PoolNeed(UNKNOWN, "no worker serves")
    stuck = _stands_still(config, load)
    promised = 0 if stuck else min(load.used_pages, load.backlog // page_tokens)
    held = load.used_pages - promised
    if load.lacking and (holders := load.running + load.granted):
        held += round(load.lacking * load.used_pages / holders)
    each = load.pages / load.decode
    found = [(held / (each * config.decode_use), f"requests ask for {held / load.pages:.0%} of its pages")]
    one_more, running = load.decode + 1.0, load.running / load.decode
    if load.put_off:
        found.append((one_more, f"{load.put_off} requests were put off for want of pages"))
    if load.lacking >= 1 or stuck:
        wait = load.ungranted if stuck else round(load.lacking)
        found.append((max(one_more, found[0][0]), f"{wait} requests wait for its pages"))
    late = load.gaps.missed(config.attainment)
    several = running >= SEVERAL
    if late and several:
        text = f"{load.gaps.late_share:.0%} of tokens are late, with {running:.1f} requests a worker"
        found.append((one_more, text))
    workers, why = max(found)
    return PoolNeed(workers, why, load.generated, late or stuck or load.lacking >= 1 or load.put_off > 0)


def _stands_still(config: AutoscalingConfig, load: MeasuredLoad) -> bool:
    """Whether prefill has a queue and computes little, because decode has no pages for its prompts."""
    return load.ungranted > 0 and load.backlog > 0 and load.busy < config.prefill_use / 2
