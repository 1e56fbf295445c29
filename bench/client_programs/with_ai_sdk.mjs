// The Vercel AI SDK, over its providers for OpenAI (whose default is responses), for servers like OpenAI's, and for Anthropic.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { APICallError, generateObject, generateText, jsonSchema, streamText, tool } from 'ai';
import { KEY, run } from './abilities.mjs';

globalThis.AI_SDK_LOG_WARNINGS = false;

const over = (made) => (task) => {
  const ask = (url, more) => generateText({ model: made(url, task.model), prompt: task.prompt, temperature: 0, maxOutputTokens: 16, maxRetries: 0, ...more });
  const streamed = (url, more) => streamText({ model: made(url, task.model), prompt: task.prompt, temperature: 0, maxOutputTokens: 16, maxRetries: 0, ...more });
  const tools = { weather: tool({ description: 'Weather.', inputSchema: jsonSchema(task.form), execute: async () => 'sunny' }) };
  return {
    text: async (url) => (await ask(url)).text,
    stream: async (url) => {
      const pieces = [];
      let failed;
      for await (const piece of streamed(url, { onError: ({ error }) => { failed = error; } }).textStream) pieces.push(piece);
      if (failed) throw failed;
      return pieces;
    },
    tools: async (url) => {
      const options = { tools, toolChoice: { type: 'tool', toolName: 'weather' }, maxOutputTokens: 200 };
      const first = await ask(url, options);
      const calls = [...first.toolCalls, ...(await streamed(url, options).toolCalls)];
      const messages = [{ role: 'user', content: task.prompt }, ...first.response.messages, { role: 'user', content: 'more' }];
      const after = await ask(url, { prompt: undefined, messages, tools });
      return { calls: calls.map((call) => [call.toolName, call.input]), after: after.text };
    },
    structured: async (url) => {
      const schema = jsonSchema(task.form);
      const found = await generateObject({ model: made(url, task.model), prompt: task.prompt, schema, temperature: 0, maxOutputTokens: 200, maxRetries: 0 });
      return [found.object];
    },
    cancel: async (url) => {
      const controller = new AbortController();
      const result = streamed(url, { maxOutputTokens: task.endless, abortSignal: controller.signal });
      for await (const _ of result.textStream) {
        controller.abort();
        break;
      }
      return true;
    },
    retry: async (url) => (await ask(url, { maxRetries: 2 })).text,
    overflow: async (url) => {
      try {
        await ask(url, { prompt: task.overflow });
      } catch (error) {
        const words = ['maximum context length is', 'prompt is too long'];
        return APICallError.isInstance(error) && !error.isRetryable && words.some((one) => error.message.includes(one));
      }
      return false;
    },
  };
};

await run(
  { 'ai-sdk-openai': '@ai-sdk/openai', 'ai-sdk-openai-compatible': '@ai-sdk/openai-compatible', 'ai-sdk-anthropic': '@ai-sdk/anthropic' },
  {
    'ai-sdk-openai': over((url, model) => createOpenAI({ baseURL: `${url}/v1`, apiKey: KEY })(model)),
    'ai-sdk-openai-compatible': over((url, model) =>
      createOpenAICompatible({ name: 'quire', baseURL: `${url}/v1`, apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true })(model)),
    'ai-sdk-anthropic': over((url, model) => createAnthropic({ baseURL: `${url}/v1`, apiKey: KEY })(model)),
  },
);
