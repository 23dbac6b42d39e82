/** Keeps looking at the server, quickly while something runs, never while nobody sees the page. */

import { ApiError } from './api.js';

const BUSY_MS = 500;
const RESTING_MS = 1000;
const LOST_MS = 1500;

export class Watch {
  #api;
  #hub;
  #wake = () => {};
  #isWanted = false;

  /** @param {import('./api.js').Api} api @param {import('./hub.js').Hub} hub */
  constructor(api, hub) {
    this.#api = api;
    this.#hub = hub;
    document.addEventListener('visibilitychange', () => this.now());
  }

  /** Look at once, or again if somebody is looking. */
  now() {
    this.#isWanted = true;
    this.#wake();
  }

  /** Never ends. */
  async run() {
    for (;;) {
      if (document.hidden) await this.#pause(null);
      else await this.#pause(await this.#look());
    }
  }

  /** @returns {Promise<number | null>} how long to wait for the next look; null: until woken */
  async #look() {
    this.#isWanted = false;
    try {
      this.#hub.look(await this.#api.get('console/sessions'), performance.now() / 1000);
      await this.#fetchTurns();
    } catch (error) {
      this.#hub.emit('trouble', error);
      return error instanceof ApiError && error.status === 401 ? null : LOST_MS;
    }
    this.#hub.emit('trouble', null);
    return this.#hub.isBusy ? BUSY_MS : RESTING_MS;
  }

  async #fetchTurns() {
    const session = this.#hub.followedSession;
    if (!session || session.turns === (this.#hub.turns.get(session.session_id)?.at(-1)?.number ?? 0)) return;
    const { turns } = await this.#api.get(`console/sessions/${encodeURIComponent(session.session_id)}`);
    this.#hub.remember(session.session_id, turns);
  }

  #pause(milliseconds) {
    if (this.#isWanted && !document.hidden) return Promise.resolve();
    return new Promise((resolve) => {
      this.#wake = resolve;
      if (milliseconds !== null) setTimeout(resolve, milliseconds);
    });
  }
}
