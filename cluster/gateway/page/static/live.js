// The stream of snapshots (GET /admin/live), open while its view is visible.

import { call } from "./api.js";
import { eventsOf } from "./events.js";
import { WhileVisible } from "./while_visible.js";

const RETRY_MS = 3000;

export class LiveSnapshots extends WhileVisible {
  #onSnapshot;
  #onState;
  #running = null;

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
      this.#onState("paused", "");
    }
  }

  async #run(signal) {
    this.#onState("connecting", "");
    while (!signal.aborted) {
      try {
        const response = await call("admin/live", { signal });
        for await (const data of eventsOf(response)) this.#take(JSON.parse(data));
        this.#onState("lost", "The router has ended the stream. Trying again …");
      } catch (error) {
        if (signal.aborted) return;
        this.#onState("lost", error.message);
        if (error.status === 401 || error.status === 403) return; // until there is another key
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  #take(snapshot) {
    if (snapshot.error) {
      this.#onState("lost", snapshot.error.message);
      return;
    }
    this.#onState("live", "");
    this.#onSnapshot(snapshot);
  }
}
