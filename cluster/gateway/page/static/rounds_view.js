// Steps through the rounds of an answer: what was drafted, what the model said of it, and how long that took.

import { track } from "./chart.js";
import { el, setText } from "./dom.js";
import { digits, duration } from "./format.js";
import { columnsOf, contextOf, counted, headlineOf, isChain, totalsOf, treeOf, visible } from "./rounds.js";

const STEP_MS = 140; // between two tokens of a round that is played; style: --step in rounds.css
const REST_MS = 1600; // in which a played round is read

/** The nodes that show the traces in an answer of GET /v1/requests/{id}/timeline; none without a trace. */
export function roundsNodes(answer) {
  const sequences = (answer.sequences ?? [answer]).filter((one) => one.speculation?.rounds.length);
  return sequences.flatMap((one) => [
    ...(sequences.length > 1 ? [el("h3", {}, one.request_id)] : []),
    new RoundsView(one.speculation).node,
  ]);
}

/** Counts and times of a whole trace, in sentences. */
export function summaryOf(trace) {
  const totals = totalsOf(trace);
  const sentences = [
    `${counted(totals.rounds, "round")} made ${counted(totals.tokens, "token")}, ` +
      `${digits(totals.tokens / totals.rounds)} in each. `,
    totals.drafted
      ? `${totals.accepted} of ${counted(totals.drafted, "drafted token")} were accepted${pastTheEnd(totals)}. ` +
        `Drafting took ${duration(totals.draftMs)}, verification ${duration(totals.verifyMs)}. `
      : "Nothing was drafted. ",
    trace.left_out ? `${counted(trace.left_out, "later round")} were not kept.` : "",
  ];
  return sentences.join("").trim();
}

const pastTheEnd = ({ accepted, used }) => (accepted > used ? `, ${accepted - used} of them past the answer's end` : "");

/** A player of a trace. Arrow keys step while the focus is in it. */
export class RoundsView {
  trace;
  #index;
  #timer = null;
  #headline = el("p", { class: "headline", role: "status" });
  #context = el("p", { class: "context" });
  #round = el("div", { class: "round" });
  #previous = button("Previous", "Previous round", () => this.step(-1));
  #play = button("Play", "", () => (this.#timer === null ? this.play() : this.pause()));
  #next = button("Next", "Next round", () => this.step(1));
  #slider;

