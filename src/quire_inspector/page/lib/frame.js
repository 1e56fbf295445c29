// The frame around the views: tabs, connection, theme, keys, and the bar with the server's numbers.

import { el, fill, icon } from "./dom.js";
import { openDialog } from "./dialogs.js";
import { format } from "./format.js";
import { isWriting, singleKeys } from "./keys.js";
import { named, visible } from "./text.js";

const THEME = "quire.theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

const CONNECTION = {
  connecting: "Connecting",
  live: "Live",
  polling: "Connected",
  lost: "Not connected",
  key: "Key needed",
};

const GLOBAL_KEYS = [
  ["1 … 6", "Go to a view"],
  ["/", "Search in the view"],
  ["T", "Dark or light"],
  ["?", "This list"],
  ["Escape", "Close a dialog or the details"],
];
export class Frame {
  /** @param {{views: object[], live: object, go: Function, on: Function, changeKey: Function, themeChanged: Function}} parts */
  constructor(parts) {
    Object.assign(this, parts);
    this.topbar = document.getElementById("topbar");
    this.statusbar = document.getElementById("statusbar");
    this.banner = document.getElementById("banner");
    this.tabs = new Map();
    this.selected = null;
    /** Title and keys of the view that is shown. */
    this.viewHelp = null;
  }

  draw() {
    const tab = ({ name, title, hint }, at) => {
      const link = el("a.tab", { href: `#${name}`, title: `${hint} (${at + 1})` }, icon(name), el("span", {}, title));
      this.tabs.set(name, link);
      return el("li", {}, link);
    };
    this.model = el("span.model");
    this.pill = el("button.pill", { type: "button", onclick: () => this.pressed() });
    this.themeButton = el("button.icon-button", { type: "button", onclick: () => this.switchTheme() });
    fill(
      this.topbar,
      el("div.brand", {}, brand(), el("span.brand-name", {}, "Quire"), this.model),
      el("nav.tabs", { "aria-label": "Views" }, el("ul", {}, this.views.map(tab))),
      el(
        "div.tools",
        {},
        this.pill,
        this.themeButton,
        el("button.icon-button", { type: "button", "aria-label": "API key", title: "API key", onclick: this.changeKey }, icon("key")),
        el("button.icon-button", { type: "button", "aria-label": "Keys and help", title: "Keys and help (?)", onclick: () => this.help() }, icon("help")),
      ),
    );
    document.getElementById("skip").addEventListener("click", (event) => {
      event.preventDefault();
      document.getElementById("view").focus();
    });
    this.on("overview", () => this.numbers());
    this.on("connection", () => this.connection());
    dark.addEventListener("change", () => this.themed());
    document.addEventListener("keydown", (event) => this.key(event));
    this.drawTheme();
    this.connection();
    this.numbers();
    if (this.selected) this.select(this.selected);
  }

  /** Mark the tab of the view that is shown. */
  select(name) {
    this.selected = name;
    for (const [key, link] of this.tabs) {
      if (key === name) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  }

  // -- theme ----------------------------------------------------------------

  get isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : dark.matches;
  }

