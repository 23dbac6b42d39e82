/**
 * The figure this console exists for: over the turns of one session the history climbs, while the
 * time to the first token, the time of each further one and the KV memory stay where they are.
 */

import { byId, element, svg } from './dom.js';
import { count, duration, memory, times } from './format.js';
import { area, canvas, dot, label, line, roundTop, rule } from './plot.js';

const LEFT = 52;
const RIGHT = 12;
const HEAD = 24;
const BODY = 52;
const GAP = 8;
const FOOT = 18;
const SMOOTHED = 20;
const NARROW = 420;

/** @typedef {import('./hub.js').Turn} Turn */

export class TurnsFigure {
  #hub;
  #host = byId('turns-plot');
  #redraw;
  /** The turn under the cursor; null for the last one. @type {number | null} */
  #cursor = null;

  /** @param {import('./hub.js').Hub} hub */
  constructor(hub) {
    this.#hub = hub;
    this.#redraw = canvas(this.#host, (width) => this.#draw(width));
    this.#host.addEventListener('pointermove', (event) => this.#point(event));
    this.#host.addEventListener('pointerleave', () => this.#moveTo(null));
    this.#host.addEventListener('keydown', (event) => this.#step(event));
    this.#host.addEventListener('blur', () => this.#moveTo(null));
    byId('unfollow-button').addEventListener('click', () => hub.choose(null));
    hub.addEventListener('turns', () => this.#moveTo(null));
    hub.addEventListener('sessions', () => this.#tell());
    this.#tell();
  }

  /** @returns {Turn[]} */
  get #turns() {
    return this.#hub.turns.get(this.#hub.followed) ?? [];
  }

  get #span() {
    const session = this.#hub.followedSession ?? this.#hub.facts;
    return session ? session.sink + session.window : Infinity;
  }

