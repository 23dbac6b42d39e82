/** The API key: asked for when the server wants one, kept until the tab is closed. */

import { ApiError } from './api.js';
import { byId } from './dom.js';

const STORED = 'kakeya-key';

export class KeyPrompt {
  #dialog = byId('key-dialog');
  #input = byId('key-input');
  #button = byId('key-button');
  /** @type {{promise: Promise<void>, resolve: () => void, reject: (error: Error) => void} | null} */
  #asking = null;
  #declined = false;
  /** Called when somebody gives a key although nobody has just asked for it. */
  onoffer = () => {};

  constructor() {
    byId('key-form').addEventListener('submit', (event) => this.#given(event));
    byId('key-cancel').addEventListener('click', () => this.#dismissed());
    this.#dialog.addEventListener('cancel', () => this.#dismissed());
    this.#button.addEventListener('click', () => this.#pressed());
    this.#showButton(Boolean(this.value));
  }

  get value() {
    return sessionStorage.getItem(STORED) ?? '';
  }

  /**
   * Ask for a key; all who wait get the one that is given. Rejects when none is, and does not ask again
   * then: whoever changes their mind presses the button.
   * @param {string} refused the key that the server did not take, if there was one
   */
  ask(refused) {
    if (refused && refused === this.value) sessionStorage.removeItem(STORED);
    this.#showButton(true);
    if (this.#declined) return Promise.reject(needed());
    if (!this.#asking) {
      this.#asking = promised();
      this.#open(refused ? 'The server does not know this key.' : '');
    }
    return this.#asking.promise;
  }

  #open(error) {
    byId('key-error').textContent = error;
    this.#input.value = '';
    if (!this.#dialog.open) this.#dialog.showModal();
    this.#input.focus();
  }

  #given(event) {
    event.preventDefault();
    const key = this.#input.value.trim();
    // A header can carry nothing else.
    if (!/^[\x21-\x7e]+$/.test(key)) {
      byId('key-error').textContent = 'A key is printable ASCII without spaces.';
      return;
    }
    sessionStorage.setItem(STORED, key);
    this.#declined = false;
    this.#showButton(true);
    this.#dialog.close();
    const asking = this.#asking;
    this.#asking = null;
    if (asking) asking.resolve();
    else this.onoffer();
  }

  #dismissed() {
    const asking = this.#asking;
    this.#asking = null;
    this.#declined = true;
    this.#dialog.close();
    asking?.reject(needed());
  }

  #pressed() {
    if (!this.value) {
      this.#open('');
      return;
    }
    // What is on the page and in the tab was the key's: nothing of it may stay.
    sessionStorage.clear();
    location.reload();
  }

  #showButton(needed) {
    this.#button.hidden = !needed;
    this.#button.textContent = this.value ? 'Forget key' : 'Enter key';
  }
}

function promised() {
  const parts = {};
  parts.promise = new Promise((resolve, reject) => Object.assign(parts, { resolve, reject }));
  return parts;
}

function needed() {
  return new ApiError(401, 'This server needs a key: press “Enter key”.');
}
