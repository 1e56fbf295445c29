/**
 * The table that says the same as the grid, a part at a time, for those who do not look at pictures.
 */

import { el, fill } from "../lib/dom.js";
import { format } from "../lib/format.js";
import { named } from "../lib/text.js";
import { branchName } from "./branch_picker.js";
import { OWNERS, SOMEBODY_ELSE } from "./page_model.js";

const PART = 50;

export class PageTable {
  /**
   * @param {HTMLElement} host
   * @param {(page: number) => void} onPick
   */
  constructor(host, onPick) {
    this.onPick = onPick;
    this.first = 0;
    this.pool = null;
    this.filter = el("select.select", { "aria-label": "Pages in the table" }, [
      el("option", { value: "used" }, "pages in use"),
      el("option", { value: "all" }, "all pages"),
      OWNERS.map((owner, code) => el("option", { value: String(code) }, `${owner} pages`)),
    ]);
    this.filter.addEventListener("change", () => this.turn(-Infinity));
    this.where = el("span.token-where");
    this.before = el("button.button.small", { type: "button", onclick: () => this.turn(-PART) }, "Earlier");
    this.after = el("button.button.small", { type: "button", onclick: () => this.turn(PART) }, "Later");
    this.rows = el("tbody");
    const head = ["Page", "Owner", "Owners", "First holder", "Position", "Given up"];
    const table = el(
      "table.table.page-table",
      {},
      el("caption.sr-only", {}, "Pages of the pool"),
      el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))),
      this.rows,
    );
    this.details = el(
      "details.page-table-box",
      { ontoggle: () => this.draw() },
      el("summary", {}, "The grid as a table"),
      el("div.table-tools", {}, this.filter, el("span.spacer"), this.before, this.where, this.after),
      el("div.table-scroll", { tabIndex: 0, role: "group", "aria-label": "Table of pages" }, table),
    );
    host.append(this.details);
  }

  /**
   * @param {import("./page_model.js").Pool} pool
   * @param {Map<string, any>} branches
   */
  show(pool, branches) {
    this.pool = pool;
    this.branches = branches;
    if (this.details.open) this.draw();
  }

  /** Return the pages that the filter lets through. */
  pages() {
    const { owner, count } = this.pool;
    const wanted = this.filter.value;
    const found = [];
    for (let page = 0; page < count; page += 1) {
      if (wanted === "all" || (wanted === "used" ? owner[page] !== 0 : owner[page] === Number(wanted))) found.push(page);
    }
    return found;
  }

  turn(by) {
    this.first = Math.max(0, this.first + by);
    this.draw();
  }

  draw() {
    if (this.pool === null || !this.details.open) return;
    const pages = this.pages();
    this.first = Math.min(this.first, Math.max(0, Math.floor((pages.length - 1) / PART) * PART));
    const part = pages.slice(this.first, this.first + PART);
    this.where.textContent = pages.length === 0 ? "none" : `${format.number(this.first + 1)} to ${format.number(this.first + part.length)} of ${format.number(pages.length)}`;
    this.before.disabled = this.first === 0;
    this.after.disabled = this.first + PART >= pages.length;
    fill(this.rows, part.map((page) => this.row(page)));
  }

  row(page) {
    const { owner, references, holder, position, eviction, branches } = this.pool;
    const id = branches[holder[page]];
    const branch = this.branches.get(id);
    const holderName = holder[page] === SOMEBODY_ELSE ? "not shown" : id === undefined ? "–" : named(branch ? branchName(branch) : id);
    const number = el("button.link", { type: "button", onclick: () => this.onPick(page), "aria-label": `Page ${page}, show it` }, String(page));
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, number),
      el("td", {}, OWNERS[owner[page]]),
      el("td", {}, format.number(references[page])),
      el("td", {}, holderName),
      el("td", {}, position[page] < 0 ? "–" : format.number(position[page])),
      el("td", {}, eviction[page] < 0 ? "–" : format.number(eviction[page] + 1)),
    );
  }
}
