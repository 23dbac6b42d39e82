/** Tokens each second of the whole server over the last two minutes, as this page saw them. */

import { byId } from './dom.js';
import { rate } from './format.js';
import { area, canvas, label, line, roundTop, rule } from './plot.js';

const SECONDS = 120;
const LEFT = 52;
const RIGHT = 12;
const TOP = 10;
const BODY = 44;
const FOOT = 18;

export class ThroughputFigure {
  #hub;

  /** @param {import('./hub.js').Hub} hub */
  constructor(hub) {
    this.#hub = hub;
    const redraw = canvas(byId('rate-plot'), (width) => this.#draw(width));
    hub.addEventListener('sessions', () => {
      redraw();
      this.#tell();
    });
  }

  get #now() {
    return this.#hub.rates.at(-1)?.rate ?? 0;
  }

  #tell() {
    const running = this.#hub.sessions.filter((session) => session.state === 'generating').length;
    const writing = running === 1 ? '1 session writes' : `${running} sessions write`;
    byId('rate-now').textContent = running || this.#now ? `${rate(this.#now)} tokens/s, ${writing}` : 'at rest';
    const most = Math.max(0, ...this.#hub.rates.map((sample) => sample.rate));
    byId('rate-plot').setAttribute(
      'aria-label',
      `Throughput over two minutes: ${rate(this.#now)} tokens each second now, ${rate(most)} at most`,
    );
  }

  #draw(width) {
    const samples = this.#hub.rates;
    const end = samples.at(-1)?.at ?? 0;
    const shown = samples.filter((sample) => sample.at > end - SECONDS);
    const highest = roundTop(Math.max(10, ...shown.map((sample) => sample.rate)) * 1.05);
    const floor = TOP + BODY;
    const points = shown.map((sample) => ({
      x: width - RIGHT - ((width - LEFT - RIGHT) * (end - sample.at)) / SECONDS,
      y: floor - (BODY * sample.rate) / highest,
    }));
    return {
      height: floor + FOOT,
      parts: [
        rule(LEFT, width - RIGHT, TOP),
        rule(LEFT, width - RIGHT, floor, 'base'),
        label(LEFT - 8, TOP + 4, rate(highest), 'axis', 'end'),
        label(LEFT - 8, floor + 1, '0', 'axis', 'end'),
        area(points, floor, 'rate'),
        line(points, 'rate'),
        label(LEFT, floor + 15, '2 min ago', 'axis'),
        label(width - RIGHT, floor + 15, 'now', 'axis', 'end'),
      ],
    };
  }
}
