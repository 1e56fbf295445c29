/**
 * The view "Time": requests as lanes, steps with their batch, and live plots.
 */

import { names } from "./branch_picker.js";
import { css, readTheme } from "./inks.js";
import { LaneChart } from "./lane_chart.js";
import { showLane } from "./lane_details.js";
import { TimeModel, laneName } from "./time_model.js";
import { TimePlots } from "./time_plots.js";
import { TimeWindow } from "./time_window.js";

export const title = "Time";

const REFRESH = 500;
/** Without news the present moves on, as long as requests run. */
const IDLE = 2000;
const PHASES = {
  waiting: "waiting",
  loading: "loading from a tier",
  prefill: "prefill",
  decode: "decode",
  preempted: "preempted",
};
const SPANS = [
  [10, "10 s"],
  [60, "1 min"],
  [600, "10 min"],
];

/** What was seen so far outlives a visit of another view. */
const model = new TimeModel();

/**
 * Mount the view.
 * @param {HTMLElement} root
 * @param {any} app
 */
export async function mount(root, app) {
  await app.css("views/canvas.css");
  const view = new TimeView(root, app);
  await view.fetch();
  return view;
}

class TimeView {
  constructor(root, app) {
    this.root = root;
    this.app = app;
    this.theme = readTheme();
    this.timer = 0;
    this.refused = false;
    this.busy = false;
    this.window = new TimeWindow(() => this.moved());
    const { el } = app;
    const button = (label, sign, onclick) =>
      el("button.button.small", { type: "button", "aria-label": label, title: label, onclick }, sign);
    this.follow = el("button.button.small", { type: "button", "aria-pressed": "true", onclick: () => this.window.follow(!this.window.following) }, "Follow");
    this.only = el("select.select", { "aria-label": "Requests shown", onchange: () => this.draw() }, [
      el("option", { value: "all" }, "all requests"),
      el("option", { value: "live" }, "under way"),
      el("option", { value: "request" }, "requests"),
      el("option", { value: "turn" }, "turns of sessions"),
      el("option", { value: "run" }, "runs without an answer"),
    ]);
    this.pack = el("button.button.small", { type: "button", onclick: () => app.set({ lanes: this.packed ? "each" : null }) }, "Packed");
    this.counts = el("span.hint.lane-counts");
    const spans = SPANS.map(([seconds, words]) => button(`Show ${words}`, words, () => this.span(seconds)));
    const toolbar = el(
      "div.toolbar",
      {},
      this.follow,
      el("div.segments", { role: "group", "aria-label": "Zoom" }, [
        button("Zoom out", "−", () => this.window.zoom(1.6, this.middle)),
        button("Zoom in", "+", () => this.window.zoom(1 / 1.6, this.middle)),
        spans,
        button("Show all", "all", () => this.window.fit(model.first, model.now)),
      ]),
      this.pack,
      this.only,
      this.counts,
    );
    this.legend = el("ul.legend-list.phase-legend", { "aria-label": "Legend" });
    for (const [phase, words] of Object.entries(PHASES)) {
      this.legend.append(el("li", {}, el("span.phase-key", { class: `phase-${phase}`, "aria-hidden": "true" }), words));
    }
    for (const [mark, words] of [["●", "stopped"], ["▮", "length reached"], ["✕", "given up or failed"]]) {
      this.legend.append(el("li", {}, el("span.end-key", { "aria-hidden": "true" }, mark), words));
    }
    const help = el("p.sr-only", { id: "lane-help" }, "Left and right move in time, plus and minus zoom, 0 shows all, F follows the present, P pauses. Up and down choose a request, Enter zooms to it. Its details are told beside.");
    this.host = el("div.lane-host");
    this.laneCard = el("section.card.lane-card", { "aria-label": "Requests over time" }, help, this.host, this.legend);
    this.detailCard = el("section.card.lane-detail", { "aria-label": "Request" });
    this.plotCard = el("section.plot-card", { "aria-label": "Live plots" });
    root.append(toolbar, el("div.time-body", {}, this.laneCard, this.detailCard, this.plotCard));
    this.chart = new LaneChart(this.host, this.window, {
      onPick: (lane, how) => this.pick(lane, how),
      describe: (lane, time) => this.describe(lane, time),
      label: (time, relative, span) => timeLabel(time, relative, span),
    });
    this.chart.canvas.setAttribute("aria-describedby", "lane-help");
    this.plots = new TimePlots(this.plotCard);
    this.window.span = Number(app.params.span) > 0 ? Number(app.params.span) : 30;
    this.seconds = 60;
    this.tick = setInterval(() => this.idle(), IDLE);
  }

  /** Whether requests that follow each other share a row. */
  get packed() {
    return this.app.params.lanes !== "each";
  }

  get middle() {
    return this.window.following ? model.now : (this.window.start + this.window.stop) / 2;
  }

  // -- fetching ---------------------------------------------------------------------------------

  async fetch() {
    if (this.busy) return;
    this.busy = true;
    try {
      const document = await this.app.get("/v1/state/timeline", { since: model.step });
      if (document.epoch !== model.epoch && model.step > 0) {
        model.clear();
        this.busy = false;
        await this.fetch();
        return;
      }
      model.add(document);
      this.refreshed = performance.now();
    } catch (error) {
      if (error.status >= 400 && error.status < 500 && error.status !== 401) this.refuse(error);
      else this.app.fail(error);
    } finally {
      this.busy = false;
    }
    if (this.refused) return;
    this.noteUse();
    this.draw();
  }

