/** Hugging Face's JavaScript tokenizer, made to cut text exactly as the original in Rust does. */

import { Tokenizer as Untyped } from "@huggingface/tokenizers";
import { CorruptCheckpoint } from "../errors.js";
import type { DecoderConfig } from "./spelling.js";

/** What we read of a tokenizer.json ourselves. */
export interface TokenizerJson {
  readonly added_tokens: readonly AddedToken[];
  readonly decoder: DecoderConfig | null;
  readonly pre_tokenizer: PreTokenizer | null;
}

/** What we use of the package, whose own types cannot be resolved by Node's rules for modules. */
export interface Encoder {
  encode(text: string, options: { add_special_tokens: boolean }): { ids: number[] };
  token_to_id(token: string): number | undefined;
  id_to_token(id: number): string | undefined;
  get_vocab(): Map<string, number>;
}

const Tokenizer = Untyped as new (json: object, config: object) => Encoder;

interface AddedToken {
  readonly id: number;
  readonly content: string;
  readonly special: boolean;
}

interface PreTokenizer {
  readonly type: string;
  readonly pretokenizers?: readonly PreTokenizer[];
  readonly use_regex?: boolean;
  readonly individual_digits?: boolean;
}

// How GPT-2 cuts words; the byte-level pre-tokenizer has it built in.
const GPT2_WORDS = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/** Throws CorruptCheckpoint for what is not a tokenizer.json. */
export function parsed(tokenizerJson: string): TokenizerJson {
  return reading(() => {
    const json = JSON.parse(tokenizerJson) as Partial<TokenizerJson>;
    return { ...json, added_tokens: json.added_tokens ?? [] } as TokenizerJson;
  });
}

/** An encoder; without `special` the spelling of a special token is ordinary text. */
export function encoderOf(json: TokenizerJson, special: boolean): Encoder {
  const added_tokens = special ? json.added_tokens : json.added_tokens.filter((token) => !token.special);
  const pre_tokenizer = asInRust(json.pre_tokenizer);
  return reading(() => new Tokenizer({ ...json, added_tokens, pre_tokenizer }, {}));
}

/**
 * The package's built-in patterns know other spaces than Unicode's (U+0085 is missing, U+FEFF is one) and only the
 * digits 0 to 9. As `Split` with the pattern written out they cut as the original does.
 */
function asInRust(step: PreTokenizer | null): PreTokenizer | null {
  if (step?.type === "Sequence") {
    return { ...step, pretokenizers: (step.pretokenizers ?? []).map((inner) => asInRust(inner) ?? inner) };
  }
  if (step?.type === "Digits") {
    return split(step.individual_digits ? "\\p{N}" : "\\p{N}+");
  }
  if (step?.type === "ByteLevel" && step.use_regex !== false) {
    return { type: "Sequence", pretokenizers: [split(GPT2_WORDS), { ...step, use_regex: false }] };
  }
  return step;
}

function split(regex: string): PreTokenizer {
  return { type: "Split", pattern: { Regex: regex }, behavior: "Isolated", invert: false } as PreTokenizer;
}

function reading<T>(work: () => T): T {
  try {
    return work();
  } catch (cause) {
    const reason = cause instanceof Error ? cause.message : String(cause);
    throw new CorruptCheckpoint(`tokenizer.json cannot be read: ${reason}`, { cause });
  }
}
