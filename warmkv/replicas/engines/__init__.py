"""The engines that a replica may run, behind one interface: a module for each kind, chosen by `engine.kind`."""
