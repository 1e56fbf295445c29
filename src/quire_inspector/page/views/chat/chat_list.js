// The list of conversations, by days; and the search in their titles and messages.

/** Milliseconds without a key before the server is asked. */
const PAUSE = 200;
/** Conversations that are listed at most. */
const MOST = 500;

export class ChatList {
  /** @param {object} chat the view */
  constructor(chat) {
    this.chat = chat;
    this.app = chat.app;
    /** What the server found for `words`; null: nothing is searched for. */
    this.found = null;
    const { el, icon } = this.app;
    this.search = el("input.input", { type: "search", placeholder: "Search", "aria-label": "Search conversations", oninput: () => this.typed() });
    this.list = el("div.chat-list");
    this.element = el(
      "nav.chat-side",
      { "aria-label": "Conversations", id: "chat-side" },
      el("div.side-head", {}, el("button.button.primary.new-chat", { type: "button", onclick: () => chat.begin(), title: "New conversation (N)" }, icon("plus"), "New chat")),
      el("div.search", {}, icon("search"), this.search),
      this.list,
      el("div.side-foot", {}, el("button.button.small", { type: "button", onclick: () => chat.exchange.choose() }, icon("upload"), "Import…")),
    );
    const step = (by) => {
      const all = [...this.list.querySelectorAll(".chat-link")];
      const at = all.indexOf(document.activeElement) + by;
      (at < 0 ? this.search : all[Math.min(at, all.length - 1)])?.focus();
    };
    this.app.keys(this.element, { ArrowDown: () => step(1), ArrowUp: () => step(-1), Escape: () => (this.search.value ? ((this.search.value = ""), this.typed()) : false) });
  }

  typed() {
    clearTimeout(this.timer);
    const words = this.search.value.trim();
    if (!words) {
      this.found = null;
      this.draw();
      return;
    }
    this.timer = setTimeout(async () => {
      const found = await this.chat.library.search(words);
      if (words !== this.search.value.trim()) return;
      this.found = found;
      this.draw();
      this.app.announce(found.length ? `${this.app.format.count(found.length, "conversation")} found` : "Nothing matches");
    }, PAUSE);
  }

  draw() {
    const { el, fill } = this.app;
    const listed = this.chat.library.list;
    const all = (this.found ?? [...listed.filter((one) => one.pinned), ...listed.filter((one) => !one.pinned)]).slice(0, MOST);
    const groups = new Map();
    for (const one of all) {
      const name = this.found ? "Found" : one.pinned ? "Pinned" : dayOf(one.updated);
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(one);
    }
    const content = JSON.stringify([[...groups], this.chat.library.id, Boolean(this.found)]);
    if (content === this.drawn) return; // the list is read again and again
    this.drawn = content;
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset.id : null;
    const none = el("p.hint.nothing", {}, this.found ? "Nothing matches. Titles and messages are searched for all words." : "Your conversations will be listed here.");
    fill(this.list, groups.size ? [...groups].map(([name, rows]) => [el("h3", {}, name), el("ul", {}, rows.map((one) => this.row(one)))]) : none);
    if (focused) this.list.querySelector(`[data-id="${focused}"]`)?.focus();
  }

  row(one) {
    const { el, icon, named, visible } = this.app;
    const here = one.id === this.chat.library.id;
    const title = one.title || "Untitled";
    return el(
      "li",
      { class: here ? "here" : "" },
      el(
        "button.chat-link",
        { type: "button", "aria-current": here ? "true" : null, dataset: { id: one.id }, title: new Date(one.updated * 1000).toLocaleString(), onclick: () => this.chat.open(one.id) },
        named(title),
        one.found ? el("bdi.hint.found", {}, visible(one.found)) : null,
      ),
      el("button.icon-button.small", { type: "button", "aria-label": `More about ${visible(title, 60)}`, onclick: (event) => this.chat.chatMenu(one, event.currentTarget) }, icon("more")),
    );
  }
}

/** Return the name of the day, the days, or the month of a time. */
function dayOf(time) {
  const begin = new Date();
  begin.setHours(0, 0, 0, 0);
  const days = Math.ceil((begin.getTime() / 1000 - time) / 86400);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  if (days <= 7) return "Last 7 days";
  if (days <= 30) return "Last 30 days";
  return new Date(time * 1000).toLocaleDateString(undefined, { month: "long", year: "numeric" });
}
