// The page: shows one view at a time, by the fragment of the address.

import { Advice } from "./advice.js";
import { askForKey, getJson, KEY_GIVEN } from "./api.js";
import { offerClasses, offerMethods, startChat } from "./chat.js";
import { createCluster } from "./cluster.js";
import { byId, setText } from "./dom.js";
import { createGallery } from "./gallery.js";
import { startPlayground } from "./playground.js";
import { showRequest } from "./request_view.js";
import { showWorth, showWorthProblem } from "./worth.js";

const TITLES = { chat: "Chat", playground: "Playground", gallery: "Gallery", cluster: "Cluster", request: "Request" };

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // an id that somebody typed
  }
}

/** Returns the name of the view that is shown; `undefined` where the address names none, and another stays. */
function showView(cluster, gallery) {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const isKnown = Object.hasOwn(TITLES, name);
  if (name && !isKnown && document.querySelector(".view:not([hidden])")) return; // the link that skips to the content
  const shown = isKnown ? name : "chat";
  for (const view of document.querySelectorAll(".view")) view.hidden = view.id !== shown;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${shown}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${TITLES[shown]} · baton`;
  window.scrollTo(0, 0);
  if (shown === "cluster") cluster.start();
  else cluster.stop();
  if (shown === "gallery") gallery.show();
  if (shown === "cluster" || shown === "playground") advice.start();
  else advice.stop();
  if (shown === "request") showRequest(decoded(rest.join("/")));
  return shown;
}

/** Shows the view of a new address, and gives its title the focus, which announces it. */
function moveTo(cluster, gallery) {
  const shown = showView(cluster, gallery);
  if (shown) byId(`${shown}-title`).focus();
}

async function showModel(options) {
  try {
    const [models, methods] = await Promise.all([getJson("v1/models", options), getJson("v1/speculation", options)]);
    setText(byId("served"), models.data[0]?.id ?? "");
    offerClasses(models.slo_classes);
    offerMethods(methods.data);
  } catch (error) {
    setText(byId("served"), error.message);
  }
}

for (const button of document.querySelectorAll("dialog button[type=button]")) {
  button.addEventListener("click", () => button.closest("dialog").close(button.value));
}
startChat();
const drafts = startPlayground();
const cluster = createCluster();
const gallery = createGallery();
const advice = new Advice(
  (found) => {
    drafts.show(found.speculation);
    showWorth(found);
  },
  (error) => {
    drafts.showProblem(error);
    showWorthProblem(error);
  },
);
byId("key-button").addEventListener("click", async () => {
  if (await askForKey("Requests are sent with this key.")) {
    location.reload(); // what another key has shown does not stay
  }
});
document.addEventListener(KEY_GIVEN, () => showModel({ isQuiet: true }));
window.addEventListener("hashchange", () => moveTo(cluster, gallery));
showView(cluster, gallery);
showModel();
