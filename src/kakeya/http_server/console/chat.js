/** The chat: one conversation at a time on the page, any number of them being answered. */

import { ask } from './answer.js';
import { announce, byId } from './dom.js';
import { Log } from './log.js';
import { settings } from './settings.js';
import { patiently } from './api.js';
import * as conversations from './conversations.js';
import * as looseEnds from './loose_ends.js';

// Who listens to a longer answer reads it in the log.
const ANNOUNCED = 1000;

export class Chat {
  #api;
  #hub;
  #watch;
  #message = byId('message');
  #log = new Log();
  /** Conversations that are being answered. @type {Map<string, Log>} */
  #running = new Map();

  /**
   * @param {import('./api.js').Api} api
   * @param {import('./hub.js').Hub} hub
   * @param {import('./watch.js').Watch} watch
   */
  constructor(api, hub, watch) {
    this.#api = api;
    this.#hub = hub;
    this.#watch = watch;
    byId('composer').addEventListener('submit', (event) => {
      event.preventDefault();
      this.send();
    });
    this.#message.addEventListener('keydown', (event) => this.#typed(event));
    byId('stop-button').addEventListener('click', (event) => {
      this.stop();
      // The button goes; who pressed it with a key goes on in the message box.
      if (event.target.matches(':focus-visible')) this.focus();
    });
    hub.addEventListener('talks', () => this.#update());
    this.startNew();
  }

  get isWriting() {
    return this.#log.stop !== null;
  }

  /** An empty page; the server hears of it with the first message. */
  startNew() {
    this.#log = new Log();
    this.#log.show();
    this.#hub.open(null);
    this.#update();
  }

  /** Show a conversation that the server holds. @param {string} id */
  async open(id) {
    const running = this.#running.get(id);
    this.#log = running ?? new Log();
    this.#log.show();
    this.#hub.open(id);
    this.#update();
    if (!running) await this.#load(id, this.#log);
    this.#watch.now();
  }

  async #load(id, log) {
    log.isLoading = true;
    try {
      for await (const { role, text } of conversations.messages(this.#api, id)) log.add(role, text);
      for (const { role, content } of looseEnds.looseEnd(id)) log.add(role, content);
    } catch (error) {
      log.note(error.message, 'error');
    } finally {
      log.isLoading = false;
    }
    if (log === this.#log) log.show();
  }

  /** Send what is in the message box. */
  async send() {
    const text = this.#message.value;
    if (!text.trim() || this.isWriting || this.#log.isLoading) return;
    this.#message.value = '';
    const log = this.#log;
    const said = log.add('user', text);
    const answer = log.addAnswer();
    log.stop = new AbortController();
    this.#update();
    try {
      await this.#answer(log, text, answer);
    } catch (error) {
      // Nothing has begun: the words go back where they came from.
      said.remove();
      answer.remove();
      log.note(error.message, 'error');
      if (log === this.#log && !this.#message.value) this.#message.value = text;
    } finally {
      log.stop = null;
      this.#update();
    }
    await this.refresh();
  }

  async #answer(log, text, answer) {
    const id = this.#hub.current ?? (await this.#begin(log, text));
    this.#running.set(id, log);
    this.#hub.answering.add(id);
    const looking = setTimeout(() => this.#watch.now(), 100);
    try {
      const request = { conversation: id, input: looseEnds.inputFor(id, text), ...settings() };
      const outcome = await ask(this.#api, request, log.stop.signal, (piece) => answer.append(piece));
      if (answer.text === '' && outcome.status === 'stopped') throw new Error('Stopped before anything came.');
      if (outcome.usage) looseEnds.drop(id);
      else if (answer.text) looseEnds.keep(id, text, answer.text);
      answer.finish(outcome);
      if (log === this.#log) announce(`${answer.text.slice(0, ANNOUNCED)} ${outcome.detail}`);
    } finally {
      clearTimeout(looking);
      this.#running.delete(id);
      this.#hub.answering.delete(id);
    }
  }

  async #begin(log, text) {
    const { id } = await this.#api.post('v1/conversations', {});
    if (log === this.#log) this.#hub.current = id;
    this.#hub.begin(id, text);
    return id;
  }

  /** End the answer of this conversation; what came so far stays. */
  stop() {
    this.#log.stop?.abort();
  }

  /** Go on in a copy; the original stays as it is. */
  async fork() {
    const id = this.#hub.current;
    if (!id || this.isWriting) return;
    await this.#tried(async () => {
      const metadata = { ...this.#hub.currentTalk?.metadata, forked_from: id };
      const copy = await this.#api.post(`v1/conversations/${encodeURIComponent(id)}/fork`, { metadata });
      looseEnds.copy(id, copy.id);
      await this.refresh();
      await this.open(copy.id);
      this.#log.note('Forked here: the original stays as it is.');
      announce('Forked. You are in the copy.');
    });
  }

  /** Delete this conversation and free its session. */
  async delete() {
    const id = this.#hub.current;
    if (!id) return;
    this.stop();
    await this.#tried(async () => {
      await patiently(() => this.#api.delete(`v1/conversations/${encodeURIComponent(id)}`));
      looseEnds.drop(id);
      this.startNew();
      await this.refresh();
      announce('Deleted.');
    });
  }

  /** Read the list of conversations again. */
  async refresh() {
    try {
      this.#hub.list(await conversations.list(this.#api));
      this.#watch.now();
    } catch (error) {
      this.#hub.emit('trouble', error);
    }
  }

  focus() {
    this.#message.focus();
  }

  async #tried(work) {
    try {
      await work();
    } catch (error) {
      this.#log.note(error.message, 'error');
    }
  }

  #typed(event) {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send();
  }

  #update() {
    const id = this.#hub.current;
    const writing = this.isWriting;
    byId('talk-title').textContent = this.#hub.currentTalk?.title || 'New conversation';
    byId('stop-button').hidden = !writing;
    byId('send-button').hidden = writing;
    byId('fork-button').disabled = id === null || writing;
    byId('delete-button').disabled = id === null;
  }
}
