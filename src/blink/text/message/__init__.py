# SPDX-License-Identifier: Apache-2.0
"""What a model's text means as a message: reasoning, content and tool calls, told apart while the text grows."""
