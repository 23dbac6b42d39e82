/** Server-sent events out of a streamed answer. */

const END_OF_EVENT = /\r?\n\r?\n/;

/**
 * The data of each event, parsed as JSON; ends at `[DONE]` or with the stream.
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<any>}
 */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const whole = (text + value).split(END_OF_EVENT);
      text = whole.pop();
      for (const event of whole) {
        const data = dataOf(event);
        if (data === '[DONE]') return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    // Whoever stops reading lets the server know.
    reader.cancel().catch(() => {});
  }
}

function dataOf(event) {
  const lines = event.split(/\r?\n/).filter((line) => line.startsWith('data:'));
  return lines.map((line) => line.slice('data:'.length).trimStart()).join('\n');
}
