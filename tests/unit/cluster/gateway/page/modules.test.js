// Modules of the page that need no browser. Run by test_modules.py.

import assert from "node:assert/strict";
import { test } from "node:test";

const page = process.env.PAGE_MODULES;
const load = (name) => import(`${page}/${name}.js`);
const { cliffOf, curve, expectedTokens, peakOf, ruleFor, speedup } = await load("speedup");
const { EventSplitter, eventsOf } = await load("events");
const { digits, duration, percent, shortId } = await load("format");
const { endOf, firstTokenOf, routesOf, rowsOf, stagesOf } = await load("waterfall");
const { History, Rates, totalsOf } = await load("figures");
const { ticksUpTo } = await load("chart");
const rounds = await load("rounds");
const { bestRoundOf, columnsOf, contextOf, headlineOf, isChain, treeOf, visible } = rounds;
const { msPerTokenOf } = await load("recording");
const { nameOf, ranked, sharesOf } = await load("measured_drafts");
const { shownFigure } = await load("worth");

test("the formula gives the known values", () => {
  const values = curve(0.7, 0.15)
    .slice(0, 8)
    .map((point) => point.speedup.toFixed(2));
  assert.deepEqual(values, ["1.48", "1.68", "1.75", "1.73", "1.68", "1.61", "1.53", "1.45"]);
  assert.equal(expectedTokens(0.7, 5).toFixed(2), "2.94");
  assert.equal(expectedTokens(0, 5), 1);
  assert.equal(expectedTokens(1, 5), 6);
});

test("peak and cliff are where the curve turns and where it falls below 1", () => {
  const points = curve(0.7, 0.15);
  assert.equal(peakOf(points).k, 3);
  assert.equal(cliffOf(points).k, 16);
  assert.ok(speedup(0.7, 0.15, 15) >= 1);
  assert.equal(cliffOf(curve(0.9, 0.02)), null);
  assert.equal(cliffOf(curve(0.1, 0.9)).k, 1);
});

test("the advice follows the acceptance", () => {
  const advice = (alpha) => ruleFor(alpha).advice;
  assert.equal(advice(0.85), "5 to 7");
  assert.equal(advice(0.99), "5 to 7");
  assert.equal(advice(0.6), "3 to 5");
  assert.equal(advice(0.8), "4 to 6");
  assert.equal(advice(0.49), "none: do not speculate");
  assert.equal(advice(0), "none: do not speculate");
});

test("events arrive whole however their bytes are cut", () => {
  const text = 'data: {"a":1}\n\n: waiting\n\nevent: x\ndata: one\ndata: two\r\n\r\ndata: [DONE]\n\n';
  for (const size of [1, 3, 1000]) {
    const splitter = new EventSplitter();
    const found = [];
    for (let at = 0; at < text.length; at += size) found.push(...splitter.feed(text.slice(at, at + size)));
    assert.deepEqual(found, ['{"a":1}', "one\ntwo", "[DONE]"]);
  }
});

test("a stream that breaks off says what to do", async () => {
  const body = new ReadableStream({
    start(controller) {
      controller.enqueue(new TextEncoder().encode("data: one\n\n"));
    },
    pull(controller) {
      controller.error(new TypeError("network error"));
    },
  });
  const found = [];
  const read = async () => {
    for await (const data of eventsOf({ body })) found.push(data);
  };
  await assert.rejects(read, { message: "The connection to the router broke. Try again.", status: 0 });
  assert.deepEqual(found, ["one"]);
});

test("numbers are short", () => {
  assert.deepEqual([0, 0.0123, 0.42, 1.234, 12.34, 123.4, null].map(digits), [
    "0",
    "0.012",
    "0.42",
    "1.23",
    "12.3",
    "123",
    "–",
  ]);
  assert.deepEqual([0.5, 42, 999.4, 1250, 179_900, 200_000, undefined].map(duration), [
    "0.5 ms",
    "42 ms",
    "999 ms",
    "1.25 s",
    "3 min 0 s",
    "3 min 20 s",
    "–",
  ]);
  assert.equal(percent(0.956), "95.6 %");
  assert.equal(shortId("chatcmpl-0123456789abcdef0123456789"), "chatcmpl-012…456789");
});

