/**
 * What a chosen layer and head see from a position, and how large the rows are that they remember.
 */

import { color } from "../lib/color.js";
import { decode } from "../lib/decode.js";
import { el, fill } from "../lib/dom.js";
import { format } from "../lib/format.js";
import { visible } from "../lib/text.js";
import { LinePlot } from "./line_plot.js";

const MEAN = "mean";
const TOP = 6;
/** Weights that the server tells at once; beyond them one head at a time is asked for. */
const MOST_WEIGHTS = 4194304;

/**
 * Return one row of an array of rows, or their mean.
 * @param {Float32Array} values
 * @param {[number, number]} shape rows and columns
 * @param {number | "mean"} row
 */
export function rowOf(values, [rows, columns], row) {
  if (row !== MEAN) return values.subarray(row * columns, (row + 1) * columns);
  const mean = new Float32Array(columns);
  for (let at = 0; at < rows * columns; at += 1) mean[at % columns] += values[at] / rows;
  return mean;
}

/**
 * Return the columns of an array of shape positions by heads, one for each head.
 * @param {Float32Array} values
 * @param {[number, number]} shape
 */
export function columnsOf(values, [positions, heads]) {
  return Array.from({ length: heads }, (_, head) => Float32Array.from({ length: positions }, (__, at) => values[at * heads + head]));
}

export class LayerPanel {
  /**
   * @param {HTMLElement} attentionHost
   * @param {HTMLElement} normHost
   * @param {any} app
   * @param {object} calls
   * @param {(weights: Float32Array | null) => void} calls.onWeights weights of the chosen head over positions
   * @param {(position: number) => void} calls.onPick a position was chosen in a plot
   */
  constructor(attentionHost, normHost, app, calls) {
    this.app = app;
    this.calls = calls;
    this.head = MEAN;
    this.attention = null;
    this.asked = "";
    this.stop = new AbortController();
    this.layer = el("select.select", { "aria-label": "Layer", onchange: () => this.chosen() });
    this.heads = el("select.select", { "aria-label": "Head", onchange: () => this.headChosen() });
    this.attentionNote = el("p.hint", { role: "status" });
    this.attentionBox = el("div");
    this.topList = el("ul.top-weights", { "aria-label": "Positions of the largest weights" });
    attentionHost.append(
      el("div.panel-head", {}, el("h2", {}, "Attention"), el("span.spacer"), this.layer, this.heads),
      this.attentionNote,
      this.attentionBox,
      this.topList,
    );
    this.normNote = el("p.hint", { role: "status" });
    this.normBox = el("div");
    normHost.append(el("div.panel-head", {}, el("h2", {}, "Norms by position")), this.normNote, this.normBox);
    this.plots = new Map();
    this.weightPlot = null;
    this.branch = null;
    this.position = 0;
  }

  close() {
    this.stop.abort();
    this.weightPlot?.close();
    for (const plot of this.plots.values()) plot.close();
  }

  /** Offer the model's layers. */
  offer(layers, chosen) {
    const words = (layer) => `Layer ${layer.id}, ${layer.kind}`;
    fill(this.layer, layers.map((layer) => el("option", { value: String(layer.id), selected: String(layer.id) === chosen }, words(layer))));
    this.layers = new Map(layers.map((layer) => [String(layer.id), layer]));
  }

  get layerId() {
    return this.layer.value;
  }

  /** Return whether the chosen layer has attention weights. */
  get attends() {
    const kind = this.layers?.get(this.layerId)?.kind ?? "";
    return !/recurrent|state|mamba|delta|conv/i.test(kind);
  }

  chosen() {
    this.app.set({ layer: this.layerId });
  }

  headChosen() {
    this.head = this.heads.value === MEAN ? MEAN : Number(this.heads.value);
    if (this.attention.heads.includes(this.head) || this.head === MEAN) this.drawAttention();
    else this.fetchAttention(this.branch, this.attention.position);
  }

