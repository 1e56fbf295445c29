// The inspector's page: its shell, which shows one view at a time.
//
// A view is a module `views/NAME.js` with
//   export const title = "Pages";
//   export const help = [["Enter", "Show a page"]];  // keys of the view, for the list behind "?"; may be missing
//   export function mount(root, app) {          // root: an empty element; may be async
//     return { update(change) {}, unmount() {} };
//   }
// `update(change)` is called, with `change.kind`:
//   "events"       `change.data`: an event of /v1/state/events; fetch again what it names
//   "params"       `app.params` changed within the view (a link, "back", or app.go)
//   "overview"     `app.overview` was read again
//   "theme"        colours changed: draw canvases again
//   "reconnected"  the server is there again, or another key is used: fetch everything again
//   "restart"      another process answers (`overview.started`): ids of before are void
// A view that throws while it mounts is replaced by its error; the others go on.
//
// `app`, made anew for each mount:
//   get(path, params, {signal})     JSON of GET; `params` may hold arrays; null ones are left out
//   post(path, body, {signal}), del(path, {signal})
//   client                          the calls below without the view: they go on when it is left
//   stream(path, body, {signal})    async generator of {event, data} of POST's server-sent events
//                                   All carry the key, and end when the view is left. They throw an
//                                   Error with the server's sentence as `message` and `status`
//                                   (0: not reached), `code`, `param`; or an AbortError: isAbort(e)
//   fail(error)                     shows an error to the reader, but aborts; use as `.catch(app.fail)`
//   signal                          aborts when the view is left
//   overview                        the latest document of /v1/state, null before the first
//   connection                      "connecting", "live", "polling", "lost" or "key"
//   on(name, fn)                    listens until the view is left: "connection", "overview",
//                                   "change", "restart", "reconnected", "theme"; returns an off()
//   params                          strings by name, kept in location.hash
//   go(view, params, {replace})     goes to a view; `replace`: "back" skips where the reader was
//   set(params, {replace})          changes some parameters of this view (null removes); replaces
//                                   unless told not to
//   announce(text)                  says it to screen readers
//   notify(text, kind)              shows a message for a while, and says it; kind: "info", "error"
//   ask(title, fields, options), confirmed(title, text, action), openDialog(title, body)
//   el(tag, props, ...children)     makes elements; texts are never parsed; fill(node, ...children)
//   icon(name)                      an icon; kinds of branches have one each
//   named(text), textNodes(text), visible(text)
//                                   users' texts with hidden characters made visible: as an element,
//                                   as nodes, as a string for attributes. Use them for every text or
//                                   name that somebody else wrote
//   decode.u1/u2/i4/f4(base64)      typed arrays
//   format.number/short/count/bytes/seconds/share/clock/date
//   color.kind/owner/series/heat/mix/get
//   keys(node, {key: fn})           single keys within an element ("ArrowDown", "Shift+F", "/")
//   reducedMotion                   whether the reader wants no motion
// d3 and uPlot are globals of the views that need them. Styles that several views share are in style.css; a view brings its own
// with `app.css("views/NAME.css")`. Inline styles in markup are forbidden: `el`'s `style` is an object.

import { ApiProblem, Client, isAbort, keyStore } from "./lib/api.js";
import { color, forgetColors } from "./lib/color.js";
import { decode } from "./lib/decode.js";
import { ask, confirmed, openDialog } from "./lib/dialogs.js";
import { el, fill, icon } from "./lib/dom.js";
import { format } from "./lib/format.js";
import { Frame } from "./lib/frame.js";
import { askForKey } from "./lib/key_dialog.js";
import { keys } from "./lib/keys.js";
import { Live } from "./lib/live.js";
import { readHash, writeHash } from "./lib/router.js";
import { named, textNodes, visible } from "./lib/text.js";
import { script, sheet } from "./lib/vendor.js";

/**
 * `live`: only of a running server, and not of a state file or a store. `needs`: libraries, which are
 * loaded before the view.
 */
