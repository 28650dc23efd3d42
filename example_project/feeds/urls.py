"""URLs of the feeds."""

from django.urls import path

from . import views

app_name = "feeds"

urlpatterns = [
    path("", views.feed_list, name="list"),
    path("import/", views.start_import, name="import"),
    path("samples/<str:name>", views.sample, name="sample"),
    path("samples/slow/<str:name>", views.slow_sample, name="slow_sample"),
]
