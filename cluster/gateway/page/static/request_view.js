// One request by its id.

import { getJson } from "./api.js";
import { byId, el, setText } from "./dom.js";
import { roundsNodes } from "./rounds_view.js";
import { timelineNodes } from "./timeline_view.js";

export async function showRequest(id) {
  const target = byId("request-timeline");
  setText(byId("request-title"), id);
  target.replaceChildren(el("p", { class: "hint" }, "Loading …"));
  try {
    const timeline = await getJson(`v1/requests/${encodeURIComponent(id)}/timeline`);
    const rounds = roundsNodes(timeline);
    const heading = rounds.length ? [el("h3", {}, "Rounds")] : [];
    target.replaceChildren(...timelineNodes(timeline), ...heading, ...rounds);
  } catch (error) {
    target.replaceChildren(el("p", { class: "problem", role: "alert" }, error.message));
  }
}