  #moveTo(place) {
    this.#cursor = place;
    this.#redraw();
    this.#tell();
  }

  #tell() {
    const session = this.#hub.followedSession;
    const chosen = this.#hub.chosen && session;
    byId('turns-title').textContent = chosen ? `Every turn of “${this.#hub.nameOf(session)}”` : 'Every turn of this session';
    byId('unfollow-button').hidden = !chosen;
    byId('verdict').replaceChildren(...verdict(this.#turns, this.#span));
    byId('turns-readout').textContent = readout(this.#turns[this.#cursor ?? this.#turns.length - 1]);
    this.#host.setAttribute('aria-label', `Plot of every turn. ${byId('verdict').textContent}`);
  }

  #point(event) {
    const turns = this.#turns;
    if (turns.length === 0) return;
    const box = this.#host.getBoundingClientRect();
    const part = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    this.#moveTo(Math.min(turns.length - 1, Math.max(0, Math.round(part * (turns.length - 1)))));
  }

  #step(event) {
    const last = this.#turns.length - 1;
    const here = this.#cursor ?? last;
    const there = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: last }[event.key];
    if (there === undefined || last < 0 || event.altKey) return;
    event.preventDefault();
    this.#moveTo(Math.min(last, Math.max(0, there)));
  }

  #draw(width) {
    const turns = this.#turns;
    const x = (place) => LEFT + (width - LEFT - RIGHT) * (turns.length < 2 ? 0.5 : place / (turns.length - 1));
    const parts = [];
    let top = 0;
    for (const panel of panels(turns, this.#span, width < NARROW)) {
      parts.push(...drawPanel(panel, x, width, top, this.#cursor));
      top += HEAD + BODY + GAP;
    }
    const height = top - GAP + FOOT;
    parts.push(...turnNumbers(turns, x, height));
    if (this.#cursor !== null && turns[this.#cursor]) {
      const at = x(this.#cursor);
      parts.unshift(svg('line', { class: 'cursor', x1: at, x2: at, y1: HEAD, y2: height - FOOT }));
    }
    return { height, parts };
  }
}

/** Seconds for each token after the first; null when there was none. @param {Turn} turn */
export function secondsPerToken(turn) {
  if (turn.generated_tokens < 2) return null;
  return (turn.seconds - turn.first_token_seconds) / (turn.generated_tokens - 1);
}

function panels(turns, span, narrow) {
  const last = turns.at(-1);
  return [
    {
      title: 'History',
      now: last ? [['history', `${count(last.history_length)} tokens`]] : [],
      lines: [{ kind: 'history', values: turns.map((turn) => turn.history_length), filled: true }],
      show: count,
      mark: { value: span, text: `${count(span)} in memory` },
    },
    {
      title: 'Turn latency',
      now: last ? latencies(last, narrow) : [],
      lines: [
        { kind: 'each', values: turns.map(secondsPerToken) },
        { kind: 'latency', values: turns.map((turn) => turn.first_token_seconds) },
      ],
      show: duration,
    },
    {
      title: 'KV memory',
      now: last ? [['memory', memory(last.kv_live_bytes)]] : [],
      lines: [{ kind: 'memory', values: turns.map((turn) => turn.kv_live_bytes), filled: true }],
      show: memory,
      headroom: 1.25,
    },
  ];
}

function latencies(turn, narrow) {
  const first = ['latency', `first token ${duration(turn.first_token_seconds)}`];
  const each = secondsPerToken(turn);
  if (each === null) return [first];
  return [first, ['latency', narrow ? `each ${duration(each)}` : `then ${duration(each)} each`]];
}

function drawPanel(panel, x, width, top, cursor) {
  const floor = top + HEAD + BODY;
  const values = panel.lines.flatMap((series) => series.values.filter((value) => value !== null));
  const highest = axisTop(Math.max(0, ...values) * (panel.headroom ?? 1.1), panel.show);
  const y = (value) => floor - (BODY * value) / highest;
  const parts = [
    label(0, top + 14, panel.title, 'panel-title'),
    nowLabel(panel.now, width - RIGHT, top + 14),
    rule(LEFT, width - RIGHT, floor - BODY),
    rule(LEFT, width - RIGHT, floor, 'base'),
  ];
  if (values.length === 0) return parts;
  parts.push(
    label(LEFT - 8, floor - BODY + 4, panel.show(highest), 'axis', 'end'),
    label(LEFT - 8, floor + 1, '0', 'axis', 'end'),
  );
  if (panel.mark && panel.mark.value < highest) {
    const mark = y(panel.mark.value);
    const under = floor - mark > 14 ? mark + 12 : mark - 4;
    parts.push(rule(LEFT, width - RIGHT, mark, 'mark'), label(width - RIGHT - 8, under, panel.mark.text, 'axis', 'end'));
  }
  for (const series of panel.lines) {
    parts.push(...drawSeries(series, x, y, floor, cursor));
  }
  return parts;
}

function drawSeries(series, x, y, floor, cursor) {
  const points = series.values.map((value, place) => (value === null ? null : { x: x(place), y: y(value) }));
  const parts = [];
  if (series.filled) parts.push(area(points, floor, series.kind));
  parts.push(line(points, series.kind));
  const crowded = points.length > 60;
  points.forEach((point, place) => {
    const marked = place === (cursor ?? points.length - 1);
    if (point && (marked || !crowded)) parts.push(dot(point, series.kind, marked ? 4 : 2));
  });
  return parts;
}

/** Bytes round to whole mebibytes, everything else to round tens. */
function axisTop(value, show) {
  if (show !== memory) return roundTop(value);
  const unit = 1024 ** Math.floor(Math.log(Math.max(value, 1)) / Math.log(1024));
  return roundTop(value / unit) * unit;
}

function nowLabel(now, right, y) {
  const text = svg('text', { class: 'panel-now', x: right, y, 'text-anchor': 'end' });
  now.forEach(([kind, words], place) => {
    if (place > 0) text.append(svg('tspan', { class: 'axis' }, ' · '));
    text.append(svg('tspan', { class: kind }, words));
  });
  return text;
}

function turnNumbers(turns, x, height) {
  if (turns.length === 0) return [];
  const shown = turns.length === 1 ? [0] : [0, turns.length - 1];
  const anchors = turns.length === 1 ? ['middle'] : ['start', 'end'];
  return shown.map((place, index) =>
    label(x(place), height - 3, `turn ${turns[place].number}`, 'axis', anchors[index]));
}

/**
 * What the figure shows, in one sentence.
 * @param {Turn[]} turns @param {number} span how many tokens the session attends to at most
 * @returns {(Node | string)[]}
 */
export function verdict(turns, span) {
  const last = turns.at(-1);
  if (!last) return ['Every turn becomes a point: the history grows, the cost of a turn does not.'];
  // The newest token is computed with the next turn: only then is it in memory.
  const full = turns.findIndex((turn) => turn.history_length > span);
  if (full === -1) {
    const part = Math.floor((100 * (last.history_length - 1)) / span);
    return [`The window is ${part} % full. From 100 % on, memory and latency stay level for as long as you talk.`];
  }
  const since = turns.slice(full);
  if (since.length < 2) return ['The window is full: from here on, memory and latency stay level.'];
  const part = Math.min(SMOOTHED, Math.floor(since.length / 2));
  return [
    `Since turn ${since[0].number}, with a full window: history `,
    strong('history', times(last.history_length / since[0].history_length)),
    ', first token ',
    strong('latency', times(settled(since.slice(-part)) / settled(since.slice(0, part)))),
    ', memory ',
    strong('memory', times(last.kv_live_bytes / since[0].kv_live_bytes)),
    '.',
  ];
}

function strong(kind, text) {
  return element('strong', { class: kind }, text);
}

/** The median time to the first token: one long message does not make a trend. */
function settled(turns) {
  const times = turns.map((turn) => turn.first_token_seconds).sort((a, b) => a - b);
  return times[Math.floor(times.length / 2)];
}

function readout(turn) {
  if (!turn) return '';
  const prompt = turn.history_length - turn.generated_tokens;
  return `Turn ${turn.number}: ${count(turn.computed_tokens)} new of ${count(prompt)} tokens computed, ` +
    `${count(turn.generated_tokens)} written in ${duration(turn.seconds)}.`;
}
