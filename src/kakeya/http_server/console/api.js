/** Calls to the server this page came from, and to nobody else. */

/** An answer that is an error, in the server's own words. */
export class ApiError extends Error {
  /**
   * @param {number} status 0 when the server could not be reached
   * @param {string} message
   */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const PATIENCE_MS = 3000;
const PAUSE_MS = 100;

/**
 * A call to a conversation that may still be busy: a stopped answer ends a moment after it was stopped.
 * @template T
 * @param {() => Promise<T>} call
 * @returns {Promise<T>}
 */
export async function patiently(call) {
  const began = performance.now();
  for (;;) {
    try {
      return await call();
    } catch (error) {
      if (error.status !== 409 || performance.now() - began > PATIENCE_MS) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
  }
}

/** @typedef {{value: string, ask: (refused: string) => Promise<void>}} KeyHolder */

export class Api {
  /** @param {KeyHolder} key asked for a new one whenever the server says 401 */
  constructor(key) {
    this.key = key;
  }

  async get(path) {
    return (await this.#send('GET', path)).json();
  }

  async post(path, body) {
    return (await this.#send('POST', path, { body })).json();
  }

  async delete(path) {
    await this.#send('DELETE', path);
  }

  /** The answer's body, as it comes. Aborting the signal ends the work on the server. */
  async stream(path, body, signal) {
    return (await this.#send('POST', path, { body, signal })).body;
  }

  async #send(method, path, { body, signal } = {}) {
    for (;;) {
      const used = this.key.value;
      const response = await this.#fetch(method, path, used, body, signal);
      if (response.ok) return response;
      if (response.status !== 401) throw await errorOf(response);
      // Another call may have brought a new key meanwhile.
      if (used === this.key.value) await this.key.ask(used);
    }
  }

  async #fetch(method, path, key, body, signal) {
    const headers = { accept: 'application/json, text/event-stream' };
    if (key) headers.authorization = `Bearer ${key}`;
    if (body !== undefined) headers['content-type'] = 'application/json';
    const options = { method, headers, signal, credentials: 'omit', cache: 'no-store' };
    try {
      // Relative, so that the console also works behind a path prefix.
      return await fetch(path, { ...options, body: body === undefined ? undefined : JSON.stringify(body) });
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      throw new ApiError(0, 'The server cannot be reached.');
    }
  }
}

async function errorOf(response) {
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not one of our errors: the status must do.
  }
  const wait = response.headers.get('retry-after');
  return new ApiError(response.status, wait ? `${message} (Try again in ${wait} s.)` : message);
}
