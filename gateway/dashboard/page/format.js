/* Numbers as people read them. What is not known is "unknown", never 0. */

export const UNKNOWN = "unknown";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export function count(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return Math.abs(value) < 10_000 ? whole.format(value) : short.format(value);
}

export function exact(value) {
  return value === null || value === undefined ? UNKNOWN : whole.format(value);
}

export function rate(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return value === 0 ? "0" : value < 0.1 ? value.toPrecision(1) : value < 10 ? value.toFixed(1) : count(value);
}

export function share(value, digits = 1) {
  return value === null || value === undefined ? "–" : `${(value * 100).toFixed(value === 1 || value === 0 ? 0 : digits)} %`;
}

/* What providers had cached of the prompts of which they said so. */
export function cachedShare(line) {
  const told = line.provider_cached_tokens + line.computed_prompt_tokens;
  return told ? line.provider_cached_tokens / told : null;
}

export function dollars(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value < 0) return `−${dollars(-value)}`;
  if (value === 0) return "$0";
  if (value >= 1) return value >= 10_000 ? `$${short.format(value)}` : `$${value.toFixed(value >= 1000 ? 0 : 2)}`;
  const digits = Math.min(9, 2 - Math.floor(Math.log10(value)));
  return `$${value.toFixed(digits).replace(/\.?0+$/, "")}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0) return `−${seconds(-value)}`;
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return value < 7200 ? `${(value / 60).toFixed(1)} min` : `${(value / 3600).toFixed(1)} h`;
}

export function bytes(value) {
  if (value === null || value === undefined) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (value >= 1024 && power < units.length - 1) { value /= 1024; power += 1; }
  return `${value.toFixed(power === 0 || value >= 100 ? 0 : 1)} ${units[power]}`;
}

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const clockWithSeconds = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

export function moment(at, withSeconds = false) {
  const date = new Date(at * 1000);
  const time = (withSeconds ? clockWithSeconds : clock).format(date);
  return date.toDateString() === new Date().toDateString() ? time : `${day.format(date)} ${time}`;
}

export function dayOf(at) { return day.format(new Date(at * 1000)); }
