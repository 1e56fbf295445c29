/**
 * The view "Pages": every pool as a grid, one page's tokens and holders, one branch's positions, and
 * the tiers below.
 */

import { decode } from "../lib/decode.js";
import { BranchAxis, layerNames } from "./branch_axis.js";
import { BranchPicker, branchName, names } from "./branch_picker.js";
import { readTheme } from "./inks.js";
import { PageDetails, ordinal } from "./page_details.js";
import { PageGrid } from "./page_grid.js";
import { showLegend } from "./page_legend.js";
import { OWNERS, nextEvictions, pictureOf, poolOf, worthDrawing } from "./page_model.js";
import { PageTable } from "./page_table.js";
import { showTiers } from "./tier_list.js";

export const title = "Pages";

const REFRESH = 1000;
const COLOURS = { owner: "Owner", branch: "Branch", eviction: "Eviction" };
const EVICTIONS = [0, 8, 32, 128];
const KINDS = { tokens: "tokens", encoder: "encoder rows", states: "recurrent states" };

/**
 * Mount the view.
 * @param {HTMLElement} root
 * @param {any} app
 */
export async function mount(root, app) {
  await app.css("views/canvas.css");
  const view = new PagesView(root, app);
  await view.fetchAll();
  return view;
}

class PagesView {
  constructor(root, app) {
    this.app = app;
    this.theme = readTheme();
    this.pool = null;
    /** Pages of the chosen branch in their order, -1 for null pages. */
    this.held = [];
    this.branches = [];
    this.timer = 0;
    this.refreshed = 0;
    /** What has changed since the last fetch; null: nothing that is known of. */
    this.stale = null;
    this.said = 0;
    const { el } = app;
    this.tabs = el("div.segments", { role: "group", "aria-label": "Pool" });
    this.colours = el("div.segments", { role: "group", "aria-label": "Colour by" });
    for (const [name, words] of Object.entries(COLOURS)) {
      this.colours.append(el("button.segment", { type: "button", dataset: { name }, onclick: () => app.set({ colour: name }) }, words));
    }
    this.evictions = el(
      "select.select",
      { "aria-label": "Evictions to outline", onchange: () => app.set({ evictions: this.evictions.value }) },
      EVICTIONS.map((count) => el("option", { value: String(count) }, count ? `next ${count} evictions` : "no evictions")),
    );
    this.picker = new BranchPicker({ label: "Branch", none: "No branch", onPick: (branch) => app.set({ branch }) });
    const toolbar = el(
      "div.toolbar",
      {},
      this.tabs,
      el("span.toolbar-part", {}, el("span.toolbar-label", {}, "Colour"), this.colours),
      this.evictions,
      el("span.spacer"),
      this.picker.select,
    );
    this.head = el("div.pool-head");
    this.gridHost = el("div.grid-scroll");
    this.tail = el("button.link.grid-tail", { type: "button", hidden: true, onclick: () => app.set({ tail: app.params.tail ? null : 1 }) });
    this.legend = el("div.page-legend");
    const help = el("p.sr-only", { id: "page-grid-help" }, "Each square is a page. Arrow keys move between pages, Page Up and Page Down by ten rows, Home and End within a row. Enter keeps a page's details. A table below says the same.");
    this.gridCard = el("section.card.grid-card", { "aria-label": "Pool" }, this.head, help, this.gridHost, this.tail, this.legend);
    this.detailCard = el("section.card.page-card", { "aria-label": "Page" });
    this.axisCard = el("section.card.axis-card", { "aria-label": "Branch" });
    this.tierCard = el("section.card.tier-card", { "aria-label": "Tiers" });
    this.tableCard = el("section.card.table-card", { "aria-label": "Table" });
    root.append(
      toolbar,
      el("div.pages-body", {}, this.gridCard, this.detailCard, this.axisCard, this.tierCard, this.tableCard),
    );
    this.grid = new PageGrid(this.gridHost, {
      onMove: (page, how) => this.look(page, how),
      onLeave: () => this.settle(),
      onPick: (page) => this.pick(page),
    });
    this.details = new PageDetails(this.detailCard, app, (branch) => app.set({ branch }, { replace: false }));
    this.axis = new BranchAxis(this.axisCard, app);
    this.table = new PageTable(this.tableCard, (page) => this.grid.moveTo(page));
  }

  // -- what is shown ----------------------------------------------------------------------------