  /** Starts with the round at `index`. */
  constructor(trace, index = 0) {
    this.trace = trace;
    this.#slider = el("input", { type: "range", min: 1, max: trace.rounds.length, step: 1, "aria-label": "Round" });
    this.#slider.addEventListener("input", () => this.show(this.#slider.valueAsNumber - 1));
    this.node = el(
      "div",
      { class: "rounds", role: "group", "aria-label": "Rounds" },
      el("p", { class: "hint" }, summaryOf(trace)),
      el("div", { class: "row steps" }, this.#previous, this.#play, this.#next, this.#slider),
      this.#headline,
      this.#round,
      this.#context,
    );
    this.node.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || event.target === this.#slider || event.target.closest(".scroll")) return;
      event.preventDefault();
      this.step(by);
    });
    this.#draw(index);
  }

  /** Shows the round at an index, and stops playing. */
  show(index) {
    this.pause();
    this.#draw(index);
  }

  step(by) {
    this.show(Math.min(Math.max(this.#index + by, 0), this.trace.rounds.length - 1));
  }

  /** Plays from the present round on, or from the first one at the end. */
  play() {
    setText(this.#play, "Pause");
    this.node.classList.add("played");
    const isLast = this.#index === this.trace.rounds.length - 1;
    this.#playRound(isLast ? 0 : this.#index);
  }

  /** Plays the present round alone. */
  replay() {
    this.pause();
    this.node.classList.add("played");
    this.#draw(this.#index);
  }

  pause() {
    clearTimeout(this.#timer);
    this.#timer = null;
    setText(this.#play, "Play");
    this.node.classList.remove("played");
  }

  #playRound(index) {
    this.#draw(index);
    const numTokens = this.#round.querySelectorAll("[data-verdict]").length;
    const still = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.#timer = setTimeout(
      () => {
        const isSeen = this.node.checkVisibility();
        if (isSeen && this.#index + 1 < this.trace.rounds.length) this.#playRound(this.#index + 1);
        else this.pause();
      },
      REST_MS + (still ? 0 : 2 * numTokens * STEP_MS),
    );
  }

  #draw(index) {
    this.#index = index;
    const round = this.trace.rounds[index];
    const { before, made, after } = contextOf(this.trace, index);
    this.#slider.value = index + 1;
    this.#slider.setAttribute("aria-valuetext", `Round ${index + 1} of ${this.trace.rounds.length}`);
    setAbled(this.#previous, index > 0);
    setAbled(this.#next, index + 1 < this.trace.rounds.length);
    setText(this.#headline, `Round ${index + 1} of ${this.trace.rounds.length}: ${headlineOf(round)}`);
    this.#context.replaceChildren(before, el("mark", {}, made), el("span", { class: "later" }, after));
    this.#round.replaceChildren(...roundNodes(round));
  }
}

/** The nodes that show one round: its draft with verdicts, and its times. */
export function roundNodes(round) {
  const tokens = isChain(round.draft) ? chain(round) : tree(round);
  const items = [...tokens.querySelectorAll("[data-verdict]")];
  tokens.style.setProperty("--tokens", items.length);
  items.forEach((item, index) => item.style.setProperty("--place", index));
  const label = isChain(round.draft) ? "Drafted tokens, and the model's below them" : "Tree of drafted tokens";
  return [el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": label }, tokens), times(round)];
}

function chain(round) {
  return el(
    "ol",
    { class: "draft chain" },
    ...columnsOf(round).map(({ node, drafted, made, verdict }) =>
      item(verdict, node, box(drafted, "drafted"), box(made, "made"), el("span", { class: "verdict" }, verdict)),
    ),
  );
}

function tree(round) {
  const draw = (branches) =>
    branches.map(({ node, token, verdict, children }) =>
      item(
        verdict,
        node,
        el(
          "span",
          { class: "pair" },
          box(token, node === null ? "made" : "drafted"),
          el("span", { class: "verdict" }, verdict),
        ),
        children.length ? el("ol", {}, ...draw(children)) : null,
      ),
    );
  return el("ol", { class: "draft tree" }, ...draw(treeOf(round)));
}

function item(verdict, node, ...children) {
  const of = node === null ? {} : { "data-node": node };
  return el("li", { class: verdict, "data-verdict": verdict, ...of }, ...children);
}

function box(token, kind) {
  if (token === null) return el("span", { class: `token ${kind} none` }, "–");
  return el("span", { class: `token ${kind}`, "data-token": token.id, title: `token ${token.id}` }, visible(token));
}

function times(round) {
  const whole = round.draft_ms + round.verify_ms;
  const share = whole ? round.draft_ms / whole : 0;
  const parts = [
    ["move", "drafting", round.draft_ms],
    ["work", "verification", round.verify_ms],
  ];
  const bars = [
    { start: 0, length: share, class: "fill move" },
    { start: share, length: whole ? 1 - share : 0, class: "fill work" },
  ];
  return el(
    "div",
    { class: "times" },
    track(bars.filter((bar) => bar.length)),
    el(
      "ul",
      { class: "legend" },
      ...parts.map(([kind, name, ms]) =>
        el("li", {}, el("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), `${name} ${duration(ms)}`),
      ),
      el("li", { class: "hint" }, `${counted(round.batch_sequences, "sequence")} in the step`),
    ),
  );
}

function button(text, label, act) {
  const made = el("button", { type: "button" }, text);
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
}

/** Unlike a disabled button, one that cannot be used now keeps the focus. */
function setAbled(node, isAble) {
  node.setAttribute("aria-disabled", String(!isAble));
}
