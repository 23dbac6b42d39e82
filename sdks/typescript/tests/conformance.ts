/**
 * The TypeScript SDK plays cases of the conformance suite: reads them from a file, and prints what came of each step.
 *
 * `tests/support/conformance_python.py` is its twin, and `tests/conformance/README.md` describes the cases.
 */

import { readFileSync } from "node:fs";
import {
  Client,
  type GenerateOptions,
  type GenerateResult,
  KakeyaError,
  type Message,
  type Session,
  type Stream,
  type Token,
  Tokenizer,
  type TokenizerFiles,
} from "kakeya";

type Step = Record<string, any> & { do: string };
type Outcome = { gives: unknown } | { fails: { error: string; status: string | null; message: string } };
type Settings = { api_key?: string | null; model?: string; timeout_s?: number; attempts?: number };
type Case = { title: string; address: string; clients: Record<string, Settings>; steps: Step[] };
type Plan = { server: string; tokenizers: Record<string, Record<string, string>>; cases: Case[] };

const OPTIONS = [
  ...["seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"],
  ...["frequency_penalty", "logit_bias", "logprobs", "min_tokens", "ignore_eos", "stop_token_ids"],
];

class Player {
  readonly #clients = new Map<string, Client>();
  readonly #sessions = new Map<string, Session>();
  readonly #held = new Map<string, Stream<Token>>();
  readonly #files = new Map<string, Uint8Array>();
  readonly #tokenizers: Plan["tokenizers"];

  constructor(plan: Plan, played: Case) {
    this.#tokenizers = plan.tokenizers;
    const settings = Object.keys(played.clients).length > 0 ? played.clients : { main: {} };
    this.#clients.set("direct", client(plan.server, {}));
    for (const [name, each] of Object.entries(settings)) {
      this.#clients.set(name, client(played.address, each));
    }
  }

  async outcome(step: Step): Promise<Outcome> {
    try {
      const play = this.#plays[step.do];
      if (play === undefined) {
        throw new Error(`no step is called ${step.do}`);
      }
      return { gives: (await play(step)) ?? null };
    } catch (error) {
      if (!(error instanceof KakeyaError || error instanceof TypeError)) {
        throw error;
      }
      const status = (error instanceof KakeyaError && error.status) || null;
      return { fails: { error: error.name, status, message: error.message } };
    }
  }