const TIMELINE = {
  total_ms: 100,
  events: [
    { name: "received", at_ms: 0 },
    { name: "first_token", at_ms: 40 },
    { name: "decode_started", at_ms: 45 },
    { name: "second_token", at_ms: 55 },
    { name: "finished", at_ms: 98 },
    { name: "sent", at_ms: 100 },
  ],
  spans: [
    { name: "tokenize", start_ms: 0, duration_ms: 2 },
    { name: "prefill", start_ms: 5, duration_ms: 34 },
    { name: "transfer", start_ms: 10, duration_ms: 33 },
    { name: "decode", start_ms: 40, duration_ms: 58 },
  ],
  stages: [
    { name: "prefill", start_ms: 5, duration_ms: 35, count: 1 },
    { name: "decode", start_ms: 45, duration_ms: 65, count: 3 },
  ],
  prefill_steps: {
    kept: [
      { start_ms: 5, duration_ms: 17 },
      { start_ms: 22, duration_ms: 17 },
    ],
  },
  decode_steps: { kept: [] },
  failed_attempts: [{ at_ms: 3, error: "worker_lost", resumed_ms: 5 }],
  routing: {
    candidates: [
      {
        prefill: "prefill-1",
        decode: "decode-1",
        chosen: true,
        ttft_ms: 41,
        tpot_ms: 9,
        score: 0.9,
        cached_tokens: 16,
      },
      { prefill: null, decode: "decode-1", chosen: false, lost_on: "expected_latency", score: 0.4 },
    ],
  },
};

test("rows keep their times, so that what overlaps is drawn as such", () => {
  const rows = new Map(rowsOf(TIMELINE).map((row) => [row.label, row]));
  assert.deepEqual(
    [...rows.keys()],
    ["Tokenize", "Prefill", "KV transfer", "First decode", "Decode", "Send", "Lost: worker_lost"],
  );
  const [prefill, transfer] = [rows.get("Prefill"), rows.get("KV transfer")];
  assert.ok(transfer.start < prefill.start + prefill.duration);
  assert.equal(prefill.parts.length, 2);
  assert.deepEqual([rows.get("First decode").start, rows.get("First decode").duration], [45, 10]);
  assert.equal(endOf(TIMELINE, [...rows.values()]), 100);
  assert.equal(firstTokenOf(TIMELINE), 40);
});

test("what was lost with a worker has its rows, and no row mixes attempts", () => {
  const lost = {
    ...TIMELINE,
    events: TIMELINE.events.map((event) => (event.name === "decode_started" ? { ...event, at_ms: 80 } : event)),
    stages: [...TIMELINE.stages, { name: "retry", start_ms: 60, duration_ms: 12, count: 1 }],
  };
  const rows = new Map(rowsOf(lost).map((row) => [row.label, row]));
  assert.deepEqual([rows.get("Retry").start, rows.get("Retry").duration], [60, 12]);
  assert.ok(!rows.has("First decode"));
});

test("stages add up and routes say why they lost", () => {
  const stages = stagesOf(TIMELINE);
  assert.deepEqual(
    stages.map((stage) => stage.name),
    ["decode", "prefill"],
  );
  assert.equal(
    stages.reduce((sum, stage) => sum + stage.share, 0),
    1,
  );
  const [pair, alone] = routesOf(TIMELINE);
  assert.deepEqual([pair.name, pair.remark], ["prefill-1 → decode-1", "chosen, 16 tokens cached"]);
  assert.deepEqual([alone.name, alone.remark], ["decode-1 alone", "lost on expected latency"]);
});

