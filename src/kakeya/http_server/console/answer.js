/** One turn: the message goes out, the answer comes in pieces. */

import { ApiError, patiently } from './api.js';
import { events } from './sse.js';

/**
 * @typedef {object} Outcome
 * @property {'completed' | 'incomplete' | 'stopped' | 'failed'} status
 * @property {string} detail why it is incomplete or failed
 * @property {any} usage null unless the server told
 * @property {number | null} firstTextSeconds as this page saw it
 * @property {number} seconds the whole turn, as this page saw it
 */

const ENDS = new Set(['response.completed', 'response.incomplete', 'response.failed', 'error']);

/**
 * Ask and read the answer. Throws only while nothing has come: an ApiError, in the server's words.
 * @param {import('./api.js').Api} api
 * @param {object} request the body of a response request
 * @param {AbortSignal} signal
 * @param {(text: string) => void} onText
 * @returns {Promise<Outcome>}
 */
export async function ask(api, request, signal, onText) {
  const began = performance.now();
  const passed = () => (performance.now() - began) / 1000;
  const outcome = { status: 'failed', detail: 'The stream broke off.', usage: null, firstTextSeconds: null };
  try {
    const body = await patiently(() => api.stream('v1/responses', { ...request, stream: true }, signal));
    for await (const event of events(body)) {
      if (event.type === 'response.output_text.delta') {
        outcome.firstTextSeconds ??= passed();
        onText(event.delta);
      } else if (ENDS.has(event.type) || event.error) {
        Object.assign(outcome, ending(event));
        break;
      }
    }
  } catch (error) {
    if (error instanceof ApiError) throw error;
    const stopped = error.name === 'AbortError';
    Object.assign(outcome, stopped ? { status: 'stopped', detail: '' } : { detail: `The stream broke off: ${error.message}` });
  }
  return { ...outcome, seconds: passed() };
}

function ending(event) {
  if (event.type === 'response.completed') return { status: 'completed', detail: '', usage: event.response.usage };
  if (event.type === 'response.incomplete') {
    const reason = event.response.incomplete_details?.reason ?? 'unfinished';
    return { status: 'incomplete', detail: reason, usage: event.response.usage };
  }
  const error = event.response?.error ?? event.error ?? event;
  return { status: 'failed', detail: error.message ?? 'The server gave up.' };
}
