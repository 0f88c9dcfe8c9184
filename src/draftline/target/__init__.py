"""The target: loading it, choosing its taps, and its tapped forward over packed rows."""
