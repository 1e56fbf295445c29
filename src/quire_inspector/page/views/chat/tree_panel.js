// The tree of a conversation: all its branches at a glance, the way between them, and the way back.

/** Return the beginning of a message without the signs of Markdown. */
function plain(text) {
  return text.slice(0, 300).replace(/[*`#>|]+|^\s*[-+]\s/gm, " ");
}

export class TreePanel {
  /** @param {object} chat the view */
  constructor(chat) {
    this.chat = chat;
    this.app = chat.app;
    const { el } = this.app;
    this.range = el("input", { type: "range", min: 1, step: 1, id: "rewind-range", "aria-describedby": "rewind-said" });
    this.range.addEventListener("input", () => this.told());
    this.range.addEventListener("change", () => this.rewind());
    this.said = el("p.hint", { id: "rewind-said" });
    this.slider = el("div.rewind", {}, el("label", { for: "rewind-range" }, "Rewind"), this.range, this.said);
    this.list = el("ul.branch-tree", { role: "tree", "aria-label": "Branches of the conversation" });
    this.app.keys(this.list, {
      ArrowDown: () => this.step(1),
      ArrowUp: () => this.step(-1),
      Home: () => this.step(-Infinity),
      End: () => this.step(Infinity),
      Enter: () => this.current?.click(),
      " ": () => this.current?.click(),
      "Shift+Enter": () => this.beside(),
      Delete: () => this.current && this.chat.removeBranch(this.current.dataset.id),
    });
    this.element = el("div.tree-panel", {}, this.slider, this.list, el("p.hint", {}, "Enter shows a branch, Shift and Enter shows it beside the present one, Delete removes it."));
  }

  get current() {
    const found = document.activeElement?.closest?.("[role=treeitem]");
    return found && this.list.contains(found) ? found : null;
  }

  step(by) {
    const items = [...this.list.querySelectorAll("[role=treeitem]")];
    const at = Math.max(0, Math.min(items.length - 1, items.indexOf(this.current) + by));
    this.focusOn(items[at]);
  }

  focusOn(item) {
    for (const one of this.list.querySelectorAll("[tabindex='0']")) one.tabIndex = -1;
    if (!item) return;
    item.tabIndex = 0;
    item.focus();
  }

  beside() {
    if (this.current) this.chat.openBeside(this.chat.tree.leafBelow(this.current.dataset.id));
  }

  draw() {
    const { tree, leaf } = this.chat;
    const path = tree.path(leaf);
    const shown = new Set(path.map((node) => node.id));
    const focused = this.current?.dataset.id;
    const rows = [];
    // A run of messages without branches stays on one level; what branches goes one level in.
    const walk = (parent, level) => {
      const children = tree.children(parent);
      for (const node of children) {
        const inner = children.length > 1 ? level + 1 : level;
        rows.push(this.row(node, inner, shown.has(node.id), children));
        walk(node.id, inner);
      }
    };
    walk(null, 1);
    this.app.fill(this.list, rows);
    const last = rows.find((row) => row.dataset.id === focused) ?? rows.find((row) => row.dataset.id === path.at(-1)?.id) ?? rows[0];
    if (last) last.tabIndex = 0;
    if (focused) last?.focus();
    this.slider.hidden = path.length < 2;
    this.range.max = String(path.length);
    this.range.value = String(path.length);
    this.told();
  }

  row(node, level, onPath, siblings) {
    const { el, icon, visible } = this.app;
    const text = visible((plain(node.content) || node.calls?.map((call) => call.function.name).join(", ") || (node.pending ? "…" : node.error ? "failed" : "")).trim().replace(/\s+/g, " "), 90);
    const name = { user: "chat", assistant: "bulb", system: "settings", tool: "tool" }[node.role] ?? "chat";
    const role = { user: "You", assistant: "Answer", system: "System", tool: "Result" }[node.role] ?? node.role;
    const here = node.id === this.chat.leaf;
    return el(
      "li",
      {
        role: "treeitem",
        tabindex: "-1",
        "aria-level": level,
        "aria-selected": String(here),
        "aria-posinset": siblings.indexOf(node) + 1,
        "aria-setsize": siblings.length,
        class: `${onPath ? "on-path" : ""} ${here ? "here" : ""} ${siblings.length > 1 ? "forked" : ""}`,
        dataset: { id: node.id },
        style: { "--level": level - 1 },
        "aria-label": `${role}: ${text}${node.name ? `, named ${visible(node.name, 60)}` : ""}`,
        onclick: () => this.chat.show(this.chat.tree.leafBelow(node.id), node.id),
      },
      icon(name),
      el("bdi.tree-text", {}, text || "(empty)"),
      node.name ? el("span.tag", {}, visible(node.name, 30)) : null,
      node.commit ? icon("commit", { class: "kind-commit" }) : null,
      node.pin ? icon("pin") : null,
    );
  }

  told() {
    const path = this.chat.tree.path(this.chat.leaf);
    const to = Number(this.range.value);
    const behind = path.length - to;
    const node = path[to - 1];
    const tokens = node?.usage ? ` ${this.app.format.count(node.usage.prompt + node.usage.completion, "token")} are kept.` : "";
    const words = behind ? `Ends behind message ${to} of ${path.length}; ${this.app.format.count(behind, "message")} stay${behind === 1 ? "s" : ""} as a branch beside.${tokens}` : "At the end of the branch.";
    this.said.textContent = words;
    this.range.setAttribute("aria-valuetext", words);
    this.chat.preview(behind ? node?.id : null);
  }

  rewind() {
    const path = this.chat.tree.path(this.chat.leaf);
    const node = path[Number(this.range.value) - 1];
    if (node && node.id !== this.chat.leaf) this.chat.threads[0].rewind(node.id);
  }
}
