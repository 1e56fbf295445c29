// What the browser itself keeps: typed text until it is sent, settings for the next conversation, and
// copies of conversations for when the server is gone.

import { keyStore } from "../../lib/api.js";

const CHAT = "quire.chat.";
const DRAFT = "quire.draft.";
const FILES = "quire.files.";
const HABITS = "quire.habits";
const SHELF = "quire.shelf.";
/** Characters of all copies together; browsers keep some 5 million for a site. */
const ROOM = 3_000_000;

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key) ?? "null");
  } catch {
    return null;
  }
}

function write(key, value) {
  const text = JSON.stringify(value);
  for (;;) {
    try {
      localStorage.setItem(key, text);
      return true;
    } catch {
      if (!dropOldest(key)) return false;
    }
  }
}

function erase(key) {
  try {
    localStorage.removeItem(key);
  } catch {
    // Nothing is kept then.
  }
}

function copies() {
  const found = [];
  try {
    for (let at = 0; at < localStorage.length; at++) {
      const key = localStorage.key(at);
      if (key?.startsWith(CHAT)) found.push({ key, size: localStorage.getItem(key).length, value: read(key) });
    }
  } catch {
    // Storage is forbidden.
  }
  return found;
}

/** Give up the oldest copy of a conversation that the server has too. */
function dropOldest(spared) {
  const clean = copies().filter((one) => one.key !== spared && one.value && !one.value.dirty);
  const oldest = clean.sort((a, b) => (a.value.updated ?? 0) - (b.value.updated ?? 0))[0];
  if (!oldest) return false;
  erase(oldest.key);
  return true;
}

/** Return a mark of the API key, so that conversations of one key are never shown to, or sent for, another one. */
export function keyMark() {
  let mark = 0x811c9dc5;
  for (const char of keyStore.get()) mark = Math.imul(mark ^ char.codePointAt(0), 0x01000193) >>> 0;
  return mark.toString(16);
}

/** Copies of conversations of this key: {id, document, version, started, updated, dirty}. */
export const chatCopies = {
  all: () => copies().map((one) => one.value).filter((one) => one?.id && one.document && one.key === keyMark()),
  get(id) {
    const found = read(CHAT + id);
    return found?.key === keyMark() ? found : null;
  },
  put(copy) {
    const done = write(CHAT + copy.id, { ...copy, key: keyMark() });
    while (copies().reduce((sum, one) => sum + one.size, 0) > ROOM && dropOldest(CHAT + copy.id));
    return done;
  },
  drop: (id) => erase(CHAT + id),
};

/** Text that was typed and not sent, by the place where it was typed. Files are apart: they are large, and typing must not wait. */
export const drafts = {
  get: (place) => ({ text: read(DRAFT + place)?.text ?? "", files: read(FILES + place) ?? [] }),
  /** Returns whether it is kept. */
  put: (place, text) => (text ? write(DRAFT + place, { text }) : (erase(DRAFT + place), true)),
  /** Returns whether they are kept. */
  putFiles: (place, files) => (files.length ? write(FILES + place, files) : (erase(FILES + place), true)),
  drop: (place) => (erase(DRAFT + place), erase(FILES + place)),
};

/** What people put by for later conversations, by names: `shelf("prompts")`. */
export function shelf(kind) {
  const all = () => {
    const found = read(SHELF + kind);
    return Array.isArray(found) ? found.filter((one) => typeof one?.name === "string") : [];
  };
  const write_ = (list) => write(SHELF + kind, list);
  return {
    all,
    /** Puts in place of one with this name. Returns whether it is kept. */
    put: (name, value) => write_([...all().filter((one) => one.name !== name), { name, value }].sort((a, b) => a.name.localeCompare(b.name))),
    drop: (name) => write_(all().filter((one) => one.name !== name)),
  };
}

/** What new conversations begin with: the settings that were used last. */
export const habits = {
  get: () => read(HABITS) ?? {},
  put: (settings) => write(HABITS, settings),
};
