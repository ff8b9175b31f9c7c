"""The dashboard at ``/dashboard``: one page that needs no build and no network but this gateway, and its numbers.

`overview` puts the numbers together, `routes` serves them and the page, `page/` is the page, `vendor/` what it uses.
"""
