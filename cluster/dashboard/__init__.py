"""What the dashboard shows of a whole cluster: made by the controller from what workers and routers tell it."""
