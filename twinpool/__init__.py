"""Twinpool: a runtime that serves large language models with prefill and decode on separate pools of workers.

This is the one package that is installed. In a checkout its parts are links to the folders beside it: `twinpool.router`
lies in `router/`.
"""
