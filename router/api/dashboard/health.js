// What was counted: damage, which is to be zero; requests; and what was mended, refused or lost. And the control plane.

import { by, clock, count, el, Keyed, mark, number, plural, rate, say, span, table } from "./words.js";

const SITES = {
  handover: "handed over", load: "loaded from host", storage: "read from storage", step: "read in a step",
  restore: "brought back", arena: "taken over", logits: "logits", audit: "audited answers",
};
const TOTALS = {
  requests_submitted: "taken", requests_ended: "answered", requests_cancelled: "taken back", generated_tokens: "tokens delivered",
  prompt_tokens_cached: "prompt tokens from cache", migrated: "moved while running",
};
const FAULTS = {
  requests_failed: ["failed", "bad"], replays: ["started over", "notice"], attempts_recomputed: ["recomputed", "notice"], handovers_damaged: ["damaged hand-overs", "bad"],
  fallbacks: ["prompts computed by decode", "notice"], refused_full: ["refused: full", "notice"], refused_early: ["refused: too late", "notice"],
  requests_shed: ["dropped: too late", "notice"], client_disconnects: ["clients left", ""], slow_clients: ["clients too slow", "notice"], streams_flagged: ["streams flagged", "notice"],
};

export class Health {
  constructor() {
    const make = () => el("div", {}, el("dt"), el("dd"));
    this.damage = new Keyed(by("damage"), make);
    this.totals = new Keyed(by("totals"), make);
    this.faults = new Keyed(by("faults"), make);
    this.facts = new Keyed(by("control"), () => el("div", { style: null }, el("dt"), el("dd")));
    const [routers, body] = table(["Router", "Under way", "Waiting", "Requests / s", "Tokens / s", "Viewers", "Build"], [1, 2, 3, 4, 5]);
    by("routers").append(routers);
    this.routers = new Keyed(body, () => el("tr", {}, el("th", { scope: "row" }), ...Array.from({ length: 5 }, () => el("td", { class: "n" })), el("td")));
  }

  draw(frame) {
    const sites = Object.entries(frame.damage);
    const found = sites.reduce((sum, [, n]) => sum + n, 0);
    const line = by("damage-line");
    mark(line, "data-level", found ? "bad" : "good");
    say(line, found ? `Damaged state was found ${plural(found, "time")}, and computed again.` : `No byte was found damaged by any of ${sites.length} checks.`);
    this.damage.update(sites, ([site]) => site, (box, [site, n]) => this.#count(box, `damage.${site}`, SITES[site] ?? site, n, "bad"));
    this.totals.update(Object.entries(TOTALS), ([name]) => name, (box, [name, title]) => this.#count(box, `totals.${name}`, title, frame.totals[name], ""));
    const deaths = [["deaths", ["workers died", "bad"], frame.deaths], ["audits", ["answers audited", ""], frame.totals.audits_equal + frame.totals.audits_damaged]];
    const faults = [...Object.entries(FAULTS).map(([name, told]) => [name, told, frame.totals[name]]), ...deaths];
    this.faults.update(faults, ([name]) => name, (box, [name, [title, level], n]) => {
      this.#count(box, name === "deaths" || name === "audits" ? name : `totals.${name}`, title, n, level);
    });
    this.#control(frame);
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
      ["Leads", control.leader || "a controller that has not said where", "control.leader"],
      ["Term", `${count(control.term)}: it leads for ${span(frame.up_s)}`, "control.term"],
      ["Stand by", control.standbys.length ? control.standbys.join(", ") : "none", "control.standbys"],
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
      const cells = [router.name, count(router.in_flight), count(router.waiting), rate(router.requests_s), rate(router.tokens_s), count(router.viewers), router.build];
      cells.forEach((text, i) => say(row.children[i], text));
      number(row.children[1], `router.${router.pid}.in_flight`, router.in_flight, count(router.in_flight));
    });
    say(by("foot"), `As of ${clock(frame.at)}; rates are of the last 5 s, percentiles of the last 15 s. Frame ${count(frame.n)} of this controller.`);
  }
}
