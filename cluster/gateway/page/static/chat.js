// The chat: a conversation with the served model, and the waterfall of each answer.

import { ApiError, call, getJson } from "./api.js";
import { byId, el, setText } from "./dom.js";
import { eventsOf } from "./events.js";
import { duration } from "./format.js";
import { counted } from "./rounds.js";
import { roundsNodes } from "./rounds_view.js";
import { timelineNodes } from "./timeline_view.js";

const PATH = "v1/chat/completions";
const STOP_MS = 300; // until the router has noticed that nobody reads an answer any more

export function startChat() {
  const chat = new Chat();
  offer("method", ["auto", "none"]);
  byId("settings").open = window.matchMedia("(min-width: 1000px)").matches;
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    chat.send();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("ask").requestSubmit();
    }
  });
  byId("parameters").addEventListener("submit", (event) => event.preventDefault());
  byId("stop").addEventListener("click", () => chat.stop());
  byId("new-chat").addEventListener("click", () => chat.clear());
}

/** Adds SLO classes, as `/v1/models` lists them. */
export const offerClasses = (names) => offer("slo", names);

/** Adds speculation methods, as `/v1/speculation` lists them. Those that cannot run here can be seen, not chosen. */
export function offerMethods(cards) {
  offer("method", cards.map((card) => card.method));
  for (const card of cards.filter((one) => !one.available)) {
    const option = byId("method").querySelector(`option[value="${card.method}"]`);
    option.disabled = true;
    option.textContent = `${card.method} (no draft is loaded)`;
  }
}

function offer(id, names) {
  const known = new Set([...byId(id).options].map((option) => option.value));
  byId(id).append(...names.filter((name) => !known.has(name)).map((name) => el("option", { value: name }, name)));
}

class Chat {
  #messages = []; // {role, content}
  #running = null; // the AbortController of the answer that is being made

  async send() {
    const prompt = byId("prompt").value.trim();
    if (!prompt || this.#running || !areValid(byId("parameters"))) return;
    byId("prompt").value = "";
    const asked = { role: "user", content: prompt };
    const turn = new Turn(prompt);
    const messages = this.#messages; // those of this conversation, even if a new one begins meanwhile
    this.#setRunning(new AbortController());
    try {
      await answer(turn, [...messages, asked], this.#running.signal);
    } catch (error) {
      if (error.name === "AbortError") {
        turn.finish("Stopped.");
        if (!turn.text) return;
        setTimeout(() => showTimeline(turn), STOP_MS);
      } else {
        turn.fail(error);
        byId("prompt").value ||= prompt;
        return;
      }
    } finally {
      this.#setRunning(null);
    }
    messages.push(asked, { role: "assistant", content: turn.text });
  }

  stop() {
    this.#running?.abort();
    byId("prompt").focus();
  }

  clear() {
    this.stop();
    this.#messages = [];
    byId("turns").replaceChildren();
    byId("chat-lead").hidden = false;
    byId("prompt").focus();
  }

  #setRunning(controller) {
    const [send, stop] = [byId("send"), byId("stop")];
    const focused = document.activeElement; // a button that goes would lose the focus
    this.#running = controller;
    stop.hidden = !controller;
    if (focused === send) stop.focus();
    if (focused === stop) byId("prompt").focus();
    send.disabled = Boolean(controller);
  }
}

/** Whether all settings have valid values; if not, the wrong one is shown, and why. */
function areValid(form) {
  if (!form.checkValidity()) byId("settings").open = true; // what is folded away cannot be shown
  return form.reportValidity();
}

/** Streams an answer into `turn` and shows its timeline. */
async function answer(turn, messages, signal) {
  const { headers, parameters } = readSettings();
  const system = byId("system").value.trim();
  const all = system ? [{ role: "system", content: system }, ...messages] : messages;
  const body = { messages: all, stream: true, stream_options: { include_usage: true }, ...parameters };
  const response = await call(PATH, { body, headers, signal });
  turn.id = response.headers.get("X-Request-Id");
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") continue; // the stream is read to its end, since leaving earlier would look like a stop
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, response.status, event.error.code);
    turn.take(event);
  }
  await showTimeline(turn, signal);
}

