// SPDX-License-Identifier: Apache-2.0
// The fields of a request that a user sets, kept in the browser.

import { $ } from "./dom.js";

const KEPT = "blink-parameters";
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "repetition_penalty", "seed"];
const FIELDS = [...NUMBERS, "system", "stop", "service_tier", "thinking", "tools"];

/** Fill in what was kept, and keep what changes; a browser that forbids that keeps nothing. */
export function keepParameters() {
  try {
    for (const [name, value] of Object.entries(JSON.parse(localStorage.getItem(KEPT) ?? "{}"))) if (FIELDS.includes(name)) $(name).value = value;
  } catch {
    // begin with the server's
  }
  $("settings").addEventListener("input", () => {
    const values = Object.fromEntries(FIELDS.map((name) => [name, $(name).value]).filter(([, value]) => value));
    try {
      localStorage.setItem(KEPT, JSON.stringify(values));
    } catch {
      // they hold until the page is closed
    }
  });
}

/** Return the system message, which may be empty. */
export const systemMessage = () => $("system").value.trim();

/** Return the fields of a request; throws an Error that says which of them cannot be read. */
export function readParameters() {
  const fields = {};
  for (const name of NUMBERS) if ($(name).value !== "") fields[name] = Number($(name).value);
  if ($("stop").value) fields.stop = [$("stop").value];
  if ($("service_tier").value) fields.service_tier = $("service_tier").value;
  if ($("thinking").value === "off") fields.chat_template_kwargs = { enable_thinking: false, thinking: false };
  else if ($("thinking").value) fields.reasoning_effort = $("thinking").value;
  if ($("tools").value.trim()) fields.tools = readTools($("tools").value);
  return fields;
}

function readTools(text) {
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are no JSON: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error('The tools must be a list, such as [{"type": "function", "function": {…}}].');
  return tools;
}
