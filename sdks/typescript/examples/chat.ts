/** A chat in the terminal: type a line, read the answer as it is said. Ctrl-C stops an answer, Ctrl-D leaves. */

import { stdin, stdout } from "node:process";
import { createInterface } from "node:readline/promises";
import { Client, type Session } from "kakeya";

const [address = "127.0.0.1:50051"] = process.argv.slice(2);

async function answer(session: Session, question: string, signal: AbortSignal): Promise<void> {
  try {
    for await (const piece of session.chat(question, { maxTokens: 60, repetitionPenalty: 1.1, signal })) {
      stdout.write(piece);
    }
    stdout.write(`\n  (${session.lastResult?.cachedTokenCount} tokens were not computed again)\n`);
  } catch (error) {
    if (!signal.aborted) {
      throw error;
    }
    stdout.write("\n  (stopped)\n");
  }
}

await using client = new Client({ address });
await using session = await client.createSession({ system: "You are brief." });
const lines = createInterface({ input: stdin, output: stdout, prompt: "> " });
let stop = new AbortController();
lines.on("SIGINT", () => stop.abort());
lines.prompt();
for await (const line of lines) {
  stop = new AbortController();
  await answer(session, line, stop.signal);
  lines.prompt();
}
const { historyLength, kvLiveBytes } = await session.info();
stdout.write(`\nThe session holds ${historyLength} tokens in ${kvLiveBytes} bytes.\n`);
