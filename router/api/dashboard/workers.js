// Both pools: each worker's state, batch, queue, and what its pages are held by; as tiles where there are many.

import { by, cores, count, el, joined, Keyed, mark, number, plural, rate, say, scrolls } from "./words.js";

const MAX_ROWS = 12;
const WIDTHS = ["c-name", "c-state", "c-number", "c-number", "c-rate", "c-cpu", "c-pages", "c-node", "c-note"];
const NUMERIC = ["running", "waiting", "tokens"];

export class Workers {
  constructor() {
    this.pools = new Keyed(by("workers"), (pool) => makePool(pool.role));
  }

  draw(frame) {
    const here = frame.pools.map((pool) => ({ ...pool, workers: frame.workers.filter((worker) => worker.role === pool.role) }));
    this.pools.update(here, (pool) => pool.role, drawPool);
  }
}

function makePool(role) {
  const body = el("tbody");
  const names = ["Worker", "State", "Running", "Queued", role === "prefill" ? "Prompt tokens / s" : "Output tokens / s", "CPU, GPU", "KV pages: device, host below", "Node", "Note"];
  const head = el("tr", {}, ...names.map((name, i) => el("th", { scope: "col", class: [2, 3, 4, 5].includes(i) ? "n" : null, text: name })));
  const rows = el("div", { class: "scroll rows", tabindex: "0", role: "region", "aria-label": `${role} workers` }, el("table", {}, el("colgroup", {}, ...WIDTHS.map((name) => el("col", { class: name }))), el("thead", {}, head), body));
  const all = el("details", { class: "behind" }, el("summary", { text: "Each worker, as a table" }));
  const tiles = el("ul", { class: "tiles", "aria-label": `${role} workers` });
  const pool = el("div", { class: "pool" },
    el("div", { class: "pool-head" }, el("h3", { text: role[0].toUpperCase() + role.slice(1) }), el("p")), tiles, rows, all);
  scrolls(rows);
  pool.rows = new Keyed(body, makeRow);
  pool.tiles = new Keyed(tiles, makeTile);
  return pool;
}

function drawPool(node, pool) {
  const many = pool.workers.length > MAX_ROWS;
  const [head, tiles, ...rest] = node.children;
  const rows = rest.find((child) => child.classList.contains("rows")) ?? node.querySelector(".behind .scroll");
  const all = node.querySelector(".behind");
  if (many && rows.parentNode !== all) all.append(rows);
  if (!many && rows.parentNode !== node) node.insertBefore(rows, all);
  all.hidden = !many;
  tiles.hidden = !many;
  const states = Object.entries(pool.states).map(([state, n]) => `${count(n)} ${state}`).join(", ");
  const wanted = pool.wanted === undefined ? "" : `; the autoscaler wants ${count(pool.wanted)} of ${pool.least} to ${pool.most}: ${pool.why}`;
  say(head.lastChild, states + wanted);
  node.rows.update(pool.workers, (worker) => worker.name, drawRow);
  node.tiles.update(many ? pool.workers : [], (worker) => worker.name, drawTile);
}

function makeRow() {
  const track = el("div", { class: "track", "aria-hidden": "true" }, el("i", { class: "b-held" }), el("i", { class: "b-cached" }));
  const host = el("div", { class: "track host", "aria-hidden": "true" }, el("i", { class: "b-swapped" }), el("i", { class: "b-cached" }));
  const pages = el("div", { class: "pages" }, track, el("span"), host, el("span"));
  return el("tr", {}, el("th", { scope: "row" }), el("td", {}, el("span", { class: "state" })),
    ...NUMERIC.map(() => el("td", { class: "n" })), el("td", { class: "n" }), el("td", { class: "wide" }, pages), el("td"), el("td", { class: "note" }));
}

