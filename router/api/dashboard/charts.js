// The small multiples: one number each, large, over the range that is looked at; one moment is marked in all of them.

import { bytes, by, clock, cores, count, el, joined, Keyed, mark, number, rate, say, seconds, span, svg, table } from "./words.js";

const W = 300, H = 64;
const MIN_S = 120;
const RANGES = [["5 min", 300], ["15 min", 900], ["1 h", 3600], ["6 h", 21600]];
const STEPS = [60, 120, 300, 600, 1200, 1800, 3600, 7200]; // Seconds that may lie between two marks of time.
const plain = (write) => (value) => [write(value), ""];
const share = plain((v) => (v === null || v === undefined ? "–" : `${(v * 100).toFixed(v && v < 0.1 ? 1 : 0)} %`));
const percentiles = (one) => `p90 ${joined(seconds(one?.p90))} · p99 ${joined(seconds(one?.p99))}`;

// A chart's lines are named as the field names what they show; `second` is the paler one. `target` has the frame's
// name for what is promised of it, `top` the end of a scale that is always the same.
const CHARTS = [
  { name: "requests_s", title: "Requests", lines: ["requests"], unit: "a second", write: plain(rate), value: (now) => now.requests_s,
    aside: (now) => `${count(now.in_flight)} in flight` },
  { name: "tokens_s", title: "Output tokens", lines: ["output", "prompt"], unit: "a second", write: plain(rate), value: (now) => now.tokens_s,
    second: "prompt_tokens_s", aside: (now) => `${rate(now.prompt_tokens_s)} prompt tokens a second` },
  { name: "ttft_p50", title: "Time to first token", short: "TTFT", lines: ["p50", "p99"], unit: "", write: seconds, value: (now) => now.ttft.p50, log: true,
    second: "ttft_p99", target: "ttft", aside: (now) => percentiles(now.ttft) },
  { name: "tpot_p50", title: "Time per output token", short: "TPOT", lines: ["p50", "p99"], unit: "", write: seconds, value: (now) => now.tpot?.p50 ?? null, log: true,
    second: "tpot_p99", aside: (now) => percentiles(now.tpot), more: "(last − first token) ÷ (tokens − 1) of each answer that ended" },
  { name: "itl_p50", title: "Inter-token latency", short: "ITL", lines: ["p50", "p99"], unit: "", write: seconds, value: (now) => now.itl.p50, log: true,
    second: "itl_p99", target: "itl", aside: (now) => percentiles(now.itl), more: "between two deliveries of an answer; accepted draft tokens come in bunches, within microseconds" },
  { name: "running", title: "Running requests", lines: ["running", "queued"], unit: "", write: plain(count), value: (now) => now.running,
    second: "queued", aside: (now) => `${count(now.queued)} queued` },
  { name: "pages_decode", title: "KV cache in use", lines: ["decode", "prefill"], unit: "of decode", write: share,
    value: (now, row) => row?.pages_decode ?? null, second: "pages_prefill", top: 1,
    aside: (now, row) => `${joined(share(row?.pages_prefill))} of prefill` },
  { name: "hit_share", title: "Prefix cache hit rate", lines: ["hit rate"], unit: "of prompts", write: share, value: (now) => now.hit_share, top: 1,
    aside: () => "device, host and storage together" },
  { name: "bytes_s", title: "KV transfer", lines: ["transfer"], unit: "a second", write: bytes, value: (now) => now.bytes_s,
    aside: () => "pages from worker to worker" },
  { name: "cpu_workers", title: "CPU", lines: ["workers", "routers"], unit: "of workers", write: cores, value: (now) => now.cpu_workers ?? null,
    second: "cpu_routers", aside: (now) => (now.cpu_routers === null && now.cpu_workers === null ? "not measured here" : `${joined(cores(now.cpu_routers))} of routers`) },
];
const COLUMNS = CHARTS.flatMap((chart) => [chart.name, chart.second].filter(Boolean));
const HEADINGS = ["Minute", ...CHARTS.flatMap((chart) => chart.lines.map((line) => (chart.lines.length > 1 ? `${chart.short ?? chart.title}: ${line}` : chart.title)))];

