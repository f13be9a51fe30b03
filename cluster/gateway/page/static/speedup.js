// The formula of speculative decoding with chains (Leviathan et al., arXiv 2211.17192).

export const MAX_DRAFT = 16;

/** Expected tokens of a round with `k` draft tokens, each accepted with the probability `alpha` in [0, 1]. */
export function expectedTokens(alpha, k) {
  return alpha === 1 ? k + 1 : (1 - alpha ** (k + 1)) / (1 - alpha);
}

/** Speed relative to decoding without drafts; `cost` is the time of a draft token over that of a step. */
export function speedup(alpha, cost, k) {
  return expectedTokens(alpha, k) / (1 + cost * k);
}

/** The values for k = 1 … 16. */
export function curve(alpha, cost) {
  return Array.from({ length: MAX_DRAFT }, (_, index) => {
    const k = index + 1;
    return { k, tokens: expectedTokens(alpha, k), speedup: speedup(alpha, cost, k) };
  });
}

/** The point with the highest speedup, of equal ones the shortest draft. */
export function peakOf(points) {
  return points.reduce((best, point) => (point.speedup > best.speedup ? point : best));
}

/** The first point from the peak on that is slower than no drafts; `null` if there is none up to k = 16. */
export function cliffOf(points) {
  const peak = peakOf(points);
  const start = peak.speedup > 1 ? peak.k : 1;
  return points.find((point) => point.k >= start && point.speedup < 1) ?? null;
}

/** Rules of thumb by acceptance, as in `baton advise`: the shortest and longest draft that usually pay. */
export const RULES = [
  { from: 0.85, lengths: [5, 7], range: "0.85 and more", advice: "5 to 7" },
  { from: 0.8, lengths: [4, 6], range: "0.80 to 0.85", advice: "4 to 6" },
  { from: 0.6, lengths: [3, 5], range: "0.60 to 0.80", advice: "3 to 5" },
  { from: 0.5, lengths: [1, 3], range: "0.50 to 0.60", advice: "1 to 3 if they are cheap" },
  { from: 0, lengths: null, range: "below 0.50", advice: "none: do not speculate" },
];

/** The rule for an acceptance in [0, 1]. */
export const ruleFor = (alpha) => RULES.find((rule) => alpha >= rule.from);