  get poolIndex() {
    const wanted = Number(this.app.params.pool ?? 0);
    return Number.isInteger(wanted) && wanted >= 0 && wanted < this.pools.length ? wanted : 0;
  }

  get pools() {
    return this.app.overview?.pools ?? [];
  }

  get branchId() {
    return this.app.params.branch ?? null;
  }

  get colour() {
    return this.app.params.colour in COLOURS ? this.app.params.colour : "owner";
  }

  get evictionLimit() {
    const wanted = Number(this.app.params.evictions ?? 8);
    return EVICTIONS.includes(wanted) ? wanted : 8;
  }

  get branchMap() {
    return this.picker.branches;
  }

  // -- fetching ---------------------------------------------------------------------------------

  async fetchAll() {
    if (this.app.overview === null) await new Promise((resolve) => this.app.on("overview", resolve));
    await Promise.all([this.fetchBranches(), this.fetchTiers()].map((one) => one.catch(this.app.fail)));
    await this.fetchPool().catch(this.app.fail);
    this.refreshed = performance.now();
  }

  async fetchPool() {
    if (this.pools.length === 0) return;
    const { poolIndex: pool, branchId: branch } = this;
    const [document, held] = await Promise.all([this.app.get("/v1/state/pages", { pool }), this.pagesOf(branch, pool)]);
    if (pool !== this.poolIndex || branch !== this.branchId) return;
    this.pool = poolOf(document);
    this.held = held;
    this.draw();
  }

  /** Return the pages of a branch in their order, -1 for null pages; none of a branch that is gone. */
  async pagesOf(branch, pool) {
    if (branch === null) return [];
    try {
      return Array.from(decode.i4((await this.app.get("/v1/state/branch-pages", { branch, pool })).pages));
    } catch (error) {
      if (error.status === 404) return [];
      throw error;
    }
  }

  async fetchBranches() {
    const history = await this.app.get("/v1/state/history");
    this.branches = history.branches;
    this.picker.show(this.branches, this.branchId);
    this.drawAxis();
  }

  async fetchTiers() {
    const document = await this.app.get("/v1/state/tiers");
    showTiers(this.tierCard, document.tiers);
  }

  /** Fetch again what an event names, not more often than once in a second. */
  fetchSoon(data) {
    this.stale = { pages: true, history: Boolean(this.stale?.history) || names(data, "history") };
    if (this.timer) return;
    const wait = Math.max(0, REFRESH - (performance.now() - this.refreshed));
    this.timer = setTimeout(async () => {
      const { history } = this.stale;
      this.stale = null;
      await Promise.all([history ? this.fetchBranches() : null, this.fetchTiers()].map((one) => one?.catch(this.app.fail)));
      await this.fetchPool().catch(this.app.fail);
      this.refreshed = performance.now();
      this.timer = 0;
      if (this.stale !== null && !this.app.signal.aborted) this.fetchSoon({ documents: [] });
    }, wait);
  }

  update(change) {
    if (change.kind === "theme") {
      this.theme = readTheme();
      this.draw();
    } else if (change.kind === "params") {
      this.picker.show(this.branches, this.branchId);
      this.drawAxis();
      this.draw();
      return this.fetchPool();
    } else if (change.kind === "events") {
      if (names(change.data, "pages") || names(change.data, "history") || names(change.data, "tiers")) this.fetchSoon(change.data);
    } else if (change.kind === "reconnected" || change.kind === "restart") {
      this.details.known.clear();
      return this.fetchAll();
    }
    return undefined;
  }

  unmount() {
    clearTimeout(this.timer);
    this.details.cancel();
    this.grid.close();
    this.axis.close();
  }

  // -- drawing ----------------------------------------------------------------------------------

