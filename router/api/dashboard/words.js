// Numbers and moments in words, and the few functions by which elements are made.

const NONE = "–";

export function count(n) {
  if (n === null || n === undefined) return NONE;
  return Math.round(n).toLocaleString("en-US");
}

export function rate(n) {
  if (n === null || n === undefined) return NONE;
  if (n >= 1000) return count(n);
  if (n >= 100) return n.toFixed(0);
  if (n >= 10) return n.toFixed(1);
  return n === 0 ? "0" : n.toFixed(2);
}

// A number and its unit apart, so that the unit can be set smaller.
export function seconds(s) {
  if (s === null || s === undefined) return [NONE, ""];
  if (s < 0.00095) return [(s * 1e6).toFixed(0), "µs"];
  if (s < 0.00995) return [(s * 1e3).toFixed(1), "ms"];
  if (s < 0.9995) return [(s * 1e3).toFixed(0), "ms"];
  if (s < 9.95) return [s.toFixed(2), "s"];
  return s < 99.5 ? [s.toFixed(1), "s"] : [s.toFixed(0), "s"];
}

export function bytes(n) {
  if (n === null || n === undefined) return [NONE, ""];
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (n >= 999.5 && unit < units.length - 1) { n /= 1000; unit += 1; }
  return [n >= 100 || unit === 0 ? n.toFixed(0) : n.toFixed(1), units[unit]];
}

// Processors in use: 1 is one of them, all of the time.
export function cores(n) {
  if (n === null || n === undefined) return [NONE, ""];
  return [n >= 9.95 ? n.toFixed(0) : n.toFixed(n < 0.995 ? 2 : 1), n === 1 ? "core" : "cores"];
}

export const joined = (pair) => pair.filter(Boolean).join(" ");

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

export function span(s) {
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 3570) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${Number((s / 3600).toFixed(1))} h` : `${Math.round(s / 86400)} days`;
}

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

export function listed(words) {
  if (words.length < 2) return words.join("");
  return `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const by = (id) => document.getElementById(id);

// Texts and attributes are set only where they differ: what a person has selected stays selected.
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function mark(node, name, value) {
  const text = String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

// A number that is on the page under a name: `data-number` has the name, `data-value` the number as it came.
export function number(node, name, value, text) {
  mark(node, "data-number", name);
  mark(node, "data-value", value === null || value === undefined ? "" : value);
  say(node, text);
}

// Children of `parent` by key, made and dropped as keys come and go, in the order of the keys.
export class Keyed {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.nodes = new Map();
  }

  update(items, keyOf, change) {
    const before = this.nodes;
    this.nodes = new Map();
    let at = this.parent.firstChild;
    for (const item of items) {
      const key = keyOf(item);
      let node = before.get(key);
      if (node === undefined) node = this.make(item);
      before.delete(key);
      this.nodes.set(key, node);
      if (node === at) at = at.nextSibling;
      else this.parent.insertBefore(node, at);
      change(node, item);
    }
    for (const node of before.values()) node.remove();
  }
}

// A region that is wider than its place says so, in words and by a shade at the edge that hides something.
export function scrolls(region) {
  const hint = el("p", { class: "swipe", hidden: true, text: "Wider than its place: scroll it sideways" });
  const look = () => {
    const hidden = region.scrollWidth - region.clientWidth;
    hint.hidden = hidden < 2;
    if (hint.nextSibling !== region) region.before(hint);
    mark(region, "data-more", hidden < 2 ? "none" : region.scrollLeft < 2 ? "right" : region.scrollLeft > hidden - 2 ? "left" : "both");
  };
  region.addEventListener("scroll", look, { passive: true });
  const watch = new ResizeObserver(look);
  watch.observe(region);
  if (region.firstElementChild) watch.observe(region.firstElementChild);
  return region;
}

export function table(headings, numeric = []) {
  const head = headings.map((title, i) => el("th", { scope: "col", class: numeric.includes(i) ? "n" : null, text: title }));
  const body = el("tbody");
  return [el("table", {}, el("thead", {}, el("tr", {}, ...head)), body), body];
}
