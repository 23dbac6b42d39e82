/**
 * What the page knows, in one place. Views read it and listen for its events:
 * `sessions` (a new look at the server), `talks` (the list of conversations), `current` (another
 * conversation was chosen), `turns` (the followed session has new points), `trouble` (the server
 * cannot be asked; null when it can again).
 *
 * @typedef {object} Facts
 * @property {string} model
 * @property {string} version
 * @property {number} sink
 * @property {number} window
 * @property {number} capacity how many sessions there is room for
 * @property {Asleep?} asleep sessions without a slab, where they can be
 * @property {number} free_slabs how many more
 * @property {number} session_bytes what each session has reserved
 * @property {number} pool_bytes
 * @property {number | null} generated_tokens by the whole server since its start; null if not counted
 *
 * @typedef {object} Asleep
 * @property {number} host sessions in memory
 * @property {number} disk and on disk
 * @property {number} host_bytes
 * @property {number} disk_bytes
 * @property {number} lag_tokens the most that a session would compute again after a crash
 * @property {number | null} wake_seconds on average; null if none woke
 *
 * @typedef {object} Turn
 * @property {number} number from 1
 * @property {number} history_length
 * @property {number} computed_tokens
 * @property {number} generated_tokens
 * @property {number} first_token_seconds
 * @property {number} seconds
 * @property {number} kv_live_bytes
 *
 * @typedef {object} Session
 * @property {string} session_id
 * @property {string} client_label
 * @property {'idle' | 'generating' | 'failed' | 'host' | 'disk'} state
 * @property {number} history_length
 * @property {number} sink
 * @property {number} window
 * @property {number} kv_live_bytes
 * @property {number} kv_capacity_bytes
 * @property {number} shared_tokens of the history, copied from sessions that began the same way
 * @property {number} dropped_token_count
 * @property {number} recalled_tokens
 * @property {number} idle_seconds
 * @property {number} turns
 * @property {number} generated_tokens
 * @property {Turn | null} last_turn
 * @property {number | null} rate tokens each second just now, as this page saw it; null when it rests
 *
 * @typedef {object} Talk
 * @property {string} id
 * @property {string} title
 * @property {string | null} session_id
 * @property {Record<string, string>} metadata
 */

// At the shortest pause between looks: the last two minutes and more.
const RATE_SAMPLES = 600;
const TITLE_LENGTH = 60;

export class Hub extends EventTarget {
  /** @type {Facts | null} */
  facts = null;
  /** @type {Session[]} */
  sessions = [];
  /** How many there are; the newest used of them are in `sessions`. */
  sessionCount = 0;
  /** @type {Talk[]} */
  talks = [];
  /** What conversations are called before their first answer is there. @type {Map<string, string>} */
  #firstWords = new Map();
  /** The conversations that this page is having answered. @type {Set<string>} */
  answering = new Set();
  /** The conversation in the chat; null for one that has not begun. @type {string | null} */
  current = null;
  /** A session chosen in the table, in place of the chat's. @type {string | null} */
  chosen = null;
  /** @type {Map<string, Turn[]>} */
  turns = new Map();
  /** Tokens each second of the whole server, at times in seconds. @type {{at: number, rate: number}[]} */
  rates = [];
  /** Generated tokens of each session at the last look. @type {Map<string, number>} */
  #seen = new Map();
  #lookedAt = 0;

  emit(name, detail = null) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  /** @returns {Talk | undefined} */
  get currentTalk() {
    return this.talks.find((talk) => talk.id === this.current);
  }

  /**
   * The id of the session that a conversation goes on in. While it is being answered the server names
   * the copy that it would fall back to; the one that writes bears the conversation's id.
   * @param {Talk | undefined} talk
   * @returns {string | null}
   */
  headOf(talk) {
    if (!talk) return null;
    const writes = (session) => session.state === 'generating' && session.client_label === talk.id;
    const writing = this.answering.has(talk.id) ? this.sessions.find(writes) : undefined;
    return writing?.session_id ?? talk.session_id;
  }

  /** The id of the session whose turns are plotted. @returns {string | null} */
  get followed() {
    return this.chosen ?? this.headOf(this.currentTalk);
  }

  /** @returns {Session | undefined} */
  get followedSession() {
    return this.sessions.find((session) => session.session_id === this.followed);
  }

  get isBusy() {
    return this.sessions.some((session) => session.state === 'generating');
  }

  /** What people call a session: its conversation's title, its label, or the beginning of its id. */
  nameOf(session) {
    const held = this.talks.find((talk) => this.headOf(talk) === session.session_id);
    if (held) return held.title || 'Untitled';
    const past = this.#pastOf(session);
    if (past) return `earlier point of “${past.title}”`;
    return session.client_label || session.session_id.slice(0, 8);
  }

  /** Whether it is a copy that the server keeps so that going back there is quick. */
  isPast(session) {
    const isHeld = this.talks.some((talk) => this.headOf(talk) === session.session_id);
    return !isHeld && this.#pastOf(session) !== undefined;
  }

  #pastOf(session) {
    return this.talks.find((talk) => talk.id === session.client_label);
  }

  /**
   * A new look at the server.
   * @param {{facts: Facts, session_count: number, sessions: Session[]}} snapshot
   * @param {number} at in seconds
   */
  look(snapshot, at) {
    const passed = at - this.#lookedAt;
    for (const session of snapshot.sessions) {
      const grown = session.generated_tokens - (this.#seen.get(session.session_id) ?? session.generated_tokens);
      session.rate = grown > 0 ? grown / passed : null;
    }
    if (this.facts) this.#sampleRate(snapshot.facts.generated_tokens - this.facts.generated_tokens, passed, at);
    this.facts = snapshot.facts;
    this.sessions = snapshot.sessions;
    this.sessionCount = snapshot.session_count;
    this.#seen = new Map(this.sessions.map((session) => [session.session_id, session.generated_tokens]));
    this.#lookedAt = at;
    for (const id of this.turns.keys()) if (!this.#seen.has(id)) this.turns.delete(id);
    if (this.chosen && !this.#seen.has(this.chosen)) this.chosen = null;
    this.emit('sessions');
  }

  #sampleRate(grown, passed, at) {
    // Less than before: another server stands there now.
    this.rates.push({ at, rate: Math.max(0, grown) / passed });
    if (this.rates.length > RATE_SAMPLES) this.rates.shift();
  }

  /** @param {string | null} id */
  choose(id) {
    this.chosen = id === this.headOf(this.currentTalk) ? null : id;
    this.emit('sessions');
    this.emit('turns');
  }

  /** @param {string | null} id */
  open(id) {
    this.current = id;
    this.chosen = null;
    this.emit('current');
    this.emit('turns');
  }

  /** @param {Talk[]} talks */
  list(talks) {
    for (const talk of talks) talk.title ||= this.#firstWords.get(talk.id) ?? '';
    this.talks = talks;
    this.emit('talks');
  }

  /** A conversation has just begun with these words. @param {string} id */
  begin(id, words) {
    this.#firstWords.set(id, words.trim().split('\n')[0].slice(0, TITLE_LENGTH));
    this.list([{ id, title: '', session_id: null, metadata: {} }, ...this.talks]);
  }

  /** @param {string} sessionId @param {Turn[]} turns */
  remember(sessionId, turns) {
    this.turns.set(sessionId, turns);
    if (sessionId === this.followed) this.emit('turns');
  }
}
