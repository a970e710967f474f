"""Workers, routers and the controller in the simulator."""
