// What happened to the cluster, newest first, with the reasons; entries that were missed are counted.

import { by, clock, el, plural } from "./words.js";

const MAX = 200;
const KINDS = { worker: "worker", scale: "autoscaler", operator: "operator", control: "controller", router: "router", damage: "damage" };

export class Log {
  constructor() {
    this.list = by("log");
    this.boot = "";
    this.last = 0;
  }

  take(boot, events, fresh) {
    if (boot !== this.boot) { this.boot = boot; this.last = 0; }
    const news = events.filter((event) => event.n > this.last);
    if (!news.length) return;
    const missed = news[0].n - this.last - 1;
    if (this.last && missed > 0) this.#add({ at: news[0].at, kind: "control", text: `${plural(missed, "entry", "entries")} came too fast to be shown` }, fresh);
    for (const event of news) this.#add(event, fresh);
    this.last = news.at(-1).n;
    while (this.list.children.length > MAX) this.list.lastChild.remove();
  }

  #add({ at, kind, text }, fresh) {
    const item = el("li", { "data-kind": kind, class: fresh ? "fresh" : null },
      el("time", { datetime: new Date(at * 1000).toISOString(), text: clock(at) }), el("span", { class: "kind", text: KINDS[kind] ?? kind }), el("p", { text }));
    this.list.prepend(item);
  }
}