test("the cluster's totals are sums over pools and classes", () => {
  const window = (requests, attainment, goodput) => ({
    windows: { "1m": { requests, attainment, goodput_per_s: goodput } },
  });
  const totals = totalsOf({
    requests: { in_flight: 3 },
    admission: { standard: { queued: 2 } },
    slo: { standard: window(30, 1, 0.5), batch: window(10, 0.5, 0.1), interactive: window(0, null, 0) },
    pools: {
      prefill: {
        target: 1,
        workers: [{ state: "ready", kv_blocks_total: 10, kv_blocks_used: 4, kv_blocks_cached: 1 }],
      },
      decode: { target: 2, workers: [{ state: "starting" }] },
    },
  });
  assert.deepEqual(
    [totals.inFlight, totals.queued, totals.attainment, totals.kvUsed, totals.ready, totals.target],
    [3, 2, 0.875, 4, 1, 3],
  );
});

test("rates need two readings and survive a restart of what counts", () => {
  const rates = new Rates();
  assert.equal(rates.read([["a", 10]], 1).size, 0);
  assert.deepEqual(
    [
      ...rates.read(
        [
          ["a", 30],
          ["b", undefined],
        ],
        3,
      ),
    ],
    [["a", 10]],
  );
  assert.equal(rates.read([["a", 5]], 4).size, 0);
  const history = new History(3);
  for (const value of [1, 2, 3, 4]) history.add(value);
  assert.deepEqual(history.add(5), [3, 4, 5]);
});

test("axes have a few round ticks that cover the values", () => {
  for (const most of [0.9, 1.75, 3.3, 16, 120]) {
    const ticks = ticksUpTo(most);
    assert.ok(ticks.at(-1) >= most && ticks.length <= 6, `${most}: ${ticks}`);
  }
});

const ROUND = {
  method: "ngram",
  draft: { token_ids: [4, 6], texts: [" a", "\n"], parents: [-1, 0], accepted: [true, false] },
  output: { token_ids: [4, 2], texts: [" a", "b"], verdicts: ["accepted", "recovered"] },
  draft_ms: 1,
  verify_ms: 9,
  batch_sequences: 1,
};
const PLAIN = {
  ...ROUND,
  method: null,
  draft: { token_ids: [], texts: [], parents: [], accepted: [] },
  output: { token_ids: [9], texts: ["x"], verdicts: ["plain"] },
};

test("a chain is drawn above what the model made in its place", () => {
  const shown = (round) =>
    columnsOf(round).map(({ drafted, made, verdict }) => [drafted?.id ?? null, made?.id ?? null, verdict]);
  assert.deepEqual(shown(ROUND), [
    [4, 4, "accepted"],
    [6, 2, "recovered"],
  ]);
  assert.deepEqual(shown(PLAIN), [[null, 9, "plain"]]);
  const endsEarly = { ...ROUND, output: { token_ids: [], texts: [], verdicts: [] } };
  assert.deepEqual(shown(endsEarly), [
    [4, null, "accepted"],
    [6, null, "rejected"],
  ]);
  assert.deepEqual([visible({ id: 4, text: " a" }), visible({ id: 6, text: "\n" }), visible({ id: 8, text: "" })], [
    "␣a",
    "⏎",
    "#8",
  ]);
});

test("drafts that are accepted past the end of the answer are told apart", () => {
  const endsEarly = { ...ROUND, output: { token_ids: [], texts: [], verdicts: [] } };
  const { drafted, accepted, used } = rounds.totalsOf({ rounds: [ROUND, PLAIN, endsEarly] });
  assert.deepEqual([drafted, accepted, used], [4, 2, 1]);
});

