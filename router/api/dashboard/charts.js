// The small multiples: one number each, large, over its last quarter of an hour; one moment is marked in all of them.

import { bytes, by, clock, count, el, joined, Keyed, mark, number, plural, rate, say, seconds, svg, table } from "./words.js";
import { KEPT_S } from "./past.js";

const W = 300, H = 56;
const LEAST_S = 120;
const plain = (write) => (value) => [write(value), ""];
const share = plain((v) => (v === null || v === undefined ? "–" : `${(v * 100).toFixed(v && v < 0.1 ? 1 : 0)} %`));

const CHARTS = [
  { name: "requests_s", title: "Requests", unit: "a second", write: plain(rate), value: (now) => now.requests_s,
    aside: (now) => `${count(now.in_flight)} under way` },
  { name: "tokens_s", title: "Tokens to clients", unit: "a second", write: plain(rate), value: (now) => now.tokens_s,
    second: "prompt_tokens_s", aside: (now) => `${rate(now.prompt_tokens_s)} of prompts computed` },
  { name: "ttft_p50", title: "Time to first token", unit: "", write: seconds, value: (now) => now.ttft.p50, log: true,
    second: "ttft_p99", aside: (now) => `p90 ${joined(seconds(now.ttft.p90))} · p99 ${joined(seconds(now.ttft.p99))}` },
  { name: "itl_p50", title: "Between tokens", unit: "", write: seconds, value: (now) => now.itl.p50, log: true,
    second: "itl_p99", aside: (now) => `p90 ${joined(seconds(now.itl.p90))} · p99 ${joined(seconds(now.itl.p99))}` },
  { name: "running", title: "Running on workers", unit: "", write: plain(count), value: (now) => now.running,
    second: "queued", aside: (now) => `${count(now.queued)} wait` },
  { name: "bytes_s", title: "Pages handed over", unit: "a second", write: bytes, value: (now) => now.bytes_s,
    aside: () => "from worker to worker" },
  { name: "pages_decode", title: "Decode’s memory", unit: "held", write: share,
    value: (now, row) => row?.pages_decode ?? null, second: "pages_prefill", top: 1,
    aside: (now, row) => `prefill ${joined(share(row?.pages_prefill))}` },
  { name: "hit_share", title: "Found in caches", unit: "of prompts", write: share, value: (now) => now.hit_share, top: 1,
    aside: (now) => `${rate(now.prompt_tokens_s)} tokens a second computed` },
];
const COLUMNS = CHARTS.flatMap((chart) => [chart.name, chart.second].filter(Boolean));
const HEADINGS = ["Minute", ...CHARTS.flatMap((chart) => [chart.title, chart.second && `${chart.title}: ${TITLES()[chart.second]}`].filter(Boolean))];

function TITLES() {
  return { prompt_tokens_s: "prompts", ttft_p99: "p99", itl_p99: "p99", queued: "waiting", pages_prefill: "prefill" };
}

