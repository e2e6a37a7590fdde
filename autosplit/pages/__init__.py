"""A report as one self-contained HTML page, which needs no network and no server.

::

    contents      the values of a run, a search and a profile; written and read as JSON (a run file)
    graphdrawing  the model's graph, to be zoomed and explained
    document      the page: header, verdict, charts and tables
    writing       a page or a run file of a run
"""
