/**
 * The view "Token": a branch's text as tokens; of one of them the probability and the alternatives,
 * what a layer's heads read from it, and norms of what the layer remembers.
 */

import { color } from "../lib/color.js";
import { BranchPicker, names } from "./branch_picker.js";
import { showChances } from "./chance_list.js";
import { mix } from "./inks.js";
import { LayerPanel } from "./layer_panel.js";
import { TokenText } from "./token_text.js";

export const title = "Token";

const WAIT = 150;

/**
 * Mount the view.
 * @param {HTMLElement} root
 * @param {any} app
 */
export async function mount(root, app) {
  await app.css("views/canvas.css");
  const view = new TokenView(root, app);
  await view.begin();
  return view;
}

class TokenView {
  constructor(root, app) {
    this.app = app;
    this.timer = 0;
    this.order = 0;
    this.opened = null;
    this.branches = [];
    const { el, format } = app;
    this.picker = new BranchPicker({
      label: "Branch",
      none: null,
      onPick: (branch) => app.set({ branch, position: null }, { replace: false }),
    });
    this.place = el("input.input.position-input", {
      type: "number",
      min: 0,
      step: 1,
      "aria-label": "Position",
      onchange: () => app.set({ position: this.place.value }),
    });
    this.earlier = el("button.button.small", { type: "button", "aria-label": "Position before", onclick: () => this.step(-1) }, "‹");
    this.later = el("button.button.small", { type: "button", "aria-label": "Position after", onclick: () => this.step(1) }, "›");
    this.of = el("span.hint");
    this.follows = el("button.button.small", { type: "button", onclick: () => this.pick(this.tokens) }, "After the end");
    const toolbar = el("div.toolbar", {}, this.picker.select, el("span.toolbar-part", {}, el("span.toolbar-label", {}, "Position"), this.earlier, this.place, this.later), this.of, this.follows);
    const heatKey = el("span.heat-key", { hidden: true }, "less", el("span.heat-ramp", { "aria-hidden": "true" }), "more read");
    this.heatKey = heatKey;
    this.textHost = el("div.text-host");
    const textCard = el("section.card.text-card", { "aria-label": "Text" }, el("div.panel-head", {}, el("h2", {}, "Text"), el("span.spacer"), heatKey), this.textHost);
    this.chanceHost = el("div.chance-host");
    const chanceCard = el("section.card.chance-card", { "aria-label": "Probability" }, el("h2", {}, "Probability"), this.chanceHost);
    const attentionCard = el("section.card.attention-card", { "aria-label": "Attention" });
    const normCard = el("section.card.norm-card", { "aria-label": "Norms" });
    this.empty = el("div.empty", { hidden: true }, el("h2", {}, "No branch to look at"), el("p", {}, "Sessions, cached prefixes and commits appear here once there are some."));
    this.body = el("div.token-body", {}, textCard, chanceCard, attentionCard, normCard);
    root.append(toolbar, this.empty, this.body);
    this.text = new TokenText(this.textHost, {
      fetch: async (start, stop) => (await app.get("/v1/state/text", { branch: this.branchId, start, stop })).tokens,
      onPick: (position) => this.pick(position),
      onProblem: (error) => app.fail(error),
    });
    this.panel = new LayerPanel(attentionCard, normCard, app, {
      onWeights: (weights) => this.heat(weights),
      onPick: (position) => this.pick(position),
    });
    this.format = format;
  }

  // -- what is shown ----------------------------------------------------------------------------

  get branchId() {
    const wanted = this.app.params.branch;
    if (wanted) return wanted;
    // Of sessions alone everything can be computed, while they are idle.
    const rank = ({ id, kind, num_tokens: tokens, busy }) => (tokens === 0 ? 0 : kind !== "session" ? 1 : id === this.opened ? 4 : busy ? 2 : 3);
    const best = this.branches.reduce((one, other) => (one === null || rank(other) > rank(one) ? other : one), null);
    this.opened = best?.id ?? null;
    return this.opened;
  }

  get branch() {
    return this.picker.branches.get(this.branchId) ?? null;
  }

  get tokens() {
    return this.branch?.num_tokens ?? 0;
  }

  get position() {
    const wanted = this.app.params.position;
    if (wanted === undefined || wanted === "" || !Number.isInteger(Number(wanted))) return Math.max(0, this.tokens - 1);
    return Math.min(this.tokens, Math.max(0, Number(wanted)));
  }

