"""Target, draft and gate together on emulated devices, in virtual or in real time.

The one place inside `outrider` that sees both sides: it deploys nothing, it composes them to measure.
"""
