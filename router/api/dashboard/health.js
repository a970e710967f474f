// What was counted: damaged state, which is to be zero; requests; errors, rejections and recoveries. Zeros that are well
// are folded into one line. And the control plane.

import { by, clock, cores, count, el, joined, Keyed, mark, number, plural, rate, say, span, table } from "./words.js";

const SITES = {
  handover: "KV pages damaged in transfer", load: "host-to-device loads damaged", storage: "storage objects damaged", step: "steps with stale KV pages",
  restore: "swapped-out KV damaged", arena: "host pages of dead workers damaged", logits: "steps with non-finite logits", audit: "audited answers that differ",
};
const TOTALS = {
  requests_submitted: "accepted", requests_ended: "completed", requests_cancelled: "cancelled", generated_tokens: "output tokens",
  prompt_tokens_cached: "prompt tokens from the prefix cache", migrated: "migrated while running",
};
const FAULTS = {
  requests_failed: ["failed", "bad"], replays: ["replayed (failover)", "notice"], attempts_recomputed: ["recomputed: out of KV memory", "notice"],
  handovers_damaged: ["damaged KV transfers", "bad"], fallbacks: ["prompts prefilled by decode", "notice"], refused_full: ["rejected: queue full (429)", "notice"],
  refused_early: ["rejected: TTFT SLO", "notice"], requests_shed: ["shed: TTFT SLO missed", "notice"], client_disconnects: ["client disconnects", ""],
  slow_clients: ["slow clients cut off", "notice"], streams_flagged: ["degenerate streams flagged", "notice"], deaths: ["worker deaths", "bad"],
};
const FEW = 4; // Zeros that the line of those that are well names.

export class Health {
  constructor() {
    const make = () => el("div", {}, el("dt"), el("dd"));
    this.damage = [new Keyed(by("damage"), make), new Keyed(by("damage-zeros"), make)];
    this.totals = new Keyed(by("totals"), make);
    this.faults = [new Keyed(by("faults"), make), new Keyed(by("faults-zeros"), make)];
    const [routers, body] = table(["Router", "In flight", "Queued", "Requests / s", "Tokens / s", "CPU", "Viewers", "Build"], [1, 2, 3, 4, 5, 6]);
    by("routers").append(routers);
    this.routers = new Keyed(body, () => el("tr", {}, el("th", { scope: "row" }), ...Array.from({ length: 6 }, () => el("td", { class: "n" })), el("td")));
  }

  draw(frame) {
    const sites = Object.entries(frame.damage);
    const found = sites.reduce((sum, [, n]) => sum + n, 0);
    const line = by("damage-line");
    mark(line, "data-level", found ? "bad" : "good");
    say(line, found ? `${plural(found, "damaged state was", "damaged states were")} found, and computed again.` : "No damaged state was found.");
    this.#both(this.damage, by("damage-well"), sites.map(([site, n]) => [`damage.${site}`, [SITES[site] ?? site, "bad"], n]));
    const audits = [["audits", "audited answers", frame.totals.audits_equal + frame.totals.audits_damaged]];
    const totals = [...Object.entries(TOTALS).map(([name, title]) => [`totals.${name}`, title, frame.totals[name]]), ...audits];
    this.totals.update(totals, ([name]) => name, (box, [name, title, n]) => this.#count(box, name, title, n, ""));
    const faults = Object.entries(FAULTS).map(([name, told]) => (name === "deaths" ? [name, told, frame.deaths] : [`totals.${name}`, told, frame.totals[name]]));
    this.#both(this.faults, by("faults-well"), faults);
    this.#control(frame);
  }

  // What isn't zero, and behind one line what is.
  #both([shown, folded], line, all) {
    const zeros = all.filter(([, , n]) => n === 0);
    const draw = (box, [name, [title, level], n]) => this.#count(box, name, title, n, level);
    shown.update(all.filter(([, , n]) => n !== 0), ([name]) => name, draw);
    folded.update(zeros, ([name]) => name, draw);
    shown.parent.hidden = zeros.length === all.length;
    line.closest("details").hidden = !zeros.length;
    const named = zeros.slice(0, FEW).map(([, [title]]) => `0 ${title.replace(/:.*| \(.*/, "")}`);
    const rest = zeros.length - named.length;
    say(line, `${named.join(", ")}${rest > 0 ? ` and ${rest} more zeros` : ""}: all well`);
  }

  #count(box, name, title, n, level) {
    say(box.children[0], title);
    number(box.children[1], name, n, count(n));
    mark(box, "data-zero", n === 0);
    mark(box, "data-bad", n > 0 && level === "bad");
    mark(box, "data-notice", n > 0 && level === "notice");
  }

  #control(frame) {
    const { control } = frame;
    const builds = [...new Set([control?.build, ...frame.workers.map((worker) => worker.build), ...frame.routers.map((router) => router.build)].filter(Boolean))];
    const facts = control ? [
      ["Leading controller", control.leader || "a controller that has not said where", "control.leader"],
      ["Term", `${count(control.term)}: it leads for ${span(frame.up_s)}`, "control.term"],
      ["Standby controllers", control.standbys.length ? control.standbys.join(", ") : "none", "control.standbys"],
      ["Supervisor", control.supervised ? "there" : "away: no worker is started meanwhile", "control.supervised"],
    ] : [["Controller", "none: router and workers are one process", "control.leader"], ["Runs", `for ${span(frame.up_s)}`, "control.up"]];
    if (frame.autoscaler) {
      const did = Object.entries(frame.autoscaler.counters).filter(([, n]) => n).map(([what, n]) => `${count(n)} ${what.replaceAll("_", " ")}`);
      facts.push(["Autoscaler", did.length ? did.join(", ") : "has changed nothing yet", "autoscaler"]);
    }
    facts.push([builds.length === 1 ? "Build" : "Builds", builds.join(", ") || "not said", "builds"]);
    const list = by("control");
    list.replaceChildren(...facts.flatMap(([title, text, name]) => [el("dt", { text: title }), el("dd", { "data-fact": name, text })]));
    this.routers.update(frame.routers, (router) => `${router.node} ${router.pid}`, (row, router) => {
      const cells = [router.name, count(router.in_flight), count(router.waiting), rate(router.requests_s), rate(router.tokens_s), joined(cores(router.cpu)), count(router.viewers), router.build];
      cells.forEach((text, i) => say(row.children[i], text));
      number(row.children[1], `router.${router.pid}.in_flight`, router.in_flight, count(router.in_flight));
    });
    say(by("foot"), `As of ${clock(frame.at)}; rates are of the last 5 s, percentiles of the last 15 s. Frame ${count(frame.n)} of this controller.`);
  }
}
