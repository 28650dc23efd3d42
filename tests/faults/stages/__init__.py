"""
Runs of stages while messages arrive twice, workers are killed and the broker is restarted.

Many runs are started on real workers (``work``), beside a relay. Messages arrive twice, and a
``nemesis`` strikes. The oracle reads from witnesses outside of the package's tables whether each
stage was begun once and each step succeeded once.
"""
