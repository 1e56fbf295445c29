// The Playground: sessions side by side, that run, fork and rewind by a click.

import { Column } from "./playground/column.js";
import { Sampling } from "./playground/sampling.js";

export const title = "Playground";
export const help = [
  ["Control+Enter", "Run the branch"],
  ["Escape", "Stop it"],
  ["← → ↑ ↓", "Walk through the tokens of a branch"],
  ["Enter", "What can be done at a token"],
  ["F / R", "Fork or rewind at a token"],
];

const MOST_OPEN = 12;
const REFRESH = 1500;

/** @param {HTMLElement} root @param {object} app */
export async function mount(root, app) {
  await app.css("views/playground.css");
  const view = new Playground(root, app);
  await view.begin();
  return { update: (change) => view.update(change), unmount: () => view.end() };
}

class Playground {
  constructor(root, app) {
    this.app = app;
    this.root = root;
    this.columns = [];
    this.stored = null;
    this.drawn = null;
    this.sampling = new Sampling(app);
    this.grid = app.el("div.columns", { role: "group", "aria-label": "Branches side by side" });
  }

  get ids() {
    return (this.app.params.open ?? "").split(",").filter(Boolean);
  }

  async begin() {
    if (this.app.overview) await this.draw();
    else this.app.fill(this.root, this.app.el("p.loading", { role: "status" }, "Waiting for the server…"));
  }

  end() {
    clearTimeout(this.soon);
  }

  /** Draw the view as what the server allows. */
  async draw() {
    const { overview, el, fill } = this.app;
    const state = overview.source !== "server" ? "file" : overview.allow_edits ? "on" : "off";
    if (this.drawn === state) return;
    this.drawn = state;
    if (state !== "on") {
      const why = state === "file" ? "A state file or a store has no model that could run." : "This server lets the page only read. Start it with quire serve --allow-edits to run, fork and rewind here.";
      fill(this.root, el("div.empty", {}, el("h2", {}, "The Playground is closed"), el("p", {}, why)));
      return;
    }
    fill(this.root, this.toolbar(), this.grid);
    await this.findBranches();
    await this.sync();
  }

  toolbar() {
    const { el, icon, overview } = this.app;
    this.modeSelect = el("select.select", { id: "playground-mode" }, el("option", { value: "text" }, "text"), el("option", { value: "chat" }, "a message of a chat"));
    const chat = overview.model?.chat_template === true;
    this.modeSelect.value = chat && this.app.params.mode === "chat" ? "chat" : "text";
    this.modeSelect.addEventListener("change", () => {
      this.app.set({ mode: this.modeSelect.value === "chat" ? "chat" : null });
      this.columns.forEach((column) => this.label(column));
    });
    return el(
      "div.toolbar",
      {},
      el("button.button.primary", { type: "button", onclick: () => this.create() }, icon("plus"), "New session"),
      el("button.button", { type: "button", onclick: () => this.choose() }, "Open…"),
      el("button.button", { type: "button", onclick: () => this.runAll() }, icon("play"), "Run all"),
      chat ? el("div.sampling-field", {}, el("label", { for: "playground-mode" }, "Add"), this.modeSelect) : null,
      el("span.spacer"),
      this.sampling.element,
    );
  }

  label(column) {
    const chat = this.modeSelect.value === "chat";
    column.text.setAttribute("aria-label", chat ? "Message to be answered" : "Text to add before the model goes on");
    column.text.placeholder = chat ? "Message" : "Text to add; may be empty";
  }

  /** Learn the names of branches, if commits can be kept at all. */
  async findBranches() {
    this.stored = null;
    try {
      const { tiers } = await this.app.get("v1/state/tiers");
      if (!tiers.some((tier) => tier.durable)) return;
      const { data } = await this.app.get("v1/branches");
      this.stored = data.map((one) => one.name);
    } catch (error) {
      if (this.app.isAbort(error)) throw error;
    }
  }

  // -- columns -------------------------------------------------------------------------

  /** Make columns as the hash names sessions. */
  async sync() {
    const wanted = this.ids.slice(0, MOST_OPEN);
    for (const column of [...this.columns]) if (!wanted.includes(column.id)) this.drop(column);
    const fresh = [];
    for (const id of wanted) {
      if (this.columns.some((column) => column.id === id)) continue;
      const column = this.make(id);
      this.columns.push(column);
      fresh.push(column.refresh().catch(this.app.fail));
    }
    this.columns.sort((a, b) => wanted.indexOf(a.id) - wanted.indexOf(b.id));
    this.arrange();
    await Promise.all(fresh);
  }

  make(id) {
    const column = new Column(this.app, id, {
      sampling: () => this.sampling.values(),
      mode: () => this.modeSelect.value,
      open: (other, after) => this.open(other, after),
      close: (one) => this.close(one),
      replace: (one, other) => this.setOpen(this.ids.map((known) => (known === one.id ? other : known))),
      changed: () => this.markCommon(),
      names: () => new Set(this.columns.map((one) => one.info?.name)),
      branches: () => this.stored,
    });
    this.label(column);
    return column;
  }

