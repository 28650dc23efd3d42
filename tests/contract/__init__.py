"""
The contract of a lock store, run on every store.

``cases`` holds what a store must do, judged by witnesses outside the locks;
``tests.faulty`` holds stores that do not, to show that the cases can fail.
"""
