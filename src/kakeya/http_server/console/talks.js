/** The list of conversations: new, pick an earlier one. */

import { byId, element, setText } from './dom.js';
import { count } from './format.js';

export class TalkList {
  #hub;
  #list = byId('talk-list');

  /**
   * @param {import('./hub.js').Hub} hub
   * @param {(id: string) => void} open
   */
  constructor(hub, open) {
    this.#hub = hub;
    this.#list.addEventListener('click', (event) => {
      const button = event.target.closest('button');
      if (button) open(button.dataset.id);
    });
    for (const name of ['talks', 'current', 'sessions']) hub.addEventListener(name, () => this.#update());
  }

  #update() {
    const { talks, current } = this.#hub;
    byId('talk-empty').hidden = talks.length > 0;
    // Each keeps its item wherever the list moves it, so that a click does not land on another.
    const items = new Map([...this.#list.children].map((item) => [item.firstChild.dataset.id, item]));
    const ids = new Set(talks.map((talk) => talk.id));
    for (const [id, item] of items) if (!ids.has(id)) item.remove();
    talks.forEach((talk, place) => {
      const item = items.get(talk.id) ?? newItem();
      const there = this.#list.children[place] ?? null;
      if (item !== there) this.#list.insertBefore(item, there);
      const button = item.firstChild;
      button.dataset.id = talk.id;
      setText(button.children[0], talk.title || 'Untitled');
      setText(button.children[1], this.#about(talk));
      if (talk.id === current) button.setAttribute('aria-current', 'true');
      else button.removeAttribute('aria-current');
    });
  }

  #about(talk) {
    return talk.metadata.forked_from ? `fork, ${this.#memory(talk)}` : this.#memory(talk);
  }

  #memory(talk) {
    if (this.#hub.answering.has(talk.id)) return 'writing …';
    const session = this.#hub.sessions.find((candidate) => candidate.session_id === talk.session_id);
    return session ? `${count(session.history_length)} tokens` : 'holds no memory';
  }
}

function newItem() {
  const title = element('span', { class: 'talk-title' });
  const about = element('span', { class: 'talk-about' });
  return element('li', {}, element('button', { type: 'button', class: 'talk' }, title, about));
}
