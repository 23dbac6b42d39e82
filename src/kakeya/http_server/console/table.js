/** The owner's sessions, row by row, kept up to date. */

import { byId, element, setText, svg } from './dom.js';
import { count, duration, memory, rate } from './format.js';

/** @typedef {import('./hub.js').Session} Session */

const COLUMNS = [
  ['History', (session) => count(session.history_length)],
  ['Shared', (session) => count(session.shared_tokens)],
  ['KV', (session) => memory(session.kv_live_bytes)],
  ['Dropped', (session) => count(session.dropped_token_count)],
  ['Recalled', (session) => count(session.recalled_tokens)],
  ['Turns', (session) => count(session.turns)],
  ['Tokens/s', tokensPerSecond],
  ['Idle', (session) => (session.state === 'generating' ? '–' : duration(Math.floor(session.idle_seconds)))],
];

export class SessionTable {
  #hub;
  #body = byId('session-rows');
  /** @type {Map<string, Row>} */
  #rows = new Map();

  /** @param {import('./hub.js').Hub} hub */
  constructor(hub) {
    this.#hub = hub;
    for (const name of ['sessions', 'talks', 'current']) hub.addEventListener(name, () => this.#update());
  }

  #update() {
    const hub = this.#hub;
    const kept = new Set(hub.sessions.map((session) => session.session_id));
    for (const [id, row] of this.#rows) {
      if (!kept.has(id)) {
        row.element.remove();
        this.#rows.delete(id);
      }
    }
    const shown = [...hub.sessions].sort((a, b) => Number(hub.isPast(a)) - Number(hub.isPast(b)));
    shown.forEach((session, place) => this.#row(session, place).show(session, hub));
    byId('sessions-table').hidden = hub.sessions.length === 0;
    byId('sessions-empty').hidden = hub.sessions.length > 0;
    setText(byId('sessions-now'), totals(hub));
  }

  /** @param {Session} session */
  #row(session, place) {
    let row = this.#rows.get(session.session_id);
    if (!row) {
      row = new Row(() => this.#hub.choose(session.session_id));
      this.#rows.set(session.session_id, row);
    }
    if (this.#body.children[place] !== row.element) this.#body.insertBefore(row.element, this.#body.children[place]);
    return row;
  }
}

class Row {
  #name;
  #state = element('td', { role: 'cell', class: 'state' });
  #cells;
  #bar = svg('rect', { height: '100%', width: '0%' });

  /** @param {() => void} choose */
  constructor(choose) {
    this.#name = element('button', { type: 'button', class: 'row-name', click: choose });
    this.#cells = COLUMNS.map(([title]) => element('td', { role: 'cell', class: 'number', 'data-title': title }));
    const name = element('td', { role: 'cell', class: 'name' }, this.#name);
    this.element = element('tr', { role: 'row' }, name, this.#state, ...this.#cells);
    this.#texts = this.#cells.map((cell) => cell.appendChild(document.createTextNode('')));
    this.#cells[2].append(svg('svg', { class: 'fill', 'aria-hidden': 'true' }, this.#bar));
  }

  #texts;

  /** @param {Session} session @param {import('./hub.js').Hub} hub */
  show(session, hub) {
    const followed = session.session_id === hub.followed;
    setText(this.#name, hub.nameOf(session));
    this.#name.title = session.session_id;
    this.#name.setAttribute('aria-pressed', String(followed));
    this.element.classList.toggle('followed', followed);
    this.element.classList.toggle('past', hub.isPast(session));
    setText(this.#state, session.state === 'generating' ? 'writing' : session.state);
    this.#state.className = `state ${session.state}`;
    COLUMNS.forEach(([, show], place) => setText(this.#texts[place], show(session)));
    this.#cells[6].classList.toggle('live', session.rate !== null);
    this.#bar.setAttribute('width', `${(100 * session.kv_live_bytes) / session.kv_capacity_bytes}%`);
  }
}

/** Just now while it writes, else over its last turn. @param {Session} session */
function tokensPerSecond(session) {
  if (session.rate !== null) return rate(session.rate);
  const turn = session.last_turn;
  return turn && turn.seconds > 0 ? rate(turn.generated_tokens / turn.seconds) : '–';
}

function totals(hub) {
  const { facts, sessions, sessionCount } = hub;
  if (!facts) return '';
  const hidden = sessionCount - sessions.length;
  const shown = hidden > 0 ? `${count(sessions.length)} of ${count(sessionCount)} shown, ` : '';
  const asleep = facts.asleep ? `${sleepers(facts.asleep)}, ` : '';
  return `${shown}${asleep}${count(facts.free_slabs)} of ${count(facts.capacity)} places free`;
}

/** @param {import('./hub.js').Asleep} asleep */
function sleepers(asleep) {
  const inMemory = `${count(asleep.host)} asleep in memory (${memory(asleep.host_bytes)})`;
  const onDisk = `${count(asleep.disk)} on disk (${memory(asleep.disk_bytes)} with snapshots of all)`;
  const waking = asleep.wake_seconds === null ? [] : [`waking takes ${duration(asleep.wake_seconds)}`];
  const lag = `a crash would cost ${count(asleep.lag_tokens)} tokens of a session`;
  return [inMemory, onDisk, ...waking, lag].join(', ');
}
