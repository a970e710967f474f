// Where the time of the latest requests went: the spans of each, one after the other, and what was done meanwhile.

import { by, clock, count, el, joined, Keyed, mark, say, scrolls, seconds, table } from "./words.js";

const MAX = 24;
// The parts of a request's time, in the one order that legend, bars and tables have: by name, in words, and whether it is
// a wait, which is hatched. Each has a hue of its own in style.css (`--p-…`).
const SPANS = {
  tokenise: ["tokenise"], queue: ["router queue", true], prefill_queue: ["prefill queue", true], prefill: ["prefill"],
  decode_queue: ["decode queue", true], handover: ["KV transfer, exposed"], transfer: ["KV transfer, overlapped"], decode: ["decode"],
  retracted: ["preempted", true], move: ["migration"], answer: ["finish"],
};
const ORDER = Object.keys(SPANS);
const place = (name) => (ORDER.includes(name) ? ORDER.indexOf(name) : ORDER.length);

export class Waterfall {
  constructor() {
    this.list = el("ol", { class: "waterfall" });
    by("requests").append(this.list);
    this.rows = new Keyed(this.list, (record) => this.#make(record));
    this.names = [];
    this.first = false; // Whether requests are drawn to their first token alone.
    for (const [id, first] of [["to-end", false], ["to-first", true]]) {
      by(id).addEventListener("click", () => {
        this.first = first;
        mark(by("to-end"), "aria-pressed", !first);
        mark(by("to-first"), "aria-pressed", first);
        this.draw(this.frame);
      });
    }
  }

  draw(frame) {
    this.frame = frame;
    const records = frame.requests.slice(0, MAX);
    by("requests-section").hidden = !records.length;
    if (!records.length) return;
    for (const record of records) for (const one of record.spans) if (!this.names.includes(one.name)) this.names.push(one.name);
    const legend = by("span-legend");
    if (legend.children.length !== this.names.length) {
      this.names.sort((one, other) => place(one) - place(other));
      legend.replaceChildren(...this.names.map((name) => { const item = el("li", { text: words(name) }); item.style.setProperty("--swatch", shade(name)); return item; }));
    }
    const longest = Math.max(...records.map((record) => this.#end(record)), 1e-6);
    this.rows.update(records, (record) => record.request_id, (row, record) => this.#draw(row, record, longest));
  }

  // Up to when a request is drawn.
  #end(record) {
    return this.first ? Math.min(record.total_s, (record.first_token_s ?? record.total_s) * 1.03) : record.total_s;
  }

  #make(record) {
    const button = el("button", { type: "button", "aria-expanded": "false", title: "its spans and events" }, el("span"));
    const head = el("div", { class: "row" }, el("div", {}, button, el("p", { class: "sub" })), el("div", { class: "bars", role: "img" }), el("div", { class: "n" }));
    const row = el("li", {}, head);
    head.addEventListener("click", () => { // The whole row opens; by keys its button does, whose click comes here as well.
      if (String(getSelection())) return; // Somebody copies its id.
      const opened = row.querySelector(".detail");
      if (opened) opened.remove();
      else row.append(detail(row.record));
      mark(button, "aria-expanded", !opened);
    });
    return row;
  }

  #draw(row, record, longest) {
    const drawn = `${record.total_s} ${record.events.length} ${longest} ${this.first} ${this.names.length}`;
    row.record = record;
    if (row.drawn === drawn) return; // A record changes only where an audit of it has ended.
    row.drawn = drawn;
    const [name, bars, total] = row.firstChild.children;
    say(name.firstChild.firstChild, record.request_id);
    say(name.lastChild, [`${count(record.prompt_tokens)} + ${count(record.generated)} tokens`, record.cached_tokens && `${count(record.cached_tokens)} cached`, record.attempts > 1 && `${record.attempts} attempts`,
      record.migrations && "migrated", record.retractions && "preempted", record.tenant].filter(Boolean).join(" · "));
    const end = this.#end(record);
    const part = (one) => {
      const bar = el("i", { title: `${words(one.name)}: ${joined(seconds(one.end_s - one.start_s))}${one.worker ? `, ${one.worker}` : ""}`, class: one.hidden ? "hidden-work" : null });
      bar.style.left = `${(100 * one.start_s) / longest}%`;
      bar.style.width = `${(100 * (Math.min(one.end_s, end) - one.start_s)) / longest}%`;
      bar.style.setProperty("--swatch", shade(one.name));
      return bar;
    };
    const parts = record.spans.filter((one) => one.start_s < end).map(part);
    if (record.first_token_s) {
      const first = el("span", { class: "first", title: `first token after ${joined(seconds(record.first_token_s))}` });
      first.style.left = `${(100 * record.first_token_s) / longest}%`;
      parts.push(first);
    }
    bars.replaceChildren(...parts);
    mark(bars, "aria-label", ordered(record.spans).map((one) => `${words(one.name)} ${joined(seconds(one.end_s - one.start_s))}`).join(", "));
    mark(row, "data-bad", !record.well);
    const took = this.first ? record.first_token_s : record.total_s;
    say(total, ["stop", "length"].includes(record.outcome) ? joined(seconds(took)) : record.outcome);
  }
}

function detail(record) {
  const [spans, body] = table(["Span", "Start", "Duration", "Worker", "Detail"], [1, 2]);
  const region = scrolls(el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Spans of ${record.request_id}` }, spans));
  for (const one of record.spans) {
    const cells = [joined(seconds(one.start_s)), joined(seconds(one.end_s - one.start_s)), one.worker, [one.hidden && "overlapped", one.detail].filter(Boolean).join(": ")];
    body.append(el("tr", {}, el("th", { scope: "row", text: words(one.name) }), ...cells.map((text, i) => el("td", { class: i < 2 ? "n" : null, text: text ?? "" }))));
  }
  return el("div", { class: "detail" }, el("p", { class: "sub", text: `arrived at ${clock(record.arrived)} by ${record.router}; ${record.outcome} ${record.message}` }), region,
    el("ol", { class: "story" }, ...record.events.map((one) => el("li", {}, el("span", { class: "n", text: joined(seconds(one.at_s)) }), el("span", { text: [one.kind, one.worker, one.text].filter(Boolean).join(" · ") })))));
}

const words = (name) => SPANS[name]?.[0] ?? name.replaceAll("_", " ");

const ordered = (spans) => [...spans].sort((one, other) => place(one.name) - place(other.name));

function shade(name) {
  const hue = `var(--p-${name in SPANS ? name : "answer"})`;
  return SPANS[name]?.[1] ? `repeating-linear-gradient(135deg, ${hue} 0 3px, color-mix(in oklab, ${hue} 35%, var(--card)) 3px 6px)` : hue;
}
