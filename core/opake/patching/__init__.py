"""Plan, apply, report and restore patches of one model; importing it imports nothing heavy."""