test("the model's own token follows the last drafted one that it accepted", () => {
  const tree = { ...ROUND.draft, token_ids: [5, 7, 8], texts: ["", "", ""], parents: [-1, -1, 1] };
  const output = { token_ids: [7, 8, 9], texts: ["", "", ""], verdicts: ["accepted", "accepted", "bonus"] };
  const ids = (branches) => branches.map((one) => [one.token.id, one.verdict, ids(one.children)]);
  const accepted = { ...ROUND, draft: { ...tree, accepted: [false, true, true] }, output };
  assert.equal(isChain(accepted.draft), false);
  assert.deepEqual(ids(treeOf(accepted)), [
    [5, "rejected", []],
    [7, "accepted", [[8, "accepted", [[9, "bonus", []]]]]],
  ]);
  const corrected = { ...ROUND, draft: { ...tree, accepted: [false, false, false] }, output: ROUND.output };
  assert.equal(treeOf(corrected).at(-1).verdict, "recovered");
});

test("the totals of a trace, its best round and what is around it", () => {
  const trace = { rounds: [PLAIN, ROUND, PLAIN], left_out: 0 };
  assert.deepEqual(rounds.totalsOf(trace), {
    rounds: 3,
    tokens: 4,
    drafted: 2,
    accepted: 1,
    used: 1,
    shortest: 2,
    longest: 2,
    draftMs: 3,
    verifyMs: 27,
  });
  assert.equal(bestRoundOf(trace), 1);
  assert.deepEqual(contextOf(trace, 1), { before: "x", made: " ab", after: "x" });
  assert.equal(headlineOf(PLAIN), "no draft, 1 token");
  assert.equal(msPerTokenOf(TIMELINE, 7), 10);
  assert.equal(msPerTokenOf(TIMELINE, 1), null);
});

test("measured drafts are named and ranked, and what auto chose is shown as shares", () => {
  const entry = (method, mode, drafts) => ({ worker: "decode-1", method, mode, num_drafts: drafts });
  const shown = ranked([entry("suffix", "used", 3), entry("eagle3", "shadow", 9)]);
  assert.deepEqual(shown.map(nameOf), ["decode-1: eagle3 (shadow)", "decode-1: suffix"]);
  assert.deepEqual(sharesOf([0, 3, 1]), [0, 0.75, 0.25]);
  assert.deepEqual(sharesOf([0, 0]), []);
});

test("figures have their unit", () => {
  const shown = [
    [1234, "ms"],
    [null, "ms"],
    [0.25, "share"],
    [12.5, "requests/s"],
  ].map(([value, unit]) => shownFigure({ value, unit }));
  assert.deepEqual(shown, ["1.23 s", "cannot keep up", "25 %", "12.5 requests/s"]);
});

test("figures that stop to come are not called live", async (context) => {
  globalThis.document = { addEventListener() {}, hidden: false };
  globalThis.sessionStorage = { getItem: () => null };
  let stream;
  const body = new ReadableStream({ start: (controller) => (stream = controller) });
  globalThis.fetch = async () => new Response(body);
  const { LiveSnapshots } = await load("live");
  const states = [];
  context.mock.timers.enable({ apis: ["setTimeout"] });
  const turn = () => new Promise((resolve) => setImmediate(resolve));
  const send = async (snapshot) => {
    stream.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(snapshot)}\n\n`));
    await turn();
  };
  const live = new LiveSnapshots(() => {}, (state, text) => states.push([state, text]));
  live.start();
  await turn();
  await send({ interval_s: 2 });
  context.mock.timers.tick(5900);
  await send({ interval_s: 2 });
  context.mock.timers.tick(5900);
  assert.deepEqual(states.map(([state]) => state), ["connecting", "live", "live"]);
  context.mock.timers.tick(200);
  assert.deepEqual(states.at(-1), ["lost", "The router has sent no figures for 6 s."]);
  await send({ interval_s: 2 });
  assert.equal(states.at(-1)[0], "live");
  live.stop();
  context.mock.timers.tick(60000);
  assert.equal(states.at(-1)[0], "paused");
});