  /** Return the one head to ask for, null where all of them can be told at once. */
  singleHead(position) {
    const heads = this.layers.get(this.layerId)?.heads ?? 1;
    if ((position + 1) * heads <= MOST_WEIGHTS) return null;
    return this.head === MEAN || this.head >= heads ? 0 : this.head;
  }

  /**
   * Show a branch at a position.
   * @param {string} branch
   * @param {number} position
   * @param {number} tokens of the branch
   */
  async show(branch, position, tokens) {
    this.stop.abort();
    this.stop = new AbortController();
    this.branch = branch;
    this.position = position;
    const at = Math.min(position, tokens - 1);
    await Promise.all([this.fetchAttention(branch, at), this.fetchNorms(branch, tokens)]);
  }

  /** Show that nothing is chosen. */
  clear(words) {
    this.stop.abort();
    this.asked = "";
    this.attention = null;
    this.calls.onWeights(null);
    this.attentionNote.textContent = words;
    this.normNote.textContent = "";
    fill(this.topList);
    this.attentionBox.hidden = true;
    this.normBox.hidden = true;
  }

  async fetchAttention(branch, position) {
    const { signal } = this.stop;
    this.attention = null;
    if (!this.attends) {
      this.attentionNote.textContent = "This layer keeps a recurrent state and has no attention weights. Its norms tell how large the state is.";
      this.drawAttention();
      return;
    }
    this.attentionNote.textContent = "Computing on a fork…";
    this.attentionBox.setAttribute("aria-busy", "true");
    try {
      const query = { branch, position, layer: this.layerId, head: this.singleHead(position) };
      const document = await this.app.get("/v1/state/attention", query, { signal });
      this.attention = { ...document, values: decode.f4(document.weights) };
      this.offerHeads(document);
    } catch (error) {
      if (this.app.isAbort(error)) return;
      this.attentionNote.textContent = visible(error.message, 400);
      this.attentionNote.classList.add("refused");
      this.drawAttention();
      return;
    } finally {
      if (!signal.aborted) this.attentionBox.removeAttribute("aria-busy");
    }
    this.attentionNote.classList.remove("refused");
    this.drawAttention();
  }

  /** Offer the layer's heads, and their mean where all of them were told. */
  offerHeads(document) {
    const all = document.heads.length === document.num_heads;
    const known = this.head === MEAN ? all : this.head < document.num_heads;
    if (!known) this.head = all ? MEAN : document.heads[0];
    const choices = Array.from({ length: document.num_heads }, (_, head) =>
      el("option", { value: String(head), selected: this.head === head }, `Head ${head}`),
    );
    fill(
      this.heads,
      all ? el("option", { value: MEAN, selected: this.head === MEAN }, `mean of ${format.count(document.num_heads, "head")}`) : null,
      choices,
    );
  }

  drawAttention() {
    const { attention } = this;
    this.attentionBox.hidden = attention === null;
    this.heads.hidden = attention === null;
    fill(this.topList);
    if (attention === null) {
      this.calls.onWeights(null);
      return;
    }
    const row = this.head === MEAN ? MEAN : attention.heads.indexOf(this.head);
    const weights = rowOf(attention.values, attention.shape, row);
    const sink = row === MEAN ? attention.sinks.reduce((sum, one) => sum + one, 0) / attention.sinks.length : attention.sinks[row];
    const parts = [
      `What position ${format.number(attention.position)} reads`,
      sink > 0 ? `learned sinks take ${format.share(sink)}` : null,
      `${format.count(attention.num_run, "token")} run for it`,
      attention.exact ? null : "the state was changed or is approximate",
    ];
    this.attentionNote.textContent = parts.filter((part) => part !== null).join(" · ");
    this.weightPlot ??= new LinePlot(this.attentionBox, {
      title: "Attention weight by position",
      lines: [{ label: "weight", filled: true }],
      write: (value) => format.share(value),
      writeX: (value) => format.number(value),
      range: [0, null],
      bars: attention.shape[1] <= 256,
      height: 150,
      onPick: (position) => this.calls.onPick(position),
    });
    const xs = Float64Array.from(weights, (_, at) => at);
    this.weightPlot.show(xs, [Array.from(weights)]);
    this.calls.onWeights(weights);
    const order = [...xs].sort((a, b) => weights[b] - weights[a]).slice(0, TOP).filter((at) => weights[at] > 0);
    fill(
      this.topList,
      order.map((at) =>
        el(
          "li",
          {},
          el("button.button.small", { type: "button", onclick: () => this.calls.onPick(at), "aria-label": `Position ${at}, weight ${format.share(weights[at])}` }, `${format.number(at)}`, el("b", {}, format.share(weights[at]))),
        ),
      ),
    );
  }

