// What the programs in this folder share, as abilities.py says for Python: `node with_NAME.mjs TASK ROW RESULTS`.
import { appendFileSync, readFileSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname, join } from 'node:path';

export const KEY = 'no-key-is-needed';

function version(name) {
  // A package need not export its package.json, so the folder is found from its entry.
  let folder = dirname(createRequire(import.meta.url).resolve(name));
  for (;;) {
    try {
      const found = JSON.parse(readFileSync(join(folder, 'package.json'), 'utf8'));
      if (found.name === name) return found.version;
    } catch { /* no package here */ }
    folder = dirname(folder);
  }
}

export async function run(packages, rows) {
  const [file, row, results] = process.argv.slice(2);
  const task = JSON.parse(readFileSync(file, 'utf8'));
  const tell = (values) => appendFileSync(results, JSON.stringify(values) + '\n');
  writeFileSync(results, '');
  tell({ version: version(packages[row]) });
  for (const [ability, made] of Object.entries(rows[row](task))) {
    try {
      tell({ ability, value: await made(`${task.url}/at/${row}/${ability}`) });
    } catch (error) {
      tell({ ability, error: `${error.name}: ${String(error.message).slice(0, 300)}` });
    }
  }
}

export function check(holds, what) {
  if (!holds) throw new Error(what);
}
