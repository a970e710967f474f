"""The hand-over of one request."""
