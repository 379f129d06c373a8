// SPDX-License-Identifier: Apache-2.0
// Text that becomes part of markup.

const NAMES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

/** Return a text as markup that shows it, also inside of an attribute. */
export const escape = (text) => text.replace(/[&<>"']/g, (character) => NAMES[character]);
