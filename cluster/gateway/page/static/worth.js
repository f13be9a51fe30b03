// "Is disaggregation worth it here?": the router's verdict and the figures behind it.

import { byId, makeRow, setText, syncChildren } from "./dom.js";
import { digits, duration, percent } from "./format.js";

const VERDICTS = {
  worth_it: "Worth it",
  not_at_this_load: "Not at this load",
  no_difference: "No difference",
  harmful: "No, it costs more than it brings",
  neither: "Neither way meets the targets",
  unknown: "Not known yet",
};

/** A figure with its unit. */
export function shownFigure({ value, unit }) {
  if (value === null) return unit === "ms" ? "cannot keep up" : "–";
  if (unit === "ms") return duration(value);
  return unit === "share" ? percent(value) : `${digits(value)} ${unit}`;
}

export function showWorth({ disaggregation }) {
  const { verdict, text, figures } = disaggregation;
  setText(byId("worth-verdict"), VERDICTS[verdict] ?? verdict);
  byId("worth-verdict").dataset.verdict = verdict;
  setText(byId("worth-text"), text);
  syncChildren(
    byId("worth-figures").tBodies[0],
    figures,
    (figure) => figure.name,
    () => makeRow(2),
    (row, figure) => {
      [figure.name, shownFigure(figure), figure.source].forEach((shown, index) => setText(row.cells[index], shown));
    },
  );
  byId("worth-shown").hidden = false;
}

/** Says why there is no answer; `null` takes it back. */
export function showWorthProblem(error) {
  setText(byId("worth-problem"), error?.message ?? "");
}
