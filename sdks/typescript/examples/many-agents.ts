/** Twenty agents on one server, each in a session of its own, all generating at once. */

import { Client } from "kakeya";

const [address = "127.0.0.1:50051"] = process.argv.slice(2);
const TRADES = ["a baker", "a sailor", "a judge", "a painter", "a farmer"];
const AGENTS = Array.from({ length: 20 }, (_, at) => ({
  name: `agent ${at}`,
  trade: TRADES[at % TRADES.length],
  seed: at,
}));

await using client = new Client({ address });

async function speak(agent: (typeof AGENTS)[number]): Promise<number> {
  await using session = await client.createSession({ label: agent.name, system: `You are ${agent.trade}. Be brief.` });
  let said = "";
  for await (const piece of session.chat("What did you do today?", {
    maxTokens: 16,
    temperature: 0.8,
    seed: agent.seed,
  })) {
    said += piece;
  }
  console.log(`${agent.name}, ${agent.trade}: ${said.replaceAll("\n", " ")}`);
  return session.lastResult?.generatedTokenCount ?? 0;
}

const begun = performance.now();
const counts = await Promise.all(AGENTS.map(speak));
const tokens = counts.reduce((sum, count) => sum + count, 0);
const seconds = (performance.now() - begun) / 1000;
console.log(`${AGENTS.length} agents, ${tokens} tokens in ${seconds.toFixed(1)} s`);
