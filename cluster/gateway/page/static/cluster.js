// The cluster: live figures of pools, classes, the autoscaler and slow requests.

import { sparkline } from "./chart.js";
import { byId, el, makeRow, setText, syncChildren } from "./dom.js";
import { History, Rates, totalsOf } from "./figures.js";
import { age, digits, duration, percent, shortId, words } from "./format.js";
import { LiveSnapshots } from "./live.js";
import { poolCard, updatePoolCard } from "./pools.js";

const KEPT = 60; // snapshots in the small charts

/** Returns an object with `start` and `stop`, for when the view is shown and hidden. */
export function createCluster() {
  const view = new ClusterView();
  return new LiveSnapshots((snapshot) => view.show(snapshot), showState);
}

function showState(state, problem) {
  const texts = { connecting: "Connecting …", live: "Live", lost: "Not live", paused: "Paused" };
  const node = byId("live-state");
  setText(node, texts[state]);
  node.dataset.state = state;
  setText(byId("live-error"), problem);
  byId("live-error").hidden = !problem;
}

class ClusterView {
  #steps = new Rates();
  #histories = new Map();

  show({ status, plan, slow_requests: slow }) {
    this.#showTiles(status);
    syncChildren(
      byId("classes").tBodies[0],
      Object.entries(status.slo),
      ([name]) => name,
      () => makeRow(10),
      updateClass,
    );
    const workers = Object.values(status.pools).flatMap((pool) => pool.workers);
    const rates = this.#steps.read(
      workers.map((worker) => [worker.id, worker.steps]),
      performance.now() / 1000,
    );
    syncChildren(
      byId("pools"),
      Object.entries(status.pools),
      ([name]) => name,
      ([name]) => poolCard(name),
      (card, [name, pool]) => updatePoolCard(card, name, pool, rates),
    );
    showPlan(plan);
    syncChildren(byId("slow").tBodies[0], slow, (request) => request.request_id, makeSlow, updateSlow);
    byId("slow-empty").hidden = slow.length > 0;
    byId("slow").hidden = slow.length === 0;
  }

  #showTiles(status) {
    const totals = totalsOf(status);
    const kv = totals.kvTotal ? totals.kvUsed / totals.kvTotal : null;
    const whose = status.routers ? `, of router ${status.router} alone` : "";
    const inTime = `${percent(totals.attainment)} of requests in time${whose}`;
    const tiles = [
      ["Goodput", `${digits(totals.goodput)}/s`, inTime, totals.goodput],
      ["In flight", String(totals.inFlight), `${totals.queued} wait for room`, totals.inFlight],
      ["KV in use", percent(kv), `${totals.kvUsed} of ${totals.kvTotal} blocks`, kv ?? 0],
      ["Workers", `${totals.ready} of ${totals.target}`, `up for ${age(status.uptime_s)}`, null],
    ];
    syncChildren(
      byId("tiles"),
      tiles,
      ([name]) => name,
      makeTile,
      (tile, [name, value, more, figure]) => {
        setText(tile.querySelector(".value"), value);
        setText(tile.querySelector(".hint"), more);
        if (figure !== null)
          tile.querySelector(".spark").replaceChildren(sparkline(this.#history(name).add(figure), KEPT));
      },
    );
  }

  #history(name) {
    if (!this.#histories.has(name)) this.#histories.set(name, new History(KEPT));
    return this.#histories.get(name);
  }
}

function makeTile([name]) {
  return el(
    "div",
    { class: "tile" },
    el("dt", {}, name),
    el("dd", {}, el("span", { class: "value" }), el("span", { class: "hint" }), el("span", { class: "spark" })),
  );
}

function updateClass(row, [name, slo]) {
  const minute = slo.windows["1m"];
  const goal = slo.percentile / 100;
  const shares = ["1m", "5m", "1h"].map((window) => slo.windows[window].attainment);
  const { ttft_ms: ttft, tpot_ms: tpot } = slo.latency;
  const cells = [
    name,
    `${digits(minute.goodput_per_s)}/s`,
    ...shares.map(percent),
    duration(ttft.p50),
    duration(tpot.p50),
    `${duration(ttft.p95)} / ${duration(slo.ttft_target_ms)}`,
    duration(ttft.p99),
    `${duration(tpot.p95)} / ${duration(slo.tpot_target_ms)}`,
    duration(tpot.p99),
  ];
  cells.forEach((text, index) => setText(row.cells[index], text));
  shares.forEach((share, index) => setVerdict(row.cells[index + 2], share === null ? null : share >= goal));
  setVerdict(row.cells[7], ttft.p95 === null ? null : ttft.p95 <= slo.ttft_target_ms);
  setVerdict(row.cells[9], tpot.p95 === null ? null : tpot.p95 <= slo.tpot_target_ms);
}

function setVerdict(cell, isGood) {
  cell.className = isGood === null ? "" : isGood ? "good" : "bad";
}

function showPlan(plan) {
  const target = byId("plan");
  if (!target.firstChild) target.append(el("ul", { class: "decisions" }), el("ul", { class: "why" }));
  const [decisions, reasons] = target.children;
  syncChildren(
    decisions,
    Object.entries(plan.pools ?? {}),
    ([name]) => name,
    () => el("li", {}),
    (item, [name, pool]) => {
      const change = pool.direction === "hold" ? `stays at ${pool.before}` : `${pool.before} → ${pool.target}`;
      setText(item, `${name}: ${change} (${percent(pool.utilisation)} used)`);
      item.className = pool.direction;
    },
  );
  const texts = Object.values(plan.pools ?? {}).flatMap((pool) => pool.texts);
  if (plan.enabled === false) texts.push("The autoscaler is off (autoscaler.enabled), so this is not carried out.");
  if (plan.move_obstacle) texts.push(`No worker can change its pool: ${plan.move_obstacle}`);
  syncChildren(
    reasons,
    [...new Set(texts)].map((text, index) => [index, text]),
    ([index]) => index,
    () => el("li", {}),
    (item, [, text]) => setText(item, text),
  );
}

function makeSlow(request) {
  const row = makeRow(4);
  row.cells[0].append(
    el(
      "a",
      { href: `#request/${encodeURIComponent(request.request_id)}`, title: request.request_id },
      shortId(request.request_id),
    ),
  );
  return row;
}

function updateSlow(row, request) {
  const texts = [
    duration(request.total_ms),
    duration(request.time_to_first_token_ms),
    `${request.prompt_tokens ?? "?"} / ${request.output_tokens ?? "?"}`,
    words(request.outcome ?? "running"),
  ];
  texts.forEach((text, index) => setText(row.cells[index + 1], text));
}
