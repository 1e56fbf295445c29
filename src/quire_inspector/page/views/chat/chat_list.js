// The list of conversations.

export class ChatList {
  /** @param {object} chat the view */
  constructor(chat) {
    this.chat = chat;
    this.app = chat.app;
    const { el, icon } = this.app;
    this.search = el("input.input", { type: "search", placeholder: "Search", "aria-label": "Search conversations", oninput: () => this.draw() });
    this.list = el("ul.chat-list");
    this.element = el(
      "nav.chat-side",
      { "aria-label": "Conversations", id: "chat-side" },
      el("div.side-head", {}, el("button.button.primary.new-chat", { type: "button", onclick: () => chat.begin(), title: "New conversation (N)" }, icon("plus"), "New chat")),
      el("div.search", {}, icon("search"), this.search),
      this.list,
      el("div.side-foot", {}, el("button.button.small", { type: "button", onclick: () => chat.exchange.choose() }, icon("upload"), "Import…")),
    );
  }

  draw() {
    const { el, fill, icon, named, format } = this.app;
    const words = this.search.value.toLowerCase();
    const all = this.chat.library.list.filter((one) => one.title.toLowerCase().includes(words));
    const row = (one) =>
      el(
        "li",
        { class: one.id === this.chat.library.id ? "here" : "" },
        el("button.chat-link", { type: "button", "aria-current": one.id === this.chat.library.id ? "true" : null, onclick: () => this.chat.open(one.id) }, named(one.title || "Untitled"), el("span.hint", {}, ago(one.updated, format))),
        el("button.icon-button.small", { type: "button", "aria-label": `More about ${this.app.visible(one.title || "Untitled", 60)}`, onclick: (event) => this.chat.chatMenu(one, event.currentTarget) }, icon("more")),
      );
    fill(this.list, all.length ? all.slice(0, 200).map(row) : el("li.hint.nothing", {}, words ? "Nothing matches." : "Your conversations will be listed here."));
  }
}

function ago(time, format) {
  const seconds = Date.now() / 1000 - time;
  if (seconds < 60) return "now";
  if (seconds < 86400) return `${format.seconds(seconds).split(" ").slice(0, 2).join(" ")} ago`;
  return new Date(time * 1000).toLocaleDateString();
}
