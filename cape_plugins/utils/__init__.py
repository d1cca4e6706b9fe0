"""Files, texts and facts about the machine: tools that know nothing of positions."""
