// What the History view and the Playground change: sessions, by the endpoints of sessions.

const MOST_TEXT = 2048;

/** Return the id that the endpoints of sessions take; null of other branches, and of sessions of a program, which have numbers. */
export function sessionId(branch) {
  const [kind, id] = branch?.id.split(/:(.*)/s) ?? [];
  return kind === "session" && !/^\d+$/.test(id) ? id : null;
}

/** Return the path of a session's endpoint. */
export const sessionPath = (id, verb = "") => `v1/sessions/${encodeURIComponent(id)}${verb && `/${verb}`}`;

/**
 * Return tokens of a branch from `start` on, to `stop`.
 * @returns {Promise<{position: number, id: number, text: string|null}[]>}
 */
export async function tokensOf(app, branch, start, stop, options) {
  const found = [];
  for (let at = Math.max(0, start); at < stop; at += MOST_TEXT) {
    const part = await app.get("v1/state/text", { branch, start: at, stop: Math.min(stop, at + MOST_TEXT) }, options);
    found.push(...part.tokens);
    if (!part.tokens.length) break;
  }
  return found;
}

/**
 * Make a session of the first `at` tokens of a branch of any kind: a fork of a session, a checkout of
 * a commit, a session of the same tokens of others, which the prefix cache then serves.
 * @param {object} app @param {object} branch its document
 * @param {number} at @param {string} [name]
 * @returns {Promise<string>} the new session's id
 */
export async function sessionFrom(app, branch, at, name = "") {
  const named = name ? { name } : {};
  const id = sessionId(branch);
  if (id !== null) {
    const made = await app.post(sessionPath(id, "fork"), { at, ...named });
    return made.ids[0];
  }
  if (branch.kind === "commit") {
    const made = await app.post("v1/sessions/checkout", { branch: branch.id.slice("commit:".length), ...named });
    if (at < made.num_tokens) await app.post(sessionPath(made.id, "rewind"), { to: at });
    return made.id;
  }
  const tokens = await tokensOf(app, branch.id, 0, at);
  if (tokens.some((token) => token.id < 0)) throw new Error("this branch holds embeddings, of which no session can be made here");
  const body = { prompt: tokens.map((token) => token.id), ...named };
  if (branch.adapter) body.model = branch.adapter;
  const made = await app.post("v1/sessions", body);
  return made.id;
}

/** Ask for a name and a number of tokens, and make a session of a branch. Returns its id, or null. */
export async function askToFork(app, branch, at = branch.num_tokens) {
  let made = null;
  const verb = sessionId(branch) !== null ? "Fork" : "Open as a session";
  const done = await app.ask(
    verb,
    [
      { name: "at", label: `Tokens to keep, of ${app.format.number(branch.num_tokens)}`, type: "number", value: at, min: 0, max: branch.num_tokens, required: true },
      { name: "name", label: "Name of the new session", hint: "May be left empty." },
    ],
    {
      action: verb,
      check: async ({ at: wanted, name }) => {
        made = await sessionFrom(app, branch, Number(wanted), name);
      },
    },
  );
  if (done) app.notify(`${done.name || made} begins with ${app.format.count(Number(done.at), "token")} of ${branch.name ?? branch.id}`);
  return made;
}

/** Say what a rewind removes and costs, ask, and rewind. Returns how many tokens are left; null: it was not done. */
export async function askToRewind(app, branch, to) {
  const id = sessionId(branch);
  const cost = await rewindCost(app, id, to).catch(() => null);
  const again = cost === null ? "" : cost ? ` ${app.format.count(cost, "token")} are run again before the next one.` : " Nothing is run again.";
  const done = await app.ask("Rewind", [{ name: "to", label: `Tokens to keep, of ${app.format.number(branch.num_tokens)}`, type: "number", value: to, min: 0, max: branch.num_tokens, required: true }], {
    action: "Rewind",
    danger: true,
    text: `What is behind is removed from this session; a fork would keep it.${again}`,
    check: async (values) => {
      await app.post(sessionPath(id, "rewind"), { to: Number(values.to) });
    },
  });
  if (!done) return null;
  app.notify(`Rewound to ${app.format.count(Number(done.to), "token")}`);
  return Number(done.to);
}

/**
 * Return how many tokens are run again after a rewind; null if the server does not say.
 * @param {object} app @param {string|null} id @param {number} to
 */
export async function rewindCost(app, id, to, options) {
  if (id === null) return null;
  const { rewind_costs: costs } = await app.get(sessionPath(id), { rewind_to: to, tokens: false }, options);
  return costs?.[0]?.replayed ?? null;
}
