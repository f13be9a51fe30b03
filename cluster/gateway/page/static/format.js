// Numbers as people read them.

const NOTHING = "–";

/** Three digits: `0.42 ms`, `42 ms`, `1.25 s`, `3 min 20 s`. */
export function duration(ms) {
  if (ms === null || ms === undefined) return NOTHING;
  const seconds = Math.round(ms / 1000);
  if (seconds >= 120) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  return ms >= 999.5 ? `${digits(ms / 1000)} s` : `${digits(ms)} ms`;
}

/** Three significant digits without an exponent; whole numbers from 100 on. */
export function digits(value) {
  if (value === null || value === undefined) return NOTHING;
  const size = Math.abs(value);
  if (size >= 99.95 || value === 0) return String(Math.round(value));
  return String(Number(value.toFixed(size >= 9.995 ? 1 : size >= 0.0995 ? 2 : 3)));
}

export function percent(share) {
  return share === null || share === undefined ? NOTHING : `${digits(share * 100)} %`;
}

/** `prefill_queue` as `prefill queue`. */
export const words = (name) => String(name).replaceAll("_", " ");

/** A long id in the middle of which something is left out. */
export const shortId = (id) => (id.length > 22 ? `${id.slice(0, 12)}…${id.slice(-6)}` : id);

/** `8 s`, `3 min`, `2 h 5 min`, `1 d 4 h`. */
export function age(seconds) {
  if (seconds === null || seconds === undefined) return NOTHING;
  const whole = Math.floor(seconds);
  for (const [name, size, smaller, smallerSize] of [
    ["d", 86_400, "h", 3600],
    ["h", 3600, "min", 60],
  ]) {
    if (whole >= size)
      return `${Math.floor(whole / size)} ${name} ${Math.floor((whole % size) / smallerSize)} ${smaller}`;
  }
  return whole >= 60 ? `${Math.floor(whole / 60)} min` : `${whole} s`;
}
