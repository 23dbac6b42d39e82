/** How answers are asked for: the fields under the message box, kept in this tab. */

import { byId } from './dom.js';

const FIELDS = ['instructions', 'temperature', 'repetition-penalty', 'max-tokens'];

/** Fill the fields with what they held before a reload, and keep what they are changed to. */
export function restoreSettings() {
  for (const id of FIELDS) {
    const field = byId(id);
    field.value = sessionStorage.getItem(`kakeya-${id}`) ?? field.value;
    field.addEventListener('change', () => sessionStorage.setItem(`kakeya-${id}`, field.value));
  }
}

/** The part of a request that they stand for; what is left empty is left to the server. */
export function settings() {
  const instructions = byId('instructions').value.trim();
  return {
    ...(instructions ? { instructions } : {}),
    ...number('temperature', 'temperature'),
    ...number('repetition-penalty', 'repetition_penalty'),
    ...number('max-tokens', 'max_output_tokens'),
  };
}

function number(id, name) {
  const field = byId(id);
  return field.value !== '' && field.validity.valid ? { [name]: field.valueAsNumber } : {};
}
