/**
 * How a tokenizer's vocabulary spells bytes.
 *
 * The bytes of a sequence are the bytes of its tokens joined. So streaming and decoding at once cannot disagree,
 * whatever is generated.
 */

import { UnsupportedModel } from "../errors.js";

/** The `decoder` of a tokenizer.json. */
export interface DecoderConfig {
  readonly type: string;
  readonly decoders?: readonly DecoderConfig[];
  readonly prepend_scheme?: string;
  readonly start?: number;
}

/** How tokens spell bytes. */
export interface Spelling {
  /** The bytes that a token stands for; `added` tells added tokens apart. */
  readonly tokenBytes: (token: string, added: boolean) => Uint8Array;
  /** The first space of a text is an artefact of encoding and is not part of it. */
  readonly dropsFirstSpace: boolean;
}

const UTF8 = new TextEncoder();

/** The spelling that a decoder implies. Throws UnsupportedModel for one it cannot name. */
export function spellingOf(decoder: DecoderConfig | null | undefined): Spelling {
  if (!decoder) {
    throw new UnsupportedModel("the tokenizer has no decoder; byte-level or SentencePiece-style is needed");
  }
  const steps = new Map(flattened(decoder).map((step) => [step.type, step]));
  if (steps.has("ByteLevel")) {
    return { tokenBytes: byteLevelBytes, dropsFirstSpace: false };
  }
  if (steps.has("ByteFallback") || steps.has("Metaspace")) {
    return { tokenBytes: sentencePieceBytes, dropsFirstSpace: stripsStart(steps) };
  }
  const names = [...steps.keys()].join("+");
  throw new UnsupportedModel(`tokenizer decoder ${names} is not supported; byte-level and SentencePiece-style are`);
}

function flattened(step: DecoderConfig): DecoderConfig[] {
  const inner = (step.decoders ?? []).flatMap(flattened);
  return step.type === "Sequence" ? inner : [step, ...inner];
}

function stripsStart(steps: ReadonlyMap<string, DecoderConfig>): boolean {
  const metaspace = steps.get("Metaspace");
  if (metaspace !== undefined) {
    return metaspace.prepend_scheme !== "never";
  }
  return Boolean(steps.get("Strip")?.start);
}

/** GPT-2's byte alphabet: printable Latin-1 stands for itself, the other bytes follow from U+0100 on. */
function byteCharacters(): Map<string, number> {
  const table = new Map<string, number>();
  let others = 0x100;
  for (let byte = 0; byte < 0x100; byte += 1) {
    const printable = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte !== 0xad);
    table.set(String.fromCharCode(printable ? byte : others), byte);
    others += printable ? 0 : 1;
  }
  return table;
}

const BYTE_OF = byteCharacters();

function byteLevelBytes(token: string, added: boolean): Uint8Array {
  const bytes = Array.from(token, (character) => BYTE_OF.get(character));
  // An added token is matched in the text as it is, so it is never written in the byte alphabet.
  return added || bytes.includes(undefined) ? UTF8.encode(token) : Uint8Array.from(bytes as number[]);
}

function sentencePieceBytes(token: string, added: boolean): Uint8Array {
  const byte = added ? null : /^<0x([0-9A-Fa-f]{2})>$/.exec(token);
  if (byte?.[1] !== undefined) {
    return Uint8Array.of(Number.parseInt(byte[1], 16));
  }
  return UTF8.encode(token.replaceAll("▁", " "));
}
