"""
E-mails that are to be sent once under ``do_once``, by a post that misbehaves.

Each user's task (``work``) is sent several times to real workers. The post, which is Django's
e-mail backend there, refuses, loses its answer, or kills its process by chance; other children
are killed at random. The oracle reads what post, tasks and nemesis recorded, and finds the cause
of each second e-mail.
"""
