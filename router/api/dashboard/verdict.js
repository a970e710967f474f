// The one sentence that tells how the cluster does, and what asks for attention.

import { by, count, el, joined, Keyed, listed, mark, plural, rate, say, seconds } from "./words.js";

export class Verdict {
  constructor() {
    this.notices = new Keyed(by("notices"), () => el("li"));
  }

  draw(frame) {
    const found = problems(frame);
    const bad = found.filter((one) => one.level === "bad");
    const title = bad.length ? (bad.some((one) => one.stops) ? "It does not serve." : "It serves, with trouble.")
      : found.length ? "All is well, and something changes." : idle(frame) ? "All is well, and quiet." : "All is well.";
    say(by("verdict"), title);
    drawMore(by("verdict-more"), frame);
    this.notices.update(found, (one) => one.text.replace(/\d+/g, ""), (item, one) => {
      mark(item, "data-level", one.level);
      say(item, one.text);
    });
    document.title = `${bad.length ? "! " : ""}${frame.cluster || frame.models[0] || "Twinpool"} · Twinpool`;
  }

  away(why) {
    say(by("verdict"), "Nothing is known of now.");
    say(by("verdict-more"), `${why}. What is below is from before; it goes on by itself.`);
    this.notices.update([], () => "", () => {});
  }
}

const idle = (frame) => frame.now.in_flight === 0 && frame.now.requests_s === 0;

function drawMore(node, frame) {
  const pools = frame.pools.map((pool) => plural(serving(pool), `${pool.role} worker`));
  const { now } = frame;
  const workers = frame.pools.reduce((sum, pool) => sum + serving(pool), 0);
  const parts = [`${listed(pools)} ${workers === 1 ? "serves" : "serve"} behind ${plural(frame.routers.length, "router")}`,
    `${plural(now.in_flight, "request")} in flight, ${rate(now.tokens_s)} output tokens a second`];
  const medians = [["to first token", now.ttft], ["per output token", now.tpot]].filter(([, one]) => one?.count);
  if (medians.length) parts.push(`median time ${medians.map(([what, one]) => `${what} ${joined(seconds(one.p50))}`).join(", ")}`);
  say(node, `${parts.join("; ")}.`);
}

const serving = (pool) => (pool.states.ready ?? 0) + (pool.states.draining ?? 0);

function problems(frame) {
  const found = [];
  const add = (level, text, stops = false) => found.push({ level, text, stops });
  for (const pool of frame.pools) if (!serving(pool)) add("bad", `no ${pool.role} worker serves`, true);
  if (!frame.pools.length) add("bad", "there are no workers", true);
  if (frame.control?.shutting_down) add("notice", "the cluster is shutting down");
  if (frame.control && !frame.control.supervised && !frame.control.shutting_down) add("bad", "the supervisor is away: no worker is started");
  if (!frame.routers.length) add("bad", "no router has reported", true);
  const named = (state) => frame.workers.filter((worker) => worker.state === state).map((worker) => worker.name);
  const few = (names) => (names.length > 4 ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more` : listed(names));
  const dead = named("dead"), starting = named("starting"), draining = named("draining");
  if (dead.length) add("bad", `${few(dead)} ${dead.length === 1 ? "is" : "are"} dead`);
  if (draining.length) add("notice", `${few(draining)} ${draining.length === 1 ? "drains" : "drain"}`);
  if (starting.length) add("notice", `${few(starting)} ${starting.length === 1 ? "starts" : "start"}`);
  for (const worker of frame.workers) if (worker.stalled_s > 2) add("bad", `${worker.name} is stalled for ${worker.stalled_s} s`);
  const broken = [...new Set(frame.routers.flatMap((router) => router.open_breakers))];
  if (broken.length) add("bad", `circuit breakers are open for ${few(broken)}`);
  const builds = new Set(frame.workers.filter((worker) => worker.build && worker.state !== "left").map((worker) => worker.build));
  if (builds.size > 1) add("notice", `workers run ${builds.size} builds`);
  if (frame.autoscaler?.held_s > 0) add("notice", `the autoscaler leaves the pools alone for ${Math.round(frame.autoscaler.held_s)} s`);
  return found;
}
