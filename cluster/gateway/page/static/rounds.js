// What a trace of speculation says, in forms that can be drawn. A trace is that of docs/api.md.

const MARKS = { " ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥" };

/** The text of a token with its white space made visible, or its id if it has none. */
export function visible({ id, text }) {
  return text ? text.replace(/[ \n\r\t]/g, (space) => MARKS[space]) : `#${id}`;
}

export const isChain = (draft) => draft.parents.every((parent, node) => parent === node - 1);

/** A chain as columns: a drafted token, and what the model made in its place. Either may be null. */
export function columnsOf({ draft, output }) {
  const count = Math.max(draft.token_ids.length, output.token_ids.length);
  return Array.from({ length: count }, (_, index) => ({
    node: index < draft.token_ids.length ? index : null,
    drafted: tokenOf(draft, index),
    made: tokenOf(output, index),
    verdict: output.verdicts[index] ?? (draft.accepted[index] ? "accepted" : "rejected"),
  }));
}

/** The top of a tree: branches of drafted tokens, and the model's own token behind the last one that it accepted. */
export function treeOf({ draft, output }) {
  const nodes = draft.token_ids.map((_, node) => ({
    node,
    token: tokenOf(draft, node),
    verdict: draft.accepted[node] ? "accepted" : "rejected",
    children: [],
  }));
  const top = [];
  const behind = (node) => (node < 0 ? top : nodes[node].children);
  for (const one of nodes) behind(draft.parents[one.node]).push(one);
  const own = output.verdicts.findIndex((verdict) => verdict !== "accepted");
  if (own >= 0) {
    const token = tokenOf(output, own);
    behind(draft.accepted.lastIndexOf(true)).push({ node: null, token, verdict: output.verdicts[own], children: [] });
  }
  return top;
}

function tokenOf(part, index) {
  return index < part.token_ids.length ? { id: part.token_ids[index], text: part.texts[index] } : null;
}

const count = (values, wanted) => values.filter((value) => value === wanted).length;
const sum = (rounds, of) => rounds.reduce((total, one) => total + of(one), 0);
export const numAccepted = (round) => count(round.draft.accepted, true);
export const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

/** Counts and times of all rounds of a trace. */
export function totalsOf({ rounds }) {
  const lengths = rounds.map((one) => one.draft.token_ids.length).filter(Boolean);
  return {
    rounds: rounds.length,
    tokens: sum(rounds, (one) => one.output.token_ids.length),
    drafted: sum(rounds, (one) => one.draft.token_ids.length),
    accepted: sum(rounds, numAccepted),
    used: sum(rounds, (one) => count(one.output.verdicts, "accepted")), // without those past the answer's end
    shortest: lengths.length ? Math.min(...lengths) : 0,
    longest: Math.max(0, ...lengths),
    draftMs: sum(rounds, (one) => one.draft_ms),
    verifyMs: sum(rounds, (one) => one.verify_ms),
  };
}

/** The index of the round that made the most tokens, and of those the one with the most drafted ones. */
export function bestRoundOf({ rounds }) {
  const worth = (one) => one.output.token_ids.length * 100 + one.draft.token_ids.length;
  return rounds.reduce((best, one, index) => (worth(one) > worth(rounds[best]) ? index : best), 0);
}

/** The text of the answer before, in and after a round, cut to what is near it. */
export function contextOf({ rounds }, index, most = 240) {
  const text = (some) => some.map((one) => one.output.texts.join("")).join("");
  const before = text(rounds.slice(0, index));
  const after = text(rounds.slice(index + 1));
  return {
    before: before.length > most ? `…${before.slice(-most)}` : before,
    made: text(rounds.slice(index, index + 1)),
    after: after.length > most ? `${after.slice(0, most)}…` : after,
  };
}

/** A round in a sentence. */
export function headlineOf(round) {
  const made = counted(round.output.token_ids.length, "token");
  if (!round.method) return `no draft, ${made}`;
  return `${round.method}, ${numAccepted(round)} of ${round.draft.token_ids.length} drafted accepted, ${made}`;
}
