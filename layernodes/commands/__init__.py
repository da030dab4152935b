"""The subcommands of ``layernodes`` on the command line, one a file: ``add_parser(subparsers)`` and ``run(args)``.

Exit codes: 0 done; 1 the answer is no (an invalid schedule); 2 it could not be asked (bad arguments, unreadable files).
"""
