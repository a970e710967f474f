"""`twinpool plan`: what pools a load needs, by costs that were measured and a simulated cluster."""
