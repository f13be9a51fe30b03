// Calls of the router's API, with the API key if there is one.

import { byId, setText } from "./dom.js";

const STORED_KEY = "baton-api-key"; // in sessionStorage: gone with the tab

/** The event of the document after a key was given. */
export const KEY_GIVEN = "baton-key-given";

/** An answer with an error, or none at all (status 0). */
export class ApiError extends Error {
  constructor(message, status, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/**
 * Sends a request and returns its response if that is a success. Asks for an API key once if one is needed, unless
 * `isQuiet`.
 *
 * Paths are relative, so that the page also works behind a proxy that serves it under a path of its own.
 */
export async function call(path, { body, headers = {}, signal, isQuiet = false } = {}) {
  let response = await send(path, body, headers, signal);
  if (response.status === 401 && !isQuiet && (await askForKey("This endpoint requires a valid API key."))) {
    response = await send(path, body, headers, signal);
  }
  if (response.ok) return response;
  throw await errorOf(response);
}

export const getJson = async (path, options) => (await call(path, options)).json();

async function send(path, body, headers, signal) {
  const key = sessionStorage.getItem(STORED_KEY);
  const sent = { Accept: "application/json, text/event-stream", ...headers };
  if (key) sent.Authorization = `Bearer ${key}`;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  const options = { method: body === undefined ? "GET" : "POST", headers: sent, signal, cache: "no-store" };
  if (body !== undefined) options.body = JSON.stringify(body);
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The router does not answer. Is it still running?", 0);
  }
}

async function errorOf(response) {
  const found = await response.json().catch(() => null);
  const message = found?.error?.message ?? `The router answered with the status ${response.status}.`;
  return new ApiError(message, response.status, found?.error?.code ?? "");
}

let asking = null; // parallel requests share one question

/** Resolves to whether the user has given a key. */
export function askForKey(reason) {
  asking ??= openKeyDialog(reason).finally(() => {
    asking = null;
  });
  return asking;
}

function openKeyDialog(reason) {
  const dialog = byId("key-dialog");
  const input = byId("key");
  setText(byId("key-reason"), `${reason} The key is kept in this tab until you close it.`);
  input.value = "";
  dialog.returnValue = "cancel";
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(takeKey(dialog.returnValue, input)), { once: true });
  });
}

function takeKey(choice, input) {
  const key = input.value.trim();
  input.value = "";
  if (choice === "forget") {
    sessionStorage.removeItem(STORED_KEY);
    location.reload(); // nothing that the key has shown stays, and no stream goes on
  }
  if (choice !== "use" || !key) return false;
  sessionStorage.setItem(STORED_KEY, key);
  document.dispatchEvent(new Event(KEY_GIVEN));
  return true;
}
