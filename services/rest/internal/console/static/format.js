// Numbers, times and names of the contract as text.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const one = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** Seconds of a Duration in the contract's JSON, such as "1.5s"; 0 where there is none. */
export const seconds = (duration) => (duration ? Number.parseFloat(duration) : 0);

/** Milliseconds since the epoch of a Timestamp. */
export const millis = (timestamp) => (timestamp ? Date.parse(timestamp) : 0);

export const count = (value) => whole.format(value ?? 0);

export function short(value) {
  const number = value ?? 0;
  return Math.abs(number) < 10000 ? whole.format(number) : compact.format(number);
}

export function rate(value) {
  const number = value ?? 0;
  if (number !== 0 && Math.abs(number) < 0.95) return number.toFixed(2);
  return Math.abs(number) < 100 ? one.format(number) : short(number);
}

export function percent(share) {
  if (share === undefined || share === null) return "–";
  const value = share * 100;
  return `${value > 0 && value < 9.95 ? value.toFixed(1) : Math.round(value)} %`;
}

export function time(value) {
  if (value === undefined || value === null) return "–";
  if (value === 0) return "0 s";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1e3)} ms`;
  if (value < 10) return `${value.toFixed(2)} s`;
  return value < 120 ? `${value.toFixed(1)} s` : `${Math.round(value / 60)} min`;
}

export function bytes(value) {
  let number = value ?? 0;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (number < 1024) return `${number < 10 && unit !== "B" ? number.toFixed(1) : Math.round(number)} ${unit}`;
    number /= 1024;
  }
  return `${number.toFixed(1)} TiB`;
}

/** Time of day. */
export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

const ROLES = {
  MEMBER_ROLE_GATEWAY: "gateway",
  MEMBER_ROLE_PREFILL: "prefill",
  MEMBER_ROLE_DECODE: "decode",
  MEMBER_ROLE_BOTH: "both",
  MEMBER_ROLE_KVSTORE: "kvstore",
};

export const role = (member) => ROLES[member.role] ?? "unknown";

/** An id that fits a table: its beginning and its end. */
export function brief(id, size = 14) {
  return id.length <= size ? id : `${id.slice(0, size - 5)}…${id.slice(-4)}`;
}