  draw() {
    this.drawTools();
    if (this.pool === null || this.pool.pool !== this.poolIndex) return;
    const { pool, theme } = this;
    const summary = this.pools[pool.pool];
    const chosen = this.held.filter((page) => page >= 0 && page < pool.count);
    this.chosen = new Map(chosen.map((page, place) => [page, place]));
    const evictions = nextEvictions(pool, this.evictionLimit);
    const count = this.app.params.tail ? pool.count : worthDrawing(pool);
    this.grid.show({ ...pictureOf(pool, this.colour, theme, count), evictions, chosen }, theme);
    this.tail.hidden = count === pool.count && !this.app.params.tail;
    this.tail.textContent = this.app.params.tail ? "Draw pages in use only" : `and ${format0(pool.count - count)} free pages behind: draw all`;
    this.gridCard.dataset.milliseconds = `${this.grid.times.pages.toFixed(2)} ${this.grid.times.marks.toFixed(2)}`;
    const unit = summary?.kind === "states" ? "slots" : "pages";
    this.grid.describe(`${format0(pool.count)} ${unit} of ${summary ? layerNames(summary.layers) : `pool ${pool.pool}`}`, "page-grid-help");
    this.drawHead(summary);
    const nulls = this.held.length - chosen.length;
    showLegend(this.legend, {
      pool,
      theme,
      colour: this.colour,
      evictions: this.evictionLimit ? evictions.size : null,
      chosen: this.branchId === null ? null : chosen.length,
      nulls,
      nameOf: (id) => (this.branchMap.has(id) ? branchName(this.branchMap.get(id)) : id),
      onBranch: (branch) => this.app.set({ branch }, { replace: false }),
    });
    this.table.show(pool, this.branchMap);
    if (this.grid.pinned >= 0) this.look(this.grid.pinned, "refresh");
  }

  drawTools() {
    const { el, fill, format } = this.app;
    const tabs = this.pools.map((pool, index) => {
      const used = pool.num_pages - (pool.counts.free ?? 0) - (pool.counts.evictable ?? 0);
      const words = `${layerNames(pool.layers)}${pool.kind === "states" ? " · states" : pool.kind === "encoder" ? " · encoder" : ""}`;
      return el(
        "button.segment.pool-tab",
        { type: "button", "aria-pressed": String(index === this.poolIndex), onclick: () => this.app.set({ pool: index }) },
        words,
        el("span.pool-share", {}, format.share(pool.num_pages ? used / pool.num_pages : 0)),
      );
    });
    const focused = [...this.tabs.children].indexOf(document.activeElement);
    fill(this.tabs, tabs);
    if (focused >= 0) this.tabs.children[focused]?.focus();
    for (const button of this.colours.children) button.setAttribute("aria-pressed", String(button.dataset.name === this.colour));
    this.evictions.value = String(this.evictionLimit);
  }

  drawHead(summary) {
    const { el, fill, format } = this.app;
    if (!summary) return;
    const unit = summary.kind === "states" ? "slot" : "page";
    const facts = [
      format.count(summary.num_pages, unit),
      summary.kind === "tokens" ? `${format.count(summary.page_tokens, "token")} each` : KINDS[summary.kind],
      `${format.bytes(summary.page_bytes)} each, ${format.bytes(summary.page_bytes * summary.num_pages)} in all`,
      summary.window ? `window of ${format.number(summary.window)}` : null,
    ].filter((fact) => fact !== null);
    fill(this.head, el("h2", {}, layerNames(summary.layers)), el("p.hint", {}, facts.join(" · ")));
  }

  drawAxis() {
    this.axis.show(this.branchMap.get(this.branchId) ?? null, this.pools);
  }

  // -- the cursor -------------------------------------------------------------------------------

  look(page, how) {
    const { pool } = this;
    this.details.show(this.pools[pool.pool], pool, page, this.branchMap);
    if (how !== "keys") return;
    clearTimeout(this.said);
    this.said = setTimeout(() => this.app.announce(this.words(page)), 250);
  }

  /** Say a page in one sentence. */
  words(page) {
    const { pool } = this;
    const owner = OWNERS[pool.owner[page]];
    if (owner === "free") return `Page ${page}, free`;
    const id = pool.branches[pool.holder[page]];
    const branch = this.branchMap.get(id);
    const parts = [`Page ${page}, ${owner}`, pool.references[page] === 1 ? "1 owner" : `${pool.references[page]} owners`];
    if (branch) parts.push(`${branchName(branch)} from position ${pool.position[page]}`);
    if (pool.eviction[page] >= 0) parts.push(`given up ${pool.eviction[page] === 0 ? "next" : ordinal(pool.eviction[page] + 1)}`);
    if (this.chosen?.has(page)) parts.push(`${ordinal(this.chosen.get(page) + 1)} page of the branch`);
    return parts.join(", ");
  }

  settle() {
    if (this.grid.pinned >= 0) this.look(this.grid.pinned, "pointer");
    else this.details.cancel();
  }

  pick(page) {
    if (page < 0) this.details.hint();
    else this.look(page, "pointer");
  }
}

/** Write a whole number. */
function format0(value) {
  return value.toLocaleString("en");
}
