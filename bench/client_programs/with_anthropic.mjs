// Anthropic's official client for JavaScript.
import Anthropic from '@anthropic-ai/sdk';
import { KEY, check, run } from './abilities.mjs';

function messages(task) {
  const client = (url, maxRetries = 0) => new Anthropic({ baseURL: url, apiKey: KEY, maxRetries, timeout: 120_000 });
  const turn = { role: 'user', content: task.prompt };
  const asked = { model: task.model, messages: [turn], temperature: 0 };
  const tool = { name: 'weather', input_schema: task.form };
  const ask = (url, more, retries) => client(url, retries).messages.create({ ...asked, max_tokens: 16, ...more });
  const text = async (url, retries = 0) => (await ask(url, {}, retries)).content[0].text;
  return {
    text,
    stream: async (url) => {
      const pieces = [];
      const stream = client(url).messages.stream({ ...asked, max_tokens: 16 }).on('text', (piece) => pieces.push(piece));
      const final = await stream.finalMessage();
      check(final.content[0].text === pieces.join('') && final.stop_reason === 'max_tokens', 'the final message differs');
      return pieces;
    },
    tools: async (url) => {
      const options = { max_tokens: 200, tools: [tool], tool_choice: { type: 'tool', name: 'weather' } };
      const first = await ask(url, options);
      const final = await client(url).messages.stream({ ...asked, ...options }).finalMessage();
      const calls = [first, final].flatMap((one) => one.content.filter((block) => block.type === 'tool_use'));
      const result = { role: 'user', content: [{ type: 'tool_result', tool_use_id: calls[0].id, content: 'sunny' }] };
      const after = await ask(url, { messages: [turn, { role: 'assistant', content: first.content }, result], tools: [tool] });
      return { calls: calls.map((call) => [call.name, call.input]), after: after.content.map((block) => block.text).join('') };
    },
    structured: async (url) => {
      const output_config = { format: { type: 'json_schema', schema: task.form } };
      return [(await ask(url, { max_tokens: 200, output_config })).content[0].text];
    },
    cancel: async (url) => {
      const stream = client(url).messages.stream({ ...asked, max_tokens: task.endless });
      for await (const event of stream) if (event.type === 'content_block_delta') break;
      stream.abort();
      return true;
    },
    retry: (url) => text(url, 2),
    overflow: async (url) => {
      try {
        await ask(url, { messages: [{ role: 'user', content: task.overflow }] });
      } catch (error) {
        return error instanceof Anthropic.BadRequestError && error.message.includes('prompt is too long');
      }
      return false;
    },
  };
}

await run({ 'node-anthropic': '@anthropic-ai/sdk' }, { 'node-anthropic': messages });
