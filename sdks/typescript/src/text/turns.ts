/**
 * What a chat template writes, as the ids that an append-only session takes.
 *
 * A session's history is append-only. So after an answer only the ids that the template writes behind it are
 * appended: what closes the answer, the new message, and what opens the next answer. They are found by rendering
 * the last exchange with a stand-in for the answer. What the model really said is never rendered, and stays in
 * the history even where a template would drop part of it, such as its thinking.
 */

import { InvalidArgument } from "../errors.js";
import type { Message } from "./chat-template.js";
import type { Tokenizer } from "./tokenizer.js";

const STAND_IN: Message = { role: "assistant", content: "A" };
const PROBE: Message = { role: "user", content: "Hello" };
const OTHER_PROBE: Message = { role: "user", content: "1" };

/**
 * How many first tokens a session keeps for ever: the opening, up to half of what the session remembers, and never
 * less than its sink.
 */
export function pinnedTokens(openingTokens: number, sink: number, window: number): number {
  return Math.max(sink, Math.min(openingTokens, Math.floor((sink + window) / 2)));
}

/**
 * Ids for a first turn and for every later one. `opening` is the system message, if there is one.
 *
 * The token with which the template itself closes an answer is added to `eosTokenIds` as `endTokenIds`. Throws
 * InvalidArgument when the template refuses.
 */
export class Turns {
  readonly endTokenIds: ReadonlySet<number>;

  constructor(
    private readonly tokenizer: Tokenizer,
    eosTokenIds: Iterable<number>,
    private readonly opening: readonly Message[],
  ) {
    this.endTokenIds = new Set([...eosTokenIds, ...this.#closingToken()]);
  }

  /** The whole conversation, up to where the next answer begins. */
  whole(messages: readonly Message[]): number[] {
    return this.tokenizer.chatIds(messages);
  }

  /**
   * What `message` adds behind the answer to `asked`, which is in the history already.
   *
   * `closed`: so is the token that ended it. Undefined when the template writes what came before differently once
   * something follows: then nothing can be appended, and the whole conversation must be written anew.
   */
  afterAnswer(asked: Message, message: Message, closed: boolean): number[] | undefined {
    const added = this.#idsAfterAnswer([...this.opening, asked], message);
    const first = added?.[0];
    return closed && first !== undefined && this.endTokenIds.has(first) ? added?.slice(1) : added;
  }

  /**
   * How many ids come before the first word of the first user message: the system message, written or implied by
   * the template, and what the template puts around it.
   */
  openingTokens(): number {
    const one = this.tokenizer.chatIds([...this.opening, PROBE]);
    const other = this.tokenizer.chatIds([...this.opening, OTHER_PROBE]);
    const shared = Math.min(one.length, other.length);
    return Math.max(
      0,
      one.slice(0, shared).findIndex((tokenId, at) => tokenId !== other[at]),
    );
  }

  #idsAfterAnswer(asked: readonly Message[], message: Message): number[] | undefined {
    let before: string;
    let after: string;
    try {
      before = this.tokenizer.renderChat(asked) + STAND_IN.content;
      after = this.tokenizer.renderChat([...asked, STAND_IN, message]);
    } catch (error) {
      // Part of a conversation may be refused where the whole is not; the whole will tell.
      if (error instanceof InvalidArgument) {
        return undefined;
      }
      throw error;
    }
    const head = this.tokenizer.encode(before);
    const ids = this.tokenizer.encode(after);
    const continues = ids.length > head.length && head.every((tokenId, at) => tokenId === ids[at]);
    return continues ? ids.slice(head.length) : undefined;
  }

  #closingToken(): number[] {
    const asked = [...this.opening, PROBE];
    this.tokenizer.renderChat(asked); // a template that refuses this much is of no use
    const added = this.#idsAfterAnswer(asked, OTHER_PROBE) ?? [];
    return added.slice(0, 1).filter((tokenId) => this.tokenizer.isSpecial(tokenId));
  }
}
