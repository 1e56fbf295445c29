// The conversation of this page, which lives on while another view is shown: its answers go on, too.

import { isAbort } from "../../lib/api.js";
import { Library } from "./library.js";
import { Runs } from "./runs.js";

let core = null;

/** Return the one core. `app` is that of the present mount. */
export function coreOf(app) {
  core ??= make(app.client);
  core.app = app;
  return core;
}

function make(client) {
  const made = {
    app: null,
    /** The mounted view: {changed(id), ended(id), listed(), lost(reason), drawn()}; null while there is none. */
    view: null,
  };
  const net = {
    isAbort,
    get overview() {
      return made.app?.overview ?? null;
    },
    get: (path, params) => client.json("GET", path, { params }),
    put: (path, body) => client.json("PUT", path, { body }),
    post: (path, body = {}, options) => client.json("POST", path, { ...options, body }),
    del: (path) => client.json("DELETE", path),
    stream: (path, body, options) => client.events("POST", path, { ...options, body }),
  };
  made.library = new Library(net, {
    changed: () => made.view?.drawn(),
    listed: () => made.view?.listed(),
    lost: (reason) => made.view?.lost(reason),
  });
  made.runs = new Runs(net, made.library, {
    changed: (id) => made.view?.changed(id),
    ended: (id) => made.view?.ended(id),
  });
  return made;
}
