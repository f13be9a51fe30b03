// The playground: the formula with sliders.

import { barChart } from "./chart.js";
import { byId, el, setText } from "./dom.js";
import { MeasuredDrafts } from "./measured_drafts.js";
import { RULES, cliffOf, curve, peakOf, ruleFor } from "./speedup.js";

let measured = null; // the entry of `baton advise` that is shown

/** Returns an object whose `show` takes the advice on drafts of this cluster. */
export function startPlayground() {
  const sliders = [byId("alpha"), byId("cost")];
  byId("rules").append(...RULES.map((rule) => el("tr", {}, el("td", {}, rule.range), el("td", {}, rule.advice))));
  const draw = () => show(...sliders.map((slider) => Number(slider.value)));
  for (const slider of sliders) slider.addEventListener("input", draw);
  byId("sliders").addEventListener("submit", (event) => event.preventDefault());
  draw();
  byId("drafts-use").addEventListener("click", () => {
    [sliders[0].value, sliders[1].value] = [measured.alpha, measured.cost];
    draw();
  });
  return new MeasuredDrafts((entry) => {
    measured = entry;
    byId("drafts-use").disabled = entry === null;
    byId("measured-key").hidden = entry === null;
    draw();
  });
}

function show(alpha, cost) {
  const points = curve(alpha, cost);
  const [peak, cliff, rule] = [peakOf(points), cliffOf(points), ruleFor(alpha)];
  const pays = peak.speedup > 1;
  setText(byId("alpha-value"), alpha.toFixed(2));
  setText(byId("cost-value"), cost.toFixed(2));
  const marks = [];
  if (pays) marks.push({ index: peak.k - 1, kind: "peak", text: `peak ${peak.speedup.toFixed(2)}×` });
  if (cliff) marks.push({ index: cliff.k - 1, kind: "cliff", text: "cliff: slower" });
  byId("speedup-chart").replaceChildren(
    barChart(
      points.map((point) => point.speedup),
      marks,
      1,
      measured?.curves.measured.speedups ?? [],
    ),
  );
  byId("tokens-chart").replaceChildren(barChart(points.map((point) => point.tokens)));
  byId("finding").replaceChildren(
    el("p", { class: "big" }, pays ? `Best: k = ${peak.k}, ${peak.speedup.toFixed(2)}×` : "Do not speculate"),
    el(
      "p",
      {},
      pays
        ? `A round makes ${peak.tokens.toFixed(2)} tokens there. ${cliffSentence(cliff)}`
        : "Every draft costs more than it saves.",
    ),
    el("p", { class: "hint" }, `Rule of thumb for α = ${alpha.toFixed(2)}: ${rule.advice}.`),
  );
  markRule(rule);
  fillTable(points, peak, cliff, pays);
}

const cliffSentence = (cliff) =>
  cliff ? `From k = ${cliff.k} on, drafts are slower than none.` : "Up to k = 16, drafts are never slower than none.";

function markRule(rule) {
  [...byId("rules").rows].forEach((row, index) => {
    if (RULES[index] === rule) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  });
}

function fillTable(points, peak, cliff, pays) {
  const note = (point) => (pays && point === peak ? "peak" : point === cliff ? "cliff" : "");
  const rows = points.map((point) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, String(point.k)),
      el("td", {}, point.tokens.toFixed(2)),
      el("td", {}, point.speedup.toFixed(2)),
      el("td", {}, measured?.curves.measured.speedups[point.k - 1].toFixed(2) ?? "–"),
      el("td", {}, note(point)),
    ),
  );
  byId("values").tBodies[0].replaceChildren(...rows);
}