async function showTimeline(turn, signal) {
  try {
    turn.explain(await getJson(`v1/requests/${encodeURIComponent(turn.id)}/timeline`, { signal }));
  } catch (error) {
    if (error.name === "AbortError") throw error;
    turn.finish(`The waterfall is not available: ${error.message}`);
  }
}

function readSettings() {
  const parameters = {};
  for (const [id, name] of [
    ["max-tokens", "max_tokens"],
    ["temperature", "temperature"],
    ["top-p", "top_p"],
    ["seed", "seed"],
  ]) {
    const value = byId(id).valueAsNumber;
    if (!Number.isNaN(value)) parameters[name] = value;
  }
  const method = byId("method").value;
  const trace = byId("trace").checked && method !== "none";
  if (method || trace) parameters.speculation = { ...(method && { method }), ...(trace && { trace }) };
  const headers = byId("slo").value ? { "X-Baton-SLO-Class": byId("slo").value } : {};
  return { headers, parameters };
}

/** A question and its answer on the page. */
class Turn {
  id = null; // of the request, once it is answered
  text = "";
  #output = document.createTextNode("");
  #thoughts = document.createTextNode("");
  #bubble = el("div", { class: "bubble", dir: "auto", "aria-busy": "true" }, this.#output);
  #state = el("p", { class: "hint state" }, "Waiting for the first token …");
  #node = null;

  constructor(prompt) {
    byId("chat-lead").hidden = true;
    this.#node = el(
      "article",
      { class: "turn" },
      el("div", { class: "said user" }, el("h2", {}, "You"), el("div", { class: "bubble", dir: "auto" }, prompt)),
      el("div", { class: "said model" }, el("h2", {}, "Model"), this.#bubble, this.#state),
    );
    byId("turns").append(this.#node);
    this.#node.scrollIntoView({ block: "end" });
  }

  take(event) {
    const delta = event.choices?.[0]?.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) this.#think(thought);
    if (delta.content) {
      this.text += delta.content;
      this.#output.appendData(delta.content);
      setText(this.#state, "Answering …");
    }
  }

  fail(error) {
    this.finish("");
    this.#bubble.after(el("p", { class: "problem", role: "alert" }, error.message));
  }

  finish(sentence) {
    this.#bubble.setAttribute("aria-busy", "false");
    if (sentence) setText(this.#state, sentence);
    else this.#state.remove();
  }

  explain(timeline) {
    const facts = timeline.attributes ?? {};
    const ttft = timeline.time_to_first_token?.duration_ms;
    const tokens = `${facts.outcome === "cancelled" ? "Stopped after " : ""}${facts.output_tokens ?? "?"} tokens`;
    this.finish(`${tokens} in ${duration(timeline.total_ms)}, the first after ${duration(ttft)}.`);
    for (const other of byId("turns").querySelectorAll("details.detail")) other.open = false;
    const details = el(
      "details",
      { class: "detail waterfall-of", open: true },
      el("summary", {}, "Waterfall"),
      ...timelineNodes(timeline),
    );
    this.#node.append(details);
    const rounds = roundsNodes(timeline);
    if (rounds.length) {
      const summary = `Rounds: ${counted(timeline.speculation.rounds.length, "step")} of decoding`;
      this.#node.append(el("details", { class: "detail rounds-of" }, el("summary", {}, summary), ...rounds));
    }
    details.scrollIntoView({ block: "nearest" });
  }

  #think(text) {
    if (!this.#thoughts.isConnected) {
      this.#bubble.before(
        el(
          "details",
          { class: "thoughts" },
          el("summary", {}, "Reasoning"),
          el("div", { class: "bubble", dir: "auto" }, this.#thoughts),
        ),
      );
    }
    this.#thoughts.appendData(text);
  }
}
