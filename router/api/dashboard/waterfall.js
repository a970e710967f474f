// Where the time of the latest requests went: the spans of each, one after the other, and what was done meanwhile.

import { by, clock, count, el, joined, Keyed, mark, say, seconds, table } from "./words.js";

const MOST = 24;
const SHADES = 7;

export class Waterfall {
  constructor() {
    this.list = el("ol", { class: "waterfall" });
    by("requests").append(this.list);
    this.rows = new Keyed(this.list, (record) => this.#make(record));
    this.names = [];
    this.open = null;
  }

  draw(frame) {
    const records = (frame.requests ?? []).slice(-MOST).reverse();
    by("requests-section").hidden = !records.length;
    if (!records.length) return;
    for (const record of records) for (const one of record.spans) if (!this.names.includes(one.name)) this.names.push(one.name);
    const legend = by("span-legend");
    if (legend.children.length !== this.names.length) {
      legend.replaceChildren(...this.names.map((name, i) => { const item = el("li", { text: name }); item.style.setProperty("--swatch", shade(i)); return item; }));
    }
    const longest = Math.max(...records.map((record) => record.total_s), 1e-6);
    this.rows.update(records, (record) => record.request_id, (row, record) => this.#draw(row, record, longest));
  }

  #make(record) {
    const button = el("button", { type: "button", "aria-expanded": "false" });
    const row = el("li", {}, el("div", {}, button, el("p", { class: "sub" })), el("div", { class: "bars", role: "img" }), el("div", { class: "n" }));
    button.addEventListener("click", () => {
      const opened = row.querySelector(".detail");
      if (opened) opened.remove();
      else row.append(detail(row.record));
      mark(button, "aria-expanded", !opened);
    });
    return row;
  }

  #draw(row, record, longest) {
    if (row.record === record && row.longest === longest) return;
    row.record = record;
    row.longest = longest;
    const [name, bars, total] = row.children;
    say(name.firstChild, record.request_id);
    say(name.lastChild, [`${count(record.prompt_tokens)} + ${count(record.generated)} tokens`, record.cached_tokens && `${count(record.cached_tokens)} cached`, record.tenant].filter(Boolean).join(" · "));
    const part = (one) => {
      const bar = el("i", { title: `${one.name}: ${joined(seconds(one.end_s - one.start_s))}${one.worker ? `, ${one.worker}` : ""}`, class: one.hidden ? "hidden-work" : null });
      bar.style.left = `${(100 * one.start_s) / longest}%`;
      bar.style.width = `${(100 * (one.end_s - one.start_s)) / longest}%`;
      bar.style.setProperty("--swatch", shade(this.names.indexOf(one.name)));
      return bar;
    };
    const parts = record.spans.map(part);
    if (record.first_token_s) {
      const first = el("span", { class: "first", title: `first token after ${joined(seconds(record.first_token_s))}` });
      first.style.left = `${(100 * record.first_token_s) / longest}%`;
      parts.push(first);
    }
    bars.replaceChildren(...parts);
    mark(bars, "aria-label", record.spans.map((one) => `${one.name} ${joined(seconds(one.end_s - one.start_s))}`).join(", "));
    const bad = !["ended", "stop", "length", "tool_calls", "ok"].includes(record.outcome);
    mark(row, "data-bad", bad);
    say(total, bad ? record.outcome : joined(seconds(record.total_s)));
  }
}

function detail(record) {
  const [spans, body] = table(["Part", "From", "Takes", "Worker", "Detail"], [1, 2]);
  for (const one of record.spans) {
    const cells = [joined(seconds(one.start_s)), joined(seconds(one.end_s - one.start_s)), one.worker, one.detail];
    body.append(el("tr", {}, el("th", { scope: "row", text: one.name }), ...cells.map((text, i) => el("td", { class: i < 2 ? "n" : null, text: text ?? "" }))));
  }
  return el("div", { class: "detail" }, el("p", { class: "sub", text: `came at ${clock(record.arrived)} by ${record.router}; ${record.outcome}` }), spans);
}

// Tints of the one hue, told apart by lightness and order; the legend names them.
function shade(i) {
  const k = ((i * 3) % SHADES) / (SHADES - 1);
  return `color-mix(in oklab, var(--accent) ${Math.round(100 - 72 * k)}%, var(--tint))`;
}
