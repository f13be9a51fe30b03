// Draws a timeline: waterfall, explanation and routes.

import { track } from "./chart.js";
import { el } from "./dom.js";
import { digits, duration, percent, words } from "./format.js";
import { counted } from "./rounds.js";
import { endOf, firstTokenOf, routesOf, rowsOf, stagesOf } from "./waterfall.js";

/** The nodes that show an answer of GET /v1/requests/{id}/timeline. */
export function timelineNodes(answer) {
  const sequences = answer.sequences ?? [answer];
  return sequences
    .flatMap((timeline) => [
      sequences.length > 1 ? el("h3", {}, timeline.request_id) : null,
      summary(timeline),
      waterfall(timeline),
      ...explanation(timeline),
      ...stages(timeline),
      ...routes(timeline),
    ])
    .filter(Boolean);
}

function summary(timeline) {
  const facts = timeline.attributes;
  const parts = [
    ["Total", duration(timeline.total_ms)],
    ["First token", duration(timeline.time_to_first_token?.duration_ms ?? firstTokenOf(timeline))],
    ["Prompt", tokens(facts.prompt_tokens, facts.cached_tokens ? `, ${facts.cached_tokens} cached` : "")],
    ["Answer", tokens(facts.output_tokens)],
    ["Drafts accepted", drafts(timeline)],
    ["Workers", workers(timeline)],
    ["SLO class", facts.slo_class ? `${facts.slo_class}: ${words(facts.slo_result ?? "running")}` : null],
    ["End", facts.outcome ? words(facts.outcome) : "still running"],
  ];
  const shown = parts.filter(([, value]) => value !== null && value !== undefined);
  const list = el(
    "dl",
    { class: "facts" },
    ...shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );
  return facts.error_message ? el("div", {}, list, el("p", { class: "problem" }, String(facts.error_message))) : list;
}

function workers(timeline) {
  const { prefill_worker: prefill, decode_worker: decode } = timeline.attributes;
  const names = [prefill, decode].filter(Boolean).join(" → ");
  const lost = timeline.failed_attempts?.length;
  return names && lost ? `${names}, after ${counted(lost, "lost attempt")}` : names || null;
}

const tokens = (count, more = "") => (count === undefined ? null : `${count} tokens${more}`);

function drafts(timeline) {
  const drafted = timeline.attributes.drafted_tokens;
  if (!drafted) return null;
  const methods = Object.keys(timeline.drafts ?? {}).join(", ");
  return `${timeline.attributes.accepted_tokens} of ${drafted}${methods ? ` (${methods})` : ""}`;
}

function waterfall(timeline) {
  const rows = rowsOf(timeline);
  const end = endOf(timeline, rows);
  const firstToken = firstTokenOf(timeline);
  const head = el(
    "tr",
    {},
    el("th", { scope: "col" }, "Stage"),
    el("th", { scope: "col", class: "start" }, "Start"),
    el("th", { scope: "col" }, "Duration"),
    el("th", { scope: "col", class: "axis" }, axis(end)),
  );
  const body = rows.map((row) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, row.label),
      el("td", { class: "start" }, duration(row.start)),
      el("td", {}, duration(row.duration)),
      el("td", { class: "lane" }, track(barsOf(row, end), firstToken === null ? null : firstToken / end)),
    ),
  );
  return el(
    "table",
    { class: "waterfall" },
    el("caption", {}, "Waterfall. Bars above each other overlap in time; the line marks the first token."),
    el("thead", {}, head),
    el("tbody", {}, ...body),
  );
}

function axis(end) {
  const marks = [0, 0.25, 0.5, 0.75, 1].map((share) => el("span", {}, share ? duration(end * share) : "0"));
  return el("span", { class: "ticks", "aria-hidden": "true" }, ...marks);
}

function barsOf(row, end) {
  const whole = { start: row.start / end, length: row.duration / end, class: `fill ${row.kind}` };
  if (!row.parts.length) return [whole];
  const parts = row.parts.map((part) => ({
    start: part.start / end,
    length: part.duration / end,
    class: `fill ${row.kind}`,
  }));
  return [{ ...whole, class: `fill ${row.kind} faint`, thin: true }, ...parts];
}

function explanation(timeline) {
  const verdicts = [timeline.time_to_first_token, timeline.slowest_gap].filter(Boolean);
  if (!verdicts.length) return [];
  return [
    el("h3", {}, "Why it took this long"),
    el(
      "ul",
      { class: "why" },
      ...verdicts.map((verdict) =>
        el("li", {}, verdict.sentence, verdict.hint ? el("span", { class: "hint" }, ` ${verdict.hint}`) : null),
      ),
    ),
  ];
}

function stages(timeline) {
  const found = stagesOf(timeline);
  if (!found.length) return [];
  let start = 0;
  const bars = found.map((stage) => {
    const bar = { start, length: stage.share, class: `fill ${stage.kind} cut` };
    start += stage.share;
    return bar;
  });
  return [
    el("h3", {}, "What it waited for"),
    track(bars),
    el(
      "ul",
      { class: "legend" },
      ...found
        .slice(0, 8)
        .map((stage) =>
          el(
            "li",
            {},
            el("span", { class: `swatch ${stage.kind}`, "aria-hidden": "true" }),
            `${words(stage.name)} ${duration(stage.duration)}`,
            el("span", { class: "hint" }, ` ${percent(stage.share)}`),
          ),
        ),
    ),
  ];
}

function routes(timeline) {
  const found = routesOf(timeline);
  if (!found.length) return [];
  const actual = timeline.routing.actual;
  const cells = (values) => values.map((value) => el("td", {}, value));
  const rows = found.map((route) =>
    el(
      "tr",
      { class: route.chosen ? "chosen" : "" },
      el("th", { scope: "row" }, route.name),
      ...cells([duration(route.ttft), duration(route.tpot), digits(route.score), route.remark]),
    ),
  );
  if (actual) {
    rows.push(
      el(
        "tr",
        { class: "actual" },
        el("th", { scope: "row" }, "As it was"),
        ...cells([duration(actual.ttft_ms), duration(actual.tpot_ms), "", ""]),
      ),
    );
  }
  const heads = ["Route", "TTFT predicted", "TPOT predicted", "Score", ""];
  return [
    el("h3", {}, "Routes considered"),
    el(
      "div",
      { class: "scroll", tabindex: "0", role: "group", "aria-label": "Routes considered" },
      el(
        "table",
        { class: "figures" },
        el("thead", {}, el("tr", {}, ...heads.map((head) => (head ? el("th", { scope: "col" }, head) : el("td"))))),
        el("tbody", {}, ...rows),
      ),
    ),
  ];
}
