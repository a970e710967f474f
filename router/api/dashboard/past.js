// What has passed: rows of the last quarter of an hour, as the controller kept them and of the frames since, and for the
// hours before it a row a minute.

export const KEPT_S = 900;
const MINUTES_S = 21600;

export class Past {
  constructor() {
    this.rows = [];
    this.whole = []; // Rows of whole minutes, the oldest first.
    this.boot = "";
  }

  // What a controller has kept. Another one than before knows less: what this page has seen stays in front of it.
  take(past) {
    const again = past.boot === this.boot;
    const told = unpacked(past.history), minutes = unpacked(past.minutes ?? { at: [] }).map((row) => ({ ...row, minute: true }));
    this.rows = merged(again ? [] : this.rows, told, this.rows.filter((row) => row.boot === past.boot));
    this.whole = merged(again ? [] : this.whole, minutes, this.whole.filter((row) => row.boot === past.boot));
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
    const row = {
      at, boot: frame.boot, requests_s: now.requests_s, tokens_s: now.tokens_s, prompt_tokens_s: now.prompt_tokens_s, hit_share: now.hit_share,
      bytes_s: now.bytes_s, running: now.running, queued: now.queued, ttft_p50: now.ttft.p50, ttft_p99: now.ttft.p99,
      tpot_p50: now.tpot?.p50 ?? null, tpot_p99: now.tpot?.p99 ?? null, itl_p50: now.itl.p50, itl_p99: now.itl.p99,
      cpu_workers: now.cpu_workers ?? null, cpu_routers: now.cpu_routers ?? null, pages_prefill: pages("prefill"), pages_decode: pages("decode"),
    };
    const last = this.rows.at(-1);
    if (last && minute(last.at) !== minute(at)) this.#close(minute(last.at), frame.boot);
    this.rows.push(row);
    while (this.rows.length && this.rows[0].at < at - KEPT_S) this.rows.shift();
    while (this.whole.length && this.whole[0].at < at - MINUTES_S) this.whole.shift();
  }

  // A minute is over: its row, as the controller makes it, unless it has sent one.
  #close(number, boot) {
    const at = number * 60 + 30;
    if (this.whole.length && this.whole.at(-1).at >= number * 60) return;
    const rows = this.rows.filter((row) => minute(row.at) === number);
    const row = { at, boot, minute: true };
    for (const name of Object.keys(rows.at(-1))) if (!(name in row)) row[name] = together(name, rows.map((one) => one[name]));
    this.whole.push(row);
  }

  // The rows since a moment, the oldest first: by minutes where it is longer ago than rows are kept.
  since(at) {
    const first = this.rows[0]?.at ?? Infinity;
    return [...this.whole.filter((row) => row.at >= at && row.at < first), ...this.rows.filter((row) => row.at >= at)];
  }

  // The row of these that is nearest to a moment.
  near(rows, at) {
    let best = null;
    for (const row of rows) if (best === null || Math.abs(row.at - at) < Math.abs(best.at - at)) best = row;
    return best;
  }

  // Averages by whole minutes since a moment, the latest first; of p99 the worst.
  minutes(names, since) {
    const found = new Map();
    for (const row of this.since(since)) {
      const number = minute(row.at);
      if (!found.has(number)) found.set(number, []);
      found.get(number).push(row);
    }
    return [...found].reverse().map(([number, rows]) => ({ at: number * 60, means: names.map((name) => together(name, rows.map((row) => row[name]))) }));
  }
}

const minute = (at) => Math.floor(at / 60);

function unpacked(columns) {
  const names = Object.keys(columns);
  return columns.at.map((_, i) => Object.fromEntries(names.map((name) => [name, columns[name][i]])));
}

// Rows that were there before those which are told, these, and what has come since.
function merged(before, told, since) {
  const first = told.length ? told[0].at : Infinity, last = told.length ? told.at(-1).at : 0;
  return [...before.filter((row) => row.at < first), ...told, ...since.filter((row) => row.at > last)];
}

// One number for several: their mean, and of a p99 the worst.
function together(name, values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (!known.length) return null;
  return name.endsWith("_p99") ? Math.max(...known) : known.reduce((a, b) => a + b, 0) / known.length;
}
