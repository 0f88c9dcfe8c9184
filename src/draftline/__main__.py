"""`python -m draftline`: what the command `draftline` runs."""

import os
import signal

try:
    from draftline.cli import main
except KeyboardInterrupt:  # nothing has begun: end as the signal ends any program, without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    raise

main()
