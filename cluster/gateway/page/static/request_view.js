// One request by its id.

import { getJson } from "./api.js";
import { byId, el, setText } from "./dom.js";
import { timelineNodes } from "./timeline_view.js";

export async function showRequest(id) {
  const target = byId("request-timeline");
  setText(byId("request-title"), id);
  target.replaceChildren(el("p", { class: "hint" }, "Loading …"));
  try {
    target.replaceChildren(...timelineNodes(await getJson(`v1/requests/${encodeURIComponent(id)}/timeline`)));
  } catch (error) {
    target.replaceChildren(el("p", { class: "problem", role: "alert" }, error.message));
  }
}
