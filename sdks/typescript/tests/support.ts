/** What the tests share: the server that they are told of by the environment. */

import { Client, type ClientOptions } from "kakeya";

/** Of the server: see `tests/conformance/test_sdks.py`. */
export const ADDRESS = process.env.KAKEYA_ADDRESS ?? "127.0.0.1:50051";
export const apiKey = process.env.KAKEYA_KEY;
export const PROMPT = Array.from({ length: 20 }, (_, at) => at + 10);
export const LONG = 20_000;
// Nothing listens there.
export const NOWHERE = "127.0.0.1:1";
export const IMPATIENT = { attempts: 2, firstDelayMs: 1, longestDelayMs: 1 };

export function connect(options: ClientOptions = {}): Client {
  return new Client({ address: ADDRESS, apiKey, ...options });
}