  switchTheme() {
    const next = this.isDark ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem(THEME, next);
    } catch {
      // The choice then lasts until the page is left.
    }
    this.themed();
  }

  themed() {
    this.drawTheme();
    this.themeChanged();
  }

  drawTheme() {
    const label = this.isDark ? "Switch to the light theme" : "Switch to the dark theme";
    this.themeButton.setAttribute("aria-label", label);
    this.themeButton.title = `${label} (T)`;
    fill(this.themeButton, icon(this.isDark ? "sun" : "moon"));
  }

  // -- connection -------------------------------------------------------------

  connection() {
    const { state, problem } = this.live;
    this.pill.dataset.state = state;
    fill(this.pill, el("span.dot", { "aria-hidden": "true" }), el("span.pill-text", {}, CONNECTION[state]));
    this.pill.title = problem?.message ?? CONNECTION[state];
    this.pill.setAttribute("aria-label", `Connection: ${CONNECTION[state]}`);
    document.documentElement.dataset.connection = state;
    const lost = state === "lost";
    this.banner.hidden = !lost && state !== "key";
    if (lost) {
      const when = this.live.wait >= 1 ? `in ${Math.round(this.live.wait)} s` : "now";
      fill(
        this.banner,
        el("span", {}, `${visible(problem?.message ?? "The server cannot be reached", 300)}. What is shown is the last that was known. Trying again ${when}. `),
        el("button.button.small", { type: "button", onclick: () => this.live.retry() }, "Try now"),
      );
    } else if (state === "key") {
      const said = problem?.status === 403 ? visible(problem.message, 300) : "This server needs an API key. ";
      fill(this.banner, el("span", {}, said), el("button.button.small", { type: "button", onclick: this.changeKey }, "Give the key"));
    } else {
      fill(this.banner);
    }
  }

  pressed() {
    if (this.live.state === "key") this.changeKey();
    else this.live.retry();
  }

  // -- numbers ----------------------------------------------------------------

  numbers() {
    const found = this.live.overview;
    for (const { name, live } of this.views) this.tabs.get(name).parentElement.hidden = Boolean(live && this.live.isStill);
    fill(this.model, found ? named(modelName(found)) : null);
    if (!found) return fill(this.statusbar);
    const items = figures(found).map(([label, value, share]) =>
      el("div.figure", {}, el("span.figure-label", {}, label), share === undefined ? null : meter(share), el("span.figure-value", {}, value)),
    );
    fill(this.statusbar, items);
  }

  // -- keys --------------------------------------------------------------------

  key(event) {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || isWriting(event)) return;
    if (!singleKeys.on || document.querySelector("dialog[open]")) return;
    const view = this.views[Number(event.key) - 1];
    if (view && !(view.live && this.live.isStill)) this.go(view.name);
    else if (event.key === "?") this.help();
    else if (event.key === "t" || event.key === "T") this.switchTheme();
    else if (event.key === "/") {
      const search = document.querySelector("#mount input[type=search]");
      if (!search) return;
      search.focus();
    } else return;
    event.preventDefault();
  }

  help() {
    const table = (name, rows) =>
      el("section", {}, el("h3", {}, name), el("dl.keys", {}, rows.map(([key, does]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, does)])));
    const box = el("input", { type: "checkbox", id: "single-keys", checked: singleKeys.on, onchange: () => (singleKeys.on = box.checked) });
    openDialog("Keys and help", () =>
      el(
        "div.dialog-body",
        {},
        table("Everywhere", GLOBAL_KEYS),
        this.viewHelp ? table(...this.viewHelp) : null,
        el("p.check", {}, box, el("label", { for: "single-keys" }, "Single keys work everywhere on the page")),
        el("p.hint", {}, `Quire ${visible(this.live.overview?.versions?.quire ?? "")} · the page loads nothing from other servers.`),
      ),
    );
  }
}

function brand() {
  return el(
    "svg:svg",
    { viewBox: "0 0 24 24", class: "logo", "aria-hidden": "true" },
    el("svg:rect", { width: 24, height: 24, rx: 5 }),
    el("svg:path", { d: "M6 6h12M6 6v12M6 12h7M13 12v6h5M6 18h3" }),
  );
}

function meter(share) {
  const percent = Math.max(0, Math.min(100, share * 100));
  return el("span.meter", { "aria-hidden": "true" }, el("span", { style: { width: `${percent}%` } }));
}

function modelName({ model }) {
  return typeof model === "string" ? model : (model?.name ?? model?.id ?? "");
}

/** Return what the bar tells: label, value, and a share for a meter. */
function figures(found) {
  const rows = [];
  const { use = {}, requests = {}, branches = {} } = found;
  if (use.total) {
    const used = use.total - (use.free ?? 0) - (use.evictable ?? 0);
    rows.push(["Pages", `${format.number(used)} of ${format.number(use.total)} in use, ${format.number(use.evictable)} evictable`, used / use.total]);
  }
  if (requests.running !== undefined) rows.push(["Running", format.number(requests.running)]);
  if (requests.waiting !== undefined) rows.push(["Waiting", format.number(requests.waiting)]);
  rows.push(["Sessions", format.number(branches.session ?? 0)]);
  if (found.source && found.source !== "server") rows.push(["Source", found.source === "file" ? "a state file" : "a store"]);
  if (found.started) rows.push(["Started", format.date(found.started)]);
  if (!found.allow_edits) rows.push(["", "reads only"]);
  return rows;
}
