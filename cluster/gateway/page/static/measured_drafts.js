// The playground's second half: what this cluster measured of its drafts. The router computes all of it.

import { barChart } from "./chart.js";
import { byId, el, setText } from "./dom.js";
import { digits, percent, words } from "./format.js";

/** Names a draft method of a worker, as in `decode-1: eagle3 (shadow)`. */
export const nameOf = (entry) =>
  `${entry.worker}: ${entry.method}${entry.mode === "shadow" ? " (shadow)" : ""}`;

/** Entries with the most drafts first. */
export const ranked = (entries) => [...entries].sort((one, other) => other.num_drafts - one.num_drafts);

/** Shares of the drafts of 1, 2, … tokens among all that `auto` chose. */
export function sharesOf(chosen) {
  const total = chosen.reduce((sum, count) => sum + count, 0);
  return total ? chosen.map((count) => count / total) : [];
}

export class MeasuredDrafts {
  #entries = [];
  #onCurve;

  /** @param onCurve called with the shown entry, whose curves belong into the chart; `null` if there are none */
  constructor(onCurve) {
    this.#onCurve = onCurve;
    byId("drafts-of").addEventListener("change", () => this.#draw());
  }

  show(entries) {
    this.#entries = ranked(entries);
    const select = byId("drafts-of");
    const names = this.#entries.map(nameOf);
    if (names.join() !== [...select.options].map((option) => option.value).join()) {
      const kept = select.value;
      select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
      if (names.includes(kept)) select.value = kept;
    }
    byId("drafts-measured").hidden = !names.length;
    byId("drafts-none").hidden = names.length > 0;
    this.#draw();
  }

  /** Says why there are no figures; `null` takes it back. */
  showProblem(error) {
    setText(byId("drafts-problem"), error?.message ?? "");
  }

  #draw() {
    const entry = this.#entries.find((one) => nameOf(one) === byId("drafts-of").value) ?? null;
    this.#onCurve(entry?.curves ? entry : null);
    if (!entry) return;
    byId("drafts-advice").replaceChildren(
      ...[entry.advice, ...entry.warnings, ...entry.formula_errors].map((text) => el("li", {}, text)),
    );
    fill("drafts-positions", entry.acceptance.map((chance, index) => [index + 1, percent(chance), entry.judged[index]]));
    fill(
      "drafts-batches",
      entry.batches.map((one) => [one.batch, digits(one.drafting), digits(one.verifying), digits(one.cost)]),
    );
    fill(
      "drafts-kinds",
      entry.kinds.map((one) => [`${words(one.workload)}, ${one.temperature}`, percent(one.alpha), one.num_drafts]),
    );
    const shares = sharesOf(entry.chosen);
    byId("drafts-chosen").replaceChildren(...(shares.length ? [barChart(shares)] : []));
    fill("drafts-lengths", shares.map((share, index) => [index + 1, percent(share), entry.chosen[index]]));
    setText(byId("drafts-choice"), choiceOf(entry));
  }
}

function choiceOf(entry) {
  const number = entry.chosen.reduce((sum, count) => sum + count, 0);
  if (!number) return "auto has chosen none of this method's drafts.";
  return (
    `auto chose ${number} drafts of this method since the worker started, and no draft at all ` +
    `${entry.num_without_draft} times. It now drafts ${digits(entry.tokens_per_sequence)} tokens per sequence and step.`
  );
}

function fill(id, rows) {
  const table = byId(id);
  table.tBodies[0].replaceChildren(
    ...rows.map(([first, ...others]) =>
      el("tr", {}, el("th", { scope: "row" }, String(first)), ...others.map((text) => el("td", {}, String(text)))),
    ),
  );
}
