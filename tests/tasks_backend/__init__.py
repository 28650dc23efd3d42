"""The backend of Django's tasks, which needs Django 6.0: on real workers, and delivered by hand."""
