// The connection: the overview, the stream of changes, and coming back after the server went away.

import { ApiProblem, isAbort } from "./api.js";

const FIRST_WAIT = 0.5;
const LONGEST_WAIT = 15;
/** Seconds of silence after which the page asks whether the server is still there. */
const SILENCE = 20;
/** Seconds between two readings of the overview, where a server sends no events. */
const POLL = 5;
/** Least seconds between two readings of the overview because of events. */
const REFRESH = 1;

/**
 * Keeps `overview` fresh. States: "connecting", "live", "polling" (a server without events), "lost"
 * (`wait`: seconds until the next try), "key" (a key is needed, or the one given is wrong).
 *
 * Calls `emit(name, value)` with: "connection" (the state), "overview", "change" (an event's data),
 * "restart" (another process answers), "reconnected" (there again; everything may have changed).
 */
export class Live {
  constructor(client, emit) {
    this.client = client;
    this.emit = emit;
    this.state = "connecting";
    this.wait = 0;
    this.overview = null;
    this.problem = null;
    this.refreshed = 0;
    this.tries = 0;
    this.stop = new AbortController();
    this.wake = null;
    /** Whether everything is to be fetched again, as under another key. */
    this.anew = false;
  }

  /** Whether what is shown is a state file or a store: no model runs. */
  get isStill() {
    return this.overview !== null && this.overview.source !== "server";
  }

  /** Connect, again and again, until the page is left. */
  async run() {
    for (;;) {
      this.stop = new AbortController();
      try {
        await this.refresh();
        await this.follow();
        throw new ApiProblem(0, "the server ended the connection");
      } catch (error) {
        if (isAbort(error)) continue;
        await this.recover(error instanceof ApiProblem ? error : new ApiProblem(0, String(error?.message ?? error)));
      }
    }
  }

  /** Start anew at once: after another key, or because the reader asked for it. */
  retry() {
    this.tries = 0;
    this.anew = true;
    if (this.wake) this.wake();
    else this.stop.abort();
  }

  /** Hear of a problem that a call of a view met. */
  heard(problem) {
    if (this.state !== "live" && this.state !== "polling") return;
    if (problem.status === 401 || problem.code === "unreachable") this.stop.abort();
  }

  set(state, wait = 0) {
    this.wait = wait;
    if (state === this.state && state !== "lost") return;
    this.state = state;
    this.emit("connection", state);
  }

  /** Read the overview, and tell if another process answers or the server is there again. */
  async refresh() {
    const found = await this.client.json("GET", "v1/state", { signal: this.stop.signal, quiet: true });
    if (found.format !== 1) {
      throw new ApiProblem(500, `the server's documents have format ${found.format}, this page reads format 1; load the page again`);
    }
    const before = this.overview;
    this.overview = found;
    this.refreshed = performance.now();
    this.problem = null;
    const restarted = before !== null && before.started !== found.started;
    this.emit("overview", found);
    if (restarted) this.emit("restart", found);
    return found;
  }

  /** Follow the events until they end. */
  async follow() {
    const { signal } = this.stop;
    let heard = performance.now();
    const watch = setInterval(() => {
      if (performance.now() - heard < SILENCE * 1000) return;
      heard = performance.now();
      this.refresh().catch((error) => isAbort(error) || this.stop.abort());
    }, 1000);
    try {
      const events = this.client.events("GET", "v1/state/events", {
        signal,
        quiet: true,
        onOpen: () => this.arrived("live"),
        onBytes: () => (heard = performance.now()),
      });
      for await (const { data } of events) {
        this.emit("change", data);
        this.refreshSoon();
      }
    } catch (error) {
      if (!(error instanceof ApiProblem) || error.status !== 404) throw error;
      await this.poll();
    } finally {
      clearInterval(watch);
    }
  }

  /** Say that the server is there. */
  arrived(state) {
    const again = this.anew || this.state === "lost" || this.state === "key";
    this.anew = false;
    this.tries = 0;
    this.set(state);
    if (again) this.emit("reconnected", this.overview);
  }

  async poll() {
    this.arrived("polling");
    for (;;) {
      await this.pause(POLL);
      this.stop.signal.throwIfAborted();
      await this.refresh();
    }
  }

  /** Read the overview again, not more often than once in `REFRESH` seconds. */
  refreshSoon() {
    if (this.soon) return;
    const wait = Math.max(0, REFRESH * 1000 - (performance.now() - this.refreshed));
    this.soon = setTimeout(() => {
      this.soon = null;
      this.refresh().catch((error) => isAbort(error) || this.stop.abort());
    }, wait);
  }

  /** Wait before the next try: for a key, or longer each time. */
  async recover(problem) {
    this.problem = problem;
    if (problem.status === 401 || problem.status === 403) {
      this.set("key");
      await this.pause(Infinity);
      return;
    }
    const wait = Math.min(LONGEST_WAIT, FIRST_WAIT * 2 ** this.tries) * (0.8 + 0.4 * Math.random());
    this.tries += 1;
    this.set("lost", wait);
    await this.pause(wait);
  }

  /** Wait for some seconds, or until `retry`. */
  pause(seconds) {
    return new Promise((resolve) => {
      const timer = seconds === Infinity ? 0 : setTimeout(done, seconds * 1000);
      this.wake = done;
      const { signal } = this.stop;
      const wake = () => done();
      function done() {
        clearTimeout(timer);
        signal.removeEventListener("abort", wake);
        resolve(undefined);
      }
      signal.addEventListener("abort", wake);
    }).finally(() => (this.wake = null));
  }
}