  async fetchNorms(branch, tokens) {
    const key = `${branch} ${tokens} ${this.layerId}`;
    if (key === this.asked) return;
    this.asked = key;
    const { signal } = this.stop;
    this.normNote.textContent = "Reading…";
    try {
      const document = await this.app.get("/v1/state/norms", { branch, layer: this.layerId }, { signal });
      this.drawNorms(document);
    } catch (error) {
      this.asked = "";
      if (this.app.isAbort(error)) return;
      this.normNote.textContent = visible(error.message, 400);
      this.normBox.hidden = true;
    }
  }

  drawNorms(document) {
    const positions = decode.i4(document.positions);
    this.normBox.hidden = positions.length === 0;
    const missing = document.num_tokens - positions.length;
    this.normNote.textContent =
      document.kind === "recurrent"
        ? `Recurrent states at ${format.count(positions.length, "position")}`
        : `${format.count(positions.length, "position")} held${missing > 0 ? `, ${format.number(missing)} not` : ""}`;
    const names = new Set(document.norms.map(({ name }) => name));
    for (const [name, plot] of this.plots) {
      if (names.has(name)) continue;
      plot.close();
      this.plots.delete(name);
    }
    for (const { name, shape, values } of document.norms) {
      const columns = columnsOf(decode.f4(values), shape);
      const noun = name.startsWith("state") ? "block" : "head";
      const lines = columns.slice(0, 8).map((_, head) => ({ label: shape[1] === 1 ? "norm" : `${noun} ${head}`, points: positions.length === 1 }));
      if (!this.plots.has(name)) {
        this.plots.set(
          name,
          new LinePlot(this.normBox, {
            title: normTitle(name),
            lines,
            write: (value) => format.number(value, 2),
            writeX: (value) => format.number(value),
            range: [0, null],
            onPick: (position) => this.calls.onPick(position),
          }),
        );
      }
      const { xs, ys } = withGaps(positions, columns.slice(0, 8));
      this.plots.get(name).show(xs, ys, lines);
    }
  }

  /** Draw again in other colours. */
  repaint() {
    this.weightPlot?.repaint();
    for (const plot of this.plots.values()) plot.repaint();
    this.drawAttention();
  }
}

/** Return positions and columns with an empty place in each gap, so that no line crosses it. */
function withGaps(positions, columns) {
  const xs = [];
  const ys = columns.map(() => []);
  positions.forEach((position, at) => {
    if (at > 0 && position > positions[at - 1] + 1 && positions.length > 64) {
      xs.push(positions[at - 1] + 1);
      for (const column of ys) column.push(null);
    }
    xs.push(position);
    ys.forEach((column, index) => column.push(columns[index][at]));
  });
  return { xs, ys };
}

/** Say what a norm is of. */
function normTitle(name) {
  const state = /^state_(\d+)$/.exec(name);
  if (state) return `Recurrent state, part ${state[1]}`;
  return { k: "K rows, by KV head", v: "V rows, by KV head", latent: "Latent rows" }[name] ?? visible(name, 40);
}
