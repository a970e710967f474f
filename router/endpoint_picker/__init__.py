"""The endpoint picker of Kubernetes gateways: which router, of several clusters, a request goes to."""