  async leave(): Promise<void> {
    for (const stream of this.#held.values()) {
      await stream.return();
    }
    for (const session of this.#sessions.values()) {
      const again = known(this.#clients, "direct").session(session.sessionId);
      await again.close().catch(() => undefined); // most were closed by their case
    }
    for (const each of this.#clients.values()) {
      each.close();
    }
  }

  readonly #plays: Record<string, (step: Step) => Promise<unknown>> = {
    create: (step) => this.#create(step),
    attach: async (step) => {
      const id = step.id ?? this.#session({ ...step, session: step.to }).sessionId;
      this.#sessions.set(step.session, this.#client(step).session(id));
    },
    append: (step) => {
      const { expected_history_length: expectedHistoryLength } = step;
      return this.#session(step).append(step.token_ids, { expectedHistoryLength });
    },
    generate: (step) => this.#generate(step),
    release: async (step) => {
      await this.#held.get(step.session ?? "s")?.return();
      this.#held.delete(step.session ?? "s");
    },
    chat: async (step) => {
      const stream = this.#session(step).chat(step.text, { maxTokens: step.max_tokens, ...options(step) });
      let text = "";
      for await (const piece of stream) {
        text += piece;
      }
      return { text, result: told(stream.result) };
    },
    info: async (step) => told(await this.#session(step).info()),
    recall: (step) => {
      const ranges = (step.ranges as [number, number][]).map(([start, end]) => ({ start, end }));
      return this.#session(step).recall(ranges, { remember: step.remember });
    },
    export_session: async (step) => {
      this.#files.set(step.file, await this.#session(step).export());
    },
    import_session: async (step) => {
      const file = known(this.#files, step.file).subarray(0, step.cut);
      this.#sessions.set(step.session, await this.#client(step).importSession(file, { label: step.label }));
    },
    fork: async (step) => {
      this.#sessions.set(step.as, await this.#session(step).fork());
    },
    close: (step) => this.#session(step).close(),
    list_sessions: async (step) => (await this.#client(step).listSessions()).map((info) => info.clientLabel),
    server_info: async (step) => told(await this.#client(step).serverInfo()),
    encode: async (step) => (await this.#tokenizer(step)).encode(step.text, { special: step.special, bos: step.bos }),
    decode: async (step) => (await this.#tokenizer(step)).decode(step.token_ids, { special: step.special }),
    token_text: async (step) => (await this.#tokenizer(step)).tokenText(step.token_id),
    render: async (step) => {
      const { messages, tools, add_generation_prompt: addGenerationPrompt } = step;
      return (await this.#tokenizer(step)).renderChat(messages, { tools, addGenerationPrompt });
    },
    chat_ids: async (step) => (await this.#tokenizer(step)).chatIds(step.messages as Message[]),
    at_once: (step) => Promise.all((step.branches as Step[][]).map((steps) => this.#branch(steps))),
  };

  async #branch(steps: Step[]): Promise<Outcome[]> {
    const outcomes: Outcome[] = [];
    for (const step of steps) {
      outcomes.push(await this.outcome(step));
    }
    return outcomes;
  }

  async #create(step: Step): Promise<void> {
    const session = await this.#client(step).createSession({
      label: step.label,
      system: step.system,
      eosTokenIds: step.eos_token_ids,
      ignoreEos: step.ignore_eos,
      pinnedPrefixTokens: step.pinned_prefix_tokens,
      recallTokens: step.recall_tokens,
    });
    this.#sessions.set(step.session ?? "s", session);
  }

  async #generate(step: Step): Promise<unknown> {
    const stream = this.#session(step).generate(step.max_tokens, options(step));
    const tokens = await this.#read(stream, step);
    const said = { token_ids: tokens.map((token) => token.id), result: told(stream.result) };
    if (step.logprobs === undefined) {
      return said;
    }
    return { ...said, logprobs: tokens.map((token) => token.topLogprobs?.map((top) => top.id)) };
  }

  async #read(stream: Stream<Token>, step: Step): Promise<Token[]> {
    if (step.cancel_after === 0) {
      stream.cancel();
    }
    const tokens: Token[] = [];
    for (let item = await stream.next(); !item.done; item = await stream.next()) {
      tokens.push(item.value);
      if (tokens.length === step.cancel_after) {
        stream.cancel();
      }
      if (tokens.length === step.leave_after) {
        await stream.return();
      }
      if (tokens.length === step.hold_after) {
        this.#held.set(step.session ?? "s", stream);
        break;
      }
    }
    return tokens;
  }

  #client(step: Step): Client {
    return known(this.#clients, step.client ?? "main");
  }

  #session(step: Step): Session {
    return known(this.#sessions, step.session ?? "s");
  }

  async #tokenizer(step: Step): Promise<Tokenizer> {
    const files = this.#tokenizers[step.tokenizer ?? "sentencepiece"];
    if (step.tokenizer === undefined && step.template === undefined) {
      return await this.#client(step).tokenizer();
    }
    return new Tokenizer(camel({ ...files, chat_template: step.template }) as unknown as TokenizerFiles);
  }
}

function client(address: string, settings: Settings): Client {
  const { api_key: apiKey = "first-key", model, timeout_s = 30, attempts = 6 } = settings;
  const retry = { attempts, firstDelayMs: 10, longestDelayMs: 100 };
  return new Client({ address, apiKey: apiKey ?? undefined, model, timeoutMs: timeout_s * 1000, retry });
}

function options(step: Step): GenerateOptions {
  const given = Object.fromEntries(OPTIONS.filter((name) => name in step).map((name) => [name, step[name]]));
  const timeout = "timeout_s" in step ? { timeoutMs: step.timeout_s * 1000 } : {};
  return { ...camel(given), ...timeout, ...step.odd_options };
}

/** A value of ours by the names of the wire. */
function told(value: GenerateResult | object | undefined): unknown {
  if (value === undefined) {
    return null;
  }
  const snake = (name: string) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [snake(name), each]));
}

function camel(fields: Record<string, unknown>): Record<string, unknown> {
  const name = (wire: string) => wire.replace(/_([a-z])/g, (_, letter: string) => letter.toUpperCase());
  return Object.fromEntries(Object.entries(fields).map(([wire, value]) => [name(wire), value]));
}

function known<T>(named: Map<string, T>, name: string): T {
  const found = named.get(name);
  if (found === undefined) {
    throw new Error(`nothing is called ${name} yet`);
  }
  return found;
}

async function play(plan: Plan, each: Case): Promise<Outcome[]> {
  const player = new Player(plan, each);
  const outcomes: Outcome[] = [];
  try {
    for (const step of each.steps) {
      outcomes.push(await player.outcome(step));
    }
  } finally {
    await player.leave();
  }
  return outcomes;
}

const plan = JSON.parse(readFileSync(process.argv[2] ?? "", "utf8")) as Plan;
const outcomes: Record<string, Outcome[]> = {};
for (const each of plan.cases) {
  outcomes[each.title] = await play(plan, each);
}
process.stdout.write(JSON.stringify(outcomes));
