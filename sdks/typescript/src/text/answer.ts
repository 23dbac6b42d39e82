/** An answer's tokens as text that may be shown: whole characters, no end token. */

import { InvalidArgument } from "../errors.js";
import { Detokenizer } from "./detokenizer.js";
import type { Tokenizer } from "./tokenizer.js";

/** Feed it the tokens of an answer, and show what it gives. */
export class AnswerText {
  /** All that was given so far. */
  text = "";
  /** Whether the last token was one that ends an answer: the history then holds it. */
  closed = false;
  readonly #detokenizer: Detokenizer;

  constructor(
    tokenizer: Tokenizer,
    private readonly endTokenIds: ReadonlySet<number>,
  ) {
    this.#detokenizer = new Detokenizer(tokenizer);
  }

  /** The text that the next token completes. */
  feed(tokenId: number): string {
    this.closed = this.endTokenIds.has(tokenId);
    return this.closed ? "" : this.#given(this.#read(tokenId));
  }

  /** Nothing follows: what a character that did not come leaves behind. */
  finish(): string {
    return this.#given(this.#detokenizer.finish());
  }

  #given(piece: string): string {
    this.text += piece;
    return piece;
  }

  #read(tokenId: number): string {
    try {
      return this.#detokenizer.feed(tokenId);
    } catch (error) {
      // A model's vocabulary may be padded: a token that the tokenizer does not know has no text.
      if (error instanceof InvalidArgument) {
        return "";
      }
      throw error;
    }
  }
}
