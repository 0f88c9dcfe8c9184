"""What keeps a run whole: one run per folder, durable files, signals, watchdog, monitor, causes of failure."""
