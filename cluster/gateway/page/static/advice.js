// The advice of `baton advise`, for views that are visible. The router computes it once for all pages.

import { KEY_GIVEN, getJson } from "./api.js";
import { WhileVisible } from "./while_visible.js";

const EVERY_S = 60;

/** Asks once a minute while its view is visible, and when an API key was given. */
export class Advice extends WhileVisible {
  #onAdvice;
  #onProblem;
  #timer = null;
  #lastMs = -Infinity;

  /**
   * @param onAdvice called with each answer
   * @param onProblem called with the error of a question, and with `null` after an answer
   */
  constructor(onAdvice, onProblem) {
    super();
    this.#onAdvice = onAdvice;
    this.#onProblem = onProblem;
    document.addEventListener(KEY_GIVEN, () => {
      if (this.#timer !== null) this.#ask();
    });
  }

  needed(isNeeded) {
    clearInterval(this.#timer);
    this.#timer = null;
    if (!isNeeded) return;
    this.#timer = setInterval(() => this.#ask(), EVERY_S * 1000);
    if (performance.now() - this.#lastMs >= EVERY_S * 1000) this.#ask();
  }

  async #ask() {
    try {
      const found = await getJson(`admin/advise?max_age_s=${EVERY_S}`, { isQuiet: true });
      this.#lastMs = performance.now();
      this.#onProblem(null);
      this.#onAdvice(found);
    } catch (error) {
      this.#onProblem(error);
    }
  }
}
