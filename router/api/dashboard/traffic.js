// The picture of the cluster: routers, both pools, and what goes from one to the other, as wide and as busy as it is.

import { bytes, by, count, el, joined, Keyed, mark, rate, say, svg, table } from "./words.js";

const MAX_QUIET = 48; // Links that carry nothing now are drawn up to so many: more would be a grey cloth.
const STILL = matchMedia("(prefers-reduced-motion: reduce)");
const SPEED = 130; // Pixels a second.

export class Traffic {
  constructor() {
    this.box = by("traffic");
    this.svg = svg("svg", { role: "img" });
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.box.append(this.svg, this.canvas);
    const [links, body] = table(["From", "To", "Bytes / s", "Since the sender’s start"], [2, 3]);
    by("links").append(links);
    this.rows = new Keyed(body, () => el("tr", {}, el("th", { scope: "row" }), el("td"), el("td", { class: "n" }), el("td", { class: "n" })));
    this.wires = [];
    this.dots = [];
    this.seen = true;
    new ResizeObserver(() => this.frame && this.draw(this.frame)).observe(this.box);
    new IntersectionObserver((entries) => { this.seen = entries.at(-1).isIntersecting; this.#move(); }).observe(this.box);
    STILL.addEventListener("change", () => this.#move());
    this.focus = null; // The worker whose links alone are shown.
    this.svg.addEventListener("pointermove", (event) => this.#look(event.target.closest?.(".node")?.dataset.name ?? null));
    this.svg.addEventListener("pointerleave", () => this.#look(null));
  }

  #look(name) {
    if (name === this.focus) return;
    this.focus = name;
    this.#light();
    this.#move();
  }

  #light() {
    const lit = new Set([this.focus]);
    if (this.focus === null) this.svg.removeAttribute("data-focus");
    else mark(this.svg, "data-focus", this.focus);
    for (const wire of this.svg.querySelectorAll(".wire[data-from]")) {
      const { from, to } = wire.dataset, on = from === this.focus || to === this.focus;
      wire.classList.toggle("lit", on);
      if (on) lit.add(from).add(to);
    }
    for (const one of this.svg.querySelectorAll(".node[data-name]")) one.classList.toggle("lit", lit.has(one.dataset.name));
  }

  draw(frame) {
    this.frame = frame;
    const width = Math.max(320, this.box.clientWidth), narrow = width < 720;
    const shown = frame.workers.filter((worker) => worker.state !== "left");
    const first = shown.filter((worker) => worker.role === "prefill");
    const second = shown.filter((worker) => worker.role !== "prefill");
    const most = Math.max(first.length, second.length, narrow ? 1 : Math.min(frame.routers.length, 16), 1);
    const pitch = Math.min(58, Math.max(15, 620 / most)), height = Math.max(most * pitch, 120) + 66;
    const nodeWidth = narrow ? Math.min(150, width * 0.38) : Math.min(236, width * 0.2);
    const columns = narrow
      ? { prefill: 10, decode: width - nodeWidth - 10 }
      : { routers: 20, prefill: width * 0.29, decode: width * 0.635 };
    mark(this.svg, "viewBox", `0 0 ${width} ${height}`);
    this.svg.style.height = `${height}px`;
    this.wires = [];
    const places = new Map();
    const place = (workers, x) => {
      const top = 56 + (height - 66 - workers.length * pitch) / 2;
      workers.forEach((worker, i) => places.set(worker.name, { x, y: top + i * pitch, w: nodeWidth, h: Math.min(pitch - 5, 46), worker }));
    };
    place(first, first.length ? columns.prefill : columns.decode);
    place(second, columns.decode);
    const parts = [];
    this.#links(frame, places, parts);
    if (!narrow) this.#edges(frame, places, columns, width, height, parts, first.length ? first : second, second);
    this.#labels(frame, columns, nodeWidth, parts, narrow, width);
    for (const spot of places.values()) parts.push(node(spot));
    this.svg.replaceChildren(...parts);
    this.#light();
    this.#say(frame, first, second);
    this.#table(frame);
    this.canvas.width = width * devicePixelRatio;
    this.canvas.height = height * devicePixelRatio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.#move();
  }

  #links(frame, places, parts) {
    const most = Math.max(...frame.links.map(([, , bytesS]) => bytesS), 1);
    const crowd = Math.max(1, frame.links.length / 20); // Many links are thinner and paler, that each can be followed.
    let quiet = 0;
    for (const [from, to, bytesS, total] of [...frame.links].reverse()) {
      const a = places.get(from), b = places.get(to);
      if (!a || !b) continue;
      if (bytesS === 0 && (quiet += 1) > MAX_QUIET) continue;
      const d = a.x === b.x ? arc(a, b) : bow(a.x + a.w, a.y + a.h / 2, b.x, b.y + b.h / 2);
      const part = Math.sqrt(bytesS / most), wide = bytesS === 0 ? 1 : 0.8 + (5 * part) / Math.sqrt(crowd);
      const title = svg("title", { text: `${from} to ${to}: ${joined(bytes(bytesS))}/s, ${joined(bytes(total))} in all` });
      const path = svg("path", { d, class: bytesS === 0 ? "wire quiet" : "wire", "stroke-width": wide.toFixed(1), "stroke-opacity": bytesS === 0 ? 0.7 : ((0.2 + 0.3 * part) / crowd ** 0.45).toFixed(2), "data-from": from, "data-to": to }, title);
      parts.push(path);
      if (bytesS > 0) this.wires.push({ path, ends: [from, to], pace: (1 + 5 * part) / Math.sqrt(crowd), size: (1.3 + 1.4 * part) / crowd ** 0.25 });
    }
  }

  #edges(frame, places, columns, width, height, parts, firsts, seconds) {
    const routers = frame.routers.slice(0, 16);
    const step = Math.min(46, (height - 80) / Math.max(1, routers.length));
    const top = 56 + (height - 66 - routers.length * step) / 2;
    const most = Math.max(...routers.map((router) => router.requests_s), 0.01);
    const mid = (spots) => spots.length ? spots.reduce((sum, one) => sum + one.y + one.h / 2, 0) / spots.length : height / 2;
    const enter = mid(firsts.map((worker) => places.get(worker.name))), leave = mid(seconds.map((worker) => places.get(worker.name)));
    const gate = (firsts.length && firsts[0].role === "prefill" ? columns.prefill : columns.decode) - 14;
    routers.forEach((router, i) => {
      const y = top + i * step + step / 2, x = columns.routers;
      const busy = router.requests_s > 0;
      const path = svg("path", { d: bow(x + 128, y, gate, enter), class: busy ? "wire edge" : "wire quiet", "stroke-width": busy ? (1 + 2.5 * Math.sqrt(router.requests_s / most)).toFixed(1) : 1, "stroke-opacity": 0.7 });
      parts.push(path, svg("g", { class: "node" },
        svg("circle", { cx: x + 6, cy: y, r: 4, fill: "var(--accent)" }),
        svg("text", { x: x + 18, y: y - 1, text: router.name.replace(/ on .*/, "") }),
        svg("text", { x: x + 18, y: y + 14, class: "dim", text: `${rate(router.requests_s)} requests/s` })));
      if (busy) this.wires.push({ path, pace: Math.min(3, 0.4 + router.requests_s / 4), size: 1.6 });
    });
    if (!seconds.length) return;
    if (firsts.length > 1 && firsts[0].role === "prefill") parts.push(bracket(gate, firsts.map((worker) => places.get(worker.name)), -1));
    const right = columns.decode + places.get(seconds[0].name).w + 14;
    if (seconds.length > 1) parts.push(bracket(right, seconds.map((worker) => places.get(worker.name)), 1));
    const out = svg("path", { d: `M${right} ${leave}L${width - 84} ${leave}`, class: frame.now.tokens_s > 0 ? "wire edge" : "wire quiet", "stroke-width": frame.now.tokens_s > 0 ? 2.4 : 1 });
    parts.push(out, svg("text", { x: width - 76, y: leave - 2, class: "pool-label", text: rate(frame.now.tokens_s) }),
      svg("text", { x: width - 76, y: leave + 13, class: "pool-sub", text: "tokens/s" }));
    if (frame.now.tokens_s > 0) this.wires.push({ path: out, pace: 2.2, size: 1.5 });
  }

  #labels(frame, columns, nodeWidth, parts, narrow, width) {
    const label = (x, title, sub) => parts.push(svg("text", { x, y: 24, class: "pool-label", text: title.toUpperCase() }), svg("text", { x, y: 41, class: "pool-sub", text: sub }));
    if (!narrow) label(columns.routers, frame.routers.length === 1 ? "Router" : "Routers", `${count(frame.now.in_flight)} in flight`);
    for (const pool of frame.pools) {
      const x = pool.role === "prefill" ? columns.prefill : columns.decode;
      const held = pool.pages_total ? (100 * pool.pages_requests) / pool.pages_total : 0;
      label(x, pool.role, narrow ? `KV ${held.toFixed(0)} % used` : `${count(pool.running)} running, ${count(pool.waiting)} queued, KV ${held.toFixed(held < 10 ? 1 : 0)} % used`);
    }
    if (!narrow) parts.push(svg("text", { x: width - 76, y: 24, class: "pool-label", text: "CLIENTS" }));
  }