const VIEWS = [
  { name: "chat", title: "Chat", hint: "Conversations with branches", live: true },
  { name: "history", title: "History", hint: "Sessions, requests, cached prefixes and commits as one tree", needs: ["d3.min.js"] },
  { name: "pages", title: "Pages", hint: "The pools of pages, and who holds them" },
  { name: "time", title: "Time", hint: "Requests and steps over time", live: true, needs: ["uPlot.iife.min.js", "uPlot.min.css"] },
  { name: "token", title: "Token", hint: "One token: probabilities, attention, norms", needs: ["uPlot.iife.min.js", "uPlot.min.css"] },
  { name: "playground", title: "Playground", hint: "Branches side by side", live: true },
];

const listeners = new Map();
const mountPoint = document.getElementById("mount");
const heading = document.getElementById("view-title");
const announcer = document.getElementById("live");
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** The view that is shown: {name, scope, stop, handle}. */
let shown = null;
let tries = 0;

function on(name, fn) {
  if (!listeners.has(name)) listeners.set(name, new Set());
  listeners.get(name).add(fn);
  return () => listeners.get(name).delete(fn);
}

function emit(name, value) {
  for (const fn of [...(listeners.get(name) ?? [])]) {
    try {
      fn(value);
    } catch (error) {
      console.error(error);
    }
  }
}

const client = new Client((problem) => live.heard(problem));
const live = new Live(client, emit);

function announce(text) {
  announcer.textContent = "";
  // A live region speaks when its text changes.
  setTimeout(() => (announcer.textContent = visible(text, 400)), 30);
}

function notify(text, kind = "info") {
  const toast = el(
    "div.toast",
    { class: kind },
    el("span", {}, visible(text, 600)),
    el("button.icon-button", { type: "button", "aria-label": "Dismiss", onclick: () => toast.remove() }, icon("close")),
  );
  const region = document.getElementById("toasts");
  region.append(toast);
  while (region.children.length > 4) region.firstChild.remove();
  if (kind !== "error") setTimeout(() => toast.remove(), 6000);
  announce(text);
}

function fail(error) {
  if (isAbort(error)) return;
  // The banner tells of a missing server or key already.
  if (error instanceof ApiProblem && (error.status === 401 || error.code === "unreachable")) return;
  if (!(error instanceof ApiProblem)) console.error(error);
  notify(error?.message ?? String(error), "error");
}

function go(view, params = {}, { replace = false } = {}) {
  const hash = writeHash(view, params);
  if (hash === location.hash) return;
  if (replace) {
    history.replaceState(null, "", hash);
    route();
  } else {
    location.hash = hash;
  }
}

const styles = new Set();

/** Load a view's style sheet once, before the view is drawn. */
function css(path) {
  if (styles.has(path) || document.head.querySelector(`link[href$="${path}"]`)) return Promise.resolve();
  styles.add(path);
  return new Promise((resolve) => {
    document.head.append(el("link", { rel: "stylesheet", href: new URL(path, import.meta.url).href, onload: resolve, onerror: resolve }));
  });
}

/** Make the `app` of one mount. */
function scopeOf(name, params) {
  const stop = new AbortController();
  const offs = [];
  const with_ = (options) => ({
    ...options,
    signal: options?.signal ? AbortSignal.any([stop.signal, options.signal]) : stop.signal,
  });
  const scope = {
    signal: stop.signal,
    params,
    get overview() {
      return live.overview;
    },
    get connection() {
      return live.state;
    },
    get reducedMotion() {
      return calm.matches;
    },
    get: (path, query, options) => client.json("GET", path, { ...with_(options), params: query }),
    client,
    post: (path, body = {}, options) => client.json("POST", path, { ...with_(options), body }),
    del: (path, options) => client.json("DELETE", path, with_(options)),
    stream: (path, body, options) => client.events("POST", path, { ...with_(options), body }),
    on(event, fn) {
      const off = on(event, fn);
      offs.push(off);
      return off;
    },
    go,
    set(changes, { replace = true } = {}) {
      go(name, { ...scope.params, ...changes }, { replace });
    },
    ...{ announce, notify, fail, isAbort, ask, confirmed, openDialog, css },
    ...{ el, fill, icon, named, textNodes, visible, decode, format, color, keys },
  };
  return { scope, leave: () => (stop.abort(), offs.forEach((off) => off())) };
}