  arrange() {
    const { el, fill } = this.app;
    if (!this.columns.length) {
      fill(this.grid, el("div.empty", {}, el("h2", {}, "No branch is open"), el("p", {}, "Make a session, or open one. Then click a token to fork or rewind there, and see the branches side by side.")));
      return;
    }
    // Columns that stay are not moved, so that focus and scrolling stay too.
    const nodes = this.columns.map((column) => column.element);
    for (const node of [...this.grid.children]) if (!nodes.includes(node)) node.remove();
    nodes.forEach((node, index) => {
      if (this.grid.children[index] !== node) this.grid.insertBefore(node, this.grid.children[index] ?? null);
    });
    this.markCommon();
  }

  drop(column) {
    column.running?.abort();
    column.element.remove();
    this.columns = this.columns.filter((one) => one !== column);
  }

  setOpen(ids) {
    this.app.set({ open: [...new Set(ids)].join(",") });
  }

  /** Open a session as a column, behind another one, and return it once it is shown. */
  async open(id, after = null) {
    const ids = this.ids.filter((known) => known !== id);
    const at = after ? ids.indexOf(after.id) + 1 : ids.length;
    ids.splice(at, 0, id);
    while (ids.length > MOST_OPEN) ids.splice(ids[0] === id || ids[0] === after?.id ? ids.length - 1 : 0, 1);
    let column = this.columns.find((one) => one.id === id);
    if (!column) {
      column = this.make(id);
      this.columns.push(column);
    }
    this.setOpen(ids);
    await column.refresh();
    column.element.scrollIntoView({ behavior: this.app.reducedMotion ? "auto" : "smooth", inline: "nearest", block: "nearest" });
    return column;
  }

  close(column) {
    const at = this.columns.indexOf(column);
    this.setOpen(this.ids.filter((id) => id !== column.id));
    (this.columns[at] ?? this.columns.at(-1))?.heading.focus();
  }

  /** Dim in each column what it has in common with another one. */
  markCommon() {
    const all = this.columns.map((column) => column.ids);
    this.columns.forEach((column, at) => {
      let most = 0;
      all.forEach((ids, other) => {
        if (other === at || !ids || !all[at]) return;
        let count = 0;
        while (count < ids.length && ids[count] === all[at][count]) count += 1;
        most = Math.max(most, count);
      });
      column.common(most);
    });
  }

  // -- what the reader does --------------------------------------------------------------

  async create() {
    const chat = this.app.overview.model?.chat_template === true;
    let made = null;
    const fields = [
      { name: "name", label: "Name", value: `draft ${this.columns.length + 1}` },
      { name: "prompt", label: chat && this.modeSelect.value === "chat" ? "Beginning (may be empty)" : "Text to begin with", value: "", hint: "May be empty; text can be added later." },
    ];
    await this.app.ask("New session", fields, {
      action: "Make",
      check: async ({ name, prompt }) => {
        const body = {};
        if (name) body.name = name;
        if (prompt) body.prompt = prompt;
        made = await this.app.post("v1/sessions", body);
      },
    });
    if (!made) return;
    const column = await this.open(made.id).catch(this.app.fail);
    column?.text.focus();
  }

  /** Choose sessions that exist. */
  async choose() {
    let found;
    try {
      found = (await this.app.get("v1/sessions", { limit: 1000 })).data;
    } catch (error) {
      return this.app.fail(error);
    }
    const { el, icon, named, format } = this.app;
    const known = new Set(this.ids);
    const id = await this.app.openDialog("Open a session", (close) => {
      const list = el("div.session-list");
      const show = (query) => {
        const words = query.toLowerCase();
        const seen = found.filter((one) => !known.has(one.id) && `${one.name ?? ""} ${one.id}`.toLowerCase().includes(words)).slice(-100).reverse();
        const line = (one) =>
          el(
            "button.menu-item",
            { type: "button", onclick: () => close(one.id) },
            icon("session", { class: "kind-session" }),
            named(one.name ?? one.id),
            el("span.hint", {}, `${format.count(one.num_tokens, "token")}, ${format.clock(one.created)}`),
          );
        this.app.fill(list, seen.length ? seen.map(line) : el("p.hint", {}, found.length ? "Nothing matches." : "There are no sessions."));
      };
      show("");
      const search = el("input.input", { type: "search", "aria-label": "Search sessions", placeholder: "Search by name or id", oninput: () => show(search.value) });
      return el("div.dialog-body", {}, search, list);
    });
    if (id) await this.open(id).catch(this.app.fail);
    return undefined;
  }

  runAll() {
    if (!this.columns.length) return void this.app.announce("No branch is open");
    for (const column of this.columns) column.run();
    return undefined;
  }

  // -- what the server tells -----------------------------------------------------------------

  async update(change) {
    if (change.kind === "overview" || change.kind === "reconnected") await this.draw();
    if (this.drawn !== "on") return;
    if (change.kind === "params") await this.sync();
    else if (change.kind === "events") this.refreshSoon();
    else if (change.kind === "reconnected" || change.kind === "restart") {
      await this.findBranches();
      await this.refreshAll();
    }
  }

  /** Read the open sessions again, as somebody may have changed them; not all the time. */
  refreshSoon() {
    this.soon ??= setTimeout(() => {
      this.soon = null;
      this.refreshAll().catch(this.app.fail);
    }, REFRESH);
  }

  async refreshAll() {
    await Promise.all(this.columns.map((column) => column.refresh()));
  }
}

