/**
 * A conversation as a session takes it: the first turn whole, every later turn only what is new.
 *
 * Some templates write the earlier part differently once a message follows; one may move the system message. Then
 * nothing can be appended: the turn is the whole conversation, marked `restarts`, for a fresh session.
 */

import type { Message } from "./chat-template.js";
import type { Tokenizer } from "./tokenizer.js";
import { Turns } from "./turns.js";

/** Token ids to append. With `restarts` they are the whole conversation, for a fresh session. */
export interface Turn {
  readonly tokenIds: readonly number[];
  readonly restarts: boolean;
}

/** The messages so far, and the ids that the next one adds. Throws InvalidArgument when the template refuses. */
export class Transcript {
  #messages: readonly Message[];

  private constructor(
    private readonly turns: Turns,
    private readonly opening: readonly Message[],
    messages: readonly Message[],
    private answerIsClosed: boolean,
  ) {
    this.#messages = messages;
  }

  /** A new one. `eosTokenIds` are those that the model ends an answer with. */
  static begin(tokenizer: Tokenizer, eosTokenIds: Iterable<number>, system?: string): Transcript {
    const opening = system === undefined ? [] : [{ role: "system", content: system }];
    return new Transcript(new Turns(tokenizer, eosTokenIds, opening), opening, opening, false);
  }

  /** The same conversation so far, independent from here on. */
  fork(): Transcript {
    return new Transcript(this.turns, this.opening, this.#messages, this.answerIsClosed);
  }

  /** The ids that end an answer. */
  get endTokenIds(): ReadonlySet<number> {
    return this.turns.endTokenIds;
  }

  /** What the user's next message adds. Changes nothing. */
  nextTurn(text: string): Turn {
    const message = { role: "user", content: text };
    const asked = this.#messages.at(-2);
    if (asked === undefined || this.#messages.length === this.opening.length) {
      return { tokenIds: this.turns.whole([...this.opening, message]), restarts: false };
    }
    const added = this.turns.afterAnswer(asked, message, this.answerIsClosed);
    if (added === undefined) {
      return { tokenIds: this.turns.whole([...this.#messages, message]), restarts: true };
    }
    return { tokenIds: added, restarts: false };
  }

  /** Record an exchange. `closed` says whether an end token is in the session's history. */
  add(text: string, answer: string, closed: boolean): void {
    const exchange = [
      { role: "user", content: text },
      { role: "assistant", content: answer },
    ];
    this.#messages = [...this.#messages, ...exchange];
    this.answerIsClosed = closed;
  }

  /** How many ids come before the first word of the first user message. */
  openingTokens(): number {
    return this.turns.openingTokens();
  }
}
