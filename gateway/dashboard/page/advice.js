/* What could be better: hits that are lost, and prompts that do not share their beginnings. For the operator. */

import { h, meter, table } from "./dom.js";
import { UNKNOWN, count, dollars, exact, rate, seconds, share } from "./format.js";

export function ladder({ ladder: { lost, fields, unexplained, uncacheable_repeats: repeats } }) {
  const lines = lost.filter((l) => l.requests);
  const most = Math.max(1, ...lines.map((l) => l.requests));
  const named = fields.map((f) => `${f.field} (${count(f.requests)})`).join(", ");
  return h("div", {}, lines.length === 0 ? h("p", { className: "none" }, "Nothing: every question asked again was a hit.") : h("ul", { className: "bars" },
    lines.map((l) => h("li", {}, h("span", { title: l.means }, l.to === "fields" && named ? `fields: ${named}` : l.to), h("span", {}, exact(l.requests)), meter(l.requests / most)))),
  repeats ? h("p", { className: "sub" }, `About ${count(repeats)} sampled requests came again word for word; they take no part in the cache.`) : null,
  unexplained ? h("p", { className: "sub" }, `${count(unexplained)} misses are of workers that have ended.`) : null);
}

export function ladderNote({ ladder: { asked, hit_rate: rate, ideal_rate: ideal } }) {
  return asked ? `hits are ${share(rate)} of ${count(asked)}; an ideal cache would reach ${share(ideal)}` : "nothing was asked yet";
}

/* What each engine could have computed, what it did, and what caches spared it. */
export function effective({ effective: lines }) {
  const spent = (line, name) => (line.engine_seconds?.[name] == null ? UNKNOWN : seconds(line.engine_seconds[name]));
  return table("Installed and effective compute of each upstream", [
    { label: "Upstream", className: "name", cell: (l) => l.upstream },
    { label: "Computes per second", cell: (l) => (l.per_second === null ? UNKNOWN : `${count(l.per_second)} tokens`), title: (l) => l.per_second_source },
    { label: "Could have computed", cell: (l) => count(l.tokens.could_have_computed) },
    { label: "Computed", cell: (l) => count(l.tokens.computed) },
    { label: "In time", cell: (l) => count(l.tokens.in_time) },
    { label: "Used", cell: (l) => (l.engine_seconds ? h("span", {}, share(l.seconds ? l.engine_seconds.used / l.seconds : null), meter(l.engine_seconds.used / l.seconds)) : UNKNOWN) },
    { label: "Saved by answers", cell: (l) => spent(l, "by_answers") },
    { label: "Saved by prefixes", cell: (l) => spent(l, "by_prefixes") },
    { label: "Does the work of", cell: (l) => (l.engine_seconds?.times == null ? UNKNOWN : `${l.engine_seconds.times.toFixed(1)} engines`) },
    { label: "Draws", cell: (l) => (l.watts === null ? UNKNOWN : `${count(l.watts)} W`), title: (l) => l.power },
    { label: "Served per joule", cell: (l) => rate(l.served_per_joule) },
    { label: "Costs", cell: (l) => dollars(l.usd) },
    { label: "Served per $", cell: (l) => count(l.served_per_usd) },
  ], lines);
}

export function effectiveNote({ effective: lines }) {
  return lines.some((l) => l.per_second_source === "best minute") ? "measured against the best minute of the last day, where no prefill_per_second is configured" : "";
}

/* Where held-out answers were compared with those kept. */
export function agreement({ agreement: lines }) {
  if (lines.length === 0) return h("span");
  const look = { armed: "good", doubted: "warn", disarmed: "bad" };
  return table("Agreement of held-out answers with those kept, lately", [
    { label: "Model", className: "name", cell: (l) => l.model },
    { label: "Tenant, namespace", text: true, className: "name", cell: (l) => [l.tenant, l.namespace].filter(Boolean).join(" / ") },
    { label: "Compared", cell: (l) => exact(l.judged) },
    { label: "Agreed", cell: (l) => (l.agreement ? `${share(l.agreement.value)} (${share(l.agreement.low)} to ${share(l.agreement.high)})` : "–") },
    { label: "Kept answers", text: true, cell: (l) => h("span", { className: `badge ${look[l.state]}` }, l.state) },
  ], lines);
}

export function placeName(line) { return `${line.model} of ${[line.tenant, line.namespace].filter(Boolean).join(" / ")}`; }

export function prefixes({ prefixes: { findings } }) {
  return table("What keeps prompts from sharing their beginnings", [
    { label: "Fault", text: true, cell: (f) => f.kind },
    { label: "Where", text: true, className: "mono", cell: (f) => `${f.path} : ${f.offset}` },
    { label: "Model", text: true, className: "name", cell: (f) => f.model },
    { label: "Tenant", text: true, className: "name wideonly", cell: (f) => f.tenant },
    { label: "Seen", cell: (f) => exact(f.seen) },
    { label: "Tokens lost a day", cell: (f) => count(f.lost_per_day) },
    { label: "What would mend it", text: true, className: "why", cell: (f) => f.mend, title: (f) => f.mend },
  ], findings);
}

export function prefixesNote({ prefixes: { requests, looked_at: looked } }) {
  return `${count(looked)} of ${count(requests)} prompts were looked at`;
}
