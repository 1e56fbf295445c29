// Asking for the API key. It stays in this tab.

import { keyStore } from "./api.js";
import { ask } from "./dialogs.js";

let open = false;

/**
 * Ask for a key until one works or the reader gives up, and connect with it.
 * @param {import("./api.js").Client} client
 * @param {import("./live.js").Live} live
 */
export async function askForKey(client, live) {
  if (open) return;
  open = true;
  const before = keyStore.get();
  const wrong = live.problem?.status === 401 && before;
  try {
    const given = await ask(
      "API key",
      [
        {
          name: "key",
          label: "Key of this server",
          type: "password",
          value: "",
          autocomplete: "off",
          hint: "Kept in this tab only, and forgotten when it is closed. Leave it empty if the server has no key.",
        },
      ],
      {
        action: "Connect",
        text: wrong ? "The server does not take the key that this tab has." : "What this page shows is behind the server's API key.",
        check: async ({ key }) => {
          try {
            await client.json("GET", "v1/state", { key: key.trim(), quiet: true });
          } catch (error) {
            if (error.status === 401) return key.trim() ? "Wrong key: this server does not take it." : "This server needs a key.";
            return error.message;
          }
          return null;
        },
      },
    );
    if (given === undefined) return;
    keyStore.set(given.key.trim());
    live.retry();
  } finally {
    open = false;
  }
}
