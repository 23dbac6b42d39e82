/** What the keyboard does anywhere on the page. */

/**
 * @param {import('./chat.js').Chat} chat
 * @param {{startNew: () => void, fork: () => void, step: (by: number) => void}} actions
 */
export function listen(chat, actions) {
  const withAlt = {
    KeyN: actions.startNew,
    KeyK: actions.fork,
    ArrowUp: () => actions.step(-1),
    ArrowDown: () => actions.step(1),
  };
  document.addEventListener('keydown', (event) => {
    if (document.querySelector('dialog[open]')) return;
    if (event.key === 'Escape' && chat.isWriting) {
      event.preventDefault();
      chat.stop();
      return;
    }
    // By its place on the keyboard: with Alt held, some layouts give another letter.
    const action = event.altKey && !event.ctrlKey && !event.metaKey ? withAlt[event.code] : undefined;
    if (!action) return;
    event.preventDefault();
    action();
  });
}