export class Charts {
  constructor(past) {
    this.past = past;
    this.at = null; // The moment that is looked at; null: now.
    this.range = 900;
    this.parts = CHARTS.map((chart) => this.#make(chart));
    by("multiples").append(...this.parts.map((part) => part.box));
    this.ranges = RANGES.map(([text, range]) => {
      const button = el("button", { type: "button", "aria-pressed": String(range === this.range), text });
      button.addEventListener("click", () => this.show(range));
      return { button, range };
    });
    by("ranges").append(...this.ranges.map(({ button }) => button));
    const [minutes, body] = table(HEADINGS, HEADINGS.map((_, i) => i).slice(1));
    by("minutes").append(minutes);
    this.minutes = new Keyed(body, () => el("tr", {}, el("th", { scope: "row" }), ...COLUMNS.map(() => el("td", { class: "n" }))));
    this.shownMinutes = by("minutes").closest("details");
    this.shownMinutes.addEventListener("toggle", () => this.#table());
  }

  show(range) {
    this.range = range;
    this.at = null;
    for (const one of this.ranges) mark(one.button, "aria-pressed", one.range === range);
    if (this.frame) this.draw(this.frame);
  }

  #make(chart) {
    const title = el("h3", { text: chart.title, title: chart.more ?? null }, chart.short ? el("abbr", { text: chart.short }) : null);
    const digits = el("span"), unit = el("small");
    const aside = el("p", { class: "aside" });
    const area = svg("path", { class: "chart-area" }), line = svg("path", { class: "chart-line" });
    const second = svg("path", { class: "chart-second" }), cross = svg("path", { class: "chart-cross" });
    const times = svg("path", { class: "chart-times" }), target = svg("path", { class: "chart-target" });
    const base = svg("path", { class: "chart-base", d: `M0 0H${W}M0 ${H}H${W}` });
    const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", tabindex: "0", role: "img" },
      area, base, times, second, line, target, cross);
    picture.addEventListener("pointermove", (event) => {
      const { left, width } = picture.getBoundingClientRect();
      this.look(this.end - this.span * (1 - (event.clientX - left) / width));
    });
    picture.addEventListener("pointerleave", () => this.look(null));
    picture.addEventListener("blur", () => this.look(null));
    picture.addEventListener("keydown", (event) => {
      const step = this.span > 1800 ? 60 : 5;
      const steps = { ArrowLeft: -step, ArrowRight: step, PageUp: -12 * step, PageDown: 12 * step }[event.key];
      if (event.key === "Escape" || event.key === "End") this.look(null);
      else if (event.key === "Home") this.look(this.end - this.span);
      else if (steps) this.look((this.at ?? this.end) + steps);
      else return;
      event.preventDefault();
    });
    const key = el("ul", { class: "key-lines", "aria-hidden": "true" }, ...chart.lines.map((name, i) => el("li", { class: i ? "second" : null, text: name })));
    const high = el("span", { class: "high", "aria-hidden": "true" }), low = el("span", { class: "low", "aria-hidden": "true" });
    const promised = el("span", { class: "promised", "aria-hidden": "true" });
    const axis = el("div", { class: "axis", "aria-hidden": "true" });
    const box = el("div", { class: "multiple", "data-chart": chart.name }, title, el("p", { class: "value" }, digits, unit), aside,
      el("div", { class: "scale" }, high, key), el("div", { class: "plot" }, picture, low, promised), axis);
    return { chart, box, digits, unit, aside, area, line, second, cross, picture, times, target, high, low, promised, axis };
  }

  look(at) {
    this.at = at === null ? null : Math.max(this.end - this.span, Math.min(this.end, at));
    if (this.frame) this.draw(this.frame);
  }

  draw(frame) {
    this.frame = frame;
    this.end = frame.at;
    const all = this.past.since(frame.at - this.range), first = all[0]?.at ?? frame.at;
    this.span = Math.min(this.range, Math.max(MIN_S, frame.at - first));
    const row = this.at === null ? all.at(-1) ?? null : this.past.near(all, this.at);
    for (const part of this.parts) this.#draw(part, all, row, frame);
    const short = this.range - this.span > 60 ? ": no more is known yet" : "";
    say(by("pulse-title"), `The last ${span(this.span)}${short}`);
    say(by("moment"), this.at === null ? "" : `at ${clock(row?.at ?? this.at)}`);
    this.#table();
  }

  #draw(part, rows, row, { now, targets }) {
    const { chart, digits, unit, aside, picture } = part;
    const value = this.at === null ? chart.value(now, row) : row?.[chart.name] ?? null;
    const [text, suffix] = chart.write(value);
    if (this.at === null) number(digits, `now.${chart.name}`, value, text);
    else say(digits, text);
    say(unit, [suffix, chart.unit && (suffix && chart.unit === "a second" ? "/ s" : chart.unit)].filter(Boolean).join(" "));
    say(aside, this.at === null ? chart.aside(now, row) : this.#past(chart, row));
    const names = [chart.name, chart.second].filter(Boolean);
    const values = rows.flatMap((one) => names.map((name) => one[name])).filter((v) => v !== null && v !== undefined);
    const promised = (targets?.[chart.target] ?? []).map((one) => one.s);
    const scale = (chart.log ? logScale : linearScale)(values, promised, chart.top);
    const x = (at) => (W * (at - this.end + this.span)) / this.span;
    const path = curve(rows, chart.name, x, scale.y, this.span / 45);
    part.line.setAttribute("d", path.line);
    part.area.setAttribute("d", chart.log ? "" : path.area);
    part.second.setAttribute("d", chart.second ? curve(rows, chart.second, x, scale.y, this.span / 45).line : "");
    part.cross.setAttribute("d", this.at === null ? "" : `M${x(row?.at ?? this.at).toFixed(1)} -4V${H}`);
    this.#scale(part, scale, promised, targets?.[chart.target] ?? []);
    this.#times(part, x);
    const least = Math.min(...values), most = Math.max(...values);
    const range = values.length ? `between ${joined(chart.write(least))} and ${joined(chart.write(most))} in the last ${span(this.span)}` : "nothing yet";
    const told = promised.length ? `; target ${promised.map((s) => joined(seconds(s))).join(" and ")}` : "";
    mark(picture, "aria-label", `${chart.title}: ${text} ${suffix} ${chart.unit}; ${range}${told}; ${chart.log ? "logarithmic" : "linear"} scale. Arrow keys look back.`);
  }

