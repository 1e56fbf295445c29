// ollama's official client for JavaScript.
import { Ollama } from 'ollama';
import { check, run } from './abilities.mjs';

function official(task) {
  const client = (host) => new Ollama({ host });
  const messages = [{ role: 'user', content: task.prompt }];
  const asked = { model: task.model, messages, options: { temperature: 0, num_predict: 16 } };
  const roomy = { ...asked, options: { temperature: 0, num_predict: 200 } };
  return {
    text: async (url) => (await client(url).chat(asked)).message.content,
    stream: async (url) => {
      const pieces = [];
      for await (const piece of await client(url).chat({ ...asked, stream: true })) pieces.push(piece);
      const last = pieces.at(-1);
      check(last.done && last.done_reason === 'length' && last.eval_count === 16, 'the last piece differs');
      return pieces.map((piece) => piece.message.content);
    },
    structured: async (url) => [(await client(url).chat({ ...roomy, format: task.form })).message.content],
    cancel: async (url) => {
      const stream = await client(url).chat({ ...asked, options: { num_predict: task.endless }, stream: true });
      for await (const piece of stream) if (piece.message.content) break;
      stream.abort();
      return true;
    },
    overflow: async (url) => {
      try {
        await client(url).chat({ ...asked, messages: [{ role: 'user', content: task.overflow }] });
      } catch (error) {
        return error.status_code === 400 && error.message.includes('maximum context length');
      }
      return false;
    },
    details: async (url) => {
      const one = client(url);
      const names = (found) => found.models.map((model) => model.model);
      const { template, capabilities } = await one.show({ model: task.model });
      const raw = await one.generate({ model: task.model, prompt: task.prompt, raw: true, options: asked.options });
      return [names(await one.list()), names(await one.ps()), template !== '', capabilities.includes('tools'), raw.response];
    },
  };
}

await run({ 'node-ollama': 'ollama' }, { 'node-ollama': official });
