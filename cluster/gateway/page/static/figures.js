// Sums over a snapshot of the cluster, and rates between two of them.

/** What the whole cluster does: `{inFlight, queued, goodput, attainment, kvUsed, kvCached, kvTotal, ready, target}`. */
export function totalsOf(status) {
  const workers = Object.values(status.pools).flatMap((pool) => pool.workers);
  const sum = (items, of) => items.reduce((total, item) => total + (of(item) ?? 0), 0);
  const minutes = Object.values(status.slo).map((slo) => slo.windows["1m"]);
  const judged = sum(minutes, (window) => window.requests);
  return {
    inFlight: status.requests.in_flight,
    queued: sum(Object.values(status.admission ?? {}), (entry) => entry.queued),
    goodput: sum(minutes, (window) => window.goodput_per_s),
    attainment: judged ? sum(minutes, (window) => (window.attainment ?? 0) * window.requests) / judged : null,
    kvUsed: sum(workers, (worker) => worker.kv_blocks_used),
    kvCached: sum(workers, (worker) => worker.kv_blocks_cached),
    kvTotal: sum(workers, (worker) => worker.kv_blocks_total),
    ready: workers.filter((worker) => worker.state === "ready").length,
    target: sum(Object.values(status.pools), (pool) => pool.target),
  };
}

/** The rates of growing counts by name. It forgets names that are no longer read. */
export class Rates {
  #last = new Map();

  /**
   * @param counts pairs of a name and its present count
   * @param seconds a clock
   * @returns a Map of increases per second; without names that are new or whose count fell
   */
  read(counts, seconds) {
    const rates = new Map();
    const now = new Map();
    for (const [name, count] of counts) {
      if (count === undefined || count === null) continue;
      now.set(name, [count, seconds]);
      const [before, then] = this.#last.get(name) ?? [Infinity, 0];
      if (count >= before && seconds > then) rates.set(name, (count - before) / (seconds - then));
    }
    this.#last = now;
    return rates;
  }
}

/** The last values of a figure, at most `size`. */
export class History {
  #values = [];

  constructor(size) {
    this.size = size;
  }

  add(value) {
    this.#values.push(value);
    if (this.#values.length > this.size) this.#values.shift();
    return this.#values;
  }
}
