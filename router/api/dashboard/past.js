// The last quarter of an hour: rows of the past as the controller kept it, and of the frames since.

export const KEPT_S = 900;

export class Past {
  constructor() {
    this.rows = [];
    this.boot = "";
  }

  // What a controller has kept. Another one than before knows less: what this page has seen stays in front of it.
  take(past) {
    const { history } = past;
    const names = Object.keys(history);
    const told = history.at.map((_, i) => Object.fromEntries(names.map((name) => [name, history[name][i]])));
    const first = told.length ? told[0].at : Infinity;
    const before = past.boot === this.boot ? [] : this.rows.filter((row) => row.at < first);
    const last = told.length ? told.at(-1).at : 0;
    const since = this.rows.filter((row) => row.at > last && row.boot === past.boot);
    this.rows = [...before, ...told, ...since];
    this.boot = past.boot;
  }

  add(frame) {
    const { now, at } = frame;
    if (this.rows.length && at <= this.rows.at(-1).at) return;
    const pages = (role) => {
      const pools = frame.pools.filter((pool) => pool.role === role || (role === "decode" && pool.role === "colocated"));
      const total = pools.reduce((sum, pool) => sum + pool.pages_total, 0);
      return total ? pools.reduce((sum, pool) => sum + pool.pages_requests, 0) / total : null;
    };
    this.rows.push({
      at, boot: frame.boot, requests_s: now.requests_s, tokens_s: now.tokens_s, prompt_tokens_s: now.prompt_tokens_s, hit_share: now.hit_share,
      bytes_s: now.bytes_s, running: now.running, queued: now.queued, ttft_p50: now.ttft.p50, ttft_p99: now.ttft.p99,
      itl_p50: now.itl.p50, itl_p99: now.itl.p99, pages_prefill: pages("prefill"), pages_decode: pages("decode"),
    });
    while (this.rows.length && this.rows[0].at < at - KEPT_S) this.rows.shift();
  }

  // The row that is nearest to a moment.
  near(at) {
    let best = null;
    for (const row of this.rows) if (best === null || Math.abs(row.at - at) < Math.abs(best.at - at)) best = row;
    return best;
  }

  // Averages by whole minutes, the latest first.
  minutes(names) {
    const found = new Map();
    for (const row of this.rows) {
      const minute = Math.floor(row.at / 60) * 60;
      if (!found.has(minute)) found.set(minute, []);
      found.get(minute).push(row);
    }
    return [...found].reverse().map(([at, rows]) => {
      const means = names.map((name) => {
        const values = rows.map((row) => row[name]).filter((value) => value !== null && value !== undefined);
        return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
      });
      return { at, means };
    });
  }
}