/** Return the view that an address without one means. */
function firstView() {
  if (live.isStill) return "history";
  return live.overview.model?.chat_template ? "chat" : "playground";
}

/** Show what the hash names. */
async function route() {
  const { view, params } = readHash(location.hash);
  const spec = VIEWS.find((one) => one.name === view);
  // The overview says whether a server runs, and whether its model can chat.
  if (live.overview === null && (!spec || spec.live)) return leave(), fill(mountPoint, el("p.loading", { role: "status" }, "Loading…"));
  if (!spec || (spec.live && live.isStill)) return go(firstView(), {}, { replace: true });
  if (shown?.name === view && !shown.failed) {
    shown.scope.params = params;
    update({ kind: "params" });
    return;
  }
  const focused = shown !== null;
  leave();
  const { scope, leave: end } = scopeOf(view, params);
  const here = (shown = { name: view, scope, end, handle: null, failed: false });
  frame.select(view);
  frame.viewHelp = null;
  document.title = `${spec.title} · Quire inspector`;
  heading.textContent = spec.title;
  fill(mountPoint, el("p.loading", { role: "status" }, `Loading ${spec.title}…`));
  try {
    const [module] = await Promise.all([load(view), ...(spec.needs ?? []).map((path) => (path.endsWith(".css") ? sheet : script)(path))]);
    if (shown !== here) return;
    frame.viewHelp = module.help?.length ? [module.title ?? spec.title, module.help] : null;
    const root = el("div.view", { class: `view-${view}` });
    fill(mountPoint, root);
    const handle = (await module.mount(root, scope)) ?? {};
    if (shown !== here) return void handle.unmount?.();
    here.handle = handle;
    if (focused) announce(`${spec.title}`);
  } catch (error) {
    if (shown !== here || isAbort(error)) return;
    here.failed = true;
    console.error(error);
    fill(mountPoint, notShown(spec, error));
  }
}

/** Import a view. Browsers remember a module that could not be had by its address, so a new try has another one. */
function load(view) {
  return import(`./views/${view}.js${tries ? `?try=${tries}` : ""}`);
}

function notShown(spec, error) {
  const again = () => {
    tries += 1;
    route();
  };
  return el(
    "div.empty",
    { role: "alert" },
    el("h2", {}, `${spec.title} cannot be shown`),
    el("p", {}, visible(error?.message ?? error, 400)),
    el("button.button", { type: "button", onclick: again }, "Try again"),
  );
}

function leave() {
  if (!shown) return;
  try {
    shown.handle?.unmount?.();
  } catch (error) {
    console.error(error);
  }
  shown.end();
  shown = null;
}

/** Tell the view; what fails in it must not stop the shell. */
function update(change) {
  if (shown?.failed && change.kind === "reconnected") {
    tries += 1;
    route();
    return;
  }
  if (!shown?.handle?.update) return;
  try {
    Promise.resolve(shown.handle.update(change)).catch(fail);
  } catch (error) {
    fail(error);
  }
}

const frame = new Frame({
  views: VIEWS,
  live,
  go,
  on,
  changeKey: () => askForKey(client, live),
  themeChanged() {
    forgetColors();
    emit("theme", null);
  },
});

on("change", (data) => update({ kind: "events", data }));
on("overview", () => {
  if (shown === null || (live.isStill && VIEWS.some((one) => one.live && one.name === shown.name))) route();
  update({ kind: "overview" });
});
on("theme", () => update({ kind: "theme" }));
on("reconnected", () => {
  announce("Connected to the server again");
  update({ kind: "reconnected" });
});
on("restart", () => {
  notify("The server was started anew; what it held before is gone unless it was kept");
  update({ kind: "restart" });
});
on("connection", (state) => {
  if (state === "key") askForKey(client, live);
  if (state === "lost") announce("The connection to the server is lost");
});

/** Take a key out of the address: `#key=KEY`, as `quire inspect --open` prints it. */
function takeKey() {
  const found = /^#key=([^&?]*)/.exec(location.hash);
  if (!found) return false;
  keyStore.set(decodeURIComponent(found[1]));
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

addEventListener("hashchange", () => {
  if (takeKey()) live.retry();
  route();
});
takeKey();
frame.draw();
route();
live.run();
