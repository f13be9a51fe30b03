// A request's timeline (GET /v1/requests/{id}/timeline) as rows on one time axis. Work that overlaps is drawn as such.

const ROWS = [
  // [name of the span, or from which event to which; label; kind]
  ["tokenize", "Tokenize", "work"],
  ["route", "Route", "wait"],
  ["queue", "Prefill queue", "wait"],
  ["prefill", "Prefill", "work"],
  ["reserve", "KV reservation", "move"],
  ["transfer", "KV transfer", "move"],
  ["decode_queue", "Decode queue", "wait"],
  [["decode_started", "second_token"], "First decode", "work"],
  ["decode", "Decode", "work"],
  [["finished", "sent"], "Send", "wait"],
];
const STEPS = { prefill: "prefill_steps", decode: "decode_steps" };

const LABELS = { retry: "Retry", recompute: "Computed again" };
const LOST = new Set(Object.keys(LABELS));
const WORK = new Set(["tokenize", "prefill", "decode", "detokenize", "parse"]);
const MOVE = new Set([
  "kv_wait",
  "first_token_delivery",
  "token_delivery",
  "to_prefill",
  "to_decode",
  "send",
  "first_token_send",
]);

/** `work`, `move`, `wait` or `lost`. */
export function kindOfStage(name) {
  if (LOST.has(name)) return "lost";
  if (WORK.has(name)) return "work";
  return MOVE.has(name) ? "move" : "wait";
}

/**
 * The rows of the waterfall, in milliseconds since the request was received.
 *
 * @returns `{label, kind, start, duration, parts}`; parts are the steps inside, `{start, duration}`
 */
export function rowsOf(timeline) {
  const events = new Map(timeline.events.map((event) => [event.name, event.at_ms]));
  const spans = new Map(timeline.spans.map((span) => [span.name, span]));
  const rows = [];
  for (const [source, label, kind] of ROWS) {
    const found = Array.isArray(source) ? between(events, ...source) : spans.get(source);
    if (!found) continue;
    const steps = timeline[STEPS[source]]?.kept ?? [];
    rows.push({
      label,
      kind,
      start: found.start_ms,
      duration: Math.max(0, found.duration_ms),
      parts: steps.map((step) => ({ start: step.start_ms, duration: step.duration_ms })),
    });
  }
  for (const attempt of timeline.failed_attempts ?? []) {
    const duration = Math.max(0, (attempt.resumed_ms ?? attempt.at_ms) - attempt.at_ms);
    rows.push({ label: `Lost: ${attempt.error}`, kind: "lost", start: attempt.at_ms, duration, parts: [] });
  }
  for (const stage of timeline.stages.filter((one) => LOST.has(one.name))) {
    rows.push({ label: LABELS[stage.name], kind: "lost", start: stage.start_ms, duration: stage.duration_ms, parts: [] });
  }
  return rows;
}

function between(events, from, to) {
  if (!events.has(from) || !events.has(to)) return undefined;
  if (events.get(to) < events.get(from)) return undefined; // from is of a later attempt
  return { start_ms: events.get(from), duration_ms: events.get(to) - events.get(from) };
}

/** The stages that the request waited for one after the other, longest first, with their shares of the total. */
export function stagesOf(timeline) {
  const total = Math.max(timeline.total_ms, 1e-6);
  return timeline.stages
    .map((stage) => ({
      name: stage.name,
      kind: kindOfStage(stage.name),
      duration: stage.duration_ms,
      share: stage.duration_ms / total,
    }))
    .sort((one, other) => other.duration - one.duration);
}

/** When the first token was there, in milliseconds; `null` before. */
export function firstTokenOf(timeline) {
  return timeline.events.find((event) => event.name === "first_token")?.at_ms ?? null;
}

/** The end of the time axis in milliseconds: all rows end before. */
export function endOf(timeline, rows) {
  return Math.max(timeline.total_ms, ...rows.map((row) => row.start + row.duration), 1e-6);
}

/** The routes that were considered, with a remark for each. */
export function routesOf(timeline) {
  return (timeline.routing?.candidates ?? []).map((route) => ({
    name:
      route.prefill === null || route.prefill === undefined
        ? `${route.decode} alone`
        : `${route.prefill} → ${route.decode}`,
    ttft: route.ttft_ms,
    tpot: route.tpot_ms,
    score: route.score ?? 0,
    chosen: Boolean(route.chosen),
    remark: [
      route.chosen ? "chosen" : null,
      route.lost_on ? `lost on ${String(route.lost_on).replaceAll("_", " ")}` : null,
      route.cached_tokens ? `${route.cached_tokens} tokens cached` : null,
    ]
      .filter(Boolean)
      .join(", "),
  }));
}
