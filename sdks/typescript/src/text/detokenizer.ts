/** Token ids to text, one token at a time. */

import type { SpecialOptions, Tokenizer } from "./tokenizer.js";

/**
 * Turns a stream of token ids into pieces of text that never hold half a character.
 *
 * The pieces joined, `finish` included, are exactly `tokenizer.decode` of all the ids.
 */
export class Detokenizer {
  readonly #utf8 = new TextDecoder("utf-8", { ignoreBOM: true });
  #dropSpace: boolean;

  constructor(
    private readonly tokenizer: Tokenizer,
    private readonly options: SpecialOptions = {},
  ) {
    this.#dropSpace = tokenizer.dropsFirstSpace;
  }

  /**
   * The text that this token completes, often empty in the middle of a character.
   *
   * Throws InvalidArgument for an unknown id, and is then as it was before.
   */
  feed(tokenId: number): string {
    let data = this.tokenizer.textBytes(tokenId, this.options);
    if (this.#dropSpace && data.length > 0) {
      this.#dropSpace = false;
      data = data[0] === 0x20 ? data.subarray(1) : data;
    }
    return this.#utf8.decode(data, { stream: true });
  }

  /** What an unfinished character leaves behind: U+FFFD, or nothing. Call it once, at the end. */
  finish(): string {
    return this.#utf8.decode();
  }
}
