/** The messages of one conversation on the page. */

import { byId, element } from './dom.js';
import { count, duration, rate } from './format.js';

const NEAR_THE_END = 60;

/** @typedef {import('./answer.js').Outcome} Outcome */

export class Log {
  #host = byId('log');
  element = element('div', { class: 'messages' });
  /** Stops the answer that is being written; null when none is. @type {AbortController | null} */
  stop = null;
  isLoading = false;

  /** Show this one in place of any other. */
  show() {
    if (this.#host.firstChild !== this.element) this.#host.replaceChildren(this.element);
    this.#host.scrollTop = this.#host.scrollHeight;
  }

  /** @param {'user' | 'assistant' | 'system' | 'tool'} role */
  add(role, text) {
    const said = element('p', { class: 'said' }, text);
    const message = element('article', { class: `message ${role}`, 'aria-label': NAMES[role] ?? role }, said);
    this.#append(message);
    return message;
  }

  /** An answer that is still to come. */
  addAnswer() {
    const message = this.add('assistant', '');
    message.classList.add('writing');
    message.setAttribute('aria-busy', 'true');
    return new Answer(message, (write) => this.#keepEndInView(write));
  }

  /** Words of the page itself. */
  note(text, kind = 'note') {
    this.#append(element('p', { class: kind, role: kind === 'error' ? 'alert' : 'note' }, text));
  }

  #append(node) {
    this.#keepEndInView(() => this.element.append(node));
  }

  #keepEndInView(write) {
    const host = this.#host;
    const atEnd = host.scrollHeight - host.scrollTop - host.clientHeight < NEAR_THE_END;
    write();
    if (atEnd && this.element.isConnected) host.scrollTop = host.scrollHeight;
  }
}

const NAMES = { user: 'You', assistant: 'Answer', system: 'Instructions', tool: 'Tool' };

/** An answer as it is written. */
class Answer {
  #message;
  #write;
  #node = document.createTextNode('');
  #waiting = '';
  /** All that has come. */
  text = '';

  constructor(message, write) {
    this.#message = message;
    this.#write = write;
    message.firstChild.append(this.#node);
  }

  /** Shown with the next frame: tokens may come faster than frames. @param {string} text */
  append(text) {
    if (this.#waiting === '') requestAnimationFrame(() => this.#flush());
    this.#waiting += text;
    this.text += text;
  }

  #flush() {
    const text = this.#waiting;
    this.#waiting = '';
    if (text) this.#write(() => this.#node.appendData(text));
  }

  /** @param {Outcome} outcome */
  finish(outcome) {
    this.#flush();
    this.#message.classList.remove('writing');
    this.#message.removeAttribute('aria-busy');
    const about = [ending(outcome), ...figures(outcome)].filter(Boolean).join(' · ');
    const remembered = recalled(outcome);
    this.#write(() => this.#message.append(element('p', { class: `about ${outcome.status}` }, about), ...remembered));
  }

  remove() {
    this.#message.remove();
  }
}

/** What had left the window and was seen again, to unfold. @param {Outcome} outcome */
function recalled({ usage }) {
  const pieces = usage?.recalled ?? [];
  if (pieces.length === 0) return [];
  const texts = pieces.map(({ text }) => element('blockquote', {}, text.trim()));
  const title = element('summary', {}, `remembered ${count(usage.recalled_tokens)} tokens from earlier`);
  return [element('details', { class: 'about recalled' }, title, ...texts)];
}

/** @param {Outcome} outcome */
function ending({ status, detail }) {
  if (status === 'completed') return '';
  if (status === 'stopped') return 'stopped, and kept as far as it came';
  if (status === 'incomplete') return detail === 'max_output_tokens' ? 'cut at the longest answer' : `cut: ${detail}`;
  return detail;
}

/** @param {Outcome} outcome */
function figures({ usage, firstTextSeconds, seconds }) {
  if (!usage) return [];
  const computed = usage.input_tokens - (usage.input_tokens_details?.cached_tokens ?? 0);
  const parts = [
    `${count(computed)} new of ${count(usage.input_tokens)} tokens computed`,
    `${count(usage.output_tokens)} written at ${rate(usage.output_tokens / seconds)}/s`,
  ];
  if (firstTextSeconds !== null) parts.push(`first after ${duration(firstTextSeconds)}`);
  if (usage.dropped_tokens) parts.push(`${count(usage.dropped_tokens)} have left the window`);
  return parts;
}