  // What the ends of the scale are, which kind it is, and where the promised lies.
  #scale({ chart, high, low, target, promised: label }, scale, promised, told) {
    say(high, scale.high === null ? "" : `${joined(chart.write(scale.high))} · ${chart.log ? "log" : "linear"}`);
    say(low, scale.low === null ? "" : joined(chart.write(scale.low)));
    target.setAttribute("d", promised.map((s) => `M0 ${scale.y(s).toFixed(1)}H${W}`).join(""));
    say(label, promised.length ? `SLO ${told.map((one) => joined(seconds(one.s)) + (one.share ? ` for ${Math.round(one.share * 100)} %` : "")).join(", ")}` : "");
    label.title = told.map((one) => one.by).join(", ");
    const y = promised.length ? scale.y(Math.max(...promised)) : 0;
    label.style.top = `${(100 * (y < 16 ? y + 3 : y - 14)) / H}%`;
  }

  // Marks of time: as few as can be read, counted back from now.
  #times({ times, axis }, x) {
    const step = STEPS.find((seconds) => this.span / seconds < 3.7) ?? STEPS.at(-1);
    const marks = [];
    for (let back = step; back < this.span * 0.97; back += step) marks.push(back);
    const drawn = `${this.span > 119 && Math.round(this.span)} ${marks.length}`;
    times.setAttribute("d", marks.map((back) => `M${x(this.end - back).toFixed(1)} 0V${H}`).join(""));
    if (axis.drawn === drawn) return;
    axis.drawn = drawn;
    axis.replaceChildren(...marks.map((back) => {
      const one = el("span", { text: back >= 3600 && this.span > 5400 ? `−${back / 3600} h` : `−${back / 60} min` });
      one.style.left = `${(100 * (this.span - back)) / this.span}%`;
      return one;
    }), el("span", { class: "now", text: "now" }));
  }

  #past(chart, row) {
    const value = chart.second && row ? row[chart.second] : null;
    return chart.second ? `${chart.lines[1]} ${joined(chart.write(value))}` : "";
  }

  #table() {
    if (!this.shownMinutes.open) return;
    const write = Object.fromEntries(CHARTS.flatMap((chart) => [[chart.name, chart.write], [chart.second, chart.write]]));
    this.minutes.update(this.past.minutes(COLUMNS, this.frame.at - this.range), (minute) => minute.at, (line, { at, means }) => {
      const [head, ...cells] = line.children;
      say(head, clock(at).slice(0, 5));
      cells.forEach((cell, i) => say(cell, joined(write[COLUMNS[i]](means[i]))));
    });
  }
}

// From 0 to what is a little more than the most.
function linearScale(values, promised, fixed) {
  const most = Math.max(...values, ...promised, 1e-9), top = fixed ?? round(most * 1.02);
  return { y: (value) => H - (H * Math.max(0, value)) / top, high: values.length ? top : null, low: values.length ? 0 : null };
}

function logScale(values, promised) {
  const positive = [...values, ...promised].filter((value) => value > 0);
  if (!values.some((value) => value > 0)) return { y: () => H, high: null, low: null };
  const low = Math.min(...positive) / 1.25, high = Math.max(...positive) * 1.25, width = Math.log(high / low);
  return { y: (value) => (value > 0 ? H - (H * Math.log(value / low)) / width : H), high, low };
}

// The next number up that people would choose for the end of a scale.
function round(most) {
  const unit = 10 ** Math.floor(Math.log10(most));
  return unit * [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((step) => step * unit >= most);
}

// The line through a column's values, broken where there are none for longer than `gap` seconds, or than 20.
function curve(rows, name, x, y, gap) {
  let line = "", area = "", begun = null, last = null;
  const close = () => { if (begun !== null) area += `L${last.toFixed(1)} ${H}L${begun.toFixed(1)} ${H}Z`; begun = null; };
  let at = null;
  for (const row of rows) {
    const value = row[name];
    if (value === null || value === undefined) continue;
    const left = x(row.at), up = y(value);
    if (at === null || row.at - at > Math.max(20, gap, row.minute ? 90 : 0)) {
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
