// What the tests share: a client as anybody would make one, and questions with short answers.

import OpenAI from "openai";

export const url = process.env.KAKEYA_URL;
export const model = process.env.KAKEYA_MODEL;
export const key = process.env.KAKEYA_KEY;
export const loadingUrl = process.env.KAKEYA_LOADING_URL;
export const places = Number(process.env.KAKEYA_PLACES);

export const client = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });

export const hello = [{ role: "user", content: "Say hello." }];
export const weatherQuestion = [{ role: "user", content: "What is the weather in Paris?" }];

const weatherParameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 16 }, unit: { enum: ["C", "F"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};
const weather = { name: "get_weather", description: "The weather in a city", parameters: weatherParameters };

export const chatTool = { type: "function", function: weather };
export const responseTool = { type: "function", strict: true, ...weather };

// A form that every answer fills in few tokens, whatever the model thinks.
export const citySchema = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 16 },
    size: { enum: ["small", "large"] },
    rank: { type: "integer", minimum: 1, maximum: 99 },
  },
  required: ["name", "size", "rank"],
  additionalProperties: false,
};

export function isCity(text) {
  const city = JSON.parse(text);
  return (
    Object.keys(city).length === 3 &&
    typeof city.name === "string" &&
    city.name.length <= 16 &&
    ["small", "large"].includes(city.size) &&
    Number.isInteger(city.rank) &&
    city.rank >= 1 &&
    city.rank <= 99
  );
}

export function isWeatherCall(name, text) {
  const told = JSON.parse(text);
  return name === "get_weather" && typeof told.city === "string" && ["C", "F"].includes(told.unit);
}

// Long answers that never end by themselves, as many as there are places. Gives what ends them.
export async function takeAllPlaces() {
  const streams = await Promise.all(
    Array.from({ length: places }, () =>
      client.completions.create({
        model,
        prompt: "On and on",
        max_tokens: 100_000,
        stream: true,
        logit_bias: { 0: -100, 2: -100 },
      }),
    ),
  );
  return () => streams.forEach((stream) => stream.controller.abort());
}
