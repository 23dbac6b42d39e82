/** Numbers as people read them. */

const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

/** @param {number} value */
export function count(value) {
  return Math.round(value).toLocaleString('en-GB');
}

/** Three figures: 22.5 MiB. @param {number} bytes */
export function memory(bytes) {
  let power = 0;
  while (bytes >= 1000 && power < UNITS.length - 1) {
    bytes /= 1024;
    power += 1;
  }
  return `${figures(bytes)} ${UNITS[power]}`;
}

/** 8.4 ms, 52 ms, 1.24 s, 3 min. @param {number} seconds */
export function duration(seconds) {
  if (seconds < 0.9995) return `${figures(seconds * 1000)} ms`;
  if (seconds < 60) return `${figures(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return `${figures(seconds / 3600)} h`;
}

/** Tokens each second. @param {number} value */
export function rate(value) {
  return figures(value);
}

/** How many times as much. @param {number} factor */
export function times(factor) {
  return `${factor >= 10 ? factor.toFixed(0) : factor.toFixed(factor >= 2 ? 1 : 2)}×`;
}

function figures(value) {
  if (value >= 100) return count(value);
  return value.toFixed(value >= 10 ? 1 : 2).replace(/\.?0+$/, '');
}

/** A file's or directory's own name, where a model is given by its path. @param {string} model */
export function modelName(model) {
  return model.split('/').filter(Boolean).pop() ?? model;
}