export class Charts {
  constructor(past) {
    this.past = past;
    this.at = null; // The moment that is looked at; null: now.
    this.parts = CHARTS.map((chart) => this.#make(chart));
    by("multiples").append(...this.parts.map((part) => part.box));
    const [minutes, body] = table(HEADINGS, HEADINGS.map((_, i) => i).slice(1));
    by("minutes").append(minutes);
    this.minutes = new Keyed(body, () => el("tr", {}, el("th", { scope: "row" }), ...COLUMNS.map(() => el("td", { class: "n" }))));
    this.shownMinutes = by("minutes").closest("details");
    this.shownMinutes.addEventListener("toggle", () => this.#table());
  }

  #make(chart) {
    const title = el("h3", { text: chart.title });
    const digits = el("span"), unit = el("small");
    const aside = el("p", { class: "aside" });
    const area = svg("path", { class: "chart-area" }), line = svg("path", { class: "chart-line" });
    const second = svg("path", { class: "chart-second" }), cross = svg("path", { class: "chart-cross" });
    const base = svg("path", { class: "chart-base", d: `M0 ${H}H${W}` });
    const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", tabindex: "0", role: "img" },
      area, base, second, line, cross);
    picture.addEventListener("pointermove", (event) => {
      const { left, width } = picture.getBoundingClientRect();
      this.look(this.end - this.span * (1 - (event.clientX - left) / width));
    });
    picture.addEventListener("pointerleave", () => this.look(null));
    picture.addEventListener("blur", () => this.look(null));
    picture.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -5, ArrowRight: 5, PageUp: -60, PageDown: 60 }[event.key];
      if (event.key === "Escape" || event.key === "End") this.look(null);
      else if (event.key === "Home") this.look(this.end - this.span);
      else if (steps) this.look((this.at ?? this.end) + steps);
      else return;
      event.preventDefault();
    });
    const box = el("div", { class: "multiple" }, title, el("p", { class: "value" }, digits, unit), aside, picture);
    return { chart, box, digits, unit, aside, area, line, second, cross, picture };
  }

  look(at) {
    this.at = at === null ? null : Math.max(this.end - this.span, Math.min(this.end, at));
    if (this.frame) this.draw(this.frame);
  }

  draw(frame) {
    this.frame = frame;
    const rows = this.past.rows;
    this.end = frame.at;
    this.span = Math.min(KEPT_S, Math.max(LEAST_S, frame.at - (rows[0]?.at ?? frame.at)));
    const row = this.at === null ? rows.at(-1) ?? null : this.past.near(this.at);
    for (const part of this.parts) this.#draw(part, rows, row, frame.now);
    say(by("pulse-title"), this.span < KEPT_S ? `The last ${plural(Math.round(this.span / 60), "minute")}` : "The last quarter of an hour");
    say(by("moment"), this.at === null ? "" : `at ${clock(row?.at ?? this.at)}`);
    this.#table();
  }

  #draw({ chart, digits, unit, aside, area, line, second, cross, picture }, rows, row, now) {
    const value = this.at === null ? chart.value(now, row) : row?.[chart.name] ?? null;
    const [text, suffix] = chart.write(value);
    if (this.at === null) number(digits, `now.${chart.name}`, value, text);
    else say(digits, text);
    say(unit, [suffix, chart.unit && (suffix ? "/ s" : chart.unit)].filter(Boolean).join(" "));
    say(aside, this.at === null ? chart.aside(now, row) : this.#past(chart, row));
    const names = [chart.name, chart.second].filter(Boolean);
    const values = rows.flatMap((one) => names.map((name) => one[name])).filter((v) => v !== null && v !== undefined);
    const scale = chart.log ? logScale(values) : linearScale(chart.top ?? Math.max(...values, 1e-9) * 1.08);
    const x = (at) => (W * (at - this.end + this.span)) / this.span;
    const path = curve(rows, chart.name, x, scale);
    line.setAttribute("d", path.line);
    area.setAttribute("d", chart.log ? "" : path.area);
    second.setAttribute("d", chart.second ? curve(rows, chart.second, x, scale).line : "");
    cross.setAttribute("d", this.at === null ? "" : `M${x(row?.at ?? this.at).toFixed(1)} -4V${H}`);
    const low = Math.min(...values), high = Math.max(...values);
    const range = values.length ? `between ${joined(chart.write(low))} and ${joined(chart.write(high))} lately` : "nothing yet";
    mark(picture, "aria-label", `${chart.title}: ${text} ${suffix} ${chart.unit}; ${range}. Arrow keys look back.`);
  }

  #past(chart, row) {
    const value = chart.second && row ? row[chart.second] : null;
    return chart.second ? `${TITLES()[chart.second]} ${joined(chart.write(value))}` : "";
  }

  #table() {
    if (!this.shownMinutes.open) return;
    const write = Object.fromEntries(CHARTS.flatMap((chart) => [[chart.name, chart.write], [chart.second, chart.write]]));
    this.minutes.update(this.past.minutes(COLUMNS), (minute) => minute.at, (line, { at, means }) => {
      const [head, ...cells] = line.children;
      say(head, clock(at).slice(0, 5));
      cells.forEach((cell, i) => say(cell, joined(write[COLUMNS[i]](means[i]))));
    });
  }
}

const linearScale = (top) => (value) => H - (H * Math.max(0, value)) / top;

function logScale(values) {
  const positive = values.filter((value) => value > 0).map(Math.log);
  const low = Math.min(...positive) - 0.25, high = Math.max(...positive) + 0.25;
  return (value) => (value > 0 && high > low ? H - (H * (Math.log(value) - low)) / (high - low) : H);
}

// The line through a column's values, broken where there are none for long.
function curve(rows, name, x, y) {
  let line = "", area = "", begun = null, last = null;
  const close = () => { if (begun !== null) area += `L${last.toFixed(1)} ${H}L${begun.toFixed(1)} ${H}Z`; begun = null; };
  let at = null;
  for (const row of rows) {
    const value = row[name];
    if (value === null || value === undefined) continue;
    const left = x(row.at), up = y(value);
    if (at === null || row.at - at > 20) {
      close();
      line += `M${left.toFixed(1)} ${up.toFixed(1)}`;
      area += `M${left.toFixed(1)} ${H}L${left.toFixed(1)} ${up.toFixed(1)}`;
      begun = left;
    } else {
      line += `L${left.toFixed(1)} ${up.toFixed(1)}`;
      area += `L${left.toFixed(1)} ${up.toFixed(1)}`;
    }
    at = row.at;
    last = left;
  }
  close();
  return { line, area };
}
