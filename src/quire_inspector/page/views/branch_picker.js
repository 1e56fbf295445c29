/**
 * The branches of `/v1/state/history`, and a control that chooses one of them.
 */

import { el, fill } from "../lib/dom.js";
import { format } from "../lib/format.js";
import { visible } from "../lib/text.js";

const KIND_NAMES = {
  session: "Sessions",
  request: "Requests",
  cached: "Cached prefixes",
  cache: "Rows of KV caches",
  commit: "Commits",
  other: "Others",
};

/**
 * Return what a branch is called, in one line.
 * @param {{id: string, kind: string, name: string | null, num_tokens: number}} branch
 */
export function branchName(branch) {
  const name = branch.name === null || branch.name === "" ? branch.id : branch.name;
  return visible(name, 60);
}

/**
 * Return whether an event of `/v1/state/events` says that a document has changed. An event without
 * names says nothing, so all of them may have.
 * @param {any} data
 * @param {string} name
 */
export function names(data, name) {
  return !Array.isArray(data?.documents) || data.documents.includes(name);
}

export class BranchPicker {
  /**
   * @param {object} options
   * @param {string} options.label
   * @param {string | null} options.none what the choice of no branch is called; null: there is none
   * @param {(branch: any) => boolean} [options.wanted] branches that can be chosen
   * @param {(id: string | null) => void} options.onPick
   */
  constructor(options) {
    this.options = options;
    /** @type {Map<string, any>} branches by id */
    this.branches = new Map();
    this.select = el("select.select.branch-select", { "aria-label": options.label });
    this.select.addEventListener("change", () => options.onPick(this.select.value || null));
    this.signature = "";
  }

  /**
   * Offer these branches; `id` is the chosen one.
   * @param {any[]} branches
   * @param {string | null} id
   */
  show(branches, id) {
    this.branches = new Map(branches.map((branch) => [branch.id, branch]));
    const { wanted = () => true, none } = this.options;
    const offered = branches.filter(wanted);
    const signature = offered.map((branch) => `${branch.id}\t${branch.name}\t${branch.num_tokens}`).join("\n") + id;
    if (signature === this.signature) return;
    this.signature = signature;
    const groups = Object.entries(KIND_NAMES).map(([kind, label]) => {
      const members = offered.filter((branch) => (branch.kind in KIND_NAMES ? branch.kind : "other") === kind);
      const choices = members.map((branch) => {
        const words = `${branchName(branch)} · ${format.count(branch.num_tokens, "token")}${branch.pinned ? " · pinned" : ""}`;
        return el("option", { value: branch.id, selected: branch.id === id }, words);
      });
      return choices.length ? el("optgroup", { label: `${label} (${choices.length})` }, choices) : null;
    });
    const gone = id !== null && !this.branches.has(id);
    fill(
      this.select,
      none === null ? null : el("option", { value: "", selected: id === null }, none),
      gone ? el("option", { value: id, selected: true, disabled: true }, `${visible(id, 60)} (gone)`) : null,
      groups,
    );
    if (none === null && offered.length === 0) fill(this.select, el("option", { value: "" }, "no branches yet"));
  }
}
