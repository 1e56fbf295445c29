// The prompt library: texts that are written often, kept in the browser by names.

import { shelf } from "./kept.js";

export class Prompts {
  /** @param {object} composer where they are put */
  constructor(composer) {
    this.composer = composer;
    this.kept = shelf("prompts");
  }

  get any() {
    return this.kept.all().length > 0;
  }

  /** Return buttons for the first few, to begin a conversation with. */
  chips() {
    const { el, named, visible } = this.composer.app;
    const kept = this.kept.all().slice(0, 4);
    return kept.length ? el("div.chips", { role: "group", "aria-label": "Your prompts" }, kept.map(({ name, value }) => el("button.button.small", { type: "button", title: visible(value, 200), onclick: () => this.composer.insert(String(value)) }, named(name)))) : null;
  }

  /** Show them: to be put into the message, to be deleted, and the message to be kept as one. */
  open() {
    const { app } = this.composer;
    const { el, icon, named, visible } = app;
    const typed = this.composer.area.value.trim();
    return app.openDialog(
      "Prompts",
      (close) => {
        const use = ({ value }) => (close(), this.composer.insert(String(value)));
        const row = (one, at) =>
          el(
            "li.prompt",
            {},
            el("button.menu-item", { type: "button", autofocus: at === 0, onclick: () => use(one) }, named(one.name), el("span.hint", {}, visible(one.value, 60))),
            el("button.icon-button.small", { type: "button", "aria-label": `Delete ${visible(one.name, 60)}`, onclick: () => (this.kept.drop(one.name), draw()) }, icon("trash")),
          );
        const list = el("ul");
        const none = el("p.hint", {}, "Texts that you write often can be kept here, in this browser. Then / in an empty field shows them.");
        const draw = () => app.fill(list, this.kept.all().map(row));
        draw();
        const keep = el("button.button", { type: "button", disabled: !typed, onclick: () => (close(), this.keep(typed)) }, icon("plus"), "Keep what is typed…");
        const box = el("div.dialog-body.menu-body", {}, this.any ? list : none, el("div.button-row", {}, keep));
        const step = (by) => {
          const all = [...box.querySelectorAll(".menu-item")];
          all[(all.indexOf(document.activeElement) + by + all.length) % all.length]?.focus();
        };
        app.keys(box, { ArrowDown: () => step(1), ArrowUp: () => step(-1) });
        return box;
      },
      { class: "menu", anchor: this.composer.promptButton },
    );
  }

  async keep(text) {
    const { app } = this.composer;
    const given = await app.ask("Keep a prompt", [{ name: "name", label: "Name", required: true, hint: "One with this name is replaced." }], { action: "Keep" });
    if (!given) return;
    const done = this.kept.put(given.name.trim().slice(0, 80), text);
    app.notify(done ? "The prompt is kept" : "The browser has no room for it", done ? "info" : "error");
  }
}
