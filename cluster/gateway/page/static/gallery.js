// The gallery of speculation methods. What it says of them comes from GET /v1/speculation, what it shows from the model.

import { getJson } from "./api.js";
import { byId, el, setText, syncChildren } from "./dom.js";
import { duration } from "./format.js";
import { record } from "./recording.js";
import { bestRoundOf, counted, totalsOf } from "./rounds.js";
import { RoundsView } from "./rounds_view.js";

export function createGallery() {
  const gallery = new Gallery();
  byId("record-all").addEventListener("click", () => gallery.recordAll());
  return gallery;
}

class Gallery {
  #cards = new Map(); // by method; they keep their recordings until the page is closed
  #last = Promise.resolve(); // the newest recording: one is made after the other, so that none disturbs another

  /** Shows the methods, and which of them can run now. */
  async show() {
    const problem = byId("gallery-error");
    try {
      const { data } = await getJson("v1/speculation");
      problem.hidden = true;
      syncChildren(
        byId("methods"),
        data,
        (method) => method.method,
        (method) => this.#add(method),
        (_, method) => this.#cards.get(method.method).update(method),
      );
    } catch (error) {
      setText(problem, error.message);
      problem.hidden = false;
    }
  }

  async recordAll() {
    const button = byId("record-all");
    if (isBusy(button)) return;
    setBusy(button, true);
    await Promise.all([...this.#cards.values()].map((card) => card.record()));
    setBusy(button, false);
  }

  #add(method) {
    const card = new Card(method, (work) => {
      this.#last = this.#last.then(work);
      return this.#last;
    });
    this.#cards.set(method.method, card);
    return card.node;
  }
}

class Card {
  #method;
  #inTurn;
  #record = el("button", { type: "button" }, "Record");
  #replay = el("button", { type: "button", class: "quiet", hidden: true }, "Play the best round");
  #state = el("p", { class: "hint", role: "status" });
  #missing = el("p", { class: "missing" });
  #shown = el("div");
  #rounds = null;

  /** `inTurn` runs a function after those that it was given before. */
  constructor(method, inTurn) {
    this.#inTurn = inTurn;
    const title = el("h2", { id: `method-${method.method}` }, method.title, " ", el("code", {}, method.method));
    this.node = el(
      "section",
      { class: "panel method", "aria-labelledby": title.id },
      title,
      el("p", {}, method.idea),
      facts(method),
      el("p", { class: "hint" }, `Question: “${method.prompt}”`),
      this.#missing,
      el("div", { class: "row" }, this.#record, this.#replay),
      this.#state,
      this.#shown,
    );
    this.#record.setAttribute("aria-label", `Record ${method.method}`);
    this.#record.addEventListener("click", () => this.record());
    this.#replay.addEventListener("click", () => this.#showBest());
  }

  /** Says which setting is missing, if one is. */
  update(method) {
    this.#method = method;
    this.#record.hidden = !method.available;
    this.#missing.hidden = method.available;
    this.#missing.replaceChildren(
      ...(method.available ? [] : ["It needs a draft that is not loaded: ", el("code", {}, method.setting)]),
    );
  }

  async record() {
    if (isBusy(this.#record) || !this.#method.available) return;
    setBusy(this.#record, true);
    this.#state.className = "hint";
    setText(this.#state, "Waiting for another recording …");
    await this.#inTurn(() => this.#recordNow());
    setBusy(this.#record, false);
  }

  async #recordNow() {
    setText(this.#state, "Recording …");
    try {
      const found = await record(this.#method.method, this.#method.prompt);
      this.#rounds = new RoundsView(found.trace);
      this.#shown.replaceChildren(this.#rounds.node);
      this.#replay.hidden = false;
      this.#state.className = "gain";
      this.#state.replaceChildren(...resultOf(found));
      this.#showBest();
    } catch (error) {
      this.#state.className = "problem";
      setText(this.#state, error.message);
    }
  }

  #showBest() {
    this.#rounds.show(bestRoundOf(this.#rounds.trace));
    this.#rounds.replay();
  }
}

const isBusy = (button) => button.getAttribute("aria-disabled") === "true";

/** Unlike a disabled button, a busy one keeps the focus. */
function setBusy(button, busy) {
  button.setAttribute("aria-disabled", String(busy));
}

function facts(method) {
  const paper = el("a", { href: method.paper.url, rel: "noreferrer" }, method.paper.title);
  const parts = [
    ["Setup", method.setup],
    ["Drafts", method.length],
    ["Good for", method.use],
    ["Paper", el("span", {}, paper, `, ${method.year}`)],
  ];
  return el(
    "dl",
    { class: "method-facts" },
    ...parts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );
}

/** What a recording shows: the gain here, and the drafts behind it. */
function resultOf(found) {
  const totals = totalsOf(found.trace);
  const isMeasured = found.plainMs && found.draftedMs;
  const gain = isMeasured ? `${(found.plainMs / found.draftedMs).toFixed(2)} × ` : "No time to compare. ";
  const length = totals.shortest === totals.longest ? totals.longest : `${totals.shortest} to ${totals.longest}`;
  return [
    el("strong", {}, gain),
    isMeasured
      ? `${duration(found.draftedMs)} a token, without drafts ${duration(found.plainMs)}. A single measurement of ` +
        `${found.numTokens} tokens each, one answer after the other. `
      : "",
    totals.drafted ? `It drafted ${counted(length, "token")} at a time. ` : "It drafted nothing in this answer. ",
    found.isSame ? "Both answers have the same tokens." : "The answers differ.",
  ];
}
