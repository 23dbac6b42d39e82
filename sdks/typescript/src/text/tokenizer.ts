/** Text to token ids and back, and conversations to text. */

import { CorruptCheckpoint, InvalidArgument } from "../errors.js";
import { ChatTemplate, type Message, type RenderOptions } from "./chat-template.js";
import { type Encoder, encoderOf, parsed, type TokenizerJson } from "./encoder.js";
import { type Spelling, spellingOf } from "./spelling.js";

/** All a tokenizer is made of: the answer to `GetTokenizer`. */
export interface TokenizerFiles {
  /** The `tokenizers` library's own file. */
  readonly tokenizerJson: string;
  /** Jinja. Left out: the model has none. */
  readonly chatTemplate?: string;
  readonly bosToken?: string;
  readonly eosToken?: string;
  readonly unkToken?: string;
  readonly padToken?: string;
}

/** How text is read. */
export interface EncodeOptions {
  /** The spelling of a special token, such as `<|im_end|>`, becomes its one id. Left out: true. */
  readonly special?: boolean;
  /** Put in front what the model expects at the start of a document. Left out: false. */
  readonly bos?: boolean;
}

/** How tokens are written. */
export interface SpecialOptions {
  /** Spell special tokens out. Left out: false. */
  readonly special?: boolean;
}

// The tags of a tool call are read from the text, whatever a vocabulary calls them.
const TOOL_TAGS = ["<tool_call>", "</tool_call>"];

/**
 * A model's tokenizer. It does not change once made.
 *
 * Throws CorruptCheckpoint when the files contradict themselves and UnsupportedModel when the vocabulary is
 * spelled in a way that cannot be decoded here.
 */
export class Tokenizer {
  readonly #json: TokenizerJson;
  readonly #encoder: Encoder;
  readonly #spelling: Spelling;
  readonly #added: ReadonlySet<number>;
  readonly #special: ReadonlySet<number>;
  readonly #bytes = new Map<number, Uint8Array>();
  readonly #template: ChatTemplate;
  #plain: Encoder | undefined;
  #start: readonly number[] | undefined;
  #size: number | undefined;
  /** The id that begins a document, if the model has one. */
  readonly bosId: number | undefined;
  /** The id that ends a text, if the model has one. */
  readonly eosId: number | undefined;

  constructor(files: TokenizerFiles) {
    this.#json = parsed(files.tokenizerJson);
    this.#encoder = encoderOf(this.#json, true);
    this.#spelling = spellingOf(this.#json.decoder);
    const added = this.#json.added_tokens;
    this.#added = new Set(added.map((token) => token.id));
    const special = added.filter((token) => token.special && !TOOL_TAGS.includes(token.content));
    this.#special = new Set(special.map((token) => token.id));
    this.bosId = this.#namedId("bos", files.bosToken);
    this.eosId = this.#namedId("eos", files.eosToken);
    this.#template = new ChatTemplate(files.chatTemplate, {
      bos_token: files.bosToken,
      eos_token: files.eosToken,
      unk_token: files.unkToken,
      pad_token: files.padToken,
    });
  }

  /** How many tokens the tokenizer knows. A model's own vocabulary may be padded beyond it. */
  get vocabSize(): number {
    this.#size ??= this.#encoder.get_vocab().size;
    return this.#size;
  }

  get hasChatTemplate(): boolean {
    return this.#template.exists;
  }

  /** Whether a text's first space belongs to the encoding (SentencePiece) and is dropped in decoding. */
  get dropsFirstSpace(): boolean {
    return this.#spelling.dropsFirstSpace;
  }

  /** The ids of `text`. Throws InvalidArgument for what is not Unicode text. */
  encode(text: string, options: EncodeOptions = {}): number[] {
    const { special = true, bos = false } = options;
    if (typeof text !== "string" || !text.isWellFormed()) {
      const shown = JSON.stringify(text)?.slice(0, 40);
      throw new InvalidArgument(`text must be a string without lone surrogates, got ${shown}`);
    }
    const { ids } = this.#encoderFor(special).encode(text, { add_special_tokens: false });
    return bos ? [...this.#documentStart(), ...ids] : ids;
  }

  /**
   * The text of `tokenIds`; special tokens are left out unless `special`.
   *
   * Bytes that are not UTF-8 become U+FFFD. Throws InvalidArgument for an id outside the vocabulary.
   */
  decode(tokenIds: Iterable<number>, options: SpecialOptions = {}): string {
    const pieces = Array.from(tokenIds, (tokenId) => this.textBytes(tokenId, options));
    const data = Buffer.concat(pieces);
    const skipped = this.dropsFirstSpace && data[0] === 0x20 ? 1 : 0;
    return shown(data.subarray(skipped));
  }

  /** What one token adds to a text: nothing for a special token, unless `special`. */
  textBytes(tokenId: number, options: SpecialOptions = {}): Uint8Array {
    const data = this.tokenBytes(tokenId);
    return options.special || !this.#special.has(tokenId) ? data : new Uint8Array();
  }

  /** The bytes that a token stands for, special or not. Throws InvalidArgument for an unknown id. */
  tokenBytes(tokenId: number): Uint8Array {
    let data = this.#bytes.get(tokenId);
    if (data === undefined) {
      data = this.#spelling.tokenBytes(this.#token(tokenId), this.#added.has(tokenId));
      this.#bytes.set(tokenId, data);
    }
    return data;
  }

  /** One token as text, for showing; part of a character shows as U+FFFD. */
  tokenText(tokenId: number): string {
    return shown(this.tokenBytes(tokenId));
  }

  isSpecial(tokenId: number): boolean {
    return this.#special.has(tokenId);
  }

  /**
   * The conversation as the model's chat template writes it, with the tools if it knows how.
   *
   * Throws InvalidArgument for bad messages, a template that refuses them, or a model without a template.
   */
  renderChat(messages: readonly Message[], options: RenderOptions = {}): string {
    return this.#template.render(messages, options);
  }

  /** The ids of `renderChat`. The template itself writes the beginning-of-text token it wants. */
  chatIds(messages: readonly Message[], options: RenderOptions = {}): number[] {
    return this.encode(this.renderChat(messages, options));
  }

  #encoderFor(special: boolean): Encoder {
    if (special) {
      return this.#encoder;
    }
    this.#plain ??= encoderOf(this.#json, false);
    return this.#plain;
  }

  #documentStart(): readonly number[] {
    if (this.#start === undefined) {
      const whole = this.#encoder.encode("a", { add_special_tokens: true }).ids;
      const end = whole.findIndex((tokenId) => !this.#added.has(tokenId));
      this.#start = whole.slice(0, Math.max(end, 0));
    }
    return this.#start;
  }

  #token(tokenId: number): string {
    const token = this.#encoder.id_to_token(tokenId);
    if (token === undefined) {
      throw new InvalidArgument(`token id ${tokenId} is not in the vocabulary of ${this.vocabSize} tokens`);
    }
    return token;
  }

  #namedId(name: string, token: string | undefined): number | undefined {
    if (token === undefined) {
      return undefined;
    }
    const tokenId = this.#encoder.token_to_id(token);
    if (tokenId === undefined) {
      throw new CorruptCheckpoint(`the ${name} token ${token} is not in the tokenizer's vocabulary`);
    }
    return tokenId;
  }
}

function shown(data: Uint8Array): string {
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(data);
}
