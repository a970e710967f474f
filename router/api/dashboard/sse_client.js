// The events of /cluster/dashboard, by fetch: an EventSource could send no key. Asks again whenever they end.

const SILENCE_MS = 20000; // A comment comes every 5 s where nothing else does.
const FIRST_MS = 400;
const MAX_MS = 5000;
const HIDDEN_MS = 120000; // A tab that nobody has looked at for so long lets go of its place.
const KEY = "twinpool.key";

export class Events {
  // `on` has: event(kind, data), state(name, words), refused(message).
  constructor(path, on) {
    this.path = path;
    this.on = on;
    this.pause = FIRST_MS;
    this.running = false;
    this.stop = null;
    document.addEventListener("visibilitychange", () => this.#seen());
  }

  get key() { return sessionStorage.getItem(KEY) ?? ""; }

  set key(key) { key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY); }

  async run() {
    if (this.running) return;
    this.running = true;
    while (this.running) {
      const why = await this.#once();
      if (!this.running) break;
      this.on.state("away", why);
      await new Promise((done) => setTimeout(done, this.pause));
      this.pause = Math.min(this.pause * 2, MAX_MS);
    }
  }

  end() {
    this.running = false;
    this.stop?.abort();
  }

  #seen() {
    clearTimeout(this.hiding);
    if (!document.hidden) {
      if (this.hid) { this.hid = false; this.run(); }
    } else {
      this.hiding = setTimeout(() => {
        if (this.running) { this.hid = true; this.end(); this.on.state("hidden", "not looking while this tab is hidden"); }
      }, HIDDEN_MS);
    }
  }

  // One stream to its end; returns why it ended.
  async #once() {
    const stop = this.stop = new AbortController();
    let silence = setTimeout(() => stop.abort(), SILENCE_MS);
    try {
      const headers = this.key ? { Authorization: `Bearer ${this.key}` } : {};
      const answer = await fetch(this.path, { headers, signal: stop.signal, cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) {
        this.running = false;
        this.on.refused(await message(answer));
        return "";
      }
      if (!answer.ok) return await message(answer);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return "this router has ended its stream";
        clearTimeout(silence);
        silence = setTimeout(() => stop.abort(), SILENCE_MS);
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) this.#take(block);
      }
    } catch (error) {
      return stop.signal.aborted ? "this router is silent" : "this router can’t be reached";
    } finally {
      clearTimeout(silence);
    }
  }

  #take(block) {
    let kind = "", data = "";
    for (const line of block.split("\n")) {
      if (line.startsWith("event: ")) kind = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (!kind) return;
    if (kind === "frame") this.pause = FIRST_MS;
    this.on.event(kind, JSON.parse(data));
  }
}

async function message(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `this router answers ${answer.status}`;
  }
}
