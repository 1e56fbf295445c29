/**
 * What is known of one page: its owner, the branches that hold it, its tokens.
 */

import { el, fill, icon } from "../lib/dom.js";
import { format } from "../lib/format.js";
import { named, textNodes, visible } from "../lib/text.js";
import { branchName } from "./branch_picker.js";
import { isHole } from "./page_model.js";

const WAIT = 110;
const KEPT = 256;
const OWNER_WORDS = {
  free: "Nobody owns it",
  evictable: "Given up when pages are needed",
  held: "Needed by requests or KV caches",
  pinned: "Pinned, or written into",
};

export class PageDetails {
  /**
   * @param {HTMLElement} host
   * @param {any} app
   * @param {(branch: string) => void} onBranch a branch was chosen
   */
  constructor(host, app, onBranch) {
    this.host = host;
    this.app = app;
    this.onBranch = onBranch;
    /** @type {Map<string, any>} documents by reading, pool and page */
    this.known = new Map();
    this.timer = 0;
    this.wanted = "";
    /** Milliseconds from a request to its answer, the last one. */
    this.milliseconds = 0;
    this.hint();
  }

  /** Say what to do, while there is no page. */
  hint() {
    clearTimeout(this.timer);
    this.wanted = "";
    fill(
      this.host,
      el("h2", {}, "A page"),
      el("p.hint", {}, "Point at a page, or move to it with the arrow keys. Click or Enter keeps it here."),
    );
  }

  /** Drop the wish for a page that was not fetched yet. */
  cancel() {
    clearTimeout(this.timer);
  }

  /**
   * Show a page soon: what is known at once, its tokens when they have come.
   * @param {any} overviewPool the pool in the overview
   * @param {import("./page_model.js").Pool} pool
   * @param {number} page
   * @param {Map<string, any>} branches
   * @param {(document: any) => void} [then] called with the document
   */
  show(overviewPool, pool, page, branches, then = () => {}) {
    clearTimeout(this.timer);
    const key = `${pool.reading}/${pool.pool}/${page}`;
    this.wanted = key;
    const known = this.known.get(key);
    if (known) {
      this.draw(overviewPool, known, branches);
      then(known);
      return;
    }
    if (pool.owner[page] === 0 && !isHole(pool, page)) {
      const nothing = { pool: pool.pool, page, references: 0, owner: "free", eviction: -1, holders: [], others: 0, tokens: [] };
      this.draw(overviewPool, nothing, branches);
      then(nothing);
      return;
    }
    this.timer = setTimeout(() => this.fetch(key, overviewPool, pool, page, branches, then), WAIT);
  }

  async fetch(key, overviewPool, pool, page, branches, then) {
    const begin = performance.now();
    this.host.setAttribute("aria-busy", "true");
    try {
      const document = await this.app.get(`/v1/state/pages/${pool.pool}/${page}`);
      this.milliseconds = performance.now() - begin;
      this.known.set(key, document);
      if (this.known.size > KEPT) this.known.delete(this.known.keys().next().value);
      if (this.wanted !== key) return;
      this.draw(overviewPool, document, branches);
      then(document);
    } catch (error) {
      if (this.app.isAbort(error) || this.wanted !== key) return;
      fill(this.host, el("h2", {}, `Page ${page}`), el("p.refusal", { role: "alert" }, visible(error.message, 400)));
    } finally {
      this.host.removeAttribute("aria-busy");
    }
  }

  draw(overviewPool, document, branches) {
    const states = overviewPool?.kind === "states";
    const shown = document.holders.length + document.others;
    const eviction = document.eviction < 0 ? "not for room" : document.eviction === 0 ? "next" : `${ordinal(document.eviction + 1)}`;
    fill(
      this.host,
      el(
        "div.page-head",
        {},
        el("h2", {}, states ? `State slot ${format.number(document.page)}` : `Page ${format.number(document.page)}`),
        el("span.owner-chip", { dataset: { owner: document.owner } }, document.owner),
      ),
      el("p.hint", {}, OWNER_WORDS[document.owner] ?? ""),
      el(
        "dl.facts",
        {},
        el("dt", {}, "Owners"),
        el("dd", {}, format.number(document.references)),
        el("dt", {}, "Given up"),
        el("dd", {}, eviction),
      ),
      shown === 0 ? null : el("h3", {}, "Held by"),
      this.holders(document, branches),
      document.others > 0
        ? el("p.hint", {}, `${format.count(document.others, "more holder")}, of other keys or of no branch that is shown`)
        : null,
      document.tokens.length === 0 ? null : el("h3", {}, states ? "The tokens before it" : "Tokens"),
      document.tokens.length === 0 ? null : tokensOf(document.tokens),
    );
  }

  holders(document, branches) {
    const rows = document.holders.slice(0, 40).map((holder) => {
      const branch = branches.get(holder.branch);
      const kind = holder.branch.split(":")[0];
      const where = holder.role ? `${holder.role} at ${format.number(holder.stop)}` : `${format.number(holder.start)} to ${format.number(holder.stop)}`;
      return el(
        "li",
        {},
        el(
          "button.holder",
          { type: "button", onclick: () => this.onBranch(holder.branch), title: `Show ${visible(holder.branch, 100)}` },
          icon(kind, { class: `kind-${kind}` }),
          named(branch ? branchName(branch) : holder.branch),
          el("span.holder-where", {}, where),
        ),
      );
    });
    const rest = document.holders.length - rows.length;
    return [el("ul.holders", {}, rows), rest > 0 ? el("p.hint", {}, `and ${format.number(rest)} more`) : null];
  }
}

/** Write a place: 1st, 2nd, 3rd, 4th. */
export function ordinal(number) {
  const teen = number % 100 >= 11 && number % 100 <= 13;
  const ending = teen ? "th" : (["th", "st", "nd", "rd"][number % 10] ?? "th");
  return `${format.number(number)}${ending}`;
}

/** Show tokens next to each other, each set apart. */
function tokensOf(tokens) {
  const marks = tokens.map(({ position, id, text }) =>
    el("span.page-token", { title: `position ${position}, token ${id}` }, text === null ? `⟨${id}⟩` : textNodes(text, { lines: true })),
  );
  return el("div.page-tokens", {}, marks);
}
