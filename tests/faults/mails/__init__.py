"""
E-mails that are to be sent once under ``do_once``, through a server that misbehaves.

Each user's task (``work``) is sent several times to real workers, whose children are killed,
while ``server`` refuses, hangs and drops connections by the plan. The oracle reads what the
server, the tasks and the nemesis recorded, and finds the cause of each second e-mail.
"""
