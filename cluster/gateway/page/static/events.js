// Server-sent events from the body of a fetch, which unlike EventSource can send an API key.

import { ApiError } from "./api.js";

/** Splits text that arrives in any pieces into the data of its events. */
export class EventSplitter {
  #rest = "";

  feed(text) {
    const parts = (this.#rest + text).split(/\r?\n\r?\n/);
    this.#rest = parts.pop();
    return parts.map(dataOf).filter((data) => data !== null);
  }
}

function dataOf(event) {
  const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.length ? lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n") : null;
}

/** Yields the data of each event of a response. Throws an `ApiError` if the connection breaks. */
export async function* eventsOf(response) {
  const splitter = new EventSplitter();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(broken);
      if (done) return;
      yield* splitter.feed(value);
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

function broken(error) {
  if (error.name === "AbortError") throw error;
  throw new ApiError("The connection to the router broke. Try again.", 0);
}
