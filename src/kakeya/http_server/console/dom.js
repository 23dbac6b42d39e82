/** Elements by hand. Text only ever becomes text: nothing here, or anywhere, parses markup. */

const SVG = 'http://www.w3.org/2000/svg';

/**
 * @param {string} id
 * @returns {any} the element of that id
 */
export function byId(id) {
  return document.getElementById(id);
}

/**
 * @param {string} tag
 * @param {Record<string, string | number | EventListener>} [attributes] functions become listeners
 * @param {...(Node | string)} children
 * @returns {HTMLElement}
 */
export function element(tag, attributes = {}, ...children) {
  return dress(document.createElement(tag), attributes, children);
}

/**
 * @param {string} tag
 * @param {Record<string, string | number>} [attributes]
 * @param {...(Node | string)} children
 * @returns {SVGElement}
 */
export function svg(tag, attributes = {}, ...children) {
  return dress(document.createElementNS(SVG, tag), attributes, children);
}

function dress(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === 'function') node.addEventListener(name, value);
    else node.setAttribute(name, String(value));
  }
  node.append(...children);
  return node;
}

/** Write only what has changed, so that a selection in the text survives. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Tell those who listen rather than look. */
export function announce(text) {
  byId('announcer').textContent = text;
}