  async begin() {
    if (this.app.overview === null) await new Promise((resolve) => this.app.on("overview", resolve));
    await this.fetchBranches().catch(this.app.fail);
    this.offerLayers();
    await this.showBranch();
  }

  offerLayers() {
    const layers = this.app.overview?.layers ?? [];
    const chosen = this.app.params.layer ?? String(layers[0]?.id ?? 0);
    this.panel.offer(layers, chosen);
  }

  async fetchBranches() {
    const history = await this.app.get("/v1/state/history");
    this.branches = history.branches;
    this.picker.show(this.branches, this.branchId);
    const none = this.branches.length === 0;
    this.empty.hidden = !none;
    this.body.hidden = none;
  }

  // -- changes ----------------------------------------------------------------------------------

  pick(position) {
    this.app.set({ branch: this.branchId, position });
  }

  step(by) {
    this.pick(Math.min(this.tokens, Math.max(0, this.position + by)));
  }

  update(change) {
    if (change.kind === "params") return this.showBranch();
    if (change.kind === "theme") {
      this.panel.repaint();
      return undefined;
    }
    if (change.kind === "events" && names(change.data, "history")) return this.refresh();
    if (change.kind === "reconnected" || change.kind === "restart") {
      this.shownBranch = "";
      return this.begin();
    }
    return undefined;
  }

  /** Fetch the branches again, and the text if the branch has grown or was cut. */
  async refresh() {
    if (this.refreshing) return;
    this.refreshing = true;
    await new Promise((resolve) => setTimeout(resolve, 1000));
    try {
      if (!this.app.signal.aborted) await this.fetchBranches();
    } finally {
      this.refreshing = false;
    }
    if (!this.app.signal.aborted) await this.showBranch();
  }

  unmount() {
    clearTimeout(this.timer);
    this.panel.close();
  }

  /** Show what the address names. */
  async showBranch() {
    const { format } = this;
    this.picker.show(this.branches, this.branchId);
    if (this.branchId === null) return;
    const position = this.position;
    this.place.value = String(position);
    this.place.max = String(this.tokens);
    this.earlier.disabled = position <= 0;
    this.later.disabled = position >= this.tokens;
    this.of.textContent = `of ${format.count(this.tokens, "token")}`;
    const key = `${this.branchId} ${this.tokens}`;
    const again = key !== this.shownBranch;
    this.shownBranch = key;
    const layer = this.app.params.layer;
    if (layer !== undefined && this.panel.layerId !== layer) this.offerLayers();
    const what = `${key} ${position} ${this.panel.layerId}`;
    await this.text.show(this.tokens, position >= this.tokens ? -1 : position, again);
    if (what === this.shownToken) return;
    this.shownToken = what;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.compute(position), WAIT);
  }

  /** Ask for what must be computed. */
  async compute(position) {
    const branch = this.branchId;
    this.order += 1;
    const order = this.order;
    if (this.branch === null) {
      this.panel.clear("The branch is gone.");
      this.app.fill(this.chanceHost, this.app.el("p.hint", {}, "The branch is gone."));
      return;
    }
    await Promise.all([this.fetchChances(branch, position, order), this.panel.show(branch, position, this.tokens)]);
  }

  async fetchChances(branch, position, order) {
    const { app } = this;
    const host = this.chanceHost;
    host.setAttribute("aria-busy", "true");
    try {
      const document = await app.get("/v1/state/token", { branch, position });
      if (order !== this.order) return;
      showChances(host, document);
      const { token } = document;
      app.announce(token === null ? `Position ${position}` : `Position ${position}: probability ${app.format.share(token.probability)}, rank ${token.rank}`);
    } catch (error) {
      if (order !== this.order || app.isAbort(error)) return;
      app.fill(host, app.el("p.refusal", { role: "alert" }, app.visible(error.message, 500)));
    } finally {
      if (order === this.order) host.removeAttribute("aria-busy");
    }
  }

  /** Colour the text by weights. */
  heat(weights) {
    this.heatKey.hidden = weights === null;
    const [ground, hot] = [color.rgb("--surface-2"), color.rgb("--heat")];
    this.text.showHeat(weights, (share) => mix(ground, hot, share));
  }
}
