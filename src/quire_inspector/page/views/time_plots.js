/**
 * The live plots of the view "Time": rates, latencies, use of pages, queues, acceptance of drafts.
 */

import { color } from "../lib/color.js";
import { el } from "../lib/dom.js";
import { format } from "../lib/format.js";
import { LinePlot } from "./line_plot.js";

const SLICES = 120;
const LATENCIES = [
  ["first_token", "first token"],
  ["inter_token", "between tokens"],
];
const OWNERS = ["pinned", "held", "evictable"];

const ago = (value) => (value === 0 ? "now" : `${Number(value.toFixed(1))} s`);

export class TimePlots {
  /** @param {HTMLElement} host */
  constructor(host) {
    const grid = el("div.plots");
    host.append(grid);
    const make = (options) => new LinePlot(grid, { writeX: ago, range: [0, null], ...options });
    this.rates = make({
      title: "Tokens a second",
      lines: [
        { label: "generated", filled: true },
        { label: "prompt" },
      ],
      write: (value) => format.short(value),
    });
    this.latencies = make({
      title: "Latency, of the last requests",
      lines: LATENCIES.flatMap(([, words]) => [{ label: `${words} p50` }, { label: `p95` }]),
      write: (value) => (value === 0 ? "0" : format.seconds(value)),
    });
    this.pages = make({
      title: "Pages",
      lines: [],
      write: (value) => format.share(value),
    });
    this.queues = make({
      title: "Requests",
      lines: [{ label: "running", filled: true }, { label: "waiting" }],
      write: (value) => format.number(value),
    });
    this.drafts = make({
      title: "Drafts accepted",
      lines: [{ label: "share of drafted tokens" }],
      write: (value) => format.share(value),
      range: [0, 1],
    });
    this.all = [this.rates, this.latencies, this.pages, this.queues, this.drafts];
  }

  close() {
    for (const plot of this.all) plot.close();
  }

  /** Draw again in other colours. */
  repaint(model, seconds) {
    for (const plot of this.all) plot.repaint();
    this.show(model, seconds);
  }

  /**
   * Show the last seconds.
   * @param {import("./time_model.js").TimeModel} model
   * @param {number} seconds
   */
  show(model, seconds) {
    const slices = model.slices(seconds / SLICES, SLICES);
    const { x, samples, uses } = slices;
    this.rates.show(x, [slices.generated, slices.prompt]);
    this.queues.show(x, [slices.running, slices.waiting]);
    this.latencies.show(
      x,
      LATENCIES.flatMap(([name]) => ["p50", "p95"].map((part) => samples.map((one) => one?.latencies[name]?.[part] ?? null))),
    );
    const shares = (owner) => uses.map((one) => (one === null ? null : one.use[owner] / Math.max(1, one.use.total)));
    this.pages.show(x, [slices.used, ...OWNERS.map(shares)], [
      { label: "not free", colour: color.get("--muted"), filled: true },
      ...OWNERS.map((owner) => ({ label: owner, colour: color.get(`--owner-${owner}`) })),
    ]);
    const drafted = model.last?.drafts.drafted ?? 0;
    this.drafts.element.hidden = drafted === 0;
    if (drafted > 0) this.drafts.show(x, [samples.map((one) => one?.rate ?? null)]);
  }
}
