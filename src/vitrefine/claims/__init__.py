"""The claims ledger: what the papers print, what was measured here, and what the one says of the other."""
