"""The commands: each is a function of an options value, and ``cli`` calls it.

::

    options                                   options that several commands share: flags, keys of an options file, and help.
                                              Those of one command stand beside it
    flags, flagfaults, flaglists, configfile  flags become options; faults are found before any work is done
    shorthelp                                 help that fits a screen, and --help-all
    machines, console, report, reasons        the machine that a command is given; how results and failures are shown
    measuring     devices, profile            searching      search
    running       run, auto, report, export   workloadfiles  search for a planner's workload file
    evaluating    evaluate                    placing        annotate, memory
    bundles       bundle                      watching       status, run --watch
    sharing       search for several models
    serving       serve                        benching       bench
    generating    generate
"""
