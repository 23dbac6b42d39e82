/**
 * Turns that were stopped. The server keeps a response only when it is whole, so the question and the
 * part of the answer that came are kept here, in this tab, and go along with the next message.
 *
 * @typedef {{role: 'user' | 'assistant', content: string}} Said
 */

const STORED = 'kakeya-loose-end-';

/** @param {string} talk the id of the conversation @returns {Said[]} */
export function looseEnd(talk) {
  return JSON.parse(sessionStorage.getItem(STORED + talk) ?? '[]');
}

/** Add a turn that was stopped. @param {string} talk */
export function keep(talk, question, answer) {
  const turn = [{ role: 'user', content: question }, { role: 'assistant', content: answer }];
  sessionStorage.setItem(STORED + talk, JSON.stringify([...looseEnd(talk), ...turn]));
}

/** The server has it now, or nobody wants it any more. @param {string} talk */
export function drop(talk) {
  sessionStorage.removeItem(STORED + talk);
}

/** A fork has the same loose end. */
export function copy(from, to) {
  const said = sessionStorage.getItem(STORED + from);
  if (said !== null) sessionStorage.setItem(STORED + to, said);
}

/** What to send for a message, with what was left over before it. @returns {string | Said[]} */
export function inputFor(talk, message) {
  const before = looseEnd(talk);
  return before.length ? [...before, { role: 'user', content: message }] : message;
}
