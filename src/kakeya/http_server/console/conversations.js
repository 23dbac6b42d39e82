/** What the server holds of conversations, page by page. */

const PAGE = 100;

/**
 * The owner's conversations, newest first.
 * @param {import('./api.js').Api} api
 * @returns {Promise<import('./hub.js').Talk[]>}
 */
export async function list(api) {
  return (await api.get(`v1/conversations?limit=${PAGE}`)).data;
}

/**
 * All that was said in a conversation, oldest first.
 * @param {import('./api.js').Api} api
 * @param {string} id
 * @returns {AsyncGenerator<{role: string, text: string}>}
 */
export async function* messages(api, id) {
  const path = `v1/conversations/${encodeURIComponent(id)}/items?order=asc&limit=${PAGE}`;
  let after = '';
  for (;;) {
    const page = await api.get(after ? `${path}&after=${encodeURIComponent(after)}` : path);
    for (const item of page.data) yield { role: roleOf(item), text: textOf(item) };
    if (!page.has_more) return;
    after = page.last_id;
  }
}

function roleOf(item) {
  if (item.type !== 'message') return 'tool';
  return item.role === 'developer' ? 'system' : item.role;
}

/** Calls of functions are shown as what they are: a name and JSON. */
function textOf(item) {
  if (item.type === 'function_call') return `${item.name}(${item.arguments})`;
  const said = item.content ?? item.output ?? '';
  return typeof said === 'string' ? said : said.map((part) => part.text ?? part.refusal ?? '').join('');
}
