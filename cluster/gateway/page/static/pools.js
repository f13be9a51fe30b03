// The card of a pool: its workers, and what an operator can do with them.

import { call } from "./api.js";
import { track } from "./chart.js";
import { confirmed, el, makeRow, setText, syncChildren } from "./dom.js";
import { digits } from "./format.js";

const OTHER = { prefill: "decode", decode: "prefill" };
const HEADS = ["Worker", "State", "KV used", "Running", "Waiting", "Hand-offs", "Steps/s"];

/** The empty card of a pool. */
export function poolCard(name) {
  const title = `${name}-title`;
  const size = el("input", {
    type: "number",
    min: "1",
    max: "4096",
    step: "1",
    required: true,
    id: `${name}-size`,
    inputMode: "numeric",
  });
  const note = el("p", { class: "hint note", role: "status" });
  const act = (action) => () => perform(note, action);
  const button = (text, action) => {
    const made = el("button", { type: "button" }, text);
    made.addEventListener("click", act(action));
    return made;
  };
  const form = el(
    "form",
    { class: "row operate" },
    el("label", { for: size.id }, "Workers"),
    size,
    el("button", { type: "submit" }, "Scale"),
    button("Automatic", () => automatic(name)),
    button("Drain one", () => drain(name, Number(form.dataset.target))),
    button(`Move one to ${OTHER[name]}`, () => move(name)),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    act(() => scale(name, size.valueAsNumber, Number(form.dataset.target)))();
  });
  return el(
    "section",
    { class: "panel pool", "aria-labelledby": title },
    el("div", { class: "heading" }, el("h2", { id: title }, `${name} pool`), el("p", { class: "hint count" })),
    el(
      "div",
      { class: "scroll", tabindex: "0", role: "group", "aria-labelledby": title },
      el(
        "table",
        { class: "figures" },
        el("thead", {}, el("tr", {}, ...HEADS.map((head) => el("th", { scope: "col" }, head)))),
        el("tbody"),
      ),
    ),
    form,
    note,
  );
}

/** Shows a pool of `GET /admin/status`; `rates` has the steps per second by worker. */
export function updatePoolCard(card, name, pool, rates) {
  const live = pool.workers.filter((worker) => worker.state !== "dead");
  const ready = live.filter((worker) => worker.state === "ready").length;
  setText(card.querySelector(".count"), `${ready} of ${pool.target} ready${pool.pinned ? ", set by hand" : ""}`);
  const form = card.querySelector("form");
  const size = form.querySelector("input");
  if (form.dataset.target !== String(pool.target)) {
    form.dataset.target = String(pool.target);
    if (document.activeElement !== size) size.value = String(pool.target);
  }
  syncChildren(
    card.querySelector("tbody"),
    live,
    (worker) => worker.id,
    () => makeRow(HEADS.length - 1),
    (row, worker) => updateWorker(row, worker, rates),
  );
}

function updateWorker(row, worker, rates) {
  setText(row.cells[0], worker.id);
  setText(row.cells[1], worker.state);
  row.cells[1].className = worker.state === "ready" ? "good" : worker.state === "suspected" ? "bad" : "wait";
  row.title = worker.reason ?? "";
  showCache(row.cells[2], worker);
  const counts = [worker.running, worker.waiting, worker.transfers, rates.get(worker.id)];
  counts.forEach((count, index) => setText(row.cells[index + 3], digits(count)));
  row.cells[3].title = worker.max_running ? `at most ${digits(worker.max_running)}` : "";
}

/** The worker's KV blocks: those in use, and behind them those that are cached. */
function showCache(cell, worker) {
  const total = worker.kv_blocks_total;
  const shares = [worker.kv_blocks_used, worker.kv_blocks_cached].map((count) => (total ? (count ?? 0) / total : 0));
  const state = shares.join();
  if (cell.dataset.state === state) return;
  cell.dataset.state = state;
  const [used, cached] = shares;
  const bars = [
    { start: 0, length: 1, class: "fill base" },
    { start: used, length: cached, class: "fill move faint" },
    { start: 0, length: used, class: "fill work" },
  ];
  cell.replaceChildren(
    track(bars.filter((bar) => bar.length > 0)),
    el("span", {}, total ? `${digits(used * 100)} %` : "–"),
    el("span", { class: "hint" }, total ? `${digits(cached * 100)} % cached` : ""),
  );
}

async function perform(note, action) {
  try {
    const told = await action();
    if (told) setText(note, told);
    note.classList.remove("bad");
  } catch (error) {
    setText(note, error.message);
    note.classList.add("bad");
  }
}

async function scale(name, target, before) {
  if (
    target < before &&
    !(await confirmed(`Drain ${before - target} of ${name}?`, drainText(name, before - target), "Drain"))
  )
    return "";
  await call("admin/scale", { body: { [name]: target } });
  return target < before ? `${before - target} ${name} drains.` : `The target is ${target}.`;
}

const drain = (name, before) => {
  if (before <= 1) return "The last worker of a pool stays.";
  return scale(name, before - 1, before);
};

const drainText = (name, count) =>
  `${count === 1 ? "A worker" : `${count} workers`} of the ${name} pool will get no new requests, and will end with ` +
  "the present ones.";

async function automatic(name) {
  await call("admin/scale", { body: { [name]: "auto" } });
  return "The autoscaler decides again, if it is enabled.";
}

async function move(name) {
  const text = `A worker of the ${name} pool finishes its requests and joins the ${OTHER[name]} pool with its weights.`;
  if (!(await confirmed(`Move one to ${OTHER[name]}?`, text, "Move"))) return "";
  await call("admin/move", { body: { from: name, to: OTHER[name] } });
  return `A worker moves to ${OTHER[name]} once it is drained.`;
}