  #say(frame, first, second) {
    const total = frame.links.reduce((sum, link) => sum + link[2], 0);
    const busy = frame.links.filter((link) => link[2] > 0).length;
    say(by("traffic-hint"), total ? `${joined(bytes(total))}/s of KV pages over ${count(busy)} ${busy === 1 ? "link" : "links"}` : "no KV pages in transfer");
    mark(this.svg, "aria-label", `${frame.routers.length} routers, ${first.length} prefill and ${second.length} other workers; ${joined(bytes(total))} of pages a second over ${busy} links. The table below has each.`);
  }

  #table(frame) {
    this.rows.update(frame.links, ([from, to]) => `${from} ${to}`, (row, [from, to, bytesS, total]) => {
      [from, to, joined(bytes(bytesS)), joined(bytes(total))].forEach((text, i) => say(row.children[i], text));
    });
  }

  // Dots run along the wires while the picture is in sight, unless the reader wants no motion.
  #move() {
    const draws = this.seen && !STILL.matches && this.wires.length;
    const shown = this.wires.filter(({ ends }) => this.focus === null || ends?.includes(this.focus));
    this.tracks = draws ? shown.map(track) : [];
    if (!draws) return this.canvas.getContext("2d").clearRect(0, 0, this.canvas.width, this.canvas.height);
    if (this.moving) return;
    this.moving = true;
    requestAnimationFrame((now) => this.#step(now));
  }

  #step(now) {
    if (!this.tracks.length) { this.moving = false; return; }
    const context = this.canvas.getContext("2d");
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.fillStyle = getComputedStyle(this.box).getPropertyValue("--accent");
    for (const { points, length, pace, size, shift } of this.tracks) {
      const gap = Math.max(26, 150 / pace), run = ((now / 1000) * SPEED + shift) % gap;
      for (let along = run; along < length; along += gap) {
        const at = (along / length) * (points.length - 1), i = Math.floor(at), rest = at - i;
        const a = points[i], b = points[Math.min(i + 1, points.length - 1)];
        context.beginPath();
        context.arc(a.x + (b.x - a.x) * rest, a.y + (b.y - a.y) * rest, size, 0, 7);
        context.fill();
      }
    }
    requestAnimationFrame((later) => this.#step(later));
  }
}

