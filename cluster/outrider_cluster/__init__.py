"""The deployment of `outrider` on Ray: settings, placement, actors, and the command `outrider`."""
