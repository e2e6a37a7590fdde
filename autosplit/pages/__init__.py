"""A report as one self-contained HTML page, which needs no network and no server.

::

    contents   what a run, a search and a profile say, as plain values; written and read as JSON (a run file)
    charts     plotly charts of these values
    document   the page: verdict, charts and tables
"""
