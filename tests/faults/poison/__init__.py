"""
Tasks of which a few kill each process that runs them, among many others.

A real worker with two processes has them all. The oracle reads from a witness outside of the
package whether the others were done, and whether the few were given up after so many deaths.
"""
