/** The tiers below the pools: what each holds, and how full it is. */

import { el, fill } from "../lib/dom.js";
import { format } from "../lib/format.js";
import { named } from "../lib/text.js";

/**
 * Draw the tiers of `/v1/state/tiers`.
 * @param {HTMLElement} host
 * @param {any[]} tiers the nearest first
 */
export function showTiers(host, tiers) {
  const cards = tiers.map((tier) => {
    const known = tier.capacity !== null && tier.capacity > 0 && tier.bytes !== null;
    const share = known ? Math.min(1, tier.bytes / tier.capacity) : 0;
    const pinned = known && tier.pinned ? Math.min(share, tier.pinned / tier.capacity) : 0;
    const room = known
      ? `${format.bytes(tier.bytes)} of ${format.bytes(tier.capacity)}`
      : tier.bytes === null
        ? "size not told"
        : `${format.bytes(tier.bytes)}, no limit known`;
    return el(
      "li.tier",
      {},
      el(
        "div.tier-head",
        {},
        el("b", {}, tier.kind),
        tier.label === null || tier.label === tier.kind ? null : named(tier.label),
        el("span.tag", {}, tier.durable ? "lasts" : "until restart"),
        tier.resting > 0 ? el("span.tag.warn", {}, `failed, asked again in ${format.seconds(tier.resting)}`) : null,
      ),
      el(
        "div.tier-bar",
        { role: "img", "aria-label": known ? `${format.share(share)} full` : "fullness not known" },
        el("span.tier-used", { style: { width: `${100 * (share - pinned)}%` } }),
        el("span.tier-pinned", { style: { width: `${100 * pinned}%` } }),
      ),
      el(
        "p.hint",
        {},
        `${tier.objects === null ? "objects not counted" : format.count(tier.objects, "object")} · ${room}` +
          (tier.pinned ? ` · ${format.bytes(tier.pinned)} pinned` : ""),
      ),
    );
  });
  fill(
    host,
    el("h2", {}, "Tiers below"),
    cards.length
      ? el("ul.tiers", {}, cards)
      : el("p.hint", {}, "None: what the pools give up is gone. quire serve --store gives it a place to go."),
  );
}
