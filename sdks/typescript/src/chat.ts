/** Text on top of a session: the server's tokenizer, and a conversation turn by turn. */

import type { Connection } from "./connection.js";
import { InvalidArgument } from "./errors.js";
import { AnswerText } from "./text/answer.js";
import { Tokenizer } from "./text/tokenizer.js";
import { Transcript, type Turn } from "./text/transcript.js";
import { pinnedTokens } from "./text/turns.js";
import type { ServerInfo, Token } from "./values.js";

/** The tokenizer of the model that the server runs. */
export async function fetchTokenizer(connection: Connection): Promise<Tokenizer> {
  const reply = await connection.call((rpc, how) => rpc.getTokenizer({}, how));
  return new Tokenizer({ ...reply, chatTemplate: reply.chatTemplate || undefined });
}

/** The conversation that a session holds. */
export class Chat {
  private constructor(
    private readonly tokenizer: Tokenizer,
    private readonly transcript: Transcript,
  ) {}

  /** A new one. Throws InvalidArgument for a model without a chat template. */
  static begin(tokenizer: Tokenizer, eosTokenIds: Iterable<number>, system?: string): Chat {
    if (!tokenizer.hasChatTemplate) {
      throw new InvalidArgument("this model has no chat template; use session.append and session.generate");
    }
    return new Chat(tokenizer, Transcript.begin(tokenizer, eosTokenIds, system));
  }

  /** The model's own, and the one with which its template closes an answer. */
  get endTokenIds(): number[] {
    return [...this.transcript.endTokenIds].sort((a, b) => a - b);
  }

  /** Enough to keep the system message for ever, up to half of what a session remembers. */
  pinnedPrefixTokens(server: ServerInfo): number {
    return pinnedTokens(this.transcript.openingTokens(), server.sink, server.window);
  }

  /** The same conversation so far, independent from here on. */
  fork(): Chat {
    return new Chat(this.tokenizer, this.transcript.fork());
  }

  /** The ids that this message adds. */
  nextTurn(text: string): Turn {
    return this.transcript.nextTurn(text);
  }

  /** The pieces of the answer. However it ends, the exchange is part of the conversation. */
  async *answer(text: string, tokens: AsyncIterable<Token>): AsyncGenerator<string, void, undefined> {
    const answer = new AnswerText(this.tokenizer, this.transcript.endTokenIds);
    try {
      for await (const token of tokens) {
        const piece = answer.feed(token.id);
        if (piece !== "") {
          yield piece;
        }
      }
      const rest = answer.finish();
      if (rest !== "") {
        yield rest;
      }
    } finally {
      this.transcript.add(text, answer.text, answer.closed);
    }
  }
}
