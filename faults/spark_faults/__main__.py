import sys

from spark_faults.runner import main

sys.exit(main())
