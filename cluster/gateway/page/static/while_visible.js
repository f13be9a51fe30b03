// Work that a view needs only while it is visible.

export class WhileVisible {
  #isWanted = false;

  constructor() {
    document.addEventListener("visibilitychange", () => this.#update());
  }

  start() {
    this.#isWanted = true;
    this.#update();
  }

  stop() {
    this.#isWanted = false;
    this.#update();
  }

  /** Called with whether the work is needed, after each change and perhaps without one. */
  needed() {
    throw new Error("a subclass says what it does");
  }

  #update() {
    this.needed(this.#isWanted && !document.hidden);
  }
}
