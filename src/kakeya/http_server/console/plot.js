/** Lines and areas in SVG. Colours come from the style sheet, so they follow light and dark. */

import { svg } from './dom.js';

const STEPS = [1, 1.5, 2, 3, 4, 5, 6, 8, 10];

/** The end of an axis that begins at zero: a round number, not below the value. */
export function roundTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return STEPS.map((step) => step * power).find((top) => top >= value);
}

/** @typedef {{x: number, y: number}} Point */

/** @param {(Point | null)[]} points a null breaks the line */
export function line(points, kind) {
  return svg('path', { class: `line ${kind}`, d: strokes(points) });
}

/** @param {Point[]} points @param {number} floor */
export function area(points, floor, kind) {
  if (points.length < 2) return svg('g');
  const outline = points.map(({ x, y }) => `${x.toFixed(1)} ${y.toFixed(1)}`).join('L');
  const d = `M${points[0].x.toFixed(1)} ${floor}L${outline}L${points.at(-1).x.toFixed(1)} ${floor}Z`;
  return svg('path', { class: `area ${kind}`, d });
}

export function dot({ x, y }, kind, radius = 2.5) {
  return svg('circle', { class: `dot ${kind}`, cx: x.toFixed(1), cy: y.toFixed(1), r: radius });
}

export function rule(x1, x2, y, kind = 'grid') {
  return svg('line', { class: kind, x1, x2, y1: y, y2: y });
}

/** @param {'start' | 'middle' | 'end'} anchor */
export function label(x, y, text, kind = 'axis', anchor = 'start') {
  return svg('text', { class: kind, x, y, 'text-anchor': anchor }, text);
}

function strokes(points) {
  let pen = 'M';
  let d = '';
  for (const point of points) {
    if (point) d += `${pen}${point.x.toFixed(1)} ${point.y.toFixed(1)}`;
    pen = point ? 'L' : 'M';
  }
  return d;
}

/**
 * Draw into an element, now, on `redraw` and whenever its width changes.
 * @param {HTMLElement} host
 * @param {(width: number) => {height: number, parts: Node[]}} draw
 * @returns {() => void} redraw
 */
export function canvas(host, draw) {
  const picture = svg('svg', { 'aria-hidden': 'true' });
  host.append(picture);
  function redraw() {
    const width = Math.round(host.clientWidth);
    if (width === 0) return; // not shown
    const { height, parts } = draw(width);
    picture.setAttribute('viewBox', `0 0 ${width} ${height}`);
    picture.setAttribute('width', String(width));
    picture.setAttribute('height', String(height));
    picture.replaceChildren(...parts);
  }
  new ResizeObserver(redraw).observe(host);
  return redraw;
}
