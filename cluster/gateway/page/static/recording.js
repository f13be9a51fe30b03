// Records a method: one answer of the served model without drafts, and the same one with them.

import { call, getJson } from "./api.js";
import { firstTokenOf } from "./waterfall.js";

const PATH = "v1/chat/completions";
const MAX_TOKENS = 64;

/**
 * Asks `prompt` with and without a method.
 *
 * Resolves to the method's trace, the milliseconds per token of both answers, and whether their tokens are equal.
 */
export async function record(method, prompt, signal) {
  const plain = await answer("none", prompt, signal);
  const drafted = await answer(method, prompt, signal);
  return {
    trace: drafted.trace,
    numTokens: drafted.tokens.length,
    plainMs: plain.msPerToken,
    draftedMs: drafted.msPerToken,
    isSame: String(plain.tokens) === String(drafted.tokens),
  };
}

async function answer(method, prompt, signal) {
  const messages = [{ role: "user", content: prompt }];
  const body = { messages, max_tokens: MAX_TOKENS, temperature: 0, speculation: { method, trace: true } };
  const response = await call(PATH, { body, signal });
  await response.json();
  const id = encodeURIComponent(response.headers.get("X-Request-Id"));
  const timeline = await getJson(`v1/requests/${id}/timeline`, { signal });
  const tokens = timeline.speculation.rounds.flatMap((one) => one.output.token_ids);
  return { trace: timeline.speculation, tokens, msPerToken: msPerTokenOf(timeline, tokens.length) };
}

/** Milliseconds per token behind the first one; `null` if there is none. */
export function msPerTokenOf(timeline, numTokens) {
  const firstMs = firstTokenOf(timeline);
  return firstMs === null || numTokens < 2 ? null : (timeline.total_ms - firstMs) / (numTokens - 1);
}
