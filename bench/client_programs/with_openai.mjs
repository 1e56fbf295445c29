// OpenAI's official client for JavaScript: chats and responses.
import OpenAI from 'openai';
import { KEY, check, run } from './abilities.mjs';

const client = (url, maxRetries = 0) => new OpenAI({ baseURL: `${url}/v1`, apiKey: KEY, maxRetries, timeout: 120_000 });

async function recognised(call) {
  try {
    await call();
  } catch (error) {
    return error instanceof OpenAI.BadRequestError && error.code === 'context_length_exceeded';
  }
  return false;
}

function chat(task) {
  const messages = [{ role: 'user', content: task.prompt }];
  const asked = { model: task.model, messages, temperature: 0 };
  const tool = { type: 'function', function: { name: 'weather', parameters: task.form } };
  const ask = (url, more, maxRetries) => client(url, maxRetries).chat.completions.create({ ...asked, ...more });
  const text = async (url, retries = 0) => (await ask(url, { max_tokens: 16 }, retries)).choices[0].message.content;
  return {
    text,
    stream: async (url) => {
      const pieces = [];
      for await (const chunk of await ask(url, { max_tokens: 16, stream: true })) pieces.push(chunk.choices[0].delta.content ?? '');
      return pieces;
    },
    tools: async (url) => {
      const options = { max_tokens: 200, tools: [tool], tool_choice: { type: 'function', function: { name: 'weather' } } };
      const [call] = (await ask(url, options)).choices[0].message.tool_calls;
      const final = await client(url).chat.completions.stream({ ...asked, ...options }).finalChatCompletion();
      const [other] = final.choices[0].message.tool_calls;
      check(other.function.arguments === call.function.arguments, 'streamed arguments differ');
      const history = [...messages, { role: 'assistant', tool_calls: [call] }, { role: 'tool', tool_call_id: call.id, content: 'sunny' }];
      const after = await ask(url, { messages: history, tools: [tool], max_tokens: 16 });
      return { calls: [[call.function.name, call.function.arguments]], after: after.choices[0].message.content };
    },
    structured: async (url) => {
      const response_format = { type: 'json_schema', json_schema: { name: 'weather', schema: task.form, strict: true } };
      const parsed = await client(url).chat.completions.parse({ ...asked, max_tokens: 200, response_format });
      return [parsed.choices[0].message.parsed];
    },
    cancel: async (url) => {
      const stream = await ask(url, { max_tokens: task.endless, stream: true });
      for await (const _ of stream) break;
      stream.controller.abort();
      return true;
    },
    retry: (url) => text(url, 2),
    overflow: (url) => recognised(() => ask(url, { messages: [{ role: 'user', content: task.overflow }], max_tokens: 16 })),
  };
}

function responses(task) {
  const asked = { model: task.model, input: task.prompt, temperature: 0 };
  const tool = { type: 'function', name: 'weather', parameters: task.form, strict: true };
  const ask = (url, more, maxRetries) => client(url, maxRetries).responses.create({ ...asked, ...more });
  const text = async (url, retries = 0) => (await ask(url, { max_output_tokens: 16 }, retries)).output_text;
  return {
    text,
    stream: async (url) => {
      const stream = client(url).responses.stream({ ...asked, max_output_tokens: 16 });
      const pieces = [];
      for await (const event of stream) if (event.type === 'response.output_text.delta') pieces.push(event.delta);
      check((await stream.finalResponse()).output_text === pieces.join(''), 'the final response differs');
      return pieces;
    },
    tools: async (url) => {
      const options = { max_output_tokens: 200, tools: [tool], tool_choice: { type: 'function', name: 'weather' } };
      const first = await ask(url, options);
      const final = await client(url).responses.stream({ ...asked, ...options }).finalResponse();
      const calls = [first, final].flatMap((one) => one.output.filter((item) => item.type === 'function_call'));
      const result = { type: 'function_call_output', call_id: calls[0].call_id, output: 'sunny' };
      const after = await ask(url, { input: [result], previous_response_id: first.id, tools: [tool], max_output_tokens: 16 });
      return { calls: calls.map((call) => [call.name, call.arguments]), after: after.output_text };
    },
    structured: async (url) => {
      const format = { type: 'json_schema', name: 'weather', schema: task.form, strict: true };
      return [(await client(url).responses.parse({ ...asked, max_output_tokens: 200, text: { format } })).output_parsed];
    },
    cancel: async (url) => {
      const stream = await ask(url, { max_output_tokens: task.endless, stream: true });
      for await (const event of stream) if (event.type === 'response.output_text.delta') break;
      stream.controller.abort();
      return true;
    },
    retry: (url) => text(url, 2),
    overflow: (url) => recognised(() => ask(url, { input: task.overflow, max_output_tokens: 16 })),
  };
}

await run({ 'node-openai-chat': 'openai', 'node-openai-responses': 'openai' }, { 'node-openai-chat': chat, 'node-openai-responses': responses });
