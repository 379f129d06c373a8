# SPDX-License-Identifier: Apache-2.0
"""Grammars of constrained texts: from JSON schemas, regular expressions and the like to automata over bytes."""