function drawRow(row, worker) {
  const [name, state, running, waiting, tokens, use, pages, node, note] = row.children;
  say(use, [worker.cpu !== undefined && joined(cores(worker.cpu)), worker.gpu !== undefined && `GPU ${Math.round(100 * worker.gpu)} %`].filter(Boolean).join(", ") || "–");
  say(name, worker.name);
  drawState(state.firstChild, worker);
  number(running, `${worker.name}.running`, worker.running, count(worker.running));
  number(waiting, `${worker.name}.waiting`, worker.waiting, count(worker.waiting));
  const tokensS = worker.role === "prefill" ? worker.prompt_tokens_s : worker.tokens_s;
  number(tokens, `${worker.name}.tokens_s`, tokensS, rate(tokensS));
  drawPages(pages.firstChild, worker);
  say(node, worker.node);
  say(note, notes(worker));
}

function drawState(node, worker) {
  mark(node, "data-state", worker.state);
  const times = worker.incarnation > 1 ? ` (${worker.incarnation}th start)`.replace("2th", "2nd").replace("3th", "3rd") : "";
  number(node, `${worker.name}.state`, worker.state, worker.state + times);
}

function drawPages(box, { name, pages, host }) {
  const [track, told, below, toldBelow] = box.children;
  const share = (n, total) => `${total ? (100 * n) / total : 0}%`;
  track.children[0].style.width = share(pages.requests, pages.total);
  track.children[1].style.width = share(pages.cached, pages.total);
  number(told, `${name}.pages_free`, pages.total - pages.requests, `${count(pages.requests)} + ${count(pages.cached)} of ${count(pages.total)}`);
  mark(told, "aria-label", `device: ${pages.requests} pages of requests, ${pages.cached} of the prefix cache alone, of ${pages.total}`);
  below.hidden = toldBelow.hidden = host === undefined;
  if (host === undefined) return;
  below.children[0].style.width = share(host.swapped, host.total);
  below.children[1].style.width = share(host.cached, host.total);
  say(toldBelow, `${count(host.swapped + host.cached)} of ${count(host.total)}`);
  mark(toldBelow, "aria-label", `host memory: ${host.swapped} pages swapped out, ${host.cached} of the prefix cache, of ${host.total}`);
}

function notes(worker) {
  const said = [];
  if (worker.waits) said.push(`waits for ${worker.waits}`);
  if (worker.stalled_s > 0) said.push(`stalled for ${worker.stalled_s} s`);
  if (worker.state === "draining") said.push(`draining: ${plural(worker.running + worker.waiting, "request")} and ${plural(worker.outgoing, "outgoing KV transfer")} left`);
  if (worker.retracted) said.push(`${plural(worker.retracted, "request")} preempted (swapped out)`);
  if (worker.ungranted) said.push(`${count(worker.ungranted)} queued for KV pages`);
  if (worker.role === "prefill" && worker.prompt_tokens) said.push(`${plural(worker.prompt_tokens, "prompt token")} to compute`);
  if (worker.cordoned) said.push("its node is cordoned");
  if (worker.last_end) said.push(`last exit: ${worker.last_end}`);
  return said.join("; ");
}

function makeTile() {
  return el("li", { class: "tile" }, el("b", {}, el("span", { class: "state" }), el("span")),
    el("div", { class: "track", "aria-hidden": "true" }, el("i", { class: "b-held" }), el("i", { class: "b-cached" })));
}

function drawTile(tile, worker) {
  const [head, track] = tile.children;
  mark(head.firstChild, "data-state", worker.state);
  say(head.firstChild, worker.name.replace(/^[a-z]+-/, ""));
  say(head.lastChild, worker.state === "ready" ? `${worker.running}${worker.waiting ? ` + ${worker.waiting}` : ""}` : worker.state);
  const { pages } = worker;
  track.children[0].style.width = `${pages.total ? (100 * pages.requests) / pages.total : 0}%`;
  track.children[1].style.width = `${pages.total ? (100 * pages.cached) / pages.total : 0}%`;
  mark(tile, "title", `${worker.name}: ${worker.state}, ${worker.running} running, ${worker.waiting} queued, ${pages.requests} + ${pages.cached} of ${pages.total} pages${worker.waits ? `, waits for ${worker.waits}` : ""}`);
}