function track({ path, pace, size }, i) {
  const length = path.getTotalLength(), steps = Math.max(2, Math.ceil(length / 14));
  const points = Array.from({ length: steps + 1 }, (_, k) => path.getPointAtLength((length * k) / steps));
  return { points, length, pace, size, shift: (i * 37) % 150 };
}

function bow(x1, y1, x2, y2) {
  const bend = (x2 - x1) * 0.45;
  return `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
}

function arc(a, b) {
  const x = a.x + a.w, y1 = a.y + a.h / 2, y2 = b.y + b.h / 2, out = x + 26 + Math.abs(y2 - y1) * 0.12;
  return `M${x} ${y1}C${out} ${y1} ${out} ${y2} ${x} ${y2}`;
}

function bracket(x, spots, side) {
  const top = spots[0].y + 4, bottom = spots.at(-1).y + spots.at(-1).h - 4;
  return svg("path", { class: "chart-base", fill: "none", d: `M${x - side * 5} ${top}H${x}V${bottom}H${x - side * 5}` });
}

function node({ x, y, w, h, worker }) {
  const { pages } = worker, roomy = h >= 30;
  const group = svg("g", { class: "node", "data-state": worker.state, "data-name": worker.name, transform: `translate(${x} ${y})` },
    svg("title", { text: `${worker.name}: ${worker.state}, ${worker.running} running, ${worker.waiting} queued, ${pages.requests} of ${pages.total} KV pages in use` }));
  const bar = (left, top, wide, tall) => {
    const held = pages.total ? (wide * pages.requests) / pages.total : 0, cached = pages.total ? (wide * pages.cached) / pages.total : 0;
    group.append(svg("rect", { class: "trough", x: left, y: top, width: wide, height: tall, rx: 1 }),
      svg("rect", { class: "fill-held", x: left, y: top, width: held.toFixed(1), height: tall, stroke: "none" }),
      svg("rect", { class: "fill-cached", x: left + held, y: top, width: cached.toFixed(1), height: tall, stroke: "none" }));
  };
  const busy = worker.state === "ready" ? (worker.running ? `${worker.running} ${w < 170 ? "run" : "running"}` : "idle") : worker.state;
  group.append(svg("rect", { class: "box", width: w, height: h, rx: 4 }));
  if (roomy) {
    group.append(svg("text", { x: 11, y: 18, text: worker.name }), svg("text", { x: w - 11, y: 18, class: "dim", "text-anchor": "end", text: busy }));
    bar(11, h - 13, w - 22, 5);
  } else {
    const size = Math.min(11, h - 2), middle = h / 2 + size * 0.36;
    const name = svg("text", { x: 7, y: middle, text: worker.name });
    name.style.fontSize = `${size}px`;
    group.append(name);
    bar(w * 0.46, h / 2 - 2, w * 0.3, 4);
    const told = svg("text", { x: w - 6, y: middle, class: "dim", "text-anchor": "end", text: worker.state === "ready" ? worker.running || "·" : worker.state });
    told.style.fontSize = `${size}px`;
    group.append(told);
  }
  return group;
}
