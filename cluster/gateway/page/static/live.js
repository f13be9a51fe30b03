// The stream of snapshots (GET /admin/live), open while its view is visible.

import { call } from "./api.js";
import { eventsOf } from "./events.js";
import { digits } from "./format.js";
import { WhileVisible } from "./while_visible.js";

const RETRY_MS = 3000;
const MISSED = 3; // intervals without a snapshot after which the figures are old

export class LiveSnapshots extends WhileVisible {
  #onSnapshot;
  #onState;
  #running = null;
  #silence; // timer

  /**
   * @param onSnapshot called with each snapshot
   * @param onState called with `connecting`, `live`, `lost` or `paused` and, after an error, its text
   */
  constructor(onSnapshot, onState) {
    super();
    this.#onSnapshot = onSnapshot;
    this.#onState = onState;
  }

  needed(isNeeded) {
    if (isNeeded && !this.#running) {
      this.#running = new AbortController();
      this.#run(this.#running.signal);
    } else if (!isNeeded && this.#running) {
      this.#running.abort();
      this.#running = null;
      clearTimeout(this.#silence);
      this.#onState("paused", "");
    }
  }

  async #run(signal) {
    this.#onState("connecting", "");
    while (!signal.aborted) {
      try {
        const response = await call("admin/live", { signal });
        for await (const data of eventsOf(response)) this.#take(JSON.parse(data));
        clearTimeout(this.#silence);
        this.#onState("lost", "The router has ended the stream. Trying again …");
      } catch (error) {
        if (signal.aborted) return;
        clearTimeout(this.#silence);
        this.#onState("lost", error.message);
        if (error.status === 401 || error.status === 403) return; // until there is another key
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  #take(snapshot) {
    this.#expectNext(snapshot.interval_s);
    if (snapshot.error) {
      this.#onState("lost", snapshot.error.message);
      return;
    }
    this.#onState("live", "");
    this.#onSnapshot(snapshot);
  }

  #expectNext(intervalS = 2) {
    clearTimeout(this.#silence);
    const text = `The router has sent no figures for ${digits(MISSED * intervalS)} s.`;
    this.#silence = setTimeout(() => this.#onState("lost", text), MISSED * intervalS * 1000);
  }
}
