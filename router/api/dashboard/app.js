// The page: takes frames as they come, and has each part draw its own of them.

import { Charts } from "./charts.js";
import { Events } from "./sse_client.js";
import { Health } from "./health.js";
import { Log } from "./log.js";
import { Past } from "./past.js";
import { Traffic } from "./traffic.js";
import { Verdict } from "./verdict.js";
import { Waterfall } from "./waterfall.js";
import { Workers } from "./workers.js";
import { by, mark, say, scrolls } from "./words.js";

const VERSION = 1;

class Page {
  constructor() {
    this.past = new Past();
    this.log = new Log();
    this.verdict = new Verdict();
    this.parts = null;
    this.frame = null;
    this.due = false;
    this.events = new Events("/cluster/dashboard" + location.search, {  // ?model=NAME, where several are served.
      event: (kind, data) => this.#take(kind, data),
      state: (name, words) => this.#state(name, words),
      refused: (message) => this.#refused(message),
    });
    by("key").addEventListener("submit", (event) => {
      event.preventDefault();
      this.events.key = by("key-field").value;
      by("key-field").value = "";
      by("key").hidden = true;
      this.run();
    });
  }

  run() {
    this.#state("starting", "connecting");
    this.events.run();
  }

  #take(kind, data) {
    if (data.v !== undefined && data.v !== VERSION) return this.#state("away", "this router has another build: load the page again");
    if (kind === "past") {
      this.past.take(data);
      this.log.take(data.boot, data.events, false);
    } else if (kind === "frame") {
      this.frame = data;
      this.past.add(data);
      this.log.take(data.boot, data.events, true);
      this.#state("live", "live");
      this.#soon();
    } else if (kind === "away") {
      this.#state("away", `the controller is away: ${data.reason}`);
    }
  }

  // Frames that come while the tab doesn't draw are drawn once, the latest of them.
  #soon() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => { this.due = false; this.#draw(); });
  }

  #draw() {
    by("main").hidden = by("key").hidden === false;
    this.parts ??= this.#made();
    for (const part of this.parts) part.draw(this.frame);
    mark(document.body, "data-frame", this.frame.n);
  }

  #made() {
    const parts = [this.verdict, new Charts(this.past), new Traffic(), new Workers(), new Waterfall(), new Health()];
    for (const region of document.querySelectorAll("main .scroll[id]")) scrolls(region);
    return parts;
  }

  #state(name, words) {
    const link = by("link");
    mark(link, "data-state", name);
    say(link.lastElementChild, name === "away" ? "not live" : words);
    if (this.frame) { say(by("models"), this.frame.models.join(", ")); say(by("cluster"), this.frame.cluster); }
    if (name === "away" && !by("main").hidden) this.verdict.away(words);
    else if (name === "away") say(by("verdict"), words);
    if (name === "away") by("main").hidden = false;
  }

  #refused(message) {
    by("main").hidden = true;
    by("key").hidden = false;
    say(by("key-why"), message);
    this.events.key = "";
    this.#state("refused", "not let in");
    by("key-field").focus();
  }
}

new Page().run();