  /** Say why there is no timeline, as of a state file, and ask no more. */
  refuse(error) {
    const { el, fill, visible } = this.app;
    this.refused = true;
    fill(this.root, el("div.empty", {}, el("h2", {}, "There is no timeline"), el("p", {}, visible(error.message, 400))));
  }

  fetchSoon() {
    if (this.timer || this.refused) return;
    const wait = Math.max(0, REFRESH - (performance.now() - (this.refreshed ?? 0)));
    this.timer = setTimeout(() => {
      this.timer = 0;
      this.fetch();
    }, wait);
  }

  /** Let the present move on while something runs and no event has come. */
  idle() {
    if (document.hidden || this.app.connection === "lost") return;
    if (performance.now() - (this.refreshed ?? 0) >= IDLE - 100) this.fetchSoon();
  }

  noteUse() {
    const { overview } = this.app;
    if (overview?.use) model.addUse(overview.reading, overview.time, overview.use);
  }

  update(change) {
    if (change.kind === "params" && !this.refused) {
      this.draw();
    } else if (change.kind === "events") {
      const { reading, time, use } = change.data ?? {};
      if (use) model.addUse(reading, time, use);
      if (names(change.data, "timeline")) this.fetchSoon();
    } else if (this.refused) {
      return undefined;
    } else if (change.kind === "overview") {
      this.noteUse();
    } else if (change.kind === "theme") {
      this.theme = readTheme();
      this.draw();
      this.plots.repaint(model, this.seconds);
    } else if (change.kind === "restart") {
      model.clear();
      return this.fetch();
    } else if (change.kind === "reconnected") {
      return this.fetch();
    }
    return undefined;
  }

  unmount() {
    clearInterval(this.tick);
    clearTimeout(this.timer);
    this.chart.close();
    this.plots.close();
  }

  // -- drawing ----------------------------------------------------------------------------------

  span(seconds) {
    this.window.span = seconds;
    this.seconds = Math.max(30, seconds);
    this.window.follow(true);
    this.plots.show(model, this.seconds);
  }

  moved() {
    this.follow.setAttribute("aria-pressed", String(this.window.following));
    this.follow.textContent = this.window.following ? "Following" : "Follow";
    this.chart.request();
  }

  draw() {
    this.window.extent(model.first, model.now);
    const wanted = this.only.value;
    const lanes = model.lanes((request) =>
      wanted === "all" ? true : wanted === "live" ? request.finished === null : request.kind === wanted,
    );
    const rows = this.packed ? model.packed(lanes) : lanes.map((lane) => [lane]);
    this.pack.setAttribute("aria-pressed", String(this.packed));
    this.chart.show(rows, this.packed, model.steps, this.theme);
    const { format } = this.app;
    const last = model.last;
    this.counts.textContent = last
      ? `${format.count(lanes.length, "lane")} · ${format.number(last.running)} running, ${format.number(last.waiting)} waiting · ${format.count(model.step, "step")}`
      : "";
    this.chart.canvas.setAttribute("aria-label", `${format.count(lanes.length, "request")} over time`);
    this.laneCard.style.setProperty("--lanes", String(Math.min(18, Math.max(5, rows.length))));
    this.plots.show(model, this.seconds);
    if (this.chart.chosen >= 0) this.showChosen();
    else showLane(this.detailCard, null, 0, 0, () => {});
    this.moved();
    this.paintKeys();
  }

  /** Give the legend's keys the canvas's colours. */
  paintKeys() {
    if (this.painted === this.theme) return;
    this.painted = this.theme;
    for (const [phase, ink] of Object.entries(this.theme.phases)) this.root.style.setProperty(`--phase-${phase}`, css(ink));
  }

  showChosen() {
    const request = model.requests.get(this.chart.chosen) ?? null;
    const chunks = model.chunks.get(this.chart.chosen)?.length ?? 0;
    showLane(this.detailCard, request, model.now, chunks, () => this.chart.fitChosen());
  }

  pick(lane, how) {
    this.showChosen();
    if (lane === null || how !== "keys") return;
    const request = model.requests.get(lane.number);
    const { format } = this.app;
    this.app.announce(
      `${laneName(request)}, ${request.finished === null ? request.phase : "finished"} after ${format.seconds(lane.stop - lane.start)}`,
    );
  }

  /** Say what is under the pointer. */
  describe(lane, time) {
    const { format } = this.app;
    if (lane !== null) {
      const phase = lane.phases.find(({ start, stop }) => start <= time && time < stop);
      if (phase) return `${lane.label}: ${PHASES[phase.phase] ?? phase.phase} for ${format.seconds(phase.stop - phase.start)}`;
      return `${lane.label}: ${format.seconds(lane.stop - lane.start)} in all`;
    }
    const step = model.stepAt(time);
    if (step === null) return "";
    return `Step ${format.number(step.number)}: ${format.count(step.decodes, "decode")}, ${format.number(step.prefills)} prompt tokens, ${format.seconds(step.stop - step.start)}`;
  }
}

/** Write a time of the axis: seconds before the present, or the time of day. */
function timeLabel(time, relative, span) {
  const digits = span < 1 ? 3 : span < 8 ? 1 : 0;
  if (relative) return Math.abs(time) < 1e-9 ? "now" : `${time > 0 ? "+" : "−"}${Math.abs(time).toFixed(digits)} s`;
  const date = new Date((model.epoch + time) * 1000);
  const clock = date.toLocaleTimeString("en-GB");
  return digits === 0 ? clock : `${clock}.${String(date.getMilliseconds()).padStart(3, "0").slice(0, digits)}`;
}
