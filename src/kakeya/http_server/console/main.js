/** Puts the page together. */

import { Api } from './api.js';
import { Chat } from './chat.js';
import { byId, setText } from './dom.js';
import { count, duration, memory, modelName } from './format.js';
import { Hub } from './hub.js';
import { KeyPrompt } from './key.js';
import { restoreSettings } from './settings.js';
import { listen } from './shortcuts.js';
import { SessionTable } from './table.js';
import { TalkList } from './talks.js';
import { ThroughputFigure } from './throughput.js';
import { TurnsFigure } from './turns.js';
import { Watch } from './watch.js';

const SURE_MS = 4000;

const key = new KeyPrompt();
const api = new Api(key);
const hub = new Hub();
const watch = new Watch(api, hub);
restoreSettings();
const chat = new Chat(api, hub, watch);
new TalkList(hub, openTalk);
new SessionTable(hub);
new TurnsFigure(hub);
new ThroughputFigure(hub);

function openTalk(id) {
  show('chat');
  chat.open(id);
}

function startNew() {
  show('chat');
  chat.startNew();
  chat.focus();
}

async function fork() {
  show('chat');
  await chat.fork();
  chat.focus();
}

function step(by) {
  const here = hub.talks.findIndex((talk) => talk.id === hub.current);
  const there = hub.talks[here === -1 ? 0 : here + by];
  if (there) openTalk(there.id);
}

/** On a narrow page one view is shown at a time. */
function show(view) {
  document.body.dataset.view = view;
  for (const button of document.querySelectorAll('.tabs button')) {
    button.setAttribute('aria-pressed', String(button.dataset.show === view));
  }
}

/** Deleting needs a second press. */
function confirmDelete() {
  const button = byId('delete-button');
  if (button.classList.contains('sure')) {
    calm();
    chat.delete();
    return;
  }
  button.classList.add('sure');
  button.textContent = 'Really delete';
  setTimeout(calm, SURE_MS);
}

function calm() {
  const button = byId('delete-button');
  button.classList.remove('sure');
  button.textContent = 'Delete';
}

let isTroubled = false;

function showTrouble(error) {
  if (isTroubled && !error) chat.refresh(); // it may be another server by now
  isTroubled = Boolean(error);
  const notice = byId('notice');
  notice.hidden = !error;
  setText(notice, error?.message ?? '');
}

function showFacts() {
  const { facts } = hub;
  const held = hub.sessions.reduce((sum, session) => sum + session.kv_live_bytes, 0);
  const parts = [
    modelName(facts.model),
    `window ${count(facts.sink)} + ${count(facts.window)} tokens`,
    `your sessions hold ${memory(held)} of ${memory(facts.pool_bytes)}`,
  ];
  setText(byId('facts'), parts.join(' · '));
}

/** The three numbers of the figure, for a page too narrow to show it beside the chat. */
function showStrip() {
  const last = hub.turns.get(hub.followed)?.at(-1);
  const strip = byId('strip');
  strip.hidden = !last;
  if (!last) return;
  const parts = [
    `history ${count(last.history_length)}`,
    `first token ${duration(last.first_token_seconds)}`,
    `KV ${memory(last.kv_live_bytes)}`,
  ];
  setText(strip, parts.join(' · '));
}

hub.addEventListener('trouble', (event) => showTrouble(event.detail));
hub.addEventListener('sessions', showFacts);
hub.addEventListener('turns', showStrip);
for (const button of document.querySelectorAll('[data-show]')) {
  button.addEventListener('click', () => show(button.dataset.show));
}
byId('new-button').addEventListener('click', startNew);
byId('fork-button').addEventListener('click', fork);
byId('delete-button').addEventListener('click', confirmDelete);
byId('delete-button').addEventListener('blur', calm);
byId('help-button').addEventListener('click', () => byId('help-dialog').showModal());
key.onoffer = () => chat.refresh();
listen(chat, { startNew, fork, step });
// On a phone that would bring up the keyboard over half the page.
if (matchMedia('(pointer: fine)').matches) chat.focus();
await chat.refresh();
await watch.run();
