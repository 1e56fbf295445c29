// Calls of the server, with the API key, whose errors are the server's own sentences.

const KEY = "quire.key";

/** An answer from 400 on, or no answer (status 0). `message` is the server's sentence. */
export class ApiProblem extends Error {
  /**
   * @param {number} status @param {string} message
   * @param {{code?: string|null, param?: string|null}} [more]
   */
  constructor(status, message, { code = null, param = null } = {}) {
    super(message);
    this.name = "ApiProblem";
    this.status = status;
    this.code = code;
    this.param = param;
  }
}

/** Return whether an error only says that a view, or the reader, has given up a call. */
export function isAbort(error) {
  return error?.name === "AbortError";
}

/** The key of this tab. Storage that is forbidden is replaced by memory. */
export const keyStore = {
  memory: "",
  get() {
    try {
      return sessionStorage.getItem(KEY) ?? this.memory;
    } catch {
      return this.memory;
    }
  },
  set(key) {
    this.memory = key;
    try {
      if (key) sessionStorage.setItem(KEY, key);
      else sessionStorage.removeItem(KEY);
    } catch {
      // The key then lasts until the page is left.
    }
  },
};

/** Return the address of a path of the server, relative to where the page lies. */
function address(path, params) {
  const url = new URL(path.replace(/^\//, ""), document.baseURI.split("#")[0]);
  for (const [name, value] of Object.entries(params ?? {})) {
    if (value === undefined || value === null) continue;
    for (const one of Array.isArray(value) ? value : [value]) url.searchParams.append(name, String(one));
  }
  return url;
}

/** Return the error that an answer stands for. */
async function problemOf(response) {
  let told = null;
  try {
    told = (await response.json()).error;
  } catch {
    // A proxy's page, or nothing.
  }
  const message = told?.message ?? `the server answered ${response.status} ${response.statusText}`.trim();
  return new ApiProblem(response.status, message, told ?? {});
}

/** Calls of the server. `onProblem(problem)` hears of each refusal and each missing answer. */
export class Client {
  constructor(onProblem = () => {}) {
    this.onProblem = onProblem;
  }

  /**
   * Ask, and return the response once it is no refusal.
   * @param {string} method @param {string} path
   * @param {{params?: object, body?: any, file?: Blob, signal?: AbortSignal, key?: string, quiet?: boolean}} [options]
   *   key: instead of the tab's; quiet: nobody else hears of a problem
   * @returns {Promise<Response>}
   * @throws {ApiProblem} @throws {DOMException} AbortError
   */
  async request(method, path, { params, body, file, signal, key = keyStore.get(), quiet = false } = {}) {
    const headers = { accept: "application/json, text/event-stream" };
    if (key) headers.authorization = `Bearer ${key}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    if (file !== undefined) headers["content-type"] = "application/octet-stream";
    let problem;
    try {
      const response = await fetch(address(path, params), {
        method,
        headers,
        signal,
        body: body === undefined ? file : JSON.stringify(body),
        cache: "no-store",
        credentials: "omit",
      });
      if (response.ok) return response;
      problem = await problemOf(response);
    } catch (error) {
      if (isAbort(error) || signal?.aborted) throw new DOMException("given up", "AbortError");
      const unfit = /non.?ISO|ByteString|header/i.test(String(error?.message));
      problem = unfit && key
        ? new ApiProblem(401, "the API key has characters that no key has", { code: "invalid_api_key" })
        : new ApiProblem(0, "the server cannot be reached", { code: "unreachable" });
    }
    if (!quiet) this.onProblem(problem);
    throw problem;
  }

  /** Send a file as it is. */
  upload(path, file, params) {
    return this.request("POST", path, { params, file });
  }

  async json(method, path, options) {
    const response = await this.request(method, path, options);
    try {
      return await response.json();
    } catch (error) {
      if (isAbort(error) || options?.signal?.aborted) throw new DOMException("given up", "AbortError");
      throw new ApiProblem(0, "the answer broke off", { code: "unreachable" });
    }
  }

  /**
   * Read server-sent events as `{event, data}`, their data parsed; "[DONE]" ends the stream.
   * @param {string} method @param {string} path @param {object} [options] as of `request`, and
   *   onOpen() when the answer has begun, onBytes() whenever something arrived
   * @returns {AsyncGenerator<{event: string, data: any}>}
   */
  async *events(method, path, options = {}) {
    const response = await this.request(method, path, options);
    options.onOpen?.();
    const reader = response.body.getReader();
    const decoder = new TextDecoder();
    let rest = "";
    try {
      for (;;) {
        const { done, value } = await this.#read(reader, options);
        if (done) return;
        options.onBytes?.();
        rest += decoder.decode(value, { stream: true });
        const blocks = rest.split(/\r?\n\r?\n/);
        rest = blocks.pop() ?? "";
        for (const block of blocks) {
          const event = eventOf(block);
          if (!event) continue;
          if (event.data === "[DONE]") return;
          yield { event: event.event, data: JSON.parse(event.data) };
        }
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }

  async #read(reader, { signal }) {
    try {
      return await reader.read();
    } catch (error) {
      if (isAbort(error) || signal?.aborted) throw new DOMException("given up", "AbortError");
      throw new ApiProblem(0, "the connection to the server broke", { code: "unreachable" });
    }
  }
}

/** Return the name and the data of one block of a stream; null for a comment. */
function eventOf(block) {
  let event = "message";
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  return data.length ? { event, data: data.join("\n") } : null;
}
